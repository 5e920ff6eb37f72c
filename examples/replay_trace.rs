//! Replays allocation traces through the pool, over a backing that costs nothing: how much it reserves, and how long a step takes.
//!
//! `cargo run --release --example replay_trace -- FILE...`, plain or gzip, for example `examples/traces/*`.
//!
//! A trace is text, one event a line: `a ID BYTES STREAM` allocates, `f ID` gives back; fields are decimal numbers, with spaces or
//! tabs between them. An id may be used again once it was given back. Lines may end in CRLF; blank lines are skipped (and counted, so that
//! errors name the right line). What is alive at the end of a trace stays so. Anything else is an error that names file and line.
//! All files are read and checked before the first is measured.
#![forbid(unsafe_code)]

#[path = "support/numbers.rs"]
mod numbers;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use cudagraph_trees::pool::{Allocation, Pool, PoolConfig, PoolError, StreamId, Tag};
use flate2::bufread::MultiGzDecoder;
use numbers::Numbers;

/// One event. Ids of the trace are replaced by places in a table, so that replaying looks nothing up.
#[derive(Clone, Copy)]
enum Event {
    Alloc { slot: u32, bytes: u64, stream: u32 },
    Free { slot: u32 },
}

/// A trace, read and checked.
pub struct Trace {
    path: String,
    name: String,
    events: Vec<Event>,
    /// The line of each event.
    lines: Vec<u64>,
    slots: usize,
    /// The most bytes alive at a time, as they were asked for.
    peak: u64,
}

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum Bad {
    #[error("{0}: {1}")]
    File(String, io::Error),
    #[error("{0}:{1}: cannot be read: {2}")]
    Read(String, u64, io::Error),
    #[error("{0}:{1}: {2}")]
    Line(String, u64, String),
    #[error("{0}:{1}: {2}")]
    Pool(String, u64, PoolError),
}

/// What a trace's ids stand for while it is read.
#[derive(Default)]
struct Reading {
    events: Vec<Event>,
    lines: Vec<u64>,
    /// Ids that are alive: where, and how many bytes.
    alive: HashMap<u64, (u32, u64)>,
    vacant: Vec<u32>,
    slots: u32,
    bytes: u64,
    peak: u64,
}

impl Reading {
    /// Takes in one line, or says what is wrong with it.
    fn line(&mut self, at: u64, line: &str) -> Result<(), String> {
        let mut fields = line.split_ascii_whitespace();
        let Some(verb) = fields.next() else {
            return Ok(());
        };
        let mut number = |what: &str| -> Result<u64, String> {
            let field = fields.next().ok_or_else(|| format!("no {what}"))?;
            // `+7` is a number to Rust, and none here.
            let digits = field.bytes().all(|b| b.is_ascii_digit());
            field
                .parse()
                .ok()
                .filter(|_| digits)
                .ok_or_else(|| format!("the {what} is {field:?}, not a number of 64 bits"))
        };
        let event = match verb {
            "a" => {
                let (id, bytes, stream) = (number("id")?, number("size")?, number("stream")?);
                let stream = u32::try_from(stream)
                    .map_err(|_| format!("stream {stream} has over 32 bits"))?;
                if self.alive.contains_key(&id) {
                    return Err(format!("id {id} is allocated already"));
                }
                self.bytes = self
                    .bytes
                    .checked_add(bytes)
                    .ok_or("more than 64 bits of bytes are alive")?;
                self.peak = self.peak.max(self.bytes);
                let slot = self.vacant.pop().unwrap_or_else(|| {
                    self.slots += 1;
                    self.slots - 1
                });
                self.alive.insert(id, (slot, bytes));
                Event::Alloc {
                    slot,
                    bytes,
                    stream,
                }
            }
            "f" => {
                let id = number("id")?;
                let (slot, bytes) = self
                    .alive
                    .remove(&id)
                    .ok_or_else(|| format!("id {id} is freed, and not alive"))?;
                self.bytes -= bytes;
                self.vacant.push(slot);
                Event::Free { slot }
            }
            other => return Err(format!("{other:?} is neither a nor f")),
        };
        if let Some(more) = fields.next() {
            return Err(format!("{more:?} follows the last field"));
        }
        self.events.push(event);
        self.lines.push(at);
        Ok(())
    }
}

/// Reads a file line by line, whether or not it is gzip.
pub fn read(path: &str) -> Result<Trace, Bad> {
    let file = File::open(path).map_err(|e| Bad::File(path.into(), e))?;
    let mut file = BufReader::new(file);
    let start = file.fill_buf().map_err(|e| Bad::File(path.into(), e))?;
    let lines: Box<dyn Read> = if start.starts_with(&[0x1f, 0x8b]) {
        Box::new(MultiGzDecoder::new(file))
    } else {
        Box::new(file)
    };
    let mut lines = BufReader::new(lines);
    let (mut reading, mut line, mut number) = (Reading::default(), Vec::new(), 0);
    loop {
        line.clear();
        number += 1;
        let bad = |what: String| Bad::Line(path.into(), number, what);
        // No event is longer than 70 bytes: a file without line ends is not read into memory whole.
        let read = lines
            .by_ref()
            .take(4096)
            .read_until(b'\n', &mut line)
            .map_err(|e| Bad::Read(path.into(), number, e))?;
        if read == 0 {
            break;
        }
        if read == 4096 && line.last() != Some(&b'\n') {
            return Err(bad("the line has over 4,096 bytes".into()));
        }
        let text = std::str::from_utf8(&line).map_err(|_| bad("the line is not text".into()))?;
        reading.line(number, text).map_err(bad)?;
    }
    let name = Path::new(path).file_name().unwrap_or_default();
    let name = name.to_string_lossy();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    Ok(Trace {
        path: path.into(),
        name: name.strip_suffix(".txt").unwrap_or(name).into(),
        events: reading.events,
        lines: reading.lines,
        slots: reading.slots as usize,
        peak: reading.peak,
    })
}

/// What one replay cost.
struct Figures {
    reserved: u64,
    ns_per_event: f64,
}

fn replay(trace: &Trace) -> Result<Figures, Bad> {
    let failed = |at: usize| {
        move |e| {
            Bad::Pool(
                trace.path.clone(),
                trace.lines.get(at).copied().unwrap_or(0),
                e,
            )
        }
    };
    let mut pool = Pool::new(PoolConfig::default(), Numbers::new()).map_err(failed(0))?;
    let mut held = vec![Allocation::EMPTY; trace.slots];
    let start = Instant::now();
    for (at, event) in trace.events.iter().enumerate() {
        match *event {
            Event::Alloc {
                slot,
                bytes,
                stream,
            } => {
                held[slot as usize] = pool
                    .alloc(StreamId(stream), bytes, Tag(1))
                    .map_err(failed(at))?;
            }
            Event::Free { slot } => {
                pool.free(held[slot as usize]).map_err(failed(at))?;
            }
        }
    }
    let ns = start.elapsed().as_nanos() as f64;
    Ok(Figures {
        reserved: pool.stats().reserved_bytes.peak,
        ns_per_event: ns / trace.events.len().max(1) as f64,
    })
}

/// Replays a trace seven times; the median of the times.
fn measure(trace: &Trace) -> Result<Figures, Bad> {
    let mut runs = (0..7)
        .map(|_| replay(trace))
        .collect::<Result<Vec<_>, _>>()?;
    runs.sort_by(|a, b| a.ns_per_event.total_cmp(&b.ns_per_event));
    Ok(runs.swap_remove(3))
}

pub fn run(files: &[String]) -> Result<(), Bad> {
    let traces = files
        .iter()
        .map(|path| read(path))
        .collect::<Result<Vec<_>, _>>()?;
    println!(
        "{:<24} {:>9} {:>15} {:>15} {:>7} {:>9}",
        "trace", "events", "peak asked for", "peak reserved", "ratio", "ns/event"
    );
    for trace in &traces {
        let figures = measure(trace)?;
        let ratio = if trace.peak == 0 {
            "-".into()
        } else {
            format!("{:.3}", figures.reserved as f64 / trace.peak as f64)
        };
        println!(
            "{:<24} {:>9} {:>15} {:>15} {:>7} {:>9.1}",
            trace.name,
            trace.events.len(),
            trace.peak,
            figures.reserved,
            ratio,
            figures.ns_per_event
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    let files: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|a| a.to_string_lossy().into_owned())
        .collect();
    if files.is_empty() {
        eprintln!("usage: replay_trace FILE...");
        return ExitCode::from(2);
    }
    match run(&files) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
