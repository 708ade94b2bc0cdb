//! A short text at the end of a run, so that a number is not all there is to see. It is made when the memory of the training step
//! is free again, so that it takes no more than was planned.

use crate::Result;
use lockstep_checkpoint::open;
use lockstep_config::Config;
use lockstep_data::Sampler;
use lockstep_host::Devices;
use lockstep_infer::state::Weights;
use lockstep_infer::{Generator, RunTokenizer, Sampling, TextStream, generate};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

/// A text that a model has continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The beginning, from the data.
    pub prompt: String,
    /// How the model goes on.
    pub text: String,
}

/// Most tokens of the prompt.
const PROMPT: usize = 32;
/// A sample must not take long: larger models give none, and slow ones a shorter one.
const LARGEST_MODEL: u64 = 200_000_000;
const LONGEST: Duration = Duration::from_millis(1500);

/// Continues the beginning of `data` by up to `max_tokens` tokens, with the parameters of a checkpoint.
pub(crate) fn sample(
    devices: &Devices,
    config: &Config,
    tokenizer: &RunTokenizer,
    checkpoint: &Path,
    parameters: u64,
    data: &Sampler,
    max_tokens: usize,
) -> Result<Option<Sample>> {
    let seq = config.train.seq;
    if parameters > LARGEST_MODEL || max_tokens == 0 {
        return Ok(None);
    }
    let (mut tokens, mut targets) = (vec![0; seq], vec![0; seq]);
    data.fill(0, &mut tokens, &mut targets);
    let mut stream = TextStream::new(tokenizer.clone());
    let prompt: String = tokens.iter().take(PROMPT.min(seq / 2)).map(|t| stream.push(*t)).collect();
    let tokens = tokenizer.encode_beginning(&prompt)?;
    if tokens.is_empty() || tokens.len() >= seq {
        return Ok(None);
    }
    let context = seq.min(tokens.len() + max_tokens);
    let checkpoint = open(checkpoint)?;
    let mut generator = Generator::new(devices, config, context, Weights::Checkpoint(&checkpoint))?;
    let begun = Instant::now();
    let sampling = Sampling { temperature: 0.8, top_p: 0.95, seed: config.train.seed, ..Sampling::default() };
    let mut stream = TextStream::new(tokenizer.clone());
    let mut text = String::new();
    generate(&mut generator, tokenizer, &[tokenizer.eos()], &tokens, max_tokens, &sampling, &mut |token| {
        text.push_str(&stream.push(token));
        if begun.elapsed() < LONGEST { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    Ok(Some(Sample { prompt, text: text + &stream.finish() }))
}
