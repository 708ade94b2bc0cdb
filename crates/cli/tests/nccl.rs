//! Ranks that are processes with a GPU each: what they ask NCCL for, bad starts, ranks that die or stall. No test here needs a GPU: a
//! fake driver and a fake NCCL stand in for them.

mod common;
mod fake_cuda;
mod launched;
mod layouts;

use common::{HANG, free_port, soon, wait_until};
use fake_cuda::Fake;
use lockstep_config::Config;
use lockstep_exec::comm::processes::host;
use lockstep_exec::comm::{Connection, communication_calls, connections};
use lockstep_host::Devices;
use lockstep_ir::MeshAxis;
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const TWO_GPUS: (&str, &str) = ("FAKE_CUDA_DEVICES", "2");

/// A short run.
fn launch<'a>(dir: &'a str, set: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["launch", "run.toml", "--run-dir", dir];
    let short = ["train.device=cuda", "train.steps=8", "checkpoint.every=4", "train.validation_sequences=0"];
    short.iter().chain(set).for_each(|set| args.extend(["--set", set]));
    args
}

/// What a rank has asked for.
fn log(fake: &Fake, rank: usize) -> Vec<String> {
    let text = std::fs::read_to_string(fake.place.path(&format!("log{rank}"))).unwrap();
    text.lines().map(str::to_owned).collect()
}

/// The log of one communicator.
fn of<'a>(log: &'a [String], id: &str) -> Vec<&'a str> {
    log.iter().filter_map(|line| line.strip_prefix(id)?.strip_prefix(' ')).collect()
}

#[test]
fn processes_ask_nccl_for_the_same_in_the_same_order_and_capture_it_once() {
    for (set, functions) in [
        (&["parallel.dp=2", "parallel.zero=3"][..], &["ncclAllGather", "ncclReduceScatter"][..]),
        (&["parallel.dp=2", "precision.policy=bf16"], &["ncclAllReduce"]),
        (&["parallel.pp=2", "train.micro_batch=2"], &["ncclSend", "ncclRecv"]),
        (
            &["model.architecture=mixtral", "model.experts=4", "parallel.ep=2", "parallel.zero=1"],
            &["ncclSend", "ncclRecv"],
        ),
    ] {
        let fake = Fake::new();
        let logs = fake.place.path("log");
        let faults = [TWO_GPUS, ("FAKE_NCCL_LOG", logs.to_str().unwrap())];
        let text = fake.ok(&launch("run", set), &faults);
        assert!(text.contains("finished 8 steps"), "{text}");
        assert_eq!(fake.place.trajectory("run").len(), 8);
        let logs = [log(&fake, 0), log(&fake, 1)];
        // Each takes the GPU of its local rank.
        assert_eq!(logs.each_ref().map(|log| log[0].as_str()), ["device is 0", "device is 1"]);
        let ids = |log: &[String]| -> Vec<String> {
            log.iter().filter_map(|line| Some(line.strip_prefix("init ")?.split_once(' ')?.0.to_owned())).collect()
        };
        assert_eq!(ids(&logs[0]), ids(&logs[1]), "{set:?}");
        assert!(!ids(&logs[0]).is_empty());
        let mut seen = String::new();
        for id in ids(&logs[0]) {
            let [mine, theirs] = logs.each_ref().map(|log| of(log, &id));
            // What one sends the other receives.
            let turned = |line: &&str| match line.strip_prefix("ncclSend") {
                Some(rest) => format!("ncclRecv{rest}"),
                None => (*line).to_owned(),
            };
            // The first message of every stream is of 4 bytes, and connects the two.
            let rest =
                |asked: Vec<&str>| asked.iter().map(turned).filter(|line| !line.ends_with(" 4")).collect::<Vec<_>>();
            let [mine, theirs] = [mine, theirs].map(rest);
            assert_eq!(mine, theirs, "{set:?}");
            // Once to try, once into the graph.
            let captured = mine.iter().filter(|line| line.contains(" captured ")).count();
            assert!(mine.is_empty() || captured * 2 == mine.len(), "{set:?}: {mine:?}");
            seen += &of(&logs[0], &id).join("\n");
            seen += &of(&logs[1], &id).join("\n");
            for log in &logs {
                assert!(log.contains(&format!("destroy {id} 0")) && !log.contains(&format!("abort {id} 0")), "{log:?}");
            }
        }
        functions.iter().for_each(|function| assert!(seen.contains(function), "{function}: {seen}"));
    }
}

#[test]
fn auto_takes_gpus_where_every_rank_has_one_and_train_gpu_is_the_first_of_them() {
    let fake = Fake::new();
    let logs = fake.place.path("log");
    let faults =
        [("FAKE_CUDA_DEVICES", "3"), ("FAKE_NCCL_LOG", logs.to_str().unwrap()), ("LOCKSTEP_POWERCAP", "nowhere")];
    fake.ok(&launch("run", &["train.device=auto", "parallel.dp=2", "train.gpu=1"]), &faults);
    assert_eq!([log(&fake, 0)[0].as_str(), log(&fake, 1)[0].as_str()], ["device is 1", "device is 2"]);
    let runs = fake.place.ok(&["runs", ".", "--format", "json"]);
    let run = serde_json::from_str::<serde_json::Value>(&runs).unwrap()["runs"][0].take();
    // Each rank had a GPU of its own.
    let hours = ["hours", "gpu_hours"].map(|key| run[key].as_f64().unwrap_or_else(|| panic!("{key}: {run}")));
    assert!(hours[0] > 0.0 && (hours[1] / hours[0] - 2.0).abs() < 1e-9, "{run}");
    assert!(fake.place.ok(&["runs", "."]).contains("GPU-hours"));
    // And took 500 W.
    let lines = std::fs::read_to_string(fake.place.path("run/metrics.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    let power = last["power_w"].as_f64().unwrap_or_else(|| panic!("{last}"));
    assert!((power / 1000.0 - 1.0).abs() < 0.5, "{last}");
    let text = fake.ok(&launch("cpu", &["train.device=auto", "parallel.dp=2"]), &[]);
    let why = format!("warning: training on the CPU: host {} has 1 GPU for 2 ranks", host());
    assert!(text.contains(&why), "{text}");
    let error = fake.fails(1, &["train", "run.toml", "--set", "train.device=cuda", "--set", "train.gpu=1"], &[]);
    assert!(error.starts_with("error: there is no GPU 1: 1 was found, counted from 0\nhint: "), "{error}");
}

#[test]
fn bad_starts_are_one_clear_error() {
    let fake = Fake::new();
    let two = launch("run", &["parallel.dp=2"]);
    let error = fake.fails(2, &two, &[]);
    assert!(error.starts_with(&format!("error: host {} has 1 GPU for 2 ranks\nhint: ", host())), "{error}");
    assert!(error.contains("--share-gpus"), "{error}");
    let text = fake.ok(&[&two[..], &["--share-gpus"]].concat(), &[]);
    assert!(text.contains("warning: ranks share GPUs") && text.contains("finished 8 steps"), "{text}");
    let error = fake.fails(1, &two, &[TWO_GPUS, ("FAKE_NCCL_VERSION", "21203")]);
    assert!(error.starts_with("error: NCCL 2.12.3 is too old: 2.17.0 or newer is needed ("), "{error}");
    let report = fake.ok(&["doctor"], &[("FAKE_NCCL_VERSION", "21203")]);
    assert!(report.contains("2.12.3 is too old") && report.contains("ready to train on the GPU"), "{report}");
    assert!(fake.ok(&["doctor"], &[]).contains("2.28.9, "));
    let without = Fake::without(&["libnccl.so.2"]);
    let report = without.ok(&["doctor"], &[]);
    if report.lines().any(|line| line.contains("NCCL") && line.contains("missing")) {
        let error = without.fails(1, &two, &[TWO_GPUS]);
        assert!(
            error.starts_with("error: NCCL was not found\nhint: install NCCL 2.17 or newer, or `pip install"),
            "{error}"
        );
        // One rank needs none.
        without.ok(&launch("one", &[]), &[]);
    }
}

#[test]
fn an_error_of_nccl_is_told_by_all_with_its_rank() {
    let fake = Fake::new();
    for fault in ["ncclAllReduce:3=3", "ncclCommInitRankConfig:1=2", "ncclGroupEnd:2=3", "ncclCommGetAsyncError:5=1"] {
        let mut command = fake.command(&launch("run", &["parallel.dp=2"]), &[TWO_GPUS, ("FAKE_CUDA_FAIL", fault)]);
        let output = end(command.stderr(Stdio::piped()).spawn().unwrap(), HANG);
        let function = fault.split(':').next().unwrap();
        assert_eq!(output.0, Some(1), "{fault}: {}", output.1);
        let said = format!("{function} failed: ");
        assert!(
            output.1.contains(&said) && output.1.contains("net.cc:42 no way (NCCL status "),
            "{fault}: {}",
            output.1
        );
        assert!(!output.1.contains("panicked"), "{}", output.1);
    }
}

#[test]
fn a_gpu_that_is_lost_ends_all_ranks_and_is_told_with_its_rank() {
    let fake = Fake::new();
    let port = free_port();
    let set = ["train.steps=100000", "checkpoint.every=0", "parallel.dp=2"];
    let args = [&["train"], &launch("run", &set)[1..]].concat();
    let rank = |rank: &str, lost: &[(&str, &str)]| {
        let places = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")];
        let faults = [&[TWO_GPUS, ("MASTER_PORT", &port)], &places[..], lost].concat();
        fake.command(&args, &faults).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks = [rank("0", &[]), rank("1", &[("FAKE_CUDA_LOSE", "cuGraphLaunch:5=719")])];
    let [(code, other), (lost_code, lost)] = ranks.map(|child| end(child, HANG));
    assert_eq!((code, lost_code), (Some(1), Some(1)), "{other}\n{lost}");
    assert!(lost.contains(&format!("error: rank 1 on host {}: the device was lost: ", host())), "{lost}");
    let told = other.contains(&format!("rank 1 on host {}", host())) && other.contains("the device was lost: ");
    assert!(told && other.contains("CUDA_ERROR_LAUNCH_FAILED, 719"), "{other}");
    assert!(!lost.contains("panicked") && !other.contains("panicked"), "{other}\n{lost}");
}

#[test]
fn collectives_over_nccl_are_checked_and_want_a_gpu_for_every_rank() {
    let fake = Fake::new();
    let bench = ["bench", "collectives", "--ranks", "2", "--processes", "--device", "cuda", "--to", "4KiB"];
    let error = fake.fails(2, &bench, &[]);
    assert!(error.starts_with(&format!("error: host {} has 1 GPU for 2 ranks\nhint: ", host())), "{error}");
    // This NCCL moves nothing.
    let output = fake.command(&bench, &[TWO_GPUS]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("all_reduce of 1.00 KiB gave rank ") && text.contains(" is right\nhint: "), "{text}");
}

/// Waits for the end, which must come within this time: the exit code, and what was said on stderr.
fn end(child: Child, within: Duration) -> (Option<i32>, String) {
    let output = launched::end(child, within);
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Waits until a rank has written this to its log, and gives how long that took.
fn wait_for_log(fake: &Fake, rank: usize, part: &str) -> Duration {
    let path = fake.place.path(&format!("log{rank}"));
    wait_until(&format!("{part} of rank {rank}"), || std::fs::read_to_string(&path).unwrap_or_default().contains(part))
}

/// The child of a process that is this rank.
fn rank_of(launcher: &Child, rank: usize) -> i32 {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", launcher.id())).unwrap();
    let is = |pid: &&str| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|b| *b == 0).any(|v| v == format!("RANK={rank}").as_bytes())
    };
    children.split_whitespace().find(is).unwrap().parse().unwrap()
}

#[test]
fn ranks_that_wait_on_the_device_for_one_that_is_killed_end_soon_and_say_where_they_were() {
    let fake = Fake::new();
    for (victim, abort) in [(1, "0"), (0, "60")] {
        let logs = fake.place.path("log");
        let faults = [
            ("FAKE_CUDA_DEVICES", "2"),
            ("FAKE_NCCL_LOG", logs.to_str().unwrap()),
            ("FAKE_CUDA_STUCK", "ncclAllReduce:3=1"),
            ("FAKE_NCCL_ABORT", abort),
        ];
        let dir = format!("run{victim}");
        let args = launch(&dir, &["parallel.dp=2"]);
        let launcher = fake.command(&args, &faults).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let survivor = 1 - victim;
        let start = wait_for_log(&fake, 0, "ncclAllReduce") + wait_for_log(&fake, 1, "ncclAllReduce");
        // Long enough to be stuck, and to be heard of.
        std::thread::sleep(start.max(Duration::from_millis(1500)));
        // SAFETY: a signal to a process that this test has started.
        assert_eq!(unsafe { libc::kill(rank_of(&launcher, victim), libc::SIGKILL) }, 0);
        let (code, text) = end(launcher, soon(start));
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(&format!("rank {victim} on host {} is gone: its process has ended", host())), "{text}");
        let waited = format!("; rank {survivor} waited in all_reduce");
        assert!(text.contains(&waited), "{text}");
        assert!(text.contains("last heard of in all_reduce"), "{text}");
        assert!(text.contains("was killed by signal 9") && !text.contains("panicked"), "{text}");
        assert!(log(&fake, survivor).iter().any(|line| line.starts_with("abort ")));
        let _ = (std::fs::remove_file(fake.place.path("log0")), std::fs::remove_file(fake.place.path("log1")));
    }
}

#[test]
fn ranks_that_do_not_get_on_end_after_the_timeout_and_name_op_and_layer() {
    let fake = Fake::new();
    let faults = [TWO_GPUS, ("FAKE_CUDA_STUCK", "ncclAllReduce:3=1")];
    let args = launch("run", &["parallel.dp=2", "parallel.timeout=2.0"]);
    let launcher = fake.command(&args, &faults).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let (code, text) = end(launcher, HANG);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains(" waits in all_reduce") && text.contains("raise parallel.timeout"), "{text}");
}

#[test]
fn a_rank_that_does_the_wrong_thing_is_named_by_the_strict_nccl() {
    for (wrong, said) in [
        ("1:absent", &[" waits for rank 1, which never came"][..]),
        // Whichever comes first is named first.
        ("1:size", &["ncclAllGather of 256 of type 1 on rank 0", "ncclAllGather of 257 of type 1 on rank 1"]),
        ("1:skip", &["collective 4 is ncclAllGather of "]),
        ("1:turn", &["collective 4 is ncclAllGather of "]),
    ] {
        let fake = Fake::new();
        let faults = [("FAKE_CUDA_DEVICES", "2"), ("FAKE_NCCL_LIMIT", "2"), ("FAKE_NCCL_WRONG", wrong)];
        let args =
            ["verify", "run.toml", "--steps", "1", "--processes", "--device", "cuda", "--layouts", "dp=2,zero=3"];
        let output = fake.command(&args, &faults).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{wrong}: {text}");
        assert!(text.contains("failed: ") && !text.contains("panicked"), "{wrong}: {text}");
        let errors = std::fs::read_to_string(fake.place.path("world.errors")).unwrap();
        let named = |line: &str| said.iter().all(|part| line.contains(part));
        assert!(errors.lines().any(named), "{wrong}: {errors}");
    }
}

/// A connection as `fake_cuda/connect.c` reads it.
fn named(number: usize, connection: &Connection) -> String {
    match connection {
        Connection::Group(group) => {
            format!("{number}:{}", group.ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
        }
        Connection::Messages { from, to, .. } => format!("{number}:{from}>{to}"),
    }
}

/// Messages of a rank to itself once were connections like all others: zb-v hung over NCCL, in every layout.
#[test]
fn the_strict_nccl_names_the_rank_that_waits_for_itself_where_zb_v_once_hung() {
    let fake = Fake::new();
    let connect = fake.place.path("connect");
    fake_cuda::compile(&[], &["connect.c", "fake.c", "device.c"], &connect);
    let keys = ["model.layers=4", "parallel.pp=2", "parallel.schedule=zb-v", "train.micro_batch=1"].map(str::to_owned);
    let config = Config::load(&fake.place.path("run.toml"), &keys).unwrap();
    let programs = lockstep_plan::plan(&Devices::new(), &config).unwrap().compiled.programs;
    // What all ranks communicate in, before what a rank does alone is left out.
    let mut all = BTreeSet::new();
    for rank in 0..2 {
        let here = programs[0].mesh.coordinates(rank);
        let calls = communication_calls(&programs[here.get(MeshAxis::Pp)], here);
        all.extend(calls.iter().flatten().flatten().map(|call| call.connection(rank)));
    }
    // Once a group of one rank was none, and a message had two ends whatever they were.
    let once = all.iter().filter(|c| matches!(c, Connection::Messages { .. }) || c.ranks().len() > 1);
    let once: Vec<_> = once.enumerate().map(|(number, c)| named(number, c)).collect();
    let now: Vec<_> = connections(&programs).iter().enumerate().map(|(number, c)| named(number, c)).collect();
    let own = once.iter().find(|connection| connection.ends_with(":1>1")).expect("zb-v's last rank sends to itself");
    assert!(!now.iter().any(|connection| connection.ends_with(":1>1")), "{now:?}");
    for (order, fits) in [(&once, false), (&now, true)] {
        // Who waits for another that does come never waits so long.
        let (name, limit) = if fits { ("now", "600") } else { ("once", "10") };
        let world = fake.place.path(name);
        let rank = |rank: &str| {
            let mut command = Command::new(&connect);
            command.arg(rank).args(order).env("FAKE_NCCL_WORLD", &world).env("FAKE_NCCL_LIMIT", limit);
            end(command.stderr(Stdio::piped()).spawn().unwrap(), HANG)
        };
        let (other, last) = std::thread::scope(|s| {
            let other = s.spawn(|| rank("0"));
            let last = rank("1");
            (other.join().unwrap(), last)
        });
        if fits {
            assert_eq!([other, last], [(); 2].map(|()| (Some(0), String::new())), "{order:?}");
        } else {
            let said = format!("communicator {own}: rank 0 waits for rank 1, which never came\n");
            assert_eq!(last, (Some(1), said), "{order:?}");
        }
    }
}

/// Worlds that a run has gone through, by its events.
fn worlds(fake: &Fake, dir: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(fake.place.path(dir).join("events.jsonl")).unwrap_or_default();
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter(|event| event["event"] == "world").collect()
}

#[test]
fn an_elastic_run_aborts_connects_and_captures_anew_when_ranks_are_killed() {
    let fake = Fake::new();
    let logs = fake.place.path("log");
    // Aborting takes long enough for a second rank to be killed meanwhile.
    let faults = [("FAKE_CUDA_DEVICES", "4"), ("FAKE_NCCL_LOG", logs.to_str().unwrap()), ("FAKE_NCCL_ABORT", "1")];
    let set = [
        "cluster.snapshot_every=2",
        "train.steps=100000",
        "train.global_batch=12",
        "train.micro_batch=1",
        "parallel.dp=4",
        "parallel.zero=1",
        "checkpoint.every=100000",
    ];
    let mut args = launch("run", &set);
    args.extend(["--elastic", "2..4", "--restarts", "1"]);
    let mut launcher = launched::spawn(fake.command(&args, &faults));
    let comes_to = |launcher: &mut Child, count| launched::comes_to(launcher, &fake.place, "run", count);
    comes_to(&mut launcher, 5);
    let kill = |launcher: &Child, rank| common::signal(rank_of(launcher, rank), libc::SIGKILL);
    // One that is started again, and joins.
    kill(&launcher, 1);
    wait_until("four ranks again", || {
        launcher.try_wait().unwrap().is_some() || worlds(&fake, "run").iter().any(|world| world["joined"] == 1)
    });
    let steps = common::steps(&fake.place, "run");
    comes_to(&mut launcher, steps + 3);
    // Two that are not, the second while the others abort. Rank 0 is one of them.
    kill(&launcher, 2);
    let aborts = |rank| log(&fake, rank).iter().filter(|line| line.starts_with("abort ")).count();
    let before = aborts(3);
    wait_until("rank 3 aborts", || aborts(3) > before);
    kill(&launcher, 0);
    wait_until("two ranks", || {
        launcher.try_wait().unwrap().is_some() || worlds(&fake, "run").last().is_some_and(|world| world["ranks"] == 2)
    });
    let steps = common::steps(&fake.place, "run");
    comes_to(&mut launcher, steps + 3);
    common::signal(launcher.id() as i32, libc::SIGTERM);
    let (code, text) = end(launcher, HANG);
    assert_eq!(code, Some(75), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    // What does not fit together would be written there.
    let errors = std::fs::read_to_string(fake.place.path("world.errors")).unwrap_or_default();
    assert!(errors.is_empty(), "{errors}");
    // In every world the rank that was in all of them has made communicators of that world's ranks, and captured its graphs anew.
    let log = log(&fake, 3);
    let of_four = log.iter().filter(|line| line.starts_with("init ") && line.ends_with(" 4")).count();
    assert!(of_four >= 2 && log.iter().any(|line| line.starts_with("init ") && line.ends_with(" 2")), "{log:?}");
    let captured: BTreeSet<&str> =
        log.iter().filter(|line| line.contains(" captured ")).filter_map(|line| line.split(' ').next()).collect();
    assert!(captured.len() >= 3, "{captured:?}");
}
