//! `lockstep completions` and `lockstep man`: what shells and manuals know of the commands.

use crate::failure::{Failure, Result};
use clap::Command;
use clap_complete::Shell;
use std::io::Write;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct CompletionArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(clap::Args)]
pub struct ManArgs {
    /// Write lockstep.1, lockstep-train.1 and so on into this folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub fn completions(args: CompletionArgs, command: &mut Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "lockstep", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(())
}

pub fn man(args: ManArgs, command: Command) -> Result<()> {
    let Some(folder) = args.out else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        std::io::stdout().write_all(&page)?;
        return Ok(());
    };
    let failed = |e: std::io::Error| {
        Failure::run(format!("cannot write manual pages to {}: {e}", folder.display()), "check the folder of --out")
    };
    std::fs::create_dir_all(&folder).map_err(failed)?;
    clap_mangen::generate_to(command, &folder).map_err(failed)?;
    writeln!(std::io::stdout(), "wrote manual pages to {}", folder.display())?;
    Ok(())
}
