//! Small runs in every order that their threads can take: `RUSTFLAGS="--cfg loom" cargo test -p lockstep-exec --lib loom`.
//! Failures are not among them: who sleeps sees those after a while, and loom has no clock.

use super::*;
use crate::sync::explore;
use lockstep_ir::program::Slot;
use std::sync::Arc;
use std::time::Duration;

const PLACE: ProgramPlace = ProgramPlace { op: "test", layer: None, micro_batch: 0 };

/// Runs a program on two ranks.
fn two(program: impl Fn(&Arc<ThreadCommunicator>) + Copy + Send + Sync + 'static) {
    explore(move || {
        let ranks = threads(2, Duration::from_secs(60)).into_iter();
        let run = |comm: Arc<ThreadCommunicator>| loom::thread::spawn(move || program(&comm));
        let threads: Vec<_> = ranks.map(run).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

fn piece(x: &mut [f32]) -> Piece {
    let at = x.as_mut_ptr().cast::<u8>();
    Piece::new(at, at, x.len(), DType::F32)
}

#[test]
fn loom_ranks_get_the_sum() {
    two(|comm| {
        let action = Action::Together(Collective::AllReduce, RankGroup::all(2));
        let mut x = [1.0 + comm.rank() as f32; 17];
        let pieces = [piece(&mut x)];
        // SAFETY: the array is this call's.
        unsafe { comm.act(&action, &pieces, PLACE) }.unwrap();
        assert_eq!(x, [3.0; 17]);
    });
}

#[test]
fn loom_messages_arrive_in_order() {
    two(|comm| {
        let mut send_buffer = [0u32];
        for number in [7u32, 8] {
            let mut x = number;
            let data = std::ptr::from_mut(&mut x).cast::<u8>();
            let (action, output) = match comm.rank() {
                0 => (Action::Send { to: 1, tag: 0, copies: 1 }, send_buffer.as_mut_ptr().cast()),
                _ => (Action::Receive { from: 0, tag: 0 }, data),
            };
            // SAFETY: four bytes each; the send buffer lives until all is taken, which the answer below says.
            unsafe { comm.act(&action, &[Piece::message(data, output, 4)], PLACE) }.unwrap();
            assert_eq!(x, number);
        }
        comm.meet(PLACE, (), |_| ()).unwrap();
    });
}

#[test]
fn loom_ranks_that_meet_get_the_same_twice() {
    two(|comm| {
        for round in 0..2 {
            let all = comm.meet(PLACE, (comm.rank(), round), |all| all).unwrap();
            assert_eq!(all, [(0, round), (1, round)]);
        }
    });
}

#[test]
fn loom_a_communication_thread_ends_what_is_waited_for() {
    explore(|| {
        let comm = threads(1, Duration::from_secs(60)).remove(0);
        let mut queue = CommunicationThread::start(comm).unwrap();
        let (mut from, mut to) = ([1.0f32; 3], [0.0f32; 3]);
        let both = Piece { output: to.as_mut_ptr().cast(), ..piece(&mut from) };
        let transfer = Action::Together(Collective::AllGather, RankGroup::all(1));
        let call = Arc::new(CommunicationCall::absolute(transfer, &[both], PLACE));
        let slot = Slot::new(0, 0);
        for _ in 0..2 {
            // SAFETY: the arrays live until the call has ended.
            let number = unsafe { queue.enqueue(&call, std::ptr::null_mut(), slot) }.unwrap();
            queue.wait(number).unwrap();
        }
        assert_eq!(to, from);
    });
}
