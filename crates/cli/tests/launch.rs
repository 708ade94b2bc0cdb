//! Ranks that are processes, from whole commands: the bits of threads in every kind of layout, on any number of processes.

mod common;
mod launched;
mod layouts;

use common::{HANG, free_port, signal, steps};
use launched::{comes_to, end, rank_of, ranks_of, spawn};
use layouts::{SHORT, command, place};
use serde_json::Value;
use std::fs;
use std::time::{Duration, Instant};

/// Every second layout, from this one.
fn processes_give_the_bits_of_threads(first: usize) {
    let place = place();
    for (i, layout) in layouts::LAYOUTS.iter().enumerate().skip(first).step_by(2) {
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
fn processes_give_the_bits_of_threads_in_every_kind_of_layout() {
    processes_give_the_bits_of_threads(0);
}

#[test]
fn processes_give_the_bits_of_threads_in_every_other_kind_of_layout() {
    processes_give_the_bits_of_threads(1);
}

#[test]
fn a_run_goes_on_with_any_number_of_processes() {
    let place = place();
    let common = ["train.reproducible=true"];
    let parts: [(&str, &[&str]); 4] = [
        ("launch", &["parallel.dp=2"]),
        ("launch", &["parallel.dp=4", "parallel.zero=3"]),
        ("train", &["parallel.dp=2", "parallel.zero=1"]),
        ("launch", &["parallel.pp=4", "train.micro_batch=2"]),
    ];
    let run = ["train.steps=100000", "train.validate_every=0", "checkpoint.every=1"];
    for (verb, layout) in parts {
        let before = steps(&place, "parts");
        let args = command(verb, "parts", &[&run[..], &common, layout].concat());
        let mut child = spawn(place.command(&args));
        comes_to(&mut child, &place, "parts", before + 3);
        signal(child.id() as i32, libc::SIGTERM);
        assert_eq!(end(child, HANG).status.code(), Some(75));
    }
    let parts = place.trajectory("parts");
    let mut child = spawn(place.command(&command("train", "whole", &[&run[..], &common].concat())));
    comes_to(&mut child, &place, "whole", parts.len());
    signal(child.id() as i32, libc::SIGTERM);
    end(child, HANG);
    assert_eq!(parts, place.trajectory("whole")[..parts.len()]);
}

#[test]
fn processes_start_by_the_variables_of_torchrun() {
    let place = place();
    let set = [&SHORT[..], &["parallel.dp=2"]].concat();
    place.ok(&command("train", "threads", &set));
    let port = free_port();
    let ranks = [0, 1].map(|rank| spawn(rank_of(&place, (rank, 2), &port, &command("train", "run", &set))));
    let [_, other] = ranks.map(|child| {
        let output = end(child, HANG);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{text}");
        text
    });
    assert_eq!(place.trajectory("run"), place.trajectory("threads"));
    assert!(other.is_empty() || other == "rank 1: waiting for rank 0, which prepares the data\n", "{other}");
}

#[test]
fn every_step_tells_how_long_each_rank_computed() {
    let place = place();
    let set = [&SHORT[..], &["parallel.dp=2", "parallel.pp=2", "train.micro_batch=1"]].concat();
    place.ok(&command("launch", "run", &set));
    let metrics = fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), 4);
    for line in metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let busy: Vec<f64> = line["rank_busy_s"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
        let step = line["step_s"].as_f64().unwrap();
        assert!(busy.len() == 4 && busy.iter().all(|s| *s > 0.0 && *s < step), "{line}");
        let longest = busy[line["slowest_rank"].as_u64().unwrap() as usize];
        assert!(busy.iter().all(|s| *s <= longest), "{line}");
    }
}

/// Pins a process, all of its threads, to a core.
fn pin(pid: i32, core: usize) {
    for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        let id: i32 = thread.file_name().to_string_lossy().parse().unwrap();
        // SAFETY: a set of cores of its own, for a thread of a process that this test has started.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(core, &mut set);
            libc::sched_setaffinity(id, size_of::<libc::cpu_set_t>(), &set);
        }
    }
}

#[test]
fn a_rank_that_computes_longer_than_the_others_is_named() {
    // SAFETY: the set is this call's.
    let cores: Vec<usize> = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set);
        (0..libc::CPU_SETSIZE as usize).filter(|core| libc::CPU_ISSET(*core, &set)).collect()
    };
    let [slow_core, fast_core, ..] = cores[..] else {
        eprintln!("skipped: a rank is slowed down by sharing its core, and there is only one");
        return;
    };
    let place = place();
    // Few checkpoints: threads that write them take turns with a rank that is pinned. Micro-batches that take longer than a turn: schedulers let
    // those go first who have slept, so that ranks with a few milliseconds of work would not notice whom they share a core with.
    let long =
        ["train.global_batch=64", "train.micro_batch=32", "model.dim=128", "model.ffn=512", "checkpoint.every=0"];
    let keys = ["train.steps=100000", "train.validate_every=0", "parallel.dp=2", "train.threads=1"];
    let mut launcher = spawn(place.command(&command("launch", "run", &[&keys[..], &long].concat())));
    comes_to(&mut launcher, &place, "run", 2);
    let pids = ranks_of(&launcher);
    // Rank 1 has a core with three others that compute without end.
    pin(pids[0], fast_core);
    pin(pids[1], slow_core);
    let spin = |_| {
        let child = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        pin(child.id() as i32, slow_core);
        child
    };
    let mut others: Vec<_> = (0..3).map(spin).collect();
    // Where the machine is busy with other things, another may be named before.
    let named = || {
        let events = fs::read_to_string(place.path("run/events.jsonl")).unwrap_or_default();
        let event = |line: &str| serde_json::from_str::<Value>(line).ok();
        events.lines().filter_map(event).find(|event| event["event"] == "slow_rank" && event["rank"] == 1)
    };
    // The tests beside this one take both cores while they run: long enough for them to end.
    let until = Instant::now() + HANG;
    while named().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(50));
    }
    others.iter_mut().for_each(|child| {
        child.kill().unwrap();
        child.wait().unwrap();
    });
    signal(launcher.id() as i32, libc::SIGTERM);
    let text = String::from_utf8(end(launcher, HANG).stderr).unwrap();
    let event = named().unwrap_or_else(|| panic!("{text}"));
    assert!(event["busy_s"].as_f64() > event["others_s"].as_f64(), "{event}");
    let host = lockstep_exec::comm::processes::host();
    assert!(text.contains(&format!("warning: rank 1 on host {host} computes for ")), "{text}");
}
