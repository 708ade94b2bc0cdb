//! Rows of published measurements: what they say, and which of them contradict themselves.

use super::csv::{self, Record};
use serde::Serialize;
use std::collections::BTreeMap;

/// One measured run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The line of its file that it stands on.
    pub line: usize,
    /// Who published it.
    pub source: String,
    /// The model's name.
    pub model: String,
    /// The device, as the source calls it.
    pub gpu: String,
    /// How many.
    pub gpus: usize,
    /// What the model is made of.
    #[serde(skip)]
    pub shape: PublishedShape,
    /// How the work was split.
    #[serde(skip)]
    pub split: Split,
    /// Activation checkpointing, in the source's words.
    #[serde(skip)]
    pub recompute: String,
    /// Number formats, in the source's words.
    pub precision: String,
    /// What came out; nothing where the run failed.
    #[serde(skip)]
    pub measured: Option<Measured>,
    /// Why the row is not to be trusted; empty where it is.
    pub flag: String,
    /// What else the source says.
    #[serde(skip)]
    pub notes: String,
}

impl Row {
    /// Whether matmuls of layers were in fp8.
    pub fn is_fp8(&self) -> bool {
        let precision = self.precision.to_lowercase();
        ["fp8", "float8"].iter().any(|word| precision.contains(word))
    }

    /// Whether each row of an operand had a scale of its own, in fp8.
    pub fn is_rowwise(&self) -> bool {
        self.is_fp8() && self.precision.to_lowercase().contains("rowwise")
    }

    /// Whether it was in MXFP8: a scale for every 32 elements.
    pub fn is_mxfp8(&self) -> bool {
        self.precision.to_lowercase().contains("mxfp8")
    }

    /// Whether weights were gathered in fp8.
    fn gathers_fp8(&self) -> bool {
        self.is_fp8() && self.precision.to_lowercase().contains("all-gather")
    }

    /// What of the row its config does not have.
    pub fn not_modelled(&self) -> Vec<&'static str> {
        let parts = [
            (self.is_mxfp8(), "scales of 32 elements (MXFP8): predicted with one per tensor"),
            (self.gathers_fp8(), "all-gathers in fp8: predicted in bf16"),
        ];
        parts.into_iter().filter_map(|(is, what)| is.then_some(what)).collect()
    }
}

/// The shape of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PublishedShape {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, where they are given.
    pub kv_heads: Option<usize>,
    /// Width of the MLP, where it is given.
    pub ffn: Option<usize>,
    /// Vocabulary, where it is given.
    pub vocab: Option<usize>,
    /// Sequence length.
    pub seq: usize,
    /// Parameters, where they are given.
    pub params: Option<f64>,
}

/// How the work was split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// Data-parallel ranks.
    pub dp: usize,
    /// Context-parallel ranks.
    pub cp: usize,
    /// ZeRO stage.
    pub zero: u8,
    /// Sequences that a rank computes at once, where that is given.
    pub micro_batch: Option<usize>,
    /// Sequences of a step.
    pub global_batch: usize,
}

/// What was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// Seconds of a step.
    pub step_s: Option<f64>,
    /// Bytes of memory of a device.
    pub memory_bytes: Option<f64>,
}

/// A row that cannot be used, or a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// The line.
    pub line: usize,
    /// Whose row it is, where that could be read.
    pub model: String,
    /// Why.
    pub reason: String,
}

/// Columns without which no row can be read.
const NEEDED: [&str; 12] =
    ["model", "layers", "hidden", "heads", "seq", "gpus", "gpu", "tp", "pp", "dp", "microbatch", "global_batch"];

/// The most by which step time and tokens per second may disagree.
const DISAGREEMENT: f64 = 0.05;

/// The rows of a file, and those that contradict themselves or miss something. A column that is missing refuses the file.
pub fn read(text: &str) -> (Vec<Row>, Vec<Refused>) {
    let mut records = csv::records(text).into_iter();
    let refused = |line: usize, reason: String| Refused { line, model: String::new(), reason };
    let Some(header) = records.next() else { return (Vec::new(), vec![refused(1, "the file is empty".into())]) };
    let columns: BTreeMap<&str, usize> = header.fields.iter().enumerate().map(|(i, name)| (name.trim(), i)).collect();
    let mut missing: Vec<String> =
        NEEDED.iter().filter(|name| !columns.contains_key(**name)).map(|name| format!("`{name}`")).collect();
    if !columns.contains_key("step_time_s") && !columns.contains_key("tokens_per_s_per_gpu") {
        missing.push("`step_time_s` or `tokens_per_s_per_gpu`".into());
    }
    if !missing.is_empty() {
        let reason = format!("the header has no column {}, so no row of the file can be read", missing.join(", "));
        return (Vec::new(), vec![refused(header.line, reason)]);
    }
    let (mut rows, mut bad) = (Vec::new(), Vec::new());
    for record in records {
        match (Fields { columns: &columns, record: &record }).row(header.fields.len()) {
            Ok(row) => rows.push(row),
            Err(reason) => {
                let model = columns.get("model").and_then(|at| record.fields.get(*at)).cloned().unwrap_or_default();
                bad.push(Refused { line: record.line, model, reason });
            }
        }
    }
    (rows, bad)
}

struct Fields<'a> {
    columns: &'a BTreeMap<&'a str, usize>,
    record: &'a Record,
}

impl Fields<'_> {
    fn text(&self, column: &str) -> &str {
        self.columns.get(column).and_then(|at| self.record.fields.get(*at)).map_or("", |field| field.trim())
    }

    /// A positive number; `None` where the field is empty.
    fn number(&self, column: &str, unit: &str) -> Result<Option<f64>, String> {
        let text = self.text(column);
        if text.is_empty() {
            return Ok(None);
        }
        let number = text.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0);
        number.map(Some).ok_or_else(|| format!("{column} = {text:?} is not a positive number of {unit}"))
    }

    /// A whole number from 1; `None` where the field is empty.
    fn optional_count(&self, column: &str) -> Result<Option<usize>, String> {
        let whole = |x: f64| (x.fract() == 0.0 && x <= 1e9).then_some(x as usize);
        match self.number(column, "things")? {
            None => Ok(None),
            Some(x) => {
                let text = self.text(column);
                whole(x).map(Some).ok_or_else(|| format!("{column} = {text:?} is not a whole number in range"))
            }
        }
    }

    fn count(&self, column: &str) -> Result<usize, String> {
        self.optional_count(column)?.ok_or_else(|| format!("{column} is not given"))
    }

    fn row(&self, columns: usize) -> Result<Row, String> {
        let fields = self.record.fields.len();
        if fields != columns {
            return Err(format!("has {fields} fields, and the header has {columns}"));
        }
        let shape = PublishedShape {
            layers: self.count("layers")?,
            hidden: self.count("hidden")?,
            heads: self.count("heads")?,
            kv_heads: self.optional_count("kv_heads")?,
            ffn: self.optional_count("ffn")?,
            vocab: self.optional_count("vocab")?,
            seq: self.count("seq")?,
            params: self.number("params", "parameters")?,
        };
        let zero = self.text("zero");
        let zero = match zero.chars().next() {
            None => 0,
            Some(digit @ '0'..='3') => digit as u8 - b'0',
            Some(_) => return Err(format!("zero = {zero:?} does not start with a stage from 0 to 3")),
        };
        let split = Split {
            tp: self.count("tp")?,
            pp: self.count("pp")?,
            dp: self.count("dp")?,
            cp: self.optional_count("cp")?.unwrap_or(1),
            zero,
            micro_batch: self.optional_count("microbatch")?,
            global_batch: self.count("global_batch")?,
        };
        let gpus = self.count("gpus")?;
        let Split { tp, pp, dp, cp, .. } = split;
        if [tp, pp, dp, cp].iter().try_fold(1usize, |a, b| a.checked_mul(*b)) != Some(gpus) {
            return Err(format!("tp × pp × dp × cp = {tp} × {pp} × {dp} × {cp}, and gpus = {gpus}"));
        }
        if let Some(ep) = self.optional_count("ep")?.filter(|ep| *ep > 1) {
            return Err(format!("ep = {ep}: rows of expert parallelism are not compared yet"));
        }
        let global = split.global_batch;
        let micro = split.micro_batch.unwrap_or(1);
        if !global.is_multiple_of(dp * micro) {
            return Err(format!("microbatch × dp = {micro} × {dp} does not divide global_batch = {global}"));
        }
        let notes = self.text("notes").to_owned();
        let step = self.number("step_time_s", "seconds")?;
        let rate = self.number("tokens_per_s_per_gpu", "tokens per second")?;
        let by_rate = rate.map(|rate| (global * shape.seq) as f64 / (rate * gpus as f64));
        if let (Some(step), Some(other)) = (step, by_rate)
            && (step / other - 1.0).abs() > DISAGREEMENT
        {
            return Err(format!("step_time_s = {step} s, and by tokens_per_s_per_gpu a step takes {other:.4} s"));
        }
        let memory_bytes = self.number("mem_gb", "GiB")?.map(|gib| gib * f64::from(1 << 30));
        let lower = notes.to_lowercase();
        let failed = ["crash", "oom", "out of memory", "failed"].iter().any(|word| lower.contains(word));
        let measured = Measured { step_s: step.or(by_rate), memory_bytes };
        let measured = match measured {
            Measured { step_s: None, memory_bytes: None } if failed => None,
            Measured { step_s: None, .. } => {
                return Err("neither step_time_s nor tokens_per_s_per_gpu is given".into());
            }
            some => Some(some),
        };
        Ok(Row {
            line: self.record.line,
            source: self.text("source").to_owned(),
            model: self.text("model").to_owned(),
            gpu: self.text("gpu").to_owned(),
            gpus,
            shape,
            split,
            recompute: self.text("recompute").to_owned(),
            precision: self.text("precision").to_owned(),
            measured,
            flag: self.text("flag").to_owned(),
            notes,
        })
    }
}
