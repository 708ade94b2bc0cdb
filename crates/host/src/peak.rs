//! What MFU is a share of: the vendor's figure of a GPU, or the matmul peak of this machine's CPU.
//!
//! A CPU's peak is that of all its cores. It is measured once, kept beside the machine profiles and the same for all runs here until
//! `lockstep bench` measures it again: runs that are compared with each other have one denominator, and a busy moment at the start of one
//! of them does not change it.

use crate::hardware::machines_folder;
use lockstep_exec::{ExecError, cpu};
use lockstep_ir::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// What MFU is a share of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peak {
    /// FLOP per second.
    pub flops_per_s: f64,
    /// What it is: `published peak`, or `matmul peak of the CPU in bf16, measured 2026-11-16`.
    pub name: String,
    /// What it is the peak of. Numbers of the same device stand for the same thing, whenever they were measured.
    pub of: String,
}

/// The name of the file in the folder of machine profiles.
const FILE: &str = "cpu-peaks.json";

/// A measurement that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Measured {
    flops_per_s: f64,
    unix_s: u64,
}

/// The file: by processor, then by type of numbers. A home folder may be that of several machines.
type Kept = BTreeMap<String, BTreeMap<String, Measured>>;

/// The peak of the CPU, kept or measured now.
pub(crate) fn of_cpu(processor: &str, compute: DType) -> Result<Peak, ExecError> {
    let found = kept_or(file().as_deref(), processor, compute, &|| cpu::peaks::matmul(cpu::cores(), compute))?;
    Ok(named(processor, compute, found))
}

/// Measures the peak of the CPU again, for all runs from now on.
pub(crate) fn renew_cpu(processor: &str, compute: DType) -> Result<Peak, ExecError> {
    let found = measured(cpu::peaks::matmul(cpu::cores(), compute)?);
    if let Some(file) = file() {
        keep(&file, processor, compute, found);
    }
    Ok(named(processor, compute, found))
}

fn named(processor: &str, compute: DType, Measured { flops_per_s, unix_s }: Measured) -> Peak {
    let name = format!("matmul peak of the CPU in {compute}, measured {}", date(unix_s));
    Peak { flops_per_s, name, of: format!("{processor}, {compute}") }
}

fn file() -> Option<PathBuf> {
    Some(machines_folder()?.join(FILE))
}

fn measured(flops_per_s: f64) -> Measured {
    Measured { flops_per_s, unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()) }
}

fn kept_or(
    file: Option<&Path>,
    processor: &str,
    compute: DType,
    measure: &dyn Fn() -> Result<f64, ExecError>,
) -> Result<Measured, ExecError> {
    let Some(file) = file else { return Ok(measured(measure()?)) };
    let known = || read(file).get(processor)?.get(compute.name()).copied().filter(|m| m.flops_per_s > 0.0);
    if let Some(known) = known() {
        return Ok(known);
    }
    let found = measured(measure()?);
    // Another run may have been first: all take the same.
    if let Some(known) = known() {
        return Ok(known);
    }
    keep(file, processor, compute, found);
    Ok(found)
}

/// What is kept; a file that is not there or cannot be read has nothing.
fn read(file: &Path) -> Kept {
    std::fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

/// Keeps a measurement. A folder that cannot be written costs the measurement at the next start, nothing else.
fn keep(file: &Path, processor: &str, compute: DType, found: Measured) {
    let mut kept = read(file);
    kept.entry(processor.to_owned()).or_default().insert(compute.name().to_owned(), found);
    let write = || {
        std::fs::create_dir_all(file.parent()?).ok()?;
        let draft = file.with_extension(format!("json.{}", std::process::id()));
        std::fs::write(&draft, serde_json::to_vec_pretty(&kept).ok()?).ok()?;
        std::fs::rename(&draft, file).ok()
    };
    let _ = write();
}

/// `2026-11-16`, the day (UTC) of a time: the civil calendar from a count of days.
pub fn date(unix_s: u64) -> String {
    let days = unix_s / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Years begin in March here.
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year_of_era + u64::from(month <= 2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_peak_is_measured_once_per_processor_and_type_and_renewed_when_asked() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("machines/cpu-peaks.json");
        let speed = Cell::new(100.0);
        let get = |processor: &str, compute| {
            let found = kept_or(Some(&file), processor, compute, &|| {
                speed.set(speed.get() + 1.0);
                Ok(speed.get())
            });
            found.unwrap().flops_per_s
        };
        // However busy the machine is at later starts.
        assert_eq!([get("a", DType::F32), get("a", DType::F32), get("a", DType::F32)], [101.0; 3]);
        assert_eq!([get("a", DType::BF16), get("b", DType::F32), get("a", DType::F32)], [102.0, 103.0, 101.0]);
        keep(&file, "a", DType::F32, measured(500.0));
        assert_eq!([get("a", DType::F32), get("a", DType::BF16)], [500.0, 102.0]);
        // What cannot be read is measured again.
        std::fs::write(&file, "{").unwrap();
        assert_eq!([get("a", DType::F32), get("a", DType::F32)], [104.0; 2]);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let file = dir.path().join("file/cpu-peaks.json");
        assert_eq!(kept_or(Some(&file), "a", DType::F32, &|| Ok(7.0)).unwrap().flops_per_s, 7.0);
        assert_eq!(kept_or(None, "a", DType::F32, &|| Ok(8.0)).unwrap().flops_per_s, 8.0);
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(951_782_400), "2000-02-29");
        assert_eq!(date(1_794_787_200), "2026-11-16");
        let peak = named("cpu x", DType::BF16, Measured { flops_per_s: 1e12, unix_s: 1_794_787_200 });
        assert_eq!(peak.name, "matmul peak of the CPU in bf16, measured 2026-11-16");
    }
}
