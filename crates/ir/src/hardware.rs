//! Accelerators by name: the figures that cost estimates need, as their makers publish them.

use crate::DType;
use serde::Serialize;

/// One accelerator. Where a board carries several, one that a program sees as its own device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GpuSpec {
    /// The name that commands take.
    pub name: &'static str,
    /// FLOP per second of dense 16-bit matmuls with 32-bit sums: bf16, or fp16 where there is no bf16 (V100).
    pub peak_flops_per_s: f64,
    /// FLOP per second of dense fp32 matmuls with all bits of fp32, as the executors compute them: not TF32.
    pub fp32_flops_per_s: f64,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Memory bandwidth in bytes per second.
    pub bytes_per_s: f64,
}

/// TFLOP/s (16-bit, fp32), GB and TB/s: decimal units, as published.
const fn gpu(name: &'static str, tflops: (f64, f64), gigabytes: u64, terabytes_per_s: f64) -> GpuSpec {
    GpuSpec {
        name,
        peak_flops_per_s: tflops.0 * 1e12,
        fp32_flops_per_s: tflops.1 * 1e12,
        memory_bytes: gigabytes * 1_000_000_000,
        bytes_per_s: terabytes_per_s * 1e12,
    }
}

/// The catalogue.
pub const GPUS: [GpuSpec; 14] = [
    gpu("v100", (125.0, 15.7), 32, 0.9),
    gpu("a100-40gb", (312.0, 19.5), 40, 1.555),
    gpu("a100", (312.0, 19.5), 80, 2.039),
    gpu("h100", (989.0, 67.0), 80, 3.35),
    gpu("h200", (989.0, 67.0), 141, 4.8),
    gpu("gh200", (989.0, 67.0), 96, 4.0),
    gpu("b200", (2250.0, 75.0), 180, 8.0),
    gpu("gb200", (2500.0, 80.0), 186, 8.0),
    gpu("b300", (2250.0, 75.0), 288, 8.0),
    gpu("mi250x", (383.0, 95.7), 128, 3.28),
    gpu("mi250x-gcd", (191.5, 47.85), 64, 1.64),
    gpu("mi300x", (1300.0, 163.4), 192, 5.3),
    gpu("mi325x", (1300.0, 163.4), 256, 6.0),
    gpu("mi355x", (2500.0, 157.3), 288, 8.0),
];

impl GpuSpec {
    /// The accelerator called `name`, in any letter case.
    pub fn named(name: &str) -> Option<&'static GpuSpec> {
        GPUS.iter().find(|gpu| gpu.name.eq_ignore_ascii_case(name))
    }

    /// FLOP per second of dense matmuls of such elements.
    pub fn peak(&self, compute: DType) -> f64 {
        match compute {
            DType::BF16 | DType::F16 => self.peak_flops_per_s,
            DType::F32 | DType::F64 | DType::U32 | DType::Fixed64 => self.fp32_flops_per_s,
        }
    }

    /// As people write it: `H100 80GB`.
    pub fn label(&self) -> String {
        let memory = format!("{}GB", self.memory_bytes / 1_000_000_000);
        let name = self.name.to_uppercase();
        format!("{} {memory}", name.strip_suffix(&format!("-{memory}")).unwrap_or(&name))
    }

    /// The accelerator that a driver calls so: "NVIDIA H100 80GB HBM3", say.
    pub fn of_device(name: &str) -> Option<&'static GpuSpec> {
        name.split(|c: char| !c.is_ascii_alphanumeric()).find_map(Self::named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_once_and_in_any_case() {
        for (i, gpu) in GPUS.iter().enumerate() {
            assert_eq!(GPUS.iter().position(|other| other.name == gpu.name), Some(i));
        }
        assert_eq!(GpuSpec::named("A100").map(|g| g.peak_flops_per_s), Some(312e12));
        assert_eq!(GpuSpec::named("a1000"), None);
        let h100 = GpuSpec::named("h100").map(|g| (g.peak(DType::BF16), g.peak(DType::F32), g.label()));
        assert_eq!(h100, Some((989e12, 67e12, "H100 80GB".into())));
        assert_eq!(GpuSpec::named("a100-40gb").map(|g| g.label()), Some("A100 40GB".into()));
        assert_eq!(GpuSpec::of_device("NVIDIA A100-SXM4-80GB").map(|g| g.name), Some("a100"));
        assert_eq!(GpuSpec::of_device("NVIDIA GeForce RTX 3090"), None);
    }
}
