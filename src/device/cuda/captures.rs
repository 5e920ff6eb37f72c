//! The captures underway that were begun through the device: which streams take part in each, and its log.
//!
//! The driver is not asked who takes part: an event that is recorded on a stream of a capture carries the capture's number, and a stream that
//! waits for the event joins it. Which refusal broke a capture, the driver does not say either; the captures are asked for their status after a call
//! was refused, and only then.

use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

use smallvec::SmallVec;

use super::inner::Inner;
use super::stream::{Handle, RawEvent};
use crate::device::log::Log;
use crate::device::{Call, CaptureMode, CaptureStatus, Code, DeviceError, GraphInfo, Result};
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
    /// Of an if's body, the capture that it belongs to in the end: that has the log.
    root: Option<Serial>,
    /// What the bodies of its ifs hold.
    bodies: GraphInfo,
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
        self.open(origin, handle, mode, None);
    }

    /// The body of an if that was begun on `stream` is captured on another.
    pub(super) fn begin_body(&mut self, origin: u32, handle: O, mode: CaptureMode, stream: u32) {
        let root = self.root_of(stream);
        self.open(origin, handle, mode, root);
    }

    fn open(&mut self, origin: u32, handle: O, mode: CaptureMode, root: Option<Serial>) {
        self.end(origin);
        // It does not capture, so whatever it took part in is over.
        for capture in &mut self.underway {
            capture.streams.retain(|other| *other != origin);
        }
        self.begun += 1;
        self.underway.push(Underway {
            serial: self.begun,
            origin,
            handle,
            owner: thread::current().id(),
            mode,
            streams: SmallVec::from_slice(&[origin]),
            log: Log::default(),
            root,
            bodies: GraphInfo::default(),
            events: Vec::new(),
        });
    }

    /// The body that is captured on a stream goes on behind an inner if: events of before are not of what follows.
    pub(super) fn renew(&mut self, origin: u32) {
        self.begun += 1;
        let serial = self.begun;
        if let Some(capture) = self.underway.iter_mut().find(|c| c.origin == origin) {
            capture.serial = serial;
            capture.streams = SmallVec::from_slice(&[origin]);
        }
    }

    /// How strictly calls beside the capture of a stream are judged.
    pub(super) fn mode(&mut self, stream: u32) -> Option<CaptureMode> {
        self.of(stream).map(|capture| capture.mode)
    }

    /// The stream that the capture of this one was begun on.
    pub(super) fn origin(&mut self, stream: u32) -> Option<u32> {
        self.of(stream).map(|capture| capture.origin)
    }

    /// The streams that take part in the capture of this one, as far as that is known.
    pub(super) fn streams(&mut self, stream: u32) -> SmallVec<[u32; 4]> {
        let capture = self.of(stream);
        capture.map_or_else(SmallVec::new, |capture| capture.streams.clone())
    }

    /// Whether a stream takes part in a body, as far as that is known.
    pub(super) fn is_in_body(&mut self, stream: u32) -> bool {
        self.of(stream)
            .is_some_and(|capture| capture.root.is_some())
    }

    /// Notes what the body of an if holds that was begun on a stream.
    pub(super) fn add_body(&mut self, stream: u32, info: GraphInfo) {
        if let Some(capture) = self.of(stream) {
            capture.bodies += info;
        }
    }

    /// What the bodies hold of the capture that was begun on a stream.
    pub(super) fn bodies(&mut self, stream: u32) -> GraphInfo {
        self.of(stream)
            .map(|capture| capture.bodies)
            .unwrap_or_default()
    }

    fn root_of(&mut self, stream: u32) -> Option<Serial> {
        self.of(stream)
            .map(|capture| capture.root.unwrap_or(capture.serial))
    }

    /// The log for the calls on a stream.
    fn log(&mut self, stream: u32) -> Option<&mut Log> {
        let root = self.root_of(stream)?;
        self.numbered(root).map(|capture| &mut capture.log)
    }

    /// The log of a capture, or of the one that a body belongs to.
    fn log_numbered(&mut self, serial: Serial) -> Option<&mut Log> {
        let root = self.numbered(serial)?.root.unwrap_or(serial);
        self.numbered(root).map(|capture| &mut capture.log)
    }

    /// Where the capture of a stream and its bodies were begun, where it has any.
    fn family(&mut self, stream: u32) -> Vec<O> {
        let Some(root) = self.root_of(stream) else {
            return Vec::new();
        };
        let all = self.underway.iter();
        let family = all.filter(|c| c.serial == root || c.root == Some(root));
        let family: Vec<O> = family.map(|c| c.handle.clone()).collect();
        if family.len() > 1 { family } else { Vec::new() }
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
        let broken = |capture: &Underway<O>| {
            let root = capture.root.unwrap_or(capture.serial);
            let mut all = self.underway.iter();
            all.find(|c| c.serial == root)
                .is_some_and(|c| c.log.first().is_some())
        };
        let minds = |capture: &&Underway<O>| {
            let minds = match capture.mode {
                CaptureMode::Global => true,
                CaptureMode::ThreadLocal => capture.owner == here,
                CaptureMode::Relaxed => false,
            };
            // A body is broken with the capture it belongs to.
            let minds = (all || minds) && capture.root.is_none();
            (minds || capture.serial == event) && !broken(capture)
        };
        let minding = self.underway.iter().filter(minds);
        minding.map(|c| (c.serial, c.handle.clone())).collect()
    }
}

/// A call on a stream of the log's capture was refused. `broken`: the capture is broken now.
fn note_refusal(log: &mut Log, error: DeviceError, broken: bool) -> DeviceError {
    let before = log.first().is_some();
    let Err(error) = log.answer::<Infallible>(error.call, before, Err(error));
    if broken && is_cause(&error) {
        log.break_by(&error);
    }
    error
}

/// Whether an error may be what broke a capture: not one that says only that it is broken.
fn is_cause(error: &DeviceError) -> bool {
    error.code != Code::StreamCaptureInvalidated
}

impl Inner {
    /// Whether no capture is underway that was begun through this device. Whoever uses a stream of a capture has seen it begin, so the order of the
    /// load does not matter.
    pub(super) fn none_begun(&self) -> bool {
        self.captures.load(Ordering::Relaxed) == 0
    }

    /// Takes note of what a call on a stream came to, where the stream captures. One load where none does. The context is current.
    pub(super) fn answer<T>(&self, call: Call, stream: &Handle, result: Result<T>) -> Result<T> {
        if self.none_begun() {
            return result;
        }
        match result {
            Ok(value) => match lock(&self.begun).log(stream.id) {
                Some(log) => log.answer(call, false, Ok(value)),
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
        captures.log(stream.id)?.first().cloned().map(Box::new)
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
        {
            let broken = status == CaptureStatus::Invalidated;
            if let Some(own) = lock(&self.begun).log(stream.id) {
                is_own = true;
                error = note_refusal(own, error, broken);
            }
            if broken {
                self.break_family(stream);
            }
        }
        if !error.is_capture() {
            return error;
        }
        if !is_cause(&error) {
            if !is_own && let Some(log) = lock(&self.begun).log_numbered(event) {
                log.explain(&mut error);
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
            if self.status(Call::CaptureStatus, &origin) != Ok(CaptureStatus::Invalidated) {
                continue;
            }
            if let Some(log) = lock(&self.begun).log_numbered(serial) {
                log.break_by(&outside);
            }
            self.break_family(&origin);
        }
        error
    }

    /// Breaks the capture that a stream takes part in, and no other. The context is current.
    pub(super) fn break_capture(&self, stream: &Handle) {
        let call = Call::CaptureStatus;
        if self.status(call, stream) == Ok(CaptureStatus::Active)
            && let Ok(_relaxed) = self.relax(call)
        {
            // A capturing stream that is waited for: refused, and the capture is invalid.
            let _ = self.wait_for(Call::Synchronize, stream);
        }
    }

    /// A capture and the bodies of its ifs are captures of their own to the driver: where one is broken, all are.
    pub(super) fn break_family(&self, stream: &Handle) {
        let family = lock(&self.begun).family(stream.id);
        for origin in family.iter().filter_map(Weak::upgrade) {
            self.break_capture(&origin);
        }
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
            self.break_capture(stream);
        }
        let error = match error.position {
            // It has been answered with that.
            Some(_) => error,
            None => self.refused(Some(stream), 0, error),
        };
        if breaks && let Some(log) = lock(&self.begun).log(stream.id) {
            log.break_by(&error);
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
            |stream, error, broken| note_refusal(captures.log(stream).unwrap(), error, broken);
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
        let mut refuse = |error| note_refusal(captures.log(1).unwrap(), error, true);
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

    #[test]
    fn bodies_have_the_log_of_their_capture() {
        let mut captures = Captures::default();
        captures.begin(1, "whole", CaptureMode::ThreadLocal);
        captures.begin_body(2, "body", CaptureMode::ThreadLocal, 1);
        captures.begin_body(3, "inner", CaptureMode::ThreadLocal, 2);
        captures.join(4, 2); // forked off the body
        let in_body = [1, 2, 3, 4].map(|stream| captures.is_in_body(stream));
        assert_eq!(in_body, [false, true, true, true]);
        assert_eq!(captures.family(4), ["whole", "body", "inner"]);
        let mut refuse =
            |stream, error, broken| note_refusal(captures.log(stream).unwrap(), error, broken);
        let bad = refuse(3, error(Call::Launch, Code::InvalidValue), false);
        assert_eq!(bad.position, Some(1));
        let waited = refuse(4, error(Call::Query, Code::StreamCaptureUnsupported), true);
        assert_eq!(waited.position, Some(2));
        let later = refuse(1, error(Call::Fill, Code::StreamCaptureInvalidated), true);
        assert_eq!((later.position, later.root()), (Some(3), &waited));
        // Behind an inner if, events of before are not the body's any more.
        captures.end(3);
        captures.renew(2);
        captures.join(5, 2);
        assert!(captures.of(4).is_none() && captures.of(5).is_none());
        assert_eq!(captures.log(2).unwrap().first(), Some(&waited));
        captures.end(2);
        assert!(captures.family(1).is_empty());

        // Asked about an event of a body, the body is what may be broken.
        captures.begin(1, "whole", CaptureMode::Relaxed);
        captures.begin_body(2, "body", CaptureMode::Relaxed, 1);
        let serial = captures.of(2).unwrap().serial;
        let asked = error(Call::QueryEvent, Code::CapturedEvent);
        assert_eq!(names(captures.minding(&asked, serial)), ["body"]);
        captures.log_numbered(serial).unwrap().break_by(&asked);
        assert!(captures.minding(&asked, serial).is_empty());
        captures.add_body(
            1,
            GraphInfo {
                kernels: 2,
                ..GraphInfo::default()
            },
        );
        assert_eq!(captures.bodies(1).kernels, 2);
        assert_eq!(captures.bodies(9), GraphInfo::default());
        // Where the capture itself is others', the body has a log of its own.
        captures.begin_body(7, "foreign", CaptureMode::Relaxed, 6);
        assert_eq!(
            (captures.is_in_body(7), captures.log(7).is_some()),
            (false, true)
        );
    }
}
