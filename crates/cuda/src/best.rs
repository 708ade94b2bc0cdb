//! The best of several that are tried out.

/// The fastest that was timed, or else the first.
pub struct Best<T> {
    timed: Option<(f64, T)>,
    untimed: Option<T>,
}

impl<T> Best<T> {
    /// Of none.
    pub fn new() -> Self {
        Self { timed: None, untimed: None }
    }

    /// Adds one with its seconds; none where there was no room to time it.
    pub fn add(&mut self, seconds: Option<f64>, one: T) {
        match seconds {
            Some(seconds) if self.timed.as_ref().is_none_or(|(least, _)| seconds < *least) => {
                self.timed = Some((seconds, one));
            }
            Some(_) => {}
            None => self.untimed = self.untimed.take().or(Some(one)),
        }
    }

    /// The best, and whether all were timed: else the choice is good for now and not worth keeping.
    pub fn take(self) -> Option<(T, bool)> {
        let all = self.untimed.is_none();
        Some((self.timed.map(|(_, one)| one).or(self.untimed)?, all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_timed_beats_what_was_not_and_only_a_whole_choice_is_kept() {
        let best = |tried: &[(Option<f64>, &'static str)]| {
            let mut best = Best::new();
            tried.iter().for_each(|(seconds, one)| best.add(*seconds, *one));
            best.take()
        };
        assert_eq!(best(&[]), None);
        assert_eq!(best(&[(Some(2.0), "a"), (Some(1.0), "b"), (Some(1.0), "c")]), Some(("b", true)));
        assert_eq!(best(&[(None, "a"), (Some(1.0), "b"), (None, "c")]), Some(("b", false)));
        assert_eq!(best(&[(None, "a"), (None, "b")]), Some(("a", false)));
    }
}
