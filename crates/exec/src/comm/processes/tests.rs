use super::*;
use crate::comm::tests::{all_reduce, place, receive, send, within};
use crate::comm::{Subject, conformance};
use lockstep_ir::Hint;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::AtomicUsize;
use std::thread::scope;
use std::time::{Duration, Instant};

/// An address that nobody uses: below the ports that the system gives out by itself, so that nobody gets it by chance either.
fn free_address() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let port = 10_000 + (std::process::id() as usize * 64 + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", port as u16)) {
            return listener.local_addr().unwrap().to_string();
        }
    }
}

/// Waits until a rank has heard what ended the run.
fn told(comm: &ProcessCommunicator) -> Option<CommError> {
    let until = Instant::now() + Duration::from_secs(3);
    while comm.failure().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    comm.failure()
}

fn start(rank: usize, ranks: usize, address: &str, timeout: Duration) -> Start {
    Start {
        rank,
        ranks,
        address: address.to_owned(),
        timeout,
        build: "0.1 (test)".to_owned(),
        mpi: None,
        secret: JobSecret::from_hex(&"5e".repeat(32)),
        board: None,
        waiting: Waiting::default(),
    }
}

/// What joining says that must fail.
fn refused(start: &Start) -> String {
    join(start).err().unwrap().with_hint()
}

/// Joins these, each from a thread of its own.
fn join_all(starts: &[Start]) -> Vec<Result<ProcessCommunicator, JoinError>> {
    scope(|s| {
        let threads: Vec<_> = starts.iter().map(|start| s.spawn(move || join(start))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Communicators as this many processes would have them, over real sockets.
fn sockets(ranks: usize, timeout: Duration) -> Vec<ProcessCommunicator> {
    let door = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = door.local_addr().unwrap().to_string();
    let starts: Vec<_> = (0..ranks).map(|rank| start(rank, ranks, &address, timeout)).collect();
    scope(|s| {
        let others: Vec<_> = starts[1..].iter().map(|start| s.spawn(move || join(start))).collect();
        let first = host_at(&starts[0], door);
        let others = others.into_iter().map(|thread| thread.join().unwrap());
        std::iter::once(first).chain(others).map(|joined| joined.unwrap()).collect()
    })
}

const SOME: Duration = Duration::from_secs(10);

#[test]
fn sockets_conform() {
    let make = |ranks| sockets(ranks, SOME).into_iter().map(|comm| Subject::inline(Arc::new(comm))).collect();
    conformance::check(&make).unwrap();
}

#[test]
fn sockets_conform_on_communication_threads() {
    let make = |ranks| sockets(ranks, SOME).into_iter().map(|comm| Subject::beside(Arc::new(comm)).unwrap()).collect();
    conformance::check(&make).unwrap();
}

#[test]
fn everybody_gets_what_everybody_says() {
    let comms = sockets(3, SOME);
    scope(|s| {
        for comm in &comms {
            s.spawn(move || {
                for round in 0..20u8 {
                    let mine = vec![round; comm.rank() * 1000];
                    let all = comm.exchange(place("tell", 0), &mine).unwrap();
                    let expected: Vec<_> = (0..3).map(|rank| vec![round; rank * 1000]).collect();
                    assert_eq!(all, expected);
                }
            });
        }
    });
}

#[test]
fn copies_go_round_while_all_tell_each_other_something() {
    let comms = sockets(3, SOME);
    let copy = |rank: usize| vec![rank as u8; 5_000_000 * rank];
    scope(|s| {
        for comm in &comms {
            let rank = comm.rank();
            let passed = s.spawn(move || comm.pass_on(place("copy", 0), &copy(rank), (rank + 1) % 3, (rank + 2) % 3));
            s.spawn(move || {
                for round in 0..20u8 {
                    assert_eq!(comm.exchange(place("tell", 0), &[round]).unwrap(), vec![vec![round]; 3]);
                }
                assert!(passed.join().unwrap().unwrap() == copy((rank + 2) % 3));
            });
        }
    });
}

#[test]
fn a_process_that_ends_without_a_word_is_named_to_all() {
    for victim in [0, 2] {
        let mut comms = sockets(3, SOME);
        let gone = comms.remove(victim);
        gone.at(place("attention", 5));
        // As the system closes them when a process is killed. What it was doing is known from its last sign of life.
        std::thread::sleep(Duration::from_millis(1500));
        gone.die();
        scope(|s| {
            let threads: Vec<_> = comms
                .iter()
                .map(|comm| s.spawn(move || within(Duration::from_secs(3), || all_reduce(comm, place("sum", 3)))))
                .collect();
            for (thread, comm) in threads.into_iter().zip(&comms) {
                let text = thread.join().unwrap();
                let start = format!("rank {victim} on host {} is gone: its process has ended", host());
                let waited = format!("; rank {} waited in sum, layer 3\nhint: ", comm.rank());
                assert!(text.starts_with(&start) && text.contains("last heard of in attention, layer 5"), "{text}");
                assert!(text.contains(&waited), "{text}");
            }
        });
    }
}

#[test]
fn two_ranks_that_live_and_lose_their_connection_are_both_named() {
    // Rank 0 hears of all as ever: the failure channels stand. Of its own connections for frames it knows that they have ended.
    for (by, other) in [(1, 2), (1, 0), (0, 1)] {
        let comms = sockets(3, SOME);
        std::thread::sleep(Duration::from_millis(100));
        comms[by].inbox.set_connected(other, by == 1 && other == 2);
        comms[by].inbox.cut(other, sockets::ended(&std::io::ErrorKind::ConnectionReset.into()));
        let expected = format!(
            "rank {by} on host {0} and rank {other} on host {0} cannot reach each other any more, and both live: their \
             connection was closed\nhint: ",
            host()
        );
        for comm in &comms {
            let text = within(Duration::from_secs(4), || receive(comm, (comm.rank() + 1) % 3, place("receive", 0)));
            assert!(text.starts_with(&expected), "{text}");
        }
    }
}

#[test]
fn ranks_that_end_because_of_another_are_not_taken_for_the_cause() {
    let mut comms = sockets(3, SOME);
    let last = comms.pop().unwrap();
    // The first is gone, and the second ends before the third has seen that.
    let error = CommError::Lost { rank: 0, host: host(), place: None, reason: "gone".into(), seen: None };
    comms[1].peers().conclude(error.clone());
    comms.remove(1).leave();
    let text = within(Duration::from_secs(3), || receive(&last, 1, place("receive", 0)));
    assert!(text.starts_with("rank 0 on host ") && text.contains(" is gone: gone"), "{text}");
    assert_eq!(told(&comms[0]), Some(error));
}

/// A failure channel that can be stopped.
struct Proxy {
    silent: Arc<AtomicBool>,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    /// Nothing passes from now on.
    fn silence(&self) {
        self.silent.store(true, Ordering::Release);
    }

    /// Closes both connections.
    fn close(&self) {
        let ends = self.ends.lock().unwrap();
        ends.iter().for_each(|end| end.shutdown(std::net::Shutdown::Both).unwrap());
    }
}

/// Two ranks whose failure channel goes through a proxy; frames pass it by.
fn behind_a_proxy(timeout: Duration) -> (Vec<ProcessCommunicator>, Proxy) {
    let (address, door) = (free_address(), TcpListener::bind("127.0.0.1:0").unwrap());
    let at = door.local_addr().unwrap().to_string();
    let proxy = Proxy { silent: Arc::default(), ends: Arc::default() };
    let (silent, ends, to) = (proxy.silent.clone(), proxy.ends.clone(), address.clone());
    std::thread::spawn(move || {
        let (near, _) = door.accept().unwrap();
        let far = connected(&to);
        let pass = |mut from: TcpStream, mut to: TcpStream, silent: Arc<AtomicBool>| {
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = std::io::Read::read(&mut from, &mut bytes) {
                    if !silent.load(Ordering::Acquire) && std::io::Write::write_all(&mut to, &bytes[..count]).is_err() {
                        break;
                    }
                }
            })
        };
        ends.lock().unwrap().extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
        pass(near.try_clone().unwrap(), far.try_clone().unwrap(), silent.clone());
        pass(far, near, silent);
    });
    let joined = join_all(&[start(0, 2, &address, timeout), start(1, 2, &at, timeout)]);
    let comms: Vec<_> = joined.into_iter().map(|comm| comm.unwrap()).collect();
    scope(|s| {
        let other = s.spawn(|| all_reduce(&comms[1], place("sum", 0)));
        all_reduce(&comms[0], place("sum", 0)).unwrap();
        other.join().unwrap().unwrap();
    });
    (comms, proxy)
}

/// Both ranks wait for each other: what each is told of the other.
fn told_of_each_other(comms: &[ProcessCommunicator], limit: Duration, expected: &str) {
    scope(|s| {
        let wait = |rank: usize| within(limit, || receive(&comms[rank], 1 - rank, place("receive", 1)));
        let second = s.spawn(move || wait(1));
        for (text, other) in [(wait(0), 1), (second.join().unwrap(), 0)] {
            let start = format!("rank {other} on host {} is gone: {expected}", host());
            assert!(text.starts_with(&start), "{text}");
        }
    });
}

#[test]
fn a_process_that_falls_silent_is_named() {
    let (comms, proxy) = behind_a_proxy(Duration::from_secs(2));
    proxy.silence();
    told_of_each_other(&comms, Duration::from_secs(8), "nothing was heard of its process for 2.0");
}

#[test]
fn a_stall_of_a_process_of_which_nothing_is_heard_is_its_silence() {
    let (comms, proxy) = behind_a_proxy(Duration::from_secs(2));
    proxy.silence();
    // Both have the same timeout, and a stall may be seen first: whoever looks for stalls looks more often.
    std::thread::sleep(Duration::from_millis(1200));
    let (place, other_place, other_waits_for) = (place("receive", 1), None, None);
    let stalled = CommError::Stalled { rank: 0, place, other: 1, other_place, seconds: 2.0, other_waits_for };
    let text = comms[0].peers().end(stalled.clone()).with_hint();
    assert!(text.contains("rank 1 on host ") && text.contains("nothing was heard of its process for 2.0"), "{text}");
    // One that is heard stalls.
    let (comms, _proxy) = behind_a_proxy(Duration::from_secs(2));
    assert_eq!(comms[0].peers().end(stalled.clone()), stalled);
}

#[test]
fn a_failure_channel_that_is_closed_does_not_mean_that_a_process_has_ended() {
    let (comms, proxy) = behind_a_proxy(SOME);
    proxy.close();
    let expected = "the connection to it was closed, and its process may still run; it was last heard of";
    told_of_each_other(&comms, Duration::from_secs(8), expected);
}

/// The addresses at which this process listens, as `/proc/net/tcp` writes them, without ports.
fn listens_at() -> Vec<String> {
    let sockets: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()?.to_str().map(str::to_owned))
        .collect();
    let mut found = Vec::new();
    for file in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        for fields in text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>()) {
            // State 0A is LISTEN.
            if fields[3] == "0A" && sockets.contains(&format!("socket:[{}]", fields[9])) {
                found.push(fields[1].split(':').next().unwrap().to_owned());
            }
        }
    }
    found
}

#[test]
fn ranks_listen_at_the_address_that_was_named_and_at_no_other() {
    // No other test uses this address.
    let address = TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap().to_string();
    scope(|s| {
        let first = s.spawn(|| join(&start(0, 2, &address, SOME)).unwrap());
        let (mut found, until) = (listens_at(), Instant::now() + SOME);
        // One socket for the rendezvous, one for frames.
        while found.iter().filter(|at| *at == "0200007F").count() < 2 {
            assert!(Instant::now() < until, "{found:?}");
            std::thread::sleep(Duration::from_millis(5));
            found = listens_at();
        }
        assert!(found.iter().all(|at| at.ends_with("00007F")), "{found:?}");
        let second = join(&start(1, 2, &address, SOME)).unwrap();
        drop((first.join().unwrap(), second));
    });
}

#[test]
fn a_rank_that_stalls_is_named_to_all_by_the_first() {
    let comms = sockets(3, Duration::from_secs(1));
    comms[2].at(place("linear", 4));
    scope(|s| {
        let first = s.spawn(|| within(Duration::from_secs(4), || receive(&comms[0], 1, place("receive", 0))));
        let text = within(Duration::from_secs(4), || receive(&comms[1], 2, place("receive", 1)));
        assert!(
            text.starts_with("rank 1 waits in receive, layer 1, for rank 2, which has been in linear, layer 4, for "),
            "{text}"
        );
        assert_eq!(first.join().unwrap(), text);
        // The one that stalls is told as well.
        assert_eq!(told(&comms[2]).unwrap().with_hint(), text);
    });
}

#[test]
fn slow_ranks_that_go_on_are_waited_for_through_ranks_that_wait() {
    let comms = sockets(3, Duration::from_secs(4));
    scope(|s| {
        s.spawn(|| {
            for layer in 0..16 {
                comms[2].at(place("linear", layer));
                std::thread::sleep(Duration::from_millis(400));
            }
            send(&comms[2], 1, 1).unwrap();
            all_reduce(&comms[2], place("all_reduce", 1)).unwrap();
        });
        s.spawn(|| {
            receive(&comms[1], 2, place("receive", 0)).unwrap();
            all_reduce(&comms[1], place("all_reduce", 1)).unwrap();
        });
        all_reduce(&comms[0], place("all_reduce", 1)).unwrap();
    });
}

#[test]
fn bad_starts_are_named_to_all_who_came() {
    let check = |ranks: &[(usize, usize, &str)], timeout: Duration, expected: &str| {
        let at = free_address();
        let of =
            |&(rank, ranks, build): &(_, _, &str)| Start { build: build.into(), ..start(rank, ranks, &at, timeout) };
        let joined = join_all(&ranks.iter().map(of).collect::<Vec<_>>());
        for result in &joined {
            let text = result.as_ref().err().unwrap_or_else(|| panic!("{expected}")).with_hint();
            assert!(text.contains(expected) && text.contains("\nhint: "), "{text}");
        }
        // Whoever is refused is told what the first rank says.
        assert!(joined.iter().skip(1).all(|result| matches!(result, Err(JoinError::Refused(_)))));
    };
    let short = Duration::from_millis(300);
    let (one, two) = ("0.1 (test)", "0.2 (test)");
    check(&[(0, 4, one), (2, 4, one)], short, "ranks 1 and 3 of 4 have not come within 300");
    check(&[(0, 2, one), (1, 3, one)], SOME, "is rank 1 of 3, and rank 0 counts 2 ranks");
    check(&[(0, 2, one), (2, 2, one)], SOME, "is rank 2 of 2, and rank 0 counts 2 ranks");
    check(&[(0, 3, one), (1, 3, one), (1, 3, one)], SOME, "rank 1 came twice: as process ");
    check(&[(0, 2, one), (1, 2, two)], SOME, "is Lockstep 0.1 (test), rank 1 on host");

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (rank, at, expected) in [
        (0, address, "another process uses this port, and there is no folder"),
        (1, free_address(), "rank 1 found no rank 0 at 127.0.0.1:"),
        (1, "no.such.host.invalid:1".into(), "found no rank 0 at no.such.host.invalid:1"),
    ] {
        let error = refused(&start(rank, 2, &at, short));
        assert!(error.contains(expected), "{error}");
    }
}

/// A connection to somebody who will listen soon.
fn connected(address: &str) -> TcpStream {
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// The memory that this process has in use, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn strangers_and_latecomers_do_no_harm() {
    let address = free_address();
    // Long enough that a start which waits for strangers is seen.
    let first = start(0, 2, &address, Duration::from_secs(60));
    let began = Instant::now();
    let (comms, strangers) = scope(|s| {
        let first = s.spawn(|| join(&first));
        let mut strangers = Vec::new();
        let mut say = |bytes: &[u8]| {
            let mut stream = connected(&address);
            // It may be cut off before it has said everything.
            let _ = std::io::Write::write_all(&mut stream, bytes);
            strangers.push(stream);
        };
        say(b"GET / HTTP/1.1\r\n\r\n");
        say(b"");
        // What ranks said before they had a secret: a greeting of another size, one of another build with escapes, and a length of 2^62.
        let greeting = |ranks: usize, build: &str| {
            let mut note = Vec::new();
            wire::write_note(&mut note, 20, &(1, ranks, build, "\x1b]0;evil\x07\x1b[2Jhost")).unwrap();
            note
        };
        say(&greeting(3, "0.1 (test)"));
        say(&greeting(2, "0.2 (another build)"));
        say(&[&[20][..], &(1u64 << 62).to_le_bytes(), &[0; 64]].concat());
        // An opening that is right, and then a length instead of a proof.
        say(&[b"lockstep", &[7; 32][..], &[20], &u32::MAX.to_le_bytes(), &[0; 64]].concat());
        let before = resident();
        for _ in 0..120 {
            say(&[&[20][..], &(16u32 << 20).to_le_bytes(), &[0; 1000]].concat());
        }
        let comms = [join(&start(1, 2, &address, SOME)), first.join().unwrap()].map(|comm| comm.unwrap());
        assert!(resident().saturating_sub(before) < 256 << 20, "strangers cost {} bytes", resident() - before);
        (comms, strangers)
    });
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let error = refused(&start(1, 2, &address, Duration::from_secs(2)));
    assert!(error.contains("rank 1 came twice"), "{error}");
    // One that was given another secret is a stranger too, and is told nothing.
    let other = Start { secret: Some(JobSecret::random().unwrap()), ..start(1, 2, &address, Duration::from_secs(3)) };
    let error = refused(&other);
    assert!(error.contains("no process of this job") && !error.contains("0.1 (test)"), "{error}");
    scope(|s| {
        s.spawn(|| all_reduce(&comms[0], place("sum", 0)).unwrap());
        all_reduce(&comms[1], place("sum", 0)).unwrap();
    });
    drop(strangers);
}

/// A folder that goes when the test ends.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("lockstep-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_port_that_is_taken_is_not_the_end_and_a_secret_is_made_where_none_was_given() {
    let folder = Folder::new("taken");
    let board = Board { path: folder.0.join(".rendezvous"), job: "7".into() };
    // One that listens and says nothing, and a notice of an earlier start that leads to nobody.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for given in [None, JobSecret::from_hex(&"5e".repeat(32))] {
        let stale = board::Posted::At { address: free_address(), secret: Some(JobSecret::random().unwrap()) };
        board.post(&stale).unwrap();
        let of = |rank| Start { board: Some(board.clone()), secret: given.clone(), ..start(rank, 3, &address, SOME) };
        let comms: Vec<_> = join_all(&[of(0), of(1), of(2)]).into_iter().map(|comm| comm.unwrap()).collect();
        scope(|s| {
            let sums: Vec<_> = comms.iter().map(|comm| s.spawn(|| all_reduce(comm, place("sum", 0)))).collect();
            sums.into_iter().for_each(|sum| sum.join().unwrap().unwrap());
        });
        assert!(board.path.exists());
        drop(comms);
        assert!(!board.path.exists(), "the notice of the first rank was left");
    }
    // Neither a secret nor a folder for one.
    for rank in [0, 1] {
        let error = refused(&Start { secret: None, ..start(rank, 2, &free_address(), SOME) });
        assert!(error.contains("LOCKSTEP_JOB_SECRET") && error.contains("\nhint: "), "{error}");
    }
}

#[test]
fn a_rank_that_ends_before_it_came_or_a_stop_ends_the_waiting_of_the_others() {
    let long = Duration::from_secs(60);
    let soon = |began: Instant| assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let folder = Folder::new("early");
    let board = Board { path: folder.0.join(".rendezvous"), job: "7".into() };
    let of = |rank, address: &str| Start { board: Some(board.clone()), ..start(rank, 3, address, long) };
    let (began, address) = (Instant::now(), free_address());
    let texts = scope(|s| {
        let waiting = [of(0, &address), of(1, &address)].map(|start| s.spawn(move || refused(&start)));
        end_early(&of(2, &address), "no such file");
        waiting.map(|thread| thread.join().unwrap())
    });
    for text in texts {
        let expected = format!("rank 2 on host {} has ended before all had come: no such file\nhint: look", host());
        assert!(text.starts_with(&expected), "{text}");
    }
    soon(began);
    // The first rank, which nobody can reach then.
    let (began, address) = (Instant::now(), free_address());
    let text = scope(|s| {
        let waiting = s.spawn(|| refused(&of(1, &address)));
        std::thread::sleep(Duration::from_millis(200));
        end_early(&of(0, &address), "no such file");
        waiting.join().unwrap()
    });
    assert!(text.starts_with("rank 0 has ended before all had come: no such file\n"), "{text}");
    soon(began);
    // Whoever started them asks them to stop, or says that one is gone: whether they wait for the first or for its answer.
    for (abandoned, expected) in [(false, "interrupted before all ranks had come"), (true, "another rank has ended")] {
        let (began, address, flag) = (Instant::now(), free_address(), Arc::new(AtomicBool::new(false)));
        let some = Some(flag.clone());
        let waiting = match abandoned {
            true => Waiting { abandoned: some, stop: None },
            false => Waiting { abandoned: None, stop: some },
        };
        scope(|s| {
            let alone = free_address();
            let starts = [start(0, 3, &address, long), start(1, 3, &address, long), start(1, 3, &alone, long)];
            let threads = starts.map(|start| {
                let start = Start { waiting: waiting.clone(), ..start };
                s.spawn(move || refused(&start))
            });
            std::thread::sleep(Duration::from_millis(300));
            flag.store(true, Ordering::Release);
            for thread in threads {
                let text = thread.join().unwrap();
                assert!(text.contains(expected), "{text}");
            }
        });
        soon(began);
    }
}

#[test]
fn buffers_are_aligned_and_used_again() {
    let mut buffer = Buffer::default();
    buffer.push(b"abc");
    buffer.align();
    buffer.push(b"d");
    assert_eq!(buffer.bytes(), b"abc\0\0\0\0\0d");
    assert!(buffer.bytes().as_ptr().cast::<u64>().is_aligned());
    let inbox = Inbox::new(0, Arc::new(Peers::new(1, None)), vec![host()]);
    inbox.recycle(buffer);
    let address = inbox.buffer(10).bytes().as_ptr();
    inbox.recycle(inbox.buffer(1000));
    assert_ne!(inbox.buffer(12).bytes().as_ptr(), address, "the one of 10 bytes was not given back");
}
