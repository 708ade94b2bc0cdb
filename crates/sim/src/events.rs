//! The event simulation: the stages of a pipeline run their segments in order, send, receive and meet.
//!
//! Once all stages are in step, what repeats is left out.

use crate::{Result, SimError};
use std::ops::Range;

/// Something in a segment that other stages take part in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Point {
    /// Waits for the next message of a channel.
    Receive(usize),
    /// Sends the next message into a channel: waits while as many as it holds have not been received.
    Send(usize),
    /// Waits for all stages, and takes this many seconds together.
    Meet(f64),
}

/// How long a segment takes where it waits for nobody.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SegmentTime {
    /// In all.
    pub seconds: f64,
    /// What others take part in: seconds from the start, in order.
    pub points: Vec<(f64, Point)>,
}

/// A stream of messages from one stage to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Channel {
    /// Messages that may have been sent and not received.
    pub copies: usize,
    /// Seconds that a message is under way.
    pub seconds: f64,
}

/// When everything ran.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The end of the last slot.
    pub total: f64,
    /// By stage: seconds that it waited for others.
    pub waited: Vec<f64>,
    /// By stage and slot: when it ended; empty where not asked for.
    pub ends: Vec<Vec<f64>>,
}

/// Where a stage is.
struct Runner {
    slot: usize,
    point: usize,
    /// When its slot started.
    start: f64,
    /// How long it has waited in this slot.
    late: f64,
    waited: f64,
    /// Whether it waits at a rendezvous that has counted it, and how many it has passed.
    counted: bool,
    meetings: usize,
}

/// The messages of a channel.
struct Messages {
    channel: Channel,
    /// When each message arrives.
    arrivals: Vec<f64>,
    /// When each was taken.
    taken: Vec<f64>,
}

/// Slots of a stage that repeat: the same segments over and over, on micro-batches that are higher by a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repetition {
    /// The first of them.
    pub start: usize,
    /// Slots of one period.
    pub period: usize,
    /// How many periods there are.
    pub count: usize,
    /// Micro-batches of one period.
    pub micro_batches: usize,
}

impl Repetition {
    /// The longest repetition around the middle of a stage's slots: segments and micro-batches.
    pub fn find(segments: &[usize], micro_batches: &[usize]) -> Option<Self> {
        let middle = segments.len() / 2;
        let again = (middle + 1..segments.len()).find(|i| segments[*i] == segments[middle])?;
        // A period has a segment several times where several micro-batches of a chunk follow each other.
        (again..segments.len()).filter(|i| segments[*i] == segments[middle]).take(64).find_map(|again| {
            let (period, shift) = (again - middle, micro_batches[again].checked_sub(micro_batches[middle])?);
            let repeats = |i: usize| {
                let next = i + period;
                next < segments.len()
                    && segments[next] == segments[i]
                    && micro_batches[next] == micro_batches[i] + shift
            };
            let start = (0..=middle).rev().take_while(|i| repeats(*i)).last()?;
            let end = (middle..segments.len()).take_while(|i| repeats(*i)).last()? + 1;
            let count = (end + period - start) / period;
            // Whole periods have as many slots of every segment as micro-batches.
            let whole = |segment: usize| {
                let here = segments[start..start + period].iter().filter(|s| **s == segment).count();
                here == shift
            };
            let sound = shift > 0 && segments[start..start + period].iter().all(|segment| whole(*segment));
            (sound && count > 2).then_some(Self { start, period, count, micro_batches: shift })
        })
    }

    /// The slots of a period.
    fn slots(&self, period: usize) -> Range<usize> {
        let start = self.start + period * self.period;
        start..start + self.period
    }
}

/// As [`run`], in a time that does not grow with what repeats: once all stages take the same time for a period again and again,
/// they do so until the repetition ends. `repetitions` has one for every stage, or none.
pub fn run_repeating(
    slots: &[&[usize]],
    segments: &[Vec<SegmentTime>],
    channels: &[Channel],
    repetitions: &[Repetition],
) -> Result<Outcome> {
    let alike = repetitions.iter().all(|r| r.micro_batches == repetitions[0].micro_batches);
    let most = repetitions.iter().map(|r| r.count).min().filter(|_| alike && repetitions.len() == slots.len());
    // What a slot waits for is at most this many periods back: a micro-batch passes all stages there and back.
    let reach = 2 * slots.len() + 2;
    let mut kept = 3 * reach;
    while let Some(most) = most.filter(|most| kept + reach < *most) {
        // Waits for transfers come round once in as many periods as there are stages.
        let left_out = (most - kept) / slots.len() * slots.len();
        let cut = |(slots, r): (&&[usize], &Repetition)| {
            let (from, to) = (r.slots(r.count - left_out).start, r.slots(r.count).start);
            [&slots[..from], &slots[to..]].concat()
        };
        let short: Vec<Vec<usize>> = slots.iter().zip(repetitions).map(cut).collect();
        let short: Vec<&[usize]> = short.iter().map(Vec::as_slice).collect();
        let mut outcome = run(&short, segments, channels, true)?;
        if let Some(period) = steady(&outcome.ends, repetitions, left_out, reach) {
            outcome.total += left_out as f64 * period;
            for (stage, r) in repetitions.iter().enumerate() {
                let busy: f64 = slots[stage][r.slots(0)].iter().map(|s| segments[stage][*s].seconds).sum();
                outcome.waited[stage] += left_out as f64 * (period - busy);
            }
            return Ok(outcome);
        }
        kept *= 4;
    }
    run(slots, segments, channels, true)
}

/// Seconds of a period, where all stages take the same for as many periods as there are stages, at any of the last that were run.
fn steady(ends: &[Vec<f64>], repetitions: &[Repetition], left_out: usize, reach: usize) -> Option<f64> {
    let (mut found, stages): (Option<f64>, usize) = (None, ends.len());
    for (ends, r) in ends.iter().zip(repetitions) {
        let last = r.count - left_out;
        for i in r.slots(last - reach - stages).start..r.slots(last - stages).start {
            let took = ends[i + stages * r.period] - ends[i];
            let all = *found.get_or_insert(took);
            if (took - all).abs() > 1e-9 * all {
                return None;
            }
        }
    }
    found.map(|all| all / stages as f64)
}

/// Runs the slots of all stages: each is the index of one of its segments. With `record`, says when each ended.
pub fn run(slots: &[&[usize]], segments: &[Vec<SegmentTime>], channels: &[Channel], record: bool) -> Result<Outcome> {
    let runner = |_| Runner { slot: 0, point: 0, start: 0.0, late: 0.0, waited: 0.0, counted: false, meetings: 0 };
    let mut runners: Vec<Runner> = slots.iter().map(runner).collect();
    let queue = |channel: &Channel| Messages { channel: *channel, arrivals: Vec::new(), taken: Vec::new() };
    let mut queues: Vec<Messages> = channels.iter().map(queue).collect();
    // Of every rendezvous: how many have come, and when the last did.
    let mut meetings: Vec<(usize, f64)> = Vec::new();
    let mut recorded: Vec<Vec<f64>> = vec![Vec::new(); if record { slots.len() } else { 0 }];
    let mut ends = vec![0.0; slots.len()];
    loop {
        let mut moved = false;
        for (stage, runner) in runners.iter_mut().enumerate() {
            'slots: while let Some(&segment) = slots[stage].get(runner.slot) {
                let time = &segments[stage][segment];
                while let Some(&(offset, point)) = time.points.get(runner.point) {
                    let now = runner.start + runner.late + offset;
                    let then = match point {
                        Point::Receive(channel) => {
                            let queue = &mut queues[channel];
                            let Some(&arrival) = queue.arrivals.get(queue.taken.len()) else { break 'slots };
                            let then = now.max(arrival);
                            queue.taken.push(then);
                            then
                        }
                        Point::Send(channel) => {
                            let queue = &mut queues[channel];
                            let full = queue.arrivals.len().checked_sub(queue.channel.copies);
                            let then = match full.map(|oldest| queue.taken.get(oldest)) {
                                None => now,
                                Some(Some(&room)) => now.max(room),
                                Some(None) => break 'slots,
                            };
                            queue.arrivals.push(then + queue.channel.seconds);
                            then
                        }
                        Point::Meet(seconds) => {
                            if meetings.len() <= runner.meetings {
                                meetings.push((0, 0.0));
                            }
                            let meeting = &mut meetings[runner.meetings];
                            if !runner.counted {
                                *meeting = (meeting.0 + 1, meeting.1.max(now));
                                (runner.counted, moved) = (true, true);
                            }
                            if meeting.0 < slots.len() {
                                break 'slots;
                            }
                            (runner.counted, runner.meetings) = (false, runner.meetings + 1);
                            runner.waited -= seconds;
                            meeting.1 + seconds
                        }
                    };
                    runner.late += then - now;
                    runner.waited += then - now;
                    runner.point += 1;
                    moved = true;
                }
                let end = runner.start + runner.late + time.seconds;
                if record {
                    recorded[stage].push(end);
                }
                (runner.start, runner.late, runner.point) = (end, 0.0, 0);
                runner.slot += 1;
                ends[stage] = end;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck = runners.iter().enumerate().find(|(stage, runner)| runner.slot < slots[*stage].len());
    if let Some((stage, runner)) = stuck {
        return Err(SimError::Deadlock(format!("stage {stage} at slot {}", runner.slot)));
    }
    let total = ends.iter().copied().fold(0.0, f64::max);
    Ok(Outcome { total, waited: runners.iter().map(|r| r.waited).collect(), ends: recorded })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Hint;

    fn segment(seconds: f64, points: &[(f64, Point)]) -> SegmentTime {
        SegmentTime { seconds, points: points.to_vec() }
    }

    /// By stage: the segments of its slots, their micro-batches, and how long segments take.
    type Stages = (Vec<Vec<usize>>, Vec<Vec<usize>>, Vec<Vec<SegmentTime>>);

    /// Two stages under 1F1B: forward, backward, and the rendezvous at the end.
    fn stages(micro_batches: usize, times: [f64; 4]) -> Stages {
        let [f0, b0, f1, b1] = times;
        let update = segment(0.5, &[(0.25, Point::Meet(0.1))]);
        let first =
            vec![segment(f0, &[(f0, Point::Send(0))]), segment(b0, &[(0.0, Point::Receive(1))]), update.clone()];
        let last = vec![segment(f1, &[(0.0, Point::Receive(0))]), segment(b1, &[(b1, Point::Send(1))]), update];
        let (mut slots, mut batches) = (vec![vec![0]], vec![vec![0]]);
        for m in 0..micro_batches {
            if m + 1 < micro_batches {
                slots[0].push(0);
                batches[0].push(m + 1);
            }
            slots[0].push(1);
            batches[0].push(m);
        }
        slots[0].push(2);
        batches[0].push(0);
        slots.push((0..micro_batches).flat_map(|_| [0, 1]).chain([2]).collect());
        batches.push((0..micro_batches).flat_map(|m| [m, m]).chain([0]).collect());
        (slots, batches, vec![first, last])
    }

    #[test]
    fn messages_arrive_and_meetings_wait_for_the_last() {
        let (slots, _, segments) = stages(1, [1.0, 2.0, 1.5, 2.5]);
        let slots: Vec<&[usize]> = slots.iter().map(Vec::as_slice).collect();
        let channels = [Channel { copies: 2, seconds: 0.125 }; 2];
        let outcome = run(&slots, &segments, &channels, true).unwrap();
        // F, message, F, B, message, B, then half of the update, the rendezvous and the other half.
        let end = 1.0 + 0.125 + 1.5 + 2.5 + 0.125 + 2.0 + 0.25 + 0.1 + 0.25;
        assert_eq!((outcome.total, &outcome.ends[0]), (end, &vec![1.0, end - 0.6, end]));
        let expected = [0.125 + 1.5 + 2.5 + 0.125, 1.125 + 2.125];
        assert!(outcome.waited.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-9));
    }

    #[test]
    fn a_stage_that_waits_for_ever_is_found() {
        let segments = vec![vec![segment(1.0, &[(0.0, Point::Receive(0))])]];
        let error = run(&[&[0]], &segments, &[Channel { copies: 1, seconds: 0.0 }], false).unwrap_err();
        assert_eq!(error.with_hint(), "the stages wait for each other: stage 0 at slot 0");
    }

    #[test]
    fn what_repeats_is_left_out_and_nothing_changes() {
        for times in [[1.0, 2.0, 1.5, 2.5], [1.5, 2.5, 1.0, 2.0], [1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 1.0001, 2.0]] {
            let (slots, batches, segments) = stages(500, times);
            let repetitions: Vec<Repetition> =
                slots.iter().zip(&batches).map(|(slots, batches)| Repetition::find(slots, batches).unwrap()).collect();
            assert!(
                repetitions.iter().all(|r| r.period == 2 && r.micro_batches == 1 && r.count > 490),
                "{repetitions:?}"
            );
            let slots: Vec<&[usize]> = slots.iter().map(Vec::as_slice).collect();
            let channels = [Channel { copies: 2, seconds: 0.125 }; 2];
            let whole = run(&slots, &segments, &channels, true).unwrap();
            let short = run_repeating(&slots, &segments, &channels, &repetitions).unwrap();
            assert!(
                (whole.total - short.total).abs() < 1e-8 * whole.total,
                "{times:?}: {} {}",
                whole.total,
                short.total
            );
            for (a, b) in whole.waited.iter().zip(&short.waited) {
                assert!((a - b).abs() < 1e-6 * whole.total, "{times:?}: {a} {b}");
            }
            assert!(short.ends[0].len() < 200, "{times:?}: {}", short.ends[0].len());
        }
    }
}
