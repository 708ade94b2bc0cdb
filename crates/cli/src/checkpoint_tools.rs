//! `lockstep checkpoint inspect`, `verify` and `prune`.

use crate::Format;
use crate::failure::{Failure, Result};
use crate::table::table;
use lockstep_checkpoint::{Keep, list, looks_whole, open};
use lockstep_ir::units;
use lockstep_rundir::{RunDir, checkpoints};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct InspectArgs {
    /// A run directory (its latest checkpoint is shown), or a checkpoint.
    #[arg(value_name = "RUN|CHECKPOINT")]
    from: PathBuf,
    /// List the tensors too.
    #[arg(long)]
    tensors: bool,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(clap::Args)]
pub struct VerifyArgs {
    /// A run directory, a folder of checkpoints (a mirror, say), or one checkpoint.
    #[arg(value_name = "RUN|FOLDER|CHECKPOINT")]
    from: PathBuf,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(clap::Args)]
pub struct PruneArgs {
    /// A run directory.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// How many of the latest stay.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep: u32,
    /// Every checkpoint whose step is a multiple of this stays too; 0 for none.
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    keep_every: u64,
    /// The checkpoint with the lowest validation loss stays too.
    #[arg(long)]
    keep_best: bool,
    /// Say what would be removed, and remove nothing.
    #[arg(long)]
    dry_run: bool,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

/// The checkpoints that a path names, by ascending step: those of a run, of a folder, or itself.
fn named(from: &Path) -> Result<Vec<(Option<u64>, PathBuf)>> {
    if from.join("manifest.json").exists() {
        return Ok(vec![(None, from.to_owned())]);
    }
    let folder = from.join("checkpoints");
    let found = list(if folder.is_dir() { &folder } else { from })?;
    if found.is_empty() {
        let text = format!("{} holds no checkpoint", from.display());
        return Err(Failure::request(text, "name a run directory, or one of its checkpoints/step-…"));
    }
    Ok(found.into_iter().map(|(step, path)| (Some(step), path)).collect())
}

pub fn inspect(args: &InspectArgs) -> Result<()> {
    let Some((_, path)) = named(&args.from)?.pop() else { return Ok(()) };
    let loaded = open(&path)?;
    let mut groups = Vec::new();
    for group in ["model", "optimizer"] {
        // Imported weights have no optimizer state.
        let mut tensors = Vec::new();
        for name in loaded.names(group).unwrap_or_default() {
            let view = loaded.tensor(group, name)?;
            let mut shape = view.shape.to_vec();
            if let Some(last) = shape.last_mut() {
                *last *= view.dtype.numbers();
            }
            tensors.push((name, view.dtype, shape));
        }
        groups.push((group, tensors));
    }
    let entries = path.read_dir()?.flatten();
    let files = entries.filter_map(|e| Some((e.file_name().into_string().ok()?, e.metadata().ok()?.len())));
    let mut files: Vec<(String, u64)> = files.collect();
    files.sort();
    let state = &loaded.state;
    let mut out = std::io::stdout().lock();
    if args.format == Format::Json {
        let tensor = |(name, dtype, shape): &(&str, lockstep_ir::DType, Vec<usize>)| json!({ "name": name, "dtype": dtype.to_string(), "shape": shape });
        let groups: serde_json::Map<String, serde_json::Value> = groups
            .iter()
            .map(|(group, tensors)| ((*group).to_owned(), json!(tensors.iter().map(tensor).collect::<Vec<_>>())))
            .collect();
        let files: Vec<_> = files.iter().map(|(name, bytes)| json!({ "name": name, "bytes": bytes })).collect();
        let value = json!({
            "path": path, "step": loaded.step, "files": files, "groups": groups, "state": state,
        });
        return Ok(writeln!(out, "{value:#}")?);
    }
    let text = |key: &str| state[key].as_str().map_or_else(|| state[key].to_string(), str::to_owned);
    writeln!(out, "{}: step {}, every checksum right", path.display(), loaded.step)?;
    for (name, key) in
        [("tokens", "tokens"), ("lockstep", "lockstep"), ("data", "data"), ("validation loss", "val_loss")]
    {
        if !state[key].is_null() {
            writeln!(out, "  {name:<16} {}", text(key))?;
        }
    }
    for (group, tensors) in groups.iter().filter(|(_, tensors)| !tensors.is_empty()) {
        let elements: usize = tensors.iter().map(|(_, _, shape)| shape.iter().product::<usize>()).sum();
        writeln!(out, "  {group:<16} {} tensors, {} elements", tensors.len(), units::count(elements as u64))?;
    }
    let rows: Vec<_> = files.iter().map(|(name, bytes)| vec![name.clone(), units::bytes(*bytes)]).collect();
    write!(out, "{}", table(&["file", "size"], &rows))?;
    if args.tensors {
        let all = groups.iter().flat_map(|(group, tensors)| tensors.iter().map(move |t| (group, t)));
        let row = |(group, (name, dtype, shape)): (&&str, &(&str, lockstep_ir::DType, Vec<usize>))| {
            vec![(*group).to_owned(), (*name).to_owned(), dtype.to_string(), format!("{shape:?}")]
        };
        write!(out, "{}", table(&["group", "tensor", "type", "shape"], &all.map(row).collect::<Vec<_>>()))?;
    }
    Ok(())
}

pub fn verify(args: &VerifyArgs) -> Result<()> {
    let (mut rows, mut values, mut damaged) = (Vec::new(), Vec::new(), 0);
    for (step, path) in named(&args.from)? {
        let result = open(&path);
        let cause = result.as_ref().err().map(|error| error.to_string());
        damaged += usize::from(cause.is_some());
        let step = step.or(result.ok().map(|loaded| loaded.step));
        values.push(json!({ "step": step, "path": path, "whole": cause.is_none(), "cause": cause }));
        rows.push(vec![step.map_or("-".into(), |step| step.to_string()), cause.unwrap_or_else(|| "whole".into())]);
    }
    args.format.print(|| json!({ "checkpoints": values }), || table(&["step", ""], &rows))?;
    match damaged {
        0 => Ok(()),
        n => Err(Failure::run(
            format!("{n} of {} checkpoints {} not whole", values.len(), if n == 1 { "is" } else { "are" }),
            "a run goes on from the newest that is; restore others from a copy",
        )),
    }
}

pub fn prune(args: &PruneArgs) -> Result<()> {
    let found = checkpoints(&args.run)?;
    // Nobody else may write there meanwhile.
    let _lock = RunDir::open(&args.run)?;
    let validated = found.iter().filter_map(|c| Some((c.val_loss?, c.step)));
    let best = validated.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, step)| step).filter(|_| args.keep_best);
    let keep = Keep { last: args.keep as usize, every: args.keep_every, best };
    let folder = args.run.join("checkpoints");
    let removed = if args.dry_run {
        let whole = found.iter().filter(|c| looks_whole(&c.path)).map(|c| c.step);
        keep.surplus(&whole.collect::<Vec<_>>())
    } else {
        lockstep_checkpoint::prune(&folder, None, &keep)?
    };
    let bytes: u64 = found.iter().filter(|c| removed.contains(&c.step)).map(|c| c.bytes).sum();
    let text = || {
        let steps: Vec<String> = removed.iter().map(u64::to_string).collect();
        let steps = if steps.is_empty() { "nothing".to_owned() } else { format!("steps {}", steps.join(", ")) };
        let what = if args.dry_run { "would remove" } else { "removed" };
        format!("{what} {steps}: {}\n", units::bytes(bytes))
    };
    args.format.print(|| json!({ "removed": removed, "bytes": bytes, "dry_run": args.dry_run }), text)
}
