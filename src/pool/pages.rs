//! Copy-on-write columns of pages. Touched by `index`, `books`, `checkpoint` and `restore` alone.
//!
//! A column's present *table* names a page for each [`PAGE`] slots; a saved table names *runs* of [`RUN`] entries. Pages and
//! runs lie in one arena each, with a count of what names them. An entry of the present table carries [`OWNED`] if
//! nothing else names its page: then it is changed in place. Any other page is copied first, or, if its count turns
//! out to be one by now, marked. A run that has not changed since it was saved is saved again by counting it.
//! Of one that has, the present table knows where, so that going back compares nothing.
//!
//! There are two columns, [`Records`]: what a block is, and who has it. A restore compares the second alone, and
//! adopting changes the second alone.

use smallvec::SmallVec;

/// Slots on one page: 1 KiB of block records, a quarter of a KiB of owners. At most 64, for [`differences`].
pub(super) const PAGE: usize = 16;
/// No record.
pub(super) const NIL: u32 = u32::MAX;
/// Entries in a run.
const RUN: usize = 32;
/// No page, or no run.
const NONE: u32 = u32::MAX;
/// A run of no pages.
static NO_RUN: [u32; RUN] = [NONE; RUN];
/// Set in an entry of the present table whose page no other table names.
const OWNED: u32 = 1 << 31;

/// What a column has for each slot.
pub(super) trait Cell: Copy {
    /// What an unused slot has.
    const NONE: Self;
}

/// Where a slot lies: the entry of the table, and the place on the page.
#[inline]
pub(super) fn place(slot: u32) -> (usize, usize) {
    (slot as usize / PAGE, slot as usize % PAGE)
}

/// One block, live or free: a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Record {
    /// Where the block begins.
    pub address: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Live blocks: the bytes asked for. 0 if it is free, or the record unused.
    pub requested: u64,
    /// How high it stands in a treap when it is free: see [`height`].
    pub height: u64,
    /// Its segment's number.
    pub segment: u32,
    /// The free lists its segment belongs to.
    pub list: u32,
    /// The block before it in its segment.
    pub prev: u32,
    /// The block after it in its segment; in an unused record, the next unused one.
    pub next: u32,
    /// Free blocks: the roots of the smaller and of the larger ones below it in its bin's treap.
    pub below: [u32; 2],
}

impl Cell for Record {
    const NONE: Record = Record {
        address: 0,
        size: 0,
        requested: 0,
        height: 0,
        segment: 0,
        list: 0,
        prev: NIL,
        next: NIL,
        below: [NIL; 2],
    };
}

impl Record {
    /// Whether somebody has it.
    #[inline]
    pub fn is_live(&self) -> bool {
        self.requested != 0
    }
}

/// How high a block at an address stands in a treap: a hash that differs wherever addresses do.
#[inline]
pub(super) fn height(address: u64) -> u64 {
    let mixed = (address ^ 0xD6E8_FEB8_6659_FD93).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// The places at which entries of the present table and a saved run differ, as bits. An owned page is in no run.
#[inline]
fn differing(now: &[u32], then: &[u32; RUN]) -> u64 {
    let pairs = now.iter().zip(then).rev();
    pairs.fold(0, |bits, (now, then)| bits << 1 | u64::from(now != then))
}

/// The places of the bits that are set, from the lowest.
#[inline]
pub(super) fn bits(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (set != 0).then(|| {
            let at = set.trailing_zeros() as usize;
            set &= set - 1;
            at
        })
    })
}

/// Who has a block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    /// The allocation; 0 if the block is free, or there is none.
    pub id: u64,
    /// The tag; 0 with an id of 0.
    pub tag: u64,
}

impl Cell for Owner {
    const NONE: Owner = Owner { id: 0, tag: 0 };
}

/// What a slot beyond the end of a table holds.
pub(super) const NO_OWNERS: [Owner; PAGE] = [Owner::NONE; PAGE];

/// The places at which two pages differ, as bits; without a branch, since no processor could guess it.
#[inline]
pub(super) fn differences(now: &[Owner; PAGE], then: &[Owner; PAGE]) -> u64 {
    let pairs = now.iter().zip(then).rev();
    pairs.fold(0, |bits, (now, then)| {
        let differ = (now.id ^ then.id) | (now.tag ^ then.tag);
        bits << 1 | u64::from(differ != 0)
    })
}

/// The two columns of the books.
#[derive(Default)]
pub(super) struct Records {
    /// What each block is.
    pub blocks: Pages<Record>,
    /// Who has it.
    pub owners: Pages<Owner>,
}

/// The runs of a saved state. Those of a small one lie in it.
pub(super) type SavedTable = SmallVec<[u32; 4]>;

/// The tables of a saved state.
#[derive(Default)]
pub(super) struct Tables {
    /// Of the blocks.
    pub blocks: SavedTable,
    /// Of the owners.
    pub owners: SavedTable,
}

impl Tables {
    /// No slots.
    pub const EMPTY: Tables = Tables {
        blocks: SavedTable::new_const(),
        owners: SavedTable::new_const(),
    };
}

impl Records {
    /// Makes room for a slot.
    #[inline]
    pub fn reach(&mut self, slot: u32) {
        self.blocks.reach(slot);
        self.owners.reach(slot);
    }

    /// The block of a slot.
    #[inline]
    pub fn get(&self, slot: u32) -> &Record {
        self.blocks.get(slot)
    }

    /// The block of a slot, to be changed.
    #[inline]
    pub fn edit(&mut self, slot: u32) -> &mut Record {
        self.blocks.edit(slot)
    }

    /// Keeps the present state in `tables`.
    pub fn save(&mut self, tables: &mut Tables) {
        self.blocks.save(&mut tables.blocks);
        self.owners.save(&mut tables.owners);
    }

    /// Makes a saved state the present one.
    pub fn load(&mut self, tables: &Tables) {
        self.blocks.load(&tables.blocks);
        self.owners.load(&tables.owners);
    }

    /// Lets go of a saved state.
    pub fn forget(&mut self, tables: &mut Tables) {
        self.blocks.forget(&mut tables.blocks);
        self.owners.forget(&mut tables.owners);
    }
}

/// Things in an arena, each with a count of those that name it.
struct Counted<X> {
    /// The things.
    all: Vec<X>,
    /// How often each is named.
    counts: Vec<u32>,
    /// Those that nobody names.
    vacant: Vec<u32>,
}

impl<X: Copy> Counted<X> {
    /// Adds one, named once.
    fn add(&mut self, new: X) -> u32 {
        self.place(|all, at| match at {
            Some(at) => all[at] = new,
            None => all.push(new),
        })
    }

    /// Adds a copy of another, named once.
    fn add_copy(&mut self, of: u32) -> u32 {
        let from = of as usize..of as usize + 1;
        self.place(|all, at| match at {
            Some(at) => all.copy_within(from, at),
            None => all.extend_from_within(from),
        })
    }

    /// Has one written over one that nobody names, or behind all.
    #[inline]
    fn place(&mut self, write: impl FnOnce(&mut Vec<X>, Option<usize>)) -> u32 {
        if let Some(at) = self.vacant.pop() {
            write(&mut self.all, Some(at as usize));
            self.counts[at as usize] = 1;
            return at;
        }
        write(&mut self.all, None);
        self.counts.push(1);
        self.counts.len() as u32 - 1
    }

    /// One more names it.
    #[inline]
    fn hold(&mut self, at: u32) {
        self.counts[at as usize] += 1;
    }

    /// One less names it; whether it was the last.
    #[inline]
    fn release(&mut self, at: u32) -> bool {
        let count = &mut self.counts[at as usize];
        *count -= 1;
        let last = *count == 0;
        if last {
            self.vacant.push(at);
        }
        last
    }
}

impl<X> Default for Counted<X> {
    fn default() -> Self {
        Self {
            all: Vec::new(),
            counts: Vec::new(),
            vacant: Vec::new(),
        }
    }
}

impl Counted<[u32; RUN]> {
    /// A run, or that of no pages.
    #[inline]
    fn get(&self, run: u32) -> &[u32; RUN] {
        self.all.get(run as usize).unwrap_or(&NO_RUN)
    }
}

/// One column: all its pages and runs, and the present table.
pub(super) struct Pages<T> {
    /// Pages, named by runs and by the present table.
    pages: Counted<[T; PAGE]>,
    /// Runs of entries, named by saved tables and by `base`.
    runs: Counted<[u32; RUN]>,
    /// The present table, in whole runs: for each [`PAGE`] slots a page; behind all that have one, [`NONE`].
    table: Vec<u32>,
    /// For each run of the present table the run in the arena that it was last equal to, or [`NONE`]...
    base: Vec<u32>,
    /// ...and the places at which it differs from that, as bits.
    changed: Vec<u32>,
}

impl<T> Default for Pages<T> {
    fn default() -> Self {
        Self {
            pages: Counted::default(),
            runs: Counted::default(),
            table: Vec::new(),
            base: Vec::new(),
            changed: Vec::new(),
        }
    }
}

impl<T: Cell> Pages<T> {
    /// The cell of a slot.
    #[inline]
    pub fn get(&self, slot: u32) -> &T {
        let (entry, at) = place(slot);
        &self.pages.all[(self.table[entry] & !OWNED) as usize][at]
    }

    /// The cell of a slot that may never have been made.
    #[inline]
    pub fn find(&self, slot: u32) -> Option<&T> {
        let (entry, at) = place(slot);
        let page = self.table.get(entry)? & !OWNED;
        Some(&self.pages.all.get(page as usize)?[at])
    }

    /// The cell of a slot, to be changed.
    #[inline]
    pub fn edit(&mut self, slot: u32) -> &mut T {
        let (entry, at) = place(slot);
        let mut page = self.table[entry];
        if page & OWNED == 0 {
            page = self.own(entry);
        }
        &mut self.pages.all[(page & !OWNED) as usize][at]
    }

    /// Makes room for a slot in the present table.
    #[inline]
    pub fn reach(&mut self, slot: u32) {
        let (entry, _) = place(slot);
        if self.table.get(entry).is_none_or(|&page| page == NONE) {
            self.grow(entry);
        }
    }

    /// Gives an entry that has none a page of unused cells.
    #[cold]
    fn grow(&mut self, entry: usize) {
        debug_assert!(
            entry == 0 || self.table.get(entry - 1).is_some_and(|&page| page != NONE),
            "slots are made in order, and so are pages: a save stops at the first entry without one"
        );
        while self.table.len() <= entry {
            self.table.extend_from_slice(&[NONE; RUN]);
            self.base.push(NONE);
            self.changed.push(0);
        }
        self.change(entry);
        self.table[entry] = self.pages.add([T::NONE; PAGE]) | OWNED;
    }

    /// Makes the page of an entry the present table's alone: by a copy, unless it already is. Returns the new entry.
    #[cold]
    fn own(&mut self, entry: usize) -> u32 {
        self.change(entry);
        let mut page = self.table[entry];
        if self.pages.counts[page as usize] > 1 {
            self.pages.release(page);
            page = self.pages.add_copy(page);
        }
        self.table[entry] = page | OWNED;
        page | OWNED
    }

    /// An entry is about to be changed.
    fn change(&mut self, entry: usize) {
        let (at, place) = (entry / RUN, entry % RUN);
        self.changed[at] |= 1 << place;
        let base = self.base[at];
        if base != NONE && self.runs.counts[base as usize] == 1 {
            // No saved table names it any more: nor need it hold pages.
            self.base[at] = NONE;
            self.release_run(base);
        }
    }

    /// One less names a run. O(1), and for the last O([`RUN`]).
    fn release_run(&mut self, run: u32) {
        if self.runs.release(run) {
            let pages = self.runs.all[run as usize].into_iter();
            for page in pages.take_while(|&page| page != NONE) {
                self.pages.release(page);
            }
        }
    }

    /// Keeps the present table in `table`; from now on its pages are copied before they are changed.
    /// O(runs + entries of runs that changed since the last time); no page is touched.
    fn save(&mut self, table: &mut SavedTable) {
        for at in 0..self.base.len() {
            let base = self.base[at];
            if base != NONE && self.changed[at] == 0 {
                self.runs.hold(base);
                continue;
            }
            let mut run = NO_RUN;
            let entries = &mut self.table[at * RUN..(at + 1) * RUN];
            for (saved, entry) in run.iter_mut().zip(entries) {
                if *entry == NONE {
                    // Nor has any behind it one.
                    break;
                }
                *entry &= !OWNED;
                *saved = *entry;
                self.pages.hold(*entry);
            }
            self.base[at] = self.runs.add(run);
            self.changed[at] = 0;
            self.runs.hold(self.base[at]);
            if base != NONE {
                self.release_run(base);
            }
        }
        table.clear();
        table.extend_from_slice(&self.base);
    }

    /// Makes a saved table the present one. O(runs + entries that differ); no page is touched.
    fn load(&mut self, table: &[u32]) {
        let runs = self.base.len().max(table.len());
        self.base.resize(runs, NONE);
        self.changed.resize(runs, 0);
        self.table.resize(runs * RUN, NONE);
        for at in 0..runs {
            let then = table.get(at).copied().unwrap_or(NONE);
            let set = self.differing_in(at, then);
            let entries = &mut self.table[at * RUN..(at + 1) * RUN];
            for place in bits(set) {
                let page = self.runs.get(then)[place];
                let before = std::mem::replace(&mut entries[place], page);
                if page != NONE {
                    self.pages.hold(page);
                }
                if before != NONE {
                    self.pages.release(before & !OWNED);
                }
            }
            self.changed[at] = 0;
            let base = std::mem::replace(&mut self.base[at], then);
            if base == then {
                continue;
            }
            if then != NONE {
                self.runs.hold(then);
            }
            if base != NONE {
                self.release_run(base);
            }
        }
        self.base.truncate(table.len());
        self.changed.truncate(table.len());
        self.table.truncate(table.len() * RUN);
    }

    /// Lets go of a saved table.
    fn forget(&mut self, table: &mut SavedTable) {
        for run in table.drain(..) {
            self.release_run(run);
        }
    }

    /// The cell of a slot in a saved state that knows it.
    #[inline]
    pub fn saved(&self, table: &[u32], slot: u32) -> Option<&T> {
        let (entry, at) = place(slot);
        Some(&self.saved_page(table, entry)?[at])
    }

    /// The page of an entry of a saved table.
    #[inline]
    pub fn saved_page(&self, table: &[u32], entry: usize) -> Option<&[T; PAGE]> {
        let run = &self.runs.all[*table.get(entry / RUN)? as usize];
        self.pages.all.get(run[entry % RUN] as usize)
    }

    /// The page of an entry of the present table.
    #[inline]
    pub fn present_page(&self, entry: usize) -> Option<&[T; PAGE]> {
        let page = self.table.get(entry)? & !OWNED;
        self.pages.all.get(page as usize)
    }

    /// Places at which a run of the present table and one in the arena (or none) name different pages, as bits.
    /// O(1) if the one is the other's base.
    #[inline]
    fn differing_in(&self, at: usize, then: u32) -> u64 {
        match self.base.get(at) {
            Some(&base) if base == then && base != NONE => u64::from(self.changed[at]),
            Some(_) => differing(&self.table[at * RUN..(at + 1) * RUN], self.runs.get(then)),
            None => differing(&NO_RUN, self.runs.get(then)),
        }
    }

    /// Entries in which the present table and a saved one name different pages. O(runs + entries that differ), and
    /// O(entries) of runs that have another base.
    pub fn differing<'a>(&'a self, table: &'a [u32]) -> impl Iterator<Item = usize> + 'a {
        (0..self.base.len().max(table.len())).flat_map(move |at| {
            let then = table.get(at).copied().unwrap_or(NONE);
            bits(self.differing_in(at, then)).map(move |place| at * RUN + place)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Owners = Pages<Owner>;

    /// Pages and runs are counted once for each that names them, and vacant if none does.
    fn check_counts(owners: &Owners, saved: &[&SavedTable]) {
        fn check<X>(counted: &Counted<X>, named: impl Iterator<Item = u32>) {
            let mut counts = vec![0; counted.counts.len()];
            named.for_each(|at| counts[at as usize] += 1);
            assert_eq!(counted.counts, counts);
            let mut vacant = counted.vacant.clone();
            vacant.sort_unstable();
            let unnamed = (0..counts.len() as u32).filter(|at| counts[*at as usize] == 0);
            assert_eq!(vacant, unnamed.collect::<Vec<_>>());
        }
        let named = |at: &u32| *at != NONE;
        let saved = saved.iter().copied().flatten();
        let runs = saved.chain(&owners.base).copied();
        check(&owners.runs, runs.filter(named));
        let held = owners.runs.all.iter().zip(&owners.runs.counts);
        let held = held.filter(|run| *run.1 > 0).flat_map(|run| *run.0);
        let present = owners.table.iter().filter(|entry| named(entry));
        let pages = present.map(|entry| entry & !OWNED).chain(held);
        check(&owners.pages, pages.filter(named));
        for (at, &base) in owners.base.iter().enumerate() {
            let set = differing(
                &owners.table[at * RUN..(at + 1) * RUN],
                owners.runs.get(base),
            );
            assert!(base == NONE || set == u64::from(owners.changed[at]));
        }
    }

    #[test]
    fn a_saved_table_keeps_what_it_saw_and_an_unsaved_page_is_changed_in_place() {
        let mut owners = Owners::default();
        owners.reach(0);
        owners.reach(PAGE as u32);
        owners.edit(3).id = 30;
        assert_eq!(owners.pages.counts.len(), 2);

        let (mut first, mut second) = (SavedTable::new(), SavedTable::new());
        owners.save(&mut first);
        owners.save(&mut second);
        check_counts(&owners, &[&first, &second]);
        owners.edit(3).id = 31;
        owners.edit(4).id = 40;
        assert_eq!(owners.pages.counts.len(), 3, "one page was copied, once");
        check_counts(&owners, &[&first, &second]);
        assert_eq!(owners.differing(&first).collect::<Vec<_>>(), [0]);
        let (now, then) = (owners.present_page(0), owners.saved_page(&first, 0));
        assert_eq!(differences(now.unwrap(), then.unwrap()), 0b11000);
        assert_eq!(owners.saved(&first, 3).map(|owner| owner.id), Some(30));

        owners.load(&first);
        check_counts(&owners, &[&first, &second]);
        assert_eq!((owners.get(3).id, owners.get(4).id), (30, 0));
        assert_eq!(owners.differing(&first).count(), 0);

        owners.forget(&mut first);
        owners.forget(&mut second);
        check_counts(&owners, &[]);
        owners.edit(3).id = 32;
        assert_eq!(
            owners.pages.counts.len(),
            3,
            "the page is the present table's alone again: no copy"
        );
        check_counts(&owners, &[]);
    }

    #[test]
    fn a_page_that_grew_after_the_save_is_gone_after_the_load_and_comes_back_clean() {
        let mut owners = Owners::default();
        let (mut table, mut longer) = (SavedTable::new(), SavedTable::new());
        owners.save(&mut table);
        owners.reach(0);
        *owners.edit(0) = Owner { id: 1, tag: 2 };
        owners.save(&mut longer);
        owners.load(&table);
        assert!(owners.find(0).is_none());
        owners.reach(0);
        assert!(*owners.get(0) == Owner::NONE);
        check_counts(&owners, &[&table, &longer]);
        owners.load(&table);
        owners.load(&longer);
        assert!(*owners.get(0) == Owner { id: 1, tag: 2 });
        check_counts(&owners, &[&table, &longer]);
    }

    #[test]
    fn a_table_knows_where_it_left_the_run_that_it_came_from_and_compares_with_others() {
        let mut owners = Owners::default();
        let slots = (2 * RUN * PAGE) as u32;
        (0..slots).for_each(|slot| owners.reach(slot));
        let (mut first, mut second) = (SavedTable::new(), SavedTable::new());
        owners.save(&mut first);
        owners.edit(0).id = 1;
        owners.edit(slots - 1).id = 2;
        let last = 2 * RUN - 1;
        assert_eq!(owners.differing(&first).collect::<Vec<_>>(), [0, last]);
        owners.save(&mut second);
        assert_eq!(owners.differing(&first).collect::<Vec<_>>(), [0, last]);
        assert_eq!(owners.differing(&second).count(), 0);
        owners.edit(PAGE as u32).id = 3;
        assert_eq!(owners.differing(&first).collect::<Vec<_>>(), [0, 1, last]);
        assert_eq!(owners.differing(&second).collect::<Vec<_>>(), [1]);
        check_counts(&owners, &[&first, &second]);
        owners.load(&first);
        assert_eq!(owners.differing(&second).collect::<Vec<_>>(), [0, last]);
        check_counts(&owners, &[&first, &second]);

        // What only the present table names is changed in place again.
        owners.forget(&mut second);
        owners.forget(&mut first);
        let pages = owners.pages.counts.len();
        (0..slots).for_each(|slot| owners.edit(slot).id = 4);
        assert_eq!(owners.pages.counts.len(), pages);
        check_counts(&owners, &[]);
    }
}
