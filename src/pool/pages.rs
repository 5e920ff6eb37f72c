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

/// One block, live or free: a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Record {
    /// Who it was handed out to; 0 if it is free, or the record unused.
    pub id: u64,
    /// Where the block begins.
    pub address: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Live blocks: the owner.
    pub tag: u64,
    /// Live blocks: the bytes asked for.
    pub requested: u64,
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

impl Record {
    /// An unused record.
    pub const NONE: Record = Record {
        id: 0,
        address: 0,
        size: 0,
        tag: 0,
        requested: 0,
        segment: 0,
        list: 0,
        prev: NIL,
        next: NIL,
        below: [NIL; 2],
    };
}

/// The ids of a page's records once more, together: two states are compared by them.
pub(super) type Ids = [u64; PAGE];
/// What a slot beyond the end of a table holds.
pub(super) const NO_IDS: Ids = [0; PAGE];

/// Where a slot lies: the entry of the table, and the place on the page.
#[inline]
pub(super) fn place(slot: u32) -> (usize, usize) {
    (slot as usize / PAGE, slot as usize % PAGE)
}

/// All pages, and the present table.
#[derive(Default)]
pub(super) struct Records {
    /// The arena: [`PAGE`] records for each page.
    records: Vec<Record>,
    /// For each page the ids of its records.
    ids: Vec<Ids>,
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

    /// The record of a slot.
    #[inline]
    pub fn get(&self, slot: u32) -> &Record {
        let (entry, at) = place(slot);
        &self.records[(self.table[entry] & !OWNED) as usize * PAGE + at]
    }

    /// The record of a slot that may never have been made.
    #[inline]
    pub fn find(&self, slot: u32) -> Option<&Record> {
        let (entry, at) = place(slot);
        let page = self.table.get(entry)? & !OWNED;
        self.records.get(page as usize * PAGE + at)
    }

    /// The page of an entry, which is the present table's alone from now on.
    #[inline]
    fn page_mut(&mut self, entry: usize) -> usize {
        match self.table[entry] {
            page if page & OWNED != 0 => (page & !OWNED) as usize,
            _ => self.own(entry) as usize,
        }
    }

    /// The record of a slot, to be changed.
    #[inline]
    pub fn edit(&mut self, slot: u32) -> &mut Record {
        let (entry, at) = place(slot);
        let page = self.page_mut(entry);
        &mut self.records[page * PAGE + at]
    }

    /// The record of a slot, to be changed, with another id.
    #[inline]
    pub fn edit_id(&mut self, slot: u32, id: u64) -> &mut Record {
        let (entry, at) = place(slot);
        let page = self.page_mut(entry);
        self.ids[page][at] = id;
        let record = &mut self.records[page * PAGE + at];
        record.id = id;
        record
    }

    /// Adds a page of unused records to the present table.
    pub fn grow(&mut self) {
        let page = if let Some(page) = self.vacant.pop() {
            let at = page as usize;
            self.records[at * PAGE..(at + 1) * PAGE].fill(Record::NONE);
            self.ids[at] = NO_IDS;
            self.counts[at] = 1;
            page
        } else {
            self.records.resize(self.records.len() + PAGE, Record::NONE);
            self.ids.push(NO_IDS);
            self.counts.push(1);
            self.counts.len() as u32 - 1
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
        let records = at * PAGE..(at + 1) * PAGE;
        if let Some(copy) = self.vacant.pop() {
            self.records.copy_within(records, copy as usize * PAGE);
            self.ids.copy_within(at..at + 1, copy as usize);
            self.counts[copy as usize] = 1;
            return copy;
        }
        self.records.extend_from_within(records);
        self.ids.extend_from_within(at..at + 1);
        self.counts.push(1);
        self.counts.len() as u32 - 1
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

    /// The ids and records of an entry of a saved table.
    #[inline]
    pub fn saved_page(&self, table: &[u32], entry: usize) -> Option<(&Ids, &[Record])> {
        table.get(entry).map(|&page| self.page(page as usize))
    }

    /// The ids and records of an entry of the present table.
    #[inline]
    pub fn present_page(&self, entry: usize) -> Option<(&Ids, &[Record])> {
        self.table
            .get(entry)
            .map(|&page| self.page((page & !OWNED) as usize))
    }

    /// The ids and records of a page.
    #[inline]
    fn page(&self, page: usize) -> (&Ids, &[Record]) {
        (
            &self.ids[page],
            &self.records[page * PAGE..(page + 1) * PAGE],
        )
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
        let mut counts = vec![0; records.counts.len()];
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
        records.edit_id(3, 30);
        assert_eq!(records.counts.len(), 2);

        let (mut first, mut second) = (Vec::new(), Vec::new());
        records.save(&mut first);
        records.save(&mut second);
        check_counts(&records, &[&first, &second]);
        records.edit_id(3, 31);
        records.edit_id(4, 40);
        assert_eq!(records.counts.len(), 3, "one page was copied, once");
        check_counts(&records, &[&first, &second]);
        assert_eq!(records.differing(&first).collect::<Vec<_>>(), [0]);

        records.load(&first);
        check_counts(&records, &[&first, &second]);
        assert_eq!((records.get(3).id, records.get(4).id), (30, 0));
        assert_eq!(records.differing(&first).count(), 0);

        records.forget(&mut first);
        records.forget(&mut second);
        check_counts(&records, &[]);
        records.edit_id(3, 32);
        assert_eq!(
            records.counts.len(),
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
        records.edit_id(0, 1).tag = 2;
        records.load(&table);
        assert_eq!((records.capacity(), records.find(0).is_none()), (0, true));
        records.grow();
        assert_eq!((records.get(0).id, records.get(0).tag), (0, 0));
        check_counts(&records, &[&table]);
    }
}
