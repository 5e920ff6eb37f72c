//! Block records in copy-on-write pages. Touched by `index`, `books`, `checkpoint` and `restore` alone.
//!
//! A *table* names the page of each run of [`PAGE`] slots. The pool's present table lies in [`Records`],
//! those of checkpoints beside it; all pages lie in one arena, each with a count of the tables that name
//! it. A table entry of the present table carries [`OWNED`] if no other table names its page: then it is
//! changed in place. Any other page is copied first, or, if its count turns out to be one by now, marked.

/// Records on one page.
pub(super) const PAGE: usize = 64;
/// No record.
pub(super) const NIL: u32 = u32::MAX;
/// Set in an entry of the present table whose page no other table names.
const OWNED: u32 = 1 << 31;

/// One block, live or free; the columns `ids`, `tags` and `requested` of its page belong to it too.
#[derive(Clone, Copy)]
pub(super) struct Record {
    /// Where the block begins.
    pub address: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Its segment's number.
    pub segment: u32,
    /// The free lists its segment belongs to.
    pub list: u32,
    /// The block before it in its segment.
    pub prev: u32,
    /// The block after it in its segment; in an unused record, the next unused one.
    pub next: u32,
    /// Free blocks: the smaller ones below it in its bin's treap.
    pub left: u32,
    /// Free blocks: the larger ones below it in its bin's treap.
    pub right: u32,
}

impl Record {
    const NONE: Record = Record {
        address: 0,
        size: 0,
        segment: 0,
        list: 0,
        prev: NIL,
        next: NIL,
        left: NIL,
        right: NIL,
    };
}

/// The ids of a page's live blocks; 0 where a record is free or unused.
pub(super) type Ids = [u64; PAGE];
/// What a slot beyond the end of a table holds.
pub(super) const NO_IDS: Ids = [0; PAGE];

/// A run of records, by column.
#[derive(Clone, Copy)]
pub(super) struct Page {
    /// Ids, first and together: two states are compared by them.
    pub ids: Ids,
    /// Owners of live blocks.
    pub tags: [u64; PAGE],
    /// Bytes asked for, of live blocks.
    pub requested: [u64; PAGE],
    /// The blocks.
    pub records: [Record; PAGE],
}

impl Page {
    const EMPTY: Page = Page {
        ids: NO_IDS,
        tags: [0; PAGE],
        requested: [0; PAGE],
        records: [Record::NONE; PAGE],
    };
}

/// Where a slot lies: the entry of the table, and the place on the page.
#[inline]
pub(super) fn place(slot: u32) -> (usize, usize) {
    (slot as usize / PAGE, slot as usize % PAGE)
}

/// All pages, and the present table.
#[derive(Default)]
pub(super) struct Records {
    /// The arena.
    pages: Vec<Page>,
    /// For each page the number of tables that name it.
    counts: Vec<u32>,
    /// Pages that no table names.
    vacant: Vec<u32>,
    /// The present table.
    table: Vec<u32>,
}

impl Records {
    /// Slots the present table has room for.
    pub fn capacity(&self) -> usize {
        self.table.len() * PAGE
    }

    /// The page of a slot in the present table.
    #[inline]
    pub fn page(&self, slot: u32) -> (&Page, usize) {
        let (entry, at) = place(slot);
        (&self.pages[(self.table[entry] & !OWNED) as usize], at)
    }

    /// The page of a slot in the present table, to be changed.
    #[inline]
    fn page_mut(&mut self, slot: u32) -> (&mut Page, usize) {
        let (entry, at) = place(slot);
        let page = match self.table[entry] {
            page if page & OWNED != 0 => page & !OWNED,
            _ => self.own(entry),
        };
        (&mut self.pages[page as usize], at)
    }

    /// The record of a slot.
    #[inline]
    pub fn get(&self, slot: u32) -> &Record {
        let (page, at) = self.page(slot);
        &page.records[at]
    }

    /// The record of a slot, to be changed.
    #[inline]
    pub fn edit(&mut self, slot: u32) -> &mut Record {
        let (page, at) = self.page_mut(slot);
        &mut page.records[at]
    }

    /// The id of a slot's block, 0 if it is not live.
    #[inline]
    pub fn id(&self, slot: u32) -> u64 {
        let (page, at) = self.page(slot);
        page.ids[at]
    }

    /// As [`Records::id`], for a slot that may never have been made.
    #[inline]
    pub fn id_or_none(&self, slot: u32) -> u64 {
        let (entry, at) = place(slot);
        self.table
            .get(entry)
            .map_or(0, |page| self.pages[(page & !OWNED) as usize].ids[at])
    }

    /// Owner and requested bytes of a slot's live block.
    pub fn owner(&self, slot: u32) -> (u64, u64) {
        let (page, at) = self.page(slot);
        (page.tags[at], page.requested[at])
    }

    /// Makes a slot's block live.
    #[inline]
    pub fn set_live(&mut self, slot: u32, id: u64, tag: u64, requested: u64) {
        let (page, at) = self.page_mut(slot);
        page.ids[at] = id;
        page.tags[at] = tag;
        page.requested[at] = requested;
    }

    /// Makes a slot's block not live; returns the bytes that had been asked for.
    #[inline]
    pub fn set_free(&mut self, slot: u32) -> u64 {
        let (page, at) = self.page_mut(slot);
        page.ids[at] = 0;
        page.requested[at]
    }

    /// Gives a slot's live block another id.
    pub fn set_id(&mut self, slot: u32, id: u64) {
        let (page, at) = self.page_mut(slot);
        page.ids[at] = id;
    }

    /// Gives a slot's live block another owner.
    pub fn set_tag(&mut self, slot: u32, tag: u64) {
        let (page, at) = self.page_mut(slot);
        page.tags[at] = tag;
    }

    /// Adds a page of unused records to the present table.
    pub fn grow(&mut self) {
        let page = if let Some(page) = self.vacant.pop() {
            self.pages[page as usize] = Page::EMPTY;
            self.counts[page as usize] = 1;
            page
        } else {
            self.pages.push(Page::EMPTY);
            self.counts.push(1);
            self.pages.len() as u32 - 1
        };
        self.table.push(page | OWNED);
    }

    /// Makes the page of an entry the present table's alone: by a copy, unless it already is.
    #[cold]
    fn own(&mut self, entry: usize) -> u32 {
        let shared = self.table[entry];
        let page = if self.counts[shared as usize] == 1 {
            shared
        } else {
            self.counts[shared as usize] -= 1;
            self.copy_of(shared)
        };
        self.table[entry] = page | OWNED;
        page
    }

    /// A page that no table names, with the contents of another; counted once.
    fn copy_of(&mut self, page: u32) -> u32 {
        let at = page as usize;
        if let Some(copy) = self.vacant.pop() {
            self.pages.copy_within(at..at + 1, copy as usize);
            self.counts[copy as usize] = 1;
            return copy;
        }
        self.pages.extend_from_within(at..at + 1);
        self.counts.push(1);
        self.pages.len() as u32 - 1
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
    pub fn save(&mut self, table: &mut Vec<u32>) {
        for entry in &mut self.table {
            *entry &= !OWNED;
            self.counts[*entry as usize] += 1;
        }
        table.clone_from(&self.table);
    }

    /// Makes a saved table the present one. O(pages); no page is touched.
    pub fn load(&mut self, table: &[u32]) {
        for &page in table {
            self.counts[page as usize] += 1;
        }
        let mut present = std::mem::take(&mut self.table);
        for entry in present.drain(..) {
            self.release(entry & !OWNED);
        }
        present.extend_from_slice(table);
        self.table = present;
    }

    /// Lets go of a saved table.
    pub fn forget(&mut self, table: &mut Vec<u32>) {
        for page in table.drain(..) {
            self.release(page);
        }
    }

    /// The page of an entry of a saved table.
    #[inline]
    pub fn saved_page(&self, table: &[u32], entry: usize) -> Option<&Page> {
        table.get(entry).map(|&page| &self.pages[page as usize])
    }

    /// The page of an entry of the present table.
    #[inline]
    pub fn present_page(&self, entry: usize) -> Option<&Page> {
        self.table
            .get(entry)
            .map(|&page| &self.pages[(page & !OWNED) as usize])
    }

    /// Entries in which the present table and a saved one name different pages.
    pub fn differing<'a>(&'a self, table: &'a [u32]) -> impl Iterator<Item = usize> + 'a {
        // An owned entry is never equal to a saved one: its page would be shared.
        (0..self.table.len().max(table.len()))
            .filter(|&entry| self.table.get(entry) != table.get(entry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every page is counted once for each table that names it, and vacant if none does.
    fn check_counts(records: &Records, saved: &[&Vec<u32>]) {
        let mut counts = vec![0; records.pages.len()];
        for entry in &records.table {
            counts[(entry & !OWNED) as usize] += 1;
        }
        for page in saved.iter().copied().flatten() {
            counts[*page as usize] += 1;
        }
        assert_eq!(records.counts, counts);
        let mut vacant = records.vacant.clone();
        vacant.sort_unstable();
        let unnamed: Vec<u32> = (0..counts.len() as u32)
            .filter(|page| counts[*page as usize] == 0)
            .collect();
        assert_eq!(vacant, unnamed);
    }

    #[test]
    fn a_saved_table_keeps_what_it_saw_and_an_unsaved_page_is_changed_in_place() {
        let mut records = Records::default();
        records.grow();
        records.grow();
        records.set_live(3, 30, 0, 0);
        assert_eq!(records.pages.len(), 2);

        let (mut first, mut second) = (Vec::new(), Vec::new());
        records.save(&mut first);
        records.save(&mut second);
        check_counts(&records, &[&first, &second]);
        records.set_live(3, 31, 0, 0);
        records.set_live(4, 40, 0, 0);
        assert_eq!(records.pages.len(), 3, "one page was copied, once");
        check_counts(&records, &[&first, &second]);
        assert_eq!(records.differing(&first).collect::<Vec<_>>(), [0]);

        records.load(&first);
        check_counts(&records, &[&first, &second]);
        assert_eq!((records.id(3), records.id(4)), (30, 0));
        assert_eq!(records.differing(&first).count(), 0);

        records.forget(&mut first);
        records.forget(&mut second);
        check_counts(&records, &[]);
        records.set_live(3, 32, 0, 0);
        assert_eq!(
            records.pages.len(),
            3,
            "the page is the present table's alone again: no copy"
        );
        check_counts(&records, &[]);
    }

    #[test]
    fn a_page_that_grew_after_the_save_is_gone_after_the_load_and_comes_back_clean() {
        let mut records = Records::default();
        let mut table = Vec::new();
        records.save(&mut table);
        records.grow();
        records.set_live(0, 1, 2, 3);
        records.load(&table);
        assert_eq!((records.capacity(), records.id_or_none(0)), (0, 0));
        records.grow();
        assert_eq!((records.id(0), records.owner(0)), (0, (0, 0)));
        check_counts(&records, &[&table]);
    }
}
