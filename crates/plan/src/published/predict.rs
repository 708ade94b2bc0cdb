//! Rows with their programs, and what is predicted of them.

use super::conventions;
use super::hardware::hardware;
use super::memory::StageMemory;
use super::peer::{Described, Description, Peer, describe};
use super::possible;
use super::program::compile;
use super::row::{Refused, Row, read};
use crate::Room;
use crate::parallel::in_parallel;
use lockstep_ir::StepProgram;
use lockstep_ir::program::Lifetime;
use lockstep_sim::{Catalogue, Constants, Framework, GpuSpec, Hardware, Workload};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A file of rows.
pub struct File {
    /// What messages call it.
    pub name: String,
    /// What it holds.
    pub text: String,
}

/// A row that was understood.
#[derive(Clone)]
pub struct Case {
    /// Index of its file.
    pub file: usize,
    /// The row.
    pub row: Row,
    /// The framework that it was measured with.
    pub peer: Peer,
    /// How that runs a step.
    pub framework: Framework,
    /// What it ran on.
    pub hardware: Hardware,
    /// What the row does not say.
    pub assumed: Vec<String>,
    /// Its program, or why the framework crashes on it.
    pub work: Result<Arc<Work>, String>,
}

impl Case {
    /// Whether the row is to be trusted.
    pub fn is_clean(&self) -> bool {
        self.row.flag.is_empty()
    }

    /// The name of the framework, and of fp8 where matmuls are in it.
    pub fn group(&self) -> String {
        format!("{}{}", self.peer.name(), if self.row.is_fp8() { " fp8" } else { "" })
    }

    /// The number format of matmuls, and which scales it has in fp8. Rows of a framework and GPU that share it share a calibration.
    pub fn precision(&self) -> &'static str {
        match &self.row {
            row if row.is_mxfp8() => "mxfp8",
            row if row.is_rowwise() => "fp8 rowwise",
            row if row.is_fp8() => "fp8",
            _ => "16-bit",
        }
    }
}

/// What is known of a program.
pub struct Work {
    /// Work whose cost is estimated.
    pub workload: Workload,
    /// What is held, by pipeline stage.
    pub memory: Vec<StageMemory>,
}

/// All rows of some files.
pub struct Cases {
    /// Those that were understood.
    pub cases: Vec<Case>,
    /// Those that were not, with the index of their file.
    pub refused: Vec<(usize, Refused)>,
}

impl Cases {
    /// Reads files and compiles their rows, equal programs once. `framework` is that of all rows, whatever their sources say; `progress`
    /// hears how many programs there are and how many are compiled.
    pub fn new(
        catalogue: &Catalogue,
        files: &[File],
        framework: Option<Peer>,
        threads: usize,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Self {
        let frameworks = Framework::builtin();
        let mut refused = Vec::new();
        let mut all: Vec<(Case, Option<String>)> = Vec::new();
        let mut programs: BTreeMap<String, Described> = BTreeMap::new();
        for (file, File { text, .. }) in files.iter().enumerate() {
            let (mut rows, bad) = read(text);
            refused.extend(bad.into_iter().map(|r| (file, r)));
            say_interleaving(&mut rows);
            for mut row in rows {
                let described = hardware(catalogue, &row).and_then(|hardware| {
                    conventions::give_time(&mut row, framework, &hardware.gpu)?;
                    possible::check(&row, &hardware.gpu)?;
                    Ok((hardware, describe(&row, framework)?))
                });
                let refuse = |reason: String| (file, Refused { line: row.line, model: row.model.clone(), reason });
                let (hardware, description) = match described {
                    Ok(both) => both,
                    Err(reason) => {
                        refused.push(refuse(reason));
                        continue;
                    }
                };
                let (peer, assumed, work, key) = match description {
                    Description::Crashes(peer, reason) => (peer, Vec::new(), Err(reason), None),
                    Description::Config(d) => {
                        let key = format!("{}{} {}", d.toml, d.recomputed_matmuls, d.peer.name());
                        let described = (d.peer, d.assumed.clone(), Err(String::new()), Some(key.clone()));
                        programs.entry(key).or_insert(*d);
                        described
                    }
                };
                let framework = frameworks.iter().find(|f| f.name == peer.name()).unwrap_or(&frameworks[0]).clone();
                all.push((Case { file, row, peer, framework, hardware, assumed, work }, key));
            }
        }
        let distinct: Vec<(&String, &Described)> = programs.iter().collect();
        let made: Mutex<BTreeMap<&String, Result<Arc<Work>, String>>> = Mutex::new(BTreeMap::new());
        let one = |i: usize| {
            let (key, described) = distinct[i];
            let work = compile(described, "row").and_then(|(_, programs)| Work::new(&programs, described));
            made.lock().unwrap_or_else(PoisonError::into_inner).insert(key, work.map(Arc::new));
        };
        in_parallel(distinct.len(), threads, &one, &|done| progress(done, distinct.len()));
        let made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut cases = Vec::new();
        for (mut case, key) in all {
            match key.as_ref().and_then(|key| made.get(key)) {
                None => cases.push(case),
                Some(Ok(work)) => {
                    case.work = Ok(work.clone());
                    cases.push(case);
                }
                Some(Err(reason)) => {
                    let (line, model) = (case.row.line, case.row.model.clone());
                    refused.push((case.file, Refused { line, model, reason: reason.clone() }));
                }
            }
        }
        refused.sort_by_key(|(file, refused)| (*file, refused.line));
        Self { cases, refused }
    }
}

impl Work {
    pub(super) fn new(programs: &[StepProgram], described: &Described) -> Result<Self, String> {
        let frameworks = Framework::builtin();
        let framework = frameworks.iter().find(|f| f.name == described.peer.name()).unwrap_or(&frameworks[0]);
        let workload = Workload::new(programs, StepProgram::TRAIN, framework).map_err(|error| error.to_string())?;
        let mut memory: Vec<StageMemory> = programs.iter().map(StageMemory::of).collect();
        // After stages without work of ours more micro-batches are in flight, as far as there are more.
        let micro_batches = programs[0].regions.iter().find(|r| r.lifetime == Lifetime::MicroBatch);
        let most = micro_batches.map_or(1.0, |region| region.slots as f64);
        for stage in &mut memory {
            stage.in_flight = (stage.in_flight + described.idle_stages as f64).min(most.max(stage.in_flight));
        }
        Ok(Self { workload, memory })
    }
}

/// Rows of a model and split that do not say how many chunks of layers a rank had take it from the row that does.
fn say_interleaving(rows: &mut [Row]) {
    const MARK: &str = "interleave v=";
    let split = |row: &Row| (row.model.clone(), row.split.tp, row.split.pp);
    let said: BTreeMap<_, String> = rows
        .iter()
        .filter_map(|row| {
            let digits: String = row.notes.split(MARK).nth(1)?.chars().take_while(char::is_ascii_digit).collect();
            Some((split(row), digits))
        })
        .collect();
    for row in rows.iter_mut().filter(|row| !row.notes.contains(MARK)) {
        if let Some(chunks) = said.get(&split(row)) {
            row.notes.push_str(&format!("; {MARK}{chunks}"));
        }
    }
}

/// What is predicted of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Seconds of a step; none where the framework crashes.
    pub step_s: Option<f64>,
    /// Bytes of memory of the device that the source looked at.
    pub memory_bytes: f64,
    /// Whether it runs: no device needs more memory than it has, and the framework does not crash.
    pub runs: bool,
}

impl Case {
    /// By the name of each other framework: ln(predicted ÷ predicted) of the step with its constants beside the framework's own ones.
    pub fn as_others(&self, constants: &Constants) -> BTreeMap<String, f64> {
        let Ok(work) = &self.work else { return BTreeMap::new() };
        let placed = work.workload.on(&self.hardware, &self.framework);
        let seconds = |of: &Framework| placed.price(&constants.terms(of, &self.hardware)).ok();
        let Some(own) = seconds(&self.framework) else { return BTreeMap::new() };
        let others = Framework::builtin().into_iter().filter(|of| {
            Peer::named(&of.name).is_some_and(|peer| peer.kin() != self.peer.kin()) && of.constants_of.is_none()
        });
        others.filter_map(|of| Some((of.name.clone(), (seconds(&of)? / own).ln()))).collect()
    }

    /// Predicts it.
    pub fn predict(&self, constants: &Constants) -> Prediction {
        let terms = constants.terms(&self.framework, &self.hardware);
        let Ok(work) = &self.work else { return Prediction { step_s: None, memory_bytes: 0.0, runs: false } };
        let step_s = work.workload.on(&self.hardware, &self.framework).price(&terms).ok();
        let (memory_bytes, largest) = self.predicted_memory(&terms);
        let runs = largest <= room(&self.hardware.gpu).bytes as f64;
        Prediction { step_s, memory_bytes, runs }
    }
}

/// What runs of other frameworks have of a GPU: its nominal size. Their memory is that of PyTorch's allocator; NCCL's buffers and
/// what the allocator cannot use come besides. Of nanotron's sweep, 94.2% are said right whether they ran with it, and 93.5% with all that
/// the driver leaves to a process.
pub(super) fn room(gpu: &GpuSpec) -> Room {
    Room { bytes: gpu.nominal_memory_bytes, ..Room::of(gpu) }
}

/// Predicts all.
pub fn predict(cases: &[Case], constants: &Constants, threads: usize) -> Vec<Prediction> {
    let none = Prediction { step_s: None, memory_bytes: 0.0, runs: false };
    let all: Vec<Mutex<Prediction>> = cases.iter().map(|_| Mutex::new(none)).collect();
    let one = |i: usize| *all[i].lock().unwrap_or_else(PoisonError::into_inner) = cases[i].predict(constants);
    in_parallel(cases.len(), threads, &one, &|_| {});
    all.into_iter().map(|p| p.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_frameworks_have_the_nominal_size_of_a_gpu() {
        let all = Catalogue::builtin();
        let h100 = all.gpu("h100").unwrap();
        let (theirs, ours) = (room(h100), Room::of(h100));
        assert_eq!((theirs.bytes, theirs.place), (80_000_000_000, ours.place));
        assert!(theirs.bytes < ours.bytes);
    }

    /// The same run in bf16 and in fp8.
    fn both() -> Vec<Case> {
        of(&["bf16", "float8"])
    }

    /// The same run in these formats, in the words of sources.
    fn of(precisions: &[&str]) -> Vec<Case> {
        let row = |precision: &str| {
            format!(
                "torchtitan,llama-tiny,4,4096,32,8,14336,32768,4096,8,H100,1,1,8,3,2,16,none,{precision},torch.compile,1.0\n"
            )
        };
        let header = "source,model,layers,hidden,heads,kv_heads,ffn,vocab,seq,gpus,gpu,tp,pp,dp,zero,microbatch,global_batch,\
                      recompute,precision,notes,step_time_s\n";
        let text: String = precisions.iter().map(|precision| row(precision)).collect();
        let files = [File { name: "rows.csv".into(), text: format!("{header}{text}") }];
        let Cases { cases, refused } = Cases::new(&Catalogue::builtin(), &files, None, 2, &|_, _| {});
        assert!(refused.is_empty(), "{refused:?}");
        cases
    }

    #[test]
    fn scales_of_rows_are_in_the_program_and_mxfp8_is_marked_and_fixes_no_constant() {
        let cases = of(&["float8 tensorwise", "float8 rowwise", "mxfp8_cublas", "float8 (fsdp float8 all-gather)"]);
        let constants = Constants::builtin();
        let seconds: Vec<f64> = cases.iter().map(|case| case.predict(&constants).step_s.unwrap()).collect();
        assert!(seconds[1] != seconds[0], "{seconds:?}");
        assert_eq!((seconds[2], seconds[3]), (seconds[0], seconds[0]));
        let marked: Vec<String> = cases.iter().map(|case| case.row.not_modelled().join("; ")).collect();
        let mx = "scales of 32 elements (MXFP8): predicted with one per tensor";
        assert_eq!(marked, ["", "", mx, "all-gathers in fp8: predicted in bf16"]);
        let files = ["rows".to_owned()];
        let without = super::super::Without::Nothing;
        let fitted = super::super::fit(&cases[2..3], &files, &constants, &without, 2, 2, &|_, _, _| {}).constants;
        assert_eq!(fitted.all, constants.all);
    }

    #[test]
    fn a_row_in_fp8_is_a_program_in_fp8_whose_quantisation_takes_time() {
        let cases = both();
        assert_eq!(
            (cases[0].group(), cases[1].group()),
            ("torchtitan-compile".into(), "torchtitan-compile fp8".into())
        );
        let mut constants = Constants::builtin();
        let times = |constants: &Constants| {
            let [bf16, fp8] = [0, 1].map(|i: usize| cases[i].predict(constants).step_s.unwrap());
            (bf16, fp8)
        };
        let (bf16, fp8) = times(&constants);
        assert!(fp8 < bf16 && fp8 > 0.5 * bf16, "{bf16} {fp8}");
        assert!(constants.set("quantise.passes", "torchtitan-compile", 3.0));
        let slower = times(&constants);
        assert!(slower.0 == bf16 && slower.1 > fp8, "{slower:?}");
    }

    #[test]
    fn rows_in_fp8_fix_the_constants_of_fp8_and_no_others() {
        let cases = both();
        let start = Constants::builtin();
        let fitted = |cases: &[Case]| {
            let files = ["rows".to_owned()];
            super::super::fit(cases, &files, &start, &super::super::Without::Nothing, 2, 2, &|_, _, _| {}).constants
        };
        for (of_fp8, case) in [(false, &cases[..1]), (true, &cases[1..])] {
            let after = fitted(case);
            let moved = start.all.iter().zip(&after.all).filter(|(a, b)| a.value != b.value);
            let moved: Vec<bool> = moved.map(|(a, _)| a.is_of_fp8()).collect();
            assert!(!moved.is_empty() && moved.iter().all(|fp8| *fp8 == of_fp8), "{moved:?}");
        }
    }
}
