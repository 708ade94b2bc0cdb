//! Columns cut down to what a chart can show.

use crate::MetricColumns;

/// A part of the step axis in buckets of equal width.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Buckets {
    /// The first step.
    pub(crate) from: f64,
    /// Steps of a bucket.
    pub(crate) width: f64,
    /// How many there are.
    pub(crate) count: usize,
}

/// Most buckets of an answer.
const MOST: usize = 8000;

impl Buckets {
    /// At most `most` buckets over the steps from `from` to `to`, whole steps each.
    pub(crate) fn over(from: f64, to: f64, most: usize) -> Self {
        let (from, to) = (from.floor().max(0.0), to.ceil().min(1e15));
        let steps = (to - from + 1.0).max(1.0);
        let width = (steps / most.clamp(1, MOST) as f64).ceil().max(1.0);
        Self { from, width, count: (steps / width).ceil() as usize }
    }

    /// Numbers that each bucket has: where it is more than a step, the least and the greatest of its values, in their order.
    pub(crate) fn slots(&self) -> usize {
        if self.width > 1.0 { 2 } else { 1 }
    }

    /// The numbers of a key, and the mean of each bucket: NaN where there are none. Nothing that stands out is lost.
    pub(crate) fn of(&self, columns: &MetricColumns, key: &str) -> Option<(Vec<f64>, Vec<f64>)> {
        let (steps, values) = (columns.get("step")?, columns.get(key)?);
        let slots = self.slots();
        let mut out = vec![f64::NAN; self.count * slots];
        let mut sums = vec![(0.0, 0u64); self.count];
        let end = self.from + self.width * self.count as f64;
        let first = steps.partition_point(|step| *step < self.from);
        let (mut bucket, mut least, mut greatest) = (usize::MAX, (0, f64::NAN), (0, f64::NAN));
        let mut put = |bucket: usize, least: (usize, f64), greatest: (usize, f64)| {
            let Some(to) = out.get_mut(bucket.saturating_mul(slots)..).filter(|to| to.len() >= slots) else { return };
            let (early, late) = if least.0 <= greatest.0 { (least, greatest) } else { (greatest, least) };
            to[0] = early.1;
            if slots == 2 && early.0 != late.0 {
                to[1] = late.1;
            }
        };
        for (row, (step, value)) in steps.iter().zip(values).enumerate().skip(first) {
            if *step >= end {
                break;
            }
            if !value.is_finite() {
                continue;
            }
            let at = ((step - self.from) / self.width) as usize;
            if let Some((sum, count)) = sums.get_mut(at) {
                *sum += value;
                *count += 1;
            }
            if at != bucket {
                put(bucket, least, greatest);
                (bucket, least, greatest) = (at, (row, *value), (row, *value));
            }
            if *value < least.1 {
                least = (row, *value);
            }
            if *value > greatest.1 {
                greatest = (row, *value);
            }
        }
        put(bucket, least, greatest);
        Some((out, sums.iter().map(|(sum, count)| sum / *count as f64).collect()))
    }
}

/// Adds numbers as a JSON array with the digits of an f32: a chart shows no more.
pub(crate) fn push_array(text: &mut String, values: &[f64]) {
    text.push('[');
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        let short = *value as f32;
        let tiny = short != 0.0 && (short.abs() < 1e-4 || short.abs() >= 1e9);
        // Writing to a string does not fail.
        let _ = match short.is_finite() {
            false => std::fmt::Write::write_str(text, "null"),
            true if tiny => std::fmt::Write::write_fmt(text, format_args!("{short:e}")),
            true => std::fmt::Write::write_fmt(text, format_args!("{short}")),
        };
    }
    text.push(']');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(losses: impl Iterator<Item = f64>) -> MetricColumns {
        let mut columns = MetricColumns::default();
        for (index, loss) in losses.enumerate() {
            columns.add_bytes(format!("{{\"step\":{},\"loss\":{loss}}}\n", index + 1).as_bytes());
        }
        columns
    }

    #[test]
    fn a_bucket_keeps_the_extremes_in_their_order() {
        let columns = columns([5.0, 1.0, 3.0, 2.0, 9.0, 4.0, 7.0].into_iter());
        let view = Buckets::over(1.0, 7.0, 3);
        assert_eq!((view.width, view.count, view.slots()), (3.0, 3, 2));
        let (values, means) = view.of(&columns, "loss").unwrap();
        assert_eq!(values[..5], [5.0, 1.0, 2.0, 9.0, 7.0]);
        assert!(values[5].is_nan() && view.of(&columns, "other").is_none());
        assert_eq!(means, [3.0, 5.0, 7.0]);
    }

    #[test]
    fn few_steps_are_shown_as_they_are() {
        let columns = columns([5.0, 1.0, 3.0].into_iter());
        let view = Buckets::over(0.0, 4.0, 1000);
        assert_eq!((view.width, view.count), (1.0, 5));
        let mut text = String::new();
        push_array(&mut text, &view.of(&columns, "loss").unwrap().0);
        assert_eq!(text, "[null,5,1,3,null]");
    }

    #[test]
    fn whatever_is_asked_for_the_answer_is_bounded() {
        for (from, to, most) in [(-5.0, -9.0, 0), (0.0, 1e300, 1 << 40), (f64::NAN, f64::NAN, 7), (1e300, 0.0, 1)] {
            let view = Buckets::over(from, to, most);
            assert!(view.count * view.slots() <= 2 * MOST, "{view:?}");
            let _ = view.of(&columns([1.0].into_iter()), "loss");
        }
    }
}
