//! The picture of a pipeline schedule, as papers draw it: a row per rank, time to the right. One file, no scripts, no fonts of its
//! own; its colours follow the viewer's light or dark scheme.

use super::forecast::Predicted;
use crate::drawing::{line, page, text, tick_step};
use crate::failure::{Failure, Result};
use crate::timeline::write_file;
use lockstep_ir::schedule::{PipeSlot, Pipeline, Timeline, Work};
use lockstep_ir::units;
use lockstep_plan::Plan;
use std::fmt::Write;
use std::path::Path;

/// The picture, and in it the rows.
const WIDTH: f64 = 1400.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 1376.0;
const TOP: f64 = 112.0;

/// Beyond this many messages, lines between the rows would hide them; beyond this many slots, each is drawn without its name.
const MOST_MESSAGES: usize = 400;
const MOST_NAMES: usize = 4000;

const STYLE: [&str; 2] = [
    ".idle { fill: #ececef } .sent { stroke: #222; stroke-width: .7; opacity: .55 } .slot { stroke: #fff; stroke-width: .6 } \
     .number { font-size: 11px; fill: #fff; text-anchor: middle } .end { stroke: #222; stroke-dasharray: 6 4 }",
    ".idle { fill: #24272f } .sent { stroke: #eee } .slot { stroke: #16181d } .end { stroke: #eee } .number { fill: #fff }",
];

/// What a kind of work is called, and its colours in the first chunk and the last.
const fn look(work: Work) -> (&'static str, [[u8; 3]; 2]) {
    match work {
        Work::Forward => ("F: forward", [[46, 94, 150], [132, 170, 214]]),
        Work::Backward => ("B: backward, input and weight gradients", [[150, 62, 92], [214, 140, 165]]),
        Work::InputGrad => ("B: input gradients", [[20, 122, 128], [104, 182, 186]]),
        Work::WeightGrad => ("W: weight gradients", [[58, 116, 42], [142, 186, 116]]),
    }
}

/// The colour of a chunk: from dark in the first to light in the last.
fn colour(work: Work, chunk: usize, chunks: usize) -> String {
    let [dark, light] = look(work).1;
    let share = if chunks > 1 { chunk as f64 / (chunks - 1) as f64 } else { 0.0 };
    let mixed = |i: usize| (f64::from(dark[i]) + share * (f64::from(light[i]) - f64::from(dark[i]))).round() as u8;
    format!("#{:02x}{:02x}{:02x}", mixed(0), mixed(1), mixed(2))
}

/// Draws the schedule of a plan into a file.
pub(super) fn write(path: &Path, plan: &Plan, predicted: Option<&Predicted>) -> Result<()> {
    let Some(timeline) = super::layout::timeline(plan) else {
        return Err(Failure::request(
            "--schedule draws the stages of a pipeline, and parallel.pp = 1",
            "add --set parallel.pp=2, or leave out --schedule",
        ));
    };
    let drawn = match predicted {
        Some(predicted) => draw(plan, &predicted.pipeline(), Some(&predicted.place())),
        None => draw(plan, &timeline, None),
    };
    write_file(path, drawn, "pipeline schedule", "check the folder of --schedule")
}

/// The schedule of a plan as SVG; none where there is no pipeline.
pub(crate) fn picture(plan: &Plan) -> Option<String> {
    super::layout::timeline(plan).map(|timeline| draw(plan, &timeline, None))
}

/// Time is seconds, predicted for what is named, or FLOPs.
fn draw(plan: &Plan, timeline: &Timeline, predicted: Option<&str>) -> String {
    let pipeline = plan.layout.pipeline();
    let ranks = timeline.slots.len();
    let row = (640.0 / ranks as f64).clamp(14.0, 34.0);
    let (gap, bottom) = (row / 6.0, TOP + ranks as f64 * row);
    let height = bottom + 92.0;
    let x = |time: f64| LEFT + (RIGHT - LEFT) * time / timeline.total.max(f64::MIN_POSITIVE);
    let y = |rank: usize| TOP + rank as f64 * row;
    let title = format!("{}, {} micro-batches", plan.layout, plan.layout.micro_batches);
    let bubble = 100.0 * timeline.bubble();
    let in_flight = pipeline.in_flight().into_iter().max().unwrap_or(0);
    let summary = format!(
        "pipeline bubble {bubble:.1}% (idle time of all ranks); at most {in_flight} chunks in flight on a rank; numbers are micro-batches"
    );
    let mut svg = page((WIDTH, height), LEFT, STYLE, &title, &summary);
    let all: usize = timeline.slots.iter().map(Vec::len).sum();
    let chunks = plan.layout.chunks;
    for (rank, slots) in timeline.slots.iter().enumerate() {
        let (top, tall) = (y(rank) + gap / 2.0, row - gap);
        text(&mut svg, "", LEFT - 8.0, top + tall / 2.0 + 4.5, "end", &format!("rank {rank}"));
        let wide = RIGHT - LEFT;
        let _ =
            writeln!(svg, "<rect class=\"idle\" x=\"{LEFT}\" y=\"{top:.1}\" width=\"{wide}\" height=\"{tall:.1}\"/>");
        for (slot, start, end) in slots {
            let (from, width) = (x(*start), x(*end) - x(*start));
            let fill = colour(slot.work, slot.chunk, chunks);
            let name =
                if all <= MOST_NAMES { format!("<title>{}</title>", named(slot, chunks)) } else { String::new() };
            let _ = writeln!(
                svg,
                "<rect class=\"slot\" x=\"{from:.2}\" y=\"{top:.1}\" width=\"{width:.2}\" height=\"{tall:.1}\" fill=\"{fill}\">{name}</rect>"
            );
            let number = slot.micro_batch.to_string();
            if width >= 6.5 * number.len() as f64 + 2.0 && tall >= 11.0 {
                let (x, y) = (from + width / 2.0, top + tall / 2.0 + 4.0);
                let _ = writeln!(svg, "<text class=\"number\" x=\"{x:.1}\" y=\"{y:.1}\">{number}</text>");
            }
        }
    }
    let sent = messages(&pipeline, timeline);
    let drawn = sent.len() <= MOST_MESSAGES;
    for message in sent.iter().filter(|_| drawn) {
        let (from, to) = (message.from, message.to);
        // From the edge of one row to the facing edge of the other.
        let (leaves, arrives) = match from.0 < to.0 {
            true => (y(from.0 + 1) - gap / 2.0, y(to.0) + gap / 2.0),
            false => (y(from.0) + gap / 2.0, y(to.0 + 1) - gap / 2.0),
        };
        line(&mut svg, "sent", x(from.1), leaves, x(to.1), arrives);
    }
    line(&mut svg, "end", RIGHT, TOP - 8.0, RIGHT, bottom);
    text(&mut svg, "quiet", RIGHT, TOP - 12.0, "end", "gradient norm of all ranks, update");
    time_axis(&mut svg, timeline.total, bottom, predicted.is_some(), &x);
    let sends = match drawn {
        true => "lines: results sent to the rank that waits for them".to_owned(),
        false => format!("{} sends between ranks are not drawn", units::thousands(sent.len() as u64)),
    };
    let time = match predicted {
        Some(place) => format!("time as predicted for {place}"),
        None => "time is FLOPs, transfers are free".to_owned(),
    };
    text(&mut svg, "quiet", LEFT, bottom + 76.0, "start", &format!("{time}; {sends}"));
    legend(&mut svg, timeline, chunks);
    svg.push_str("</svg>\n");
    svg
}

/// What a slot is: `B3, input gradients of chunk 1`.
fn named(slot: &PipeSlot, chunks: usize) -> String {
    let what = look(slot.work).0.split(": ").nth(1).unwrap_or_default();
    let chunk = if chunks > 1 { format!(", chunk {}", slot.chunk) } else { String::new() };
    format!("{}{}: {what} of micro-batch {}{chunk}", slot.work.letter(), slot.micro_batch, slot.micro_batch)
}

/// A result that another rank waits for: rank and time where it is made and where it is used.
struct Message {
    from: (usize, f64),
    to: (usize, f64),
}

fn messages(pipeline: &Pipeline, timeline: &Timeline) -> Vec<Message> {
    let places = pipeline.places();
    let mut starts = std::collections::BTreeMap::new();
    for (rank, slots) in timeline.slots.iter().enumerate() {
        for (slot, start, _) in slots {
            let stage = pipeline.virtual_stages[rank][slot.chunk];
            starts.insert((stage, slot.work.letter(), slot.micro_batch), *start);
        }
    }
    let mut messages = Vec::new();
    for (rank, slots) in timeline.slots.iter().enumerate() {
        for (slot, _, end) in slots {
            let stage = pipeline.virtual_stages[rank][slot.chunk];
            let next = match slot.work {
                Work::Forward => Some(stage + 1),
                Work::Backward | Work::InputGrad => stage.checked_sub(1),
                Work::WeightGrad => None,
            };
            let reader = next.and_then(|next| Some((places.get(next)?.0, next)));
            if let Some((to, next)) = reader.filter(|(to, _)| *to != rank)
                && let Some(start) = starts.get(&(next, slot.work.letter(), slot.micro_batch))
            {
                messages.push(Message { from: (rank, *end), to: (to, *start) });
            }
        }
    }
    messages
}

fn time_axis(svg: &mut String, end: f64, bottom: f64, seconds: bool, x: &dyn Fn(f64) -> f64) {
    let step = tick_step(end);
    for n in 0..=(end / step) as usize {
        let at = x(n as f64 * step);
        line(svg, "axis", at, bottom + 3.0, at, bottom + 9.0);
        let label = match (n, seconds) {
            (0, _) => "0".to_owned(),
            (_, true) => units::seconds(n as f64 * step),
            (_, false) => units::flops(n as f64 * step),
        };
        text(svg, "quiet", at, bottom + 25.0, "middle", &label);
    }
    text(
        svg,
        "quiet",
        (LEFT + RIGHT) / 2.0,
        bottom + 48.0,
        "middle",
        if seconds { "time" } else { "time, as FLOPs of one rank" },
    );
}

fn legend(svg: &mut String, timeline: &Timeline, chunks: usize) {
    let mut x = LEFT;
    let mut entry = |fills: Vec<String>, label: &str| {
        for fill in fills {
            let _ = writeln!(svg, "<rect x=\"{x:.1}\" y=\"66\" width=\"13\" height=\"13\" {fill}/>");
            x += 14.0;
        }
        text(svg, "", x + 4.0, 77.0, "start", label);
        x += 26.0 + 6.4 * label.chars().count() as f64;
    };
    for work in [Work::Forward, Work::Backward, Work::InputGrad, Work::WeightGrad] {
        if timeline.slots.iter().flatten().any(|(slot, ..)| slot.work == work) {
            let fills = (0..chunks).map(|chunk| format!("fill=\"{}\"", colour(work, chunk, chunks)));
            entry(fills.collect(), look(work).0);
        }
    }
    entry(vec!["class=\"idle\"".to_owned()], "idle (bubble)");
    if chunks > 1 {
        entry(Vec::new(), "dark to light: chunks in order");
    }
}
