//! The captures underway that were begun through the device: which streams take part in each, and its log.
//!
//! The driver is not asked who takes part: an event that is recorded on a stream of a capture carries the capture's number, and a stream that
//! waits for the event joins it. Which refusal broke a capture, the driver does not say either; the captures are asked for their status after a call
//! was refused, and only then.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, ThreadId};

use smallvec::SmallVec;

use super::inner::Inner;
use super::stream::{Handle, RawEvent};
use crate::device::log::Log;
use crate::device::{Call, CaptureMode, CaptureStatus, Code, DeviceError, Result};
use crate::sync::lock;

/// The captures, by the numbers of their streams. `O` is what the stream that began one is asked by.
pub(super) struct Captures<O> {
    underway: Vec<Underway<O>>,
    begun: u64,
}

/// A capture's number among those of its device, from 1; 0 stands for none.
pub(super) type Serial = u64;

struct Underway<O> {
    serial: Serial,
    origin: u32,
    handle: O,
    owner: ThreadId,
    mode: CaptureMode,
    /// The streams that take part, the origin among them.
    streams: SmallVec<[u32; 4]>,
    log: Log,
    /// The events that its nodes record or wait for.
    events: Vec<Arc<RawEvent>>,
}

impl<O> Default for Captures<O> {
    fn default() -> Self {
        Captures {
            underway: Vec::new(),
            begun: 0,
        }
    }
}

impl<O: Clone> Captures<O> {
    /// A capture has begun on a stream. An earlier one of the same stream was ended by others.
    pub(super) fn begin(&mut self, origin: u32, handle: O, mode: CaptureMode) {
        self.end(origin);
        self.begun += 1;
        self.underway.push(Underway {
            serial: self.begun,
            origin,
            handle,
            owner: thread::current().id(),
            mode,
            streams: SmallVec::from_slice(&[origin]),
            log: Log::default(),
            events: Vec::new(),
        });
    }

    /// The capture that was begun on a stream is over.
    pub(super) fn end(&mut self, origin: u32) {
        self.underway.retain(|capture| capture.origin != origin);
    }

    fn of(&mut self, stream: u32) -> Option<&mut Underway<O>> {
        self.underway
            .iter_mut()
            .find(|capture| capture.streams.contains(&stream))
    }

    fn numbered(&mut self, serial: Serial) -> Option<&mut Underway<O>> {
        self.underway
            .iter_mut()
            .find(|capture| capture.serial == serial)
    }

    /// A stream takes part in a capture from here on. One that it took part in before was ended by others.
    fn join(&mut self, stream: u32, serial: Serial) {
        let before = self.of(stream).map(|capture| capture.serial);
        if before == Some(serial) || self.numbered(serial).is_none() {
            return;
        }
        for capture in &mut self.underway {
            capture.streams.retain(|other| *other != stream);
            if capture.serial == serial {
                capture.streams.push(stream);
            }
        }
    }

    /// The sound captures that a refused call may have broken, which is none of their operations: those that mind what this
    /// thread does, and that of the event it was about.
    fn minding(&self, error: &DeviceError, event: Serial) -> Vec<(Serial, O)> {
        let here = thread::current().id();
        let all =
            error.call == Call::SynchronizeDevice || error.code == Code::StreamCaptureImplicit;
        let minds = |capture: &&Underway<O>| {
            let minds = match capture.mode {
                CaptureMode::Global => true,
                CaptureMode::ThreadLocal => capture.owner == here,
                CaptureMode::Relaxed => false,
            };
            (all || minds || capture.serial == event) && capture.log.first().is_none()
        };
        let minding = self.underway.iter().filter(minds);
        minding.map(|c| (c.serial, c.handle.clone())).collect()
    }
}

impl<O> Underway<O> {
    /// A call on one of its streams was refused. `broken`: the capture is broken now.
    fn refused(&mut self, error: DeviceError, broken: bool) -> DeviceError {
        let before = self.log.first().is_some();
        let Err(error) = self
            .log
            .answer::<Infallible>(error.call, before, Err(error));
        if broken && is_cause(&error) {
            self.log.break_by(&error);
        }
        error
    }
}

/// Whether an error may be what broke a capture: not one that says only that it is broken.
fn is_cause(error: &DeviceError) -> bool {
    error.code != Code::StreamCaptureInvalidated
}

impl Inner {
    /// Whether no capture is underway that was begun through this device. Whoever uses a stream of a capture has seen it begin, so the order of the
    /// load does not matter.
    fn none_begun(&self) -> bool {
        self.captures.load(Ordering::Relaxed) == 0
    }

    /// Takes note of what a call on a stream came to, where the stream captures. One load where none does. The context is current.
    pub(super) fn answer<T>(&self, call: Call, stream: &Handle, result: Result<T>) -> Result<T> {
        if self.none_begun() {
            return result;
        }
        match result {
            Ok(value) => match lock(&self.begun).of(stream.id) {
                Some(capture) => capture.log.answer(call, false, Ok(value)),
                None => Ok(value),
            },
            Err(error) => Err(self.refused(Some(stream), 0, error)),
        }
    }

    /// The capture that a stream takes part in.
    pub(super) fn capture_of(&self, stream: &Handle) -> Serial {
        if self.none_begun() {
            return 0;
        }
        lock(&self.begun).of(stream.id).map_or(0, |c| c.serial)
    }

    /// A stream has waited for an event of this capture.
    pub(super) fn join_capture(&self, stream: &Handle, serial: Serial) {
        if serial != 0 && !self.none_begun() {
            lock(&self.begun).join(stream.id, serial);
        }
    }

    /// Whether a capture of this number is underway, as far as is known.
    pub(super) fn is_underway(&self, serial: Serial) -> bool {
        serial != 0 && !self.none_begun() && lock(&self.begun).numbered(serial).is_some()
    }

    /// Keeps an event that a node of the capture on a stream names, for the graph; of a capture that others began, nobody says when its graph goes, so the
    /// event is never destroyed.
    pub(super) fn keep_event(&self, stream: &Handle, event: &Arc<RawEvent>) {
        match lock(&self.begun).of(stream.id) {
            Some(capture) => capture.events.push(event.clone()),
            None => event.leave(),
        }
    }

    /// The events that the nodes of the capture on a stream name.
    pub(super) fn take_events(&self, stream: &Handle) -> Vec<Arc<RawEvent>> {
        let mut captures = lock(&self.begun);
        let capture = captures.of(stream.id);
        capture.map_or_else(Vec::new, |c| std::mem::take(&mut c.events))
    }

    /// What broke the capture that a stream takes part in.
    pub(super) fn first_refusal(&self, stream: &Handle) -> Option<Box<DeviceError>> {
        if self.none_begun() {
            return None;
        }
        let mut captures = lock(&self.begun);
        captures.of(stream.id)?.log.first().cloned().map(Box::new)
    }

    /// A call was refused, on a stream or about an event of a capture, or neither. Completes its error, and remembers it for the captures that it broke.
    /// The context is current.
    #[cold]
    pub(super) fn refused(
        &self,
        stream: Option<&Handle>,
        event: Serial,
        error: DeviceError,
    ) -> DeviceError {
        if self.none_begun() {
            return error;
        }
        let mut error = error;
        let mut is_own = false;
        if let Some(stream) = stream
            && let Ok(status) = self.status(Call::CaptureStatus, stream)
            && status != CaptureStatus::None
            && let Some(own) = lock(&self.begun).of(stream.id)
        {
            is_own = true;
            error = own.refused(error, status == CaptureStatus::Invalidated);
        }
        if !error.is_capture() {
            return error;
        }
        if !is_cause(&error) {
            if !is_own && let Some(capture) = lock(&self.begun).numbered(event) {
                capture.log.explain(&mut error);
            }
            return error;
        }
        // To other captures it is no operation.
        let mut outside = error.clone();
        outside.position = None;
        let minding = lock(&self.begun).minding(&error, event);
        for (serial, origin) in minding {
            // Dropped outside of the lock: it may be the last of its stream.
            let Some(origin) = origin.upgrade() else {
                continue;
            };
            if self.status(Call::CaptureStatus, &origin) == Ok(CaptureStatus::Invalidated)
                && let Some(capture) = lock(&self.begun).numbered(serial)
            {
                capture.log.break_by(&outside);
            }
        }
        error
    }

    /// The same for a call that was refused before it came here; with `invalidate` it breaks the capture of its stream.
    pub(super) fn refuse(
        &self,
        stream: &Arc<Handle>,
        error: DeviceError,
        invalidate: bool,
    ) -> DeviceError {
        let call = Call::CaptureStatus;
        let breaks = invalidate && self.status(call, stream) == Ok(CaptureStatus::Active);
        if breaks {
            // A capturing stream that is waited for: refused, and the capture is invalid.
            let _ = self.wait_for(Call::Synchronize, stream);
        }
        let error = self.refused(Some(stream), 0, error);
        if breaks && let Some(capture) = lock(&self.begun).of(stream.id) {
            capture.log.break_by(&error);
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(call: Call, code: Code) -> DeviceError {
        DeviceError::new(call, code, "no")
    }

    fn names(minding: Vec<(Serial, &'static str)>) -> Vec<&'static str> {
        minding.into_iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn streams_join_by_events_and_leave_with_the_capture() {
        let mut captures = Captures::default();
        captures.begin(1, "a", CaptureMode::ThreadLocal);
        captures.begin(2, "b", CaptureMode::ThreadLocal);
        let serial = |captures: &mut Captures<_>, stream| captures.of(stream).map(|c| c.serial);
        let a = serial(&mut captures, 1).unwrap();
        captures.join(3, a);
        captures.join(3, a);
        captures.join(4, 99); // of a capture that is over
        let all = [1, 2, 3, 4].map(|stream| serial(&mut captures, stream));
        assert_eq!(all, [Some(1), Some(2), Some(1), None]);
        captures.join(3, 2);
        assert_eq!(serial(&mut captures, 3), Some(2));
        captures.join(3, a);
        captures.end(3); // does nothing: it began none
        captures.end(1);
        assert_eq!(
            [1, 2, 3].map(|s| serial(&mut captures, s)),
            [None, Some(2), None]
        );
        // Begun again after others have ended it.
        captures.begin(2, "b", CaptureMode::ThreadLocal);
        assert_eq!(serial(&mut captures, 2), Some(3));
        captures.join(3, 2);
        assert_eq!(serial(&mut captures, 3), None);
    }

    #[test]
    fn the_first_refusal_that_breaks_is_kept() {
        let mut captures = Captures::default();
        captures.begin(1, "a", CaptureMode::Relaxed);
        captures.join(2, 1);
        let mut refuse =
            |stream, error, broken| captures.of(stream).unwrap().refused(error, broken);
        let bad = refuse(1, error(Call::Launch, Code::InvalidValue), false);
        assert_eq!((bad.position, &bad.first), (Some(1), &None));
        let waited = refuse(2, error(Call::Query, Code::StreamCaptureUnsupported), true);
        assert_eq!((waited.position, &waited.first), (Some(2), &None));
        for (stream, position) in [(1, 3), (2, 4)] {
            let later = refuse(
                stream,
                error(Call::Fill, Code::StreamCaptureInvalidated),
                true,
            );
            assert_eq!((later.position, later.root()), (Some(position), &waited));
        }
        // Broken by something else: nothing is known of it.
        captures.begin(1, "a", CaptureMode::Relaxed);
        let mut refuse = |error| captures.of(1).unwrap().refused(error, true);
        for position in [1, 2] {
            let later = refuse(error(Call::Fill, Code::StreamCaptureInvalidated));
            assert_eq!((later.position, &later.first), (Some(position), &None));
        }
    }

    #[test]
    fn who_minds_a_call_from_outside() {
        let mut captures = Captures::default();
        captures.begin(1, "global", CaptureMode::Global);
        captures.begin(2, "mine", CaptureMode::ThreadLocal);
        captures.begin(3, "relaxed", CaptureMode::Relaxed);
        thread::scope(|scope| {
            let captures = &mut captures;
            scope.spawn(move || captures.begin(4, "others", CaptureMode::ThreadLocal));
        });
        let waited = error(Call::Synchronize, Code::StreamCaptureUnsupported);
        assert_eq!(names(captures.minding(&waited, 0)), ["global", "mine"]);
        assert_eq!(
            names(captures.minding(&waited, 3)),
            ["global", "mine", "relaxed"]
        );
        let all = error(Call::SynchronizeDevice, Code::StreamCaptureUnsupported);
        assert_eq!(captures.minding(&all, 0).len(), 4);
        // What is broken already was broken by something else.
        captures.numbered(1).unwrap().log.break_by(&waited);
        assert_eq!(names(captures.minding(&waited, 0)), ["mine"]);
    }
}
