//! Evaluation tasks: questions with choices, and texts with a word to complete, scored by log-likelihood as
//! lm-evaluation-harness scores them; and questions that a model answers in its own words.

mod generation;
mod read;
mod score;

pub use generation::{GenerationEvaluation, GenerationItem, GenerationReport, GenerationTask, evaluate_generation};
pub use read::TaskFile;
pub use score::{ItemScore, TaskReport, TaskScores};

use crate::feed::TextScore;
use crate::{EvaluateProgress, EvaluationShape, Result, TextScorer, Trained};
use lockstep_host::Devices;
use lockstep_plan::check_positions;
pub use read::Request;
use std::path::PathBuf;

/// How a model does on tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskEvaluation {
    /// Each task, in the order in which they were given.
    pub tasks: Vec<TaskReport>,
    /// Most tokens that a prediction has seen.
    pub seq: usize,
    /// Tokens that the model read: those of a question once for all its answers.
    pub tokens_read: u64,
    /// Bytes allocated.
    pub arena_bytes: u64,
}

/// Tasks of both kinds.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    /// Those that are scored by log-likelihood.
    pub scored: Vec<TaskFile>,
    /// Those whose questions are answered by generation.
    pub generated: Vec<GenerationTask>,
}

impl Tasks {
    /// Opens files of either kind, whose names must differ; of their items the first `most`, where that is not 0.
    pub fn open(paths: &[PathBuf], most: usize) -> Result<Self> {
        let mut tasks = Self::default();
        for path in paths {
            let text = read::text_of(path)?;
            let lines = read::lines_of(&text);
            match GenerationTask::is_one(&lines) {
                true => tasks.generated.push(GenerationTask::of(path, &lines, most)?),
                false => tasks.scored.push(TaskFile::of(path, &lines, most)?),
            }
        }
        read::require_names(paths)?;
        Ok(tasks)
    }
}

/// Scores a model on tasks, whose texts are cut from the left to the tokens of the shape.
pub fn evaluate_tasks(
    devices: &Devices,
    trained: &Trained,
    files: &[TaskFile],
    shape: EvaluationShape,
    show: &mut dyn FnMut(EvaluateProgress<'_>),
) -> Result<TaskEvaluation> {
    let config = &trained.config;
    let tokenizer = trained.tokenizer()?;
    let most = shape.seq_of(config);
    check_positions(config, most)?;
    let requests = TaskRequests::new(files, &tokenizer, most)?;
    let groups: Vec<usize> = files.iter().flat_map(|file| file.items.iter().map(|item| item.texts())).collect();
    let total = requests.rows.len() as u64;
    let mut scorer = TextScorer::new(devices, config, trained.weights(), (&requests.rows, &groups), shape.tp)?;
    let mut done = 0;
    let scores = scorer.score(&requests.rows, &groups, &mut || {
        done += 1;
        show(EvaluateProgress::Scoring { done, total });
    })?;
    Ok(TaskEvaluation {
        tasks: requests.reports(files, &scores)?,
        seq: most,
        tokens_read: scorer.tokens_read(),
        arena_bytes: scorer.arena_bytes(),
    })
}

/// The texts of tasks as tokens, of all items one after the other.
pub struct TaskRequests {
    /// Each text.
    pub rows: Vec<Request>,
}

impl TaskRequests {
    /// Texts are cut from the left so that a model that reads `seq` tokens can predict their end.
    pub fn new(files: &[TaskFile], tokenizer: &crate::RunTokenizer, seq: usize) -> Result<Self> {
        let mut rows = Vec::new();
        for file in files {
            file.requests(tokenizer, seq, &mut rows)?;
        }
        Ok(Self { rows })
    }

    /// What the scores of all texts say.
    pub fn reports(&self, files: &[TaskFile], scores: &[TextScore]) -> Result<Vec<TaskReport>> {
        let mut left = scores;
        files.iter().map(|file| TaskReport::new(file, &mut left)).collect()
    }
}
