//! `lockstep generate`: text from a trained model, as it comes; or of a file of prompts, many at once.

use crate::Format;
use crate::failure::{Failure, Result};
use crate::options::WeightArgs;
use crate::processes::{self, ProcessPlace};
use crate::progress::Progress;
use crate::ranks::RankArgs;
use crate::terminal::printable;
use lockstep_config::{FrozenPrecision, bytes};
use lockstep_data::Conversation;
use lockstep_infer::{
    Generated, Generator, PromptOptions, PromptProgress, RunTokenizer, Sampling, Stop, TextBatch, TextStream, generate,
    write_prompts,
};
use lockstep_ir::units;
use lockstep_plan::GenerationShape;
use serde_json::json;
use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// A run directory (its latest checkpoint is used), a checkpoint in one, a Hugging Face folder, or hf:OWNER/NAME for a model on the
    /// Hugging Face Hub.
    #[arg(value_name = "RUN|CHECKPOINT|HF_FOLDER")]
    from: PathBuf,
    /// Text to continue.
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["prompt_file", "prompts"])]
    prompt: Option<String>,
    /// File that holds the text to continue.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Many texts at once: a file of JSON lines, {"prompt": "…"} or, with --chat, {"messages": […]}; an "id" is kept. Started again, it goes on
    /// where it stopped.
    #[arg(long, value_name = "FILE.JSONL", conflicts_with_all = ["prompt", "prompt_file"], requires = "out")]
    prompts: Option<PathBuf>,
    /// With --prompts: the file that gets a line for each of them, in their order.
    #[arg(long, value_name = "FILE.JSONL", requires = "prompts")]
    out: Option<PathBuf>,
    /// With --prompts: texts for each prompt.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "prompts", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    samples: u32,
    /// With --prompts: texts that are under way at once.
    #[arg(long, value_name = "N", default_value_t = 32, requires = "prompts", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// With --prompts: memory of the KV cache, such as 20GiB; as much as all texts at once may need if not given, or what is free.
    #[arg(long, value_name = "BYTES", requires = "prompts", value_parser = cache_bytes)]
    cache: Option<u64>,
    /// With --prompts: a text ends before this one; may be given several times.
    #[arg(long, value_name = "TEXT", requires = "prompts")]
    stop: Vec<String>,
    /// With --prompts: write the log-probability of each token, in nats.
    #[arg(long, requires = "prompts")]
    logprobs: bool,
    /// Chat: the text is a question to the assistant, written with the chat template of the model. Only the answer is shown.
    #[arg(long)]
    chat: bool,
    /// With --chat, what the system says before the question.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Most tokens to write.
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_tokens: usize,
    /// 0 is greedy decoding, 1 samples as trained.
    #[arg(long, value_name = "T", default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f64,
    /// Top-k sampling: from the K most probable tokens only.
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Top-p (nucleus) sampling: from the most probable tokens that together have this probability only.
    #[arg(long, value_name = "P", default_value_t = 0.95, allow_negative_numbers = true)]
    top_p: f64,
    /// Min-p sampling: from tokens only that are at least this many times as probable as the most probable one.
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    min_p: f64,
    /// Repetition penalty: divides positive logits of tokens that the text has, and multiplies negative ones; 1 is none.
    #[arg(long, value_name = "R", default_value_t = 1.0, allow_negative_numbers = true)]
    repetition_penalty: f64,
    /// Seed of the draws: the same seed gives the same text.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Most tokens of prompt and text together; train.seq of the run if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    context: Option<u32>,
    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    ranks: RankArgs,
    /// Go on where the model ends the document, up to --max-tokens: an EOS token is a token like others then.
    #[arg(long)]
    ignore_eos: bool,
    /// How to print it: text as it comes, or one object at the end.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

/// Bytes as people write them.
fn cache_bytes(text: &str) -> std::result::Result<u64, String> {
    bytes(text).ok_or_else(|| "give bytes with a unit, such as 20GiB".to_owned())
}

pub fn run(args: Args) -> Result<ExitCode> {
    let Some(place) = args.ranks.place()? else { return of_rank(&args, None) };
    processes::end_with_launcher()?;
    processes::end_well(of_rank(&args, Some(&place)).map_err(|failure| failure.of_rank(place.rank)))
}

/// Generates as one of several processes, or alone. The first of them writes.
fn of_rank(args: &Args, place: Option<&ProcessPlace>) -> Result<ExitCode> {
    let &Args { temperature, top_k, top_p, min_p, repetition_penalty, seed, .. } = args;
    let sampling = Sampling { temperature, top_k, top_p, min_p, repetition_penalty, seed };
    sampling.check()?;
    if let (Some(prompts), Some(out)) = (&args.prompts, &args.out) {
        return of_file(args, sampling, (prompts, out), place);
    }
    let prompt = prompt(args)?;
    let trained = args.weights.open(&args.from)?;
    if let Some(code) = args.ranks.start(&trained.config, place)? {
        return Ok(code);
    }
    let tokenizer = trained.tokenizer()?;
    let mut ends = if args.ignore_eos { Vec::new() } else { trained.end_tokens(&tokenizer)? };
    let tokens = match args.chat {
        false => tokenizer.encode_beginning(&prompt)?,
        true => {
            let chat = trained.chat(&tokenizer)?;
            ends.extend(chat.end_of_turn(&tokenizer)?.filter(|_| !args.ignore_eos));
            chat.prompt(&tokenizer, &Conversation::asking(args.system.as_deref(), &prompt))?
        }
    };
    let context = args.context.map_or(trained.config.train.seq, |c| c as usize);
    let devices = args.ranks.devices(&trained.config, place)?;
    let size = (context, args.ranks.tp());
    let mut generator = Generator::shared(&devices, &trained.config, size, trained.weights())?;

    let first = devices.group().is_first();
    let mut screen = Screen::new(tokenizer.clone(), first && args.format == Format::Text);
    // Ranks end a text together.
    let alone = place.is_none();
    // Shown when the first token is there: an error comes before any text.
    let mut echo = Some(&prompt).filter(|_| !args.chat);
    let result = generate(&mut generator, &tokenizer, &ends, &tokens, args.max_tokens, &sampling, &mut |token| {
        if let Some(prompt) = echo.take() {
            screen.write(prompt);
        }
        let heard = screen.hear(token);
        if alone { heard } else { ControlFlow::Continue(()) }
    });
    if let (Ok(_), Some(prompt)) = (&result, echo) {
        screen.write(prompt);
    }
    let text = screen.end()?;
    let generated = result?;
    if !first {
        return Ok(ExitCode::SUCCESS);
    }
    let speed = |n: usize, seconds: f64| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
    let tokens_per_s = speed(generated.tokens.len(), generated.generate_s);
    match args.format {
        Format::Text => {
            writeln!(std::io::stderr(), "{}", summary(&generated, args.chat, tokens.len(), tokens_per_s))?;
        }
        Format::Json => {
            let object = json!({
                "checkpoint": trained.path(),
                "step": trained.step(),
                "prompt": prompt,
                "prompt_tokens": tokens.len(),
                "text": text,
                "tokens": generated.tokens.len(),
                "stop": generated.stop,
                "seed": seed,
                "context": context,
                "prompt_tokens_per_s": speed(tokens.len(), generated.prompt_s),
                "tokens_per_s": tokens_per_s,
                "arena_bytes": generator.arena_bytes(),
            });
            writeln!(std::io::stdout(), "{object:#}")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Continues the prompts of a file.
fn of_file(args: &Args, sampling: Sampling, files: (&Path, &Path), place: Option<&ProcessPlace>) -> Result<ExitCode> {
    let trained = args.weights.open(&args.from)?;
    if let Some(code) = args.ranks.start(&trained.config, place)? {
        return Ok(code);
    }
    let devices = args.ranks.devices(&trained.config, place)?;
    let tokenizer = trained.tokenizer()?;
    let mut ends = if args.ignore_eos { Vec::new() } else { trained.end_tokens(&tokenizer)? };
    let chat = args.chat.then(|| trained.chat(&tokenizer)).transpose()?;
    if let Some(chat) = &chat {
        ends.extend(chat.end_of_turn(&tokenizer)?.filter(|_| !args.ignore_eos));
    }
    let context = args.context.map_or(trained.config.train.seq, |c| c as usize);
    let shape = GenerationShape {
        context,
        texts: args.batch as usize,
        cache: args.cache,
        known: Some(tokenizer.vocabulary() as usize),
        tp: args.ranks.tp(),
    };
    let mut batch = TextBatch::new(&devices, &trained.config, shape, trained.weights())?;
    let mut model = json!({"checkpoint": trained.path(), "step": trained.step(), "context": context});
    if args.ranks.tp() > 1 {
        model["tp"] = args.ranks.tp().into();
    }
    if trained.config.precision.frozen != FrozenPrecision::Policy {
        model["weights"] = trained.config.precision.frozen.to_string().into();
    }
    let options = PromptOptions {
        max_tokens: args.max_tokens,
        sampling,
        samples: args.samples as usize,
        stop: args.stop.clone(),
        logprobs: args.logprobs,
        ends,
        chat: chat.as_ref(),
        system: args.system.clone(),
        model,
    };
    let begun = Instant::now();
    let mut progress = Progress::new(0);
    let speed = |tokens: u64| tokens as f64 / begun.elapsed().as_secs_f64().max(1e-9);
    let first = devices.group().is_first();
    let summary =
        write_prompts(&mut batch, &tokenizer, files, &options, devices.group(), &mut |p: &PromptProgress| {
            if !first {
                return;
            }
            let (done, total) = p.texts;
            let (filled, rate) = (100.0 * p.filled, units::count(speed(p.tokens) as u64));
            let more = format!(", {} under way, cache {filled:.0}% full, {rate} tokens/s", p.running);
            progress.work_with("texts", (done as u64, total as u64), |n| n.to_string(), &more);
        })?;
    progress.clear();
    if !first {
        return Ok(ExitCode::SUCCESS);
    }
    let counts = batch.counts();
    let rate = speed(counts.written);
    if summary.errors > 0 {
        let prompts = if summary.errors == 1 { "prompt has" } else { "prompts have" };
        crate::warn(&[format!("{} {prompts} an \"error\" instead of a text in {}", summary.errors, files.1.display())]);
    }
    match args.format {
        Format::Text => writeln!(
            std::io::stderr(),
            "{} texts in {}, {} of them from before; {} tokens written, {} tokens/s; {} tokens read, {} shared; {} texts read again",
            summary.texts,
            files.1.display(),
            summary.before,
            units::count(counts.written),
            units::count(rate as u64),
            units::count(counts.read),
            units::count(counts.shared),
            counts.recomputed,
        )?,
        Format::Json => {
            let object = json!({
                "checkpoint": trained.path(),
                "step": trained.step(),
                "out": files.1,
                "texts": summary.texts,
                "texts_before": summary.before,
                "errors": summary.errors,
                "tokens": counts.written,
                "tokens_per_s": rate,
                "tokens_read": counts.read,
                "tokens_shared": counts.shared,
                "texts_read_again": counts.recomputed,
                "context": context,
                "cache_bytes": batch.cache().bytes(),
                "arena_bytes": batch.arena_bytes(),
            });
            writeln!(std::io::stdout(), "{object:#}")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn prompt(args: &Args) -> Result<String> {
    let Some(path) = &args.prompt_file else { return Ok(args.prompt.clone().unwrap_or_default()) };
    let refuse = |cause: String, hint: &str| Failure::request(format!("{}: {cause}", path.display()), hint);
    let bytes =
        std::fs::read(path).map_err(|e| refuse(format!("cannot be read: {e}"), "name a file that holds the prompt"))?;
    String::from_utf8(bytes).map_err(|_| refuse("is not UTF-8 text".to_owned(), "save the prompt as UTF-8"))
}

/// Where text goes while tokens come.
struct Screen {
    stream: TextStream,
    text: String,
    /// How writing to stdout goes; `None` where nothing is shown before the end.
    live: Option<std::io::Result<()>>,
    line_is_open: bool,
}

impl Screen {
    fn new(tokenizer: RunTokenizer, live: bool) -> Self {
        let (stream, text) = (TextStream::new(tokenizer), String::new());
        Self { stream, text, live: live.then_some(Ok(())), line_is_open: false }
    }

    fn hear(&mut self, token: u32) -> ControlFlow<()> {
        let piece = self.stream.push(token);
        self.write(&piece);
        self.text.push_str(&piece);
        if let Some(Err(_)) = &self.live { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn write(&mut self, piece: &str) {
        if let (Some(state @ Ok(())), Some(last)) = (&mut self.live, piece.chars().last()) {
            let mut out = std::io::stdout().lock();
            *state = out.write_all(printable(piece).as_bytes()).and_then(|()| out.flush());
            self.line_is_open = last != '\n';
        }
    }

    /// Ends the last line and gives the new text. Whoever closes the pipe has seen enough.
    fn end(mut self) -> Result<String> {
        let rest = self.stream.finish();
        self.write(&rest);
        self.text.push_str(&rest);
        if self.line_is_open {
            self.write("\n");
        }
        match self.live {
            Some(Err(error)) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(self.text),
        }
    }
}

fn summary(generated: &Generated, chat: bool, prompt_tokens: usize, tokens_per_s: f64) -> String {
    let end = match generated.stop {
        Stop::Eos if chat => "the answer ended",
        Stop::Eos => "the document ended",
        Stop::MaxTokens => "--max-tokens reached",
        Stop::Context => "the context is full",
        Stop::Listener => "stopped",
    };
    format!(
        "{} tokens, {} tokens/s; prompt of {prompt_tokens} read in {}; {end}",
        generated.tokens.len(),
        units::count(tokens_per_s as u64),
        units::seconds(generated.prompt_s)
    )
}
