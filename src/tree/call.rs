//! What warmup and recording have in common: the inputs as the closure sees them, the closure's call, the outputs' kinds.

use std::any::Any;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;

use smallvec::SmallVec;

use super::args::{Arg, Inputs, Slot, Slots, Value};
use super::function::{Body, Bound, BoundInput, FunctionState, HeldBound};
use super::node::{InputSpec, InputSpecs, OutputSlots, OutputSpec, OutputSpecs};
use super::path::is_on_path;
use super::recorder::{Recorder, Said};
use super::{Inner, State};
use crate::allocator::{RouteGuard, refuse_tensor};
use crate::device::{Code, Device, DeviceError, DevicePtr, GatherSlot};
use crate::error::{Error, Phase, Result};
use crate::pool::Allocation;
use crate::storage::{Home, LiveMask, Storage, Tensor};
use crate::sync::lock;

/// One run, as its verbs hand it around.
pub(super) struct Call<'c, 'a, D: Device> {
    pub(super) function: super::FunctionKey,
    pub(super) variant: usize,
    pub(super) name: &'c Arc<str>,
    pub(super) generation: u64,
    pub(super) stream: &'c D::Stream,
    pub(super) args: &'c mut [Arg<'a, D>],
    /// Whether an input is given.
    pub(super) gives: bool,
    /// Passed inputs that are copied although they would be used in place.
    pub(super) demoted: &'c [usize],
    /// Passed inputs of generations that have ended.
    pub(super) fed: &'c [Arc<Storage<D>>],
    pub(super) at: &'static Location<'static>,
}

impl<D: Device> Inner<D> {
    /// Notes that the call's stream uses its inputs, bound ones included: those of other streams, and of other trees, may be dropped as soon as it has returned, and are not
    /// overwritten before they have been read.
    pub(super) fn note_uses(&self, call: &Call<'_, '_, D>, bound: &HeldBound<D>) {
        let passed = call.args.iter().filter_map(Arg::tensor);
        for storage in passed.chain(bound.tensors()).filter_map(Tensor::storage) {
            storage.used_by(call.stream, Some(&self.pool));
        }
    }

    /// The same for what functions have allocated as their state: whatever function's it is, the closure may have used it.
    pub(super) fn note_state(&self, stream: &D::Stream) {
        lock(&self.made).retain(|made| {
            made.upgrade().is_some_and(|storage| {
                storage.used_by_run(stream);
                storage.owners() > 0
            })
        });
    }
}

impl<D: Device> Call<'_, '_, D> {
    /// Ends what was fed: the work that reads it has been enqueued, and may have been to write over it.
    pub(super) fn end_fed(&self) {
        self.fed.iter().for_each(|storage| self.end_one(storage));
    }

    pub(super) fn end_one(&self, storage: &Storage<D>) {
        storage.hush();
        storage.invalidate(self.name, self.at);
    }

    pub(super) fn is_fed(&self, storage: &Arc<Storage<D>>) -> bool {
        self.fed.iter().any(|fed| Arc::ptr_eq(fed, storage))
    }
}

/// The inputs of one call, classified, and the copied ones placed. Nothing has been given up yet.
pub(super) struct Placed<D: Device> {
    pub(super) specs: InputSpecs<D>,
    /// Where the copied inputs go.
    pub(super) gather: Vec<GatherSlot>,
    /// Where they come from.
    pub(super) sources: Vec<DevicePtr>,
    /// Outputs of the path that are given: which passed input, and its position.
    pub(super) given: SmallVec<[(usize, usize); 2]>,
}

impl<D: Device> Placed<D> {
    /// Of none of `inputs` inputs yet.
    pub(super) fn new(inputs: usize) -> Self {
        Placed {
            specs: InputSpecs::with_capacity(inputs),
            gather: Vec::new(),
            sources: Vec::new(),
            given: SmallVec::new(),
        }
    }
}

/// Storages whose blocks were freed for a closure, each with the block it had.
pub(super) type Lent<D> = Vec<(Arc<Storage<D>>, Allocation)>;

/// An output of the path that went into the closure's hands: what it takes to bring it back if the recording is undone.
pub(super) struct Given<D: Device> {
    pub(super) input: usize,
    pub(super) storage: Arc<Storage<D>>,
    pub(super) stamp: u64,
    pub(super) block: Option<Allocation>,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) made_at: &'static Location<'static>,
}

/// What came of a closure.
pub(super) enum Outcome<D: Device> {
    Returned(Vec<Tensor<D>>, Said),
    Failed(Box<(Error, Blame)>),
    Panicked(Box<dyn Any + Send>),
}

/// What a closure's error says of its recording. Asked while no lock is held: the error is the caller's, and with it what it does when it is asked.
#[derive(Default)]
pub(super) struct Blame {
    /// The whole error in words.
    pub(super) text: String,
    /// The device's refusal that it goes back to.
    pub(super) refused: Option<DeviceError>,
    /// The closure said that it cannot be captured.
    pub(super) not_capturable: bool,
}

/// The outputs of one call, classified.
pub(super) struct Sorted<D: Device> {
    pub(super) specs: OutputSpecs<D>,
    pub(super) slots: OutputSlots<D>,
    /// For each slot, the first output in it.
    pub(super) first: SmallVec<[usize; 4]>,
}

impl<D: Device> Default for Sorted<D> {
    fn default() -> Self {
        Sorted {
            specs: OutputSpecs::new(),
            slots: OutputSlots::new(),
            first: SmallVec::new(),
        }
    }
}

impl<D: Device> Inner<D> {
    /// Classifies the inputs into `placed`, and allocates the places of the copied ones; what the closure gets, by position, without what is given of the path.
    /// On an error nothing has changed.
    pub(super) fn place(
        &self,
        state: &State<D>,
        call: &Call<'_, '_, D>,
        route: &RouteGuard<D>,
        placed: &mut Placed<D>,
    ) -> Result<Inputs<D>> {
        let function = &state.functions[call.function];
        let bound = function.bound_inputs()?;
        all_bound_fit(call.name, &bound, call.args.len())?;
        let mut slots = Slots::with_capacity(call.args.len() + bound.len());
        for (index, arg) in call.args.iter().enumerate() {
            let (spec, slot) = match arg {
                Arg::Value(value) => (
                    InputSpec::Value(value.clone()),
                    Some(Slot::Value(value.clone())),
                ),
                Arg::Taken => return Err(taken(call.name, index)),
                Arg::Lend(tensor) => {
                    self.place_tensor(state, call, index, tensor, placed, route)?
                }
                Arg::Give(tensor) => {
                    self.place_tensor(state, call, index, tensor, placed, route)?
                }
            };
            if slot.is_none() {
                placed.given.push((index, function.position(index)));
            }
            placed.specs.push(spec);
            slots.push(slot.unwrap_or(Slot::Taken));
        }
        Ok(Inputs::new(slots, bound))
    }

    /// Copies the moving inputs to their places, as one piece of work on the tree's stream.
    pub(super) fn copy_in(&self, placed: &Placed<D>) -> Result<(), DeviceError> {
        if placed.gather.is_empty() {
            return Ok(());
        }
        self.allocator
            .device()
            .gather(&self.stream, &placed.gather, &placed.sources)
    }

    /// Frees the blocks of what was fed and has been copied in: the closure may use that memory. Each, with the block it had.
    pub(super) fn lend_fed(&self, call: &Call<'_, '_, D>) -> Lent<D> {
        if call.fed.is_empty() {
            return Lent::new();
        }
        let disown = |storage: &Arc<Storage<D>>| Some((storage.clone(), storage.disown()?));
        let lent: Vec<_> = call.fed.iter().filter_map(disown).collect();
        for (_, block) in &lent {
            self.pool.let_go(Some(*block));
        }
        lent
    }

    /// Refuses inputs of another device. Before anything is enqueued for them.
    pub(super) fn refuse_foreign(&self, name: &Arc<str>, args: &[Arg<'_, D>]) -> Result<()> {
        let mut tensors = args.iter().enumerate();
        tensors.try_for_each(|(index, arg)| match arg.tensor() {
            Some(tensor) => self.refuse_input(name, index, tensor),
            None => Ok(()),
        })
    }

    #[inline]
    pub(super) fn refuse_input(
        &self,
        name: &Arc<str>,
        index: usize,
        tensor: &Tensor<D>,
    ) -> Result<()> {
        if self.allocator.reaches(tensor) {
            Ok(())
        } else {
            Err(foreign_input(name, index))
        }
    }

    /// Refuses outputs that cannot be handed out, whatever they are.
    pub(super) fn check_outputs(&self, name: &Arc<str>, outputs: &[Tensor<D>]) -> Result<()> {
        outputs.iter().enumerate().try_for_each(|(index, output)| {
            output.check()?;
            let what = || format!("output {index} of {name}");
            refuse_tensor(self.allocator.device(), output, what)
        })
    }

    /// Puts the outputs of the path that are given into the closure's hands, at their positions.
    pub(super) fn hand_in(
        &self,
        call: &mut Call<'_, '_, D>,
        mut inputs: Inputs<D>,
        given: &[(usize, usize)],
    ) -> (Inputs<D>, Vec<Given<D>>) {
        if given.is_empty() {
            return (inputs, Vec::new());
        }
        let hand = |&(index, position): &(usize, usize)| {
            let tensor = call.args[index].take()?;
            let storage = tensor.storage()?.clone();
            // If it dies inside, its memory is next used there.
            storage.hand_over(&self.stream);
            let given = Given {
                input: index,
                stamp: storage.stamp(),
                block: storage.block(),
                offset: tensor.offset(),
                bytes: tensor.bytes(),
                made_at: tensor.made_at(),
                storage,
            };
            inputs.put(position, tensor);
            Some(given)
        };
        let given = given.iter().filter_map(hand).collect();
        (inputs, given)
    }

    /// One tensor's kind, and what the closure gets for it; `None` for an output of the path that is given.
    fn place_tensor(
        &self,
        state: &State<D>,
        call: &Call<'_, '_, D>,
        index: usize,
        tensor: &Tensor<D>,
        placed: &mut Placed<D>,
        route: &RouteGuard<D>,
    ) -> Result<(InputSpec<D>, Option<Slot<D>>)> {
        let bytes = tensor.bytes();
        let Some(storage) = tensor.storage() else {
            return Ok((InputSpec::Empty, Some(Slot::Tensor(tensor.clone()))));
        };
        let (function, arg) = (&state.functions[call.function], &call.args[index]);
        let declared = function.is_static(function.position(index));
        let managed = state.on_path(storage);
        let demoted = call.demoted.contains(&index) || (declared && !function.in_place(index, arg));
        if managed && !demoted {
            let spec = InputSpec::Managed {
                storage: storage.clone(),
                offset: tensor.offset(),
                bytes,
            };
            return Ok((
                spec,
                (!arg.is_given()).then(|| Slot::Tensor(tensor.clone())),
            ));
        }
        if declared && !demoted {
            let spec = InputSpec::Static {
                ptr: tensor.address(),
                bytes,
                whole: None,
                storage: storage.is_eternal().then(|| Arc::downgrade(storage)),
            };
            return Ok((spec, Some(Slot::Tensor(tensor.clone()))));
        }
        let place = route.alloc_at(&self.stream, bytes, call.at)?;
        placed.gather.push(GatherSlot {
            dst: place.address(),
            bytes,
        });
        placed.sources.push(tensor.address());
        let spec = InputSpec::Copied { bytes, demoted };
        Ok((spec, Some(Slot::Tensor(place))))
    }

    /// Calls the closure, with this thread's and the stream's allocations routed to a pool. No lock of ours is held meanwhile. What was allocated by the route is
    /// given back, in order.
    pub(super) fn call_body(
        &self,
        (name, body): (&Arc<str>, &Body<D>),
        inputs: Inputs<D>,
        phase: Phase,
        stream: &D::Stream,
        route: RouteGuard<D>,
    ) -> (Outcome<D>, Vec<Arc<Storage<D>>>) {
        let mut recorder = Recorder {
            name,
            device: self.allocator.device(),
            stream,
            phase,
            route: &route,
            allocator: &self.allocator,
            said: Said::default(),
            made: &self.made,
        };
        let call = || match body(&mut recorder, inputs) {
            Ok(outputs) => Outcome::Returned(outputs, std::mem::take(&mut recorder.said)),
            Err(source) => {
                let function = name.clone();
                let error = Error::Function {
                    function,
                    phase,
                    source,
                };
                let blame = (phase == Phase::Record).then(|| Blame::of(&error));
                Outcome::Failed(Box::new((error, blame.unwrap_or_default())))
            }
        };
        let outcome = catch_unwind(AssertUnwindSafe(call));
        let born = route.end();
        (outcome.unwrap_or_else(Outcome::Panicked), born)
    }

    /// Says in `sorted` of each output what it is, and finds what the closure kept without returning it.
    pub(super) fn sort_outputs(
        &self,
        function: &FunctionState<D>,
        call: &Call<'_, '_, D>,
        phase: Phase,
        inputs: &mut [InputSpec<D>],
        (born, outputs): (&[Arc<Storage<D>>], &[Tensor<D>]),
        sorted: &mut Sorted<D>,
    ) -> Result<()> {
        self.check_outputs(call.name, outputs)?;
        sorted.specs.reserve_exact(outputs.len());
        for (index, output) in outputs.iter().enumerate() {
            let spec = self.sort_output(function, call, inputs, output, index, born, sorted)?;
            sorted.specs.push(spec);
        }
        self.no_survivors(call.name, phase, sorted, born)
    }

    #[allow(clippy::too_many_arguments)] // one call site, where all of them are at hand
    fn sort_output(
        &self,
        function: &FunctionState<D>,
        call: &Call<'_, '_, D>,
        inputs: &mut [InputSpec<D>],
        output: &Tensor<D>,
        index: usize,
        born: &[Arc<Storage<D>>],
        sorted: &mut Sorted<D>,
    ) -> Result<OutputSpec<D>> {
        let (offset, bytes) = (output.offset(), output.bytes());
        let Some(storage) = output.storage() else {
            return Ok(OutputSpec::Empty);
        };
        if born.iter().any(|b| Arc::ptr_eq(b, storage)) {
            let slot = match sorted
                .slots
                .iter()
                .position(|(s, _)| Arc::ptr_eq(s, storage))
            {
                Some(slot) => slot,
                None => {
                    sorted.slots.push((storage.clone(), 0));
                    sorted.first.push(index);
                    sorted.slots.len() - 1
                }
            };
            sorted.slots[slot].1 += 1;
            return Ok(OutputSpec::Fresh {
                slot,
                offset,
                bytes,
            });
        }
        for (input, spec) in inputs.iter_mut().enumerate() {
            match spec {
                InputSpec::Managed { storage: s, .. } if Arc::ptr_eq(s, storage) => {
                    return Ok(OutputSpec::Input {
                        input,
                        offset,
                        bytes,
                    });
                }
                InputSpec::Static { whole, .. } => {
                    let passed = call
                        .args
                        .get(input)
                        .and_then(Arg::tensor)
                        .and_then(Tensor::storage);
                    if passed.is_some_and(|s| Arc::ptr_eq(s, storage)) {
                        *whole = Some((storage.ptr(), storage.bytes()));
                        return Ok(OutputSpec::Input {
                            input,
                            offset,
                            bytes,
                        });
                    }
                }
                _ => {}
            }
        }
        if storage.in_pool(&self.pool) {
            return Err(Error::ForeignOutput {
                function: call.name.clone(),
                output: index,
            });
        }
        let bound = function.bound.iter().any(|(_, b)| {
            matches!(b, Bound::Tensor(weak) if weak.upgrade().is_some_and(|t| t.storage().is_some_and(|s| Arc::ptr_eq(s, storage))))
        });
        Ok(if bound {
            OutputSpec::Bound(output.downgrade())
        } else {
            OutputSpec::Constant(output.clone())
        })
    }

    /// Refuses a call that kept memory of the pool without returning it.
    fn no_survivors(
        &self,
        name: &Arc<str>,
        phase: Phase,
        sorted: &Sorted<D>,
        born: &[Arc<Storage<D>>],
    ) -> Result<()> {
        let kept: Vec<_> = born
            .iter()
            .filter(|s| {
                s.owners() > 0 && !sorted.slots.iter().any(|(slot, _)| Arc::ptr_eq(slot, s))
            })
            .collect();
        let Some(first) = kept.first() else {
            return Ok(());
        };
        let place = self.pool.locate(first.ptr()).map_or_else(
            || "?".to_owned(),
            |(segment, offset)| format!("S{}+{offset}", segment.0),
        );
        Err(Error::Untracked {
            function: name.clone(),
            phase,
            bytes: first.bytes(),
            place,
            at: first.made_at(),
            count: kept.len(),
        })
    }

    /// Ends whatever a failed call still holds of the pool.
    #[cold]
    pub(super) fn drop_survivors(&self, call: &Call<'_, '_, D>, born: &[Arc<Storage<D>>]) {
        for storage in born {
            storage.invalidate(call.name, call.at);
        }
    }

    /// Makes the slots outputs of their node, held by the caller's stream from here on. The mask says which are held. `each` is told of each, and of the block that it owns.
    pub(super) fn settle(
        &self,
        name: &Arc<str>,
        sorted: &Sorted<D>,
        stream: &D::Stream,
        mut each: impl FnMut(&Arc<Storage<D>>, Option<Allocation>),
    ) -> Arc<LiveMask> {
        let live = LiveMask::new(sorted.slots.len());
        for (bit, ((storage, _), output)) in sorted.slots.iter().zip(&sorted.first).enumerate() {
            each(storage, storage.hand_over(stream));
            let bit = u32::try_from(bit).unwrap_or(u32::MAX);
            storage.settle(Home {
                function: name.clone(),
                output: *output,
                live: live.clone(),
                bit,
            });
        }
        live
    }

    /// Drops what was given of the tree's pool, and has not died inside. What was given from elsewhere is left to [`drop_given`], without the lock; its
    /// memory is not used again on another stream than the call's before the call's work has run.
    pub(super) fn give_up(&self, call: &mut Call<'_, '_, D>) {
        for arg in &mut *call.args {
            let Arg::Give(tensor) = &*arg else { continue };
            let ours = |storage: &Arc<Storage<D>>| storage.in_pool(&self.pool);
            if tensor.storage().is_none_or(ours) {
                drop(arg.take());
            }
        }
    }

    /// Lets go of what a closure returned, where nothing comes of it: what is of the tree's pool dies at once, the rest when the lock is free.
    #[cold]
    pub(super) fn let_go(
        &self,
        state: &mut State<D>,
        mut outputs: Vec<Tensor<D>>,
        values: Vec<Value>,
    ) {
        let ours = |t: &mut Tensor<D>| t.storage().is_none_or(|s| s.in_pool(&self.pool));
        drop(outputs.extract_if(.., ours).collect::<Vec<_>>());
        if !outputs.is_empty() || !values.is_empty() {
            self.bury(state, (outputs, values));
        }
    }

    /// Orders the call's stream after every other stream that runs of the path were called on: their outputs may be in use there still.
    #[inline(always)] // on the path of every replay
    pub(super) fn order(&self, state: &mut State<D>, stream: &D::Stream) -> Result<()> {
        self.hear_of_streams(state);
        let others = state.streams.iter().filter(|used| *used != stream);
        others.into_iter().try_for_each(|used| {
            // An event of its would make `stream` a part of that capture.
            if self.captures(used)? {
                let detail = "an earlier run was called there, or its output used, and this one is to come after that work; but the stream captures now: \
                              end the capture first";
                let code = Code::StreamCaptureIsolation;
                return Err(DeviceError::new(crate::device::Call::Wait, code, detail).into());
            }
            self.follow(used, stream)
        })
    }

    /// Takes over the streams that outputs were said to be used on since the last run.
    #[inline]
    pub(super) fn hear_of_streams(&self, state: &mut State<D>) {
        let Some(elsewhere) = self.elsewhere.as_ref().filter(|e| e.any()) else {
            return;
        };
        for stream in elsewhere.take() {
            if !state.streams.contains(&stream) {
                state.streams.push(stream);
            }
        }
    }

    /// Makes the caller's stream wait for what the tree's was given. Where no event does, the host waits: work that was enqueued must not
    /// run beside what comes next.
    pub(super) fn join(&self, stream: &D::Stream) -> Result<()> {
        self.follow(&self.stream, stream).or_else(|error| {
            tracing::warn!(%error, "waiting for a warmup on the host");
            Ok(self.allocator.device().synchronize(&self.stream)?)
        })
    }

    /// Makes `after` wait for all that `before` has been given so far.
    pub(super) fn follow(&self, before: &D::Stream, after: &D::Stream) -> Result<()> {
        let device = self.allocator.device();
        device.record(&self.event, before)?;
        Ok(device.wait(after, &self.event)?)
    }
}

/// Refuses inputs that were bound at positions which a run with `passed` more does not have.
pub(super) fn all_bound_fit<D: Device>(
    function: &Arc<str>,
    bound: &[(usize, BoundInput<D>)],
    passed: usize,
) -> Result<()> {
    let total = passed + bound.len();
    let Some((position, _)) = bound.iter().find(|(position, _)| *position >= total) else {
        return Ok(());
    };
    let detail = format!(
        "input {position} is bound, but the run passes {passed} inputs, so there are only {total} in all"
    );
    Err(inputs_error(function, detail))
}

#[cold]
fn foreign_input(name: &Arc<str>, index: usize) -> Error {
    Error::ForeignTensor {
        what: format!("input {index} of {name}"),
    }
}

/// Drops what is left of the given inputs of a run that is done. No lock is held: of memory that was imported, the keeper is the caller's, and may do
/// anything in its drop.
#[cold]
pub(super) fn drop_given<D: Device>(args: &mut [Arg<'_, D>]) {
    args.iter_mut().for_each(|arg| drop(arg.take()));
}

#[cold]
pub(super) fn taken(function: &Arc<str>, index: usize) -> Error {
    inputs_error(
        function,
        format!("input {index} was taken by an earlier run"),
    )
}

#[cold]
pub(super) fn inputs_error(function: &Arc<str>, detail: String) -> Error {
    Error::Inputs {
        function: function.clone(),
        detail,
    }
}

impl<D: Device> State<D> {
    /// Notes that the device has taken work for a run on this stream, which was ordered after the others. Before the run joins the path.
    #[inline]
    pub(super) fn use_stream(&mut self, stream: &D::Stream) {
        if self.streams.as_slice() == std::slice::from_ref(stream) {
            return;
        }
        if self.path.is_empty() && self.carried.is_empty() {
            // Nothing of the tree is in use elsewhere any more that this stream has not waited for.
            self.streams.retain(|used| used == stream);
        }
        if !self.streams.contains(stream) {
            self.streams.push(stream.clone());
        }
        if self.streams.len() > 1 {
            // In use on several streams: its death has no place in the order of one. Later runs wait for all of them.
            self.all_held().for_each(|storage| storage.hush());
        }
    }

    /// Whether a storage is an output of a run on the path.
    pub(super) fn on_path(&self, storage: &Storage<D>) -> bool {
        is_on_path(&self.nodes, &self.path, storage)
    }
}

/// The inputs that lie in a storage, of those that were given.
pub(super) fn given_in<D: Device>(
    given: &[Given<D>],
    storage: &Arc<Storage<D>>,
) -> SmallVec<[usize; 2]> {
    given
        .iter()
        .filter(|g| Arc::ptr_eq(&g.storage, storage))
        .map(|g| g.input)
        .collect()
}
