//! The event simulation: the stages of a pipeline run their segments in order, send, receive and meet.

use crate::SimError;

/// Something in a segment that other stages take part in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Point {
    /// Waits for the next message of a channel.
    Receive(usize),
    /// Sends the next message into a channel: waits while as many as it holds have not been received.
    Send(usize),
    /// Waits for all stages, and takes so many seconds together.
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
    /// By stage and slot: start and end; empty where not asked for.
    pub slots: Vec<Vec<(f64, f64)>>,
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
    /// Whether it stands at a meeting that has counted it, and how many it has passed.
    counted: bool,
    meetings: usize,
}

struct Mailbox {
    channel: Channel,
    /// When each message arrives.
    arrivals: Vec<f64>,
    /// When each was taken.
    taken: Vec<f64>,
}

/// Runs the slots of all stages: each is the index of one of its segments. With `record`, says when each ran.
pub fn run(
    slots: &[Vec<usize>],
    segments: &[Vec<SegmentTime>],
    channels: &[Channel],
    record: bool,
) -> Result<Outcome, SimError> {
    let runner = |_| Runner { slot: 0, point: 0, start: 0.0, late: 0.0, waited: 0.0, counted: false, meetings: 0 };
    let mut runners: Vec<Runner> = slots.iter().map(runner).collect();
    let mailbox = |channel: &Channel| Mailbox { channel: *channel, arrivals: Vec::new(), taken: Vec::new() };
    let mut mailboxes: Vec<Mailbox> = channels.iter().map(mailbox).collect();
    // Of every meeting: how many have come, and when the last did.
    let mut meetings: Vec<(usize, f64)> = Vec::new();
    let mut recorded: Vec<Vec<(f64, f64)>> = vec![Vec::new(); if record { slots.len() } else { 0 }];
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
                            let mailbox = &mut mailboxes[channel];
                            let Some(&arrival) = mailbox.arrivals.get(mailbox.taken.len()) else { break 'slots };
                            let then = now.max(arrival);
                            mailbox.taken.push(then);
                            then
                        }
                        Point::Send(channel) => {
                            let mailbox = &mut mailboxes[channel];
                            let full = mailbox.arrivals.len().checked_sub(mailbox.channel.copies);
                            let then = match full.map(|oldest| mailbox.taken.get(oldest)) {
                                None => now,
                                Some(Some(&room)) => now.max(room),
                                Some(None) => break 'slots,
                            };
                            mailbox.arrivals.push(then + mailbox.channel.seconds);
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
                    recorded[stage].push((runner.start, end));
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
    Ok(Outcome { total, waited: runners.iter().map(|r| r.waited).collect(), slots: recorded })
}
