//! How many sequences each step of a run has, and which.

use crate::schema::Config;

/// The sequences of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Index of the first in the order of the run.
    pub first_sample: u64,
    /// How many.
    pub sequences: usize,
}

/// Steps of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchStage {
    /// The first, counted from 0.
    pub first_step: u64,
    /// Its first sequence.
    pub first_sample: u64,
    /// Sequences of each.
    pub sequences: usize,
}

/// The steps of a run, by size. A step has the size that belongs to the tokens that were seen before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batches {
    stages: Vec<BatchStage>,
}

impl Config {
    /// The batches of `train.global_batch` and `train.batch_ramp`.
    pub fn batches(&self) -> Batches {
        let seq = self.train.seq as u64;
        let mut now = BatchStage { first_step: 0, first_sample: 0, sequences: self.train.global_batch };
        let mut stages = Vec::new();
        for next in &self.train.batch_ramp {
            // The first step that begins when this many tokens have been seen.
            let missing = next.tokens.div_ceil(seq).saturating_sub(now.first_sample);
            let steps = missing.div_ceil(now.sequences as u64);
            // A stage that lasts no step is left out.
            if steps > 0 {
                stages.push(now);
            }
            now = BatchStage {
                first_step: now.first_step + steps,
                first_sample: now.first_sample + steps * now.sequences as u64,
                sequences: next.global_batch,
            };
        }
        stages.push(now);
        Batches { stages }
    }
}

impl Batches {
    /// The sizes, in the order in which a run has them.
    pub fn stages(&self) -> &[BatchStage] {
        &self.stages
    }

    /// The sequences of a step, counted from 0.
    pub fn at(&self, step: u64) -> Batch {
        let after = self.stages.partition_point(|stage| stage.first_step <= step);
        let stage = self.stages[after.saturating_sub(1)];
        let before = (step - stage.first_step).saturating_mul(stage.sequences as u64);
        Batch { first_sample: stage.first_sample.saturating_add(before), sequences: stage.sequences }
    }

    /// Sequences of the largest step.
    pub fn largest(&self) -> usize {
        self.stages.iter().map(|stage| stage.sequences).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batches(train: &str) -> Batches {
        let text = format!("[model]\npreset = \"llama-15m\"\n[train]\n{train}");
        Config::parse(&text, "run.toml", &[]).unwrap_or_else(|error| panic!("{error}")).batches()
    }

    fn stages(train: &str) -> Vec<(u64, u64, usize)> {
        batches(train).stages().iter().map(|s| (s.first_step, s.first_sample, s.sequences)).collect()
    }

    #[test]
    fn without_a_ramp_all_steps_are_alike() {
        assert_eq!(stages("global_batch = 8\nseq = 16"), [(0, 0, 8)]);
        let found = batches("global_batch = 8\nseq = 16");
        assert_eq!(found.at(5), Batch { first_sample: 40, sequences: 8 });
    }

    #[test]
    fn a_step_has_the_size_of_the_tokens_before_it() {
        let ramp = "global_batch = 2\nseq = 10\nmicro_batch = 1\nbatch_ramp = [{ tokens = 50, global_batch = 4 }, \
                    { tokens = 100, global_batch = \"60 tokens\" }]";
        // 20 tokens a step: 60 are seen before the fourth. 40 a step: 100 after one more.
        assert_eq!(stages(ramp), [(0, 0, 2), (3, 6, 4), (4, 10, 6)]);
        assert_eq!(batches(ramp).largest(), 6);
    }

    #[test]
    fn no_sample_is_lost_or_seen_twice() {
        let found = batches(
            "global_batch = 3\nseq = 7\nmicro_batch = 1\nbatch_ramp = [{ tokens = 1, global_batch = 4 }, \
             { tokens = 333, global_batch = 5 }, { tokens = 334, global_batch = 9 }, { tokens = 1000, global_batch = 64 }]",
        );
        let mut next = 0;
        for step in 0..100 {
            let batch = found.at(step);
            assert_eq!(batch.first_sample, next, "step {step}");
            next += batch.sequences as u64;
        }
        assert_eq!(found.at(0).sequences, 3);
        assert_eq!(found.at(1).sequences, 4);
        // 334 tokens are seen in the same step as 333: a size of no step.
        assert!(found.stages().iter().all(|stage| stage.sequences != 5));
    }

    #[test]
    fn the_ramp_of_a_large_run() {
        let ramp = "seq = 8000\nsteps = 100000\nglobal_batch = \"16M tokens\"\nmicro_batch = 1\nbatch_ramp = [\
                    { tokens = \"69B\", global_batch = \"32M tokens\" }, { tokens = \"790B\", global_batch = \"64M tokens\" }, \
                    { tokens = \"4.7T\", global_batch = \"128M tokens\" }]";
        // 69e9 ÷ 16e6 = 4312.5, and so on.
        let expected =
            [(0, 0, 2000), (4313, 8_626_000, 4000), (26_844, 98_750_000, 8000), (87_938, 587_502_000, 16_000)];
        assert_eq!(stages(ramp), expected);
    }
}
