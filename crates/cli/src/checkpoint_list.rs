//! `lockstep checkpoint list`.

use crate::Format;
use crate::failure::Failure;
use crate::table::table;
use lockstep_ir::units;
use lockstep_rundir::{CheckpointSummary, checkpoints};
use serde_json::json;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A run directory.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// How to print them.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let found = checkpoints(&args.run)?;
    let text = || match found.is_empty() {
        true => format!("{}: no checkpoints yet\n", args.run.display()),
        false => table(&["step", "size", "saved", "val loss", ""], &found.iter().map(row).collect::<Vec<_>>()),
    };
    args.format.print(|| json!({ "checkpoints": found }), text)
}

fn row(checkpoint: &CheckpointSummary) -> Vec<String> {
    let unknown = || "-".to_owned();
    vec![
        checkpoint.step.to_string(),
        units::bytes(checkpoint.bytes),
        checkpoint.unix_s.map_or_else(unknown, utc),
        checkpoint.val_loss.map_or_else(unknown, |loss| format!("{loss:.4}")),
        if checkpoint.whole { "" } else { "not whole" }.to_owned(),
    ]
}

/// `2026-11-15 16:02:34 UTC`.
fn utc(unix_s: f64) -> String {
    let seconds = unix_s as i64;
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{:02} UTC", second % 60)
}

/// Year, month and day of a day counted from 1970: years are taken to begin in March, so that a leap day ends one.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let (day, month) =
        (day_of_year - (153 * shifted + 2) / 5 + 1, if shifted < 10 { shifted + 3 } else { shifted - 9 });
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (unix_s, text) in [
            (0.0, "1970-01-01 00:00:00 UTC"),
            (951_782_399.9, "2000-02-28 23:59:59 UTC"),
            (951_782_400.0, "2000-02-29 00:00:00 UTC"),
            (1_794_758_554.0, "2026-11-15 16:02:34 UTC"),
            (4_107_542_400.0, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(unix_s), text);
        }
    }
}
