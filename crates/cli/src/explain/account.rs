//! What other choices would cost, and the program's counts beside analytical formulas.

use crate::table::{table, wrapped};
use lockstep_ir::program::Class;
use lockstep_ir::units;
use lockstep_ir::units::thousands;
use lockstep_plan::{Account, Formula, PolicyCost, Projection, ReshardCost, Scaling};

pub(super) fn as_text(account: &Account) -> String {
    [
        projections(&account.projections),
        policies(&account.policies),
        reshard(&account.reshard),
        scaling(&account.scaling),
        formulas(&account.formulas),
    ]
    .concat()
}

/// Parts of the model with their projections below them.
fn projections(all: &[Projection]) -> String {
    let sum = |of: &dyn Fn(&Projection) -> f64, part: Option<&str>| -> f64 {
        all.iter().filter(|p| part.is_none_or(|part| p.part == part)).map(of).sum()
    };
    let [parameters, active, flops]: [&dyn Fn(&Projection) -> f64; 3] =
        [&|p| p.parameters as f64, &|p| p.active_parameters as f64, &|p| p.flops_per_token];
    let row = |name: String, counts: [f64; 3]| {
        let count = |n: f64| if n == 0.0 { "-".to_owned() } else { whole(n) };
        let cost = if counts[2] == 0.0 { "-".to_owned() } else { units::flops(counts[2]) };
        let share = |n: f64, all: f64| if n == 0.0 { "-".to_owned() } else { format!("{:.1}%", 100.0 * n / all) };
        vec![
            name,
            count(counts[0]),
            share(counts[0], sum(parameters, None)),
            count(counts[1]),
            cost,
            share(counts[2], sum(flops, None)),
        ]
    };
    let sums = |part: Option<&str>| [sum(parameters, part), sum(active, part), sum(flops, part)];
    let mut rows = Vec::new();
    let mut parts: Vec<&str> = all.iter().map(|p| p.part).collect();
    parts.dedup();
    for part in parts {
        rows.push(row(part.to_owned(), sums(Some(part))));
        let mine: Vec<&Projection> = all.iter().filter(|p| p.part == part).collect();
        if mine.len() > 1 {
            rows.extend(mine.iter().map(|p| row(format!("  {}", p.name), [parameters(p), active(p), flops(p)])));
        }
    }
    rows.push(row("total".to_owned(), sums(None)));
    let mut header = vec!["part", "parameters", "~share", "active", "FLOPs per token", "~share"];
    // Every token uses all parameters where there are no experts.
    if sum(parameters, None) == sum(active, None) {
        header.remove(3);
        rows.iter_mut().for_each(|row| drop(row.remove(3)));
    }
    let title = "parameters and model FLOPs by projection, of all layers (forward and backward)";
    format!("\n{}{}", wrapped(title, "  "), table(&header, &rows))
}

fn policies(policies: &[PolicyCost]) -> String {
    let row = |p: &PolicyCost| {
        let sign = if p.less_than_none_bytes < 0 { "-" } else { "" };
        let added = if p.added_flops == 0.0 { "-".to_owned() } else { units::flops(p.added_flops) };
        vec![
            format!("{}{}", p.policy, if p.chosen { " *" } else { "" }),
            units::bytes(p.saved_bytes),
            units::bytes(p.arena_bytes),
            format!("{sign}{}", units::bytes(p.less_than_none_bytes.unsigned_abs())),
            added,
            format!("{:.1}%", 100.0 * p.added_share),
        ]
    };
    let header = ["policy", "saved for backward", "arena", "less than none", "added FLOPs", "added"];
    let rows: Vec<_> = policies.iter().map(row).collect();
    let recomputed = policies.iter().filter_map(|p| p.recomputed.as_ref());
    let line = |(layers, names): &(String, Vec<String>)| {
        let names = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
        wrapped(&format!("  recomputed in {layers}: {names}"), "    ")
    };
    let recomputed: String = recomputed.flatten().map(line).collect();
    format!(
        "\nrecompute policies (activation checkpointing), one step (* this config's)\n{}{recomputed}",
        table(&header, &rows)
    )
}

fn reshard(costs: &[ReshardCost]) -> String {
    if costs.is_empty() {
        return String::new();
    }
    let row = |c: &ReshardCost| {
        let name = format!("{}{}", c.reshard_after_forward, if c.chosen { " *" } else { "" });
        vec![name, units::bytes(c.arena_bytes), units::bytes(c.sent_bytes)]
    };
    let rows: Vec<_> = costs.iter().map(row).collect();
    let header = ["reshard_after_forward", "arena", "sent by a rank"];
    let title = "ZeRO 3: parameters gathered again for backward, or kept; one step (* this config's)";
    format!("\n{}{}", wrapped(title, "  "), table(&header, &rows))
}

fn scaling(scaling: &[Scaling]) -> String {
    let times = |ratio: f64| format!("×{ratio:.2}");
    let row = |name: &str, value: &dyn Fn(&Scaling) -> Option<f64>| -> Option<Vec<String>> {
        let cells: Option<Vec<String>> = scaling.iter().map(|g| value(g).map(times)).collect();
        Some([vec![name.to_owned()], cells?].concat())
    };
    let mut rows = vec![
        row("parameters", &|g| Some(g.parameters)),
        row("model FLOPs of a step", &|g| Some(g.model_flops)),
        row("hardware FLOPs of a step", &|g| Some(g.hardware_flops)),
        row("arena", &|g| Some(g.arena_bytes)),
    ];
    rows.extend(Class::ALL.iter().map(|c| row(&format!("  {}", c.name()), &|g| g.classes.get(c.name()).copied())));
    let header: Vec<&str> = ["at twice the"].into_iter().chain(scaling.iter().map(|g| g.doubled)).collect();
    let rows: Vec<_> = rows.into_iter().flatten().collect();
    format!("\nscaling (batch: sequences of a micro-batch; width: dim, heads and ffn)\n{}", table(&header, &rows))
}

fn formulas(forms: &[Formula]) -> String {
    let row = |f: &Formula| {
        let difference = f.program - f.closed;
        let shown = match difference == 0.0 {
            true => "0".to_owned(),
            false => format!("{difference:+} ({:+.4}%)", 100.0 * difference / f.closed),
        };
        vec![f.name.to_owned(), whole(f.program), whole(f.closed), shown]
    };
    let rows: Vec<_> = forms.iter().map(row).collect();
    let mut text = format!(
        "\nanalytical formulas (D dim, Q and KV widths of queries and keys, F ffn,\nV vocabulary, L layers, S sequence)\n{}",
        table(&["count", "program", "formula", "difference"], &rows)
    );
    for f in forms {
        let note = f.note.map_or(String::new(), |note| format!("; {note}"));
        text.push_str(&wrapped(&format!("  {} = {}{note}", f.name, f.formula), "    "));
    }
    text
}

/// A count without a fraction, by thousands.
fn whole(x: f64) -> String {
    if x < 1e18 { thousands(x.round() as u64) } else { format!("{x:.6e}") }
}
