//! An MPI library, opened while the program runs: Open MPI, MPICH and its relatives, or one with the ABI of MPI 5.
//!
//! What the three have in common is the order of arguments. Handles are pointers, ints or small numbers, and are passed as words;
//! what a request is fits into 8 bytes everywhere.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// The MPI library that a process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MpiLibrary {
    /// Open MPI's, whose `mpirun` started it.
    OpenMpi,
    /// MPICH's or that of a relative, which started it.
    Mpich,
    /// This file.
    File(PathBuf),
}

impl MpiLibrary {
    fn files(&self) -> Vec<PathBuf> {
        match self {
            MpiLibrary::OpenMpi => ["libmpi.so.40", "libmpi_abi.so.1"].map(PathBuf::from).to_vec(),
            MpiLibrary::Mpich => ["libmpich.so.12", "libmpi.so.12", "libmpi_abi.so.1"].map(PathBuf::from).to_vec(),
            MpiLibrary::File(path) => vec![path.clone()],
        }
    }
}

/// A handle: a value, or the address of something in the library.
enum Handle {
    Value(usize),
    Address(&'static CStr),
}

/// What differs between libraries.
struct Flavour {
    world: Handle,
    byte: Handle,
    errors_return: Handle,
    any_source: c_int,
    status_ignore: usize,
    /// Threads call MPI one at a time.
    serialized: c_int,
}

const OPEN_MPI: Flavour = Flavour {
    world: Handle::Address(c"ompi_mpi_comm_world"),
    byte: Handle::Address(c"ompi_mpi_byte"),
    errors_return: Handle::Address(c"ompi_mpi_errors_return"),
    any_source: -1,
    status_ignore: 0,
    serialized: 2,
};

const MPICH: Flavour = Flavour {
    world: Handle::Value(0x4400_0000),
    byte: Handle::Value(0x4c00_010d),
    errors_return: Handle::Value(0x5400_0001),
    any_source: -2,
    status_ignore: 1,
    serialized: 2,
};

const MPI_5: Flavour = Flavour {
    world: Handle::Value(0x101),
    byte: Handle::Value(0x247),
    errors_return: Handle::Value(0x143),
    any_source: -1,
    status_ignore: 0,
    serialized: 2048,
};

/// A send or a receive that is under way. 0 where there is none.
pub type Request = u64;

type InitThread = unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int;
type Plain = unsafe extern "C" fn() -> c_int;
type Number = unsafe extern "C" fn(usize, *mut c_int) -> c_int;
type TwoHandles = unsafe extern "C" fn(usize, usize) -> c_int;
type Move = unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, c_int, usize, *mut Request) -> c_int;
type Test = unsafe extern "C" fn(*mut Request, *mut c_int, usize) -> c_int;
type OfRequest = unsafe extern "C" fn(*mut Request) -> c_int;
type Version = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;
type ErrorText = unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int;

/// An open library. It stays open as long as the process lives.
pub struct Library {
    /// Its name and version.
    pub name: String,
    world: usize,
    byte: usize,
    errors_return: usize,
    any_source: c_int,
    status_ignore: usize,
    serialized: c_int,
    init_thread: InitThread,
    finalize: Plain,
    comm_rank: Number,
    comm_size: Number,
    set_errhandler: TwoHandles,
    isend: Move,
    irecv: Move,
    test: Test,
    cancel: OfRequest,
    request_free: OfRequest,
    error_string: ErrorText,
}

/// The longest text that a library gives, with room to spare.
const TEXT: usize = 16 << 10;

fn symbol(handle: *mut c_void, name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: the handle is of an open library, the name ends with a zero.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if address.is_null() { Err(format!("it has no {}", name.to_string_lossy())) } else { Ok(address) }
}

/// The function of this name as the type that the caller says it has.
///
/// # Safety
/// It has this type, which is a function pointer.
unsafe fn function<F: Copy>(handle: *mut c_void, name: &CStr) -> Result<F, String> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let address = symbol(handle, name)?;
    // SAFETY: both are as large as a pointer; the caller vouches for the type.
    Ok(unsafe { std::mem::transmute_copy(&address) })
}

impl Library {
    /// Opens the first that is there.
    pub fn open(which: &MpiLibrary) -> Result<Self, String> {
        let files = which.files();
        let mut why = String::new();
        for path in &files {
            match Self::open_file(path) {
                Ok(library) => return Ok(library),
                Err(error) if why.is_empty() => why = error,
                Err(_) => {}
            }
        }
        Err(why)
    }

    fn open_file(path: &Path) -> Result<Self, String> {
        let text = path.to_str().and_then(|path| CString::new(path).ok());
        let text = text.ok_or_else(|| format!("{} is no name for a library", path.display()))?;
        // SAFETY: opening a library runs its initialisers. Its parts look for each other's symbols, so all are visible.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            // SAFETY: the system gives a text that lasts until its next call in this thread, or nothing.
            let why = unsafe {
                let text = libc::dlerror();
                if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
            };
            return Err(why);
        }
        let flavour = if path.to_string_lossy().contains("mpi_abi") {
            MPI_5
        } else if symbol(handle, c"ompi_mpi_comm_world").is_ok() {
            OPEN_MPI
        } else {
            MPICH
        };
        let value = |of: &Handle| match of {
            Handle::Value(value) => Ok(*value),
            Handle::Address(name) => symbol(handle, name).map(|address| address as usize),
        };
        // SAFETY: these are the functions of the MPI standard, whose handles are words or smaller and passed in registers.
        unsafe {
            Ok(Self {
                name: version(function(handle, c"MPI_Get_library_version")?),
                world: value(&flavour.world)?,
                byte: value(&flavour.byte)?,
                errors_return: value(&flavour.errors_return)?,
                any_source: flavour.any_source,
                status_ignore: flavour.status_ignore,
                serialized: flavour.serialized,
                init_thread: function(handle, c"MPI_Init_thread")?,
                finalize: function(handle, c"MPI_Finalize")?,
                comm_rank: function(handle, c"MPI_Comm_rank")?,
                comm_size: function(handle, c"MPI_Comm_size")?,
                set_errhandler: function(handle, c"MPI_Comm_set_errhandler")?,
                isend: function(handle, c"MPI_Isend")?,
                irecv: function(handle, c"MPI_Irecv")?,
                test: function(handle, c"MPI_Test")?,
                cancel: function(handle, c"MPI_Cancel")?,
                request_free: function(handle, c"MPI_Request_free")?,
                error_string: function(handle, c"MPI_Error_string")?,
            })
        }
    }

    fn check(&self, what: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let (mut text, mut length) = ([0u8; TEXT], 0);
        // SAFETY: the text has more room than any library takes.
        let known = unsafe { (self.error_string)(code, text.as_mut_ptr().cast(), &mut length) } == 0;
        let text = if known { string(&text) } else { format!("error {code}") };
        Err(format!("{what}: {text}"))
    }

    /// Starts MPI; this thread has to end it. Gives rank and ranks.
    pub fn init(&self) -> Result<(usize, usize), String> {
        let mut provided = 0;
        // SAFETY: MPI takes null for the arguments of the program.
        let code =
            unsafe { (self.init_thread)(std::ptr::null_mut(), std::ptr::null_mut(), self.serialized, &mut provided) };
        self.check("MPI_Init_thread", code)?;
        if provided < self.serialized {
            return Err("it allows no threads".to_owned());
        }
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: MPI runs; the handles are this library's.
        unsafe {
            self.check("MPI_Comm_set_errhandler", (self.set_errhandler)(self.world, self.errors_return))?;
            self.check("MPI_Comm_rank", (self.comm_rank)(self.world, &mut rank))?;
            self.check("MPI_Comm_size", (self.comm_size)(self.world, &mut ranks))?;
        }
        Ok((rank as usize, ranks as usize))
    }

    /// Ends MPI, with all others.
    pub fn finalize(&self) -> Result<(), String> {
        // SAFETY: the thread that started MPI ends it; nothing is under way.
        self.check("MPI_Finalize", unsafe { (self.finalize)() })
    }

    /// Begins to send bytes.
    ///
    /// # Safety
    /// They stay as they are until the request is done, or until MPI is called no more. At most `i32::MAX`.
    pub unsafe fn send(&self, data: *const u8, bytes: usize, to: usize, tag: c_int) -> Result<Request, String> {
        let mut request = 0;
        // SAFETY: the caller vouches.
        let code = unsafe {
            (self.isend)(data.cast_mut().cast(), bytes as c_int, self.byte, to as c_int, tag, self.world, &mut request)
        };
        self.check("MPI_Isend", code).map(|()| request)
    }

    /// Begins to receive up to so many bytes, from one rank or any.
    ///
    /// # Safety
    /// Nobody else uses this memory until the request is done, or until MPI is called no more. At most `i32::MAX` bytes.
    pub unsafe fn receive(
        &self,
        data: *mut u8,
        bytes: usize,
        from: Option<usize>,
        tag: c_int,
    ) -> Result<Request, String> {
        let (mut request, from) = (0, from.map_or(self.any_source, |from| from as c_int));
        // SAFETY: the caller vouches.
        let code = unsafe { (self.irecv)(data.cast(), bytes as c_int, self.byte, from, tag, self.world, &mut request) };
        self.check("MPI_Irecv", code).map(|()| request)
    }

    /// Whether a request is done; if so it is gone.
    pub fn done(&self, request: &mut Request) -> Result<bool, String> {
        let mut flag = 0;
        // SAFETY: the request is one of this library's, or was done before.
        let code = unsafe { (self.test)(request, &mut flag, self.status_ignore) };
        self.check("MPI_Test", code).map(|()| flag != 0)
    }

    /// Gives up a receive.
    pub fn cancel(&self, request: &mut Request) -> Result<(), String> {
        // SAFETY: the request is a receive that is under way.
        unsafe {
            self.check("MPI_Cancel", (self.cancel)(request))?;
            self.check("MPI_Request_free", (self.request_free)(request))
        }
    }
}

/// A text that ends with a zero.
fn string(text: &[u8]) -> String {
    CStr::from_bytes_until_nul(text).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn version(get: Version) -> String {
    let (mut text, mut length) = ([0u8; TEXT], 0);
    // SAFETY: the text has more room than any library takes; this may be asked before MPI is started.
    let known = unsafe { get(text.as_mut_ptr().cast(), &mut length) } == 0;
    if known { short(&string(&text)) } else { "MPI".to_owned() }
}

/// `Open MPI v4.1.4`, `MPICH 4.0.2`.
fn short(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let line = line.split(',').next().unwrap_or_default().replace(" Version:", "");
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_shortened() {
        let open_mpi = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022";
        assert_eq!(short(open_mpi), "Open MPI v4.1.4");
        assert_eq!(short("MPICH Version:\t4.0.2\nMPICH Release date:\tThu Apr  7"), "MPICH 4.0.2");
        assert_eq!(short(""), "");
    }

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let missing = MpiLibrary::File("no/such/libmpi.so".into());
        let error = Library::open(&missing).err().unwrap();
        assert!(error.contains("no/such/libmpi.so"), "{error}");
        // The C library is none.
        let error = Library::open(&MpiLibrary::File("libc.so.6".into())).err().unwrap();
        assert!(error.contains("it has no MPI_"), "{error}");
    }
}
