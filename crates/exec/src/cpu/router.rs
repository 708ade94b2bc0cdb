//! The router of a mixture of experts: scores, the choice, its losses, and their gradients.

use super::call::{Call, Ptr};
use super::experts::Scratch;
use lockstep_ir::op::{Routing, Score};
use std::cmp::Ordering;

/// Scratch of the router: what it chooses by, and what it may still choose, on every thread.
pub fn route_scratch(threads: usize) -> Scratch {
    (0, vec![(8 * threads as u64, "experts")])
}

/// The scores of some logits.
fn score(how: Score, logits: &[f32], scores: &mut [f32]) {
    match how {
        Score::Sigmoid => scores.iter_mut().zip(logits).for_each(|(s, l)| *s = 1.0 / (1.0 + (-l).exp())),
        Score::Softmax => drop(softmax(logits, scores)),
    }
}

/// The first of the largest among `0..n` that are `open`; what is no number comes last.
fn largest(n: usize, open: impl Fn(usize) -> bool, key: impl Fn(usize) -> f32) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (i, key) in (0..n).filter(|i| open(*i)).map(|i| (i, key(i))) {
        if best.is_none_or(|(_, b)| key > b || (b.is_nan() && !key.is_nan())) {
            best = Some((i, key));
        }
    }
    best.map(|(i, _)| i)
}

/// Closes the groups that a token may not use.
fn close_groups(how: &Routing, key: impl Fn(usize) -> f32, open: &mut [f32]) {
    let each = open.len() / how.groups;
    let of_group = |group: usize| {
        let at = |i: usize| key(group * each + i);
        let first = largest(each, |_| true, at).unwrap_or(0);
        match how.score {
            Score::Softmax => at(first),
            Score::Sigmoid => at(first) + at(largest(each, |i| i != first, at).unwrap_or(0)),
        }
    };
    open.fill(0.0);
    for _ in 0..how.top_groups {
        let free = |group: usize| open[group * each] == 0.0;
        if let Some(group) = largest(how.groups, free, of_group) {
            open[group * each..][..each].fill(1.0);
        }
    }
}

/// weights, chosen `[tokens, choices]` of logits `[tokens, experts]`.
pub fn route(call: Call, how: &Routing) {
    let (tokens, experts, choices) =
        (call.size("batch") * call.size("seq"), call.size("experts"), call.size("choices"));
    let (logits, bias) = (Ptr(call.input::<f32>(0)), call.given::<f32>(1).map(Ptr));
    let (weights, chosen) = (call.output::<f32>(0).map(Ptr), call.output::<u32>(1).map(Ptr));
    let scratch = Ptr(call.scratch::<f32>());
    let grain = tokens.div_ceil(4 * call.pool.threads()).max(1);
    call.pool.run(tokens.div_ceil(grain), |task, worker| {
        // SAFETY: a worker has its own scratch; tokens of the task are its own; experts are below `experts`.
        unsafe {
            let scores = scratch.slice(worker * 2 * experts, experts);
            let open = scratch.slice(worker * 2 * experts + experts, experts);
            for token in task * grain..tokens.min((task + 1) * grain) {
                score(how.score, logits.slice(token * experts, experts), scores);
                let key = |e: usize| scores[e] + bias.map_or(0.0, |bias| *bias.at(e));
                match how.groups {
                    1 => open.fill(1.0),
                    _ => close_groups(how, key, open),
                }
                let mut sum = 0.0;
                for i in token * choices..(token + 1) * choices {
                    let expert = largest(experts, |e| open[e] != 0.0, key).unwrap_or(0);
                    open[expert] = 0.0;
                    sum += scores[expert];
                    if let Some(weights) = weights {
                        *weights.at(i) = scores[expert];
                    }
                    if let Some(chosen) = chosen {
                        *chosen.at(i) = expert as u32;
                    }
                }
                let factor = if how.normalise { how.scale / sum } else { how.scale };
                if let Some(weights) = weights {
                    weights.slice(token * choices, choices).iter_mut().for_each(|w| *w *= factor);
                }
            }
        }
    });
}

/// Scratch of weights for given experts: scores, on every thread.
pub fn route_to_scratch(threads: usize) -> Scratch {
    (0, vec![(4 * threads as u64, "experts")])
}

/// weights and chosen `[tokens, choices]` of logits `[tokens, experts]` and given `[tokens, choices]`, with the bits of [`route`].
pub fn route_to(call: Call, how: &Routing) {
    let (tokens, experts, choices) =
        (call.size("batch") * call.size("seq"), call.size("experts"), call.size("choices"));
    let (logits, given) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<u32>(1)));
    let (weights, chosen) = (call.output::<f32>(0).map(Ptr), call.output::<u32>(1).map(Ptr));
    let scratch = Ptr(call.scratch::<f32>());
    let grain = tokens.div_ceil(4 * call.pool.threads()).max(1);
    call.pool.run(tokens.div_ceil(grain), |task, worker| {
        // SAFETY: a worker has its own scratch; tokens of the task are its own.
        unsafe {
            let scores = scratch.slice(worker * experts, experts);
            for token in task * grain..tokens.min((task + 1) * grain) {
                score(how.score, logits.slice(token * experts, experts), scores);
                let own = |e: &u32| scores[*e as usize % experts];
                let given = given.slice(token * choices, choices);
                let sum: f32 = given.iter().map(own).sum();
                let factor = if how.normalise { how.scale / sum } else { how.scale };
                if let Some(weights) = weights {
                    let weights = weights.slice(token * choices, choices);
                    weights.iter_mut().zip(given.iter()).for_each(|(w, e)| *w = own(e) * factor);
                }
                if let Some(chosen) = chosen {
                    chosen.slice(token * choices, choices).copy_from_slice(given);
                }
            }
        }
    });
}

/// dlogits `[tokens, experts]` from dweights `[tokens, choices]`.
pub fn route_grad(call: Call, how: &Routing) {
    let (tokens, experts, choices) =
        (call.size("batch") * call.size("seq"), call.size("experts"), call.size("choices"));
    let (dweights, logits) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<f32>(1)));
    let chosen = Ptr(call.input::<u32>(2));
    let Some(dlogits) = call.output::<f32>(0).map(Ptr) else { return };
    call.rows(tokens, |from, to| {
        for token in from..to {
            // SAFETY: tokens from .. to belong to this task.
            unsafe {
                let (dweights, chosen) =
                    (dweights.slice(token * choices, choices), chosen.slice(token * choices, choices));
                let d = dlogits.slice(token * experts, experts);
                score(how.score, logits.slice(token * experts, experts), d);
                let all = || dweights.iter().zip(chosen).map(|(dw, e)| (*dw, *e as usize % experts));
                let sum: f32 = all().map(|(_, e)| d[e]).sum();
                let mean: f32 = all().map(|(dw, e)| dw * d[e]).sum::<f32>() / sum;
                // Of a score, by the weights.
                let of = |dw: f32| how.scale * if how.normalise { (dw - mean) / sum } else { dw };
                let dot: f32 = all().map(|(dw, e)| of(dw) * d[e]).sum();
                for (expert, d) in d.iter_mut().enumerate() {
                    let by: f32 = all().filter(|(_, e)| *e == expert).map(|(dw, _)| of(dw)).sum();
                    *d = match how.score {
                        Score::Softmax => *d * (by - dot),
                        Score::Sigmoid => by * *d * (1.0 - *d),
                    };
                }
            }
        }
    });
}

/// Scratch of the router's losses: on every thread the shares of a sequence's experts, and scores.
pub fn router_loss_scratch(threads: usize) -> Scratch {
    (0, vec![(8 * threads as u64, "experts")])
}

/// counts `[b, experts]` of chosen `[b, s, choices]`.
pub fn counts(call: Call) {
    let (rows, experts) = (call.size("seq") * call.size("choices"), call.size("experts"));
    let chosen = Ptr(call.input::<u32>(0));
    let Some(counts) = call.output::<f32>(0).map(Ptr) else { return };
    call.ranges(call.size("batch"), 1, |sequence, _| {
        // SAFETY: the sequence belongs to this task.
        let (chosen, counts) =
            unsafe { (chosen.slice(sequence * rows, rows), counts.slice(sequence * experts, experts)) };
        counts.fill(0.0);
        chosen.iter().for_each(|e| counts[*e as usize % experts] += 1.0);
    });
}

/// load `[experts]` (f64) of chosen `[tokens, choices]`.
pub fn load(call: Call) {
    let Some(load) = call.output::<f64>(0).map(Ptr) else { return };
    let (rows, experts) = (call.bound.inputs[0].elements, call.size("experts"));
    // SAFETY: the operands have as many elements.
    let (chosen, load) = unsafe { (Ptr(call.input::<u32>(0)).slice(0, rows), load.slice(0, experts)) };
    if !call.adds(0) {
        load.fill(0.0);
    }
    chosen.iter().for_each(|e| load[*e as usize % experts] += 1.0);
}

/// totals `[rows, entries]` of each `[entries]`.
pub fn stack_totals(call: Call) {
    let (Some(totals), entries) = (call.output::<f64>(0).map(Ptr), call.size("entries")) else { return };
    for row in 0..call.bound.inputs.len() {
        // SAFETY: there is a row for every input, of as many elements.
        unsafe {
            let total = Ptr(call.input::<f64>(row)).slice(0, entries);
            totals.slice(row * entries, entries).copy_from_slice(total);
        }
    }
}

/// next `[experts]` of bias `[experts]`, row `row` of loads `[layers, experts]` and stats.
pub fn move_bias(call: Call, row: usize, rate: f32) {
    let (Some(next), experts) = (call.output::<f32>(0).map(Ptr), call.size("experts")) else { return };
    // SAFETY: the operands have as many elements; the shape rule has checked the row.
    unsafe {
        let load = Ptr(call.input::<f64>(1)).slice(row * experts, experts);
        let applied = !(*Ptr(call.input::<f32>(2)).at(1)).is_nan();
        let (bias, all) = (Ptr(call.input::<f32>(0)), load.iter().sum::<f64>());
        for (e, load) in load.iter().enumerate() {
            let step = match (load * experts as f64).total_cmp(&all) {
                Ordering::Less => rate,
                Ordering::Equal => 0.0,
                Ordering::Greater => -rate,
            };
            *next.at(e) = *bias.at(e) + if applied { step } else { 0.0 };
        }
    }
}

/// Calls `f(sequence, shares, scores)` for every sequence: how much of its tokens each expert gets, and room for scores.
fn each_sequence(call: Call, f: impl Fn(usize, &[f32], &mut [f32]) + Sync) {
    let experts = call.size("experts");
    let (counts, scratch) = (Ptr(call.input::<f32>(1)), Ptr(call.scratch::<f32>()));
    call.pool.run(call.size("batch"), |sequence, worker| {
        // SAFETY: a worker has its own scratch.
        unsafe {
            let shares = scratch.slice(worker * 2 * experts, experts);
            let scores = scratch.slice(worker * 2 * experts + experts, experts);
            let counts = counts.slice(sequence * experts, experts);
            let all: f32 = counts.iter().sum();
            shares.iter_mut().zip(counts).for_each(|(share, n)| *share = n / all);
            f(sequence, shares, scores);
        }
    });
}

/// The log-sum-exp of some logits, and their softmax.
fn softmax(logits: &[f32], scores: &mut [f32]) -> f32 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = logits.iter().map(|l| (l - most).exp()).sum();
    let lse = most + sum.ln();
    scores.iter_mut().zip(logits).for_each(|(s, l)| *s = (l - lse).exp());
    lse
}

/// How much of a token's scores goes to busy experts.
fn busy(scores: &[f32], shares: &[f32]) -> f32 {
    scores.iter().zip(shares).map(|(p, share)| p * share).sum()
}

/// loss `[b]` (f64) of logits `[b, s, experts]` and counts `[b, experts]`.
pub fn router_loss(call: Call, balance: f32, z: f32) {
    let (seq, experts) = (call.size("seq"), call.size("experts"));
    let logits = Ptr(call.input::<f32>(0));
    let Some(loss) = call.output::<f64>(0).map(Ptr) else { return };
    each_sequence(call, |sequence, shares, scores| {
        let of_token = |token: usize| {
            // SAFETY: there is a row for every token.
            let lse = softmax(unsafe { logits.slice(token * experts, experts) }, scores);
            f64::from(balance * experts as f32 * busy(scores, shares) + z * lse * lse)
        };
        let sum = (sequence * seq..(sequence + 1) * seq).map(of_token).sum();
        // SAFETY: the sequence belongs to this task.
        unsafe { *loss.at(sequence) = sum };
    });
}

/// dlogits `[b, s, experts]`.
pub fn router_loss_grad(call: Call, balance: f32, z: f32) {
    let (seq, experts) = (call.size("seq"), call.size("experts"));
    let logits = Ptr(call.input::<f32>(0));
    let Some(dlogits) = call.output::<f32>(0).map(Ptr) else { return };
    each_sequence(call, |sequence, shares, _| {
        for token in sequence * seq..(sequence + 1) * seq {
            // SAFETY: the sequence belongs to this task.
            let (logits, d) =
                unsafe { (logits.slice(token * experts, experts), dlogits.slice(token * experts, experts)) };
            let lse = softmax(logits, d);
            let mean = busy(d, shares);
            let of = |p: f32, share: f32| p * (balance * experts as f32 * (share - mean) + 2.0 * z * lse);
            d.iter_mut().zip(shares).for_each(|(d, share)| *d = of(*d, *share));
        }
    });
}
