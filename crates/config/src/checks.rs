//! Rules between keys: what must divide what, what goes together, and sizes that later arithmetic can hold.

use crate::architecture::{Architecture, Features};
use crate::conflict::Conflict;
use crate::experts;
use crate::inherit::is_in_bucket;
use crate::latent;
use crate::layers;
use crate::legal::{self, Extents};
use crate::optimizers::OptimizerName;
use crate::rules;
use crate::stages;
use crate::value::Value;
use crate::values::Values;
use crate::words::{AttentionMethod, DataFormat, RecomputePolicy, TrainOnTurns};
use lockstep_ir::{Axes, Layout, Mesh, MeshAxis};

/// What the model's architecture has.
pub(crate) fn features(values: &Values) -> Features {
    values.word::<Architecture>("model.architecture").map_or(Features::LLAMA, Architecture::features)
}

/// Ranks that have sequences of their own.
pub(crate) fn data_parallel_ranks(values: &Values) -> Option<u64> {
    let [dp, replicas, ep] = ["parallel.dp", "parallel.dp_replicate", "parallel.ep"].map(|path| values.count(path));
    dp?.checked_mul(replicas?)?.checked_mul(ep?)
}

/// Every rule that complete values must keep. A rule is silent where a key it needs has no value yet.
pub(crate) const CHECKS: &[fn(&Values) -> Option<Conflict>] = &[
    kv_heads_divide_heads,
    latent::sizes_go_together,
    layers::further_tokens_have_layers,
    head_dim_is_even,
    layers::patterns_fit_the_layers,
    layers::local_bases_have_layers,
    layers::gpt2_has_its_own_block,
    layers::limits_clamp_something,
    layers::sinks_go_with_flash_attention,
    experts_are_of_their_architectures,
    tokens_go_to_experts_that_there_are,
    experts::parts_are_of_their_architectures,
    experts::some_layers_have_experts,
    experts::groups_hold_the_chosen,
    keys_belong_to_the_architecture,
    sequences_have_positions,
    rules::decay_steps_have_a_schedule,
    rules::constant_rates_do_not_fall,
    rules::constants_have_an_optimizer,
    rules::loss_scales_are_of_fp16,
    rules::masters_in_bf16_are_the_weights,
    rules::weights_in_bytes_are_frozen,
    rules::fp8_goes_with_the_rest,
    rules::adapters_have_a_rank,
    parameters_can_be_counted,
    activations_can_be_counted,
    tokens_can_be_counted,
    noise_scale_has_two_sizes,
    data_have_one_form,
    prompts_go_with_the_rest,
    chats_go_with_the_rest,
    special_tokens_have_a_tokenizer,
    recompute_has_its_keys,
    stages::stages_make_up_the_model,
];

fn kv_heads_divide_heads(values: &Values) -> Option<Conflict> {
    let (heads, kv_heads) = (values.count("model.heads")?, values.count("model.kv_heads")?);
    Conflict::when(
        heads % kv_heads != 0,
        &["model.kv_heads", "model.heads"],
        format!("model.kv_heads = {kv_heads} does not divide model.heads = {heads}"),
        format!("{} kv heads divide it", near_divisors(heads, kv_heads)),
    )
}

fn head_dim_is_even(values: &Values) -> Option<Conflict> {
    let head_dim = values.count("model.head_dim")?;
    Conflict::when(
        head_dim % 2 != 0 && !features(values).learned_positions && values.count("model.kv_lora_rank").is_none(),
        &["model.head_dim", "model.heads", "model.dim"],
        format!("model.head_dim = {head_dim} is odd, and RoPE rotates pairs"),
        "choose an even model.head_dim, or other model.heads (model.head_dim defaults to model.dim / model.heads)",
    )
}

fn experts_are_of_their_architectures(values: &Values) -> Option<Conflict> {
    let architecture: Architecture = values.word("model.architecture")?;
    match (values.count("model.experts"), architecture.features().experts) {
        (Some(_), true) | (None, false) => None,
        (Some(experts), false) => Some(Conflict::new(
            &["model.experts", "model.architecture"],
            format!("model.experts = {experts} is given, and model.architecture = \"{architecture}\" has no experts"),
            format!(
                "use model.architecture = {}, or remove model.experts",
                Architecture::listed(|features| features.experts)
            ),
        )),
        (None, true) => Some(Conflict::new(
            &["model.architecture", "model.experts"],
            format!("model.architecture = \"{architecture}\" needs model.experts"),
            "say how many experts a layer has, such as model.experts = 8",
        )),
    }
}

fn tokens_go_to_experts_that_there_are(values: &Values) -> Option<Conflict> {
    let experts = values.count("model.experts");
    for key in ["model.experts_per_token", "model.expert_ffn"] {
        if values.count(key).is_some() && experts.is_none() {
            let text = format!("{key} is given, and there are no model.experts");
            return Some(Conflict::new(&[key, "model.experts"], text, format!("remove {key}, or give model.experts")));
        }
    }
    let (experts, top) = (experts?, values.count("model.experts_per_token")?);
    Conflict::when(
        top > experts,
        &["model.experts_per_token", "model.experts"],
        format!("model.experts_per_token = {top} is more than model.experts = {experts}"),
        format!("choose at most {experts}"),
    )
}

/// Keys that say something about a part which the model does not have.
fn keys_belong_to_the_architecture(values: &Values) -> Option<Conflict> {
    let architecture: Architecture = values.word("model.architecture")?;
    let features = architecture.features();
    let conflict = |key: &'static str, why: &str, hint: String| {
        let text = format!("{key} is given, and model.architecture = \"{architecture}\" {why}");
        Some(Conflict::new(&[key, "model.architecture"], text, hint))
    };
    let remove = |key: &str| format!("remove {key}, or choose another model.architecture");
    let dropout = matches!(values.get("model.dropout"), Some(Value::Float(rate)) if *rate > 0.0);
    if dropout && !features.gpt2_block {
        return conflict("model.dropout", "has no dropout", remove("model.dropout"));
    }
    let (key, why) = match features.learned_positions {
        true => ("model.rope_scaling", "has learned positions, not RoPE"),
        false => ("model.positions", "has RoPE, not learned positions"),
    };
    if values.get(key).is_some() {
        return conflict(key, why, remove(key));
    }
    if !features.gpt2_block {
        return None;
    }
    let (heads, kv_heads) = (values.count("model.heads")?, values.count("model.kv_heads")?);
    if heads != kv_heads {
        return conflict("model.kv_heads", "has as many as heads", remove("model.kv_heads"));
    }
    let (dim, head_dim) = (values.count("model.dim")?, values.count("model.head_dim")?);
    if dim != heads * head_dim {
        return conflict("model.head_dim", "has model.dim / model.heads", remove("model.head_dim"));
    }
    None
}

fn sequences_have_positions(values: &Values) -> Option<Conflict> {
    let (seq, positions) = (values.count("train.seq")?, values.count("model.positions")?);
    Conflict::when(
        seq > positions && features(values).learned_positions,
        &["train.seq", "model.positions"],
        format!("train.seq = {seq} is more than the {positions} rows of model.positions"),
        format!("choose at most {positions} tokens per sequence, or more positions"),
    )
}

/// Why the layout does not fit the model and the batch; nothing where a key it needs has no value yet.
pub(crate) fn layout_conflicts(values: &Values) -> Vec<Conflict> {
    let Some((layout, extents)) = layout_and_extents(values) else { return Vec::new() };
    let conflict = |refusal: legal::Refusal| {
        let keys = [&[refusal.key], refusal.with].concat();
        Conflict::new(&keys, refusal.reason, format!("use {}", refusal.nearest))
    };
    let mut conflicts: Vec<Conflict> = legal::check(&layout, &extents).into_iter().map(conflict).collect();
    if conflicts.is_empty() {
        conflicts.extend(ramp_conflict(values, &layout, &extents));
    }
    conflicts
}

/// A batch of the ramp that micro-batches of all ranks do not make up.
fn ramp_conflict(values: &Values, layout: &Layout, extents: &Extents) -> Option<Conflict> {
    let Value::Ramp(stages) = values.get("train.batch_ramp")? else { return None };
    let round = (layout.mesh.size(Axes::SEQUENCES) * extents.micro_batch) as u64;
    let odd = |(_, batch): &(u64, Value)| match batch {
        Value::Count(count) if !count.is_multiple_of(round) => Some(*count),
        _ => None,
    };
    let count = stages.iter().find_map(odd)?;
    let what = legal::round(layout, extents);
    let near: Vec<String> = [count / round, count / round + 1].map(|n| (n * round).to_string()).to_vec();
    Some(Conflict::new(
        &["train.batch_ramp", "train.micro_batch", "parallel.dp", "parallel.dp_replicate", "parallel.ep"],
        format!("{what} does not divide the {count} sequences of a step in train.batch_ramp"),
        format!("use {} sequences there, or a train.micro_batch that divides all sizes", near.join(" or ")),
    ))
}

fn layout_and_extents(values: &Values) -> Option<(Layout, Extents)> {
    let size = |path: &str| values.count(path).and_then(|n| usize::try_from(n).ok());
    let layout = Layout {
        mesh: Mesh::ONE
            .with(MeshAxis::DpReplicate, size("parallel.dp_replicate")?)
            .with(MeshAxis::DpShard, size("parallel.dp")?)
            .with(MeshAxis::Cp, size("parallel.cp")?)
            .with(MeshAxis::Ep, size("parallel.ep")?)
            .with(MeshAxis::Tp, size("parallel.tp")?)
            .with(MeshAxis::Pp, size("parallel.pp")?),
        zero: values.count("parallel.zero").and_then(|zero| u8::try_from(zero).ok())?,
        reshard_after_forward: values.switch("parallel.reshard_after_forward")?,
        sequence_parallel: values.switch("parallel.sequence_parallel")?,
        context: values.word("parallel.context")?,
        expert_bound: values.get("parallel.ep_bound").map(|_| 100),
        schedule: values.word("parallel.schedule")?,
        chunks: size("parallel.virtual")?,
        ..Layout::single(1)
    };
    let extents = Extents {
        layers: size("model.layers")?,
        heads: size("model.heads")?,
        kv_heads: size("model.kv_heads")?,
        ffn: size("model.expert_ffn").or(size("model.ffn"))?,
        dense_ffn: match size("model.dense_layers")? {
            0 => None,
            _ => size("model.ffn"),
        },
        experts: size("model.experts"),
        vocab: size("model.vocab_size")?,
        seq: size("train.seq")?,
        global_batch: size("train.global_batch")?,
        micro_batch: size("train.micro_batch")?,
        gathered_head: match values
            .word::<OptimizerName>("optimizer.name")
            .is_some_and(|name| name.facts().gathers_matrices)
        {
            true => Some(size("model.head_dim")?.max(size("model.v_head_dim").unwrap_or(0)) * size("model.dim")?),
            false => None,
        },
        naive_attention: values.word("model.attention") == Some(AttentionMethod::Naive),
        latent: values.count("model.kv_lora_rank").is_some() && values.count("lora.rank").is_none(),
        noise_scale: values.switch("train.noise_scale").unwrap_or(false),
    };
    Some((layout, extents))
}

/// Past this many parameters, byte counts of parameters and optimizer state leave 64 bits.
const MAX_PARAMETERS: u128 = 1 << 48;

fn parameters_can_be_counted(values: &Values) -> Option<Conflict> {
    let [vocab, layers, dim, heads, kv_heads, head_dim, ffn] =
        ["vocab_size", "layers", "dim", "heads", "kv_heads", "head_dim", "ffn"].map(|name| model(values, name));
    // With latent attention at most as many in projections, and those from and to the latents.
    let [q_rank, kv_rank, value_dim] =
        ["q_lora_rank", "kv_lora_rank", "v_head_dim"].map(|name| model(values, name).unwrap_or(0));
    let latents = (q_rank + kv_rank) * (dim? + heads? * (head_dim? + value_dim));
    let attention = 2 * dim? * head_dim?.max(value_dim) * (heads? + kv_heads?) + latents;
    let positions = values.count("model.positions").map_or(0, u128::from);
    // Where there are experts, their width, and as many of them.
    let count = |key| values.count(key).map(u128::from);
    let experts = count("model.experts").unwrap_or(1).saturating_add(count("model.shared_experts").unwrap_or(0));
    let ffn = values.count("model.expert_ffn").map(u128::from).or(ffn)?;
    let parameters = (2 * vocab? + positions) * dim? + layers? * (attention + 3 * experts.saturating_mul(dim? * ffn));
    Conflict::when(
        parameters > MAX_PARAMETERS,
        &MODEL_SIZES,
        format!("the model would have {parameters} parameters"),
        "at most 2^48 are accepted; check model.vocab_size, layers, dim, heads, head_dim and ffn",
    )
}

/// Past this many elements, byte counts of activations leave 64 bits.
const MAX_ACTIVATIONS: u128 = 1 << 56;

fn activations_can_be_counted(values: &Values) -> Option<Conflict> {
    let [vocab, layers, dim, heads, head_dim, ffn] =
        ["vocab_size", "layers", "dim", "heads", "head_dim", "ffn"].map(|name| model(values, name));
    let (seq, micro) = (values.count("train.seq")?, values.count("train.micro_batch")?);
    let naive = values.word("model.attention") == Some(AttentionMethod::Naive);
    let weights = if naive { heads? * u128::from(seq) } else { 0 };
    let count = |key| values.count(key).map(u128::from);
    let top = count("model.experts_per_token").unwrap_or(1).saturating_add(count("model.shared_experts").unwrap_or(0));
    let ffn = values.count("model.expert_ffn").map(u128::from).or(ffn)?;
    let width = vocab? + layers? * (dim? + heads? * head_dim? + top * ffn + weights);
    let elements = u128::from(seq) * u128::from(micro) * width;
    Conflict::when(
        elements > MAX_ACTIVATIONS,
        &[&["train.micro_batch", "train.global_batch", "train.seq"], &MODEL_SIZES[..]].concat(),
        format!("one micro-batch of {micro} sequences of {seq} tokens would have {elements} activations"),
        "at most 2^56 are accepted; lower train.micro_batch or train.seq",
    )
}

/// The most tokens a run may read.
const MAX_TOKENS: u128 = 1 << 60;

fn tokens_can_be_counted(values: &Values) -> Option<Conflict> {
    let keys = ["train.global_batch", "train.steps", "train.seq"];
    let [batch, steps, seq] = keys.map(|path| values.count(path).map(u128::from));
    let largest = match values.get("train.batch_ramp") {
        Some(Value::Ramp(stages)) => stages.last().and_then(|(_, batch)| match batch {
            Value::Count(count) => Some(u128::from(*count)),
            _ => None,
        }),
        _ => None,
    };
    let tokens = steps?.max(1) * seq? * batch?.max(largest.unwrap_or(0));
    (tokens > MAX_TOKENS).then(|| {
        let text = format!("the run would read {tokens} tokens");
        Conflict::new(&keys, text, "at most 2^60 are accepted; lower train.steps, train.seq or train.global_batch")
    })
}

/// The noise scale compares the gradient of one micro-batch with that of a step.
fn prompts_go_with_the_rest(values: &Values) -> Option<Conflict> {
    let prompt = values.get("data.prompt_field")?;
    if values.get("data.text_field") == Some(prompt) {
        return Some(Conflict::new(
            &["data.prompt_field", "data.text_field"],
            format!("data.prompt_field = {prompt} is also data.text_field"),
            "name the field with the prompt, and in data.text_field the one with what comes after it",
        ));
    }
    if values.word("data.format") == Some(DataFormat::Chat) {
        return Some(Conflict::new(
            &["data.prompt_field", "data.format"],
            format!("data.prompt_field = {prompt} is given, and the prompts of a chat are its own messages"),
            "remove data.prompt_field; data.train_on says what counts in the loss",
        ));
    }
    Conflict::when(
        values.switch("train.noise_scale") == Some(true),
        &["train.noise_scale", "data.prompt_field"],
        "train.noise_scale is not measured where data.prompt_field leaves some targets out",
        "leave out one of the two",
    )
}

/// Chats have a tokenizer with special tokens, and keys of their own.
fn chats_go_with_the_rest(values: &Values) -> Option<Conflict> {
    let train_on: Option<TrainOnTurns> = values.word("data.train_on");
    match values.word::<DataFormat>("data.format")? {
        DataFormat::Text => {
            let key = ["data.chat_template", "data.train_on"].into_iter().find(|key| values.get(key).is_some())?;
            Some(Conflict::new(
                &[key, "data.format"],
                format!("{key} is given, and data.format = \"text\" has no turns"),
                format!("set data.format = \"chat\", or remove {key}"),
            ))
        }
        DataFormat::Chat if matches!(values.get("data.tokenizer")?, Value::Text(name) if name == "bytes") => {
            Some(Conflict::new(
                &["data.format", "data.tokenizer"],
                "data.format = \"chat\" is given, and data.tokenizer = \"bytes\" has no special tokens to keep turns apart".to_owned(),
                "name a tokenizer.json, or a folder in train.init_from that has one",
            ))
        }
        DataFormat::Chat => Conflict::when(
            values.switch("train.noise_scale") == Some(true) && train_on != Some(TrainOnTurns::All),
            &["train.noise_scale", "data.train_on"],
            "train.noise_scale is not measured where data.train_on leaves some targets out",
            "remove train.noise_scale, or set data.train_on = \"all\"",
        ),
    }
}

fn noise_scale_has_two_sizes(values: &Values) -> Option<Conflict> {
    if !values.switch("train.noise_scale")? {
        return None;
    }
    let conflict = |with: &'static str, reason: String, hint: &str| {
        Some(Conflict::new(&["train.noise_scale", with], format!("train.noise_scale = true {reason}"), hint))
    };
    let experts = values.count("parallel.ep")?;
    if experts > 1 {
        let reason =
            format!("needs gradients of a rank's own tokens, and parallel.ep = {experts} ranks have those of all");
        return conflict("parallel.ep", reason, "remove train.noise_scale, or use ep = 1");
    }
    let [global, micro] = ["train.global_batch", "train.micro_batch"].map(|key| values.count(key));
    if global? < micro?.saturating_mul(data_parallel_ranks(values)?).saturating_mul(2) {
        let reason = format!("needs two micro-batches per step and rank, and train.micro_batch = {} makes one", micro?);
        return conflict("train.micro_batch", reason, "lower train.micro_batch, or raise train.global_batch");
    }
    None
}

fn data_have_one_form(values: &Values) -> Option<Conflict> {
    let (Value::Texts(paths), Value::Corpora(corpora)) = (values.get("data.paths")?, values.get("data.corpora")?)
    else {
        return None;
    };
    Conflict::when(
        !paths.is_empty() && !corpora.is_empty(),
        &["data.paths", "data.corpora"],
        "data.paths and data.corpora are both given",
        "list the paths as a corpus of their own, with a name and a weight",
    )
}

fn special_tokens_have_a_tokenizer(values: &Values) -> Option<Conflict> {
    let Value::Text(tokenizer) = values.get("data.tokenizer")? else { return None };
    let says = [
        ("data.eos_token", "ends documents with a byte 0"),
        ("data.bos_token", "begins them with none"),
        ("data.special_tokens", "has no special tokens"),
    ];
    let given = |key: &str| match values.get(key) {
        Some(Value::Texts(list)) => !list.is_empty(),
        value => value.is_some(),
    };
    let (key, says) = says.into_iter().find(|(key, _)| given(key)).filter(|_| tokenizer == "bytes")?;
    let token = values.get(key)?;
    Some(Conflict::new(
        &[key, "data.tokenizer"],
        format!("{key} = {token} is given, and data.tokenizer = \"bytes\" {says}"),
        format!("remove {key}, or name a tokenizer.json"),
    ))
}

/// Text, prepared data and copies of checkpoints may be in a bucket; other addresses are not fetched.
pub(crate) fn paths_are_no_addresses(values: &Values) -> Option<Conflict> {
    let copy = "of addresses, s3://BUCKET/KEY is read; of others, copy the files to a folder first, and name it; hf:datasets/OWNER/NAME is a \
                dataset on the Hugging Face Hub";
    let fetch = "copy the folder first (`aws s3 sync`), and name it; hf:OWNER/NAME is a model on the Hugging Face Hub";
    let bucket = "of addresses, s3://BUCKET/KEY can be named here, at any server that speaks the protocol of S3 (AWS_ENDPOINT_URL_S3)";
    let keys = [
        ("data.paths", "files, folders and objects in buckets", copy, true),
        ("data.corpora", "files, folders and objects in buckets", copy, true),
        ("data.prepared", "a folder, here or in a bucket", bucket, true),
        ("data.cache", "a folder", "name a folder on a disk of the node", false),
        ("data.tokenizer", "a file", FETCH_TOKENIZER, false),
        ("train.init_from", "a folder", fetch, false),
        ("lora.init_from", "a folder", fetch, false),
        ("checkpoint.mirror", "a folder, here or in a bucket", bucket, true),
    ];
    keys.into_iter().find_map(|(key, names, hint, takes_buckets)| {
        let given: Vec<&String> = match values.get(key)? {
            Value::Text(text) => vec![text],
            Value::Texts(texts) => texts.iter().collect(),
            Value::Corpora(corpora) => corpora.iter().flat_map(|corpus| &corpus.paths).collect(),
            _ => return None,
        };
        let other = |text: &&String| text.contains("://") && !(takes_buckets && is_in_bucket(text));
        let address = given.into_iter().find(other)?;
        Some(Conflict::new(&[key], format!("{address}: this is an address, and {key} names {names}"), hint))
    })
}

/// How a tokenizer comes onto this machine.
pub(crate) const FETCH_TOKENIZER: &str = "set data.tokenizer = \"hf:OWNER/NAME\" for the tokenizer of a model on the Hugging Face Hub, or fetch its tokenizer.json";

/// `recompute.ops` and `recompute.budget` are given exactly where the policy reads them.
fn recompute_has_its_keys(values: &Values) -> Option<Conflict> {
    let policy: RecomputePolicy = values.word("recompute.policy")?;
    let ops = matches!(values.get("recompute.ops")?, Value::Texts(ops) if !ops.is_empty());
    let keys = [
        (RecomputePolicy::List, "recompute.ops", ops, "[\"rms_norm\", \"swiglu\"]"),
        (RecomputePolicy::Budget, "recompute.budget", values.get("recompute.budget").is_some(), "\"40 GiB\""),
    ];
    keys.into_iter().find_map(|(reader, key, given, example)| match (policy == reader, given) {
        (true, false) => Some(Conflict::new(
            &["recompute.policy"],
            format!("recompute.policy = \"{reader}\" needs {key}"),
            format!("give {key} = {example}, say"),
        )),
        (false, true) => Some(Conflict::new(
            &[key, "recompute.policy"],
            format!("{key} is given, and recompute.policy = \"{policy}\" does not read it"),
            format!("set recompute.policy = \"{reader}\", or remove {key}"),
        )),
        _ => None,
    })
}

const MODEL_SIZES: [&str; 7] =
    ["model.vocab_size", "model.layers", "model.dim", "model.heads", "model.kv_heads", "model.head_dim", "model.ffn"];

fn model(values: &Values, name: &str) -> Option<u128> {
    values.count(&format!("model.{name}")).map(u128::from)
}

/// The divisors of `n` on either side of `wanted`, as text: `4 or 6`.
pub(crate) fn near_divisors(n: u64, wanted: u64) -> String {
    let divisors = legal::divisors(n as usize);
    let above = divisors.partition_point(|&d| (d as u64) < wanted);
    let near = divisors[above.saturating_sub(1)..(above + 1).min(divisors.len())].iter();
    near.map(usize::to_string).collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_name_the_divisors_on_either_side() {
        assert_eq!(near_divisors(12, 5), "4 or 6");
        assert_eq!(near_divisors(8, 9), "8");
        assert_eq!(near_divisors(1, 3), "1");
        assert_eq!(near_divisors(1 << 32, 3), "2 or 4");
    }
}
