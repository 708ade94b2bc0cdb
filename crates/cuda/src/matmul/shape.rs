//! What a matmul is: which factors, of which sizes and types, in which units.

use super::{COMPUTE_32F, COMPUTE_32F_FAST_TF32, Epilogue};
use lockstep_ir::DType;
use lockstep_ir::op::Fine;
use std::ffi::c_int;

/// Which matmul of activations `x [m, k]`, weights `w [n, k]` and results `y [m, n]`, all row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gemm {
    /// y = x · wᵀ.
    Forward,
    /// x = y · w.
    Input,
    /// w = yᵀ · x.
    Weight,
    /// The same of transposes, `y [n, m]` and `x [k, m]`.
    WeightOfTransposes,
}

/// What has a unit of its own in a factor in fp8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Units {
    /// All of it.
    One,
    /// A row along the summed dimension.
    Rows,
    /// 128 elements of such a row.
    Blocks,
}

impl Units {
    /// Those of operands with many.
    pub const fn of(fine: Fine) -> Self {
        match fine {
            Fine::Rows => Units::Rows,
            Fine::Blocks => Units::Blocks,
        }
    }

    /// What the library calls it.
    pub(super) const fn mode(self) -> c_int {
        match self {
            Units::One => 0,
            Units::Rows => 3,
            Units::Blocks => 4,
        }
    }
}

/// A matmul with its sizes and types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulShape {
    /// Which.
    pub gemm: Gemm,
    /// Rows of activations.
    pub m: usize,
    /// Columns of y.
    pub n: usize,
    /// Columns of x.
    pub k: usize,
    /// Type of the first factor.
    pub input: DType,
    /// Type of the second: another one in fp8 alone.
    pub second: DType,
    /// Type of the result.
    pub output: DType,
    /// What has a unit in its factors: in fp8.
    pub units: Units,
    /// Whether the result adds to a third matrix.
    pub adds: bool,
    /// Elements from one row of y to the next.
    pub y_stride: usize,
    /// What happens to the result on its way.
    pub epilogue: Epilogue,
    /// Whether factors of f32 may be rounded to TF32.
    pub tf32: bool,
}

impl MatmulShape {
    /// A matmul of `x [m, k]`, `w [n, k]` and `y [m, n]` with nothing special about it.
    pub const fn new(gemm: Gemm, (m, n, k): (usize, usize, usize), input: DType, output: DType) -> Self {
        Self {
            gemm,
            m,
            n,
            k,
            input,
            second: input,
            output,
            units: Units::One,
            adds: false,
            y_stride: n,
            epilogue: Epilogue::None,
            tf32: false,
        }
    }

    /// Matrices start where buffers do, or a whole number of rows later: at multiples of this many bytes.
    pub(super) fn alignment(&self) -> u32 {
        let rows = [self.k * self.input.bytes(), self.y_stride * self.input.bytes(), self.k * self.output.bytes()];
        let transposed = (self.gemm == Gemm::WeightOfTransposes).then_some(self.m * self.input.bytes());
        rows.iter().chain(&transposed).map(|bytes| 1 << bytes.trailing_zeros().min(4)).min().unwrap_or(1)
    }

    /// Elements of a row of the result.
    pub(super) fn result_row(&self) -> usize {
        match self.gemm {
            Gemm::Forward => self.n,
            Gemm::Input | Gemm::Weight | Gemm::WeightOfTransposes => self.k,
        }
    }

    /// The library's number for how it is computed. Matrix units have TF32 from compute capability 8.0 on; elsewhere all bits count.
    pub(super) fn compute(&self, capability: u32) -> c_int {
        let tf32 = self.tf32 && self.input == DType::F32 && capability >= 80;
        if tf32 { COMPUTE_32F_FAST_TF32 } else { COMPUTE_32F }
    }

    /// Whether partial sums may stay in the matrix units. In fp8 those keep 14 bits: enough for what is rounded to bf16, not for sums over all
    /// positions.
    pub(super) fn fast(&self) -> bool {
        self.input.is_fp8() && self.gemm == Gemm::Forward && self.units != Units::Blocks
    }
}
