//! Why a layout and not another; and what a request that cannot be met could be instead.

use super::searched;
use crate::explain::exact;
use crate::failure::{Failure, Result};
use crate::table::{table, wrapped};
use lockstep_config::legal;
use lockstep_ir::program::Class;
use lockstep_ir::units::{self, counted};
use lockstep_ir::{Layout, MeshAxis};
use lockstep_plan::{NoLayout, RankedLayout, Rates, Room, SearchRequest, at_layout, ways_to_fit};
use std::collections::BTreeMap;

/// A time in days: `30d`, `12h`.
pub(super) fn days(text: &str) -> Result<f64> {
    let (number, unit) = text.split_at(text.len() - text.chars().next_back().map_or(0, char::len_utf8));
    let each = match unit {
        "d" => Some(1.0),
        "h" => Some(1.0 / 24.0),
        "w" => Some(7.0),
        _ => None,
    };
    let days = each.and_then(|each| Some(number.trim().parse::<f64>().ok()? * each));
    let sound = days.filter(|days| days.is_finite() && *days > 0.0);
    sound.ok_or_else(|| {
        Failure::request(format!("--deadline {text} is not a time"), "give days or hours, such as 30d or 12h")
    })
}

/// Refuses a deadline that the best layout does not meet, with the number of GPUs that does.
pub(super) fn meet(asked: &SearchRequest, best: &RankedLayout, tokens: u64, deadline: f64) -> Result<()> {
    let takes = |layout: &RankedLayout| tokens as f64 / layout.evaluated.forecast.tokens_per_s / 86_400.0;
    if takes(best) <= deadline {
        return Ok(());
    }
    let what = format!(
        "--deadline of {deadline:.1} days cannot be met: the fastest layout of {} takes {:.1} days",
        counted(asked.gpus, "GPU"),
        takes(best)
    );
    let mut nearest = None;
    for gpus in more_gpus(asked) {
        let Ok(found) = searched(&SearchRequest { gpus, wanted: 1, ..asked.clone() }) else { continue };
        let Some(best) = found.best.first() else { continue };
        nearest = Some((gpus, takes(best)));
        if takes(best) <= deadline {
            let hint = format!("give --gpus {gpus}: {:.1} days ({})", takes(best), best.choice);
            return Err(Failure::request(what, &hint));
        }
    }
    let hint = match nearest {
        Some((gpus, days)) => format!("no number up to {gpus} does ({days:.1} days): allow more time, or fewer tokens"),
        None => "allow more time, or fewer tokens".to_owned(),
    };
    Err(Failure::request(what, &hint))
}

/// Numbers of GPUs to try where there are too few: from half as many more, up to what the cluster has.
fn more_gpus(asked: &SearchRequest) -> Vec<usize> {
    let cluster = &asked.hardware.cluster;
    let all = cluster.nodes.map_or(asked.gpus * 256, |nodes| nodes * cluster.gpus_per_node);
    let halves = (0..9).flat_map(|n| [3 * asked.gpus * (1 << n) / 2, 2 * asked.gpus * (1 << n)]);
    halves.filter(|gpus| *gpus <= all && *gpus > asked.gpus).collect()
}

/// The refusal of a request that nothing fits, with what would do: other keys on as many GPUs, or more of them.
pub(super) fn nothing_fits(asked: &SearchRequest, why: &NoLayout) -> Failure {
    // Keys that the config fixes, and what is not searched.
    let ways = why.nearest.as_ref().and_then(|choice| {
        let rates = Rates::Catalogue(asked.hardware);
        let ways = ways_to_fit(asked.machine, &choice.config(asked.config), asked.room, Some(rates)).ok()?;
        (!ways.changes.is_empty()).then(|| format!("of this layout, {ways}"))
    });
    let fits = |gpus: &usize| {
        let found = searched(&SearchRequest { gpus: *gpus, wanted: 1, ..asked.clone() });
        found.ok().and_then(|found| Some((*gpus, found.best.first()?.choice)))
    };
    let more = more_gpus(asked).iter().find_map(fits).map(|(gpus, choice)| format!("give --gpus {gpus}: {choice}"));
    let hint = match (ways, more) {
        (Some(ways), Some(more)) => format!("{ways}\nor {more}"),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => why.hint.clone(),
    };
    Failure::request(why.reason.clone(), &hint)
}

/// What a layout that was asked about costs.
pub(super) fn why(asked: &SearchRequest, text: &str) -> Result<RankedLayout> {
    let layout: Layout = text.parse().map_err(|e| Failure::refused(&e).about(format!("--why {text}")))?;
    let ranks = layout.mesh.ranks();
    if ranks != asked.gpus {
        let rest = asked.gpus / ranks.max(1) * layout.mesh.size(MeshAxis::DpShard);
        let hint = format!("give its sizes so that they are {} in all: dp={rest}, say", asked.gpus);
        return Err(Failure::request(
            {
                let [ranks, gpus] = [counted(ranks, "rank"), counted(asked.gpus, "GPU")];
                format!("--why {text} has {ranks}, and the plan is for {gpus}")
            },
            &hint,
        ));
    }
    let extents = legal::Extents { micro_batch: 1, ..asked.config.extents() };
    if let Some(refusal) = legal::check(&layout, &extents).first() {
        return Err(Failure::refused(refusal).about(format!("--why {text}")));
    }
    let nothing = || {
        let batch = asked.config.train.global_batch;
        Failure::request(
            format!("--why {text}: no micro-batch divides train.global_batch = {batch}"),
            "change one of them",
        )
    };
    at_layout(asked, &layout)?.ok_or_else(nothing)
}

/// Two layouts, term by term.
pub(super) fn compared(best: &RankedLayout, other: &RankedLayout, room: &Room, gpus: usize) -> String {
    let mut rows = Vec::new();
    let classes = |layout: &RankedLayout| {
        let roles = &layout.evaluated.forecast.roles;
        let mut sums: BTreeMap<String, f64> = BTreeMap::new();
        for (class, seconds) in roles.iter().flat_map(|role| &role.classes) {
            *sums.entry(class.clone()).or_default() += seconds / roles.len() as f64;
        }
        sums
    };
    let signed = |more: f64, text: String| if more < 0.0 { format!("-{text}") } else { format!("+{text}") };
    let mut time = |name: &str, a: f64, b: f64| {
        rows.push(vec![name.to_owned(), exact(a), exact(b), signed(b - a, exact((b - a).abs()))]);
    };
    let [a, b] = [best, other].map(|layout| &layout.evaluated.forecast);
    time("step", a.step_s, b.step_s);
    time("exposed communication", a.exposed_communication_s, b.exposed_communication_s);
    time("bubble", a.bubble * a.step_s, b.bubble * b.step_s);
    let [of_a, of_b] = [classes(best), classes(other)];
    let mut names: Vec<&String> = of_a.keys().chain(of_b.keys()).filter(|name| *name != "bubble").collect();
    names.sort();
    names.dedup();
    for name in names {
        let [a, b] = [&of_a, &of_b].map(|classes| classes.get(name).copied().unwrap_or(0.0));
        if a.max(b) > 0.0 {
            time(name, a, b);
        }
    }
    let mut bytes = |name: &str, a: u64, b: u64| {
        let more = b as f64 - a as f64;
        rows.push(vec![name.to_owned(), units::bytes(a), units::bytes(b), signed(more, units::bytes(a.abs_diff(b)))]);
    };
    let [a, b] = [best, other].map(|layout| layout.evaluated.memory());
    bytes("memory", a.total_bytes, b.total_bytes);
    for class in Class::ALL {
        bytes(class.name(), a.classes[class.name()], b.classes[class.name()]);
    }
    let verdict = room.verdict(&other.evaluated.stages, gpus);
    let slower = 100.0 * (other.evaluated.forecast.step_s / best.evaluated.forecast.step_s - 1.0);
    let title = format!("why not {}: {slower:+.1}% of the step time, {verdict}", other.choice);
    let note = "Times of kernels and collectives are means over stages; collectives that overlap count in full.";
    let rows = table(&["", "the first", "this", "more"], &rows);
    format!("\n{}{rows}{}", wrapped(&title, "  "), wrapped(&format!("  {note}"), "  "))
}
