//! The tokenizer of a config against the vocabulary of its model.

use crate::TrainError;
use lockstep_config::Config;
use lockstep_data::{DataError, TokenizerSpec};

/// The tokenizer that a config names.
pub(crate) fn tokenizer_spec(config: &Config) -> Result<TokenizerSpec, DataError> {
    let Some(path) = config.tokenizer_path() else { return Ok(TokenizerSpec::Bytes) };
    if let Some((problem, hint)) = config.tokenizer_on_the_hub() {
        let path = config.data.tokenizer.clone().into();
        return Err(DataError::Source { path, problem: problem.into(), hint: hint.into() });
    }
    Ok(TokenizerSpec::file(&path, config.data.eos_token.clone())?.with_bos(config.bos_token()))
}

/// A warning where much of a model's vocabulary is no token of the tokenizer: it is trained on other text than is meant, or has
/// rows that nothing reads.
pub(crate) fn unused_vocabulary(config: &Config, tokenizer: &crate::RunTokenizer) -> Option<TrainError> {
    let (vocab, tokens) = (config.model.vocab_size, tokenizer.vocabulary());
    let named = config.tokenizer_path().map_or("\"bytes\"".to_owned(), |path| path.display().to_string());
    (tokens < vocab / 4 * 3).then(|| TrainError::Rehearsal {
        problem: format!(
            "model.vocab_size = {vocab}, and data.tokenizer ({named}) has {tokens} tokens: the others are never read"
        ),
        hint: format!("set data.tokenizer to the tokenizer of the model, or model.vocab_size = {tokens}"),
    })
}

/// Refuses a model that has no embedding for some token.
pub(crate) fn require_vocabulary(config: &Config, needed: u32) -> Result<(), TrainError> {
    let vocab = config.model.vocab_size;
    if vocab >= needed as usize {
        return Ok(());
    }
    let tokenizer = config.tokenizer_path().map_or("bytes".to_owned(), |path| path.display().to_string());
    Err(TrainError::Vocabulary { vocab, tokenizer, needed })
}
