//! The walk of schedules against the bubbles that the Zero Bubble paper calculates from profiled times (arXiv 2401.10241, tables 5
//! and 9).

use lockstep_ir::Schedule;
use lockstep_ir::schedule::{ChunkCosts, Costs, Pipeline, Timeline, Work, evaluate};
use std::collections::BTreeMap;

/// Copies of send buffers, as compiled programs have them.
const COPIES: usize = 2;

/// A row of the tables: times in ms, and the bubbles of 1F1B, interleaved 1F1B and ZB-H1.
struct Row {
    /// Chunks of a rank where it is interleaved.
    v: usize,
    p: usize,
    m: usize,
    f: f64,
    b: f64,
    w: f64,
    c: f64,
    usual: f64,
    interleaved: f64,
    h1: f64,
}

#[rustfmt::skip]
const ROWS: [Row; 12] = [
    // 1.5B
    Row { v: 3, p: 8, m: 24, f: 18.522, b: 18.086, w: 9.337, c: 0.601, usual: 0.2431, interleaved: 0.1055, h1: 0.1585 },
    Row { v: 3, p: 8, m: 32, f: 18.513, b: 18.086, w: 9.331, c: 0.626, usual: 0.1985, interleaved: 0.0818, h1: 0.1242 },
    Row { v: 3, p: 8, m: 64, f: 18.546, b: 18.097, w: 9.321, c: 0.762, usual: 0.1240, interleaved: 0.0443, h1: 0.0674 },
    // 6.2B
    Row { v: 4, p: 8, m: 24, f: 29.718, b: 29.444, w: 19.927, c: 0.527, usual: 0.2347, interleaved: 0.0808, h1: 0.1323 },
    Row { v: 4, p: 8, m: 32, f: 29.802, b: 29.428, w: 19.530, c: 0.577, usual: 0.1898, interleaved: 0.0628, h1: 0.1045 },
    Row { v: 4, p: 8, m: 64, f: 29.935, b: 29.621, w: 19.388, c: 0.535, usual: 0.1091, interleaved: 0.0320, h1: 0.0554 },
    // 14.6B
    Row { v: 3, p: 16, m: 48, f: 11.347, b: 11.248, w: 8.132, c: 0.377, usual: 0.2552, interleaved: 0.1104, h1: 0.1397 },
    Row { v: 3, p: 16, m: 64, f: 11.307, b: 11.254, w: 8.101, c: 0.379, usual: 0.2082, interleaved: 0.0852, h1: 0.1088 },
    Row { v: 3, p: 16, m: 128, f: 11.325, b: 11.308, w: 8.109, c: 0.378, usual: 0.1251, interleaved: 0.0445, h1: 0.0576 },
    // 28.3B
    Row { v: 2, p: 32, m: 96, f: 10.419, b: 10.207, w: 7.715, c: 0.408, usual: 0.2646, interleaved: 0.1493, h1: 0.1421 },
    Row { v: 2, p: 32, m: 128, f: 10.408, b: 10.204, w: 7.703, c: 0.408, usual: 0.2168, interleaved: 0.1164, h1: 0.1106 },
    Row { v: 2, p: 32, m: 256, f: 10.402, b: 10.248, w: 7.698, c: 0.460, usual: 0.1352, interleaved: 0.0624, h1: 0.0594 },
];

impl Row {
    fn pipeline(&self, schedule: &str, chunks: usize) -> Pipeline {
        let schedule: Schedule = schedule.parse().unwrap();
        schedule.pipeline(self.p, chunks, self.m)
    }

    fn costs(&self, chunks: usize) -> Costs {
        let [forward, input_grad, weight_grad] = [self.f, self.b, self.w].map(|time| time / chunks as f64);
        Costs { chunks: vec![ChunkCosts { forward, input_grad, weight_grad }; self.p * chunks], transfer: self.c }
    }

    fn walk(&self, schedule: &str, chunks: usize) -> Timeline {
        evaluate(&self.pipeline(schedule, chunks), &self.costs(chunks), COPIES).unwrap()
    }

    /// What a rank computes.
    fn compute(&self) -> f64 {
        self.m as f64 * (self.f + self.b + self.w)
    }

    fn bubble(&self, total: f64) -> f64 {
        1.0 - self.compute() / total
    }
}

/// To four digits.
fn same(found: f64, published: f64) -> bool {
    format!("{found:.4}") == format!("{published:.4}")
}

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() < 1e-6 * expected
}

#[test]
fn usual_and_zb_h1_take_what_was_published() {
    for row in &ROWS {
        let Row { p, m, f, b, w, c, .. } = *row;
        let [ranks, batches] = [p as f64, m as f64];
        let usual = row.walk("1f1b", 1);
        assert!(same(row.bubble(usual.total), row.usual), "1f1b, p = {p}, m = {m}");
        let transfers = 2.0 * batches * (ranks - 1.0) / ranks + 2.0 * (ranks - 2.0);
        assert!(close(usual.total - row.compute(), (ranks - 1.0) * (f + b + w) + transfers * c));
        let h1 = row.walk("zb-h1", 1);
        assert!(same(row.bubble(h1.total), row.h1), "zb-h1, p = {p}, m = {m}");
        assert!(close(h1.total - row.compute(), (ranks - 1.0) * (f + b - w + 4.0 * c)));
    }
}

/// The makespan of an interleaved pipeline as the authors count it: between the last rank and the first, only the first micro-batch of
/// each group waits for its message.
fn as_published(pipeline: &Pipeline, costs: &Costs) -> f64 {
    let (places, ranks, stages) = (pipeline.places(), pipeline.slots.len(), pipeline.stages());
    let mut ends: BTreeMap<(usize, Work, usize), f64> = BTreeMap::new();
    let mut next = vec![0; ranks];
    let mut free = vec![0.0; ranks];
    while (0..ranks).any(|rank| next[rank] < pipeline.slots[rank].len()) {
        for rank in 0..ranks {
            while let Some(slot) = pipeline.slots[rank].get(next[rank]) {
                let stage = pipeline.virtual_stages[rank][slot.chunk];
                let ChunkCosts { forward, input_grad, weight_grad } = costs.chunks[stage];
                let (before, time) = match slot.work == Work::Forward {
                    true => (stage.checked_sub(1), forward),
                    false => (Some(stage + 1).filter(|s| *s < stages), input_grad + weight_grad),
                };
                let wraps = |before: usize| places[before].0.abs_diff(rank) == ranks - 1;
                let awaited = before.filter(|before| !wraps(*before) || slot.micro_batch.is_multiple_of(ranks));
                let mut start = free[rank];
                if let Some(before) = awaited {
                    let Some(end) = ends.get(&(before, slot.work, slot.micro_batch)) else { break };
                    start = f64::max(start, end + costs.transfer);
                }
                free[rank] = start + time;
                ends.insert((stage, slot.work, slot.micro_batch), free[rank]);
                next[rank] += 1;
            }
        }
    }
    free.into_iter().fold(0.0, f64::max)
}

#[test]
fn interleaved_takes_what_was_published_and_the_waits_that_were_left_out() {
    for row in &ROWS {
        let Row { v, p, m, f, b, w, c, .. } = *row;
        let [ranks, chunks] = [p as f64, v as f64];
        let found = row.walk("interleaved", v).total;
        let idle = (ranks - 1.0) * (f + b + w) / chunks;
        assert!(close(found - row.compute(), idle + (2.0 * ranks * chunks - 2.0) * c), "p = {p}, m = {m}");
        let published = as_published(&row.pipeline("interleaved", v), &row.costs(v));
        assert!(same(row.bubble(published), row.interleaved), "p = {p}, m = {m}: {}", row.bubble(published));
        let counted = 2.0 * ranks * (chunks - 1.0) + ranks - 2.0;
        assert!(close(published - row.compute(), idle + counted * c), "p = {p}, m = {m}");
        assert!(close(found - published, ranks * c), "p = {p}, m = {m}");
    }
}

#[test]
fn zb_v_waits_less_than_zb_h1_and_the_gradient_norm_costs_what_ranks_start_later() {
    for row in &ROWS {
        let v = row.walk("zb-v", 2);
        // Steps could follow each other after the window; the norm over all ranks makes them wait for the makespan.
        let (window, total) = (row.bubble(v.longest_window()), row.bubble(v.total));
        println!(
            "p = {:2}, m = {:3}: bubble {total:.4} of the makespan, {window:.4} of the longest window",
            row.p, row.m
        );
        assert!(window <= total && total < 0.6 * row.h1, "p = {}, m = {}: {window} {total}", row.p, row.m);
        assert!(v.total - v.longest_window() <= (row.p - 1) as f64 * (row.f / 2.0 + row.c), "p = {}", row.p);
    }
}
