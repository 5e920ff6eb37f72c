//! The pinned memory that nobody holds: what waits for work that uses it, and what is free.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use super::{InUse, PinnedConfig, PinnedStats};
use crate::device::{Code, Device, DeviceError, Mark, PinnedMemory};
use crate::pool::Trimmed;
use crate::sync::{Mutex, MutexGuard, lock};

/// Pinned memory whose last owner is gone.
pub(super) struct Parked<D: Device> {
    pub(super) memory: D::Pinned,
    pub(super) uses: InUse<D>,
}

/// An allocator's cache of pinned memory.
pub(in crate::allocator) struct Cache<D: Device> {
    /// What became ownerless since the last look. Blocks may be dropped anywhere, so nothing else is done under this lock.
    parked: Mutex<Vec<Parked<D>>>,
    state: Mutex<State<D>>,
}

struct State<D: Device> {
    /// In use by work that has not run.
    waiting: Vec<Parked<D>>,
    /// By size; of one size, what became free last is taken first.
    free: BTreeMap<u64, Vec<D::Pinned>>,
    /// Captures of others have its address.
    kept: Vec<D::Pinned>,
    config: PinnedConfig,
    stats: PinnedStats,
}

/// What is to be freed, once no lock is held: freeing waits for the device.
type Gone<D> = Vec<<D as Device>::Pinned>;

impl<D: Device> Default for Cache<D> {
    fn default() -> Self {
        Cache {
            parked: Mutex::new(Vec::new()),
            state: Mutex::new(State {
                waiting: Vec::new(),
                free: BTreeMap::new(),
                kept: Vec::new(),
                config: PinnedConfig::default(),
                stats: PinnedStats::default(),
            }),
        }
    }
}

impl<D: Device> State<D> {
    /// Makes memory free, or what is too large for the cache, gone.
    fn give_back(&mut self, memory: D::Pinned, gone: &mut Gone<D>) {
        memory.mark(Mark::Dead);
        let bytes = memory.bytes();
        if bytes > self.config.cache_up_to {
            self.forget(bytes);
            gone.push(memory);
        } else {
            self.free.entry(bytes).or_default().push(memory);
        }
    }

    fn forget(&mut self, bytes: u64) {
        self.stats.blocks.lose(1);
        self.stats.reserved_bytes.lose(bytes);
    }

    /// Takes all free memory out.
    fn empty(&mut self) -> Gone<D> {
        let free = std::mem::take(&mut self.free);
        let gone: Gone<D> = free.into_values().flatten().collect();
        gone.iter().for_each(|memory| self.forget(memory.bytes()));
        gone
    }

    fn hand_out(&mut self, memory: &D::Pinned) {
        memory.mark(Mark::Live);
        self.stats.live_blocks.gain(1);
        self.stats.live_bytes.gain(memory.bytes());
    }
}

impl<D: Device> Cache<D> {
    /// Takes what has no owner any more. Calls nobody.
    pub(super) fn park(&self, parked: Parked<D>) {
        lock(&self.parked).push(parked);
    }

    /// The state, with all free that has become so. Touches no capture, and waits for nothing.
    fn settle(&self, device: &D) -> (MutexGuard<'_, State<D>>, Gone<D>) {
        let mut gone = Vec::new();
        let mut state = lock(&self.state);
        let parked = std::mem::take(&mut *lock(&self.parked));
        for parked in parked {
            state.stats.live_blocks.lose(1);
            state.stats.live_bytes.lose(parked.memory.bytes());
            if parked.uses.kept {
                state.kept.push(parked.memory);
            } else {
                state.waiting.push(parked);
            }
        }
        let mut busy: SmallVec<[u32; 4]> = SmallVec::new();
        let done = |parked: &mut Parked<D>| parked.uses.poll(device, &mut busy);
        let done: Vec<_> = state.waiting.extract_if(.., done).collect();
        for parked in done {
            state.give_back(parked.memory, &mut gone);
        }
        (state, gone)
    }

    /// Memory of at least `bytes`.
    pub(super) fn alloc(&self, device: &D, bytes: u64) -> Result<D::Pinned, DeviceError> {
        let (mut state, gone) = self.settle(device);
        let size = state.config.size(bytes);
        let free = state.free.get_mut(&size).and_then(Vec::pop);
        if let Some(memory) = free {
            state.hand_out(&memory);
            drop(state);
            return Ok(memory);
        }
        // It takes its time, and others need not wait for it.
        drop(state);
        drop(gone);
        let memory = match device.alloc_pinned(size) {
            Err(error) if error.code == Code::OutOfMemory => {
                if !self.make_room(device)? {
                    return Err(error);
                }
                device.alloc_pinned(size)?
            }
            other => other?,
        };
        let mut state = lock(&self.state);
        state.stats.blocks.gain(1);
        state.stats.reserved_bytes.gain(memory.bytes());
        state.hand_out(&memory);
        Ok(memory)
    }

    /// Waits for what is still in use, and frees all that nobody holds. Whether that was any.
    #[cold]
    fn make_room(&self, device: &D) -> Result<bool, DeviceError> {
        let (mut state, mut gone) = self.settle(device);
        for parked in &mut state.waiting {
            parked.uses.wait(device, false)?;
        }
        let waiting = std::mem::take(&mut state.waiting);
        for parked in waiting {
            state.give_back(parked.memory, &mut gone);
        }
        gone.extend(state.empty());
        drop(state);
        Ok(!gone.is_empty())
    }

    pub(super) fn trim(&self, device: &D) -> Trimmed {
        let (mut state, mut gone) = self.settle(device);
        gone.extend(state.empty());
        drop(state);
        Trimmed {
            segments: gone.len() as u64,
            bytes: gone.iter().map(PinnedMemory::bytes).sum(),
        }
    }

    pub(super) fn configure(&self, device: &D, config: PinnedConfig) {
        let (mut state, mut gone) = self.settle(device);
        state.config = config;
        let too_large = state.free.split_off(&config.cache_up_to.saturating_add(1));
        for memory in too_large.into_values().flatten() {
            state.forget(memory.bytes());
            gone.push(memory);
        }
        drop(state);
    }

    pub(super) fn stats(&self, device: &D) -> PinnedStats {
        let (state, _gone) = self.settle(device);
        let mut stats = state.stats;
        (stats.waiting, stats.kept) = (state.waiting.len() as u64, state.kept.len() as u64);
        drop(state);
        stats
    }

    /// Whether work may be underway that uses memory without an owner.
    pub(in crate::allocator) fn is_waiting(&self, device: &D) -> bool {
        let (state, _gone) = self.settle(device);
        let waits = !state.waiting.is_empty() || !state.kept.is_empty();
        drop(state);
        waits
    }
}
