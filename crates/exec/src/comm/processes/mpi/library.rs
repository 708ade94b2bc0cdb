//! An MPI library, opened while the program runs: Open MPI, MPICH and its relatives, or one with the ABI of MPI 5.
//!
//! What the three have in common is the order of arguments. Handles are pointers, ints or small numbers, and are passed as words;
//! what a request is fits into 8 bytes everywhere.

use crate::library;
use std::ffi::{CStr, c_char, c_int, c_void};
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

/// What differs between libraries: handles, and numbers that mean something.
struct Flavour {
    world: usize,
    byte: usize,
    errors_return: usize,
    any_source: c_int,
    status_ignore: usize,
    /// Threads call MPI one at a time.
    serialized: c_int,
}

const MPICH: Flavour = Flavour {
    world: 0x4400_0000,
    byte: 0x4c00_010d,
    errors_return: 0x5400_0001,
    any_source: -2,
    status_ignore: 1,
    serialized: 2,
};

const MPI_5: Flavour =
    Flavour { world: 0x101, byte: 0x247, errors_return: 0x143, any_source: -1, status_ignore: 0, serialized: 2048 };

/// A send or a receive that is under way. 0 where there is none.
pub type Request = u64;

crate::functions! {
    /// The functions of the MPI standard, whose handles are words or smaller and passed in registers.
    Functions;
    init_thread = c"MPI_Init_thread": fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int;
    finalize = c"MPI_Finalize": fn() -> c_int;
    comm_rank = c"MPI_Comm_rank": fn(usize, *mut c_int) -> c_int;
    comm_size = c"MPI_Comm_size": fn(usize, *mut c_int) -> c_int;
    set_errhandler = c"MPI_Comm_set_errhandler": fn(usize, usize) -> c_int;
    isend = c"MPI_Isend": fn(*mut c_void, c_int, usize, c_int, c_int, usize, *mut Request) -> c_int;
    irecv = c"MPI_Irecv": fn(*mut c_void, c_int, usize, c_int, c_int, usize, *mut Request) -> c_int;
    test = c"MPI_Test": fn(*mut Request, *mut c_int, usize) -> c_int;
    cancel = c"MPI_Cancel": fn(*mut Request) -> c_int;
    request_free = c"MPI_Request_free": fn(*mut Request) -> c_int;
    library_version = c"MPI_Get_library_version": fn(*mut c_char, *mut c_int) -> c_int;
    error_string = c"MPI_Error_string": fn(c_int, *mut c_char, *mut c_int) -> c_int;
}

/// An open library.
pub struct Library {
    /// Its name and version.
    pub name: String,
    flavour: Flavour,
    functions: Functions,
}

/// The longest text that a library gives, with room to spare.
const TEXT: usize = 16 << 10;

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
        let library = library::Library::open(path)?;
        let missing = |name: &CStr| format!("it has no {}", name.to_string_lossy());
        let address = |name| library.symbol(name).map(|at| at as usize).ok_or_else(|| missing(name));
        let flavour = match address(c"ompi_mpi_comm_world") {
            _ if path.to_string_lossy().contains("mpi_abi") => MPI_5,
            Ok(world) => {
                let (byte, errors_return) = (address(c"ompi_mpi_byte")?, address(c"ompi_mpi_errors_return")?);
                Flavour { world, byte, errors_return, any_source: -1, status_ignore: 0, serialized: 2 }
            }
            Err(_) => MPICH,
        };
        let functions = Functions::find(&library, missing)?;
        Ok(Self { name: version(&functions), flavour, functions })
    }

    fn check(&self, what: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let (mut text, mut length) = ([0u8; TEXT], 0);
        // SAFETY: the text has more room than any library takes.
        let known = unsafe { (self.functions.error_string)(code, text.as_mut_ptr().cast(), &mut length) } == 0;
        let text = if known { string(&text) } else { format!("error {code}") };
        Err(format!("{what}: {text}"))
    }

    /// Starts MPI; this thread has to end it. Gives rank and ranks.
    pub fn init(&self) -> Result<(usize, usize), String> {
        let mut provided = 0;
        // SAFETY: MPI takes null for the arguments of the program.
        let code = unsafe {
            (self.functions.init_thread)(
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                self.flavour.serialized,
                &mut provided,
            )
        };
        self.check("MPI_Init_thread", code)?;
        if provided < self.flavour.serialized {
            return Err("it allows no threads".to_owned());
        }
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: MPI runs; the handles are this library's.
        unsafe {
            self.check(
                "MPI_Comm_set_errhandler",
                (self.functions.set_errhandler)(self.flavour.world, self.flavour.errors_return),
            )?;
            self.check("MPI_Comm_rank", (self.functions.comm_rank)(self.flavour.world, &mut rank))?;
            self.check("MPI_Comm_size", (self.functions.comm_size)(self.flavour.world, &mut ranks))?;
        }
        Ok((rank as usize, ranks as usize))
    }

    /// Ends MPI, with all others.
    pub fn finalize(&self) -> Result<(), String> {
        // SAFETY: the thread that started MPI ends it; nothing is under way.
        self.check("MPI_Finalize", unsafe { (self.functions.finalize)() })
    }

    /// Begins to send bytes.
    ///
    /// # Safety
    /// They stay as they are until the request is done, or until MPI is called no more. At most `i32::MAX`.
    pub unsafe fn send(&self, data: *const u8, bytes: usize, to: usize, tag: c_int) -> Result<Request, String> {
        let mut request = 0;
        // SAFETY: the caller vouches.
        let code = unsafe {
            (self.functions.isend)(
                data.cast_mut().cast(),
                bytes as c_int,
                self.flavour.byte,
                to as c_int,
                tag,
                self.flavour.world,
                &mut request,
            )
        };
        self.check("MPI_Isend", code).map(|()| request)
    }

    /// Begins to receive up to this many bytes, from one rank or any.
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
        let (mut request, from) = (0, from.map_or(self.flavour.any_source, |from| from as c_int));
        // SAFETY: the caller vouches.
        let code = unsafe {
            (self.functions.irecv)(
                data.cast(),
                bytes as c_int,
                self.flavour.byte,
                from,
                tag,
                self.flavour.world,
                &mut request,
            )
        };
        self.check("MPI_Irecv", code).map(|()| request)
    }

    /// Whether a request is done; if so it is gone.
    pub fn done(&self, request: &mut Request) -> Result<bool, String> {
        let mut flag = 0;
        // SAFETY: the request is one of this library's, or was done before.
        let code = unsafe { (self.functions.test)(request, &mut flag, self.flavour.status_ignore) };
        self.check("MPI_Test", code).map(|()| flag != 0)
    }

    /// Gives up a receive.
    pub fn cancel(&self, request: &mut Request) -> Result<(), String> {
        // SAFETY: the request is a receive that is under way.
        unsafe {
            self.check("MPI_Cancel", (self.functions.cancel)(request))?;
            self.check("MPI_Request_free", (self.functions.request_free)(request))
        }
    }
}

/// A text that ends with a zero.
fn string(text: &[u8]) -> String {
    CStr::from_bytes_until_nul(text).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn version(functions: &Functions) -> String {
    let (mut text, mut length) = ([0u8; TEXT], 0);
    // SAFETY: the text has more room than any library takes; this may be asked before MPI is started.
    let known = unsafe { (functions.library_version)(text.as_mut_ptr().cast(), &mut length) } == 0;
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
