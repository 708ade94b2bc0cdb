use super::*;
use lockstep_ir::counter;

fn random<T: Float>(n: usize, name: &str) -> Vec<T> {
    let key = counter::key(1, name);
    (0..n).map(|i| T::of(counter::normal(key, i as u64))).collect()
}

/// Where an operand's rows stand in memory.
#[derive(Clone, Copy, Debug)]
struct Turned(bool);

impl Turned {
    fn matrix<T>(self, data: &[T], rows: usize, columns: usize) -> Matrix<T> {
        if self.0 { Matrix::rows(data.as_ptr(), rows).transposed() } else { Matrix::rows(data.as_ptr(), columns) }
    }

    fn at(self, rows: usize, columns: usize, i: usize, j: usize) -> usize {
        if self.0 { j * rows + i } else { i * columns + j }
    }
}

fn scratch(threads: usize, k: usize) -> Vec<f32> {
    let (fixed, per_k) = scratch_bytes(threads);
    vec![f32::NAN; (fixed + per_k * k) / 4]
}

fn matmul<T: Float>(
    simd: Simd,
    threads: usize,
    (m, n, k): (usize, usize, usize),
    a: Matrix<T>,
    b: Matrix<T>,
) -> Vec<f32> {
    let pool = Pool::new(threads).unwrap();
    let mut c = vec![f32::NAN; m * n];
    let target = Target::F32 { ptr: c.as_mut_ptr(), stride: n, add: false };
    // SAFETY: the vectors have the sizes given.
    unsafe { gemm(&pool, simd, (m, n, k), a, b, target, scratch(threads, k).as_mut_ptr()) };
    c
}

fn units() -> Vec<Simd> {
    Simd::ALL.into_iter().filter(|path| *path <= Simd::current()).collect()
}

const SIZES: [(usize, usize, usize); 7] =
    [(1, 1, 1), (13, 33, 7), (97, 65, 300), (12, 2100, 5), (100, 31, 513), (64, 64, 64), (40, 96, 1100)];

fn agrees<T: Float>(tolerance: f64) {
    for (m, n, k) in SIZES {
        let (a, b) = (random::<T>(m * k, "a"), random::<T>(k * n, "b"));
        for (ta, tb) in
            [(false, false), (false, true), (true, false), (true, true)].map(|(a, b)| (Turned(a), Turned(b)))
        {
            let exact = |i: usize, j: usize| -> f64 {
                let term = |l: usize| f64::from(a[ta.at(m, k, i, l)].to()) * f64::from(b[tb.at(k, n, l, j)].to());
                (0..k).map(term).sum()
            };
            for simd in units() {
                let c = matmul(simd, 2, (m, n, k), ta.matrix(&a, m, k), tb.matrix(&b, k, n));
                let worst = (0..m * n).map(|at| (f64::from(c[at]) - exact(at / n, at % n)).abs()).fold(0.0, f64::max);
                assert!(worst <= tolerance * (k as f64).sqrt(), "{simd:?} {m}×{n}×{k} {ta:?} {tb:?}: {worst}");
            }
        }
    }
}

#[test]
fn f32_products_agree_with_f64_on_every_unit_at_awkward_sizes() {
    agrees::<f32>(4e-6);
}

#[test]
fn bf16_products_agree_with_f64_on_every_unit_at_awkward_sizes() {
    // Operands are exact in f32, so only the order of sums differs: the units agree as closely as f32 ones.
    agrees::<Bf16>(4e-6);
}

fn row_is_its_own<T: Float>() {
    let (n, k) = (70, 1600);
    let (a, b) = (random::<T>(200 * k, "a"), random::<T>(k * n, "b"));
    let rows = |from: usize| Matrix::rows(a[from * k..].as_ptr(), k);
    let many = matmul(Simd::current(), 2, (200, n, k), rows(0), Matrix::rows(b.as_ptr(), n));
    for row in [0, 5, 96, 199] {
        let one = matmul(Simd::current(), 1, (1, n, k), rows(row), Matrix::rows(b.as_ptr(), n));
        assert_eq!(one, many[row * n..(row + 1) * n], "{}", T::DTYPE);
    }
}

#[test]
fn a_row_does_not_depend_on_the_rows_around_it_nor_on_threads() {
    row_is_its_own::<f32>();
    row_is_its_own::<Bf16>();
}

#[test]
fn a_bf16_result_is_the_f32_result_rounded_once() {
    let (m, n, k) = (50, 40, 300);
    let (a, b) = (random::<Bf16>(m * k, "a"), random::<Bf16>(k * n, "b"));
    let (a, b) = (Matrix::rows(a.as_ptr(), k), Matrix::rows(b.as_ptr(), n));
    for simd in units() {
        let pool = Pool::new(2).unwrap();
        let mut rounded = vec![Bf16(0); m * n];
        let target = Target::new(rounded.as_mut_ptr(), n);
        // SAFETY: the vectors have the sizes given.
        unsafe { gemm(&pool, simd, (m, n, k), a, b, target, scratch(2, k).as_mut_ptr()) };
        let whole = matmul(simd, 2, (m, n, k), a, b);
        for (r, w) in rounded.iter().zip(whole) {
            assert!((r.to() - w).abs() <= w.abs() * 0.004 + 1e-6, "{simd:?}: {} and {w}", r.to());
        }
    }
}
