//! Frameworks that published rows were measured with, as data: what of their habits decides which program of ours does the same work.

use super::row::{PublishedShape, Row};
use lockstep_ir::{Layout, MeshAxis, Schedule};
use std::fmt::Write;

/// A framework.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Peer {
    /// Hugging Face nanotron.
    Nanotron,
    /// Megatron-LM of 2020 to 2022, before FlashAttention.
    Megatron2021,
    /// Megatron-LM since (NeMo, Megatron-Bridge), with Transformer Engine.
    Megatron,
    /// torchtitan with torch.compile.
    Torchtitan,
    /// torchtitan without.
    TorchtitanEager,
    /// MosaicML LLM Foundry.
    LlmFoundry,
    /// HAI-LLM, DeepSeek's, of which no row is fitted.
    HaiLlm,
}

impl Peer {
    /// All of them.
    pub const ALL: [Peer; 7] = [
        Peer::Nanotron,
        Peer::Megatron2021,
        Peer::Megatron,
        Peer::Torchtitan,
        Peer::TorchtitanEager,
        Peer::LlmFoundry,
        Peer::HaiLlm,
    ];

    /// The name that commands take.
    pub const fn name(self) -> &'static str {
        match self {
            Peer::Nanotron => "nanotron",
            Peer::Megatron2021 => "megatron",
            Peer::Megatron => "megatron-core",
            Peer::Torchtitan => "torchtitan-compile",
            Peer::TorchtitanEager => "torchtitan",
            Peer::LlmFoundry => "llm-foundry",
            Peer::HaiLlm => "hai-llm",
        }
    }

    /// The name of all that is the same framework: torchtitan with and without torch.compile is one.
    pub fn kin(self) -> &'static str {
        self.name().trim_end_matches("-compile")
    }

    /// The framework that a row was measured with, by its source and notes.
    pub fn of(row: &Row) -> Option<Peer> {
        let source = row.source.to_lowercase();
        let notes = row.notes.to_lowercase();
        let has = |words: &[&str]| words.iter().any(|word| source.contains(word));
        if has(&["playbook", "nanotron"]) {
            Some(Peer::Nanotron)
        } else if has(&["llm-foundry", "llm foundry", "mosaicml"]) {
            Some(Peer::LlmFoundry)
        } else if has(&["hai-llm"]) {
            Some(Peer::HaiLlm)
        } else if has(&["torchtitan"]) {
            let eager = !notes.contains("compile") && notes.contains("fsdp");
            Some(if eager { Peer::TorchtitanEager } else { Peer::Torchtitan })
        } else if has(&["korthikanti", "narayanan", "sc21", "megatron-lm", "mt-nlg", "bigscience", "bloom"]) {
            Some(Peer::Megatron2021)
        } else if has(&["megatron", "nemo", "dgxc", "dgx cloud", "llama 3", "llama-3"]) {
            Some(Peer::Megatron)
        } else if has(&["deepseek"]) {
            Some(Peer::HaiLlm)
        } else {
            None
        }
    }

    /// Of micro-batches in flight, how many keep what they have gathered over tensor-parallel ranks until backward. Of nanotron's all do
    /// without a pipeline, and all but two with one, which is what its memory shows; others gather again.
    pub fn keeps_gathers(self, in_flight: f64, pp: usize) -> f64 {
        match (self, pp) {
            (Peer::Nanotron, 1) => in_flight,
            (Peer::Nanotron, _) => (in_flight - 2.0).max(0.0),
            _ => 0.0,
        }
    }

    /// Whether the memory that its source gives is that of the first pipeline stage; else it is the largest.
    pub fn measures_first_stage(self) -> bool {
        self == Peer::Nanotron
    }

    /// Whether its layouts have been swept over, so that what the search proposes for it can be held against what was measured.
    pub fn is_swept(self) -> bool {
        self == Peer::Nanotron
    }

    /// Whether it has all that a layout asks for; nothing is known of those that were not swept. nanotron has ZeRO 1, tensor parallelism
    /// that always splits sequences too, and 1F1B.
    pub(super) fn has(self, layout: &Layout) -> bool {
        let size = |axis: MeshAxis| layout.mesh.size(axis);
        let alone = size(MeshAxis::Cp) == 1 && size(MeshAxis::DpReplicate) == 1;
        let usual = layout.schedule == Schedule::USUAL && layout.zero <= 1;
        self == Peer::Nanotron && alone && usual && layout.sequence_parallel == (size(MeshAxis::Tp) > 1)
    }

    /// Layers of the stages of a row's model on this many ranks; see [`Peer::stages`].
    pub(super) fn cut(self, row: &Row, pp: usize) -> Result<Option<Vec<usize>>, String> {
        match (row.shape.ffn, row.shape.vocab) {
            (Some(ffn), Some(vocab)) => self.stages(&row.shape, ffn, vocab, pp),
            _ => Ok(None),
        }
    }

    /// The one of a name.
    pub fn named(name: &str) -> Option<Peer> {
        Self::ALL.into_iter().find(|peer| peer.name() == name)
    }

    /// How it calls the layers of its stages; `None` where they are cut as ours are. Fails where a stage has nothing, which crashes it.
    fn stages(self, shape: &PublishedShape, ffn: usize, vocab: usize, pp: usize) -> Result<Option<Vec<usize>>, String> {
        match self {
            Peer::Nanotron if pp > 1 => nanotron_stages(shape, ffn, vocab, pp).map(Some),
            _ => Ok(None),
        }
    }
}

/// nanotron fills a stage until the matmul parameters so far exceed its share of the whole; the norm, the head, a cast and the loss are
/// blocks of their own after the layers.
fn nanotron_stages(shape: &PublishedShape, ffn: usize, vocab: usize, pp: usize) -> Result<Vec<usize>, String> {
    let layer = 4 * shape.hidden * shape.hidden + 3 * ffn * shape.hidden;
    let behind = [0, vocab * shape.hidden, 0, 0];
    let blocks = std::iter::once(0).chain(vec![layer; shape.layers]).chain(behind);
    let total = layer * shape.layers + vocab * shape.hidden;
    let (mut layers, mut filled) = (vec![0; pp], vec![0; pp]);
    let (mut stage, mut sum) = (0, 0);
    for (block, cost) in blocks.enumerate() {
        sum += cost;
        filled[stage] += 1;
        layers[stage] += usize::from((1..=shape.layers).contains(&block));
        if (sum * pp) as f64 > (total * (stage + 1)) as f64 && stage + 1 < pp {
            stage += 1;
        }
    }
    match filled.iter().position(|blocks| *blocks == 0) {
        Some(stage) => Err(format!("nanotron's split gives stage {stage} nothing, which crashes it")),
        None => Ok(layers),
    }
}

/// A row as a config of ours.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// The text of a `run.toml`.
    pub toml: String,
    /// The framework.
    pub peer: Peer,
    /// What the row does not say.
    pub assumed: Vec<String>,
    /// Stages that have no work of ours.
    pub idle_stages: usize,
    /// The part of layers that recompute their first MLP matmul besides what is cheap, where the framework recomputes some matmuls.
    pub recomputed_matmuls: f64,
}

/// What becomes of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Description {
    /// It is a config.
    Config(Box<Described>),
    /// The framework crashes on it, for this reason.
    Crashes(Peer, String),
}

/// The vocabulary of GPT-2, padded as Megatron pads it.
const GPT_VOCAB: usize = 51_200;

/// Describes a row in keys of our own; the reason where it cannot be.
pub fn describe(row: &Row, framework: Option<Peer>) -> Result<Description, String> {
    let unknown = || {
        let names: Vec<&str> = Peer::ALL.iter().map(|peer| peer.name()).collect();
        format!("source {:?} names no framework that is known: give --framework {}", row.source, names.join(", "))
    };
    let peer = framework.or_else(|| Peer::of(row)).ok_or_else(unknown)?;
    let mut assumed = row.assumed.clone();
    let PublishedShape { layers, hidden, heads, seq, .. } = row.shape;
    let gpt = row.is_gpt();
    let kv_heads = row.shape.kv_heads.unwrap_or(heads);
    let ffn = row.shape.ffn.or(gpt.then_some(4 * hidden)).ok_or("ffn is not given")?;
    let vocab = row.shape.vocab.or_else(|| {
        assumed.push(format!("vocab = {GPT_VOCAB}"));
        gpt.then_some(GPT_VOCAB)
    });
    let vocab = vocab.ok_or("vocab is not given")?;
    // Two matmuls of a width are as many FLOPs as three of two thirds of it.
    let (gpt, ffn) = if row.is_ungated() { (false, 2 * ffn / 3) } else { (gpt, ffn) };
    let split = &row.split;
    let notes = row.notes.to_lowercase();
    let mut stages = match peer.stages(&row.shape, ffn, vocab, split.pp) {
        Ok(stages) => stages,
        Err(crash) => return Ok(Description::Crashes(peer, crash)),
    };
    // A stage after the head has the loss alone, which is no work of its own here.
    let idle = stages.as_ref().map_or(0, |s| s.iter().rev().take_while(|n| **n == 0).count().saturating_sub(1));
    let pp = split.pp - idle;
    if let Some(stages) = &mut stages {
        stages.truncate(pp);
    }
    let micro_batch = split.micro_batch.unwrap_or_else(|| {
        let share = split.global_batch / split.dp;
        let most = if split.pp == 1 { 16 } else { 1 };
        let size = (1..=share.min(most)).rev().find(|n| share.is_multiple_of(*n)).unwrap_or(1);
        assumed.push(format!("microbatch = {size}"));
        size
    });
    let precision = row.precision.to_lowercase();
    if precision.contains("fp4") {
        return Err(format!("precision = {:?}: there is no fp4 yet", row.precision));
    }
    let embedding = (vocab * hidden) as f64;
    let matmuls =
        (layers * hidden) as f64 * (2.0 * hidden as f64 * (1.0 + kv_heads as f64 / heads as f64) + 3.0 * ffn as f64);
    // Two tables or one: whichever comes nearer to the parameters that are given.
    let tied = gpt || notes.contains("tied emb") || row.shape.params.is_some_and(|p| p < matmuls + 1.5 * embedding);
    let mut toml = String::new();
    let mut line = |text: std::fmt::Arguments| {
        let _ = writeln!(toml, "{text}");
    };
    line(format_args!("[model]"));
    if let Some(keys) = row.known.as_ref().and_then(|known| known.keys.as_ref()) {
        line(format_args!("{keys}\nlayers = {layers}"));
    } else {
        line(format_args!("architecture = \"{}\"", if gpt { "gpt2" } else { "llama" }));
        line(format_args!("vocab_size = {vocab}\nlayers = {layers}\ndim = {hidden}\nheads = {heads}\nffn = {ffn}"));
        match gpt {
            true => line(format_args!("positions = {seq}")),
            false => line(format_args!("kv_heads = {kv_heads}\ntied_embeddings = {tied}")),
        }
    }
    let naive = peer == Peer::Megatron2021;
    if naive {
        line(format_args!("attention = \"naive\"\ndropout = 0.1"));
    }
    line(format_args!("[train]\nseq = {seq}\nglobal_batch = {}\nmicro_batch = {micro_batch}", split.global_batch));
    let policy = if row.is_fp8() { "fp8" } else { "bf16" };
    line(format_args!("device = \"cuda\"\n[precision]\npolicy = \"{policy}\""));
    if peer == Peer::HaiLlm && row.is_fp8() {
        // Scales of tiles and blocks of 128 (arXiv 2412.19437, section 3.3.2).
        line(format_args!("fp8_recipe = \"block\""));
    } else if row.is_rowwise() {
        line(format_args!("fp8_recipe = \"rowwise\""));
    } else if row.is_delayed() {
        line(format_args!("fp8_recipe = \"delayed\""));
    }
    let half_gradients = match peer {
        Peer::LlmFoundry => notes.contains("mixed_precision=pure"),
        // In fp16 it sums gradients in the type of parameters.
        Peer::Megatron2021 => precision.starts_with("fp16"),
        _ => false,
    };
    line(format_args!("gradients = \"{}\"", if half_gradients { "bf16" } else { "fp32" }));
    let zero = if split.dp * split.cp > 1 { split.zero } else { 0 };
    line(format_args!(
        "[parallel]\ntp = {}\npp = {}\ndp = {}\ncp = {}\nzero = {zero}",
        split.tp,
        pp,
        split.dp / split.ep,
        split.cp
    ));
    if split.ep > 1 {
        line(format_args!("ep = {}\nep_bound = 1.0", split.ep));
        assumed.push("experts get as many tokens each".into());
    }
    let recompute = row.recompute.to_lowercase();
    // Those since 2022 have it unless the row says otherwise.
    let usual = peer != Peer::Megatron2021 || recompute.contains("sequence parallel");
    let sequence_parallel = split.tp > 1 && usual && !recompute.contains("no sequence");
    line(format_args!("sequence_parallel = {sequence_parallel}"));
    if split.pp > 1 {
        let Order { schedule, chunks } = Order::of(&notes, layers, split.pp, &mut assumed)?;
        if let Some(schedule) = schedule {
            line(format_args!("schedule = \"{schedule}\""));
        }
        if chunks > 1 {
            line(format_args!("virtual = {chunks}"));
        }
        let ends_count = peer == Peer::Megatron;
        if let Some(stages) =
            stages.or_else(|| ends_count.then(|| cut_with_ends(layers, split.pp * chunks, &mut assumed)).flatten())
        {
            line(format_args!("stages = {stages:?}"));
        }
    }
    let mut recomputed_matmuls = 0.0;
    if recompute.starts_with("full") {
        line(format_args!("[recompute]\npolicy = \"full\""));
    } else if recompute.starts_with("selective layer") {
        // Every second layer.
        recomputed_matmuls = 0.5;
        line(format_args!("[recompute]\npolicy = \"selective\""));
    } else if recompute.starts_with("selective") {
        match peer {
            Peer::Megatron2021 => line(format_args!("[recompute]\npolicy = \"list\"\nops = [\"attention_scores\"]")),
            // FlashAttention recomputes its scores by itself.
            Peer::Megatron | Peer::HaiLlm | Peer::Nanotron => {}
            // Every second matmul, counted in each layer, beside what is cheap.
            Peer::Torchtitan | Peer::TorchtitanEager | Peer::LlmFoundry => {
                let (q, kv) = (hidden as f64, (hidden * kv_heads / heads) as f64);
                recomputed_matmuls = ((kv + q + ffn as f64) / (2.0 * ffn as f64)).min(1.0);
                line(format_args!("[recompute]\npolicy = \"selective\""));
            }
        }
    } else if !recompute.is_empty() && !recompute.starts_with("none") && !recompute.starts_with("no ") {
        return Err(format!("recompute = {:?} is not known: none, full or selective", row.recompute));
    } else if recompute.is_empty() {
        assumed.push("no recompute".into());
    }
    Ok(Description::Config(Box::new(Described { toml, peer, assumed, recomputed_matmuls, idle_stages: idle })))
}

/// In which order stages compute.
struct Order {
    /// The schedule; the usual one where notes say nothing.
    schedule: Option<&'static str>,
    /// Chunks of layers per rank that have to be given.
    chunks: usize,
}

/// Schedules by the names that papers have for them.
const SCHEDULES: [(&str, &str); 10] = [
    ("1f1b", "1f1b"),
    ("gpipe", "gpipe"),
    ("afab", "gpipe"),
    ("zb-1p", "zb-h1"),
    ("zb-h1", "zb-h1"),
    ("zb1p", "zb-h1"),
    ("zb-v", "zb-v"),
    ("zbv", "zb-v"),
    ("dualpipe-v", "zb-v"),
    ("dualpipev", "zb-v"),
];

impl Order {
    /// From notes: `interleave v=3`, `VP=8`, `interleaved` alone, `schedule=ZB-V`.
    fn of(notes: &str, layers: usize, pp: usize, assumed: &mut Vec<String>) -> Result<Self, String> {
        let said = |mark: &str| {
            let (before, after) = notes.split_once(mark)?;
            (!before.ends_with(|c: char| c.is_alphanumeric())).then_some(after)
        };
        let digits =
            |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<usize>().ok();
        let given = ["interleave v=", "vpp=", "vp=", "virtual=", "virtual stages="]
            .into_iter()
            .find_map(|mark| said(mark).and_then(digits))
            .filter(|chunks| *chunks > 0);
        if let Some(name) = said("schedule=").or_else(|| said("schedule:")).map(str::trim_start) {
            let name: String = name.chars().take_while(|c| c.is_alphanumeric() || "-_ ".contains(*c)).collect();
            let name = name.trim().replace(['_', ' '], "-");
            let known = SCHEDULES.iter().find(|(theirs, _)| name == *theirs || name.starts_with(&format!("{theirs}-")));
            match known {
                Some((_, schedule)) => return Ok(Self { schedule: Some(schedule), chunks: 1 }),
                None if name.starts_with("interleave") => {}
                None if name == "zb-2p" || name == "zb-h2" => {
                    assumed.push("the schedule ZB-2P as ZB-V, whose bubble is as small in the memory of 1F1B".into());
                    return Ok(Self { schedule: Some("zb-v"), chunks: 1 });
                }
                None => {
                    let names: Vec<&str> = SCHEDULES.iter().map(|(theirs, _)| *theirs).collect();
                    return Err(format!("schedule = {name:?} is not known: interleaved, zb-2p, {}", names.join(", ")));
                }
            }
        }
        let chunks = match given {
            Some(chunks) => chunks,
            None if !notes.contains("interleaved") => 1,
            None => {
                let each = layers / pp;
                let chunks = (2..=each).find(|n| each.is_multiple_of(*n) && layers.is_multiple_of(pp)).unwrap_or(1);
                assumed.push(format!("{chunks} chunks of layers per rank"));
                chunks
            }
        };
        // Some frameworks let a virtual stage have the embedding or the head alone, and no layer.
        let most = (layers / pp).max(1);
        if chunks > most {
            assumed.push(format!("{most} chunks of layers per rank for {chunks}, so that each has a layer"));
        }
        let chunks = chunks.min(most);
        Ok(Self { schedule: (chunks > 1).then_some("interleaved"), chunks })
    }
}

/// Layers of virtual stages where the embedding and the head count as a layer each, as Megatron can cut: 62 layers in 32 stages.
fn cut_with_ends(layers: usize, stages: usize, assumed: &mut Vec<String>) -> Option<Vec<usize>> {
    let each = (layers + 2) / stages;
    if layers.is_multiple_of(stages) || !(layers + 2).is_multiple_of(stages) || each < 2 {
        return None;
    }
    assumed.push("the embedding and the head count as a layer each where stages are cut".into());
    let mut cut = vec![each; stages];
    cut[0] -= 1;
    cut[stages - 1] -= 1;
    Some(cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_are_read_as_papers_name_them() {
        let of = |notes: &str| Order::of(notes, 32, 4, &mut Vec::new()).map(|order| (order.schedule, order.chunks));
        assert_eq!(of(""), Ok((None, 1)));
        assert_eq!(of("vp=n/a; vpx"), Ok((None, 1)));
        for notes in ["vp=4; more", "interleave v=4", "vpp=4", "schedule=interleaved; vp=4"] {
            assert_eq!(of(notes), Ok((Some("interleaved"), 4)), "{notes}");
        }
        // Every chunk has a layer.
        assert_eq!(of("vp=9"), Ok((Some("interleaved"), 8)));
        assert_eq!(of("interleaved schedule"), Ok((Some("interleaved"), 2)));
        assert_eq!(of("schedule=zb-1p"), Ok((Some("zb-h1"), 1)));
        assert_eq!((of("schedule=zb-v; x"), of("schedule=zb-2p")), (Ok((Some("zb-v"), 1)), Ok((Some("zb-v"), 1))));
        assert!(of("schedule=wave").is_err_and(|reason| reason.contains("wave")));
    }

    #[test]
    fn rows_of_deepseek_s_own_framework_have_its_profile_and_its_scales() {
        let text = "source,model,layers,hidden,heads,seq,gpus,gpu,tp,pp,dp,ep,microbatch,global_batch,precision,notes,step_time_s\n\
                    \"DeepSeek-V3, HAI-LLM\",deepseek-v3,,,,4096,2048,H800,1,16,128,64,1,15360,fp8,schedule=DualPipe-V,20\n\
                    \"DeepSeek-V3 in Megatron-Bridge\",deepseek-v3,,,,4096,2048,H100,1,16,128,64,1,15360,fp8,,20\n";
        let (rows, refused) = crate::published::read(text);
        assert!(refused.is_empty(), "{refused:?}");
        let of = |row: &Row| match describe(row, None) {
            Ok(Description::Config(described)) => (described.peer, described.toml.contains("fp8_recipe = \"block\"")),
            other => panic!("{other:?}"),
        };
        assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), [(Peer::HaiLlm, true), (Peer::Megatron, false)]);
    }

    #[test]
    fn embedding_and_head_may_count_as_layers() {
        let mut assumed = Vec::new();
        let cut = cut_with_ends(62, 32, &mut assumed).unwrap();
        assert_eq!((cut.iter().sum::<usize>(), cut[0], cut[1], cut[31], assumed.len()), (62, 1, 2, 1, 1));
        assert_eq!((cut_with_ends(30, 32, &mut assumed), cut_with_ends(32, 8, &mut assumed)), (None, None));
        assert_eq!(cut_with_ends(31, 8, &mut assumed), None);
    }

    #[test]
    fn nanotron_fills_stages_by_parameters_and_crashes_on_an_empty_one() {
        let shape = |layers, hidden| PublishedShape {
            layers,
            hidden,
            heads: 32,
            kv_heads: None,
            ffn: Some(8192),
            vocab: Some(131_072),
            seq: 4096,
            params: None,
        };
        let cut = |layers, hidden, pp| nanotron_stages(&shape(layers, hidden), 8192, 131_072, pp);
        assert_eq!(cut(16, 2048, 2), Ok(vec![11, 5]));
        assert_eq!(cut(16, 2048, 4), Ok(vec![6, 5, 5, 0]));
        assert_eq!(cut(16, 2048, 8), Ok(vec![3, 3, 2, 3, 2, 3, 0, 0]));
        assert_eq!(cut(28, 3072, 8), Ok(vec![4, 4, 4, 4, 4, 4, 4, 0]));
        assert!(cut(16, 2048, 16).is_err_and(|reason| reason.contains("stage 15")));
        assert!(cut(28, 3072, 32).is_err());
    }
}
