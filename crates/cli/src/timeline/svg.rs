//! The picture of a timeline: bytes in use, stacked by class, over the segments that run. One file, no scripts, no fonts of its
//! own; its colours follow the viewer's light or dark scheme.

use crate::drawing::{CLASS_COLOURS, byte_scale, line, page, text, tick_step};
use crate::explain::exact;
use lockstep_ir::program::Class;
use lockstep_ir::units;
use lockstep_plan::{Clock, Mark, MemoryTimeline, StepPhase};
use std::fmt::Write;

/// The picture, and in it the plot.
const WIDTH: f64 = 1120.0;
const HEIGHT: f64 = 676.0;
const LEFT: f64 = 92.0;
const RIGHT: f64 = 1096.0;
const TOP: f64 = 108.0;
const BOTTOM: f64 = 500.0;

/// Columns: of the instructions in one, that with most bytes is drawn.
const COLUMNS: usize = 1004;

const STYLE: [&str; 2] = [
    ".arena { stroke: #222; stroke-dasharray: 6 4 } .band0 { fill: #e8e8ee } .band1 { fill: #d2d2dc } \
     .phase0 { fill: #2e5e96 } .phase1 { fill: #963e5c } .phase2 { fill: #d98a1f } .phase3 { fill: #3a742a }",
    ".arena { stroke: #eee } .band0 { fill: #2a2d36 } .band1 { fill: #3b3f4b }",
];

/// A column of the picture: where it starts and what is in use.
struct Column {
    x: f64,
    bytes: [u64; Class::ALL.len()],
}

/// The picture of a timeline, as SVG.
pub fn draw(title: &str, timeline: &MemoryTimeline) -> String {
    let end = timeline.marks.last().map_or(1.0, |m| m.end).max(f64::MIN_POSITIVE);
    let x = |time: f64| LEFT + (RIGHT - LEFT) * time / end;
    let (step, top) = byte_scale(timeline.arena_bytes);
    let y = |bytes: u64| BOTTOM - (BOTTOM - TOP) * bytes as f64 / top;
    let mut svg = page((WIDTH, HEIGHT), LEFT, STYLE, title, &summary(timeline));
    for n in 0.. {
        let bytes = n as f64 * step;
        if bytes > top {
            break;
        }
        let at = y(bytes as u64);
        line(&mut svg, "grid", LEFT, at, RIGHT, at);
        text(&mut svg, "quiet", LEFT - 8.0, at + 4.0, "end", &units::bytes(bytes as u64));
    }
    areas(&mut svg, &columns(timeline, x), &y);
    bands(&mut svg, &timeline.marks, &x);
    phases(&mut svg, timeline, &x);
    let arena = y(timeline.arena_bytes);
    line(&mut svg, "arena", LEFT, arena, RIGHT, arena);
    text(&mut svg, "", RIGHT, arena - 6.0, "end", &format!("arena {}", units::bytes(timeline.arena_bytes)));
    if let Some(peak) = timeline.peak() {
        let (at, up) = (x((peak.start + peak.end) / 2.0), y(peak.total()));
        let _ = writeln!(
            svg,
            "<circle cx=\"{at:.1}\" cy=\"{up:.1}\" r=\"4\" fill=\"none\" class=\"axis\" stroke-width=\"2\"/>"
        );
    }
    line(&mut svg, "axis", LEFT, BOTTOM, RIGHT, BOTTOM);
    line(&mut svg, "axis", LEFT, TOP, LEFT, BOTTOM);
    time_axis(&mut svg, &timeline.clock, end, &x);
    legend(&mut svg, timeline);
    svg.push_str("</svg>\n");
    svg
}

/// What the picture shows, in a line.
fn summary(timeline: &MemoryTimeline) -> String {
    let mut parts = vec![match &timeline.clock {
        Clock::Instructions => "from the plan, by instruction".to_owned(),
        Clock::PeakRates(gpu) => format!("from the plan, at the peak rates of {gpu}; collectives are not timed"),
        Clock::Measured => "measured".to_owned(),
    }];
    if let Some(peak) = timeline.peak() {
        let layer = peak.layer.map_or(String::new(), |l| format!(" of layer {l}"));
        let (bytes, op, segment) = (units::bytes(peak.total()), peak.op, peak.segment);
        parts.push(format!("peak {bytes} (circle) at {op}{layer} in {segment}, micro-batch {}", peak.micro_batch));
    }
    parts.extend(timeline.touched_bytes.map(|bytes| format!("the run wrote to {} of the arena", units::bytes(bytes))));
    if timeline.left_out > 0 {
        let which =
            if timeline.left_out == 1 { "micro-batch that repeats is" } else { "micro-batches that repeat are" };
        parts.push(format!("{} {which} left out", timeline.left_out));
    }
    parts.join("; ")
}

fn columns(timeline: &MemoryTimeline, x: impl Fn(f64) -> f64) -> Vec<Column> {
    let mut columns: Vec<Column> = Vec::new();
    let width = (RIGHT - LEFT) / COLUMNS as f64;
    for mark in &timeline.marks {
        let at = x(mark.start);
        let total = |bytes: &[u64]| bytes.iter().sum::<u64>();
        match columns.last_mut().filter(|c| at - c.x < width) {
            Some(column) if total(&mark.bytes) > total(&column.bytes) => column.bytes = mark.bytes,
            Some(_) => {}
            None => columns.push(Column { x: at, bytes: mark.bytes }),
        }
    }
    columns
}

/// One area per class, each upon those before it.
fn areas(svg: &mut String, columns: &[Column], y: &dyn Fn(u64) -> f64) {
    for (class, colour) in CLASS_COLOURS.iter().enumerate() {
        if columns.iter().all(|c| c.bytes[class] == 0) {
            continue;
        }
        let edge = |c: &Column, classes: usize| y(c.bytes[..classes].iter().sum());
        let ends = columns.iter().skip(1).map(|c| c.x).chain([RIGHT]);
        let steps: Vec<(&Column, f64)> = columns.iter().zip(ends).collect();
        let mut path = String::new();
        for (i, (c, end)) in steps.iter().enumerate() {
            let command = if i == 0 { 'M' } else { 'L' };
            let _ = write!(path, "{command}{:.1} {:.2}H{end:.1}", c.x, edge(c, class + 1));
        }
        for (c, end) in steps.iter().rev() {
            let _ = write!(path, "L{end:.1} {:.2}H{:.1}", edge(c, class), c.x);
        }
        let name = Class::ALL[class].name();
        let _ = writeln!(svg, "<path fill=\"{colour}\" d=\"{path}Z\"><title>{name}</title></path>");
    }
}

/// Which segment runs when, below the plot.
fn bands(svg: &mut String, marks: &[Mark], x: &dyn Fn(f64) -> f64) {
    let mut at = 0;
    let mut number = 0;
    while at < marks.len() {
        let same = |m: &&Mark| {
            (m.step, m.segment, m.micro_batch) == (marks[at].step, marks[at].segment, marks[at].micro_batch)
        };
        let length = marks[at..].iter().take_while(same).count();
        let (from, to) = (x(marks[at].start), x(marks[at + length - 1].end));
        let label = match marks[at].segment {
            name @ ("prepare" | "update") => format!("{name}, step {}", marks[at].step + 1),
            name => format!("{} {}", name.replace('_', " "), marks[at].micro_batch),
        };
        let _ = writeln!(
            svg,
            "<rect class=\"band{}\" x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"22\"><title>{label}</title></rect>",
            number % 2,
            BOTTOM + 2.0,
            to - from
        );
        // As much of the name as there is room for.
        let short = match marks[at].segment {
            "prepare" => "Q".to_owned(),
            "update" => "U".to_owned(),
            name => format!("{}{}", name.chars().next().unwrap_or(' ').to_ascii_uppercase(), marks[at].micro_batch),
        };
        let room = (to - from) / 7.5;
        if let Some(shown) = [&label, &short].into_iter().find(|l| l.chars().count() as f64 <= room) {
            text(svg, "", (from + to) / 2.0, BOTTOM + 18.0, "middle", shown);
        }
        (at, number) = (at + length, number + 1);
    }
}

/// The four phases of a step below the segments, and when those of the first step begin and end.
fn phases(svg: &mut String, timeline: &MemoryTimeline, x: &dyn Fn(f64) -> f64) {
    let width = (RIGHT - LEFT) / COLUMNS as f64;
    // Where it starts, how far it goes, and of which phase it is. In a column, a reduction is seen beside what else is there.
    let mut runs: Vec<(f64, f64, StepPhase)> = Vec::new();
    for mark in &timeline.marks {
        let (from, to) = (x(mark.start), x(mark.end));
        let to = if mark.phase == StepPhase::GradientReduction { to.max(from + width) } else { to };
        match runs.last_mut() {
            Some((_, end, phase)) if *phase == mark.phase => *end = end.max(to),
            Some((start, end, _)) => {
                let from = from.max(*end).max(*start + width);
                if to > from {
                    runs.push((from, to, mark.phase));
                }
            }
            None => runs.push((from, to, mark.phase)),
        }
    }
    let top = BOTTOM + 26.0;
    for (from, to, phase) in runs {
        let (wide, class, name) = (to - from, phase as usize, phase.name());
        let _ = writeln!(
            svg,
            "<rect class=\"phase{class}\" x=\"{from:.1}\" y=\"{top:.1}\" width=\"{wide:.1}\" height=\"16\"><title>{name}</title></rect>"
        );
    }
    for (i, time) in timeline.phases().into_iter().enumerate() {
        let [begins, ends, takes] = [time.begins, time.ends, time.takes].map(|time| shown(&timeline.clock, time));
        let label = format!("{}: {begins} to {ends}, takes {takes}", time.phase.name());
        let (at, y) = (LEFT + 500.0 * (i % 2) as f64, HEIGHT - 38.0 + 22.0 * (i / 2) as f64);
        let class = time.phase as usize;
        let _ = writeln!(
            svg,
            "<rect class=\"phase{class}\" x=\"{at:.1}\" y=\"{:.1}\" width=\"13\" height=\"13\"/>",
            y - 11.0
        );
        text(svg, "", at + 18.0, y, "start", &label);
    }
    let unit = if timeline.clock == Clock::Instructions { "instructions" } else { "time" };
    text(svg, "quiet", LEFT, HEIGHT - 62.0, "start", &format!("phases of the first step, in {unit}:"));
}

/// A time of a clock.
fn shown(clock: &Clock, time: f64) -> String {
    match clock {
        Clock::Instructions => units::thousands(time as u64),
        Clock::PeakRates(_) | Clock::Measured => exact(time),
    }
}

fn time_axis(svg: &mut String, clock: &Clock, end: f64, x: &dyn Fn(f64) -> f64) {
    let step = tick_step(end);
    let step = if *clock == Clock::Instructions { step.max(1.0) } else { step };
    let (unit, factor) = match (clock, end) {
        (Clock::Instructions, _) => ("instructions", 1.0),
        (_, end) if end < 1e-2 => ("µs", 1e6),
        (_, end) if end < 10.0 => ("ms", 1e3),
        _ => ("s", 1.0),
    };
    for n in 0..=(end / step) as usize {
        let time = n as f64 * step;
        line(svg, "axis", x(time), BOTTOM + 44.0, x(time), BOTTOM + 49.0);
        let shown = (time * factor * 1e6).round() / 1e6;
        text(svg, "quiet", x(time), BOTTOM + 64.0, "middle", &shown.to_string());
    }
    text(svg, "quiet", (LEFT + RIGHT) / 2.0, BOTTOM + 86.0, "middle", &format!("time, {unit}"));
}

fn legend(svg: &mut String, timeline: &MemoryTimeline) {
    let mut x = LEFT;
    for (class, colour) in CLASS_COLOURS.iter().enumerate() {
        let most = timeline.marks.iter().map(|m| m.bytes[class]).max().unwrap_or(0);
        if most == 0 {
            continue;
        }
        let label = format!("{} {}", Class::ALL[class].name(), units::bytes(most));
        let _ = writeln!(svg, "<rect x=\"{x:.1}\" y=\"70\" width=\"13\" height=\"13\" fill=\"{colour}\"/>");
        text(svg, "", x + 18.0, 81.0, "start", &label);
        x += 44.0 + 6.6 * label.chars().count() as f64;
    }
    text(svg, "quiet", RIGHT, BOTTOM + 86.0, "end", "beside each colour: the most at any time");
}
