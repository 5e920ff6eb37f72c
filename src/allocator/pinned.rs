//! Pinned buffers: page-locked memory of the host that copies read and write when they run, cached as device memory is.
//!
//! A copy from a pinned buffer is read when the device comes to it. So two things must not happen before: the host must not write the buffer, and
//! nobody else may get its memory. For copies that run, an event behind the last one on each stream says when. For copies that were captured, the
//! memory belongs to their graph: it is not used again as long as the graph lives, and each launch of such a graph is followed by an event.

mod cache;
mod last;

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use self::cache::Parked;
use self::last::LastWork;
use super::{Allocator, Shared};
use crate::device::{CaptureStatus, Device, DeviceError, PinnedMemory};
use crate::error::{Error, Result};
use crate::pool::{Stat, Trimmed};
use crate::sync::thread;
use crate::sync::{AtomicBool, Mutex, MutexGuard, lock};

pub(super) use self::cache::Cache;

/// Page-locked memory of the host, for copies that do not wait: [`Tensor::copy_from_pinned`](crate::Tensor::copy_from_pinned),
/// [`Tensor::copy_to_pinned`](crate::Tensor::copy_to_pinned). Clones are handles on the same bytes.
///
/// The copies run in stream order, the bytes are read and written then. [`write`](PinnedBuffer::write) and [`read`](PinnedBuffer::read) wait for them; so what was enqueued
/// copies the bytes that were there when it was enqueued, and what is read is there.
///
/// **In graphs.** A copy that is captured becomes a node, which reads the buffer's bytes at each launch: fill the buffer, then launch. A write waits for
/// the last launch of each graph that reads the buffer, and a launch for a write of another thread, so none reads half of it. The memory belongs to the graph too: dropped or
/// not, the buffer's bytes stay where they are, and are nobody else's, as long as the [`Graph`](crate::Graph) lives (in a [`GraphTrees`](crate::GraphTrees): the recording). So they do
/// where a graph only writes them, since each launch does it again. A capture that fails lets go of it.
///
/// While this thread captures, what it captured has not run: to write a buffer that a copy of that capture uses, or to read one that it writes, is
/// [`Error::NotCapturable`] (in a recording of a tree: returned by the closure, it has the call answered eagerly, and the key not recorded again). Use a buffer for each copy.
///
/// Of a capture that was not begun through this crate (also where a run becomes part of one) nobody says how long its graph lives, or when it was launched last. A buffer that is
/// used there is never used again as long as the [`Allocator`] lives, and whoever launches that graph keeps the allocator, and orders the host's writes himself.
pub struct PinnedBuffer<D: Device> {
    block: Arc<Block<D>>,
    bytes: u64,
}

/// Sizes and limits of an allocator's pinned memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedConfig {
    /// Requests of up to this are rounded up to a power of two; larger ones are served as they are. Default: all are rounded.
    pub round_up_to: u64,
    /// Memory of more than this is freed, not kept, when nothing uses it any more. Default: all is kept.
    pub cache_up_to: u64,
}

impl Default for PinnedConfig {
    fn default() -> Self {
        PinnedConfig {
            round_up_to: u64::MAX,
            cache_up_to: u64::MAX,
        }
    }
}

impl PinnedConfig {
    /// The size of the memory that a request is served with.
    fn size(&self, bytes: u64) -> u64 {
        let bytes = bytes.max(1);
        if bytes <= self.round_up_to {
            bytes.checked_next_power_of_two().unwrap_or(bytes)
        } else {
            bytes
        }
    }
}

/// Figures of an allocator's pinned memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedStats {
    /// Blocks with an owner: a buffer, or a graph.
    pub live_blocks: Stat,
    /// Their bytes, as rounded.
    pub live_bytes: Stat,
    /// Blocks that the device gave.
    pub blocks: Stat,
    /// Their bytes.
    pub reserved_bytes: Stat,
    /// Blocks without an owner that work underway still uses.
    pub waiting: u64,
    /// Blocks without an owner whose addresses captures of others have: they are not used again.
    pub kept: u64,
}

/// Memory with an owner: buffers and graphs. It goes back to the cache with the last.
pub(crate) struct Block<D: Device> {
    memory: ManuallyDrop<D::Pinned>,
    uses: Mutex<InUse<D>>,
    shared: Arc<Shared<D>>,
}

/// What uses a block. Held while work is enqueued that does, and while the host touches its bytes.
struct InUse<D: Device> {
    /// Copies that were enqueued.
    work: LastWork<D>,
    /// Graphs with copies.
    graphs: SmallVec<[Share<D>; 1]>,
    /// A capture that nobody knows has its address.
    kept: bool,
}

impl<D: Device> Default for InUse<D> {
    fn default() -> Self {
        InUse {
            work: LastWork::default(),
            graphs: SmallVec::new(),
            kept: false,
        }
    }
}

/// A graph's part in a block.
struct Share<D: Device> {
    launches: Arc<Launches<D>>,
    writes: bool,
}

/// The launches of one graph.
struct Launches<D: Device> {
    last: Mutex<LastWork<D>>,
    /// The graph is gone.
    over: AtomicBool,
}

impl<D: Device> InUse<D> {
    /// Waits for all work so far, or for what of it may write.
    fn wait(&mut self, device: &D, only_writes: bool) -> Result<(), DeviceError> {
        self.work.wait(device, only_writes)?;
        for share in &self.graphs {
            if share.writes || !only_writes {
                lock(&share.launches.last).wait(device, false)?;
            }
        }
        if !only_writes {
            // Asked after its launches were waited for: there are no more.
            self.graphs
                .retain(|share| !share.launches.over.load(Ordering::Acquire));
        }
        Ok(())
    }

    /// Whether all work so far has run.
    fn poll(&mut self, device: &D, busy: &mut SmallVec<[u32; 4]>) -> bool {
        let done = self.work.poll(device, busy);
        self.graphs.iter().fold(done, |done, share| {
            lock(&share.launches.last).poll(device, busy) && done
        })
    }
}

impl<D: Device> Drop for Block<D> {
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        let uses = std::mem::take(&mut *lock(&self.uses));
        self.shared.pinned.park(Parked { memory, uses });
    }
}

impl<D: Device> Allocator<D> {
    /// Allocates pinned memory of the host. The bytes are undefined. It comes from the cache where that has a block of the size ([`PinnedConfig`]) that nothing uses any
    /// more. Legal during captures, which it does not touch.
    ///
    /// # Errors
    /// The device's, where it has none: after what waits was waited for, and what is free was given back.
    pub fn alloc_pinned(&self, bytes: u64) -> Result<PinnedBuffer<D>> {
        let shared = &self.shared;
        let memory = shared.pinned.alloc(&shared.device, bytes)?;
        Ok(PinnedBuffer {
            block: Arc::new(Block {
                memory: ManuallyDrop::new(memory),
                uses: Mutex::new(InUse::default()),
                shared: shared.clone(),
            }),
            bytes,
        })
    }

    /// Gives pinned memory that nobody holds and nothing uses back to the system; how many blocks, and their bytes. Touches no capture; may wait for work.
    pub fn trim_pinned(&self) -> Trimmed {
        self.shared.pinned.trim(&self.shared.device)
    }

    /// Figures of the pinned memory.
    #[must_use]
    pub fn pinned_stats(&self) -> PinnedStats {
        self.shared.pinned.stats(&self.shared.device)
    }

    /// Sets sizes and limits of the pinned memory from here on.
    pub fn configure_pinned(&self, config: PinnedConfig) {
        self.shared.pinned.configure(&self.shared.device, config);
    }
}

impl<D: Device> PinnedBuffer<D> {
    /// How many bytes were asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it begins, as an address of this process. It does not move.
    #[must_use]
    pub fn address(&self) -> usize {
        self.block.memory.address()
    }

    /// Writes bytes from `offset` on, after all work that was given the buffer so far, which is waited for (launches of graphs that use it, too).
    ///
    /// # Errors
    /// [`Error::View`] where they do not lie in it; [`Error::NotCapturable`] where a capture of this thread uses it; the device's, where that work failed.
    pub fn write(&self, offset: u64, src: &[u8]) -> Result<()> {
        self.fits(offset, src.len() as u64)?;
        self.refuse_captured(false)?;
        let mut uses = lock(&self.block.uses);
        uses.wait(self.device(), false)?;
        Ok(self.block.memory.write(offset, src)?)
    }

    /// Reads bytes from `offset` on, after all work so far that writes the buffer, which is waited for (launches of graphs that write it, too).
    ///
    /// # Errors
    /// As [`write`](PinnedBuffer::write); [`Error::NotCapturable`] where a capture of this thread writes it.
    pub fn read(&self, offset: u64, dst: &mut [u8]) -> Result<()> {
        self.fits(offset, dst.len() as u64)?;
        self.refuse_captured(true)?;
        let mut uses = lock(&self.block.uses);
        uses.wait(self.device(), true)?;
        Ok(self.block.memory.read(offset, dst)?)
    }

    /// All its bytes.
    ///
    /// # Errors
    /// As [`read`](PinnedBuffer::read).
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        // It was allocated, so it can be counted.
        let mut bytes = vec![0; usize::try_from(self.bytes).unwrap_or(0)];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Whether work so far still uses it, so that a write would wait. Touches no capture.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        !lock(&self.block.uses).poll(self.device(), &mut SmallVec::new())
    }

    pub(crate) fn device(&self) -> &D {
        &self.block.shared.device
    }

    fn fits(&self, offset: u64, bytes: u64) -> Result<()> {
        if offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.bytes)
        {
            return Ok(());
        }
        Err(Error::View {
            offset,
            bytes,
            of: self.bytes,
        })
    }

    /// Refuses what would be another thing in a graph than it is here: a capture of this thread has captured copies of it, which have not run.
    fn refuse_captured(&self, only_writes: bool) -> Result<()> {
        let shared = &self.block.shared;
        let books = shared.books();
        let here = || thread::current().id();
        let ours = |c: &super::Underway<D>| {
            let uses =
                |c: &Captured<D>| Arc::ptr_eq(&c.block, &self.block) && (c.writes || !only_writes);
            c.pinned.iter().any(uses) && c.thread == here()
        };
        if !books.captures.iter().any(ours) {
            return Ok(());
        }
        let what = if only_writes {
            "to read a pinned buffer that a captured copy writes"
        } else {
            "to write a pinned buffer that a captured copy uses"
        };
        Err(Error::NotCapturable { what: what.into() })
    }

    /// Enqueues a copy of `bytes` from `offset`, or captures it.
    pub(crate) fn enqueue(
        &self,
        stream: &D::Stream,
        (offset, bytes): (u64, u64),
        writes: bool,
        copy: impl FnOnce(&D::Pinned) -> Result<(), DeviceError>,
    ) -> Result<()> {
        self.fits(offset, bytes)?;
        let (block, device) = (&self.block, self.device());
        block.shared.refuse_stream(stream)?;
        let mut uses = lock(&block.uses);
        let copy = || copy(&block.memory);
        if device.capture_status(stream)? == CaptureStatus::None {
            return Ok(uses.work.follow(device, stream, writes, copy)?);
        }
        // Before it is captured: a copy is not to be without its memory.
        uses.kept |= !block.shared.note_captured(stream, block, writes);
        Ok(copy()?)
    }
}

impl<D: Device> Clone for PinnedBuffer<D> {
    fn clone(&self) -> Self {
        PinnedBuffer {
            block: self.block.clone(),
            bytes: self.bytes,
        }
    }
}

impl<D: Device> fmt::Debug for PinnedBuffer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuffer({:#x}, {} B)", self.address(), self.bytes)
    }
}

// ---- the graphs' side ---------------------------------------------------------------------------------

/// A block that a capture underway has copies of.
pub(crate) struct Captured<D: Device> {
    block: Arc<Block<D>>,
    writes: bool,
}

impl<D: Device> Shared<D> {
    /// Notes a captured copy for the graph to come. False where the capture is nobody's that is known.
    fn note_captured(&self, stream: &D::Stream, block: &Arc<Block<D>>, writes: bool) -> bool {
        let mut books = self.books();
        let Some(at) = books.capture_of(&self.device, stream) else {
            return false;
        };
        let all = &mut books.captures[at].pinned;
        match all.iter_mut().find(|c| Arc::ptr_eq(&c.block, block)) {
            Some(captured) => captured.writes |= writes,
            None => all.push(Captured {
                block: block.clone(),
                writes,
            }),
        }
        true
    }
}

/// The pinned memory of a graph: it belongs to the graph as long as this lives.
pub(crate) struct PinnedUses<D: Device> {
    /// In order of their addresses, in which they are locked.
    blocks: Vec<Arc<Block<D>>>,
    launches: Arc<Launches<D>>,
}

impl<D: Device> PinnedUses<D> {
    /// Of a graph whose capture ended well; `None` where it uses none.
    pub(crate) fn of(mut captured: Vec<Captured<D>>) -> Option<Self> {
        if captured.is_empty() {
            return None;
        }
        captured.sort_unstable_by_key(|c| c.block.memory.address());
        let launches = Arc::new(Launches {
            last: Mutex::default(),
            over: AtomicBool::new(false),
        });
        for c in &captured {
            lock(&c.block.uses).graphs.push(Share {
                launches: launches.clone(),
                writes: c.writes,
            });
        }
        Some(PinnedUses {
            blocks: captured.into_iter().map(|c| c.block).collect(),
            launches,
        })
    }

    /// Launches the graph, when no thread of the host is at its blocks, and notes that.
    pub(crate) fn launch(
        &self,
        device: &D,
        stream: &D::Stream,
        launch: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let _held: SmallVec<[MutexGuard<'_, InUse<D>>; 4]> =
            self.blocks.iter().map(|block| lock(&block.uses)).collect();
        lock(&self.launches.last).follow(device, stream, false, launch)
    }
}

impl<D: Device> Drop for PinnedUses<D> {
    fn drop(&mut self) {
        self.launches.over.store(true, Ordering::Release);
    }
}

impl<D: Device> fmt::Debug for PinnedUses<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedUses({} blocks)", self.blocks.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_up_to_a_limit() {
        let all = PinnedConfig::default();
        let sizes = [0, 1, 100, 40_960, 81_920, 1 << 30].map(|bytes| all.size(bytes));
        assert_eq!(sizes, [1, 1, 128, 65_536, 131_072, 1 << 30]);
        assert_eq!(all.size(u64::MAX), u64::MAX);
        let some = PinnedConfig {
            round_up_to: 128 << 20,
            ..all
        };
        let sizes = [127 << 20, 128 << 20, 129 << 20].map(|bytes| some.size(bytes));
        assert_eq!(sizes, [128 << 20, 128 << 20, 129 << 20]);
    }
}
