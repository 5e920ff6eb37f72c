//! Segments that stay although nothing in them is live: captured graphs have their addresses.

use smallvec::SmallVec;

use super::{Backing, Pool};

/// The segments that one owner of pins keeps, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins(SmallVec<[u32; 2]>);

impl<B: Backing> Pool<B> {
    /// Keeps the segments in which these addresses lie: [`trim`](Pool::trim) passes them over until [`unpin`](Pool::unpin). Addresses outside of the pool
    /// are passed over. O(log segments) each.
    pub fn pin(&mut self, addresses: impl IntoIterator<Item = u64>) -> Pins {
        let mut pins = Pins::default();
        for address in addresses {
            if let Some(segment) = self.segments.holding(address)
                && !pins.0.contains(&segment.number)
            {
                pins.0.push(segment.number);
                *self.pinned.entry(segment.number).or_default() += 1;
            }
        }
        pins
    }

    /// Takes pins back. Segments that nobody else keeps may go again.
    pub fn unpin(&mut self, pins: &Pins) {
        for number in &pins.0 {
            if let Some(count) = self.pinned.get_mut(number) {
                *count -= 1;
                if *count == 0 {
                    self.pinned.remove(number);
                }
            }
        }
    }
}
