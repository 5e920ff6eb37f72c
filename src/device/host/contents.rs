//! The bytes of one mapped range, where what was never written costs nothing.
//!
//! A range is cut into blocks of 64 KiB, each of which is *present* (its bytes lie in memory) or stands for
//! one byte repeated: [`FRESH`] where nothing was written since it was mapped, [`POISON`] where all of it died.
//! So mapping 20 GiB or killing them touches no page, and yet no undefined byte reads as a plausible zero.

use super::mapping::Chunk;

/// What never written memory reads as.
pub(super) const FRESH: u8 = 0xCD;
/// What memory that died reads as, once it is live again and until it is written.
pub(super) const POISON: u8 = 0xDB;

const BLOCK: usize = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Fresh,
    Poisoned,
    Present,
}

impl Block {
    /// The byte a block that is not present stands for.
    fn pattern(self) -> Option<u8> {
        match self {
            Block::Fresh => Some(FRESH),
            Block::Poisoned => Some(POISON),
            Block::Present => None,
        }
    }
}

pub(super) struct Contents {
    chunk: Chunk,
    blocks: Vec<Block>,
}

impl Contents {
    pub(super) fn new(chunk: Chunk) -> Self {
        let blocks = vec![Block::Fresh; chunk.len().div_ceil(BLOCK)];
        Contents { chunk, blocks }
    }

    pub(super) fn len(&self) -> usize {
        self.chunk.len()
    }

    /// Copies bytes out; the range lies inside.
    pub(super) fn read(&self, offset: usize, dst: &mut [u8]) {
        let mut done = 0;
        for (index, start, end) in pieces(offset, dst.len()) {
            let part = &mut dst[done..done + (end - start)];
            match self.blocks[index].pattern() {
                Some(byte) => part.fill(byte),
                None => self.chunk.read(start, part),
            }
            done += end - start;
        }
    }

    /// Copies bytes in; the range lies inside.
    pub(super) fn write(&mut self, offset: usize, src: &[u8]) {
        let mut done = 0;
        for (index, start, end) in pieces(offset, src.len()) {
            self.prepare(index, start, end);
            self.chunk.write(start, &src[done..done + (end - start)]);
            done += end - start;
        }
    }

    /// Sets each byte of a range that lies inside.
    pub(super) fn fill(&mut self, offset: usize, bytes: usize, value: u8) {
        for (index, start, end) in pieces(offset, bytes) {
            self.prepare(index, start, end);
            self.chunk.fill(start, end - start, value);
        }
    }

    /// Overwrites what died with [`POISON`].
    pub(super) fn poison(&mut self, offset: usize, bytes: usize) {
        for (index, start, end) in pieces(offset, bytes) {
            if (start, end) == self.bounds(index) {
                self.blocks[index] = Block::Poisoned;
            } else if self.blocks[index] != Block::Poisoned {
                self.prepare(index, start, end);
                self.chunk.fill(start, end - start, POISON);
            }
        }
    }

    fn bounds(&self, index: usize) -> (usize, usize) {
        (index * BLOCK, ((index + 1) * BLOCK).min(self.chunk.len()))
    }

    /// Makes a block present before `start..end` of it is written: its other bytes get what it stood for.
    fn prepare(&mut self, index: usize, start: usize, end: usize) {
        if let Some(byte) = self.blocks[index].pattern() {
            let (low, high) = self.bounds(index);
            self.chunk.fill(low, start - low, byte);
            self.chunk.fill(end, high - end, byte);
            self.blocks[index] = Block::Present;
        }
    }
}

/// The parts of a range that lie in one block each: the block, and the part's bounds.
fn pieces(offset: usize, bytes: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let end = offset + bytes;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (index, start) = (at / BLOCK, at);
        at = ((index + 1) * BLOCK).min(end);
        Some((index, start, at))
    })
}

#[cfg(test)]
mod tests {
    use super::super::mapping::Reservation;
    use super::*;
    use std::sync::Arc;

    #[test]
    fn undefined_bytes_are_patterns_and_neighbours_are_kept() {
        let bytes = 3 * BLOCK - 4096;
        let range = Arc::new(Reservation::new(bytes, BLOCK).unwrap());
        let mut contents = Contents::new(range.map(0, bytes).unwrap());
        let at = |contents: &Contents, offset: usize| {
            let mut byte = [0];
            contents.read(offset, &mut byte);
            byte[0]
        };
        contents.write(BLOCK - 2, &[1, 2, 3, 4]);
        let around: Vec<u8> = (BLOCK - 3..BLOCK + 3).map(|i| at(&contents, i)).collect();
        assert_eq!(around, [FRESH, 1, 2, 3, 4, FRESH]);
        contents.poison(BLOCK - 1, bytes - BLOCK + 1);
        let around: Vec<u8> = (BLOCK - 3..BLOCK + 1).map(|i| at(&contents, i)).collect();
        assert_eq!(around, [FRESH, 1, POISON, POISON]);
        assert_eq!(at(&contents, bytes - 1), POISON);
        contents.fill(2 * BLOCK, 1, 7);
        assert_eq!(
            (at(&contents, 2 * BLOCK), at(&contents, 2 * BLOCK + 1)),
            (7, POISON)
        );
    }
}
