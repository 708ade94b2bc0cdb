//! Plans of cuDNN for the attentions of programs.

use super::blocks::{self, Block};
use super::graph::{self, id};
use super::table::Table;
use crate::CudaError;
use crate::cudnn::{Cudnn, Data, Plan};
use crate::driver::{ALIGNMENT, Address, Device, Memory, Stream};
use crate::matmul::fill_random;
use lockstep_exec::Note;
use lockstep_exec::bound::Bound;
use lockstep_ir::blocks::PartedAttention;
use lockstep_ir::{DType, Op, Workspace, units};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

/// What a plan may ask for besides what grows with the shape.
pub(crate) const SLACK: u64 = 1 << 20;

/// How many heads Q and K have, and how wide those of Q and K and of V are.
pub(crate) const HEADS: [&str; 4] = ["heads", "kv_heads", "head_dim", "value_dim"];

/// Whether the library may take heads of this many elements, multiples of `step`.
fn takes_heads(e: usize, v: usize, step: usize) -> bool {
    [e, v].iter().all(|n| n.is_multiple_of(step) && *n <= 256)
}

/// What scores are multiplied by.
pub(crate) fn scale(e: usize) -> f32 {
    1.0 / (e as f32).sqrt()
}

/// The shape of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Type of Q, K, V and o, one of those that cuDNN takes.
    pub dtype: DType,
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Elements of a head of Q and K, and of V.
    pub e: usize,
    pub v: usize,
    /// Keys that a query sees at most, where that is fewer than a sequence has.
    pub window: Option<usize>,
    pub backward: bool,
    /// The same bits every time: the library's first plan, and backward one that adds in one order.
    pub deterministic: bool,
    /// Documents that a micro-batch has at most, where they are apart.
    pub documents: Option<usize>,
    /// Where keys are others than those of the queries, in rows of their own.
    pub parts: Option<Parts>,
}

/// Queries over keys that stand elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Parts {
    /// Keys of a sequence.
    pub keys: usize,
    /// Whether a query sees the keys up to its own place, rather than all.
    pub causal: bool,
    /// Rows from a sequence to the next: of queries, of keys.
    pub rows: (usize, usize),
}

impl AttentionShape {
    /// Of an instruction that cuDNN may run, with at most `most` documents.
    fn of(bound: &Bound, deterministic: bool, most: Option<usize>) -> Option<Self> {
        let (window, backward) = match bound.op {
            Op::Attention { window } => (window, false),
            Op::AttentionGrad { window } => (window, true),
            _ => return None,
        };
        let documents = bound.inputs.len() == bound.op.spec().inputs.len();
        let (dtype, size) = (bound.float, |letter| bound.size(letter));
        let (batch, seq) = (size("batch"), size("seq"));
        let [heads, kv_heads, e, v] = HEADS.map(size);
        let window = window.filter(|w| *w < seq);
        // A window is added to positions as a float, which holds whole numbers up to here.
        let exact = window.is_none() || seq <= 1 << 23;
        let step = if documents { 16 } else { 8 };
        // With documents, what query heads have of shared keys and values stands in rows of one width.
        let rows = !documents || e == v || heads == kv_heads;
        let fits = Data::fused(dtype).is_some() && takes_heads(e, v, step) && exact && rows;
        let documents = match documents {
            true => Some(most?.min(batch * seq)),
            false => None,
        };
        // With documents the same plan serves both: what it sums in no order is recomputed.
        let deterministic = deterministic && documents.is_none();
        let parts = None;
        fits.then_some(Self {
            dtype,
            batch,
            seq,
            heads,
            kv_heads,
            e,
            v,
            window,
            backward,
            deterministic,
            documents,
            parts,
        })
    }

    /// Of a block of an instruction that cuDNN may run in blocks.
    fn of_block(bound: &Bound, parted: PartedAttention, block: &Block, deterministic: bool) -> Self {
        let (dtype, size) = (bound.float, |letter| bound.size(letter));
        let ([heads, kv_heads, e, v], batch) = (HEADS.map(size), size("batch"));
        let rows = (size("seq"), blocks::keys(parted, bound).1);
        let parts = Some(Parts { keys: block.keys, causal: block.causal, rows });
        let (seq, window, documents, backward) = (block.queries, None, None, parted.backward);
        Self { dtype, batch, seq, heads, kv_heads, e, v, window, backward, deterministic, documents, parts }
    }

    /// Keys of a sequence.
    pub(super) fn keys(&self) -> usize {
        self.parts.map_or(self.seq, |parts| parts.keys)
    }

    /// Where Q, K and V stand in packed rows.
    pub(super) fn packed(&self, rows: Address) -> [Address; 3] {
        let (q, kv) = (self.heads * self.e, self.kv_heads * self.e);
        [0, q, q + kv].map(|first| rows + (first * self.dtype.bytes()) as u64)
    }

    /// Whether several queries share a key.
    pub(super) fn grouped(&self) -> bool {
        self.heads != self.kv_heads
    }

    /// Bytes of a number of every row of every query head.
    pub(super) fn row_bytes(&self) -> u64 {
        (4 * self.batch * self.heads * self.seq) as u64
    }

    /// Bytes of scratch that were planned for its plan, besides dQ.
    pub(super) fn most_scratch(&self) -> u64 {
        let heads = (self.batch * self.heads) as u64;
        let tiles = |rows: usize| rows.next_multiple_of(Workspace::TILE) as u64;
        // dK and dV of every query head, and two numbers per row.
        let backward = SLACK + 2 * heads * (self.keys() * (self.e + self.v) + 4 * self.seq) as u64;
        match (self.backward, self.deterministic) {
            _ if self.documents.is_some() => SLACK,
            (false, _) => SLACK,
            (true, false) => backward,
            (true, true) => backward + 2 * heads * tiles(self.seq) * tiles(self.keys()),
        }
    }

    /// Bytes of dQ in f32, where it is added up in no order.
    pub(super) fn dq_bytes(&self) -> u64 {
        match self.deterministic {
            true => 0,
            false => (4 * self.batch * self.heads * self.seq * self.e) as u64,
        }
    }

    /// For people.
    fn text(&self) -> String {
        let Self { dtype, batch, seq, heads, kv_heads, e, v, .. } = self;
        let values = if e == v { String::new() } else { format!(" and {v} in V") };
        let window = self.window.map_or(String::new(), |w| format!(", a window of {w}"));
        let which = if self.backward { ", backward" } else { ", forward" };
        let how = if self.deterministic { ", deterministic" } else { "" };
        let documents = self.documents.map_or(String::new(), |d| format!(" of at most {d} documents"));
        let keys = self.parts.map_or(String::new(), |parts| format!(" over {} keys", parts.keys));
        format!(
            "{batch} × {seq} tokens{documents}{keys}, {heads} heads ({kv_heads} of keys) of {e} elements{values} in {dtype}{window}{which}{how}"
        )
    }
}

/// A plan, and what it costs where that was asked for.
struct Made {
    plan: Plan,
    cost: Option<String>,
}

/// Plans that all programs on a device share, each made once.
pub struct SharedPlans {
    device: Arc<Device>,
    cudnn: OnceLock<Result<Cudnn, CudaError>>,
    made: Mutex<HashMap<AttentionShape, Arc<Made>>>,
}

impl SharedPlans {
    /// None yet.
    pub fn new(device: &Arc<Device>) -> Self {
        Self { device: device.clone(), cudnn: OnceLock::new(), made: Mutex::default() }
    }

    fn cudnn(&self) -> Result<&Cudnn, CudaError> {
        self.cudnn.get_or_init(|| Cudnn::open(&self.device)).as_ref().map_err(Clone::clone)
    }

    fn get(&self, shape: AttentionShape) -> Result<Arc<Made>, CudaError> {
        // Held while plans are timed: two at once would time each other.
        let mut made = self.made.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(made) = made.get(&shape) {
            return Ok(made.clone());
        }
        let plan = make(self, &shape)?;
        let cost = (shape.backward && shape.deterministic).then(|| cost(self, &shape, &plan));
        Ok(made.entry(shape).or_insert(Arc::new(Made { plan, cost })).clone())
    }
}

fn make(shared: &SharedPlans, shape: &AttentionShape) -> Result<Plan, CudaError> {
    let graph = graph::build(shared.cudnn()?, shape)?;
    let key = format!("attention {shape:?}");
    // Plans of documents are made while a program runs too: the library's order counts.
    match shape.deterministic || shape.documents.is_some() {
        true => graph.plan(&key, shape.most_scratch(), None),
        false => {
            // Where there is no room to try, the library's order counts.
            let time = |plan: &Plan| trial(shared, shape, plan);
            graph.plan(&key, shape.most_scratch(), Some(&time))
        }
    }
}

/// What a deterministic backward pass costs against the usual one.
fn cost(shared: &SharedPlans, shape: &AttentionShape, plan: &Plan) -> String {
    let usual = AttentionShape { deterministic: false, ..*shape };
    let [here, there] = [shape, &usual].map(|s| s.most_scratch() + s.dq_bytes());
    let scratch = match here >= there {
        true => format!("{} more scratch", units::bytes(here - there)),
        false => format!("{} less scratch", units::bytes(there - here)),
    };
    let time = || Some((trial(shared, shape, plan).ok()??, trial(shared, &usual, &make(shared, &usual).ok()?).ok()??));
    match time() {
        Some((here, there)) => format!(
            "deterministic: attention's backward takes {:.2} ms instead of {:.2} ms per layer and micro-batch, with {scratch}",
            here * 1e3,
            there * 1e3
        ),
        None => format!("deterministic: attention's backward has {scratch}; there was no room to time it"),
    }
}

/// Documents of a micro-batch that the first plans are made for.
const FIRST_DOCUMENTS: usize = 64;

/// Plans for the shapes of a program.
pub struct Plans {
    /// None where cuDNN has none.
    plans: HashMap<AttentionShape, Option<Arc<Made>>>,
    /// The same bits every time.
    pub(super) deterministic: bool,
    /// Documents of a micro-batch that plans are made for; none where starts are no cut into documents, which our own kernels take.
    documents: Option<usize>,
    /// Where attention runs on kernels of our own and why; what plans cost.
    pub notes: Vec<Note>,
}

impl Plans {
    /// Makes plans for all instructions that cuDNN takes.
    pub fn new<'a>(shared: &SharedPlans, bounds: impl Iterator<Item = &'a Bound>, deterministic: bool) -> Self {
        let documents = Some(FIRST_DOCUMENTS);
        let mut plans = Self { plans: HashMap::new(), deterministic, documents, notes: Vec::new() };
        plans.make(shared, bounds);
        plans
    }

    fn make<'a>(&mut self, shared: &SharedPlans, bounds: impl Iterator<Item = &'a Bound>) {
        for bound in bounds {
            if let Op::Attention { .. } | Op::AttentionGrad { .. } = bound.op {
                self.want(shared, AttentionShape::of(bound, self.deterministic, self.documents), IN_ONE);
            }
            if let Some(parted) = PartedAttention::of(&bound.op) {
                match self.shapes(bound, parted) {
                    None => self.want(shared, None, IN_BLOCKS),
                    Some(shapes) => shapes.into_iter().for_each(|(_, shape)| self.want(shared, Some(shape), IN_BLOCKS)),
                }
            }
        }
    }

    /// Makes the plan of a shape; `when` says when cuDNN has none.
    fn want(&mut self, shared: &SharedPlans, shape: Option<AttentionShape>, when: &str) {
        let note = match shape {
            None => Some(slow(when)),
            Some(shape) if self.plans.contains_key(&shape) => None,
            Some(shape) => self.add(shared, shape),
        };
        self.notes.extend(note.filter(|n| !self.notes.contains(n)));
    }

    /// The blocks of an instruction that cuDNN may run in blocks.
    fn shapes(&self, bound: &Bound, parted: PartedAttention) -> Option<Vec<(Block, AttentionShape)>> {
        let fits =
            Data::fused(bound.float).is_some() && takes_heads(bound.size("head_dim"), bound.size("value_dim"), 8);
        let blocks = blocks::of(bound, parted).filter(|_| fits)?;
        let shape = |b: Block| (b, AttentionShape::of_block(bound, parted, &b, self.deterministic));
        Some(blocks.into_iter().map(shape).collect())
    }

    /// The blocks of an instruction with their plans, if there are plans for all.
    pub(super) fn blocks(&self, bound: &Bound, parted: PartedAttention) -> Option<Vec<(Block, AttentionShape, &Plan)>> {
        let plan = |(block, shape)| Some((block, shape, &self.plans.get(&shape)?.as_ref()?.plan));
        self.shapes(bound, parted)?.into_iter().map(plan).collect()
    }

    /// Whether its plans take micro-batches of this many documents; `None` is no cut into documents.
    pub fn fits(&self, documents: Option<usize>) -> bool {
        match (self.documents, documents) {
            (Some(planned), Some(most)) => most <= planned,
            (planned, most) => planned == most,
        }
    }

    /// Makes plans for micro-batches of this many documents.
    pub fn fit<'a>(&mut self, shared: &SharedPlans, bounds: impl Iterator<Item = &'a Bound>, documents: Option<usize>) {
        self.documents = documents.map(|most| most.next_power_of_two().max(FIRST_DOCUMENTS));
        if self.documents.is_some() {
            self.make(shared, bounds);
        }
    }

    fn add(&mut self, shared: &SharedPlans, shape: AttentionShape) -> Option<Note> {
        let made = shared.get(shape);
        self.plans.insert(shape, made.as_ref().ok().cloned());
        match made {
            Ok(made) => made.cost.clone().map(Note::Cost),
            Err(CudaError::Library { library, problem }) => {
                Some(slow(&format!("{} {problem} ({})", library.name(), library.hint())))
            }
            Err(error) => {
                let why = error.to_string();
                let why = why.lines().next().unwrap_or_default();
                Some(slow(&format!("cuDNN gave no plan for {} ({why})", shape.text())))
            }
        }
    }

    /// The plan of an instruction, if there is one.
    pub(super) fn of(&self, bound: &Bound) -> Option<(AttentionShape, &Plan)> {
        let shape = AttentionShape::of(bound, self.deterministic, self.documents)?;
        Some((shape, &self.plans.get(&shape)?.as_ref()?.plan))
    }
}

/// When cuDNN has a plan.
const IN_ONE: &str =
    "cuDNN is used in bf16 and fp16, for heads of 8, 16, … 256 elements (16, 32, … with document masks)";
const IN_BLOCKS: &str = "with context parallelism, cuDNN is used in bf16 and fp16, for heads of 8, 16, … 256 elements, \
                         without sliding windows and document masks";

fn slow(why: &str) -> Note {
    Note::Warning(format!("attention runs on a slow kernel: {why}"))
}

/// Where the operands of an attention stand.
#[derive(Clone, Copy, Default)]
pub struct Operands {
    /// Q, K and V.
    pub inputs: [Address; 3],
    pub o: Address,
    pub lse: Address,
    pub dout: Address,
    /// dQ, dK and dV.
    pub gradients: [Address; 3],
    /// dQ in f32, where it is.
    pub dq: Address,
    pub scratch: Address,
    /// Where documents are apart.
    pub ragged: Option<Ragged>,
}

/// What a plan of documents needs besides.
#[derive(Clone, Copy)]
pub struct Ragged {
    pub table: Table,
    /// A number of every row.
    pub row_sum: Address,
}

/// Queues a plan.
///
/// # Safety
/// The operands are as large as the shape says.
pub unsafe fn execute(stream: &Stream, shape: &AttentionShape, plan: &Plan, at: &Operands) -> Result<(), CudaError> {
    let mut operands: Vec<_> = [id::Q, id::K, id::V].into_iter().zip(at.inputs).collect();
    operands.extend([(id::O, at.o), (id::STATS, at.lse)]);
    let mut values = vec![(id::SCALE, scale(shape.e))];
    if shape.parts.is_none_or(|parts| parts.causal) {
        values.push((id::MINUS_INFINITY, f32::NEG_INFINITY));
    }
    if let Some(window) = shape.window {
        values.extend([(id::WINDOW, window as f32), (id::MINUS_INFINITY_BEFORE, f32::NEG_INFINITY)]);
    }
    if shape.backward {
        operands.push((id::DO, at.dout));
        operands.extend([id::DQ, id::DK, id::DV].into_iter().zip(at.gradients));
        operands.extend((!shape.deterministic).then_some((id::DQ_SUM, at.dq)));
        values.push((id::ONE, 1.0));
    }
    if let Some(ragged) = &at.ragged {
        operands.extend(id::OFFSETS.into_iter().zip(ragged.table.offsets));
        operands.push((id::LENGTHS, ragged.table.lengths));
        operands.extend(shape.backward.then_some((id::ROW_SUM, ragged.row_sum)));
        values.push((id::MINUS_INFINITY_PADDING, f32::NEG_INFINITY));
    }
    // SAFETY: the plan is of this shape, which the operands have by the caller's word.
    unsafe { plan.execute(stream, &operands, &values, at.scratch) }
}

/// Seconds that a plan takes on random numbers, if there is room.
fn trial(shared: &SharedPlans, shape: &AttentionShape, plan: &Plan) -> Result<Option<f64>, CudaError> {
    match seconds(shared, shape, plan) {
        // What is counted as free cannot always be had.
        Err(CudaError::OutOfMemory) => Ok(None),
        tried => tried,
    }
}

fn seconds(shared: &SharedPlans, shape: &AttentionShape, plan: &Plan) -> Result<Option<f64>, CudaError> {
    const TIMES: usize = 3;
    let packed = shape.heads * shape.e + shape.kv_heads * (shape.e + shape.v);
    let (queries, keys) = shape.parts.map_or((shape.seq, shape.seq), |parts| parts.rows);
    let rows = (shape.batch * queries.max(keys)) as u64;
    let (wide, narrow) = (2 * rows * packed as u64, 2 * rows * (shape.heads * shape.v) as u64);
    let sizes = [wide, narrow, 4 * rows * shape.heads as u64, narrow, wide, shape.dq_bytes(), plan.workspace];
    let sizes = sizes.map(|s| s.next_multiple_of(ALIGNMENT));
    if shared.device.free_bytes()? < sizes.iter().sum::<u64>() + (256 << 20) {
        return Ok(None);
    }
    let (memory, stream) = (Memory::new(&shared.device, sizes.iter().sum())?, Stream::new(&shared.device)?);
    fill_random(&stream, memory.base, memory.bytes)?;
    let mut next = memory.base;
    let [qkv, o, lse, dout, dqkv, dq, scratch] = sizes.map(|size| {
        let here = next;
        next += size;
        here
    });
    let (inputs, gradients) = (shape.packed(qkv), shape.packed(dqkv));
    let at = Operands { inputs, o, lse, dout, gradients, dq, scratch, ragged: None };
    // SAFETY: the operands are as large as the shape says.
    let once = || unsafe { execute(&stream, shape, plan, &at) };
    // The first call loads code.
    once()?;
    Ok(Some(stream.seconds(TIMES, once)?))
}
