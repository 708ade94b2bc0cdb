//! Evaluation tasks: questions with choices, and texts with a word to complete, scored by log-likelihood as
//! lm-evaluation-harness scores them.

mod read;
mod score;

pub use read::TaskFile;
pub use score::{ItemScore, TaskReport, TaskScores};

use crate::evaluate::Scorer;
use crate::{Devices, EvaluateProgress, Generator, TrainError, Trained};
pub(crate) use read::Request;

/// How a model does on tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskEvaluation {
    /// Each task, in the order in which they were given.
    pub tasks: Vec<TaskReport>,
    /// Most tokens that a prediction has seen.
    pub seq: usize,
    /// Bytes allocated.
    pub arena_bytes: u64,
}

/// Scores a model on tasks, whose texts are cut from the left to `seq` tokens (by default those of its training).
pub fn evaluate_tasks(
    devices: &Devices,
    trained: &Trained,
    files: &[TaskFile],
    seq: Option<usize>,
    show: &mut dyn FnMut(EvaluateProgress<'_>),
) -> Result<TaskEvaluation, TrainError> {
    let config = &trained.config;
    let tokenizer = trained.tokenizer()?;
    let most = seq.unwrap_or(config.train.seq).max(1);
    lockstep_plan::check_positions(config, most)?;
    let requests = TaskRequests::new(files, &tokenizer, most)?;
    // Programs are made for the longest text, not for the longest that there could be.
    let seq = requests.longest();
    let mut scorer = Scorer::load(devices, trained, seq, requests.rows.len() as u64)?;
    let total = requests.rows.len() as u64;
    let mut losses = Vec::new();
    scorer.score(&requests.rows, &mut |loss| {
        losses.push(loss);
        show(EvaluateProgress::Scoring { done: losses.len() as u64, total });
    })?;
    let mut arena_bytes = scorer.arena_bytes();
    drop(scorer);
    let mut tasks = requests.reports(files, &losses)?;
    // Only where the likelihood leaves it open is it asked token by token whether the model would write the text itself.
    let open: Vec<_> = requests.open_completions(files, &losses);
    if !open.is_empty() {
        let mut generator = Generator::new(devices, config, seq, trained.weights())?;
        arena_bytes = arena_bytes.max(generator.arena_bytes());
        for (done, (task, item, row)) in open.iter().enumerate() {
            show(EvaluateProgress::Completing { done: done as u64, total: open.len() as u64 });
            let greedy = is_greedy(&mut generator, &requests.rows[*row])?;
            tasks[*task].decide(*item, greedy);
        }
    }
    Ok(TaskEvaluation { tasks, seq: most, arena_bytes })
}

/// Whether the most probable token is the right one at each place of a completion.
fn is_greedy(generator: &mut Generator, row: &Request) -> Result<bool, TrainError> {
    generator.forget();
    let (context, completion) = row.tokens.split_at(row.context);
    let mut next = context;
    for token in completion {
        let logits = generator.read(next)?;
        let best = logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |(best, most), (index, logit)| {
            if *logit > most { (index, *logit) } else { (best, most) }
        });
        if best.0 != *token as usize {
            return Ok(false);
        }
        next = std::slice::from_ref(token);
    }
    Ok(true)
}

/// The texts of tasks as tokens, of all items one behind the other.
pub(crate) struct TaskRequests {
    pub(crate) rows: Vec<Request>,
}

impl TaskRequests {
    /// Texts are cut from the left so that a model that reads `seq` tokens can predict their end.
    pub(crate) fn new(files: &[TaskFile], tokenizer: &crate::RunTokenizer, seq: usize) -> Result<Self, TrainError> {
        let mut rows = Vec::new();
        for file in files {
            file.requests(tokenizer, seq, &mut rows)?;
        }
        Ok(Self { rows })
    }

    /// Tokens that the longest one reads.
    fn longest(&self) -> usize {
        self.rows.iter().map(|row| row.tokens.len() - 1).max().unwrap_or(1).max(1)
    }

    /// What the losses of all texts say.
    pub(crate) fn reports(&self, files: &[TaskFile], losses: &[f64]) -> Result<Vec<TaskReport>, TrainError> {
        let mut left = losses;
        files.iter().map(|file| TaskReport::new(file, &mut left)).collect()
    }

    /// The completions of which the likelihood does not tell whether they are greedy: task, item and text. Where the whole has a
    /// probability above one half, so has every token, and no other can be more probable.
    fn open_completions(&self, files: &[TaskFile], losses: &[f64]) -> Vec<(usize, usize, usize)> {
        let mut row = 0;
        let mut open = Vec::new();
        for (task, file) in files.iter().enumerate() {
            for (item, question) in file.items.iter().enumerate() {
                if question.gold.is_none() && losses[row] >= std::f64::consts::LN_2 {
                    open.push((task, item, row));
                }
                row += question.texts();
            }
        }
        open
    }
}
