//! NCCL: communicators of ranks that have a GPU each, and what is queued on streams for them.
//!
//! Communicators do not block: a call that waits for other processes returns at once, and the host looks whether it is done, and
//! whether those processes are still there.

use crate::CudaError;
use crate::driver::{Address, Stream};
use crate::library::{Name, functions};
use lockstep_ir::DType;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

type Handle = *mut c_void;

functions! {
    /// The library's version, which every one tells.
    Version, Name::Nccl;
    version = c"ncclGetVersion" safe: fn(&mut c_int) -> c_int;
}

functions! {
    /// The library's functions.
    Functions, Name::Nccl;
    unique_id = c"ncclGetUniqueId" safe: fn(&mut UniqueId) -> c_int;
    init = c"ncclCommInitRankConfig": fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int;
    state = c"ncclCommGetAsyncError": fn(Handle, *mut c_int) -> c_int;
    abort = c"ncclCommAbort": fn(Handle) -> c_int;
    finalize = c"ncclCommFinalize": fn(Handle) -> c_int;
    destroy = c"ncclCommDestroy": fn(Handle) -> c_int;
    all_reduce = c"ncclAllReduce": fn(Address, Address, usize, c_int, c_int, Handle, Handle) -> c_int;
    reduce_scatter = c"ncclReduceScatter": fn(Address, Address, usize, c_int, c_int, Handle, Handle) -> c_int;
    all_gather = c"ncclAllGather": fn(Address, Address, usize, c_int, Handle, Handle) -> c_int;
    send = c"ncclSend": fn(Address, usize, c_int, c_int, Handle, Handle) -> c_int;
    receive = c"ncclRecv": fn(Address, usize, c_int, c_int, Handle, Handle) -> c_int;
    group_start = c"ncclGroupStart" safe: fn() -> c_int;
    group_end = c"ncclGroupEnd": fn() -> c_int;
    error_text = c"ncclGetErrorString": fn(c_int) -> *const c_char;
    last_error = c"ncclGetLastError": fn(Handle) -> *const c_char;
}

/// What makes processes find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; UniqueId::BYTES]);

impl UniqueId {
    /// Its size.
    pub const BYTES: usize = 128;
}

/// `ncclConfig_t` as of [`LEAST`]; later libraries take it for what it is.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    least_ctas: c_int,
    most_ctas: c_int,
    network: *const c_char,
    split_share: c_int,
}

impl Config {
    /// All as the library likes it, but that calls do not wait for other processes.
    fn not_blocking() -> Self {
        const UNSET: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: LEAST as u32,
            blocking: 0,
            cga_cluster_size: UNSET,
            least_ctas: UNSET,
            most_ctas: UNSET,
            network: std::ptr::null(),
            split_share: UNSET,
        }
    }
}

/// The oldest version whose communicators can be configured so.
const LEAST: usize = 21700;

const IN_PROGRESS: c_int = 7;
const SUM: c_int = 0;
const BYTES: c_int = 1;

/// How long the loss of another rank, which the library has noticed, may take to be told.
const TOLD_WITHIN: Duration = Duration::from_secs(1);
/// How long the end of a communicator may take.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// The library.
pub struct Nccl {
    functions: Functions,
}

/// Its version, as 10000 × major + 100 × minor + patch, and where it was found. One that is too old is none.
pub fn version() -> Result<(usize, PathBuf), CudaError> {
    let (table, path) = Version::open()?;
    let mut found = 0;
    (table.version)(&mut found);
    let found = found.max(0) as usize;
    if found < LEAST {
        let text = |version: usize| match version {
            // As it was counted before 2.9.
            0..=9999 => format!("{}.{}.{}", version / 1000, version / 100 % 10, version % 100),
            _ => format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100),
        };
        let problem = format!("{} is too old: {} or newer is needed ({})", text(found), text(LEAST), path.display());
        return Err(CudaError::Library { library: Name::Nccl, problem });
    }
    Ok((found, path))
}

/// The library's number for a type that it adds up.
#[derive(Clone, Copy, Debug)]
pub struct SumType(c_int);

impl SumType {
    /// That of a type, if it has one whose sum is ours.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F16 => Some(Self(6)),
            DType::F32 => Some(Self(7)),
            DType::F64 => Some(Self(8)),
            DType::BF16 => Some(Self(9)),
            // A sum in fixed point that leaves its range says so.
            _ => None,
        }
    }
}

/// What a rank asks for. Addresses are of the device's memory.
#[derive(Clone, Copy, Debug)]
pub enum Ask {
    /// The sum of all members' elements for all.
    AllReduce { input: Address, output: Address, elements: usize, of: SumType },
    /// The i-th part of the sum for the i-th member.
    ReduceScatter { input: Address, output: Address, elements: usize, of: SumType },
    /// All members' bytes for all.
    AllGather { input: Address, output: Address, bytes: usize },
    /// Bytes for a member.
    Send { input: Address, bytes: usize, to: usize },
    /// Bytes of a member.
    Receive { output: Address, bytes: usize, from: usize },
}

impl Nccl {
    /// The library of this process.
    pub fn get() -> Result<&'static Nccl, CudaError> {
        static NCCL: OnceLock<Result<Nccl, CudaError>> = OnceLock::new();
        let open = || {
            version()?;
            Ok(Nccl { functions: Functions::open()?.0 })
        };
        NCCL.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// What a new communicator's members need.
    pub fn unique_id(&self) -> Result<UniqueId, CudaError> {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        let status = (self.functions.unique_id)(&mut id);
        self.check("ncclGetUniqueId", status, std::ptr::null_mut())?;
        Ok(id)
    }

    fn check(&self, call: &'static str, status: c_int, handle: Handle) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        let text = |at: *const c_char| match at.is_null() {
            true => String::new(),
            // SAFETY: the library gives texts that end with a zero.
            false => unsafe { CStr::from_ptr(at) }.to_string_lossy().trim().to_owned(),
        };
        // SAFETY: the handle is of an open communicator, or null, which means all.
        let (what, more) = unsafe { ((self.functions.error_text)(status), (self.functions.last_error)(handle)) };
        let said = [text(what), text(more)].into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join(": ");
        Err(CudaError::of_nccl(call, status, said))
    }
}

/// Members that communicate, of which this process is one.
pub struct NcclComm {
    nccl: &'static Nccl,
    handle: Handle,
}

// SAFETY: communicators may be used from any thread, one at a time; who has it sees to that.
unsafe impl Send for NcclComm {}
// SAFETY: as above; to abort it from another thread is what the library is made for.
unsafe impl Sync for NcclComm {}

/// Of an error of the library, the loss of another rank where that is the cause: the library may notice it before it is told of.
fn cause(error: CudaError, watch: &dyn Fn() -> Result<(), CudaError>) -> CudaError {
    let until = Instant::now() + TOLD_WITHIN;
    while Instant::now() < until {
        if let Err(error) = watch() {
            return error;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    error
}

impl NcclComm {
    /// Begins to join as the member `index` of `members`. The device's context is this thread's.
    pub fn begin(nccl: &'static Nccl, id: UniqueId, index: usize, members: usize) -> Result<Self, CudaError> {
        let (mut handle, mut config) = (std::ptr::null_mut(), Config::not_blocking());
        // SAFETY: the addresses are valid for the call, which copies what they hold.
        let status = unsafe {
            (nccl.functions.init)(&mut handle, members as c_int, id, index as c_int, std::ptr::from_mut(&mut config))
        };
        let comm = Self { nccl, handle };
        if status != IN_PROGRESS {
            nccl.check("ncclCommInitRankConfig", status, std::ptr::null_mut())?;
        }
        Ok(comm)
    }

    /// Waits until all members have joined. `watch` says whether it has sense to wait for the others.
    pub fn joined(&self, watch: &dyn Fn() -> Result<(), CudaError>) -> Result<(), CudaError> {
        self.settle("ncclCommInitRankConfig", watch)
    }

    /// Waits until the library has done what it was asked for last: on the host; on the device it is queued then.
    fn settle(&self, call: &'static str, watch: &dyn Fn() -> Result<(), CudaError>) -> Result<(), CudaError> {
        let mut looks = 0;
        loop {
            let mut state = 0;
            // SAFETY: the communicator is open; the address is valid for the call.
            let status = unsafe { (self.nccl.functions.state)(self.handle, &mut state) };
            self.nccl.check("ncclCommGetAsyncError", status, self.handle)?;
            if state != IN_PROGRESS {
                return self.nccl.check(call, state, self.handle).map_err(|error| cause(error, watch));
            }
            watch()?;
            looks += 1;
            if looks < 100 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(50)) }
        }
    }

    /// Queues all of these on a stream as one.
    ///
    /// # Safety
    /// Addresses and sizes are of memory of the device that nobody else uses until the stream has come so far; all members ask
    /// for what fits together.
    pub unsafe fn queue(
        &self,
        stream: &Stream,
        asks: &[Ask],
        watch: &dyn Fn() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if asks.is_empty() {
            return Ok(());
        }
        let (f, comm, stream) = (&self.nccl.functions, self.handle, stream.handle());
        self.nccl.check("ncclGroupStart", (f.group_start)(), comm)?;
        let mut asked = Ok(());
        for ask in asks {
            // SAFETY: the caller vouches for the memory; communicator and stream are open.
            let (call, status) = unsafe {
                match *ask {
                    Ask::AllReduce { input, output, elements, of } => {
                        ("ncclAllReduce", (f.all_reduce)(input, output, elements, of.0, SUM, comm, stream))
                    }
                    Ask::ReduceScatter { input, output, elements, of } => {
                        ("ncclReduceScatter", (f.reduce_scatter)(input, output, elements, of.0, SUM, comm, stream))
                    }
                    Ask::AllGather { input, output, bytes } => {
                        ("ncclAllGather", (f.all_gather)(input, output, bytes, BYTES, comm, stream))
                    }
                    Ask::Send { input, bytes, to } => {
                        ("ncclSend", (f.send)(input, bytes, BYTES, to as c_int, comm, stream))
                    }
                    Ask::Receive { output, bytes, from } => {
                        ("ncclRecv", (f.receive)(output, bytes, BYTES, from as c_int, comm, stream))
                    }
                }
            };
            if status != IN_PROGRESS {
                asked = asked.and(self.nccl.check(call, status, comm));
            }
        }
        // SAFETY: a group was started.
        let status = unsafe { (f.group_end)() };
        asked?;
        if status != IN_PROGRESS {
            self.nccl.check("ncclGroupEnd", status, comm)?;
        }
        self.settle("ncclGroupEnd", watch)
    }

    /// Ends what runs on the device, and the communicator. Waits until the graphs that it was captured in are gone; may take for ever.
    pub fn abort(&self) {
        // SAFETY: the communicator is open, and not used afterwards.
        unsafe { (self.nccl.functions.abort)(self.handle) };
    }

    /// Ends the communicator after all that was queued has run, as all members do.
    pub fn close(&self, watch: &dyn Fn() -> Result<(), CudaError>) {
        let until = Instant::now() + ENDS_WITHIN;
        let hope = || match Instant::now() < until {
            true => watch(),
            false => Err(CudaError::Internal("a communicator does not end".into())),
        };
        // SAFETY: the communicator is open, and not used afterwards. What does not end is left to the end of the process.
        unsafe {
            (self.nccl.functions.finalize)(self.handle);
            if self.settle("ncclCommFinalize", &hope).is_ok() {
                (self.nccl.functions.destroy)(self.handle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_config_is_the_librarys() {
        assert_eq!(size_of::<Config>(), 48);
        let offsets = [std::mem::offset_of!(Config, blocking), std::mem::offset_of!(Config, network)];
        assert_eq!(offsets, [16, 32]);
    }
}
