//! The catalogue: names, memory, rates, and files of a user.

use super::*;
use lockstep_ir::Hint;

#[test]
fn names_are_found_once_and_in_any_case() {
    let all = Catalogue::builtin();
    for (i, gpu) in all.gpus.iter().enumerate() {
        assert_eq!(all.gpus.iter().position(|other| other.name == gpu.name), Some(i));
    }
    assert_eq!(all.gpu("A100").map(|g| g.peak_flops_per_s), Some(312e12));
    assert_eq!(all.gpu("a1000"), None);
    let h100 = all.gpu("h100").map(|g| (g.peak(DType::BF16), g.peak(DType::F32), g.label()));
    assert_eq!(h100, Some((989e12, 67e12, "H100 80GB".into())));
    let tf32 = |name: &str| all.gpu(name).map(|g| g.peak(MatmulType::Tf32));
    // Without matrix units for it, it is fp32.
    assert_eq!((tf32("h200"), tf32("a100"), tf32("v100")), (Some(494e12), Some(156e12), Some(15.7e12)));
    let name = |gpu: &str| all.gpu(gpu).map(|g| g.multiplies_in(MatmulType::Tf32).name());
    assert_eq!((name("h200"), name("v100")), (Some("tf32"), Some("f32")));
    assert_eq!(all.gpu("a100-40gb").map(GpuSpec::label), Some("A100 40GB".into()));
    assert_eq!(all.of_device("NVIDIA A100-SXM4-80GB").map(|g| g.name.as_str()), Some("a100"));
    let device = |name: &str| all.of_device(name).map(|g| (g.name.as_str(), g.label()));
    for (name, gpu, label) in [
        ("NVIDIA L4", "l4", "L4 24GB"),
        ("NVIDIA L40S", "l40s", "L40S 48GB"),
        ("NVIDIA A10", "a10", "A10 24GB"),
        ("NVIDIA RTX A6000", "a6000", "RTX A6000 48GB"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada", "RTX 6000 Ada 48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000", "RTX PRO 6000 Blackwell 96GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server", "RTX PRO 6000 Blackwell Server 96GB"),
        ("NVIDIA GeForce RTX 3060", "rtx3060", "RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 3090", "rtx3090", "RTX 3090 24GB"),
        ("NVIDIA GeForce RTX 4060", "rtx4060", "RTX 4060 8GB"),
        // The driver does not tell the parts with 8 and 16 GB apart, which have the same rates.
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti", "RTX 4060 Ti 8GB"),
        ("NVIDIA GeForce RTX 4090", "rtx4090", "RTX 4090 24GB"),
        ("NVIDIA GeForce RTX 5090", "rtx5090", "RTX 5090 32GB"),
        ("NVIDIA H100 PCIe", "h100-pcie", "H100-PCIE 80GB"),
    ] {
        assert_eq!(device(name), Some((gpu, label.to_owned())), "{name}");
    }
    for other in [
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA A10G",
        "NVIDIA GeForce GTX 1080 Ti",
        "Intel(R) Xeon(R) Processor @ 2.60GHz",
        "",
    ] {
        assert_eq!(device(other), None, "{other}");
    }
}

#[test]
fn tensor_cores_of_a_geforce_sum_in_fp32_at_half_their_rate_and_fp8_starts_with_ada() {
    let all = Catalogue::builtin();
    let rates = |name: &str| {
        let gpu = all.gpu(name).unwrap();
        [gpu.peak(DType::BF16), gpu.peak(MatmulType::Tf32), gpu.peak(DType::F32)].map(|rate| rate * 1e-12)
    };
    assert_eq!(rates("rtx4090"), [165.2, 82.6, 82.6]);
    assert_eq!(rates("rtx6000-ada"), [364.2, 182.1, 91.1]);
    for gpu in all.gpus.iter().filter(|gpu| gpu.family == "geforce") {
        // FLOPs of an SM and clock: 256 in fp32, twice as many in 16 bits.
        let clock = gpu.fp32_flops_per_s / gpu.units as f64 / 256.0;
        assert!((1.6e9..2.7e9).contains(&clock), "{}: {clock}", gpu.name);
        assert!((gpu.peak_flops_per_s / gpu.fp32_flops_per_s - 2.0).abs() < 0.02, "{}", gpu.name);
    }
    let fp8 = |name: &str| all.gpu(name).and_then(|gpu| gpu.fp8_flops_per_s);
    for ampere in ["a10", "a6000", "rtx3060", "rtx3090", "a100"] {
        assert_eq!(fp8(ampere), None, "{ampere}");
    }
    for ada in ["l4", "l40s", "rtx6000-ada", "rtx4060", "rtx4060ti-16gb", "rtx4090", "rtx5090", "rtx-pro-6000"] {
        let twice = fp8(ada).unwrap() / all.gpu(ada).unwrap().peak_flops_per_s;
        assert!((twice - 2.0).abs() < 0.03, "{ada}: {twice}");
    }
}

#[test]
fn small_gpus_are_joined_by_pcie_and_their_nodes_by_ethernet() {
    let all = Catalogue::builtin();
    let assumed = |name: &str| Hardware::assumed(all.gpu(name).unwrap());
    let small = assumed("rtx4060");
    assert_eq!((small.link_bytes_per_s(), small.gpu.host_bytes_per_s), (16e9, Some(16e9)));
    assert_eq!((small.cluster.node_bytes_per_s, small.cluster.fabric.as_str()), (12.5e9, "ethernet"));
    assert_eq!(small.cluster.label, "nodes of 8, 100 Gb/s for each node");
    let h100 = assumed("h100");
    assert_eq!((h100.gpu.host_bytes_per_s, h100.cluster.node_bytes_per_s), (Some(64e9), 400e9));
    assert_eq!(
        (h100.cluster.label.as_str(), h100.cluster.fabric.as_str()),
        ("nodes of 8, 400 Gb/s each", "infiniband")
    );
    let l40s = all.hardware("aws-g6e").unwrap();
    assert_eq!((l40s.gpu.label(), l40s.cluster.node_bytes_per_s), ("L40S 48GB".into(), 50e9));
}

#[test]
fn every_nvidia_gpu_from_compute_capability_8_on_has_a_tf32_peak() {
    let older_or_others = |name: &str| name == "v100" || name.starts_with("mi");
    for gpu in Catalogue::builtin().gpus.iter().filter(|gpu| !older_or_others(&gpu.name)) {
        let tf32 = gpu.tf32_flops_per_s.unwrap_or_else(|| panic!("{} has no tflops_tf32", gpu.name));
        assert!(tf32 < gpu.peak_flops_per_s, "{}: {tf32} FLOP/s in TF32", gpu.name);
    }
}

#[test]
fn memory_is_what_the_driver_reports_less_what_it_takes_and_names_stay_nominal() {
    let all = Catalogue::builtin();
    let gib = |name: &str| all.gpu(name).map(|gpu| format!("{:.1}", gpu.memory_bytes as f64 / f64::from(1 << 30)));
    assert_eq!(gib("h100"), Some("78.5".into()));
    assert_eq!(gib("a100-40gb"), Some("38.9".into()));
    let small = ["rtx4060", "rtx3060", "rtx4060ti-16gb", "l4", "rtx4090", "rtx5090", "l40s", "rtx-pro-6000"].map(gib);
    assert_eq!(small.map(Option::unwrap), ["6.9", "10.9", "14.9", "21.4", "22.9", "30.7", "43.9", "94.5"]);
    // cuMemGetInfo of an H200 whose process has a context: 149,557,477,376 bytes are free.
    let h200 = all.gpu("h200").unwrap();
    assert!((149_000_000_000..=149_557_477_376).contains(&h200.memory_bytes), "{}", h200.memory_bytes);
    assert_eq!((h200.nominal_memory_bytes, h200.label()), (141_000_000_000, "H200 141GB".into()));
    assert!(h200.source.contains("; memory: nvidia-smi"), "{}", h200.source);
    for gpu in &all.gpus {
        // Nobody sells more than there is, but for rounding and what a context takes, which is most of the least.
        let share = (gpu.memory_bytes + (TAKEN_MIB << 20)) as f64 / gpu.nominal_memory_bytes as f64;
        assert!((1.0..1.1).contains(&share), "{}: {share}", gpu.name);
    }
    assert_eq!(all.gpu("mi325x").map(|gpu| gpu.memory_bytes), Some(256_000_000_000));
}

#[test]
fn the_european_clusters_are_there_with_what_nobody_verified() {
    let all = Catalogue::builtin();
    for name in ["leonardo", "lumi", "marenostrum5", "jupiter", "alps", "meluxina", "vega", "karolina", "berzelius"] {
        assert!(all.hardware(name).is_some(), "{name}");
    }
    let leonardo = all.hardware("Leonardo").unwrap();
    assert_eq!(leonardo.cluster.gpus_per_node, 4);
    assert!(leonardo.unverified().contains(&"a100-64gb.tflops".to_owned()), "{:?}", leonardo.unverified());
    for gpu in &all.gpus {
        assert!(!gpu.source.is_empty(), "{}", gpu.name);
    }
}

#[test]
fn a_users_file_adds_and_replaces_and_its_errors_name_the_figure() {
    let mut all = Catalogue::builtin();
    let gpu = |name: &str, tflops: f64| {
        format!(
            "[[gpu]]\nname = \"{name}\"\ntflops = {tflops:.1}\ntflops_fp32 = 1.0\nmemory_gb = 8.0\nmemory_tb_per_s = 1.0\nunits = 4\n\
             link_gb_per_s = 1.0\nsource = \"mine\"\n"
        )
    };
    let count = all.gpus.len();
    all.add("mine.toml", &gpu("mine", 5.0)).unwrap();
    all.add("mine.toml", &gpu("mine", 6.0)).unwrap();
    assert_eq!((all.gpus.len(), all.gpu("mine").map(|g| g.peak_flops_per_s)), (count + 1, Some(6e12)));
    // As typed, where the driver's figure is not given.
    let mine = all.gpu("mine").unwrap();
    assert_eq!((mine.memory_bytes, mine.nominal_memory_bytes), (8_000_000_000, 8_000_000_000));
    let driver = |mib: u64| gpu("mine", 6.0) + &format!("memory_mib = {mib}\n");
    all.add("mine.toml", &driver(8192)).unwrap();
    let mine = all.gpu("mine").unwrap();
    assert_eq!((mine.memory_bytes, mine.label()), ((8192 - TAKEN_MIB) << 20, "MINE 8GB".into()));
    let error = all.add("mine.toml", &driver(1024)).unwrap_err().with_hint();
    assert!(error.contains("gpu mine: memory_mib is not above what the driver and a context take, 1160"), "{error}");
    let error = all.add("mine.toml", &gpu("other", -1.0)).unwrap_err().with_hint();
    assert!(error.contains("mine.toml: gpu other: tflops is not above 0"), "{error}");
    let cluster = "[[cluster]]\nname = \"c\"\ngpu = \"h1000\"\ngpus_per_node = 4\nnode_gbit_per_s = 1.0\nfabric = \"efa\"\nsource = \"\"\n";
    let error = all.add("c.toml", cluster).unwrap_err().with_hint();
    assert!(error.contains("gpu \"h1000\" is not in the catalogue"), "{error}");
}
