//! Which tokens each sample of a run holds.

use std::sync::Arc;

use lockstep_ir::counter;

use crate::mix::MixSchedule;
use crate::{DataError, Document, Result, TokenStream};

/// Cuts token streams into sequences and puts them in order.
///
/// Sequence `i` of a stream holds its tokens `i·seq .. (i+1)·seq`, and as targets the same range one token later. A
/// *global sample index* counts the samples of a whole run. Over several corpora, the index alone says which corpus a
/// sample comes from, so that every prefix of the run has the corpora in their weights, which may change at given tokens; each corpus
/// goes through its own sequences in its own order, which every pass over it (an epoch) changes.
#[derive(Debug)]
pub struct Sampler {
    seq: u64,
    corpora: Vec<Sequences>,
    mix: MixSchedule,
}

/// One corpus of a mixture.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// Its name, which is part of the key of its order.
    pub name: String,
    /// Its share of the samples, relative to the others': 0 or greater, and greater than 0 at some time.
    pub weight: f64,
    /// Other weights: tokens of all corpora after which each counts, in order. It counts from the first sample that begins there or
    /// later.
    pub schedule: Vec<(u64, f64)>,
    /// Its tokens.
    pub tokens: Arc<TokenStream>,
}

impl Corpus {
    /// One that is not mixed with others.
    fn alone(tokens: Arc<TokenStream>) -> Self {
        Corpus { name: String::new(), weight: 1.0, schedule: Vec::new(), tokens }
    }
}

/// Where a sample's tokens are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplePlace {
    /// The corpus, in the order they were given.
    pub corpus: usize,
    /// Which pass over the corpus this is, from 0.
    pub epoch: u64,
    /// The offset of the sample's first token in the corpus.
    pub offset: u64,
}

#[derive(Debug)]
struct Sequences {
    tokens: Arc<TokenStream>,
    sequences: u64,
    order: Order,
}

#[derive(Debug)]
enum Order {
    Shuffled { key: u64 },
    AsStored,
}

impl Sampler {
    /// Samples of one corpus in an order that `seed` and the epoch choose.
    pub fn new(tokens: impl Into<Arc<TokenStream>>, seq: usize, seed: u64) -> Result<Self> {
        let order = Order::Shuffled { key: counter::key(seed, "data order") };
        Sampler::build(vec![(Corpus::alone(tokens.into()), order)], seq)
    }

    /// Samples of one corpus as they are stored, the same in every epoch; for validation.
    pub fn in_order(tokens: impl Into<Arc<TokenStream>>, seq: usize) -> Result<Self> {
        Sampler::build(vec![(Corpus::alone(tokens.into()), Order::AsStored)], seq)
    }

    /// Samples of several corpora by weight, each in an order that `seed`, its name and its epoch choose.
    pub fn mixed(corpora: Vec<Corpus>, seq: usize, seed: u64) -> Result<Self> {
        let shuffled = |corpus: Corpus| {
            let key = counter::key(seed, &format!("data order of {}", corpus.name));
            (corpus, Order::Shuffled { key })
        };
        Sampler::build(corpora.into_iter().map(shuffled).collect(), seq)
    }

    /// Samples of several corpora by weight, each as it is stored.
    pub fn mixed_in_order(corpora: Vec<Corpus>, seq: usize) -> Result<Self> {
        Sampler::build(corpora.into_iter().map(|corpus| (corpus, Order::AsStored)).collect(), seq)
    }

    fn build(corpora: Vec<(Corpus, Order)>, seq: usize) -> Result<Self> {
        let seq = seq as u64;
        let (mut built, mut changes) = (Vec::new(), Vec::new());
        for (corpus, order) in corpora {
            let path = corpus.tokens.path().to_owned();
            if seq == 0 {
                return Err(DataError::SequenceZero { path });
            }
            let sequences = match corpus.tokens.len().saturating_sub(1) / seq {
                0 => return Err(DataError::SequenceTooLong { path, seq, tokens: corpus.tokens.len() }),
                sequences => sequences,
            };
            let later = corpus.schedule.iter().map(|(tokens, weight)| (tokens.div_ceil(seq), *weight));
            let weights: Vec<(u64, f64)> = [(0, corpus.weight)].into_iter().chain(later).collect();
            let good = |weight: f64| weight.is_finite() && weight >= 0.0;
            if let Some((_, value)) = weights.iter().find(|(_, weight)| !good(*weight)) {
                return Err(DataError::Weight { value: *value });
            }
            if weights.iter().all(|(_, weight)| *weight == 0.0) {
                return Err(DataError::Weight { value: 0.0 });
            }
            changes.push(weights);
            built.push(Sequences { tokens: corpus.tokens, sequences, order });
        }
        if built.is_empty() {
            return Err(DataError::NoPaths);
        }
        let mut starts: Vec<u64> = changes.iter().flatten().map(|(from, _)| *from).collect();
        starts.sort_unstable();
        starts.dedup();
        let at = |from: u64, weights: &[(u64, f64)]| {
            weights.iter().rev().find(|(start, _)| *start <= from).map_or(0.0, |(_, weight)| *weight)
        };
        let phase = |from: u64| (from, changes.iter().map(|weights| at(from, weights)).collect::<Vec<f64>>());
        let phases: Vec<_> = starts.into_iter().map(phase).collect();
        if phases.iter().any(|(_, weights)| weights.iter().all(|weight| *weight == 0.0)) {
            return Err(DataError::Weight { value: 0.0 });
        }
        Ok(Sampler { seq, corpora: built, mix: MixSchedule::new(&phases) })
    }

    /// Number of sequences of all corpora together; with one corpus, samples per epoch.
    pub fn sequences(&self) -> u64 {
        self.corpora.iter().map(|corpus| corpus.sequences).sum()
    }

    /// How many samples there are before one comes up for the second time.
    pub fn samples_before_repeat(&self) -> u64 {
        let fits =
            |samples| self.corpora.iter().enumerate().all(|(i, corpus)| self.mix.count(i, samples) <= corpus.sequences);
        // The mixture cannot go on for longer than all of its sequences.
        let (mut low, mut high) = (0, self.sequences());
        while low < high {
            let middle = high - (high - low) / 2;
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// Where a sample is. A pure function: no call depends on an earlier one.
    pub fn locate(&self, global_sample_index: u64) -> SamplePlace {
        let (corpus, rank) = self.mix.locate(global_sample_index);
        let Sequences { sequences, ref order, .. } = self.corpora[corpus];
        let (epoch, index) = (rank / sequences, rank % sequences);
        let sequence = match order {
            Order::Shuffled { key } => counter::permute(counter::bits(*key, epoch), index, sequences),
            Order::AsStored => index,
        };
        SamplePlace { corpus, epoch, offset: sequence * self.seq }
    }

    /// The epoch that a sample belongs to in its corpus, from 0.
    pub fn epoch_of(&self, global_sample_index: u64) -> u64 {
        self.locate(global_sample_index).epoch
    }

    /// The offset in its corpus of a sample's first token.
    pub fn position(&self, global_sample_index: u64) -> u64 {
        self.locate(global_sample_index).offset
    }

    /// The corpus of a sample, and the offset in it of the sample's first token.
    pub fn source(&self, global_sample_index: u64) -> (&TokenStream, u64) {
        let SamplePlace { corpus, offset, .. } = self.locate(global_sample_index);
        (&self.corpora[corpus].tokens, offset)
    }

    /// Refuses what was read of the corpora since the last call where some of it did not come; see [`TokenStream::require_read`].
    pub fn require_read(&self) -> Result<()> {
        self.corpora.iter().try_for_each(|corpus| corpus.tokens.require_read())
    }

    /// Writes a sample's tokens, and as targets the token after each, those of prompts as
    /// [`IGNORED_TARGET`](lockstep_ir::op::IGNORED_TARGET). Does not allocate.
    ///
    /// # Panics
    ///
    /// If a slice does not have the sequence length.
    pub fn fill(&self, global_sample_index: u64, tokens: &mut [u32], targets: &mut [u32]) {
        assert_eq!(tokens.len() as u64, self.seq, "tokens have the sequence length");
        assert_eq!(targets.len() as u64, self.seq, "targets have the sequence length");
        let (stream, offset) = self.source(global_sample_index);
        stream.copy(offset, tokens);
        stream.copy_targets(offset, targets);
    }

    /// Writes, for each position of a sample, where in the sequence its document starts: 0 for the document that the
    /// sequence begins with, wherever that one began. An EOS token belongs to the document it ends. Does not allocate.
    ///
    /// # Panics
    ///
    /// If the slice does not have the sequence length.
    pub fn document_starts(&self, global_sample_index: u64, starts: &mut [u32]) {
        assert_eq!(starts.len() as u64, self.seq, "starts have the sequence length");
        let (stream, offset) = self.source(global_sample_index);
        stream.document_starts(offset, starts);
    }

    /// The documents that a sample's tokens are from, in order. The first may have begun before the sample.
    pub fn documents(&self, global_sample_index: u64) -> Vec<Document> {
        let (tokens, offset) = self.source(global_sample_index);
        let mut documents = vec![tokens.document_at(offset)];
        tokens.documents_beginning_in(offset + 1, offset + self.seq, |document| documents.push(document));
        documents
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::Width;
    use crate::shard_writer::ShardWriter;
    use crate::{Origin, Shard, TokenFile};
    use lockstep_ir::Hint;

    /// A shard of these tokens, with documents at these offsets; the first is continued where they do not begin with 0.
    fn shard(folder: &std::path::Path, tokens: &[u8], documents: &[u64]) -> Arc<dyn TokenFile> {
        let mut writer = ShardWriter::create(folder, "a.shard", Width::One, false).unwrap();
        let continued = !documents.starts_with(&[0]);
        let starts = [&[0][..continued as usize], documents, &[tokens.len() as u64]].concat();
        for (index, range) in starts.windows(2).enumerate().filter(|_| !tokens.is_empty()) {
            writer.document(Origin { file: 0, record: range[0] }, continued && index == 0, 0);
            writer.tokens(&tokens[range[0] as usize..range[1] as usize], 0).unwrap();
        }
        writer.finish().unwrap().0.publish().unwrap();
        // The map outlives the name.
        Arc::new(Shard::open(&folder.join("a.shard")).unwrap())
    }

    /// The tokens 0, 1, 2 … (at most 256 of them) in shards of these sizes.
    fn counting(sizes: &[usize]) -> Arc<TokenStream> {
        let folder = tempfile::tempdir().unwrap();
        let mut all = 0..=255;
        let shards =
            sizes.iter().map(|&size| shard(folder.path(), &all.by_ref().take(size).collect::<Vec<u8>>(), &[0]));
        Arc::new(TokenStream::new(shards.collect()))
    }

    fn counting_shard(tokens: usize) -> Arc<TokenStream> {
        counting(&[tokens])
    }

    fn positions(sampler: &Sampler, epoch: u64) -> Vec<u64> {
        let n = sampler.sequences();
        (epoch * n..(epoch + 1) * n).map(|index| sampler.position(index)).collect()
    }

    #[test]
    fn a_sequence_needs_one_token_more_than_its_length() {
        for (tokens, seq, sequences) in [(9, 8, 1), (16, 8, 1), (17, 8, 2), (256, 1, 255)] {
            let sampler = Sampler::new(counting_shard(tokens), seq, 1).unwrap();
            assert_eq!(sampler.sequences(), sequences);
        }
    }

    #[test]
    fn every_epoch_visits_every_sequence_once() {
        let sampler = Sampler::new(counting_shard(256), 5, 1).unwrap();
        assert_eq!(sampler.sequences(), 51);
        for epoch in [0, 1, 2, 1 << 50] {
            let mut positions = positions(&sampler, epoch);
            positions.sort();
            assert_eq!(positions, (0..51).map(|i| i * 5).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_order_differs_by_epoch_and_by_seed_and_not_otherwise() {
        let shard = counting_shard(256);
        let sampler = |seed| Sampler::new(shard.clone(), 5, seed).unwrap();
        assert_eq!(positions(&sampler(1), 3), positions(&sampler(1), 3));
        assert_ne!(positions(&sampler(1), 3), positions(&sampler(1), 4));
        assert_ne!(positions(&sampler(1), 3), positions(&sampler(2), 3));
    }

    #[test]
    fn a_position_does_not_depend_on_what_was_asked_before() {
        let sampler = Sampler::new(counting_shard(256), 5, 1).unwrap();
        let forward: Vec<_> = (0..200).map(|index| sampler.position(index)).collect();
        let mut backward: Vec<_> = (0..200).rev().map(|index| sampler.position(index)).collect();
        backward.reverse();
        assert_eq!(forward, backward);
    }

    #[test]
    fn the_order_of_a_seed_never_changes() {
        let sampler = Sampler::new(counting_shard(81), 8, 42).unwrap();
        assert_eq!(positions(&sampler, 0), [8, 64, 32, 72, 40, 0, 24, 56, 48, 16]);
        assert_eq!(positions(&sampler, 1), [40, 0, 32, 48, 8, 56, 64, 24, 16, 72]);
    }

    #[test]
    fn epochs_count_from_0() {
        let sampler = Sampler::new(counting_shard(81), 8, 1).unwrap();
        assert_eq!([0, 9, 10, 25].map(|index| sampler.epoch_of(index)), [0, 0, 1, 2]);
        sampler.position(u64::MAX);
    }

    #[test]
    fn in_order_reads_the_shard_from_front_to_back_again_and_again() {
        let sampler = Sampler::in_order(counting_shard(25), 8).unwrap();
        assert_eq!([0, 1, 2, 3, 4].map(|index| sampler.position(index)), [0, 8, 16, 0, 8]);
    }

    #[test]
    fn targets_are_the_tokens_shifted_by_one() {
        let sampler = Sampler::in_order(counting_shard(9), 4).unwrap();
        let (mut tokens, mut targets) = ([0; 4], [0; 4]);
        sampler.fill(0, &mut tokens, &mut targets);
        assert_eq!((tokens, targets), ([0, 1, 2, 3], [1, 2, 3, 4]));
        sampler.fill(1, &mut tokens, &mut targets);
        assert_eq!((tokens, targets), ([4, 5, 6, 7], [5, 6, 7, 8]));
    }

    #[test]
    fn a_shuffled_sample_holds_the_tokens_at_its_position() {
        let sampler = Sampler::new(counting_shard(256), 4, 1).unwrap();
        for index in 0..100 {
            let (mut tokens, mut targets) = ([0; 4], [0; 4]);
            sampler.fill(index, &mut tokens, &mut targets);
            let first = sampler.position(index) as u32;
            assert_eq!(tokens, [first, first + 1, first + 2, first + 3]);
            assert_eq!(targets, tokens.map(|token| token + 1));
        }
    }

    #[test]
    fn a_sequence_that_does_not_fit_is_refused() {
        let shard = counting_shard(8);
        let file = shard.path().display().to_string();
        assert_eq!(
            Sampler::new(shard.clone(), 8, 1).unwrap_err().with_hint(),
            format!(
                "{file}: 8 tokens are too few for a sequence of 8 and its last target\n\
                 hint: use a sequence length of at most 7, or add text"
            )
        );
        assert_eq!(
            Sampler::in_order(shard, 0).unwrap_err().with_hint(),
            format!(
                "{file}: cannot be cut into sequences of 0 tokens\n\
                 hint: use a sequence length of at least 1"
            )
        );
        assert!(matches!(
            Sampler::new(counting_shard(0), 8, 1).unwrap_err(),
            DataError::SequenceTooLong { seq: 8, tokens: 0, .. }
        ));
    }

    #[test]
    fn where_shards_end_cannot_be_told_from_the_samples() {
        let (whole, cut) = (counting(&[200]), counting(&[1, 7, 0, 150, 42]));
        let samples = |tokens: &Arc<TokenStream>| -> Vec<_> {
            let sampler = Sampler::new(tokens.clone(), 9, 3).unwrap();
            let sample = |index| {
                let (mut tokens, mut targets) = ([0; 9], [0; 9]);
                sampler.fill(index, &mut tokens, &mut targets);
                (tokens, targets)
            };
            (0..2 * sampler.sequences()).map(sample).collect()
        };
        assert_eq!(samples(&whole), samples(&cut));
    }

    #[test]
    fn every_position_knows_where_its_document_starts() {
        let folder = tempfile::tempdir().unwrap();
        let shards = [(&[9; 6][..], &[0, 4][..]), (&[9; 5], &[3]), (&[9; 6], &[0, 1, 5])];
        let shards = shards.map(|(tokens, documents)| shard(folder.path(), tokens, documents));
        let sampler = Sampler::in_order(TokenStream::new(shards.to_vec()), 8).unwrap();
        let mut starts = [7; 8];
        // Documents begin at 0, 4, 9, 11, 12 and 16.
        sampler.document_starts(0, &mut starts);
        assert_eq!(starts, [0, 0, 0, 0, 4, 4, 4, 4]);
        sampler.document_starts(1, &mut starts);
        assert_eq!(starts, [0, 1, 1, 3, 4, 4, 4, 4]);
        let began: Vec<_> = sampler.documents(1).iter().map(|d| (d.start, d.continued)).collect();
        assert_eq!(began, [(6, true), (9, false), (11, false), (12, false)]);
    }

    #[test]
    fn corpora_are_mixed_by_weight_and_each_keeps_its_own_epochs() {
        let corpus = |name: &str, weight, tokens| Corpus { name: name.into(), weight, schedule: Vec::new(), tokens };
        let corpora = || vec![corpus("code", 0.25, counting(&[41])), corpus("books", 0.75, counting(&[101]))];
        let sampler = Sampler::mixed(corpora(), 10, 1).unwrap();
        let places: Vec<_> = (0..16).map(|index| sampler.locate(index)).collect();
        let of = |corpus| places.iter().filter(move |place| place.corpus == corpus);
        assert_eq!((of(0).count(), of(1).count()), (4, 12));
        let mut code: Vec<_> = of(0).map(|place| place.offset).collect();
        code.sort_unstable();
        assert_eq!(code, [0, 10, 20, 30], "an epoch of code has every sequence once");
        assert_eq!(of(1).map(|place| place.epoch).collect::<Vec<_>>(), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(Sampler::mixed_in_order(corpora(), 10).unwrap().samples_before_repeat(), 14);
        let error = Sampler::mixed(vec![corpus("a", 0.0, counting(&[41]))], 10, 1).unwrap_err();
        assert!(matches!(error, DataError::Weight { .. }));
    }

    #[test]
    fn weights_change_at_the_first_sample_behind_so_many_tokens() {
        let corpus = |name: &str, weight, schedule: &[(u64, f64)], tokens| Corpus {
            name: name.into(),
            weight,
            schedule: schedule.to_vec(),
            tokens,
        };
        let sampler = Sampler::mixed(
            vec![
                corpus("web", 3.0, &[(41, 1.0)], counting(&[201])),
                corpus("code", 1.0, &[], counting(&[201])),
                corpus("last", 0.0, &[(80, 2.0)], counting(&[41])),
            ],
            10,
            1,
        )
        .unwrap();
        let of = |samples: std::ops::Range<u64>| {
            let mut counts = [0; 3];
            samples.for_each(|index| counts[sampler.locate(index).corpus] += 1);
            counts
        };
        // 41 tokens are four samples and a part of the fifth, which still has the weights before.
        assert_eq!(of(0..5)[2], 0);
        assert!(of(0..5)[0] >= 3);
        let between = of(5..8);
        assert!(between[0] <= 2 && between[1] <= 2 && between[2] == 0);
        assert_eq!(of(8..16), [2, 2, 4]);
        // Each corpus has every sequence once before any a second time, whatever the weights were.
        let mut last: Vec<_> = (8..16).map(|i| sampler.locate(i)).filter(|p| p.corpus == 2).map(|p| p.offset).collect();
        last.sort_unstable();
        assert_eq!(last, [0, 10, 20, 30]);
        let never = vec![corpus("a", 1.0, &[(10, 0.0)], counting(&[41]))];
        assert!(matches!(Sampler::mixed(never, 10, 1).unwrap_err(), DataError::Weight { value: 0.0 }));
    }
}
