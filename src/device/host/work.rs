//! Pieces of work, and what running one does to the device's memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use super::context::{Args, Context, Undo};
use super::graph::Dag;
use super::handles::EventRef;
use super::memory::Memory;
use super::pinned::Pinned;
use crate::device::{
    Call, Code, DeviceError, DevicePtr, Fault, FaultReason, GatherSlot, HostFn, LaunchConfig, Mark,
    Pattern,
};

/// Host memory that a captured copy reads or writes at each launch, as the driver does with pageable memory.
pub type HostBuffer = Arc<Mutex<Vec<u8>>>;

/// A host function in stream order.
pub(super) type HostCall = Arc<dyn Fn() + Send + Sync>;

/// A loaded kernel.
pub(super) struct Body {
    pub(super) name: String,
    pub(super) run: HostFn,
}

/// One piece of work.
#[derive(Clone)]
pub(super) enum Work {
    Kernel {
        body: Arc<Body>,
        config: LaunchConfig,
        args: Args,
    },
    Copy {
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    },
    Fill {
        dst: DevicePtr,
        pattern: Pattern,
        bytes: u64,
    },
    Write {
        dst: DevicePtr,
        src: Arc<[u8]>,
    },
    /// Into the device's read-back buffer.
    Read {
        src: DevicePtr,
        bytes: usize,
    },
    /// Captured, its sources come with the launch.
    Gather {
        slots: Arc<[GatherSlot]>,
        sources: Arc<[DevicePtr]>,
    },
    /// Leaves ranges alone that were mapped as number `before` or later.
    Mark {
        ptr: DevicePtr,
        bytes: u64,
        mark: Mark,
        before: u32,
    },
    Call(HostCall),
    FromHost {
        dst: DevicePtr,
        src: HostBuffer,
    },
    ToHost {
        dst: HostBuffer,
        src: DevicePtr,
    },
    /// Only in graphs: runs the body if the byte is not 0. A plan has the body's nodes among its own.
    If {
        predicate: DevicePtr,
        body: Arc<Dag>,
    },
    /// Only in plans: what comes after an if, whether or not its body ran.
    EndIf,
    FromPinned {
        dst: DevicePtr,
        src: Arc<Pinned>,
        offset: u64,
        bytes: u64,
    },
    ToPinned {
        dst: Arc<Pinned>,
        offset: u64,
        src: DevicePtr,
        bytes: u64,
    },
    /// Only in graphs: waits for the event's record as it was before the launch.
    WaitEvent(Arc<EventRef>),
    /// Only in graphs: the event's record, from the launch on.
    RecordEvent(Arc<EventRef>),
    /// Memory of the driver's own pool, under an address that is reserved.
    Allocate {
        ptr: DevicePtr,
        bytes: u64,
    },
    Free {
        ptr: DevicePtr,
        release: bool,
    },
}

impl Work {
    /// The driver's name for a node of this kind; marks are no nodes.
    pub(super) fn node_kind(&self) -> Option<&'static str> {
        Some(match self {
            Work::Kernel { .. } | Work::Gather { .. } => "kernel",
            Work::Copy { .. }
            | Work::FromHost { .. }
            | Work::ToHost { .. }
            | Work::FromPinned { .. }
            | Work::ToPinned { .. }
            | Work::Write { .. }
            | Work::Read { .. } => "memcpy",
            Work::Fill { .. } => "memset",
            Work::Call(_) => "host",
            Work::WaitEvent(_) => "wait_event",
            Work::RecordEvent(_) => "record_event",
            Work::Allocate { .. } => "mem_alloc",
            Work::Free { .. } => "mem_free",
            Work::If { .. } => "conditional",
            Work::Mark { .. } | Work::EndIf => return None,
        })
    }
}

/// Why the device stopped.
#[derive(Clone, Debug)]
pub(super) struct Broken {
    pub(super) code: Code,
    pub(super) detail: String,
    pub(super) fault: Option<Box<Fault>>,
}

impl Broken {
    /// The error that a call gets which runs into it.
    pub(super) fn error(&self, call: Call) -> DeviceError {
        DeviceError {
            fault: self.fault.clone(),
            ..DeviceError::new(call, self.code, self.detail.clone())
        }
    }
}

impl From<Fault> for Broken {
    fn from(fault: Fault) -> Self {
        let code = match fault.reason {
            FaultReason::Unmapped | FaultReason::NotLive => Code::IllegalAddress,
            FaultReason::BadArgument | FaultReason::Panicked => Code::LaunchFailed,
        };
        Broken {
            code,
            detail: fault.to_string(),
            fault: Some(Box::new(fault)),
        }
    }
}

/// What work acts on.
pub(super) struct World {
    pub(super) memory: Memory,
    /// What the last `read` fetched.
    pub(super) read_back: Vec<u8>,
    /// Kernel bodies that ran to their end.
    pub(super) kernels_run: u64,
    /// The device's clock: pieces of work begun, but for marks and events, which are none.
    pub(super) clock: u64,
    scratch: Vec<u8>,
    undo: Undo,
}

/// Copies go through a buffer of this size.
const PIECE: u64 = 1 << 20;

impl World {
    pub(super) fn new(memory: Memory) -> Self {
        World {
            memory,
            read_back: Vec::new(),
            kernels_run: 0,
            clock: 0,
            scratch: Vec::new(),
            undo: Undo::default(),
        }
    }

    /// Runs a piece of work: wholly, or (where it faults) not at all. `sources` are those of a captured gather.
    pub(super) fn run(&mut self, work: &Work, sources: Option<&[DevicePtr]>) -> Result<(), Broken> {
        self.clock += u64::from(!matches!(
            work,
            Work::Mark { .. } | Work::WaitEvent(_) | Work::RecordEvent(_)
        ));
        match work {
            Work::Kernel { body, config, args } => return self.run_kernel(body, *config, args),
            Work::Copy { dst, src, bytes } => {
                self.copy_all("copy", [(*dst, *src, *bytes)].into_iter())?
            }
            Work::Fill {
                dst,
                pattern,
                bytes,
            } => self.fill(*dst, *pattern, *bytes)?,
            Work::Write { dst, src } => self.write("write", *dst, src)?,
            Work::Read { src, bytes } => {
                self.memory.check("read", *src, *bytes as u64)?;
                self.read_back.resize(*bytes, 0);
                self.memory.read(*src, &mut self.read_back);
            }
            Work::Gather {
                slots,
                sources: own,
            } => {
                let sources = sources.unwrap_or(own);
                self.copy_all(
                    "gather",
                    slots
                        .iter()
                        .zip(sources)
                        .map(|(slot, &src)| (slot.dst, src, slot.bytes)),
                )?;
            }
            Work::Mark {
                ptr,
                bytes,
                mark,
                before,
            } => self.memory.mark(*ptr, *bytes, *mark, *before),
            Work::Call(call) => {
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| call())) {
                    return Err(panicked("host function", &*panic));
                }
            }
            Work::FromHost { dst, src } => {
                let src = src.lock().unwrap_or_else(PoisonError::into_inner);
                self.write("copy from the host", *dst, &src)?;
            }
            Work::ToHost { dst, src } => {
                let mut dst = dst.lock().unwrap_or_else(PoisonError::into_inner);
                self.memory
                    .check("copy to the host", *src, dst.len() as u64)?;
                self.memory.read(*src, &mut dst);
            }
            Work::FromPinned {
                dst,
                src,
                offset,
                bytes,
            } => self.copy_from_pinned(*dst, (src, *offset, *bytes))?,
            Work::ToPinned {
                dst,
                offset,
                src,
                bytes,
            } => self.copy_to_pinned((dst, *offset, *bytes), *src)?,
            // Where they stand is what they do: the scheduler sees to it.
            Work::WaitEvent(_) | Work::RecordEvent(_) | Work::If { .. } | Work::EndIf => {}
            Work::Allocate { ptr, bytes } => {
                if self.memory.mapped_at(*ptr).is_none() {
                    self.memory
                        .map(Call::Driver("cuMemAllocAsync"), *ptr, *bytes, true)
                        .map_err(stopped)?;
                }
            }
            Work::Free { ptr, release } => {
                if let Some(bytes) = self.memory.mapped_at(*ptr) {
                    let call = Call::Driver("cuMemFreeAsync");
                    self.memory.unmap(call, *ptr, bytes).map_err(stopped)?;
                    if *release {
                        self.memory.release(call, *ptr, bytes).map_err(stopped)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the predicate of an if holds now.
    pub(super) fn holds(&self, predicate: DevicePtr) -> Result<bool, Broken> {
        let mut byte = [0];
        self.memory.check("if", predicate, 1)?;
        self.memory.read(predicate, &mut byte);
        Ok(byte != [0])
    }

    fn run_kernel(&mut self, body: &Body, config: LaunchConfig, args: &Args) -> Result<(), Broken> {
        let World { memory, undo, .. } = self;
        let mut context = Context {
            name: &body.name,
            config,
            args,
            memory,
            undo,
            refused: None,
        };
        let ended = catch_unwind(AssertUnwindSafe(|| (body.run)(&mut context)));
        let ended = ended.map(|result| result.and(context.refused.map_or(Ok(()), Err)));
        let broken = match ended {
            Ok(Ok(())) => {
                self.undo.clear();
                self.kernels_run += 1;
                return Ok(());
            }
            Ok(Err(fault)) => Broken::from(fault),
            Err(panic) => panicked(&body.name, &*panic),
        };
        self.undo.restore(&mut self.memory);
        Err(broken)
    }

    fn write(&mut self, who: &str, dst: DevicePtr, src: &[u8]) -> Result<(), Fault> {
        self.memory.check(who, dst, src.len() as u64)?;
        self.memory.write(dst, src);
        Ok(())
    }

    fn fill(&mut self, dst: DevicePtr, pattern: Pattern, bytes: u64) -> Result<(), Fault> {
        self.memory.check("fill", dst, bytes)?;
        if let Pattern::B8(value) = pattern {
            self.memory.fill(dst, bytes, value);
            return Ok(());
        }
        let value = &pattern.to_bytes()[..pattern.bytes() as usize];
        self.scratch.clear();
        // A piece is a whole number of values.
        let part = PIECE.min(bytes);
        while (self.scratch.len() as u64) < part {
            self.scratch.extend_from_slice(value);
        }
        let mut done = 0;
        while done < bytes {
            let part = part.min(bytes - done);
            self.memory
                .write(dst.offset(done), &self.scratch[..part as usize]);
            done += part;
        }
        Ok(())
    }

    /// Makes all copies, or none: everything is checked before the first byte moves.
    fn copy_all(
        &mut self,
        who: &str,
        copies: impl Iterator<Item = (DevicePtr, DevicePtr, u64)> + Clone,
    ) -> Result<(), Fault> {
        for (dst, src, bytes) in copies.clone() {
            self.memory.check(who, src, bytes)?;
            self.memory.check(who, dst, bytes)?;
        }
        for (dst, src, bytes) in copies {
            let mut done = 0;
            while done < bytes && dst != src {
                let part = PIECE.min(bytes - done);
                self.scratch.resize(part as usize, 0);
                self.memory.read(src.offset(done), &mut self.scratch);
                self.memory.write(dst.offset(done), &self.scratch);
                done += part;
            }
        }
        Ok(())
    }
}

fn stopped(error: DeviceError) -> Broken {
    Broken {
        code: error.code,
        detail: error.to_string(),
        fault: None,
    }
}

fn panicked(who: &str, panic: &(dyn std::any::Any + Send)) -> Broken {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = text.unwrap_or("a panic without a message");
    let fault = Fault {
        kernel: who.to_owned(),
        address: text.to_owned(),
        bytes: 0,
        reason: FaultReason::Panicked,
    };
    Broken::from(fault)
}
