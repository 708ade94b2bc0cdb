//! Every kernel compiles where NVRTC is found. What needs a device is in `device.rs`.

use lockstep_cuda::{CudaError, compile_all};

#[test]
fn every_source_compiles_for_hopper() {
    match compile_all(90) {
        Err(CudaError::Library { library, problem }) => println!("skipped: {} {problem}", library.name()),
        Err(error) => panic!("{error}"),
        Ok(code) => {
            assert!(!code.is_empty());
            code.iter().for_each(|(name, code)| assert!(code.starts_with(b"\x7fELF"), "{name} is no machine code"));
        }
    }
}
