//! `lockstep data`: text to tokens, and a look at what came of it.

mod export;
mod inspect;
mod prepare;
mod statistics;
mod verify;

use crate::failure::Result;

#[derive(clap::Subcommand)]
pub enum Command {
    /// Tokenise a config's data, as `train` would do by itself; goes on where an earlier call stopped.
    Prepare(prepare::Args),
    /// Show what prepared data hold: counts, any sample as text, the documents of a training step.
    Inspect(inspect::Args),
    /// Read every byte of prepared data and compare it with the checksums that were written with it.
    Verify(verify::Args),
    /// Write the tokens as Megatron's indexed datasets: .bin and .idx files.
    Export(export::Args),
}

pub fn run(command: Command) -> Result<()> {
    match command {
        Command::Prepare(args) => prepare::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Export(args) => export::run(args),
    }
}
