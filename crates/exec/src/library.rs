//! Shared libraries, opened while the program runs: the binary needs none of them to start.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};

/// An open library. It stays open as long as the process lives: what it started may still run.
#[derive(Clone, Debug)]
pub struct Library {
    handle: usize,
    /// Where it was found.
    pub path: PathBuf,
}

impl Library {
    /// Opens the library of this path, or of this name where the system looks; or says why it cannot.
    pub fn open(path: &Path) -> Result<Self, String> {
        let text = path.to_str().and_then(|p| CString::new(p).ok());
        let text = text.ok_or_else(|| format!("{} is no name for a library", path.display()))?;
        // SAFETY: opening a library runs its initialisers, which are made for that. Its parts look for each other's symbols, so all
        // are visible.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            // SAFETY: the system gives a text that lasts until its next call in this thread, or nothing.
            let why = unsafe {
                let text = libc::dlerror();
                if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
            };
            return Err(why);
        }
        Ok(Self { handle: handle as usize, path: real_path(handle).unwrap_or_else(|| path.to_owned()) })
    }

    /// The address of a function or a variable.
    pub fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is open.
        let address = unsafe { libc::dlsym(self.handle as *mut c_void, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// Where an open library lies.
fn real_path(handle: *mut c_void) -> Option<PathBuf> {
    #[repr(C)]
    struct LinkMap {
        address: usize,
        name: *const c_char,
    }
    let mut map: *mut LinkMap = std::ptr::null_mut();
    // SAFETY: the handle is open; `map` receives the address of its link map, whose first fields are these.
    unsafe {
        if libc::dlinfo(handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) != 0 || map.is_null() {
            return None;
        }
        let name = CStr::from_ptr((*map).name).to_str().ok()?;
        (!name.is_empty()).then(|| PathBuf::from(name))
    }
}

/// Declares functions of a library as a struct of addresses, which `find` looks up. One that takes numbers and places of results
/// alone is declared `safe`.
#[macro_export]
macro_rules! functions {
    (@type; $($arg:ty),*; $result:ty) => { unsafe extern "C" fn($($arg),*) -> $result };
    (@type safe; $($arg:ty),*; $result:ty) => { extern "C" fn($($arg),*) -> $result };
    ($(#[$doc:meta])* $table:ident; $($field:ident = $symbol:literal $($safe:ident)?: fn($($arg:ty),* $(,)?) -> $result:ty;)*) => {
        $(#[$doc])*
        pub(crate) struct $table {
            $(pub $field: $crate::functions!(@type $($safe)?; $($arg),*; $result),)*
        }

        impl $table {
            /// Finds them all; `missing` makes the error for one that is not there.
            pub fn find<E>(
                library: &$crate::library::Library,
                missing: impl Fn(&std::ffi::CStr) -> E,
            ) -> Result<Self, E> {
                Ok(Self {
                    $($field: {
                        let address = library.symbol($symbol).ok_or_else(|| missing($symbol))?;
                        type Type = $crate::functions!(@type $($safe)?; $($arg),*; $result);
                        // SAFETY: the library's documentation gives this function this type. One that is declared safe takes
                        // numbers and places of results alone, and refuses numbers that mean nothing.
                        unsafe { std::mem::transmute::<*mut std::ffi::c_void, Type>(address) }
                    },)*
                })
            }
        }
    };
}
