//! The constants of the cost model: one table, `data/constants.toml`. A constant may hold for one framework, family of GPUs or fabric
//! alone; where it has no value of its own, that for all holds. A fit varies values in memory ([`Constants::set`]).

use crate::{Framework, Hardware, Result, SimError};
use serde::{Deserialize, Serialize};

/// The most constants that may be fitted.
pub const MOST_FITTED: usize = 40;

/// A constant of the cost model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constant {
    /// Which term: one of [`Terms::NAMES`].
    pub term: String,
    /// The framework, family of GPUs or fabric that it holds for, or `framework/family`; empty for all.
    #[serde(default)]
    pub of: String,
    /// Its value.
    pub value: f64,
    /// The unit of its value.
    pub unit: String,
    /// What it means.
    pub meaning: String,
    /// Where the value comes from.
    pub source: String,
    /// The rows that fixed it; empty where it was not fitted.
    #[serde(default)]
    pub rows: String,
    /// The least and the greatest value that a fit may give it; none where it is not fitted.
    #[serde(default)]
    pub range: Option<[f64; 2]>,
}

impl Constant {
    /// `host.op of nanotron`.
    pub fn name(&self) -> String {
        if self.of.is_empty() { self.term.clone() } else { format!("{} of {}", self.term, self.of) }
    }

    /// Whether it matters to nothing but programs whose ranks have experts.
    pub fn is_of_experts(&self) -> bool {
        self.term == "host.dispatch"
    }

    /// Whether it matters to nothing but programs in fp8.
    pub fn is_of_fp8(&self) -> bool {
        ["matmul.fp8", "quantise.passes"].contains(&self.term.as_str())
    }
}

/// All constants.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Constants {
    /// In the order of the file.
    pub all: Vec<Constant>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConstantsFile {
    constant: Vec<Constant>,
}

/// From `field = "term", neutral value` for every term: [`Terms`], and how it is looked up.
macro_rules! terms {
    ($($(#[$doc:meta])* $field:ident = $name:literal, $neutral:literal;)*) => {
        /// The constants that hold for one framework on one kind of hardware.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct Terms {
            $($(#[$doc])* pub $field: f64,)*
        }

        impl Terms {
            /// The terms, as the table names them.
            pub const NAMES: &[&str] = &[$($name,)*];

            /// Those of kernels that reach their bounds, and a host that takes no time.
            pub const NEUTRAL: Terms = Terms { $($field: $neutral,)* };
        }

        impl Constants {
            /// The constants that hold for a framework on some hardware.
            pub fn terms(&self, framework: &Framework, hardware: &Hardware) -> Terms {
                let like = framework.constants_of.as_deref();
                let (framework, family) = (framework.name.as_str(), hardware.gpu.family.as_str());
                let both = format!("{framework}/{family}");
                let mut of = vec![both.as_str(), framework];
                let like = like.map(|like| (format!("{like}/{family}"), like));
                of.extend(like.iter().flat_map(|(both, like)| [both.as_str(), like]));
                of.extend([family, &hardware.cluster.fabric]);
                Terms { $($field: self.value($name, &of),)* }
            }
        }
    };
}

terms! {
    /// Share of the peak that large aligned matmuls reach.
    matmul_efficiency = "matmul.efficiency", 1.0;
    /// How many times a matmul's operands and results are moved.
    matmul_bytes = "matmul.bytes", 1.0;
    /// Of moving a matmul's operands and results and computing it, the share of the shorter one that runs beside the longer one; sums that it adds to
    /// are read besides.
    matmul_hidden = "matmul.hidden", 0.0;
    /// The share that fp8 matmuls reach of their peak, beside what 16-bit ones reach of theirs.
    matmul_fp8 = "matmul.fp8", 1.0;
    /// How much of the loss of a last wave of tiles that is not full is felt: 0 none, 1 all.
    matmul_waves = "matmul.waves", 0.0;
    /// Share of the rate that is lost where extents are no multiple of 8, half of it where they are none of 64.
    matmul_misaligned = "matmul.misaligned", 0.0;
    /// Share of the memory bandwidth that kernels reach.
    memory_efficiency = "memory.efficiency", 1.0;
    /// How many times elementwise ops move the bytes that fused kernels would.
    elementwise_passes = "elementwise.passes", 1.0;
    /// How many times quantising to fp8 moves the bytes that its ops name.
    quantise_passes = "quantise.passes", 1.0;
    /// Share of the peak that causal fused attention reaches in the forward pass, with heads of 128.
    attention_efficiency = "attention.efficiency", 1.0;
    /// The same in backward, beside forward.
    attention_backward = "attention.backward", 1.0;
    /// The same with heads of 64, beside heads of 128.
    attention_narrow = "attention.narrow", 1.0;
    /// Keys that a tile of queries of fused attention computes besides those that the mask leaves it: a tile on the diagonal is computed whole,
    /// and it takes time to begin and to end.
    attention_tile = "attention.tile", 128.0;
    /// How many times unfused attention moves the scores that its ops name.
    scores_passes = "scores.passes", 1.0;
    /// Bytes moved per logit besides matmuls.
    logits_bytes = "logits.bytes", 0.0;
    /// Bytes moved per weight and micro-batch to add its gradient, besides the matmul.
    gradient_bytes = "gradient.bytes", 0.0;
    /// How many times the optimizer's bytes are moved.
    optimizer_passes = "optimizer.passes", 1.0;
    /// Seconds from the end of a kernel to the start of the next.
    kernel_gap = "kernel.gap", 0.0;
    /// Seconds of the host per kernel.
    host_op = "host.op", 0.0;
    /// Seconds of the host per collective.
    host_collective = "host.collective", 0.0;
    /// Seconds of the host per collective and rank of it, where a pipeline goes over several nodes.
    host_crowd = "host.crowd", 0.0;
    /// Seconds of the host per all-to-all to experts and back: it waits to hear how many rows there are.
    host_dispatch = "host.dispatch", 0.0;
    /// Seconds of the host per message between stages.
    host_message = "host.message", 0.0;
    /// Seconds of a step that nothing else explains: data, logging, launching the optimizer.
    host_step = "host.step", 0.0;
    /// Sharpness of the maximum of host time and GPU time of a layer: the exponent of a norm.
    host_sharpness = "host.sharpness", 1.0;
    /// Seconds until a collective moves its first byte.
    collective_launch = "collective.launch", 0.0;
    /// Share of the link's rate that collectives inside a node reach.
    link_efficiency = "link.efficiency", 1.0;
    /// Seconds per rank of a ring inside a node.
    link_hop = "link.hop", 0.0;
    /// How many times faster an all-reduce inside a node is than its two halves: the switch adds.
    link_all_reduce = "link.all_reduce", 1.0;
    /// Share of the adapters' rate that collectives between nodes reach.
    fabric_efficiency = "fabric.efficiency", 1.0;
    /// Seconds per rank of a ring that crosses nodes.
    fabric_hop = "fabric.hop", 0.0;
    /// Share of the rate that messages between stages reach.
    message_efficiency = "message.efficiency", 1.0;
    /// Share of the time of collectives among tensor-parallel ranks that matmuls which run with them do not hide.
    tp_exposed = "tp.exposed", 1.0;
    /// Bytes per rank of the bucket that gradients and parameters wait for before they are reduced or gathered.
    bucket_bytes = "bucket.bytes", 0.0;
    /// Of time in which collectives overlap with kernels, the share by which both together take longer.
    overlap_cost = "overlap.cost", 0.0;
    /// Bytes beside those of parameters, per byte of them.
    memory_parameters = "memory.parameters", 0.0;
    /// How many times the bytes of saved activations are taken.
    memory_saved = "memory.saved", 1.0;
    /// Bytes per logit of a micro-batch that are held at a time.
    memory_logits = "memory.logits", 0.0;
    /// Bytes that are held whatever the program.
    memory_fixed = "memory.fixed", 0.0;
    /// Bytes of temporaries of a sharded update, per byte of parameters.
    memory_update = "memory.update", 0.0;
    /// Power that matmuls and attention would draw without a limit, of the limit.
    power_compute = "power.compute", 1.0;
    /// Power while kernels read and write memory, of the limit.
    power_memory = "power.memory", 1.0;
    /// Power while kernels of collectives and messages wait, of the limit.
    power_waiting = "power.waiting", 1.0;
    /// Power while nothing runs, of the limit.
    power_idle = "power.idle", 1.0;
}

impl Constants {
    /// What every build knows.
    pub fn builtin() -> Self {
        Self::parse("constants.toml", include_str!("../data/constants.toml"))
            .unwrap_or_else(|error| unreachable!("{error}"))
    }

    /// Those of a data file.
    pub fn parse(file: &str, text: &str) -> Result<Self> {
        let refuse = |reason: String| SimError::file(file, reason, "write it as validate --fit writes it");
        let parsed: ConstantsFile =
            toml::from_str(text).map_err(|error| refuse(error.to_string().trim_end().to_owned()))?;
        let all = parsed.constant;
        for name in Terms::NAMES {
            if !all.iter().any(|c| c.term == *name && c.of.is_empty()) {
                return Err(refuse(format!("no value of {name} for all")));
            }
        }
        for (i, constant) in all.iter().enumerate() {
            let twice = all[i + 1..].iter().any(|c| c.term == constant.term && c.of == constant.of);
            let reason = match () {
                () if !Terms::NAMES.contains(&constant.term.as_str()) => "is not a term of the cost model",
                () if twice => "stands twice",
                () if !(constant.value >= 0.0 && constant.value.is_finite()) => "is not a number from 0 on",
                () => continue,
            };
            return Err(refuse(format!("{} {reason}", constant.name())));
        }
        Ok(Self { all })
    }

    /// The value of a term for any of these, the first that has one of its own; else that for all.
    pub fn value(&self, term: &str, of: &[&str]) -> f64 {
        let find = |of: &str| self.all.iter().find(|c| c.term == term && c.of == of).map(|c| c.value);
        of.iter().find_map(|of| find(of)).or_else(|| find("")).unwrap_or(0.0)
    }

    /// Gives a constant another value; false where the table has no such one.
    pub fn set(&mut self, term: &str, of: &str, value: f64) -> bool {
        let found = self.all.iter_mut().find(|c| c.term == term && c.of == of);
        found.is_some_and(|constant| {
            constant.value = value;
            true
        })
    }

    /// Those that a fit may vary.
    pub fn fitted(&self) -> impl Iterator<Item = &Constant> {
        self.all.iter().filter(|c| c.range.is_some())
    }

    /// As a data file.
    pub fn to_toml(&self) -> String {
        #[derive(Serialize)]
        struct Written<'a> {
            constant: &'a [Constant],
        }
        toml::to_string(&Written { constant: &self.all }).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Catalogue;
    use lockstep_ir::Hint;

    #[test]
    fn every_fitted_constant_has_a_meaning_a_source_and_rows_and_there_are_few() {
        let constants = Constants::builtin();
        for c in &constants.all {
            assert!(!c.meaning.is_empty() && !c.source.is_empty() && !c.unit.is_empty(), "{}", c.name());
            if let Some([least, most]) = c.range {
                assert!(!c.rows.is_empty(), "{} was fitted on no rows", c.name());
                assert!((least..=most).contains(&c.value), "{} = {}", c.name(), c.value);
            }
        }
        assert!(constants.fitted().count() <= MOST_FITTED, "{}", constants.fitted().count());
    }

    #[test]
    fn a_value_of_its_own_goes_before_that_for_all_and_files_read_back() {
        let mut constants = Constants::builtin();
        assert!(constants.set("matmul.efficiency", "h100", 0.5));
        assert!(!constants.set("matmul.efficiency", "z80", 0.5));
        assert!(constants.set("matmul.efficiency", "lockstep/h100", 0.25));
        let all = Catalogue::builtin();
        let rate = |framework: &str, gpu: &str| {
            let hardware = Hardware::assumed(all.gpu(gpu).unwrap());
            constants.terms(&Framework::named(framework).unwrap(), &hardware).matmul_efficiency
        };
        // Of a framework on a family, of a family, of all.
        assert_eq!((rate("lockstep", "h200"), rate("nanotron", "h200"), rate("lockstep", "mi355x")), (0.25, 0.5, 0.75));
        assert!(rate("lockstep", "a100") > 0.75);
        assert_eq!(Constants::parse("again", &constants.to_toml()).unwrap(), constants);
    }

    #[test]
    fn a_file_with_an_unknown_or_missing_term_is_refused_by_name() {
        let text = Constants::builtin().to_toml();
        let error = |text: &str| Constants::parse("c.toml", text).unwrap_err().with_hint();
        assert!(error(&text.replace("\"host.step\"", "\"host.stop\"")).contains("no value of host.step for all"));
        let more = "\n[[constant]]\nterm = \"x\"\nvalue = 1.0\nunit = \"-\"\nmeaning = \"m\"\nsource = \"s\"\n";
        assert!(error(&(text + more)).contains("x is not a term of the cost model"));
    }
}
