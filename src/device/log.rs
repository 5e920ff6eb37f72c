//! What a capture has been given, and what first went wrong with it.
//!
//! A driver says "invalidated" of everything that follows the refusal which broke a capture, its end included. The log of a capture
//! lets each of those errors name that refusal: which operation of the capture it was, and why. The bodies of a capture's ifs are captures of their own to a
//! driver; they have the log of the capture they belong to.

use super::{Call, DeviceError, Result};

/// One capture's log.
#[derive(Debug, Default)]
pub(super) struct Log {
    /// How many operations the capture has been given, refused ones included.
    given: u64,
    /// The refusal that broke it.
    first: Option<Box<DeviceError>>,
}

/// What a call on a capturing stream is to its capture.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// An operation: work that becomes a node.
    Work,
    /// An operation only where it is refused: it would have had a place among the others.
    Refused,
    /// About the capture as a whole, so without a place in it.
    Whole,
}

fn kind(call: Call) -> Kind {
    match call {
        Call::Launch
        | Call::Copy
        | Call::Fill
        | Call::FillPattern
        | Call::CopyFromPinned
        | Call::CopyToPinned
        | Call::Gather
        | Call::BeginIf
        | Call::RecordExternal
        | Call::WaitExternal
        | Call::Driver(_) => Kind::Work,
        Call::BeginCapture | Call::CaptureStatus | Call::CaptureId | Call::EndCapture => {
            Kind::Whole
        }
        _ => Kind::Refused,
    }
}

impl Log {
    /// The refusal that broke the capture, if it went through the device.
    pub(super) fn first(&self) -> Option<&DeviceError> {
        self.first.as_deref()
    }

    /// The position of the next operation.
    pub(super) fn next(&self) -> u64 {
        self.given + 1
    }

    /// Notes what broke the capture. What came before counts, not what comes later.
    pub(super) fn break_by(&mut self, error: &DeviceError) {
        if self.first.is_none() {
            self.first = Some(Box::new(error.clone()));
        }
    }

    /// Counts a call on a stream of the capture, and completes its error: with its position, and, where the capture was broken `before`,
    /// with what broke it.
    pub(super) fn answer<T>(&mut self, call: Call, before: bool, result: Result<T>) -> Result<T> {
        let kind = kind(call);
        if kind == Kind::Work || (kind == Kind::Refused && result.is_err()) {
            self.given += 1;
        }
        result.map_err(|mut error| {
            if kind != Kind::Whole {
                error.position = Some(self.given);
            }
            if before && error.is_capture() {
                self.explain(&mut error);
            }
            error
        })
    }

    /// Completes an error that comes of the capture's being broken.
    pub(super) fn explain(&self, error: &mut DeviceError) {
        if error.first.is_none() {
            error.first.clone_from(&self.first);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Code;

    fn refused(call: Call, code: Code) -> Result<()> {
        Err(DeviceError::new(call, code, "no"))
    }

    /// A call's position, and the position and call of what it names as the first.
    fn told(result: Result<()>) -> (Option<u64>, Option<(Option<u64>, Call)>) {
        let error = result.unwrap_err();
        let first = error.first.map(|first| (first.position, first.call));
        (error.position, first)
    }

    #[test]
    fn operations_are_counted_and_the_first_refusal_is_kept() {
        let mut log = Log::default();
        assert_eq!(log.answer(Call::Launch, false, Ok(())), Ok(()));
        // Neither is work; refused, it has a place.
        assert_eq!(log.answer(Call::Record, false, Ok(())), Ok(()));
        let read = refused(Call::Read, Code::StreamCaptureUnsupported);
        assert_eq!(told(log.answer(Call::Read, false, read)), (Some(2), None));
        let begun = refused(Call::BeginCapture, Code::IllegalState);
        assert_eq!(
            told(log.answer(Call::BeginCapture, false, begun)),
            (None, None)
        );
        assert_eq!((log.next(), log.first()), (3, None));

        let broke = refused(Call::Wait, Code::StreamCaptureIsolation);
        let broke = log.answer(Call::Wait, false, broke).unwrap_err();
        log.break_by(&broke);
        assert_eq!((broke.position, &broke.first), (Some(3), &None));
        log.break_by(&DeviceError::new(Call::Fill, Code::InvalidValue, "later"));
        assert_eq!(log.first(), Some(&broke));

        let echo = refused(Call::Fill, Code::StreamCaptureInvalidated);
        let first = Some((Some(3), Call::Wait));
        assert_eq!(told(log.answer(Call::Fill, true, echo)), (Some(4), first));
        // It stands for itself.
        let own = refused(Call::Launch, Code::InvalidValue);
        assert_eq!(told(log.answer(Call::Launch, true, own)), (Some(5), None));
    }
}
