//! What runs next: at each step one of the streams that may run, drawn from the seed.

use std::sync::Arc;

use smallvec::SmallVec;

use super::state::State;
use super::stream::{Entry, EventKey, Launch, Point, Record, Stream, StreamKey};
use super::work::{Broken, Work};
use crate::device::{Call, Code, DeviceError, Result};

/// Splitmix64: the schedule's dice.
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Rng(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub(super) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }
}

/// How many source buffers are kept for launches to come.
const SPARE_BUFFERS: usize = 256;

impl State {
    /// Runs work until `done` holds. Gives the device's error if it stops, or has stopped, before that.
    pub(super) fn run_until(&mut self, call: Call, done: impl Fn(&State) -> bool) -> Result<()> {
        let gate = Arc::clone(&self.gate);
        let _inside = gate.run();
        loop {
            self.check_broken(call)?;
            if done(self) {
                return Ok(());
            }
            if !self.step() {
                let detail = "work is waited for, and none can run; this is a defect of the simulated device";
                return Err(DeviceError::new(call, Code::Other(999), detail));
            }
        }
    }

    /// Makes at most one step, then says whether `done` holds.
    pub(super) fn poll(&mut self, call: Call, done: impl Fn(&State) -> bool) -> Result<bool> {
        if !done(self) {
            let gate = Arc::clone(&self.gate);
            let _inside = gate.run();
            self.step();
        }
        self.check_broken(call)?;
        Ok(done(self))
    }

    /// Whether a point in a stream has been reached.
    pub(super) fn reached(&self, point: Point) -> bool {
        self.streams.get(point.stream).is_none_or(|stream| {
            let inside = |node| stream.done + 1 == point.seq && stream.run.has_recorded(node);
            stream.done >= point.seq || point.node.is_some_and(inside)
        })
    }

    /// Takes the time of an event, if its last record is at this place, which is reached now.
    fn take_time(&mut self, event: EventKey, here: Point) {
        if let Some(event) = self.events.get_mut(event)
            && event.timed
            && matches!(event.last, Record::Point(last) if last == here)
        {
            event.time = Some(self.world.clock);
        }
    }

    /// Runs the head of one stream that may run. False if there is none.
    fn step(&mut self) -> bool {
        let mut choices = std::mem::take(&mut self.choices);
        choices.clear();
        for place in 0..self.busy.len() {
            let stream = self.busy[place];
            if self.may_run(stream) {
                choices.push(stream);
            }
        }
        let chosen = (!choices.is_empty()).then(|| choices[self.rng.below(choices.len())]);
        self.choices = choices;
        if let Some(stream) = chosen
            && let Err(broken) = self.advance(stream)
        {
            self.stop(broken);
        }
        chosen.is_some()
    }

    fn may_run(&mut self, key: StreamKey) -> bool {
        match self.streams[key].queue.front() {
            None => false,
            Some(Entry::Work(_) | Entry::Time(_)) => true,
            Some(Entry::Wait(point)) => self.reached(*point),
            Some(Entry::Graph(launch)) if launch.waits.is_empty() => true,
            Some(Entry::Graph(launch)) => {
                let held_up = self.held_up(launch);
                let Stream { queue, run, .. } = &mut self.streams[key];
                if let Some(Entry::Graph(launch)) = queue.front() {
                    run.start(&launch.plan);
                }
                run.any(|node| !held_up.contains(&node))
            }
        }
    }

    /// The nodes of a launch that wait for an event which is not reached.
    fn held_up(&self, launch: &Launch) -> SmallVec<[u32; 4]> {
        let waits = launch.plan.waits.iter().zip(&launch.waits);
        waits
            .filter(|(_, point)| point.is_some_and(|p| !self.reached(p)))
            .map(|(&(node, _), _)| node)
            .collect()
    }

    /// Does one step of a stream that may run: a piece of work, or one node of the graph at its head.
    fn advance(&mut self, key: StreamKey) -> Result<(), Broken> {
        let held_up = match self.streams[key].queue.front() {
            Some(Entry::Graph(launch)) if !launch.waits.is_empty() => self.held_up(launch),
            _ => SmallVec::new(),
        };
        let mut here = Point {
            stream: key,
            seq: self.streams[key].done + 1,
            node: None,
        };
        let State {
            streams,
            world,
            rng,
            ..
        } = self;
        let Stream { queue, run, .. } = &mut streams[key];
        match queue.front() {
            None => return Ok(()),
            Some(Entry::Wait(_)) => {}
            Some(&Entry::Time(event)) => self.take_time(event, here),
            Some(Entry::Work(work)) => world.run(work, None)?,
            Some(Entry::Graph(Launch { plan, sources, .. })) => {
                run.start(plan);
                if let Some(node) = run.draw(rng, |node| !held_up.contains(&node)) {
                    let work = &plan.nodes[node as usize].work;
                    run.perform(plan, node, world, sources)?;
                    run.finish(plan, node);
                    if let Work::RecordEvent(event) = work {
                        let event = event.0;
                        here.node = Some(node);
                        self.take_time(event, here);
                    }
                }
                let run = &mut self.streams[key].run;
                if !run.is_over() {
                    return Ok(());
                }
                run.reset();
            }
        }
        self.retire(key);
        Ok(())
    }

    fn retire(&mut self, key: StreamKey) {
        let stream = &mut self.streams[key];
        let entry = stream.queue.pop_front();
        stream.done += 1;
        if stream.queue.is_empty() {
            self.busy.retain(|&busy| busy != key);
            self.forget_if_over(key);
        }
        if let Some(Entry::Graph(Launch { mut sources, .. })) = entry
            && sources.capacity() > 0
            && self.spare.len() < SPARE_BUFFERS
        {
            sources.clear();
            self.spare.push(sources);
        }
    }

    /// The device stops: what is queued never runs, but for the marks, which say who owns what.
    fn stop(&mut self, broken: Broken) {
        for key in std::mem::take(&mut self.busy) {
            let stream = &mut self.streams[key];
            stream.done = stream.enqueued;
            stream.run.reset();
            for entry in std::mem::take(&mut stream.queue) {
                if let Entry::Work(work) = entry
                    && let Work::Mark {
                        ptr,
                        bytes,
                        mark,
                        before,
                    } = *work
                {
                    self.world.memory.mark(ptr, bytes, mark, before);
                }
            }
            self.forget_if_over(key);
        }
        self.broken.get_or_insert(broken);
    }
}
