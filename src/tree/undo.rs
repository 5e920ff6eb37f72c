//! The way back from a recording that comes to nothing, and what is answered instead.
//!
//! A capture executes nothing, so whatever it did to the books can be undone without a trace: what it allocated is freed, and what was
//! given to it and died inside is claimed back where it lay. Called by `record` alone. None of it is on the way of a recording that
//! succeeds, so what that way calls is out of line (`#[cold]`).

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use tracing::warn;

use super::args::{Arg, Value};
use super::call::{Blame, Call, Given, Lent};
use super::function::Never;
use super::outputs::Outputs;
use super::reason::Reason;
use super::{Inner, State};
use crate::allocator::{Baked, Claim};
use crate::device::{Bare, Broke, Code, Device, DeviceError, GraphInfo};
use crate::error::{Error, Result};
use crate::pool::{Allocation, Tag};
use crate::storage::{Storage, Tensor};
use crate::sync::MutexGuard;

/// Why a capture failed for its own reasons.
pub(super) struct Failure {
    /// In words: an error of the caller's is not kept, nor asked again.
    text: String,
    /// The device's refusal that was the first of it.
    pub(super) first: Option<Box<DeviceError>>,
}

impl From<DeviceError> for Failure {
    #[cold]
    fn from(error: DeviceError) -> Self {
        Failure {
            first: first_of(&error),
            text: error.to_string(),
        }
    }
}

impl fmt::Display for Failure {
    /// The error, and the first refusal where the error does not tell of it: a closure may go on after that, and fail with words of its own.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        match &self.first {
            Some(first) if !self.text.contains(&Bare(first).to_string()) => {
                write!(f, "; {}", Broke(first))
            }
            _ => Ok(()),
        }
    }
}

/// Why there is no recording.
pub(super) enum Undone {
    /// The capture failed for its own reasons: the call is answered eagerly.
    Capture(Failure),
    /// The key is not to be captured again: the call is answered eagerly.
    Never(Never),
    /// The closure did not want it kept: the call is answered eagerly.
    Discarded,
    /// The caller hears of it.
    Call(Error),
    /// The closure panicked; in a capture that was broken, if that is known.
    Panic(Box<dyn Any + Send>, Option<DeviceError>),
}

impl From<DeviceError> for Box<Undone> {
    #[cold]
    fn from(error: DeviceError) -> Self {
        Box::new(Undone::Capture(error.into()))
    }
}

impl Undone {
    /// The caller hears of an error.
    #[cold]
    pub(super) fn call(error: impl Into<Error>) -> Box<Self> {
        Box::new(Undone::Call(error.into()))
    }

    /// Why a graph of such nodes is not kept.
    #[cold]
    pub(super) fn of(info: GraphInfo) -> Box<Self> {
        Box::new(if info.memory > 0 {
            let text = Error::MemoryNodes(info).to_string();
            Undone::Capture(Failure { text, first: None })
        } else {
            Undone::Never(Never::TooSmall)
        })
    }
}

/// What a recording that comes to nothing has in its hands.
pub(super) struct Loose<D: Device> {
    pub(super) given: Vec<Given<D>>,
    pub(super) lent: Lent<D>,
    pub(super) born: Vec<Arc<Storage<D>>>,
    pub(super) outputs: Vec<Tensor<D>>,
    pub(super) values: Vec<Value>,
}

impl<D: Device> Inner<D> {
    /// Notes why a call was not recorded: the reason to answer it eagerly. An error where the caller is to hear of it instead; goes on with the closure's
    /// panic.
    #[cold]
    pub(super) fn not_recorded<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<D>>,
        call: &Call<'_, '_, D>,
        undone: Undone,
    ) -> Result<(MutexGuard<'s, State<D>>, Reason)> {
        let variant = &mut state.functions[call.function].variants[call.variant];
        let instead = match undone {
            Undone::Call(error) => return Err(error),
            Undone::Discarded => Reason::Discarded,
            Undone::Never(never) => {
                variant.never = Some(never);
                never.into()
            }
            Undone::Panic(panic, broken) => {
                if let Some(broken) = broken {
                    state.last_failure = Some(broken.into());
                }
                drop(state);
                std::panic::resume_unwind(panic);
            }
            Undone::Capture(failure) => {
                warn!(function = %call.name, %failure, "the capture failed; the call is answered eagerly");
                variant.capture_failed();
                state.counts.failed_captures += 1;
                state.last_failure = Some(failure);
                Reason::CaptureFailed
            }
        };
        Ok((state, instead))
    }

    /// Answers a call eagerly that was to be recorded on account of `recorded`, unless the reason why it is not is refused.
    #[cold]
    pub(super) fn fall_back<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<D>>,
        call: Call<'_, '_, D>,
        recorded: Reason,
        reason: Reason,
        out: &mut Outputs<D>,
    ) -> Result<()> {
        // One reason for each run.
        state.functions[call.function].reasons[recorded.kind() as usize] -= 1;
        if state.refused & reason.kind().bit() != 0 {
            let function = call.name.clone();
            return Err(Error::Refused { function, reason });
        }
        self.answered(&mut state, call.function, reason);
        self.eager(state, call, reason, out)
    }

    /// The driver did not begin the capture.
    #[cold]
    pub(super) fn not_begun(&self, serial: u64, error: DeviceError) -> Box<Undone> {
        self.allocator
            .leave_capture(serial, Some((&self.pool, &[])));
        Box::new(Undone::Capture(error.into()))
    }

    /// The closure gave an error; its capture is ended.
    #[cold]
    pub(super) fn failed(
        &self,
        state: &mut State<D>,
        serial: u64,
        (error, blame): (Error, Blame),
    ) -> Box<Undone> {
        let broken = self.abandon(state, serial);
        if blame.not_capturable {
            self.bury(state, error);
            return Box::new(Undone::Never(Never::NotCapturable));
        }
        if blame.refused.is_none() && broken.is_none() {
            return Box::new(Undone::Call(error));
        }
        self.bury(state, error);
        let first = broken.and_then(|broken| broken.first);
        let first = first.or_else(|| first_of(&blame.refused?));
        let text = blame.text;
        Box::new(Undone::Capture(Failure { text, first }))
    }

    /// The closure panicked; its capture is ended.
    #[cold]
    pub(super) fn panicked(
        &self,
        state: &mut State<D>,
        serial: u64,
        panic: Box<dyn Any + Send>,
    ) -> Box<Undone> {
        Box::new(Undone::Panic(panic, self.abandon(state, serial)))
    }

    /// Ends a capture that comes to nothing for `why`, unless it was broken: that came first.
    #[cold]
    pub(super) fn abandoned(&self, state: &mut State<D>, serial: u64, why: Undone) -> Box<Undone> {
        Box::new(match self.abandon(state, serial) {
            Some(broken) => Undone::Capture(broken.into()),
            None => why,
        })
    }

    /// Ends a capture that comes to nothing. Whatever ending it says, the stream does not capture any more; if it says that the capture
    /// was broken, that is given.
    #[cold]
    pub(super) fn abandon(&self, state: &mut State<D>, serial: u64) -> Option<DeviceError> {
        let ended = self.allocator.device().end_capture(&self.stream);
        let own = (&self.pool, &[][..]);
        let baked = self.allocator.leave_capture(serial, Some(own));
        self.let_go_baked(state, baked);
        let error = ended.err()?;
        tracing::debug!(%error, "an abandoned capture ended with an error");
        let broken = error.code == Code::StreamCaptureInvalidated || error.first.is_some();
        broken.then_some(error)
    }

    /// Lets go of what a graph that never came to be would have kept.
    #[cold]
    pub(super) fn let_go_baked(&self, state: &mut State<D>, baked: Baked<D>) {
        self.pool.unpin(&baked.pins);
        // Of the last one the backing may be the caller's.
        if baked.has_pools() {
            self.bury(state, baked);
        }
    }

    /// Brings back what a recording that came to nothing was given, and lets go of what it made. What to say of it.
    #[cold]
    pub(super) fn undo(
        &self,
        state: &mut State<D>,
        call: &mut Call<'_, '_, D>,
        loose: Loose<D>,
        undone: Box<Undone>,
    ) -> Box<Undone> {
        // A given input that is among the outputs dies only here, outside of the capture. It is brought back, so the device is told nothing.
        loose.given.iter().for_each(|g| g.storage.hush());
        self.let_go(state, loose.outputs, loose.values);
        self.drop_survivors(call, &loose.born);
        match self.roll_back(call, loose.given, &loose.lent) {
            Ok(()) => undone,
            Err(error) => {
                self.bury(state, undone);
                Box::new(Undone::Call(error))
            }
        }
    }

    /// Brings back what was given and died inside: its block, and a handle in the caller's hands for each. What was allocated inside is free again, so
    /// wherever such a block lay is free too.
    #[cold]
    fn roll_back(
        &self,
        call: &mut Call<'_, '_, D>,
        given: Vec<Given<D>>,
        lent: &[(Arc<Storage<D>>, Allocation)],
    ) -> Result<()> {
        let mut died: Vec<Arc<Storage<D>>> = Vec::new();
        let mut claim: Vec<Claim> = Vec::new();
        for g in &given {
            if let Some(block) = g.block
                && g.storage.owners() == 0
                && !died.iter().any(|s| Arc::ptr_eq(s, &g.storage))
            {
                claim.push(Claim {
                    range: block.address()..block.address() + block.bytes(),
                    tag: Tag(g.storage.id().0),
                    owned: None,
                });
                died.push(g.storage.clone());
            }
        }
        // What was fed has its block again, if it is held still.
        let lent: Vec<_> = lent.iter().filter(|(s, _)| s.owners() > 0).collect();
        for (storage, block) in &lent {
            claim.push(Claim {
                range: block.address()..block.address() + block.bytes(),
                tag: Tag(storage.id().0),
                owned: None,
            });
        }
        if !claim.is_empty() {
            let claimed = self.pool.claim_blocks(call.stream, &claim)?;
            let mut blocks = claimed.into_iter();
            for (storage, block) in died.iter().zip(&mut blocks) {
                // The handle is made below: until then the storage is held by this owner.
                if storage.resurrect().is_some() {
                    storage.adopt(block, call.stream.clone());
                }
            }
            for ((storage, _), block) in lent.iter().zip(blocks) {
                storage.adopt(block, call.stream.clone());
            }
        }
        for g in given {
            g.storage.hand_over(call.stream);
            let first = died.iter().position(|s| Arc::ptr_eq(s, &g.storage));
            let counted = match first {
                Some(index) => {
                    died.swap_remove(index);
                    true
                }
                None => g.storage.retain_if_held(g.stamp),
            };
            if counted {
                call.args[g.input] = Arg::Give(Tensor::counted(
                    g.storage, g.stamp, g.offset, g.bytes, g.made_at,
                ));
            }
        }
        Ok(())
    }
}

/// The refusal that an error goes back to, unless all that is known is that the capture was broken.
#[cold]
fn first_of(error: &DeviceError) -> Option<Box<DeviceError>> {
    let root = error.root();
    (root.code != Code::StreamCaptureInvalidated).then(|| Box::new(root.clone()))
}

impl Blame {
    #[cold]
    pub(super) fn of(error: &Error) -> Self {
        let all = || {
            std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |e| {
                e.source()
            })
        };
        let refused = |e: &(dyn std::error::Error + 'static)| {
            let refused = match e.downcast_ref() {
                Some(Error::Device(refused)) => Some(refused),
                _ => e.downcast_ref(),
            };
            refused
                .filter(|refused: &&DeviceError| refused.is_capture())
                .cloned()
        };
        Blame {
            text: error.to_string(),
            refused: all().find_map(refused),
            not_capturable: all()
                .any(|e| matches!(e.downcast_ref(), Some(Error::NotCapturable { .. }))),
        }
    }
}
