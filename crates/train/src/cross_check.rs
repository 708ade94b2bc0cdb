//! Whether ranks that should have the same numbers have them: what names a host whose memory or whose arithmetic is wrong.
//!
//! Two comparisons, both to the bit. **State**: of every tensor that several ranks hold, a checksum on each. **Arithmetic**: the losses of one
//! micro-batch of each data-parallel copy of the model, computed by that copy and by the one before it, which has the same weights.
//! What the majority of three or more has is right; of two, both are named.

use crate::Result;
use crate::checkpoint::rank_parts::of_each;
use lockstep_exec::{ExecError, Executor, World};
use lockstep_infer::feed::Sequences;
use lockstep_ir::graph::State;
use lockstep_ir::program::{Role, Tensor};
use lockstep_ir::{Axes, Coordinates, Mesh, MeshAxis, Placement, StepProgram, units};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use xxhash_rust::xxh3::Xxh3;

/// Ranks that do not have what others have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Suspects {
    pub(crate) ranks: Vec<usize>,
    /// Whether a majority of others agrees; else one of the ranks is right.
    pub(crate) certain: bool,
    pub(crate) of: Compared,
}

/// What was compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Compared {
    /// Tensors that the ranks hold, by name.
    State(Vec<String>),
    /// Losses that they compute.
    Losses,
}

/// The axes along which there are copies of the model that compute micro-batches of their own.
fn copies() -> Axes {
    Axes::of(&[MeshAxis::DpReplicate, MeshAxis::DpShard])
}

/// How many copies of the model there are.
pub(crate) fn copies_of(mesh: &Mesh) -> usize {
    mesh.size(copies())
}

/// The ranks of a copy.
fn ranks_of(mesh: &Mesh, copy: usize) -> Vec<usize> {
    (0..mesh.ranks()).filter(|rank| mesh.coordinates(*rank).index(copies(), mesh) == copy).collect()
}

/// A tensor's elements on a rank: which tensor, which elements, and their checksum.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Held {
    tensor: usize,
    elements: u64,
    checksum: u64,
}

/// Ranks whose state is not that of the ranks which should have the same. All processes call this together.
pub(crate) fn state(world: &dyn World, tensors: &[Tensor]) -> Result<Vec<Suspects>> {
    let (mesh, programs) = (world.mesh(), world.programs());
    let mine: Vec<(usize, Vec<Held>)> = {
        let of_rank = |at: Coordinates, executor: &dyn Executor| {
            held((&mesh, programs), tensors, at, executor).map(|held| (mesh.rank(at), held))
        };
        of_each(world, of_rank, &mut || {})?.into_iter().collect::<Result<_>>()?
    };
    let said = world.exchange("compare checksums", &serde_json::to_vec(&mine).unwrap_or_default())?;
    let wrong = |error: serde_json::Error| ExecError::Internal(format!("checksums: {error}"));
    let mut groups: BTreeMap<(usize, u64), Vec<(usize, u64)>> = BTreeMap::new();
    for said in said {
        let ranks: Vec<(usize, Vec<Held>)> = serde_json::from_slice(&said).map_err(wrong)?;
        for (rank, held) in ranks {
            for Held { tensor, elements, checksum } in held {
                groups.entry((tensor, elements)).or_default().push((rank, checksum));
            }
        }
    }
    let mut found: BTreeMap<(Vec<usize>, bool), Vec<String>> = BTreeMap::new();
    for ((tensor, _), ranks) in groups {
        let Some(suspects) = outvoted(&ranks) else { continue };
        let names = found.entry(suspects).or_default();
        if let Some(tensor) = tensors.get(tensor).filter(|tensor| !names.contains(&tensor.name)) {
            names.push(tensor.name.clone());
        }
    }
    let suspects = |((ranks, certain), names)| Suspects { ranks, certain, of: Compared::State(names) };
    Ok(found.into_iter().map(suspects).collect())
}

/// What a rank holds that others hold as well.
fn held(
    (mesh, programs): (&Mesh, &[StepProgram]),
    tensors: &[Tensor],
    at: Coordinates,
    executor: &dyn Executor,
) -> Result<Vec<Held>> {
    let Some(program) = programs.get(at.get(MeshAxis::Pp)) else { return Ok(Vec::new()) };
    let mut all = Vec::new();
    for (number, tensor) in tensors.iter().enumerate() {
        let stays = matches!(
            tensor.role,
            Role::State(State::Parameter(_) | State::Moment { .. } | State::Master { .. } | State::Constant(_))
        );
        let shared = mesh.size(tensor.sharding.axes(Placement::Replicated).within(Axes::STAGE)) > 1;
        if !stays || !shared || program.tensor(&tensor.name).is_none() {
            continue;
        }
        let (mut elements, mut checksum, width) = (Xxh3::new(), Xxh3::new(), tensor.whole.dtype.bytes());
        // In one piece: from a device, each reading is a copy.
        let mine = executor.read(&tensor.name, 0)?;
        for run in tensor.sharding.runs(&tensor.whole, mesh, at) {
            elements.update(&[run.whole, run.len].map(|n| (n as u64).to_le_bytes()).concat());
            let bytes = mine.get(run.local * width..(run.local + run.len) * width);
            checksum.update(bytes.ok_or_else(|| ExecError::Internal(format!("{} is too short", tensor.name)))?);
        }
        all.push(Held { tensor: number, elements: elements.digest(), checksum: checksum.digest() });
    }
    Ok(all)
}

/// Who does not have the checksum of the others, and whether those are more than half; nobody where all have the same.
fn outvoted(ranks: &[(usize, u64)]) -> Option<(Vec<usize>, bool)> {
    let mut by_checksum: BTreeMap<u64, usize> = BTreeMap::new();
    ranks.iter().for_each(|(_, checksum)| *by_checksum.entry(*checksum).or_default() += 1);
    if by_checksum.len() < 2 {
        return None;
    }
    let right = by_checksum.iter().find(|(_, count)| 2 * **count > ranks.len()).map(|(checksum, _)| *checksum);
    let mut others: Vec<usize> =
        ranks.iter().filter(|(_, checksum)| Some(*checksum) != right).map(|(rank, _)| *rank).collect();
    others.sort_unstable();
    Some((others, right.is_some()))
}

/// Samples of a round in which every copy of the model gets the micro-batch of the next.
pub(crate) struct Rotated<'a> {
    pub(crate) data: &'a dyn Sequences,
    pub(crate) first: u64,
    /// Sequences of the round, and of a copy.
    pub(crate) round: u64,
    pub(crate) by: u64,
}

impl Sequences for Rotated<'_> {
    fn source(&self, index: u64) -> (&lockstep_data::TokenStream, u64) {
        self.data.source(self.first + (index - self.first + self.by) % self.round)
    }
}

/// Ranks whose losses are not those that others compute of the same sequences: `own` are in the order of the round, `rotated` as the copies
/// of the model computed them, each those of the next.
pub(crate) fn losses(mesh: &Mesh, own: &[f64], rotated: &[f64]) -> Option<Suspects> {
    let copies = copies_of(mesh);
    let by = own.len() / copies.max(1);
    let differs = |copy: usize| {
        let bits = |loss: &f64| loss.to_bits();
        let mine = own[copy * by..(copy + 1) * by].iter().map(bits);
        let before = (copy + copies - 1) % copies;
        !mine.eq(rotated[before * by..(before + 1) * by].iter().map(bits))
    };
    // Each copy has computed its own micro-batch and that of the next: where both are other losses than its neighbours computed, it is the copy.
    let differ: Vec<bool> = (0..copies).map(differs).collect();
    let next = |copy: usize| (copy + 1) % copies;
    let certain: Vec<usize> = (0..copies).filter(|copy| copies > 2 && differ[*copy] && differ[next(*copy)]).collect();
    let either: Vec<usize> = (0..copies).filter(|copy| differ[*copy] || differ[next(*copy)]).collect();
    let (of, is_certain) = if certain.is_empty() { (either, false) } else { (certain, true) };
    let mut ranks: Vec<usize> = of.into_iter().flat_map(|copy| ranks_of(mesh, copy)).collect();
    ranks.sort_unstable();
    (!ranks.is_empty()).then_some(Suspects { ranks, certain: is_certain, of: Compared::Losses })
}

impl Suspects {
    /// What is wrong, with the host of each rank.
    pub(crate) fn text(&self, host: &dyn Fn(usize) -> String) -> String {
        let mut by_host: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        self.ranks.iter().for_each(|rank| by_host.entry(host(*rank)).or_default().push(*rank));
        let who: Vec<String> =
            by_host.iter().map(|(host, ranks)| format!("{} on host {host}", units::ranks(ranks))).collect();
        let (who, many) = (who.join(" and "), self.ranks.len() > 1);
        let what = match &self.of {
            Compared::State(names) => {
                let more = match names.len() {
                    0 | 1 => String::new(),
                    2 => " and 1 more tensor".to_owned(),
                    count => format!(" and {} more tensors", count - 1),
                };
                format!("other values of {}{more}", names.first().map_or("a tensor", String::as_str))
            }
            Compared::Losses => "another loss of the same micro-batch".to_owned(),
        };
        let verb = match (&self.of, many) {
            (Compared::State(_), true) => "have",
            (Compared::State(_), false) => "has",
            (Compared::Losses, true) => "compute",
            (Compared::Losses, false) => "computes",
        };
        match self.certain {
            true => format!("{who} {verb} {what} than the ranks that should have the same"),
            false => format!("{who} do not agree: each {} {what}", if verb == "have" { "has" } else { "computes" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_majority_is_right_and_of_two_both_are_named() {
        assert_eq!(outvoted(&[(0, 7), (1, 7), (2, 7)]), None);
        assert_eq!(outvoted(&[(4, 7)]), None);
        assert_eq!(outvoted(&[(0, 7), (3, 8), (5, 7)]), Some((vec![3], true)));
        assert_eq!(outvoted(&[(2, 7), (1, 8)]), Some((vec![1, 2], false)));
        assert_eq!(outvoted(&[(0, 7), (1, 8), (2, 7), (3, 8)]), Some((vec![0, 1, 2, 3], false)));
    }

    /// Who is named where each copy of the model computes its losses with an error of its own, by what it has computed before.
    fn named(mesh: &Mesh, error: &dyn Fn(usize, usize) -> f64) -> Option<(Vec<usize>, bool)> {
        let copies = copies_of(mesh);
        let by = 2;
        let own: Vec<f64> = (0..copies * by).map(|i| i as f64 + error(i / by, 0)).collect();
        let rotated = (0..copies * by).map(|i| ((i + by) % (copies * by)) as f64 + error(i / by, 1));
        let rotated: Vec<f64> = rotated.collect();
        losses(mesh, &own, &rotated).map(|suspects| (suspects.ranks, suspects.certain))
    }

    #[test]
    fn a_copy_of_the_model_that_computes_otherwise_is_told_from_its_neighbours() {
        let three = Mesh::ONE.with(MeshAxis::DpShard, 3);
        assert_eq!(named(&three, &|_, _| 0.0), None);
        for wrong in 0..3 {
            let always = |copy, _| if copy == wrong { 0.5 } else { 0.0 };
            assert_eq!(named(&three, &always), Some((vec![wrong], true)));
        }
        // A flip that comes once: one of the two who computed it.
        assert_eq!(
            named(&three, &|copy, time| if (copy, time) == (1, 0) { 0.5 } else { 0.0 }),
            Some((vec![0, 1], false))
        );
        let two = Mesh::ONE.with(MeshAxis::DpShard, 2);
        assert_eq!(named(&two, &|copy, _| if copy == 1 { 0.5 } else { 0.0 }), Some((vec![0, 1], false)));
        // All ranks of the copy have a part in it.
        let square = Mesh::ONE.with(MeshAxis::DpReplicate, 2).with(MeshAxis::DpShard, 2).with(MeshAxis::Tp, 2);
        assert_eq!(named(&square, &|copy, _| if copy == 2 { 0.5 } else { 0.0 }), Some((vec![4, 5], true)));
        // Losses that are not finite are compared too.
        assert_eq!(named(&three, &|_, _| f64::NAN), None);
        assert_eq!(named(&three, &|copy, _| if copy == 0 { f64::NAN } else { 0.0 }), Some((vec![0], true)));
    }

    #[test]
    fn ranks_are_named_with_their_hosts() {
        let host = |rank: usize| format!("n{}", rank / 2);
        let text = |ranks: &[usize], certain, of| Suspects { ranks: ranks.to_vec(), certain, of }.text(&host);
        let names = |names: &[&str]| Compared::State(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(
            text(&[3], true, names(&["embed", "head"])),
            "rank 3 on host n1 has other values of embed and 1 more tensor than the ranks that should have the same"
        );
        assert_eq!(
            text(&[0, 2], false, Compared::Losses),
            "rank 0 on host n0 and rank 2 on host n1 do not agree: each computes another loss of the same micro-batch"
        );
    }
}
