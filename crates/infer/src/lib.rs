//! A trained model and what it is for: text and its loss.
//!
//! This crate owns models on disk (run directories, checkpoints, Hugging Face folders, and names on the hub where a config has them), their tokenizers and data, how weights and
//! sequences get into programs, generation, evaluation and tasks. It knows nothing of training steps.
#![forbid(unsafe_code)]

mod batch;
mod chat;
mod data;
mod error;
mod evaluate;
pub mod feed;
mod generate;
mod hf;
mod hub;
mod inherited;
mod initial;
mod pages;
mod prompts;
mod sampling;
mod scorer;
pub mod state;
mod tasks;
mod text;
mod trained;

pub use batch::{BatchCounts, Ended, TextBatch, TextRequest, Written};
pub use data::{Existing, RunCorpus, RunData, data_folder, limit_buckets, prepare_data, way};
pub use error::{InferError, Result};
pub use evaluate::{CorpusEvaluation, EvaluateProgress, Evaluation, EvaluationShape, Score, Text, evaluate};
pub use generate::{Generated, Generator, Stop, generate};
pub use hf::{ATTACHMENT, AdapterFolder, ExportOptions, Exported, Imported, Kept, export, export_problem, import};
pub use hub::{HubNeed, HubOpener, ShowHub, model_folder, text_paths};
pub use inherited::inherited;
pub use initial::{BASE, InitialWeights};
pub use prompts::{PromptOptions, PromptProgress, PromptSummary, write_prompts};
pub use sampling::Sampling;
pub use scorer::TextScorer;
pub use state::{Part, Weights, parts};
pub use tasks::{
    GenerationEvaluation, GenerationItem, GenerationReport, GenerationTask, ItemScore, Request, TaskEvaluation,
    TaskFile, TaskReport, TaskRequests, TaskScores, Tasks, evaluate_generation, evaluate_tasks,
};
pub use text::{RunTokenizer, TextStream, require_vocabulary, tokenizer_spec, unused_vocabulary};
pub use trained::{TOKENIZER, Trained};
