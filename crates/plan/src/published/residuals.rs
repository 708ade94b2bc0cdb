//! How far off predicted times are: what came of rows that were left out of the fit, and intervals from that.
//!
//! `data/residuals.toml` has ln(measured ÷ predicted) of every row, predicted by constants that were fitted without it: `lockstep validate FILES
//! --residuals data/residuals.toml` writes it again. An interval is as wide as nine of ten such rows of the framework need, at the same
//! [`Distance`] from what was measured.

use super::stats::quantile;
use lockstep_sim::{Framework, GpuSpec};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// The share of measured times that intervals are to hold.
const SHARE: f64 = 0.9;

/// Rows of the framework itself from which on those of others do not count.
const ENOUGH: usize = 12;

/// Rows of a group that calibrate in turn, at most, where intervals of calibrated times are counted out.
const TURNS: usize = 40;

/// How far a run is from those that were measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distance {
    /// Other models were measured with the framework on such GPUs.
    Model,
    /// The framework was measured on other GPUs.
    Gpu,
    /// The framework was not measured.
    Framework,
}

impl Distance {
    /// All of them, the nearest first.
    pub const ALL: [Distance; 3] = [Distance::Model, Distance::Gpu, Distance::Framework];

    /// What was left out for it.
    pub fn name(self) -> &'static str {
        match self {
            Distance::Model => "model",
            Distance::Gpu => "GPU",
            Distance::Framework => "framework",
        }
    }
}

/// Rows of one model that were left out together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeftOut {
    /// What was left out with them: all of the model on the GPU, of the framework on the family of GPUs, or of the framework.
    pub distance: Distance,
    /// The framework, and `fp8` where matmuls were in it.
    pub framework: String,
    /// The GPU.
    pub gpu: String,
    /// Its family.
    pub family: String,
    /// The model.
    pub model: String,
    /// The file that they stand in.
    pub file: String,
    /// Who published them.
    pub source: String,
    /// ln(measured ÷ predicted) of each.
    pub residuals: Vec<f64>,
    /// Of a framework that is left out: by other frameworks, ln(predicted ÷ predicted) of each with their constants beside the guessed ones.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub as_others: BTreeMap<String, Vec<f64>>,
}

/// All rows that were left out.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residuals {
    /// By what was left out.
    pub left_out: Vec<LeftOut>,
}

/// How sure a predicted time is: nine of ten measured ones lie from it ÷ (1 + share) to it × (1 + share).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// The share.
    pub share: f64,
    /// How far the run is from what was measured.
    pub distance: Distance,
    /// Measured rows that the time was calibrated by.
    pub calibrated_by: usize,
    /// Rows of the framework itself that the share rests on; where they are few, rows of others count too.
    pub rows: usize,
}

impl Interval {
    /// The least and the most of a predicted time.
    pub fn around(&self, seconds: f64) -> [f64; 2] {
        [seconds / (1.0 + self.share), seconds * (1.0 + self.share)]
    }

    /// Whether a measured time lies in the interval around the predicted one.
    pub fn holds(&self, predicted: f64, measured: f64) -> bool {
        let [least, most] = self.around(predicted);
        (least..=most).contains(&measured)
    }

    /// `± 6%`.
    pub fn as_text(&self) -> String {
        let percent = 100.0 * self.share;
        if percent < 9.95 { format!("± {percent:.1}%") } else { format!("± {percent:.0}%") }
    }
}

/// Numbers under a key, in lines.
fn list(text: &mut String, key: &str, numbers: &[f64], digits: usize) {
    let _ = write!(text, "{key} = [");
    for (i, number) in numbers.iter().enumerate() {
        text.push_str(if i % 16 == 0 { "\n    " } else { " " });
        let _ = write!(text, "{number:.digits$},");
    }
    text.push_str("\n]\n");
}

fn is_fp8(framework: &str) -> bool {
    framework.ends_with(" fp8")
}

/// The framework of a group, without the number format.
fn base(framework: &str) -> &str {
    framework.strip_suffix(" fp8").unwrap_or(framework)
}

impl Residuals {
    /// What every build knows.
    pub fn builtin() -> Self {
        toml::from_str(include_str!("../../data/residuals.toml"))
            .unwrap_or_else(|error| unreachable!("residuals.toml: {error}"))
    }

    /// As a data file.
    pub fn to_toml(&self) -> String {
        let mut text = "# ln(measured ÷ predicted) of rows that were left out of the fit, by what was left out with them.\n\
                        # Written by `lockstep validate bench/records/published/*.csv --residuals FILE`, but for framework = \"lockstep\": its steps on an H200\n\
                        # (bench/records/foresight-h200.txt), which nothing was fitted to, against the catalogue's.\n"
            .to_owned();
        for group in &self.left_out {
            let LeftOut { distance, framework, gpu, family, model, file, source, residuals, as_others } = group;
            let distance = match distance {
                Distance::Model => "model",
                Distance::Gpu => "gpu",
                Distance::Framework => "framework",
            };
            let _ = write!(text, "\n[[left_out]]\ndistance = \"{distance}\"\n");
            let fields = [("framework", framework), ("gpu", gpu), ("family", family), ("model", model)];
            for (key, value) in fields.into_iter().chain([("file", file), ("source", source)]) {
                let _ = writeln!(text, "{key} = {}", toml::Value::String(value.clone()));
            }
            list(&mut text, "residuals", residuals, 4);
            for (of, ratios) in as_others {
                list(&mut text, &format!("as_others.{of}"), ratios, 2);
            }
        }
        text
    }

    /// With what is known of this program's own steps, which are in no file of published rows.
    pub fn with_lockstep(mut self) -> Self {
        let name = Framework::lockstep().name;
        self.left_out.extend(Self::builtin().left_out.into_iter().filter(|group| base(&group.framework) == name));
        self
    }

    /// Those that a test on them keeps.
    pub fn retain(&self, keep: impl Fn(&LeftOut) -> bool) -> Self {
        Self { left_out: self.left_out.iter().filter(|group| keep(group)).cloned().collect() }
    }

    /// How far a framework (with `fp8` where matmuls are in it) on a family of GPUs is from what was measured.
    pub fn distance(&self, framework: &str, family: &str) -> Distance {
        let of = |test: &dyn Fn(&LeftOut) -> bool| {
            self.left_out.iter().any(|group| group.distance == Distance::Model && test(group))
        };
        if of(&|group| group.framework == framework && group.family == family) {
            Distance::Model
        } else if of(&|group| base(&group.framework) == base(framework)) {
            Distance::Gpu
        } else {
            Distance::Framework
        }
    }

    /// The interval of a predicted time of a framework of which nothing was measured: `as_others` has, by other frameworks, ln(predicted ÷
    /// predicted) with their constants beside the guessed ones. What a framework costs is unknown, so the interval reaches as far as the known
    /// ones lie apart in this step, and further by what nine of ten rows of frameworks that were left out needed besides. None where nothing was
    /// left out.
    pub fn of_unknown(&self, framework: &str, as_others: &BTreeMap<String, f64>) -> Option<Interval> {
        let known = self.frameworks();
        let apart = as_others.iter().filter(|(of, _)| known.contains(of.as_str())).map(|(_, ratio)| ratio.abs());
        let share = (self.beyond(framework, &known)? + apart.fold(0.0, f64::max)).max(0.0).exp() - 1.0;
        Some(Interval { share, distance: Distance::Framework, calibrated_by: 0, rows: 0 })
    }

    /// The frameworks whose rows were left out.
    fn frameworks(&self) -> BTreeSet<&str> {
        self.of_frameworks().map(|group| base(&group.framework)).collect()
    }

    fn of_frameworks(&self) -> impl Iterator<Item = &LeftOut> {
        self.left_out.iter().filter(|group| group.distance == Distance::Framework)
    }

    /// What nine of ten rows of frameworks that were left out needed besides what the constants of these frameworks differ by. Each framework
    /// counts the same, and another may be further off than all.
    fn beyond(&self, framework: &str, known: &BTreeSet<&str>) -> Option<f64> {
        let mut others: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for group in self.of_frameworks().filter(|group| is_fp8(&group.framework) == is_fp8(framework)) {
            let ratios =
                || group.as_others.iter().filter(|(of, _)| known.contains(of.as_str())).map(|(_, ratios)| ratios);
            let beyond = group.residuals.iter().enumerate().map(|(row, residual)| {
                let apart = ratios().filter_map(|ratios| ratios.get(row)).map(|ratio| ratio.abs());
                residual.abs() - apart.fold(0.0, f64::max)
            });
            others.entry(&group.framework).or_default().extend(beyond);
        }
        let each = ENOUGH as f64 / others.len() as f64;
        let weighed = others.values().flat_map(|errors| errors.iter().map(|e| (*e, each / errors.len() as f64)));
        bound(weighed.collect(), 1.0)
    }

    /// The interval of predicted times of a framework on a family of GPUs, where this many measured rows of theirs calibrate them. None
    /// where nothing was left out. [`Residuals::of_unknown`] has that of one step of a framework of which nothing was measured.
    pub fn interval(&self, framework: &str, family: &str, calibrated_by: usize) -> Option<Interval> {
        match self.distance(framework, family) {
            Distance::Framework if calibrated_by == 0 => self.of_unknown(framework, &BTreeMap::new()),
            distance => self.interval_at(distance, framework, calibrated_by),
        }
    }

    /// The same at a distance from a framework that was measured.
    pub fn interval_at(&self, distance: Distance, framework: &str, calibrated_by: usize) -> Option<Interval> {
        // A calibrated time is as far as another model on the same GPU.
        let at = if calibrated_by > 0 { Distance::Model } else { distance };
        let alike = |group: &&LeftOut| group.distance == at && is_fp8(&group.framework) == is_fp8(framework);
        // Rows of each framework on each GPU.
        let mut sets: BTreeMap<(&str, &str, &str), Vec<f64>> = BTreeMap::new();
        for group in self.left_out.iter().filter(alike) {
            let set = sets.entry((&group.framework, &group.family, &group.gpu)).or_default();
            set.extend(&group.residuals);
        }
        let mut own: Vec<f64> = Vec::new();
        let mut others: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
        for ((of, family, _), residuals) in sets {
            let errors = match calibrated_by {
                0 => residuals,
                rows => calibrated(&residuals, rows),
            };
            let errors = errors.into_iter().map(f64::abs);
            // What is left out together counts as one; rows of the framework itself say more than those of others on the same GPUs alone.
            match at {
                Distance::Model if of == framework => own.extend(errors),
                Distance::Model | Distance::Framework => others.entry((of, "")).or_default().extend(errors),
                Distance::Gpu => others.entry((of, family)).or_default().extend(errors),
            }
        }
        let rows = own.len();
        let mut weighed: Vec<(f64, f64)> = own.into_iter().map(|error| (error, 1.0)).collect();
        let missing = ENOUGH.saturating_sub(rows) as f64;
        others.retain(|_, errors| !errors.is_empty());
        let each = missing / others.len() as f64;
        for errors in others.values().filter(|_| missing > 0.0) {
            weighed.extend(errors.iter().map(|error| (*error, each / errors.len() as f64)));
        }
        // Another row may be further off than all that are known, and so may another framework.
        let unknown = at == Distance::Framework || (at == Distance::Model && rows == 0);
        let more = if unknown || missing == 0.0 { 1.0 } else { 0.0 };
        let share = bound(weighed, more)?.exp() - 1.0;
        Some(Interval { share, distance, calibrated_by, rows })
    }

    /// The interval of predicted steps of this program on some GPUs, which ran on one at a time of a few kinds. None where nothing is known.
    pub fn of_lockstep(&self, gpu: &GpuSpec, gpus: usize, fp8: bool) -> Option<Interval> {
        let name = format!("{}{}", Framework::lockstep().name, if fp8 { " fp8" } else { "" });
        match self.distance(&name, &gpu.family) {
            Distance::Model if gpus == 1 => self.interval_at(Distance::Model, &name, 0),
            // Its own way of running a step is known, and how long that takes there is not.
            _ => self.interval_at(Distance::Gpu, &name, 0),
        }
    }

    /// Of the rows at a distance, how many lie inside their interval, and how many there are: each group of them by the others, without
    /// those of the same model, GPU or framework, by distance.
    pub fn coverage(&self, distance: Distance) -> (usize, usize) {
        let (mut inside, mut all) = (0, 0);
        for group in self.left_out.iter().filter(|group| group.distance == distance) {
            let same = |other: &LeftOut| match distance {
                Distance::Model => {
                    (base(&other.framework), &other.gpu, &other.model)
                        == (base(&group.framework), &group.gpu, &group.model)
                }
                Distance::Gpu => (base(&other.framework), &other.family) == (base(&group.framework), &group.family),
                Distance::Framework => base(&other.framework) == base(&group.framework),
            };
            let others = self.retain(|other| !same(other));
            let interval = |row: usize| match distance {
                Distance::Framework => {
                    let ratio = |(of, ratios): (&String, &Vec<f64>)| Some((of.clone(), *ratios.get(row)?));
                    others.of_unknown(&group.framework, &group.as_others.iter().filter_map(ratio).collect())
                }
                Distance::Model | Distance::Gpu => others.interval_at(distance, &group.framework, 0),
            };
            let found: Vec<Interval> = (0..group.residuals.len()).map_while(interval).collect();
            all += found.len();
            inside += found.iter().zip(&group.residuals).filter(|(i, residual)| i.holds(1.0, residual.exp())).count();
        }
        (inside, all)
    }

    /// The same where this many rows of the same framework and GPU calibrate: by intervals from all other frameworks and GPUs.
    pub fn coverage_calibrated(&self, rows: usize) -> (usize, usize) {
        let mut sets: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
        for group in self.left_out.iter().filter(|group| group.distance == Distance::Model) {
            sets.entry((&group.framework, &group.gpu)).or_default().extend(&group.residuals);
        }
        let (mut inside, mut all) = (0, 0);
        for ((framework, gpu), residuals) in &sets {
            let others = self.retain(|other| (other.framework.as_str(), other.gpu.as_str()) != (framework, gpu));
            let Some(interval) = others.interval_at(Distance::Model, framework, rows) else { continue };
            let errors = calibrated(residuals, rows);
            let held = errors.iter().filter(|error| interval.holds(1.0, error.exp())).count();
            // Groups count by their rows, not by the pairs of them.
            let weight = residuals.len() as f64 / errors.len().max(1) as f64;
            all += if errors.is_empty() { 0 } else { residuals.len() };
            inside += (held as f64 * weight).round() as usize;
        }
        (inside, all)
    }
}

/// What is left of residuals where some of them, as many as `rows`, calibrate the others: each in turn with those that lie evenly after it.
fn calibrated(residuals: &[f64], rows: usize) -> Vec<f64> {
    let n = residuals.len();
    if n <= rows {
        return Vec::new();
    }
    let turns = n.min(TURNS);
    let mut left = Vec::new();
    for turn in 0..turns {
        let first = turn * n / turns;
        let given: Vec<usize> = (0..rows).map(|i| (first + i * n / rows) % n).collect();
        let known: Vec<f64> = given.iter().map(|i| residuals[*i]).collect();
        let factor = quantile(&known, 0.5).unwrap_or(0.0);
        left.extend((0..n).filter(|i| !given.contains(i)).map(|i| residuals[i] - factor));
    }
    left
}

/// What nine of ten errors do not exceed, by their weights, with `more` that are larger than all; none of no errors.
fn bound(mut weighed: Vec<(f64, f64)>, more: f64) -> Option<f64> {
    weighed.sort_by(|a, b| a.0.total_cmp(&b.0));
    let wanted = SHARE * (weighed.iter().map(|(_, weight)| weight).sum::<f64>() + more) - 1e-9;
    let mut sum = 0.0;
    let found = weighed.iter().find(|(_, weight)| {
        sum += weight;
        sum >= wanted
    });
    found.or(weighed.last()).map(|(error, _)| *error)
}

/// The error of times that measured rows calibrate, by these rows alone: each by the factor of the others. None where there are too few.
pub fn spread(log_factors: &[f64]) -> Option<f64> {
    if log_factors.len() < 4 {
        return None;
    }
    let error = |i: usize| {
        let others: Vec<f64> = (0..log_factors.len()).filter(|j| *j != i).map(|j| log_factors[j]).collect();
        let factor = quantile(&others, 0.5).unwrap_or(0.0);
        ((log_factors[i] - factor).abs(), 1.0)
    };
    bound((0..log_factors.len()).map(error).collect(), 1.0).map(|error| error.exp() - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(distance: Distance, framework: &str, gpu: &str, model: &str, residuals: &[f64]) -> LeftOut {
        LeftOut {
            distance,
            framework: framework.into(),
            gpu: gpu.into(),
            family: gpu.into(),
            model: model.into(),
            file: "rows".into(),
            source: "a \"table\"".into(),
            residuals: residuals.to_vec(),
            as_others: BTreeMap::new(),
        }
    }

    fn planted() -> Residuals {
        let near: Vec<f64> = (0..40).map(|i| f64::from(i - 20) / 1000.0).collect();
        let far: Vec<f64> = (0..20).map(|i| f64::from(i - 10) / 50.0).collect();
        Residuals {
            left_out: vec![
                group(Distance::Model, "a", "h100", "1b", &near),
                group(Distance::Model, "a", "h100", "3b", &near),
                group(Distance::Model, "b", "a100", "1b", &far),
                group(Distance::Gpu, "a", "h100", "1b", &far),
                group(Distance::Framework, "a", "h100", "1b", &[0.5, -0.5, 0.4, 0.3]),
            ],
        }
    }

    #[test]
    fn a_file_is_read_to_what_was_written() {
        let text = planted().to_toml();
        assert_eq!(toml::from_str::<Residuals>(&text).unwrap(), planted());
        assert_eq!(toml::from_str::<Residuals>(&frameworks().to_toml()).unwrap(), frameworks());
        let builtin = Residuals::builtin();
        assert_eq!(toml::from_str::<Residuals>(&builtin.to_toml()).unwrap(), builtin);
    }

    #[test]
    fn intervals_hold_nine_of_ten_and_widen_with_the_distance() {
        let all = planted();
        let of = |framework: &str, gpu: &str| all.interval(framework, gpu, 0).unwrap();
        let near = of("a", "h100");
        assert_eq!((near.distance, near.rows), (Distance::Model, 80));
        assert!((near.share - 0.018).abs() < 0.002, "{near:?}");
        assert_eq!(near.as_text(), "± 1.8%");
        assert_eq!((of("a", "b200").distance, all.distance("a fp8", "h100")), (Distance::Gpu, Distance::Gpu));
        // Rows in bf16 say nothing of fp8.
        assert_eq!(all.interval("a fp8", "h100", 0), None);
        assert_eq!(of("c", "h100").distance, Distance::Framework);
        assert!(near.share < of("a", "b200").share && of("a", "b200").share < of("c", "h100").share);
        // Of few rows of its own, it takes the rest from others.
        assert!(all.interval_at(Distance::Model, "c", 0).unwrap().share > near.share);
        let [least, most] = near.around(2.0);
        assert!(
            near.holds(2.0, 2.0) && near.holds(2.0, least) && near.holds(2.0, most) && !near.holds(2.0, 1.01 * most)
        );
        assert_eq!(Residuals::default().interval("a", "h100", 0), None);
    }

    /// Three frameworks that were left out: steps that the host launches are off by as much as the constants of others differ.
    fn frameworks() -> Residuals {
        let of = |framework: &str, residuals: &[f64], as_others: &[(&str, &[f64])]| LeftOut {
            as_others: as_others.iter().map(|(of, ratios)| ((*of).to_owned(), ratios.to_vec())).collect(),
            ..group(Distance::Framework, framework, "h100", "1b", residuals)
        };
        Residuals {
            left_out: vec![
                of("a", &[0.1, 0.9], &[("b", &[0.0, 0.8]), ("c", &[0.05, 0.1])]),
                of("b", &[-0.1, -0.7], &[("a", &[0.0, -0.6]), ("c", &[0.05, -0.3])]),
                of("c", &[0.1, 0.5], &[("a", &[0.0, 0.4]), ("b", &[0.0, 0.3])]),
            ],
        }
    }

    #[test]
    fn a_framework_that_nobody_measured_is_as_unsure_as_known_ones_lie_apart_in_that_step() {
        let all = frameworks();
        let of = |as_others: &[(&str, f64)]| {
            all.of_unknown("d", &as_others.iter().map(|(of, ratio)| ((*of).to_owned(), *ratio)).collect()).unwrap()
        };
        // No row needed more than 0.1 besides.
        let (near, far) = (of(&[("a", 0.0), ("b", 0.01)]), of(&[("a", 0.2), ("b", -0.8)]));
        assert!((near.share - (0.11f64.exp() - 1.0)).abs() < 1e-9, "{near:?}");
        assert!((far.share - (0.9f64.exp() - 1.0)).abs() < 1e-9, "{far:?}");
        // Constants of a framework that is no part of the rows say nothing.
        assert_eq!(of(&[("e", 3.0)]), of(&[]));
        assert_eq!((near.distance, near.calibrated_by), (Distance::Framework, 0));
        // Without what they differ by, the rows need 0.9.
        let mut plain = frameworks();
        plain.left_out.iter_mut().for_each(|group| group.as_others.clear());
        let share = plain.of_unknown("d", &BTreeMap::new()).unwrap().share;
        assert!((share - (0.9f64.exp() - 1.0)).abs() < 1e-9, "{share}");
    }

    #[test]
    fn intervals_of_this_build_hold_nine_of_ten_rows_that_were_left_out() {
        let all = Residuals::builtin();
        let found = Distance::ALL.map(|distance| all.coverage(distance));
        let calibrated = [1, 2, 4].map(|rows| all.coverage_calibrated(rows));
        for (inside, rows) in found.into_iter().chain(calibrated) {
            let share = inside as f64 / rows as f64;
            assert!(rows > 290 && (0.85..=0.95).contains(&share), "{found:?} {calibrated:?}");
        }
    }

    #[test]
    fn models_that_were_left_out_are_near_in_the_median() {
        let all = Residuals::builtin();
        let median = |of: &dyn Fn(&LeftOut) -> bool| {
            let groups = all.left_out.iter().filter(|group| group.distance == Distance::Model && of(group));
            // |predicted ÷ measured - 1|.
            let errors: Vec<f64> = groups.flat_map(|g| &g.residuals).map(|r| ((-r).exp() - 1.0).abs()).collect();
            quantile(&errors, 0.5).unwrap()
        };
        let found =
            [median(&|_| true), median(&|g| g.file == "megatron_core"), median(&|g| g.file == "megatron_bridge")];
        assert!(found[0] <= 0.08 && found[1] <= 0.10 && found[2] <= 0.10, "{found:?}");
    }

    #[test]
    fn rows_that_are_left_out_count_by_what_the_others_know() {
        // Each by the other two: their constants alone count, and so does what their rows needed.
        assert_eq!(frameworks().coverage(Distance::Framework), (6, 6));
        let mut surprising = frameworks();
        surprising.left_out[0].residuals[1] = 3.0;
        assert_eq!(surprising.coverage(Distance::Framework), (5, 6));
    }

    #[test]
    fn rows_that_calibrate_take_away_what_all_rows_have_in_common() {
        let shifted: Vec<f64> = (0..30).map(|i| 0.3 + 0.001 * f64::from(i % 7)).collect();
        let all = Residuals { left_out: vec![group(Distance::Model, "a", "h100", "1b", &shifted)] };
        let [none, one, four] = [0, 1, 4].map(|rows| all.interval("a", "h100", rows).unwrap());
        assert!(none.share > 0.3 && one.share < 0.01 && four.share <= one.share, "{none:?} {one:?} {four:?}");
        assert_eq!((one.calibrated_by, spread(&[0.3, 0.3, 0.3])), (1, None));
        let apart = spread(&[0.3, 0.3, 0.31, 0.6]).unwrap();
        assert!((apart - 0.35).abs() < 0.01, "{apart}");
    }

    #[test]
    fn errors_of_few_rows_are_bounded_by_the_largest() {
        assert_eq!(bound(vec![(0.1, 1.0), (0.3, 1.0), (0.2, 1.0)], 1.0), Some(0.3));
        assert_eq!(bound((1..=19).map(|i| (f64::from(i), 1.0)).collect(), 1.0), Some(18.0));
        assert_eq!(bound(Vec::new(), 1.0), None);
    }
}
