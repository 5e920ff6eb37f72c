//! The trace reader of `examples/replay_trace.rs`: what is wrong with a file is said with its name and line, and the samples can be replayed.
#[allow(dead_code)] // its `main`
#[path = "../examples/replay_trace.rs"]
mod replay_trace;

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use flate2::Compression;
use flate2::write::GzEncoder;

/// A file of this test's, gone afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, bytes: &[u8]) -> Scratch {
        let path = std::env::temp_dir().join(format!("{}-{name}", std::process::id()));
        fs::write(&path, bytes).unwrap();
        Scratch(path)
    }

    fn path(&self) -> String {
        self.0.to_string_lossy().into_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_file(&self.0).unwrap();
    }
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

/// The error of a file, without the path it begins with.
#[track_caller]
fn error(name: &str, bytes: &[u8]) -> String {
    let file = Scratch::new(name, bytes);
    let error = replay_trace::run(&[file.path()]).unwrap_err().to_string();
    let rest = error.strip_prefix(&file.path());
    rest.unwrap_or_else(|| panic!("{error} does not name the file"))
        .to_string()
}

#[test]
fn malformed_lines_are_named() {
    let cases: [(&[u8], &str); 17] = [
        (b"a 1 5 0\nx 1\n", ":2: \"x\" is neither a nor f"),
        (b"A 1 5 0\n", ":1: \"A\" is neither a nor f"),
        (b"a\n", ":1: no id"),
        (b"a 1\n", ":1: no size"),
        (b"a 1 5\n", ":1: no stream"),
        (b"f\n", ":1: no id"),
        (
            b"a 1 5z 0\n",
            ":1: the size is \"5z\", not a number of 64 bits",
        ),
        (
            b"a 1 -5 0\n",
            ":1: the size is \"-5\", not a number of 64 bits",
        ),
        (
            b"a +1 5 0\n",
            ":1: the id is \"+1\", not a number of 64 bits",
        ),
        (
            b"a 1 18446744073709551616 0\n",
            ":1: the size is \"18446744073709551616\", not a number of 64 bits",
        ),
        (
            b"a 1 5 4294967296\n",
            ":1: stream 4294967296 has over 32 bits",
        ),
        // Blank lines count.
        (b"a 1 5 0\n\r\n\na 1 5 0\n", ":4: id 1 is allocated already"),
        (b"f 3\n", ":1: id 3 is freed, and not alive"),
        (b"a 3 1 0\nf 3\nf 3", ":3: id 3 is freed, and not alive"),
        (b"a 1 5 0 7\n", ":1: \"7\" follows the last field"),
        (b"a 1 5 0\nf 1 1\n", ":2: \"1\" follows the last field"),
        (b"a 1 5 0\n\xff\xfe\n", ":2: the line is not text"),
    ];
    for (i, (text, expected)) in cases.into_iter().enumerate() {
        assert_eq!(error(&format!("plain{i}"), text), expected);
        assert_eq!(error(&format!("gzip{i}"), &gzip(text)), expected);
    }
}

#[test]
fn what_no_pool_could_hold() {
    assert_eq!(
        error("huge", b"\na 1 18446744073709551615 0\n"),
        ":2: 18446744073709551615 B is more than any pool can hold"
    );
    assert_eq!(
        error("sum", b"a 1 18446744073709551615 0\na 2 1 0\n"),
        ":2: more than 64 bits of bytes are alive"
    );
}

#[test]
fn files_that_cannot_be_read() {
    let endless = vec![b'a'; 10_000];
    assert_eq!(
        error("endless", &endless),
        ":1: the line has over 4,096 bytes"
    );
    let text: String = (0..2000).map(|i| format!("a {i} {} 0\n", i * 37)).collect();
    let whole = gzip(text.as_bytes());
    let cut = error("cut.gz", &whole[..whole.len() / 2]);
    let line: usize = cut.split(':').nth(1).unwrap().parse().unwrap();
    assert!(line > 1 && line < 2000, "{cut}");
    assert!(cut.contains(": cannot be read: "), "{cut}");
    // The last bytes are a checksum.
    let mut damaged = whole.clone();
    let at = damaged.len() - 6;
    damaged[at] ^= 1;
    assert!(error("damaged.gz", &damaged).starts_with(":2001: cannot be read: "));
    let mut trailing = whole;
    trailing.extend(b"junk");
    assert!(error("trailing.gz", &trailing).starts_with(":2001: cannot be read: "));
    let missing = replay_trace::run(&["no/such/file".into()]).unwrap_err();
    assert!(
        missing.to_string().starts_with("no/such/file: "),
        "{missing}"
    );
    let folder = std::env::temp_dir().to_string_lossy().into_owned();
    let error = replay_trace::run(std::slice::from_ref(&folder)).unwrap_err();
    assert!(error.to_string().starts_with(&folder), "{error}");
}

#[test]
fn well_formed_files() {
    for (name, text) in [
        ("empty", &b""[..]),
        ("blank", b"\n\r\n \t\n"),
        ("no_last_end", b"a 1 5 0\nf 1"),
        ("crlf", b"a 1 5 0\r\nf 1\r\na 1 0 3\r\n"),
        ("tabs", b"a\t1\t5\t0\n  f 1\n"),
    ] {
        for bytes in [text.to_vec(), gzip(text)] {
            let file = Scratch::new(name, &bytes);
            assert_eq!(
                replay_trace::run(&[file.path()]).map_err(|e| e.to_string()),
                Ok(())
            );
        }
    }
    let samples = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/traces");
    let samples: Vec<String> = fs::read_dir(samples)
        .unwrap()
        .map(|entry| entry.unwrap().path().to_string_lossy().into_owned())
        .collect();
    assert_eq!(samples.len(), 3);
    assert_eq!(
        replay_trace::run(&samples).map_err(|e| e.to_string()),
        Ok(())
    );
}
