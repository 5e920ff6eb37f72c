//! The path: the runs since the tree was last empty, how generations end on it, and how the pool's books catch up with it.

use std::panic::Location;
use std::sync::Arc;

use slotmap::SlotMap;
use smallvec::SmallVec;
use tracing::debug_span;

use super::args::Arg;
use super::function::FunctionState;
use super::generation::Generations;
use super::node::Node;
use super::{FunctionKey, Inner, NodeKey, State};
use crate::allocator::Claim;
use crate::device::Device;
use crate::error::Result;
use crate::pool::{Adopt, Tag};
use crate::storage::{LiveMask, Storage, Tensor};

/// One run on the path.
pub(super) struct Entry<D: Device> {
    pub(super) generation: u64,
    pub(super) run: Run<D>,
}

pub(super) enum Run<D: Device> {
    /// A recorded node; whether its graph was recorded in this run, or replayed.
    Node { node: NodeKey, replayed: bool },
    /// A warmup, which leaves no node.
    Warm(Box<Warm<D>>),
}

/// Outputs of ended generations that a call takes as inputs: it copies them in, and then their memory is free, also for the call itself.
pub(super) type Fed<D> = Box<[Arc<Storage<D>>]>;

/// How a call takes an output of an ended generation.
pub(super) enum Intake {
    Copied,
    /// Declared static: it is held for the time of this call.
    InPlace,
}

/// A number of dropped tokens that there never is.
const NEVER_SEEN: u64 = u64::MAX;

/// What a warmup handed out.
pub(super) struct Warm<D: Device> {
    pub(super) function: Arc<str>,
    pub(super) slots: Box<[Arc<Storage<D>>]>,
    pub(super) live: Arc<LiveMask>,
}

fn live_in<'a, D: Device>(
    nodes: &'a SlotMap<NodeKey, Node<D>>,
    entry: &'a Entry<D>,
) -> &'a Arc<LiveMask> {
    match &entry.run {
        Run::Node { node, .. } => &nodes[*node].live,
        Run::Warm(warm) => &warm.live,
    }
}

/// Whether a storage is an output of a run on the path.
#[inline]
pub(super) fn is_on_path<D: Device>(
    nodes: &SlotMap<NodeKey, Node<D>>,
    path: &[Entry<D>],
    storage: &Storage<D>,
) -> bool {
    storage.home().is_some_and(|home| {
        path.iter()
            .any(|entry| Arc::ptr_eq(live_in(nodes, entry), &home.live))
    })
}

/// Which generations a run found ended. Looked at once: a token that is dropped on another thread meanwhile is the next run's, so that all that one does of ended generations it
/// does of the same.
pub(super) struct Over {
    /// How many tokens had been dropped before the look.
    seen: u64,
    generations: SmallVec<[u64; 4]>,
}

impl Over {
    pub(super) fn has<D: Device>(&self, entry: &Entry<D>) -> bool {
        self.generations.contains(&entry.generation)
    }
}

impl<D: Device> State<D> {
    pub(super) fn live_of<'a>(&'a self, entry: &'a Entry<D>) -> &'a Arc<LiveMask> {
        live_in(&self.nodes, entry)
    }

    /// The output storages of an entry, by bit.
    pub(super) fn slot<'a>(&'a self, entry: &'a Entry<D>, bit: usize) -> &'a Arc<Storage<D>> {
        match &entry.run {
            Run::Node { node, .. } => &self.nodes[*node].slots[bit].0,
            Run::Warm(warm) => &warm.slots[bit],
        }
    }

    /// The output storages of an entry that are held, by bit.
    pub(super) fn held<'a>(
        &'a self,
        entry: &'a Entry<D>,
    ) -> impl Iterator<Item = &'a Arc<Storage<D>>> {
        let live = self.live_of(entry);
        (0..live.words()).flat_map(move |index| {
            let mut bits = live.word(index);
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(self.slot(entry, index * 64 + bit))
            })
        })
    }

    /// A handle on each output of the path that somebody besides this call's given inputs holds. Kept while a closure runs: what another thread drops
    /// meanwhile dies afterwards, so that nothing the closure does depends on it, nor its memory is written while that thread's work reads it.
    pub(super) fn hold(&self, args: &[Arg<'_, D>]) -> Vec<Tensor<D>> {
        let given = |storage: &Arc<Storage<D>>| {
            args.iter()
                .filter(|arg| arg.is_given())
                .filter_map(|arg| arg.tensor()?.storage())
                .filter(|s| Arc::ptr_eq(s, storage))
                .count() as u64
        };
        let mut handles = Vec::new();
        if self.path.is_empty() && self.carried.is_empty() {
            return handles;
        }
        for storage in self.all_held() {
            let owners = storage.owners();
            if owners > 0 && owners <= given(storage) {
                continue;
            }
            match Tensor::hold(storage) {
                Some(handle) => handles.push(handle),
                // Its last handle is being dropped right now. Until that is done, its block, its mark and its bit do not agree.
                None => storage.settled(),
            }
        }
        handles
    }

    /// The node at the path's end, unless the path is empty or ends in a warmup.
    pub(super) fn tip(&self) -> Option<NodeKey> {
        match self.path.last()?.run {
            Run::Node { node, .. } => Some(node),
            Run::Warm(_) => None,
        }
    }

    /// Whether the path begins at a root, so that its nodes are all ancestors of the tip.
    pub(super) fn path_is_rooted(&self) -> bool {
        match self.path.first().map(|entry| &entry.run) {
            Some(Run::Node { node, .. }) => self.nodes[*node].parent.is_none(),
            Some(Run::Warm(_)) | None => true,
        }
    }

    /// Whether a warmup ends the path: only warmups can follow.
    pub(super) fn tip_is_warm(&self) -> bool {
        matches!(
            self.path.last(),
            Some(Entry {
                run: Run::Warm(_),
                ..
            })
        )
    }

    /// Whether the tip was warmed up or recorded: dead, it is then forgotten at once, as the next recording would.
    pub(super) fn tip_is_exact(&self) -> bool {
        !matches!(
            self.path.last(),
            None | Some(Entry {
                run: Run::Node { replayed: true, .. },
                ..
            })
        )
    }

    /// How many output storages of the path are held.
    pub(super) fn path_live(&self) -> usize {
        self.path
            .iter()
            .map(|entry| self.live_of(entry).count())
            .sum()
    }

    /// Everything that is held: of the path, and of the paths before it.
    pub(super) fn all_held(&self) -> impl Iterator<Item = &Arc<Storage<D>>> {
        self.path
            .iter()
            .chain(&self.carried)
            .flat_map(|entry| self.held(entry))
    }

    /// Whether there is a tip, of which nothing is held.
    pub(super) fn tip_is_dead(&self) -> bool {
        self.path
            .last()
            .is_some_and(|entry| !self.live_of(entry).any())
    }

    /// Whether there is a tip, and it belongs to another generation.
    pub(super) fn tip_is_before(&self, generation: u64) -> bool {
        self.path
            .last()
            .is_some_and(|tip| tip.generation != generation)
    }

    /// Forgets a tip of which nothing is held: the memory is as its parent left it.
    #[inline]
    pub(super) fn cut_tip(&mut self) {
        self.path.pop();
        self.settle_books();
    }

    /// Ends a path of which something is held, by another generation than the one that goes on: the next run is at the root again, and
    /// what is held is carried along, out of its way.
    pub(super) fn carry_path(&mut self) {
        let nodes = &self.nodes;
        let held = |entry: &Entry<D>| live_in(nodes, entry).any();
        self.carried.extend(self.path.drain(..).filter(held));
    }

    /// Forgets what was carried along and is not held any more.
    #[inline]
    pub(super) fn drop_carried(&mut self) {
        if !self.carried.is_empty() {
            let nodes = &self.nodes;
            self.carried.retain(|entry| live_in(nodes, entry).any());
            self.settle_books();
        }
    }

    /// What is in the books has an owner who is held; so where nothing is, they are empty, and exact.
    fn settle_books(&mut self) {
        self.books_exact |= self.path.is_empty() && self.carried.is_empty();
    }

    /// The generations of the path, and of what is carried, whose tokens were dropped.
    pub(super) fn over(&self, generations: &Generations) -> Over {
        let mut over = Over {
            seen: generations.ended(),
            generations: SmallVec::new(),
        };
        let mut open = None;
        for entry in self.path.iter().chain(&self.carried) {
            let generation = entry.generation;
            if open == Some(generation) || over.has(entry) {
                continue;
            }
            match generations.is_open(generation) {
                true => open = Some(generation),
                false => over.generations.push(generation),
            }
        }
        over
    }

    /// Ends the generations whose tokens were dropped: what is held of them goes stale, and the runs at the path's end that belong to them are
    /// forgotten. Costs what is held, and a look at each run.
    ///
    /// What this call takes (`taken` says how) goes stale only when it has. Of that, what it copies in and is no output of the path any more is given back.
    pub(super) fn retire(
        &mut self,
        over: &Over,
        taken: impl Fn(&SlotMap<FunctionKey, FunctionState<D>>, &Arc<Storage<D>>) -> Option<Intake>,
        by: &Arc<str>,
        at: &'static Location<'static>,
    ) -> Option<Fed<D>> {
        self.seen_ended = over.seen;
        let ended = |entry: &Entry<D>| over.has(entry);
        let mut fed = None;
        if !self.path.is_empty() || !self.carried.is_empty() {
            let holds = |entry: &Entry<D>| self.live_of(entry).any() && ended(entry);
            if self.path.iter().any(holds) || self.carried.iter().any(holds) {
                fed = self.retire_held(&ended, taken, by, at);
            }
            // What this call takes is held still, and stays.
            while self.tip_is_dead() && self.path.last().is_some_and(ended) {
                self.cut_tip();
            }
            self.drop_carried();
        }
        fed
    }

    /// The same where something of an ended generation is held.
    #[cold]
    fn retire_held(
        &mut self,
        ended: &impl Fn(&Entry<D>) -> bool,
        taken: impl Fn(&SlotMap<FunctionKey, FunctionState<D>>, &Arc<Storage<D>>) -> Option<Intake>,
        by: &Arc<str>,
        at: &'static Location<'static>,
    ) -> Option<Fed<D>> {
        let (mut fed, mut kept) = (Vec::new(), Vec::new());
        for entry in self.path.iter().chain(&self.carried) {
            if ended(entry) {
                for storage in self.held(entry) {
                    match taken(&self.functions, storage) {
                        Some(Intake::Copied) => fed.push(storage.clone()),
                        Some(Intake::InPlace) => kept.push(storage.clone()),
                        None => {
                            let _stays = storage.stay();
                            storage.invalidate(by, at);
                        }
                    }
                }
            }
        }
        while self.path.last().is_some_and(ended) {
            let wanted = |s: &Arc<Storage<D>>| fed.iter().chain(&kept).any(|f| Arc::ptr_eq(f, s));
            let all_taken = self
                .path
                .last()
                .is_some_and(|tip| self.held(tip).all(wanted));
            if self.tip_is_dead() {
                self.cut_tip();
            } else if all_taken {
                self.carried.extend(self.path.pop());
            } else {
                break;
            }
        }
        if fed.is_empty() && kept.is_empty() {
            return None;
        }
        // Until the call has read it, and where it does not come to that: the next run looks again.
        self.seen_ended = NEVER_SEEN;
        fed.retain(|storage| !self.on_path(storage));
        (!fed.is_empty()).then(|| fed.into())
    }
}

impl<D: Device> Inner<D> {
    /// Makes the pool's books say what is held now: restores the tip's checkpoint (that of the empty pool, on an empty path), lets the storages
    /// that are held own their blocks again, and claims what is held besides. Does nothing where the books are exact.
    pub(super) fn catch_up(&self, state: &mut State<D>, stream: &D::Stream) -> Result<()> {
        if state.books_exact {
            return Ok(());
        }
        let node = state.tip().map(|tip| &state.nodes[tip]);
        let span = debug_span!("restore", node = node.map(|n| n.id.0));
        let _entered = span.enter();
        let (checkpoint, saved) = match node {
            Some(node) => (&node.checkpoint, &*node.saved),
            None => (&self.empty, &[][..]),
        };
        let held: Vec<_> = saved
            .iter()
            .filter(|(storage, _)| storage.owners() > 0)
            .collect();
        let adopt: Vec<Adopt> = held
            .iter()
            .map(|(storage, block)| Adopt {
                saved: *block,
                tag: Tag(storage.id().0),
            })
            .collect();
        let claim: Vec<_> = state
            .all_held()
            .filter(|s| s.owners() > 0 && !saved.iter().any(|(other, _)| Arc::ptr_eq(s, other)))
            .cloned()
            .collect();
        let ranges: Vec<_> = claim
            .iter()
            .map(|storage| Claim {
                range: storage.range(),
                tag: Tag(storage.id().0),
                owned: storage.block(),
            })
            .collect();
        let (adopted, claimed) = self
            .pool
            .restore_and_claim(stream, checkpoint, &adopt, &ranges)?;
        let blocks = adopted.into_iter().chain(claimed);
        for (storage, block) in held.into_iter().map(|(s, _)| s).chain(&claim).zip(blocks) {
            if storage.block() != Some(block) {
                self.pool.let_go(storage.adopt(block, stream.clone()));
            }
        }
        state.books_exact = true;
        state.counts.restores += 1;
        Ok(())
    }
}
