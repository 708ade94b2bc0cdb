//! Attention: cuDNN's fused kernels where they take the shape, else kernels of our own.

use crate::call::Call;
use crate::cudnn::{Builder, Cudnn, Data, Place, Plan, Pointwise, Reduction, TensorId};
use crate::driver::{Address, Event, Memory, Stream};
use crate::gpu::Gpu;
use crate::kernels::args;
use crate::matmul::fill_random;
use crate::{CudaError, ops};
use lockstep_exec::bound::Bound;
use lockstep_ir::{DType, Op, Workspace};
use std::collections::HashMap;

/// What a plan may ask for besides what grows with the shape.
const SLACK: u64 = 1 << 20;

/// Scratch of the forward kernels: cuDNN's, and log-sum-exps that nobody else wants.
pub fn scratch(compute: DType) -> Workspace {
    match compute {
        DType::BF16 => Workspace { fixed: SLACK, terms: vec![(4, "bqs")] },
        _ => Workspace::default(),
    }
}

/// Scratch of the backward kernels. Ours: a sum of every row. cuDNN's: that, dQ in f32, and dK and dV of every query head.
pub fn grad_scratch(compute: DType) -> Workspace {
    match compute {
        DType::BF16 => Workspace { fixed: SLACK + 2 * ops::ALIGNMENT, terms: vec![(8, "bsh"), (8, "bqs")] },
        _ => Workspace { fixed: 0, terms: vec![(4, "bqs")] },
    }
}

/// The shape of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    batch: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
    e: usize,
    backward: bool,
}

impl Shape {
    /// Of an instruction that cuDNN may run.
    fn of(bound: &Bound) -> Option<Self> {
        let backward = match bound.op {
            Op::Attention { documents: false, window: None } => false,
            Op::AttentionGrad { documents: false, window: None } => true,
            _ => return None,
        };
        let size = |letter| bound.size(letter);
        let (batch, seq, heads, kv_heads, e) = (size('b'), size('s'), size('q'), size('u'), size('e'));
        let fits = bound.float == DType::BF16 && e.is_multiple_of(8) && e <= 256;
        fits.then_some(Self { batch, seq, heads, kv_heads, e, backward })
    }

    /// Bytes of scratch that were planned for it, besides dQ.
    fn most_scratch(&self) -> u64 {
        let rows = (self.batch * self.heads * self.seq) as u64;
        if self.backward { SLACK + 4 * rows * (self.e as u64 + 2) } else { SLACK }
    }

    fn dq_bytes(&self) -> u64 {
        (4 * self.batch * self.heads * self.seq * self.e) as u64
    }
}

/// Plans for the shapes of a program.
pub struct Plans {
    plans: HashMap<Shape, Plan>,
    /// Where attention runs on kernels of our own: that, and why.
    pub slow: Option<String>,
}

impl Plans {
    /// Makes plans for all instructions that cuDNN takes.
    pub fn new<'a>(gpu: &Gpu, bounds: impl Iterator<Item = &'a Bound>) -> Self {
        let mut plans = Self { plans: HashMap::new(), slow: None };
        let attends = |b: &&Bound| matches!(b.op, Op::Attention { .. } | Op::AttentionGrad { .. });
        for bound in bounds.filter(attends) {
            let made = match Shape::of(bound) {
                None => Err("cuDNN is used in bf16, without windows and document masks".to_owned()),
                Some(shape) if plans.plans.contains_key(&shape) => Ok(()),
                Some(shape) => plans.make(gpu, shape).map_err(|e| e.to_string()),
            };
            if let Err(why) = made {
                plans.slow.get_or_insert(format!("attention runs on a slow kernel: {why}"));
            }
        }
        plans
    }

    fn make(&mut self, gpu: &Gpu, shape: Shape) -> Result<(), CudaError> {
        let cudnn = gpu.cudnn()?;
        let plan = match shape.backward {
            true => backward_plan(gpu, cudnn, &shape)?,
            false => forward_plan(gpu, cudnn, &shape)?,
        };
        self.plans.insert(shape, plan);
        Ok(())
    }

    /// The plan of an instruction, if there is one.
    fn of(&self, bound: &Bound) -> Option<(Shape, &Plan)> {
        let shape = Shape::of(bound)?;
        Some((shape, self.plans.get(&shape)?))
    }
}

/// Numbers of tensors.
mod id {
    pub const Q: i64 = 1;
    pub const K: i64 = 2;
    pub const V: i64 = 3;
    pub const O: i64 = 4;
    pub const STATS: i64 = 5;
    pub const DO: i64 = 6;
    pub const DQ: i64 = 7;
    pub const DK: i64 = 8;
    pub const DV: i64 = 9;
    pub const DQ_SUM: i64 = 10;
    pub const SCALE: i64 = 20;
    pub const MINUS_INFINITY: i64 = 21;
    pub const ONE: i64 = 22;
}

/// A graph of attention under construction.
struct Graph {
    g: Builder,
    b: i64,
    h: i64,
    kv: i64,
    s: i64,
    e: i64,
    /// Elements of a row of packed Q·K·V.
    width: i64,
}

impl Graph {
    fn new(cudnn: &Cudnn, shape: &Shape) -> Self {
        let [b, h, kv, s, e] = [shape.batch, shape.heads, shape.kv_heads, shape.seq, shape.e].map(|n| n as i64);
        Self { g: Builder::new(cudnn), b, h, kv, s, e, width: (h + 2 * kv) * e }
    }

    /// Heads of packed Q·K·V.
    fn packed(&mut self, heads: i64, id: i64) -> Result<TensorId, CudaError> {
        let strides = [self.s * self.width, self.e, self.width, 1];
        self.g.tensor([self.b, heads, self.s, self.e], strides, Data::Bf16, Place::Memory(id))
    }

    /// The same, turned.
    fn packed_turned(&mut self, heads: i64, id: i64) -> Result<TensorId, CudaError> {
        let strides = [self.s * self.width, self.e, 1, self.width];
        self.g.tensor([self.b, heads, self.e, self.s], strides, Data::Bf16, Place::Memory(id))
    }

    /// Results, a row per position.
    fn rows(&mut self, id: i64) -> Result<TensorId, CudaError> {
        let strides = [self.s * self.h * self.e, self.e, self.h * self.e, 1];
        self.g.tensor([self.b, self.h, self.s, self.e], strides, Data::Bf16, Place::Memory(id))
    }

    fn scores(&mut self, data: Data) -> Result<TensorId, CudaError> {
        self.g.between([self.b, self.h, self.s, self.s], data)
    }

    /// Scores, seen turned.
    fn scores_turned(&mut self) -> Result<TensorId, CudaError> {
        let (h, s) = (self.h, self.s);
        self.g.tensor([self.b, h, s, s], [h * s * s, s * s, 1, s], Data::Bf16, Place::Virtual)
    }

    /// A number per row of scores.
    fn column(&mut self, place: Place) -> Result<TensorId, CudaError> {
        let (h, s) = (self.h, self.s);
        self.g.tensor([self.b, h, s, 1], [h * s, s, 1, 1], Data::Float, place)
    }

    fn heads_between(&mut self, data: Data) -> Result<TensorId, CudaError> {
        self.g.between([self.b, self.h, self.s, self.e], data)
    }

    fn binary(&mut self, mode: Pointwise, x: TensorId, b: TensorId) -> Result<TensorId, CudaError> {
        let y = self.scores(Data::Float)?;
        self.g.pointwise(mode, (x, Some(b), None), y, None)?;
        Ok(y)
    }

    /// Scores with those of later keys at −∞.
    fn masked(&mut self, x: TensorId) -> Result<TensorId, CudaError> {
        let (row, column) = (self.scores(Data::Int32)?, self.scores(Data::Int32)?);
        self.g.pointwise(Pointwise::Index, (x, None, None), row, Some(2))?;
        self.g.pointwise(Pointwise::Index, (x, None, None), column, Some(3))?;
        let sees = self.scores(Data::Boolean)?;
        self.g.pointwise(Pointwise::GreaterEqual, (row, Some(column), None), sees, None)?;
        let (minus_infinity, y) = (self.g.value(id::MINUS_INFINITY)?, self.scores(Data::Float)?);
        self.g.pointwise(Pointwise::Select, (x, Some(minus_infinity), Some(sees)), y, None)?;
        Ok(y)
    }
}

fn forward_plan(gpu: &Gpu, cudnn: &Cudnn, shape: &Shape) -> Result<Plan, CudaError> {
    let mut g = Graph::new(cudnn, shape);
    let (q, k, v) = (g.packed(g.h, id::Q)?, g.packed_turned(g.kv, id::K)?, g.packed(g.kv, id::V)?);
    let raw = g.scores(Data::Float)?;
    g.g.matmul(q, k, raw)?;
    let scale = g.g.value(id::SCALE)?;
    let scaled = g.binary(Pointwise::Mul, raw, scale)?;
    let scores = g.masked(scaled)?;
    let max = g.column(Place::Virtual)?;
    g.g.reduce(Reduction::Max, scores, max)?;
    let below = g.binary(Pointwise::Sub, scores, max)?;
    let exp = g.scores(Data::Float)?;
    g.g.pointwise(Pointwise::Exp, (below, None, None), exp, None)?;
    let sum = g.column(Place::Virtual)?;
    g.g.reduce(Reduction::Add, exp, sum)?;
    let log = g.column(Place::Virtual)?;
    g.g.pointwise(Pointwise::Log, (sum, None, None), log, None)?;
    let stats = g.column(Place::Memory(id::STATS))?;
    g.g.pointwise(Pointwise::Add, (max, Some(log), None), stats, None)?;
    let p = g.scores(Data::Bf16)?;
    g.g.pointwise(Pointwise::Div, (exp, Some(sum), None), p, None)?;
    let o = g.rows(id::O)?;
    g.g.matmul(p, v, o)?;
    g.g.plan(&format!("forward {shape:?}"), shape.most_scratch(), &|plan| trial(gpu, shape, plan))
}

fn backward_plan(gpu: &Gpu, cudnn: &Cudnn, shape: &Shape) -> Result<Plan, CudaError> {
    let mut g = Graph::new(cudnn, shape);
    let q = g.packed(g.h, id::Q)?;
    let (k, v) = (g.packed_turned(g.kv, id::K)?, g.packed_turned(g.kv, id::V)?);
    let (o, dout, stats) = (g.rows(id::O)?, g.rows(id::DO)?, g.column(Place::Memory(id::STATS))?);
    // What each row's gradients have in common.
    let product = g.heads_between(Data::Float)?;
    g.g.pointwise(Pointwise::Mul, (dout, Some(o), None), product, None)?;
    let row_sum = g.column(Place::Virtual)?;
    g.g.reduce(Reduction::Add, product, row_sum)?;
    // Without this product by one, plans of cuDNN 9.14 and 9.19 give NaN.
    let (one, common) = (g.g.value(id::ONE)?, g.column(Place::Virtual)?);
    g.g.pointwise(Pointwise::Mul, (row_sum, Some(one), None), common, None)?;
    // Probabilities again.
    let raw = g.scores(Data::Float)?;
    g.g.matmul(q, k, raw)?;
    let scale = g.g.value(id::SCALE)?;
    let scaled = g.binary(Pointwise::Mul, raw, scale)?;
    let below = g.binary(Pointwise::Sub, scaled, stats)?;
    let masked = g.masked(below)?;
    let p = g.scores(Data::Float)?;
    g.g.pointwise(Pointwise::Exp, (masked, None, None), p, None)?;
    let p_turned = g.scores_turned()?;
    g.g.reshape(p, p_turned)?;
    let grouped = g.kv != g.h;
    let sum_into = |g: &mut Graph, a: TensorId, b: TensorId, id: i64| -> Result<(), CudaError> {
        let out = g.packed(g.kv, id)?;
        match grouped {
            false => g.g.matmul(a, b, out),
            true => {
                let full = g.heads_between(Data::Bf16)?;
                g.g.matmul(a, b, full)?;
                g.g.reduce(Reduction::Add, full, out)
            }
        }
    };
    sum_into(&mut g, p_turned, dout, id::DV)?;
    let dp = g.scores(Data::Float)?;
    g.g.matmul(dout, v, dp)?;
    let less = g.binary(Pointwise::Sub, dp, common)?;
    let weighed = g.binary(Pointwise::Mul, less, p)?;
    let ds = g.binary(Pointwise::Mul, weighed, scale)?;
    let ds_turned = g.scores_turned()?;
    g.g.reshape(ds, ds_turned)?;
    sum_into(&mut g, ds_turned, q, id::DK)?;
    let strides = [g.s * g.width, g.e, g.width, 1];
    let k_rows = g.g.tensor([g.b, g.kv, g.s, g.e], strides, Data::Bf16, Place::Virtual)?;
    g.g.reshape(k, k_rows)?;
    let (h, s, e) = (g.h, g.s, g.e);
    let dq_sum = g.g.tensor([g.b, h, s, e], [h * s * e, s * e, e, 1], Data::Float, Place::Memory(id::DQ_SUM))?;
    g.g.matmul(ds, k_rows, dq_sum)?;
    let dq = g.packed(g.h, id::DQ)?;
    g.g.pointwise(Pointwise::Identity, (dq_sum, None, None), dq, None)?;
    g.g.plan(&format!("backward {shape:?}"), shape.most_scratch(), &|plan| trial(gpu, shape, plan))
}

/// Where the operands of an attention stand.
struct Operands {
    qkv: Address,
    o: Address,
    lse: Address,
    dout: Address,
    dqkv: Address,
    /// dQ in f32.
    dq: Address,
    scratch: Address,
}

/// Queues a plan.
///
/// # Safety
/// The operands are as large as the shape says.
unsafe fn execute(stream: &Stream, shape: &Shape, plan: &Plan, at: &Operands) -> Result<(), CudaError> {
    // K and V stand behind Q in a row.
    let (q, kv) = (shape.heads * shape.e, shape.kv_heads * shape.e);
    let bytes = DType::BF16.bytes();
    let (k, v) = ((q * bytes) as u64, ((q + kv) * bytes) as u64);
    let forward = [(id::Q, at.qkv), (id::K, at.qkv + k), (id::V, at.qkv + v), (id::O, at.o), (id::STATS, at.lse)];
    let backward =
        [(id::DO, at.dout), (id::DQ, at.dqkv), (id::DK, at.dqkv + k), (id::DV, at.dqkv + v), (id::DQ_SUM, at.dq)];
    let values = [(id::SCALE, scale(shape.e)), (id::MINUS_INFINITY, f32::NEG_INFINITY), (id::ONE, 1.0)];
    // SAFETY: the caller vouches.
    unsafe {
        match shape.backward {
            false => plan.execute(stream, &forward, &values[..2], at.scratch),
            true => plan.execute(stream, &[forward, backward].concat(), &values, at.scratch),
        }
    }
}

/// Seconds that a plan takes on random numbers.
fn trial(gpu: &Gpu, shape: &Shape, plan: &Plan) -> Result<f64, CudaError> {
    let (q, kv) = (shape.heads * shape.e, shape.kv_heads * shape.e);
    let rows = (shape.batch * shape.seq) as u64;
    let (wide, narrow) = (2 * rows * (q + 2 * kv) as u64, 2 * rows * q as u64);
    let sizes = [wide, narrow, 4 * rows * shape.heads as u64, narrow, wide, shape.dq_bytes(), plan.workspace];
    let sizes = sizes.map(|s| s.next_multiple_of(ops::ALIGNMENT));
    // Where there is no room to try, the library's order counts.
    if gpu.device.free_bytes()? < sizes.iter().sum::<u64>() + (256 << 20) {
        return Ok(0.0);
    }
    let (memory, stream) = (Memory::new(&gpu.device, sizes.iter().sum())?, Stream::new(&gpu.device)?);
    fill_random(&stream, memory.base, memory.bytes)?;
    let mut next = memory.base;
    let [qkv, o, lse, dout, dqkv, dq, scratch] = sizes.map(|size| {
        let here = next;
        next += size;
        here
    });
    let at = Operands { qkv, o, lse, dout, dqkv, dq, scratch };
    let (start, end) = (Event::new(&gpu.device)?, Event::new(&gpu.device)?);
    // SAFETY: the operands are as large as the shape says.
    unsafe { execute(&stream, shape, plan, &at)? };
    start.record(&stream)?;
    for _ in 0..3 {
        // SAFETY: as above.
        unsafe { execute(&stream, shape, plan, &at)? };
    }
    end.record(&stream)?;
    end.wait()?;
    end.since(&start)
}

/// Keys that a query sees at most.
pub(crate) fn keys_seen(window: Option<usize>) -> usize {
    window.unwrap_or(i32::MAX as usize).min(i32::MAX as usize)
}

pub(crate) fn scale(e: usize) -> f32 {
    1.0 / (e as f32).sqrt()
}

/// Warps of a block of our own kernels; each has a position.
pub(crate) const WARPS: usize = 4;

/// o, and the log-sum-exp of each row of scores.
pub unsafe fn forward(call: Call, documents: bool, window: Option<usize>) -> Result<(), CudaError> {
    let Some(o) = call.output(0) else { return Ok(()) };
    let (e, qkv) = (call.size('e'), call.input(0));
    if let Some((shape, plan)) = call.attention.of(call.bound) {
        let scratch = call.scratch()?;
        let lse = call.output(1).unwrap_or(scratch + SLACK);
        let at = Operands { qkv, o, lse, dout: 0, dqkv: 0, dq: 0, scratch };
        // SAFETY: the operands have these sizes.
        return unsafe { execute(call.stream, &shape, plan, &at) };
    }
    let (seq, heads) = (call.size('s'), call.size('q'));
    let starts = documents.then(|| call.input(1));
    let grid = [seq.div_ceil(WARPS), heads, call.size('b')];
    let args = args![qkv, starts, o, call.output(1), seq, heads, call.size('u'), e, keys_seen(window), scale(e)];
    check_head(e)?;
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("attention", "attention"), grid, 32 * WARPS, args) }
}

/// Our own kernels keep a head in the registers of a warp.
pub(crate) fn check_head(e: usize) -> Result<(), CudaError> {
    match e {
        1..=256 => Ok(()),
        _ => Err(CudaError::Internal(format!("heads of {e} elements are too wide for the device's kernels"))),
    }
}

/// dqkv from do, qkv, o and the log-sum-exps.
pub unsafe fn grad(call: Call, documents: bool, window: Option<usize>) -> Result<(), CudaError> {
    let Some(dqkv) = call.output(0) else { return Ok(()) };
    let (e, seq, heads, kv_heads) = (call.size('e'), call.size('s'), call.size('q'), call.size('u'));
    let (dout, qkv, o, lse, scratch) = (call.input(0), call.input(1), call.input(2), call.input(3), call.scratch()?);
    if let Some((shape, plan)) = call.attention.of(call.bound) {
        let rest = scratch + shape.dq_bytes().next_multiple_of(ops::ALIGNMENT);
        let at = Operands { qkv, o, lse, dout, dqkv, dq: scratch, scratch: rest };
        // SAFETY: the operands have these sizes; the scratch has room for dQ and the plan.
        return unsafe { execute(call.stream, &shape, plan, &at) };
    }
    check_head(e)?;
    let starts = documents.then(|| call.input(4));
    let rows = seq.div_ceil(WARPS);
    let (grid, keys) = ([rows, heads, call.size('b')], [rows, kv_heads, call.size('b')]);
    let args = args![dout, qkv, lse, scratch, starts, dqkv, seq, heads, kv_heads, e, keys_seen(window), scale(e)];
    let delta = args![dout, o, scratch, seq, heads, kv_heads, e];
    // SAFETY: the operands have these sizes; the scratch has a number per row.
    unsafe {
        call.typed(("attention", "attention_delta"), grid, 32 * WARPS, delta)?;
        call.typed(("attention", "attention_grad_query"), grid, 32 * WARPS, args)?;
        call.typed(("attention", "attention_grad_key"), keys, 32 * WARPS, args)
    }
}

/// o of new positions over the cache, which gets their keys and values.
pub unsafe fn cached(call: Call, window: Option<usize>) -> Result<(), CudaError> {
    let (Some(o), Some(cache)) = (call.output(0), call.output(1)) else { return Ok(()) };
    let (e, seq, heads, kv_heads, context) =
        (call.size('e'), call.size('s'), call.size('q'), call.size('u'), call.size('t'));
    let (qkv, start, count, batch) = (call.input(0), call.input(2), call.input(3), call.size('b'));
    check_head(e)?;
    let write = args![qkv, cache, start, count, seq, heads, kv_heads, e, context];
    let args = args![qkv, cache, start, count, o, seq, heads, kv_heads, e, context, keys_seen(window), scale(e)];
    // SAFETY: the operands have these sizes.
    unsafe {
        call.typed(("attention", "cache_write"), [seq, batch, 1], 128, write)?;
        call.typed(("attention", "cached_attention"), [seq.div_ceil(WARPS), heads, batch], 32 * WARPS, args)
    }
}
