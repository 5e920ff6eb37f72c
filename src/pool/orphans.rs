//! Ids of blocks that a restore took out of the books, each good for one more free. Asked only about ids
//! that are not in the books.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};

/// A set of ids. They are the pool's own running numbers: a multiplication spreads them well enough.
#[derive(Default)]
pub(super) struct Orphans(HashSet<u64, BuildHasherDefault<Spread>>);

impl Orphans {
    /// Adds an id.
    pub fn insert(&mut self, id: u64) {
        self.0.insert(id);
    }

    /// Removes an id; whether it was there.
    pub fn remove(&mut self, id: u64) -> bool {
        self.0.remove(&id)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// Multiplies by the golden ratio.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        self.0 = (self.0 ^ id)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(26);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_id_is_good_once() {
        let mut orphans = Orphans::default();
        (1..1000).for_each(|id| orphans.insert(id));
        assert_eq!(orphans.len(), 999);
        assert!((1..1000).all(|id| orphans.remove(id)));
        assert!(!(1..1000).any(|id| orphans.remove(id)));
    }
}
