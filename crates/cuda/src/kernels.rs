//! Loaded kernels and their launches.

use crate::CudaError;
use crate::driver::{Address, Device, Function, Module, Stream};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock};

/// Loaded kernels of a device.
pub struct Kernels {
    device: Arc<Device>,
    modules: Vec<(&'static str, Module)>,
    functions: RwLock<HashMap<String, Function>>,
}

/// An argument of a kernel. `launches.rs` holds its kind against the parameter that the kernel declares.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    /// An address on the device, or null.
    Address(Address),
    /// A number of 64 bits.
    Long(u64),
    /// A number of 32 bits.
    Word(u32),
    /// A number of as many bits as the parameter has.
    Size(usize),
    /// A float.
    Float(f32),
    /// A double.
    Double(f64),
}

impl Value {
    /// What a kernel reads the low bytes of.
    fn bits(self) -> u64 {
        match self {
            Value::Address(x) | Value::Long(x) => x,
            Value::Word(x) => x.into(),
            Value::Size(x) => x as u64,
            Value::Float(x) => x.to_bits().into(),
            Value::Double(x) => x.to_bits(),
        }
    }
}

macro_rules! values {
    ($($type:ty: $x:ident => $value:expr;)*) => {
        $(impl From<$type> for Value {
            fn from($x: $type) -> Self {
                $value
            }
        })*
    };
}

values! {
    Address: x => Value::Address(x);
    // A place that may be missing: null then.
    Option<Address>: x => Value::Address(x.unwrap_or(0));
    usize: x => Value::Size(x);
    i32: x => Value::Word(x as u32);
    u32: x => Value::Word(x);
    bool: x => Value::Word(x.into());
    f32: x => Value::Float(x);
    f64: x => Value::Double(x);
}

/// The arguments of a kernel, in order.
macro_rules! args {
    ($($x:expr),* $(,)?) => { &[$(crate::kernels::Value::from($x)),*] };
}
pub(crate) use args;

const MOST_ARGS: usize = 25;

impl Kernels {
    /// Loads the machine code of all sources.
    pub fn load(device: &Arc<Device>, code: Vec<(&'static str, Vec<u8>)>) -> Result<Self, CudaError> {
        let modules = code.into_iter().map(|(name, code)| Ok((name, Module::load(device, &code)?)));
        let modules = modules.collect::<Result<Vec<_>, CudaError>>()?;
        Ok(Self { device: device.clone(), modules, functions: RwLock::default() })
    }

    /// Compute capability of the device that they are for, as 10 × major + minor.
    pub fn capability(&self) -> u32 {
        self.device.capability
    }

    /// Its multiprocessors.
    pub fn processors(&self) -> usize {
        self.device.processors as usize
    }

    fn function(&self, source: &str, name: &str) -> Result<Function, CudaError> {
        let key = format!("{source}/{name}");
        // Many threads launch kernels; few are the first to launch one.
        if let Some(function) = self.functions.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(*function);
        }
        let module = self.modules.iter().find(|(n, _)| *n == source);
        let (_, module) = module.ok_or_else(|| CudaError::Internal(format!("no kernels called {source}")))?;
        let function = module.function(&self.device, name)?;
        self.functions.write().unwrap_or_else(PoisonError::into_inner).insert(key, function);
        Ok(function)
    }

    /// The same, on a stream.
    pub fn on<'a>(&'a self, stream: &'a Stream) -> Launcher<'a> {
        Launcher { kernels: self, stream, early: false }
    }
}

/// Kernels, and the stream that they are queued on.
#[derive(Clone, Copy)]
pub struct Launcher<'a> {
    pub kernels: &'a Kernels,
    pub stream: &'a Stream,
    /// Whether kernels that can do so begin before what is queued has ended.
    pub early: bool,
}

/// Kernels that wait for those before them, by the beginnings of their names: they may be launched early.
const WAITING: [(&str, &str); 8] = [
    ("attention", "cache_write_"),
    ("norm", "add_rms_norm_"),
    ("norm", "rms_norm_"),
    ("paged", "argmax_"),
    ("paged", "decode_"),
    ("pointwise", "rope_"),
    ("pointwise", "swiglu_"),
    ("skinny", "skinny_"),
];

/// Gradients have names that begin alike.
fn waits(source: &str, name: &str) -> bool {
    !name.contains("_grad") && WAITING.iter().any(|(of, start)| *of == source && name.starts_with(start))
}

/// A block of threads.
#[derive(Clone, Copy)]
pub struct Block {
    pub threads: usize,
    /// Bytes of shared memory besides what the kernel declares.
    pub shared: usize,
}

/// Most bytes that a kernel copies.
const FEW_BYTES: usize = 2048;

impl Launcher<'_> {
    /// Queues a copy between any two places of the device's memory and pinned memory of the host. A kernel copies a few words: between kernels, the copy engine
    /// takes several microseconds to begin and to end.
    ///
    /// # Safety
    /// Both places have this many bytes, do not overlap, and stay as they are until the copy is done.
    pub unsafe fn copy(self, to: Address, from: Address, bytes: usize) -> Result<(), CudaError> {
        let words = [to, from, bytes as u64].iter().all(|n| n.is_multiple_of(4));
        // SAFETY: the caller vouches.
        unsafe {
            match bytes {
                0 => Ok(()),
                1..=FEW_BYTES if words => self.launch(("words", "copy_words"), [1; 3], 128, args![to, from, bytes / 4]),
                _ => self.stream.copy(to, from, bytes),
            }
        }
    }

    /// Queues a kernel of a source.
    ///
    /// # Safety
    /// The arguments are those of the kernel's parameters, and what they point at is theirs.
    pub unsafe fn launch(
        self,
        kernel: (&str, &str),
        grid: [usize; 3],
        threads: usize,
        args: &[Value],
    ) -> Result<(), CudaError> {
        // SAFETY: the contract is this one's: nothing is given as a struct.
        unsafe { self.launch_with(kernel, grid, Block { threads, shared: 0 }, None, args) }
    }

    /// The same for a kernel whose first parameter is a struct, given as its bytes.
    ///
    /// # Safety
    /// As for [`Launcher::launch`].
    pub unsafe fn launch_with(
        self,
        (source, name): (&str, &str),
        grid: [usize; 3],
        block: Block,
        first: Option<&[u64]>,
        args: &[Value],
    ) -> Result<(), CudaError> {
        #[cfg(test)]
        crate::launches::check((source, name), first.is_some(), args);
        // Nothing to do is nothing to launch.
        if grid.contains(&0) {
            return Ok(());
        }
        if grid[0] > i32::MAX as usize || grid[1] > 65535 || grid[2] > 65535 || args.len() > MOST_ARGS {
            return Err(CudaError::Internal(format!("{name} with a grid of {grid:?}")));
        }
        let function = self.kernels.function(source, name)?;
        let mut values = [0; MOST_ARGS];
        values.iter_mut().zip(args).for_each(|(to, arg)| *to = arg.bits());
        let given = first.map(|words| words.as_ptr().cast_mut().cast::<c_void>());
        let mut pointers = [std::ptr::null_mut(); MOST_ARGS + 1];
        let all = given.into_iter().chain(values.iter_mut().map(|v| std::ptr::from_mut(v).cast()));
        pointers.iter_mut().zip(all).for_each(|(to, from)| *to = from);
        let count = args.len() + usize::from(first.is_some());
        let grid = grid.map(|n| n as u32);
        // SAFETY: the caller vouches for the arguments.
        unsafe {
            let (threads, early) = (block.threads as u32, self.early && waits(source, name));
            function.launch(self.stream, grid, threads, block.shared, early, &mut pointers[..count])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::WAITING;
    use crate::sources::SOURCES;

    #[test]
    fn kernels_that_are_launched_early_wait_for_those_before_them() {
        // Where the body of each begins: of decoding there are two.
        let bodies = [
            ("attention", "void cache_write("),
            ("norm", "#define NORM_ONE("),
            ("paged", "void argmax("),
            ("paged", "void attend("),
            ("paged", "void merge("),
            ("pointwise", "void rope_##NAME("),
            ("pointwise", "void swiglu_##NAME("),
            ("skinny", "void skinny("),
        ];
        for (source, _) in WAITING {
            assert!(bodies.iter().any(|(of, _)| *of == source), "{source} has no body here");
        }
        for (source, begins) in bodies {
            let text = SOURCES.iter().find(|(name, _)| *name == source).unwrap().1;
            let body = text.split_once(begins).unwrap_or_else(|| panic!("{source} has no {begins}")).1;
            // Up to the next kernel or function.
            let end = ["extern \"C\" __global__", "static __device__ void", "#define"].map(|next| {
                let first = if begins.starts_with("#define") { body.find("extern").unwrap() + 6 } else { 0 };
                body[first..].find(next).map_or(body.len(), |at| first + at)
            });
            let body = &body[..end.into_iter().min().unwrap()];
            assert!(body.contains("wait_for_those_before()"), "{source}: {begins} does not wait");
        }
    }
}
