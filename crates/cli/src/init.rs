//! `lockstep init`: a first config, from a few answers.

use crate::failure::{Failure, Result};
use crate::shell::shell_quoted;
use lockstep_config::presets;
use lockstep_hub::PREFIX;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// What to do; asked for if not given.
    #[arg(long, value_enum)]
    task: Option<Task>,
    /// The model: a preset for pretrain (`lockstep config --search preset` lists them); for the others a Hugging Face folder, a run, or
    /// hf:OWNER/NAME on the Hugging Face Hub.
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// A file or a folder of data, or hf:datasets/OWNER/NAME/PATH: text, JSON lines or Parquet; conversations to fine-tune, or prompts and
    /// completions.
    #[arg(long, value_name = "PATH")]
    data: Option<String>,
    /// How many GPUs to train on; 0 for the CPU.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=65_536))]
    gpus: Option<u32>,
    /// The config file to write.
    #[arg(long, value_name = "RUN.TOML", default_value = "run.toml")]
    out: PathBuf,
}

/// What a run is for.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Task {
    /// Pre-train a model from random weights.
    Pretrain,
    /// Continue the pre-training of a model on more text.
    Continue,
    /// Fine-tune a model on prompts and completions.
    Prompts,
    /// Fine-tune a model on conversations.
    Finetune,
    /// The same with LoRA: the weights stay, and small matrices beside them are trained.
    Lora,
    /// The same with LoRA beside weights in one byte each: half the memory.
    Qlora,
}

impl Task {
    const ALL: [(&'static str, Task); 6] = [
        ("pretrain", Task::Pretrain),
        ("continue", Task::Continue),
        ("prompts", Task::Prompts),
        ("finetune", Task::Finetune),
        ("lora", Task::Lora),
        ("qlora", Task::Qlora),
    ];

    /// What it does, for the head of the file.
    fn told(self) -> &'static str {
        match self {
            Task::Pretrain => "Pre-trains a model from random weights.",
            Task::Continue => "Continues the pre-training of a model.",
            Task::Prompts => "Fine-tunes a model on prompts and completions.",
            Task::Finetune => "Fine-tunes a model on conversations.",
            Task::Lora => "Fine-tunes a model on conversations with LoRA.",
            Task::Qlora => "Fine-tunes a model on conversations with LoRA, beside weights in one byte each.",
        }
    }

    fn is_chat(self) -> bool {
        matches!(self, Task::Finetune | Task::Lora | Task::Qlora)
    }

    fn has_adapters(self) -> bool {
        matches!(self, Task::Lora | Task::Qlora)
    }

    /// What the data are, for a question.
    fn data(self) -> &'static str {
        match self {
            Task::Pretrain | Task::Continue => "text",
            Task::Prompts => "prompts and completions, as JSON lines or Parquet",
            Task::Finetune | Task::Lora | Task::Qlora => "conversations, as JSON lines or Parquet",
        }
    }
}

pub fn run(args: Args) -> Result<()> {
    let Args { task, model, data, gpus, out } = args;
    if out.exists() {
        let text = format!("{} is there already", out.display());
        return Err(Failure::request(text, "name another file: --out other.toml"));
    }
    let words: Vec<&str> = Task::ALL.iter().map(|(word, _)| *word).collect();
    let task = match task {
        Some(task) => task,
        None => asked("--task", &format!("What to do ({})?", words.join(", ")), "pretrain", &|text| {
            Task::ALL.iter().find(|(word, _)| *word == text).map(|(_, task)| *task).ok_or("one of these words")
        })?,
    };
    let model = match (model, task) {
        (Some(model), _) => model,
        (None, Task::Pretrain) => {
            let names: Vec<&str> = presets().collect();
            asked("--model", &format!("Which preset ({})?", names.join(", ")), names[0], &|text| {
                names.contains(&text).then(|| text.to_owned()).ok_or("one of these names")
            })?
        }
        (None, _) => asked("--model", "Which model (a Hugging Face folder, or hf:OWNER/NAME)?", "", &some)?,
    };
    check_model(task, &model)?;
    let data = match data {
        Some(data) => data,
        None => asked("--data", &format!("Where is the data (a file or a folder of {})?", task.data()), "", &some)?,
    };
    if !data.starts_with(PREFIX) && !Path::new(&data).exists() {
        let hint = "name a file, a folder, or hf:datasets/OWNER/NAME on the Hugging Face Hub";
        return Err(Failure::request(format!("--data {data}: no such file or folder"), hint));
    }
    let gpus = match gpus {
        Some(gpus) => gpus,
        None => {
            asked("--gpus", "On how many GPUs (0 for the CPU)?", "1", &|text| text.parse().map_err(|_| "a number"))?
        }
    };
    let text = config(task, &from_folder_of(&out, &model), &from_folder_of(&out, &data), gpus, &out);
    let unwritable = |error: std::io::Error| {
        Failure::request(format!("{}: {error}", out.display()), "name a file in a folder that is there: --out")
    };
    std::fs::File::create_new(&out).and_then(|mut file| file.write_all(text.as_bytes())).map_err(unwritable)?;
    writeln!(std::io::stdout(), "{}: written", out.display())?;
    let name = shell_quoted(&out.display().to_string());
    writeln!(
        std::io::stderr(),
        "\ntry next:\n  lockstep explain {name}\n  lockstep rehearse {name}\n  {}",
        start(gpus, &name)
    )?;
    Ok(())
}

/// The command that trains.
fn start(gpus: u32, name: &str) -> String {
    format!("lockstep {} {name}", if gpus > 1 { "launch" } else { "train" })
}

/// A model that a task can begin with.
fn check_model(task: Task, model: &str) -> Result<()> {
    let is_preset = presets().any(|name| name == model);
    match task {
        Task::Pretrain if is_preset => Ok(()),
        Task::Pretrain => Err(Failure::request(
            format!("--model {model}: pretrain begins with random weights, and needs a preset"),
            format!("name one ({}), or --task continue for weights", presets().collect::<Vec<_>>().join(", ")),
        )),
        _ if model.starts_with(PREFIX) || Path::new(model).exists() => Ok(()),
        _ if is_preset => Err(Failure::request(
            format!("--model {model}: a preset has no weights"),
            "name a Hugging Face folder, a run or hf:OWNER/NAME, or --task pretrain",
        )),
        _ => Err(Failure::request(
            format!("--model {model}: no such folder"),
            "name a Hugging Face folder, a run, or hf:OWNER/NAME on the Hugging Face Hub",
        )),
    }
}

/// A path as the config has it, which counts paths from its own folder; names stay as they are.
fn from_folder_of(out: &Path, path: &str) -> String {
    let beside = out.parent().is_none_or(|folder| folder == Path::new(""));
    if beside || path.starts_with(PREFIX) || !Path::new(path).exists() {
        return path.to_owned();
    }
    std::path::absolute(path).map_or_else(|_| path.to_owned(), |path| path.display().to_string())
}

/// Asks on the terminal until the answer can be used; Enter alone is the one in brackets.
fn asked<T>(flag: &str, question: &str, usual: &str, read: &dyn Fn(&str) -> Result<T, &'static str>) -> Result<T> {
    if !std::io::stdin().is_terminal() {
        let text = format!("{flag} is not given, and there is no terminal to ask on");
        return Err(Failure::request(text, "give --task, --model, --data and --gpus"));
    }
    let mut out = std::io::stderr();
    loop {
        let brackets = if usual.is_empty() { String::new() } else { format!(" [{usual}]") };
        write!(out, "{question}{brackets} ")?;
        out.flush()?;
        let mut line = String::new();
        if std::io::stdin().read_line(&mut line)? == 0 {
            return Err(Failure::request(format!("{flag} is not given"), "give it as an option"));
        }
        let answer = if line.trim().is_empty() { usual } else { line.trim() };
        match read(answer) {
            Ok(value) => return Ok(value),
            Err(wanted) => writeln!(out, "{wanted}, please")?,
        }
    }
}

/// Any answer but none.
fn some(text: &str) -> Result<String, &'static str> {
    if text.is_empty() { Err("a path or a name") } else { Ok(text.to_owned()) }
}

/// The file.
fn config(task: Task, model: &str, data: &str, gpus: u32, out: &Path) -> String {
    // Strings of JSON are strings of TOML.
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let ranks = gpus.max(1);
    let name = shell_quoted(&out.display().to_string());
    let mut text = format!(
        "# {} Every key: `lockstep config`; what a step takes: `lockstep explain {name}`.\n#\n#     {}\n\n",
        task.told(),
        start(gpus, &name)
    );
    if task == Task::Pretrain {
        text += &format!("[model]\npreset = {}\n", quoted(model));
        text += "vocab_size = 256    # tokens of \"bytes\"; with the tokenizer of the preset, leave it out\n\n";
    }
    text += &format!("[data]\npaths = [{}]    # files and folders: text, .jsonl, .jsonl.zst, .parquet\n", quoted(data));
    text += match task {
        _ if task.is_chat() => {
            "format = \"chat\"    # messages of user and assistant, by the model's chat template; the loss is on what the assistant says\n"
        }
        Task::Pretrain => {
            "tokenizer = \"bytes\"    # or the path of a tokenizer.json, or \"hf:OWNER/NAME\" for that of a model on the hub\n"
        }
        Task::Continue => "# text_field = \"text\"    # of JSON lines and Parquet\n",
        _ => {
            "prompt_field = \"prompt\"    # read, and not counted in the loss\n\
             text_field = \"completion\"\n"
        }
    };
    text += "validation_fraction = 0.05    # held out for the validation loss\n\n";
    // As many sequences on every GPU.
    let batch = |least: u32| ranks * least.div_ceil(ranks);
    let init = format!("init_from = {}    # gives [model], the tokenizer and the precision\n", quoted(model));
    text += "[train]\n";
    text += &match task {
        Task::Pretrain => format!(
            "steps = 1000\nglobal_batch = {}    # sequences; times train.seq, which the preset gives, the tokens of a step\n",
            batch(32)
        ),
        Task::Continue => format!("{init}steps = 1000\nseq = 2048\nglobal_batch = {}    # sequences\n", batch(32)),
        _ => format!("{init}steps = 500\nseq = 2048    # longer conversations are cut\nglobal_batch = {}\n", batch(16)),
    };
    text += match gpus {
        0 => "device = \"cpu\"\n",
        // So that a machine without one can explain and rehearse it.
        _ => "# device = \"cuda\"    # \"auto\", the default, takes the CPU where no GPU is found\n",
    };
    text += "# micro_batch is the largest that fits, if not set.\n\n";
    if task.has_adapters() {
        text += "[lora]\nrank = 16\n\n";
    }
    if task == Task::Qlora {
        text += "[precision]\nfrozen = \"int8\"    # weights beside the adapters: one byte each; or \"fp8\"\n\n";
    }
    if ranks > 1 {
        text += &format!(
            "[parallel]\ndp = {ranks}\nzero = {}    # ZeRO: 1 shards the optimizer's state, 3 (FSDP) parameters and gradients too; `lockstep plan` \
             finds the fastest\n\n",
            if task.has_adapters() { 0 } else { 3 }
        );
    }
    let (rate, warmup) = match task {
        Task::Pretrain => ("3e-4", 100),
        Task::Continue => ("3e-5", 50),
        Task::Prompts | Task::Finetune => ("1e-5", 20),
        Task::Lora | Task::Qlora => ("2e-4", 20),
    };
    text + &format!("[optimizer]\nlr = {rate}\nwarmup_steps = {warmup}\n\n[checkpoint]\nevery = 100\n")
}
