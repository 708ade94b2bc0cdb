//! Every kernel compiles where NVRTC is found. What needs a device is in `device.rs`.

use lockstep_cuda::{CudaError, compile_all};
use std::io::Write;

#[test]
fn every_source_compiles_for_hopper() {
    match compile_all(90) {
        // Who says where the libraries are, as CI does, means them to be there.
        Err(error @ CudaError::Library { .. }) if std::env::var_os("LOCKSTEP_CUDA_LIBRARIES").is_some() => {
            panic!("{error}")
        }
        // Past the test runner, which hides what a test that passes prints.
        Err(CudaError::Library { library, problem }) => {
            let _ = writeln!(std::io::stderr(), "skipped: {} {problem}", library.name());
        }
        Err(error) => panic!("{error}"),
        Ok(code) => {
            assert!(!code.is_empty());
            code.iter().for_each(|(name, code)| assert!(code.starts_with(b"\x7fELF"), "{name} is no machine code"));
        }
    }
}
