//! What was measured on one machine: how long its kernels and collectives take, by size. The cost of programs for it is estimated from
//! that instead of from the constants of the cost model.
//!
//! A profile is a list of measured points for each op and type. Between them the *share of the roofline bound* is interpolated, not
//! the time: that varies little over sizes. At a measured size the price is the measured time.
//!
//! What a run measures (`measured.json`) are points of the same kind, so a profile learns by adding them. This
//! crate reads text; `train` knows the files.

mod file;
mod points;

pub use points::{Family, Point, Table};

use crate::hardware::{ClusterSpec, GpuSpec};
use crate::work::{Demand, Kernel};
use crate::{Hardware, Terms};
use lockstep_ir::{Collective, DType, MatmulType, Mesh, StepProgram};
use std::collections::{BTreeMap, BTreeSet};

/// A machine's measurements.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineProfile {
    /// The name that it was saved under.
    pub name: String,
    /// What computes, as the system or the driver calls it. The profile holds for such a one.
    pub processor: String,
    /// When it was measured, in seconds since 1970.
    pub saved_unix_s: u64,
    /// By how the ranks share it.
    pub settings: Vec<Setting>,
}

/// Measurements with this many ranks at work at once.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Ranks that share the device.
    pub ranks: usize,
    /// CPU threads of each; 0 on a GPU.
    pub threads: usize,
    /// Streaming multiprocessors of a GPU; 0 on a CPU.
    pub units: usize,
    /// Bytes per second of a copy, read and written, of one rank.
    pub bytes_per_s: f64,
    /// FLOP per second of a large matmul of one rank, by the type of its operands.
    pub flops_per_s: BTreeMap<DType, f64>,
    /// Seconds of a step beside the sum of its kernels, per kernel.
    pub kernel_gap_s: f64,
    /// Seconds that timing a kernel by itself adds to it. They are taken off before a time becomes a point, since those of a small
    /// kernel would else be a share of every larger one.
    pub clock_s: f64,
    /// How many times as long kernels take in a step as alone: other work of the machine, lower clocks.
    pub slowdown: f64,
    /// Of time in which collectives overlap with kernels, the share by which both together take longer: 1 where they use the same cores.
    pub overlap_cost: f64,
    /// Measured times.
    pub tables: Vec<Table>,
}

/// Whose measurements hold for a run.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredTimes<'a> {
    /// The profile's name.
    pub name: &'a str,
    /// The measurements.
    pub setting: &'a Setting,
    /// How many times as long kernels take as there: 1 where as many threads were measured.
    pub factor: f64,
    /// Whether as many ranks and threads were measured.
    pub exact: bool,
}

impl MachineProfile {
    /// The measurements that hold for this many ranks of this many CPU threads, or are nearest to them.
    pub fn measured(&self, ranks: usize, threads: usize) -> Option<MeasuredTimes<'_>> {
        let times = |s: &Setting| if s.threads == 0 { 1.0 } else { s.threads as f64 / threads.max(1) as f64 };
        let far = |s: &Setting| times(s).log2().abs() + 0.5 * (s.ranks as f64 / ranks.max(1) as f64).log2().abs();
        let setting = self.settings.iter().min_by(|a, b| far(a).total_cmp(&far(b)))?;
        Some(MeasuredTimes { name: &self.name, setting, factor: times(setting), exact: far(setting) == 0.0 })
    }

    /// The measurements of this many ranks of this many threads, to be added to.
    pub fn setting_mut(&mut self, ranks: usize, threads: usize) -> Option<&mut Setting> {
        self.settings.iter_mut().find(|s| (s.ranks, s.threads) == (ranks, threads))
    }
}

impl Setting {
    /// Of a device of which nothing is known.
    pub fn nominal() -> Self {
        Self {
            ranks: 1,
            threads: 0,
            units: 0,
            bytes_per_s: 1e12,
            flops_per_s: BTreeMap::from([(DType::BF16, 1e14), (DType::F32, 1e13)]),
            kernel_gap_s: 0.0,
            clock_s: 0.0,
            slowdown: 1.0,
            overlap_cost: 0.0,
            tables: Vec::new(),
        }
    }

    /// The peak rate of matmuls of such operands; of fp32 where there is none. TF32 and fp8 were not measured: matrix units of GPUs have
    /// TF32 at half the rate of 16 bits, and fp8 at twice, of which a power limit leaves 1.85 times (1,250 and 674 TFLOP/s on an H200).
    /// On a CPU TF32 is fp32.
    pub fn peak(&self, dtype: impl Into<MatmulType>) -> f64 {
        let of = |dtype| self.flops_per_s.get(&dtype).copied();
        let dtype = dtype.into();
        let times = match dtype {
            MatmulType::Tf32 => Some(0.5),
            MatmulType::Stored(dtype) => dtype.is_fp8().then_some(1.85),
        };
        let beside = times.filter(|_| self.threads == 0).and_then(|times| Some(times * of(DType::BF16)?));
        let own = of(dtype.stored()).filter(|_| dtype != MatmulType::Tf32 || beside.is_none());
        own.or(beside).or_else(|| of(DType::F32)).or_else(|| of(DType::BF16)).unwrap_or(1e12)
    }

    /// Whether a demand is a matmul that may be in TF32, and this machine a GPU: what was measured in fp32 says nothing of it.
    fn is_faster_in_tf32(&self, demand: &Demand) -> bool {
        self.threads == 0 && matches!(demand, Demand::Matmul { dtype: MatmulType::Tf32, .. })
    }

    /// Whether a demand is a matmul in fp8, and this machine a GPU: where none was measured, those of 16 bits reach the same share of
    /// another peak.
    fn is_faster_in_fp8(&self, demand: &Demand) -> bool {
        self.threads == 0 && matches!(demand, Demand::Matmul { dtype, .. } if dtype.stored().is_fp8())
    }

    /// Seconds of a demand; what had to be estimated from other ops is noted.
    pub(crate) fn seconds(
        &self,
        kernel: Kernel,
        demand: &Demand,
        mesh: &Mesh,
        unmeasured: &mut BTreeSet<String>,
    ) -> f64 {
        match demand {
            Demand::Nothing | Demand::Receive { .. } => 0.0,
            Demand::Collective { pattern, over, sharers, bytes, .. } => {
                self.together(*pattern, sharers.unwrap_or(mesh.size(*over)), *bytes, unmeasured)
            }
            // Not measured. On a CPU both memories are one.
            Demand::HostCopy { bytes } => {
                unmeasured.insert(kernel.op.to_owned());
                *bytes as f64 / if self.threads == 0 { 50e9 } else { self.bytes_per_s / 2.0 }
            }
            Demand::Send { bytes, .. } => self.together(Collective::Shift, 2, 2 * bytes, unmeasured),
            Demand::Matmul { .. }
            | Demand::Attention { .. }
            | Demand::Scores { .. }
            | Demand::Elementwise { .. }
            | Demand::Quantise { .. }
            | Demand::Optimizer { .. } => {
                let Some((family, size)) = Family::of(demand) else { return 0.0 };
                // As the nearest sizes of other ops of the kind, of this type if there are any.
                let like = |dtype: Option<DType>| {
                    let tables =
                        self.tables.iter().filter(|t| t.family == family && dtype.is_none_or(|d| d == t.dtype));
                    points::share(self, tables, &size)
                };
                if self.is_faster_in_tf32(demand) {
                    unmeasured.insert(format!("{} {}", kernel.op, MatmulType::Tf32));
                    let bound = self.bound(family, MatmulType::Tf32, &size);
                    return self.slowdown * bound * like(Some(DType::BF16)).or_else(|| like(None)).unwrap_or(2.0);
                }
                let bound = self.bound(family, kernel.dtype, &size);
                let own = self.tables.iter().find(|t| t.op == kernel.op && t.dtype == kernel.dtype);
                if let Some(share) = own.and_then(|table| table.share(self, &size)) {
                    return self.slowdown * bound * share;
                }
                unmeasured.insert(format!("{} {}", kernel.op, kernel.dtype));
                if let (Demand::Matmul { dtype, .. }, true) = (demand, self.is_faster_in_fp8(demand)) {
                    let bound = self.bound(family, *dtype, &size);
                    return self.slowdown * bound * like(Some(DType::BF16)).or_else(|| like(None)).unwrap_or(2.0);
                }
                self.slowdown * bound * like(Some(kernel.dtype)).or_else(|| like(None)).unwrap_or(2.0)
            }
        }
    }

    /// Seconds of a collective of this many ranks on tensors of this many bytes as a whole.
    fn together(&self, pattern: Collective, ranks: usize, bytes: u64, unmeasured: &mut BTreeSet<String>) -> f64 {
        if ranks < 2 {
            return 0.0;
        }
        let size = [ranks as f64, bytes as f64];
        let bound = self.bound(Family::Together, DType::F32, &size);
        let table = self.tables.iter().find(|t| t.op == pattern.name());
        match table.and_then(|table| table.share(self, &size)) {
            Some(share) => bound * share,
            None => {
                unmeasured.insert(pattern.name().to_owned());
                2.0 * bound
            }
        }
    }

    /// The roofline bound of a size, in seconds.
    pub(crate) fn bound(&self, family: Family, dtype: impl Into<MatmulType>, size: &[f64]) -> f64 {
        family.bound(size, self.peak(dtype), self.bytes_per_s, self.units)
    }

    /// The same, where kernels that compute take this many times as long.
    pub fn computing_scaled(&self, times: f64) -> Self {
        let mut scaled = self.clone();
        for table in &mut scaled.tables {
            match table.family {
                Family::Matmul | Family::Attention => table.points.iter_mut().for_each(|point| point.seconds *= times),
                Family::Scores | Family::Bytes | Family::Together => {}
            }
        }
        scaled
    }

    /// Adds measured points; one of the same size is replaced.
    pub fn add(&mut self, tables: Vec<Table>) {
        for table in tables {
            match self.tables.iter_mut().find(|t| (&t.op, t.dtype) == (&table.op, table.dtype)) {
                Some(known) => table.points.into_iter().for_each(|point| known.add(point)),
                None => self.tables.push(table),
            }
        }
        self.tables.sort_by(|a, b| (a.family, &a.op, a.dtype).cmp(&(b.family, &b.op, b.dtype)));
    }

    /// As hardware: what shares of a peak are of.
    pub fn hardware(&self, name: &str) -> Hardware {
        let source = format!("measured: {name}");
        let gpu = GpuSpec {
            name: name.to_owned(),
            product: None,
            family: name.to_owned(),
            peak_flops_per_s: self.peak(DType::BF16),
            fp32_flops_per_s: self.peak(DType::F32),
            // A CPU has none.
            tf32_flops_per_s: (self.threads == 0).then(|| self.peak(MatmulType::Tf32)),
            fp8_flops_per_s: None,
            memory_bytes: 0,
            nominal_memory_bytes: 0,
            bytes_per_s: self.bytes_per_s,
            units: self.units,
            power_w: None,
            link_bytes_per_s: self.bytes_per_s,
            domain: None,
            host_bytes_per_s: None,
            node_bytes_per_s: None,
            source: source.clone(),
            unverified: Vec::new(),
        };
        let cluster = ClusterSpec {
            name: name.to_owned(),
            label: name.to_owned(),
            gpu: name.to_owned(),
            gpus_per_node: self.ranks,
            nodes: Some(1),
            node_bytes_per_s: self.bytes_per_s,
            fabric: "memory".into(),
            link_bytes_per_s: None,
            source,
            unverified: Vec::new(),
        };
        Hardware { gpu, cluster }
    }

    /// The terms of the cost model that are left where kernels and collectives are measured: no host, which a CPU does not have
    /// beside it and a CUDA graph does not wait for.
    pub fn terms(&self) -> Terms {
        Terms { kernel_gap: self.kernel_gap_s, overlap_cost: self.overlap_cost, ..Terms::NEUTRAL }
    }
}

/// Least share of a timed kernel that is its own.
const LEAST_KERNEL: f64 = 0.25;

/// What a run's instruction took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Index of its segment.
    pub segment: usize,
    /// Index in the segment.
    pub instr: usize,
    /// Seconds.
    pub seconds: f64,
}

/// What timed instructions say of the machine: points by op and type, each what calls of that size took, and seconds by what they
/// were spent on, collectives apart, which wait for others. What timing adds is taken off each. Of several times it is the median; on a CPU, where other programs disturb
/// some, the lower quartile. What a device does as one is shared out by the members' roofline bounds.
pub fn observe(
    program: &StepProgram,
    setting: &Setting,
    samples: &[Sample],
) -> Result<(Vec<Table>, BTreeMap<String, f64>), crate::SimError> {
    type Key = (Family, &'static str, DType);
    // Times by size.
    type Times = Vec<(Vec<f64>, Vec<f64>)>;
    let mut seen: BTreeMap<Key, Times> = BTreeMap::new();
    let mut classes: BTreeMap<String, f64> = BTreeMap::new();
    let mut at = 0;
    while let Some(sample) = samples.get(at) {
        let segment = &program.segments[sample.segment];
        let group = segment.group_of(sample.instr);
        let count = group.map_or(1, |g| g.instrs.len()).min(samples.len() - at);
        let members = &samples[at..at + count];
        at += count;
        let mut asked = Vec::new();
        for member in members {
            let demand = Demand::of(program, segment, member.instr, true)?;
            let kernel = Kernel::of(&segment.instrs[member.instr]);
            if let (Some((family, size)), Some(class)) = (Family::of(&demand), demand.class()) {
                let faster = setting.is_faster_in_tf32(&demand);
                let bound = setting.bound(family, if faster { MatmulType::Tf32 } else { kernel.dtype.into() }, &size);
                asked.push(((!faster).then_some((family, kernel.op, kernel.dtype)), size, class, bound));
            }
        }
        let all: f64 = asked.iter().map(|(.., bound)| bound).sum();
        let timed: f64 = members.iter().map(|m| m.seconds).sum();
        let seconds = (timed - setting.clock_s).max(LEAST_KERNEL * timed);
        for (key, size, class, bound) in asked {
            let share = seconds * bound / all.max(f64::MIN_POSITIVE);
            *classes.entry(class.to_string()).or_default() += share;
            let Some(key) = key else { continue };
            let sizes = seen.entry(key).or_default();
            match sizes.iter_mut().find(|(known, _)| *known == size) {
                Some((_, times)) => times.push(share),
                None => sizes.push((size, vec![share])),
            }
        }
    }
    let on_cpu = setting.threads > 0;
    let table = |((family, op, dtype), sizes): (Key, Times)| {
        let point = |(size, mut times): (Vec<f64>, Vec<f64>)| {
            times.sort_by(f64::total_cmp);
            Point { size, seconds: times[times.len() / if on_cpu { 4 } else { 2 }].max(1e-9) }
        };
        Table { op: op.to_owned(), dtype, family, points: sizes.into_iter().map(point).collect() }
    };
    Ok((seen.into_iter().map(table).collect(), classes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SimError;

    fn planted() -> MachineProfile {
        let point = |size: &[f64], seconds: f64| Point { size: size.to_vec(), seconds };
        let table = |op: &str, dtype, family, points| Table { op: op.into(), dtype, family, points };
        // A tenth of the peak where it is small, a half where it is large; the bytes take next to no time.
        let matmuls = vec![
            point(&[64.0, 64.0, 64.0, 1.0, 1.0], 2.0 * 64f64.powi(3) / 1e11),
            point(&[1024.0, 1024.0, 1024.0, 1.0, 1.0], 2.0 * 1024f64.powi(3) / 5e11),
        ];
        let tables = vec![
            table("linear", DType::BF16, Family::Matmul, matmuls),
            table("gelu", DType::BF16, Family::Bytes, vec![point(&[1e6], 2e-6)]),
            table("all_reduce", DType::F32, Family::Together, vec![point(&[2.0, 1e6], 5e-6)]),
        ];
        let setting = Setting {
            flops_per_s: BTreeMap::from([(DType::BF16, 1e12)]),
            threads: 2,
            kernel_gap_s: 1e-6,
            overlap_cost: 1.0,
            tables,
            ..Setting::nominal()
        };
        let two = Setting { ranks: 2, threads: 1, ..setting.clone() };
        MachineProfile {
            name: "mine".into(),
            processor: "a \"chip\"".into(),
            saved_unix_s: 7,
            settings: vec![setting, two],
        }
    }

    fn seconds(op: &'static str, demand: Demand) -> (f64, Vec<String>) {
        let profile = planted();
        let mut unmeasured = BTreeSet::new();
        let kernel = Kernel { op, dtype: DType::BF16 };
        let mesh = Mesh::ONE.with(lockstep_ir::MeshAxis::DpShard, 2);
        let seconds = profile.settings[0].seconds(kernel, &demand, &mesh, &mut unmeasured);
        (seconds, unmeasured.into_iter().collect())
    }

    fn matmul(n: u64, calls: u64) -> Demand {
        let (rows, cols, inner, dtype) = (n, n, n, DType::BF16.into());
        Demand::Matmul { rows, cols, inner, calls, dtype, bytes: 1, sums: 0, gradients: 0, logits: 0 }
    }

    #[test]
    fn a_file_is_read_to_what_was_written() {
        let text = planted().to_toml();
        let read = MachineProfile::parse("mine.toml", &text).unwrap();
        assert_eq!(read.to_toml(), text);
        assert_eq!((read.name.as_str(), read.processor.as_str(), read.settings.len()), ("mine", "a \"chip\"", 2));
        assert_eq!(read.settings[0].tables[0].points[0].size, planted().settings[0].tables[0].points[0].size);
    }

    #[test]
    fn what_is_wrong_with_a_file_is_named_by_line() {
        let text = planted().to_toml();
        let line = |what: &str| 1 + text.lines().position(|l| l.contains(what)).unwrap();
        for (from, to, part, says) in [
            ("op = \"gelu\"", "op = \"glue\"", "op = \"gelu\"", "there is no op \"glue\""),
            ("dtype = \"f32\"", "dtype = \"f31\"", "dtype = \"f32\"", "there is no type \"f31\""),
            ("[\"ranks\", \"bytes\", \"us\"]", "[\"ranks\", \"us\"]", "[\"ranks\"", "no op has these columns"),
            ("[1000000.0, 2.0]", "[1000000.0]", "[1000000.0, 2.0]", "a point has 2 numbers above 0: bytes, us"),
            ("memory_gb_per_s = 1000.0", "memory_gb_per_s = -1.0", "memory_gb_per_s", "is not above 0"),
            ("slowdown = 1.0", "slowdown = \"x\"", "slowdown", "invalid type"),
        ] {
            let broken = text.replacen(from, to, 1);
            assert_ne!(broken, text, "{from}");
            let SimError::File { file, reason, hint } = MachineProfile::parse("mine.toml", &broken).unwrap_err() else {
                panic!("{from}");
            };
            let at = format!("line {}", line(part));
            assert!(file == "mine.toml" && reason.contains(&at) && reason.contains(says), "{reason}");
            assert!(hint.contains("bench --save"), "{hint}");
        }
    }

    #[test]
    fn a_measured_size_takes_what_was_measured_and_one_between_the_share_that_is_between() {
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-3;
        assert!(near(seconds("linear", matmul(64, 1)).0, 2.0 * 64f64.powi(3) / 1e11));
        assert!(near(seconds("linear", matmul(1024, 3)).0, 3.0 * 2.0 * 1024f64.powi(3) / 5e11));
        let rate = 2.0 * 256f64.powi(3) / seconds("linear", matmul(256, 1)).0;
        assert!(rate > 1.5e11 && rate < 4e11, "{rate}");
        // Twice the bytes of a kernel bound by memory: twice the time.
        assert!(near(seconds("gelu", Demand::Elementwise { bytes: 2_000_000 }).0, 4e-6));
        let reduce = Demand::Collective {
            pattern: Collective::AllReduce,
            over: lockstep_ir::MeshAxis::DpShard.into(),
            sharers: None,
            bytes: 1_000_000,
            routed: None,
        };
        assert!(near(seconds("all_reduce", reduce).0, 5e-6));
    }

    #[test]
    fn what_was_never_measured_is_estimated_and_named() {
        let (found, unmeasured) = seconds("dropout", Demand::Elementwise { bytes: 1_000_000 });
        assert!((found / 2e-6 - 1.0).abs() < 1e-3, "{found}");
        assert_eq!(unmeasured, ["dropout bf16"]);
        assert_eq!(seconds("gelu", Demand::Elementwise { bytes: 9 }).1, [""; 0]);
    }

    #[test]
    fn what_was_measured_in_fp32_says_nothing_of_tf32_on_a_gpu() {
        let Demand::Matmul { rows, cols, inner, calls, bytes, sums, gradients, logits, .. } = matmul(1024, 1) else {
            unreachable!()
        };
        let tf32 = Demand::Matmul { rows, cols, inner, calls, dtype: MatmulType::Tf32, bytes, sums, gradients, logits };
        let mut setting = planted().settings.remove(0);
        setting.flops_per_s = BTreeMap::from([(DType::BF16, 1e12), (DType::F32, 1e11)]);
        let fp32 = Table { dtype: DType::F32, ..setting.tables[0].clone() };
        setting.add(vec![fp32]);
        let kernel = Kernel { op: "linear", dtype: DType::F32 };
        let of = |setting: &Setting| {
            let mut unmeasured = BTreeSet::new();
            (setting.seconds(kernel, &tf32, &Mesh::ONE, &mut unmeasured), unmeasured.len())
        };
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-3;
        // On a CPU it is fp32, which was measured.
        let (found, unmeasured) = of(&setting);
        assert!(near(found, 2.0 * 1024f64.powi(3) / 5e11) && unmeasured == 0, "{found}");
        // On a GPU matmuls reach the share of their peak that those of 16 bits reach: half of half the rate.
        setting.threads = 0;
        let (found, unmeasured) = of(&setting);
        assert!(near(found, 2.0 * 1024f64.powi(3) / 2.5e11) && unmeasured == 1, "{found}");
    }

    #[test]
    fn fp8_that_was_not_measured_is_as_far_from_its_peak_as_16_bits_and_where_it_was_that_counts() {
        let Demand::Matmul { rows, cols, inner, calls, bytes, sums, gradients, logits, .. } = matmul(1024, 1) else {
            unreachable!()
        };
        let fp8 =
            Demand::Matmul { rows, cols, inner, calls, dtype: DType::E4M3.into(), bytes, sums, gradients, logits };
        let mut setting = Setting { threads: 0, ..planted().settings.remove(0) };
        let kernel = Kernel { op: "fp8_linear", dtype: DType::F32 };
        let of = |setting: &Setting| {
            let mut unmeasured = BTreeSet::new();
            (setting.seconds(kernel, &fp8, &Mesh::ONE, &mut unmeasured), unmeasured.len())
        };
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-3;
        let (found, unmeasured) = of(&setting);
        assert!(near(found, 2.0 * 1024f64.powi(3) / (1.85 * 5e11)) && unmeasured == 1, "{found}");
        let point = Point { size: vec![1024.0, 1024.0, 1024.0, 1.0, 1.0], seconds: 3e-3 };
        let family = Family::Matmul;
        setting.add(vec![Table { op: "fp8_linear".into(), dtype: DType::F32, family, points: vec![point] }]);
        let (found, unmeasured) = of(&setting);
        assert!(near(found, 3e-3) && unmeasured == 0, "{found}");
    }

    #[test]
    fn attention_is_timed_over_lengths_and_a_longer_one_than_any_comes_nearer_to_the_peak() {
        let mut setting = Setting { threads: 0, units: 132, tables: Vec::new(), ..Setting::nominal() };
        let demand = |seq: u64| {
            let (flops, bytes) = (seq * seq * 4096, seq * 16_384);
            Demand::Attention { flops, bytes, head_dim: 64, seq, dtype: DType::BF16, backward: false }
        };
        let points = [(1024, 40e-6), (4096, 440e-6)].map(|(seq, seconds)| {
            let (_, size) = Family::of(&demand(seq)).unwrap();
            Point { size, seconds }
        });
        let (op, dtype, family) = ("attention".to_owned(), DType::BF16, Family::Attention);
        setting.add(vec![Table { op, dtype, family, points: points.to_vec() }]);
        let rate = |seq: u64| {
            let kernel = Kernel { op: "attention", dtype: DType::BF16 };
            (seq * seq) as f64 / setting.seconds(kernel, &demand(seq), &Mesh::ONE, &mut BTreeSet::new())
        };
        assert!(rate(1024) < rate(4096) && 1.1 * rate(4096) < rate(32768), "{} {}", rate(4096), rate(32768));
    }

    #[test]
    fn ranks_and_threads_choose_the_measurements() {
        let profile = planted();
        let of = |ranks, threads| {
            let found = profile.measured(ranks, threads).unwrap();
            (found.setting.ranks, found.factor, found.exact)
        };
        assert_eq!(of(1, 2), (1, 1.0, true));
        assert_eq!(of(2, 1), (2, 1.0, true));
        assert_eq!(of(4, 1), (2, 1.0, false));
        assert_eq!(of(1, 4), (1, 0.5, false));
    }
}
