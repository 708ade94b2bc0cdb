//! The table of documents that cuDNN reads: where each starts and how long it is are numbers on the device, so one plan serves every
//! batch of at most as many documents.

use super::plans::AttentionShape;
use crate::driver::{ALIGNMENT, Address};
use lockstep_ir::program::{Instr, StepProgram};
use lockstep_ir::{DType, Op};
use std::collections::BTreeMap;

/// Bytes of the table per position: three offsets and a length.
pub const BYTES: u64 = 3 * 8 + 4;

/// Bytes of scratch besides what grows: an element more per array of offsets, and whole alignments.
pub const ROUNDING: u64 = 16 * ALIGNMENT;

/// How many documents rows of `seq` positions hold, by where the document of each position starts; none where that is no cut of
/// the rows into documents. A start after its position counts as the position, as in every kernel.
pub fn count(starts: &[u8], seq: usize) -> Option<usize> {
    let (mut documents, mut current) = (0, 0);
    for (i, bytes) in starts.as_chunks::<4>().0.iter().enumerate() {
        let position = i % seq.max(1);
        let start = (u32::from_le_bytes(*bytes) as usize).min(position);
        if start == position {
            (documents, current) = (documents + 1, position);
        } else if start != current {
            return None;
        }
    }
    Some(documents)
}

/// What the host wrote of documents: by tensor and micro-batch, how many there are.
#[derive(Default)]
pub struct Written {
    /// Tensors that attention reads starts from, and positions of their rows.
    tensors: BTreeMap<String, usize>,
    counts: BTreeMap<(String, usize), Option<usize>>,
    /// Whether some are gathered from ranks that have parts of the sequence: of those the host of a rank knows no count.
    gathered: bool,
}

impl Written {
    /// Of a program.
    pub fn new(program: &StepProgram) -> Self {
        let instrs = program.segments.iter().flat_map(|s| &s.instrs);
        let read = |i: &Instr| Some(i.inputs.get(starts_input(&i.op)?)?.buffer);
        let buffers: Vec<_> = instrs.filter_map(read).collect();
        let of = program.tensors.iter().filter(|t| t.ty.dtype == DType::U32 && buffers.contains(&t.buffer));
        let tensors = of.map(|t| (t.name.to_string(), t.ty.dims[1].size())).collect();
        let gathered = buffers.iter().any(|buffer| program.tensors.iter().all(|t| t.buffer != *buffer));
        Self { tensors, counts: BTreeMap::new(), gathered }
    }

    /// Whether plans may change with what is written.
    pub fn any(&self) -> bool {
        self.gathered || !self.tensors.is_empty()
    }

    /// Counts the documents of a tensor that the host writes, if it is one of starts.
    pub fn note(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) {
        if let Some(seq) = self.tensors.get(tensor) {
            self.counts.insert((tensor.to_owned(), micro_batch), count(data, *seq));
        }
    }

    /// The most documents of a micro-batch; none where starts are no cut into documents, or nobody knows.
    pub fn most(&self) -> Option<usize> {
        if self.gathered {
            return None;
        }
        self.counts.values().try_fold(0, |most, count| Some(most.max((*count)?)))
    }
}

/// Which input says where documents start, if it is given.
pub fn starts_input(op: &Op) -> Option<usize> {
    op.spec().inputs.iter().position(|operand| operand.name == "starts")
}

/// Bytes of scratch that are given out one after the other.
pub struct Room(pub Address);

impl Room {
    /// The next bytes, this many of them.
    pub fn take(&mut self, bytes: u64) -> Address {
        let here = self.0;
        self.0 += bytes.next_multiple_of(ALIGNMENT);
        here
    }
}

/// Where documents are, for a plan.
#[derive(Clone, Copy)]
pub struct Table {
    /// Where each starts, in elements: rows of packed Q·K·V, of heads, of statistics.
    pub offsets: [Address; 3],
    /// How many positions each has.
    pub lengths: Address,
    /// Elements between two arrays of offsets.
    pub apart: u64,
}

impl Table {
    /// Room for as many documents as there are positions.
    pub fn new(shape: &AttentionShape, room: &mut Room) -> Self {
        let tokens = (shape.batch * shape.seq) as u64;
        let bytes = (8 * (tokens + 1)).next_multiple_of(ALIGNMENT);
        Self { offsets: [(); 3].map(|()| room.take(bytes)), lengths: room.take(4 * tokens), apart: bytes / 8 }
    }
}

#[cfg(test)]
mod tests {
    use super::{Written, count};
    use lockstep_compile::{AdamW, Context, Offload, Optimizer, Precision, Recompute, Steps, compile};
    use lockstep_config::Config;
    use lockstep_ir::DType;
    use lockstep_model::{Form, build_form};

    fn documents(starts: &[u32], seq: usize) -> Option<usize> {
        count(&starts.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<_>>(), seq)
    }

    /// What a rank's host knows of documents that it wrote, four in all.
    fn known(layout: &str) -> Option<usize> {
        let text = "[model]\nvocab_size = 64\nlayers = 2\ndim = 32\nheads = 4\nffn = 32\n[data]\npaths = [\".\"]\n";
        let config = Config::parse(text, "run.toml", &[]).unwrap();
        let context = Context {
            device: crate::profile("cuda", DType::BF16, DType::F32, false),
            layout: layout.parse().unwrap(),
            optimizer: Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.1),
            precision: Precision::of(DType::BF16, DType::F32),
            recompute: Recompute::default(),
            stages: vec![],
            steps: Steps::default(),
            offload: Offload::default(),
        };
        let form = Form::Loss { batch: 2, seq: 8, context: 8, documents: true };
        let graph = build_form(&config.model, form).unwrap();
        let program = compile(&graph, &context).unwrap().programs.remove(0);
        let mut written = Written::new(&program);
        let starts: Vec<u8> = [0u32, 0, 2, 2, 2, 2, 2, 2].repeat(2).iter().flat_map(|s| s.to_le_bytes()).collect();
        written.note(lockstep_model::names::DOCUMENT_STARTS, 0, &starts);
        assert!(written.any());
        written.most()
    }

    #[test]
    fn of_documents_that_ranks_gather_nobody_knows_how_many_there_are() {
        assert_eq!(known("dp=1"), Some(4));
        assert_eq!(known("cp=2,context=a2a"), None);
    }

    #[test]
    fn documents_are_counted_where_starts_cut_rows_into_them() {
        assert_eq!(documents(&[0, 0, 0, 0], 4), Some(1));
        assert_eq!(documents(&[0, 0, 0, 0], 2), Some(2));
        assert_eq!(documents(&[0, 0, 2, 2, 0, 1, 1, 3], 4), Some(5));
        // After its position: a document of its own.
        assert_eq!(documents(&[0, u32::MAX, 2, 2], 4), Some(3));
        // The third position returns to the first document, the last to a place inside one.
        assert_eq!(documents(&[0, u32::MAX, 0, 0], 4), None);
        assert_eq!(documents(&[0, 0, 0, 2], 4), None);
    }
}
