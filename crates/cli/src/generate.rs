//! `lockstep generate`: text from a trained model, as it comes.

use crate::Format;
use crate::failure::{Failure, Result};
use crate::options::model_folder;
use crate::terminal::printable;
use lockstep_data::Conversation;
use lockstep_host::Devices;
use lockstep_infer::{Generated, Generator, RunTokenizer, Sampling, Stop, TextStream, Trained, generate};
use lockstep_ir::units;
use serde_json::json;
use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A run directory (its latest checkpoint is used), a checkpoint in one, a Hugging Face folder, or hf:OWNER/NAME for a model on the
    /// Hugging Face Hub.
    #[arg(value_name = "RUN|CHECKPOINT|HF_FOLDER")]
    from: PathBuf,
    /// Text to continue.
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_file", conflicts_with = "prompt_file")]
    prompt: Option<String>,
    /// File that holds the text to continue.
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
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
    /// Seed of the draws: the same seed gives the same text.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Most tokens of prompt and text together; train.seq of the run if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    context: Option<u32>,
    /// Go on where the model ends the document, up to --max-tokens: an EOS token is a token like others then.
    #[arg(long)]
    ignore_eos: bool,
    /// How to print it: text as it comes, or one object at the end.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: Args) -> Result<()> {
    let Args { temperature, top_k, top_p, seed, .. } = args;
    let sampling = Sampling { temperature, top_k, top_p, seed };
    sampling.check()?;
    let prompt = prompt(&args)?;
    let trained = Trained::open(&model_folder(&args.from)?)?;
    crate::warn(&trained.warnings);
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
    let mut generator = Generator::new(&Devices::of(&trained.config), &trained.config, context, trained.weights())?;

    let mut screen = Screen::new(tokenizer.clone(), args.format == Format::Text);
    // Shown when the first token is there: an error comes before any text.
    let mut echo = Some(&prompt).filter(|_| !args.chat);
    let result = generate(&mut generator, &tokenizer, &ends, &tokens, args.max_tokens, &sampling, &mut |token| {
        if let Some(prompt) = echo.take() {
            screen.write(prompt);
        }
        screen.hear(token)
    });
    if let (Ok(_), Some(prompt)) = (&result, echo) {
        screen.write(prompt);
    }
    let text = screen.end()?;
    let generated = result?;
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
    Ok(())
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
