//! The cheapest set of recomputed activations whose arena fits a budget.
//!
//! A set says for every kind of layer which of the values that backward reads are recomputed instead of saved. Its cost is the
//! recomputed FLOPs, then the bytes that these calls move. Costs follow from one layer of each kind. Arenas do not: what is
//! recomputed needs memory as well, so sets are lowered and placed in order of cost until one fits. Three things keep that
//! short: a set is skipped where the states and what it saves are over the budget already; a binary search along the sets that
//! free more for more gives a set that fits; and the walk over cheaper sets ends after [`WORK`] nodes. On small graphs it
//! completes, so that the answer is optimal; where it does not, the set that was found is used.
//!
//! What is left of the budget then is spent by [`mix`]: the first layers of a stage recompute more than the others.

mod mix;
#[cfg(test)]
mod tests;

use crate::passes::{Layers, Recomputation, recomputation};
use crate::settings::{Candidate, Recompute, Recomputed};
use crate::{CompileError, Estimator};
use lockstep_ir::graph::Phase;
use lockstep_ir::program::{BufferId, Lifetime, StepProgram};
use lockstep_ir::{Graph, TypeError, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Nodes that a search may place before it settles for what it has.
const WORK: usize = 1 << 16;

/// Values of one kind of layer that are decided about, the largest first; the others are saved.
const MOST: usize = 16;

/// Sets that are looked at one by one; where kinds have more together, only the best of each kind are combined.
const COMBINATIONS: usize = 1 << MOST;

/// What a search found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fit {
    /// The cheapest policy that fits.
    Recompute(Recompute),
    /// None does: the least bytes that an arena can have.
    Least(u64),
}

/// Finds the cheapest set of recomputed values under which the arena of every rank has at most `budget` bytes.
pub fn fit(estimator: &Estimator, budget: u64) -> Result<Fit, CompileError> {
    let mut search = Search::new(estimator)?;
    let sets = search.sets()?;
    match search.alike(&sets, budget)? {
        None => search.least(sets).map(Fit::Least),
        Some(found) => {
            let mixed = mix::cheaper(&mut search, &sets, found, budget)?;
            Ok(Fit::Recompute(mixed.unwrap_or_else(|| search.policy(&sets[found]))))
        }
    }
}

/// Values that are recomputed, of every kind: bits in the order of its candidates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Set {
    flops: u128,
    moved: u128,
    recomputed: Vec<u64>,
}

struct Search<'a> {
    estimator: &'a Estimator,
    kinds: Vec<Kind>,
    stages: Vec<StageMemory>,
    work: usize,
    /// Arenas that have been placed.
    known: BTreeMap<Vec<u64>, u64>,
}

/// One kind of layer.
struct Kind {
    candidates: Vec<Candidate>,
    calls: Vec<Call>,
    /// Bytes of every value that its layers make, by bit.
    bytes: Vec<u64>,
    /// Bits: values that backward reads, values that are saved whatever is decided, and each candidate's.
    read: u64,
    stays: u64,
    bits: Vec<u64>,
    layers: u64,
}

/// A forward node of a layer, and what recomputing it takes.
struct Call {
    outputs: u64,
    /// Made even where they are unused.
    always: u64,
    plain: Cost,
    /// From saved outputs: which, and the cost.
    shorter: Option<(u64, Cost)>,
}

struct Cost {
    flops: u128,
    reads: u64,
    read_bytes: u64,
}

/// What a pipeline stage's arena holds whatever is recomputed, and the bytes that recomputation frees.
struct StageMemory {
    /// States, host buffers, all saved values, and the largest operands that any one call has in the frame.
    bound: u64,
    /// By kind: bytes of each candidate in all layers of the stage and all micro-batches in flight.
    frees: Vec<Vec<u64>>,
    /// The kind of each of its layers.
    kinds: Vec<usize>,
}

impl<'a> Search<'a> {
    fn new(estimator: &'a Estimator) -> Result<Self, CompileError> {
        let layers = estimator.layers();
        let graph = &estimator.derived;
        let values = layers.candidates(graph);
        let mut kinds = Vec::new();
        for (kind, layer) in layers.representatives() {
            let mut own: Vec<(Candidate, ValueId)> =
                values.iter().filter(|(c, _)| c.kind == kind).map(|(c, v)| (*c, *v)).collect();
            own.sort_by_key(|(c, v)| (std::cmp::Reverse(graph.ty(*v).bytes()), *c));
            own.truncate(MOST);
            kinds.push(Kind::new(graph, &layers, kind, layer, &own)?);
        }
        let none = estimator.programs(Recompute::None)?;
        // Layers are counted anew in every stage.
        let starts: Vec<usize> = (0..layers.in_stage.len()).filter(|l| layers.in_stage[*l] == 0).collect();
        let end = |s: usize| starts.get(s + 1).copied().unwrap_or(layers.kind_of.len());
        let of_stage = |s: usize| starts.get(s).map_or(&[][..], |from| &layers.kind_of[*from..end(s)]);
        let of_rank = |stages: &Vec<usize>| stages.iter().flat_map(|s| of_stage(*s)).copied().collect();
        let stages = none.iter().zip(&estimator.pipeline.virtual_stages);
        let stages = stages.map(|(p, own)| StageMemory::new(p, estimator, &layers, &kinds, of_rank(own))).collect();
        let mut search = Self { estimator, kinds, stages, work: 0, known: BTreeMap::new() };
        search.note(vec![0; search.kinds.len()], &none);
        Ok(search)
    }

    /// Sets that free more than all that are cheaper, of sets from the cheapest on.
    fn front(&self, sets: &[Set]) -> Vec<usize> {
        let mut least = u64::MAX;
        let mut frees_more = |set: &Set| {
            let before = least;
            least = least.min(self.bound(set));
            least < before
        };
        (0..sets.len()).filter(|s| frees_more(&sets[*s])).collect()
    }

    /// The cheapest set that fits where all layers of a kind do the same.
    fn alike(&mut self, sets: &[Set], budget: u64) -> Result<Option<usize>, CompileError> {
        let front = self.front(sets);
        let (mut from, mut to) = (0, front.len());
        while from < to {
            let middle = (from + to) / 2;
            match self.arena(&sets[front[middle]])? <= budget {
                true => to = middle,
                false => from = middle + 1,
            }
        }
        let found = front.get(to).copied();
        for (s, set) in sets[..found.unwrap_or(sets.len())].iter().enumerate() {
            if self.bound(set) <= budget && self.may_go_on() && self.arena(set)? <= budget {
                return Ok(Some(s));
            }
        }
        Ok(found)
    }

    /// All sets, cheapest first.
    fn sets(&self) -> Result<Vec<Set>, CompileError> {
        let decisions: usize = self.kinds.iter().map(|k| k.bits.len()).sum();
        let all = 1usize.checked_shl(decisions as u32).is_some_and(|sets| sets <= COMBINATIONS);
        let mut sets = vec![Set { flops: 0, moved: 0, recomputed: Vec::new() }];
        for (k, kind) in self.kinds.iter().enumerate() {
            let mut own: Vec<(u128, u128, u64)> = (0..1u64 << kind.bits.len())
                .map(|chosen| {
                    let (flops, moved) = kind.cost(chosen);
                    (flops, moved, chosen)
                })
                .collect();
            own.sort_unstable();
            if !all {
                let mut most = None;
                own.retain(|(_, _, chosen)| {
                    let frees: u64 = self.stages.iter().map(|s| s.freed(k, *chosen)).sum();
                    let better = most.is_none_or(|most| frees > most);
                    most = most.max(Some(frees));
                    better
                });
            }
            let join = |set: &Set, (flops, moved, chosen): &(u128, u128, u64)| Set {
                flops: set.flops + flops,
                moved: set.moved + moved,
                recomputed: set.recomputed.iter().copied().chain([*chosen]).collect(),
            };
            sets = sets.iter().flat_map(|set| own.iter().map(move |chosen| join(set, chosen))).collect();
            sets.sort_unstable();
            if !all {
                // Sets that cost more than another and free no more are of no use, whatever is added to them.
                let mut most = None;
                sets.retain(|set| {
                    let frees: u64 = self.stages.iter().map(|s| s.frees(&set.recomputed)).sum();
                    let better = most.is_none_or(|most| frees > most);
                    most = most.max(Some(frees));
                    better
                });
            }
        }
        Ok(sets)
    }

    /// Bytes that the arena has at least.
    fn bound(&self, set: &Set) -> u64 {
        // Rows that go to experts are saved once, and freed where they are sent and where they come.
        self.stages.iter().map(|s| s.bound.saturating_sub(s.frees(&set.recomputed))).max().unwrap_or(0)
    }

    /// Bytes of the largest arena.
    fn arena(&mut self, set: &Set) -> Result<u64, CompileError> {
        if let Some(known) = self.known.get(&set.recomputed) {
            return Ok(*known);
        }
        let programs = self.estimator.programs(self.policy(set))?;
        Ok(self.note(set.recomputed.clone(), &programs))
    }

    fn note(&mut self, recomputed: Vec<u64>, programs: &[StepProgram]) -> u64 {
        let arena = programs.iter().map(|p| p.arena_bytes).max().unwrap_or(0);
        self.work += self.estimator.derived.nodes.len();
        self.known.insert(recomputed, arena);
        arena
    }

    fn may_go_on(&self) -> bool {
        self.work < WORK
    }

    fn values(&self, set: &Set) -> BTreeSet<Candidate> {
        let mut values = BTreeSet::new();
        for (kind, chosen) in self.kinds.iter().zip(&set.recomputed) {
            values.extend(kind.candidates.iter().enumerate().filter(|(c, _)| chosen >> c & 1 == 1).map(|(_, c)| *c));
        }
        values
    }

    fn policy(&self, set: &Set) -> Recompute {
        let values = self.values(set);
        if values.is_empty() { Recompute::None } else { Recompute::Values(Recomputed::by_all(values)) }
    }

    /// The least arena of all sets: those that may have it are placed, by increasing lower bound.
    fn least(&mut self, mut sets: Vec<Set>) -> Result<u64, CompileError> {
        sets.sort_by_key(|set| self.bound(set));
        let mut least = self.known.values().min().copied().unwrap_or(u64::MAX);
        for set in sets {
            if self.bound(&set) >= least || !self.may_go_on() {
                break;
            }
            least = least.min(self.arena(&set)?);
        }
        Ok(least)
    }
}

impl Kind {
    fn new(
        graph: &Graph,
        layers: &Layers,
        kind: usize,
        layer: usize,
        own: &[(Candidate, ValueId)],
    ) -> Result<Self, TypeError> {
        let nodes: Vec<_> = layers.nodes[layer].iter().map(|n| &graph.nodes[*n]).collect();
        let values: Vec<ValueId> = nodes.iter().flat_map(|n| n.outputs.iter().flatten().copied()).collect();
        // A layer of more values than a word has bits decides about the first of them.
        let bit = |v: ValueId| values.iter().position(|x| *x == v).filter(|b| *b < 64).map_or(0, |b| 1u64 << b);
        let all = |vs: &mut dyn Iterator<Item = ValueId>| vs.fold(0, |bits, v| bits | bit(v));
        let cost = |Recomputation { op, inputs, outputs }: Recomputation| -> Result<Cost, TypeError> {
            let types: Vec<_> = inputs.iter().map(|v| graph.ty(*v)).collect();
            let wanted: Vec<bool> = outputs.iter().map(Option::is_some).collect();
            Ok(Cost {
                flops: op.flops(&types, &wanted)?.hardware,
                reads: all(&mut inputs.iter().copied()),
                read_bytes: types.iter().map(|ty| ty.bytes()).sum(),
            })
        };
        let mut calls = Vec::new();
        for node in &nodes {
            let (plain, from_saved) = (recomputation(node, &|_| false), recomputation(node, &|_| true));
            let from = all(&mut from_saved.inputs.iter().copied()) & all(&mut node.outputs.iter().flatten().copied());
            let always = node.op.spec().always_made.iter().filter_map(|o| node.outputs[*o]);
            calls.push(Call {
                outputs: all(&mut node.outputs.iter().flatten().copied()),
                always: all(&mut always.into_iter()),
                plain: cost(plain)?,
                shorter: if from == 0 { None } else { Some((from, cost(from_saved)?)) },
            });
        }
        let read = all(&mut values.iter().copied().filter(|v| layers.is_wanted(*v).1));
        let leaves = all(&mut values.iter().copied().filter(|v| layers.is_wanted(*v).0));
        let bits: Vec<u64> = own.iter().map(|(_, v)| bit(*v)).collect();
        Ok(Self {
            candidates: own.iter().map(|(c, _)| *c).collect(),
            calls,
            bytes: values.iter().take(64).map(|v| graph.ty(*v).bytes()).collect(),
            read,
            stays: leaves | (read & !bits.iter().fold(0, |all, b| all | b)),
            bits,
            layers: layers.kind_of.iter().filter(|k| **k == kind).count() as u64,
        })
    }

    /// FLOPs and bytes moved of what all layers of the kind recompute.
    fn cost(&self, chosen: u64) -> (u128, u128) {
        let (flops, moved) = self.cost_of_one(chosen);
        (flops * u128::from(self.layers), moved * u128::from(self.layers))
    }

    /// The same for one layer.
    fn cost_of_one(&self, chosen: u64) -> (u128, u128) {
        let saved =
            (0..self.bits.len()).filter(|c| chosen >> c & 1 == 0).fold(self.stays, |saved, c| saved | self.bits[c]);
        let mut needed = self.read & !saved;
        let (mut flops, mut moved) = (0, 0u64);
        for call in self.calls.iter().rev().filter(|call| call.outputs != 0) {
            let wanted = call.outputs & needed;
            if wanted == 0 {
                continue;
            }
            let (cost, always) = match &call.shorter {
                Some((from, cost)) if from & saved == *from => (cost, 0),
                _ => (&call.plain, call.always),
            };
            flops += cost.flops;
            let written = wanted | always;
            let bytes = (0..self.bytes.len()).filter(|b| written >> b & 1 == 1).map(|b| self.bytes[b]);
            moved += cost.read_bytes + bytes.sum::<u64>();
            needed |= cost.reads & !saved;
        }
        (flops, u128::from(moved))
    }
}

impl StageMemory {
    fn new(program: &StepProgram, estimator: &Estimator, layers: &Layers, kinds: &[Kind], own: Vec<usize>) -> Self {
        let graph = &estimator.derived;
        let forward = program.segments.iter().flat_map(|s| &s.instrs).filter(|i| i.phase == Phase::Forward);
        let saved: BTreeMap<&str, u64> = forward
            .flat_map(|i| i.outputs.iter().flatten())
            .filter(|a| matches!(program.lifetime(a.buffer), Lifetime::Saved(_)))
            .map(|a| {
                let buffer = &program.buffers[a.buffer.0];
                let copies = program.regions[buffer.region].slots as u64;
                (program.values[a.value].as_str(), estimator.align(buffer.bytes) * copies)
            })
            .collect();
        let bytes = |kind: usize, c: &Candidate| -> u64 {
            let of_kind = layers.nodes.iter().zip(&layers.kind_of).filter(|(_, k)| **k == kind);
            let value = |nodes: &Vec<usize>| graph.nodes[nodes[c.node]].outputs[c.output];
            let names = of_kind.filter_map(|(nodes, _)| value(nodes)).map(|v| graph.get(v).name.as_str());
            names.filter_map(|name| saved.get(name)).sum::<u64>()
        };
        let frees = kinds.iter().enumerate().map(|(k, kind)| kind.candidates.iter().map(|c| bytes(k, c)).collect());
        let in_arena = |lifetime: Lifetime| {
            !matches!(lifetime, Lifetime::Step | Lifetime::Frame | Lifetime::Overlay) && !lifetime.is_in_host()
        };
        let without_frame = program.regions.iter().filter(|r| in_arena(r.lifetime));
        let frame = program.segments.iter().flat_map(|s| &s.instrs).map(|i| {
            let own: BTreeSet<BufferId> = i.buffers().collect();
            let in_frame = own.into_iter().filter(|b| program.lifetime(*b) == Lifetime::Frame);
            in_frame.map(|b| program.buffers[b.0].bytes).sum::<u64>()
        });
        let bound = without_frame.map(|r| r.bytes()).sum::<u64>() + frame.max().unwrap_or(0);
        // What is recomputed leaves its room in the memory of the host to other values.
        let in_host = program.regions.iter().filter(|r| matches!(r.lifetime, Lifetime::SavedInHost(_)));
        let bound = bound.saturating_sub(in_host.map(|r| r.bytes()).sum());
        Self { bound, frees: frees.collect(), kinds: own }
    }

    fn freed(&self, kind: usize, chosen: u64) -> u64 {
        self.frees[kind].iter().enumerate().filter(|(c, _)| chosen >> c & 1 == 1).map(|(_, bytes)| bytes).sum()
    }

    fn frees(&self, recomputed: &[u64]) -> u64 {
        recomputed.iter().enumerate().map(|(kind, chosen)| self.freed(kind, *chosen)).sum()
    }
}
