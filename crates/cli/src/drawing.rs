//! What pictures share: lines, text, and where the ticks of an axis stand.

use lockstep_ir::program::Class;
use std::fmt::Write;

/// One per class of memory, far enough apart for most eyes, on light and on dark.
pub const CLASS_COLOURS: [&str; Class::ALL.len()] = ["#4477aa", "#66ccee", "#228833", "#ee6677", "#ccbb44", "#aa3377"];

/// The distance of grid lines up to this many bytes, and the top of the plot.
pub fn byte_scale(most: u64) -> (f64, f64) {
    let unit = 1024f64.powf(((most.max(1)) as f64).log(1024.0).floor());
    let whole = most.max(1) as f64 / unit;
    let step = [0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0];
    let step = unit * step.into_iter().find(|s| whole / s <= 6.5).unwrap_or(250.0);
    (step, most as f64 * 1.06)
}

/// The style that all pictures have, on light and on dark.
const STYLE: [&str; 2] = [
    "text { font: 13px system-ui, sans-serif; fill: #222 } .title { font-size: 17px; font-weight: 600 } .quiet { fill: #555 } \
     .page { fill: #fff } .grid { stroke: #ddd } .axis { stroke: #555 }",
    "text { fill: #eee } .quiet { fill: #aaa } .page { fill: #16181d } .grid { stroke: #333 } .axis { stroke: #aaa }",
];

/// The head of a picture of a size: its page, title and summary, and its own style, on light and on dark.
pub fn page((width, height): (f64, f64), left: f64, style: [&str; 2], title: &str, summary: &str) -> String {
    let ([light, dark], [own, own_dark]) = (STYLE, style);
    let (title, summary) = (escaped(title), escaped(summary));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height:.0}\" role=\"img\">\n<title>{title}</title>\n\
         <style>{light} {own} @media (prefers-color-scheme: dark) {{ {dark} {own_dark} }}</style>\n\
         <rect class=\"page\" width=\"{width}\" height=\"{height:.0}\"/>\n\
         <text class=\"title\" x=\"{left}\" y=\"30\">{title}</text>\n<text class=\"quiet\" x=\"{left}\" y=\"52\">{summary}</text>\n"
    )
}

/// A line of a class.
pub fn line(svg: &mut String, class: &str, x1: f64, y1: f64, x2: f64, y2: f64) {
    let _ = writeln!(svg, "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>");
}

/// Text of a class at a place.
pub fn text(svg: &mut String, class: &str, x: f64, y: f64, anchor: &str, content: &str) {
    let content = escaped(content);
    let _ =
        writeln!(svg, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>");
}

/// Text as SVG takes it.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The distance of about eight ticks up to `end`: 1, 2 or 5 times a power of ten.
pub fn tick_step(end: f64) -> f64 {
    let rough = (end / 8.0).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|f| f * power).into_iter().find(|s| *s >= rough).unwrap_or(rough)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_stand_at_round_numbers() {
        for (end, step) in [(56e9, 1e10), (8.0, 1.0), (9.0, 2.0), (30.0, 5.0), (0.7, 0.1)] {
            assert!((tick_step(end) / step - 1.0).abs() < 1e-12, "{end}: {}", tick_step(end));
        }
    }

    #[test]
    fn text_is_escaped() {
        let mut svg = String::new();
        text(&mut svg, "", 1.0, 2.0, "end", "a < b & c");
        assert!(svg.contains("a &lt; b &amp; c"), "{svg}");
    }
}
