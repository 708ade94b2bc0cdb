//! The declaration of every key of `run.toml`: `field: type = kind, default, effect`, and its meaning above it. After it,
//! where there are any: `finds` what else the field calls it, `was` the names that it had before.
//!
//! A default may be derived from keys that have a fixed default, and from others that stand above it.

use crate::architecture::{self, Architecture};
use crate::declare::Default::{Derived, DerivedOrRequired, Fixed, OfOptimizer, Required, Unset};
use crate::declare::Effect::{Changeable, Conduct, Trajectory};
use crate::declare::{Key, name, tables};
use crate::defaults;
use crate::kind::Kind::{
    Bool, Choice, Corpora, Count, CountOrAuto, Counts, Float, Groups, Integer, Ramp, RopeScaling as Scaling, Sequences,
    Size, SizeOrAuto, Text, Texts,
};
use crate::kind::{
    AT_LEAST_ONE, BELOW_ONE, CONTAINER, ELASTIC, EXTENSIONS, FIELD, FOLDER, LAYER_TYPES, LAYERS_OF_STAGES, MAX_BATCH,
    MODULES, NOT_NEGATIVE, OPS, PATHS, POSITIVE, POWER_OF_TWO, ROPE_LAYERS, SERVER, SHELL_LINES, SITE_NAME,
    SLURM_OPTIONS, TARGETS, TEMPLATE, TIME_LIMIT, TOKEN, TOKENIZER, TOKENS, UP_TO_A_DAY, UP_TO_HALF, UP_TO_ONE,
};
use crate::latent;
use crate::optimizers::{self, OptimizerName};
use crate::origin::Provenance;
use crate::presets;
use crate::rules;
use crate::stages;
use crate::value::{
    Bytes, CorpusConfig, Field, GroupConfig, OffloadSize, RampConfig, RopeScalingConfig, SaveEvery, Value,
};
use crate::values::Values;
use crate::words::{
    Activation, AttentionMethod, DataFormat, DeviceChoice, Fp8Recipe, FrozenPrecision, GradientPrecision, LayerType,
    LayoutSource, LrSchedule, MasterPrecision, MomentPrecision, NormPlaces, PrecisionPolicy, QkNorm, RecomputePolicy,
    TrainOnTurns,
};
use lockstep_ir::{ContextParallel, Layout, Schedule};

/// The largest extent of one tensor dimension.
const EXTENT: u64 = 1 << 24;
/// The largest batch, in sequences.
const BATCH: u64 = MAX_BATCH;
/// The largest number of ranks along an axis of the mesh.
const RANKS: u64 = Layout::MOST as u64;
/// The largest number of steps.
const STEPS: u64 = 1 << 40;

tables! {
    /// The shape of the model.
    model: ModelConfig {
        /// A published model size, or one of ours. It fills the other model keys, train.seq with the sequence length of its
        /// pre-training, and precision.policy with bf16; keys given beside it win over it, and one that --set names wins over
        /// the shape that the file gives.
        preset: Option<String> = Choice(&presets::NAMES), Unset, Conduct, finds ["model size", "model name", "shape"];
        /// The family of models the shape belongs to.
        architecture: Architecture = Choice(Architecture::WORDS), Fixed(architecture::DEFAULT), Trajectory,
            finds ["model type"];
        /// How many different tokens there are.
        vocab_size: usize = Count(1, EXTENT), Required, Trajectory, finds ["vocabulary", "vocab"];
        /// How many transformer layers.
        layers: usize = Count(1, EXTENT), Required, Trajectory,
            finds ["num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "blocks"];
        /// Width of the residual stream.
        dim: usize = Count(1, EXTENT), Required, Trajectory,
            finds ["hidden_size", "d_model", "n_embd", "embedding dimension", "width"];
        /// How many query heads attention has.
        heads: usize = Count(1, EXTENT), Required, Trajectory,
            finds ["num_attention_heads", "n_heads", "n_head", "num_heads"];
        /// How many key and value heads; fewer than query heads is grouped-query attention (GQA), one is multi-query attention
        /// (MQA). It divides the query heads.
        kv_heads: usize = Count(1, EXTENT), Derived("model.heads", defaults::kv_heads), Trajectory,
            finds ["GQA", "grouped-query attention", "grouped query attention", "MQA", "multi-query attention",
                "num_key_value_heads", "n_kv_heads", "num_query_groups"];
        /// Multi-head latent attention (MLA): the width of the latent that keys and values of all heads expand from, after a norm. If
        /// it is not set, keys and values are projected as they are.
        kv_lora_rank: Option<usize> = Count(1, EXTENT),
            Derived("512 for deepseek_v2 and deepseek_v3, else not set", latent::kv_lora_rank), Trajectory,
            finds ["MLA", "multi-head latent attention", "latent attention", "kv_lora_rank"];
        /// With latent attention, the width of the latent of queries, which has a norm too; if it is not set, queries have none.
        q_lora_rank: Option<usize> = Count(1, EXTENT), Unset, Trajectory, finds ["q_lora_rank", "low-rank queries"];
        /// With latent attention, how many elements of a head of Q and K have no position.
        qk_nope_head_dim: Option<usize> = Count(1, EXTENT),
            Derived("128 with model.kv_lora_rank, else not set", latent::nope), Trajectory, finds ["qk_head_dim"];
        /// With latent attention, how many elements of a head of Q and K have RoPE, in pairs side by side; those of K are the same in
        /// all heads.
        qk_rope_head_dim: Option<usize> = Count(1, EXTENT),
            Derived("64 with model.kv_lora_rank, else not set", latent::rope), Trajectory,
            finds ["qk_pos_emb_head_dim", "decoupled RoPE"];
        /// With latent attention, the width of a head of V.
        v_head_dim: Option<usize> = Count(1, EXTENT),
            Derived("128 with model.kv_lora_rank, else not set", latent::value), Trajectory, finds ["v_head_dim"];
        /// Width of one head of Q and K; even where RoPE rotates pairs.
        head_dim: usize = Count(1, EXTENT),
            Derived("model.dim / model.heads; with model.kv_lora_rank, model.qk_nope_head_dim + model.qk_rope_head_dim", defaults::head_dim),
            Trajectory,
            finds ["d_head", "kv_channels"];
        /// Hidden width of the feed-forward block (MLP).
        ffn: usize =
            Count(1, EXTENT), DerivedOrRequired("4 × model.dim for gpt2, else required", defaults::ffn), Trajectory,
            finds ["intermediate_size", "d_ff", "ffn_hidden_size", "feed-forward", "MLP", "hidden_dim"];
        /// Activation function of the feed-forward block. silu: SwiGLU. gelu: GeGLU, with the tanh approximation of GELU; gpt2 has it
        /// without a gate. clamped_swiglu: (up + 1) · gate · sigmoid(1.702 · gate), with gate at most model.swiglu_limit and up at most as far
        /// from 0, as gpt-oss has it.
        activation: Activation =
            Choice(Activation::WORDS),
            Derived("\"gelu\" for gemma3_text and gpt2, \"clamped_swiglu\" for gpt_oss, else \"silu\"", defaults::activation), Trajectory,
            finds ["SwiGLU", "GeGLU", "GELU", "hidden_act", "hidden_activation", "gelu_pytorch_tanh", "swiglu", "quick_geglu"];
        /// Where a clamped SwiGLU clamps gate and up.
        swiglu_limit: Option<f64> = Float(POSITIVE),
            Derived("7.0 with model.activation = \"clamped_swiglu\", else not set", defaults::swiglu_limit), Trajectory,
            finds ["swiglu_limit", "activation_func_clamp_value", "glu_linear_offset"];
        /// Mixture of experts (MoE), which mixtral, qwen3_moe, olmoe, dots1, gpt_oss and the deepseek families have: how many experts take the place of the
        /// feed-forward block of every layer.
        experts: Option<usize> = Count(1, EXTENT), Unset, Trajectory,
            finds ["MoE", "mixture of experts", "num_experts", "num_local_experts", "n_routed_experts"];
        /// Top-k: how many experts the router chooses for a token.
        experts_per_token: Option<usize> =
            Count(1, EXTENT), Derived("2 with model.experts, else not set", defaults::top_k), Trajectory,
            finds ["top_k", "top-k", "num_experts_per_tok", "moe_router_topk", "router"];
        /// Hidden width of one expert.
        expert_ffn: Option<usize> =
            Count(1, EXTENT), Derived("model.ffn with model.experts, else not set", defaults::expert_ffn), Trajectory,
            finds ["moe_intermediate_size", "moe_ffn_hidden_size"];
        /// Whether the weights of a token's experts are divided by their sum.
        norm_topk: bool = Bool, Derived("false for deepseek_v2, else true", defaults::norm_topk), Trajectory, finds ["norm_topk_prob", "normalised router weights"];
        /// Experts that every token goes to besides, of dots1 and the deepseek families: one MLP as wide as all of them.
        shared_experts: Option<usize> =
            Count(1, EXTENT), Derived("1 for deepseek, dots1, deepseek_v2 and deepseek_v3, else not set", defaults::shared_experts), Trajectory,
            finds ["n_shared_experts", "shared expert"];
        /// How many first layers of a dots1 or deepseek model have a feed-forward block of model.ffn and no experts.
        dense_layers: usize = Count(0, EXTENT), Fixed("0"), Trajectory,
            finds ["first_k_dense_replace", "moe_layer_freq", "dense first layers"];
        /// What the weights of a token's experts are multiplied by, in a dots1, deepseek_v2 or deepseek_v3 model.
        router_scale: f64 = Float(POSITIVE), Fixed("1.0"), Trajectory,
            finds ["routed_scaling_factor", "moe_router_topk_scaling_factor"];
        /// Group-limited choice of a dots1, deepseek_v2 or deepseek_v3 model: groups of experts, side by side, of which a token may use
        /// model.expert_top_groups.
        expert_groups: usize = Count(1, EXTENT), Fixed("1"), Trajectory,
            finds ["n_group", "moe_router_num_groups", "group-limited routing", "device-limited routing"];
        /// How many groups of experts a token may use: those whose two best experts have the highest scores together; in deepseek_v2 those with
        /// the best expert.
        expert_top_groups: usize = Count(1, EXTENT), Fixed("1"), Trajectory,
            finds ["topk_group", "moe_router_group_topk"];
        /// Balancing without a loss, of a dots1 or deepseek_v3 model: how far the bias of an expert, which counts in the choice alone, moves per step:
        /// up where it got fewer tokens than the mean, down where it got more. DeepSeek-V3 takes 0.001.
        balance_bias: f64 = Float(NOT_NEGATIVE), Fixed("0.0"), Changeable,
            finds ["moe_router_bias_update_rate", "auxiliary-loss-free", "loss-free balancing", "e_score_correction_bias"];
        /// How much the load-balancing loss of a model with experts counts in training, of every sequence for itself. It is 1 where all
        /// experts get as many tokens, and is no part of the loss that is shown.
        balance_loss: f64 = Float(NOT_NEGATIVE), Fixed("0.01"), Changeable,
            finds ["router_aux_loss_coef", "moe_aux_loss_coeff", "load balancing", "auxiliary loss"];
        /// How much the z-loss of the router counts: the mean square of the log-sum-exp of its logits.
        z_loss: f64 = Float(NOT_NEGATIVE), Fixed("0.0"), Changeable,
            finds ["router_z_loss_coef", "moe_z_loss_coeff", "z loss"];
        /// Multi-token prediction (MTP), as DeepSeek-V3 is trained with it: how many modules after the last layer predict one further token each, with a
        /// layer of their own and the model's embedding and output head. Evaluation and generation are without them.
        mtp_depth: usize = Count(0, 16), Fixed("0"), Trajectory,
            finds ["MTP", "multi-token prediction", "num_nextn_predict_layers", "mtp_num_layers", "multi token prediction"];
        /// How much the loss of those modules, their mean, counts in training beside the loss that is shown. DeepSeek-V3 took 0.3 for its first 10T
        /// tokens, then 0.1.
        mtp_loss: f64 = Float(POSITIVE), Fixed("0.1"), Changeable,
            finds ["mtp_loss_scaling_factor", "MTP loss weight"];
        /// Learned position embeddings, which gpt2 has instead of RoPE: the longest sequence.
        positions: Option<usize> =
            Count(1, EXTENT), Derived("1024 for gpt2, else not set", defaults::positions), Trajectory,
            finds ["max_position_embeddings", "n_positions", "learned positions", "position embeddings"];
        /// Base of the rotary position embeddings (RoPE); gpt2, which has none, does not look at it.
        rope_theta: f64 = Float(POSITIVE), Fixed("500000.0"), Trajectory,
            finds ["RoPE", "rotary embeddings", "rotary_base", "theta"];
        /// RoPE scaling for a longer context: that of Llama 3, or with `type`, "linear" or "yarn".
        rope_scaling: Option<RopeScalingConfig> = Scaling, Unset, Trajectory,
            finds ["long context", "context extension", "YaRN", "linear RoPE scaling", "position interpolation", "llama3", "rope_type", "rope_parameters"];
        /// Which layers have RoPE, 1 with and 0 without (NoPE), as a pattern that repeats over the layers. If it is empty, all have
        /// it.
        rope_layers: Vec<usize> =
            Counts(ROPE_LAYERS), Derived("[1, 1, 1, 0] for smollm3, else []", defaults::rope_layers), Trajectory,
            finds ["NoPE", "no_rope_layers", "no_rope_layer_interval", "iRoPE", "no positional encoding"];
        /// Sliding-window attention: how many tokens a token attends to at most, itself included, in the layers that
        /// model.layer_types says; if not set, all before it.
        sliding_window: Option<usize> = Count(1, EXTENT), Unset, Trajectory,
            finds ["sliding window", "SWA", "local attention", "attention window"], was ["window"];
        /// Which layers have the sliding window, "sliding" with and "full" without, as a pattern that repeats over the layers. If it is
        /// empty, all are the same.
        layer_types: Vec<LayerType> = Texts(LAYER_TYPES),
            Derived("1 sliding and 1 full for gpt_oss, 3 and 1 for olmo3, 5 and 1 for gemma3_text, if there is a window, else []", defaults::layer_types),
            Trajectory,
            finds ["sliding_window_pattern", "interleaved attention", "local and global attention", "hybrid attention",
                "full attention layers"];
        /// Base of RoPE in layers with a sliding window where others have none; model.rope_scaling does not touch it. If it is not
        /// set, they have the RoPE of the others.
        rope_local_theta: Option<f64> = Float(POSITIVE),
            Derived("10000 for gemma3_text, model.rope_theta for olmo3, if some layers have a window; else not set", defaults::rope_local_theta),
            Trajectory, finds ["rope_local_base_freq", "local RoPE base"];
        /// QK norm: RMS norms of queries and keys, before RoPE. none: there are none. head: of every head, with a weight for
        /// all heads of Q and one for those of K. whole: over all heads of Q at once, and of K.
        qk_norm: QkNorm = Choice(QkNorm::WORDS),
            Derived("\"head\" for qwen3, qwen3_moe, dots1 and gemma3_text, \"whole\" for olmoe, olmo2 and olmo3, else \"none\"", defaults::qk_norm),
            Trajectory, finds ["QK norm", "qk_layernorm", "query-key normalization", "q_norm", "k_norm", "use_qk_norm"];
        /// Scores of attention are divided by the square root of this number before the softmax.
        softmax_scale_dim: usize =
            Count(1, EXTENT), Derived("model.head_dim", defaults::softmax_scale_dim), Trajectory,
            finds ["query_pre_attn_scalar", "softmax scale", "softmax_scale", "attention scale", "attention_multiplier"];
        /// Attention sinks: a learned logit of every head in the denominator of its softmax, without a value, so that a query may attend to
        /// nothing.
        attention_sinks: bool = Bool, Derived("true for gpt_oss, else false", defaults::attention_sinks), Trajectory,
            finds ["attention sink", "sinks", "softmax_type", "learnable sink", "off-by-one softmax", "softmax1"];
        /// How attention is computed in training. flash: tile by tile, so that memory grows with the sequence. naive: with the
        /// matrix of its weights saved for the backward pass, so that memory grows with the square of the sequence.
        attention: AttentionMethod = Choice(AttentionMethod::WORDS), Fixed("\"flash\""), Changeable,
            finds ["FlashAttention", "flash attention", "SDPA", "attn_implementation"];
        /// Where the norms of a layer stand. pre: before attention and before the feed-forward block. post: after each, before its
        /// result is added to the residual stream. sandwich: before and after each.
        norms: NormPlaces = Choice(NormPlaces::WORDS),
            Derived("\"post\" for olmo2 and olmo3, \"sandwich\" for gemma3_text, else \"pre\"", defaults::norms), Trajectory,
            finds ["norm placement", "pre-norm", "post-norm", "sandwich norm", "peri-LN", "post_attention_layernorm",
                "pre_feedforward_layernorm", "reordered norm"];
        /// Whether norms multiply by 1 + their weight, which then starts at 0.
        norm_plus_one: bool = Bool, Derived("true for gemma3_text, else false", defaults::norm_plus_one), Trajectory,
            finds ["zero-centered gamma", "layernorm_zero_centered_gamma", "apply_layernorm_1p", "rms_norm_add_unit_offset",
                "unit offset"];
        /// What norms add to the mean square, or to the variance, before the root.
        norm_eps: f64 = Float(POSITIVE), Fixed("1e-5"), Trajectory,
            finds ["rms_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"];
        /// Whether the output head uses the embedding's weights.
        tied_embeddings: bool = Bool, Derived("true for gpt2, smollm3 and gemma3_text, else false", defaults::tied), Trajectory,
            finds ["tie_word_embeddings", "weight tying", "tied weights"];
        /// What embeddings are multiplied by before the first layer, as rounded to the type of the weights.
        embedding_scale: f64 = Float(POSITIVE),
            Derived("the square root of model.dim for gemma3_text, else 1.0", defaults::embedding_scale), Trajectory,
            finds ["embedding multiplier", "embedding_multiplier", "scale_embeddings", "embed_scale", "normalize_embedding"];
        /// Probability of dropout after gpt2's embedding and in front of every addition to the residual stream; attention
        /// weights are not dropped. The same mask on every layout.
        dropout: f64 = Float(BELOW_ONE), Fixed("0.0"), Changeable,
            finds ["resid_pdrop", "embd_pdrop", "hidden_dropout"];
        /// Standard deviation of the initial weights.
        init_std: f64 = Float(POSITIVE), Fixed("0.02"), Trajectory,
            finds ["initializer_range", "init_method_std", "weight initialization"];
    }

    /// What is read.
    data: DataConfig {
        /// Files, or folders to search for files, relative to the config file's folder: text, or Megatron's tokens (.bin, .idx). Or
        /// hf:datasets/OWNER/NAME/PATH, files of a dataset on the Hugging Face Hub. Or s3://BUCKET/KEY: text in a bucket.
        paths: Vec<String> = Texts(PATHS), Fixed("[]"), Conduct, finds ["dataset", "training data", "data_path", "Megatron", "indexed dataset"];
        /// Several corpora to mix, each with its name, its paths, its weight, and if it changes, its weights from given tokens on
        /// (`schedule`), instead of `data.paths`.
        corpora: Vec<CorpusConfig> = Corpora, Fixed("[]"), Trajectory,
            finds ["data mixture", "data mix", "blend", "datasets", "sampling weights", "annealing",
                "curriculum"];
        /// Which files of a folder are read, by extension; files that are named themselves are always read.
        extensions: Vec<String> = Texts(EXTENSIONS), Fixed(TEXT_EXTENSIONS), Conduct;
        /// What records hold. text: a text. chat: a conversation, a list of messages with a role and content (or ShareGPT's
        /// conversations with from and value), which the chat template of the tokenizer makes text of.
        format: DataFormat = Choice(DataFormat::WORDS), Fixed("\"text\""), Trajectory,
            finds ["chat", "messages", "conversations", "ShareGPT", "SFT", "supervised fine-tuning", "instruction tuning"];
        /// The chat template: the path of a Jinja file, relative to the config file's folder. If not set, chat_template.jinja beside
        /// the tokenizer.json, or else chat_template in tokenizer_config.json beside it.
        chat_template: Option<String> = Text(TEMPLATE), Unset, Trajectory, finds ["Jinja", "apply_chat_template"];
        /// What of a conversation counts in the loss: the turns of the assistant, the last of them, or all.
        train_on: Option<TrainOnTurns> = Choice(TrainOnTurns::WORDS),
            Derived("\"assistant\" for chats, else not set", defaults::train_on), Trajectory,
            finds ["assistant_only_loss", "train_on_inputs", "train_on_responses_only", "roles_to_train", "loss mask"];
        /// Special tokens that text and messages may spell; others are text there. Special tokens that a chat template writes are always
        /// special.
        special_tokens: Vec<String> = Texts(TOKENS), Fixed("[]"), Trajectory,
            finds ["split_special_tokens", "parse_special", "sanitize_control_tokens"];
        /// The field of a JSON line, or the column of a Parquet file, that holds the text or the messages.
        text_field: String = Text(FIELD), Derived("\"text\"; for chats \"messages\"", defaults::text_field), Conduct,
            finds ["dataset_text_field", "text_column", "json_key"];
        /// The field or column whose text stands before it as a prompt: the model reads it, and only the text after it counts in
        /// the loss (completion-only loss, for fine-tuning). If not set, every token counts.
        prompt_field: Option<String> = Text(FIELD), Unset, Trajectory,
            finds ["completion-only loss", "train_on_inputs", "loss mask", "instruction tuning", "prompt masking"];
        /// How text becomes tokens: "bytes", the path of a Hugging Face tokenizer.json, relative to the config file's
        /// folder, or hf:OWNER/NAME for that of a model on the Hugging Face Hub.
        tokenizer: String = Text(TOKENIZER), Fixed("\"bytes\""), Trajectory,
            finds ["tokenizer_path", "BPE", "byte-level"];
        /// The EOS token, which ends each document. If not set, that of the tokenizer: of its folder, or the one of a usual name.
        eos_token: Option<String> = Text(TOKEN), Unset, Trajectory,
            finds ["EOS", "EOD", "end of text", "end of document", "separator"], was ["end_token"];
        /// The BOS token, which begins each document and prompt; if not set, that of a Hugging Face folder in `train.init_from` whose
        /// tokenizer adds one, else none. "none" adds none in any case.
        bos_token: Option<String> = Text(TOKEN), Unset, Trajectory,
            finds ["BOS", "add_bos_token", "beginning of text", "begin_of_text"];
        /// Folder of prepared (tokenized, packed) data to share between runs, relative to the config file's folder; if not
        /// set, each run has its own. Or s3://BUCKET/KEY: such a folder in a bucket, which is read while the run trains.
        prepared: Option<String> = Text(FOLDER), Unset, Conduct,
            finds ["tokenized data", "packed data", "S3", "bucket", "object storage", "streaming dataset"];
        /// Folder where blocks of prepared data in a bucket are kept, relative to the config file's folder; if not set, lockstep/buckets in
        /// the user's cache ($XDG_CACHE_HOME, or ~/.cache). A disk of the node is best.
        cache: Option<String> = Text(FOLDER), Unset, Conduct, finds ["data cache", "local cache", "cache_dir"];
        /// The most bytes that it may have: the least recently used blocks go first.
        cache_size: Bytes = Size, Fixed("\"16 GiB\""), Conduct, finds ["cache limit", "cache_limit"];
        /// Seconds that a bucket which does not answer is asked again, for data and for checkpoints, before that is an error.
        bucket_timeout: f64 = Float(UP_TO_A_DAY), Fixed("600.0"), Conduct, finds ["S3 timeout", "retries", "max_attempts"];
        /// Whether a token attends to its own document only, with positions counted from its start, where a packed sequence
        /// holds several.
        document_mask: bool = Bool, Derived("true for chats, else false", defaults::document_mask), Changeable,
            finds ["document masking", "packing", "intra-document masking", "block-diagonal attention",
                "reset_attention_mask", "cross-document attention", "variable length", "varlen"];
        /// The share of the data held out for validation.
        validation_fraction: f64 = Float(UP_TO_HALF), Fixed("0.05"), Trajectory,
            finds ["validation split", "held-out", "eval split", "val_split"];
    }

    /// The training loop.
    train: TrainConfig {
        /// How many optimizer steps the run has.
        steps: u64 = Count(0, STEPS), Fixed("1000"), Changeable,
            finds ["max_steps", "train_iters", "iterations", "max_iters", "epochs", "num_train_epochs"];
        /// Sequence length: tokens per sequence. A preset gives that of its pre-training.
        seq: usize = Count(1, EXTENT), Fixed("1024"), Trajectory,
            finds ["sequence length", "seq_len", "seq_length", "context length", "block_size", "max_seq_length",
                "max_seq_len", "context"];
        /// Global batch size: sequences per optimizer step.
        global_batch: usize = Sequences(BATCH), Fixed("8"), Trajectory,
            finds ["batch size", "global batch size", "batch", "train_batch_size"];
        /// Batch size warmup: other sizes of steps, each of which begins when the run has seen a number of tokens; global_batch is the
        /// first. Steps are counted as ever, by train.steps and the learning rate too. Memory is that of the largest size.
        batch_ramp: Vec<RampConfig> = Ramp, Fixed("[]"), Changeable,
            finds ["batch size warmup", "batch ramp-up", "rampup_batch_size"];
        /// Micro-batch size: sequences that a rank computes at once. Times data-parallel ranks (`parallel.dp` ×
        /// `parallel.dp_replicate`), it divides the global batch; the quotient is the number of gradient accumulation steps. Where the whole batch does not fit the memory, the default
        /// is the largest size that does.
        micro_batch: usize =
            Sequences(BATCH), Derived("train.global_batch / data-parallel ranks, or the largest that fits", defaults::micro_batch), Conduct,
            finds ["gradient accumulation", "gradient_accumulation_steps", "accumulation", "micro_batch_size",
                "per_device_train_batch_size", "local_batch_size", "OOM", "out of memory"];
        /// Seed of the initial weights and the data order.
        seed: u64 = Integer(0, i64::MAX as u64), Fixed("0"), Trajectory, finds ["random seed"];
        /// Folder whose weights a new run starts from (fine-tuning, continued pre-training), relative to the config file's
        /// folder: a run directory, a checkpoint, a Hugging Face model, or hf:OWNER/NAME for one on the Hugging Face Hub (with
        /// @REVISION for one that does not change); if not set, weights are initialized at random.
        init_from: Option<String> = Text(FOLDER), Unset, Trajectory,
            finds ["fine-tuning", "finetuning", "pretrained", "continued pre-training", "SFT", "model_name_or_path",
                "load checkpoint", "warm start", "hub", "hugging face hub", "huggingface hub", "download"];
        /// Weight gradients per sequence, summed in fixed point: bit-identical for any gradient accumulation; costs time and
        /// 4 extra bytes per parameter. Gradient sums have a unit of 1.5e-11; a step whose sums leave ±6.7e7 is repeated with
        /// a larger unit.
        reproducible: bool = Bool, Fixed("false"), Changeable,
            finds ["reproducibility", "bit-identical", "batch invariant"];
        /// Whether to estimate the gradient noise scale, the batch above which more sequences help little, from the gradients of the
        /// first micro-batch and of the whole step. It reads every gradient once more per step, and takes a second gradient of
        /// tied embeddings as workspace.
        noise_scale: bool = Bool, Fixed("false"), Conduct, finds ["gradient noise scale", "critical batch size", "GNS"];
        /// Steps from one validation to the next; 0 validates only at the start and the end.
        validate_every: u64 = Count(0, STEPS), Fixed("50"), Conduct,
            finds ["eval_interval", "eval_steps", "validation interval", "val_check_interval"];
        /// The most sequences that one validation reads; 0 skips validation. In a short run the default is a quarter of
        /// the sequences that are trained on from one validation to the next, so that validation stays a small part of it.
        validation_sequences: usize =
            Count(0, BATCH), Derived("64, less in a short run", defaults::validation_sequences), Conduct,
            finds ["eval_iters", "validation batches", "skip validation"];
        /// What computes: the CPU, an NVIDIA GPU, or a GPU where one is found.
        device: DeviceChoice = Choice(DeviceChoice::WORDS), Fixed("\"auto\""), Conduct,
            finds ["GPU", "CUDA", "accelerator"];
        /// Which GPU of the machine to use, counted from 0 among those that CUDA_VISIBLE_DEVICES leaves. Ranks that are processes
        /// take this one and those after it, one each in their order on the host.
        gpu: usize = Count(0, 1023), Fixed("0"), Conduct, finds ["device index", "device_id", "local_rank", "cuda:1"];
        /// On a GPU, whether the same steps give the same bits every time, at the cost of time, and of workspace that grows with
        /// the square of train.seq (explain shows it). The CPU always does.
        deterministic: bool = Bool, Fixed("false"), Conduct, finds ["determinism", "use_deterministic_algorithms"];
        /// CPU threads to compute with; 0 uses all cores.
        threads: usize = Count(0, 1024), Fixed("0"), Conduct, finds ["num_threads", "cores"];
    }

    /// What numbers are stored in.
    precision: PrecisionConfig {
        /// fp32: everything in fp32. tf32: the same, but matmuls of linear layers and of the output head may round their operands to TF32 (10 bits
        /// of mantissa), as the matrix units of NVIDIA GPUs from compute capability 8.0 on do; what has none computes as in fp32, and matmuls of attention, experts and
        /// routers stay in fp32. bf16: mixed precision, that is parameters and activations in bf16, with fp32 master
        /// weights, moments, norms, softmax, sums and losses. fp16: the same in fp16, with dynamic loss scaling. fp8: as bf16, with
        /// operands of the layers' matmuls in fp8: weights and activations in E4M3, gradients in E5M2, each tensor with the scale of its
        /// largest element in this micro-batch. Embedding, norms, attention, routers and output head stay in bf16. On GPUs from
        /// compute capability 8.9 on; a CPU computes the same, slowly. A preset gives bf16.
        policy: PrecisionPolicy = Choice(PrecisionPolicy::WORDS), Fixed("\"fp32\""), Changeable,
            finds ["mixed precision", "AMP", "autocast", "dtype", "torch_dtype", "master weights", "bf16", "fp16",
                "half precision", "bfloat16", "TensorFloat-32", "allow_tf32", "set_float32_matmul_precision", "float8", "fp8 training", "transformer engine", "torchao"];
        /// What gradients are accumulated in; train.reproducible sums in fixed point instead.
        gradients: GradientPrecision = Choice(GradientPrecision::WORDS), Fixed("\"fp32\""), Changeable,
            finds ["gradient dtype", "grad_reduce_in_fp32", "accumulate_allreduce_grads_in_fp32", "reduce_dtype"];
        /// What the optimizer's moments of matrices are kept in. bf16: 2 bytes instead of 4, rounded up or down by random bits, so that they
        /// are right on average. int8: 1 byte, in blocks of 256 numbers with a scale each (dynamic quantisation, as bitsandbytes has it), and bf16
        /// where rows are no multiples of 256. Norms, embeddings and tensors of fewer than 4,096 elements stay in fp32. A run may be resumed with
        /// another; what that loses is said.
        moments: MomentPrecision = Choice(MomentPrecision::WORDS), Fixed("\"fp32\""), Changeable,
            finds ["8-bit optimizer", "8-bit Adam", "adamw_8bit", "bitsandbytes", "paged_adamw_8bit", "optimizer state dtype",
                "exp_avg_dtype", "exp_avg_sq_dtype", "precision-aware optimizer", "use_precision_aware_optimizer", "moment dtype"];
        /// What master weights of matrices are kept in. bf16: nothing beside the weights themselves, which the update rounds up or down by random
        /// bits (stochastic rounding), the same on every layout; only with precision.policy bf16 or fp8. Norms, embeddings and tensors of
        /// fewer than 4,096 elements keep theirs in fp32.
        master: MasterPrecision = Choice(MasterPrecision::WORDS), Fixed("\"fp32\""), Changeable,
            finds ["stochastic rounding", "bf16 master weights", "main_params_dtype", "pure bf16", "bf16_stochastic_round"];
        /// What weights that are not trained are kept in: with lora.rank those beside the adapters, and in generation and evaluation (option --weights) all.
        /// fp8 (E4M3) and int8: 1 byte each for the matrices of layers, with a scale for each row, a power of two, so that all devices and layouts
        /// multiply the same numbers; activations stay as the policy says. Embedding, output head, norms, routers and experts do too. Not with
        /// precision.policy fp8.
        frozen: FrozenPrecision = Choice(FrozenPrecision::WORDS), Fixed("\"policy\""), Changeable,
            finds ["QLoRA", "quantized base weights", "load_in_8bit", "int8 weight only", "int8_weight_only", "weight quantization",
                "quantization_config", "W8A16", "8-bit inference"];
        /// With fp8, what has a scale of its own. current: a whole tensor, and of experts each one's weights, by its largest element. delayed: the same,
        /// but activations and gradients by their largest elements in the last 16 steps, which checkpoints keep: ranks need not agree on a scale in
        /// every micro-batch, and what grows beyond is cut off. rowwise: each row of a matmul's operand. block: 128 elements of a row, and of a weight
        /// 128 × 128, as DeepSeek-V3 has it. Those two are slower; experts have the scales of current with them.
        fp8_recipe: Fp8Recipe = Choice(Fp8Recipe::WORDS), Fixed("\"current\""), Changeable,
            finds ["tensorwise", "rowwise scaling", "blockwise", "block scaling", "current scaling", "delayed scaling",
                "amax history", "amax_history_len", "DelayedScaling", "DeepSeek fp8", "recipe_name"];
        /// With fp8, the fewest weights of a linear layer or an expert's matrix (on one rank) for its matmuls to be in fp8; smaller ones stay in bf16. If it is not
        /// given, as many as an H200 gains from: 1,048,576. Sizes that are no multiples of 16 (of experts: 128) stay in bf16 too.
        fp8_weights: Option<usize> = Count(0, 1 << 40), Unset, Changeable,
            finds ["fp8 layers", "fp8 filter", "auto_filter_small_kn", "module_filter_fn"];
        /// With fp8, the first N layers stay in bf16.
        fp8_skip_first: usize = Count(0, 1 << 16), Fixed("0"), Changeable,
            finds ["first_last_layers_bf16", "num_layers_at_start_in_bf16"];
        /// With fp8, the last N layers stay in bf16.
        fp8_skip_last: usize = Count(0, 1 << 16), Fixed("0"), Changeable, finds ["num_layers_at_end_in_bf16"];
        /// With fp8, steps from one comparison with bf16 to the next; the first step has one too, and 0 never compares. Before
        /// the step, the loss of its first micro-batch is computed without gradients, in fp8 and in bf16, from the same
        /// weights. It leaves weights and updates as they are, and shares the memory of evaluation.
        shadow_every: u64 = Count(0, STEPS), Fixed("0"), Conduct,
            finds ["fp8 loss", "fp8 accuracy", "bf16 shadow", "loss difference", "compare fp8 with bf16"];
        /// Initial loss scale of fp16 runs, so that small gradients do not underflow. A gradient that is not finite
        /// halves it and skips the update.
        loss_scale: Option<f64> = Float(POWER_OF_TWO), Derived("65536 for fp16", rules::default_loss_scale), Trajectory,
            finds ["GradScaler", "dynamic loss scaling", "loss scaling", "initial_loss_scale"];
        /// Steps with finite gradients after which the loss scale doubles.
        growth_interval: Option<u64> =
            Count(1, STEPS), Derived("2000 for fp16", rules::default_growth_interval), Changeable,
            finds ["loss_scale_window"];
    }

    /// How the work is split among ranks.
    parallel: ParallelConfig {
        /// Where the layout comes from. given: the keys of this table. auto: a search for the fastest that fits, when the run starts, as
        /// `lockstep plan` does. Keys of this table that are given stay, and so do train.micro_batch and recompute.policy; the rest, and
        /// dp in any case, is decided. A run that is resumed with as many ranks keeps its layout.
        layout: LayoutSource = Choice(LayoutSource::WORDS), Fixed("\"given\""), Conduct,
            finds ["auto parallel", "autotuning", "automatic layout", "planner"];
        /// With layout = "auto", how many ranks there are to plan for. If it is not given, as many as there are processes.
        ranks: Option<usize> = Count(1, RANKS), Unset, Conduct, finds ["number of ranks", "WORLD_SIZE", "num_processes"];
        /// Data parallelism: groups of ranks that compute on sequences of their own and reduce their gradients.
        dp: usize = Count(1, RANKS), Fixed("1"), Conduct,
            finds ["data parallel", "data parallelism", "DDP", "data_parallel_size", "world size",
                "data_parallel_shard_degree"];
        /// HSDP (hybrid sharded data parallelism): groups of parallel.dp ranks that each have all state, as zero shards it inside
        /// of one, and compute on sequences of their own. Gradients are reduced inside, then across.
        dp_replicate: usize = Count(1, RANKS), Fixed("1"), Conduct,
            finds ["HSDP", "hybrid sharding", "HYBRID_SHARD", "data_parallel_replicate_degree", "replicas",
                "num_distributed_optimizer_instances"];
        /// Context parallelism: ranks that split every sequence among themselves, an early and a late chunk each (zig-zag), for long
        /// sequences. Twice as many divide train.seq.
        cp: usize = Count(1, RANKS), Fixed("1"), Conduct,
            finds ["context parallel", "context parallelism", "context_parallel", "context_parallel_size", "context_parallel_degree",
                "long context", "zig-zag", "CP"];
        /// How attention is computed over parallel.cp. ring (ring attention): keys and values go from rank to rank while attention is computed
        /// over those that are there. latent: a ring too, of the latent of latent attention (model.kv_lora_rank), from which every rank rebuilds keys and
        /// values: fewer bytes, more FLOPs. gather: all of them are gathered, which takes their memory and no turns. a2a (Ulysses): all-to-alls make
        /// parts of the heads of parts of the sequence, and back after attention; tp × cp divides model.kv_heads.
        context: ContextParallel = Choice(&ContextParallel::NAMES), Fixed("\"ring\""), Conduct,
            finds ["ring attention", "cp_comm_type", "context_parallel_rotate_method", "all-gather KV", "Ulysses", "DeepSpeed-Ulysses",
                "all-to-all attention", "ulysses_sequence_parallel_size"];
        /// Expert parallelism: data-parallel ranks that split the experts of every layer among themselves. Tokens go to the rank of their
        /// expert and come back, by all-to-all; outside of experts they are as dp ranks, of which there are dp × ep then. zero shards
        /// what is not of experts over dp × ep, and an expert's over dp. It divides model.experts.
        ep: usize = Count(1, RANKS), Fixed("1"), Conduct,
            finds ["expert parallel", "expert parallelism", "expert_parallel", "expert_parallel_size", "expert_model_parallel_size",
                "expert_parallel_degree", "EP", "MoE parallel"];
        /// Rows of tokens that are planned for what one ep rank sends to another's experts, as a multiple of an even share. If it is not given,
        /// as many as there can be: ep times an even share, whose memory is planned too. A step that needs more changes nothing,
        /// and the run ends.
        ep_bound: Option<f64> = Float(AT_LEAST_ONE), Unset, Conduct,
            finds ["capacity factor", "moe_expert_capacity_factor", "expert capacity", "token dropping", "dropless"];
        /// Tensor parallelism: ranks that split heads, hidden units and vocabulary among themselves.
        tp: usize = Count(1, RANKS), Fixed("1"), Conduct,
            finds ["tensor parallel", "tensor parallelism", "tensor_model_parallel_size", "model parallel", "Megatron"];
        /// Pipeline parallelism: stages that split the layers among themselves.
        pp: usize = Count(1, RANKS), Fixed("1"), Conduct,
            finds ["pipeline parallel", "pipeline parallelism", "pipeline_model_parallel_size"];
        /// ZeRO stage, what dp ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters, as FSDP does.
        zero: u8 = Integer(0, 3), Fixed("0"), Conduct,
            finds ["FSDP", "ZeRO", "fully sharded", "sharded optimizer", "distributed optimizer", "DeepSpeed",
                "use_distributed_optimizer", "zero stage"];
        /// With zero = 3, whether backward gathers parameters again. false: what forward has gathered stays until the backward pass of
        /// its micro-batch, which saves an all-gather and takes its memory for every micro-batch in flight; explain shows both.
        reshard_after_forward: bool = Bool, Fixed("true"), Conduct,
            finds ["reshard_after_forward", "SHARD_GRAD_OP", "FULL_SHARD", "fsdp_reshard_after_forward"];
        /// Sequence parallelism: whether tp ranks split the sequence where they do not split the matrices.
        sequence_parallel: bool = Bool, Fixed("false"), Conduct, finds ["sequence parallelism", "SP"];
        /// Pipeline schedule: the order in which stages compute micro-batches. 1f1b: a forward and a backward pass in turn,
        /// with few micro-batches in flight. gpipe: all forward passes first. interleaved: 1f1b with several chunks of layers per
        /// rank, a smaller bubble for more memory and messages. zb-h1: 1f1b whose weight gradients wait and fill idle time. zb-v: the
        /// same with two chunks per rank, placed in a V, nearly without a bubble.
        schedule: Schedule = Choice(&Schedule::NAMES), Fixed("\"1f1b\""), Conduct,
            finds ["pipeline schedule", "1F1B", "GPipe", "interleaved 1F1B", "zero bubble", "ZB-H1", "ZB-V",
                "pipeline bubble"];
        /// Virtual pipeline stages: chunks of layers that a rank of the pipeline has.
        r#virtual: usize = Count(1, RANKS), Derived("2 for interleaved and zb-v, else 1", stages::default_virtual), Conduct,
            finds ["virtual pipeline", "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
                "model chunks", "virtual stages"];
        /// Layers of every virtual stage of the pipeline, in the order of the model; 0 for a last stage that has the output head alone. If it
        /// is empty, stages are cut so that their FLOPs are as equal as can be, with embedding and head counted.
        stages: Vec<usize> = Counts(LAYERS_OF_STAGES), Fixed("[]"), Conduct,
            finds ["pipeline split", "layers per stage", "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers",
                "stage boundaries"];
        /// Seconds that a rank waits for another one that shows no sign of life, and a process for a GPU that does not get on.
        timeout: f64 = Float(UP_TO_A_DAY), Fixed("60.0"), Conduct,
            finds ["NCCL timeout", "collective timeout", "watchdog", "distributed_timeout"], was ["patience"];
    }

    /// Activation checkpointing: what backward recomputes instead of reading it saved.
    recompute: RecomputeConfig {
        /// Activation checkpointing (gradient checkpointing). none: every activation that backward reads is saved. selective:
        /// norms and activation functions are recomputed, which costs no matmul, and the weights of naive attention, which costs
        /// one. full: all of a layer but its input. every-k: all of recompute.every layers but the input of the first. sqrt: the
        /// same with the square root of the number of layers. list: the outputs of the ops in recompute.ops. budget: as little
        /// as lets the arena fit recompute.budget. Bits stay the same.
        policy: RecomputePolicy = Choice(RecomputePolicy::WORDS), Fixed("\"none\""), Conduct,
            finds ["activation checkpointing", "gradient checkpointing", "activation recomputation", "recomputation",
                "remat", "rematerialization", "selective activation recomputation"];
        /// Layers that are recomputed together under the every-k policy.
        every: usize = Count(1, EXTENT), Fixed("2"), Conduct, finds ["recompute_num_layers"];
        /// Ops whose outputs are recomputed under the list policy, by the names that explain shows.
        ops: Vec<String> = Texts(OPS), Fixed("[]"), Conduct;
        /// Memory budget: the most bytes that the arena of a rank may have under the budget policy.
        budget: Option<Bytes> = Size, Unset, Conduct, finds ["memory budget", "activation_memory_budget"];
    }

    /// Offload: what waits in the memory of the host until the device needs it. Bits stay the same.
    offload: OffloadConfig {
        /// Moments and fp32 master weights. They come to the device for the update of their parameter and go back after it, while others are
        /// updated. true: all of them. A size: as many as that has room for, of each rank. auto: the least that lets a run fit its device.
        optimizer: OffloadSize = SizeOrAuto, Fixed("false"), Conduct,
            finds ["CPU offload", "optimizer offload", "ZeRO-Offload", "offload_optimizer", "host memory", "pinned memory",
                "model larger than the GPU"];
        /// Activations that are saved for backward. They go to the host after their last use in forward and come back ahead of their first
        /// use in backward, beside kernels. The recompute policy decides what is saved; this moves it. true: all that can wait there. A
        /// size: as many as that has room for, of each rank and all micro-batches in flight: what enters layers first. auto: as many as make the
        /// predicted step the shortest of those that fit the device; under recompute.policy = "budget" it is decided together what is saved,
        /// recomputed and moved.
        activations: OffloadSize = SizeOrAuto, Fixed("false"), Conduct,
            finds ["activation offload", "activation offloading", "CPU activation checkpointing", "cpu_checkpointing", "cpu_offload_activations",
                "saved tensors on CPU", "save_on_cpu"];
    }

    /// How gradients become updates.
    optimizer: OptimizerConfig {
        #[doc = optimizers::meaning!()]
        name: OptimizerName = Choice(OptimizerName::WORDS), Fixed("\"adamw\""), Trajectory,
            finds ["Adam", "AdamW", "Lion", "SGD", "Muon", "optimizer type"];
        /// Peak learning rate, reached after warmup.
        lr: f64 = Float(POSITIVE), Fixed("3e-4"), Changeable, finds ["learning rate", "peak learning rate", "max_lr"];
        /// Learning rate schedule after warmup. cosine, linear: decay over the rest of the run. wsd: constant, then linear
        /// decay over the last decay_steps. constant: no decay.
        schedule: LrSchedule = Choice(LrSchedule::WORDS), Fixed("\"cosine\""), Changeable,
            finds ["lr schedule", "learning rate schedule", "lr_scheduler_type", "lr_decay_style", "WSD",
                "warmup-stable-decay", "cosine decay", "linear decay"];
        /// Final learning rate as a share of the peak.
        min_lr_ratio: Option<f64> =
            Float(UP_TO_ONE), Derived("0.1; none for constant", rules::default_min_lr_ratio), Changeable,
            finds ["min_lr", "final learning rate"];
        /// Steps of linear warmup, from a learning rate of 0.
        warmup_steps: u64 = Count(0, STEPS), Derived("100, or train.steps if less", rules::default_warmup), Changeable,
            finds ["warmup", "linear warmup", "lr_warmup_iters", "warmup_ratio"];
        /// Steps of linear decay at the end of a run with the wsd schedule.
        decay_steps: Option<u64> =
            Count(0, STEPS), Derived("train.steps / 10 for wsd", rules::default_decay_steps), Changeable,
            finds ["cooldown", "lr_decay_iters", "annealing"];
        /// Decay of the first moment; for lion, the share of the moment in the update.
        beta1: Option<f64> = Float(BELOW_ONE), OfOptimizer(|facts| facts.beta1), Changeable,
            finds ["adam_beta1", "betas"];
        /// Decay of the second moment; for lion, of its only one.
        beta2: Option<f64> =
            Float(BELOW_ONE), OfOptimizer(|facts| facts.beta2), Changeable,
            finds ["adam_beta2", "betas"];
        /// What is added to the root of the second moment.
        eps: Option<f64> = Float(POSITIVE), OfOptimizer(|facts| facts.eps), Changeable,
            finds ["epsilon", "adam_epsilon", "adam_eps"];
        /// Momentum of sgd and muon.
        momentum: Option<f64> =
            Float(BELOW_ONE), OfOptimizer(|facts| facts.momentum), Changeable;
        /// Decoupled weight decay, per step and unit of learning rate.
        weight_decay: f64 = Float(NOT_NEGATIVE), Fixed("0.1"), Changeable, finds ["wd", "L2"];
        /// Gradient clipping: the largest norm of the whole gradient; 0 turns clipping off.
        grad_clip: f64 = Float(NOT_NEGATIVE), Fixed("1.0"), Changeable,
            finds ["gradient clipping", "clip_grad", "max_grad_norm", "clip_grad_norm"];
        /// Parameter groups: other numbers for the parameters whose Hugging Face name matches a pattern (`*` any text, `?` any
        /// letter): a factor on the learning rate, another weight decay. The first that matches counts. Norms and biases have no
        /// weight decay unless a group gives them one.
        groups: Vec<GroupConfig> = Groups, Fixed("[]"), Changeable,
            finds ["param groups", "parameter groups", "layer-wise learning rate", "no weight decay"];
    }

    /// LoRA: with lora.rank, all weights stay as they are, and adapters beside the matmuls of layers are trained instead.
    lora: LoraConfig {
        /// Rank of the adapters: width of the two thin matrices beside a weight. If not set, there are none and all weights are
        /// trained.
        rank: Option<usize> = Count(1, EXTENT), Unset, Trajectory,
            finds ["LoRA", "adapter", "adapters", "PEFT", "lora_r", "r", "lora_rank", "parameter-efficient fine-tuning"];
        /// What adapters add is multiplied by lora.alpha / lora.rank.
        alpha: Option<f64> = Float(POSITIVE), Derived("2 × lora.rank, if that is set", defaults::lora_alpha), Trajectory,
            finds ["lora_alpha", "LoRA scaling"];
        /// Share of what adapters read that is set to zero in training.
        dropout: f64 = Float(BELOW_ONE), Fixed("0.0"), Trajectory, finds ["lora_dropout"];
        /// Which matmuls of layers have adapters: names of modules, whole or their ends after a dot, with `*` for any text and `?` for any
        /// letter. The output head and routers have none.
        targets: Vec<String> = Texts(TARGETS), Fixed("[\"*\"]"), Trajectory,
            finds ["target_modules", "lora targets", "all-linear", "q_proj"];
        /// Folder of adapters to start from, as PEFT writes it, or hf:OWNER/NAME for one on the Hugging Face Hub.
        init_from: Option<String> = Text(FOLDER), Unset, Trajectory, finds ["adapter_name_or_path", "PEFT folder"];
    }

    /// Loss spikes: what is done about steps whose loss or gradient norm jumps.
    spikes: SpikesConfig {
        /// Whether to skip the update of a step whose loss or gradient norm is more than spikes.z robust standard deviations above the
        /// median of the steps before it. The device decides, from numbers that it has: no step waits for the host.
        skip: bool = Bool, Fixed("false"), Changeable,
            finds ["loss spike", "spike detection", "skip update", "skip bad batches", "divergence", "anomaly", "z-score"];
        /// How far above the median is too far: robust standard deviations, 1.4826 times the median absolute deviation (MAD). Of losses, a
        /// deviation counts as at least 1% of the median; those of gradient norms are of their logarithms, and count as at least 17%.
        z: f64 = Float(POSITIVE), Fixed("10.0"), Changeable, finds ["threshold", "median absolute deviation", "sigma"];
        /// Steps that median and deviation are of: the latest whose updates were applied. Before there are as many, nothing is skipped.
        window: usize = Count(4, 1 << 16), Fixed("128"), Changeable, finds ["moving window", "history"];
        /// Skipped updates in a row after which the run rolls back to the checkpoint before them, and leaves out the data of all steps since that
        /// one.
        skips: u64 = Count(1, STEPS), Fixed("3"), Changeable, finds ["consecutive skips", "rollback", "roll back"];
        /// Roll-backs after which the run does not roll back once more but stops, with a report of all.
        roll_backs: u64 = Count(0, STEPS), Fixed("3"), Changeable, finds ["max rollbacks", "restart from checkpoint"];
    }

    /// What is saved.
    checkpoint: CheckpointConfig {
        /// Steps from one checkpoint to the next; 0 saves only at the end and on interrupt. "auto": as many as lose the least time to
        /// failures and to saving, from the number of nodes, a published failure rate, and the times of a step and of a save, which a
        /// run that is resumed has measured.
        every: SaveEvery = CountOrAuto(0, STEPS), Fixed("100"), Conduct,
            finds ["save_steps", "save_interval", "checkpoint interval", "Young", "Daly", "MTBF"];
        /// How many of the latest checkpoints stay on disk.
        keep: usize = Count(1, EXTENT), Fixed("3"), Conduct, finds ["save_total_limit", "keep_last"];
        /// Minutes after which a checkpoint is saved too, whatever step it is.
        every_minutes: Option<f64> = Float(POSITIVE), Unset, Conduct,
            finds ["save_interval_minutes", "checkpoint interval in time", "every 30 min"];
        /// Every checkpoint whose step is a multiple of this stays for ever; 0 keeps none so.
        keep_every: u64 = Count(0, STEPS), Fixed("0"), Conduct, finds ["keep_every_n_steps", "keep_period", "milestones"];
        /// Whether the checkpoint with the lowest validation loss stays.
        keep_best: bool = Bool, Fixed("false"), Conduct, finds ["load_best_model_at_end", "save_best", "best model"];
        /// Folder for a second copy of every checkpoint, on another disk, relative to the config file's folder; this run's are in a folder
        /// inside that has the name of the run directory. It is used by itself where the first place is damaged or gone. Or s3://BUCKET/KEY.
        mirror: Option<String> = Text(FOLDER), Unset, Conduct, finds ["backup", "replica", "second checkpoint folder"];
        /// Whether checkpoints are written in the background: steps wait for a copy of parameters and optimizer state in host memory
        /// alone, which takes as many bytes as a checkpoint. Where they are not free, steps wait for the disk.
        asynchronous: bool = Bool, Fixed("true"), Conduct,
            finds ["async_save", "async checkpointing", "background save", "snapshot"];
    }

    /// Tasks that a model is evaluated on while it trains.
    eval: EvalConfig {
        /// Files of questions with choices, or of texts to complete, as JSON lines (docs/generate-and-eval.md), relative to the
        /// config file's folder.
        tasks: Vec<String> = Texts(PATHS), Fixed("[]"), Conduct,
            finds ["benchmarks", "downstream evaluation", "lm-evaluation-harness", "HellaSwag", "multiple choice"];
        /// Steps from one evaluation on tasks to the next; 0 evaluates only after the last step.
        every: u64 = Count(0, STEPS), Fixed("1000"), Conduct, finds ["eval_interval", "eval_steps", "eval frequency"];
        /// The most items of a task that are asked while training, the first of its file; 0 asks all.
        items: usize = Count(0, EXTENT), Fixed("0"), Conduct, finds ["limit", "eval_limit", "num_samples"];
    }

    /// Where metrics go besides metrics.jsonl. A sink that fails is warned of, and the run goes on without it.
    telemetry: TelemetryConfig {
        /// Whether to write TensorBoard event files, into the folder `tensorboard` of the run directory.
        tensorboard: bool = Bool, Fixed("false"), Conduct,
            finds ["TensorBoard", "tfevents", "event files", "logging", "report_to"];
        /// Whether to write `metrics.csv` in the run directory.
        csv: bool = Bool, Fixed("false"), Conduct, finds ["CSV", "CSVLogger", "spreadsheet"];
        /// Whether to send config, metrics and events to an MLflow tracking server.
        mlflow: bool = Bool, Fixed("false"), Conduct, finds ["MLflow", "tracking server", "logging", "report_to"];
        /// Address of the MLflow tracking server, such as "http://host:5000". If not set, MLFLOW_TRACKING_URI names it.
        mlflow_uri: Option<String> = Text(SERVER), Unset, Conduct, finds ["tracking URI", "MLFLOW_TRACKING_URI"];
        /// Whether to give config, metrics and events to the client of Weights & Biases, the Python package wandb. WANDB_MODE says
        /// whether it works online or offline.
        wandb: bool = Bool, Fixed("false"), Conduct,
            finds ["wandb", "Weights & Biases", "weights and biases", "WandbLogger", "logging", "report_to"];
        /// Experiment of MLflow, and project of Weights & Biases, that the run is part of. If not set, MLFLOW_EXPERIMENT_NAME and
        /// WANDB_PROJECT name them, or they are called "lockstep".
        experiment: Option<String> = Text(SITE_NAME), Unset, Conduct,
            finds ["project", "wandb_project", "experiment name", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"];
    }

    /// What a Slurm job asks for (`lockstep launch --slurm`), and what becomes of a run that loses ranks.
    cluster: ClusterConfig {
        /// The fewest and the most ranks that may train: "2..4". If ranks are lost, those that are left go on with a layout for as many as
        /// there are, from snapshots in memory; others may join later. If not set, a lost rank ends the run. Not over MPI.
        elastic: Option<String> = Text(ELASTIC), Unset, Conduct,
            finds ["elastic", "torchelastic", "torchft", "fault tolerance", "node failure"];
        /// With cluster.elastic, steps from one snapshot in memory to the next: at most this many are repeated after a loss.
        snapshot_every: u64 = Count(1, STEPS), Fixed("10"), Conduct, finds ["in-memory checkpoint", "Gemini"];
        /// With cluster.elastic, processes beyond the ranks of the layout, which wait: they take the place of ranks that are lost, with the same layout.
        spares: usize = Count(0, RANKS), Fixed("0"), Conduct, finds ["hot spare", "spare nodes", "standby"];
        /// Steps from one comparison of ranks to the next; 0 never compares. Checksums of all that several ranks hold, and the losses of a micro-batch
        /// of each data-parallel copy of the model, computed by two of them: a host whose memory or arithmetic is wrong is named.
        cross_check: u64 = Count(0, STEPS), Fixed("0"), Conduct,
            finds ["silent data corruption", "SDC", "checksum", "replica consistency"];
        /// Time limit of a job: hours, minutes and seconds, with days before them if need be. Slurm counts whole minutes.
        time: Option<String> = Text(TIME_LIMIT), Unset, Conduct, finds ["time limit", "walltime", "Slurm", "sbatch"];
        /// Nodes of a job, each of which has as many ranks. If not set, as many as cluster.gpus_per_node makes necessary, or one.
        nodes: Option<usize> = Count(1, RANKS), Unset, Conduct, finds ["num_nodes", "nnodes"];
        /// GPUs of every node that the job asks for; at most as many ranks are on one.
        gpus_per_node: Option<usize> = Count(1, 1024), Unset, Conduct, finds ["gres", "nproc_per_node", "devices"];
        /// Cores that the job asks for, for every rank.
        cpus_per_rank: Option<usize> = Count(1, 1024), Unset, Conduct, finds ["cpus_per_task"];
        /// Account that the job is charged to.
        account: Option<String> = Text(SITE_NAME), Unset, Conduct, finds ["project", "allocation"];
        /// Partition that the job runs in.
        partition: Option<String> = Text(SITE_NAME), Unset, Conduct, finds ["queue"];
        /// Quality of service of the job.
        qos: Option<String> = Text(SITE_NAME), Unset, Conduct, finds ["quality of service"];
        /// Seconds before the time limit at which the job is told to save a checkpoint and stop: as long as a step and a
        /// checkpoint take, with room to spare. Slurm may be up to a minute late.
        signal_before: u64 = Integer(1, 86400), Fixed("180"), Conduct, finds ["preemption", "requeue", "timeout signal"];
        /// Environment modules that the job loads.
        modules: Vec<String> = Texts(MODULES), Fixed("[]"), Conduct, finds ["module load", "lmod"];
        /// Lines of shell that the job runs before the ranks start.
        setup: Vec<String> = Texts(SHELL_LINES), Fixed("[]"), Conduct, finds ["environment variables"];
        /// Command in whose container the ranks run `lockstep`.
        container: Option<String> = Text(CONTAINER), Unset, Conduct, finds ["apptainer", "singularity", "docker", "enroot"];
        /// Further options of srun.
        srun: Vec<String> = Texts(SLURM_OPTIONS), Fixed("[]"), Conduct;
        /// Further options of sbatch.
        sbatch: Vec<String> = Texts(SLURM_OPTIONS), Fixed("[]"), Conduct;
    }
}

const TEXT_EXTENSIONS: &str = r#"["txt", "md", "rst", "tex", "html", "csv", "json", "jsonl", "jsonl.zst", "parquet", "toml", "yaml", "yml", "rs", "py", "c", "h", "cc", "cpp", "hpp", "cu", "cuh", "go", "java", "js", "ts", "sh", "sql"]"#;
