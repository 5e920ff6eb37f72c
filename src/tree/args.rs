//! What goes into a run, and what a function's closure sees of it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::function::BoundInput;
use crate::device::Device;
use crate::error::{BoxError, Error, Result};
use crate::storage::Tensor;

/// A host value that a function takes besides tensors: opaque to the runtime, and static (another object is another recording).
pub type Value = Arc<dyn Any + Send + Sync>;

/// One input of a run.
pub enum Arg<'a, D: Device> {
    /// A tensor that the caller keeps. Unless it is an output of the path, declared static or bound, the function works on a copy of it: what it
    /// writes there is not seen by the caller. State that is updated in place is static.
    Lend(&'a Tensor<D>),
    /// A tensor given up: if nobody else holds it, it may die inside the function, and its memory be used there.
    /// A run that fails before it was given up leaves it here.
    Give(Tensor<D>),
    /// A host value.
    Value(Value),
    /// What a run leaves of a given input.
    Taken,
}

/// A lent input. It may be dropped when the run has returned, whatever stream it is of: its memory is not used again before the run has read it. (A static
/// input is read where it lies by every later replay too: who passes it keeps it.)
pub fn lend<D: Device>(tensor: &Tensor<D>) -> Arg<'_, D> {
    Arg::Lend(tensor)
}

/// An input given up.
#[must_use]
pub fn give<'a, D: Device>(tensor: Tensor<D>) -> Arg<'a, D> {
    Arg::Give(tensor)
}

impl<D: Device> Arg<'_, D> {
    /// The tensor, lent or given; `None` for a host value, and for what was taken.
    #[must_use]
    pub fn tensor(&self) -> Option<&Tensor<D>> {
        match self {
            Arg::Lend(tensor) => Some(tensor),
            Arg::Give(tensor) => Some(tensor),
            Arg::Value(_) | Arg::Taken => None,
        }
    }

    /// Whether it is a tensor given up.
    #[must_use]
    pub fn is_given(&self) -> bool {
        matches!(self, Arg::Give(_))
    }

    /// Takes a given tensor out, and leaves [`Arg::Taken`]. `None` for anything else, which stays.
    pub fn take(&mut self) -> Option<Tensor<D>> {
        match std::mem::replace(self, Arg::Taken) {
            Arg::Give(tensor) => Some(tensor),
            other => {
                *self = other;
                None
            }
        }
    }
}

impl<D: Device> fmt::Debug for Arg<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arg::Lend(tensor) => write!(f, "lend {tensor:?}"),
            Arg::Give(tensor) => write!(f, "give {tensor:?}"),
            Arg::Value(_) => f.write_str("value"),
            Arg::Taken => f.write_str("taken"),
        }
    }
}

/// The inputs as a function's closure sees them, by position: those bound at registration and those passed. Owned: what is
/// taken out and dropped dies where it is dropped.
pub struct Inputs<D: Device> {
    slots: Slots<D>,
}

/// A few need no heap.
pub(super) type Slots<D> = SmallVec<[Slot<D>; 2]>;

pub(super) enum Slot<D: Device> {
    Tensor(Tensor<D>),
    Value(Value),
    Taken,
}

impl<D: Device> Inputs<D> {
    /// What is passed, in order, and what is bound, each at its position and in ascending order.
    pub(super) fn new(mut slots: Slots<D>, bound: Vec<(usize, BoundInput<D>)>) -> Self {
        for (position, input) in bound {
            let slot = match input {
                BoundInput::Tensor(tensor) => Slot::Tensor(tensor),
                BoundInput::Value(value) => Slot::Value(value),
            };
            slots.insert(position.min(slots.len()), slot);
        }
        Inputs { slots }
    }

    /// Puts a tensor at a position.
    pub(super) fn put(&mut self, position: usize, tensor: Tensor<D>) {
        self.slots[position] = Slot::Tensor(tensor);
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The tensor at `index`.
    ///
    /// # Errors
    /// [`Error::Inputs`] where there is none (any more).
    pub fn get(&self, index: usize) -> Result<&Tensor<D>> {
        match self.slots.get(index) {
            Some(Slot::Tensor(tensor)) => Ok(tensor),
            other => Err(absent(index, other, "tensor")),
        }
    }

    /// Takes the tensor at `index` out.
    ///
    /// # Errors
    /// [`Error::Inputs`] where there is none (any more).
    pub fn take(&mut self, index: usize) -> Result<Tensor<D>> {
        match self.slots.get_mut(index) {
            Some(slot @ Slot::Tensor(_)) => match std::mem::replace(slot, Slot::Taken) {
                Slot::Tensor(tensor) => Ok(tensor),
                _ => Err(absent::<D>(index, None, "tensor")),
            },
            other => Err(absent(index, other.as_deref(), "tensor")),
        }
    }

    /// The host value at `index`.
    ///
    /// # Errors
    /// [`Error::Inputs`] where there is none, or one of another type.
    pub fn value<T: Any + Send + Sync>(&self, index: usize) -> Result<Arc<T>> {
        match self.slots.get(index) {
            Some(Slot::Value(value)) => value.clone().downcast().map_err(|_| Error::Inputs {
                function: "closure".into(),
                detail: format!(
                    "the value at input {index} is not a {}",
                    std::any::type_name::<T>()
                ),
            }),
            other => Err(absent(index, other, "host value")),
        }
    }
}

fn absent<D: Device>(index: usize, slot: Option<&Slot<D>>, wanted: &str) -> Error {
    let holds = match slot {
        None => "there is no such input",
        Some(Slot::Taken) => "it was taken already",
        Some(Slot::Tensor(_)) => "it is a tensor",
        Some(Slot::Value(_)) => "it is a host value",
    };
    Error::Inputs {
        function: "closure".into(),
        detail: format!("no {wanted} at input {index}: {holds}"),
    }
}

impl<D: Device> fmt::Debug for Inputs<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inputs").field("len", &self.len()).finish()
    }
}

/// What a function's closure returns.
pub type BodyResult<D> = std::result::Result<Vec<Tensor<D>>, BoxError>;
