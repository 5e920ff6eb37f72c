//! Errors of a device: the call, the driver's code, and what happened in words.

use std::fmt;

use super::CaptureStatus;

/// The calls of [`Device`](super::Device), as errors and [`Faulty`](super::faulty::Faulty) name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // each is the method of the same name
pub enum Call {
    MemoryInfo,
    Reserve,
    Release,
    Map,
    Unmap,
    AllocPinned,
    CreateStream,
    Synchronize,
    SynchronizeDevice,
    Quiesce,
    Query,
    CreateEvent,
    CreateTimedEvent,
    Record,
    Wait,
    RecordExternal,
    WaitExternal,
    Elapsed,
    QueryEvent,
    PollEvent,
    SynchronizeEvent,
    Load,
    Launch,
    Copy,
    Fill,
    FillPattern,
    Write,
    Read,
    CopyFromPinned,
    CopyToPinned,
    Gather,
    BeginCapture,
    ExchangeCaptureMode,
    CaptureStatus,
    CaptureId,
    EndCapture,
    BeginIf,
    EndIf,
    GraphInfo,
    GraphDot,
    Instantiate,
    LaunchGraph,
    /// A driver call outside the trait, by the driver's name for it.
    Driver(&'static str),
}

/// The driver's codes that the runtime tells apart (`CUresult`), by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the driver's names
pub enum Code {
    InvalidValue,
    OutOfMemory,
    NotInitialized,
    NoDevice,
    InvalidContext,
    OperatingSystem,
    InvalidHandle,
    IllegalState,
    NotFound,
    NotReady,
    IllegalAddress,
    LaunchFailed,
    NotSupported,
    StreamCaptureUnsupported,
    StreamCaptureInvalidated,
    StreamCaptureMerge,
    StreamCaptureUnmatched,
    StreamCaptureUnjoined,
    StreamCaptureIsolation,
    StreamCaptureImplicit,
    CapturedEvent,
    StreamCaptureWrongThread,
    /// Any other, by number.
    Other(u32),
}

impl Code {
    /// The driver's number for it.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Code::InvalidValue => 1,
            Code::OutOfMemory => 2,
            Code::NotInitialized => 3,
            Code::NoDevice => 100,
            Code::InvalidContext => 201,
            Code::OperatingSystem => 304,
            Code::InvalidHandle => 400,
            Code::IllegalState => 401,
            Code::NotFound => 500,
            Code::NotReady => 600,
            Code::IllegalAddress => 700,
            Code::LaunchFailed => 719,
            Code::NotSupported => 801,
            Code::StreamCaptureUnsupported => 900,
            Code::StreamCaptureInvalidated => 901,
            Code::StreamCaptureMerge => 902,
            Code::StreamCaptureUnmatched => 903,
            Code::StreamCaptureUnjoined => 904,
            Code::StreamCaptureIsolation => 905,
            Code::StreamCaptureImplicit => 906,
            Code::CapturedEvent => 907,
            Code::StreamCaptureWrongThread => 908,
            Code::Other(n) => n,
        }
    }
}

/// A device call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceError {
    /// The call.
    pub call: Call,
    /// The driver's code.
    pub code: Code,
    /// What was asked, what holds, and what to do.
    pub detail: String,
    /// What work in flight did wrong, where that is the cause.
    pub fault: Option<Box<Fault>>,
    /// Which operation of a capture it was, from 1: counted are the launches, copies, fills, gathers, ifs, external records and external waits that the capture has been given
    /// through this device, on whichever of its streams, those of the ifs' bodies included (of a tree's recording, the gather of its copied inputs is the first), and every other
    /// call on those streams that was refused. `None` for a call that is none of a capture's.
    pub position: Option<u64>,
    /// For an error that comes of a capture's being broken: the refusal that broke it, if that went through this device.
    pub first: Option<Box<DeviceError>>,
}

impl DeviceError {
    /// An error without a fault, that is no operation of a capture.
    pub fn new(call: Call, code: Code, detail: impl Into<String>) -> Self {
        DeviceError {
            call,
            code,
            detail: detail.into(),
            fault: None,
            position: None,
            first: None,
        }
    }

    /// What went wrong first: the refusal that broke the capture, or else this error itself.
    #[must_use]
    pub fn root(&self) -> &DeviceError {
        self.first.as_deref().unwrap_or(self)
    }

    /// Whether the error says that a capture broke or was misused, whatever the call.
    #[must_use]
    pub fn is_capture(&self) -> bool {
        (900..=908).contains(&self.code.number()) || self.code == Code::IllegalState
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Bare(self).fmt(f)?;
        if let Some(position) = self.position {
            write!(f, " (operation {position} of the capture)")?;
        }
        match &self.first {
            Some(first) => write!(f, "; {}", Broke(first)),
            None => Ok(()),
        }
    }
}

impl std::error::Error for DeviceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.first.as_deref().map(|first| first as _)
    }
}

/// An error by itself, without its place in a capture.
pub(crate) struct Bare<'a>(pub(crate) &'a DeviceError);

impl fmt::Display for Bare<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceError {
            call, code, detail, ..
        } = self.0;
        write!(
            f,
            "{call:?} failed with {code:?} ({}): {detail}",
            code.number()
        )
    }
}

/// A refusal as what broke a capture.
pub(crate) struct Broke<'a>(pub(crate) &'a DeviceError);

impl fmt::Display for Broke<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bare = Bare(self.0);
        match self.0.position {
            Some(position) => write!(
                f,
                "the capture was broken by its operation {position}: {bare}"
            ),
            None => write!(f, "the capture was broken by another call: {bare}"),
        }
    }
}

/// What a piece of work did wrong while it ran: who, where, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kernel's name, or the operation's (`copy`, `fill`, `gather`).
    pub kernel: String,
    /// The first address that it may not touch, as `S<k>+<offset>` in bytes, where `S<k>` is the `k`-th range that was
    /// mapped (from 0); `R<k>+<offset>` in the `k`-th reservation where nothing is mapped, and the number itself outside of any.
    /// `H<k>+<offset>` in the `k`-th allocation of pinned host memory.
    /// For faults that are about no address: which argument, or what the panic said.
    pub address: String,
    /// How many bytes it wanted from there on.
    pub bytes: u64,
    /// Why it may not.
    pub reason: FaultReason,
}

/// Why a range may not be touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultReason {
    /// Nothing is mapped there.
    Unmapped,
    /// The range, or a part of it, has no owner: it was freed, or never allocated.
    NotLive,
    /// The kernel was called with other arguments than it takes.
    BadArgument,
    /// The kernel's body on the simulated device panicked.
    Panicked,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.reason {
            FaultReason::Unmapped => "nothing is mapped there",
            FaultReason::NotLive => "it has no owner (freed, or never allocated)",
            FaultReason::BadArgument => {
                return write!(
                    f,
                    "{}: {}: it does not fit the kernel",
                    self.kernel, self.address
                );
            }
            FaultReason::Panicked => {
                return write!(f, "{} panicked: {}", self.kernel, self.address);
            }
        };
        write!(
            f,
            "{} touched {} B at {}: {why}",
            self.kernel, self.bytes, self.address
        )
    }
}

/// Why an event has no time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventState {
    Untimed,
    Never,
    Captured,
    Pending,
}

impl EventState {
    /// The error of [`elapsed`](super::Device::elapsed) for its `start` or `end`.
    pub(crate) fn no_time(self, which: &str) -> DeviceError {
        let (code, why) = match self {
            EventState::Untimed => (
                Code::InvalidHandle,
                "was made without timing; make it with create_timed_event",
            ),
            EventState::Never => (Code::InvalidHandle, "was never recorded; record it first"),
            EventState::Captured => (
                Code::InvalidValue,
                "was last recorded in a capture, which runs nothing; record it there with record_external, and launch the graph",
            ),
            EventState::Pending => (
                Code::NotReady,
                "is not reached yet; wait for it with synchronize_event",
            ),
        };
        DeviceError::new(Call::Elapsed, code, format!("the {which} event {why}"))
    }
}

impl fmt::Display for CaptureStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CaptureStatus::None => "not capturing",
            CaptureStatus::Active => "capturing",
            CaptureStatus::Invalidated => "capturing (invalidated)",
        })
    }
}
