//! What was chosen for a run: how its work is split among ranks and micro-batches.

use crate::mesh::{Mesh, MeshAxis};
use crate::schedule::{Pipeline, Schedule, UnknownSchedule};
use serde::Serialize;
use std::str::FromStr;

/// The axes that the text of a layout may name.
const NAMED: [MeshAxis; 6] =
    [MeshAxis::DpReplicate, MeshAxis::DpShard, MeshAxis::Cp, MeshAxis::Ep, MeshAxis::Tp, MeshAxis::Pp];

/// How queries of one context-parallel rank come to the keys of another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ContextParallel {
    /// Keys and values go around, a part at a time.
    #[default]
    Ring,
    /// All of them are gathered.
    Gather,
    /// The latent of latent attention goes around, with the key that all heads share, and every rank rebuilds keys and values from it.
    Latent,
    /// Ulysses: ranks have parts of the heads instead of parts of the sequence for as long as attention is computed.
    #[serde(rename = "a2a")]
    AllToAll,
}

impl ContextParallel {
    /// All of them.
    pub const ALL: [ContextParallel; 4] =
        [ContextParallel::Ring, ContextParallel::Gather, ContextParallel::Latent, ContextParallel::AllToAll];

    /// Their names, in the same order.
    pub const NAMES: [&str; 4] = [
        ContextParallel::Ring.name(),
        ContextParallel::Gather.name(),
        ContextParallel::Latent.name(),
        ContextParallel::AllToAll.name(),
    ];

    /// The name in configs and layouts.
    pub const fn name(self) -> &'static str {
        match self {
            ContextParallel::Ring => "ring",
            ContextParallel::Gather => "gather",
            ContextParallel::Latent => "latent",
            ContextParallel::AllToAll => "a2a",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }
}

/// What words for a schedule are about.
const SCHEDULE: &str = "the schedule";

/// How the text of a layout calls the chunks of a rank.
const VIRTUAL: &str = "virtual";

/// How it calls the rows that are planned from one ep rank to another.
const BOUND: &str = "bound";

/// What was chosen for a run. Prints what differs from one rank: `dp=2 zero=1 tp=2 sp pp=2 1f1b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Layout {
    /// Micro-batches whose gradients one rank sums in one step.
    pub micro_batches: usize,
    /// The ranks.
    pub mesh: Mesh,
    /// ZeRO level, what is sharded over dp ranks: nothing (0), optimizer state (1), gradients too (2), parameters too (3).
    pub zero: u8,
    /// Whether parameters that ZeRO 3 has gathered for forward are gathered again for backward, and not kept from one to the other.
    pub reshard_after_forward: bool,
    /// Whether tp ranks split the sequence where they do not split the matrices.
    pub sequence_parallel: bool,
    /// How attention is computed over cp ranks.
    pub context: ContextParallel,
    /// Rows that are planned for what one ep rank sends to another, in percent of an even share; as many as there can be where it is
    /// not given.
    pub expert_bound: Option<usize>,
    /// In which order stages compute micro-batches.
    pub schedule: Schedule,
    /// Chunks of layers that a rank of the pipeline has (virtual pipeline stages).
    pub chunks: usize,
}

impl Layout {
    /// The largest size along an axis of the mesh.
    pub const MOST: usize = 1 << 16;

    /// What the ranks of its pipeline do in a step.
    pub fn pipeline(&self) -> Pipeline {
        self.schedule.pipeline(self.mesh.size(MeshAxis::Pp), self.chunks, self.micro_batches)
    }

    /// How many virtual stages its pipeline has.
    pub fn stages(&self) -> usize {
        self.mesh.size(MeshAxis::Pp) * self.chunks
    }

    /// One rank.
    pub const fn single(micro_batches: usize) -> Self {
        Self {
            micro_batches,
            mesh: Mesh::ONE,
            zero: 0,
            reshard_after_forward: true,
            sequence_parallel: false,
            context: ContextParallel::Ring,
            expert_bound: None,
            schedule: Schedule::USUAL,
            chunks: 1,
        }
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let size = |axis: MeshAxis| {
            let size = self.mesh.size(axis);
            (size != 1).then(|| format!("{}={size}", axis.name()))
        };
        let pipeline = self.mesh.size(MeshAxis::Pp) != 1;
        let words = [
            size(MeshAxis::DpReplicate),
            size(MeshAxis::DpShard),
            (self.zero != 0).then(|| format!("zero={}", self.zero)),
            (!self.reshard_after_forward).then(|| "no-reshard".to_owned()),
            size(MeshAxis::Cp),
            (self.mesh.size(MeshAxis::Cp) != 1 && self.context != ContextParallel::default())
                .then(|| format!("context={}", self.context.name())),
            size(MeshAxis::Ep),
            (self.expert_bound.filter(|_| self.mesh.size(MeshAxis::Ep) != 1))
                .map(|percent| format!("{BOUND}={}", percent as f64 / 100.0)),
            size(MeshAxis::Tp),
            self.sequence_parallel.then(|| "sp".to_owned()),
            size(MeshAxis::Pp),
            pipeline.then(|| self.schedule.name().to_owned()),
            // Where the schedule leaves a choice.
            (pipeline && self.schedule.chunks() != (self.chunks..=self.chunks))
                .then(|| format!("virtual={}", self.chunks)),
        ];
        let words: Vec<_> = words.into_iter().flatten().collect();
        f.write_str(if words.is_empty() { "one rank" } else { "" })?;
        f.write_str(&words.join(" "))
    }
}

/// What the text of a layout may say.
fn words() -> String {
    format!(
        "a layout is made of dp=N, dp_replicate=N, zero=N, no-reshard, cp=N, context=ring, gather, latent or a2a, ep=N, bound=X, tp=N, sp, pp=N, virtual=N and a \
         schedule: {}",
        Schedule::NAMES.join(", ")
    )
}

/// Why the text of a layout was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, lockstep_ir::Hint)]
pub enum LayoutError {
    /// No words at all.
    #[error("the layout is empty")]
    #[hint("write what differs from one rank, such as dp=2,tp=2")]
    Empty,
    /// A word that means nothing here.
    #[error("{0:?} is not part of a layout")]
    #[hint("{words}", words = words())]
    Unknown(String),
    /// A size without a number.
    #[error("{0} has no value")]
    #[hint("write {_0}=N")]
    NoValue(&'static str),
    /// A value that is no number, or one out of range.
    #[error("{key}={value} is not a number in range")]
    #[hint("give {key} a whole number from {least} to {most}")]
    Value {
        /// What was being given.
        key: &'static str,
        /// What was written.
        value: String,
        /// The least that is accepted.
        least: usize,
        /// The most that is accepted.
        most: usize,
    },
    /// A multiple of an even share that is none.
    #[error("{key}={value} is no multiple of an even share")]
    #[hint("give {key} a number from 1 to 1000, such as 1.5")]
    Share {
        /// What was being given.
        key: &'static str,
        /// What was written.
        value: String,
    },
    /// A value that is none of a few words.
    #[error("{key}={value} is not known")]
    #[hint("write {key}={}", words.join(&format!(" or {key}=")))]
    Word {
        /// What was being given.
        key: &'static str,
        /// What was written.
        value: String,
        /// What is accepted.
        words: &'static [&'static str],
    },
    /// A value for a word that has none.
    #[error("{0} takes no value")]
    #[hint("write {_0} alone, or leave it out")]
    TakesNoValue(&'static str),
    /// A schedule without a name.
    #[error("schedule has no value")]
    #[hint("write schedule= and one of {}", Schedule::NAMES.join(", "))]
    NoSchedule,
    /// A schedule that does not exist.
    #[error(transparent)]
    #[hint(_0.hint())]
    Schedule(#[from] UnknownSchedule),
    /// Something said twice.
    #[error("{0} is given twice")]
    #[hint("give it once")]
    Twice(&'static str),
}

/// Reads `dp=2,zero=1,tp=2,sp,pp=2,interleaved,virtual=4`, in any order; `schedule=interleaved` is the word alone. Blanks separate as commas do. What is not given is as in
/// [`Layout::single`] of one micro-batch: how many there are follows from the batch. Chunks are as the schedule usually has them.
impl FromStr for Layout {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut layout = Layout::single(1);
        let mut given = Vec::new();
        for word in text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty()) {
            let key = layout.read(word)?;
            if given.contains(&key) {
                return Err(LayoutError::Twice(key));
            }
            given.push(key);
        }
        if !given.contains(&VIRTUAL) {
            layout.chunks = *layout.schedule.chunks().start();
        }
        if given.is_empty() { Err(LayoutError::Empty) } else { Ok(layout) }
    }
}

impl Layout {
    /// Lays one word over the layout; returns what it was about.
    fn read(&mut self, word: &str) -> Result<&'static str, LayoutError> {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        let number = |key: &'static str, least: usize, most: usize| {
            let value = value.ok_or(LayoutError::NoValue(key))?;
            let number = value.parse().ok().filter(|n| (least..=most).contains(n));
            number.ok_or_else(|| LayoutError::Value { key, value: value.to_owned(), least, most })
        };
        let alone = |key: &'static str| if value.is_none() { Ok(()) } else { Err(LayoutError::TakesNoValue(key)) };
        if let Some(axis) = NAMED.into_iter().find(|axis| axis.name() == name) {
            self.mesh = self.mesh.with(axis, number(axis.name(), 1, Layout::MOST)?);
            return Ok(axis.name());
        }
        if let Ok(schedule) = name.parse::<Schedule>() {
            alone(schedule.name())?;
            self.schedule = schedule;
            return Ok(SCHEDULE);
        }
        match name {
            "schedule" => {
                let name = value.ok_or(LayoutError::NoSchedule)?;
                self.schedule = name.parse()?;
                Ok(SCHEDULE)
            }
            VIRTUAL => {
                self.chunks = number(VIRTUAL, 1, Layout::MOST)?;
                Ok(VIRTUAL)
            }
            "zero" => {
                self.zero = number("zero", 0, 3)? as u8;
                Ok("zero")
            }
            "no-reshard" => {
                alone("no-reshard")?;
                self.reshard_after_forward = false;
                Ok("no-reshard")
            }
            BOUND => {
                let value = value.ok_or(LayoutError::NoValue(BOUND))?;
                let share = value.parse().ok().filter(|x: &f64| (1.0..=1000.0).contains(x));
                let share = share.ok_or_else(|| LayoutError::Share { key: BOUND, value: value.to_owned() })?;
                self.expert_bound = Some((share * 100.0).round() as usize);
                Ok(BOUND)
            }
            "sp" => {
                alone("sp")?;
                self.sequence_parallel = true;
                Ok("sp")
            }
            "context" => {
                let value = value.ok_or(LayoutError::NoValue("context"))?;
                let unknown =
                    || LayoutError::Word { key: "context", value: value.to_owned(), words: &ContextParallel::NAMES };
                self.context = ContextParallel::named(value).ok_or_else(unknown)?;
                Ok("context")
            }
            _ => Err(LayoutError::Unknown(word.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Hint;

    fn mesh(dp: usize, tp: usize, pp: usize) -> Mesh {
        Mesh::ONE.with(MeshAxis::DpShard, dp).with(MeshAxis::Tp, tp).with(MeshAxis::Pp, pp)
    }

    fn read(text: &str) -> Layout {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn a_layout_prints_what_differs_from_one_rank() {
        assert_eq!(Layout::single(4).to_string(), "one rank");
        let full = Layout {
            mesh: mesh(2, 2, 2),
            zero: 1,
            sequence_parallel: true,
            schedule: Schedule::USUAL,
            ..Layout::single(4)
        };
        assert_eq!(full.to_string(), "dp=2 zero=1 tp=2 sp pp=2 1f1b");
        assert_eq!(Layout { schedule: Schedule::ALL[1], ..Layout::single(1) }.to_string(), "one rank");
    }

    #[test]
    fn a_layout_is_read_in_any_order_and_as_it_prints() {
        let layout = read("dp=2,zero=1,tp=4,sp,pp=8,gpipe");
        assert_eq!(layout.mesh, mesh(2, 4, 8));
        assert_eq!((layout.zero, layout.sequence_parallel, layout.schedule), (1, true, Schedule::ALL[1]));
        assert_eq!(read("gpipe, pp=8, sp, tp=4, zero=1, dp=2"), layout);
        assert_eq!(read(&layout.to_string()), layout);
        assert_eq!(read("dp=1"), Layout::single(1));
        let hybrid = read("zero=3,no-reshard,dp=4,dp_replicate=2");
        assert!(!hybrid.reshard_after_forward);
        assert_eq!(hybrid.mesh, mesh(4, 1, 1).with(MeshAxis::DpReplicate, 2));
        assert_eq!(hybrid.to_string(), "dp_replicate=2 dp=4 zero=3 no-reshard");
        assert_eq!(read(&hybrid.to_string()), hybrid);
        assert_eq!(read("pp=2").schedule, Schedule::USUAL);
        let context = read("cp=4,context=gather,tp=2");
        assert_eq!((context.mesh.size(MeshAxis::Cp), context.context), (4, ContextParallel::Gather));
        assert_eq!(context.to_string(), "cp=4 context=gather tp=2");
        assert_eq!(read(&context.to_string()), context);
        assert_eq!(read("cp=2,context=ring").to_string(), "cp=2");
        assert_eq!(read("context=a2a,cp=2").to_string(), "cp=2 context=a2a");
        assert_eq!(read("cp=2 context=a2a").context, ContextParallel::AllToAll);
        let bound = read("ep=4,bound=1.25");
        assert_eq!((bound.expert_bound, bound.to_string().as_str()), (Some(125), "ep=4 bound=1.25"));
        assert_eq!(read(&bound.to_string()), bound);
        let experts = read("ep=4,zero=1,tp=2");
        assert_eq!(experts.mesh.size(MeshAxis::Ep), 4);
        assert_eq!(experts.to_string(), "zero=1 ep=4 tp=2");
        assert_eq!(read(&experts.to_string()), experts);
    }

    #[test]
    fn chunks_are_as_many_as_the_schedule_usually_has_or_as_given() {
        let check = |text: &str, chunks: usize, printed: &str| {
            let layout = read(text);
            assert_eq!((layout.chunks, layout.to_string().as_str()), (chunks, printed), "{text}");
            assert_eq!(read(printed), layout);
        };
        check("pp=4", 1, "pp=4 1f1b");
        check("interleaved,pp=4", 2, "pp=4 interleaved virtual=2");
        check("virtual=4,schedule=interleaved,pp=4", 4, "pp=4 interleaved virtual=4");
        check("pp=4,zb-h1", 1, "pp=4 zb-h1");
        check("pp=4,schedule=zb-v", 2, "pp=4 zb-v");
        // Whether they go together is not the text's business.
        check("pp=4,zb-v,virtual=3", 3, "pp=4 zb-v virtual=3");
        assert_eq!(read("pp=4,interleaved,virtual=4").stages(), 16);
    }

    #[test]
    fn a_refused_layout_says_what_is_wrong() {
        let refused = |text: &str| text.parse::<Layout>().expect_err(text).with_hint();
        let first = |text: &str| refused(text).lines().next().map(str::to_owned).unwrap_or_default();
        assert_eq!(first(" , "), "the layout is empty");
        assert_eq!(first("dp=2,fsdp"), "\"fsdp\" is not part of a layout");
        assert_eq!(first("one rank"), "\"one\" is not part of a layout");
        assert_eq!(first("tp"), "tp has no value");
        assert_eq!(first("tp=two"), "tp=two is not a number in range");
        assert_eq!(first("pp=0"), "pp=0 is not a number in range");
        assert_eq!(first("dp=99999999999999999999"), "dp=99999999999999999999 is not a number in range");
        assert_eq!(first("zero=4"), "zero=4 is not a number in range");
        assert_eq!(first("sp=1"), "sp takes no value");
        assert_eq!(
            refused("context=all"),
            "context=all is not known\nhint: write context=ring or context=gather or context=latent or context=a2a"
        );
        assert_eq!(first("bound=0.5"), "bound=0.5 is no multiple of an even share");
        assert_eq!(first("gpipe=true"), "gpipe takes no value");
        assert_eq!(first("dp=2,dp=2"), "dp is given twice");
        assert_eq!(first("gpipe,1f1b"), "the schedule is given twice");
        assert_eq!(first("gpipe,schedule=1f1b"), "the schedule is given twice");
        assert_eq!(first("schedule=zigzag"), "\"zigzag\" is not a schedule");
        assert_eq!(first("schedule"), "schedule has no value");
        assert_eq!(first("virtual=0"), "virtual=0 is not a number in range");
        for text in ["", "x", "tp", "schedule", "schedule=x", "virtual", "tp=", "zero=9", "sp=", "sp sp"] {
            assert_eq!(refused(text).matches("\nhint: ").count(), 1, "{text}");
        }
    }
}
