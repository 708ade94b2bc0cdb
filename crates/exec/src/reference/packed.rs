//! Where heads stand in packed Q·K·V.

use super::at::{dot, log_sum_exp};
use lockstep_ir::op::Dims;
use std::ops::Range;

pub struct Heads {
    pub seq: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Elements of a head of Q and K, and of V.
    pub e: usize,
    pub v: usize,
}

impl Heads {
    pub fn of(dims: &Dims) -> Self {
        Self {
            seq: dims.size("seq"),
            heads: dims.size("heads"),
            kv_heads: dims.size("kv_heads"),
            e: dims.size("head_dim"),
            v: dims.size("value_dim"),
        }
    }

    /// Index in qkv of element `i` at position `s` for head `h`: query heads first, then keys, then values.
    pub fn at(&self, b: usize, s: usize, h: usize, i: usize) -> usize {
        self.range(b, s, h).start + i
    }

    /// Where the head stands in qkv, and where its output does.
    pub fn range(&self, b: usize, s: usize, h: usize) -> Range<usize> {
        let row = (b * self.seq + s) * ((self.heads + self.kv_heads) * self.e + self.kv_heads * self.v);
        let keys = self.heads + self.kv_heads;
        let (first, n) = if h < keys { (h * self.e, self.e) } else { (keys * self.e + (h - keys) * self.v, self.v) };
        row + first..row + first + n
    }

    pub fn out_range(&self, b: usize, s: usize, h: usize) -> Range<usize> {
        self.out(b, s, h, 0)..self.out(b, s, h, 0) + self.v
    }

    pub fn key(&self, h: usize) -> usize {
        self.heads + h / (self.heads / self.kv_heads)
    }

    pub fn value(&self, h: usize) -> usize {
        self.key(h) + self.kv_heads
    }

    pub fn out(&self, b: usize, s: usize, h: usize, i: usize) -> usize {
        ((b * self.seq + s) * self.heads + h) * self.v + i
    }

    /// Weights of the keys from ..= s, and the log-sum-exp of their scores.
    pub fn weights(&self, qkv: &[f64], b: usize, from: usize, s: usize, h: usize) -> (Vec<f64>, f64) {
        let query = &qkv[self.range(b, s, h)];
        let dot = |t: usize| dot(query, &qkv[self.range(b, t, self.key(h))]);
        let scores: Vec<f64> = (from..=s).map(|t| dot(t) / (self.e as f64).sqrt()).collect();
        let lse = log_sum_exp(&scores);
        (scores.iter().map(|x| (x - lse).exp()).collect(), lse)
    }
}
