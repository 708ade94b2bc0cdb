//! `lockstep data inspect`.

use super::statistics;
use crate::failure::{Failure, Result};
use crate::options::default_run_dir;
use crate::progress::Progress;
use crate::shell::shell_quoted;
use crate::{ConfigArgs, Format};
use lockstep_config::Config;
use lockstep_data::Sampler;
use lockstep_infer::{HubNeed, RunCorpus, RunData, data_folder};
use lockstep_ir::units::thousands;
use lockstep_train::left_out;
use serde::Serialize;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// A run directory, a folder of prepared data, or a config file.
    #[arg(value_name = "RUN_OR_DATA")]
    path: PathBuf,
    /// Show a sample of the run as text, counted from 0 in training order.
    #[arg(long, value_name = "N")]
    sample: Option<u64>,
    /// Name the documents of a training step, counted from 1 as in metrics.jsonl.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    step: Option<u64>,
    /// Show the token ids of that sample or step too: those of a sequence and the target of its last.
    #[arg(long)]
    tokens: bool,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: Args) -> Result<()> {
    if args.tokens && args.sample.is_none() && args.step.is_none() {
        return Err(Failure::request(
            "--tokens shows the tokens of a sample or a step",
            "name one: --sample 0, or --step 1",
        ));
    }
    let Inspected { config, run_dir, folder, data } = open(&args.path)?;
    crate::warn(&data.warnings()?);
    let statistics = statistics::of(&folder, data.corpora());
    let order = match (&config, args.sample.is_some() || args.step.is_some()) {
        (_, false) => None,
        (Some(config), true) => Some(Order::new(config, &data)?),
        (None, true) => {
            return Err(Failure::request(
                format!("{}: samples and steps are those of a run, and there is no run.toml here", args.path.display()),
                "give the run directory, or the config file",
            ));
        }
    };
    let sample = order.as_ref().zip(args.sample).map(|(order, index)| order.sample(index, true, args.tokens));
    let step = match (&order, args.step, &config) {
        (Some(order), Some(step), Some(config)) => {
            let batch = config.batches().at(step - 1);
            let first = batch.first_sample + left_out(&run_dir, step - 1)?;
            let samples = first..first + batch.sequences as u64;
            Some(StepSamples { step, samples: samples.map(|index| order.sample(index, false, args.tokens)).collect() })
        }
        _ => None,
    };
    data.require_read()?;
    let value = || {
        let mut json = serde_json::json!(statistics);
        json["sample"] = serde_json::json!(sample);
        json["step"] = serde_json::json!(step);
        json
    };
    let text = || {
        let mut text = statistics::as_text(&statistics);
        if let Some(sample) = &sample {
            let own = printable(sample.text.as_deref().unwrap_or_default());
            text += &format!("\n{}\n{own}\n", sample.as_text());
        }
        if let Some(StepSamples { step, samples }) = &step {
            text += &format!("\nstep {step}\n");
            samples.iter().for_each(|sample| text += &sample.as_text());
        }
        text
    };
    args.format.print(value, text)
}

/// Data, and what is known of them.
pub(super) struct Inspected {
    config: Option<Config>,
    /// Whose roll-backs have left samples out.
    run_dir: PathBuf,
    folder: PathBuf,
    pub(super) data: RunData,
}

/// Finds the data that a path stands for.
pub(super) fn open(path: &Path) -> Result<Inspected> {
    let missing = |folder: &Path, config: Option<&Path>| {
        let hint = match config {
            Some(file) => {
                format!("prepare them first: lockstep data prepare {}", shell_quoted(&file.display().to_string()))
            }
            None => "give a run directory or a folder that `lockstep data prepare` wrote".to_owned(),
        };
        Failure::request(format!("{}: no prepared data here", folder.display()), hint)
    };
    let (config, run_dir) = match path.is_dir() {
        false => (Some(path.to_owned()), default_run_dir(path)),
        true => (Some(path.join("run.toml")).filter(|file| file.exists()), path.to_owned()),
    };
    if let Some(config) = config {
        let file = (!path.is_dir()).then_some(path);
        let args = ConfigArgs { config, set: Vec::new() };
        let (config, _) = args.open(HubNeed::Resume, None, Progress::new(0))?;
        let folder = data_folder(&config, &run_dir);
        let data = RunData::open(&config, &folder)?.ok_or_else(|| missing(&folder, file))?;
        return Ok(Inspected { config: Some(config), run_dir, folder, data });
    }
    for folder in [path.to_owned(), path.join("data")] {
        if let Some(data) = RunData::find(&folder)? {
            return Ok(Inspected { config: None, run_dir, folder, data });
        }
    }
    Err(missing(path, None))
}

/// The samples of a run, and what their documents are called.
struct Order<'a> {
    sampler: Sampler,
    seq: usize,
    corpora: &'a [RunCorpus],
    sources: Vec<Vec<PathBuf>>,
    tokenizers: Vec<lockstep_data::Tokenizer>,
}

/// A sample, as `--format json` has it.
#[derive(Serialize)]
struct Sample {
    index: u64,
    corpus: String,
    epoch: u64,
    /// The first token's place in the corpus.
    offset: u64,
    documents: Vec<SampleDocument>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// Those of the sequence, and the target of its last.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<Vec<u32>>,
}

/// A document of a sample.
#[derive(Serialize)]
struct SampleDocument {
    file: String,
    /// The line or row, from 1; none where the file is one document.
    record: Option<u64>,
    /// Where it starts in the sample.
    start: u64,
    /// Whether it began before the sample.
    continued: bool,
    /// Its first tokens that are a prompt, which does not count in the loss.
    #[serde(skip_serializing_if = "is_zero")]
    prompt: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

#[derive(Serialize)]
struct StepSamples {
    step: u64,
    samples: Vec<Sample>,
}

impl<'a> Order<'a> {
    fn new(config: &Config, data: &'a RunData) -> Result<Self> {
        let corpora = data.corpora();
        let sources = corpora.iter().map(|corpus| corpus.data.sources()).collect::<Result<_, _>>()?;
        let tokenizers = corpora.iter().map(|corpus| corpus.data.tokenizer()).collect::<Result<_, _>>()?;
        Ok(Order { sampler: data.train(config)?, seq: config.train.seq, corpora, sources, tokenizers })
    }

    fn sample(&self, index: u64, with_text: bool, with_tokens: bool) -> Sample {
        let place = self.sampler.locate(index);
        let document = |document: &lockstep_data::Document| {
            let path = self.sources[place.corpus].get(document.origin.file as usize);
            SampleDocument {
                file: path.map_or_else(|| "unknown".to_owned(), |path| path.display().to_string()),
                record: Some(document.origin.record).filter(|&record| record > 0),
                start: document.start.saturating_sub(place.offset),
                continued: document.continued || document.start < place.offset,
                prompt: document.prompt,
            }
        };
        // A sample's last target is the token after it.
        let mut tokens = vec![0; self.seq + 1];
        let (stream, offset) = self.sampler.source(index);
        stream.copy(offset, &mut tokens);
        let text = with_text.then(|| self.tokenizers[place.corpus].decode(&tokens[..self.seq]));
        Sample {
            index,
            corpus: self.corpora[place.corpus].name.clone(),
            epoch: place.epoch,
            offset: place.offset,
            documents: self.sampler.documents(index).iter().map(document).collect(),
            text,
            tokens: with_tokens.then_some(tokens),
        }
    }
}

impl Sample {
    fn as_text(&self) -> String {
        let corpus = if self.corpus.is_empty() { String::new() } else { format!(" of {}", self.corpus) };
        let (epoch, offset) = (self.epoch, thousands(self.offset));
        let mut text = format!("sample {}{corpus}: epoch {epoch}, tokens from {offset} on\n", self.index);
        for document in &self.documents {
            let record = document.record.map_or(String::new(), |record| format!(":{record}"));
            let begun = if document.continued { " (began earlier)" } else { "" };
            let prompt = match document.prompt {
                0 => String::new(),
                1 => ", prompt of 1 token".to_owned(),
                tokens => format!(", prompt of {} tokens", thousands(tokens)),
            };
            text.push_str(&format!("  {:>8}  {}{record}{begun}{prompt}\n", document.start, printable(&document.file)));
        }
        if let Some(tokens) = &self.tokens {
            let ids: Vec<String> = tokens.iter().map(u32::to_string).collect();
            text.push_str(&format!("  tokens {}\n", ids.join(" ")));
        }
        text
    }
}

/// Text with nothing in it that a terminal would act on.
fn printable(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c,
        '\0' => '\u{2400}',
        c if c.is_control() => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    text.chars().map(shown).collect()
}
