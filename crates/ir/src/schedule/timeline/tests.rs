use super::*;
use crate::counter;
use crate::schedule::Schedule;
use crate::schedule::tests::{GPIPE, all, named};
use lockstep_ir::Hint;
use std::collections::BTreeMap;

fn equal(stages: usize, forward: f64, backward: f64) -> Costs {
    let half = backward / 2.0;
    Costs { chunks: vec![ChunkCosts { forward, input_grad: half, weight_grad: half }; stages], transfer: 0.0 }
}

/// One chunk per rank, from slots in their printed form, a line per rank.
fn written(ranks: &[&str]) -> Pipeline {
    let slot = |word: &str| {
        let micro_batch = word[1..].parse().expect("a number");
        if word.starts_with('F') { PipeSlot::forward(0, micro_batch) } else { PipeSlot::backward(0, micro_batch) }
    };
    Pipeline {
        virtual_stages: (0..ranks.len()).map(|rank| vec![rank]).collect(),
        slots: ranks.iter().map(|line| line.split(' ').filter(|w| !w.is_empty()).map(slot).collect()).collect(),
    }
}

fn deadlock(ranks: &[&str], copies: usize) -> Deadlock {
    evaluate(&written(ranks), &equal(ranks.len(), 1.0, 2.0), copies).expect_err("these slots cannot all run")
}

/// Every schedule with up to 8 ranks, 4 chunks and 16 micro-batches.
fn each(mut visit: impl FnMut(Schedule, &Pipeline, usize)) {
    for (schedule, chunks) in all() {
        for (ranks, m) in (1..=8).flat_map(|p| (1..=16).map(move |m| (p, m))) {
            visit(schedule, &schedule.pipeline(ranks, chunks, m), m);
        }
    }
}

#[test]
fn with_equal_stages_the_bubble_is_that_of_theory_and_one_copy_is_enough() {
    for (schedule, p, m) in [Schedule::USUAL, GPIPE].into_iter().flat_map(|s| sizes().map(move |(p, m)| (s, p, m))) {
        for (forward, backward) in [(1.0, 1.0), (2.0, 3.0), (1.0, 2.0), (1.0, 3.0)] {
            for copies in [1, 2, 16] {
                let costs = equal(p, forward, backward);
                let timeline = evaluate(&schedule.pipeline(p, 1, m), &costs, copies).expect("it ends");
                let theory = (p - 1) as f64 / (m + p - 1) as f64;
                assert_eq!(timeline.bubble(), theory, "{schedule} p={p} m={m} b={backward} copies={copies}");
                assert_eq!(timeline.total, (m + p - 1) as f64 * (forward + backward));
            }
        }
    }
}

/// Up to 8 ranks and 16 micro-batches.
fn sizes() -> impl Iterator<Item = (usize, usize)> {
    (1..=8).flat_map(|p| (1..=16).map(move |m| (p, m)))
}

#[test]
fn interleaving_divides_the_bubble_by_the_chunks() {
    for (p, v, groups) in [(2, 2, 2), (4, 2, 2), (4, 3, 3), (8, 2, 2), (8, 4, 3), (16, 4, 8)] {
        let m = groups * p;
        let pipeline = named("interleaved").pipeline(p, v, m);
        let timeline = evaluate(&pipeline, &equal(p * v, 1.0, 2.0), 1).expect("it ends");
        assert_eq!(timeline.bubble(), (p - 1) as f64 / (v * m + p - 1) as f64, "p={p} v={v} m={m}");
    }
}

#[test]
fn micro_batches_that_are_no_whole_group_take_no_longer_than_a_whole_one() {
    for (p, v, m) in [(2usize, 2usize, 3usize), (4, 2, 5), (4, 3, 10), (8, 2, 1), (8, 3, 15)] {
        let total = |m: usize| {
            let pipeline = named("interleaved").pipeline(p, v, m);
            evaluate(&pipeline, &equal(p * v, 1.0, 2.0), 1).expect("it ends").total
        };
        let whole = total(m.next_multiple_of(p));
        assert!(total(m) < whole, "p={p} v={v} m={m}");
        assert_eq!(whole, (3 * (v * m.next_multiple_of(p) + p - 1)) as f64);
    }
}

#[test]
fn zero_bubble_schedules_take_what_their_papers_say() {
    for (p, m) in (1..=8).flat_map(|p| (2 * p..=3 * p).map(move |m| (p, m))) {
        // F = B = W = 1.
        let h1 = evaluate(&named("zb-h1").pipeline(p, 1, m), &equal(p, 1.0, 2.0), 2).expect("it ends");
        assert_eq!(h1.total, (3 * m + p - 1) as f64, "p={p} m={m}");
        // Each chunk is half a rank's layers. No rank waits inside its window; the last starts p - 1 chunks after the first.
        let v = evaluate(&named("zb-v").pipeline(p, 2, m), &equal(2 * p, 0.5, 1.0), 2).expect("it ends");
        assert_eq!(v.longest_window(), (3 * m) as f64, "p={p} m={m}");
        assert_eq!(v.total, 3.0 * m as f64 + 0.5 * (p - 1) as f64, "p={p} m={m}");
    }
}

#[test]
fn no_schedule_leaves_less_of_the_bubble_than_it_says() {
    for (schedule, chunks) in all() {
        for (p, m) in sizes() {
            // F = B = W; a rank computes for a micro-batch as long as with one chunk.
            let (f, b) = (1.0 / chunks as f64, 2.0 / chunks as f64);
            let timeline = evaluate(&schedule.pipeline(p, chunks, m), &equal(p * chunks, f, b), 2).expect("it ends");
            let least = schedule.least_bubble(chunks) * 3.0 * (p - 1) as f64;
            assert!(timeline.total >= 3.0 * m as f64 + least - 1e-9, "{schedule} p={p} m={m} chunks={chunks}");
        }
    }
}

#[test]
fn micro_batches_in_flight_are_those_of_theory() {
    for (p, m) in sizes() {
        let usual = Vec::from_iter((0..p).map(|rank| m.min(p - rank)));
        assert_eq!(Schedule::USUAL.pipeline(p, 1, m).in_flight(), usual, "p={p} m={m}");
        assert_eq!(GPIPE.pipeline(p, 1, m).in_flight(), vec![m; p], "p={p} m={m}");
    }
}

#[test]
fn no_costs_bring_a_schedule_to_a_stop_and_more_copies_make_none_slower() {
    each(|schedule, pipeline, m| {
        let stages = pipeline.stages();
        let at = (stages * 100 + m) as u64;
        let draw = |i: usize, from: u64| 0.25 + (counter::bits(at, from + 8 * i as u64) % 16) as f64 / 4.0;
        let chunk =
            |stage| ChunkCosts { forward: draw(stage, 0), input_grad: draw(stage, 1), weight_grad: draw(stage, 2) };
        let costs = Costs { chunks: (0..stages).map(chunk).collect(), transfer: draw(0, 3) };
        let totals = [1, 2, 3, 16].map(|copies| evaluate(pipeline, &costs, copies).expect("it ends").total);
        assert!(totals.is_sorted_by(|fewer, more| fewer >= more), "{schedule} of {stages}, m={m}: {totals:?}");
    });
}

#[test]
fn slots_start_after_what_they_need_and_never_overlap() {
    each(|_, pipeline, _| {
        let stages = pipeline.stages();
        let costs = Costs { transfer: 0.5, ..equal(stages, 1.0, 2.0) };
        let timeline = evaluate(pipeline, &costs, 1).expect("it ends");
        // By rank, chunk, letter and micro-batch: one rank may have B alone where another has it in one with W.
        let key = |rank: usize, chunk: usize, letter: char, m: usize| (rank, chunk, letter, m);
        let mut ends = BTreeMap::new();
        for (rank, slots) in timeline.slots.iter().enumerate() {
            for (slot, _, end) in slots {
                ends.insert(key(rank, slot.chunk, slot.work.letter(), slot.micro_batch), *end);
            }
        }
        let places = pipeline.places();
        for (rank, slots) in timeline.slots.iter().enumerate() {
            assert!(slots.is_sorted_by(|before, after| before.2 <= after.1));
            for &(slot, start, _) in slots {
                let stage = pipeline.virtual_stages[rank][slot.chunk];
                let before = Direction::of(slot.work).and_then(|way| way.reversed().next(stage, stages));
                if let Some((from, chunk)) = before.map(|stage| places[stage]) {
                    let transfer = if from == rank { 0.0 } else { costs.transfer };
                    assert!(ends[&key(from, chunk, slot.work.letter(), slot.micro_batch)] + transfer <= start);
                }
                let own = match slot.work {
                    Work::Forward => continue,
                    Work::Backward | Work::InputGrad => Work::Forward,
                    Work::WeightGrad => Work::InputGrad,
                };
                assert!(ends[&key(rank, slot.chunk, own.letter(), slot.micro_batch)] <= start);
            }
        }
    });
}

#[test]
fn a_slow_transfer_holds_up_a_stage_with_one_copy_and_not_one_with_two() {
    let slots = written(&["F0 F1 F2", "F0 F1 F2"]);
    let costs = Costs { transfer: 2.0, ..equal(2, 1.0, 1.0) };
    let starts = |copies| {
        let timeline = evaluate(&slots, &costs, copies).expect("it ends");
        timeline.slots[1].iter().map(|(_, start, _)| *start).collect::<Vec<_>>()
    };
    assert_eq!(starts(1), [3.0, 5.0, 7.0]);
    assert_eq!(starts(2), [3.0, 4.0, 5.0]);
}

#[test]
fn a_backward_pass_before_its_forward_pass_is_named() {
    let found = deadlock(&["F0 F1 B0 B1", "F0 B1 F1 B0"], 4);
    assert_eq!(
        found.with_hint(),
        "the pipeline stops before its end: stage 0 at B0 waits for B0 of stage 1; stage 1 at B1 waits for its own F1\n\
         hint: order the slots of neighbouring stages alike, each backward pass after its forward pass, or give send buffers \
         more copies"
    );
    assert_eq!(found.stuck[1].index, 1);
}

#[test]
fn two_stages_that_wait_for_each_other_are_named() {
    let found = deadlock(&["F0 B0 F1 B1", "F0 F1 B0 B1"], 4);
    let wait = |stage, slot| WaitsFor::Result { stage, slot };
    assert_eq!(
        found.stuck,
        [
            Stuck { stage: 0, slot: PipeSlot::backward(0, 0), index: 1, waits_for: wait(1, PipeSlot::backward(0, 0)) },
            Stuck { stage: 1, slot: PipeSlot::forward(0, 1), index: 1, waits_for: wait(0, PipeSlot::forward(0, 1)) },
        ]
    );
}

#[test]
fn a_send_buffer_that_is_full_forever_is_named_and_a_larger_one_ends_it() {
    let crossed = ["F0 F1 B0 B1", "F1 F0 B0 B1"];
    let lines: Vec<_> = deadlock(&crossed, 1).stuck.iter().map(Stuck::to_string).collect();
    assert_eq!(lines, ["stage 0 after F1 waits for stage 1 to start F0", "stage 1 at F1 waits for F1 of stage 0"]);
    assert!(evaluate(&written(&crossed), &equal(2, 1.0, 2.0), 2).is_ok());
    let none = deadlock(&["F0", "F0"], 0);
    assert_eq!(none.stuck[0].to_string(), "stage 0 after F0 waits for a send buffer to stage 1, which has no copies");
    let untaken = deadlock(&["F0 F1", "F0 B0"], 0);
    assert_eq!(untaken.stuck.len(), 2);
}

#[test]
fn slots_that_are_missing_or_there_twice_are_named() {
    assert_eq!(deadlock(&["F0", "F0 F1"], 2).stuck[0].to_string(), "stage 1 at F1 waits for F1 of stage 0");
    assert_eq!(deadlock(&["F0 F0 B0"], 2).stuck[0].to_string(), "stage 0 has F0 twice");
}

#[test]
fn a_pipeline_of_nothing_takes_no_time() {
    let timeline = evaluate(&written(&["", ""]), &equal(2, 1.0, 1.0), 1).expect("it ends");
    assert_eq!((timeline.total, timeline.bubble()), (0.0, 0.0));
    assert_eq!(timeline.picture(4), "stage 0  ....\nstage 1  ....\n");
}

fn picture(schedule: Schedule, stages: usize, micro_batches: usize, width: usize) -> String {
    let timeline =
        evaluate(&schedule.pipeline(stages, 1, micro_batches), &equal(stages, 1.0, 2.0), 1).expect("it ends");
    format!("\n{}", timeline.picture(width))
}

#[test]
fn gpipe_looks_like_this() {
    assert_eq!(
        picture(GPIPE, 4, 4, 63),
        "
stage 0  F0-F1-F2-F3-...........................B0----B1----B2----B3----
stage 1  ...F0-F1-F2-F3-..................B0----B1----B2----B3----......
stage 2  ......F0-F1-F2-F3-.........B0----B1----B2----B3----............
stage 3  .........F0-F1-F2-F3-B0----B1----B2----B3----..................
"
    );
}

#[test]
fn one_forward_one_backward_looks_like_this() {
    assert_eq!(
        picture(Schedule::USUAL, 4, 6, 81),
        "
stage 0  F0-F1-F2-F3-..................B0----F4-B1----F5-B2----...B3----...B4----...B5----
stage 1  ...F0-F1-F2-............B0----F3-B1----F4-B2----F5-B3----...B4----...B5----......
stage 2  ......F0-F1-......B0----F2-B1----F3-B2----F4-B3----F5-B4----...B5----............
stage 3  .........F0-B0----F1-B1----F2-B2----F3-B3----F4-B4----F5-B5----..................
"
    );
}

#[test]
fn a_narrow_picture_leaves_out_numbers() {
    assert_eq!(
        picture(Schedule::USUAL, 2, 12, 39),
        "
stage 0  FF..B0FB1FB2FB3FB4FB5FB6FB7FB8FB9FB-.B-
stage 1  .FB0FB1FB2FB3FB4FB5FB6FB7FB8FB9FB-FB-..
"
    );
}
