//! Which text trains and which validates.

use std::path::Path;

use lockstep_ir::counter;

use crate::cut::PIECE_BYTES;
use crate::scan::{Form, SourceFile};
use crate::{DataError, Result};

/// One side of the division of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Split {
    Train,
    Validation,
}

/// The rule that divides a data set: files of text by pieces, so that a few large ones still split evenly, and files of
/// records by record.
#[derive(Debug)]
pub(crate) struct HoldOut {
    fraction: f64,
    record_key: u64,
    text: TextRule,
}

#[derive(Debug)]
enum TextRule {
    /// Everything trains.
    Nothing,
    /// The only piece trains up to byte `from` and validates after it.
    Tail { from: u64 },
    /// A piece validates where its random number is at most `threshold`.
    Pieces { key: u64, threshold: u64 },
}

impl HoldOut {
    /// Holds out `fraction` of the pieces of text, by count, but at least one and never all; and of the records.
    pub(crate) fn choose(fraction: f64, seed: u64, files: &[SourceFile]) -> Result<Self> {
        if !(0.0..1.0).contains(&fraction) {
            return Err(DataError::Fraction { value: fraction });
        }
        let text = match (files, files.iter().map(pieces).sum()) {
            _ if fraction == 0.0 => TextRule::Nothing,
            (_, 0) => TextRule::Nothing,
            ([only], 1) => hold_out_tail(fraction, &only.path, only.bytes)?,
            // The only piece of text beside files of records.
            (_, 1) => TextRule::Nothing,
            (_, pieces) => {
                let key = counter::key(seed, "validation");
                let held = share(fraction, pieces);
                TextRule::Pieces { key, threshold: smallest_draw(key, pieces, held) }
            }
        };
        Ok(HoldOut { fraction, record_key: counter::key(seed, "validation records"), text })
    }

    /// Whether anything may be held out.
    pub(crate) fn is_active(&self) -> bool {
        self.fraction > 0.0
    }

    /// The split of a record, which is counted from 0 over all files of records.
    ///
    /// Of every `1 / fraction` records in a row one is held out, at a random place; so the share holds at every prefix
    /// without the number of records being known, and records that are added change nothing. The first record trains.
    pub(crate) fn record(&self, ordinal: u64) -> Split {
        if self.fraction == 0.0 {
            return Split::Train;
        }
        let first_of = |group: u64| (group as f64 / self.fraction).ceil() as u64;
        let guess = (ordinal as f64 * self.fraction) as u64;
        // Rounding may put the guess beside the group.
        let group = (guess.saturating_sub(1)..=guess + 1).rev().find(|&group| first_of(group) <= ordinal).unwrap_or(0);
        let (first, next) = (first_of(group), first_of(group + 1));
        let held = first + counter::bits(self.record_key, group) % (next - first).max(1);
        if ordinal == held.max(1) { Split::Validation } else { Split::Train }
    }

    /// The split of byte `offset` of a file of text, and the byte where the split next changes or the file ends.
    ///
    /// `first_piece` counts the pieces of all files of text before this one.
    pub(crate) fn stretch(&self, file: &SourceFile, first_piece: u64, offset: u64) -> (Split, u64) {
        match self.text {
            TextRule::Nothing => (Split::Train, file.bytes),
            TextRule::Tail { from } if offset < from => (Split::Train, from),
            TextRule::Tail { .. } => (Split::Validation, file.bytes),
            TextRule::Pieces { key, threshold } => {
                let split_of = |piece| match counter::bits(key, first_piece + piece) <= threshold {
                    true => Split::Validation,
                    false => Split::Train,
                };
                let piece = offset / PIECE_BYTES;
                let split = split_of(piece);
                let end = (piece + 1..pieces(file)).find(|&next| split_of(next) != split);
                (split, end.map_or(file.bytes, |piece| piece * PIECE_BYTES))
            }
        }
    }
}

/// The number of pieces a file of text is cut into; a file of records has none.
pub(crate) fn pieces(file: &SourceFile) -> u64 {
    if file.form == Form::Text { file.bytes.div_ceil(PIECE_BYTES) } else { 0 }
}

fn hold_out_tail(fraction: f64, path: &Path, bytes: u64) -> Result<TextRule> {
    if bytes < 2 {
        return Err(DataError::TooSmallToHoldOut { path: path.to_owned() });
    }
    Ok(TextRule::Tail { from: bytes - share(fraction, bytes) })
}

/// `fraction` of `n`, but at least 1 and at most `n - 1`.
fn share(fraction: f64, n: u64) -> u64 {
    ((fraction * n as f64).round() as u64).clamp(1, n - 1)
}

/// The `rank`-th smallest (from 1) of the first `n` numbers of the stream `key`, without keeping them.
///
/// It builds the number bit by bit from the top. The numbers of a stream are distinct, so exactly `rank` of them are
/// at most the result; and a data set that grows keeps nearly the same pieces held out.
fn smallest_draw(key: u64, n: u64, rank: u64) -> u64 {
    let below = |limit: u64| (0..n).filter(|&i| counter::bits(key, i) < limit).count() as u64;
    (0..64).rev().fold(0, |draw, bit| {
        let higher = draw | 1 << bit;
        if below(higher) < rank { higher } else { draw }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Hint;

    fn document(bytes: u64) -> SourceFile {
        SourceFile { path: "text".into(), bytes, form: Form::Text }
    }

    /// The stretches of all documents, as (split, bytes).
    fn stretches(fraction: f64, seed: u64, documents: &[SourceFile]) -> Vec<Vec<(Split, u64)>> {
        let holdout = HoldOut::choose(fraction, seed, documents).unwrap();
        let mut first_piece = 0;
        let mut all = Vec::new();
        for document in documents {
            let mut of_document = Vec::new();
            let mut offset = 0;
            while offset < document.bytes {
                let (split, end) = holdout.stretch(document, first_piece, offset);
                of_document.push((split, end - offset));
                offset = end;
            }
            first_piece += pieces(document);
            all.push(of_document);
        }
        all
    }

    fn held_out(fraction: f64, seed: u64, documents: u64) -> Vec<u64> {
        let documents: Vec<_> = (0..documents).map(|_| document(10)).collect();
        let stretches = stretches(fraction, seed, &documents);
        (0..).zip(stretches).filter(|(_, s)| s[0].0 == Split::Validation).map(|(i, _)| i).collect()
    }

    #[test]
    fn the_share_of_documents_is_the_fraction() {
        assert_eq!(held_out(0.1, 1, 1000).len(), 100);
        assert_eq!(held_out(0.25, 7, 10).len(), 3);
    }

    #[test]
    fn at_least_one_document_is_held_out_and_one_trains() {
        assert_eq!(held_out(0.001, 1, 2).len(), 1);
        assert_eq!(held_out(0.999, 1, 2).len(), 1);
        assert_eq!(held_out(0.999, 1, 5).len(), 4);
    }

    #[test]
    fn the_choice_depends_on_the_seed_and_the_index_only() {
        assert_eq!(held_out(0.1, 1, 100), held_out(0.1, 1, 100));
        assert_ne!(held_out(0.1, 1, 100), held_out(0.1, 2, 100));
    }

    #[test]
    fn a_data_set_that_grows_keeps_nearly_the_same_documents_held_out() {
        let before = held_out(0.1, 1, 1000);
        let after = held_out(0.1, 1, 1100);
        let kept = before.iter().filter(|i| after.contains(i)).count();
        assert!(kept >= 90, "{kept}");
    }

    #[test]
    fn fraction_0_holds_out_nothing() {
        assert_eq!(stretches(0.0, 1, &[document(1 << 20)]), [[(Split::Train, 1 << 20)]]);
    }

    #[test]
    fn the_only_short_document_loses_its_end() {
        let expected = [[(Split::Train, 90), (Split::Validation, 10)]];
        assert_eq!(stretches(0.1, 1, &[document(100)]), expected);
        let expected = [[(Split::Train, 1), (Split::Validation, 1)]];
        assert_eq!(stretches(0.9, 1, &[document(2)]), expected);
    }

    #[test]
    fn a_long_document_is_held_out_by_pieces_that_stay_together() {
        let bytes = 40 * PIECE_BYTES + 5;
        let stretches = stretches(0.5, 3, &[document(bytes)]).remove(0);
        assert_eq!(stretches.iter().map(|s| s.1).sum::<u64>(), bytes);
        assert!(stretches.len() > 2);
        for pair in stretches.windows(2) {
            assert_ne!(pair[0].0, pair[1].0, "neighbours of one split are one stretch");
            assert_eq!(pair[0].1 % PIECE_BYTES, 0);
        }
        let held: u64 = stretches.iter().filter(|s| s.0 == Split::Validation).map(|s| s.1).sum();
        assert!(held.abs_diff(bytes / 2) <= PIECE_BYTES, "{held}");
    }

    #[test]
    fn a_fraction_that_is_no_share_is_refused() {
        for value in [-0.1, 1.0, 2.0, f64::NAN, f64::INFINITY] {
            let error = HoldOut::choose(value, 1, &[document(10)]).unwrap_err();
            assert!(matches!(error, DataError::Fraction { .. }));
        }
        assert_eq!(
            HoldOut::choose(1.0, 1, &[document(10)]).unwrap_err().with_hint(),
            "validation fraction 1 is not in 0 ≤ fraction < 1\nhint: hold out 0.05, or 0 for no validation"
        );
    }

    #[test]
    fn one_byte_cannot_be_divided() {
        assert_eq!(
            HoldOut::choose(0.1, 1, &[document(1)]).unwrap_err().with_hint(),
            "text: 1 byte is too little to hold some out\n\
             hint: add text, or set the validation fraction to 0"
        );
    }

    #[test]
    fn records_are_held_out_in_their_share_at_every_prefix() {
        let records = SourceFile { path: "a.jsonl".into(), bytes: 10, form: Form::Rows };
        for fraction in [0.05, 0.1, 0.3, 0.5, 0.99] {
            let holdout = HoldOut::choose(fraction, 1, std::slice::from_ref(&records)).unwrap();
            let mut held = 0;
            for ordinal in 0..10_000u64 {
                held += u64::from(holdout.record(ordinal) == Split::Validation);
                let exact = (ordinal + 1) as f64 * fraction;
                assert!((held as f64 - exact).abs() <= 2.0, "{fraction} {ordinal} {held}");
            }
            assert_eq!(holdout.record(0), Split::Train);
        }
        let nothing = HoldOut::choose(0.0, 1, &[records]).unwrap();
        assert!((0..100).all(|ordinal| nothing.record(ordinal) == Split::Train));
    }
}
