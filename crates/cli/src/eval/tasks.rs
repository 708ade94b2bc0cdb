//! `lockstep eval --tasks`.

use super::Args;
use crate::failure::{Failure, Result};
use crate::progress::Progress;
use crate::table::table;
use lockstep_host::Devices;
use lockstep_infer::{EvaluateProgress, TaskEvaluation, TaskFile, TaskReport, Trained, evaluate_tasks};
use lockstep_ir::units;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

pub fn run(args: &Args, trained: &Trained) -> Result<()> {
    let files = TaskFile::open_all(&args.tasks, args.limit.map_or(0, |limit| limit as usize))?;
    let mut progress = Progress::new(0);
    let (devices, seq) = (Devices::of(&trained.config), args.seq.map(|seq| seq as usize));
    let result = evaluate_tasks(&devices, trained, &files, seq, &mut |event| match event {
        EvaluateProgress::Scoring { done, total } => progress.work("scoring", done, total, texts),
        EvaluateProgress::Warning(_) | EvaluateProgress::Preparing(_) | EvaluateProgress::Evaluating { .. } => {}
    });
    progress.clear();
    let evaluation = result?;
    if let Some(path) = &args.log_samples {
        let hint = "give a file in a folder that is there and can be written";
        let refuse = |e| Failure::request(format!("cannot write {}: {e}", path.display()), hint);
        write_samples(path, &evaluation).map_err(refuse)?;
    }
    let text = || {
        let rows: Vec<_> = evaluation.tasks.iter().map(row).collect();
        let table = table(&["task", "items", "acc", "±", "acc_norm", "±", "~acc_bytes", "perplexity"], &rows);
        let (arena, seq, model) = (units::bytes(evaluation.arena_bytes), evaluation.seq, trained.path().display());
        format!("{table}\nup to {seq} tokens of each text; model {model}, {arena} in memory\n")
    };
    args.format.print(|| as_json(&evaluation, trained), text)
}

/// `1 text`, `1.20K texts`.
pub(crate) fn texts(n: u64) -> String {
    format!("{} text{}", units::count(n), if n == 1 { "" } else { "s" })
}

fn write_samples(path: &Path, evaluation: &TaskEvaluation) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    for task in &evaluation.tasks {
        for (index, item) in task.items.iter().enumerate() {
            let mut line = json!(item);
            line["task"] = json!(task.name);
            line["item"] = json!(index);
            writeln!(file, "{line}")?;
        }
    }
    file.flush()
}

fn as_json(evaluation: &TaskEvaluation, trained: &Trained) -> Value {
    let task = |task: &TaskReport| {
        let scores = task.scores();
        let mut object = json!(scores);
        object["name"] = json!(task.name);
        object["items"] = json!(task.items.len());
        for (name, share) in [("acc", scores.acc), ("acc_norm", scores.acc_norm), ("acc_bytes", scores.acc_bytes)] {
            if let Some(share) = share {
                object[format!("{name}_stderr")] = json!(task.standard_error(share));
            }
        }
        object
    };
    json!({
        "tasks": evaluation.tasks.iter().map(task).collect::<Vec<_>>(),
        "seq": evaluation.seq,
        "tokens_read": evaluation.tokens_read,
        "arena_bytes": evaluation.arena_bytes,
        "checkpoint": trained.path(),
        "step": trained.step(),
    })
}

fn row(task: &TaskReport) -> Vec<String> {
    let scores = task.scores();
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.4}"));
    let error = |share: Option<f64>| number(share.map(|share| task.standard_error(share)));
    vec![
        task.name.clone(),
        task.items.len().to_string(),
        number(scores.acc),
        error(scores.acc),
        number(scores.acc_norm),
        error(scores.acc_norm),
        number(scores.acc_bytes),
        number(scores.perplexity),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_text_is_no_plural() {
        assert_eq!([0, 1, 2, 1200].map(texts), ["0 texts", "1 text", "2 texts", "1.20K texts"]);
    }
}
