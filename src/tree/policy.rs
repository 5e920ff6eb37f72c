//! What a function or a tree may cost, and what is done when an input moves: settings, without any doing.

/// What is done when an input that is used in place lies elsewhere than at every recording of this place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnMove {
    /// It is recorded again, beside the others: each address has a recording of its own.
    Record,
    /// It is recorded once more, with the input copied in from then on, wherever it lies. Not so for an input that the function writes or returns:
    /// that one is recorded again.
    Copy,
    /// The call runs eagerly. At an address that was recorded it replays.
    Eager,
    /// The call runs eagerly, and so does every later call of the function at this place of the tree.
    Skip,
    /// The call is [`Error::InputMoved`](crate::Error::InputMoved).
    Error,
}

/// When an input has moved `after` times at one place of the tree, each time recorded again, `then` is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovePolicy {
    /// How many recordings on account of moves are made before. Only moves of the policy's own kind of input count.
    pub after: u32,
    /// What is done from then on.
    pub then: OnMove,
}

impl MovePolicy {
    /// Record each time.
    pub const RECORD: MovePolicy = MovePolicy {
        after: u32::MAX,
        then: OnMove::Record,
    };
}

/// What happens to outputs that are held when their generation has ended, at the first run after its token was dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnOverwrite {
    /// Reading them is [`Error::Stale`](crate::Error::Stale) from then on.
    #[default]
    Stale,
    /// They are copied out first: handles, views included, keep their values and their storage, at another address, with memory of the allocator's default pool.
    /// Work that other streams do with the old address by then is waited for only if the stream was named ([`record_stream`](crate::Tensor::record_stream)).
    /// The copy is made on the stream of the run that ends the step; reads, writes, runs, and the streams that runs were called on wait for it. Who takes the new
    /// address ([`ptr`](crate::Tensor::ptr)) to another stream waits for that run.
    Copy,
}

/// How much a tree may keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Graphs. When there is one too many, the recording that was used the longest ago goes, of those with nothing below them.
    pub graphs: usize,
    /// Bytes that the driver takes for them, as [`GraphInfo::exec_bytes`](crate::device::GraphInfo::exec_bytes) estimates it. The latest recording stays,
    /// whatever its size.
    pub graph_bytes: u64,
}

impl Default for Budget {
    /// 4,096 graphs, of any size.
    fn default() -> Self {
        Budget {
            graphs: 4096,
            graph_bytes: u64::MAX,
        }
    }
}

/// What a function may record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// In all.
    pub(super) recordings: usize,
    /// Below one node, or at the root.
    pub(super) at_a_place: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            recordings: 1024,
            at_a_place: 128,
        }
    }
}
