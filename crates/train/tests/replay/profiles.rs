//! Device profiles as data: what the corpus is compiled for, on every machine the same.
//!
//! `profiles.txt` has a part per profile and types of numbers, equal ones once. A device has a profile for each type that it computes
//! in and that gradients are summed in, for one thread.

use lockstep_compile::Precision;
use lockstep_exec::cpu::{self, Simd};
use lockstep_ir::{DType, DeviceProfile, Fusion, OpKind, Workspace};
use lockstep_plan::{Machine, Target};
use std::collections::BTreeMap;
use std::fmt::Write;

/// The profile whose programs the corpus has part by part; of others it has a line each.
pub const FIRST: &str = "amx";

/// The other profiles.
pub const OTHERS: [&str; 4] = ["avx512", "avx2", "portable", GPU];

/// The profile of a GPU.
pub const GPU: &str = "sm_90";

/// Types that programs of the corpus compute in, with those that gradients are summed in.
const TYPES: [(DType, DType); 5] = [
    (DType::F32, DType::F32),
    (DType::F32, DType::Fixed64),
    (DType::BF16, DType::F32),
    (DType::BF16, DType::BF16),
    (DType::F16, DType::F32),
];

/// A machine that has one device, whose profiles are data.
pub struct Recorded {
    profiles: BTreeMap<String, DeviceProfile>,
}

impl Recorded {
    /// The device of this name.
    pub fn new(name: &str) -> Self {
        let mut profiles = BTreeMap::new();
        for part in include_str!("profiles.txt").split("\n\n") {
            let (keys, body) = part.trim().split_once('\n').expect("keys and a profile");
            for key in keys.split("; ").filter_map(|key| key.strip_prefix(name)) {
                profiles.insert(key.trim_start().to_owned(), parse(body));
            }
        }
        Self { profiles }
    }
}

impl Machine for Recorded {
    fn cores(&self) -> usize {
        1
    }

    fn has_gpus(&self, _: usize) -> bool {
        false
    }

    fn profile(&self, _: Target, threads: usize, precision: Precision) -> DeviceProfile {
        assert_eq!(threads, 1, "profiles are those of one thread");
        self.profiles[&types(precision.compute, precision.gradients)].clone()
    }
}

/// The profiles of this code, as `profiles.txt` has them.
pub fn of_the_executors() -> String {
    let mut keys: Vec<(String, Vec<String>)> = Vec::new();
    let mut add = |name: &str, (compute, gradients), profile: &DeviceProfile| {
        let (key, body) = (format!("{name} {}", types(compute, gradients)), print(profile));
        match keys.iter_mut().find(|(known, _)| *known == body) {
            Some((_, keys)) => keys.push(key),
            None => keys.push((body, vec![key])),
        }
    };
    for of in TYPES {
        for simd in Simd::ALL {
            add(simd.name(), of, &cpu::profile_of(simd, 1, of.0, of.1));
        }
        add(GPU, of, &lockstep_cuda::profile("cuda", of.0, of.1, false));
    }
    let parts: Vec<String> = keys.into_iter().map(|(body, keys)| format!("{}\n{body}", keys.join("; "))).collect();
    parts.join("\n")
}

fn types(compute: DType, gradients: DType) -> String {
    format!("{compute}, sums in {gradients}")
}

fn print(profile: &DeviceProfile) -> String {
    let DeviceProfile {
        name,
        alignment,
        cross_entropy_logits,
        cross_entropy_rows,
        workspaces,
        workspaces_with_optional,
        fusions,
        faster,
        fp8_weights: _,
    } = profile;
    assert!(faster.is_empty(), "what is measured is no part of a fixed profile");
    let mut text = format!(
        "  name: {name}\n  alignment: {alignment}\n  cross_entropy_logits: {cross_entropy_logits}\n  \
         cross_entropy_rows: {cross_entropy_rows}\n"
    );
    for fusion in fusions {
        writeln!(text, "  fuses: {}", fusion.name()).unwrap();
    }
    for (kind, table) in [("scratch", workspaces), ("scratch with optional operands", workspaces_with_optional)] {
        for (op, Workspace { fixed, terms }) in table {
            write!(text, "  {kind}: {} {fixed}", op).unwrap();
            terms.iter().for_each(|(bytes, of)| write!(text, " {bytes}·{}", of.replace(' ', "·")).unwrap());
            text.push('\n');
        }
    }
    text
}

fn parse(body: &str) -> DeviceProfile {
    let mut profile = DeviceProfile {
        name: String::new(),
        alignment: 0,
        cross_entropy_logits: 0,
        cross_entropy_rows: 0,
        workspaces: BTreeMap::new(),
        workspaces_with_optional: BTreeMap::new(),
        fusions: Vec::new(),
        faster: Vec::new(),
        fp8_weights: 0,
    };
    for line in body.lines() {
        let (key, value) = line.trim().split_once(": ").expect("a key and a value");
        let table = match key {
            "name" => {
                profile.name = value.to_owned();
                continue;
            }
            "alignment" => {
                profile.alignment = value.parse().unwrap();
                continue;
            }
            "cross_entropy_logits" => {
                profile.cross_entropy_logits = value.parse().unwrap();
                continue;
            }
            "cross_entropy_rows" => {
                profile.cross_entropy_rows = value.parse().unwrap();
                continue;
            }
            "fuses" => {
                profile.fusions.push(Fusion::ALL.into_iter().find(|fusion| fusion.name() == value).unwrap());
                continue;
            }
            "scratch" => &mut profile.workspaces,
            "scratch with optional operands" => &mut profile.workspaces_with_optional,
            other => panic!("{other:?} is no key of a profile"),
        };
        let mut words = value.split(' ');
        let op = words.next().unwrap();
        let op = OpKind::ALL.iter().flat_map(|kind| kind.rows()).find(|row| row.name == op).unwrap().name;
        let fixed = words.next().unwrap().parse().unwrap();
        let term = |word: &str| {
            let (bytes, of) = word.split_once('·').unwrap();
            // A test of a second: nothing is gained by giving a few bytes back.
            (bytes.parse().unwrap(), &*of.replace('·', " ").leak())
        };
        table.insert(op, Workspace { fixed, terms: words.map(term).collect() });
    }
    profile
}
