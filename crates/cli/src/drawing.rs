//! What pictures share: lines, text, and where the ticks of an axis stand.

use std::fmt::Write;

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
