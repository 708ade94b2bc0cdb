//! A checkpoint becomes a Hugging Face folder.

use super::adapter::{added, export_adapter};
use super::special::{put_bos_text, put_eos_id, put_eos_text, template_bos};
use super::{CONFIG, GENERATION, Kept, TOKENIZER, TOKENIZER_CONFIG, byte_tokenizer, unfit};
use crate::{Result, RunTokenizer, Trained};
use lockstep_checkpoint::{Interleaved, NewFolder, TensorCopy, TensorSource, WeightsFolder};
use lockstep_config::{Config, DataFormat, PrecisionPolicy};
use lockstep_ir::DType;
use lockstep_model::hf::{self, HfExtras};
use lockstep_plan::check_positions;
use lockstep_rundir::RunDirError;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// How a model is exported.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// F32 or BF16; if not given, what the run computes in.
    pub dtype: Option<DType>,
    /// Positions that the result says it is made for; if not given, those of the Hugging Face model that it was made from, or
    /// `train.seq`.
    pub context: Option<usize>,
    /// The most bytes of one file of weights.
    pub shard_bytes: u64,
    /// Whether the adapters of a run are exported alone, as PEFT keeps them. If not, they are merged into the weights.
    pub adapter: bool,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self { dtype: None, context: None, shard_bytes: 5_000_000_000, adapter: false }
    }
}

/// What was exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The step of the checkpoint.
    pub step: u64,
    /// Elements of all parameters.
    pub parameters: u64,
    /// The type of the weights.
    pub dtype: DType,
    /// What was passed over to find the checkpoint.
    pub warnings: Vec<String>,
}

/// Writes a run's latest checkpoint, or the one in a folder, to `out` as a Hugging Face model: `config.json`,
/// `generation_config.json`, weights and tokenizer. What came beside the weights of a Hugging Face model that it was made from
/// goes out again: its special tokens, how to draw tokens, the template of a chat. Weights pass in chunks. `progress` hears the
/// bytes written and the bytes in all.
pub fn export(from: &Path, out: &Path, options: ExportOptions, progress: &mut dyn FnMut(u64, u64)) -> Result<Exported> {
    let trained = Trained::open(from)?;
    let Some(checkpoint) = trained.checkpoint() else {
        return Err(RunDirError::NotTrained { path: from.to_owned() }.into());
    };
    let (config, kept) = (&trained.config, trained.kept()?);
    let dtype = match (options.dtype, config.precision.policy) {
        (Some(dtype), _) => dtype,
        (None, PrecisionPolicy::Bf16 | PrecisionPolicy::Fp8) => DType::BF16,
        (None, PrecisionPolicy::Fp32 | PrecisionPolicy::Tf32 | PrecisionPolicy::Fp16) => DType::F32,
    };
    if options.adapter {
        if config.lora.rank.is_none() {
            let hint = "all weights of this model were trained: export it as a model";
            return Err(unfit(from, "there are no adapters".into(), hint.into()).into());
        }
        let (parameters, warnings) = export_adapter(&trained, checkpoint, out, dtype)?;
        let warnings = [trained.warnings.clone(), warnings].concat();
        return Ok(Exported { step: checkpoint.step, parameters, dtype, warnings });
    }
    let imported = checkpoint.state["imported"]["context"].as_u64().and_then(|context| usize::try_from(context).ok());
    let original = hf::read_config(&kept.json(CONFIG)).ok();
    let quantised = original.as_ref().and_then(|original| original.quantised);
    let original = original.map(|original| original.context.max(config.train.seq));
    let context = options.context.or(imported).or(original).unwrap_or(config.train.seq);
    check_positions(config, context)?;
    // A model that came without its tokenizer goes without one: it is not made of bytes.
    let unknown = !checkpoint.state["imported"].is_null() && config.tokenizer_path().is_none();
    let tokenizer = if unknown { None } else { Some(trained.tokenizer()?) };
    let beside = HfExtras {
        context,
        dtype: if dtype == DType::BF16 { "bfloat16" } else { "float32" },
        end_token: tokenizer.as_ref().map(|tokenizer| tokenizer.eos()),
    };
    // What was only imported goes out as it came; what was trained begins and ends texts with the tokens that it was trained with.
    let own = tokenizer.as_ref().filter(|_| checkpoint.state["imported"].is_null());
    let kept = match own {
        Some(tokenizer) => {
            let template = template_bos(tokenizer.source().unwrap_or_default());
            let kept = kept.begun_by(tokenizer.bos_text().as_deref(), template.as_deref());
            kept.ended_by(tokenizer.eos(), eos_text(&trained, tokenizer)?.as_deref())
        }
        None => kept,
    };
    // A model that was trained on chats ends its answers with the token of its template.
    let of_chat = own.filter(|_| config.data.format == DataFormat::Chat);
    let answered = match of_chat {
        Some(tokenizer) => trained.chat(tokenizer)?.end_of_turn(tokenizer)?,
        None => None,
    };
    let kept = answered.into_iter().fold(kept, |kept, end| kept.ended_by(end, None));
    let mut described = describe(config, beside, from)?;
    kept.put_ids(&mut described);
    if let Some(end) = answered {
        put_eos_id(&mut described, end);
    }
    if let Some(bos) = own.and_then(|tokenizer| tokenizer.bos()) {
        described["bos_token_id"] = json!(bos);
    }

    let model = &config.model;
    let copy = |copy: TensorCopy| {
        let TensorCopy { mut shape, transposed, interleaved, .. } = copy;
        let turned = hf::is_transposed(model, &copy.to);
        if let (true, [.., a, b]) = (turned, &mut shape[..]) {
            std::mem::swap(a, b);
        }
        let mixed = interleaved == Interleaved::InSource;
        let interleaved = Interleaved::between(mixed, hf::is_interleaved(model, &copy.to));
        let exact = hf::stays_f32(&copy.to);
        TensorCopy { shape, transposed: transposed != turned, interleaved, exact, ..copy }
    };
    let added = if config.lora.rank.is_some() { added(config, checkpoint)? } else { BTreeMap::new() };
    let (base, copies) = trained.model_source()?;
    let mut copies: Vec<TensorCopy> = copies.into_iter().map(copy).collect();
    for (to, of) in hf::further_copies(model) {
        let shared = copies.iter().find(|copy| copy.to == of).cloned();
        copies.extend(shared.map(|copy| TensorCopy { to, ..copy }));
    }
    base.check(&copies, "run.toml is not of this checkpoint: name the checkpoint's own folder")?;
    let source = if added.is_empty() { base } else { TensorSource::Sum { base: &base, added: &added } };

    let new = NewFolder::begin(out)?;
    let pretty = |value: &Value| format!("{value:#}\n").into_bytes();
    new.write(CONFIG, &pretty(&described))?;
    match (kept.file(GENERATION), &described["eos_token_id"]) {
        (Some(text), _) => new.write(GENERATION, text.as_bytes())?,
        (None, Value::Null) => {}
        (None, end) => new.write(GENERATION, &pretty(&json!({ "eos_token_id": end })))?,
    }
    if let Some(tokenizer) = &tokenizer {
        for (name, bytes) in tokenizer_files(&trained, tokenizer, &kept, context)? {
            new.write(name, &bytes)?;
        }
    }
    for (name, text) in kept.others() {
        new.write(name, text.as_bytes())?;
    }
    lockstep_checkpoint::export(new.contents(), (source, "model"), &copies, dtype, options.shard_bytes, progress)?;
    new.publish()?;
    let parameters = copies.iter().map(|copy| copy.shape.iter().product::<usize>() as u64).sum();
    let mut warnings = trained.warnings.clone();
    warnings.extend(quantised.map(|how| {
        let to = if dtype == DType::BF16 { "bf16" } else { "f32" };
        format!("the model came with weights in {}, and goes out in {to}", how.name())
    }));
    Ok(Exported { step: checkpoint.step, parameters, dtype, warnings })
}

/// Why the model of a config cannot be exported, if it cannot.
pub fn export_problem(config: &Config) -> Option<String> {
    let beside = HfExtras { context: config.train.seq, dtype: "float32", end_token: None };
    let problem = describe(config, beside, Path::new("")).err()?.to_string();
    Some(problem.trim_start_matches(": ").to_owned())
}

/// The `config.json` of a model, which must read back as the same model.
fn describe(config: &Config, beside: HfExtras, from: &Path) -> Result<Value> {
    let described = hf::write_config(&config.model, beside).map_err(|e| unfit(from, e.problem, e.hint))?;
    let again = hf::read_config(&described).map_err(|e| unfit(from, e.problem, e.hint))?;
    let modules = again.further;
    let mut again = Config::parse(&again.with_further(modules).to_toml(), CONFIG, &[])?;
    // Patterns that mean the same are the same.
    let mut ours = config.clone();
    (ours.model, again.model) = (ours.model.with_short_patterns(), again.model.with_short_patterns());
    let differences = ours.differences(&again);
    let lost = differences.iter().filter(|d| hf::matters(&config.model, d.path));
    let lost: Vec<String> = lost.map(|d| format!("{} = {}", d.path, d.ours)).collect();
    if lost.is_empty() {
        return Ok(described);
    }
    let cause = format!("Hugging Face's {} has no {}", config.model.architecture, lost.join(", "));
    Err(unfit(from, cause, "no folder can be exported that computes what this model computes".into()).into())
}

/// The EOS token as files of a tokenizer spell it. A chat template writes it by that name: to it, it is what it was in training.
fn eos_text(trained: &Trained, tokenizer: &RunTokenizer) -> Result<Option<String>> {
    let is_chat = trained.config.data.format == DataFormat::Chat;
    let chat = if is_chat { trained.chat_spec()? } else { None };
    let of_chat = chat.and_then(|mut chat| chat.tokens.remove("eos_token"));
    Ok(of_chat.or_else(|| tokenizer.token(tokenizer.eos())))
}

/// The files of a run's tokenizer. One that came with a `tokenizer_config.json` keeps it.
fn tokenizer_files(
    trained: &Trained,
    tokenizer: &RunTokenizer,
    kept: &Kept,
    context: usize,
) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let mut described = json!({ "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, "clean_up_tokenization_spaces": false });
    let (Some(path), Some(bytes)) = (trained.config.tokenizer_path(), tokenizer.source()) else {
        let tokenizer = byte_tokenizer::tokenizer_json();
        return Ok(vec![
            (TOKENIZER, format!("{tokenizer:#}\n").into_bytes()),
            (TOKENIZER_CONFIG, format!("{described:#}\n").into_bytes()),
        ]);
    };
    let folder = path.parent().unwrap_or(Path::new("."));
    let eos = eos_text(trained, tokenizer)?;
    let (bos, template) = (tokenizer.bos_text(), template_bos(bytes));
    let beside = match kept.file(TOKENIZER_CONFIG) {
        Some(text) => text.as_bytes().to_vec(),
        None if folder.join(TOKENIZER_CONFIG).exists() => {
            let bytes = WeightsFolder::bytes(folder, TOKENIZER_CONFIG, 16 << 20)?;
            let mut file: Value = serde_json::from_slice(&bytes).unwrap_or_default();
            let changed = file.is_object()
                && [
                    eos.as_ref().is_some_and(|eos| put_eos_text(&mut file, eos)),
                    put_bos_text(&mut file, bos.as_deref(), template.as_deref()),
                ]
                .contains(&true);
            if changed { format!("{file:#}\n").into_bytes() } else { bytes }
        }
        None => {
            described["eos_token"] = json!(eos);
            put_bos_text(&mut described, bos.as_deref(), template.as_deref());
            format!("{described:#}\n").into_bytes()
        }
    };
    Ok(vec![(TOKENIZER, bytes.to_vec()), (TOKENIZER_CONFIG, beside)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Hint;

    #[test]
    fn a_model_that_no_config_json_can_describe_is_refused() {
        let text = "[model]\narchitecture = \"qwen2\"\nvocab_size = 64\nlayers = 2\ndim = 32\nheads = 4\nffn = 48\nattention = \"naive\"\n";
        let mut config = Config::parse(text, "run.toml", &[]).unwrap();
        let beside = HfExtras { context: 64, dtype: "float32", end_token: None };
        assert!(describe(&config, beside, Path::new("run")).is_ok());
        config.model.sliding_window = Some(8);
        let error = describe(&config, beside, Path::new("run")).unwrap_err().with_hint();
        assert!(error.starts_with("run: Hugging Face's qwen2 has no model.sliding_window = 8\nhint: "), "{error}");
        // Heads of another width than theirs, of a class that has no field for it.
        let text = text.replace("\"qwen2\"", "\"olmo2\"");
        let exported = |keys: &str| {
            let config = Config::parse(&format!("{text}{keys}"), "run.toml", &[]).unwrap();
            describe(&config, beside, Path::new("run")).map_err(|error| error.with_hint())
        };
        let error = exported("head_dim = 6\n").unwrap_err();
        assert!(error.starts_with("run: Hugging Face's olmo2 has no model.head_dim = 6"), "{error}");
        // Layers that are full anyway may be said to be.
        assert!(exported("layer_types = [\"full\"]\n").is_ok());
    }
}
