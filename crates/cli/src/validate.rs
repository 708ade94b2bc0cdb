//! `lockstep validate`: predicted step times and memory beside what others have measured and published.

mod plot;
mod proposed;

use crate::Format;
use crate::failure::{Failure, Result};
use crate::progress::Progress;
use crate::style::heading;
use crate::table::{table, wrapped};
use lockstep_exec::cpu;
use lockstep_ir::units;
use lockstep_plan::published::{
    Assumption, Case, Cases, Distance, Errors, File, Interval, Peer, Prediction, Refused, Report, Residuals, RowReport,
    Summary, Without, fit, left_out, predict, proposals, quantile, spread,
};
use lockstep_sim::Constants;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

#[derive(clap::Args)]
pub struct Args {
    /// Files of measured runs, one per row, with a header of column names (docs/foresight.md lists them).
    #[arg(value_name = "FILE.CSV", required = true)]
    files: Vec<PathBuf>,
    /// The framework of all rows, where their source does not name it.
    #[arg(long, value_name = "NAME", value_parser = framework)]
    framework: Option<Peer>,
    /// Learn a factor on step times from this row, or from these, for all rows of its framework, GPU and number format: the median of what rows say.
    /// May be given several times. The rest is reported, each time with its interval of 90%.
    #[arg(long, value_name = "FILE.CSV:LINE[-LINE]")]
    calibrate: Vec<String>,
    /// Take the constants of the cost model from this file.
    #[arg(long, value_name = "FILE.TOML")]
    constants: Option<PathBuf>,
    /// Fit the constants to the clean rows, write the table to this file, and report with it.
    #[arg(long, value_name = "FILE.TOML", group = "fitting")]
    fit: Option<PathBuf>,
    /// Fit without the rows of this framework, GPU family, file or source, or of a model on a GPU (MODEL@GPU), and report on them alone.
    #[arg(long, value_name = "NAME", requires = "fit")]
    leave_out: Option<String>,
    /// Leave every clean row out of a fit, with its model, its GPU and its framework, and write to this file how far off it was predicted: what
    /// intervals of predicted times are from.
    #[arg(long, value_name = "FILE.TOML", group = "fitting", conflicts_with = "calibrate")]
    residuals: Option<PathBuf>,
    /// Rounds of a fit.
    #[arg(long, value_name = "N", default_value_t = 12, requires = "fitting", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Also let the search of `lockstep plan` propose layouts for every model and number of GPUs that nanotron was swept over, restricted
    /// to what it has, and show how much longer they took than the fastest that was measured.
    #[arg(long)]
    search: bool,
    /// Print every row.
    #[arg(long)]
    rows: bool,
    /// Draw predicted against measured, an SVG per file, into this folder.
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

fn framework(name: &str) -> Result<Peer, String> {
    let names: Vec<&str> = Peer::ALL.iter().map(|peer| peer.name()).collect();
    Peer::named(name).ok_or_else(|| format!("known are {}", names.join(", ")))
}

pub fn run(args: Args) -> Result<()> {
    let files = args.files.iter().map(|path| read(path)).collect::<Result<Vec<File>>>()?;
    let catalogue = lockstep_host::catalogue().map_err(|error| Failure::refused(&error))?;
    let mut constants = match &args.constants {
        None => Constants::builtin(),
        Some(path) => {
            let text = text_of(path, "give the path of a table of constants, as --fit writes it")?;
            Constants::parse(&path.display().to_string(), &text).map_err(|error| Failure::refused(&error))?
        }
    };
    let threads = cpu::cores();
    let progress = Mutex::new(Progress::new(0));
    let show = |what: &str, done: usize, total: usize| {
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.work(what, done as u64, total as u64, |n| n.to_string());
    };
    let Cases { cases, refused } = Cases::new(&catalogue, &files, args.framework, threads, &|done, total| {
        show("compiling programs", done, total);
    });
    let names: Vec<String> = args.files.iter().map(|path| stem(path)).collect();
    let factors = Factors::named(&args.calibrate, &cases, &names)?;
    let without = args.leave_out.clone().map_or(Without::Nothing, Without::Named);
    let rounds = args.rounds as usize;
    let mut known = Residuals::builtin().retain(|rows| !without.leaves_out_residuals(rows));
    if let Some(path) = &args.residuals {
        let found =
            left_out(&cases, &names, &constants, rounds, threads, &|done, all| show("fits without rows", done, all));
        known = found.with_lockstep();
        write_to(path, &known.to_toml(), "--residuals")?;
    }
    let mut fitted = None;
    if let Some(path) = &args.fit {
        let found = fit(&cases, &names, &constants, &without, rounds, threads, &|round, rounds, _| {
            show("rounds of the fit", round, rounds);
        });
        write_to(path, &found.constants.to_toml(), "--fit")?;
        let (count, rows, (before, after)) = (found.constants.fitted().count(), found.rows, found.loss);
        let errors = format!("mean |log error| {before:.4} → {after:.4}");
        fitted = Some(format!("fitted {count} constants to {rows} clean rows: {errors}; table in {}", path.display()));
        constants = found.constants;
    }
    let proposed = match args.search {
        true => Some(proposals(&cases, &constants, threads, &|done, total| show("cells searched", done, total))?),
        false => None,
    };
    progress.lock().unwrap_or_else(PoisonError::into_inner).clear();
    let predictions = predict(&cases, &constants, threads);
    let learned = factors.learn(&cases, &predictions)?;
    let shown = |i: &usize| {
        let case = &cases[*i];
        !factors.rows.contains(i) && (args.leave_out.is_none() || without.leaves_out(case, &names[case.file]))
    };
    let mut intervals = Intervals { known: &known, constants: &constants, found: BTreeMap::new() };
    let mut row = |i: usize| {
        let case = &cases[i];
        let calibration = learned.get(&Factors::key(case));
        let interval = intervals.of(case, calibration.map_or(0, |c| c.rows));
        let interval = interval.map(|interval| calibration.map_or(interval, |c| c.widen(interval)));
        RowReport::new(case, &names[case.file], &predictions[i], calibration.map(|c| c.factor), interval)
    };
    let report = Report::new((0..cases.len()).filter(shown).map(&mut row).collect());
    let scaled = args.leave_out.as_ref().map(|_| with_one_factor(&report));
    // The framework's own constants as the rest of the table would guess them.
    let guessed = args.leave_out.as_ref().map(|_| {
        let guessed = without.guess(&constants, &cases, &names);
        let all = predict(&cases, &guessed, threads);
        let mut intervals = Intervals { known: &known, constants: &guessed, found: BTreeMap::new() };
        let mut row = |i: usize| {
            let case = &cases[i];
            let interval = intervals.of(case, 0);
            RowReport::new(case, &names[case.file], &all[i], None, interval)
        };
        let report = Report::new((0..cases.len()).filter(shown).map(&mut row).collect());
        let of_files = report.summary.by_file.iter();
        let errors = of_files.filter_map(|(file, summary)| Some((file.clone(), summary.step_time?)));
        (errors.collect::<BTreeMap<_, _>>(), with_one_factor(&report), report.summary.clean.inside)
    });
    let mut out = std::io::stdout().lock();
    match args.format {
        Format::Json => {
            let refused: Vec<_> = refused
                .iter()
                .map(|(file, Refused { line, model, reason })| {
                    json!({ "file": names[*file], "line": line, "model": model, "reason": reason })
                })
                .collect();
            let document = json!({
                "summary": report.summary,
                "rows": report.rows,
                "assumed": report.assumed,
                "not_represented": refused,
                "search": proposed.as_deref().map(proposed::as_json),
                "calibrated": learned.iter().map(|(key, calibration)| calibration.as_json(key)).collect::<Vec<_>>(),
                "intervals": coverages(&known),
                "left_out_with_one_factor": scaled,
                "left_out_without_profile": guessed.as_ref().map(|(errors, one, inside)| {
                    json!({ "step_time": errors, "with_one_factor": one, "inside": inside })
                }),
            });
            writeln!(out, "{document:#}")?;
        }
        Format::Text => {
            write!(out, "{}", as_text(&report, args.rows))?;
            write!(out, "{}", proposed.as_deref().map_or(String::new(), proposed::as_text))?;
            for (key, calibration) in &learned {
                write!(out, "{}", wrapped(&calibration.as_text(key), "  "))?;
            }
            if let Some(path) = &args.residuals {
                write!(out, "{}", coverage_text(&known, path))?;
            }
            if let (Some(name), Some(inside)) = (&args.leave_out, report.summary.clean.inside) {
                let text = format!(
                    "inside their interval of 90%, which the rows of {name} are no part of: {:.1}%",
                    100.0 * inside
                );
                write!(out, "{}", wrapped(&text, "  "))?;
            }
            if let Some(errors) = scaled {
                let text = format!("with one factor per framework and GPU: step time of {}", by_file(&errors));
                write!(out, "{}", wrapped(&text, "  "))?;
            }
            if let Some((errors, one, inside)) = guessed {
                let text = format!(
                    "with nothing known of the framework, its constants guessed from others: step time of {}; with one factor {}{}",
                    by_file(&errors),
                    by_file(&one),
                    inside.map_or(String::new(), |inside| format!("; inside their interval {:.1}%", 100.0 * inside))
                );
                write!(out, "{}", wrapped(&text, "  "))?;
            }
            if let Some(fitted) = fitted {
                write!(out, "{}", wrapped(&fitted, "  "))?;
            }
            write!(out, "{}", assumptions(&report))?;
            write!(out, "{}", refusals(&refused, &names))?;
        }
    }
    if let Some(folder) = &args.plot {
        let written = plot::write(folder, &report).map_err(|error| {
            Failure::run(format!("cannot write to {}: {error}", folder.display()), "choose another folder for --plot")
        })?;
        for path in written {
            eprintln!("wrote {}", path.display());
        }
    }
    Ok(())
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| path.display().to_string(), |stem| stem.to_string_lossy().into_owned())
}

fn read(path: &Path) -> Result<File> {
    let text = text_of(path, "give the path of a file of rows that can be read")?;
    Ok(File { name: path.display().to_string(), text })
}

fn text_of(path: &Path, hint: &str) -> Result<String> {
    std::fs::read_to_string(path)
        .map_err(|error| Failure::request(format!("cannot read {}: {error}", path.display()), hint))
}

fn write_to(path: &Path, text: &str, option: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|error| {
        Failure::run(format!("cannot write {}: {error}", path.display()), format!("choose another file for {option}"))
    })
}

/// Intervals of rows. Those of measured frameworks are counted out once for each; of others they differ by row.
struct Intervals<'a> {
    known: &'a Residuals,
    constants: &'a Constants,
    found: BTreeMap<(String, String, usize), Option<Interval>>,
}

impl Intervals<'_> {
    fn of(&mut self, case: &Case, calibrated_by: usize) -> Option<Interval> {
        let key = (case.group(), case.hardware.gpu.family.clone(), calibrated_by);
        if calibrated_by == 0 && self.known.distance(&key.0, &key.1) == Distance::Framework {
            return self.known.of_unknown(&key.0, &case.as_others(self.constants));
        }
        let found = self.found.entry(key);
        *found.or_insert_with_key(|(framework, family, rows)| self.known.interval(framework, family, *rows))
    }
}

/// Rows that teach a factor.
struct Factors {
    rows: Vec<usize>,
}

/// Rows that share a factor: of a framework, on a GPU, in a number format.
type Calibrated = (&'static str, String, &'static str);

/// What rows teach.
struct Calibration {
    factor: f64,
    rows: usize,
    /// How far the factors of single rows lie apart, where there are enough to tell.
    spread: Option<f64>,
}

impl Calibration {
    /// An interval that is not narrower than the rows which calibrate lie apart.
    fn widen(&self, interval: Interval) -> Interval {
        Interval { share: interval.share.max(self.spread.unwrap_or(0.0)), ..interval }
    }

    fn as_json(&self, (framework, gpu, precision): &Calibrated) -> serde_json::Value {
        let Calibration { factor, rows, spread } = self;
        json!({
            "framework": framework, "gpu": gpu, "precision": precision, "rows": rows, "factor": factor, "spread": spread,
        })
    }

    fn as_text(&self, (framework, gpu, precision): &Calibrated) -> String {
        let rows = units::counted(self.rows, "row");
        format!("calibrated by {rows}: step times of {framework} on {gpu} in {precision} × {:.3}", self.factor)
    }
}

impl Factors {
    fn named(named: &[String], cases: &[Case], files: &[String]) -> Result<Self> {
        let mut rows = Vec::new();
        for text in named {
            let wrong = |why: &str| {
                Failure::request(
                    format!("--calibrate {text} {why}"),
                    format!("name a measured row, such as {0}.csv:2, or several: {0}.csv:2-5", files[0]),
                )
            };
            let (file, lines) = text.rsplit_once(':').ok_or_else(|| wrong("has no line"))?;
            let (first, last) = lines.split_once('-').unwrap_or((lines, lines));
            let line = |text: &str| text.parse::<usize>().map_err(|_| wrong("does not end with a line number"));
            let (first, last) = (line(first)?, line(last)?);
            if first > last {
                return Err(wrong("ends with lines of which the first is after the last"));
            }
            let file = stem(Path::new(file));
            let named = |i: &usize| files[cases[*i].file] == file && (first..=last).contains(&cases[*i].row.line);
            let measured = |i: &usize| {
                let step_s = cases[*i].row.measured.and_then(|measured| measured.step_s);
                step_s.is_some() && cases[*i].work.is_ok()
            };
            let found: Vec<usize> = (0..cases.len()).filter(named).filter(measured).collect();
            if found.is_empty() {
                let why = if first == last {
                    "is no row that was measured and predicted"
                } else {
                    "are no rows that were measured and predicted"
                };
                return Err(wrong(why));
            }
            rows.extend(found);
        }
        rows.sort_unstable();
        rows.dedup();
        Ok(Self { rows })
    }

    fn key(case: &Case) -> Calibrated {
        (case.peer.name(), case.hardware.gpu.name.clone(), case.precision())
    }

    fn learn(&self, cases: &[Case], predictions: &[Prediction]) -> Result<BTreeMap<Calibrated, Calibration>> {
        let mut logs: BTreeMap<Calibrated, Vec<f64>> = BTreeMap::new();
        for &i in &self.rows {
            let measured = cases[i].row.measured.and_then(|m| m.step_s);
            if let (Some(measured), Some(predicted)) = (measured, predictions[i].step_s) {
                logs.entry(Self::key(&cases[i])).or_default().push((measured / predicted).ln());
            }
        }
        let calibration = |(key, logs): (Calibrated, Vec<f64>)| {
            let factor = quantile(&logs, 0.5).unwrap_or(0.0).exp();
            (key, Calibration { factor, rows: logs.len(), spread: spread(&logs) })
        };
        Ok(logs.into_iter().map(calibration).collect())
    }
}

/// Of the rows that intervals are from, the share inside: by distance, and where some rows calibrate the rest.
fn coverages(known: &Residuals) -> serde_json::Value {
    let share = |(inside, rows): (usize, usize)| json!({ "rows": rows, "inside": (rows > 0).then(|| inside as f64 / rows as f64) });
    let by_distance: serde_json::Map<_, _> =
        Distance::ALL.iter().map(|d| (d.name().to_lowercase(), share(known.coverage(*d)))).collect();
    let calibrated: serde_json::Map<_, _> =
        CALIBRATED_BY.iter().map(|n| (n.to_string(), share(known.coverage_calibrated(*n)))).collect();
    json!({ "left_out": by_distance, "calibrated_by": calibrated })
}

/// Numbers of rows that calibrate for which intervals are counted out.
const CALIBRATED_BY: [usize; 3] = [1, 2, 4];

fn coverage_text(known: &Residuals, path: &Path) -> String {
    let line = |what: String, (inside, rows): (usize, usize)| {
        let share = if rows > 0 { format!("{:.1}%", 100.0 * inside as f64 / rows as f64) } else { "-".into() };
        vec![what, rows.to_string(), share]
    };
    let mut lines: Vec<_> =
        Distance::ALL.iter().map(|d| line(format!("left out by {}", d.name()), known.coverage(*d))).collect();
    let calibrated =
        |n: &usize| line(format!("calibrated by {}", units::counted(*n, "row")), known.coverage_calibrated(*n));
    lines.extend(CALIBRATED_BY.iter().map(calibrated));
    let table = table(&["inside their interval of 90% by the others", "rows", "inside"], &lines);
    format!("\n{table}  residuals in {}\n", path.display())
}

/// Errors of clean rows, of each file, where a framework has one factor on a GPU: what the row teaches by which the others are least
/// off in the median.
fn with_one_factor(report: &Report) -> BTreeMap<String, Errors> {
    let mut groups: BTreeMap<(&str, &str), Vec<(String, f64)>> = BTreeMap::new();
    for row in report.rows.iter().filter(|row| row.clean) {
        if let (Some(predicted), Some(measured)) = (row.predicted_s, row.measured_s) {
            groups.entry((&row.framework, &row.gpu)).or_default().push((row.of_file(), predicted / measured));
        }
    }
    let mut errors: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for rows in groups.into_values() {
        let off = |factor: f64| rows.iter().map(|(_, ratio)| (ratio / factor - 1.0).abs()).collect::<Vec<f64>>();
        let middle = |factor: &f64| quantile(&off(*factor), 0.5).unwrap_or(f64::INFINITY);
        let taught = rows.iter().map(|(_, ratio)| *ratio).min_by(|a, b| middle(a).total_cmp(&middle(b)));
        let taught = taught.unwrap_or(1.0);
        for (file, ratio) in rows {
            errors.entry(file).or_default().push((ratio / taught - 1.0).abs());
        }
    }
    errors.into_iter().filter_map(|(file, errors)| Some((file, Errors::of(&errors)?))).collect()
}

/// Of every file, in a line.
fn by_file(errors: &BTreeMap<String, Errors>) -> String {
    errors.iter().map(|(file, errors)| format!("{file} {}", percent(&Some(*errors)))).collect::<Vec<_>>().join("; ")
}

fn percent(errors: &Option<Errors>) -> String {
    errors.map_or("-".into(), |e| format!("{:.1}% / {:.1}% / {:.1}%", 100.0 * e.median, 100.0 * e.mean, 100.0 * e.p90))
}

fn as_text(report: &Report, rows: bool) -> String {
    let mut text = String::new();
    if rows {
        text += &heading("Rows: predicted beside measured");
        text.push('\n');
        text += &row_table(&report.rows);
        text.push('\n');
    }
    let share = |x: f64| format!("{:.1}%", 100.0 * x);
    let line = |name: &str, s: &Summary| {
        let with_runs = s.memory.is_some() || s.oom.failed_right.is_some_and(|right| right < 1.0);
        vec![
            name.to_owned(),
            s.rows.to_string(),
            percent(&s.step_time),
            s.inside.map_or("-".into(), share),
            percent(&s.memory),
            s.oom.right.filter(|_| with_runs).map_or("-".into(), share),
            s.spearman.map_or("-".into(), |x| format!("{x:.3}")),
            s.regret.map_or("-".into(), |r| format!("{} / {} / {}", share(r.median), share(r.mean), share(r.of_five))),
        ]
    };
    let summary = &report.summary;
    let mut lines = vec![line("clean rows", &summary.clean), line("all rows", &summary.all)];
    for (title, group) in
        [("by framework", &summary.by_framework), ("by file", &summary.by_file), ("by nodes", &summary.by_nodes)]
    {
        lines.push(vec![format!("{title}, clean:")]);
        lines.extend(group.iter().map(|(name, s)| line(&format!("  {name}"), s)));
    }
    text += &heading("Errors: median / mean / 90th percentile");
    text.push('\n');
    let header = [
        "",
        "rows",
        "step time",
        "~in interval",
        "memory",
        "runs or fails, right",
        "~Spearman",
        "~regret: median / mean / of five",
    ];
    text + &table(&header, &lines)
}

fn row_table(rows: &[RowReport]) -> String {
    let number = |x: Option<f64>, digits: usize| x.map_or("-".into(), |x| format!("{x:.digits$}"));
    let line = |row: &RowReport| {
        let gib = |bytes: Option<f64>| bytes.filter(|b| *b > 0.0).map_or("-".into(), |b| units::gib(b as u64));
        let outcome = match (row.failed, row.runs, row.error) {
            (true, true, _) => "failed, predicted to run".to_owned(),
            (true, false, _) => "failed, as predicted".to_owned(),
            (false, true, Some(error)) => format!("{:.1}%", 100.0 * error),
            (false, false, Some(error)) => format!("{:.1}%, predicted to fail", 100.0 * error),
            (false, _, None) => "ran, predicted to fail".to_owned(),
        };
        vec![
            format!("{}:{} {}", row.file, row.line, row.model),
            format!("{} {}", row.gpus, row.gpu),
            row.layout.clone(),
            number(row.measured_s, 3),
            number(row.predicted_s, 3) + &row.interval.map_or(String::new(), |i| format!(" {}", i.as_text())),
            format!("{outcome}{}", if row.clean { "" } else { " (flagged)" }),
            number(row.measured_tokens_per_s_per_gpu, 0),
            number(row.predicted_tokens_per_s_per_gpu, 0),
            gib(row.measured_memory_bytes),
            gib(Some(row.predicted_memory_bytes)),
        ]
    };
    let header = [
        "row",
        "GPUs",
        "layout",
        "measured, s",
        "predicted, s",
        "error",
        "~measured, tokens/s/GPU",
        "~predicted, tokens/s/GPU",
        "~measured memory",
        "~predicted memory",
    ];
    table(&header, &rows.iter().map(line).collect::<Vec<_>>())
}

/// What rows do not say, once for each reason.
fn assumptions(report: &Report) -> String {
    if report.assumed.is_empty() {
        return String::new();
    }
    let mut text = format!("\n{}\n", heading("Assumed where rows do not say it, or not modelled"));
    for Assumption { what, rows, first } in &report.assumed {
        text += &wrapped(&format!("{what}: {}, the first {first}", units::counted(*rows, "row")), "  ");
    }
    text
}

/// Rows that are not represented, by line.
fn refusals(refused: &[(usize, Refused)], names: &[String]) -> String {
    if refused.is_empty() {
        return String::new();
    }
    let mut text = format!("\n{}\n", heading(&format!("{} rows are not represented", refused.len())));
    for (file, Refused { line, model, reason }) in refused {
        let model = if model.is_empty() { String::new() } else { format!(" {model}") };
        text += &wrapped(&format!("{}.csv:{line}{model}: {reason}", names[*file]), "  ");
    }
    text
}
