//! Which corpus each sample of a run comes from.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Interleaves corpora by weight: a pure function of the sample index, without tables.
///
/// The samples are dealt out by a binary tree over the corpora. A node gives its lighter side the rounded share of every
/// prefix, so two corpora are never more than half a sample away from their weights. The tree is a Huffman tree, in
/// which no inner node takes more than two thirds of its parent; so with any number of corpora each stays within two
/// samples, and in practice within one, at every prefix of a run of any length.
#[derive(Debug)]
pub(crate) struct Mix {
    root: Node,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    Corpus(usize),
    Split { light: Box<Node>, heavy: Box<Node>, light_weight: u128, weight: u128 },
}

/// The sum that weights are scaled to. Its product with any index fits 128 bits.
const SCALE: f64 = (1u64 << 53) as f64;

impl Mix {
    /// For corpora of these positive, finite weights, of which there is at least one.
    pub(crate) fn new(weights: &[f64]) -> Self {
        let largest = weights.iter().copied().fold(0.0, f64::max);
        // Scaled by the largest first, so that the sum of huge weights stays finite.
        let total: f64 = weights.iter().map(|weight| weight / largest).sum();
        let scaled = |weight: f64| ((weight / largest / total * SCALE).round() as u128).max(1);
        let leaves = weights.iter().enumerate().map(|(i, &weight)| Reverse((scaled(weight), i, Node::Corpus(i))));
        let mut nodes: BinaryHeap<_> = leaves.collect();
        loop {
            let Some(Reverse((light_weight, order, light))) = nodes.pop() else {
                panic!("a mix has at least one corpus")
            };
            let Some(Reverse((heavy_weight, _, heavy))) = nodes.pop() else { return Mix { root: light } };
            let weight = light_weight + heavy_weight;
            let split = Node::Split { light: Box::new(light), heavy: Box::new(heavy), light_weight, weight };
            nodes.push(Reverse((weight, order, split)));
        }
    }

    /// The corpus of a sample, and how many earlier samples came from it.
    pub(crate) fn locate(&self, index: u64) -> (usize, u64) {
        let (mut node, mut index) = (&self.root, index);
        loop {
            match node {
                Node::Corpus(corpus) => return (*corpus, index),
                Node::Split { light, heavy, light_weight, weight } => {
                    let before = share(index, *light_weight, *weight);
                    // The next prefix of the last index does not fit 64 bits, and is not needed in full.
                    let after = share_of(u128::from(index) + 1, *light_weight, *weight);
                    (node, index) = if after > u128::from(before) { (light, before) } else { (heavy, index - before) };
                }
            }
        }
    }

    /// How many of the first `samples` come from a corpus.
    pub(crate) fn count(&self, corpus: usize, samples: u64) -> u64 {
        count(&self.root, corpus, samples).unwrap_or(0)
    }
}

/// Mixes whose weights change at given samples: each is a [`Mix`] of its own, and a corpus goes on where it was.
#[derive(Debug)]
pub(crate) struct MixSchedule {
    phases: Vec<Phase>,
}

#[derive(Debug)]
struct Phase {
    /// Its first sample.
    from: u64,
    mix: Mix,
    /// The corpora that have a share, in the order of the mix.
    corpora: Vec<usize>,
    /// Samples that came from each corpus before.
    before: Vec<u64>,
}

impl MixSchedule {
    /// From each of these samples on, of which the first is 0 and each is after the one before, the weights of all corpora. They are
    /// finite and not negative, and one of each list is positive.
    pub(crate) fn new(phases: &[(u64, Vec<f64>)]) -> Self {
        let mut built: Vec<Phase> = Vec::new();
        for (from, weights) in phases {
            let corpora: Vec<usize> = (0..weights.len()).filter(|&corpus| weights[corpus] > 0.0).collect();
            let mix = Mix::new(&corpora.iter().map(|&corpus| weights[corpus]).collect::<Vec<_>>());
            let before = match built.last() {
                None => vec![0; weights.len()],
                Some(last) => (0..weights.len()).map(|corpus| last.count(corpus, *from)).collect(),
            };
            built.push(Phase { from: *from, mix, corpora, before });
        }
        MixSchedule { phases: built }
    }

    /// The corpus of a sample, and how many earlier samples came from it.
    pub(crate) fn locate(&self, index: u64) -> (usize, u64) {
        let phase = self.phase(index);
        let (place, rank) = phase.mix.locate(index - phase.from);
        let corpus = phase.corpora[place];
        (corpus, phase.before[corpus] + rank)
    }

    /// How many of the first `samples` come from a corpus.
    pub(crate) fn count(&self, corpus: usize, samples: u64) -> u64 {
        self.phase(samples).count(corpus, samples)
    }

    fn phase(&self, index: u64) -> &Phase {
        &self.phases[self.phases.partition_point(|phase| phase.from <= index) - 1]
    }
}

impl Phase {
    fn count(&self, corpus: usize, samples: u64) -> u64 {
        let place = self.corpora.iter().position(|&known| known == corpus);
        self.before[corpus] + place.map_or(0, |place| self.mix.count(place, samples - self.from))
    }
}

fn count(node: &Node, wanted: usize, samples: u64) -> Option<u64> {
    match node {
        Node::Corpus(corpus) => (*corpus == wanted).then_some(samples),
        Node::Split { light, heavy, light_weight, weight } => {
            let to_light = share(samples, *light_weight, *weight);
            count(light, wanted, to_light).or_else(|| count(heavy, wanted, samples - to_light))
        }
    }
}

/// `samples · part ÷ whole`, rounded.
fn share(samples: u64, part: u128, whole: u128) -> u64 {
    share_of(u128::from(samples), part, whole) as u64
}

fn share_of(samples: u128, part: u128, whole: u128) -> u128 {
    (samples * part + whole / 2) / whole
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(weights: &[f64], n: u64) -> Vec<usize> {
        let mix = Mix::new(weights);
        (0..n).map(|index| mix.locate(index).0).collect()
    }

    #[test]
    fn one_corpus_takes_everything() {
        let mix = Mix::new(&[7.5]);
        assert_eq!([0, 1, u64::MAX].map(|index| mix.locate(index)), [(0, 0), (0, 1), (0, u64::MAX)]);
    }

    #[test]
    fn samples_are_spread_evenly() {
        assert_eq!(first(&[1.0, 1.0], 8), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(first(&[0.7, 0.3], 10), [0, 1, 0, 0, 1, 0, 0, 0, 1, 0]);
        assert_eq!(first(&[0.5, 0.25, 0.25], 8), [0, 1, 0, 2, 0, 1, 0, 2]);
    }

    #[test]
    fn every_prefix_has_the_weights_up_to_rounding() {
        for (weights, most) in [
            (&[0.7, 0.3][..], 0.5),
            (&[1e-9, 1.0], 0.5),
            (&[5.0, 3.0, 2.0], 1.0),
            (&[0.37, 0.21, 0.19, 0.11, 0.07, 0.05], 1.5),
            (&[1.0; 17], 1.5),
            (&[1e300, 1e300, 3e300], 1.0),
        ] {
            let mix = Mix::new(weights);
            let total: f64 = weights.iter().map(|w| w / weights[0]).sum();
            let mut counts = vec![0u64; weights.len()];
            for index in 0..20_000 {
                let (corpus, rank) = mix.locate(index);
                assert_eq!(rank, counts[corpus], "samples of a corpus are numbered without gaps");
                counts[corpus] += 1;
                for (corpus, &count) in counts.iter().enumerate() {
                    let exact = (index + 1) as f64 * (weights[corpus] / weights[0]) / total;
                    assert!(
                        (count as f64 - exact).abs() <= most + 1e-6,
                        "{weights:?} {index} {corpus}: {count} {exact}"
                    );
                    assert_eq!(mix.count(corpus, index + 1), count);
                }
            }
        }
    }

    #[test]
    fn weights_change_where_they_are_to_and_corpora_go_on_where_they_were() {
        let phases = [(0, vec![0.5, 0.5, 0.0]), (10, vec![0.0, 0.25, 0.75]), (30, vec![1.0, 0.0, 1.0])];
        let mix = MixSchedule::new(&phases);
        let mut counts = [0u64; 3];
        for index in 0..50 {
            let (corpus, rank) = mix.locate(index);
            assert_eq!(rank, counts[corpus], "samples of a corpus are numbered without gaps");
            counts[corpus] += 1;
            for (corpus, &count) in counts.iter().enumerate() {
                assert_eq!(mix.count(corpus, index + 1), count);
            }
            match index + 1 {
                10 => assert_eq!(counts, [5, 5, 0]),
                30 => assert_eq!(counts, [5, 10, 15]),
                50 => assert_eq!(counts, [15, 10, 25]),
                _ => {}
            }
        }
        let plain = Mix::new(&[0.3, 0.7]);
        let alone = MixSchedule::new(&[(0, vec![0.3, 0.7])]);
        assert!((0..1000).all(|index| alone.locate(index) == plain.locate(index)));
        alone.locate(u64::MAX);
    }

    #[test]
    fn shares_do_not_drift_in_the_longest_run() {
        let mix = Mix::new(&[0.3, 0.7]);
        let n = 1 << 60;
        let exact = 0.3 * n as f64;
        assert!((mix.count(0, n) as f64 - exact).abs() / exact < 1e-15);
        mix.locate(u64::MAX);
    }
}
