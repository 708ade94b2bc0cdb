//! Published models by name. A preset is a `[model]` table, read by the same reader as the user's, and what such a model is
//! trained with: the sequence length of its pre-training, in bf16.

/// The names that `model.preset` accepts.
pub fn presets() -> impl Iterator<Item = &'static str> {
    NAMES.iter().copied()
}

struct Preset {
    name: &'static str,
    /// Tokens per sequence in pre-training, before any extension to a longer context.
    seq: u32,
    table: &'static str,
}

const PRESETS: [Preset; 29] = [
    Preset {
        name: "llama-15m",
        seq: 256,
        table: "
            [model]
            vocab_size = 32000
            layers = 6
            dim = 288
            heads = 6
            kv_heads = 6
            ffn = 768
            tied_embeddings = true
        ",
    },
    Preset {
        name: "llama-29m",
        seq: 512,
        table: "
            [model]
            vocab_size = 8192
            layers = 8
            dim = 512
            heads = 8
            kv_heads = 4
            ffn = 1536
            tied_embeddings = true
        ",
    },
    Preset {
        name: "llama-124m",
        seq: 1024,
        table: "
            [model]
            vocab_size = 50304
            layers = 12
            dim = 768
            heads = 12
            kv_heads = 12
            ffn = 2048
            tied_embeddings = true
        ",
    },
    Preset {
        name: "llama-2-7b",
        seq: 4096,
        table: "
            [model]
            vocab_size = 32000
            layers = 32
            dim = 4096
            heads = 32
            kv_heads = 32
            ffn = 11008
            tied_embeddings = false
            rope_theta = 10000.0
        ",
    },
    Preset {
        name: "llama-3.2-1b",
        seq: 8192,
        table: "
            [model]
            vocab_size = 128256
            layers = 16
            dim = 2048
            heads = 32
            kv_heads = 8
            head_dim = 64
            ffn = 8192
            tied_embeddings = true
            rope_theta = 500000.0

            [model.rope_scaling]
            factor = 32.0
            low_freq_factor = 1.0
            high_freq_factor = 4.0
            original_context = 8192
        ",
    },
    Preset {
        name: "llama-3.2-3b",
        seq: 8192,
        table: "
            [model]
            vocab_size = 128256
            layers = 28
            dim = 3072
            heads = 24
            kv_heads = 8
            head_dim = 128
            ffn = 8192
            tied_embeddings = true
            rope_theta = 500000.0

            [model.rope_scaling]
            factor = 32.0
            low_freq_factor = 1.0
            high_freq_factor = 4.0
            original_context = 8192
        ",
    },
    Preset {
        name: "llama-3-8b",
        seq: 8192,
        table: "
            [model]
            vocab_size = 128256
            layers = 32
            dim = 4096
            heads = 32
            kv_heads = 8
            ffn = 14336
            tied_embeddings = false
            rope_theta = 500000.0
        ",
    },
    Preset {
        name: "llama-3-70b",
        seq: 8192,
        table: "
            [model]
            vocab_size = 128256
            layers = 80
            dim = 8192
            heads = 64
            kv_heads = 8
            ffn = 28672
            tied_embeddings = false
            rope_theta = 500000.0
        ",
    },
    Preset {
        name: "llama-3-405b",
        seq: 8192,
        table: "
            [model]
            vocab_size = 128256
            layers = 126
            dim = 16384
            heads = 128
            kv_heads = 8
            ffn = 53248
            tied_embeddings = false
            rope_theta = 500000.0

            [model.rope_scaling]
            factor = 8.0
            low_freq_factor = 1.0
            high_freq_factor = 4.0
            original_context = 8192
        ",
    },
    Preset {
        name: "llama-3.1-8b",
        seq: 8192,
        table: "
            [model]
            vocab_size = 128256
            layers = 32
            dim = 4096
            heads = 32
            kv_heads = 8
            ffn = 14336
            tied_embeddings = false
            rope_theta = 500000.0

            [model.rope_scaling]
            factor = 8.0
            low_freq_factor = 1.0
            high_freq_factor = 4.0
            original_context = 8192
        ",
    },
    Preset {
        name: "llama-3.1-70b",
        seq: 8192,
        table: "
            [model]
            vocab_size = 128256
            layers = 80
            dim = 8192
            heads = 64
            kv_heads = 8
            ffn = 28672
            tied_embeddings = false
            rope_theta = 500000.0

            [model.rope_scaling]
            factor = 8.0
            low_freq_factor = 1.0
            high_freq_factor = 4.0
            original_context = 8192
        ",
    },
    Preset {
        name: "llama-3.1-405b",
        seq: 8192,
        table: "
            [model]
            vocab_size = 128256
            layers = 126
            dim = 16384
            heads = 128
            kv_heads = 8
            ffn = 53248
            tied_embeddings = false
            rope_theta = 500000.0

            [model.rope_scaling]
            factor = 8.0
            low_freq_factor = 1.0
            high_freq_factor = 4.0
            original_context = 8192
        ",
    },
    Preset {
        name: "gpt2",
        seq: 1024,
        table: r#"
            [model]
            architecture = "gpt2"
            vocab_size = 50257
            layers = 12
            dim = 768
            heads = 12
            ffn = 3072
            tied_embeddings = true
            positions = 1024
        "#,
    },
    Preset {
        name: "gpt2-medium",
        seq: 1024,
        table: r#"
            [model]
            architecture = "gpt2"
            vocab_size = 50257
            layers = 24
            dim = 1024
            heads = 16
            ffn = 4096
            tied_embeddings = true
            positions = 1024
        "#,
    },
    Preset {
        name: "gpt2-large",
        seq: 1024,
        table: r#"
            [model]
            architecture = "gpt2"
            vocab_size = 50257
            layers = 36
            dim = 1280
            heads = 20
            ffn = 5120
            tied_embeddings = true
            positions = 1024
        "#,
    },
    Preset {
        name: "gpt2-xl",
        seq: 1024,
        table: r#"
            [model]
            architecture = "gpt2"
            vocab_size = 50257
            layers = 48
            dim = 1600
            heads = 25
            ffn = 6400
            tied_embeddings = true
            positions = 1024
        "#,
    },
    Preset {
        name: "qwen2.5-0.5b",
        seq: 4096,
        table: r#"
            [model]
            architecture = "qwen2"
            vocab_size = 151936
            layers = 24
            dim = 896
            heads = 14
            kv_heads = 2
            ffn = 4864
            tied_embeddings = true
            rope_theta = 1000000.0
            norm_eps = 1e-6
        "#,
    },
    Preset {
        name: "qwen2.5-1.5b",
        seq: 4096,
        table: r#"
            [model]
            architecture = "qwen2"
            vocab_size = 151936
            layers = 28
            dim = 1536
            heads = 12
            kv_heads = 2
            ffn = 8960
            tied_embeddings = true
            rope_theta = 1000000.0
            norm_eps = 1e-6
        "#,
    },
    Preset {
        name: "qwen2.5-7b",
        seq: 4096,
        table: r#"
            [model]
            architecture = "qwen2"
            vocab_size = 152064
            layers = 28
            dim = 3584
            heads = 28
            kv_heads = 4
            ffn = 18944
            tied_embeddings = false
            rope_theta = 1000000.0
            norm_eps = 1e-6
        "#,
    },
    Preset {
        name: "qwen3-0.6b",
        seq: 4096,
        table: r#"
            [model]
            architecture = "qwen3"
            vocab_size = 151936
            layers = 28
            dim = 1024
            heads = 16
            kv_heads = 8
            head_dim = 128
            ffn = 3072
            tied_embeddings = true
            rope_theta = 1000000.0
            norm_eps = 1e-6
        "#,
    },
    Preset {
        name: "qwen3-8b",
        seq: 4096,
        table: r#"
            [model]
            architecture = "qwen3"
            vocab_size = 151936
            layers = 36
            dim = 4096
            heads = 32
            kv_heads = 8
            head_dim = 128
            ffn = 12288
            tied_embeddings = false
            rope_theta = 1000000.0
            norm_eps = 1e-6
        "#,
    },
    Preset {
        name: "mistral-7b",
        seq: 8192,
        table: r#"
            [model]
            architecture = "mistral"
            vocab_size = 32000
            layers = 32
            dim = 4096
            heads = 32
            kv_heads = 8
            ffn = 14336
            tied_embeddings = false
            rope_theta = 10000.0
            sliding_window = 4096
        "#,
    },
    Preset {
        name: "mixtral-8x7b",
        seq: 4096,
        table: r#"
            [model]
            architecture = "mixtral"
            vocab_size = 32000
            layers = 32
            dim = 4096
            heads = 32
            kv_heads = 8
            ffn = 14336
            experts = 8
            experts_per_token = 2
            tied_embeddings = false
            rope_theta = 1000000.0
        "#,
    },
    Preset {
        name: "mixtral-8x22b",
        seq: 4096,
        table: r#"
            [model]
            architecture = "mixtral"
            vocab_size = 32000
            layers = 56
            dim = 6144
            heads = 48
            kv_heads = 8
            ffn = 16384
            experts = 8
            experts_per_token = 2
            tied_embeddings = false
            rope_theta = 1000000.0
        "#,
    },
    Preset {
        name: "qwen3-30b-a3b",
        seq: 4096,
        table: r#"
            [model]
            architecture = "qwen3_moe"
            vocab_size = 151936
            layers = 48
            dim = 2048
            heads = 32
            kv_heads = 4
            head_dim = 128
            ffn = 6144
            expert_ffn = 768
            experts = 128
            experts_per_token = 8
            tied_embeddings = false
            rope_theta = 1000000.0
            norm_eps = 1e-6
        "#,
    },
    Preset {
        name: "qwen3-235b-a22b",
        seq: 4096,
        table: r#"
            [model]
            architecture = "qwen3_moe"
            vocab_size = 151936
            layers = 94
            dim = 4096
            heads = 64
            kv_heads = 4
            head_dim = 128
            ffn = 12288
            expert_ffn = 1536
            experts = 128
            experts_per_token = 8
            tied_embeddings = false
            rope_theta = 1000000.0
            norm_eps = 1e-6
        "#,
    },
    Preset {
        name: "olmoe-1b-7b",
        seq: 4096,
        table: r#"
            [model]
            architecture = "olmoe"
            vocab_size = 50304
            layers = 16
            dim = 2048
            heads = 16
            kv_heads = 16
            ffn = 1024
            experts = 64
            experts_per_token = 8
            norm_topk = false
            tied_embeddings = false
            rope_theta = 10000.0
        "#,
    },
    Preset {
        name: "deepseek-moe-16b",
        seq: 4096,
        table: r#"
            [model]
            architecture = "deepseek"
            vocab_size = 102400
            layers = 28
            dim = 2048
            heads = 16
            kv_heads = 16
            ffn = 10944
            expert_ffn = 1408
            experts = 64
            experts_per_token = 6
            shared_experts = 2
            dense_layers = 1
            norm_topk = false
            tied_embeddings = false
            rope_theta = 10000.0
            norm_eps = 1e-6
        "#,
    },
    // The layers of DeepSeek-V3 with multi-head attention in place of its latent attention, so of more parameters than it.
    Preset {
        name: "deepseek-v3-mha",
        seq: 4096,
        table: r#"
            [model]
            architecture = "dots1"
            vocab_size = 129280
            layers = 61
            dim = 7168
            heads = 128
            kv_heads = 128
            head_dim = 128
            ffn = 18432
            expert_ffn = 2048
            experts = 256
            experts_per_token = 8
            shared_experts = 1
            dense_layers = 3
            router_scale = 2.5
            expert_groups = 8
            expert_top_groups = 4
            tied_embeddings = false
            rope_theta = 10000.0
            norm_eps = 1e-6
        "#,
    },
];

/// The names of [`PRESETS`], in its order.
pub(crate) const NAMES: [&str; PRESETS.len()] = {
    let mut names = [""; PRESETS.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = PRESETS[i].name;
        i += 1;
    }
    names
};

/// What a preset gives, as TOML; none for a name that is not one.
pub(crate) fn text(name: &str) -> Option<String> {
    let preset = PRESETS.iter().find(|preset| preset.name == name)?;
    Some(format!("{}\n[train]\nseq = {}\n[precision]\npolicy = \"bf16\"\n", preset.table, preset.seq))
}
