//! What each of several processes reads of the data, of which there may be much. The processes are threads here, with real sockets between them.

use super::*;
use lockstep_exec::comm::processes::{JobSecret, Start, Waiting};
use lockstep_host::Processes;
use lockstep_infer::{Existing, RunData};
use lockstep_plan::plan;
use std::net::TcpListener;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The devices of a rank that has joined the others at an address.
fn joined(rank: usize, ranks: usize, address: &str, config: &Config) -> Devices {
    let start = Start {
        rank,
        ranks,
        address: address.to_owned(),
        timeout: Duration::from_secs(20),
        build: "test".into(),
        mpi: None,
        secret: JobSecret::from_hex(&"5e".repeat(32)),
        board: None,
        waiting: Waiting::default(),
    };
    Devices::of_processes(Processes::join(&start, config, None).unwrap())
}

/// Fills the buffers of tokens and targets with what is no token.
fn forget(session: &mut Session) {
    session.feed.ids().into_iter().for_each(|ids| ids.fill(u32::MAX));
}

/// The sequences of 16 tokens that were read since, of tokens and of targets.
fn read(session: &mut Session) -> [Vec<usize>; 2] {
    let is_read = |(_, ids): &(usize, &[u32])| !ids.contains(&u32::MAX);
    session.feed.ids().map(|ids| ids.chunks(16).enumerate().filter(is_read).map(|(b, _)| b).collect())
}

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
        let devices = joined(rank, ranks, &address, &config);
        let mut session = Session::new(&devices, &config, &plan(&devices, &config).unwrap()).unwrap();
        forget(&mut session);
        session.load_batch(&samples, Batch { first_sample: 3, sequences: session.feed.batch() }).unwrap();
        assert_eq!(session.targets, (session.feed.batch() * 16) as u64);
        read(&mut session)
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

/// Tokens of a data set of 100 GB that is holes but for the samples that are read.
const MANY: u64 = 50 << 30;

#[test]
fn two_processes_never_read_the_same_sample_of_a_hundred_gigabytes() {
    let dir = tempfile::tempdir().unwrap();
    // Megatron's files: tokens of 2 bytes, documents of 2³⁰.
    let documents = MANY >> 30;
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1u64.to_le_bytes());
    index.push(8);
    index.extend(documents.to_le_bytes());
    index.extend((documents + 1).to_le_bytes());
    (0..documents).for_each(|_| index.extend((1u32 << 30).to_le_bytes()));
    (0..documents).for_each(|i| index.extend((i << 31).to_le_bytes()));
    (0..=documents).for_each(|i| index.extend(i.to_le_bytes()));
    std::fs::write(dir.path().join("many.idx"), index).unwrap();
    let bin = std::fs::File::create(dir.path().join("many.bin")).unwrap();
    if bin.set_len(2 * MANY).is_err() {
        eprintln!("skipped: the disk has no sparse files of {} bytes", 2 * MANY);
        return;
    }
    let toml = "[model]\nvocab_size = 256\nlayers = 2\ndim = 16\nheads = 2\nffn = 32\n[data]\npaths = [\"many\"]\n\
        [train]\nseq = 16\nglobal_batch = 16\nmicro_batch = 2\nthreads = 1\n[parallel]\ndp = 2\n";
    std::fs::write(dir.path().join("run.toml"), toml).unwrap();
    let config = Config::load(&dir.path().join("run.toml"), &[]).unwrap();
    let never = AtomicBool::new(false);
    let start = Instant::now();
    let data = RunData::prepare(&config, &dir.path().join("data"), Existing::Reuse, &never, &mut |_, _| ()).unwrap();
    data.check(&never, &mut |_, _| ()).unwrap();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert!(data.train_tokens() > MANY / 10 * 9);

    // Every sample begins with its number.
    let (steps, batch) = (16, 16);
    let samples = Arc::new(data.train(&config).unwrap());
    for sample in 0..steps * batch {
        let number = [(sample >> 8) as u16, (sample & 0xff) as u16].map(u16::to_le_bytes).concat();
        std::os::unix::fs::FileExt::write_all_at(&bin, &number, 2 * samples.position(sample)).unwrap();
    }
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let rank = |rank: usize| {
        let devices = joined(rank, 2, &address, &config);
        let mut session = Session::new(&devices, &config, &plan(&devices, &config).unwrap()).unwrap();
        // What is read of 16 sequences in 4 micro-batches: 2 of 4 each, tokens and targets.
        assert_eq!(session.read_ahead(&samples, 0).unwrap(), 4 * 2 * 2 * 16 * 4);
        let mut read = Vec::new();
        for first_sample in (0..steps * batch).step_by(session.feed.batch()) {
            forget(&mut session);
            session.load_batch(&samples, Batch { first_sample, sequences: session.feed.batch() }).unwrap();
            for b in self::read(&mut session)[0].clone() {
                let [high, low, ..] = &session.feed.ids()[0][16 * b..] else { unreachable!() };
                read.push(u64::from(high << 8 | low));
            }
        }
        read
    };
    let [first, second] = std::thread::scope(|scope| {
        let second = scope.spawn(|| rank(1));
        [rank(0), second.join().unwrap()]
    });
    assert_eq!((first.len(), second.len()), (128, 128));
    let mut all = [first, second].concat();
    all.sort_unstable();
    assert_eq!(all, (0..steps * batch).collect::<Vec<_>>(), "every sample by one of them, and by one alone");
}
