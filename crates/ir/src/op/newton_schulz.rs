//! The numbers of `Op::Orthogonalise`: what its definition and every kernel share.
//!
//! From X, the matrix divided by its Frobenius norm, each iteration makes a·X + (b·A + c·A²)·X with A = X·Xᵀ; for a matrix
//! with more rows than columns, the same from the other side.

/// Iterations.
pub const ITERATIONS: usize = 5;
/// a, b and c: they bring every singular value near 1 in few iterations, not to it.
pub const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// Added to the norm, so that a matrix of zeros stays one.
pub const EPS: f32 = 1e-7;

/// The factor on the result: its root mean square becomes that of a usual AdamW update.
pub fn scale(rows: usize, columns: usize) -> f32 {
    0.2 * (rows.max(columns) as f32).sqrt()
}

/// Floating-point operations of all iterations.
pub fn flops(rows: usize, columns: usize) -> u128 {
    let (short, long) = (rows.min(columns) as u128, rows.max(columns) as u128);
    ITERATIONS as u128 * (4 * short * short * long + 2 * short * short * short)
}
