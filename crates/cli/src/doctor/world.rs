//! `lockstep doctor --world`: the processes of a job. Who is there, what each has, and what the links between them give.

use crate::Format;
use crate::failure::{Failure, Result};
use crate::processes::{self, ProcessPlace};
use crate::style;
use crate::table::table;
use lockstep_cuda::{device_count, device_name, survey_libraries};
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::{Link, Over, ProcessCommunicator, Waiting, conform, join, measure_link};
use lockstep_exec::comm::{CommError, Communicator, ProgramPlace, conformance};
use lockstep_exec::cpu;
use lockstep_ir::{Hint, units};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

/// How long processes wait for each other.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Up to this many ranks every link is measured and shown; of more, those to the next rank and to the first.
const ALL_LINKS: usize = 8;
/// Clocks that differ by more make times in logs of several hosts misleading.
const CLOCKS: f64 = 1.0;
/// A link that is this many times slower than the median stands out.
const SLOW: f64 = 4.0;

const PLACE: ProgramPlace = ProgramPlace { op: "doctor", layer: None, micro_batch: 0 };

/// Looks at the processes; where `conformance` names a device, checks how they communicate there.
pub fn run(conformance: Option<&str>, format: Format) -> Result<()> {
    let Some(place) = processes::place()? else {
        return Err(Failure::request(
            "no other processes were started with this one",
            "start it as `mpirun -n 4 lockstep doctor --world`, or with srun or torchrun",
        ));
    };
    processes::end_well(of_rank(&place, conformance, format).map_err(|failure| failure.of_rank(place.rank)))
}

fn of_rank(place: &ProcessPlace, conformance: Option<&str>, format: Format) -> Result<()> {
    let start = place.start(TIMEOUT, None, Waiting::default())?;
    let failed = |error: String, hint: Option<String>| {
        Failure::run(error, hint.unwrap_or_else(|| "please report this with the output of `lockstep doctor`".into()))
    };
    let lost = |error: CommError| failed(error.to_string(), error.hint());
    let comm = Arc::new(join(&start).map_err(|e| failed(e.to_string(), e.hint()))?);
    let (first, ranks) = (comm.rank() == 0, comm.ranks());
    if let Some(device) = conformance {
        let mut hold = Vec::new();
        if device == "cuda" {
            for (ordered, how) in [(true, "in rank order"), (false, "in NCCL's order")] {
                over_nccl(place, &comm, ordered).map_err(|e| failed(e.to_string(), e.hint()))?;
                hold.push(format!("collectives (sums {how}) and messages of {ranks} processes over NCCL"));
            }
        } else {
            conform(&comm, &start).map_err(|e| failed(e, None))?;
            hold.push(format!("collectives and messages of up to {ranks} processes over {}", over(&comm)));
        }
        if first {
            hold.iter().try_for_each(|what| writeln!(std::io::stdout(), "{what} hold"))?;
        }
        return Ok(());
    }
    let mut mine = About::this(&comm);
    if first && format == Format::Text {
        let _ = writeln!(std::io::stderr(), "measuring the links of {} ranks", comm.ranks());
    }
    for (a, b) in pairs(comm.ranks()) {
        if let Some(other) = [(a, b), (b, a)].into_iter().find(|(me, _)| *me == comm.rank()).map(|(_, other)| other) {
            let Link { latency, bytes_per_s, ahead } = measure_link(&comm, other).map_err(lost)?;
            mine.links.push(Measured { to: other, latency_s: latency, bytes_per_s, clock_ahead_s: ahead });
        }
        // One pair at a time, so that none is in another's way.
        comm.exchange(PLACE, &[]).map_err(lost)?;
    }
    let text = serde_json::to_vec(&mine).map_err(|e| failed(e.to_string(), None))?;
    let all = comm.exchange(PLACE, &text).map_err(lost)?;
    if !first {
        return Ok(());
    }
    let all: Result<Vec<About>, _> = all.iter().map(|text| serde_json::from_slice(text)).collect();
    let world = World { over: over(&comm), ranks: all.map_err(|e| failed(e.to_string(), None))? };
    format.print(|| json!(world), || world.text())
}

/// Checks communication between the GPUs of the processes.
fn over_nccl(place: &ProcessPlace, comm: &Arc<ProcessCommunicator>, ordered: bool) -> Result<(), ExecError> {
    let all = conformance::rank_connections(comm.ranks());
    let subject = lockstep_cuda::process_subject(&place.gpu()?, comm.clone(), &all, ordered)?;
    conformance::check_rank(&subject).map_err(|problem| match comm.failure() {
        Some(failure) => failure.into(),
        None => ExecError::Internal(problem),
    })
}

/// What bytes go over, and why not MPI.
fn over(comm: &ProcessCommunicator) -> String {
    match comm.over() {
        Over::Mpi(name) => name.clone(),
        Over::Tcp(None) => "TCP".to_owned(),
        Over::Tcp(Some(why)) => format!("TCP (no MPI: {why})"),
    }
}

/// The pairs of ranks whose links are measured.
fn pairs(ranks: usize) -> Vec<(usize, usize)> {
    let all = (0..ranks).flat_map(|a| (a + 1..ranks).map(move |b| (a, b)));
    all.filter(|(a, b)| ranks <= ALL_LINKS || *a == 0 || b - a == 1).collect()
}

/// What a process tells of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct About {
    host: String,
    pid: u32,
    cores: usize,
    free_bytes: Option<u64>,
    /// GPUs that it sees, and the one of its place among the ranks of its host.
    gpus: usize,
    gpu: Option<String>,
    /// What of CUDA is there: name and version.
    libraries: BTreeMap<String, String>,
    links: Vec<Measured>,
}

/// A link, as the rank at one end has measured it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Measured {
    to: usize,
    latency_s: f64,
    bytes_per_s: f64,
    clock_ahead_s: f64,
}

impl About {
    fn this(comm: &ProcessCommunicator) -> Self {
        let (members, rank) = (comm.members(), comm.rank());
        let local = members[..rank].iter().filter(|member| member.host == members[rank].host).count();
        let gpus = device_count();
        let found = survey_libraries().into_iter().filter_map(|f| Some((f.what, f.found.ok()?)));
        Self {
            host: members[rank].host.clone(),
            pid: members[rank].pid,
            cores: members[rank].cores,
            free_bytes: cpu::available_bytes(),
            gpus,
            // One that is shown a single GPU takes that.
            gpu: device_name(if gpus == 1 { 0 } else { local }),
            libraries: found.collect(),
            links: Vec::new(),
        }
    }
}

/// All processes.
#[derive(Debug, Serialize)]
struct World {
    over: String,
    /// By rank.
    ranks: Vec<About>,
}

impl World {
    fn text(&self) -> String {
        let mut text = format!("{} ranks over {}\n{}", self.ranks.len(), self.over, self.who());
        text += &self.libraries();
        text += &format!("\n{}\n{}", style::heading("bandwidth between ranks, in GB/s"), self.bandwidths());
        for (good, line) in self.verdicts() {
            text += &format!("{} {line}\n", style::verdict(good, if good { "ok     " } else { "warning" }));
        }
        text
    }

    /// Who is there. Clocks are those of rank 0 and what others say of theirs.
    fn who(&self) -> String {
        let row = |(rank, about): (usize, &About)| {
            let clock = match self.link(0, rank) {
                Some(link) => format!("{:+.2} ± {:.2} ms", link.clock_ahead_s * 1e3, link.latency_s * 1e3),
                None => "-".to_owned(),
            };
            let latency = self.link(0, rank).map_or("-".to_owned(), |link| format!("{:.0} µs", link.latency_s * 1e6));
            vec![
                rank.to_string(),
                about.host.clone(),
                about.pid.to_string(),
                about.cores.to_string(),
                about.free_bytes.map_or("unknown".to_owned(), units::bytes),
                about.gpu.clone().unwrap_or_else(|| "none".to_owned()),
                clock,
                latency,
            ]
        };
        let rows: Vec<Vec<String>> = self.ranks.iter().enumerate().map(row).collect();
        table(
            &["rank", "host", "~process", "cores", "~free memory", "GPU", "clock to rank 0", "latency to rank 0"],
            &rows,
        )
    }

    /// What of CUDA is there, one line each; where hosts differ, with the ranks.
    fn libraries(&self) -> String {
        let mut versions: BTreeMap<&str, BTreeMap<&str, Vec<usize>>> = BTreeMap::new();
        for (rank, about) in self.ranks.iter().enumerate() {
            for (name, version) in &about.libraries {
                versions.entry(name).or_default().entry(version).or_default().push(rank);
            }
        }
        let line = |(name, found): (&&str, &BTreeMap<&str, Vec<usize>>)| {
            let all = |ranks: &Vec<usize>| ranks.len() == self.ranks.len();
            let text: Vec<String> = found
                .iter()
                .map(|(version, ranks)| match all(ranks) {
                    true => (*version).to_owned(),
                    false => format!("{version} on ranks {ranks:?}"),
                })
                .collect();
            format!("{name}: {}\n", text.join("; "))
        };
        versions.iter().map(line).collect()
    }

    fn link(&self, from: usize, to: usize) -> Option<&Measured> {
        self.ranks.get(from)?.links.iter().find(|link| link.to == to)
    }

    /// Every link as a matrix, or of many ranks the slowest.
    fn bandwidths(&self) -> String {
        let ranks = self.ranks.len();
        let number = |link: &Measured| format!("{:.2}", link.bytes_per_s * 1e-9);
        if ranks <= ALL_LINKS {
            let titles: Vec<String> = (0..ranks).map(|to| format!("to {to}")).collect();
            let header: Vec<&str> = std::iter::once("from").chain(titles.iter().map(String::as_str)).collect();
            let cell = |from, to| self.link(from, to).map_or("-".to_owned(), number);
            let row = |from: usize| {
                std::iter::once(from.to_string()).chain((0..ranks).map(|to| cell(from, to))).collect::<Vec<_>>()
            };
            return table(&header, &(0..ranks).map(row).collect::<Vec<_>>());
        }
        let mut links = self.links();
        links.sort_by(|a, b| a.1.bytes_per_s.total_cmp(&b.1.bytes_per_s));
        let row = |(from, link): &(usize, &Measured)| {
            let host = |rank: usize| self.ranks[rank].host.clone();
            vec![format!("{from} to {}", link.to), host(*from), host(link.to), number(link)]
        };
        table(&["slowest links", "from host", "to host", "GB/s"], &links.iter().take(8).map(row).collect::<Vec<_>>())
    }

    fn links(&self) -> Vec<(usize, &Measured)> {
        let ranks = self.ranks.iter().enumerate();
        ranks.flat_map(|(rank, about)| about.links.iter().map(move |link| (rank, link))).collect()
    }

    /// What is right and what is not, a line each.
    fn verdicts(&self) -> Vec<(bool, String)> {
        let mut lines = Vec::new();
        let mut rates: Vec<f64> = self.links().iter().map(|(_, link)| link.bytes_per_s).collect();
        rates.sort_by(f64::total_cmp);
        let median = rates.get(rates.len() / 2).copied().unwrap_or(0.0);
        let slowest = self.links().into_iter().min_by(|a, b| a.1.bytes_per_s.total_cmp(&b.1.bytes_per_s));
        if let Some((from, link)) = slowest {
            let [least, usual] = [link.bytes_per_s, median].map(|rate| format!("{:.2} GB/s", rate * 1e-9));
            let slowest = format!("the slowest link is {from} to {}, {least}, the median {usual}", link.to);
            lines.push((link.bytes_per_s * SLOW > median, format!("all ranks reach each other; {slowest}")));
        }
        let clocks = self.ranks[0].links.iter().map(|link| link.clock_ahead_s);
        let (low, high) = clocks.fold((0.0f64, 0.0f64), |(low, high), x| (low.min(x), high.max(x)));
        lines.push((high - low < CLOCKS, format!("clocks differ by at most {:.2} ms", (high - low) * 1e3)));
        let mut seen: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for (rank, about) in self.ranks.iter().enumerate() {
            if let Some(gpu) = &about.gpu
                && let Some(other) = seen.insert((&about.host, gpu), rank)
            {
                lines
                    .push((false, format!("ranks {other} and {rank} on host {} have the same GPU: {gpu}", about.host)));
            }
        }
        let with = self.ranks.iter().filter(|about| about.gpu.is_some()).count();
        if 0 < with && with < self.ranks.len() {
            lines.push((false, format!("{with} of {} ranks have a GPU of their own", self.ranks.len())));
        }
        let differ = self.ranks.iter().any(|about| about.libraries != self.ranks[0].libraries);
        if differ {
            lines.push((false, "ranks have different libraries".to_owned()));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(host: &str, gpu: Option<&str>, links: &[(usize, f64, f64)]) -> About {
        let link = |&(to, bytes_per_s, clock_ahead_s): &(usize, f64, f64)| Measured {
            to,
            latency_s: 2e-5,
            bytes_per_s,
            clock_ahead_s,
        };
        About {
            host: host.into(),
            pid: 7,
            cores: 4,
            free_bytes: Some(1 << 30),
            gpus: usize::from(gpu.is_some()),
            gpu: gpu.map(str::to_owned),
            libraries: BTreeMap::new(),
            links: links.iter().map(link).collect(),
        }
    }

    #[test]
    fn what_stands_out_is_named() {
        let world = World {
            over: "TCP".into(),
            ranks: vec![
                about("a", Some("H200"), &[(1, 9e9, 0.0), (2, 1e9, 1.5)]),
                about("a", Some("H200"), &[(0, 9e9, 0.0), (2, 9e9, 1.5)]),
                about("b", None, &[(0, 9e9, -1.5), (1, 9e9, -1.5)]),
            ],
        };
        let bad: Vec<String> = world.verdicts().into_iter().filter(|(good, _)| !good).map(|(_, text)| text).collect();
        let parts = [
            "the slowest link is 0 to 2, 1.00 GB/s, the median 9.00 GB/s",
            "clocks differ by at most 1500.00 ms",
            "ranks 0 and 1 on host a have the same GPU: H200",
            "2 of 3 ranks have a GPU",
        ];
        assert_eq!(bad.len(), parts.len(), "{bad:?}");
        assert!(bad.iter().zip(parts).all(|(text, part)| text.contains(part)), "{bad:?}");
        let text = world.text();
        assert!(text.contains("+1500.00 ± 0.02 ms") && text.contains("20 µs"), "{text}");
    }

    #[test]
    fn few_ranks_measure_all_links_and_many_some() {
        assert_eq!(pairs(3), [(0, 1), (0, 2), (1, 2)]);
        assert_eq!(pairs(ALL_LINKS).len(), ALL_LINKS * (ALL_LINKS - 1) / 2);
        assert_eq!(pairs(64).len(), 63 + 62);
    }
}
