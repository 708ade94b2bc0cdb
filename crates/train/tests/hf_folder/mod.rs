//! Hugging Face folders to import, made of the golden files.
// Each test binary uses a part of this.
#![allow(dead_code)]

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Golden files of every architecture.
pub const CASES: [&str; 25] = [
    "llama_mha",
    "llama_gqa_tied",
    "llama3_rope",
    "mistral",
    "qwen2",
    "qwen2_tied",
    "qwen3",
    "qwen3_tied",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "deepseek",
    "dots1",
    "gpt2",
    "gpt2_untied",
    "smollm3",
    "olmo2",
    "olmo3",
    "gemma3_text",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_wide",
    "gpt_oss",
    "gpt_oss_plain",
];

/// A tensor: name, type, dims, bytes.
pub type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

type Entries = Vec<(usize, usize, Tensor)>;

/// A model of a golden file, as Hugging Face has it.
pub struct Model {
    pub config: Value,
    pub tensors: Vec<Tensor>,
}

impl Model {
    pub fn golden(case: &str) -> Self {
        Self::of(case, "param.")
    }

    /// The tensors of a golden file whose names begin so.
    pub fn of(case: &str, prefix: &str) -> Self {
        let path = format!("{}/tests/golden/{case}.safetensors", env!("CARGO_MANIFEST_DIR"));
        Self::read(Path::new(&path), prefix)
    }

    /// The same of any file.
    pub fn read(path: &Path, prefix: &str) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors: Vec<Tensor> = Vec::new();
        for name in file.names() {
            let Some(own) = name.strip_prefix(prefix) else { continue };
            let view = file.tensor(name).unwrap();
            tensors.push((own.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec()));
        }
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        Self { config: config(header.metadata().as_ref().unwrap()), tensors }
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.0 == name).unwrap_or_else(|| panic!("{name}"))
    }

    /// As transformers 5 saves it with `save_original_format=False`: the matrices of all experts of a layer in one tensor.
    pub fn with_experts_together(self) -> Self {
        // By the block and the name of the whole: of each expert in order, its place there, and the matrix.
        let mut together: BTreeMap<(String, &str), Entries> = BTreeMap::new();
        let mut tensors = Vec::new();
        for (name, dtype, shape, data) in self.tensors {
            let memory = name.replace(".block_sparse_moe.", ".mlp.");
            let parts: Vec<&str> = memory.split(".experts.").collect();
            let [block, rest] = parts[..] else {
                tensors.push((memory, dtype, shape, data));
                continue;
            };
            let (expert, matrix) = rest.split_once('.').unwrap();
            let (whole, place) = match matrix.trim_end_matches(".weight") {
                "gate_proj" | "w1" => ("gate_up_proj", 0),
                "up_proj" | "w3" => ("gate_up_proj", 1),
                _ => ("down_proj", 0),
            };
            let entry = (expert.parse().unwrap(), place, (name, dtype, shape, data));
            together.entry((block.to_owned(), whole)).or_default().push(entry);
        }
        for ((block, whole), mut entries) in together {
            entries.sort_by_key(|(expert, place, _)| (*expert, *place));
            let experts = entries.last().unwrap().0 + 1;
            let (_, _, (_, dtype, shape, _)) = &entries[0];
            let shape = vec![experts, shape[0] * entries.len() / experts, shape[1]];
            let data = entries.iter().flat_map(|(_, _, tensor)| tensor.3.clone()).collect();
            tensors.push((format!("{block}.experts.{whole}"), *dtype, shape, data));
        }
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        Self { config: self.config, tensors }
    }

    /// The file as transformers writes it.
    pub fn file(&self) -> Vec<u8> {
        serialize(&self.tensors)
    }

    /// Writes the model to a folder.
    pub fn write(&self, folder: &Path) -> PathBuf {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        std::fs::write(folder.join("model.safetensors"), self.file()).unwrap();
        folder.to_owned()
    }
}

pub fn serialize(tensors: &[Tensor]) -> Vec<u8> {
    let view = |(name, dtype, shape, data): &Tensor| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), &data.clone().leak()[..]).unwrap())
    };
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(tensors.iter().map(view), Some(format)).unwrap()
}

/// The `config.json` of a golden model.
fn config(m: &HashMap<String, String>) -> Value {
    if let Some(config) = m.get("config") {
        return serde_json::from_str(config).unwrap();
    }
    let number = |key: &str| m.get(key).map(|text| text.parse::<f64>().unwrap());
    let count = |key: &str| m.get(key).map(|text| text.parse::<usize>().unwrap());
    let tied = m["tied"] == "true";
    let architecture = m.get("architecture").map_or("llama", String::as_str);
    if architecture == "gpt2" {
        return json!({
            "model_type": "gpt2", "vocab_size": count("vocab_size"), "n_layer": count("layers"), "n_embd": count("dim"),
            "n_head": count("heads"), "n_inner": count("ffn"), "n_positions": count("positions"),
            "layer_norm_epsilon": number("norm_eps"), "activation_function": "gelu_new", "tie_word_embeddings": tied,
        });
    }
    let mut rope = json!({ "rope_type": "default", "rope_theta": number("rope_theta") });
    if let Some(factor) = number("rope_factor") {
        rope = json!({
            "rope_type": "llama3", "rope_theta": number("rope_theta"), "factor": factor,
            "low_freq_factor": number("rope_low"), "high_freq_factor": number("rope_high"),
            "original_max_position_embeddings": count("rope_original"),
        });
    }
    let mut config = json!({
        "model_type": architecture, "vocab_size": count("vocab_size"), "num_hidden_layers": count("layers"),
        "hidden_size": count("dim"), "num_attention_heads": count("heads"), "num_key_value_heads": count("kv_heads"),
        "head_dim": count("head_dim"), "intermediate_size": count("ffn"), "rms_norm_eps": number("norm_eps"),
        "hidden_act": "silu", "tie_word_embeddings": tied, "rope_parameters": rope, "max_position_embeddings": 128,
        "sliding_window": count("window"), "use_sliding_window": false, "dtype": "float32",
    });
    let experts = match architecture {
        "mixtral" => "num_local_experts",
        "deepseek" | "dots1" => "n_routed_experts",
        _ => "num_experts",
    };
    if let Some(scale) = number("router_scale") {
        config["routed_scaling_factor"] = json!(scale);
    }
    let experts = [
        (experts, count("experts")),
        ("num_experts_per_tok", count("experts_per_token")),
        ("moe_intermediate_size", count("expert_ffn")),
        ("n_shared_experts", count("shared_experts")),
        ("first_k_dense_replace", count("dense_layers")),
        ("n_group", count("expert_groups")),
        ("topk_group", count("expert_top_groups")),
    ];
    for (field, count) in experts {
        if let Some(count) = count {
            config[field] = json!(count);
        }
    }
    config["norm_topk_prob"] = json!(m.get("norm_topk").is_some_and(|text| text == "true"));
    config
}
