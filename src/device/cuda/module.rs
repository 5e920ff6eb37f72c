//! Kernels: modules loaded once and kept as long as the device, functions with their parameters' sizes, launches.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use smallvec::SmallVec;

use super::driver::SUCCESS;
use super::inner::{Inner, Shared};
use super::nvrtc::{self, Compiled};
use super::ptx;
use super::stream::Handle;
use crate::device::{Call, Code, DeviceError, Kernel, KernelArg, LaunchConfig, Result};
use crate::sync::lock;

/// Bytes of a compiler's words that an error takes in.
const LOG: usize = 8 << 10;

/// What a module was made from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Origin {
    /// CUDA C.
    Source(Box<str>),
    /// PTX, or machine code.
    Image(Box<[u8]>),
}

/// All modules of a device. Graphs may hold their functions, so none is unloaded before the device's end.
#[derive(Default)]
pub(super) struct Modules(HashMap<Origin, Module>);

struct Module {
    raw: Shared<sys::CUmodule>,
    functions: HashMap<Box<str>, Arc<Function>>,
    /// How many parameters its kernels have; empty for machine code that came from elsewhere.
    parameters: HashMap<Box<str>, usize>,
}

/// A kernel in a module.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) raw: Shared<sys::CUfunction>,
    pub(super) name: Box<str>,
    /// The sizes of its parameters, in bytes.
    pub(super) params: SmallVec<[u32; 12]>,
}

/// A loaded kernel of a [`CudaDevice`](super::CudaDevice).
#[derive(Clone)]
pub struct CudaFunction {
    pub(super) device: Arc<Inner>,
    pub(super) function: Arc<Function>,
}

impl CudaFunction {
    /// The driver's handle. Good as long as the device lives.
    #[must_use]
    pub fn raw(&self) -> sys::CUfunction {
        self.function.raw.0
    }

    /// The kernel's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.function.name
    }
}

impl fmt::Debug for CudaFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaFunction({})", self.function.name)
    }
}

impl Function {
    /// Refuses arguments that are not those of the kernel: the driver reads as many bytes as the kernel takes, wherever they lie.
    pub(super) fn check(&self, args: &[KernelArg]) -> Result<(), String> {
        if args.len() != self.params.len() {
            return Err(format!(
                "{} takes {} arguments, and {} are given",
                self.name,
                self.params.len(),
                args.len()
            ));
        }
        for (index, (arg, &takes)) in args.iter().zip(&self.params).enumerate() {
            let (_, bytes) = word(arg);
            if bytes != takes {
                return Err(format!(
                    "argument {index} of {} is {arg:?}, of {bytes} B; the kernel takes {takes} B there",
                    self.name
                ));
            }
        }
        Ok(())
    }
}

/// An argument's bytes, first byte lowest, and how many they are.
pub(super) fn word(arg: &KernelArg) -> (u64, u32) {
    match *arg {
        KernelArg::Ptr(ptr) => (ptr.0, 8),
        KernelArg::U64(value) => (value, 8),
        KernelArg::U32(value) => (value.into(), 4),
        KernelArg::I32(value) => (value.cast_unsigned().into(), 4),
        KernelArg::F32(value) => (value.to_bits().into(), 4),
        KernelArg::F64(value) => (value.to_bits(), 8),
    }
}

impl Inner {
    /// A kernel's function, compiled from its CUDA C if it is new.
    pub(super) fn load_kernel(&self, kernel: &Kernel) -> Result<Arc<Function>> {
        let Some(source) = &kernel.cuda else {
            let detail = format!(
                "the kernel {} has no CUDA C; give it some with Kernel::cuda",
                kernel.name
            );
            return Err(DeviceError::new(Call::Load, Code::NotFound, detail));
        };
        self.load_from(&Origin::Source(source.as_ref().into()), &kernel.name)
    }

    /// A function of a module, which is loaded if it is new. The lock is held meanwhile: a kernel is compiled once.
    pub(super) fn load_from(&self, origin: &Origin, name: &str) -> Result<Arc<Function>> {
        let _current = self.enter(Call::Load)?;
        let mut modules = lock(&self.modules);
        if !modules.0.contains_key(origin) {
            let module = self.load_module(origin, name)?;
            modules.0.insert(origin.clone(), module);
        }
        let module = modules.0.get_mut(origin).ok_or_else(|| {
            DeviceError::new(Call::Load, Code::NotFound, "the module was not kept")
        })?;
        if let Some(function) = module.functions.get(name) {
            return Ok(function.clone());
        }
        let function = Arc::new(self.find_function(module, name)?);
        module.functions.insert(name.into(), function.clone());
        Ok(function)
    }

    fn load_module(&self, origin: &Origin, name: &str) -> Result<Module> {
        let Compiled { mut image, ptx } = match origin {
            Origin::Source(source) => {
                let driver = self.driver.version().cast_unsigned() / 1000;
                nvrtc::compile(source, name, self.arch, driver)?
            }
            Origin::Image(image) => Compiled {
                image: image.to_vec(),
                ptx: std::str::from_utf8(image).is_ok().then(|| image.to_vec()),
            },
        };
        let parameters = ptx
            .as_deref()
            .and_then(|ptx| std::str::from_utf8(ptx).ok())
            .map(ptx::parameters)
            .unwrap_or_default();
        // PTX is text, and ends with a zero; machine code says itself how long it is.
        image.push(0);
        let mut log = vec![0_u8; LOG];
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values = [log.as_mut_ptr().cast(), ptr::without_provenance_mut(LOG)];
        let mut raw = ptr::null_mut();
        // SAFETY: the image is PTX that ends with a zero, or machine code from the compiler or one that the caller of
        // `load_image` vouched for; there are as many options as values, and the log has the size it is said to have.
        let code = unsafe {
            (self.driver.cuModuleLoadDataEx)(
                &raw mut raw,
                image.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        self.check(Call::Load, code, || {
            let said = log.split(|byte| *byte == 0).next().unwrap_or_default();
            format!(
                "the module of {name} ({} B) {}",
                image.len() - 1,
                String::from_utf8_lossy(said).trim()
            )
        })?;
        Ok(Module {
            raw: Shared(raw),
            functions: HashMap::new(),
            parameters,
        })
    }

    fn find_function(&self, module: &Module, name: &str) -> Result<Function> {
        let call = Call::Load;
        let asked = || format!("the kernel {name} in its module; is it extern \"C\"?");
        let Ok(c_name) = CString::new(name) else {
            return Err(DeviceError::new(call, Code::InvalidValue, asked()));
        };
        let mut raw = ptr::null_mut();
        let text: *const c_char = c_name.as_ptr();
        // SAFETY: the module is loaded; the name is a C string that lives until the end of this function's call.
        let code = unsafe { (self.driver.cuModuleGetFunction)(&raw mut raw, module.raw.0, text) };
        self.check(call, code, asked)?;
        Ok(Function {
            raw: Shared(raw),
            name: name.into(),
            params: self.param_sizes(raw, module.parameters.get(name).copied())?,
        })
    }

    /// The sizes of a kernel's parameters, asked for one by one: as many as there are, or until the driver says that there is none, by failing.
    fn param_sizes(
        &self,
        function: sys::CUfunction,
        count: Option<usize>,
    ) -> Result<SmallVec<[u32; 12]>> {
        let mut sizes = SmallVec::new();
        while count.is_none_or(|count| sizes.len() < count) {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: the function is loaded; the pointers are to live locals.
            let code = unsafe {
                (self.driver.cuFuncGetParamInfo)(
                    function,
                    sizes.len(),
                    &raw mut offset,
                    &raw mut bytes,
                )
            };
            match code {
                SUCCESS => sizes.push(u32::try_from(bytes).unwrap_or(u32::MAX)),
                1 => break, // INVALID_VALUE: no such parameter
                code => self.check(Call::Load, code, || "a kernel's parameters".into())?,
            }
        }
        Ok(sizes)
    }

    /// Launches a kernel with arguments that are its own. The context is current.
    pub(super) fn launch_function(
        &self,
        stream: &Handle,
        function: &Function,
        config: LaunchConfig,
        args: &[KernelArg],
    ) -> Result<()> {
        let call = Call::Launch;
        let refuse = |why| DeviceError::new(call, Code::InvalidValue, why);
        if config.grid.contains(&0) || config.block.contains(&0) {
            let why = format!(
                "{} is launched with {config:?}; no extent may be 0",
                function.name
            );
            return Err(refuse(why));
        }
        function.check(args).map_err(refuse)?;
        let mut words: SmallVec<[u64; 12]> = args.iter().map(|arg| word(arg).0).collect();
        let mut params: SmallVec<[*mut c_void; 12]> = words
            .iter_mut()
            .map(|word| ptr::from_mut(word).cast())
            .collect();
        let ([gx, gy, gz], [bx, by, bz]) = (config.grid, config.block);
        // SAFETY: there is a pointer for each parameter of the kernel, to a word that has at least its size (checked above), first
        // byte lowest, as on every machine that CUDA runs on; the driver copies them at the call. Function and stream
        // live as long as their handles.
        let code = unsafe {
            (self.driver.cuLaunchKernel)(
                function.raw.0,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                config.shared_bytes,
                stream.raw.0,
                params.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.check(call, code, || {
            format!("{} on stream {} with {config:?}", function.name, stream.id)
        })
    }

    /// Unloads all modules: for the device's end, when no handle is left.
    pub(super) fn unload_modules(&self) {
        for (_, module) in lock(&self.modules).0.drain() {
            // SAFETY: the device loaded it, and no handle of a function or graph is left. The driver waits for running kernels.
            unsafe { (self.driver.cuModuleUnload)(module.raw.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DevicePtr;

    #[test]
    fn arguments_must_be_the_kernels() {
        let function = Function {
            raw: Shared(ptr::null_mut()),
            name: "f".into(),
            params: [8, 4].into_iter().collect(),
        };
        let ptr = KernelArg::Ptr(DevicePtr(0x10));
        assert_eq!(function.check(&[ptr, KernelArg::F32(1.0)]), Ok(()));
        for wrong in [
            &[ptr][..],
            &[ptr, ptr],
            &[ptr, KernelArg::U32(1), KernelArg::U32(2)],
        ] {
            assert!(function.check(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(word(&KernelArg::I32(-1)), (0xffff_ffff, 4));
        assert_eq!(word(&KernelArg::F64(1.0)), (1.0_f64.to_bits(), 8));
    }
}
