//! Hugging Face folders in and out: what a model's tensors are called there, and the files around them.

mod adapter;
mod byte_tokenizer;
mod experts;
mod export;
mod import;
mod kept;
mod special;

pub use adapter::AdapterFolder;
pub use export::{ExportOptions, Exported, export, export_problem};
pub(crate) use import::{FolderModel, is_foreign, keys, quoted, read_folder, special_warnings, tokenizer_bytes};
pub use import::{Imported, import};
pub use kept::{ATTACHMENT, Kept};
pub(crate) use kept::{CHAT_TEMPLATE, TOOL_TEMPLATE};
pub(crate) use special::text_of;

use crate::{Part, Result, parts};
use lockstep_checkpoint::{CheckpointError, Interleaved, TensorCopy, TensorSource, WeightsFolder};
use lockstep_config::ModelConfig;
use lockstep_model::hf::{self, HfConfig, Quantised};
use lockstep_plan::PlanError;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

pub(crate) const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
pub(crate) const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";

/// Most layers of a model that is read: a graph is built before every tensor's name is known to be there.
const MOST_LAYERS: usize = 2048;

/// A Hugging Face folder whose config was understood and whose headers are sound.
#[derive(Debug)]
pub(crate) struct HfFolder {
    pub(crate) config: HfConfig,
    pub(crate) weights: WeightsFolder,
}

impl HfFolder {
    pub fn open(path: &Path) -> Result<Self> {
        if !path.join(CONFIG).exists() {
            let (cause, hint) =
                ("no config.json", "name the folder of a Hugging Face model, as save_pretrained writes it");
            return Err(unfit(path, cause.into(), hint.into()).into());
        }
        let config = hf::read_config(&WeightsFolder::json(path, CONFIG)?)
            .map_err(|e| unfit(&path.join(CONFIG), e.problem, e.hint))?;
        let weights = WeightsFolder::open(path)?;
        if let (Some(name), false) = (weights.fp8(), config.quantised == Some(Quantised::Fp8)) {
            let cause =
                format!("tensor `{}` is in fp8, and {CONFIG} has no `quantization_config` of fp8", name.escape_debug());
            return Err(unfit(path, cause, SAME_FOLDER.into()).into());
        }
        let config = with_modules(config, &weights);
        // A layer has tensors of its own: no graph is built for layers that are not there.
        let tensors = weights.names().count();
        if config.layers > MOST_LAYERS {
            let cause = format!("{} layers, at most {MOST_LAYERS} are read", config.layers);
            return Err(unfit(&path.join(CONFIG), cause, SAME_FOLDER.into()).into());
        }
        if config.layers > tensors {
            let cause = format!("{} layers, and there are {tensors} tensors", config.layers);
            return Err(unfit(&path.join(CONFIG), cause, SAME_FOLDER.into()).into());
        }
        Ok(Self { config, weights })
    }

    /// Warnings of its `config.json`, and of tensors that are left out.
    pub fn warnings(&self) -> Vec<String> {
        let (path, unknown) = (self.weights.path(), &self.config.unknown);
        let names = unknown.iter().map(|name| format!("`{}`", name.escape_debug())).collect::<Vec<_>>().join(", ");
        let fields = format!("{}: fields of unknown meaning are passed over: {names}", path.join(CONFIG).display());
        let layers = self.config.layers + self.config.further;
        let further = self.weights.names().filter(|name| hf::layer_of(name) >= Some(layers)).count();
        let modules = format!(
            "{}: modules that predict further tokens (MTP) are left out, with their {further} tensors",
            path.display()
        );
        let all = [(!unknown.is_empty(), fields), (further > 0, modules)];
        all.into_iter().filter_map(|(is, warning)| is.then_some(warning)).collect()
    }

    /// How the tensors of a model are copied from the folder, which must have them all and no others.
    pub fn copies(&mut self, model: &ModelConfig, hint: &str) -> Result<Vec<TensorCopy>> {
        let parts = model_parts(model)?;
        take_experts_apart(&mut self.weights, &parts);
        let names: BTreeSet<&str> = self.weights.names().collect();
        let prefix = hf::base_prefix(model);
        let theirs = |name: &str| match name.strip_prefix(prefix) {
            Some(bare) if !names.contains(name) && names.contains(bare) => bare.to_owned(),
            _ if names.contains(name) => name.to_owned(),
            _ => {
                Some(in_memory(name)).filter(|other| names.contains(other.as_str())).unwrap_or_else(|| name.to_owned())
            }
        };
        let copy = |part: Part| {
            let from = theirs(&part.name);
            TensorCopy {
                // Matrices in mxfp4 have blocks of inputs, so their rows are outputs in any family.
                transposed: hf::is_transposed(model, &part.name) && !self.weights.is_mxfp4(&from),
                interleaved: Interleaved::between(hf::is_interleaved(model, &part.name), false),
                exact: hf::stays_f32(&part.name),
                from,
                to: part.name,
                shape: part.shape,
            }
        };
        let copies: Vec<TensorCopy> = parts.into_iter().map(copy).collect();
        let source = TensorSource::Folder(&self.weights);
        source.check(&copies, hint)?;
        let (head, embedding) = hf::head_and_embedding(model);
        let spare = model.tied_embeddings && names.contains(head);
        let taken: BTreeSet<&str> = copies.iter().map(|copy| copy.from.as_str()).collect();
        let passed_over = |name: &str| hf::is_buffer(name) || hf::is_further_prediction(model, name);
        let others = names.iter().filter(|name| !taken.contains(*name) && !passed_over(name));
        refuse_others(self.weights.path(), others.copied().filter(|name| !(spare && *name == head)), hint)?;
        if spare && !source.equal(head, &theirs(embedding))? {
            let cause = format!("`{head}` differs from `{}`, and `tie_word_embeddings` is true", theirs(embedding));
            let hint = "set it to false in config.json, if the model has a head of its own";
            return Err(unfit(self.weights.path(), cause, hint.into()).into());
        }
        for (copy, of) in hf::further_copies(model).iter().filter(|(copy, _)| names.contains(copy.as_str())) {
            if !source.equal(copy, &theirs(of))? {
                let cause =
                    format!("`{copy}` differs from `{}`, and modules that predict further tokens share it", theirs(of));
                let hint = "remove it from the files, if the model's own is meant";
                return Err(unfit(self.weights.path(), cause, hint.into()).into());
            }
        }
        Ok(copies)
    }
}

/// What transformers 5 calls a tensor in memory: Mixtral's block of experts has another name in its own files.
fn in_memory(name: &str) -> String {
    name.replace(".block_sparse_moe.", ".mlp.")
}

/// Lets the matrices of experts be found by the names of each where files have those of all experts of a layer in one tensor, as transformers 5
/// has them in memory and saves them with `save_original_format=False`.
fn take_experts_apart(weights: &mut WeightsFolder, parts: &[Part]) {
    // Of every block with experts, the names of each of an expert's matrices: gate, up and down.
    let mut blocks: BTreeMap<&str, BTreeMap<usize, Vec<&str>>> = BTreeMap::new();
    for part in parts {
        let Some((block, rest)) = part.name.split_once(".experts.") else { continue };
        let Some(expert) = rest.split_once('.').and_then(|(expert, _)| expert.parse().ok()) else { continue };
        blocks.entry(block).or_default().entry(expert).or_default().push(&part.name);
    }
    for (block, experts) in blocks {
        let block = in_memory(&format!("{block}."));
        let of = |range: Range<usize>| -> Vec<Vec<String>> {
            let named =
                |names: &Vec<&str>| names.get(range.clone()).unwrap_or_default().iter().map(|n| (*n).into()).collect();
            experts.values().map(named).collect()
        };
        weights.take_apart(&format!("{block}experts.gate_up_proj"), &of(0..2));
        weights.take_apart(&format!("{block}experts.down_proj"), &of(2..3));
    }
}

/// A config with the modules that predict further tokens (MTP) that there are weights of: transformers saves models without them.
pub(crate) fn with_modules(config: HfConfig, weights: &WeightsFolder) -> HfConfig {
    let names: BTreeSet<&str> = weights.names().collect();
    let has = |depth: &usize| names.contains(format!("model.layers.{}.eh_proj.weight", config.layers + depth).as_str());
    let modules = (0..config.further).take_while(has).count();
    config.with_further(modules)
}

const SAME_FOLDER: &str = "config.json is of another model than the weights: take both from one folder";

/// Refuses tensors that a model has no place for.
pub(crate) fn refuse_others<'a>(
    path: &Path,
    others: impl Iterator<Item = &'a str>,
    hint: &str,
) -> Result<(), CheckpointError> {
    let others: Vec<String> = others.map(|name| format!("`{}`", name.escape_debug())).collect();
    if others.is_empty() {
        return Ok(());
    }
    let shown = others[..others.len().min(5)].join(", ");
    let more = if others.len() > 5 { format!(" and {} more", others.len() - 5) } else { String::new() };
    let (count, are) = (others.len(), if others.len() == 1 { "tensor is" } else { "tensors are" });
    Err(unfit(path, format!("{count} {are} not part of the model: {shown}{more}"), hint.to_owned()))
}

/// The unpacked tensors of a model.
pub(crate) fn model_parts(model: &ModelConfig) -> Result<Vec<Part>> {
    let graph = lockstep_model::build(model, 1, 1).map_err(PlanError::from)?;
    Ok(graph.parameters().flat_map(|(_, value, parameter)| parts(parameter, &value.ty)).collect())
}

pub(crate) fn unfit(path: &Path, cause: String, hint: String) -> CheckpointError {
    CheckpointError::Unfit { path: path.to_owned(), cause, hint }
}
