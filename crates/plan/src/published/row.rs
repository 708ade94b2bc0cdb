//! Rows of published measurements: what they say, and which of them contradict themselves.

use super::csv::{self, Record};
use super::shapes::{KnownModel, layers_of, named};
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
    /// The model that its name means, where sizes are not given or do not say all.
    #[serde(skip)]
    pub known: Option<KnownModel>,
    /// How fast it was, where only FLOPs are given.
    #[serde(skip)]
    pub rate: Option<FlopRate>,
    /// What the row does not say and its reading takes for granted.
    #[serde(skip)]
    pub assumed: Vec<String>,
}

/// A rate of FLOPs, by which a step takes as long as its source's count of FLOPs says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FlopRate {
    /// FLOP per second of a GPU.
    PerGpu(f64),
    /// A share of the peak: model FLOPs utilization (MFU).
    OfPeak(f64),
}

impl FlopRate {
    /// The column that it comes from.
    pub fn column(self) -> &'static str {
        match self {
            FlopRate::PerGpu(_) => "tflops_per_gpu",
            FlopRate::OfPeak(_) => "mfu",
        }
    }
}

impl Row {
    /// Whether matmuls of layers were in fp8.
    pub fn is_fp8(&self) -> bool {
        let precision = self.precision.to_lowercase();
        ["fp8", "float8"].iter().any(|word| precision.contains(word))
    }

    /// Whether scales were those of earlier steps, in fp8.
    pub fn is_delayed(&self) -> bool {
        self.is_fp8() && ["delayed", "fp8-ds"].iter().any(|word| self.precision.to_lowercase().contains(word))
    }

    /// Whether each row of an operand had a scale of its own, in fp8.
    pub fn is_rowwise(&self) -> bool {
        self.is_fp8() && self.precision.to_lowercase().contains("rowwise")
    }

    /// Whether it was in MXFP8: a scale for every 32 elements.
    pub fn is_mxfp8(&self) -> bool {
        ["mxfp8", "fp8-mx", "fp8_mx"].iter().any(|word| self.precision.to_lowercase().contains(word))
    }

    /// Whether weights were gathered in fp8.
    fn gathers_fp8(&self) -> bool {
        self.is_fp8() && self.precision.to_lowercase().contains("all-gather")
    }

    /// Whether its model is a GPT: an MLP of two matmuls.
    pub fn is_gpt(&self) -> bool {
        let model = self.model.to_lowercase();
        let named = ["gpt", "mpt", "opt", "bloom", "mt-nlg"].iter().any(|name| model.contains(name));
        let mixture = self.known.as_ref().is_some_and(|known| known.active_experts.is_some());
        !mixture && (named || (!model.contains("llama") && self.shape.ffn == Some(4 * self.shape.hidden)))
    }

    /// Whether its model has an MLP of two matmuls and fewer key heads than heads, as no GPT has.
    pub fn is_ungated(&self) -> bool {
        self.is_gpt() && self.shape.kv_heads.is_some_and(|kv_heads| kv_heads != self.shape.heads)
    }

    /// What of the row its config does not have.
    pub fn not_modelled(&self) -> Vec<&'static str> {
        let parts = [
            (self.is_mxfp8(), "scales of 32 elements (MXFP8): predicted with one per tensor"),
            (self.gathers_fp8(), "all-gathers in fp8: predicted in bf16"),
            (
                self.is_ungated(),
                "an MLP without a gate: predicted with a gate and two thirds of its width, which are as many FLOPs",
            ),
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
    /// Expert-parallel ranks, which are among the data-parallel ones.
    pub ep: usize,
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

/// Columns of which one says how fast a run was.
const SPEEDS: [&str; 4] = ["step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"];

/// What people write where there is nothing to write.
const NOTHING: [&str; 9] = ["n/a", "na", "nan", "-", "–", "none", "null", "unknown", "?"];

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
    if !SPEEDS.iter().any(|name| columns.contains_key(name)) {
        missing.push(SPEEDS.map(|name| format!("`{name}`")).join(" or "));
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
        if text.is_empty() || NOTHING.contains(&text.to_lowercase().as_str()) {
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
        let mut assumed = Vec::new();
        let (shape, known) = self.shape(&mut assumed)?;
        let zero = self.text("zero");
        let zero = match zero.chars().next() {
            None => 0,
            Some(digit @ '0'..='3') => digit as u8 - b'0',
            Some(_) if NOTHING.contains(&zero.to_lowercase().as_str()) => 0,
            Some(_) => return Err(format!("zero = {zero:?} does not start with a stage from 0 to 3")),
        };
        let gpus = self.count("gpus")?;
        let (tp, pp) = (self.count("tp")?, self.count("pp")?);
        let cp = self.optional_count("cp")?.unwrap_or(1);
        let dp = match self.optional_count("dp")? {
            Some(dp) => dp,
            None => {
                let others = tp.saturating_mul(pp).saturating_mul(cp);
                let dp = gpus.checked_div(others).filter(|dp| dp * others == gpus);
                assumed.push("dp: what tp, pp and cp leave of gpus".into());
                dp.ok_or_else(|| format!("dp is not given, and tp × pp × cp = {others} does not divide gpus = {gpus}"))?
            }
        };
        let split = Split {
            tp,
            pp,
            dp,
            cp,
            ep: self.optional_count("ep")?.unwrap_or(1),
            zero,
            micro_batch: self.optional_count("microbatch")?,
            global_batch: self.count("global_batch")?,
        };
        if [tp, pp, dp, cp].iter().try_fold(1usize, |a, b| a.checked_mul(*b)) != Some(gpus) {
            return Err(format!("tp × pp × dp × cp = {tp} × {pp} × {dp} × {cp}, and gpus = {gpus}"));
        }
        if !dp.is_multiple_of(split.ep) {
            return Err(format!("ep = {} does not divide dp = {dp}, whose ranks have the experts", split.ep));
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
        let flops = self.number("tflops_per_gpu", "TFLOP/s")?.map(|tflops| FlopRate::PerGpu(tflops * 1e12));
        let rate = flops.or(self.share("mfu")?.map(FlopRate::OfPeak)).filter(|_| step.or(by_rate).is_none());
        let measured = Measured { step_s: step.or(by_rate), memory_bytes };
        let measured = match measured {
            Measured { step_s: None, memory_bytes: None } if failed => None,
            Measured { step_s: None, .. } if rate.is_none() => {
                return Err("none of step_time_s, tokens_per_s_per_gpu, tflops_per_gpu and mfu is given".into());
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
            known,
            rate,
            assumed,
        })
    }

    /// A share, given as such or in percent.
    fn share(&self, column: &str) -> Result<Option<f64>, String> {
        let Some(given) = self.number(column, "percent")? else { return Ok(None) };
        let share = if given > 1.0 { given / 100.0 } else { given };
        let text = self.text(column);
        if share <= 1.0 { Ok(Some(share)) } else { Err(format!("{column} = {text:?} is above 100%")) }
    }

    /// The model's shape: what the row gives, and for the rest what its name means.
    fn shape(&self, assumed: &mut Vec<String>) -> Result<(PublishedShape, Option<KnownModel>), String> {
        let model = self.text("model");
        let [layers, hidden, heads, kv_heads, ffn, vocab] = {
            let count = |column| self.optional_count(column);
            [count("layers")?, count("hidden")?, count("heads")?, count("kv_heads")?, count("ffn")?, count("vocab")?]
        };
        let layers = layers.or_else(|| layers_of(model));
        let params = self.number("params", "parameters")?;
        let whole = [layers, hidden, heads, kv_heads, ffn, vocab].iter().all(Option::is_some);
        let same = |given: Option<usize>, known: Option<usize>| given.is_none_or(|given| known == Some(given));
        let found = named(model).filter(|(known, shape)| {
            // Sizes that are given say all, but for a model of experts.
            (!whole || known.active_experts.is_some())
                && same(hidden, Some(shape.hidden))
                && same(heads, Some(shape.heads))
                && same(kv_heads, shape.kv_heads)
                && same(vocab, shape.vocab)
        });
        let missing = |size: &str| format!("{size} is not given, and model = {model:?} is none whose shape is known");
        let known = found.as_ref().map(|(_, shape)| *shape);
        if let Some((known, _)) = found.as_ref().filter(|_| !whole) {
            assumed.push(format!("the shape of {}", known.name));
        }
        let seq = self.optional_count("seq")?.ok_or("seq is not given")?;
        let shape = PublishedShape {
            layers: layers.or(known.map(|k| k.layers)).ok_or_else(|| missing("layers"))?,
            hidden: hidden.or(known.map(|k| k.hidden)).ok_or_else(|| missing("hidden"))?,
            heads: heads.or(known.map(|k| k.heads)).ok_or_else(|| missing("heads"))?,
            kv_heads: kv_heads.or(known.and_then(|k| k.kv_heads)),
            ffn: known.and_then(|k| k.ffn).filter(|_| ffn.is_none()).or(ffn),
            vocab: vocab.or(known.and_then(|k| k.vocab)),
            seq,
            params,
        };
        Ok((shape, found.map(|(known, _)| known)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "source,model,layers,hidden,heads,kv_heads,ffn,vocab,seq,gpus,gpu,tp,pp,dp,cp,ep,zero,microbatch,global_batch,step_time_s,mfu";

    fn rows(lines: &str) -> (Vec<Row>, Vec<Refused>) {
        read(&format!("{HEADER}\n{lines}\n"))
    }

    #[test]
    fn what_a_name_says_need_not_be_given_and_nothing_may_be_written_in_many_ways() {
        let (rows, refused) = rows(
            "x,Qwen3_30B_a3B,,,,,,,4096,16,8xH100,n/a,2,,NA,8,-,1,1024,28.9,?\n\
             x,Llama3.1-405b-proxy(8 layers),,,,,,,8192,32,h100,8,1,2,2,,1,1,64,5.4,",
        );
        // Sizes of tensor and pipeline parallelism have no usual value.
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert!(refused[0].reason.contains("tp is not given"), "{refused:?}");
        let shape = rows[0].shape;
        assert_eq!((shape.layers, shape.hidden, shape.kv_heads, shape.vocab), (8, 16_384, Some(8), Some(128_256)));
        assert_eq!(rows[0].assumed, ["the shape of llama-3.1-405b"]);
    }

    #[test]
    fn experts_lie_on_data_parallel_ranks() {
        let (found, refused) = rows(
            "x,Qwen3_30B_a3B,,,,,,,4096,16,h100,1,2,,NA,8,-,1,1024,28.9,?\n\
             x,Qwen3_30B_a3B,,,,,,,4096,8,h100,1,2,4,1,8,1,1,1024,28.9,",
        );
        let Split { dp, ep, cp, zero, .. } = found[0].split;
        assert_eq!((dp, ep, cp, zero), (8, 8, 1, 0));
        assert_eq!(found[0].known.as_ref().unwrap().active_experts, Some(8));
        assert!(refused[0].reason.contains("ep = 8 does not divide dp = 4"), "{refused:?}");
    }

    #[test]
    fn an_unknown_name_needs_its_sizes() {
        let (_, refused) =
            rows("x,secret-9b,,,,,,,4096,8,h100,1,1,8,1,1,1,1,64,1.0,\nx,gpt-1b,,,,,,,64,1,h100,1,1,1,,,,1,1,,140");
        let reason = "layers is not given, and model = \"secret-9b\" is none whose shape is known";
        assert_eq!(refused[0].reason, reason);
        let (_, refused) = rows("x,gpt-3,,,,,,,64,1,h100,1,1,1,,,,1,1,,140");
        assert_eq!(refused[0].reason, "mfu = \"140\" is above 100%");
    }
}
