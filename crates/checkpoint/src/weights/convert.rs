//! Elements of one floating-point type as those of another.

use lockstep_ir::{DType, bf16, f16};
use safetensors::Dtype as FileDType;

/// How floating-point numbers of other programs are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Float {
    F32,
    Bf16,
    F16,
}

impl Float {
    pub(crate) fn of(dtype: FileDType) -> Option<Float> {
        match dtype {
            FileDType::F32 => Some(Float::F32),
            FileDType::BF16 => Some(Float::Bf16),
            FileDType::F16 => Some(Float::F16),
            _ => None,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::Bf16 | Float::F16 => 2,
        }
    }

    /// Whether none of the elements is infinite or no number.
    pub(crate) fn all_finite(self, bytes: &[u8]) -> bool {
        match self {
            Float::F32 => bytes.as_chunks().0.iter().all(|b| f32::from_le_bytes(*b).is_finite()),
            Float::Bf16 => halves(bytes).all(|bits| bf16::to_f32(bits).is_finite()),
            Float::F16 => halves(bytes).all(|bits| f16::to_f32(bits).is_finite()),
        }
    }

    /// Replaces `to` by the elements in `from`, as f32 or bf16. Every number that the new type has stays as it is, others
    /// become the nearest.
    pub(crate) fn convert(self, from: &[u8], dtype: DType, to: &mut Vec<u8>) {
        to.clear();
        match (self, dtype) {
            (Float::F32, DType::F32) | (Float::Bf16, DType::BF16) => to.extend_from_slice(from),
            (Float::F32, _) => narrow(to, from.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)), dtype),
            (Float::Bf16, _) => narrow(to, halves(from).map(bf16::to_f32), dtype),
            (Float::F16, _) => narrow(to, halves(from).map(f16::to_f32), dtype),
        }
    }
}

fn narrow(to: &mut Vec<u8>, values: impl Iterator<Item = f32>, dtype: DType) {
    match dtype {
        DType::BF16 => to.extend(values.flat_map(|x| bf16::from_f32(x).to_le_bytes())),
        _ => to.extend(values.flat_map(f32::to_le_bytes)),
    }
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_the_number_it_stands_for() {
        for bits in 0..=u16::MAX {
            let (sign, exponent, mantissa) = (bits >> 15, i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
            let expected = match exponent {
                0 => mantissa * 2f64.powi(-24),
                0x1f if mantissa == 0.0 => f64::INFINITY,
                0x1f => f64::NAN,
                _ => (1.0 + mantissa / 1024.0) * 2f64.powi(exponent - 15),
            };
            let found = f16::to_f32(bits);
            assert_eq!(found.is_sign_negative(), sign == 1);
            assert!(f64::from(found.abs()) == expected || (found.is_nan() && expected.is_nan()), "{bits:04x}");
        }
        assert_eq!(f16::to_f32(0x3555), 0.333_251_95);
    }

    #[test]
    fn narrow_types_come_back_as_they_were() {
        let halves: Vec<u8> =
            (0..=u16::MAX).filter(|b| !bf16::to_f32(*b).is_nan()).flat_map(u16::to_le_bytes).collect();
        let (mut wide, mut narrow) = (Vec::new(), Vec::new());
        Float::Bf16.convert(&halves, DType::F32, &mut wide);
        assert_eq!(wide.len(), 2 * halves.len());
        Float::F32.convert(&wide, DType::BF16, &mut narrow);
        assert_eq!(narrow, halves);
        Float::F16.convert(&[0x01, 0x3c], DType::BF16, &mut narrow);
        assert_eq!(narrow, bf16::from_f32(1.0 + 1.0 / 1024.0).to_le_bytes());
    }
}
