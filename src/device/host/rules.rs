//! Which calls are refused while a capture is underway, with which code, and which refusal breaks the capture.
//!
//! The rules are those that the driver of an H200 gave (driver 580, CUDA 13.0), code for code. Refusals that were not
//! measured follow CUDA's documentation.

use std::convert::Infallible;

use super::capture::{Capture, Joined};
use super::state::State;
use super::stream::{CaptureKey, Frontier, Record, StreamKey};
use crate::device::{Call, CaptureMode, Code, DeviceError, Result};
use crate::sync::thread;

impl State {
    /// Breaks a capture by a call that is none of its operations, and says so.
    pub(super) fn invalidate(
        &mut self,
        capture: CaptureKey,
        call: Call,
        code: Code,
        why: &str,
    ) -> DeviceError {
        self.break_capture(capture, None, call, code, why)
    }

    /// The same by a call on one of its own streams.
    pub(super) fn invalidate_own(
        &mut self,
        capture: CaptureKey,
        call: Call,
        code: Code,
        why: &str,
    ) -> DeviceError {
        let position = self.captures.get(self.root(capture)).map(|c| c.log.next());
        self.break_capture(capture, position, call, code, why)
    }

    fn break_capture(
        &mut self,
        capture: CaptureKey,
        position: Option<u64>,
        call: Call,
        code: Code,
        why: &str,
    ) -> DeviceError {
        let mut error = DeviceError::new(call, code, why);
        let root = self.root(capture);
        let Some(underway) = self.captures.get(root) else {
            return error;
        };
        error.position = position;
        error.detail = format!(
            "{why}; the capture on {} is invalid now and must be ended",
            self.stream_name(underway.origin)
        );
        let log = &mut self.captures[root].log;
        log.explain(&mut error);
        log.break_by(&error);
        error
    }

    /// The capture whose log a capture has: of an if's body, the one that it belongs to in the end.
    pub(super) fn root(&self, capture: CaptureKey) -> CaptureKey {
        let body = self.captures.get(capture).and_then(|c| c.body.as_ref());
        body.map_or(capture, |body| body.root)
    }

    pub(super) fn is_broken(&self, capture: CaptureKey) -> bool {
        self.captures
            .get(self.root(capture))
            .is_none_or(|c| c.log.first().is_some())
    }

    /// The capture in whose log a stream's calls are noted, and whether it is broken.
    fn taking_part(&self, key: StreamKey) -> Option<(CaptureKey, bool)> {
        let joined = self.streams[key].joined.as_ref()?;
        Some((self.root(joined.capture), self.is_broken(joined.capture)))
    }

    /// Makes a call on a stream, and takes note of it where the stream captures.
    pub(super) fn on<T>(
        &mut self,
        call: Call,
        key: StreamKey,
        f: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let before = self.taking_part(key);
        let result = f(self);
        match before.and_then(|(capture, broken)| Some((self.captures.get_mut(capture)?, broken))) {
            Some((capture, broken)) => capture.log.answer(call, broken, result),
            None => result,
        }
    }

    /// A call on a stream that was refused before it came here.
    pub(super) fn refuse(
        &mut self,
        key: StreamKey,
        error: DeviceError,
        invalidate: bool,
    ) -> DeviceError {
        let taking_part = self.taking_part(key);
        let error = match error.position {
            // It has been answered with that.
            Some(_) => error,
            None => {
                let Err(error) = self.on(error.call, key, |_| Err::<Infallible, _>(error));
                error
            }
        };
        if invalidate && let Some((capture, false)) = taking_part {
            self.captures[capture].log.break_by(&error);
        }
        error
    }

    /// The capture a stream takes part in, refused where it is broken.
    pub(super) fn valid_capture(&self, call: Call, key: StreamKey) -> Result<Option<CaptureKey>> {
        let Some(joined) = &self.streams[key].joined else {
            return Ok(None);
        };
        if !self.is_broken(joined.capture) {
            return Ok(Some(joined.capture));
        }
        let detail = format!(
            "{} takes part in a capture that is broken; end it",
            self.stream_name(key)
        );
        Err(DeviceError::new(
            call,
            Code::StreamCaptureInvalidated,
            detail,
        ))
    }

    /// Work for a stream: the capture it goes into, or none.
    pub(super) fn admit(&mut self, call: Call, key: StreamKey) -> Result<Option<CaptureKey>> {
        let capture = self.valid_capture(call, key)?;
        match capture {
            Some(capture) => self.refuse_beside_body(call, key, capture)?,
            None if !self.captures.is_empty() => self.refuse_implicit(call, key)?,
            None => {}
        }
        Ok(capture)
    }

    /// The default stream orders itself with blocking streams, so it may not be used while one of them captures.
    pub(super) fn refuse_implicit(&mut self, call: Call, key: StreamKey) -> Result<()> {
        if key == self.default_stream
            && let Some(capture) = self.blocking_capture()
        {
            let why = "the default stream would wait for a blocking stream that captures";
            return Err(self.invalidate(capture, call, Code::StreamCaptureImplicit, why));
        }
        Ok(())
    }

    pub(super) fn blocking_capture(&self) -> Option<CaptureKey> {
        let blocking = |c: &Capture| c.streams.iter().any(|&s| self.streams[s].blocking);
        self.captures
            .iter()
            .find(|(_, c)| blocking(c))
            .map(|(key, _)| key)
    }

    /// A call that a capturing stream does not take, and that breaks its capture.
    pub(super) fn refuse_capturing(&mut self, call: Call, key: StreamKey, why: &str) -> Result<()> {
        match self.admit(call, key)? {
            None => Ok(()),
            Some(capture) => {
                Err(self.invalidate_own(capture, call, Code::StreamCaptureUnsupported, why))
            }
        }
    }

    /// A copy from or to pageable memory: refused on a capturing stream, whose capture is left alone.
    pub(super) fn refuse_pageable(&mut self, call: Call, key: StreamKey) -> Result<()> {
        if self.streams[key].joined.is_none() {
            return self.refuse_implicit(call, key);
        }
        let detail = format!(
            "{} captures, and a graph cannot keep pageable host memory alive; copy before or after the capture, or from and to a pinned buffer",
            self.stream_name(key)
        );
        Err(DeviceError::new(
            call,
            Code::StreamCaptureUnsupported,
            detail,
        ))
    }

    /// A call that may not be made while a capture is underway that minds it: one that this thread began in another mode than
    /// the relaxed, or any thread in the global mode. A thread that exchanged its mode minds less.
    pub(super) fn refuse_unsafe(&mut self, call: Call) -> Result<()> {
        if self.captures.is_empty() {
            return Ok(());
        }
        let here = thread::current().id();
        let mode = self
            .thread_modes
            .get(&here)
            .copied()
            .unwrap_or(CaptureMode::Global);
        let minds = |c: &Capture| match (mode, c.mode) {
            (CaptureMode::Relaxed, _) | (_, CaptureMode::Relaxed) => false,
            (CaptureMode::Global, CaptureMode::Global) => true,
            _ => c.owner == here,
        };
        // A body is broken with the capture it belongs to.
        let minds = |c: &Capture| c.body.is_none() && minds(c);
        let minding: Vec<CaptureKey> = self
            .captures
            .iter()
            .filter(|(_, c)| minds(c))
            .map(|(key, _)| key)
            .collect();
        let why = "the call is not allowed while a capture is underway in this mode";
        let refused = minding
            .into_iter()
            .map(|c| self.invalidate(c, call, Code::StreamCaptureUnsupported, why));
        refused.last().map_or(Ok(()), Err)
    }

    /// A call that waits for every stream: refused in every mode.
    pub(super) fn refuse_any_capture(&mut self, call: Call) -> Result<()> {
        let whole = self.captures.iter().filter(|(_, c)| c.body.is_none());
        let all: Vec<CaptureKey> = whole.map(|(key, _)| key).collect();
        let why = "the call waits for all streams, and one captures";
        let refused = all
            .into_iter()
            .map(|c| self.invalidate(c, call, Code::StreamCaptureUnsupported, why));
        refused.last().map_or(Ok(()), Err)
    }

    // ---- events ---------------------------------------------------------------------------------

    /// What an event stands for once its stream captures; `None` outside a capture.
    pub(super) fn captured_record(&mut self, call: Call, key: StreamKey) -> Result<Option<Record>> {
        let capture = self.admit(call, key)?;
        let after = self.streams[key]
            .joined
            .as_ref()
            .map(|joined| joined.after.clone())
            .unwrap_or_default();
        Ok(capture.map(|capture| Record::Captured { capture, after }))
    }

    /// An event whose record was captured cannot be asked or waited for by the host.
    pub(super) fn refuse_captured(&mut self, call: Call, record: &Record) -> Result<()> {
        let Record::Captured { capture, .. } = *record else {
            return Ok(());
        };
        self.refuse_stale(call, capture)?;
        let why = "the event was recorded in a capture, which runs nothing";
        Err(self.invalidate(capture, call, Code::CapturedEvent, why))
    }

    pub(super) fn refuse_stale(&self, call: Call, capture: CaptureKey) -> Result<()> {
        if self.captures.contains_key(capture) {
            return Ok(());
        }
        Err(DeviceError::new(
            call,
            Code::InvalidValue,
            "the event was recorded in a capture that has ended; record it again",
        ))
    }

    /// A stream that captures, or is to join a capture, waits for an event. False: nothing here captures.
    pub(super) fn wait_captured(
        &mut self,
        call: Call,
        key: StreamKey,
        record: &Record,
    ) -> Result<bool> {
        let own = self.valid_capture(call, key)?;
        if let Some(own) = own {
            self.refuse_beside_body(call, key, own)?;
        }
        let (capture, after) = match (record, own) {
            (Record::Never, _) | (Record::Point(_), None) => return Ok(false),
            (Record::Point(_), Some(own)) => {
                let why = "the event was recorded outside of the capture";
                return Err(self.invalidate_own(own, call, Code::StreamCaptureIsolation, why));
            }
            (Record::Captured { capture, after }, _) => (*capture, after),
        };
        if let Err(stale) = self.refuse_stale(call, capture) {
            return Err(match own {
                Some(own) => self.invalidate_own(own, call, stale.code, &stale.detail),
                None => stale,
            });
        }
        if let Some(own) = own.filter(|&own| own != capture) {
            let why = "the event belongs to another capture";
            let refused = self.invalidate_own(own, call, Code::StreamCaptureMerge, why);
            // A body, and the capture or another body of it, are broken as one.
            if self.root(own) == self.root(capture) {
                return Err(refused);
            }
            return Err(self.invalidate(capture, call, Code::StreamCaptureMerge, why));
        }
        if self.is_broken(capture) {
            let detail = "the event was recorded in a capture that is invalid; end that capture";
            let mut error = DeviceError::new(call, Code::StreamCaptureInvalidated, detail);
            let root = self.root(capture);
            self.captures[root].log.explain(&mut error);
            return Err(error);
        }
        if key == self.default_stream {
            let why = "the default stream cannot take part in a capture";
            return Err(self.invalidate(capture, call, Code::StreamCaptureUnsupported, why));
        }
        if own.is_none() {
            self.captures[capture].streams.push(key);
            self.streams[key].joined = Some(Joined {
                capture,
                after: after.clone(),
                open: None,
            });
        } else if let Some(joined) = &mut self.streams[key].joined {
            let new = after
                .iter()
                .filter(|&node| !joined.after.contains(node))
                .copied();
            let new: Frontier = new.collect();
            joined.after.extend(new);
        }
        Ok(true)
    }
}
