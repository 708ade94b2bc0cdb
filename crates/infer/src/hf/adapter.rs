//! Adapters as PEFT keeps them: `adapter_config.json` and `adapter_model.safetensors`.

use super::experts::{self, Together};
use super::{model_parts, unfit};
use crate::state::MODEL;
use crate::{Part, Result, Trained, parts};
use lockstep_checkpoint::{
    CheckpointError, HeldTensors, Loaded, LowRank, NewFolder, TensorCopy, TensorSource, WeightsFolder,
};
use lockstep_config::{Config, LoraConfig};
use lockstep_ir::DType;
use lockstep_model::adapters::{A, B, adapt, module, scale};
use lockstep_model::hf;
use lockstep_plan::PlanError;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const CONFIG: &str = "adapter_config.json";
/// The file of PEFT's weights.
const WEIGHTS: &str = "adapter_model";
/// What stands before the names of modules in that file.
const PREFIX: &str = "base_model.model.";

/// Fields that change what adapters compute, and what they must be.
const PLAIN: [(&str, &[Value]); 13] = [
    ("use_dora", &[Value::Null, Value::Bool(false)]),
    ("use_rslora", &[Value::Null, Value::Bool(false)]),
    ("lora_bias", &[Value::Null, Value::Bool(false)]),
    ("modules_to_save", &[Value::Null]),
    ("alora_invocation_tokens", &[Value::Null]),
    ("trainable_token_indices", &[Value::Null]),
    ("layer_replication", &[Value::Null]),
    ("arrow_config", &[Value::Null]),
    ("use_qalora", &[Value::Null, Value::Bool(false)]),
    ("use_bdlora", &[Value::Null, Value::Bool(false)]),
    ("kasa_config", &[Value::Null]),
    ("velora_config", &[Value::Null]),
    ("monteclora_config", &[Value::Null]),
];

/// Ways to begin that change the weights beside the adapters, which PEFT does again when it loads them.
const CHANGE_WEIGHTS: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

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
    /// Those of a folder in which experts stand together, one by one.
    apart: Option<HeldTensors>,
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
        let together = check(&WeightsFolder::json(&path, CONFIG)?, &config.lora)
            .map_err(|(cause, hint)| unfit(&path.join(CONFIG), cause, hint))?;
        let weights = WeightsFolder::open_named(&path, WEIGHTS)?;
        let hint = "they are adapters of another model, or of other modules: give lora.targets those of target_modules";
        let parts = adapter_parts(config)?;
        let apart = together.map(|form| form.unpack(&weights, PREFIX, config, &parts, hint)).transpose()?;
        let copy = |part: Part| TensorCopy::plain(format!("{PREFIX}{}", part.name), part.name, part.shape);
        let copies: Vec<TensorCopy> = parts.into_iter().map(copy).collect();
        let this = Self { weights, apart, copies };
        this.source().0.check(&this.copies, hint)?;
        if this.apart.is_none() {
            let known: BTreeSet<&str> = this.copies.iter().map(|copy| copy.from.as_str()).collect();
            super::refuse_others(&path, this.weights.names().filter(|name| !known.contains(name)), hint)?;
        }
        Ok(Some(this))
    }

    /// The adapters, and which of them.
    pub fn source(&self) -> (TensorSource<'_>, &[TensorCopy]) {
        let source = self.apart.as_ref().map_or(TensorSource::Folder(&self.weights), TensorSource::Held);
        (source, &self.copies)
    }

    /// The folder, for messages.
    pub fn path(&self) -> &Path {
        self.weights.path()
    }
}

/// How a folder keeps its adapters, where not a module at a time; or why they are not those of a config, and what to do.
fn check(theirs: &Value, lora: &LoraConfig) -> Result<Option<Together>, (String, String)> {
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
    let begun = theirs["init_lora_weights"].as_str().unwrap_or_default();
    if CHANGE_WEIGHTS.iter().any(|way| begun.starts_with(way)) {
        let hint =
            "save them with path_initial_model_for_weight_conversion in PEFT, which makes plain adapters of them";
        return refuse(
            format!("init_lora_weights is {begun:?}, which has changed the weights beside them"),
            hint.into(),
        );
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
    Together::read(theirs, lora).map_err(|cause| (cause, "such adapters cannot be read".into()))
}

/// Writes the adapters of a checkpoint to a folder that PEFT loads. Gives the number of their elements, and what PEFT cannot do with them.
pub(super) fn export_adapter(
    trained: &Trained,
    checkpoint: &Loaded,
    out: &Path,
    dtype: DType,
) -> Result<(u64, Vec<String>)> {
    let (config, lora) = (&trained.config, &trained.config.lora);
    let parts = adapter_parts(config)?;
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
    // PEFT refuses dropout beside weights of all experts together.
    let of_experts = targets.iter().any(|target| target.contains(".experts."));
    let described = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.init_from(),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": if of_experts { 0.0 } else { lora.dropout },
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": true,
    });
    let new = NewFolder::begin(out)?;
    new.write(CONFIG, format!("{described:#}\n").as_bytes())?;
    lockstep_checkpoint::export(new.contents(), (source, WEIGHTS), &copies, dtype, u64::MAX, &mut |_, _| {})?;
    new.publish()?;
    let elements = copies.iter().map(|copy| copy.shape.iter().product::<usize>() as u64).sum();
    Ok((elements, experts::warnings(config, &targets)))
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
