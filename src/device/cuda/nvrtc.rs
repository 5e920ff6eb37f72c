//! The run-time compiler: found where toolkits and wheels put it, asked for machine code of the device's kind.
//!
//! It needs no GPU, so kernels can be compiled where none is. As with the driver, functions are looked up by name and
//! results are numbers (see [`driver`](super::driver)).

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use cudarc::nvrtc::sys::nvrtcProgram;
use libloading::Library;

use super::driver::said;
use crate::device::{Call, Code, DeviceError, Result};

/// Where the library lies, if it is not where libraries are looked for: a file, or the folder of `libnvrtc.so.*`.
pub const NVRTC_VARIABLE: &str = "CUDAGRAPH_TREES_NVRTC";

/// Variables that name a toolkit's folder.
const TOOLKITS: [&str; 3] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"];
/// Where in such a folder libraries lie.
const FOLDERS: [&str; 4] = ["lib64", "lib", "targets/x86_64-linux/lib", "bin"];

macro_rules! functions {
    ($(fn $name:ident($($type:ty),*);)*) => {
        #[allow(non_snake_case)] // the library's names
        struct Nvrtc { $($name: unsafe extern "C" fn($($type),*) -> u32,)* }

        impl Nvrtc {
            /// # Safety
            /// The library is NVRTC, and is never unloaded.
            unsafe fn look_up(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Nvrtc {
                    $($name: {
                        // SAFETY: the function of this name has had this signature in every version.
                        *unsafe { library.get(stringify!($name).as_bytes()) }?
                    },)*
                })
            }
        }

        #[cfg(feature = "cuda")]
        const _: () = {
            use cudarc::nvrtc::sys;
            $(let _: unsafe fn($($type),*) -> sys::nvrtcResult = sys::$name;)*
        };
    };
}

functions! {
    fn nvrtcCreateProgram(*mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    fn nvrtcDestroyProgram(*mut nvrtcProgram);
    fn nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
    fn nvrtcGetNumSupportedArchs(*mut c_int);
    fn nvrtcGetSupportedArchs(*mut c_int);
    fn nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
    fn nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
    fn nvrtcGetPTXSize(nvrtcProgram, *mut usize);
    fn nvrtcGetPTX(nvrtcProgram, *mut c_char);
    fn nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
    fn nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
}

/// A program, destroyed at its end.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    raw: nvrtcProgram,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed once.
        unsafe { (self.nvrtc.nvrtcDestroyProgram)(&raw mut self.raw) };
    }
}

/// What the compiler makes of a source.
pub(super) struct Compiled {
    /// Machine code, or PTX.
    pub(super) image: Vec<u8>,
    /// PTX in any case: it says what parameters its kernels have.
    pub(super) ptx: Option<Vec<u8>>,
}

/// Compiles CUDA C for a device of compute capability `arch`: to machine code if the compiler knows that kind, else to PTX for
/// the newest older one. Arithmetic is as written: no product and sum is fused.
pub(super) fn compile(source: &str, name: &str, arch: (u32, u32), driver: u32) -> Result<Compiled> {
    let nvrtc = Nvrtc::get(driver)?;
    let device = arch.0 * 10 + arch.1;
    let known = nvrtc.archs();
    let machine_code = known.contains(&device);
    let target = if machine_code {
        format!("--gpu-architecture=sm_{device}")
    } else {
        let older = known.into_iter().filter(|known| *known < device).max();
        let Some(older) = older else {
            let detail =
                format!("{name}: this NVRTC has no target for a device of kind sm_{device}");
            return Err(DeviceError::new(Call::Load, Code::NotSupported, detail));
        };
        format!("--gpu-architecture=compute_{older}")
    };
    let program = nvrtc.program(source, name)?;
    program.compile(name, &[&target, "--fmad=false", "--std=c++17"])?;
    let (size, get) = if machine_code {
        (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    } else {
        (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    };
    // SAFETY: both are this library's functions for one and the same form of output.
    let image = unsafe { program.output(size, get) }.ok_or_else(|| {
        let detail = format!("{name}: NVRTC compiled it, and gives no code for {target}");
        DeviceError::new(Call::Load, Code::NotSupported, detail)
    })?;
    // SAFETY: as above.
    let ptx = unsafe { program.output(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) };
    Ok(Compiled { image, ptx })
}

impl Nvrtc {
    /// The compiler of this machine. Found once; a machine without one is asked again each time.
    fn get(driver: u32) -> Result<&'static Nvrtc> {
        static NVRTC: OnceLock<Nvrtc> = OnceLock::new();
        if let Some(nvrtc) = NVRTC.get() {
            return Ok(nvrtc);
        }
        let mut tried = Vec::new();
        for candidate in candidates(driver) {
            match Self::open(&candidate) {
                Ok(nvrtc) => return Ok(NVRTC.get_or_init(|| nvrtc)),
                Err(error) => tried.push(said(&error)),
            }
        }
        let detail = format!(
            "kernels in CUDA C need libnvrtc (part of the CUDA toolkit, or of the Python package nvidia-cuda-nvrtc), \
             which is not found; name its file or folder in {NVRTC_VARIABLE}. Tried: {}",
            tried.join("; ")
        );
        Err(DeviceError::new(Call::Load, Code::NotFound, detail))
    }

    fn open(path: &Path) -> Result<Self, libloading::Error> {
        preload_builtins(path);
        // SAFETY: loading runs the library's initialisers; the path is NVRTC's by name.
        let library = unsafe { Library::new(path) }?;
        // The functions are used until the process ends.
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: as above; the library was leaked.
        unsafe { Self::look_up(library) }
    }

    /// The kinds of devices it makes machine code for.
    fn archs(&self) -> Vec<u32> {
        let mut count = 0;
        // SAFETY: the pointer is to a live local.
        if unsafe { (self.nvrtcGetNumSupportedArchs)(&raw mut count) } != 0 {
            return Vec::new();
        }
        let mut archs: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the array has room for as many as it counted.
        unsafe { (self.nvrtcGetSupportedArchs)(archs.as_mut_ptr()) };
        archs.into_iter().map(c_int::cast_unsigned).collect()
    }

    fn program(&self, source: &str, name: &str) -> Result<Program<'_>> {
        let wrong = |what: &str| {
            DeviceError::new(Call::Load, Code::InvalidValue, format!("{name}: {what}"))
        };
        let source = CString::new(source).map_err(|_| wrong("its source has a zero byte"))?;
        let file = CString::new(format!("{name}.cu")).map_err(|_| wrong("a zero byte"))?;
        let mut raw = ptr::null_mut();
        // SAFETY: the strings are C strings and are copied; there are no headers.
        let code = unsafe {
            (self.nvrtcCreateProgram)(
                &raw mut raw,
                source.as_ptr(),
                file.as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            )
        };
        if code != 0 {
            return Err(wrong(&format!(
                "NVRTC makes no program of it (code {code})"
            )));
        }
        Ok(Program { nvrtc: self, raw })
    }
}

impl Program<'_> {
    fn compile(&self, name: &str, options: &[&str]) -> Result<()> {
        let options: Vec<CString> = options
            .iter()
            .filter_map(|option| CString::new(*option).ok())
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).unwrap_or(0);
        // SAFETY: the program lives; there are as many options as said, all of them C strings that live.
        let code = unsafe { (self.nvrtc.nvrtcCompileProgram)(self.raw, count, pointers.as_ptr()) };
        if code == 0 {
            return Ok(());
        }
        // SAFETY: both are this library's functions for the log.
        let log = unsafe {
            self.output(
                self.nvrtc.nvrtcGetProgramLogSize,
                self.nvrtc.nvrtcGetProgramLog,
            )
        }
        .unwrap_or_default();
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default();
        let detail = format!(
            "{name} does not compile (NVRTC code {code}):\n{}",
            log.to_string_lossy()
        );
        Err(DeviceError::new(Call::Load, Code::InvalidValue, detail))
    }

    /// One of the program's outputs.
    ///
    /// # Safety
    /// The functions give the size and the bytes of one and the same output.
    unsafe fn output(
        &self,
        size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> u32,
        get: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> u32,
    ) -> Option<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program lives; the pointer is to a live local.
        if unsafe { size(self.raw, &raw mut bytes) } != 0 || bytes == 0 {
            return None;
        }
        let mut output = vec![0_u8; bytes];
        // SAFETY: the buffer has the size that was asked for.
        (unsafe { get(self.raw, output.as_mut_ptr().cast()) } == 0).then_some(output)
    }
}

/// The files to try, in this order: what the variable names, the toolkits that variables name, the usual toolkit, then by bare name,
/// the driver's own major version first.
fn candidates(driver: u32) -> Vec<PathBuf> {
    let names = names(driver);
    let mut files = Vec::new();
    let mut folder = |folder: PathBuf| {
        let inside = names.iter().map(|name| folder.join(name));
        files.extend(inside.filter(|file| file.exists()));
    };
    if let Some(named) = std::env::var_os(NVRTC_VARIABLE) {
        // Absolute, so that its folder can be looked into.
        let named = std::fs::canonicalize(&named).unwrap_or(named.into());
        if named.is_dir() {
            folder(named);
        } else {
            return vec![named];
        }
    }
    let usual = Path::new("/usr/local/cuda").to_path_buf();
    let toolkits = TOOLKITS
        .iter()
        .filter_map(|variable| std::env::var_os(variable).map(PathBuf::from));
    for toolkit in toolkits.chain([usual]) {
        for inside in FOLDERS {
            folder(toolkit.join(inside));
        }
    }
    files.extend(names.iter().map(PathBuf::from));
    files
}

/// What the library is called.
fn names(driver: u32) -> Vec<String> {
    if cfg!(windows) {
        return ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]
            .map(String::from)
            .into();
    }
    let majors = [13, 12];
    let own = majors.into_iter().filter(|major| *major == driver);
    let others = majors.into_iter().filter(|major| *major != driver);
    own.chain(others)
        .map(|major| format!("libnvrtc.so.{major}"))
        .chain(["libnvrtc.so".into()])
        .collect()
}

/// Loads what NVRTC itself loads by bare name, from its own folder: outside of the loader's path it would not be found.
#[cfg(unix)]
fn preload_builtins(nvrtc: &Path) {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

    let Some(folder) = nvrtc.parent().filter(|folder| folder.is_absolute()) else {
        return;
    };
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libnvrtc-builtins.so.")
        })
        .collect();
    files.sort();
    for file in files {
        // SAFETY: loading runs the library's initialisers; the file is NVRTC's own by name and place.
        if let Ok(library) = unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_GLOBAL) } {
            // It stays, as NVRTC does.
            std::mem::forget(library);
        }
    }
}

#[cfg(not(unix))]
fn preload_builtins(_: &Path) {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::kernels;

    #[test]
    fn the_drivers_own_version_is_tried_first() {
        if cfg!(unix) {
            assert_eq!(
                names(12),
                ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"]
            );
            assert_eq!(names(14)[0], "libnvrtc.so.13");
            if std::env::var_os(NVRTC_VARIABLE).is_none() {
                // Bare names come last, so that what a toolkit has goes before.
                let all = candidates(13);
                let bare = all.iter().rev().take_while(|file| !file.is_absolute());
                assert_eq!(bare.count(), 3);
            }
        }
    }

    /// Needs NVRTC, but no GPU; says so where there is none.
    #[test]
    fn every_kernel_compiles() {
        let gather = include_str!("gather.cu");
        let params = |compiled: &Compiled| {
            let ptx = std::str::from_utf8(compiled.ptx.as_deref().unwrap()).unwrap();
            super::super::ptx::parameters(ptx)
        };
        match compile(gather, "gather", (9, 0), 13) {
            Ok(compiled) => {
                assert_eq!(&compiled.image[..4], b"\x7fELF");
                let params = params(&compiled);
                assert_eq!(params.len(), 4, "{params:?}");
                assert!(params.values().all(|count| *count == 1), "{params:?}");
            }
            Err(error) if error.code == Code::NotFound => {
                assert!(error.detail.contains("libnvrtc"), "{error}");
                eprintln!("skipped: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
        for (kernel, count) in [
            (kernels::fill(), 3),
            (kernels::scale_add(), 5),
            (kernels::add(), 4),
            (kernels::mul(), 4),
            (kernels::copy(), 3),
            (kernels::increment(), 3),
            (kernels::sum(), 3),
        ] {
            let name = &*kernel.name;
            let compiled = compile(kernel.cuda.as_deref().unwrap(), name, (9, 0), 13).unwrap();
            assert_eq!(&compiled.image[..4], b"\x7fELF");
            assert_eq!(params(&compiled).get(name), Some(&count), "{name}");
        }
        // A device that the compiler does not know gets PTX.
        let ptx = compile(gather, "gather", (99, 9), 13).unwrap();
        let ptx = String::from_utf8(ptx.image).unwrap();
        assert!(ptx.contains(".entry cudagraph_trees_gather_144"), "{ptx}");
        let wrong = compile(
            "extern \"C\" __global__ void f() { x = 1; }",
            "f",
            (9, 0),
            13,
        );
        let wrong = wrong.err().unwrap();
        assert_eq!((wrong.call, wrong.code), (Call::Load, Code::InvalidValue));
        assert!(wrong.detail.contains("identifier \"x\""), "{wrong}");
    }
}
