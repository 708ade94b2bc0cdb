//! Ranks that are processes, from whole commands: the bits of threads, kills, restarts, signals, bad starts.

mod common;
mod layouts;

use common::{Place, signal, wait_for_steps};
use layouts::{SHORT, command, place};
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

#[test]
fn processes_give_the_bits_of_threads_in_every_kind_of_layout() {
    let place = place();
    for (i, layout) in layouts::LAYOUTS.iter().enumerate() {
        let set = [&SHORT[..], layout].concat();
        let [threads, processes] = ["threads", "processes"].map(|kind| format!("{kind}-{i}"));
        place.ok(&command("train", &threads, &set));
        let mut args = command("launch", &processes, &set);
        args.extend(["--ranks", "4"]);
        let said = place.ok(&args);
        assert!(said.lines().last().unwrap().starts_with("finished 4 steps; checkpoint "), "{said}");
        layouts::same(&place, &processes, &threads, layout);
    }
}

#[test]
fn a_run_goes_on_with_any_number_of_processes() {
    let place = place();
    let common = ["train.reproducible=true", "train.steps=100000", "train.validate_every=0", "checkpoint.every=1"];
    let parts: [(&str, &[&str]); 4] = [
        ("launch", &["parallel.dp=2"]),
        ("launch", &["parallel.dp=4", "parallel.zero=3"]),
        ("train", &["parallel.dp=2", "parallel.zero=1"]),
        ("launch", &["parallel.pp=4", "train.micro_batch=2"]),
    ];
    for (verb, layout) in parts {
        let args = command(verb, "parts", &[&common[..], layout].concat());
        let child = place.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let before = fs::read_to_string(place.path("parts/metrics.jsonl")).unwrap_or_default().lines().count();
        wait_for_steps(&place, "parts", before + 3);
        signal(child.id() as i32, libc::SIGTERM);
        assert_eq!(end(child, Duration::from_secs(30)).status.code(), Some(75));
    }
    let parts = place.trajectory("parts");
    let child =
        place.command(&command("train", "whole", &common)).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.unwrap();
    wait_for_steps(&place, "whole", parts.len());
    signal(child.id() as i32, libc::SIGTERM);
    end(child, Duration::from_secs(30));
    assert_eq!(parts, place.trajectory("whole")[..parts.len()]);
}

/// A launch that runs until it is stopped.
fn begin(place: &Place, dir: &str, more: &[&str]) -> Child {
    let set = ["train.steps=100000", "train.validate_every=0", "checkpoint.every=1", "parallel.dp=2", "parallel.pp=2"];
    let mut args = command("launch", dir, &[&set[..], &["train.micro_batch=1"]].concat());
    args.extend(more);
    place.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The processes that a launcher has started, by rank.
fn ranks_of(launcher: &Child) -> Vec<i32> {
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

/// Waits for the end, which must come soon.
fn end(mut child: Child, within: Duration) -> Output {
    let until = Instant::now() + within;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            child.kill().unwrap();
            panic!("still there after {within:?}");
        }
        sleep(Duration::from_millis(10));
    }
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    child.stdout.take().unwrap().read_to_end(&mut stdout).unwrap();
    child.stderr.take().unwrap().read_to_end(&mut stderr).unwrap();
    Output { status: child.wait().unwrap(), stdout, stderr }
}

#[test]
fn a_rank_that_is_killed_is_named_by_all_and_no_checkpoint_is_harmed() {
    let place = place();
    for victim in [2, 0] {
        let dir = format!("run-{victim}");
        let launcher = begin(&place, &dir, &["--quiet"]);
        wait_for_steps(&place, &dir, 2);
        let pids = ranks_of(&launcher);
        assert_eq!(pids.len(), 4);
        signal(pids[victim], libc::SIGKILL);
        let output = end(launcher, Duration::from_secs(10));
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        let cause = format!("error: rank {victim} (process {}) was killed by signal 9\nhint: ", pids[victim]);
        assert!(text.contains(&cause), "{text}");
        let host = lockstep_exec::comm::processes::host();
        for rank in (0..4).filter(|rank| *rank != victim) {
            let who = if rank == 0 { String::new() } else { format!("rank {rank} on host {host}: ") };
            let start = format!("error: {who}rank {victim} on host {host} is gone: its process has ended");
            let line = text.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{rank}: {text}"));
            assert!(line.contains(&format!("; rank {rank} waited in ")), "{line}");
        }
        assert!(!text.contains("panicked"), "{text}");
        // It goes on from the last checkpoint.
        let launcher = begin(&place, &dir, &[]);
        sleep(Duration::from_millis(100));
        let steps = place.trajectory(&dir).len();
        wait_for_steps(&place, &dir, steps + 2);
        signal(launcher.id() as i32, libc::SIGTERM);
        let output = end(launcher, Duration::from_secs(30));
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(75), "{text}");
        assert!(text.contains("resuming at step ") && !text.contains("damaged"), "{text}");
    }
}

#[test]
fn a_signal_to_any_rank_stops_all_after_the_same_step() {
    let place = place();
    for target in [Some(0), Some(3), None] {
        let launcher = begin(&place, "run", &[]);
        let before = fs::read_to_string(place.path("run/metrics.jsonl")).unwrap_or_default().lines().count();
        wait_for_steps(&place, "run", before + 2);
        match target {
            Some(rank) => signal(ranks_of(&launcher)[rank], libc::SIGTERM),
            None => signal(launcher.id() as i32, libc::SIGINT),
        }
        let output = end(launcher, Duration::from_secs(30));
        let (said, text) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert_eq!(output.status.code(), Some(75), "{text}");
        let steps = place.trajectory("run").len();
        assert!(said.contains(&format!("interrupted after step {steps} of 100000; checkpoint ")), "{said}");
        assert!(!text.contains("error"), "{text}");
    }
}

#[test]
fn killed_again_and_again_a_run_restarts_by_itself_and_ends_with_the_same_bits() {
    let place = place();
    let set = ["train.steps=60", "checkpoint.every=1", "train.validate_every=20", "parallel.dp=2", "parallel.tp=2"];
    let set = [&set[..], &["train.micro_batch=1"]].concat();
    place.ok(&command("train", "whole", &set));
    let mut args = command("launch", "killed", &set);
    args.extend(["--restarts", "9"]);
    let mut launcher = place.command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut kills = Vec::new();
    for attempt in 0..6u64 {
        let steps = place.path("killed/metrics.jsonl");
        let before = fs::read_to_string(&steps).unwrap_or_default().lines().count();
        wait_for_steps(&place, "killed", (before + 1).min(59));
        sleep(Duration::from_millis(lockstep_ir::counter::bits(3, attempt) % 30));
        let pids = ranks_of(&launcher);
        let rank = lockstep_ir::counter::bits(4, attempt) as usize % 4;
        // Between two attempts there is nobody to kill.
        if let (Some(pid), 4) = (pids.get(rank), pids.len())
            && launcher.try_wait().unwrap().is_none()
        {
            signal(*pid, libc::SIGKILL);
            kills.push(rank);
        }
    }
    let output = launcher.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{text}");
    assert_eq!(place.trajectory("killed"), place.trajectory("whole"));
    assert!(kills.len() >= 2, "{kills:?}");
    for rank in kills {
        assert!(text.contains(&format!("error: rank {rank} (process ")), "{rank}: {text}");
    }
    assert!(text.contains("starting again from the last checkpoint, 1 of 9 restarts"), "{text}");
}

/// Starts processes as torchrun would, each with arguments of its own, and gives how they ended.
fn start(place: &Place, ranks: usize, args: &[Vec<&str>]) -> Vec<(Option<i32>, String)> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let child = |(rank, args): (usize, &Vec<&str>)| {
        let mut command = place.command(args);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<Child> = args.iter().enumerate().map(child).collect();
    let ended = children.into_iter().map(|child| end(child, Duration::from_secs(60)));
    ended.map(|output| (output.status.code(), String::from_utf8(output.stderr).unwrap())).collect()
}

#[test]
fn processes_start_by_the_variables_of_torchrun() {
    let place = place();
    let set = [&SHORT[..], &["parallel.dp=2"]].concat();
    place.ok(&command("train", "threads", &set));
    let ended = start(&place, 2, &[command("train", "run", &set), command("train", "run", &set)]);
    assert!(ended.iter().all(|(code, _)| *code == Some(0)), "{ended:?}");
    assert_eq!(place.trajectory("run"), place.trajectory("threads"));
    assert!(
        ended[1].1.is_empty() || ended[1].1 == "rank 1: waiting for rank 0, which prepares the data\n",
        "{ended:?}"
    );
}

#[test]
fn bad_starts_are_one_clear_error_for_all() {
    let place = place();
    let dp = ["parallel.dp=2", "parallel.timeout=5.0", "train.steps=4"];
    let train = |dir, more: &[&'static str]| command("train", dir, &[&dp[..], more].concat());
    let all_say = |ended: &[(Option<i32>, String)], code: i32, part: &str| {
        assert_eq!(ended[0].0, Some(code), "{ended:?}");
        assert!(ended.iter().all(|(code, text)| *code != Some(0) && text.contains(part)), "{part}: {ended:?}");
    };
    let ended = start(&place, 2, &[train("run", &[]), train("run", &["optimizer.lr=1e-2"])]);
    all_say(&ended, 2, "do not have the same config: lr = 0.003");
    let ended = start(&place, 2, &[train("run", &[]), train("other", &[])]);
    all_say(&ended, 2, "is not the folder of this name");
    let ended = start(&place, 3, &vec![train("run", &[]); 3]);
    all_say(&ended, 2, "the config has 2 ranks (dp=2), and 3 processes were started");
    let ended = start(&place, 2, &[train("run", &["parallel.timeout=0.5"])]);
    all_say(&ended, 1, "rank 1 of 2 has not come within 500");
    assert!(!place.path("run/checkpoints").exists());

    let error = place.fails(2, &[&command("launch", "run", &dp)[..], &["--ranks", "4"]].concat());
    assert!(error.contains("the config has 2 ranks (dp=2), and 4 processes were started\nhint: "), "{error}");
    let error = place.fails(2, &command("launch", "run", &["parallel.dp=3"]));
    assert!(error.contains("parallel.dp"), "{error}");
    let error = place.fails(2, &[&command("launch", "run", &dp)[..], &["--fresh", "--restarts", "2"]].concat());
    assert!(error.contains("cannot be used with"), "{error}");
    assert!(place.ok(&[&command("launch", "run", &dp)[..], &["--dry-run"]].concat()).contains("nothing was started"));
    // A run that another process has is refused, by all ranks.
    let holder = lockstep_train::RunDir::open(&place.path("held")).unwrap();
    let error = place.fails(2, &command("launch", "held", &dp));
    assert!(error.contains("is in use by another process"), "{error}");
    drop(holder);
}
