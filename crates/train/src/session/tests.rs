//! What each of several processes reads of the data. The processes are threads here, with real sockets between them.

use super::*;
use crate::{Existing, Processes, RunData};
use lockstep_exec::comm::processes::Start;
use lockstep_plan::plan;
use std::net::TcpListener;
use std::time::Duration;

/// Which sequences of a micro-batch each rank has read: tokens and targets.
fn read_by_rank(keys: &str) -> Vec<[Vec<usize>; 2]> {
    let dir = tempfile::tempdir().unwrap();
    let text: String = (0..900).map(|i| format!("{} times {} is {}.\n", i % 31, i % 17, (i % 31) * (i % 17))).collect();
    std::fs::write(dir.path().join("all.txt"), text).unwrap();
    let toml = format!(
        "[model]\nvocab_size = 256\nlayers = 4\ndim = 16\nheads = 2\nffn = 32\n[data]\npaths = [\".\"]\nextensions = [\"txt\"]\n\
         [train]\nseq = 16\nglobal_batch = 8\nmicro_batch = 2\nthreads = 1\n[parallel]\n{keys}\n"
    );
    std::fs::write(dir.path().join("run.toml"), toml).unwrap();
    let config = Config::load(&dir.path().join("run.toml"), &[]).unwrap();
    let never = AtomicBool::new(false);
    let data = RunData::prepare(&config, &dir.path().join("data"), Existing::Reuse, &never, &mut |_, _| ()).unwrap();
    let (samples, ranks) = (data.train(&config).unwrap(), config.layout().mesh.ranks());
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let rank = |rank: usize| {
        let timeout = Duration::from_secs(20);
        let start = Start { rank, ranks, address: address.clone(), timeout, build: "test".into(), mpi: None };
        let devices = Devices::of_processes(Processes::join(&start, &config, None).unwrap());
        let mut session = Session::new(&devices, &config, &plan(&devices, &config).unwrap()).unwrap();
        // No token has this number.
        session.feed.forget(u32::MAX);
        session.load_batch(&samples, Batch { first_sample: 3, sequences: session.feed.batch() }).unwrap();
        assert_eq!(session.targets, (session.feed.batch() * 16) as u64);
        session.feed.read(u32::MAX)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|r| scope.spawn(move || rank(r))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_process_reads_the_sequences_that_its_rank_computes_and_no_others() {
    let none: Vec<usize> = Vec::new();
    let check = |keys: &str, expected: Vec<[Vec<usize>; 2]>| assert_eq!(read_by_rank(keys), expected, "{keys}");
    let half = [vec![0, 1], vec![2, 3]];
    check("dp = 2", half.iter().map(|rows| [rows.clone(), rows.clone()]).collect());
    // The first stage embeds tokens, the last has the loss, and those between need neither.
    let stages = [[true, false], [false, false], [false, true]];
    let stage = |reads: [bool; 2]| half.clone().map(|rows| reads.map(|r| if r { rows.clone() } else { none.clone() }));
    check("dp = 2\npp = 3", stages.into_iter().flat_map(stage).collect());
    // Ranks that share sequences read the same.
    let pair: Vec<usize> = vec![0, 1];
    check("tp = 2", vec![[pair.clone(), pair.clone()]; 2]);
    check("dp = 2\ndp_replicate = 2\nzero = 3", {
        let of = |from: usize| vec![from, from + 1];
        (0..4).map(|rank| [of(2 * rank), of(2 * rank)]).collect()
    });
}
