//! Ranks whose memory is corrupted from outside, while the run goes on: `cluster.cross_check` names them.

mod common;
mod launched;
mod layouts;

use common::{HANG, Place, signal, steps, wait_until};
use launched::{as_rank, comes_to, end, said, spawn};
use layouts::{command, place};
use lockstep_exec::comm::processes::host;
use lockstep_ir::Init;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Child;

const RUN: [&str; 6] = [
    "train.steps=100000",
    "train.micro_batch=1",
    "train.validate_every=0",
    "train.device=cpu",
    "checkpoint.every=1000",
    "model.rope_theta=10000",
];

/// Flips a bit of every place in the memory of a process that has these bytes, and says how many there are.
fn flip(process: &Child, wanted: &[u8]) -> std::io::Result<usize> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", process.id()))?;
    let memory = File::options().read(true).write(true).open(format!("/proc/{}/mem", process.id()))?;
    let mut found = 0;
    for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
        let (start, end) = line.split(' ').next().and_then(|range| range.split_once('-')).unwrap();
        let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).unwrap());
        let mut bytes = vec![0; (end - start) as usize];
        // Some cannot be read, or have gone meanwhile.
        if memory.read_exact_at(&mut bytes, start).is_err() {
            continue;
        }
        let mut from = 0;
        while let Some(at) = bytes[from..].windows(wanted.len()).position(|window| window == wanted) {
            memory.write_all_at(&[wanted[2] ^ 0x40], start + (from + at + 2) as u64)?;
            (from, found) = (from + at + wanted.len(), found + 1);
        }
    }
    Ok(found)
}

/// What was said of ranks that differ.
fn reports(place: &Place) -> Vec<Value> {
    let text = fs::read_to_string(place.path("run").join("events.jsonl")).unwrap_or_default();
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter(|event| event["event"] == "cross_check").collect()
}

/// Starts a run of ranks that compare themselves after every second step, flips a bit of what `wanted` gives in one of them, and gives what was
/// said; nothing where this test may not write into the memory of another process.
fn corrupted(
    place: &Place,
    layout: &[&str],
    (ranks, wrong): (usize, usize),
    wanted: &[u8],
) -> Option<(Vec<Value>, String)> {
    let args = command("train", "run", &[&RUN[..], &["cluster.cross_check=2"], layout].concat());
    let port = common::free_port();
    let one = |rank| spawn(as_rank(place.command(&args), (rank, ranks), &port));
    let mut children: Vec<Child> = (0..ranks).map(one).collect();
    comes_to(&mut children[0], place, "run", 4);
    assert!(reports(place).is_empty(), "{:?}", reports(place));
    let flipped = flip(&children[wrong], wanted);
    let before = steps(place, "run");
    if matches!(flipped, Ok(1..)) {
        comes_to(&mut children[0], place, "run", before + 4);
        wait_until("a report", || !reports(place).is_empty());
    }
    signal(children[0].id() as i32, libc::SIGTERM);
    let ended: Vec<_> = children.into_iter().map(|rank| end(rank, HANG)).collect();
    let text = said(&ended[0]);
    match flipped {
        Ok(0) => panic!("the bytes are not there: {text}"),
        Ok(_) => {
            let first = reports(place);
            // Within two steps.
            assert!(first[0]["step"].as_u64().unwrap() <= before as u64 + 4, "{first:?}");
            Some((first, text))
        }
        Err(error) => {
            eprintln!("skipped: no access to the memory of another process: {error}");
            None
        }
    }
}

/// The cosines and sines of RoPE at a position of the small model: of a constant that no step writes.
fn rope() -> Vec<u8> {
    let mut row = [0.0; 12];
    Init::RopeTable { theta: 1e4, scaling: None }.fill_from(0, "", row.len(), 17, &mut row);
    row.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[test]
fn a_rank_whose_memory_is_corrupted_is_named_by_the_majority() {
    let place = place();
    let layout = ["parallel.dp=3", "train.global_batch=6"];
    let Some((reports, text)) = corrupted(&place, &layout, (3, 1), &rope()) else { return };
    let named = |report: &&Value| report["ranks"] == json!([1]) && report["certain"] == true;
    let host = host();
    assert!(reports.iter().all(|report| report["ranks"] != json!([]) && report["hosts"][0] == *host), "{reports:?}");
    // The memory by its checksum, and what is computed with it.
    assert!(reports.iter().filter(named).any(|report| report["tensors"][0].is_string()), "{reports:?}");
    assert!(reports.iter().filter(named).any(|report| report["tensors"].is_null()), "{reports:?}");
    assert!(text.contains(&format!("rank 1 on host {host} has other values of ")), "{text}");
    assert!(
        text.contains(&format!("rank 1 on host {host} computes another loss of the same micro-batch than ")),
        "{text}"
    );
}

#[test]
fn of_two_ranks_both_are_named() {
    let place = place();
    let Some((reports, text)) = corrupted(&place, &["parallel.dp=2"], (2, 1), &rope()) else { return };
    assert!(reports.iter().all(|report| report["ranks"] == json!([0, 1]) && report["certain"] == false), "{reports:?}");
    assert!(text.contains("do not agree: each computes another loss of the same micro-batch"), "{text}");
}

#[test]
fn ranks_that_agree_are_not_named_and_the_run_does_not_notice() {
    let place = place();
    let layouts: [&[&str]; 3] = [
        &["parallel.dp=2", "parallel.pp=2"],
        &["parallel.dp=2", "parallel.tp=2", "parallel.zero=1", "precision.policy=bf16"],
        &["model.architecture=mixtral", "model.experts=4", "parallel.dp=2", "parallel.ep=2"],
    ];
    for (number, layout) in layouts.into_iter().enumerate() {
        let run = ["train.steps=4", "train.micro_batch=1", "train.validate_every=2", "train.device=cpu"];
        let trajectory = |name: &str, set: &[&str]| {
            let dir = format!("{name}{number}");
            place.ok(&command("train", &dir, &[&run[..], layout, set].concat()));
            (place.trajectory(&dir), fs::read_to_string(place.path(&dir).join("events.jsonl")).unwrap())
        };
        let (compared, events) = trajectory("compared", &["cluster.cross_check=1"]);
        assert!(!events.contains("cross_check"), "{layout:?}: {events}");
        assert_eq!(compared, trajectory("alone", &[]).0, "{layout:?}");
    }
}
