//! The declaration of every key of `run.toml`: `field: type = kind, default, effect`, and its meaning above it.
//!
//! A default may be derived from keys that have a fixed default, and from others that stand above it.

use crate::checks;
use crate::config::Provenance;
use crate::declare::Default::{Derived, DerivedOrRequired, Fixed, Required, Unset};
use crate::declare::Effect::{Changeable, Conduct, Trajectory};
use crate::declare::{Key, tables};
use crate::kind::Kind::{
    Bool, Choice, Corpora, Count, Float, Groups, Integer, Ramp, RopeScaling as Scaling, Sequences, Size, Text, Texts,
};
use crate::kind::{
    BELOW_ONE, EXTENSIONS, FIELD, FOLDER, NOT_NEGATIVE, OPS, PATHS, POSITIVE, POWER_OF_TWO, TOKEN, TOKENIZER,
    UP_TO_A_DAY, UP_TO_HALF, UP_TO_ONE,
};
use crate::presets;
use crate::resolve::Values;
use crate::rules;
use crate::value::{Bytes, CorpusConfig, Field, GroupConfig, RampConfig, RopeScaling};
use lockstep_ir::{Layout, Schedule};

/// The largest extent of one tensor dimension.
const EXTENT: u64 = 1 << 24;
/// The largest batch, in sequences.
const BATCH: u64 = checks::MAX_BATCH;
/// The largest number of ranks along an axis of the mesh.
const RANKS: u64 = Layout::MOST as u64;
/// The largest number of steps.
const STEPS: u64 = 1 << 40;

tables! {
    /// The shape of the model.
    model: ModelConfig {
        /// A public shape that fills the other model keys; keys given explicitly win over it.
        preset: Option<String> = Choice(&presets::NAMES), Unset, Conduct;
        /// The family of models the shape belongs to.
        architecture: String =
            Choice(&["llama", "gpt2", "qwen2", "qwen3", "mistral"]), Fixed("\"llama\""), Trajectory;
        /// How many different tokens there are.
        vocab_size: usize = Count(1, EXTENT), Required, Trajectory;
        /// How many transformer layers.
        layers: usize = Count(1, EXTENT), Required, Trajectory;
        /// Width of the residual stream.
        dim: usize = Count(1, EXTENT), Required, Trajectory;
        /// How many query heads attention has.
        heads: usize = Count(1, EXTENT), Required, Trajectory;
        /// How many key and value heads; it divides the query heads.
        kv_heads: usize = Count(1, EXTENT), Derived("model.heads", checks::default_kv_heads), Trajectory;
        /// Width of one head; even where rotary embeddings turn pairs.
        head_dim: usize = Count(1, EXTENT), Derived("model.dim / model.heads", checks::default_head_dim), Trajectory;
        /// Inner width of the feed-forward block.
        ffn: usize =
            Count(1, EXTENT), DerivedOrRequired("4 × model.dim for gpt2, else required", checks::default_ffn), Trajectory;
        /// Rows of the learned table of positions, which gpt2 has instead of rotary embeddings: the longest sequence.
        positions: Option<usize> =
            Count(1, EXTENT), Derived("1024 for gpt2, else not set", checks::default_positions), Trajectory;
        /// Base of the rotary wavelengths; gpt2, which has none, does not look at it.
        rope_theta: f64 = Float(POSITIVE), Fixed("500000.0"), Trajectory;
        /// Llama-3 style stretching of the rotary wavelengths for a longer context.
        rope_scaling: Option<RopeScaling> = Scaling, Unset, Trajectory;
        /// How many tokens a token of a mistral model sees at most in each layer, itself included; if not set, all before it.
        window: Option<usize> = Count(1, EXTENT), Unset, Trajectory;
        /// How attention is computed in training. flash: tile by tile, so that memory grows with the sequence. naive: with the
        /// matrix of its weights kept for the backward pass, so that memory grows with the square of the sequence.
        attention: String = Choice(&["flash", "naive"]), Fixed("\"flash\""), Changeable;
        /// What norms add to the mean square, or to the variance, before the root.
        norm_eps: f64 = Float(POSITIVE), Fixed("1e-5"), Trajectory;
        /// Whether the output head uses the embedding's weights.
        tied_embeddings: bool = Bool, Derived("true for gpt2, else false", checks::default_tied), Trajectory;
        /// The share of elements that training sets to 0 behind gpt2's embedding and in front of every addition to the
        /// residual stream; attention weights are not dropped. The same on every layout.
        dropout: f64 = Float(BELOW_ONE), Fixed("0.0"), Changeable;
        /// Standard deviation of the initial weights.
        init_std: f64 = Float(POSITIVE), Fixed("0.02"), Trajectory;
    }

    /// What is read.
    data: DataConfig {
        /// Files, or folders to search for files, relative to the config file's folder.
        paths: Vec<String> = Texts(PATHS), Fixed("[]"), Conduct;
        /// Several corpora to mix, each with its name, its paths and its weight, instead of `data.paths`.
        corpora: Vec<CorpusConfig> = Corpora, Fixed("[]"), Trajectory;
        /// Which files of a folder are read, by extension; files that are named themselves are always read.
        extensions: Vec<String> = Texts(EXTENSIONS), Fixed(TEXT_EXTENSIONS), Conduct;
        /// The field of a JSON line, or the column of a Parquet file, that holds the text.
        text_field: String = Text(FIELD), Fixed("\"text\""), Conduct;
        /// The field or column whose text stands before it as a prompt: the model reads it, and only the text after it counts in
        /// the loss (completion-only loss, for fine-tuning). If not set, every token counts.
        prompt_field: Option<String> = Text(FIELD), Unset, Trajectory;
        /// How text becomes tokens: "bytes", or the path of a Hugging Face tokenizer.json, relative to the config file's
        /// folder.
        tokenizer: String = Text(TOKENIZER), Fixed("\"bytes\""), Trajectory;
        /// The token after each document, for a tokenizer without one of the usual names for it.
        end_token: Option<String> = Text(TOKEN), Unset, Trajectory;
        /// Folder of prepared data to share between runs, relative to the config file's folder; if not set, each run has
        /// its own.
        prepared: Option<String> = Text(FOLDER), Unset, Conduct;
        /// Whether a token attends to its own document only, with positions counted from its start, where a sequence holds
        /// several.
        document_mask: bool = Bool, Fixed("false"), Changeable;
        /// The share of the data held out for validation.
        validation_fraction: f64 = Float(UP_TO_HALF), Fixed("0.05"), Trajectory;
    }

    /// The training loop.
    train: TrainConfig {
        /// How many optimizer steps the run has.
        steps: u64 = Count(0, STEPS), Fixed("1000"), Changeable;
        /// Tokens per sequence.
        seq: usize = Count(1, EXTENT), Fixed("1024"), Trajectory;
        /// Sequences per optimizer step.
        global_batch: usize = Sequences(BATCH), Fixed("8"), Trajectory;
        /// Other sizes of steps, each from so many tokens on that the run has seen: global_batch is the first. Steps are counted as
        /// ever, by train.steps and the learning rate too. Memory is that of the largest size.
        batch_ramp: Vec<RampConfig> = Ramp, Fixed("[]"), Changeable;
        /// Sequences that a rank computes at once; times `parallel.dp`, it divides the global batch.
        micro_batch: usize =
            Sequences(BATCH), Derived("train.global_batch / parallel.dp", checks::default_micro_batch), Conduct;
        /// Seed of the initial weights and the data order.
        seed: u64 = Integer(0, i64::MAX as u64), Fixed("0"), Trajectory;
        /// Folder whose weights a new run starts from, relative to the config file's folder: a run directory, a checkpoint, or
        /// a Hugging Face model; if not set, weights are drawn.
        init_from: Option<String> = Text(FOLDER), Unset, Trajectory;
        /// Weight gradients per sequence, summed in fixed point: bit-identical for any accumulation; costs time and
        /// 4 extra bytes per parameter. Gradient sums have a unit of 1.5e-11; a step whose sums leave ±6.7e7 is computed again with
        /// a larger unit.
        reproducible: bool = Bool, Fixed("false"), Changeable;
        /// Whether to estimate the gradient noise scale, the batch above which more sequences help little, from the gradients of the
        /// first micro-batch and of the whole step. It reads every gradient once more per step, and takes a second gradient of
        /// tied embeddings as scratch.
        noise_scale: bool = Bool, Fixed("false"), Conduct;
        /// Steps from one validation to the next; 0 validates only at the start and the end.
        validate_every: u64 = Count(0, STEPS), Fixed("50"), Conduct;
        /// The most held-out sequences that one validation reads; 0 skips validation. In a short run the default is a quarter of
        /// the sequences that are trained on from one validation to the next, so that validation stays a small part of it.
        validation_sequences: usize =
            Count(0, BATCH), Derived("64, less in a short run", checks::default_validation_sequences), Conduct;
        /// What computes: the processor, an NVIDIA GPU, or a GPU where one is found.
        device: String = Choice(&["auto", "cpu", "cuda"]), Fixed("\"auto\""), Conduct;
        /// On a GPU, whether the same steps give the same bits every time, at the cost of time, and of scratch that grows with
        /// the square of train.seq (explain shows it). The processor always does.
        deterministic: bool = Bool, Fixed("false"), Conduct;
        /// CPU threads to compute with; 0 uses all cores.
        threads: usize = Count(0, 1024), Fixed("0"), Conduct;
    }

    /// What numbers are stored in.
    precision: PrecisionConfig {
        /// fp32: everything in fp32. bf16: parameters and activations in bf16, with fp32 originals, moments, norms, softmax,
        /// sums and losses. fp16: the same in fp16, with a loss scale that finds its size by itself.
        policy: String = Choice(&["fp32", "bf16", "fp16"]), Fixed("\"fp32\""), Changeable;
        /// What gradients are summed in; train.reproducible sums in fixed point instead.
        gradients: String = Choice(&["fp32", "bf16"]), Fixed("\"fp32\""), Changeable;
        /// What fp16 runs multiply the mean loss by at first, so that small gradients do not vanish. A gradient that is not finite
        /// halves it and leaves the weights as they are.
        loss_scale: Option<f64> = Float(POWER_OF_TWO), Derived("65536 for fp16", rules::default_loss_scale), Trajectory;
        /// Steps with finite gradients after which the loss scale doubles.
        growth_interval: Option<u64> =
            Count(1, STEPS), Derived("2000 for fp16", rules::default_growth_interval), Changeable;
    }

    /// How the work is split among ranks.
    parallel: ParallelConfig {
        /// Groups of ranks that compute on sequences of their own and sum their gradients.
        dp: usize = Count(1, RANKS), Fixed("1"), Conduct;
        /// Ranks that split heads, hidden units and vocabulary among themselves.
        tp: usize = Count(1, RANKS), Fixed("1"), Conduct;
        /// Stages that split the layers among themselves.
        pp: usize = Count(1, RANKS), Fixed("1"), Conduct;
        /// What dp ranks hold only a share of: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        zero: u8 = Integer(0, 3), Fixed("0"), Conduct;
        /// Whether tp ranks split the sequence where they do not split the matrices.
        sequence_parallel: bool = Bool, Fixed("false"), Conduct;
        /// In which order stages compute micro-batches. 1f1b: a forward and a backward pass in turn, with few micro-batches
        /// in flight. gpipe: all forward passes first.
        schedule: String = Choice(&Schedule::NAMES), Fixed("\"1f1b\""), Conduct;
        /// Seconds that a rank waits for another one that shows no sign of life.
        patience: f64 = Float(UP_TO_A_DAY), Fixed("60.0"), Conduct;
    }

    /// What is computed again in backward instead of kept.
    recompute: RecomputeConfig {
        /// none: everything that backward reads is kept. selective: norms and activation functions are computed again, which
        /// costs no matrix product, and the weights of naive attention, which costs one. full: all of a layer but what enters
        /// it. every-k: all of recompute.every layers but what enters the first. sqrt: the same with the square root of the
        /// number of layers. list: what the ops of recompute.ops make. budget: as little as lets the arena fit
        /// recompute.budget. Bits stay the same.
        policy: String = Choice(&["none", "selective", "full", "every-k", "sqrt", "list", "budget"]), Fixed("\"none\""), Conduct;
        /// Layers whose values are given up together under the every-k policy.
        every: usize = Count(1, EXTENT), Fixed("2"), Conduct;
        /// Ops whose outputs are not kept under the list policy, by the names that explain shows.
        ops: Vec<String> = Texts(OPS), Fixed("[]"), Conduct;
        /// The most bytes that the arena of a rank may have under the budget policy.
        budget: Option<Bytes> = Size, Unset, Conduct;
    }

    /// How gradients become updates.
    optimizer: OptimizerConfig {
        /// The update rule. adamw: Adam with decoupled decay. lion: the sign of a moment. sgd: with momentum. muon: orthogonalised momentum
        /// for the matrices of layers, adamw for embeddings, output head, norms and biases; the learning rate is adamw's.
        name: String = Choice(&["adamw", "lion", "sgd", "muon"]), Fixed("\"adamw\""), Trajectory;
        /// The highest learning rate, reached after warmup.
        lr: f64 = Float(POSITIVE), Fixed("3e-4"), Changeable;
        /// How the learning rate goes after warmup. cosine, linear: falls over the rest of the run. wsd: stays, and falls in a
        /// line over the last decay_steps. constant: stays.
        schedule: String = Choice(&["cosine", "linear", "wsd", "constant"]), Fixed("\"cosine\""), Changeable;
        /// The schedule ends at this share of the learning rate.
        min_lr_ratio: Option<f64> =
            Float(UP_TO_ONE), Derived("0.1; none for constant", rules::default_min_lr_ratio), Changeable;
        /// Steps over which the learning rate rises from 0.
        warmup_steps: u64 = Count(0, STEPS), Derived("100, or train.steps if less", rules::default_warmup), Changeable;
        /// The last steps of a run over which wsd lets the learning rate fall.
        decay_steps: Option<u64> =
            Count(0, STEPS), Derived("train.steps / 10 for wsd", rules::default_decay_steps), Changeable;
        /// Decay of the first moment; for lion, the share of the moment in the update.
        beta1: Option<f64> = Float(BELOW_ONE), Derived("0.9; none for sgd", rules::default_beta1), Changeable;
        /// Decay of the second moment; for lion, of its only one.
        beta2: Option<f64> =
            Float(BELOW_ONE), Derived("0.95; 0.99 for lion; none for sgd", rules::default_beta2), Changeable;
        /// What is added to the root of the second moment.
        eps: Option<f64> = Float(POSITIVE), Derived("1e-8 for adamw and muon", rules::default_eps), Changeable;
        /// Decay of the momentum of sgd and muon.
        momentum: Option<f64> =
            Float(BELOW_ONE), Derived("0.9 for sgd, 0.95 for muon", rules::default_momentum), Changeable;
        /// Decoupled weight decay, per step and unit of learning rate.
        weight_decay: f64 = Float(NOT_NEGATIVE), Fixed("0.1"), Changeable;
        /// The largest norm of the whole gradient; 0 turns clipping off.
        grad_clip: f64 = Float(NOT_NEGATIVE), Fixed("1.0"), Changeable;
        /// Other numbers for the parameters whose Hugging Face name matches a pattern (`*` any text, `?` any letter): a factor
        /// on the learning rate, another weight decay. The first that matches counts. Norms and biases have no decay
        /// unless a group gives them one.
        groups: Vec<GroupConfig> = Groups, Fixed("[]"), Changeable;
    }

    /// What is saved.
    checkpoint: CheckpointConfig {
        /// Steps from one checkpoint to the next; 0 saves only at the end and on interrupt.
        every: u64 = Count(0, STEPS), Fixed("100"), Conduct;
        /// How many of the latest checkpoints stay on disk.
        keep: usize = Count(1, EXTENT), Fixed("3"), Conduct;
    }
}

const TEXT_EXTENSIONS: &str = r#"["txt", "md", "rst", "tex", "html", "csv", "json", "jsonl", "jsonl.zst", "parquet", "toml", "yaml", "yml", "rs", "py", "c", "h", "cc", "cpp", "hpp", "cu", "cuh", "go", "java", "js", "ts", "sh", "sql"]"#;
