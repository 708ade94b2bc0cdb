//! How long collectives between ranks of one process take.

use super::{Action, Collective, CommError, HostCommunicator, Piece, ProgramPlace, RankGroup, threads};
use lockstep_ir::DType;
use std::time::{Duration, Instant};

/// Bytes that are moved in all to measure one collective, about.
const MOVED: usize = 256 << 20;

/// Median seconds of a collective of this many ranks on a tensor of this many bytes as a whole, all of them threads of this process.
pub fn seconds(ranks: usize, kind: Collective, bytes: usize) -> Result<f64, CommError> {
    let [given, taken, whole] = kind.parts(ranks);
    let elements = (bytes / 4 / ranks).max(1) * ranks / whole;
    let (given, taken) = (given * elements, taken * elements);
    let count = (MOVED / bytes.max(1)).clamp(4, 200);
    let action = Action::Together(kind, RankGroup::all(ranks));
    let place = ProgramPlace { op: kind.name(), layer: None, micro_batch: 0 };
    let comms = threads(ranks, Duration::from_secs(60));
    let one = |comm: &dyn HostCommunicator| {
        let (mut input, mut output) = (vec![1.0f32; given], vec![0.0f32; taken]);
        let piece = Piece::new(input.as_mut_ptr().cast(), output.as_mut_ptr().cast(), elements, DType::F32);
        let mut times = Vec::new();
        for i in 0..count + 2 {
            let start = Instant::now();
            // SAFETY: the vectors have these sizes, are this rank's alone and outlive the call.
            unsafe { comm.act(&action, &[piece], place)? };
            // The first ones touch new memory.
            if i >= 2 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
        comm.leave();
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = comms[1..].iter().map(|comm| scope.spawn(|| one(comm.as_ref()))).collect();
        let first = one(comms[0].as_ref());
        // All fail or none: the first tells.
        others.into_iter().for_each(|other| drop(other.join()));
        first
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_kinds_are_timed_and_more_bytes_take_longer() {
        for kind in Collective::ALL {
            let [few, many] = [1 << 12, 1 << 24].map(|bytes| seconds(2, kind, bytes).unwrap());
            assert!(few > 0.0 && many > few, "{kind}: {few} {many}");
        }
    }
}
