//! Pictures of predictions: predicted against measured, on logarithmic axes. One file each, no scripts, no fonts of its own; colours
//! follow the viewer's light or dark scheme.

use crate::drawing::{escaped, line, page, text};
use lockstep_ir::units::counted;
use lockstep_plan::published::{Errors, Report, RowReport};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const SIZE: (f64, f64) = (640.0, 640.0);
const LEFT: f64 = 78.0;
const RIGHT: f64 = 620.0;
const TOP: f64 = 88.0;
const BOTTOM: f64 = 582.0;

const COLOURS: [&str; 6] = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"];

const STYLE: [&str; 2] = [
    ".grid { stroke: #e2e2e2 } .equal { stroke: #222; stroke-width: 1.3 } .near { stroke: #999; stroke-dasharray: 5 4 } \
     .point { fill-opacity: 0.55 } .flagged { fill: none; stroke: #999; stroke-opacity: 0.6 }",
    ".grid { stroke: #2c2f37 } .equal { stroke: #eee } .near { stroke: #777 }",
];

/// Something that was measured and predicted.
struct Quantity {
    suffix: &'static str,
    name: &'static str,
    unit: &'static str,
    of: fn(&RowReport) -> Option<(f64, f64)>,
}

const GIB: f64 = (1u64 << 30) as f64;

const QUANTITIES: [Quantity; 2] = [
    Quantity { suffix: "", name: "step time", unit: "s", of: |row| Some((row.measured_s?, row.predicted_s?)) },
    Quantity {
        suffix: "-memory",
        name: "memory",
        unit: "GiB",
        of: |row| {
            let predicted = Some(row.predicted_memory_bytes).filter(|bytes| *bytes > 0.0)?;
            Some((row.measured_memory_bytes? / GIB, predicted / GIB))
        },
    },
];

/// Writes a picture per file of rows and quantity; returns their paths.
pub(super) fn write(folder: &Path, report: &Report) -> std::io::Result<Vec<PathBuf>> {
    std::fs::create_dir_all(folder)?;
    let mut files: BTreeMap<&str, Vec<&RowReport>> = BTreeMap::new();
    report.rows.iter().for_each(|row| files.entry(&row.file).or_default().push(row));
    let mut written = Vec::new();
    for (file, rows) in files {
        for quantity in &QUANTITIES {
            if let Some(svg) = draw(file, &rows, quantity) {
                let path = folder.join(format!("{file}{}.svg", quantity.suffix));
                std::fs::write(&path, svg)?;
                written.push(path);
            }
        }
    }
    Ok(written)
}

/// A logarithmic axis.
struct Scale {
    low: f64,
    high: f64,
}

impl Scale {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), x| (low.min(x), high.max(x)));
        Self { low: low / 1.25, high: high * 1.25 }
    }

    fn share(&self, x: f64) -> f64 {
        (x / self.low).ln() / (self.high / self.low).ln()
    }

    /// 1, 2 and 5 times powers of ten; powers alone where there are many.
    fn ticks(&self) -> Vec<f64> {
        let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let steps: &[f64] = if self.high / self.low > 3000.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let all = powers.flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)));
        all.filter(|x| (self.low..=self.high).contains(x)).collect()
    }
}

fn draw(file: &str, rows: &[&RowReport], quantity: &Quantity) -> Option<String> {
    let points: Vec<(&RowReport, f64, f64)> = rows
        .iter()
        .filter_map(|row| (quantity.of)(row).map(|(measured, predicted)| (*row, measured, predicted)))
        .collect();
    let clean: Vec<f64> = points
        .iter()
        .filter(|(row, ..)| row.clean)
        .map(|(_, measured, predicted)| (predicted / measured - 1.0).abs())
        .collect();
    let errors = Errors::of(&clean)?;
    let scale = Scale::of(points.iter().flat_map(|(_, measured, predicted)| [*measured, *predicted]));
    let x = |value: f64| LEFT + (RIGHT - LEFT) * scale.share(value);
    let y = |value: f64| BOTTOM - (BOTTOM - TOP) * scale.share(value);
    let title = format!("{file}: {}, predicted against measured", quantity.name);
    let flagged = points.len() - clean.len();
    let [median, mean, p90] = [errors.median, errors.mean, errors.p90].map(|error| format!("{:.1}%", 100.0 * error));
    let flagged = if flagged > 0 { format!("; {flagged} flagged (circles)") } else { String::new() };
    let rows = errors.rows;
    let about = format!("{rows} clean rows: error {median} median, {mean} mean, {p90} 90th percentile{flagged}");
    let mut svg = page(SIZE, 20.0, STYLE, &title, &about);
    for tick in scale.ticks() {
        line(&mut svg, "grid", x(tick), TOP, x(tick), BOTTOM);
        line(&mut svg, "grid", LEFT, y(tick), RIGHT, y(tick));
        text(&mut svg, "quiet", x(tick), BOTTOM + 18.0, "middle", &format!("{tick}"));
        text(&mut svg, "quiet", LEFT - 8.0, y(tick) + 4.0, "end", &format!("{tick}"));
    }
    // Equal, and a tenth more or less.
    for (class, factor) in [("near", 1.1), ("near", 1.0 / 1.1), ("equal", 1.0)] {
        let (from, to) = (scale.low * f64::max(1.0, 1.0 / factor), scale.high * f64::min(1.0, 1.0 / factor));
        line(&mut svg, class, x(from), y(from * factor), x(to), y(to * factor));
    }
    let mut groups: Vec<&str> = points.iter().map(|(row, ..)| row.framework.as_str()).collect();
    groups.sort_unstable();
    groups.dedup();
    // Flagged rows lie below.
    for wanted in [false, true] {
        for (row, measured, predicted) in points.iter().filter(|(row, ..)| row.clean == wanted) {
            let group = groups.iter().position(|name| *name == row.framework).unwrap_or(0);
            let look = match row.clean {
                true => format!("class=\"point\" fill=\"{}\"", COLOURS[group % COLOURS.len()]),
                false => "class=\"flagged\"".to_owned(),
            };
            let (run, unit) = (format!("{} {} {}", row.model, counted(row.gpus, "GPU"), row.layout), quantity.unit);
            let said = escaped(&format!("{run}: measured {measured:.3} {unit}, predicted {predicted:.3} {unit}"));
            let place = format!("cx=\"{:.1}\" cy=\"{:.1}\"", x(*measured), y(*predicted));
            let _ = writeln!(svg, "<circle {look} {place} r=\"3.4\"><title>{said}</title></circle>");
        }
    }
    for (i, group) in groups.iter().enumerate() {
        let at = TOP + 16.0 + 18.0 * i as f64;
        let (colour, x, y) = (COLOURS[i % COLOURS.len()], LEFT + 14.0, at - 4.0);
        let _ = writeln!(svg, "<circle fill=\"{colour}\" cx=\"{x}\" cy=\"{y}\" r=\"5\"/>");
        text(&mut svg, "", LEFT + 26.0, at, "start", group);
    }
    line(&mut svg, "axis", LEFT, BOTTOM, RIGHT, BOTTOM);
    line(&mut svg, "axis", LEFT, TOP, LEFT, BOTTOM);
    let (what, middle) = (format!("{}, {}", quantity.name, quantity.unit), (TOP + BOTTOM) / 2.0);
    text(&mut svg, "", (LEFT + RIGHT) / 2.0, BOTTOM + 42.0, "middle", &format!("measured {what}"));
    let place = format!("text-anchor=\"middle\" transform=\"translate(24 {middle:.1}) rotate(-90)\"");
    let _ = writeln!(svg, "<text {place}>predicted {what}</text>\n</svg>");
    Some(svg)
}
