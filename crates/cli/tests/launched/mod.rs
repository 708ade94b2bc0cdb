//! Ranks that are processes: starting them, watching them, doing them harm.
// Each test binary uses a part of this.
#![allow(dead_code)]

use crate::common::{Place, steps, wait_until};
use crate::layouts::command;
use std::fs;
use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Starts a command whose output is kept.
pub fn spawn(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A launch that runs until it is stopped.
pub fn begin(place: &Place, dir: &str, set: &[&str], more: &[&str]) -> Child {
    let run = ["train.steps=100000", "train.validate_every=0", "checkpoint.every=1"];
    let mut args = command("launch", dir, &[&run[..], set].concat());
    args.extend(more);
    spawn(place.command(&args))
}

/// Four ranks.
pub const SQUARE: [&str; 3] = ["parallel.dp=2", "parallel.pp=2", "train.micro_batch=1"];

/// The processes that a launcher has started, by rank.
pub fn ranks_of(launcher: &Child) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse::<u32>().ok());
        if parent != Some(launcher.id()) {
            continue;
        }
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let rank = environment.split(|b| *b == 0).find_map(|v| std::str::from_utf8(v).ok()?.strip_prefix("RANK="));
        if let Some(rank) = rank.and_then(|rank| rank.parse::<usize>().ok()) {
            found.push((rank, pid));
        }
    }
    found.sort_unstable();
    found.into_iter().map(|(_, pid)| pid).collect()
}

/// Waits until a run has this many lines of metrics, and gives how long that took; a run that ends before that says why.
pub fn comes_to(launcher: &mut Child, place: &Place, dir: &str, count: usize) -> Duration {
    let mut ended = None;
    let took = wait_until(&format!("step {count} of {dir}"), || {
        ended = launcher.try_wait().unwrap();
        ended.is_some() || steps(place, dir) >= count
    });
    if let Some(status) = ended {
        let mut text = String::new();
        launcher.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        panic!("{dir} ended before step {count}, {status}: {text}");
    }
    took
}

/// Waits for the end, which must come within this time.
pub fn end(mut child: Child, within: Duration) -> Output {
    // What is said must be read, or whoever says it waits.
    let read = |from: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            from.map_or(Ok(0), |mut from| from.read_to_end(&mut bytes)).map(|_| bytes)
        })
    };
    let out = read(child.stdout.take().map(|out| Box::new(out) as _));
    let err = read(child.stderr.take().map(|err| Box::new(err) as _));
    let until = Instant::now() + within;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            child.kill().unwrap();
            panic!("still there after {within:?}: {}", String::from_utf8_lossy(&err.join().unwrap().unwrap()));
        }
        sleep(Duration::from_millis(10));
    }
    let [stdout, stderr] = [out, err].map(|thread| thread.join().unwrap().unwrap());
    Output { status: child.wait().unwrap(), stdout, stderr }
}

/// What a command said on stderr.
pub fn said(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// A process of several, as torchrun would start it.
pub fn rank_of(place: &Place, (rank, ranks): (usize, usize), port: &str, args: &[&str]) -> Command {
    as_rank(place.command(args), (rank, ranks), port)
}

/// A command as a process of several.
pub fn as_rank(mut command: Command, (rank, ranks): (usize, usize), port: &str) -> Command {
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port);
    command
}
