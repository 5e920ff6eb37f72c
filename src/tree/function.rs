//! Functions: what is registered, and its variants by key.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::args::{BodyResult, Inputs, Value};
use super::recorder::Recorder;
use super::{FunctionKey, NodeKey};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::storage::{Tensor, WeakTensor};

/// A function's body.
pub(super) type Body<D> =
    Arc<dyn Fn(&mut Recorder<'_, D>, Inputs<D>) -> BodyResult<D> + Send + Sync>;

/// A key: the integers that choose a variant.
pub(super) type Key = SmallVec<[i64; 4]>;

/// The declaration of a function, for [`GraphTrees::register`](crate::GraphTrees::register).
pub struct FunctionSpec<D: Device> {
    pub(super) name: Arc<str>,
    pub(super) statics: Vec<usize>,
    pub(super) bound: Vec<(usize, Bound<D>)>,
    pub(super) skip_warmup: bool,
}

/// What an input was bound to at registration. Tensors are held weakly.
pub(super) enum Bound<D: Device> {
    Tensor(WeakTensor<D>),
    Value(Value),
}

impl<D: Device> FunctionSpec<D> {
    /// A function of that name; the name is what errors and pictures call it.
    #[must_use]
    pub fn new(name: &str) -> Self {
        FunctionSpec {
            name: name.into(),
            statics: Vec::new(),
            bound: Vec::new(),
            skip_warmup: false,
        }
    }

    /// The input at `position` keeps its address from call to call; it is never copied, and another address is another recording.
    #[must_use]
    pub fn static_input(mut self, position: usize) -> Self {
        self.statics.push(position);
        self
    }

    /// The input at `position` is this tensor, in every call: static, and not passed to `run`, which then costs nothing for it. Held weakly: who
    /// binds it keeps it. Positions count all inputs as the closure sees them, bound and passed; a function with bound inputs after the passed
    /// ones needs no renumbering.
    #[must_use]
    pub fn bind(mut self, position: usize, tensor: &Tensor<D>) -> Self {
        self.bound
            .push((position, Bound::Tensor(tensor.downgrade())));
        self
    }

    /// The input at `position` is this host value, in every call.
    #[must_use]
    pub fn bind_value(mut self, position: usize, value: Value) -> Self {
        self.bound.push((position, Bound::Value(value)));
        self
    }

    /// The first run records: for a function that has been run before and initialises nothing.
    #[must_use]
    pub fn skip_warmup(mut self) -> Self {
        self.skip_warmup = true;
        self
    }
}

impl<D: Device> fmt::Debug for FunctionSpec<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionSpec")
            .field("name", &self.name)
            .field("statics", &self.statics)
            .field("bound", &self.bound.len())
            .finish_non_exhaustive()
    }
}

/// A registered function. Clones are the same function.
#[derive(Clone)]
pub struct Function {
    pub(super) key: FunctionKey,
    pub(super) name: Arc<str>,
    pub(super) owner: Arc<()>,
}

impl Function {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({})", self.name)
    }
}

/// A function as the tree keeps it.
pub(super) struct FunctionState<D: Device> {
    pub(super) number: u32,
    pub(super) name: Arc<str>,
    pub(super) body: Body<D>,
    /// Declared static, by position, sorted.
    pub(super) statics: Vec<usize>,
    /// Bound at registration, by position, sorted.
    pub(super) bound: Vec<(usize, Bound<D>)>,
    /// Raised by the death of a bound storage.
    pub(super) bound_died: Arc<AtomicBool>,
    pub(super) skip_warmup: bool,
    pub(super) variants: Vec<Variant>,
}

/// One key of a function.
pub(super) struct Variant {
    pub(super) key: Key,
    /// It has been warmed up, or need not be.
    pub(super) warm: bool,
    /// Captures of it that failed since the last that did not.
    pub(super) failures: u32,
    /// Calls that are answered eagerly before the next capture is tried.
    pub(super) pause: u64,
    /// Its recordings on the empty path, in order of creation.
    pub(super) roots: SmallVec<[NodeKey; 2]>,
}

/// Captures of a variant that may fail in a row before it is not tried again.
const FAILURES: u32 = 8;

impl Variant {
    /// A capture failed: the next call tries again, then one in 2, in 4, and so on, and after eight failures none.
    pub(super) fn capture_failed(&mut self) {
        self.failures += 1;
        self.pause = if self.failures >= FAILURES {
            u64::MAX
        } else {
            (1 << (self.failures - 1)) - 1
        };
    }

    /// A capture succeeded.
    pub(super) fn captured(&mut self) {
        (self.failures, self.pause) = (0, 0);
    }

    /// Whether this call is to be answered eagerly because captures failed.
    pub(super) fn pauses(&mut self) -> bool {
        let pauses = self.pause > 0;
        if pauses && self.pause != u64::MAX {
            self.pause -= 1;
        }
        pauses
    }
}

impl<D: Device> FunctionState<D> {
    /// The position that the `passed`-th input of a run has for the closure.
    pub(super) fn position(&self, passed: usize) -> usize {
        let mut position = passed;
        for (bound, _) in &self.bound {
            if *bound <= position {
                position += 1;
            }
        }
        position
    }

    pub(super) fn is_static(&self, position: usize) -> bool {
        self.statics.binary_search(&position).is_ok()
    }

    /// The index of a key's variant.
    pub(super) fn variant(&self, key: &[i64]) -> Option<usize> {
        self.variants.iter().position(|v| v.key.as_slice() == key)
    }

    pub(super) fn variant_or_new(&mut self, key: &[i64]) -> usize {
        self.variant(key).unwrap_or_else(|| {
            self.variants.push(Variant {
                key: Key::from_slice(key),
                warm: self.skip_warmup,
                failures: 0,
                pause: 0,
                roots: SmallVec::new(),
            });
            self.variants.len() - 1
        })
    }

    /// Refuses a function of which a bound storage died.
    pub(super) fn check_bound(&self) -> Result<()> {
        if !self.bound_died.load(Ordering::Acquire) {
            return Ok(());
        }
        let died = self
            .bound
            .iter()
            .find(|(_, b)| matches!(b, Bound::Tensor(weak) if weak.upgrade().is_none()));
        Err(Error::StaticDied {
            function: self.name.clone(),
            input: died.map_or(0, |(position, _)| *position),
        })
    }

    /// The bound inputs, alive.
    pub(super) fn bound_inputs(&self) -> Result<Vec<(usize, BoundInput<D>)>> {
        self.bound
            .iter()
            .map(|(position, bound)| {
                let input = match bound {
                    Bound::Tensor(weak) => {
                        BoundInput::Tensor(weak.upgrade().ok_or_else(|| Error::StaticDied {
                            function: self.name.clone(),
                            input: *position,
                        })?)
                    }
                    Bound::Value(value) => BoundInput::Value(value.clone()),
                };
                Ok((*position, input))
            })
            .collect()
    }
}

/// A bound input, alive for one call.
pub(super) enum BoundInput<D: Device> {
    Tensor(Tensor<D>),
    Value(Value),
}
