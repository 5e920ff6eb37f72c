//! Toy backings, pool makers and short names for the pool's tests.
#![allow(dead_code)] // each test crate uses a part

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use cudagraph_trees::pool::{
    Adopt, Allocation, Backing, BackingError, Freed, Pool, PoolConfig, PoolSnapshot, SizeClass,
    StreamId, Tag,
};

pub const KIB: u64 = 1024;
pub const MIB: u64 = 1024 * KIB;

/// Nobody's tag.
pub const NOBODY: Tag = Tag(0);

/// Which call of a [`Toy`] is to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Reserve,
    Map,
    Unmap,
    Release,
}

/// A range of a [`Toy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub bytes: u64,
    pub mapped: bool,
}

/// What a [`Toy`] holds; shared, so that a test sees it while (and after) a pool has the toy.
#[derive(Default)]
pub struct ToyState {
    /// Reserved ranges.
    pub ranges: RefCell<BTreeMap<u64, Range>>,
    /// The call to fail next, once.
    pub fail: Cell<Option<Call>>,
    /// What `reserve` answers next, once, instead of a good address.
    pub answer: Cell<Option<u64>>,
    /// The next address.
    next: Cell<u64>,
    /// Whether addresses fall.
    falling: Cell<bool>,
}

impl ToyState {
    /// Bytes with memory behind them.
    pub fn mapped(&self) -> u64 {
        self.ranges
            .borrow()
            .values()
            .filter(|range| range.mapped)
            .map(|range| range.bytes)
            .sum()
    }

    /// Ranges reserved.
    pub fn reserved(&self) -> usize {
        self.ranges.borrow().len()
    }

    fn check(&self, call: Call) -> Result<(), BackingError> {
        if self.fail.get() == Some(call) {
            self.fail.set(None);
            return Err(format!("the toy's {call:?} was told to fail").into());
        }
        Ok(())
    }
}

/// Addresses with nothing behind them, strict about the order of calls.
#[derive(Clone)]
pub struct Toy(pub Rc<ToyState>);

impl Toy {
    pub fn rising() -> Self {
        let state = ToyState::default();
        state.next.set(1 << 32);
        Self(Rc::new(state))
    }

    pub fn falling() -> Self {
        let toy = Self::rising();
        toy.0.next.set(1 << 46);
        toy.0.falling.set(true);
        toy
    }
}

impl Backing for Toy {
    fn reserve(&mut self, bytes: u64) -> Result<u64, BackingError> {
        self.0.check(Call::Reserve)?;
        if let Some(address) = self.0.answer.take() {
            return Ok(address);
        }
        let next = self.0.next.get();
        // A gap between ranges, so that blocks of two segments are never neighbours.
        let address = if self.0.falling.get() {
            next - bytes - 4096
        } else {
            next
        };
        self.0.next.set(if self.0.falling.get() {
            address
        } else {
            next + bytes + 4096
        });
        self.0.ranges.borrow_mut().insert(
            address,
            Range {
                bytes,
                mapped: false,
            },
        );
        Ok(address)
    }

    fn map(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        self.0.check(Call::Map)?;
        let before = self.0.ranges.borrow_mut().insert(
            address,
            Range {
                bytes,
                mapped: true,
            },
        );
        assert_eq!(
            before,
            Some(Range {
                bytes,
                mapped: false
            }),
            "map of a range not reserved"
        );
        Ok(())
    }

    fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        self.0.check(Call::Unmap)?;
        let before = self.0.ranges.borrow_mut().insert(
            address,
            Range {
                bytes,
                mapped: false,
            },
        );
        assert_eq!(
            before,
            Some(Range {
                bytes,
                mapped: true
            }),
            "unmap of a range not mapped"
        );
        Ok(())
    }

    fn release(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        self.0.check(Call::Release)?;
        let before = self.0.ranges.borrow_mut().remove(&address);
        assert_eq!(
            before,
            Some(Range {
                bytes,
                mapped: false
            }),
            "release of a range not reserved"
        );
        Ok(())
    }
}

/// A pool of default sizes on a toy of rising addresses.
pub fn pool() -> Pool<Toy> {
    pool_of(PoolConfig::default()).0
}

/// A pool and what its toy holds.
pub fn pool_of(config: PoolConfig) -> (Pool<Toy>, Rc<ToyState>) {
    let toy = Toy::rising();
    let state = Rc::clone(&toy.0);
    (Pool::new(config, toy).expect("a good configuration"), state)
}

/// Allocates on a stream, for nobody.
pub fn alloc(pool: &mut Pool<Toy>, stream: u32, bytes: u64) -> Allocation {
    pool.alloc(StreamId(stream), bytes, NOBODY)
        .expect("the toy has memory")
}

/// Frees what must be live.
pub fn free(pool: &mut Pool<Toy>, allocation: Allocation) {
    let freed = pool.free(allocation).expect("a live block");
    let (address, bytes) = (allocation.address(), allocation.bytes());
    assert_eq!(freed, Freed::Block { address, bytes });
}

/// An adopter of `saved`.
pub fn adopt(saved: Allocation, tag: u64) -> Adopt {
    Adopt {
        saved,
        tag: Tag(tag),
    }
}

/// Segment number and offset of an allocation.
pub fn at(pool: &Pool<Toy>, allocation: Allocation) -> (u32, u64) {
    let (segment, offset) = pool
        .locate(allocation.address())
        .expect("an address of the pool");
    (segment.0, offset)
}

/// Live blocks and reserved bytes.
pub fn held(pool: &Pool<Toy>) -> (u64, u64) {
    let stats = pool.stats();
    (stats.live_blocks.current, stats.reserved_bytes.current)
}

/// The layout in a line.
pub fn layout(pool: &Pool<Toy>) -> String {
    pool.snapshot().layout()
}

/// The layout of the segments below a number.
pub fn layout_below(pool: &Pool<Toy>, number: u32) -> String {
    let segments = pool
        .snapshot()
        .segments
        .into_iter()
        .filter(|segment| segment.id.0 < number)
        .collect();
    PoolSnapshot { segments }.layout()
}

/// A small generator of random numbers (xorshift64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }

    /// Log-uniform between 1 and `2^(top + 1)`.
    pub fn bytes(&mut self, top: u64) -> u64 {
        let octave = self.below(top + 1);
        (1 << octave) + self.below(1 << octave)
    }
}

/// A written trace: what was done, where it landed, and the layouts at chosen points.
#[derive(Default)]
pub struct Trace {
    text: String,
    named: BTreeMap<&'static str, Allocation>,
}

impl Trace {
    /// Allocates `name` and asserts where: class and number of the segment, and offset, as in `L0+512`.
    pub fn alloc(
        &mut self,
        pool: &mut Pool<Toy>,
        name: &'static str,
        bytes: u64,
        stream: u32,
        place: &str,
    ) {
        let block = alloc(pool, stream, bytes);
        let (number, offset) = at(pool, block);
        let class = pool
            .snapshot()
            .segments
            .iter()
            .find(|segment| segment.id.0 == number)
            .map(|s| s.class);
        let class = if class == Some(SizeClass::Small) {
            'S'
        } else {
            'L'
        };
        assert_eq!(
            format!("{class}{number}+{offset}"),
            place,
            "alloc {name} {bytes} B on stream {stream}"
        );
        self.text += &format!("alloc {name:<4} {bytes:>9} B st{stream} -> {place}\n");
        self.named.insert(name, block);
    }

    pub fn free(&mut self, pool: &mut Pool<Toy>, name: &'static str) {
        free(pool, self.get(name));
        self.note(&format!("free  {name}"));
    }

    /// The allocation of a name.
    pub fn get(&self, name: &str) -> Allocation {
        self.named[name]
    }

    /// Asserts live blocks and reserved bytes, and writes the layout down.
    pub fn expect(&mut self, pool: &Pool<Toy>, live: u64, reserved: u64, layout: &str) {
        assert_eq!(
            (held(pool), self::layout(pool)),
            ((live, reserved), layout.to_owned()),
            "after\n{}",
            self.text
        );
        self.note(&format!("  live={live} reserved={reserved}\n  {layout}"));
    }

    pub fn note(&mut self, line: &str) {
        self.text += line;
        self.text.push('\n');
    }

    /// Compares the trace with the snapshot of a name.
    pub fn check(&self, name: &str) {
        let mut settings = insta::Settings::clone_current();
        settings.set_snapshot_path(concat!(env!("CARGO_MANIFEST_DIR"), "/snapshots"));
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.bind(|| insta::assert_snapshot!(name, self.text));
    }
}
