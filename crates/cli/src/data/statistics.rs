//! What prepared data hold, in numbers.

use crate::table::table;
use lockstep_data::{SplitSummary, TokenizerSpec};
use lockstep_infer::RunCorpus;
use lockstep_ir::units::{self, thousands};
use serde::Serialize;
use std::path::Path;

/// The statistics of a folder of prepared data; the fields of `--format json`.
#[derive(Debug, Serialize)]
pub struct Statistics {
    folder: String,
    tokenizer: String,
    vocabulary: u32,
    eos_token: u32,
    /// The name that it had before.
    separator: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    bos_token: Option<u32>,
    corpora: Vec<CorpusStatistics>,
}

#[derive(Debug, Serialize)]
struct CorpusStatistics {
    name: String,
    weight: f64,
    /// Other weights later in the run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    schedule: Vec<ScheduledWeight>,
    files: u64,
    empty_files: u64,
    train: SplitStatistics,
    validation: Option<SplitStatistics>,
}

#[derive(Debug, Serialize)]
struct ScheduledWeight {
    /// Tokens of the run after which it counts.
    tokens: u64,
    weight: f64,
}

#[derive(Debug, Serialize)]
struct SplitStatistics {
    documents: u64,
    tokens: u64,
    bytes: u64,
    tokens_per_document: f64,
    bytes_per_token: f64,
    shards: u64,
}

/// Counts the corpora of a folder.
pub fn of(folder: &Path, corpora: &[RunCorpus]) -> Statistics {
    let tokenizer = corpora.first().map(|corpus| match &corpus.data.spec().tokenizer {
        TokenizerSpec::Bytes => "bytes".to_owned(),
        TokenizerSpec::File { path, .. } => path.display().to_string(),
    });
    let largest = |of: fn(&RunCorpus) -> u32| corpora.iter().map(of).max().unwrap_or(0);
    let eos_token = largest(|corpus| corpus.data.eos());
    Statistics {
        folder: folder.display().to_string(),
        tokenizer: tokenizer.unwrap_or_default(),
        vocabulary: largest(|corpus| corpus.data.vocabulary()),
        eos_token,
        separator: eos_token,
        bos_token: corpora.iter().find_map(|corpus| corpus.data.bos()),
        corpora: corpora.iter().map(of_corpus).collect(),
    }
}

fn of_corpus(corpus: &RunCorpus) -> CorpusStatistics {
    CorpusStatistics {
        name: corpus.name.clone(),
        weight: corpus.weight,
        schedule: corpus.schedule.iter().map(|&(tokens, weight)| ScheduledWeight { tokens, weight }).collect(),
        files: corpus.data.files(),
        empty_files: corpus.data.empty_files(),
        train: of_split(corpus.data.train_summary()),
        validation: corpus.data.validation_summary().map(of_split),
    }
}

fn of_split(split: &SplitSummary) -> SplitStatistics {
    let ratio = |a: u64, b: u64| a as f64 / b.max(1) as f64;
    SplitStatistics {
        documents: split.documents,
        tokens: split.tokens,
        bytes: split.bytes,
        tokens_per_document: ratio(split.tokens, split.documents),
        bytes_per_token: ratio(split.bytes, split.tokens),
        shards: split.shards.len() as u64,
    }
}

/// The share of each corpus after this many tokens.
fn mixture(corpora: &[CorpusStatistics], tokens: u64) -> String {
    let weight = |corpus: &CorpusStatistics| {
        let later = corpus.schedule.iter().rev().find(|later| later.tokens <= tokens);
        later.map_or(corpus.weight, |later| later.weight)
    };
    let total: f64 = corpora.iter().map(weight).sum();
    let share = |corpus: &CorpusStatistics| format!("{} {:.1}%", corpus.name, 100.0 * weight(corpus) / total);
    corpora.iter().map(share).collect::<Vec<_>>().join(", ")
}

/// For people.
pub fn as_text(statistics: &Statistics) -> String {
    let mut rows = Vec::new();
    for corpus in &statistics.corpora {
        let splits = [("train", Some(&corpus.train)), ("validation", corpus.validation.as_ref())];
        for (name, split) in splits.into_iter().filter_map(|(name, split)| Some((name, split?))) {
            rows.push(vec![
                [corpus.name.as_str(), name].join(" ").trim().to_owned(),
                thousands(split.documents),
                thousands(split.tokens),
                known(split, units::bytes(split.bytes)),
                format!("{:.1}", split.tokens_per_document),
                known(split, format!("{:.2}", split.bytes_per_token)),
                thousands(split.shards),
            ]);
        }
    }
    // Of tokens that others made the text is not known.
    fn known(split: &SplitStatistics, text: String) -> String {
        if split.bytes > 0 { text } else { "–".to_owned() }
    }
    let header = ["split", "documents", "tokens", "text", "tokens/document", "bytes/token", "shards"];
    let mut starts: Vec<u64> =
        statistics.corpora.iter().flat_map(|corpus| &corpus.schedule).map(|later| later.tokens).collect();
    starts.sort_unstable();
    starts.dedup();
    let mut shares = String::new();
    if statistics.corpora.iter().any(|corpus| !corpus.name.is_empty()) {
        shares = format!("mixture: {}\n", mixture(&statistics.corpora, 0));
        for tokens in starts {
            shares += &format!("  from {} tokens on: {}\n", units::count(tokens), mixture(&statistics.corpora, tokens));
        }
    }
    let bos = statistics.bos_token.map_or(String::new(), |bos| format!(", BOS token {bos}"));
    let Statistics { folder, tokenizer, eos_token, .. } = statistics;
    let (vocabulary, table) = (thousands(statistics.vocabulary.into()), table(&header, &rows));
    format!("{folder}\ntokenizer {tokenizer}, vocabulary {vocabulary}, EOS token {eos_token}{bos}\n{shares}{table}")
}
