//! From log-likelihoods to accuracies.

use super::read::TaskFile;
use crate::feed::TextScore;
use crate::{InferError, Result};
use serde::{Deserialize, Serialize};

/// What a task gives: means over its items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskScores {
    /// Share of items whose right choice is the most probable one, or whose completion greedy decoding writes. Runs of older versions
    /// have none of completions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acc: Option<f64>,
    /// The same, with log-likelihoods divided by the characters of the choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acc_norm: Option<f64>,
    /// The same, divided by its bytes in UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acc_bytes: Option<f64>,
    /// Of completions: the exponential of the mean negative log-likelihood.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
}

/// How a model does on one item.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ItemScore {
    /// Sum of the log-probabilities of the tokens of each choice, in nats.
    pub log_likelihoods: Vec<f64>,
    /// Index of the right choice; none for a completion.
    pub gold: Option<usize>,
    /// Whether the most probable choice is the right one, or greedy decoding writes the completion.
    pub acc: bool,
    /// As `acc`, per character; none for a completion.
    pub acc_norm: Option<bool>,
    /// As `acc`, per byte.
    pub acc_bytes: Option<bool>,
}

/// A task and its items.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskReport {
    /// Its name.
    pub name: String,
    /// Each item, in the order of the file.
    pub items: Vec<ItemScore>,
}

impl TaskReport {
    /// Takes the scores of the file's texts from the front of `scores`.
    pub(super) fn new(file: &TaskFile, scores: &mut &[TextScore]) -> Result<Self> {
        let mut items = Vec::new();
        for item in &file.items {
            let (own, rest) = scores.split_at(item.texts());
            *scores = rest;
            if own.iter().any(|text| !text.loss.is_finite()) {
                return Err(InferError::NotFinite { what: format!("{}: a log-likelihood is", file.name) });
            }
            let log_likelihoods: Vec<f64> = own.iter().map(|text| -text.loss).collect();
            let right = |length: fn(&str) -> usize| {
                let per = log_likelihoods.iter().zip(&item.choices).map(|(l, choice)| l / length(choice) as f64);
                item.gold.map(|gold| first_greatest(per) == gold)
            };
            let acc = right(|_| 1).unwrap_or(own[0].greedy);
            let (acc_norm, acc_bytes) = (right(|choice| choice.chars().count()), right(str::len));
            items.push(ItemScore { log_likelihoods, gold: item.gold, acc, acc_norm, acc_bytes });
        }
        Ok(Self { name: file.name.clone(), items })
    }

    /// Means over the items.
    pub fn scores(&self) -> TaskScores {
        let completions = self.items.iter().all(|item| item.gold.is_none());
        let sum: f64 = self.items.iter().map(|item| item.log_likelihoods[0]).sum();
        TaskScores {
            acc: self.share(|item| Some(item.acc)),
            acc_norm: self.share(|item| item.acc_norm),
            acc_bytes: self.share(|item| item.acc_bytes),
            perplexity: completions.then(|| (-sum / self.items.len() as f64).exp()),
        }
    }

    /// The share of items of which something holds; none where it is not known of all.
    fn share(&self, of: impl Fn(&ItemScore) -> Option<bool>) -> Option<f64> {
        let known: Option<Vec<bool>> = self.items.iter().map(of).collect();
        known.map(|all| all.iter().filter(|holds| **holds).count() as f64 / all.len() as f64)
    }

    /// The standard error of a share of the items, as of a sample of all that could be asked; 0 of one item.
    pub fn standard_error(&self, share: f64) -> f64 {
        standard_error(share, self.items.len())
    }
}

/// The standard error of a share among `items`.
pub(super) fn standard_error(share: f64, items: usize) -> f64 {
    (share * (1.0 - share) / (items.max(2) - 1) as f64).sqrt()
}

/// The first of the greatest.
fn first_greatest(values: impl Iterator<Item = f64>) -> usize {
    let best = values.enumerate().fold(None, |best: Option<(usize, f64)>, (index, value)| match best {
        Some((_, most)) if most >= value => best,
        _ => Some((index, value)),
    });
    best.map_or(0, |(index, _)| index)
}
