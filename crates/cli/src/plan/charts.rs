//! Charts of lines in a page of its own: no scripts, no fonts, colours by the viewer's light or dark scheme.

use crate::drawing::{escaped, line, text, tick_step};
use std::fmt::Write;

const SIZE: (f64, f64) = (520.0, 360.0);
const LEFT: f64 = 84.0;
const RIGHT: f64 = 500.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 306.0;

const COLOURS: [&str; 4] = ["#4477aa", "#ee6677", "#228833", "#aa3377"];

const STYLE: &str = "\
body { font: 15px system-ui, sans-serif; margin: 24px; color: #222; background: #fff } main { display: flex; flex-wrap: wrap; gap: 18px } \
text { font: 12px system-ui, sans-serif; fill: #222 } .title { font-size: 15px; font-weight: 600 } .quiet { fill: #555 } \
.grid { stroke: #e2e2e2 } .axis { stroke: #555 } .limit { stroke: #b00; stroke-dasharray: 6 4 } .series { fill: none; stroke-width: 2 } \
.dashed { stroke-dasharray: 5 4; stroke: #999; fill: none } \
@media (prefers-color-scheme: dark) { body { color: #eee; background: #16181d } text { fill: #eee } .quiet { fill: #aaa } \
.grid { stroke: #2c2f37 } .axis { stroke: #aaa } .limit { stroke: #f66 } }";

/// Points that a line joins.
pub(super) struct Series {
    name: String,
    pub(super) points: Vec<(f64, f64)>,
    dashed: bool,
}

impl Series {
    pub(super) fn new(name: &str, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.to_owned(), points, dashed: false }
    }

    /// As what would be, not what is.
    pub(super) fn dashed(self) -> Self {
        Self { dashed: true, ..self }
    }
}

/// One chart; its horizontal axis is logarithmic.
pub(super) struct Chart {
    title: String,
    x: String,
    y: String,
    series: Vec<Series>,
    linear: bool,
    limit: Option<f64>,
}

impl Chart {
    pub(super) fn new(title: &str, x: &str, y: &str, series: Vec<Series>) -> Self {
        let series = series.into_iter().filter(|s| !s.points.is_empty()).collect();
        Self { title: title.to_owned(), x: x.to_owned(), y: y.to_owned(), series, linear: false, limit: None }
    }

    /// With a vertical axis that is linear, from 0.
    pub(super) fn linear(self) -> Self {
        Self { linear: true, ..self }
    }

    /// With a line that must not be passed.
    pub(super) fn limit(self, at: f64) -> Self {
        Self { limit: Some(at), ..self }
    }

    fn svg(&self) -> String {
        let (width, height) = SIZE;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             role=\"img\" aria-label=\"{}\">\n",
            escaped(&self.title)
        );
        text(&mut svg, "title", LEFT, 20.0, "start", &self.title);
        text(&mut svg, "quiet", (LEFT + RIGHT) / 2.0, SIZE.1 - 14.0, "middle", &self.x);
        text(&mut svg, "quiet", 4.0, TOP - 10.0, "start", &self.y);
        let all = || self.series.iter().flat_map(|s| s.points.iter().copied());
        let Some(x) = Axis::log(all().map(|p| p.0)) else {
            text(&mut svg, "quiet", (LEFT + RIGHT) / 2.0, 180.0, "middle", "nothing fits");
            return svg + "</svg>\n";
        };
        let heights = all().map(|p| p.1).chain(self.limit);
        let Some(y) = (if self.linear { Axis::linear(heights) } else { Axis::log(heights) }) else {
            return svg + "</svg>\n";
        };
        let across = |v: f64| LEFT + (RIGHT - LEFT) * x.share(v);
        let up = |v: f64| BOTTOM - (BOTTOM - TOP) * y.share(v);
        for tick in y.ticks() {
            line(&mut svg, "grid", LEFT, up(tick), RIGHT, up(tick));
            text(&mut svg, "", LEFT - 8.0, up(tick) + 4.0, "end", &short(tick));
        }
        // Those that were asked for, as far as there is room.
        let mut asked: Vec<f64> = all().map(|p| p.0).collect();
        asked.sort_by(f64::total_cmp);
        asked.dedup();
        let mut last = f64::NEG_INFINITY;
        for tick in asked {
            if across(tick) - last >= 46.0 {
                line(&mut svg, "axis", across(tick), BOTTOM, across(tick), BOTTOM + 5.0);
                text(&mut svg, "", across(tick), BOTTOM + 20.0, "middle", &short(tick));
                last = across(tick);
            }
        }
        line(&mut svg, "axis", LEFT, BOTTOM, RIGHT, BOTTOM);
        line(&mut svg, "axis", LEFT, TOP, LEFT, BOTTOM);
        if let Some(limit) = self.limit {
            line(&mut svg, "limit", LEFT, up(limit), RIGHT, up(limit));
            text(&mut svg, "quiet", LEFT + 6.0, up(limit) - 5.0, "start", "memory of a GPU");
        }
        for (i, series) in self.series.iter().enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            let points: Vec<String> =
                series.points.iter().map(|p| format!("{:.1},{:.1}", across(p.0), up(p.1))).collect();
            let look = if series.dashed {
                "class=\"dashed\"".to_owned()
            } else {
                format!("class=\"series\" stroke=\"{colour}\"")
            };
            let _ = writeln!(svg, "<polyline {look} points=\"{}\"/>", points.join(" "));
            if !series.dashed {
                for p in &series.points {
                    let value =
                        escaped(&format!("{}: {} {}, {} {}", series.name, short(p.0), self.x, short(p.1), self.y));
                    let (x, y) = (across(p.0), up(p.1));
                    let _ = writeln!(
                        svg,
                        "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"><title>{value}</title></circle>"
                    );
                }
            }
            let at = LEFT + 12.0 + 110.0 * i as f64;
            let key = if series.dashed { "#999" } else { colour };
            let _ = writeln!(svg, "<rect x=\"{at:.1}\" y=\"30\" width=\"12\" height=\"4\" fill=\"{key}\"/>");
            text(&mut svg, "", at + 18.0, 36.0, "start", &series.name);
        }
        svg + "</svg>\n"
    }
}

struct Axis {
    low: f64,
    high: f64,
    log: bool,
}

impl Axis {
    fn log(values: impl Iterator<Item = f64>) -> Option<Self> {
        let (low, high) =
            values.filter(|v| *v > 0.0).fold((f64::INFINITY, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
        (high > 0.0).then(|| Self { low: low / 1.15, high: high * 1.15, log: true })
    }

    fn linear(values: impl Iterator<Item = f64>) -> Option<Self> {
        let high = values.fold(0.0f64, f64::max);
        (high > 0.0).then_some(Self { low: 0.0, high: 1.08 * high, log: false })
    }

    fn share(&self, v: f64) -> f64 {
        match self.log {
            true => (v / self.low).ln() / (self.high / self.low).ln(),
            false => (v - self.low) / (self.high - self.low),
        }
    }

    fn ticks(&self) -> Vec<f64> {
        if !self.log {
            let step = tick_step(self.high);
            return (0..).map(|i| f64::from(i) * step).take_while(|v| *v <= self.high).collect();
        }
        let decades = (self.low.log10().floor() as i32)..=(self.high.log10().ceil() as i32);
        let wide = self.high / self.low > 300.0;
        let parts: &[f64] = if wide { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let all = decades.flat_map(|d| parts.iter().map(move |p| p * 10f64.powi(d)));
        all.filter(|v| (self.low..=self.high).contains(v)).collect()
    }
}

/// A number in few letters: `1.2K`, `45`, `0.03`.
fn short(v: f64) -> String {
    let (v, suffix) = match v.abs() {
        a if a >= 1e12 => (v / 1e12, "T"),
        a if a >= 1e9 => (v / 1e9, "B"),
        a if a >= 1e6 => (v / 1e6, "M"),
        a if a >= 1e4 => (v / 1e3, "K"),
        _ => (v, ""),
    };
    let digits = match v.abs() {
        a if a >= 100.0 || a == 0.0 => 0,
        a if a >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{v:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{suffix}")
}

/// A page of charts.
pub(super) fn page(title: &str, charts: &[Chart]) -> String {
    let body: String = charts.iter().map(Chart::svg).collect();
    let title = escaped(title);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
         <style>{STYLE}</style>\n<h1>{title}</h1>\n<main>\n{body}</main>\n</html>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_stand_inside_and_empty_charts_say_so() {
        let chart =
            Chart::new("a < b", "GPUs", "tokens/s", vec![Series::new("strong", vec![(1.0, 10.0), (8.0, 70.0)])]);
        let svg = chart.svg();
        assert!(svg.contains("a &lt; b") && svg.contains("strong: 8 GPUs, 70 tokens/s"), "{svg}");
        for part in svg.split("cx=\"").skip(1) {
            let x: f64 = part.split('"').next().unwrap().parse().unwrap();
            assert!((LEFT..=RIGHT).contains(&x), "{x}");
        }
        assert!(Chart::new("", "", "", Vec::new()).svg().contains("nothing fits"));
        assert_eq!([0.0, 0.05, 7.0, 1234.0, 45_600.0, 2e6].map(short), ["0", "0.05", "7", "1234", "45.6K", "2M"]);
    }
}
