//! `lockstep launch --slurm`: the batch script of a run, and its submission.
//!
//! A job that is about to reach its time limit gets a signal, saves a checkpoint and ends with exit code 75. Its script then puts it
//! back into the queue; in a chain, the next job goes on instead.
//!
//! The job of an elastic run goes on without nodes that are lost. Its step then ends with the exit code of a rank that was lost, so the script asks the
//! run's events how it ended.

use crate::failure::{Failure, INTERRUPTED, Result};
use crate::shell::shell_quoted;
use crate::sites::{self, Site};
use crate::{hardware, train};
use lockstep_config::{ClusterConfig, Config};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[derive(clap::Args)]
#[group(skip)]
pub struct Args {
    /// Submit the run as a Slurm job: writes the batch script into the run directory and calls sbatch. What the job asks for
    /// stands in `[cluster]`; --dry-run prints the script.
    #[arg(long, conflicts_with_all = ["restarts", "fresh", "resume_from", "change"])]
    pub slurm: bool,
    /// Submit N jobs, each of which goes on where the one before it was interrupted, instead of one that is requeued: for
    /// sites that do not allow that. Those that are left when the run is done are cancelled.
    #[arg(long, value_name = "N", requires = "slurm", value_parser = clap::value_parser!(u32).range(1..=100))]
    chain: Option<u32>,
    /// Time limit of the job, as cluster.time.
    #[arg(long, value_name = "TIME", requires = "slurm")]
    time: Option<String>,
    /// Nodes of the job, as cluster.nodes.
    #[arg(long, value_name = "N", requires = "slurm")]
    nodes: Option<u32>,
    /// Partition of the job, as cluster.partition.
    #[arg(long, value_name = "NAME", requires = "slurm")]
    partition: Option<String>,
    /// Account that the job is charged to, as cluster.account.
    #[arg(long, value_name = "NAME", requires = "slurm")]
    account: Option<String>,
    /// The site that the job runs at (any wrong name lists them): its partition, GPUs per node, cores per rank and what else is known,
    /// where `[cluster]` does not say. Of other clusters of the catalogue: their GPUs per node.
    #[arg(long, value_name = "NAME", requires = "slurm")]
    cluster: Option<String>,
}

impl Args {
    /// The site that was named, if one was that is known.
    pub fn site(&self) -> Result<Option<Site>> {
        self.cluster.as_deref().map_or(Ok(None), sites::named)
    }

    /// What the named site or cluster has, as overrides of the config file.
    pub fn cluster_overrides(&self, config: &Path) -> Result<Vec<String>> {
        if let Some(site) = self.site()? {
            return Ok(site.overrides(config));
        }
        sites::require_known(self.cluster.as_deref())?;
        let found = hardware::named(None, self.cluster.as_deref(), None)?;
        Ok(found.iter().map(|found| format!("cluster.gpus_per_node={}", found.cluster.gpus_per_node)).collect())
    }

    /// What these say, as overrides of the config.
    pub fn overrides(&self) -> Vec<String> {
        let text = |key: &str, value: &Option<String>| value.as_ref().map(|value| format!("cluster.{key}={value:?}"));
        let nodes = self.nodes.map(|nodes| format!("cluster.nodes={nodes}"));
        let texts = [text("time", &self.time), text("partition", &self.partition), text("account", &self.account)];
        texts.into_iter().chain([nodes]).flatten().collect()
    }
}

/// Submits a run, or prints the script.
pub fn run(args: &Args, mut train: train::Args, config: &Config, ranks: usize) -> Result<()> {
    config.require_data()?;
    let dir = &train.run_dir();
    let only_show = std::mem::take(&mut train.dry_run);
    let job = Job::of(config, ranks, &train, dir, args.chain.is_none())?;
    let script = job.script()?;
    if only_show {
        let chain = args.chain.map_or(String::new(), |jobs| chain(jobs, &dir.join(SCRIPT)));
        write!(std::io::stdout(), "{script}{chain}")?;
        return Ok(());
    }
    std::fs::create_dir_all(dir).and_then(|()| std::fs::write(dir.join(SCRIPT), &script)).map_err(|e| {
        Failure::request(format!("cannot write {}: {e}", dir.join(SCRIPT).display()), "choose another --run-dir")
    })?;
    let path = dir.join(SCRIPT);
    let mut jobs: Vec<String> = Vec::new();
    for link in 0..args.chain.unwrap_or(1) {
        let mut command = Command::new("sbatch");
        command.arg("--parsable");
        if link > 0 {
            command.args(after(&jobs));
        }
        match submitted(command.arg(&path)) {
            Ok(job) => jobs.push(job),
            Err(failure) => {
                for job in &jobs {
                    // What cannot be cancelled starts, and trains.
                    let _ = Command::new("scancel").arg(job).stdin(Stdio::null()).status();
                }
                return Err(failure);
            }
        }
    }
    let mut out = std::io::stdout();
    let what = if jobs.len() == 1 { "job" } else { "jobs" };
    writeln!(out, "submitted {what} {}: {}", jobs.join(", "), job.summary())?;
    let log = |job: &str| shell_quoted(&job_log(dir, job).display().to_string());
    writeln!(out, "script {}, log {}", shell_quoted(&path.display().to_string()), log(&jobs[0]))?;
    let _ = writeln!(
        std::io::stderr(),
        "\ntry next:\n  squeue --job {}\n  tail -F {}\n  scancel {}    # stops with a checkpoint",
        jobs.join(","),
        log(&jobs[0]),
        jobs.join(" ")
    );
    Ok(())
}

/// What sbatch is told of a job after these: only if none of them has come to the end; a job whose turn never comes is cancelled.
fn after(jobs: &[String]) -> [String; 2] {
    let before: Vec<String> = jobs.iter().map(|job| format!("afternotok:{job}")).collect();
    [format!("--dependency={}", before.join(",")), "--kill-on-invalid-dep=yes".to_owned()]
}

/// How the jobs of a chain would be submitted, as comments after the script.
fn chain(jobs: u32, script: &Path) -> String {
    let script = shell_quoted(&script.display().to_string());
    let mut text = format!("\n# Submitted {jobs} times:\n");
    let names: Vec<String> = (1..jobs).map(|job| format!("$job{job}")).collect();
    for job in 0..jobs as usize {
        let after = if job == 0 { String::new() } else { after(&names[..job]).join(" ") + " " };
        text += &format!("# job{}=$(sbatch --parsable {after}{script})\n", job + 1);
    }
    text
}

/// Calls sbatch and gives the number of the job.
fn submitted(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().map_err(|e| {
        Failure::request(
            format!("sbatch cannot be started: {e}"),
            "call this on a login node of a Slurm cluster; --dry-run prints the script",
        )
    })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if !output.status.success() {
        let said = text(&output.stderr).replace("sbatch: error: ", "");
        let said = said.lines().next().unwrap_or("it does not say why").to_owned();
        return Err(Failure::request(
            format!("sbatch refuses the job: {said}"),
            "[cluster] says what it asks for; `sinfo` shows what there is, --dry-run the script",
        ));
    }
    // With a cluster's name after it, where there are several.
    Ok(text(&output.stdout).split(';').next().unwrap_or_default().to_owned())
}

/// The name of the script in the run directory.
const SCRIPT: &str = "job.sh";

/// The log of a job.
fn job_log(dir: &Path, job: &str) -> PathBuf {
    dir.join(format!("slurm-{job}.log"))
}

/// Nodes of a job of this many ranks, if they can be spread evenly.
pub fn nodes(cluster: &ClusterConfig, ranks: usize) -> usize {
    match (cluster.nodes, cluster.gpus_per_node) {
        (Some(nodes), _) => nodes,
        (None, Some(gpus)) => ranks.div_ceil(gpus),
        (None, None) => 1,
    }
}

/// A job as its script asks for it.
struct Job<'a> {
    cluster: &'a ClusterConfig,
    name: String,
    nodes: usize,
    ranks: usize,
    time: &'a str,
    /// The command of a rank, a word each.
    command: Vec<String>,
    log: String,
    requeue: bool,
    /// The events of a run that goes on without nodes that are lost.
    elastic: Option<String>,
}

impl<'a> Job<'a> {
    fn of(config: &'a Config, ranks: usize, train: &train::Args, dir: &Path, requeue: bool) -> Result<Self> {
        let cluster = &config.cluster;
        let Some(time) = cluster.time.as_deref() else {
            return Err(Failure::request(
                "cluster.time is not set: how long may the job run?",
                "write time = \"12:00:00\" below [cluster], or give --time 12:00:00",
            ));
        };
        let Some(seconds) = seconds(time) else {
            return Err(Failure::request(
                format!("cluster.time = {time:?} is no time limit of Slurm"),
                "write hours, minutes and seconds, such as \"12:00:00\", or with days before them, such as \
                 \"1-12:00:00\"",
            ));
        };
        let before = cluster.signal_before;
        if seconds <= before {
            return Err(Failure::request(
                format!(
                    "cluster.time = {time:?} leaves no time to train: the signal to save and stop comes \
                 cluster.signal_before = {before} s before its end"
                ),
                format!("take more time, or cluster.signal_before = {}", (seconds / 4).max(1)),
            ));
        }
        let per_node = cluster.gpus_per_node;
        // Those that wait for a place have nodes too.
        let (trained, ranks) = (ranks, ranks + cluster.spares);
        let nodes = nodes(cluster, ranks);
        if !ranks.is_multiple_of(nodes) || per_node.is_some_and(|gpus| ranks / nodes > gpus) {
            let why = match per_node.filter(|gpus| ranks.is_multiple_of(nodes) && ranks / nodes > *gpus) {
                Some(gpus) => format!(", {} on each, and cluster.gpus_per_node = {gpus}", ranks / nodes),
                None => String::new(),
            };
            let fits = |n: &usize| ranks.is_multiple_of(*n) && per_node.is_none_or(|gpus| ranks / n <= gpus);
            let near = (1..=ranks).filter(fits).min_by_key(|n| n.abs_diff(nodes)).unwrap_or(ranks);
            let spares = match cluster.spares {
                0 => String::new(),
                spares => format!(" and {spares} to spare"),
            };
            return Err(Failure::request(
                format!(
                    "{trained} ranks ({}){spares} cannot be spread evenly over {nodes} nodes{why}",
                    config.layout()
                ),
                format!("cluster.nodes = {near} fits"),
            ));
        }
        let lockstep = match cluster.container {
            // What the host has is not there.
            Some(_) => "lockstep".to_owned(),
            None => std::env::current_exe()?.display().to_string(),
        };
        let mut command = vec![lockstep, "train".to_owned()];
        command.extend(train.arguments().iter().map(|word| word.to_string_lossy().into_owned()));
        let stem = train.config.file().file_stem().unwrap_or("run".as_ref()).to_string_lossy().into_owned();
        Ok(Self {
            cluster,
            name: format!("lockstep-{stem}"),
            nodes,
            ranks,
            time,
            command,
            // Slurm replaces names after a percent sign.
            log: job_log(&PathBuf::from(dir.display().to_string().replace('%', "%%")), "%j").display().to_string(),
            requeue,
            elastic: cluster.elastic.is_some().then(|| dir.join("events.jsonl").display().to_string()),
        })
    }

    fn summary(&self) -> String {
        let Self { nodes, ranks, time, .. } = self;
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        format!("{ranks} rank{} on {nodes} node{}, time limit {time}", plural(*ranks), plural(*nodes))
    }

    /// The script, unless what it asks for cannot be written there.
    fn script(&self) -> Result<String> {
        let Self { cluster, name, nodes, ranks, time, command, log, requeue, elastic } = self;
        let per_node = ranks / nodes;
        let mut asks = vec![
            format!("--job-name={}", shell_quoted(name)),
            format!("--nodes={nodes}"),
            format!("--ntasks-per-node={per_node}"),
            format!("--time={time}"),
            format!("--output={}", shell_quoted(log)),
            // It reaches this script alone, which passes it on.
            format!("--signal=B:USR1@{}", cluster.signal_before),
        ];
        let mut ask = |flag: &str, value: Option<String>| asks.extend(value.map(|value| format!("--{flag}={value}")));
        ask("account", cluster.account.as_deref().map(shell_quoted));
        ask("partition", cluster.partition.as_deref().map(shell_quoted));
        ask("qos", cluster.qos.as_deref().map(shell_quoted));
        ask("gpus-per-node", cluster.gpus_per_node.map(|gpus| gpus.to_string()));
        ask("cpus-per-task", cluster.cpus_per_rank.map(|cpus| cpus.to_string()));
        let again = if *requeue { ["--requeue", "--open-mode=append"] } else { ["--no-requeue", "--open-mode=append"] };
        asks.extend(again.map(str::to_owned));
        asks.extend(elastic.iter().map(|_| "--no-kill".to_owned()));
        asks.extend(cluster.sbatch.iter().cloned());
        if let Some(ask) = asks.iter().find(|ask| ask.contains(char::is_control)) {
            let shown = ask.escape_debug();
            return Err(Failure::request(
                format!(
                    "#SBATCH {shown} has a line break or another control character, which ends a line of the job's \
                 script"
                ),
                "choose a --run-dir, config file or value of [cluster] without it",
            ));
        }
        let mut text = "#!/bin/bash\n".to_owned();
        asks.iter().for_each(|ask| text += &format!("#SBATCH {ask}\n"));
        text += "# Written by `lockstep launch --slurm`.\n\n";
        cluster.modules.iter().for_each(|module| text += &format!("module load {}\n", shell_quoted(module)));
        cluster.setup.iter().for_each(|line| text += &format!("{line}\n"));
        let mut srun = vec!["srun".to_owned()];
        let ends = match elastic {
            Some(_) => &["--no-kill", "--kill-on-bad-exit=0", "--wait=0"][..],
            None => &["--kill-on-bad-exit=1"],
        };
        srun.extend(ends.iter().map(|&end| end.to_owned()));
        srun.extend(cluster.cpus_per_rank.map(|cpus| format!("--cpus-per-task={cpus}")));
        srun.extend(cluster.srun.iter().cloned());
        srun.extend(cluster.container.clone());
        srun.extend(command.iter().map(|word| shell_quoted(word)));
        if let Some(events) = elastic {
            let events = shell_quoted(events);
            text += &format!("\nevents={events}\nbefore=$(cat \"$events\" 2>/dev/null | wc -l)");
        }
        text += &format!(
            "\n{} &\nstep=$!\n\
             # The signal to save and stop, which comes {} s before the time limit: the ranks exit with code {INTERRUPTED}. It ends the\n\
             # waiting, not what is waited for.\n\
             trap '[ -n \"$told\" ] || kill -USR1 $step; told=1 again=1' USR1\n\
             again=1\nwhile [ -n \"$again\" ]; do again=; wait $step; code=$?; done\n",
            srun.join(" "),
            cluster.signal_before
        );
        if elastic.is_some() {
            text += &format!(
                "# Ranks that were lost leave their exit code with the step. How the run ended is the last of its events.\n\
                 case $(tail -n +$((before + 1)) \"$events\" 2>/dev/null | tail -n 1) in\n    \
                 *'\"event\":\"finish\"'*) code=0 ;;\n    *'\"event\":\"interrupt\"'*) code={INTERRUPTED} ;;\nesac\n"
            );
        }
        if *requeue {
            text += &format!(
                "if [ $code -eq {INTERRUPTED} ]; then\n    echo \"interrupted with a checkpoint: job $SLURM_JOB_ID goes back into the \
                 queue\"\n    scontrol requeue $SLURM_JOB_ID && sleep 60\nfi\n"
            );
        }
        Ok(text + "exit $code\n")
    }
}

/// The seconds of a time limit as Slurm reads it: minutes, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM`, `D-HH:MM:SS`.
fn seconds(text: &str) -> Option<u64> {
    let number = |text: &str| text.parse::<u64>().ok().filter(|n| *n < 1 << 20 && !text.starts_with('+'));
    let parts = |clock: &str| clock.split(':').map(number).collect::<Option<Vec<u64>>>();
    let units: &[u64] = match text.split_once('-') {
        Some((days, clock)) => {
            let (days, parts) = (number(days)?, parts(clock)?);
            let of = [3600, 60, 1];
            return (parts.len() <= 3).then(|| 86400 * days + parts.iter().zip(of).map(|(n, of)| n * of).sum::<u64>());
        }
        None if text.matches(':').count() == 2 => &[3600, 60, 1],
        None => &[60, 1],
    };
    let parts = parts(text)?;
    (parts.len() <= units.len()).then(|| parts.iter().zip(units).map(|(n, of)| n * of).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_limits_are_those_of_slurm() {
        let good = [("30", 1800), ("90:30", 5430), ("12:00:05", 43205), ("1-12", 129_600), ("2-00:30", 174_600)];
        for (text, expected) in good.into_iter().chain([("7-00:00:01", 604_801)]) {
            assert_eq!(seconds(text), Some(expected), "{text}");
        }
        for bad in ["", "12h", "1-", "-5", "1:2:3:4", "12:00:", "two hours", "1.5", "9999999", "+5"] {
            assert_eq!(seconds(bad), None, "{bad}");
        }
    }
}
