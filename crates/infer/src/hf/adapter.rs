//! Adapters as PEFT keeps them: `adapter_config.json` and `adapter_model.safetensors`.

use super::{model_parts, unfit};
use crate::state::MODEL;
use crate::{Part, Result, Trained, parts};
use lockstep_checkpoint::{CheckpointError, Loaded, LowRank, NewFolder, TensorCopy, TensorSource, WeightsFolder};
use lockstep_config::{Config, LoraConfig};
use lockstep_ir::DType;
use lockstep_model::adapters::{A, B, adapt, module, scale};
use lockstep_model::hf;
use lockstep_plan::PlanError;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const CONFIG: &str = "adapter_config.json";
/// The file of PEFT's weights.
const WEIGHTS: &str = "adapter_model";
/// What stands before the names of modules in that file.
const PREFIX: &str = "base_model.model.";

/// Fields that change what adapters compute, and what they must be.
const PLAIN: [(&str, &[Value]); 9] = [
    ("use_dora", &[Value::Null, Value::Bool(false)]),
    ("use_rslora", &[Value::Null, Value::Bool(false)]),
    ("lora_bias", &[Value::Null, Value::Bool(false)]),
    ("modules_to_save", &[Value::Null]),
    ("alora_invocation_tokens", &[Value::Null]),
    ("trainable_token_indices", &[Value::Null]),
    ("layer_replication", &[Value::Null]),
    ("target_parameters", &[Value::Null]),
    ("arrow_config", &[Value::Null]),
];

/// The matrices of the adapters of a config.
pub(crate) fn adapter_parts(config: &Config) -> Result<Vec<Part>> {
    let graph = lockstep_model::build(&config.model, 1, 1).map_err(PlanError::from)?;
    let lora = LoraConfig { dropout: 0.0, ..config.lora.clone() };
    let graph = adapt(graph, &lora).map_err(PlanError::from)?;
    let trained = graph.parameters().filter(|(_, _, parameter)| !parameter.frozen);
    Ok(trained.flat_map(|(_, value, parameter)| parts(parameter, &value.ty)).collect())
}

/// Adapters in a folder, which are those that a config asks for.
#[derive(Debug)]
pub struct AdapterFolder {
    weights: WeightsFolder,
    copies: Vec<TensorCopy>,
}

impl AdapterFolder {
    /// Opens what `lora.init_from` names.
    pub fn open(config: &Config) -> Result<Option<Self>> {
        let Some(path) = config.adapter_dir() else { return Ok(None) };
        if !path.join(CONFIG).exists() {
            let hint = "name a folder that PEFT has written, with adapter_model.safetensors beside it";
            return Err(unfit(&path, format!("no {CONFIG}"), hint.into()).into());
        }
        check(&WeightsFolder::json(&path, CONFIG)?, &config.lora)
            .map_err(|(cause, hint)| unfit(&path.join(CONFIG), cause, hint))?;
        let weights = WeightsFolder::open_named(&path, WEIGHTS)?;
        let copy = |part: Part| TensorCopy::plain(format!("{PREFIX}{}", part.name), part.name, part.shape);
        let copies: Vec<TensorCopy> = adapter_parts(config)?.into_iter().map(copy).collect();
        let source = TensorSource::Folder(&weights);
        let hint = "they are adapters of another model, or of other modules: give lora.targets those of target_modules";
        source.check(&copies, hint)?;
        let others = weights.names().filter(|name| !copies.iter().any(|copy| copy.from == *name));
        super::refuse_others(&path, others, hint)?;
        Ok(Some(Self { weights, copies }))
    }

    /// The adapters, and which of them.
    pub fn source(&self) -> (TensorSource<'_>, &[TensorCopy]) {
        (TensorSource::Folder(&self.weights), &self.copies)
    }

    /// The folder, for messages.
    pub fn path(&self) -> &Path {
        self.weights.path()
    }
}

/// Why adapters are not those of a config, and what to do.
fn check(theirs: &Value, lora: &LoraConfig) -> Result<(), (String, String)> {
    let refuse = |cause: String, hint: String| Err((cause, hint));
    if theirs["peft_type"] != "LORA" {
        let hint = "only LoRA can be read".into();
        return refuse(format!("peft_type is {}", theirs["peft_type"]), hint);
    }
    for (field, plain) in PLAIN {
        if !plain.contains(&theirs[field]) {
            return refuse(format!("{field} is {}", theirs[field]), "such adapters cannot be read".into());
        }
    }
    for field in ["rank_pattern", "alpha_pattern"] {
        if theirs[field].as_object().is_some_and(|pattern| !pattern.is_empty()) {
            return refuse(format!("{field} gives modules ranks of their own"), "such adapters cannot be read".into());
        }
    }
    if !matches!(theirs["bias"].as_str(), None | Some("none")) {
        return refuse(
            format!("bias is {}", theirs["bias"]),
            "biases are not trained: such adapters cannot be read".into(),
        );
    }
    if theirs["r"].as_u64() != lora.rank.map(|rank| rank as u64) {
        return refuse(format!("r is {}", theirs["r"]), format!("set lora.rank = {}", theirs["r"]));
    }
    if theirs["lora_alpha"].as_f64() != lora.alpha {
        let alpha = &theirs["lora_alpha"];
        return refuse(format!("lora_alpha is {alpha}"), format!("set lora.alpha = {alpha}"));
    }
    Ok(())
}

/// Writes the adapters of a checkpoint to a folder that PEFT loads.
pub(super) fn export_adapter(trained: &Trained, checkpoint: &Loaded, out: &Path, dtype: DType) -> Result<u64> {
    let (config, lora) = (&trained.config, &trained.config.lora);
    let parts = adapter_parts(config)?;
    if let Some(part) = parts.iter().find(|part| part.name.contains(".experts.")) {
        let cause = format!("`{}` is of one expert, and PEFT adapts experts all at once", part.name);
        let hint = "export the model with its adapters merged into the weights";
        return Err(unfit(&checkpoint.path, cause, hint.into()).into());
    }
    let copy = |part: Part| {
        let to = format!("{PREFIX}{}", part.name);
        TensorCopy::plain(part.name, to, part.shape)
    };
    let copies: Vec<TensorCopy> = parts.into_iter().map(copy).collect();
    let source = TensorSource::Checkpoint { loaded: checkpoint, group: MODEL };
    source.check(&copies, "run.toml is not of this checkpoint: name the checkpoint's own folder")?;
    let mut targets: Vec<&str> = copies.iter().filter_map(|copy| copy.from.strip_suffix(A)).collect();
    targets.sort_unstable();
    let fan_in_fan_out = targets.iter().any(|target| hf::is_transposed(&config.model, &format!("{target}.weight")));
    let described = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.init_from(),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": true,
    });
    let new = NewFolder::begin(out)?;
    new.write(CONFIG, format!("{described:#}\n").as_bytes())?;
    lockstep_checkpoint::export(new.contents(), (source, WEIGHTS), &copies, dtype, u64::MAX, &mut |_, _| {})?;
    new.publish()?;
    Ok(copies.iter().map(|copy| copy.shape.iter().product::<usize>() as u64).sum())
}

/// What the adapters of a checkpoint add to the weights of a model, by the names of these, as Hugging Face turns them.
pub(super) fn added(config: &Config, checkpoint: &Loaded) -> Result<BTreeMap<String, LowRank>> {
    let scale = scale(&config.lora);
    let source = TensorSource::Checkpoint { loaded: checkpoint, group: MODEL };
    let matrices: BTreeMap<String, Part> = adapter_parts(config)?.into_iter().map(|p| (p.name.clone(), p)).collect();
    let read = |part: &Part| -> Result<Vec<f32>, CheckpointError> {
        let Part { name, shape, .. } = part;
        let copy = TensorCopy::plain(name.clone(), name.clone(), shape.clone());
        source.check(std::slice::from_ref(&copy), "the checkpoint is damaged: take one before it")?;
        let mut numbers = Vec::with_capacity(part.elements);
        source.stream(&copy, DType::F32, &mut |chunk| {
            numbers.extend(chunk.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)));
            Ok(())
        })?;
        Ok(numbers)
    };
    let mut added = BTreeMap::new();
    for Part { name, .. } in model_parts(&config.model)? {
        let [a, b] = [A, B].map(|end| matrices.get(&format!("{}{end}", module(&name))));
        let (Some(a), Some(b)) = (a, b) else { continue };
        let (rank, inputs, outputs) = (a.shape[0], a.shape[1], b.shape[0]);
        let (mut a, b) = (read(a)?, read(b)?);
        a.iter_mut().for_each(|x| *x *= scale);
        let low = match hf::is_transposed(&config.model, &name) {
            false => LowRank { left: b, right: a, rank, columns: inputs },
            true => {
                LowRank { left: turned(&a, rank, inputs), right: turned(&b, outputs, rank), rank, columns: outputs }
            }
        };
        added.insert(name, low);
    }
    Ok(added)
}

fn turned(matrix: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns * rows).map(|i| matrix[i % rows * columns + i / rows]).collect()
}
