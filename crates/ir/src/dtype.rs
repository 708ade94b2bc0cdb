use crate::dynamic8;
use serde::{Deserialize, Serialize};

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// The upper half of an IEEE binary32.
    BF16,
    /// IEEE binary16: finer than bf16, over a smaller range.
    F16,
    /// One byte, 4 bits of exponent and 3 of mantissa ([`F8`](crate::F8)): operands of matmuls.
    E4M3,
    /// One byte, 5 bits of exponent and 2 of mantissa: gradients that enter a matmul.
    E5M2,
    /// A signed byte: weights that are not trained ([`rows8`](crate::rows8)).
    Int8,
    /// A block of 256 numbers of any sign in 8 bits each, and their scale ([`dynamic8`](crate::dynamic8)): first moments.
    Signed8,
    /// The same of numbers from 0 on: second moments.
    Unsigned8,
    /// IEEE binary64, for losses and squared norms.
    F64,
    /// Unsigned 32-bit integers: token ids.
    U32,
    /// A 64-bit integer that holds a fixed-point real: the sum of such numbers does not depend on their order.
    Fixed64,
}

impl DType {
    /// All of them.
    pub const ALL: [DType; 11] = [
        DType::F32,
        DType::BF16,
        DType::F16,
        DType::E4M3,
        DType::E5M2,
        DType::Signed8,
        DType::Unsigned8,
        DType::F64,
        DType::U32,
        DType::Fixed64,
        DType::Int8,
    ];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::E4M3 | DType::E5M2 | DType::Int8 => 1,
            DType::BF16 | DType::F16 => 2,
            DType::F32 | DType::U32 => 4,
            DType::F64 | DType::Fixed64 => 8,
            DType::Signed8 | DType::Unsigned8 => dynamic8::BLOCK_BYTES,
        }
    }

    /// Numbers that an element stands for: more than one where it is a block.
    pub const fn numbers(self) -> usize {
        if self.is_block() { dynamic8::BLOCK } else { 1 }
    }

    /// Whether an element is a block of numbers in 8 bits.
    pub const fn is_block(self) -> bool {
        matches!(self, DType::Signed8 | DType::Unsigned8)
    }

    /// Whether activations and parameters may be stored in this type.
    pub const fn is_float(self) -> bool {
        match self {
            DType::F32 | DType::BF16 | DType::F16 => true,
            DType::E4M3 | DType::E5M2 | DType::Int8 | DType::F64 | DType::U32 | DType::Fixed64 => false,
            DType::Signed8 | DType::Unsigned8 => false,
        }
    }

    /// Whether it is one of fp8.
    pub const fn is_fp8(self) -> bool {
        matches!(self, DType::E4M3 | DType::E5M2)
    }

    /// Whether f32 master weights are rounded to this type.
    pub const fn is_rounded(self) -> bool {
        matches!(self, DType::BF16 | DType::F16)
    }

    /// Whether gradients may be summed in this type.
    pub const fn accumulates(self) -> bool {
        matches!(self, DType::F32 | DType::BF16 | DType::Fixed64)
    }

    /// The name that printed programs and checkpoints use.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
            DType::Int8 => "int8",
            DType::Signed8 => "signed8",
            DType::Unsigned8 => "unsigned8",
            DType::F64 => "f64",
            DType::U32 => "u32",
            DType::Fixed64 => "fixed64",
        }
    }
}

/// What matmuls multiply in. Peak rates are of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MatmulType {
    /// Elements as they are stored.
    Stored(DType),
    /// f32 of which matrix units may read 10 bits of the mantissa; sums are in f32.
    Tf32,
}

impl MatmulType {
    /// What the elements are stored in.
    pub const fn stored(self) -> DType {
        match self {
            MatmulType::Stored(dtype) => dtype,
            MatmulType::Tf32 => DType::F32,
        }
    }

    /// The name that people see.
    pub const fn name(self) -> &'static str {
        match self {
            MatmulType::Stored(dtype) => dtype.name(),
            MatmulType::Tf32 => "tf32",
        }
    }
}

impl From<DType> for MatmulType {
    fn from(dtype: DType) -> Self {
        MatmulType::Stored(dtype)
    }
}

impl std::fmt::Display for MatmulType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
