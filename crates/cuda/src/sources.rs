//! The sources of kernels, and their compilation.
//!
//! Kernels include no header of the toolkit, so NVRTC alone compiles them, without a GPU too.

use crate::{CudaError, nvrtc};

/// What every source begins with.
pub const COMMON: &str = concat!(include_str!("../kernels/common.cuh"), include_str!("../kernels/sums.cuh"));

/// What grouped matmuls begin with.
macro_rules! hopper {
    () => {
        concat!(include_str!("../kernels/hopper.cuh"), include_str!("../kernels/grouped.cuh"))
    };
}

/// What matmuls of few rows begin with.
macro_rules! skinny {
    () => {
        concat!(include_str!("../kernels/units.cuh"), include_str!("../kernels/skinny.cuh"))
    };
}

/// All sources, by name.
pub const SOURCES: [(&str, &str); 31] = [
    ("attention", include_str!("../kernels/attention.cu")),
    ("attention_dq", include_str!("../kernels/attention_dq.cu")),
    ("bytes", concat!(skinny!(), include_str!("../kernels/bytes.cu"))),
    ("collectives", include_str!("../kernels/collectives.cu")),
    ("context", include_str!("../kernels/context.cu")),
    ("documents", include_str!("../kernels/documents.cu")),
    ("elements", include_str!("../kernels/elements.cu")),
    ("embedding_grad", include_str!("../kernels/embedding_grad.cu")),
    ("expert_bias", include_str!("../kernels/expert_bias.cu")),
    ("experts", include_str!("../kernels/experts.cu")),
    ("fine", concat!(include_str!("../kernels/fp8.cuh"), include_str!("../kernels/fine.cu"))),
    ("grouped", concat!(hopper!(), include_str!("../kernels/grouped.cu"))),
    ("grouped_fp8", concat!(hopper!(), include_str!("../kernels/grouped_fp8.cu"))),
    ("kept", concat!(include_str!("../kernels/many.cuh"), include_str!("../kernels/kept.cu"))),
    ("latent", concat!(include_str!("../kernels/units.cuh"), include_str!("../kernels/latent.cu"))),
    ("latent_cache", concat!(include_str!("../kernels/units.cuh"), include_str!("../kernels/latent_cache.cu"))),
    ("loss", include_str!("../kernels/loss.cu")),
    ("map", concat!(include_str!("../kernels/map.cu"), crate::ops::pointwise::maps!())),
    ("naive", include_str!("../kernels/naive.cu")),
    ("norm", include_str!("../kernels/norm.cu")),
    ("numbers", include_str!("../kernels/numbers.cu")),
    ("optimizer", concat!(include_str!("../kernels/many.cuh"), include_str!("../kernels/optimizer.cu"))),
    ("paged", concat!(include_str!("../kernels/units.cuh"), include_str!("../kernels/paged.cu"))),
    ("pointwise", include_str!("../kernels/pointwise.cu")),
    ("quantise", concat!(include_str!("../kernels/fp8.cuh"), include_str!("../kernels/quantise.cu"))),
    ("router", include_str!("../kernels/router.cu")),
    ("sections", include_str!("../kernels/sections.cu")),
    ("sink", include_str!("../kernels/sink.cu")),
    ("skinny", concat!(skinny!(), include_str!("../kernels/skinny.cu"))),
    ("sums", include_str!("../kernels/sums.cu")),
    ("words", include_str!("../kernels/words.cu")),
];

/// Compiles every kernel for a compute capability, and gives the bytes of machine code of each source. Needs no device.
pub fn compile_all(capability: u32) -> Result<Vec<(&'static str, Vec<u8>)>, CudaError> {
    let compile = |(name, source): (&'static str, &'static str)| {
        Ok((name, nvrtc::cubin(name, &format!("{COMMON}{source}"), capability)?))
    };
    // They do not depend on each other, and what is not cached takes a second or two each.
    std::thread::scope(|scope| {
        let threads: Vec<_> = SOURCES.map(|s| scope.spawn(move || compile(s))).into_iter().collect();
        let lost = |_| Err(CudaError::Internal("the compiler of kernels stopped".into()));
        threads.into_iter().map(|t| t.join().unwrap_or_else(lost)).collect()
    })
}
