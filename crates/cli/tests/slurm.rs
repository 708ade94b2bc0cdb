//! Runs as jobs of a real Slurm, whose nodes are virtual ones of this machine: to the end, requeued, as a chain, cancelled.

mod common;

use common::{CONFIG, HANG, Place, free_port, wait_for_steps, wait_until};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A Slurm of eight nodes, which goes when the test ends.
struct Slurm {
    folder: tempfile::TempDir,
}

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/scripts/slurm-cluster.sh");

impl Slurm {
    /// Starts it where Debian's packages are installed; in CI, which installs them, they must be.
    fn start() -> Option<Self> {
        if Command::new("slurmctld").arg("-V").output().is_err() {
            assert!(std::env::var_os("LOCKSTEP_TEST_CLUSTER").is_none(), "Slurm is not installed");
            eprintln!("skipped: Slurm is not installed");
            return None;
        }
        // Short, since a socket is in it.
        let folder = tempfile::Builder::new().prefix("ls").tempdir_in("/tmp").unwrap();
        // The first of twenty ports that no other Slurm of this process has.
        let port = 12000 + free_port().parse::<u32>().unwrap() % 400 * 20;
        // Before it is up: what has started of it goes too where it does not come up.
        let slurm = Self { folder };
        let folder = slurm.folder.path();
        let up = Command::new(SCRIPT).arg("up").arg(folder).args(["8", "2", &port.to_string()]).output().unwrap();
        assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
        Some(slurm)
    }

    /// The processes that were started for it.
    fn daemons(&self) -> Vec<String> {
        let files = fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "pid"));
        files.map(|path| fs::read_to_string(path).unwrap().trim().to_owned()).collect()
    }

    fn conf(&self) -> PathBuf {
        self.folder.path().join("slurm.conf")
    }

    /// What a command of Slurm says.
    fn ask(&self, command: &[&str]) -> String {
        let output = Command::new(command[0]).args(&command[1..]).env("SLURM_CONF", self.conf()).output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Submits a run and gives its jobs.
    fn launch(&self, place: &Place, dir: &str, more: &[&str]) -> Vec<String> {
        let args = [&["launch", "run.toml", "--slurm", "--run-dir", dir], more].concat();
        let output = place.command(&args).env("SLURM_CONF", self.conf()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8(output.stdout).unwrap();
        let jobs = said.split_once(':').unwrap().0.rsplit_once("job").unwrap().1;
        jobs.trim_start_matches('s').split(',').map(|job| job.trim().to_owned()).collect()
    }

    fn state(&self, job: &str) -> String {
        let text = self.ask(&["scontrol", "-o", "show", "job", job]);
        text.split("JobState=").nth(1).unwrap().split(' ').next().unwrap().to_owned()
    }

    /// Lets a job that went back into the queue begin: Slurm gives it a time two minutes later.
    fn begin_again(&self, job: &str) {
        wait_until(&format!("job {job} in the queue"), || self.state(job) == "PENDING");
        self.ask(&["scontrol", "update", &format!("JobId={job}"), "StartTime=now"]);
    }

    /// Waits until a job is in this state.
    fn wait_for(&self, place: &Place, dir: &str, job: &str, state: &str) {
        let until = Instant::now() + HANG;
        while self.state(job) != state {
            let log = || fs::read_to_string(place.path(dir).join(format!("slurm-{job}.log"))).unwrap_or_default();
            assert!(Instant::now() < until, "{job} is {}, not {state}: {}", self.state(job), log());
            sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        let _ = Command::new(SCRIPT).arg("down").arg(self.folder.path()).stdin(Stdio::null()).status();
    }
}

#[test]
fn a_test_that_panics_leaves_no_daemon_behind() {
    let daemons = std::sync::Mutex::new(Vec::new());
    let panicked = std::panic::catch_unwind(|| {
        let slurm = Slurm::start()?;
        *daemons.lock().unwrap() = slurm.daemons();
        assert!(slurm.daemons().is_empty(), "as a test that fails");
        Some(())
    });
    let daemons = daemons.into_inner().unwrap();
    let Err(_) = panicked else { return };
    assert_eq!(daemons.len(), 10, "munged, slurmctld and a slurmd per node");
    for pid in daemons {
        // Nobody may be there to reap it.
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        assert!(status.is_empty() || status.contains("State:\tZ"), "{pid} is there: {status}");
    }
}

/// Four ranks on two nodes, long enough to be interrupted.
fn place() -> Place {
    let place = Place::new();
    let train = "steps = 100\nmicro_batch = 1";
    let config =
        CONFIG.replace("steps = 20", train).replace("kv_heads = 2", "kv_heads = 4").replace("every = 5", "every = 40");
    let config = config.replace("validate_every = 40", "validate_every = 30");
    place.config(&format!("{config}\n[parallel]\ndp = 2\ntp = 2\n\n[cluster]\ntime = \"20\"\nnodes = 2\n"));
    place
}

#[test]
fn jobs_train_to_the_end_are_requeued_chained_and_cancelled() {
    let Some(slurm) = Slurm::start() else { return };
    let place = place();
    // The time limit's signal, without the wait for it; at once, before the run is done.
    let interrupted = |dir: &str, more: &[&str]| {
        let jobs = slurm.launch(&place, dir, more);
        wait_for_steps(&place, dir, 3);
        slurm.ask(&["scancel", "--batch", "--signal=USR1", &jobs[0]]);
        jobs
    };
    let chain = interrupted("chain", &["--chain", "3"]);
    let requeued = interrupted("requeued", &[]);
    let whole = slurm.launch(&place, "whole", &[]);
    let cancelled = slurm.launch(&place, "cancelled", &["--set", "train.steps=100000", "--set", "checkpoint.every=0"]);
    assert_eq!((chain.len(), requeued.len(), whole.len(), cancelled.len()), (3, 1, 1, 1));
    wait_for_steps(&place, "cancelled", 3);
    slurm.ask(&["scancel", &cancelled[0]]);
    slurm.begin_again(&requeued[0]);
    place.ok(&["train", "run.toml", "--run-dir", "threads", "--quiet"]);

    slurm.wait_for(&place, "whole", &whole[0], "COMPLETED");
    slurm.wait_for(&place, "cancelled", &cancelled[0], "CANCELLED");
    slurm.wait_for(&place, "chain", &chain[0], "FAILED");
    slurm.wait_for(&place, "chain", &chain[1], "COMPLETED");
    slurm.wait_for(&place, "chain", &chain[2], "CANCELLED");
    slurm.wait_for(&place, "requeued", &requeued[0], "COMPLETED");
    for dir in ["whole", "chain", "requeued"] {
        assert_eq!(place.trajectory(dir), place.trajectory("threads"), "{dir}");
        assert!(!place.path(dir).join("failures.jsonl").exists());
    }
    let log = |dir: &str, job: &str| fs::read_to_string(place.path(dir).join(format!("slurm-{job}.log"))).unwrap();
    let text = log("requeued", &requeued[0]);
    let step = text.split_once("interrupted after step ").unwrap().1.split_once(' ').unwrap().0;
    let goes_on = format!("interrupted with a checkpoint: job {} goes back into the queue", requeued[0]);
    assert!(text.contains(&goes_on) && text.contains(&format!("resuming at step {step}")), "{text}");
    assert!(text.contains("finished 100 steps; ") && !text.contains("\nerror: "), "{text}");
    assert!(log("chain", &chain[1]).contains("resuming at step "));
    assert!(slurm.ask(&["scontrol", "-o", "show", "job", &chain[0]]).contains("ExitCode=75:0"));
    assert!(!place.path("chain").join(format!("slurm-{}.log", chain[2])).exists(), "the last of the chain has run");

    // What was cancelled has saved, and goes on.
    let steps = place.trajectory("cancelled").len().to_string();
    let list = place.ok(&["checkpoint", "list", "cancelled"]);
    assert!(list.contains(&steps), "{steps}: {list}");
    let change = format!("train.steps={}", steps.parse::<u32>().unwrap() + 1);
    let said = place.ok(&["train", "run.toml", "--run-dir", "cancelled", "--change", &change, "--quiet"]);
    assert!(said.starts_with("finished "), "{said}");
}

/// Ends all that runs on a node, as when it loses its power.
fn lose(slurm: &Slurm, node: &str) {
    // Other tests have nodes of the same names.
    let wanted = [format!("SLURMD_NODENAME={node}"), format!("SLURM_CONF={}", slurm.conf().display())];
    let of = |pid: &str| fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let on_node = |pid: &str| {
        let set = of(pid);
        wanted.iter().all(|wanted| set.split(|byte| *byte == 0).any(|set| set == wanted.as_bytes()))
    };
    let processes = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let tasks: Vec<String> = processes.filter(|name| name.parse::<u32>().is_ok() && on_node(name)).collect();
    assert!(!tasks.is_empty(), "nothing runs on {node}");
    // What has started a task belongs to the node as well, and is told apart from other tests' by it.
    let parent = |pid: &String| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.split(' ').nth(1).map(str::to_owned)
    };
    let stepd = |pid: &String| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim().starts_with("slurmstepd"))
    };
    let steps: Vec<String> = tasks.iter().filter_map(parent).filter(stepd).collect();
    let daemon = fs::read_to_string(slurm.folder.path().join(format!("slurmd-{node}.pid"))).unwrap().trim().to_owned();
    let all: Vec<String> = [daemon].into_iter().chain(steps).chain(tasks).collect();
    // Some end with others.
    let _ = Command::new("kill").arg("-KILL").args(&all).stderr(Stdio::null()).status().unwrap();
}

#[test]
fn an_elastic_job_goes_on_without_a_node_and_with_a_spare_one() {
    let Some(slurm) = Slurm::start() else { return };
    let place = Place::new();
    let train = "steps = 300\nmicro_batch = 1\nreproducible = true";
    let config = CONFIG
        .replace("steps = 20", train)
        .replace("every = 5", "every = 0")
        .replace("global_batch = 8", "global_batch = 12");
    let cluster = "\n[cluster]\ntime = \"20\"\nnodes = 4\nelastic = \"2..4\"\nsbatch = [\"--exclusive\"]\n";
    place.config(&format!("{config}\n[parallel]\ndp = 4\ntimeout = 20\n{cluster}"));
    let fewer = slurm.launch(&place, "fewer", &[]);
    let spare = ["--set", "cluster.elastic=\"2..3\"", "--set", "cluster.spares=1", "--set", "parallel.dp=3"];
    let spare = slurm.launch(&place, "spare", &spare);
    wait_for_steps(&place, "fewer", 20);
    wait_for_steps(&place, "spare", 20);
    // Each job has nodes of its own (`--exclusive`); the script runs on the first.
    for (job, which) in [(&fewer[0], 2), (&spare[0], 1)] {
        let text = slurm.ask(&["scontrol", "-o", "show", "job", job]);
        let nodes = text.split(" NodeList=").nth(1).unwrap().split(' ').next().unwrap();
        let nodes = slurm.ask(&["scontrol", "show", "hostnames", nodes]);
        lose(&slurm, nodes.lines().nth(which).unwrap());
    }
    slurm.wait_for(&place, "fewer", &fewer[0], "COMPLETED");
    slurm.wait_for(&place, "spare", &spare[0], "COMPLETED");
    place.ok(&["train", "run.toml", "--run-dir", "threads", "--quiet", "--set", "cluster.elastic=\"2..4\""]);
    assert_eq!(place.trajectory("fewer"), place.trajectory("threads"));
    for (dir, layout) in [("fewer", "dp=3"), ("spare", "dp=3")] {
        let events = fs::read_to_string(place.path(dir).join("events.jsonl")).unwrap();
        let world = events.lines().find(|line| line.contains("\"event\":\"world\"")).unwrap();
        let log = fs::read_dir(place.path(dir)).unwrap().flatten().map(|entry| entry.path());
        let log = log.filter(|path| path.extension().is_some_and(|end| end == "log")).map(fs::read_to_string);
        assert!(world.contains(layout), "{dir}: {world}\n{:?}", log.collect::<Vec<_>>());
    }
}

#[test]
fn the_script_asks_for_what_the_config_says_and_wrong_requests_are_refused() {
    let place = place();
    let base = ["launch", "run.toml", "--slurm", "--run-dir", "run"];
    let with = |more: &[&'static str]| [&base[..], more].concat();
    let set = [
        "--dry-run",
        "--time",
        "1-00:00:00",
        "--account",
        "me",
        "--partition",
        "gpu",
        "--set",
        "cluster.gpus_per_node=2",
        "--set",
        "cluster.cpus_per_rank=8",
        "--set",
        "cluster.modules=[\"cuda/13\"]",
        "--set",
        "cluster.setup=[\"export A='b c'\"]",
        "--set",
        "cluster.container=\"apptainer exec --nv l.sif\"",
        "--set",
        "cluster.srun=[\"--mpi=pmix\"]",
        "--set",
        "cluster.sbatch=[\"--exclusive\"]",
        "--set",
        "cluster.qos=\"high\"",
    ];
    let script = place.ok(&with(&set));
    let asks = [
        "--job-name=lockstep-run",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--time=1-00:00:00",
        "--output=run/slurm-%j.log",
        "--signal=B:USR1@180",
        "--account=me",
        "--partition=gpu",
        "--qos=high",
        "--gpus-per-node=2",
        "--cpus-per-task=8",
        "--requeue",
        "--open-mode=append",
        "--exclusive",
    ];
    let head: String = asks.iter().map(|ask| format!("#SBATCH {ask}\n")).collect();
    assert!(script.starts_with(&format!("#!/bin/bash\n{head}")), "{script}");
    assert!(script.contains("\nmodule load cuda/13\nexport A='b c'\n"), "{script}");
    let srun =
        "\nsrun --kill-on-bad-exit=1 --cpus-per-task=8 --mpi=pmix apptainer exec --nv l.sif lockstep train run.toml ";
    assert!(script.contains(srun) && !script.contains("--dry-run"), "{script}");
    let syntax = |script: &str| assert!(Command::new("bash").args(["-n", "-c", script]).status().unwrap().success());
    syntax(&script);
    let elastic = ["--dry-run", "--elastic", "2..4", "--nodes", "3", "--set", "cluster.spares=2"];
    let script = place.ok(&with(&elastic));
    assert!(script.contains("#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=2\n"), "{script}");
    assert!(script.contains("#SBATCH --no-kill\n") && script.contains("--no-kill --kill-on-bad-exit=0"), "{script}");
    assert!(script.contains("events=run/events.jsonl\n"), "{script}");
    syntax(&script);
    let chain = place.ok(&with(&["--dry-run", "--chain", "3"]));
    assert!(chain.contains("#SBATCH --no-requeue\n"), "{chain}");
    let last = "--dependency=afternotok:$job1,afternotok:$job2 --kill-on-invalid-dep=yes run/job.sh)\n";
    assert!(chain.ends_with(last) && chain.contains("# job1=$(sbatch --parsable run/job.sh)\n"), "{chain}");
    syntax(&chain);
    // Slurm replaces what follows a percent sign, and a line ends at a line break.
    let run_in = |dir: &'static str| vec!["launch", "run.toml", "--slurm", "--dry-run", "--run-dir", dir];
    assert!(place.ok(&run_in("50%j")).contains("#SBATCH --output=50%%j/slurm-%j.log\n"));
    for dir in ["a\nrm -rf b", "a\rb"] {
        let error = place.fails(2, &run_in(dir));
        assert!(error.contains("has a line break") && error.contains("\nhint: choose a --run-dir"), "{error}");
    }
    assert!(place.ok(&with(&["--dry-run", "--cluster", "leonardo"])).contains("#SBATCH --gpus-per-node=4\n"));
    let set = ["--dry-run", "--cluster", "leonardo", "--set", "cluster.gpus_per_node=2"];
    assert!(place.ok(&with(&set)).contains("#SBATCH --gpus-per-node=2\n"));
    assert!(place.fails(2, &with(&["--dry-run", "--cluster", "leonard"])).contains("leonardo"));
    assert!(!place.path("run").exists());

    let fails = |more: &[&'static str], expected: &str| {
        let error = place.fails(2, &with(more));
        assert!(error.contains(expected) && (error.contains("\nhint: ") || error.contains("--help")), "{error}");
    };
    fails(&["--nodes", "3"], "4 ranks (dp=2 tp=2) cannot be spread evenly over 3 nodes\nhint: cluster.nodes = 2 fits");
    fails(
        &["--set", "cluster.gpus_per_node=1"],
        "2 on each, and cluster.gpus_per_node = 1\nhint: cluster.nodes = 4 fits",
    );
    fails(&["--time", "2h"], "cluster.time = \"2h\" is no time limit of Slurm");
    fails(&["--time", "2"], "cluster.time = \"2\" leaves no time to train");
    fails(&["--set", "cluster.sbatch=[\"exclusive\"]"], "cluster.sbatch");
    fails(&["--restarts", "2"], "cannot be used with");
    let fails_too = place.fails(2, &["launch", "run.toml", "--chain", "2"]);
    assert!(fails_too.contains("--slurm"), "{fails_too}");
    place.config(&CONFIG.replace("[checkpoint]", "[parallel]\ndp = 2\n\n[checkpoint]"));
    fails(&[], "cluster.time is not set");
    let output = place.command(&with(&["--time", "9"])).env("PATH", "/nowhere").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && text.contains("sbatch cannot be started"), "{text}");
}
