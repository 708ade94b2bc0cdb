//! `lockstep watch`: a live page of runs.

use crate::failure::{Failure, Result};
use crate::runs::special_files;
use lockstep_telemetry::{RunPage, random_text};
use std::io::Write;
use std::net::{IpAddr, TcpListener};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// Run directories, or folders of them.
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Address to listen on. On any but a loopback address a token is asked for; the URL that is printed has it.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, value_name = "PORT", default_value = "8127")]
    port: u16,
}

pub fn run(args: &Args) -> Result<()> {
    let runs = run_dirs(&args.runs)?;
    let listener = TcpListener::bind((args.host, args.port)).map_err(|error| {
        let hint = "give another --port (0 takes a free one), or a --host of this machine";
        Failure::request(format!("cannot listen on {}, port {}: {error}", args.host, args.port), hint)
    })?;
    let address = listener.local_addr()?;
    let token = if args.host.is_loopback() { None } else { Some(random_text()?) };
    let query = token.as_ref().map_or(String::new(), |token| format!("?token={token}"));
    let what = if runs.len() == 1 { "1 run".to_owned() } else { format!("{} runs", runs.len()) };
    let mut out = std::io::stdout().lock();
    writeln!(out, "watching {what}: http://{address}/{query}")?;
    if args.host.is_loopback() {
        let port = address.port();
        writeln!(out, "from another machine: ssh -L {port}:127.0.0.1:{port} THIS_HOST, then the same address")?;
    } else if args.host.is_unspecified() {
        writeln!(out, "from another machine: the name of this host instead of {}", args.host)?;
    }
    writeln!(out, "Ctrl-C ends it; the runs go on")?;
    out.flush()?;
    drop(out);
    Ok(RunPage::new(&runs).serve(&listener, token)?)
}

/// The run directories that are named, and those in folders that are none.
pub fn run_dirs(named: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let is_run = |dir: &Path| dir.join("metrics.jsonl").exists() || dir.join("run.toml").exists();
    let mut found = Vec::new();
    for dir in named {
        if is_run(dir) {
            found.push(dir.clone());
            continue;
        }
        let inside = std::fs::read_dir(dir).map(|entries| entries.flatten().map(|entry| entry.path()).collect());
        let mut inside: Vec<PathBuf> = inside.unwrap_or_default();
        inside.retain(|dir| is_run(dir));
        inside.sort();
        if inside.is_empty() {
            return Err(no_run(dir));
        }
        found.extend(inside);
    }
    if let Some(text) = found.iter().flat_map(|run| special_files(run)).next() {
        return Err(Failure::request(text, "put back the file that the run has written"));
    }
    if found.len() > MOST_RUNS {
        let hint = format!("name those that you want to see, up to {MOST_RUNS}");
        return Err(Failure::request(format!("{} runs are too many for one page", found.len()), hint));
    }
    Ok(found)
}

/// What to do where there is no run: what was named may not be there yet, or be somewhere else.
fn no_run(dir: &Path) -> Failure {
    let what = if dir.exists() { "is no run directory, and has none in it" } else { "is not there" };
    Failure::request(
        format!("{} {what}", dir.display()),
        "`lockstep train RUN.TOML` makes one (runs/NAME for NAME.toml); `lockstep runs DIR` lists those of a folder",
    )
}

/// Most runs of a page.
const MOST_RUNS: usize = 32;
