//! `lockstep bench collectives` on threads, on processes that it starts, and on processes that others started.

mod common;
mod launched;
mod layouts;

use common::{Place, free_port};
use launched::{end, rank_of, said, spawn};
use lockstep_exec::comm::measure::Pattern;
use serde_json::Value;
use std::time::Duration;

const SMALL: [&str; 8] = ["bench", "collectives", "--to", "16KiB", "--seconds", "0.001", "--format", "json"];

/// What must be true of every world.
fn check(text: &str, world: &str, ranks: usize) {
    let found: Value = serde_json::from_str(text).unwrap();
    assert_eq!((&found["world"], &found["ranks"]), (&world.into(), &ranks.into()), "{found}");
    assert_eq!(found["hosts"][0]["ranks"], ranks, "{found}");
    let rows = found["collectives"].as_array().unwrap();
    assert_eq!(rows.len(), Pattern::ALL.len() * 3, "{found}");
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap();
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
        assert!(close(number("algorithm_bytes_per_s"), number("bytes") / number("seconds")), "{row}");
        let factor = match row["collective"].as_str().unwrap() {
            "all_reduce" => 2.0 * (ranks - 1) as f64 / ranks as f64,
            "reduce_scatter" | "all_gather" | "all_to_all" => (ranks - 1) as f64 / ranks as f64,
            "shift" | "send_receive" => 1.0,
            other => Pattern::ALL.iter().find(|p| p.name() == other).unwrap().bus_factor(ranks),
        };
        assert!(close(number("bus_bytes_per_s"), factor * number("algorithm_bytes_per_s")), "{row}");
    }
}

#[test]
fn every_world_is_measured() {
    let place = Place::new();
    check(&place.ok(&[&SMALL[..], &["--ranks", "3"]].concat()), "threads", 3);
    check(&place.ok(&[&SMALL[..], &["--ranks", "4", "--processes"]].concat()), "tcp", 4);
    let port = free_port();
    let [first, other] = [0, 1].map(|rank| spawn(rank_of(&place, (rank, 2), &port, &SMALL)));
    let [first, other] = [first, other].map(|child| end(child, Duration::from_secs(60)));
    assert!(first.status.success() && other.status.success(), "{}{}", said(&first), said(&other));
    check(&String::from_utf8(first.stdout).unwrap(), "tcp", 2);
    assert!(other.stdout.is_empty());
}

#[test]
fn a_table_has_units_and_wrong_requests_are_refused() {
    let place = Place::new();
    let bench = |more: &[&'static str]| [&["bench", "collectives", "--seconds", "0.001"], more].concat();
    let text = place.ok(&bench(&["--only", "all_gather", "--from", "4KiB", "--to", "64KiB"]));
    let mut lines = text.lines();
    assert!(lines.next().unwrap().starts_with("2 ranks as threads (2 on "), "{text}");
    let (header, rows): (&str, Vec<&str>) = (lines.next().unwrap(), lines.collect());
    assert!(header.contains("algorithm bandwidth") && header.contains("bus bandwidth"), "{text}");
    assert_eq!(rows.len(), 3, "{text}");
    assert!(rows.iter().all(|row| row.contains(" µs ") && row.matches(" GB/s").count() == 2), "{text}");
    assert!(place.fails(2, &bench(&["--ranks", "1"])).contains("hint: --ranks 2"));
    assert!(place.fails(2, &bench(&["--from", "8KiB", "--to", "4KiB"])).contains("hint: sizes go up"));
    assert!(place.fails(2, &bench(&["--only", "all_scatter"])).contains("choose one of all_reduce, "));
}
