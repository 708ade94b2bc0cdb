//! Attention as a graph of cuDNN, forward and backward.
//!
//! cuDNN fuses a graph only where it recognises its form, so nodes stand as the library expects them.

use super::plans::{AttentionShape, Parts};
use crate::CudaError;
use crate::cudnn::{Builder, Cudnn, Data, Pointwise, Reduction, Storage, TensorId};

/// The graph of a shape.
pub fn build(cudnn: &Cudnn, shape: &AttentionShape) -> Result<Builder, CudaError> {
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
    pub const MINUS_INFINITY_PADDING: i64 = 25;
    pub const ROW_SUM: i64 = 13;
    /// Where documents start: in rows of packed Q·K·V, of heads, of statistics.
    pub const OFFSETS: [i64; 3] = [30, 31, 32];
    pub const LENGTHS: i64 = 34;
}

/// Documents as entries of the batch: where each starts in the tensors of a kind of row, and how long it is.
#[derive(Clone, Copy)]
struct Documents {
    packed: TensorId,
    heads: TensorId,
    stats: TensorId,
    lengths: TensorId,
}

/// What a matmul of attention makes.
enum Product {
    /// Rows are queries, columns keys.
    Scores,
    /// Rows are queries or keys, and it sums over keys or queries.
    OverKeys,
}

/// A graph of attention under construction.
struct Graph {
    g: Builder,
    /// Of Q, K, V, o and their gradients, and of what is multiplied with them.
    data: Data,
    b: i64,
    h: i64,
    kv: i64,
    /// Queries, keys.
    s: i64,
    t: i64,
    /// Elements of a head of Q and K, and of V.
    e: i64,
    v: i64,
    /// Elements of a row of packed Q·K·V.
    width: i64,
    window: bool,
    documents: Option<Documents>,
    parts: Option<Parts>,
}

impl Graph {
    fn new(cudnn: &Cudnn, shape: &AttentionShape) -> Result<Self, CudaError> {
        let entries = shape.documents.unwrap_or(shape.batch);
        let [b, h, kv, s, e, v] = [entries, shape.heads, shape.kv_heads, shape.seq, shape.e, shape.v].map(|n| n as i64);
        let (t, parts) = (shape.keys() as i64, shape.parts);
        let none = || CudaError::Internal(format!("cuDNN has no attention in {}", shape.dtype));
        let data = Data::fused(shape.dtype).ok_or_else(none)?;
        let mut g = Builder::new(cudnn);
        let mut column = |count, data, id| g.tensor([count, 1, 1, 1], [1; 4], data, Storage::Memory(id));
        let documents = match shape.documents {
            None => None,
            Some(_) => {
                let mut offsets = |kind: usize| column(b + 1, Data::Int64, id::OFFSETS[kind]);
                let (packed, heads, stats) = (offsets(0)?, offsets(1)?, offsets(2)?);
                Some(Documents { packed, heads, stats, lengths: column(b, Data::Int32, id::LENGTHS)? })
            }
        };
        let (width, window) = ((h + kv) * e + kv * v, shape.window.is_some());
        Ok(Self { g, data, b, h, kv, s, t, e, v, width, window, documents, parts })
    }

    /// Heads of `e` elements of `count` positions in rows of `width` elements, `rows` from a sequence to the next.
    fn in_rows(
        &mut self,
        (heads, e, width): (i64, i64, i64),
        (count, rows): (i64, i64),
        transposed: bool,
        data: Data,
        (place, offsets): (Storage, Option<TensorId>),
    ) -> Result<TensorId, CudaError> {
        let (mut dims, mut strides) = ([self.b, heads, count, e], [rows * width, e, width, 1]);
        if transposed {
            dims.swap(2, 3);
            strides.swap(2, 3);
        }
        self.g.ragged(dims, strides, data, place, offsets)
    }

    /// Rows from a sequence to the next, of queries and of keys.
    fn rows_apart(&self) -> (i64, i64) {
        self.parts.map_or((self.s, self.s), |parts| (parts.rows.0 as i64, parts.rows.1 as i64))
    }

    /// Queries: heads of packed Q·K·V.
    fn queries(&mut self, place: Storage) -> Result<TensorId, CudaError> {
        let offsets = self.documents.map(|d| d.packed);
        let rows = (self.s, self.rows_apart().0);
        self.in_rows((self.h, self.e, self.width), rows, false, self.data, (place, offsets))
    }

    /// dQ: where Q is, or in rows of its own.
    fn query_gradients(&mut self, place: Storage) -> Result<TensorId, CudaError> {
        match self.parts {
            None => self.queries(place),
            Some(_) => {
                let heads = (self.h, self.e, self.h * self.e);
                self.in_rows(heads, (self.s, self.s), false, self.data, (place, None))
            }
        }
    }

    /// Elements of a row of packed K·V.
    fn key_width(&self) -> i64 {
        self.kv * (self.e + self.v)
    }

    /// K or V, whose heads have `e` elements: packed, or in rows of their own.
    fn packed_keys(&mut self, e: i64, transposed: bool, place: Storage) -> Result<TensorId, CudaError> {
        let offsets = self.documents.map(|d| d.packed);
        let width = if self.parts.is_some() { self.key_width() } else { self.width };
        let rows = (self.t, self.rows_apart().1);
        self.in_rows((self.kv, e, width), rows, transposed, self.data, (place, offsets))
    }

    /// K or V in a backward pass: as in a forward pass, or, where documents are apart and queries share keys, a key head per
    /// query head in rows of their own (the library's own sums over such heads fail with documents), K and V of one width.
    fn keys(&mut self, e: i64, transposed: bool, place: Storage) -> Result<TensorId, CudaError> {
        match self.documents {
            Some(d) if self.grouped() => {
                let rows = (self.s, self.s);
                self.in_rows((self.h, e, self.h * e), rows, transposed, self.data, (place, Some(d.heads)))
            }
            _ => self.packed_keys(e, transposed, place),
        }
    }

    /// dK or dV: where K and V are, or one after the other.
    fn key_gradients(&mut self, e: i64, place: Storage) -> Result<TensorId, CudaError> {
        match self.parts {
            None => self.keys(e, false, place),
            Some(_) => {
                let heads = (self.kv, e, self.key_width());
                self.in_rows(heads, (self.t, self.t), false, self.data, (place, None))
            }
        }
    }

    /// Whether several queries share a key.
    fn grouped(&self) -> bool {
        self.kv != self.h
    }

    /// Results, a row of all query heads per position, `apart` from a sequence to the next.
    fn rows(&mut self, id: i64, apart: i64) -> Result<TensorId, CudaError> {
        let place = (Storage::Memory(id), self.documents.map(|d| d.heads));
        self.in_rows((self.h, self.v, self.h * self.v), (self.s, apart), false, self.data, place)
    }

    /// Statistics in memory: position by position where documents are apart, head by head otherwise.
    fn stats(&mut self, id: i64) -> Result<TensorId, CudaError> {
        let (h, s) = (self.h, self.s);
        match self.documents {
            None => self.column(Storage::Memory(id)),
            Some(d) => {
                self.g.ragged([self.b, h, s, 1], [h * s, 1, h, 1], Data::Float, Storage::Memory(id), Some(d.stats))
            }
        }
    }

    /// Scores = a · b, or what scores turn into.
    fn matmul(&mut self, a: TensorId, b: TensorId, c: TensorId, of: Product) -> Result<(), CudaError> {
        let lengths = self.documents.map(|d| d.lengths);
        let sizes = match of {
            Product::Scores => [lengths, lengths, None],
            Product::OverKeys => [lengths, None, lengths],
        };
        self.g.matmul(a, b, c, sizes)
    }

    /// Scores with those of positions after the end of a document at −∞.
    fn padded(&mut self, x: TensorId) -> Result<TensorId, CudaError> {
        let Some(Documents { lengths, .. }) = self.documents else { return Ok(x) };
        let (row, column) = self.indices(x, Data::Int32)?;
        let mut inside = [self.scores(Data::Boolean)?, self.scores(Data::Boolean)?];
        for (index, y) in [row, column].into_iter().zip(&mut inside) {
            self.g.pointwise(Pointwise::Less, (index, Some(lengths), None), *y)?;
        }
        self.kept(x, Pointwise::And, inside[0], inside[1], id::MINUS_INFINITY_PADDING)
    }

    fn scores(&mut self, data: Data) -> Result<TensorId, CudaError> {
        self.g.between([self.b, self.h, self.s, self.t], data)
    }

    /// Scores, seen transposed.
    fn scores_transposed(&mut self) -> Result<TensorId, CudaError> {
        let (h, s, t) = (self.h, self.s, self.t);
        self.g.tensor([self.b, h, t, s], [h * s * t, s * t, 1, t], self.data, Storage::Virtual)
    }

    /// A number per row of scores.
    fn column(&mut self, place: Storage) -> Result<TensorId, CudaError> {
        let (h, s) = (self.h, self.s);
        self.g.tensor([self.b, h, s, 1], [h * s, s, 1, 1], Data::Float, place)
    }

    fn heads_between(&mut self, positions: i64, e: i64, data: Data) -> Result<TensorId, CudaError> {
        self.g.between([self.b, self.h, positions, e], data)
    }

    fn binary(&mut self, mode: Pointwise, x: TensorId, b: TensorId) -> Result<TensorId, CudaError> {
        let y = self.scores(Data::Float)?;
        self.g.pointwise(mode, (x, Some(b), None), y)?;
        Ok(y)
    }

    /// Scores with those of keys that a query does not see at −∞: later ones, and those before its window. The library knows
    /// this graph by its form: two masks one after the other, each with indices of its own, and a window that is a float.
    fn masked(&mut self, x: TensorId) -> Result<TensorId, CudaError> {
        if self.parts.is_some_and(|parts| !parts.causal) {
            return Ok(x);
        }
        let (row, column) = self.indices(x, Data::Float)?;
        let earlier = self.kept(x, Pointwise::GreaterEqual, row, column, id::MINUS_INFINITY)?;
        if !self.window {
            return Ok(earlier);
        }
        let (row, column) = self.indices(earlier, Data::Float)?;
        let window = self.g.value(id::WINDOW)?;
        let end = self.binary(Pointwise::Add, column, window)?;
        self.kept(earlier, Pointwise::Greater, end, row, id::MINUS_INFINITY_BEFORE)
    }

    /// The query and the key of each score.
    fn indices(&mut self, x: TensorId, precision: Data) -> Result<(TensorId, TensorId), CudaError> {
        let (row, column) = (self.scores(Data::Int32)?, self.scores(Data::Int32)?);
        self.g.index(x, row, 2, precision)?;
        self.g.index(x, column, 3, precision)?;
        Ok((row, column))
    }

    /// Scores where a comparison holds, −∞ elsewhere.
    fn kept(
        &mut self,
        x: TensorId,
        mode: Pointwise,
        a: TensorId,
        b: TensorId,
        minus_infinity: i64,
    ) -> Result<TensorId, CudaError> {
        let sees = self.scores(Data::Boolean)?;
        self.g.pointwise(mode, (a, Some(b), None), sees)?;
        let (minus_infinity, y) = (self.g.value(minus_infinity)?, self.scores(Data::Float)?);
        self.g.pointwise(Pointwise::Select, (x, Some(minus_infinity), Some(sees)), y)?;
        Ok(y)
    }
}

fn forward(cudnn: &Cudnn, shape: &AttentionShape) -> Result<Builder, CudaError> {
    let mut g = Graph::new(cudnn, shape)?;
    let q = g.queries(Storage::Memory(id::Q))?;
    let k = g.packed_keys(g.e, true, Storage::Memory(id::K))?;
    let v = g.packed_keys(g.v, false, Storage::Memory(id::V))?;
    let raw = g.scores(Data::Float)?;
    g.matmul(q, k, raw, Product::Scores)?;
    let scale = g.g.value(id::SCALE)?;
    let scaled = g.binary(Pointwise::Mul, raw, scale)?;
    let padded = g.padded(scaled)?;
    let scores = g.masked(padded)?;
    let max = g.column(Storage::Virtual)?;
    g.g.reduce(Reduction::Max, scores, max)?;
    let below = g.binary(Pointwise::Sub, scores, max)?;
    let exp = g.scores(Data::Float)?;
    g.g.pointwise(Pointwise::Exp, (below, None, None), exp)?;
    let sum = g.column(Storage::Virtual)?;
    g.g.reduce(Reduction::Add, exp, sum)?;
    let log = g.column(Storage::Virtual)?;
    g.g.pointwise(Pointwise::Log, (sum, None, None), log)?;
    let stats = g.stats(id::STATS)?;
    g.g.pointwise(Pointwise::Add, (max, Some(log), None), stats)?;
    let p = g.scores(g.data)?;
    g.g.pointwise(Pointwise::Div, (exp, Some(sum), None), p)?;
    // Of a block, one after the other.
    let o = g.rows(id::O, g.s)?;
    g.matmul(p, v, o, Product::OverKeys)?;
    Ok(g.g)
}

fn backward(cudnn: &Cudnn, shape: &AttentionShape) -> Result<Builder, CudaError> {
    let mut g = Graph::new(cudnn, shape)?;
    let q = g.queries(Storage::Memory(id::Q))?;
    let (k, v) = (g.keys(g.e, true, Storage::Memory(id::K))?, g.keys(g.v, true, Storage::Memory(id::V))?);
    let apart = g.rows_apart().0;
    let (o, dout, stats) = (g.rows(id::O, apart)?, g.rows(id::DO, apart)?, g.stats(id::STATS)?);
    // What each row's gradients have in common.
    let product = g.heads_between(g.s, g.v, Data::Float)?;
    g.g.pointwise(Pointwise::Mul, (dout, Some(o), None), product)?;
    let row_sum = g.column(Storage::Virtual)?;
    g.g.reduce(Reduction::Add, product, row_sum)?;
    // Without this product by one, plans of cuDNN 9.14 and 9.19 give NaN.
    let one = g.g.value(id::ONE)?;
    let common = match g.documents {
        Some(_) => g.stats(id::ROW_SUM)?,
        None => g.column(Storage::Virtual)?,
    };
    g.g.pointwise(Pointwise::Mul, (row_sum, Some(one), None), common)?;
    // Recompute the probabilities.
    let raw = g.scores(Data::Float)?;
    g.matmul(q, k, raw, Product::Scores)?;
    let scale = g.g.value(id::SCALE)?;
    let scaled = g.binary(Pointwise::Mul, raw, scale)?;
    let padded = g.padded(scaled)?;
    let below = g.binary(Pointwise::Sub, padded, stats)?;
    let masked = g.masked(below)?;
    let p = g.scores(Data::Float)?;
    g.g.pointwise(Pointwise::Exp, (masked, None, None), p)?;
    let p_transposed = g.scores_transposed()?;
    g.g.reshape(p, p_transposed)?;
    let sum_into = |g: &mut Graph, a: TensorId, b: TensorId, (id, e): (i64, i64)| -> Result<(), CudaError> {
        let out = g.key_gradients(e, Storage::Memory(id))?;
        if !g.grouped() || g.documents.is_some() {
            return g.matmul(a, b, out, Product::OverKeys);
        }
        let full = g.heads_between(g.t, e, g.data)?;
        g.matmul(a, b, full, Product::OverKeys)?;
        g.g.reduce(Reduction::Add, full, out)
    };
    let (of_keys, of_values) = ((id::DK, g.e), (id::DV, g.v));
    sum_into(&mut g, p_transposed, dout, of_values)?;
    let dp = g.scores(Data::Float)?;
    g.matmul(dout, v, dp, Product::Scores)?;
    let less = g.binary(Pointwise::Sub, dp, common)?;
    let weighed = g.binary(Pointwise::Mul, less, p)?;
    let ds = g.binary(Pointwise::Mul, weighed, scale)?;
    let ds_transposed = g.scores_transposed()?;
    g.g.reshape(ds, ds_transposed)?;
    sum_into(&mut g, ds_transposed, q, of_keys)?;
    let k_rows = g.keys(g.e, false, Storage::Virtual)?;
    g.g.reshape(k, k_rows)?;
    let dq = g.query_gradients(Storage::Memory(id::DQ))?;
    if shape.deterministic {
        // The library adds this product up in one order, over all of dS in scratch.
        g.matmul(ds, k_rows, dq, Product::OverKeys)?;
        return Ok(g.g);
    }
    let (h, s, e) = (g.h, g.s, g.e);
    let dq_sum = match g.documents {
        None => g.g.tensor([g.b, h, s, e], [h * s * e, s * e, e, 1], Data::Float, Storage::Memory(id::DQ_SUM))?,
        // In rows as wide as those of Q: the library takes Q's offsets for it.
        Some(d) => {
            let place = (Storage::Memory(id::DQ_SUM), Some(d.packed));
            g.in_rows((h, e, g.width), (s, s), false, Data::Float, place)?
        }
    };
    g.matmul(ds, k_rows, dq_sum, Product::OverKeys)?;
    g.g.pointwise(Pointwise::Identity, (dq_sum, None, None), dq)?;
    Ok(g.g)
}
