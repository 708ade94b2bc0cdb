//! The event simulation against the bubbles that the Zero Bubble paper calculates from profiled times (arXiv 2401.10241, tables 5 and
//! 9), and against the walk of schedules in `ir`.

use lockstep_ir::Schedule;
use lockstep_ir::schedule::{ChunkCosts, Costs, PipeSlot, Work, evaluate};
use lockstep_sim::events::{Channel, Point, SegmentTime, run};
use std::collections::BTreeMap;

/// Copies of send buffers, as compiled programs have them.
const COPIES: usize = 2;

/// Chunks of a rank where it is interleaved; times in ms (forward, input gradients, weight gradients, transfer); the published bubbles of 1F1B,
/// interleaved 1F1B and ZB-H1.
struct Row {
    v: usize,
    p: usize,
    m: usize,
    times: [f64; 4],
    bubbles: [f64; 3],
}

const fn row(v: usize, p: usize, m: usize, times: [f64; 4], bubbles: [f64; 3]) -> Row {
    Row { v, p, m, times, bubbles }
}

#[rustfmt::skip]
const ROWS: [Row; 12] = [
    row(3, 8, 24, [18.522, 18.086, 9.337, 0.601], [0.2431, 0.1055, 0.1585]),
    row(3, 8, 32, [18.513, 18.086, 9.331, 0.626], [0.1985, 0.0818, 0.1242]),
    row(3, 8, 64, [18.546, 18.097, 9.321, 0.762], [0.1240, 0.0443, 0.0674]),
    row(4, 8, 24, [29.718, 29.444, 19.927, 0.527], [0.2347, 0.0808, 0.1323]),
    row(4, 8, 32, [29.802, 29.428, 19.530, 0.577], [0.1898, 0.0628, 0.1045]),
    row(4, 8, 64, [29.935, 29.621, 19.388, 0.535], [0.1091, 0.0320, 0.0554]),
    row(3, 16, 48, [11.347, 11.248, 8.132, 0.377], [0.2552, 0.1104, 0.1397]),
    row(3, 16, 64, [11.307, 11.254, 8.101, 0.379], [0.2082, 0.0852, 0.1088]),
    row(3, 16, 128, [11.325, 11.308, 8.109, 0.378], [0.1251, 0.0445, 0.0576]),
    row(2, 32, 96, [10.419, 10.207, 7.715, 0.408], [0.2646, 0.1493, 0.1421]),
    row(2, 32, 128, [10.408, 10.204, 7.703, 0.408], [0.2168, 0.1164, 0.1106]),
    row(2, 32, 256, [10.402, 10.248, 7.698, 0.460], [0.1352, 0.0624, 0.0594]),
];

/// A pipeline as the simulator sees it: by rank its slots, a segment for each chunk and kind of work, messages between virtual
/// stages on other ranks.
fn simulated(schedule: &str, p: usize, chunks: usize, m: usize, costs: &Costs) -> f64 {
    let schedule: Schedule = schedule.parse().unwrap();
    let pipeline = schedule.pipeline(p, chunks, m);
    let (places, stages) = (pipeline.places(), pipeline.stages());
    let mut channels: BTreeMap<(usize, bool), usize> = BTreeMap::new();
    let mut channel = |sender: usize, forward: bool| {
        let count = channels.len();
        *channels.entry((sender, forward)).or_insert(count)
    };
    let (mut slots, mut segments) = (Vec::new(), Vec::new());
    for (rank, order) in pipeline.slots.iter().enumerate() {
        let mut known: BTreeMap<(usize, Work), usize> = BTreeMap::new();
        let mut times = Vec::new();
        let mut list = Vec::new();
        for PipeSlot { chunk, work, .. } in order {
            let stage = pipeline.virtual_stages[rank][*chunk];
            let elsewhere = |other: &usize| *other < stages && places[*other].0 != rank;
            let before = stage.checked_sub(1).filter(elsewhere);
            let behind = Some(stage + 1).filter(elsewhere);
            let ChunkCosts { forward, input_grad, weight_grad } = costs.chunks[stage];
            let (seconds, from, to) = match work {
                Work::Forward => (forward, before, behind),
                Work::Backward => (input_grad + weight_grad, behind, before),
                Work::InputGrad => (input_grad, behind, before),
                Work::WeightGrad => (weight_grad, None, None),
            };
            list.push(*known.entry((*chunk, *work)).or_insert_with(|| {
                let mut points = Vec::new();
                points.extend(from.map(|from| (0.0, Point::Receive(channel(from, *work == Work::Forward)))));
                points.extend(to.map(|_| (seconds, Point::Send(channel(stage, *work == Work::Forward)))));
                times.push(SegmentTime { seconds, points });
                times.len() - 1
            }));
        }
        slots.push(list);
        segments.push(times);
    }
    let channels = vec![Channel { copies: COPIES, seconds: costs.transfer }; channels.len()];
    let slots: Vec<&[usize]> = slots.iter().map(Vec::as_slice).collect();
    run(&slots, &segments, &channels, false).unwrap().total
}

fn costs(row: &Row, chunks: usize) -> Costs {
    let [forward, input_grad, weight_grad, transfer] = row.times;
    let each = |time: f64| time / chunks as f64;
    let chunk = ChunkCosts { forward: each(forward), input_grad: each(input_grad), weight_grad: each(weight_grad) };
    Costs { chunks: vec![chunk; row.p * chunks], transfer }
}

#[test]
fn the_published_bubbles_come_out_to_four_digits() {
    for row in &ROWS {
        let Row { v, p, m, times: [f, b, w, c], bubbles: [usual, interleaved, h1] } = *row;
        let took = |schedule: &str, chunks: usize| simulated(schedule, p, chunks, m, &costs(row, chunks));
        let check = |name: &str, total: f64, published: f64| {
            let found = 1.0 - m as f64 * (f + b + w) / total;
            assert_eq!(format!("{found:.4}"), format!("{published:.4}"), "{name}, p = {p}, m = {m}");
        };
        check("1f1b", took("1f1b", 1), usual);
        check("zb-h1", took("zb-h1", 1), h1);
        // Between the last rank and the first the authors let only the first micro-batch of each group wait for its message.
        check("interleaved", took("interleaved", v) - p as f64 * c, interleaved);
    }
}

#[test]
fn the_published_times_take_what_the_walk_takes_under_every_schedule() {
    for row in &ROWS {
        for schedule in Schedule::ALL {
            let chunks = row.v.clamp(*schedule.chunks().start(), *schedule.chunks().end());
            let costs = costs(row, chunks);
            let walked = evaluate(&schedule.pipeline(row.p, chunks, row.m), &costs, COPIES).unwrap().total;
            let found = simulated(schedule.name(), row.p, chunks, row.m, &costs);
            assert!(
                (found - walked).abs() < 1e-9 * walked,
                "{schedule}, p = {}, m = {}: {found} {walked}",
                row.p,
                row.m
            );
        }
    }
}

#[test]
fn every_schedule_takes_what_the_walk_of_it_takes() {
    for schedule in Schedule::ALL {
        for chunks in (1..=4).filter(|chunks| schedule.chunks().contains(chunks)) {
            for (p, m) in [(2, 2), (2, 7), (4, 4), (4, 16), (8, 24), (3, 9)] {
                // Stages that differ.
                let chunk = |i: usize| {
                    let x = 1.0 + (i * 7 % 5) as f64 / 10.0;
                    ChunkCosts { forward: x, input_grad: 1.1 * x, weight_grad: 0.8 * x }
                };
                let costs = Costs { chunks: (0..p * chunks).map(chunk).collect(), transfer: 0.05 };
                let walked = evaluate(&schedule.pipeline(p, chunks, m), &costs, COPIES).unwrap().total;
                let found = simulated(schedule.name(), p, chunks, m, &costs);
                assert!((found - walked).abs() < 1e-9 * walked, "{schedule} p={p} v={chunks} m={m}: {found} {walked}");
            }
        }
    }
}
