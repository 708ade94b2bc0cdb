//! Which tokens each sample of a run holds.

use std::sync::Arc;

use lockstep_ir::counter;

use crate::{DataError, Shard};

/// Cuts a shard into sequences and puts them in order.
///
/// Sequence `i` holds the tokens `i·seq .. (i+1)·seq`, and as targets the same range one token later. A *global sample
/// index* counts the samples of a whole run; every pass over the shard (an epoch) has its own order.
#[derive(Debug)]
pub struct Sampler {
    shard: Arc<Shard>,
    seq: u64,
    sequences: u64,
    order: Order,
}

#[derive(Debug)]
enum Order {
    Shuffled { key: u64 },
    AsStored,
}

impl Sampler {
    /// Samples in an order that `seed` and the epoch choose.
    pub fn new(shard: impl Into<Arc<Shard>>, seq: usize, seed: u64) -> Result<Self, DataError> {
        let order = Order::Shuffled { key: counter::key(seed, "data order") };
        Sampler::with_order(shard.into(), seq, order)
    }

    /// Samples as they stand in the shard, the same in every epoch; for validation.
    pub fn in_order(shard: impl Into<Arc<Shard>>, seq: usize) -> Result<Self, DataError> {
        Sampler::with_order(shard.into(), seq, Order::AsStored)
    }

    fn with_order(shard: Arc<Shard>, seq: usize, order: Order) -> Result<Self, DataError> {
        let path = shard.path().to_owned();
        let (seq, tokens) = (seq as u64, shard.len());
        if seq == 0 {
            return Err(DataError::SequenceZero { path });
        }
        match tokens.saturating_sub(1) / seq {
            0 => Err(DataError::SequenceTooLong { path, seq, tokens }),
            sequences => Ok(Sampler { shard, seq, sequences, order }),
        }
    }

    /// Number of sequences in the shard: samples per epoch.
    pub fn sequences(&self) -> u64 {
        self.sequences
    }

    /// The epoch that a sample belongs to, from 0.
    pub fn epoch_of(&self, global_sample_index: u64) -> u64 {
        global_sample_index / self.sequences
    }

    /// The offset in the shard of a sample's first token. A pure function: no call depends on an earlier one.
    pub fn position(&self, global_sample_index: u64) -> u64 {
        let index = global_sample_index % self.sequences;
        let sequence = match self.order {
            Order::Shuffled { key } => {
                let epoch_key = counter::bits(key, self.epoch_of(global_sample_index));
                counter::permute(epoch_key, index, self.sequences)
            }
            Order::AsStored => index,
        };
        sequence * self.seq
    }

    /// Writes a sample's tokens, and as targets the token after each. Does not allocate.
    ///
    /// # Panics
    ///
    /// If a slice does not have the sequence length.
    pub fn fill(&self, global_sample_index: u64, tokens: &mut [u32], targets: &mut [u32]) {
        assert_eq!(tokens.len() as u64, self.seq, "tokens have the sequence length");
        assert_eq!(targets.len() as u64, self.seq, "targets have the sequence length");
        let position = self.position(global_sample_index);
        self.shard.copy(position, tokens);
        self.shard.copy(position + 1, targets);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard_writer::ShardWriter;

    /// A shard of the tokens 0, 1, 2 … (at most 256 of them).
    fn counting_shard(tokens: usize) -> Arc<Shard> {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = ShardWriter::create(folder.path(), "counting.shard").unwrap();
        writer.text(&(0..=255).take(tokens).collect::<Vec<u8>>()).unwrap();
        writer.finish().unwrap().0.publish().unwrap();
        // The map outlives the name.
        Arc::new(Shard::open(&folder.path().join("counting.shard")).unwrap())
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
            Sampler::new(shard.clone(), 8, 1).unwrap_err().to_string(),
            format!(
                "{file}: 8 tokens are too few for a sequence of 8 and its last target\n\
                 hint: use a sequence length of at most 7, or add text"
            )
        );
        assert_eq!(
            Sampler::in_order(shard, 0).unwrap_err().to_string(),
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
}
