//! `lockstep eval --tasks`.

use super::Args;
use crate::failure::{Failure, Result};
use crate::progress::{Progress, texts};
use crate::table::table;
use lockstep_host::Devices;
use lockstep_infer::{
    EvaluateProgress, EvaluationShape, GenerationEvaluation, GenerationReport, TaskEvaluation, TaskReport, Tasks,
    Trained, evaluate_generation, evaluate_tasks,
};
use lockstep_ir::units;
use serde::Serialize;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

/// What tasks of each kind gave, where there are any.
struct Found {
    scored: Option<TaskEvaluation>,
    generated: Option<GenerationEvaluation>,
}

pub fn run(args: &Args, trained: &Trained, (devices, shape): (&Devices, EvaluationShape)) -> Result<ExitCode> {
    let tasks = Tasks::open(&args.tasks, args.limit.map_or(0, |limit| limit as usize))?;
    let mut progress = Progress::new(0);
    let first = devices.group().is_first();
    let mut show = |event: EvaluateProgress<'_>| match event {
        _ if !first => {}
        EvaluateProgress::Scoring { done, total } => progress.work("scoring", done, total, texts),
        EvaluateProgress::Answering { done, total } => progress.work("answering", done, total, texts),
        EvaluateProgress::Warning(_) | EvaluateProgress::Preparing(_) | EvaluateProgress::Evaluating { .. } => {}
    };
    let mut evaluate = || {
        let scored = match &tasks.scored[..] {
            [] => None,
            files => Some(evaluate_tasks(devices, trained, files, shape, &mut show)?),
        };
        let generated = match &tasks.generated[..] {
            [] => None,
            tasks => Some(evaluate_generation(devices, trained, tasks, shape, &mut show)?),
        };
        Ok(Found { scored, generated })
    };
    let result: lockstep_infer::Result<Found> = evaluate();
    progress.clear();
    let found = result?;
    if !first {
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(path) = &args.log_samples {
        let hint = "give a file in a folder that is there and can be written";
        let refuse = |e| Failure::request(format!("cannot write {}: {e}", path.display()), hint);
        write_samples(path, &found).map_err(refuse)?;
    }
    args.format.print(|| found.as_json(trained), || found.as_text(trained))?;
    Ok(ExitCode::SUCCESS)
}

impl Found {
    fn scored(&self) -> &[TaskReport] {
        self.scored.as_ref().map_or(&[], |scored| &scored.tasks)
    }

    fn generated(&self) -> &[GenerationReport] {
        self.generated.as_ref().map_or(&[], |generated| &generated.tasks)
    }

    /// Most tokens of a text, and the most bytes that were allocated at once.
    fn size(&self) -> (usize, u64) {
        let scored = self.scored.as_ref().map(|scored| (scored.seq, scored.arena_bytes));
        let generated = self.generated.as_ref().map(|generated| (generated.seq, generated.arena_bytes));
        let both = scored.into_iter().chain(generated);
        both.fold((0, 0), |(seq, bytes), (s, b)| (seq.max(s), bytes.max(b)))
    }

    fn as_text(&self, trained: &Trained) -> String {
        let mut text = String::new();
        if self.scored.is_some() {
            let rows: Vec<_> = self.scored().iter().map(row).collect();
            let columns = ["task", "items", "acc", "±", "acc_norm", "±", "~acc_bytes", "perplexity"];
            text += &(table(&columns, &rows) + "\n");
        }
        if self.generated.is_some() {
            let rows: Vec<_> = self.generated().iter().map(generated_row).collect();
            text += &(table(&["task", "items", "exact_match", "±", "unmatched"], &rows) + "\n");
        }
        let ((seq, bytes), model) = (self.size(), trained.path().display());
        text + &format!("up to {seq} tokens of each text; model {model}, {} in memory\n", units::bytes(bytes))
    }

    fn as_json(&self, trained: &Trained) -> Value {
        let scored = |task: &TaskReport| {
            let scores = task.scores();
            let mut object = json!(scores);
            object["name"] = json!(task.name);
            object["items"] = json!(task.items.len());
            let shares = [("acc", scores.acc), ("acc_norm", scores.acc_norm), ("acc_bytes", scores.acc_bytes)];
            for (name, share) in shares {
                if let Some(share) = share {
                    object[format!("{name}_stderr")] = json!(task.standard_error(share));
                }
            }
            object
        };
        let generated = |task: &GenerationReport| {
            json!({
                "name": task.name,
                "items": task.items.len(),
                "exact_match": task.exact_match(),
                "exact_match_stderr": task.standard_error(),
                "unmatched": task.unmatched(),
            })
        };
        let (seq, arena_bytes) = self.size();
        let (read, written) = self.generated.as_ref().map_or((0, 0), |generated| generated.tokens);
        json!({
            "tasks": self.scored().iter().map(scored).chain(self.generated().iter().map(generated)).collect::<Vec<_>>(),
            "seq": seq,
            "tokens_read": self.scored.as_ref().map_or(0, |scored| scored.tokens_read) + read,
            "tokens_written": written,
            "arena_bytes": arena_bytes,
            "checkpoint": trained.path(),
            "step": trained.step(),
        })
    }
}

fn write_samples(path: &Path, found: &Found) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    for task in found.scored() {
        write_items(&mut file, &task.name, &task.items)?;
    }
    for task in found.generated() {
        write_items(&mut file, &task.name, &task.items)?;
    }
    file.flush()
}

fn write_items(file: &mut dyn Write, task: &str, items: &[impl Serialize]) -> std::io::Result<()> {
    for (index, item) in items.iter().enumerate() {
        let mut line = json!(item);
        line["task"] = json!(task);
        line["item"] = json!(index);
        writeln!(file, "{line}")?;
    }
    Ok(())
}

fn generated_row(task: &GenerationReport) -> Vec<String> {
    let shares = [task.exact_match(), task.standard_error()].map(|share| format!("{share:.4}"));
    let [share, error] = shares;
    vec![task.name.clone(), task.items.len().to_string(), share, error, task.unmatched().to_string()]
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
