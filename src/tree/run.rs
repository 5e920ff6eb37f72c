//! One run: the tree's lock, the fast path, and where that declines, what to do and who does it.

use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use slotmap::SlotMap;

use super::args::Arg;
use super::call::{Call, drop_given};
use super::decide::Choice;
use super::function::{Function, FunctionState};
use super::generation::Step;
use super::outputs::Outputs;
use super::path::{Fed, Intake, Over};
use super::policy::OnOverwrite;
use super::remove::Tidied;
use super::replay::Taken;
use super::{FunctionKey, Inner, State};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::storage::{Storage, Tensor};
use crate::sync::{MutexGuard, lock, thread_id};

impl<D: Device> Inner<D> {
    #[allow(clippy::too_many_arguments)] // the public face's, and where the result goes
    pub(super) fn run(
        &self,
        function: &Function,
        step: &Step,
        variant_key: &[i64],
        stream: &D::Stream,
        args: &mut [Arg<'_, D>],
        out: &mut Outputs<D>,
        at: &'static Location<'static>,
    ) -> Result<()> {
        let Some(key) = function.key_in(&self.owner) else {
            return Err(Error::ForeignHandle { what: "function" });
        };
        if !Arc::ptr_eq(&step.generations, &self.generations) {
            return Err(Error::ForeignHandle { what: "step" });
        }
        let mut state = self.enter(function.shared_name())?;
        match self.replay_fast(&mut state, key, step, variant_key, stream, args, out, at) {
            Some(done) => done,
            None => self.run_whole(
                state,
                (function, key),
                step,
                variant_key,
                stream,
                args,
                out,
                at,
            ),
        }
    }

    /// A run, the whole way.
    #[inline(never)]
    #[allow(clippy::too_many_arguments)] // as above
    fn run_whole<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<D>>,
        (function, key): (&Function, FunctionKey),
        step: &Step,
        variant_key: &[i64],
        stream: &D::Stream,
        args: &mut [Arg<'_, D>],
        out: &mut Outputs<D>,
        at: &'static Location<'static>,
    ) -> Result<()> {
        // Dropped after the lock.
        let mut tidied = Tidied::new(self);
        if state.down {
            return Err(Error::ShutDown);
        }
        match self.captures(stream) {
            Ok(false) => {}
            Ok(true) => return self.inline(state, (function, key), stream, args, out, at),
            Err(error) => return Err(self.not_asked(stream, error)),
        }
        if self.untidy.load(Ordering::Acquire) {
            tidied.removed = self.tidy(&mut state);
        }
        self.decided(
            state,
            (function, key),
            step,
            variant_key,
            stream,
            args,
            out,
            at,
        )
    }

    /// Why a stream's capture could not be asked for.
    #[cold]
    fn not_asked(&self, stream: &D::Stream, error: Error) -> Error {
        if self.allocator.device().owns(stream) {
            error
        } else {
            Error::ForeignStream
        }
    }

    /// Chooses what to do, and does it.
    #[inline(always)] // one caller, and on the path of every replay
    #[allow(clippy::too_many_arguments)] // as above
    fn decided<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<D>>,
        (function, key): (&Function, FunctionKey),
        step: &Step,
        variant_key: &[i64],
        stream: &D::Stream,
        args: &mut [Arg<'_, D>],
        out: &mut Outputs<D>,
        at: &'static Location<'static>,
    ) -> Result<()> {
        let name = function.shared_name();
        let variant = match state.functions[key].variant(variant_key) {
            Some(variant) => variant,
            None => {
                state.functions[key].all_declared_fit(args.len())?;
                let added;
                (state, added) = self.add_variant(state, key, variant_key);
                added
            }
        };
        // Before generations end: their outputs may be inputs here.
        let mut gives = false;
        for arg in &*args {
            if let Some(tensor) = arg.tensor() {
                tensor.check()?;
                tensor.await_copy(self.allocator.device(), stream)?;
            }
            gives |= arg.is_given();
        }
        let mut fed: Option<Fed<D>> = None;
        if self.generations.ended() != state.seen_ended {
            let over = state.over(&self.generations);
            if state.on_overwrite == OnOverwrite::Copy {
                self.keep_held(&mut state, stream, &over, args)?;
            }
            fed = self.retire(&mut state, key, &over, args, name, at);
        }
        if state.functions[key].lost_bound() {
            let held = state.functions[key].hold_bound();
            let error = state.functions[key].bound_error(&held);
            self.bury(&mut state, held);
            return Err(error);
        }
        let (choice, taken) = loop {
            let choice = state.choose(
                key,
                variant,
                step.number(),
                args,
                fed.as_deref().unwrap_or_default(),
            );
            let Choice::Replay(node) = choice else {
                break (choice, Taken::new());
            };
            // Otherwise somebody has come to hold what the node consumes: it is not admitted any more.
            if let Some(taken) = state.take_consumed(node, args) {
                break (choice, taken);
            }
        };
        let mut call = Call {
            function: key,
            variant,
            name,
            generation: step.number(),
            stream,
            args: &mut *args,
            gives,
            demoted: &[],
            fed: fed.as_deref().unwrap_or_default(),
            at,
        };
        if !matches!(choice, Choice::Replay(_)) {
            state.functions[key].takes(call.args.len())?;
            self.refuse_foreign(name, call.args)?;
        }
        if let Some(reason) = choice.reason() {
            if state.refused & reason.kind().bit() != 0 {
                let function = name.clone();
                return Err(Error::Refused { function, reason });
            }
            if let Choice::Skip(_) = choice {
                state.skip_here(key);
            }
            self.answered(&mut state, key, reason);
        }
        let done = match choice {
            Choice::Replay(node) if state.nodes[node].returns_bound => {
                self.replay_returning_bound(state, node, call, &taken, out)
            }
            Choice::Replay(node) => self.replay(state, node, call, &taken, out),
            Choice::Record(reason, demoted) => {
                call.demoted = &demoted;
                self.record(state, call, reason, out)
            }
            Choice::Warmup(reason) => self.warmup(state, call, reason, out),
            Choice::Eager(reason) | Choice::Skip(reason) => self.eager(state, call, reason, out),
            Choice::Refuse(error) => Err(*error),
        };
        if gives && done.is_ok() {
            drop_given(args);
        }
        done
    }

    /// A variant for a key that a function has not been run with. Whether it is captured, a closure of the caller's may say.
    #[cold]
    fn add_variant<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<D>>,
        function: FunctionKey,
        key: &[i64],
    ) -> (MutexGuard<'s, State<D>>, usize) {
        let wanted = match state.functions[function].keys.contain(key) {
            Ok(wanted) => wanted,
            Err(ask) => {
                let asked;
                (state, asked) =
                    self.unlocked(state, || catch_unwind(AssertUnwindSafe(|| ask(key))));
                match asked {
                    Ok(wanted) => wanted,
                    Err(panic) => {
                        drop(state);
                        std::panic::resume_unwind(panic);
                    }
                }
            }
        };
        let variant = state.functions[function].add_variant(key, wanted);
        (state, variant)
    }

    /// Ends the generations whose tokens were dropped; what of them this call copies in.
    fn retire(
        &self,
        state: &mut State<D>,
        function: FunctionKey,
        over: &Over,
        args: &[Arg<'_, D>],
        by: &Arc<str>,
        at: &'static Location<'static>,
    ) -> Option<Fed<D>> {
        // Asked only of what is held and ends.
        let taken = |functions: &SlotMap<FunctionKey, FunctionState<D>>,
                     storage: &Arc<Storage<D>>| {
            let f = &functions[function];
            let mut places = args
                .iter()
                .enumerate()
                .filter(|(_, arg)| {
                    let passed = arg.tensor().and_then(Tensor::storage);
                    passed.is_some_and(|passed| Arc::ptr_eq(passed, storage))
                })
                .map(|(index, arg)| f.in_place(index, arg))
                .peekable();
            places.peek()?;
            Some(if places.any(|in_place| in_place) {
                Intake::InPlace
            } else {
                Intake::Copied
            })
        };
        state.retire(over, taken, by, at)
    }

    /// Takes the state, once no closure of another thread is running.
    pub(super) fn enter(&self, function: &Arc<str>) -> Result<MutexGuard<'_, State<D>>> {
        let mut state = lock(&self.state);
        while let Some(thread) = state.busy {
            if thread == thread_id() {
                return Err(Error::Nested {
                    function: function.clone(),
                });
            }
            state.waiting += 1;
            state = self
                .idle
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        Ok(state)
    }

    /// Calls `f` with the state given back, marked busy meanwhile. `f` does not unwind.
    pub(super) fn unlocked<'s, T>(
        &'s self,
        mut state: MutexGuard<'s, State<D>>,
        f: impl FnOnce() -> T,
    ) -> (MutexGuard<'s, State<D>>, T) {
        state.busy = Some(thread_id());
        drop(state);
        let result = f();
        let mut state = lock(&self.state);
        state.busy = None;
        if state.waiting > 0 {
            // A call into the kernel, also where nobody waits.
            self.idle.notify_all();
        }
        (state, result)
    }
}
