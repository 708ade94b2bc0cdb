//! What goes wrong among ranks that are processes, from whole commands: kills, signals, stalls, full disks, cut links, bad starts.

mod common;
mod launched;
mod layouts;
mod switched;

use common::{HANG, Place, free_port, signal, soon, steps, wait_for_steps, wait_until};
use launched::{SQUARE, as_rank, begin, comes_to, end, rank_of, ranks_of, said, spawn};
use layouts::{command, place};
use lockstep_exec::comm::processes::host;
use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use switched::{Hosts, SKIPPED};

/// A run goes on from a checkpoint that is whole, in a launch of these keys, and is stopped again.
fn goes_on(place: &Place, dir: &str, set: &[&str]) {
    let before = fs::read_dir(place.path(dir).join("checkpoints")).unwrap().count();
    assert!(before > 0, "no checkpoint");
    let known = steps(place, dir);
    let mut launcher = begin(place, dir, set, &[]);
    comes_to(&mut launcher, place, dir, known + 2);
    signal(launcher.id() as i32, libc::SIGTERM);
    let output = end(launcher, HANG);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(75), "{text}");
    assert!(text.contains("resuming at step ") && !text.contains("damaged"), "{text}");
}

#[test]
fn a_rank_that_is_killed_is_named_by_all_and_no_checkpoint_is_harmed() {
    let place = place();
    for victim in [2, 0] {
        let dir = format!("run-{victim}");
        let mut launcher = begin(&place, &dir, &SQUARE, &["--quiet"]);
        let start = comes_to(&mut launcher, &place, &dir, 3);
        let pids = ranks_of(&launcher);
        assert_eq!(pids.len(), 4);
        signal(pids[victim], libc::SIGKILL);
        let output = end(launcher, soon(start));
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        let cause = format!("error: rank {victim} (process {}) was killed by signal 9\nhint: ", pids[victim]);
        assert!(text.contains(&cause), "{text}");
        let host = host();
        for rank in (0..4).filter(|rank| *rank != victim) {
            let who = if rank == 0 { String::new() } else { format!("rank {rank} on host {host}: ") };
            let start = format!("error: {who}rank {victim} on host {host} is gone: its process has ended");
            let line = text.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{rank}: {text}"));
            assert!(line.contains(&format!("; rank {rank} waited in ")), "{line}");
        }
        goes_on(&place, &dir, &SQUARE);
    }
}

#[test]
fn a_signal_to_any_rank_stops_all_after_the_same_step() {
    let place = place();
    // The launcher is the last.
    for (target, which) in [(0, libc::SIGTERM), (3, libc::SIGUSR1), (4, libc::SIGINT)] {
        let before = steps(&place, "run");
        let mut launcher = begin(&place, "run", &SQUARE, &[]);
        comes_to(&mut launcher, &place, "run", before + 2);
        signal(ranks_of(&launcher).get(target).copied().unwrap_or(launcher.id() as i32), which);
        let output = end(launcher, HANG);
        let (told, text) = (String::from_utf8(output.stdout.clone()).unwrap(), said(&output));
        assert_eq!(output.status.code(), Some(75), "{text}");
        let steps = place.trajectory("run").len();
        assert!(told.contains(&format!("interrupted after step {steps} of 100000; checkpoint ")), "{told}");
        assert!(!text.contains("error"), "{text}");
    }
}

/// `bench/scripts/kills.sh` does the same with 60 kills.
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
        wait_for_steps(&place, "killed", (steps(&place, "killed") + 1).min(59));
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
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(place.trajectory("killed"), place.trajectory("whole"));
    assert!(kills.len() >= 2, "{kills:?}");
    for rank in kills {
        assert!(text.contains(&format!("error: rank {rank} (process ")), "{rank}: {text}");
    }
    assert!(text.contains("starting again from the last checkpoint, 1 of 9 restarts"), "{text}");
}

#[test]
fn a_rank_that_is_stopped_ends_the_run_after_the_timeout() {
    let place = place();
    // Of ranks that get no core for so long as this machine takes for a start, nothing is heard either.
    let begun = Instant::now();
    place.ok(&command("launch", "start", &[&SQUARE[..], &["train.steps=2", "checkpoint.every=0"]].concat()));
    let timeout = begun.elapsed().as_secs_f64().max(2.0).ceil();
    let stop = |victim: usize| {
        let (dir, limit) = (format!("run-{victim}"), format!("parallel.timeout={timeout:.1}"));
        let set = [&SQUARE[..], &[limit.as_str()]].concat();
        let mut launcher = begin(&place, &dir, &set, &[]);
        let start = comes_to(&mut launcher, &place, &dir, 3);
        let pid = ranks_of(&launcher)[victim];
        signal(pid, libc::SIGSTOP);
        let output = end(launcher, Duration::from_secs_f64(timeout) + soon(start));
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        // Silence is noticed after 8 s at the latest, however long ranks are waited for.
        let silent = timeout.min(8.0);
        let noticed =
            format!("rank {victim} on host {} is gone: nothing was heard of its process for {silent:.1} s", host());
        // Or by those who wait for it, whichever looks first.
        let missed = format!(", for rank {victim}, which has been in ");
        assert_eq!(text.matches(&noticed).count() + text.matches(&missed).count(), 3, "{text}");
        assert!(text.contains(&format!("error: rank {victim} (process {pid}) was stopped by a signal; ")), "{text}");
        goes_on(&place, &dir, &SQUARE);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| stop(0));
        scope.spawn(|| stop(2));
    });
}

#[test]
fn a_rank_that_cannot_write_its_part_of_a_checkpoint_is_named_with_the_cause() {
    let place = place();
    let (port, set) = (free_port(), ["parallel.dp=2", "parallel.zero=1"]);
    let run = ["train.steps=100000", "train.validate_every=0", "checkpoint.every=1"];
    let args = command("train", "run", &[&run[..], &set].concat());
    let start = |rank: usize| {
        let mut command = rank_of(&place, (rank, 2), &port, &args);
        // Files that are too large then are an error, as a full disk is, and no signal.
        // SAFETY: a call that is safe between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
                Ok(())
            });
        }
        spawn(command)
    };
    let mut ranks = [start(0), start(1)];
    let took = comes_to(&mut ranks[0], &place, "run", 3);
    let limit = libc::rlimit { rlim_cur: 512, rlim_max: 512 };
    // SAFETY: the limit is this call's; the process is this test's.
    let done =
        unsafe { libc::prlimit(ranks[1].id() as i32, libc::RLIMIT_FSIZE, &raw const limit, std::ptr::null_mut()) };
    assert_eq!(done, 0);
    for child in ranks {
        let output = end(child, soon(took));
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        let cause = format!("rank 1 on host {}", host());
        assert!(text.contains(&cause) && text.contains("File too large") && text.contains("\nhint: "), "{text}");
    }
    goes_on(&place, "run", &set);
}

/// A file system of this many bytes, for as long as this lives; none where this process may not mount one.
struct Disk<'a>(&'a std::path::Path);

impl<'a> Disk<'a> {
    fn mount(at: &'a std::path::Path, size: &str) -> Option<Self> {
        fs::create_dir(at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(at).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then_some(Self(at))
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn a_full_disk_ends_all_ranks_and_harms_no_checkpoint() {
    let place = place();
    let path = place.path("run");
    let Some(_disk) = Disk::mount(&path, "24m") else {
        eprintln!("skipped: mounting a small file system takes root");
        return;
    };
    let mut launcher = begin(&place, "run", &[&SQUARE[..], &["checkpoint.keep=2"]].concat(), &[]);
    let start = comes_to(&mut launcher, &place, "run", 3);
    // Whatever room is left.
    let mut filler = fs::File::create(path.join("filler")).unwrap();
    while std::io::Write::write_all(&mut filler, &[7; 4096]).is_ok() {}
    drop(filler);
    let output = end(launcher, soon(start));
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("No space left on device") && text.contains("rank "), "{text}");
    fs::remove_file(path.join("filler")).unwrap();
    goes_on(&place, "run", &SQUARE);
}

#[test]
fn a_link_between_two_hosts_that_is_cut_is_noticed_and_named() {
    let Some(hosts) = Hosts::new(2) else {
        eprintln!("{SKIPPED}");
        return;
    };
    let place = place();
    let run = ["train.steps=100000", "train.validate_every=0", "checkpoint.every=1"];
    let args = command("train", "run", &[&run[..], &SQUARE].concat());
    let start = |rank: usize| {
        let mut command = rank_of(&place, (rank, 4), "29500", &args);
        command.env("MASTER_ADDR", Hosts::address(0));
        spawn(hosts.on(rank / 2, &command))
    };
    let mut ranks: Vec<Child> = (0..4).map(start).collect();
    let took = comes_to(&mut ranks[0], &place, "run", 3);
    hosts.part(&[1]);
    let until = Instant::now() + soon(took);
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = end(child, until.saturating_duration_since(Instant::now()));
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        // Whoever is on the other side of the cut.
        let other = 1 - rank / 2;
        let named =
            (2 * other..2 * other + 2).any(|gone| text.contains(&format!("rank {gone} on host host{other} is gone: ")));
        assert!(named && text.contains(&format!("; rank {rank} waited in ")), "{rank}: {text}");
    }
    goes_on(&place, "run", &SQUARE);
}

/// A process of a start that cannot succeed.
struct Starts<'a> {
    rank: usize,
    ranks: usize,
    args: Vec<&'a str>,
    binary: Option<&'a std::path::Path>,
}

const FOLDER: &str = "a folder of its own";
const VARIABLE: &str = "another variable that matters";
const CLOCK: &str = "another clock";

/// A library before that of C, in which the time is an hour ahead.
const HOUR_AHEAD: &str = "
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 3600;
    return result;
}
";

#[test]
fn bad_starts_are_one_clear_error_for_all() {
    let place = place();
    let dp = ["parallel.dp=2", "parallel.timeout=5.0", "train.steps=4"];
    let train = |dir, more: &[&'static str]| command("train", dir, &[&dp[..], more].concat());
    let other = place.path("lockstep");
    fs::copy(env!("CARGO_BIN_EXE_lockstep"), &other).unwrap();
    // As good a program, and another.
    std::io::Write::write_all(&mut fs::OpenOptions::new().append(true).open(&other).unwrap(), b"x").unwrap();

    let start = |rank, ranks, args| Starts { rank, ranks, args, binary: None };
    let pair = |second: Starts<'static>| vec![start(0, 2, train("run", &[])), second];
    let cases: Vec<(&str, Vec<Starts<'_>>, i32, &str)> = vec![
        (
            "another config",
            pair(start(1, 2, train("run", &["optimizer.lr=1e-2"]))),
            2,
            "were told different things:\n  optimizer.lr: 0.003 against 0.01\nhint: ",
        ),
        (FOLDER, pair(start(1, 2, train("other", &[]))), 2, "/other on host "),
        (
            "another number of ranks",
            vec![
                start(0, 2, train("run", &[])),
                start(1, 3, command("train", "run", &["parallel.dp=3", "train.global_batch=9"])),
            ],
            1,
            "is rank 1 of 3, and rank 0 counts 2 ranks",
        ),
        (
            "more ranks than the layout has",
            (0..3).map(|rank| start(rank, 3, train("run", &[]))).collect(),
            2,
            "the config has 2 ranks (dp=2), and 3 processes were started",
        ),
        (
            "a rank that is missing",
            vec![start(0, 2, train("run", &["parallel.timeout=0.5"]))],
            1,
            "rank 1 of 2 has not come within 500",
        ),
        (
            "no first rank",
            vec![start(1, 2, train("run", &["parallel.timeout=0.5"]))],
            1,
            "rank 1 found no rank 0 at 127.0.0.1:",
        ),
        (
            "twice the same rank",
            [0, 1, 1]
                .map(|rank| start(rank, 3, command("train", "run", &["parallel.dp=3", "train.global_batch=9"])))
                .into(),
            1,
            "rank 1 came twice: as process ",
        ),
        (
            "other changes",
            pair(Starts {
                args: [&train("run", &[])[..], &["--change", "optimizer.lr=0.05", "--resume-from", "6"]].concat(),
                ..start(1, 2, vec![])
            }),
            2,
            "were told different things:\n  --change: none against optimizer.lr=0.05\n  --resume-from: none against 6\nhint: ",
        ),
        (
            VARIABLE,
            pair(start(1, 2, train("run", &[]))),
            2,
            "were told different things:\n  NCCL_ALGO: none against Ring\nhint: ",
        ),
        (CLOCK, pair(start(1, 2, train("run", &[]))), 1, " by +3600 s\nhint: set the clocks"),
        (
            "another binary",
            vec![start(0, 2, train("run", &[])), Starts { binary: Some(&other), ..start(1, 2, train("run", &[])) }],
            1,
            "\nhint: start all ranks from the same binary",
        ),
    ];
    std::fs::write(place.path("clock.c"), HOUR_AHEAD).unwrap();
    let clock = place.path("clock.so");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&clock).arg(place.path("clock.c")).status();
    assert!(compiled.unwrap().success());
    for (name, starts, code, part) in cases {
        let port = free_port();
        let spawned = starts.iter().map(|s| {
            let mut command = Command::new(s.binary.unwrap_or(env!("CARGO_BIN_EXE_lockstep").as_ref()));
            if name == FOLDER {
                // Else they look for the secret in two places, and never meet.
                command.env("LOCKSTEP_JOB_SECRET", "5e".repeat(32));
            }
            command.args(&s.args).current_dir(place.path("")).stdin(Stdio::null());
            if name == VARIABLE && s.rank == 1 {
                command.env("NCCL_ALGO", "Ring");
            }
            if name == CLOCK && s.rank == 1 {
                command.env("LD_PRELOAD", &clock);
            }
            spawn(as_rank(command, (s.rank, s.ranks), &port))
        });
        let spawned: Vec<Child> = spawned.collect();
        for (i, child) in spawned.into_iter().enumerate() {
            let output = end(child, HANG);
            let text = said(&output);
            assert!(text.contains(part) && text.contains("\nhint: "), "{name}: {text}");
            assert_ne!(output.status.code(), Some(0), "{name}: {text}");
            assert!(i > 0 || output.status.code() == Some(code), "{name}: {:?} {text}", output.status);
        }
    }
    assert!(!place.path("run/checkpoints").exists());
}

#[test]
fn a_port_in_use_is_not_the_end_and_a_run_in_use_and_launches_that_cannot_be_meant_are_refused() {
    let place = place();
    let dp = ["parallel.dp=2", "parallel.timeout=10.0", "train.steps=4"];
    let launch = |more: &[&'static str]| [&command("launch", "run", &dp)[..], more].concat();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let long = ["parallel.dp=2", "train.steps=4"];
    let ranks = [1, 0].map(|rank| spawn(rank_of(&place, (rank, 2), &port, &command("train", "taken", &long))));
    for child in ranks {
        let output = end(child, HANG);
        assert!(output.status.success(), "{}", said(&output));
    }
    assert_eq!(steps(&place, "taken"), 4);
    assert!(!place.path("taken/.rendezvous").exists());

    let error = place.fails(2, &launch(&["--ranks", "4"]));
    assert!(error.contains("the config has 2 ranks (dp=2), and 4 processes were started\nhint: "), "{error}");
    let error = place.fails(2, &command("launch", "run", &["parallel.dp=3"]));
    assert!(error.contains("parallel.dp"), "{error}");
    let error = place.fails(2, &launch(&["--fresh", "--restarts", "2"]));
    assert!(error.contains("cannot be used with"), "{error}");
    assert!(place.ok(&launch(&["--dry-run"])).contains("nothing was started"));
    // A run that another process has is refused, by all ranks.
    let holder = lockstep_rundir::RunDir::open(&place.path("held")).unwrap();
    let error = place.fails(2, &command("launch", "held", &dp));
    assert!(error.contains("is in use by another process"), "{error}");
    drop(holder);
}

#[test]
fn wrong_variables_are_refused_at_once() {
    let place = place();
    let args = command("train", "run", &["parallel.dp=2", "train.steps=4"]);
    let begun = Instant::now();
    place.ok(&[&args[..], &["--dry-run"]].concat());
    let start = begun.elapsed();
    let check = |set: &[(&str, &str)], expected: &str| {
        let mut command = place.command(&args);
        command.env("MASTER_ADDR", "127.0.0.1").env("RANK", "0").env("WORLD_SIZE", "2");
        command.envs(set.iter().copied());
        let output = end(spawn(command), soon(start));
        let text = said(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(expected) && text.contains("\nhint: "), "{text}");
    };
    check(&[("RANK", "2")], "RANK=2 is not a rank of WORLD_SIZE=2");
    check(&[("RANK", "")], "RANK= is set and empty");
    check(&[("WORLD_SIZE", "0")], "WORLD_SIZE=0 leaves no process");
    check(&[("MASTER_PORT", "99999")], "MASTER_PORT=99999 is no port");
    check(&[("MASTER_PORT", "x")], "MASTER_PORT=x is no port");
}

#[test]
fn a_rank_that_ends_before_all_have_come_ends_the_waiting_of_the_others() {
    let place = place();
    let (port, set) = (free_port(), ["parallel.dp=2", "train.steps=4"]);
    let wrong = [&set[..], &["no.such=1"]].concat();
    let ranks = [(0, &set[..]), (1, &wrong)];
    let begun = Instant::now();
    let ranks = ranks.map(|(rank, set)| spawn(rank_of(&place, (rank, 2), &port, &command("train", "run", set))));
    let [first, second] = ranks.map(|child| end(child, HANG));
    let start = begun.elapsed();
    let text = said(&first);
    assert!(text.contains(&format!("rank 1 on host {} has ended before all had come: ", host())), "{text}");
    assert_eq!((first.status.code(), second.status.code()), (Some(1), Some(2)), "{text}");

    // Rank 0 is killed as soon as it is there.
    for wait in [0, 10, 40] {
        let launcher = begin(&place, "killed", &["parallel.dp=2"], &[]);
        let mut pids = Vec::new();
        wait_until("two ranks", || {
            pids = ranks_of(&launcher);
            pids.len() > 1
        });
        let pid = pids[0];
        sleep(Duration::from_millis(wait));
        signal(pid, libc::SIGKILL);
        let output = end(launcher, soon(start));
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(&format!("rank 0 (process {pid}) was killed by signal 9")), "{text}");
    }
}

#[test]
fn a_rank_that_is_stopped_when_the_run_is_done_does_not_hold_up_the_others() {
    let place = place();
    let set = ["train.steps=4", "train.validate_every=0", "checkpoint.every=0", "parallel.dp=2"];
    let launcher = spawn(place.command(&command("launch", "run", &set)));
    let done = || fs::read_to_string(place.path("run/events.jsonl")).unwrap_or_default().contains("\"finish\"");
    // Rank 0 writes a sample then; wherever in its end it is stopped, all must end.
    wait_until("the end of the run", done);
    let stopped = ranks_of(&launcher).first().copied();
    stopped.into_iter().for_each(|pid| signal(pid, libc::SIGSTOP));
    let output = end(launcher, HANG);
    let text = said(&output);
    if output.status.code() != Some(0) {
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("was stopped by a signal; it was killed when the others had ended"), "{text}");
    }
}

#[test]
fn a_run_that_ends_at_its_expert_bound_is_not_repeated() {
    let place = place();
    let experts = ["model.architecture=mixtral", "model.experts=4", "parallel.ep=2", "parallel.ep_bound=1.0"];
    let set = [&experts[..], &["train.steps=40", "train.validate_every=0"]].concat();
    let mut args = command("launch", "run", &set);
    args.extend(["--restarts", "3"]);
    let error = place.fails(1, &args);
    assert!(error.contains("parallel.ep_bound = 1 times an even share"), "{error}");
    assert!(!error.contains("starting again") && !error.contains("--restarts N"), "{error}");
    assert!(error.contains("so no restart helps"), "{error}");
}
