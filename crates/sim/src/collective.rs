//! Collectives: which ranks take part, over which links, by which algorithm.

use crate::work::Routed;
use crate::{Hardware, Terms};
use lockstep_ir::{Axes, Collective, Coordinates, Mesh, MeshAxis};

/// Buckets are as large as with this many ranks, at least.
const LEAST_BUCKET_RANKS: f64 = 40.0;

/// A group of ranks on nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// How many ranks.
    pub ranks: usize,
    /// How many of them are on one node, at most.
    pub on_a_node: usize,
    /// On how many nodes they are.
    pub nodes: usize,
}

impl Group {
    /// The group along these axes of the first rank of a stage. Ranks lie on nodes in their order.
    pub fn of(mesh: &Mesh, over: Axes, stage: usize, gpus_per_node: usize) -> Self {
        let ranks = mesh.group(
            Coordinates::default().with(MeshAxis::Pp, if over.contains(MeshAxis::Pp) { 0 } else { stage }),
            over,
        );
        let (mut nodes, mut most, mut here, mut last) = (0, 0, 0, None);
        for rank in &ranks {
            let node = rank / gpus_per_node;
            if last != Some(node) {
                (nodes, here, last) = (nodes + 1, 0, Some(node));
            }
            here += 1;
            most = most.max(here);
        }
        Self { ranks: ranks.len(), on_a_node: most, nodes }
    }

    /// This many ranks that lie on nodes one after the other.
    pub fn of_neighbours(ranks: usize, gpus_per_node: usize) -> Self {
        Self { ranks, on_a_node: ranks.min(gpus_per_node), nodes: ranks.div_ceil(gpus_per_node) }
    }

    /// The first of its neighbours that share a part: groups of this many along the innermost axis.
    pub fn sharers(self, sharers: usize) -> Self {
        let on_a_node = self.on_a_node.min(sharers);
        Self { ranks: sharers, on_a_node, nodes: sharers.div_ceil(on_a_node.max(1)) }
    }
}

/// Whose ranks take part in a collective, where constants differ by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// Those that split matrices alone.
    Tensor,
    /// Those that have experts, among others.
    Experts,
    /// Those that share gradients and parameters.
    Data,
    /// All others.
    Other,
}

impl Ranks {
    fn of(over: Axes) -> Self {
        if over == MeshAxis::Tp.into() {
            Ranks::Tensor
        } else if over == MeshAxis::Ep.into() {
            Ranks::Experts
        } else if [MeshAxis::DpShard, MeshAxis::DpReplicate].into_iter().any(|axis| over.contains(axis)) {
            Ranks::Data
        } else {
            Ranks::Other
        }
    }
}

/// A collective on some hardware: seconds at full rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlacedCollective {
    pattern: Collective,
    group: Group,
    ranks: Ranks,
    bytes: f64,
    /// Seconds of the whole tensors at the rate of a GPU's link.
    link_s: f64,
    /// Seconds of them at the rate of the adapters that the group has on a node.
    fabric_s: f64,
    /// Of an all-to-all: the shares of the bytes that pass links inside a node, and adapters.
    inside: f64,
    outside: f64,
}

impl PlacedCollective {
    /// Of tensors of this many bytes as a whole, over these axes.
    pub fn new(pattern: Collective, over: Axes, group: Group, bytes: u64, hardware: &Hardware) -> Self {
        let adapters = hardware.cluster.node_bytes_per_s / hardware.cluster.gpus_per_node as f64;
        let (n, near) = (group.ranks as f64, group.on_a_node as f64);
        Self {
            inside: (near - 1.0) / n,
            outside: (n - near) / n,
            pattern,
            group,
            ranks: Ranks::of(over),
            bytes: bytes as f64,
            link_s: bytes as f64 / hardware.link_bytes_per_s(),
            fabric_s: bytes as f64 / (adapters * group.on_a_node as f64),
        }
    }

    /// The same where a row that goes to several experts of another node crosses the network once: the rank there that gets it passes it on,
    /// and what comes back is added up there first.
    pub fn once_per_node(self, routed: Routed) -> Self {
        let (near, nodes) = (self.group.on_a_node as f64, self.group.nodes as f64);
        let crossings = routed.nodes(self.group.nodes) * (nodes - 1.0) / nodes;
        Self { inside: (near - 1.0) / near, outside: crossings / routed.choices as f64, ..self }
    }

    /// How many ranks take part; those on other nodes than the first count a fifth more for each node.
    pub fn crowd(&self) -> f64 {
        self.group.ranks as f64 * (1.0 + (self.group.nodes as f64 - 1.0) / 5.0)
    }

    /// Whether it carries tokens to their experts or back.
    pub fn is_dispatch(&self) -> bool {
        self.pattern == Collective::AllToAll && self.ranks == Ranks::Experts
    }

    /// The share of its latency that it has: gradients and parameters wait for a bucket of others, which grows with the ranks.
    fn of_a_bucket(&self, terms: &Terms) -> f64 {
        let bucket = terms.bucket_bytes * (self.group.ranks as f64).max(LEAST_BUCKET_RANKS);
        if self.ranks == Ranks::Data && bucket > 0.0 { (self.bytes / bucket).min(1.0) } else { 1.0 }
    }

    /// Whether it leaves the node.
    pub fn crosses_nodes(&self) -> bool {
        self.group.nodes > 1
    }

    /// A rank sends a part of what it has to each, without a ring: what goes to other nodes takes an adapter, all at the same time.
    fn all_to_all(&self, terms: &Terms) -> f64 {
        let (n, near) = (self.group.ranks as f64, self.group.on_a_node as f64);
        let inside = self.link_s / terms.link_efficiency * self.inside;
        // Adapters are shared by all of the group on a node.
        let outside = self.fabric_s * near / terms.fabric_efficiency * self.outside;
        let hop = if self.crosses_nodes() { terms.fabric_hop } else { terms.link_hop };
        inside.max(outside) + hop * (n - 1.0)
    }

    /// How long it takes.
    pub fn seconds(&self, terms: &Terms) -> f64 {
        let n = self.group.ranks as f64;
        if self.group.ranks < 2 {
            return 0.0;
        }
        let link = self.link_s / terms.link_efficiency;
        let (whole, hop) = match self.crosses_nodes() {
            true => (link.max(self.fabric_s / terms.fabric_efficiency), terms.fabric_hop),
            false => (link, terms.link_hop),
        };
        let shared = self.of_a_bucket(terms);
        let hop = hop * shared;
        // A ring passes a part on n − 1 times.
        let pass = whole * (n - 1.0) / n;
        let ring = pass + hop * (n - 1.0);
        let time = match self.pattern {
            Collective::ReduceScatter | Collective::AllGather => ring,
            Collective::Shift => whole / n + hop,
            Collective::AllToAll => self.all_to_all(terms),
            Collective::AllReduce if self.crosses_nodes() => {
                // Up and down a tree of nodes; a chain inside each. All of the tensor passes twice.
                let depth = (self.group.nodes as f64).log2().ceil();
                let tree = 2.0 * (whole + depth * hop + (self.group.on_a_node as f64 - 1.0) * terms.link_hop);
                tree.min(2.0 * ring)
            }
            Collective::AllReduce => 2.0 * (pass / terms.link_all_reduce + hop * (n - 1.0)),
        };
        let exposed = if self.ranks == Ranks::Tensor { terms.tp_exposed } else { 1.0 };
        terms.collective_launch * shared + exposed * time
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Catalogue, Constants, Framework};

    fn mesh(dp: usize, tp: usize, pp: usize) -> Mesh {
        Mesh::ONE.with(MeshAxis::DpShard, dp).with(MeshAxis::Tp, tp).with(MeshAxis::Pp, pp)
    }

    #[test]
    fn groups_lie_on_nodes_as_ranks_are_numbered() {
        let of = |mesh: &Mesh, axis: MeshAxis| Group::of(mesh, axis.into(), 0, 8);
        let m = mesh(4, 4, 2);
        assert_eq!(of(&m, MeshAxis::Tp), Group { ranks: 4, on_a_node: 4, nodes: 1 });
        assert_eq!(of(&m, MeshAxis::DpShard), Group { ranks: 4, on_a_node: 2, nodes: 2 });
        assert_eq!(of(&m, MeshAxis::Pp), Group { ranks: 2, on_a_node: 1, nodes: 2 });
        assert_eq!(of(&mesh(1, 16, 1), MeshAxis::Tp), Group { ranks: 16, on_a_node: 8, nodes: 2 });
    }

    #[test]
    fn more_bytes_ranks_and_nodes_take_longer() {
        let all = Catalogue::builtin();
        let hardware = all.hardware("meta-24k").unwrap();
        let terms = Constants::builtin().terms(&Framework::named("lockstep").unwrap(), &hardware);
        let time = |pattern, bytes: u64, dp: usize, tp: usize, axis: MeshAxis| {
            let group = Group::of(&mesh(dp, tp, 1), axis.into(), 0, 8);
            PlacedCollective::new(pattern, axis.into(), group, bytes, &hardware).seconds(&terms)
        };
        for pattern in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll] {
            let inside = time(pattern, 1 << 28, 1, 8, MeshAxis::Tp);
            let outside = time(pattern, 1 << 28, 8, 8, MeshAxis::DpShard);
            assert!(time(pattern, 1 << 29, 1, 8, MeshAxis::Tp) > inside);
            assert!(outside > 3.0 * inside, "{pattern:?}: {outside} {inside}");
            assert!(time(pattern, 1 << 20, 64, 8, MeshAxis::DpShard) > time(pattern, 1 << 20, 8, 8, MeshAxis::DpShard));
        }
        assert_eq!(time(Collective::AllGather, 1 << 20, 1, 1, MeshAxis::Tp), 0.0);
    }
}
