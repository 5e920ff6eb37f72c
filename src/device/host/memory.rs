//! Reserved ranges, what is mapped under them, and whether an access may be made.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::contents::Contents;
use super::liveness::Dead;
use super::mapping::Reservation;
use crate::device::{
    Call, Code, DeviceError, DevicePtr, Fault, FaultReason, Mark, MemoryInfo, Result,
};

/// One call of `map`: its bytes, and which of them have no owner.
struct Mapped {
    contents: Contents,
    dead: Dead,
    /// Its number in order of mapping, by which faults name it.
    number: u32,
    /// Whether it counts as device memory (host memory is mapped, too, but has no limit).
    counted: bool,
}

impl Mapped {
    fn len(&self) -> u64 {
        self.contents.len() as u64
    }
}

struct Reserved {
    range: Arc<Reservation>,
    /// Its number in order of reservation.
    number: u32,
}

/// All memory of a device. Addresses are those of this process.
pub(super) struct Memory {
    granularity: u64,
    limit: u64,
    mapped_bytes: u64,
    reserved: BTreeMap<u64, Reserved>,
    mapped: BTreeMap<u64, Mapped>,
    reservations: u32,
    mappings: u32,
}

impl Memory {
    pub(super) fn new(limit: u64, granularity: u64) -> Self {
        Memory {
            granularity,
            limit,
            mapped_bytes: 0,
            reserved: BTreeMap::new(),
            mapped: BTreeMap::new(),
            reservations: 0,
            mappings: 0,
        }
    }

    pub(super) fn info(&self) -> MemoryInfo {
        MemoryInfo {
            free: self.limit - self.mapped_bytes,
            total: self.limit,
        }
    }

    pub(super) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    pub(super) fn mapped_ranges(&self) -> usize {
        self.mapped.len()
    }

    pub(super) fn reserved_ranges(&self) -> usize {
        self.reserved.len()
    }

    /// How many ranges were ever mapped: the number the next one gets.
    pub(super) fn mappings(&self) -> u32 {
        self.mappings
    }

    // ---- reserve, map, unmap, release -----------------------------------------------------------

    pub(super) fn reserve(&mut self, call: Call, bytes: u64) -> Result<DevicePtr> {
        let granularity = self.granularity;
        if bytes == 0 || !bytes.is_multiple_of(granularity) {
            let detail = format!(
                "{bytes} B of addresses are asked for; ask for a multiple of {granularity} B, and not none"
            );
            return Err(DeviceError::new(call, Code::InvalidValue, detail));
        }
        let range = usize::try_from(bytes)
            .map_err(|_| std::io::ErrorKind::OutOfMemory.into())
            .and_then(|len| {
                Reservation::new(len, usize::try_from(granularity).unwrap_or(usize::MAX))
            })
            .map_err(|e| {
                DeviceError::new(
                    call,
                    Code::OutOfMemory,
                    format!("the host has no {bytes} B of addresses left: {e}"),
                )
            })?;
        let base = range.base();
        self.reserved.insert(
            base,
            Reserved {
                range: Arc::new(range),
                number: self.reservations,
            },
        );
        self.reservations += 1;
        Ok(DevicePtr(base))
    }

    pub(super) fn release(&mut self, call: Call, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let refused = |detail: String| Err(DeviceError::new(call, Code::InvalidValue, detail));
        match self.reserved.get(&ptr.0) {
            Some(found) if found.range.len() == bytes => {}
            Some(found) => {
                return refused(format!(
                    "{bytes} B are released of a reservation of {} B; release it whole",
                    found.range.len()
                ));
            }
            None => {
                return refused(
                    "no reservation begins at this address; release what `reserve` gave".into(),
                );
            }
        }
        let mapped = self.mapped.range(ptr.0..ptr.0 + bytes).count();
        if mapped > 0 {
            return refused(format!(
                "{mapped} mapped ranges lie in the reservation; unmap them first"
            ));
        }
        self.reserved.remove(&ptr.0);
        Ok(())
    }

    /// Maps fresh bytes, all of them live. `counted` bytes are device memory, and there is a limit to it.
    pub(super) fn map(
        &mut self,
        call: Call,
        ptr: DevicePtr,
        bytes: u64,
        counted: bool,
    ) -> Result<()> {
        let granularity = self.granularity;
        let refused = |detail: String| Err(DeviceError::new(call, Code::InvalidValue, detail));
        if bytes == 0 || !bytes.is_multiple_of(granularity) || !ptr.0.is_multiple_of(granularity) {
            return refused(format!(
                "{bytes} B are mapped at an address; both must be multiples of {granularity} B, and not zero"
            ));
        }
        let end = ptr.0.checked_add(bytes);
        let place = self
            .reserved
            .range(..=ptr.0)
            .next_back()
            .map(|(&base, found)| (base, found));
        let (base, range) = match (place, end) {
            (Some((base, found)), Some(end)) if end <= base + found.range.len() => {
                (base, found.range.clone())
            }
            _ => {
                return refused(format!(
                    "{bytes} B are mapped outside of any one reservation; reserve the addresses first"
                ));
            }
        };
        if self
            .mapped
            .range(..ptr.0 + bytes)
            .next_back()
            .is_some_and(|(&at, m)| at + m.len() > ptr.0)
        {
            return refused("a part of the range has memory already; unmap it first".into());
        }
        if counted && bytes > self.limit - self.mapped_bytes {
            let MemoryInfo { free, total } = self.info();
            return Err(DeviceError::new(
                call,
                Code::OutOfMemory,
                format!("{bytes} B are asked for; {free} B of {total} B are free"),
            ));
        }
        let chunk = range
            .map((ptr.0 - base) as usize, bytes as usize)
            .map_err(|e| {
                DeviceError::new(
                    call,
                    Code::OutOfMemory,
                    format!("the host cannot map {bytes} B: {e}"),
                )
            })?;
        let mapped = Mapped {
            contents: Contents::new(chunk),
            dead: Dead::default(),
            number: self.mappings,
            counted,
        };
        self.mapped.insert(ptr.0, mapped);
        self.mappings += 1;
        self.mapped_bytes += if counted { bytes } else { 0 };
        Ok(())
    }

    pub(super) fn unmap(&mut self, call: Call, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let refused = |detail: String| Err(DeviceError::new(call, Code::InvalidValue, detail));
        match self.mapped.get(&ptr.0) {
            Some(found) if found.len() == bytes => {
                self.mapped_bytes -= if found.counted { bytes } else { 0 };
                self.mapped.remove(&ptr.0);
                Ok(())
            }
            Some(found) => refused(format!(
                "{bytes} B are unmapped of a range of {} B; unmap what one `map` mapped",
                found.len()
            )),
            None => refused(
                "no mapped range begins at this address; unmap what one `map` mapped".into(),
            ),
        }
    }

    /// Whether a mapped range begins at the address, and how long it is.
    pub(super) fn mapped_at(&self, ptr: DevicePtr) -> Option<u64> {
        self.mapped.get(&ptr.0).map(Mapped::len)
    }

    // ---- marks ----------------------------------------------------------------------------------

    /// Makes a range live or dead, where it is mapped; ranges mapped as number `before` or later are left alone.
    pub(super) fn mark(&mut self, ptr: DevicePtr, bytes: u64, mark: Mark, before: u32) {
        let end = ptr.0.saturating_add(bytes);
        for (&base, mapped) in self.mapped.range_mut(..end).rev() {
            if base + mapped.len() <= ptr.0 {
                break;
            }
            if mapped.number >= before {
                continue;
            }
            let (start, stop) = (ptr.0.max(base) - base, end.min(base + mapped.len()) - base);
            match mark {
                Mark::Live => mapped.dead.revive(start, stop),
                Mark::Dead => {
                    mapped.dead.kill(start, stop);
                    mapped
                        .contents
                        .poison(start as usize, (stop - start) as usize);
                }
            }
        }
    }

    // ---- accesses ---------------------------------------------------------------------------------

    /// Whether `who` may touch a range: every byte of it is mapped and live. The fault names the first that is not.
    pub(super) fn check(&self, who: &str, ptr: DevicePtr, bytes: u64) -> Result<(), Fault> {
        let end = ptr.0.saturating_add(bytes);
        let mut at = ptr.0;
        let refuse = |at: u64, reason: FaultReason| {
            Err(Fault {
                kernel: who.to_owned(),
                address: self.name(DevicePtr(at)),
                bytes: ptr.0.saturating_add(bytes) - at,
                reason,
            })
        };
        while at < end {
            let Some((base, mapped)) = self.containing(at) else {
                return refuse(at, FaultReason::Unmapped);
            };
            let stop = end.min(base + mapped.len());
            if let Some(dead) = mapped.dead.first(at - base, stop - base) {
                return refuse(base + dead, FaultReason::NotLive);
            }
            at = stop;
        }
        Ok(())
    }

    /// Copies bytes out of memory that [`check`](Memory::check) has allowed.
    pub(super) fn read(&self, ptr: DevicePtr, dst: &mut [u8]) {
        let mut rest = dst;
        let mut at = ptr.0;
        while !rest.is_empty() {
            let Some((base, mapped)) = self.containing(at) else {
                return;
            };
            let offset = (at - base) as usize;
            let (part, after) = rest.split_at_mut(rest.len().min(mapped.contents.len() - offset));
            mapped.contents.read(offset, part);
            at += part.len() as u64;
            rest = after;
        }
    }

    /// Copies bytes into memory that [`check`](Memory::check) has allowed.
    pub(super) fn write(&mut self, ptr: DevicePtr, src: &[u8]) {
        self.each_part(ptr, src.len() as u64, |contents, offset, done, bytes| {
            contents.write(offset, &src[done..done + bytes]);
        });
    }

    /// Sets bytes of memory that [`check`](Memory::check) has allowed.
    pub(super) fn fill(&mut self, ptr: DevicePtr, bytes: u64, value: u8) {
        self.each_part(ptr, bytes, |contents, offset, _, bytes| {
            contents.fill(offset, bytes, value)
        });
    }

    fn each_part(
        &mut self,
        ptr: DevicePtr,
        bytes: u64,
        mut each: impl FnMut(&mut Contents, usize, usize, usize),
    ) {
        let mut done = 0;
        while done < bytes {
            let at = ptr.0 + done;
            let Some((&base, mapped)) = self.mapped.range_mut(..=at).next_back() else {
                return;
            };
            let Some(left) = (base + mapped.len())
                .checked_sub(at)
                .filter(|&left| left > 0)
            else {
                return;
            };
            let part = left.min(bytes - done);
            each(
                &mut mapped.contents,
                (at - base) as usize,
                done as usize,
                part as usize,
            );
            done += part;
        }
    }

    fn containing(&self, at: u64) -> Option<(u64, &Mapped)> {
        let (&base, mapped) = self.mapped.range(..=at).next_back()?;
        (at < base + mapped.len()).then_some((base, mapped))
    }

    /// An address by the range it lies in: `S<k>+<offset>` in the `k`-th mapped range, `R<k>+<offset>` in the `k`-th
    /// reservation where nothing is mapped, the number itself elsewhere.
    pub(super) fn name(&self, ptr: DevicePtr) -> String {
        if let Some((base, mapped)) = self.containing(ptr.0) {
            return format!("S{}+{}", mapped.number, ptr.0 - base);
        }
        match self.reserved.range(..=ptr.0).next_back() {
            Some((&base, found)) if ptr.0 < base + found.range.len() => {
                format!("R{}+{}", found.number, ptr.0 - base)
            }
            _ => format!("{ptr:?}"),
        }
    }
}
