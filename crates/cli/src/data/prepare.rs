//! `lockstep data prepare`.

use super::statistics;
use crate::failure::Result;
use crate::progress::Progress;
use crate::train::on_interrupt;
use crate::{ConfigArgs, Format};
use lockstep_infer::prepare_data;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Where the data go; the folder that `train` will look in if not given.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The run directory that the data are for, as `train` takes it.
    #[arg(long, value_name = "DIR", conflicts_with = "out")]
    run_dir: Option<PathBuf>,
    /// How to print the result.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: Args) -> Result<()> {
    let config = args.config.load()?;
    let run_dir = args.config.run_dir(args.run_dir);
    let stop = on_interrupt()?;
    let mut progress = Progress::new(0);
    let result = prepare_data(&config, &run_dir, args.out.as_deref(), &stop, &mut |corpus, at| {
        let what = if corpus.is_empty() { "data" } else { corpus };
        progress.preparing(what, at);
    });
    progress.clear();
    let (data, folder) = result?;
    crate::warn(&data.warnings()?);
    let statistics = statistics::of(&folder, data.corpora());
    args.format.print(|| serde_json::json!(statistics), || statistics::as_text(&statistics))
}
