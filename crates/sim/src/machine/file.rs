//! A machine's profile as a data file.

use super::{Family, MachineProfile, Point, Setting, Table};
use crate::{Result, SimError};
use lockstep_ir::{Collective, DType, OpKind};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use toml::Spanned;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    processor: String,
    saved_unix_s: u64,
    setting: Vec<SettingEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SettingEntry {
    ranks: Spanned<usize>,
    threads: usize,
    units: usize,
    memory_gb_per_s: Spanned<f64>,
    matmul_gflops: BTreeMap<String, Spanned<f64>>,
    kernel_gap_us: f64,
    /// Files from before it have it in the gap.
    #[serde(default)]
    clock_us: f64,
    slowdown: Spanned<f64>,
    overlap_cost: f64,
    table: Vec<TableEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TableEntry {
    op: Spanned<String>,
    dtype: Spanned<String>,
    columns: Spanned<Vec<String>>,
    points: Vec<Spanned<Vec<f64>>>,
}

/// The column of the time.
const TIME: &str = "us";

/// The types that matmuls are measured in, by name.
fn dtype(name: &str) -> Option<DType> {
    DType::ALL.into_iter().find(|d| d.name() == name)
}

impl MachineProfile {
    /// Reads a file; what is wrong with it is named by line.
    pub fn parse(file: &str, text: &str) -> Result<Self> {
        let refuse = |reason: String| SimError::file(file, reason, "measure it again: lockstep bench --save NAME");
        let at = |span: std::ops::Range<usize>, reason: String| {
            let line = 1 + text.as_bytes().iter().take(span.start).filter(|b| **b == b'\n').count();
            refuse(format!("line {line}: {reason}"))
        };
        let mut parsed: File = toml::from_str(text).map_err(|e| refuse(e.to_string().trim_end().to_owned()))?;
        let positive = |value: &Spanned<f64>, what: &str| match *value.get_ref() {
            x if x > 0.0 && x.is_finite() => Ok(x),
            x => Err(at(value.span(), format!("{what} = {x} is not above 0"))),
        };
        let mut settings = Vec::new();
        for entry in std::mem::take(&mut parsed.setting) {
            let mut flops_per_s = BTreeMap::new();
            for (name, rate) in &entry.matmul_gflops {
                let unknown = || at(rate.span(), format!("matmul_gflops.{name}: there is no such type"));
                flops_per_s.insert(dtype(name).ok_or_else(unknown)?, 1e9 * positive(rate, "matmul_gflops")?);
            }
            if *entry.ranks.get_ref() == 0 {
                return Err(at(entry.ranks.span(), "ranks = 0 measure nothing".into()));
            }
            let tables = entry.table.into_iter().map(|table| table.read(&at)).collect::<Result<_, _>>()?;
            settings.push(Setting {
                ranks: entry.ranks.into_inner(),
                threads: entry.threads,
                units: entry.units,
                bytes_per_s: 1e9 * positive(&entry.memory_gb_per_s, "memory_gb_per_s")?,
                flops_per_s,
                kernel_gap_s: 1e-6 * entry.kernel_gap_us,
                clock_s: 1e-6 * entry.clock_us,
                slowdown: positive(&entry.slowdown, "slowdown")?,
                overlap_cost: entry.overlap_cost,
                tables,
            });
        }
        let File { name, processor, saved_unix_s, .. } = parsed;
        Ok(Self { name, processor, saved_unix_s, settings })
    }

    /// As a data file, which [`MachineProfile::parse`] reads to the same.
    pub fn to_toml(&self) -> String {
        let mut text = String::from(
            "# Written by `lockstep bench --save`: how long kernels and collectives take on this machine, by size.\n\
             # explain, train and bench train use it when they run here.\n\n",
        );
        let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
        let _ = writeln!(text, "name = {}\nprocessor = {}", quoted(&self.name), quoted(&self.processor));
        let _ = writeln!(text, "saved_unix_s = {}", self.saved_unix_s);
        for s in &self.settings {
            let rates: Vec<String> = s.flops_per_s.iter().map(|(d, rate)| format!("{d} = {:?}", rate / 1e9)).collect();
            let Setting { ranks, threads, units, slowdown, overlap_cost, .. } = s;
            let (memory, matmul) = (s.bytes_per_s / 1e9, rates.join(", "));
            let [gap, clock] = [s.kernel_gap_s, s.clock_s].map(|seconds| seconds * 1e6);
            let _ = writeln!(
                text,
                "\n[[setting]]\nranks = {ranks}\nthreads = {threads}\nunits = {units}\nmemory_gb_per_s = {memory:?}\n\
                 matmul_gflops = {{ {matmul} }}\nkernel_gap_us = {gap:?}\nclock_us = {clock:?}\nslowdown = {slowdown:?}\noverlap_cost = {overlap_cost:?}"
            );
            for table in &s.tables {
                table.write(&mut text);
            }
        }
        text
    }
}

impl TableEntry {
    fn read(self, at: &dyn Fn(std::ops::Range<usize>, String) -> SimError) -> Result<Table> {
        let (op, span) = (self.op.get_ref().clone(), self.op.span());
        let collective = Collective::ALL.iter().any(|pattern| pattern.name() == op);
        if !collective && !OpKind::ALL.iter().flat_map(|kind| kind.rows()).any(|row| row.name == op) {
            return Err(at(span, format!("there is no op {op:?}")));
        }
        let (name, span) = (self.dtype.get_ref(), self.dtype.span());
        let dtype = dtype(name).ok_or_else(|| at(span, format!("there is no type {name:?}")))?;
        let columns = self.columns.get_ref();
        let (time, size) = columns.split_last().map_or(("", &[][..]), |(time, size)| (time.as_str(), size));
        let family = Family::ALL.into_iter().find(|family| family.columns() == size).filter(|_| time == TIME);
        let family = family.ok_or_else(|| {
            let known: Vec<String> = Family::ALL.iter().map(|f| f.columns().join(", ")).collect();
            at(
                self.columns.span(),
                format!("no op has these columns: it is one of {}, then {TIME}", known.join("; or ")),
            )
        })?;
        let mut points = Vec::new();
        for point in self.points {
            let numbers = point.get_ref();
            if numbers.len() != columns.len() || numbers.iter().any(|x| !(*x > 0.0 && x.is_finite())) {
                let reason = format!("a point has {} numbers above 0: {}", columns.len(), columns.join(", "));
                return Err(at(point.span(), reason));
            }
            let (size, time) = numbers.split_at(numbers.len() - 1);
            points.push(Point { size: size.to_vec(), seconds: 1e-6 * time[0] });
        }
        Ok(Table { op, dtype, family, points })
    }
}

impl Table {
    fn write(&self, text: &mut String) {
        let columns: Vec<String> = self.family.columns().iter().chain(&[TIME]).map(|c| format!("\"{c}\"")).collect();
        let _ = writeln!(
            text,
            "\n[[setting.table]]\nop = \"{}\"\ndtype = \"{}\"\ncolumns = [{}]\npoints = [",
            self.op,
            self.dtype,
            columns.join(", ")
        );
        for Point { size, seconds } in &self.points {
            let numbers: Vec<String> = size.iter().chain(&[seconds * 1e6]).map(|x| format!("{x:?}")).collect();
            let _ = writeln!(text, "    [{}],", numbers.join(", "));
        }
        let _ = writeln!(text, "]");
    }
}
