//! The hardware that a row names in words.

use super::row::Row;
use lockstep_sim::{Catalogue, GpuSpec, Hardware};

/// Network adapters of nodes of which nothing is said, in bytes per second for each GPU: 200 Gb/s up to the A100, 400 Gb/s since.
const ADAPTERS: [(&str, f64); 3] = [("v100", 12.5e9), ("a100", 25e9), ("mi250x", 25e9)];

/// The hardware of a row; the reason where its GPU is not in the catalogue.
pub fn hardware(catalogue: &Catalogue, row: &Row) -> Result<Hardware, String> {
    let unknown = || {
        let names: Vec<&str> = catalogue.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
        format!("gpu = {:?} is not in the catalogue: {}", row.gpu, names.join(", "))
    };
    let gpu = gpu(catalogue, &row.gpu).ok_or_else(unknown)?;
    let said = format!("{} {} {}", row.gpu, row.source, row.notes).to_lowercase();
    let words: Vec<&str> = said.split(|c: char| !c.is_alphanumeric()).collect();
    let named = catalogue.clusters.iter().filter(|cluster| cluster.gpu == gpu.name).find(|cluster| {
        let place = cluster.name.split('-').next().unwrap_or_default();
        let whole = words.windows(2).any(|pair| pair.join("-") == cluster.name);
        whole || words.contains(&place) || (cluster.fabric == "efa" && words.contains(&"efa"))
    });
    if let Some(cluster) = named {
        return Ok(Hardware { gpu: gpu.clone(), cluster: cluster.clone() });
    }
    let mut hardware = Hardware::assumed(gpu);
    if let Some((_, adapter)) = ADAPTERS.iter().find(|(family, _)| *family == gpu.family) {
        hardware.cluster.node_bytes_per_s = adapter * hardware.cluster.gpus_per_node as f64;
        hardware.cluster.label = format!("nodes of {}, {} Gb/s each", hardware.cluster.gpus_per_node, adapter * 8e-9);
    }
    Ok(hardware)
}

/// The GPU that a text means: the first that it names, with as much memory as it says.
fn gpu<'a>(catalogue: &'a Catalogue, text: &str) -> Option<&'a GpuSpec> {
    let text = text.to_lowercase();
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    let words: Vec<&str> = words.map(|word| bare(catalogue, word)).collect();
    let first = words.iter().enumerate().find_map(|(i, word)| Some((i, catalogue.gpu(word)?)));
    let Some((at, base)) = first else { return catalogue.of_device(&text) };
    let memory = words[at + 1..].iter().take(3).find_map(|word| word.strip_suffix("gb")?.parse::<u32>().ok());
    let variant = memory.and_then(|gigabytes| catalogue.gpu(&format!("{}-{gigabytes}gb", base.name)));
    let kind = words[at + 1..].first().and_then(|word| catalogue.gpu(&format!("{}-{word}", base.name)));
    Some(variant.or(kind).unwrap_or(base))
}

/// A word without what counts or houses GPUs: `8xh100`, `h100sxm5` and `h100x8` are an `h100`.
fn bare<'a>(catalogue: &Catalogue, word: &'a str) -> &'a str {
    let counted = word.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix('x');
    let counts = word.trim_end_matches(|c: char| c.is_ascii_digit()).strip_suffix('x');
    let housed = ["sxm", "hgx", "dgx", "nvl", "pcie"].iter().find_map(|house| {
        let before = word.find(house).map(|at| &word[..at]).filter(|before| !before.is_empty());
        before.or_else(|| word.strip_prefix(house))
    });
    let known = |word: &&str| catalogue.gpu(word).is_some();
    [Some(word), counted, counts, housed].into_iter().flatten().find(known).unwrap_or(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_found_under_decorated_names() {
        let all = Catalogue::builtin();
        let of = |text: &str| gpu(&all, text).map(|gpu| gpu.name.as_str());
        for name in [
            "H100",
            "DGX-H100",
            "H100 80GB SXM",
            "NVIDIA_H100_SXM5",
            "8xH100",
            "8x H100",
            "H100x8",
            "HGX H100",
            "h100sxm5",
        ] {
            assert_eq!(of(name), Some("h100"), "{name}");
        }
        assert_eq!(of("DGX-GB200 NVL72"), Some("gb200"));
        assert_eq!(of("4xA100-SXM4-40GB"), Some("a100-40gb"));
        assert_eq!((of("H100 PCIe"), of("H100 96GB (Grand Teton)")), (Some("h100-pcie"), Some("h100-96gb")));
        assert_eq!(of("z80"), None);
    }
}
