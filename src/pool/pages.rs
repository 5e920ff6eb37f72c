//! Copy-on-write columns of pages. Touched by `index`, `books`, `checkpoint` and `restore` alone.
//!
//! A *table* names the page of each run of `N` slots. A column's present table lies in [`Pages`], those of
//! checkpoints beside it; all pages lie in one arena, each with a count of the tables that name
//! it. A table entry of the present table carries [`OWNED`] if no other table names its page: then it is
//! changed in place. Any other page is copied first, or, if its count turns out to be one by now, marked.
//!
//! There are two columns, [`Records`]: what a block is, and who has it. A restore compares the second alone, and
//! adopting changes the second alone.

/// Block records on one page, 2 KiB.
pub(super) const BLOCKS: usize = 32;
/// Owners on one page, half a KiB; at most 64, for [`differences`].
pub(super) const OWNERS: usize = 32;
/// No record.
pub(super) const NIL: u32 = u32::MAX;
/// Set in an entry of the present table whose page no other table names.
const OWNED: u32 = 1 << 31;

/// What a column has for each slot.
pub(super) trait Cell: Copy {
    /// What an unused slot has.
    const NONE: Self;
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
pub(super) const NO_OWNERS: [Owner; OWNERS] = [Owner::NONE; OWNERS];

/// The places at which two pages differ, as bits.
#[inline]
pub(super) fn differences(now: &[Owner; OWNERS], then: &[Owner; OWNERS]) -> u64 {
    let mut differ = 0;
    for (at, (now, then)) in now.iter().zip(then).enumerate() {
        let same = (now.id ^ then.id) | (now.tag ^ then.tag);
        differ |= u64::from(same != 0) << at;
    }
    differ
}

/// The two columns of the books.
#[derive(Default)]
pub(super) struct Records {
    /// What each block is.
    pub blocks: Pages<Record, BLOCKS>,
    /// Who has it.
    pub owners: Pages<Owner, OWNERS>,
}

/// The tables of a saved state.
#[derive(Default)]
pub(super) struct Tables {
    /// Of the blocks.
    pub blocks: Vec<u32>,
    /// Of the owners.
    pub owners: Vec<u32>,
}

impl Tables {
    /// No slots.
    pub const EMPTY: Tables = Tables {
        blocks: Vec::new(),
        owners: Vec::new(),
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

/// One column: all its pages, and the present table.
pub(super) struct Pages<T, const N: usize> {
    /// The arena.
    pages: Vec<[T; N]>,
    /// For each page the number of tables that name it.
    counts: Vec<u32>,
    /// Pages that no table names.
    vacant: Vec<u32>,
    /// The present table.
    table: Vec<u32>,
}

impl<T, const N: usize> Default for Pages<T, N> {
    fn default() -> Self {
        Self {
            pages: Vec::new(),
            counts: Vec::new(),
            vacant: Vec::new(),
            table: Vec::new(),
        }
    }
}

impl<T: Cell, const N: usize> Pages<T, N> {
    /// Where a slot lies: the entry of the table, and the place on the page.
    #[inline]
    fn place(slot: u32) -> (usize, usize) {
        (slot as usize / N, slot as usize % N)
    }

    /// The cell of a slot.
    #[inline]
    pub fn get(&self, slot: u32) -> &T {
        let (entry, at) = Self::place(slot);
        &self.pages[(self.table[entry] & !OWNED) as usize][at]
    }

    /// The cell of a slot that may never have been made.
    #[inline]
    pub fn find(&self, slot: u32) -> Option<&T> {
        let (entry, at) = Self::place(slot);
        let page = self.table.get(entry)? & !OWNED;
        Some(&self.pages[page as usize][at])
    }

    /// The cell of a slot, to be changed.
    #[inline]
    pub fn edit(&mut self, slot: u32) -> &mut T {
        let (entry, at) = Self::place(slot);
        let mut page = self.table[entry];
        if page & OWNED == 0 {
            page = self.own(entry);
        }
        &mut self.pages[(page & !OWNED) as usize][at]
    }

    /// Makes room for a slot in the present table, which has room for all below it.
    #[inline]
    pub fn reach(&mut self, slot: u32) {
        if Self::place(slot).0 >= self.table.len() {
            self.grow();
        }
    }

    /// Adds a page of unused cells to the present table.
    #[cold]
    fn grow(&mut self) {
        let page = self.new_page(|pages, at| match at {
            Some(at) => pages[at] = [T::NONE; N],
            None => pages.push([T::NONE; N]),
        });
        self.table.push(page | OWNED);
    }

    /// A page that no table names, counted once: one that was used before (`write` is told which), or a new one.
    #[inline]
    fn new_page(&mut self, write: impl FnOnce(&mut Vec<[T; N]>, Option<usize>)) -> u32 {
        if let Some(page) = self.vacant.pop() {
            write(&mut self.pages, Some(page as usize));
            self.counts[page as usize] = 1;
            return page;
        }
        write(&mut self.pages, None);
        self.counts.push(1);
        self.counts.len() as u32 - 1
    }

    /// Makes the page of an entry the present table's alone: by a copy, unless it already is. Returns the new entry.
    #[cold]
    fn own(&mut self, entry: usize) -> u32 {
        let shared = self.table[entry];
        let count = &mut self.counts[shared as usize];
        let page = if *count == 1 {
            shared
        } else {
            *count -= 1;
            let from = shared as usize..shared as usize + 1;
            self.new_page(|pages, at| match at {
                Some(at) => pages.copy_within(from, at),
                None => pages.extend_from_within(from),
            })
        };
        self.table[entry] = page | OWNED;
        page | OWNED
    }

    /// One table less names a page.
    #[inline]
    fn release(&mut self, page: u32) {
        let count = &mut self.counts[page as usize];
        *count -= 1;
        if *count == 0 {
            self.vacant.push(page);
        }
    }

    /// Copies the present table into `table`; from now on its pages are copied before they are changed.
    /// O(pages); no page is touched.
    fn save(&mut self, table: &mut Vec<u32>) {
        let counts = self.counts.as_mut_slice();
        for entry in &mut self.table {
            *entry &= !OWNED;
            counts[*entry as usize] += 1;
        }
        table.clone_from(&self.table);
    }

    /// Makes a saved table the present one. O(pages); no page is touched.
    fn load(&mut self, table: &[u32]) {
        while self.table.len() > table.len()
            && let Some(page) = self.table.pop()
        {
            self.release(page & !OWNED);
        }
        for (entry, &then) in table.iter().enumerate() {
            match self.table.get(entry) {
                // An owned entry is never equal to a saved one: its page would be shared.
                Some(&now) if now == then => continue,
                Some(&now) => {
                    self.table[entry] = then;
                    self.release(now & !OWNED);
                }
                None => self.table.push(then),
            }
            self.counts[then as usize] += 1;
        }
    }

    /// Lets go of a saved table.
    fn forget(&mut self, table: &mut Vec<u32>) {
        for page in table.drain(..) {
            self.release(page);
        }
    }

    /// The cell of a slot in a saved state that knows it.
    #[inline]
    pub fn saved(&self, table: &[u32], slot: u32) -> Option<&T> {
        let (entry, at) = Self::place(slot);
        Some(&self.saved_page(table, entry)?[at])
    }

    /// The page of an entry of a saved table.
    #[inline]
    pub fn saved_page(&self, table: &[u32], entry: usize) -> Option<&[T; N]> {
        table.get(entry).map(|&page| &self.pages[page as usize])
    }

    /// The page of an entry of the present table.
    #[inline]
    pub fn present_page(&self, entry: usize) -> Option<&[T; N]> {
        let page = self.table.get(entry)?;
        Some(&self.pages[(page & !OWNED) as usize])
    }

    /// Entries in which the present table and a saved one name different pages.
    pub fn differing<'a>(&'a self, table: &'a [u32]) -> impl Iterator<Item = usize> + 'a {
        (0..self.table.len().max(table.len()))
            .filter(|&entry| self.table.get(entry) != table.get(entry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Owners = Pages<Owner, OWNERS>;

    /// Every page is counted once for each table that names it, and vacant if none does.
    fn check_counts(owners: &Owners, saved: &[&Vec<u32>]) {
        let mut counts = vec![0; owners.counts.len()];
        for entry in &owners.table {
            counts[(entry & !OWNED) as usize] += 1;
        }
        for page in saved.iter().copied().flatten() {
            counts[*page as usize] += 1;
        }
        assert_eq!(owners.counts, counts);
        let mut vacant = owners.vacant.clone();
        vacant.sort_unstable();
        let unnamed: Vec<u32> = (0..counts.len() as u32)
            .filter(|page| counts[*page as usize] == 0)
            .collect();
        assert_eq!(vacant, unnamed);
    }

    #[test]
    fn a_saved_table_keeps_what_it_saw_and_an_unsaved_page_is_changed_in_place() {
        let mut owners = Owners::default();
        owners.grow();
        owners.grow();
        owners.edit(3).id = 30;
        assert_eq!(owners.counts.len(), 2);

        let (mut first, mut second) = (Vec::new(), Vec::new());
        owners.save(&mut first);
        owners.save(&mut second);
        check_counts(&owners, &[&first, &second]);
        owners.edit(3).id = 31;
        owners.edit(4).id = 40;
        assert_eq!(owners.counts.len(), 3, "one page was copied, once");
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
            owners.counts.len(),
            3,
            "the page is the present table's alone again: no copy"
        );
        check_counts(&owners, &[]);
    }

    #[test]
    fn a_page_that_grew_after_the_save_is_gone_after_the_load_and_comes_back_clean() {
        let mut owners = Owners::default();
        let (mut table, mut longer) = (Vec::new(), Vec::new());
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
}
