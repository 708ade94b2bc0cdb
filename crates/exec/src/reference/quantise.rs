//! fp8: what the formats say, in f64.

use super::at::{At, Definition, Definitions, matmul};
use super::dispatch::of_rows;
use super::experts;
use crate::by_kind;
use lockstep_ir::op::Factor;
use lockstep_ir::{DType, F8, Seen};

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        Amax { of, parts } => vec![matrices(at, of).flat_map(|x| vec![amax(x); parts]).collect()],
        Quantise { of, to, measures } => quantise(at, of, to, measures),
        Remember { row } => vec![remember(at, row)],
        Fp8Linear { .. } => {
            let y = matmul((at.rows(), at.size("outputs"), at.size("inputs")), at.x[0], false, at.x[2], true);
            vec![in_units(at, y)]
        },
        Fp8GradWeight => {
            let dw = matmul((at.size("outputs"), at.size("inputs"), at.rows()), at.x[0], false, at.x[2], true);
            vec![in_units(at, dw)]
        },
        Fp8Grouped { each, .. } => vec![experts::linear(&at.dims, at.sharers(each), &of_experts(at, at.x[4].to_vec()).each())],
        Fp8GroupedGradWeight { each, .. } => {
            vec![experts::grad_weight(&at.dims, at.sharers(each), &of_experts(at, at.x[4].to_vec()).each())]
        },
        Fp8Rows { .. } => vec![experts::linear(&at.dims, 1, &of_experts(at, of_rows(&at.dims, at.x[4])).each())],
        Fp8RowsGradWeight { .. } => {
            vec![experts::grad_weight(&at.dims, 1, &of_experts(at, of_rows(&at.dims, at.x[4])).each())]
        },
    }
}

/// Operands of a matmul of experts as numbers, and the expert of each row.
struct OfExperts([Vec<f64>; 3]);

impl OfExperts {
    fn each(&self) -> [&[f64]; 3] {
        self.0.each_ref().map(Vec::as_slice)
    }
}

fn of_experts(at: &At, experts: Vec<f64>) -> OfExperts {
    OfExperts([scaled(at.x[0], at.x[1]), scaled(at.x[2], at.x[3]), experts])
}

/// Numbers in their units: equal parts of them have one each.
fn scaled(x: &[f64], units: &[f64]) -> Vec<f64> {
    x.chunks(x.len() / units.len()).zip(units).flat_map(|(x, unit)| x.iter().map(move |x| x * unit)).collect()
}

/// What has a unit of its own: the matrices of experts, or all of it.
fn matrices<'a>(at: &'a At, of: Factor) -> impl Iterator<Item = &'a [f64]> {
    let count = if of == Factor::Stack { at.size("experts") } else { 1 };
    at.x[0].chunks(at.x[0].len() / count)
}

fn amax(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |most: f64, x| most.max(x.abs()))
}

/// A product of bytes in the units of its operands.
fn in_units(at: &At, product: Vec<f64>) -> Vec<f64> {
    product.into_iter().map(|y| y * at.x[1][0] * at.x[3][0]).collect()
}

fn quantise(at: &At, of: Factor, to: DType, measures: bool) -> Vec<Vec<f64>> {
    let Some(format) = F8::of(to) else { unreachable!("the op table refuses {to}") };
    let columns = at.types[0].dims.last().map_or(1, |d| d.size());
    let (mut bytes, mut transposed, mut units) = (Vec::new(), Vec::new(), Vec::new());
    let mut all = vec![0.0; Seen::COUNT];
    let each = at.x[1].len() / matrices(at, of).count();
    for (x, amaxes) in matrices(at, of).zip(at.x[1].chunks(each)) {
        let unit = f64::from(format.unit(amax(amaxes) as f32));
        let q: Vec<f64> = x.iter().map(|x| nearest(to, x / unit)).collect();
        let rows = q.len() / columns;
        all.iter_mut().zip(seen(x, columns, to, measures, |_| unit)).for_each(|(all, here)| *all += here);
        transposed.extend((0..q.len()).map(|i| q[i % rows * columns + i / rows]));
        bytes.extend(q);
        units.push(unit);
    }
    if of.transposes() { vec![bytes, transposed, units, all] } else { vec![bytes, units, all] }
}

/// What rounding loses of x, whose element `i` has the unit `unit(i)`.
pub fn seen(x: &[f64], columns: usize, to: DType, measures: bool, unit: impl Fn(usize) -> f64) -> Vec<f64> {
    let largest = nearest(to, f64::MAX);
    let mut seen = vec![0.0; Seen::COUNT];
    let across = columns.div_ceil(Seen::TILE);
    let mut parts = vec![0.0; x.len().div_ceil(columns).div_ceil(Seen::TILE) * across];
    for (i, x) in x.iter().enumerate() {
        let (scaled, part) = (x / unit(i), i / columns / Seen::TILE * across + i % columns / Seen::TILE);
        parts[part] = x.abs().max(parts[part]);
        if part % Seen::EVERY == 0 {
            seen[0] += 1.0;
            seen[1] += f64::from(scaled.is_nan() || scaled.abs() > largest);
            seen[2] += f64::from(*x != 0.0 && nearest(to, scaled) == 0.0);
        }
    }
    parts.iter().filter(|_| measures).filter_map(|most| Seen::place(*most as f32)).for_each(|place| seen[place] += 1.0);
    seen
}

/// The newest magnitude first, where one was seen that has bounds; guesses go with it.
fn remember(at: &At, row: usize) -> Vec<f64> {
    let (history, applied) = (at.x[0], !at.x[2][1].is_nan());
    match Seen::largest(&at.x[1][row * Seen::COUNT..(row + 1) * Seen::COUNT]).filter(|_| applied) {
        Some(largest) => {
            [f64::from(largest)].into_iter().chain(history.iter().map(|x| x.max(0.0))).take(history.len()).collect()
        }
        None => history.to_vec(),
    }
}

/// The nearest number of a format: steps of equal size between two powers of two, and below the smallest normal one.
pub fn nearest(to: DType, x: f64) -> f64 {
    let (mantissa, smallest, largest) = if to == DType::E4M3 { (3, -6, 448.0) } else { (2, -14, 57344.0) };
    let exponent = if x == 0.0 { smallest } else { (x.abs().log2().floor() as i32).max(smallest) };
    let step = 2f64.powi(exponent - mantissa);
    ((x / step).round_ties_even() * step).clamp(-largest, largest)
}
