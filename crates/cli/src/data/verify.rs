//! `lockstep data verify`.

use super::inspect::{Inspected, open};
use crate::failure::Result;
use crate::progress::Progress;
use crate::train::on_interrupt;
use lockstep_ir::units;
use std::io::Write;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A run directory, a folder of prepared data, or a config file.
    #[arg(value_name = "RUN_OR_DATA")]
    path: PathBuf,
}

pub fn run(args: Args) -> Result<()> {
    let Inspected { data, .. } = open(&args.path)?;
    let stop = on_interrupt()?;
    let mut progress = Progress::new(0);
    let checked = data.verify(&stop, &mut |done, total| progress.work("reading", done, total, units::bytes));
    progress.clear();
    checked?;
    let bytes = units::bytes(data.verified_bytes());
    let mut out = std::io::stdout().lock();
    writeln!(out, "{bytes} read: everything is as it was prepared, fingerprint {:016x}", data.fingerprint())?;
    if data.corpora().iter().any(|corpus| corpus.data.is_in_place()) {
        writeln!(out, "Megatron's files have no checksums: their index was checked, the tokens were not")?;
    }
    Ok(())
}
