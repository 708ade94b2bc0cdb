//! `lockstep eval`: the loss of a trained model on text, and its accuracy on tasks.

mod tasks;

use crate::Format;
use crate::failure::{Failure, Result};
use crate::options::{WeightArgs, text_paths};
use crate::processes::{self, ProcessPlace};
use crate::progress::Progress;
use crate::ranks::RankArgs;
use crate::table::table;
use lockstep_infer::{CorpusEvaluation, EvaluateProgress, Evaluation, EvaluationShape, Score, Text, Trained, evaluate};
use lockstep_ir::units;
use lockstep_ir::units::thousands;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    /// A run directory (its latest checkpoint is used), a checkpoint in one, a Hugging Face folder, or hf:OWNER/NAME for a model on the
    /// Hugging Face Hub.
    #[arg(value_name = "RUN|CHECKPOINT|HF_FOLDER")]
    from: PathBuf,
    /// Text files, folders to search for them, or hf:datasets/OWNER/NAME[/PATH] for a dataset on the Hugging Face Hub.
    #[arg(long, value_name = "PATH", num_args = 1.., required_unless_present_any = ["validation", "tasks"])]
    data: Vec<PathBuf>,
    /// The run's own validation text: the sequences that its validation reads.
    #[arg(long, conflicts_with = "data")]
    validation: bool,
    /// Tasks: files of JSON lines, {"query", "choices", "gold"} for multiple choice, {"query", "target"} for a text to complete,
    /// {"prompt", "answer"} for an answer that greedy decoding writes. Scored as lm-evaluation-harness does.
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["data", "validation"])]
    tasks: Vec<PathBuf>,
    /// Ask only the first N items of each task.
    #[arg(long, value_name = "N", requires = "tasks", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Write what every item gave to a file, as JSON lines.
    #[arg(long, value_name = "FILE", requires = "tasks")]
    log_samples: Option<PathBuf>,
    /// Tokens per sequence; train.seq of the run if not given. Longer texts of tasks, with the room of an answer, lose their beginning.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    seq: Option<u32>,
    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    ranks: RankArgs,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let Some(place) = args.ranks.place()? else { return of_rank(&args, None) };
    processes::end_with_launcher()?;
    processes::end_well(of_rank(&args, Some(&place)).map_err(|failure| failure.of_rank(place.rank)))
}

/// Evaluates as one of several processes, or alone. The first of them prints.
fn of_rank(args: &Args, place: Option<&ProcessPlace>) -> Result<ExitCode> {
    let trained = args.weights.open(&args.from)?;
    if let Some(code) = args.ranks.start(&trained.config, place)? {
        return Ok(code);
    }
    let devices = args.ranks.devices(&trained.config, place)?;
    let first = devices.group().is_first();
    let shape = EvaluationShape { seq: args.seq.map(|seq| seq as usize), tp: args.ranks.tp() };
    if !args.tasks.is_empty() {
        return tasks::run(args, &trained, (&devices, shape));
    }
    let text = match args.validation {
        true => Text::Validation,
        false => Text::Paths(text_paths(&args.data, &trained.config.data.extensions)?),
    };
    let mut progress = Progress::new(0);
    let result = evaluate(&devices, &trained, &text, shape, &mut |event| match event {
        _ if !first => {}
        EvaluateProgress::Warning(text) => crate::warn(&[text.to_owned()]),
        EvaluateProgress::Scoring { .. } | EvaluateProgress::Answering { .. } => {}
        EvaluateProgress::Preparing(p) => progress.work("reading text", p.bytes_done, p.bytes_total, units::bytes),
        EvaluateProgress::Evaluating { done, total } => {
            progress.work("evaluating", done, total, |n| format!("{} tokens", units::count(n)));
        }
    });
    progress.clear();
    let evaluation = result?;
    if first {
        let value = || {
            let mut object = json!(evaluation);
            object["checkpoint"] = json!(trained.path());
            object["step"] = json!(trained.step());
            object
        };
        args.format.print(value, || as_text(&trained, &evaluation))?;
    }
    if !evaluation.score.loss.is_finite() {
        let hint = "the model has diverged: use an earlier checkpoint";
        return Err(Failure::run(format!("the loss is {}, no number", evaluation.score.loss), hint));
    }
    Ok(ExitCode::SUCCESS)
}

fn as_text(trained: &Trained, e: &Evaluation) -> String {
    let Score { tokens, bytes, loss, perplexity, bits_per_byte } = e.score;
    let text = format!(
        "loss           {loss:.4} nats per token\nperplexity     {perplexity:.4}\nbits per byte  {bits_per_byte:.4}\n\
         text           {} tokens ({} bytes), in sequences of {}\nmodel          {}, {} in memory\n",
        thousands(tokens),
        thousands(bytes),
        e.seq,
        trained.path().display(),
        units::bytes(e.arena_bytes)
    );
    if e.corpora.is_empty() {
        return text;
    }
    let row = |corpus: &CorpusEvaluation| {
        let Score { tokens, bytes, loss, perplexity, bits_per_byte } = corpus.score;
        let numbers = [loss, perplexity, bits_per_byte].map(|x| format!("{x:.4}"));
        let counts = [thousands(tokens), thousands(bytes)];
        [&[corpus.name.clone()][..], &numbers, &counts].concat()
    };
    let rows: Vec<_> = e.corpora.iter().map(row).collect();
    text + "\n" + &table(&["corpus", "loss", "perplexity", "bits per byte", "tokens", "bytes"], &rows)
}
