//! Attention as a graph of cuDNN, forward and backward.

use super::plans::Shape;
use crate::CudaError;
use crate::cudnn::{Builder, Cudnn, Data, Place, Pointwise, Reduction, TensorId};

/// The graph of a shape.
pub fn build(cudnn: &Cudnn, shape: &Shape) -> Result<Builder, CudaError> {
    match shape.backward {
        true => backward(cudnn, shape),
        false => forward(cudnn, shape),
    }
}

/// Numbers of tensors.
pub mod id {
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
    pub const WINDOW: i64 = 23;
    pub const MINUS_INFINITY_BEFORE: i64 = 24;
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
    window: bool,
}

impl Graph {
    fn new(cudnn: &Cudnn, shape: &Shape) -> Self {
        let [b, h, kv, s, e] = [shape.batch, shape.heads, shape.kv_heads, shape.seq, shape.e].map(|n| n as i64);
        Self { g: Builder::new(cudnn), b, h, kv, s, e, width: (h + 2 * kv) * e, window: shape.window.is_some() }
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

    /// Scores with those of keys that a query does not see at −∞: later ones, and those before its window. The library knows
    /// this graph by its form: two masks one after the other, each with indices of its own, and a window that is a float.
    fn masked(&mut self, x: TensorId) -> Result<TensorId, CudaError> {
        let (row, column) = self.indices(x)?;
        let earlier = self.kept(x, (Pointwise::GreaterEqual, row, column), id::MINUS_INFINITY)?;
        if !self.window {
            return Ok(earlier);
        }
        let (row, column) = self.indices(earlier)?;
        let window = self.g.value(id::WINDOW)?;
        let end = self.binary(Pointwise::Add, column, window)?;
        self.kept(earlier, (Pointwise::Greater, end, row), id::MINUS_INFINITY_BEFORE)
    }

    /// The query and the key of each score.
    fn indices(&mut self, x: TensorId) -> Result<(TensorId, TensorId), CudaError> {
        let (row, column) = (self.scores(Data::Int32)?, self.scores(Data::Int32)?);
        self.g.pointwise(Pointwise::Index, (x, None, None), row, Some(2))?;
        self.g.pointwise(Pointwise::Index, (x, None, None), column, Some(3))?;
        Ok((row, column))
    }

    /// Scores where a comparison holds, −∞ elsewhere.
    fn kept(
        &mut self,
        x: TensorId,
        (mode, a, b): (Pointwise, TensorId, TensorId),
        minus_infinity: i64,
    ) -> Result<TensorId, CudaError> {
        let sees = self.scores(Data::Boolean)?;
        self.g.pointwise(mode, (a, Some(b), None), sees, None)?;
        let (minus_infinity, y) = (self.g.value(minus_infinity)?, self.scores(Data::Float)?);
        self.g.pointwise(Pointwise::Select, (x, Some(minus_infinity), Some(sees)), y, None)?;
        Ok(y)
    }
}

fn forward(cudnn: &Cudnn, shape: &Shape) -> Result<Builder, CudaError> {
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
    Ok(g.g)
}

fn backward(cudnn: &Cudnn, shape: &Shape) -> Result<Builder, CudaError> {
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
    let dq = g.packed(g.h, id::DQ)?;
    if shape.deterministic {
        // The library adds this product up in one order, over all of dS in scratch.
        g.g.matmul(ds, k_rows, dq)?;
        return Ok(g.g);
    }
    let (h, s, e) = (g.h, g.s, g.e);
    let dq_sum = g.g.tensor([g.b, h, s, e], [h * s * e, s * e, e, 1], Data::Float, Place::Memory(id::DQ_SUM))?;
    g.g.matmul(ds, k_rows, dq_sum)?;
    g.g.pointwise(Pointwise::Identity, (dq_sum, None, None), dq, None)?;
    Ok(g.g)
}
