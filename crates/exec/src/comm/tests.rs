use super::*;
use lockstep_ir::Hint;
use std::sync::Arc;
use std::thread::scope;
use std::time::{Duration, Instant};

fn threads_as(ranks: usize, subject: impl Fn(Arc<ThreadCommunicator>) -> Subject) -> Vec<Subject> {
    threads(ranks, Duration::from_secs(10)).into_iter().map(subject).collect()
}

#[test]
fn threads_conform() {
    conformance::check(&|ranks| threads_as(ranks, |comm| Subject::inline(comm))).unwrap();
}

#[test]
fn communication_threads_conform() {
    conformance::check(&|ranks| threads_as(ranks, |comm| Subject::beside(comm).unwrap())).unwrap();
}

/// What a planted communicator does wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fault {
    None,
    ReversesSums(DType),
    SwapsParts(Collective),
    ForgetsAPiece,
    WritesBeforeItAgrees,
    MixesChannels,
    MixesTags,
    OverrunsTheSendBuffer,
    ForgetsFailures,
    /// The first number of the second rank.
    Spoils(Collective),
}

struct Wrong(Arc<ThreadCommunicator>, Fault);

impl Communicator for Wrong {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn peers(&self) -> &Peers {
        self.0.peers()
    }

    fn leave(&self) {
        self.0.leave();
    }

    fn fail_with(&self, reason: &str, hint: Option<String>) {
        if self.1 != Fault::ForgetsFailures {
            self.0.fail_with(reason, hint);
        }
    }
}

impl HostCommunicator for Wrong {
    unsafe fn act(&self, action: &Action, pieces: &[Piece], place: ProgramPlace) -> Result<(), CommError> {
        let (mut action, mut pieces) = (action.clone(), pieces);
        match (&mut action, self.1) {
            (Action::Together(Collective::AllReduce, group), Fault::ReversesSums(dtype))
                if pieces.iter().all(|p| p.dtype == dtype) =>
            {
                group.ranks.reverse();
            }
            (Action::Together(kind, group), Fault::SwapsParts(other)) if *kind == other => group.ranks.reverse(),
            (Action::Together(..), Fault::ForgetsAPiece) => pieces = &pieces[..pieces.len().saturating_sub(1)],
            (Action::Together(_, group), Fault::MixesChannels) => group.channel = 0,
            (Action::Together(Collective::AllReduce, _), Fault::WritesBeforeItAgrees) => {
                for piece in pieces.iter().filter(|piece| piece.elements > 0 && piece.input != piece.output) {
                    // SAFETY: the caller vouches for the output.
                    unsafe { *piece.output = 1 };
                }
            }
            (Action::Send { tag, .. } | Action::Receive { tag, .. }, Fault::MixesTags) => *tag = 0,
            (Action::Send { copies, .. }, Fault::OverrunsTheSendBuffer) => *copies += 1,
            _ => {}
        }
        // SAFETY: the caller vouches; one copy more is in the margin of the suite's buffers.
        unsafe { self.0.act(&action, pieces, place)? };
        if matches!((&action, self.1), (Action::Together(kind, _), Fault::Spoils(other)) if *kind == other)
            && (pieces[0].dtype, self.rank()) == (DType::F32, 1)
        {
            // SAFETY: the output has a first element.
            unsafe { *pieces[0].output.cast::<f32>() += 1.0 };
        }
        Ok(())
    }
}

/// Ranks that all have a fault.
pub(super) fn wrong(ranks: usize, timeout: Duration, fault: Fault) -> Vec<Subject> {
    threads(ranks, timeout).into_iter().map(|comm| Subject::inline(Arc::new(Wrong(comm, fault)))).collect()
}

#[test]
fn the_suite_refuses_wrong_communicators() {
    const WRONG: &str = "gives the wrong result";
    let [one_by_one, at_once, messages, endings] = conformance::SECTIONS;
    for (fault, section, texts) in [
        (Fault::ReversesSums(DType::F32), one_by_one, ["elements f32", WRONG]),
        (Fault::ReversesSums(DType::BF16), one_by_one, ["elements bf16", WRONG]),
        (Fault::ReversesSums(DType::F64), one_by_one, ["elements f64", WRONG]),
        (Fault::ReversesSums(DType::Fixed64), one_by_one, ["elements fixed64", WRONG]),
        (Fault::SwapsParts(Collective::ReduceScatter), one_by_one, ["reduce_scatter of", WRONG]),
        (Fault::SwapsParts(Collective::AllGather), one_by_one, ["all_gather of", WRONG]),
        (Fault::ForgetsAPiece, one_by_one, ["by", WRONG]),
        (Fault::MixesChannels, at_once, ["two channels of one group", ""]),
        (Fault::MixesTags, messages, ["a message from rank 0", "comes out wrong"]),
        (Fault::OverrunsTheSendBuffer, messages, ["a message goes", "beyond the send buffer"]),
        (Fault::WritesBeforeItAgrees, endings, ["refused", "touches memory"]),
        (Fault::ForgetsFailures, endings, ["the error should say", "failed in"]),
    ] {
        let make = |ranks| wrong(ranks, Duration::from_millis(300), fault);
        let error = section(conformance::Make { ranks: &make, apart: None }).expect_err(&format!("{fault:?}"));
        assert!(texts.iter().all(|text| error.contains(text)), "{fault:?}: {error}");
    }
}

pub(super) const fn place(op: &'static str, layer: usize) -> ProgramPlace {
    ProgramPlace { op, layer: Some(layer), micro_batch: 1 }
}

/// Sums some numbers over all ranks: enough that ranks share the work.
pub(super) fn all_reduce(comm: &dyn HostCommunicator, place: ProgramPlace) -> Result<(), CommError> {
    let mut x = [1.0f32; 4096];
    let at = x.as_mut_ptr().cast::<u8>();
    let action = Action::Together(Collective::AllReduce, RankGroup::all(comm.ranks()));
    comm.at(place);
    // SAFETY: the array is this call's.
    unsafe { comm.act(&action, &[Piece::new(at, at, 4096, DType::F32)], place) }?;
    assert_eq!(x, [comm.ranks() as f32; 4096]);
    Ok(())
}

const NOTHING: Piece = Piece::message(std::ptr::null_mut(), std::ptr::null_mut(), 0);

pub(super) fn receive(comm: &dyn HostCommunicator, from: usize, place: ProgramPlace) -> Result<(), CommError> {
    comm.at(place);
    // SAFETY: no bytes.
    unsafe { comm.act(&Action::Receive { from, tag: 0 }, &[NOTHING], place) }
}

pub(super) fn send(comm: &dyn HostCommunicator, to: usize, copies: usize) -> Result<(), CommError> {
    // SAFETY: no bytes.
    unsafe { comm.act(&Action::Send { to, tag: 0, copies }, &[NOTHING], place("send", 0)) }
}

/// The error's text, which must come in time.
pub(super) fn within(limit: Duration, run: impl FnOnce() -> Result<(), CommError>) -> String {
    let start = Instant::now();
    let text = run().unwrap_err().with_hint();
    assert!(start.elapsed() < limit, "{:?}: {text}", start.elapsed());
    text
}

fn soon(run: impl FnOnce() -> Result<(), CommError>) -> String {
    within(Duration::from_secs(1), run)
}

#[test]
fn a_stalled_rank_is_named() {
    let comms = threads(2, Duration::from_millis(150));
    comms[1].at(place("linear", 0));
    let text = soon(|| all_reduce(&*comms[0], place("all_reduce", 2)));
    let start = "rank 0 waits in all_reduce, layer 2, for rank 1, which has been in linear, layer 0, for ";
    assert!(text.starts_with(start) && text.contains(" ms\nhint: ") && text.ends_with("messages of rank 1"), "{text}");
    assert_eq!(soon(|| all_reduce(&*comms[1], place("all_reduce", 2))), text);
    assert_eq!(comms[1].failure().unwrap().with_hint(), text);
}

#[test]
fn a_rank_that_has_not_begun_is_named() {
    let comms = threads(2, Duration::from_millis(30));
    let text = soon(|| receive(&*comms[0], 1, place("receive", 0)));
    assert!(
        text.starts_with("rank 0 waits in receive, layer 0, for rank 1, which has been before its first op"),
        "{text}"
    );
}

#[test]
fn slow_ranks_that_go_on_are_waited_for_through_ranks_that_wait() {
    let comms = threads(3, Duration::from_millis(250));
    scope(|s| {
        let last = s.spawn(|| {
            for layer in 0..12 {
                comms[2].at(place("linear", layer));
                std::thread::sleep(Duration::from_millis(50));
            }
            send(&*comms[2], 1, 1).and_then(|()| all_reduce(&*comms[2], place("all_reduce", 1)))
        });
        let middle = s.spawn(|| {
            receive(&*comms[1], 2, place("receive", 0)).and_then(|()| all_reduce(&*comms[1], place("all_reduce", 1)))
        });
        all_reduce(&*comms[0], place("all_reduce", 1)).unwrap();
        middle.join().unwrap().unwrap();
        last.join().unwrap().unwrap();
    });
}

#[test]
fn the_end_of_a_chain_of_waiting_ranks_is_named() {
    let comms = threads(3, Duration::from_millis(150));
    comms[2].at(place("linear", 4));
    scope(|s| {
        let middle = s.spawn(|| soon(|| receive(&*comms[1], 2, place("receive", 0))));
        let text = soon(|| all_reduce(&*comms[0], place("all_reduce", 1)));
        assert!(text.contains("for rank 2, which has been in linear, layer 4, for"), "{text}");
        assert_eq!(middle.join().unwrap(), text);
    });
}

#[test]
fn ranks_that_wait_for_each_other_end() {
    let comms = threads(2, Duration::from_millis(150));
    scope(|s| {
        let other = s.spawn(|| soon(|| receive(&*comms[1], 0, place("receive", 5))));
        let text = soon(|| all_reduce(&*comms[0], place("all_reduce", 1)));
        assert!(text.contains(", waiting for rank "), "{text}");
        assert!(text.contains("all_reduce, layer 1") && text.contains("receive, layer 5"), "{text}");
        assert_eq!(other.join().unwrap(), text);
    });
}

#[test]
fn a_panic_ends_the_run_for_all() {
    let comms = threads(4, Duration::from_secs(10));
    scope(|s| {
        let others: Vec<_> = [0, 1, 3]
            .map(|rank| {
                let comm = &*comms[rank];
                s.spawn(move || soon(|| all_reduce(comm, place("all_reduce", 3))))
            })
            .into();
        let failing = s.spawn(|| {
            let _guard = RankGuard::new(&*comms[2]);
            // Another thread of the rank is somewhere else: it does not matter.
            comms[2].at(place("attention_grad", 3));
            scope(|s| s.spawn(|| comms[2].at(place("all_gather", 0))).join().unwrap());
            std::thread::sleep(Duration::from_millis(50));
            std::panic::resume_unwind(Box::new("planted"));
        });
        assert!(failing.join().is_err());
        for other in others {
            assert_eq!(other.join().unwrap(), "rank 2 failed in attention_grad, layer 3, micro-batch 1: panicked");
        }
    });
}

#[test]
fn a_mismatch_names_both_sides() {
    let comms = threads(2, Duration::from_secs(10));
    scope(|s| {
        let other = s.spawn(|| {
            let mut x = [1u16; 1024];
            let at = x.as_mut_ptr().cast();
            let action = Action::Together(Collective::AllGather, RankGroup::all(2));
            // SAFETY: the array is this call's, and its first half is this rank's part.
            soon(|| unsafe { comms[1].act(&action, &[Piece::new(at, at, 512, DType::BF16)], place("gather", 7)) })
        });
        let text = soon(|| all_reduce(&*comms[0], place("sum", 2)));
        let start = "ranks 0 and 1 do not agree: all_reduce of 16,384 bytes f32 in sum, layer 2, micro-batch 1 \
                     against all_gather of 1,024 bytes bf16 in gather, layer 7, micro-batch 1\nhint: ";
        assert!(text.starts_with(start), "{text}");
        assert_eq!(other.join().unwrap(), text);
    });
}

#[test]
fn a_rank_that_leaves_or_is_dropped_is_missed() {
    for drop in [false, true] {
        let mut comms = threads(2, Duration::from_secs(10));
        let last = comms.pop().unwrap();
        if !drop {
            last.leave();
            let text = soon(|| all_reduce(&*last, place("all_reduce", 0)));
            assert!(text.contains("this rank has ended its program"), "{text}");
            continue;
        }
        std::mem::drop(last);
        let text = soon(|| all_reduce(&*comms[0], place("all_reduce", 0)));
        assert!(text.contains("but rank 1 has ended its program\nhint: "), "{text}");
    }
}

#[test]
fn a_message_that_nobody_takes_is_an_error() {
    let comms = threads(2, Duration::from_secs(10));
    send(&*comms[0], 1, 1).unwrap();
    comms[1].leave();
    comms[0].leave();
    let text = comms[0].failure().unwrap().with_hint();
    assert!(text.starts_with("rank 0 waits in leave, for rank 1, but rank 1 has ended its program"), "{text}");
}

#[test]
fn what_cannot_be_done_is_refused() {
    let refused = |run: &dyn Fn(&dyn HostCommunicator) -> Result<(), CommError>| {
        let error = run(&*threads(2, Duration::from_secs(10))[0]).unwrap_err();
        assert!(matches!(error, CommError::Refused { rank: 0, .. }), "{error}");
    };
    for ranks in [vec![], vec![1], vec![0, 0], vec![0, 2]] {
        let action = Action::Together(Collective::AllGather, RankGroup { ranks, channel: 0 });
        // SAFETY: no pieces.
        refused(&|comm| unsafe { comm.act(&action, &[], place("gather", 0)) });
    }
    refused(&|comm| send(comm, 2, 1));
    refused(&|comm| send(comm, 1, 0));
    refused(&|comm| receive(comm, 2, place("receive", 0)));
}
