//! Copying out what is held of a generation that ends, so that old handles keep their values: the policy [`OnOverwrite::Copy`](super::OnOverwrite::Copy).
//!
//! The handles keep their storage, which moves to memory of the allocator's; the node gets another storage in its place. Costs nothing where nothing is held.

use std::sync::Arc;

use super::args::Arg;
use super::node::{InputSpec, Node};
use super::path::{Over, Run};
use super::{Inner, State};
use crate::device::Device;
use crate::error::Result;
use crate::storage::{Storage, Tensor};

impl<D: Device> Inner<D> {
    /// Moves out what is held of ended generations, except what this call alone holds and gives up. An error has changed nothing.
    #[cold]
    pub(super) fn keep_held(
        &self,
        state: &mut State<D>,
        stream: &D::Stream,
        over: &Over,
        args: &[Arg<'_, D>],
    ) -> Result<()> {
        let given_up = |storage: &Arc<Storage<D>>| {
            let given = args.iter().filter(|arg| {
                arg.is_given()
                    && arg
                        .tensor()
                        .and_then(Tensor::storage)
                        .is_some_and(|s| Arc::ptr_eq(s, storage))
            });
            storage.owners() == given.count() as u64
        };
        let ended: Vec<Arc<Storage<D>>> = state
            .path
            .iter()
            .chain(&state.carried)
            .filter(|entry| over.has(entry))
            .flat_map(|entry| state.held(entry))
            .filter(|storage| !given_up(storage))
            .cloned()
            .collect();
        if ended.is_empty() {
            return Ok(());
        }
        // Held meanwhile: another thread's last drop would take the memory from under the copy.
        let mut held = Vec::with_capacity(ended.len());
        for storage in ended {
            match Tensor::hold(&storage) {
                Some(handle) => held.push((storage, handle)),
                None => storage.settled(),
            }
        }
        self.order(state, stream)?;
        // What other threads write to them from here on goes to where they move.
        let _stay: Vec<_> = held.iter().map(|(storage, _)| storage.stay()).collect();
        let (pool, device) = (self.allocator.default_pool(), self.allocator.device());
        let mut refuges = Vec::with_capacity(held.len());
        for (storage, _) in &held {
            let refuge = pool.alloc_at(stream, storage.bytes(), storage.made_at())?;
            device.copy(stream, refuge.address(), storage.ptr(), storage.bytes())?;
            refuges.push(refuge);
        }
        let event = device.create_event()?;
        device.record(&event, stream)?;
        let copied = Arc::new((stream.clone(), event));
        for ((storage, _), refuge) in held.iter().zip(refuges) {
            state.replace(storage, storage.replacement(self.allocator.next_storage()));
            self.pool.let_go(storage.move_out(refuge, copied.clone()));
        }
        // The streams that this tree knows of find the bytes at the new place; any other waits when it asks for them (see `Storage::await_copy`).
        for used in state.streams.iter().filter(|used| *used != stream) {
            device.wait(used, &copied.1)?;
        }
        tracing::debug!(
            storages = held.len(),
            "copied out before they are overwritten"
        );
        Ok(())
    }
}

impl<D: Device> State<D> {
    /// Puts another storage in a storage's place, wherever nodes name it.
    fn replace(&mut self, old: &Arc<Storage<D>>, new: Option<Arc<Storage<D>>>) {
        let Some(new) = new else { return };
        for node in self.nodes.values_mut() {
            node.replace(old, &new);
        }
        for entry in self.path.iter_mut().chain(&mut self.carried) {
            if let Run::Warm(warm) = &mut entry.run {
                for slot in &mut warm.slots {
                    if Arc::ptr_eq(slot, old) {
                        *slot = new.clone();
                    }
                }
            }
        }
    }
}

impl<D: Device> Node<D> {
    fn replace(&mut self, old: &Arc<Storage<D>>, new: &Arc<Storage<D>>) {
        let swap = |place: &mut Arc<Storage<D>>| {
            if Arc::ptr_eq(place, old) {
                *place = new.clone();
            }
        };
        self.slots.iter_mut().for_each(|(slot, _)| swap(slot));
        self.saved.iter_mut().for_each(|(saved, _)| swap(saved));
        self.consumed.iter_mut().for_each(|c| swap(&mut c.storage));
        for input in &mut self.inputs {
            if let InputSpec::Managed { storage, .. } = input {
                swap(storage);
            }
        }
    }
}
