//! A graph's picture by the driver, which writes it to a file.

use std::collections::hash_map::RandomState;
use std::ffi::CString;
use std::hash::BuildHasher;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fs, io, process};

use super::graph::CudaGraph;
use crate::device::{Call, Code, DeviceError, Result};

/// `CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE`: all that there is.
const VERBOSE: u32 = 1;

/// The graph in the DOT language.
pub(super) fn picture(graph: &CudaGraph) -> Result<String> {
    let call = Call::GraphDot;
    let device = &graph.0.device;
    let _current = device.enter(call)?;
    let _relaxed = device.relax(call)?;
    let folder = Folder::new().map_err(|error| unwritten(&error))?;
    let file = folder.0.join("graph.dot");
    let path = CString::new(file.as_os_str().as_encoded_bytes());
    let path = path.map_err(|error| unwritten(&error.into()))?;
    // SAFETY: the graph lives, and nobody else uses it meanwhile; the path is a live C string.
    let code = graph.with_raw(|raw| unsafe {
        (device.driver.cuGraphDebugDotPrint)(raw, path.as_ptr(), VERBOSE)
    });
    device.check(call, code, || {
        format!("a picture of a graph, written to {}", file.display())
    })?;
    let text = fs::read(&file).map_err(|error| unwritten(&error))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn unwritten(error: &io::Error) -> DeviceError {
    let detail = format!(
        "the driver writes a graph's picture to a file, and there is none in {}: {error}",
        env::temp_dir().display()
    );
    DeviceError::new(Call::GraphDot, Code::OperatingSystem, detail)
}

/// A new folder among the temporary files that nobody else may enter, so that nothing lies in the driver's way; removed when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> io::Result<Folder> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let mut builder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        let mut tries = 0;
        loop {
            let number = MADE.fetch_add(1, Ordering::Relaxed);
            let random = RandomState::new().hash_one(number);
            let name = format!("cudagraph-trees-{}-{number}-{random:x}", process::id());
            let path = env::temp_dir().join(name);
            match builder.create(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries < 16 => {
                    tries += 1;
                }
                made => return made.map(|()| Folder(path)),
            }
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(folder = %self.0.display(), %error, "a temporary folder could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_its_own_and_goes_with_what_is_in_it() {
        let (one, other) = (Folder::new().unwrap(), Folder::new().unwrap());
        assert_ne!(one.0, other.0);
        fs::write(one.0.join("graph.dot"), "digraph {}").unwrap();
        let path = one.0.clone();
        drop(one);
        assert!(!path.exists() && other.0.exists());
    }
}
