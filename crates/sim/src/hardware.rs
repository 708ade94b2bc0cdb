//! The hardware catalogue: GPUs, and clusters of them. Figures are those that makers and sites publish; those that nobody has
//! verified are listed as such in every entry, and shown so.
//!
//! The files `data/gpus.toml` and `data/clusters.toml` are part of the program; a user's own file has the same form.

use crate::{Result, SimError};
use lockstep_ir::{DType, MatmulType};
use serde::{Deserialize, Serialize};

/// One GPU. Where a board carries several, one that a program sees as its own device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuSpec {
    /// The name that commands take.
    pub name: String,
    /// What people and drivers call it, without its memory, where that is not its name: `RTX 4090`.
    pub product: Option<String>,
    /// The family whose efficiencies it has.
    pub family: String,
    /// FLOP per second of dense 16-bit matmuls with 32-bit sums: bf16, or fp16 where there is no bf16 (V100).
    pub peak_flops_per_s: f64,
    /// FLOP per second of dense fp32 matmuls with all bits of fp32, as the executors compute them: not TF32.
    pub fp32_flops_per_s: f64,
    /// FLOP per second of dense matmuls of fp32 rounded to TF32, where it has them.
    pub tf32_flops_per_s: Option<f64>,
    /// FLOP per second of dense fp8 matmuls, where it has them.
    pub fp8_flops_per_s: Option<f64>,
    /// Bytes of its memory that a program can have: what the driver reports, less what the driver and a context take; where that is not
    /// known, the nominal size.
    pub memory_bytes: u64,
    /// Bytes of its memory by its name: 80 · 10⁹ for an H100 80GB.
    pub nominal_memory_bytes: u64,
    /// Memory bandwidth in bytes per second.
    pub bytes_per_s: f64,
    /// Streaming multiprocessors or compute units: how many tiles of a matmul run at a time.
    pub units: usize,
    /// Watts that it may draw, where known.
    pub power_w: Option<f64>,
    /// Bytes per second that it sends to the other GPUs of its node together, in one direction.
    pub link_bytes_per_s: f64,
    /// How many of them one NVLink domain joins, where that is more than a node: 72 in a rack of GB200.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<usize>,
    /// Bytes per second that it sends to the memory of its host, in one direction, where known.
    pub host_bytes_per_s: Option<f64>,
    /// Bytes per second that a node of eight sends to the others over Ethernet, in one direction, where no cluster is named; none for
    /// GPUs that usually have a network adapter each.
    pub node_bytes_per_s: Option<f64>,
    /// Where the figures come from.
    pub source: String,
    /// Figures that nobody has verified, by their names in the data file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unverified: Vec<String>,
}

/// Nodes of GPUs, and what joins them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClusterSpec {
    /// The name that commands take.
    pub name: String,
    /// As people write it.
    pub label: String,
    /// The name of its GPU.
    pub gpu: String,
    /// GPUs of a node.
    pub gpus_per_node: usize,
    /// How many nodes it has, where known.
    pub nodes: Option<usize>,
    /// Bytes per second that a node sends to the others, in one direction, over all its network adapters.
    pub node_bytes_per_s: f64,
    /// What joins nodes: `infiniband`, `efa`, `roce`, `slingshot`, `omni-path` or `ethernet`. Collectives have latencies by it.
    pub fabric: String,
    /// Bytes per second that a GPU sends inside its node, where it is not that of the GPU.
    pub link_bytes_per_s: Option<f64>,
    /// Where the figures come from.
    pub source: String,
    /// Figures that nobody has verified, by their names in the data file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unverified: Vec<String>,
}

/// MiB of what nvidia-smi reports as a GPU's total that no arena can have. Measured on an H200 with driver 580: the driver reserves 616
/// (`nvidia-smi -q -d MEMORY`; cuMemGetInfo leaves them out of its total), a context with our kernels and cuBLASLt takes 0.53 GiB.
/// Other GPUs differ by some tens of MiB; small ones reserve less (an RTX 3060 382, an RTX 3090 453, by what CUDA sees of their total), so
/// that they have up to 0.25 GiB more than this says. AMD's were not measured.
const TAKEN_MIB: u64 = 616 + 544;

/// Words that make another product of the one whose name stands before them: an RTX 3090 Ti is no RTX 3090.
const VARIANTS: [&str; 5] = ["ti", "super", "d", "laptop", "max"];

/// A GPU as a data file has it: decimal units, as published.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuEntry {
    name: String,
    product: Option<String>,
    family: Option<String>,
    tflops: f64,
    tflops_fp32: f64,
    tflops_tf32: Option<f64>,
    tflops_fp8: Option<f64>,
    memory_gb: f64,
    memory_mib: Option<u64>,
    memory_source: Option<String>,
    memory_tb_per_s: f64,
    units: usize,
    power_w: Option<f64>,
    link_gb_per_s: f64,
    domain: Option<usize>,
    host_gb_per_s: Option<f64>,
    node_gbit_per_s: Option<f64>,
    source: String,
    #[serde(default)]
    unverified: Vec<String>,
}

/// A cluster as a data file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterEntry {
    name: String,
    label: Option<String>,
    gpu: String,
    gpus_per_node: usize,
    nodes: Option<usize>,
    node_gbit_per_s: f64,
    fabric: String,
    link_gb_per_s: Option<f64>,
    source: String,
    #[serde(default)]
    unverified: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CatalogueFile {
    #[serde(default)]
    gpu: Vec<GpuEntry>,
    #[serde(default)]
    cluster: Vec<ClusterEntry>,
}

/// All GPUs and clusters that are known.
#[derive(Clone, Debug, PartialEq)]
pub struct Catalogue {
    /// In the order of the files.
    pub gpus: Vec<GpuSpec>,
    /// In the order of the files.
    pub clusters: Vec<ClusterSpec>,
}

/// Bytes per second to the host where nobody says: PCIe 4.0 with 16 lanes.
const HOST_BYTES_PER_S: f64 = 32e9;
/// Share of that rate which copies have that run in both directions at once: 51 of 64 GB/s on an H200.
const HOST_SHARE: f64 = 0.8;

impl GpuSpec {
    /// Bytes per second of copies between its memory and the host's, in each direction while the other has as many.
    pub fn host_rate(&self) -> f64 {
        HOST_SHARE * self.host_bytes_per_s.unwrap_or(HOST_BYTES_PER_S)
    }
}

impl Catalogue {
    /// What every build knows.
    pub fn builtin() -> Self {
        let mut all = Self { gpus: Vec::new(), clusters: Vec::new() };
        for (file, text) in
            [("gpus.toml", include_str!("../data/gpus.toml")), ("clusters.toml", include_str!("../data/clusters.toml"))]
        {
            all.add(file, text).unwrap_or_else(|error| unreachable!("{error}"));
        }
        all
    }

    /// Adds what a data file has; an entry of a known name replaces it.
    pub fn add(&mut self, file: &str, text: &str) -> Result<()> {
        let refuse = |reason: String, hint: &str| SimError::file(file, reason, hint);
        let parsed: CatalogueFile = toml::from_str(text).map_err(|error| {
            refuse(
                error.to_string().trim_end().to_owned(),
                "a [[gpu]] has name, tflops, tflops_fp32, memory_gb, memory_tb_per_s, units, link_gb_per_s and source; a [[cluster]] \
                 has name, gpu, gpus_per_node, node_gbit_per_s, fabric and source",
            )
        })?;
        for entry in parsed.gpu {
            let gpu =
                entry.spec().map_err(|reason| refuse(reason, "give the figure in the unit that the key names"))?;
            self.gpus.retain(|known| !known.name.eq_ignore_ascii_case(&gpu.name));
            self.gpus.push(gpu);
        }
        for entry in parsed.cluster {
            let known = self.gpus.iter().any(|gpu| gpu.name.eq_ignore_ascii_case(&entry.gpu));
            if !known {
                let names: Vec<&str> = self.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
                let reason = format!("cluster {}: gpu {:?} is not in the catalogue", entry.name, entry.gpu);
                return Err(refuse(reason, &format!("name one of {}, or add a [[gpu]]", names.join(", "))));
            }
            let cluster = entry.spec().map_err(|(name, key)| {
                refuse(
                    format!("cluster {name}: {key} is not above 0"),
                    "give the figure in the unit that the key names",
                )
            })?;
            self.clusters.retain(|known| !known.name.eq_ignore_ascii_case(&cluster.name));
            self.clusters.push(cluster);
        }
        Ok(())
    }

    /// The GPU called `name`, in any letter case.
    pub fn gpu(&self, name: &str) -> Option<&GpuSpec> {
        self.gpus.iter().find(|gpu| gpu.name.eq_ignore_ascii_case(name))
    }

    /// The cluster called `name`, in any letter case.
    pub fn cluster(&self, name: &str) -> Option<&ClusterSpec> {
        self.clusters.iter().find(|cluster| cluster.name.eq_ignore_ascii_case(name))
    }

    /// The GPU that a driver calls so: "NVIDIA H100 80GB HBM3", say. Of several, that of the most words, and of those the first.
    pub fn of_device(&self, name: &str) -> Option<&GpuSpec> {
        let name = words(name);
        let named = |product: &[String]| {
            let other = |end: usize| name.get(end).is_some_and(|next| VARIANTS.contains(&next.as_str()));
            name.windows(product.len()).enumerate().any(|(at, found)| found == product && !other(at + product.len()))
        };
        let products = self.gpus.iter().map(|gpu| (words(gpu.product.as_ref().unwrap_or(&gpu.name)), gpu));
        let found = products.filter(|(product, _)| !product.is_empty() && named(product));
        found.reduce(|best, next| if next.0.len() > best.0.len() { next } else { best }).map(|(_, gpu)| gpu)
    }

    /// A cluster with its GPU.
    pub fn hardware(&self, cluster: &str) -> Option<Hardware> {
        let cluster = self.cluster(cluster)?;
        Some(Hardware { gpu: self.gpu(&cluster.gpu)?.clone(), cluster: cluster.clone() })
    }
}

/// Letters and digits that stand together, in lower case.
fn words(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric());
    words.filter(|word| !word.is_empty()).map(str::to_ascii_lowercase).collect()
}

impl GpuEntry {
    /// The GPU, or why it cannot be one.
    fn spec(self) -> Result<GpuSpec, String> {
        let figures = [
            ("tflops", self.tflops),
            ("tflops_fp32", self.tflops_fp32),
            ("tflops_tf32", self.tflops_tf32.unwrap_or(1.0)),
            ("tflops_fp8", self.tflops_fp8.unwrap_or(1.0)),
            ("memory_gb", self.memory_gb),
            ("memory_tb_per_s", self.memory_tb_per_s),
            ("units", self.units as f64),
            ("power_w", self.power_w.unwrap_or(1.0)),
            ("link_gb_per_s", self.link_gb_per_s),
            ("domain", self.domain.unwrap_or(1) as f64),
            ("host_gb_per_s", self.host_gb_per_s.unwrap_or(1.0)),
            ("node_gbit_per_s", self.node_gbit_per_s.unwrap_or(1.0)),
        ];
        if let Some((key, _)) = figures.into_iter().find(|(_, value)| !(*value > 0.0 && value.is_finite())) {
            return Err(format!("gpu {}: {key} is not above 0", self.name));
        }
        if self.memory_mib.is_some_and(|mib| mib <= TAKEN_MIB) {
            let name = &self.name;
            return Err(format!("gpu {name}: memory_mib is not above what the driver and a context take, {TAKEN_MIB}"));
        }
        let nominal_memory_bytes = (self.memory_gb * 1e9) as u64;
        let source = match self.memory_source {
            Some(memory) => format!("{}; memory: {memory}", self.source),
            None => self.source,
        };
        Ok(GpuSpec {
            family: self.family.unwrap_or_else(|| self.name.clone()),
            name: self.name,
            product: self.product,
            peak_flops_per_s: self.tflops * 1e12,
            fp32_flops_per_s: self.tflops_fp32 * 1e12,
            tf32_flops_per_s: self.tflops_tf32.map(|tflops| tflops * 1e12),
            fp8_flops_per_s: self.tflops_fp8.map(|tflops| tflops * 1e12),
            memory_bytes: self.memory_mib.map_or(nominal_memory_bytes, |mib| (mib - TAKEN_MIB).saturating_mul(1 << 20)),
            nominal_memory_bytes,
            bytes_per_s: self.memory_tb_per_s * 1e12,
            units: self.units,
            power_w: self.power_w,
            link_bytes_per_s: self.link_gb_per_s * 1e9,
            domain: self.domain,
            host_bytes_per_s: self.host_gb_per_s.map(|gigabytes| gigabytes * 1e9),
            node_bytes_per_s: self.node_gbit_per_s.map(|gigabits| gigabits * 1e9 / 8.0),
            source,
            unverified: self.unverified,
        })
    }
}

impl ClusterEntry {
    fn spec(self) -> Result<ClusterSpec, (String, &'static str)> {
        let figures = [
            ("gpus_per_node", self.gpus_per_node as f64),
            ("nodes", self.nodes.unwrap_or(1) as f64),
            ("node_gbit_per_s", self.node_gbit_per_s),
            ("link_gb_per_s", self.link_gb_per_s.unwrap_or(1.0)),
        ];
        if let Some((key, _)) = figures.into_iter().find(|(_, value)| !(*value > 0.0 && value.is_finite())) {
            return Err((self.name, key));
        }
        Ok(ClusterSpec {
            label: self.label.unwrap_or_else(|| self.name.clone()),
            name: self.name,
            gpu: self.gpu,
            gpus_per_node: self.gpus_per_node,
            nodes: self.nodes,
            node_bytes_per_s: self.node_gbit_per_s * 1e9 / 8.0,
            fabric: self.fabric,
            link_bytes_per_s: self.link_gb_per_s.map(|gigabytes| gigabytes * 1e9),
            source: self.source,
            unverified: self.unverified,
        })
    }
}

impl GpuSpec {
    /// FLOP per second of dense matmuls in such a type.
    pub fn peak(&self, compute: impl Into<MatmulType>) -> f64 {
        match compute.into() {
            MatmulType::Tf32 => self.tf32_flops_per_s.unwrap_or(self.fp32_flops_per_s),
            MatmulType::Stored(DType::BF16 | DType::F16) => self.peak_flops_per_s,
            MatmulType::Stored(DType::E4M3 | DType::E5M2) => self.fp8_flops_per_s.unwrap_or(self.peak_flops_per_s),
            MatmulType::Stored(_) => self.fp32_flops_per_s,
        }
    }

    /// What matmuls of such a type are computed in: without matrix units for TF32, it is fp32.
    pub fn multiplies_in(&self, compute: MatmulType) -> MatmulType {
        match compute {
            MatmulType::Tf32 if self.tf32_flops_per_s.is_none() => MatmulType::Stored(DType::F32),
            MatmulType::Tf32 | MatmulType::Stored(_) => compute,
        }
    }

    /// As people write it: `H100 80GB`.
    pub fn label(&self) -> String {
        let memory = format!("{}GB", self.nominal_memory_bytes / 1_000_000_000);
        if let Some(product) = &self.product {
            return format!("{product} {memory}");
        }
        let name = self.name.to_uppercase();
        format!("{} {memory}", name.strip_suffix(&format!("-{memory}")).unwrap_or(&name))
    }
}

/// What a step runs on: GPUs, and how they are joined. Ranks lie on nodes in their order, as many as a node has GPUs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hardware {
    /// The GPU of every rank.
    pub gpu: GpuSpec,
    /// The nodes.
    pub cluster: ClusterSpec,
}

impl Hardware {
    /// GPUs of one kind where nothing is known of the nodes: eight on each, or as many as NVLink joins, and for every GPU a network adapter of 400 Gb/s, or for all of
    /// a node the Ethernet that the catalogue gives for the GPU.
    pub fn assumed(gpu: &GpuSpec) -> Self {
        let gpus_per_node = gpu.domain.unwrap_or(8);
        let (node_bytes_per_s, network, fabric) = match gpu.node_bytes_per_s {
            Some(bytes) => (bytes, format!("{} Gb/s for each node", (bytes * 8e-8).round() / 10.0), "ethernet"),
            None => (gpus_per_node as f64 * 50e9, "400 Gb/s each".to_owned(), "infiniband"),
        };
        let cluster = ClusterSpec {
            name: "assumed".into(),
            label: format!("{} of {gpus_per_node}, {network}", gpu.domain.map_or("nodes", |_| "NVLink domains")),
            gpu: gpu.name.clone(),
            gpus_per_node,
            nodes: None,
            node_bytes_per_s,
            fabric: fabric.into(),
            link_bytes_per_s: None,
            source: "assumed".into(),
            unverified: ["gpus_per_node", "node_gbit_per_s", "fabric"].map(str::to_owned).into(),
        };
        Self { gpu: gpu.clone(), cluster }
    }

    /// Bytes per second that a GPU sends inside its node.
    pub fn link_bytes_per_s(&self) -> f64 {
        self.cluster.link_bytes_per_s.unwrap_or(self.gpu.link_bytes_per_s)
    }

    /// Figures that nobody has verified: `h100.link_gb_per_s`.
    pub fn unverified(&self) -> Vec<String> {
        let of = |name: &str, keys: &[String]| keys.iter().map(|key| format!("{name}.{key}")).collect::<Vec<_>>();
        [of(&self.gpu.name, &self.gpu.unverified), of(&self.cluster.name, &self.cluster.unverified)].concat()
    }
}

#[cfg(test)]
mod tests;
