//! What a kernel's host body sees while it runs.

use smallvec::SmallVec;

use super::memory::Memory;
use crate::device::{DevicePtr, Fault, FaultReason, KernelArg, KernelContext, LaunchConfig};

/// Arguments of a launch, by value.
pub(super) type Args = SmallVec<[KernelArg; 8]>;

/// The old bytes of everything one kernel wrote, so that a kernel that faults halfway leaves no effect.
#[derive(Default)]
pub(super) struct Undo {
    writes: Vec<(DevicePtr, usize)>,
    bytes: Vec<u8>,
}

impl Undo {
    /// Forgets what was kept: the kernel came to its end.
    pub(super) fn clear(&mut self) {
        self.writes.clear();
        self.bytes.clear();
    }

    fn keep(&mut self, memory: &Memory, ptr: DevicePtr, len: usize) {
        let start = self.bytes.len();
        self.bytes.resize(start + len, 0);
        memory.read(ptr, &mut self.bytes[start..]);
        self.writes.push((ptr, len));
    }

    /// Brings the old bytes back, last write first.
    pub(super) fn restore(&mut self, memory: &mut Memory) {
        while let Some((ptr, len)) = self.writes.pop() {
            let start = self.bytes.len() - len;
            memory.write(ptr, &self.bytes[start..]);
            self.bytes.truncate(start);
        }
    }
}

/// One running kernel.
pub(super) struct Context<'a> {
    pub(super) name: &'a str,
    pub(super) config: LaunchConfig,
    pub(super) args: &'a [KernelArg],
    pub(super) memory: &'a mut Memory,
    pub(super) undo: &'a mut Undo,
    /// The first access that was refused: a body that goes on regardless has failed all the same.
    pub(super) refused: Option<Fault>,
}

impl Context<'_> {
    fn allow(&mut self, ptr: DevicePtr, bytes: usize) -> Result<(), Fault> {
        self.memory
            .check(self.name, ptr, bytes as u64)
            .inspect_err(|fault| {
                self.refused.get_or_insert_with(|| fault.clone());
            })
    }
}

impl KernelContext for Context<'_> {
    fn config(&self) -> LaunchConfig {
        self.config
    }

    fn arg(&self, index: usize) -> Result<KernelArg, Fault> {
        self.args.get(index).copied().ok_or_else(|| Fault {
            kernel: self.name.to_owned(),
            address: format!("argument {index} of {}", self.args.len()),
            bytes: 0,
            reason: FaultReason::BadArgument,
        })
    }

    fn read(&mut self, src: DevicePtr, dst: &mut [u8]) -> Result<(), Fault> {
        self.allow(src, dst.len())?;
        self.memory.read(src, dst);
        Ok(())
    }

    fn write(&mut self, dst: DevicePtr, src: &[u8]) -> Result<(), Fault> {
        self.allow(dst, src.len())?;
        self.undo.keep(self.memory, dst, src.len());
        self.memory.write(dst, src);
        Ok(())
    }
}
