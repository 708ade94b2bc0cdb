//! Runs over hosts whose network fails, from whole commands. `bench/scripts/hosts.sh` has more cases, and takes longer.

mod common;
mod launched;
mod layouts;
mod switched;

use common::{HANG, Place, steps, wait_until};
use launched::{as_rank, comes_to, end, said, spawn};
use layouts::{command, place};
use serde_json::Value;
use std::fs;
use std::process::Child;
use std::thread::sleep;
use std::time::Duration;
use switched::{Hosts, SKIPPED};

/// A run whose bits no number of data-parallel ranks changes.
const RUN: [&str; 7] = [
    "train.steps=150",
    "train.global_batch=6",
    "train.reproducible=true",
    "train.micro_batch=1",
    "train.validate_every=0",
    "train.device=cpu",
    "checkpoint.every=1000",
];

/// A rank on each host, in an order of their own.
fn start(hosts: &Hosts, place: &Place, ranks: usize, set: &[&str]) -> Vec<Child> {
    let args = command("train", "run", &[&RUN[..], set].concat());
    let one = |rank| {
        let mut command = as_rank(place.command(&args), (rank, ranks), "29500");
        command.env("MASTER_ADDR", Hosts::address(0)).env("LOCKSTEP_JOB_SECRET", "5e".repeat(32));
        spawn(hosts.on(rank, &command))
    };
    (0..ranks).map(one).collect()
}

fn ends_well(rank: Child) -> String {
    let output = end(rank, HANG);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    text
}

fn ends_alone(rank: Child) {
    let output = end(rank, HANG);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("1 of ") && text.contains("which is not more than half"), "{text}");
    assert!(text.contains("\nhint: look at the network between the hosts"), "{text}");
}

/// What has become of the run's ranks.
fn worlds(place: &Place) -> Vec<Value> {
    let text = fs::read_to_string(place.path("run").join("events.jsonl")).unwrap_or_default();
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter(|event| event["event"] == "world").collect()
}

/// The files of worlds that there are, without the first.
fn epochs(place: &Place) -> usize {
    let jobs = fs::read_dir(place.path("run").join(".elastic")).into_iter().flatten().flatten();
    let files = jobs.flat_map(|job| fs::read_dir(job.path()).into_iter().flatten().flatten());
    let is_one = |name: &str| name.starts_with("epoch-") && name != "epoch-0.json";
    files.filter(|file| file.file_name().to_str().is_some_and(is_one)).count()
}

#[test]
fn a_link_that_is_down_for_five_seconds_costs_five_seconds() {
    let Some(hosts) = Hosts::new(2) else { return eprintln!("{SKIPPED}") };
    let place = place();
    place.ok(&command("train", "alone", &RUN));
    let mut ranks = start(&hosts, &place, 2, &["parallel.dp=2"]);
    comes_to(&mut ranks[0], &place, "run", 3);
    hosts.unplug(1);
    sleep(Duration::from_secs(1));
    let before = steps(&place, "run");
    sleep(Duration::from_secs(4));
    assert!(before < 150 && steps(&place, "run") == before, "steps go on without a network");
    hosts.plug(1);
    let said: Vec<String> = ranks.into_iter().map(ends_well).collect();
    assert!(!said.concat().contains("is gone"), "{said:?}");
    assert_eq!(place.trajectory("run"), place.trajectory("alone"));
}

#[test]
fn of_a_partition_the_side_with_more_than_half_goes_on() {
    // Most of the time is waiting.
    std::thread::scope(|scope| {
        scope.spawn(the_larger_side_goes_on);
        scope.spawn(both_halves_end);
    });
}

fn the_larger_side_goes_on() {
    let Some(hosts) = Hosts::new(3) else { return eprintln!("{SKIPPED}") };
    let place = place();
    place.ok(&command("train", "alone", &RUN));
    let mut ranks = start(&hosts, &place, 3, &["parallel.dp=3", "cluster.elastic=1..3", "cluster.snapshot_every=1"]);
    comes_to(&mut ranks[0], &place, "run", 3);
    // The one that writes the run directory is alone.
    hosts.part(&[0]);
    let first = ranks.remove(0);
    wait_until("a world of two", || ranks[0].try_wait().unwrap().is_some() || !worlds(&place).is_empty());
    ranks.into_iter().for_each(|rank| drop(ends_well(rank)));
    // It sees by the file of their world that the others have gone on, and waits.
    let text = ends_well(first);
    assert!(text.contains("is gone: ") && text.contains("the others go on without this process"), "{text}");
    let worlds = worlds(&place);
    let world = &worlds[0];
    assert_eq!((&world["ranks"], &world["gone"], worlds.len(), epochs(&place)), (&2.into(), &vec![0].into(), 1, 1));
    assert!(world["cause"].as_str().unwrap().contains("rank 0 on host host0 is gone: "), "{world}");
    assert_eq!(place.trajectory("run"), place.trajectory("alone"));
}

fn both_halves_end() {
    let Some(hosts) = Hosts::new(2) else { return eprintln!("{SKIPPED}") };
    let place = place();
    let mut ranks = start(&hosts, &place, 2, &["parallel.dp=2", "cluster.elastic=1..2"]);
    comes_to(&mut ranks[0], &place, "run", 3);
    hosts.part(&[1]);
    ranks.into_iter().for_each(ends_alone);
    assert!(worlds(&place).is_empty() && epochs(&place) == 0);
}
