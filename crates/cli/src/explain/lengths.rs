//! `--sequence-lengths`: how memory grows with the length of sequences, as a table and as a picture. The picture is one file, without
//! scripts and fonts of its own; its colours follow the viewer's light or dark scheme.

use crate::drawing::{CLASS_COLOURS, byte_scale, line, page, text};
use crate::failure::{Failure, Result};
use crate::table::{table, wrapped};
use crate::timeline::{require_extension, write_file};
use lockstep_config::{Config, legal};
use lockstep_host::Devices;
use lockstep_ir::program::Class;
use lockstep_ir::units::{self, counted, thousands};
use lockstep_plan::{LengthCost, Room, Verdict, length_costs};
use std::fmt::Write;
use std::path::Path;

/// The picture, and in it the plot.
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 92.0;
const RIGHT: f64 = 876.0;
const TOP: f64 = 108.0;
const BOTTOM: f64 = 440.0;

const STYLE: [&str; 2] = [".limit { stroke: #b00; stroke-dasharray: 6 4 }", ".limit { stroke: #f66 }"];

/// The memory at lengths that the layout can split, from the shortest.
pub(super) fn costs(
    devices: &Devices,
    config: &Config,
    lengths: &[usize],
    room: Option<&Room>,
) -> Result<Vec<LengthCost>> {
    let mut lengths = lengths.to_vec();
    lengths.sort_unstable();
    lengths.dedup();
    for &seq in &lengths {
        let mut config = config.clone();
        config.train.seq = seq;
        if let Some(refusal) = legal::check(&config.layout(), &config.extents()).first() {
            return Err(Failure::refused(refusal).about(format!("--sequence-lengths {seq}")));
        }
    }
    Ok(length_costs(devices, config, &lengths, room)?)
}

pub(super) fn as_text(sequences: usize, rows: &[LengthCost]) -> String {
    let judged = rows.iter().any(|r| r.verdict.is_some());
    let row = |r: &LengthCost| {
        let bytes = |class: &Class| units::bytes(r.memory.classes[class.name()]);
        let mut cells = vec![thousands(r.seq as u64)];
        cells.extend(SHOWN.iter().map(bytes));
        cells.push(units::bytes(r.memory.total_bytes));
        if judged {
            cells.push(r.verdict.as_ref().map_or("-", |v| if v.fits { "yes" } else { "NO" }).to_owned());
        }
        cells
    };
    let mut header = vec!["tokens"];
    header.extend(SHOWN.map(|class| if class == Class::Communication { "~communication" } else { class.name() }));
    header.push("total");
    if judged {
        header.push("fits");
    }
    let title = format!(
        "memory against sequence length: micro-batches of {}; bytes of the rank that needs most",
        counted(sequences, "sequence")
    );
    let mut text = wrapped(&title, "  ") + &table(&header, &rows.iter().map(row).collect::<Vec<_>>());
    if let Some(verdict) = rows.iter().find_map(|r| r.verdict.as_ref()) {
        text.push_str(&format!("\n{}", wrapped(&of_a_rank(verdict).1, "  ")));
    }
    text
}

/// What a rank has of the memory that a plan is held against, and a line that says so.
fn of_a_rank(verdict: &Verdict) -> (u64, String) {
    let Verdict { memory_bytes, place, ranks, shared, .. } = verdict;
    let all = format!("memory: {} {place}", units::bytes(*memory_bytes));
    match (ranks, shared) {
        (1, _) => (*memory_bytes, all),
        (_, false) => (*memory_bytes, format!("{all}, for each rank")),
        (ranks, true) => {
            let each = memory_bytes / *ranks as u64;
            (each, format!("{all}, for all {ranks} ranks together: {} for each", units::bytes(each)))
        }
    }
}

/// The classes, of which the last is left out where there is no room for it.
const SHOWN: [Class; Class::ALL.len()] = Class::ALL;

/// Draws the memory into a file.
pub(super) fn write(path: &Path, config: &Config, rows: &[LengthCost]) -> Result<()> {
    let path = require_extension("--plot", path, "lengths.svg")?;
    write_file(path, draw(config, rows), "memory against sequence length", "check the folder of --plot")
}

/// A bar for each length, its classes upon each other.
fn draw(config: &Config, rows: &[LengthCost]) -> String {
    let title =
        format!("memory against sequence length, micro-batches of {}", counted(config.train.micro_batch, "sequence"));
    let summary = format!(
        "{}, {}; recompute.policy = {}; bytes of the rank that needs most",
        config.model.architecture, config.precision.policy, config.recompute.policy
    );
    let most = rows.iter().map(|r| r.memory.total_bytes).max().unwrap_or(1);
    let limit = rows.iter().find_map(|r| r.verdict.as_ref()).map(of_a_rank);
    // A limit far above all bars would flatten them.
    let drawn = limit.as_ref().map(|(bytes, _)| *bytes).filter(|bytes| *bytes <= 2 * most);
    let (step, top) = byte_scale(drawn.map_or(most, |bytes| bytes.max(most)));
    let y = |bytes: u64| BOTTOM - (BOTTOM - TOP) * bytes as f64 / top;
    let mut svg = page((WIDTH, HEIGHT), LEFT, STYLE, &title, &summary);
    for n in 0..=(top / step) as usize {
        let at = y((n as f64 * step) as u64);
        line(&mut svg, "grid", LEFT, at, RIGHT, at);
        text(&mut svg, "quiet", LEFT - 8.0, at + 4.0, "end", &units::bytes((n as f64 * step) as u64));
    }
    let each = (RIGHT - LEFT) / rows.len().max(1) as f64;
    let wide = (0.62 * each).min(110.0);
    for (i, row) in rows.iter().enumerate() {
        let middle = LEFT + (i as f64 + 0.5) * each;
        let mut below = 0;
        for (class, colour) in Class::ALL.iter().zip(CLASS_COLOURS) {
            let bytes = row.memory.classes[class.name()];
            let (from, to) = (y(below + bytes), y(below));
            let (x, tall) = (middle - wide / 2.0, to - from);
            let name = format!("{}, {} tokens: {}", class.name(), thousands(row.seq as u64), units::bytes(bytes));
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{from:.2}\" width=\"{wide:.1}\" height=\"{tall:.2}\" fill=\"{colour}\"><title>{name}</title></rect>"
            );
            below += bytes;
        }
        text(&mut svg, "", middle, y(below) - 6.0, "middle", &units::bytes(below));
        text(&mut svg, "", middle, BOTTOM + 20.0, "middle", &thousands(row.seq as u64));
    }
    line(&mut svg, "axis", LEFT, BOTTOM, RIGHT, BOTTOM);
    line(&mut svg, "axis", LEFT, TOP, LEFT, BOTTOM);
    text(&mut svg, "quiet", (LEFT + RIGHT) / 2.0, BOTTOM + 46.0, "middle", "sequence length, tokens");
    if let Some((bytes, label)) = limit {
        match drawn {
            Some(_) => {
                let at = y(bytes);
                line(&mut svg, "limit", LEFT, at, RIGHT, at);
                text(&mut svg, "", LEFT + 8.0, at - 6.0, "start", &label);
            }
            None => text(&mut svg, "quiet", RIGHT, BOTTOM + 68.0, "end", &label),
        }
    }
    let mut x = LEFT;
    for (class, colour) in Class::ALL.iter().zip(CLASS_COLOURS) {
        if rows.iter().all(|r| r.memory.classes[class.name()] == 0) {
            continue;
        }
        let _ = writeln!(svg, "<rect x=\"{x:.1}\" y=\"70\" width=\"13\" height=\"13\" fill=\"{colour}\"/>");
        text(&mut svg, "", x + 18.0, 81.0, "start", class.name());
        x += 44.0 + 6.6 * class.name().len() as f64;
    }
    svg.push_str("</svg>\n");
    svg
}
