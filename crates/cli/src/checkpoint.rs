//! `lockstep checkpoint`: those of a run, and models of Hugging Face in and out.

use crate::failure::Result;
use crate::options::model_folder;
use crate::progress::Progress;
use crate::shell::shell_quoted;
use crate::{Format, checkpoint_list, checkpoint_tools};
use lockstep_infer::{ExportOptions, Exported, Imported, export, import};
use lockstep_ir::{DType, units};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

#[derive(clap::Subcommand)]
pub enum Command {
    /// List the checkpoints of a run: step, size, time, validation loss.
    List(checkpoint_list::Args),
    /// Show what a checkpoint holds: its step, its files, its tensors.
    Inspect(checkpoint_tools::InspectArgs),
    /// Read every byte of checkpoints and compare it with its checksum.
    Verify(checkpoint_tools::VerifyArgs),
    /// Remove the checkpoints of a run that no rule keeps.
    Prune(checkpoint_tools::PruneArgs),
    /// Make a run directory of a Hugging Face model: to start from, to generate with, to evaluate.
    Import(ImportArgs),
    /// Write a trained model as a Hugging Face folder.
    Export(ExportArgs),
}

#[derive(clap::Args)]
pub struct ImportArgs {
    /// A folder with config.json, model.safetensors or its shards, and tokenizer.json if there is one; or hf:OWNER/NAME for a model on
    /// the Hugging Face Hub.
    #[arg(value_name = "HF_FOLDER")]
    from: PathBuf,
    /// The folder to make.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// How to print the result.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(clap::Args)]
pub struct ExportArgs {
    /// A run directory (its latest checkpoint is used), or a checkpoint in one.
    #[arg(value_name = "RUN|CHECKPOINT")]
    from: PathBuf,
    /// The folder to make.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// What the weights are written in; bf16 where precision.policy of the run is bf16, f32 elsewhere, if not given.
    #[arg(long, value_enum)]
    dtype: Option<Weights>,
    /// Positions that the model is made for; train.seq of the run if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    context: Option<u32>,
    /// Write the adapters of a LoRA run alone, as PEFT loads them; if not given, they are merged into the weights.
    #[arg(long)]
    adapter: bool,
    /// How to print the result.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

/// What weights are written in.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Weights {
    Bf16,
    F32,
}

pub fn run(command: Command) -> Result<()> {
    let mut progress = Progress::new(0);
    let mut show = |done, total| progress.work("writing weights", done, total, units::bytes);
    match command {
        Command::List(args) => checkpoint_list::run(&args),
        Command::Inspect(args) => checkpoint_tools::inspect(&args),
        Command::Verify(args) => checkpoint_tools::verify(&args),
        Command::Prune(args) => checkpoint_tools::prune(&args),
        Command::Import(args) => {
            let result = import(&model_folder(&args.from)?, &args.out, &mut show);
            progress.clear();
            imported(&args, &result?)
        }
        Command::Export(args) => {
            let dtype = args.dtype.map(|dtype| match dtype {
                Weights::Bf16 => DType::BF16,
                Weights::F32 => DType::F32,
            });
            let context = args.context.map(|n| n as usize);
            let options = ExportOptions { dtype, context, adapter: args.adapter, ..Default::default() };
            let result = export(&args.from, &args.out, options, &mut show);
            progress.clear();
            exported(&args, &result?)
        }
    }
}

fn imported(args: &ImportArgs, result: &Imported) -> Result<()> {
    let Imported { config, parameters, context, tokenizer, warnings } = result;
    crate::warn(warnings);
    let (model, out) = (&config.model, args.out.display());
    let quoted = shell_quoted(&args.out.display().to_string());
    let mut stdout = std::io::stdout().lock();
    if args.format == Format::Json {
        let (architecture, vocab) = (&model.architecture, model.vocab_size);
        let object = json!({
            "folder": args.out, "architecture": architecture, "parameters": parameters, "layers": model.layers,
            "dim": model.dim, "vocab_size": vocab, "context": context, "tokenizer": tokenizer,
        });
        return Ok(writeln!(stdout, "{object:#}")?);
    }
    let (name, size) = (&model.architecture, format!("{} of {}", units::counted(model.layers, "layer"), model.dim));
    writeln!(stdout, "{name}: {} parameters, {size}, context {context} tokens", units::count(*parameters))?;
    let with = if *tokenizer { ", tokenizer.json" } else { "" };
    writeln!(stdout, "{out}: run.toml, checkpoints/step-00000000{with}")?;
    if !tokenizer {
        let note = "note: it comes without a tokenizer.json: set data.tokenizer in run.toml, or its tokens are bytes";
        writeln!(std::io::stderr(), "{note}")?;
    }
    // Without its tokenizer a model cannot read a prompt.
    let generate = if *tokenizer { format!("\n  lockstep generate {quoted} --prompt 'The'") } else { String::new() };
    writeln!(std::io::stderr(), "\ntry next:{generate}\n  train from it: [train] init_from = \"{out}\"")?;
    Ok(())
}

fn exported(args: &ExportArgs, result: &Exported) -> Result<()> {
    let Exported { step, parameters, dtype, warnings } = result;
    crate::warn(warnings);
    let (out, count) = (args.out.display(), units::count(*parameters));
    args.format.print(
        || json!({ "folder": args.out, "step": step, "parameters": parameters, "dtype": dtype.to_string() }),
        || format!("{out}: step {step}, {count} parameters in {dtype}\n"),
    )
}
