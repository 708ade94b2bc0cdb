//! Runs that go on when ranks are lost, and when others join, from whole commands. `bench/scripts/elastic.sh` kills 200 times.

mod common;
mod launched;
mod layouts;

use common::{HANG, Place, signal, steps, wait_until};
use launched::{as_rank, comes_to, end, ranks_of, said, spawn};
use layouts::{command, place};
use serde_json::Value;
use std::fs;
use std::process::{Child, Command};

/// A run of a few steps whose bits no number of data-parallel ranks changes.
const RUN: [&str; 9] = [
    "train.steps=120",
    "train.global_batch=12",
    "train.reproducible=true",
    "train.micro_batch=1",
    "train.validate_every=20",
    "train.device=cpu",
    "checkpoint.every=1000",
    "parallel.dp=4",
    "parallel.zero=1",
];

/// What has become of the run's ranks.
fn worlds(place: &Place, dir: &str) -> Vec<Value> {
    let text = fs::read_to_string(place.path(dir).join("events.jsonl")).unwrap_or_default();
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter(|event| event["event"] == "world").collect()
}

fn begin(place: &Place, dir: &str, set: &[&str], more: &[&str]) -> Child {
    let mut args = command("launch", dir, &[&RUN[..], set].concat());
    args.extend(more);
    spawn(place.command(&args))
}

fn waits_for_worlds(launcher: &mut Child, place: &Place, dir: &str, count: usize) {
    wait_until(&format!("world {count} of {dir}"), || {
        launcher.try_wait().unwrap().is_some() || worlds(place, dir).len() >= count
    });
    assert!(worlds(place, dir).len() >= count, "the run ended before");
}

fn ends_well(launcher: Child) -> String {
    let output = end(launcher, HANG);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn ranks_are_lost_and_join_and_no_loss_has_another_bit() {
    let place = place();
    place.ok(&command("train", "alone", &RUN[..7]));
    let set = ["cluster.elastic=2..4", "cluster.snapshot_every=2"];
    let mut launcher = begin(&place, "run", &set, &["--restarts", "3"]);
    for (kill, victim) in [0, 2].into_iter().enumerate() {
        let before = steps(&place, "run");
        comes_to(&mut launcher, &place, "run", before + 3);
        signal(ranks_of(&launcher)[victim], libc::SIGKILL);
        // A world without it, and one with the process in its place.
        wait_until("the process in its place", || {
            let joined = worlds(&place, "run").iter().filter(|world| world["joined"] == 1).count();
            launcher.try_wait().unwrap().is_some() || joined > kill
        });
    }
    let text = ends_well(launcher);
    assert_eq!(place.trajectory("run"), place.trajectory("alone"));
    let worlds = worlds(&place, "run");
    let lost: Vec<&Value> = worlds.iter().filter(|world| world["gone"] != serde_json::json!([])).collect();
    assert!(!lost.is_empty() && lost.iter().all(|world| world["from_memory"] == true), "{worlds:?}");
    assert!(lost.iter().all(|world| world["lost_steps"].as_u64().unwrap() <= 3), "{worlds:?}");
    assert!(worlds.iter().all(|world| world["changes_bits"] == false), "{worlds:?}");
    assert!(worlds.iter().any(|world| world["joined"] == 1 && world["ranks"] == 4), "{worlds:?}");
    assert!(text.contains("ranks go on (dp=3 zero=1) from step ") && text.contains(" in memory: "), "{text}");
    let last = fs::read_to_string(place.path("run").join("metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(last.lines().last().unwrap()).unwrap();
    let goodput = last["goodput"].as_f64().unwrap();
    assert!(goodput > 0.0 && goodput < 1.0, "{goodput}");
    // What was said is in the report as well.
    place.ok(&["report", "run", "-o", "report.html"]);
    let report = fs::read_to_string(place.path("report.html")).unwrap();
    assert!(
        report.contains(": ranks lost and joined</h2>") && report.contains("ranks go on (dp=3 zero=1)"),
        "no history"
    );
    assert!(report.contains(&format!("Goodput: {:.1}% of the time", 100.0 * goodput)), "no goodput");
}

#[test]
fn ranks_that_no_layout_has_a_place_for_wait() {
    let place = place();
    place.ok(&command("train", "alone", &[&RUN[..7], &["train.global_batch=8"]].concat()));
    let mut launcher = begin(&place, "run", &["cluster.elastic=1..4", "train.global_batch=8"], &[]);
    comes_to(&mut launcher, &place, "run", 3);
    signal(ranks_of(&launcher)[1], libc::SIGKILL);
    waits_for_worlds(&mut launcher, &place, "run", 1);
    // Three ranks do not divide eight sequences: two train. When one of these is lost, the third takes its place.
    let first = worlds(&place, "run")[0].clone();
    assert_eq!((&first["ranks"], &first["spares"]), (&2.into(), &1.into()), "{first}");
    let before = steps(&place, "run");
    comes_to(&mut launcher, &place, "run", before + 2);
    signal(ranks_of(&launcher)[0], libc::SIGKILL);
    ends_well(launcher);
    assert_eq!(place.trajectory("run"), place.trajectory("alone"));
    let worlds = worlds(&place, "run");
    assert_eq!(worlds.last().unwrap()["ranks"], 2, "{worlds:?}");
}

#[test]
fn a_spare_takes_the_place_of_a_lost_rank_with_the_same_layout() {
    let place = place();
    place.ok(&command("train", "alone", &RUN[..7]));
    let set = ["cluster.elastic=2..4", "cluster.spares=1", "cluster.snapshot_every=2"];
    // What is asked for once is not asked for again by the spare.
    let mut launcher = begin(&place, "run", &set, &["--fresh"]);
    comes_to(&mut launcher, &place, "run", 3);
    assert_eq!(ranks_of(&launcher).len(), 5);
    signal(ranks_of(&launcher)[1], libc::SIGKILL);
    let text = ends_well(launcher);
    let worlds = worlds(&place, "run");
    let world = &worlds[0];
    assert_eq!(
        (&world["layout"], &world["gone"], &world["joined"]),
        (&"dp=4 zero=1".into(), &vec![1].into(), &1.into())
    );
    assert!(worlds.len() == 1 && world["from_memory"] == true && world["changes_bits"] == false, "{text}");
    assert_eq!(place.trajectory("run"), place.trajectory("alone"));
    // The first world is a first one for those that wait, too.
    let events = fs::read_to_string(place.path("run").join("events.jsonl")).unwrap();
    assert!(events.lines().any(|line| line.contains("\"validation\"") && line.contains("\"step\":0,")), "{events}");
}

#[test]
fn too_few_ranks_end_the_run_and_the_same_command_goes_on() {
    let place = place();
    let set = ["cluster.elastic=4..4", "checkpoint.every=1"];
    let mut launcher = begin(&place, "run", &set, &[]);
    comes_to(&mut launcher, &place, "run", 4);
    signal(ranks_of(&launcher)[3], libc::SIGKILL);
    let output = end(launcher, HANG);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("3 of 4 ranks are left, and cluster.elastic asks for 4 at least\nhint: "), "{text}");
    let text = ends_well(begin(&place, "run", &set, &[]));
    assert!(text.contains("resuming at step "), "{text}");
    place.ok(&command("train", "alone", &RUN[..7]));
    assert_eq!(place.trajectory("run"), place.trajectory("alone"));
}

#[test]
fn an_elastic_run_stops_when_it_is_asked_to() {
    let place = place();
    let mut launcher = begin(&place, "run", &["cluster.elastic=2..4"], &[]);
    comes_to(&mut launcher, &place, "run", 3);
    signal(ranks_of(&launcher)[2], libc::SIGKILL);
    waits_for_worlds(&mut launcher, &place, "run", 1);
    signal(launcher.id() as i32, libc::SIGTERM);
    let output = end(launcher, HANG);
    assert_eq!(output.status.code(), Some(75), "{}", said(&output));
}

/// A process as it would come late, with a secret.
fn late(place: &Place, secret: &str, args: &[&str]) -> Command {
    let mut command = as_rank(place.command(args), (1, 2), "29555");
    command.env("LOCKSTEP_JOINS_LATE", "1").env("LOCKSTEP_JOB_SECRET", secret);
    command
}

#[test]
fn who_is_of_another_config_or_job_does_not_join() {
    let place = place();
    let secret = "5e".repeat(32);
    let set = [&RUN[..7], &["cluster.elastic=1..4", "parallel.dp=2", "train.steps=100000"]].concat();
    let args = command("train", "run", &set);
    let port = common::free_port();
    let mut ranks: Vec<Child> = (0..2)
        .map(|rank| {
            let mut command = as_rank(place.command(&args), (rank, 2), &port);
            command.env("LOCKSTEP_JOB_SECRET", &secret);
            spawn(command)
        })
        .collect();
    comes_to(&mut ranks[0], &place, "run", 2);
    // Another config, by one key.
    let other = [&set[..], &["optimizer.lr=0.5"]].concat();
    let output = end(spawn(late(&place, &secret, &command("train", "run", &other))), HANG);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("was started with another config than this process: it cannot join\nhint: "));
    // One who does not know the secret finds no run, and the run does not see it.
    let mut stranger = spawn(late(&place, &"5f".repeat(32), &args));
    let before = steps(&place, "run");
    comes_to(&mut ranks[0], &place, "run", before + 3);
    assert!(stranger.try_wait().unwrap().is_none() && worlds(&place, "run").is_empty());
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    // And one of the job joins.
    let mut third = spawn(late(&place, &secret, &args));
    waits_for_worlds(&mut ranks[0], &place, "run", 1);
    assert_eq!(worlds(&place, "run")[0]["ranks"], 3);
    signal(third.id() as i32, libc::SIGTERM);
    for rank in ranks {
        let output = end(rank, HANG);
        assert_eq!(output.status.code(), Some(75), "{}", said(&output));
    }
    assert_eq!(third.wait().unwrap().code(), Some(75));
}

#[test]
fn two_join_together_where_no_layout_has_a_place_for_one() {
    let place = place();
    let secret = "5e".repeat(32);
    // Three ranks do not divide eight sequences.
    let more = ["train.global_batch=8", "cluster.elastic=1..4", "parallel.dp=2", "train.steps=100000"];
    let args = command("train", "run", &[&RUN[..7], &more].concat());
    let port = common::free_port();
    let mut ranks: Vec<Child> = (0..2)
        .map(|rank| {
            let mut command = as_rank(place.command(&args), (rank, 2), &port);
            command.env("LOCKSTEP_JOB_SECRET", &secret);
            spawn(command)
        })
        .collect();
    comes_to(&mut ranks[0], &place, "run", 2);
    for _ in 0..2 {
        assert!(worlds(&place, "run").is_empty());
        ranks.push(spawn(late(&place, &secret, &args)));
        let before = steps(&place, "run");
        comes_to(&mut ranks[0], &place, "run", before + 2);
    }
    waits_for_worlds(&mut ranks[0], &place, "run", 1);
    assert_eq!(worlds(&place, "run")[0]["ranks"], 4);
    signal(ranks[2].id() as i32, libc::SIGTERM);
    for rank in ranks {
        let output = end(rank, HANG);
        assert_eq!(output.status.code(), Some(75), "{}", said(&output));
    }
}

#[test]
fn bounds_that_cannot_be_meant_are_refused() {
    let place = place();
    for (bounds, problem) in [
        ("cluster.elastic=4..2", "cluster.elastic = \"4..2\" is not two numbers of ranks"),
        ("cluster.elastic=1..2", "cluster.elastic = \"1..2\" allows at most 2 ranks, and the layout has 4"),
        ("cluster.elastic=5..6", "cluster.elastic = \"5..6\" needs at least 5 ranks, and the layout has 4"),
        ("cluster.elastic=1..5 cluster.spares=1", "lets more than the 4 ranks of the layout train: none would wait"),
        ("cluster.spares=1", "cluster.spares = 1, and the run is not elastic: nobody's place would be taken"),
    ] {
        let set: Vec<&str> = bounds.split(' ').collect();
        let output = end(begin(&place, "run", &set, &[]), HANG);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(problem) && text.contains("\nhint: "), "{text}");
    }
    let auto = command("launch", "run", &["train.steps=2", "parallel.layout=auto", "cluster.elastic=1..2"]);
    let text = said(&end(spawn(place.command(&[&auto[..], &["--ranks", "2"]].concat())), HANG));
    assert!(text.contains("cluster.elastic does not go with parallel.layout = \"auto\""), "{text}");
}

#[test]
fn what_would_fail_again_ends_the_run_though_others_wait_to_join() {
    let place = place();
    // Losses that are not finite end all ranks, and the one that is started again must not wait for ever.
    let set = ["cluster.elastic=2..4", "optimizer.lr=1e30", "optimizer.grad_clip=0", "train.steps=100000"];
    let mut launcher = begin(&place, "run", &set, &["--restarts", "9"]);
    comes_to(&mut launcher, &place, "run", 1);
    if let Some(pid) = ranks_of(&launcher).get(2) {
        signal(*pid, libc::SIGKILL);
    }
    let output = end(launcher, HANG);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("not finite"), "{text}");
}
