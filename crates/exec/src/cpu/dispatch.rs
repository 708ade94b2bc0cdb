//! Expert parallelism: rows of tokens in blocks, one for every part of the experts, and back.

use super::call::{Call, Kernel, Kernels, Ptr};
use super::experts;
use super::float::Float;
use crate::by_kind;
use lockstep_ir::op::{Blocks, NO_ROW};

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        ExpertSlots { blocks, .. } => slots(call, blocks),
        SendRows { each, .. } => send_rows::<T>(call, call.sharers(each)),
        TakeRows { .. } => take_rows::<T>(call),
        RowsLinear { .. } => experts::linear::<T>(call, 1),
        RowsGradInput { .. } => experts::grad_input::<T>(call),
        RowsGradWeight { .. } => experts::grad_weight::<T>(call, 1),
    }
}

/// Places of choices, in the order of tokens, the experts of places, and how many choices of every sequence have no place.
pub fn slots(call: Call, Blocks { parts, rows, .. }: Blocks) {
    let (choices, each) = (call.size("batch") * call.size("seq") * call.size("choices"), call.size("experts") / parts);
    let chosen = Ptr(call.input::<u32>(0));
    let (slots, owners) = (call.output::<u32>(0).map(Ptr), call.output::<u32>(1).map(Ptr));
    let all = parts * each;
    call.pool.run(parts, |part, _| {
        // SAFETY: a task has the rows of its part, and the choices that go there.
        unsafe {
            let mut filled = 0;
            for (i, expert) in chosen.slice(0, choices).iter().enumerate() {
                // What is no expert's stays with the last.
                let expert = (*expert as usize).min(all - 1);
                if expert / each != part {
                    continue;
                }
                let place = (filled < rows).then_some(part * rows + filled);
                if let Some(slots) = slots {
                    *slots.at(i) = place.map_or(NO_ROW, |place| place as u32);
                }
                if let (Some(owners), Some(place)) = (owners, place) {
                    *owners.at(place) = (expert % each) as u32;
                }
                filled += 1;
            }
            if let Some(owners) = owners {
                let filled = filled.min(rows);
                owners.slice(part * rows + filled, rows - filled).fill(NO_ROW);
            }
        }
    });
    if let (Some(slots), Some(beyond)) = (slots, call.output::<f64>(2)) {
        let of_sequence = call.size("seq") * call.size("choices");
        for b in 0..call.size("batch") {
            // SAFETY: the choices of a sequence, and its count.
            unsafe {
                let missing = slots.slice(b * of_sequence, of_sequence).iter().filter(|slot| **slot == NO_ROW);
                *beyond.add(b) = missing.count() as f64;
            }
        }
    }
}

/// Rows of x, of which `sharers` choices have one, at the places of choices; zeros elsewhere.
pub fn send_rows<T: Float>(call: Call, sharers: usize) {
    let Some(rows) = call.output::<T>(0).map(Ptr) else { return };
    let (x, slots, d) = (Ptr(call.input::<T>(0)), Ptr(call.input::<u32>(1)), call.size("features"));
    let places = call.size("parts") * call.size("rows");
    // SAFETY: places of the output, each once.
    call.rows(places, |from, to| unsafe { rows.slice(from * d, (to - from) * d).fill(T::of(0.0)) });
    call.rows(call.size("batch") * call.size("seq") * call.size("choices"), |from, to| {
        for i in from..to {
            // SAFETY: choices have places of their own.
            unsafe {
                let slot = *slots.at(i) as usize;
                if slot < places {
                    rows.slice(slot * d, d).copy_from_slice(x.slice(i / sharers * d, d));
                }
            }
        }
    });
}

/// The row at every choice's place.
pub fn take_rows<T: Float>(call: Call) {
    let Some(y) = call.output::<T>(0).map(Ptr) else { return };
    let (rows, slots, d) = (Ptr(call.input::<T>(0)), Ptr(call.input::<u32>(1)), call.size("features"));
    let places = call.size("parts") * call.size("rows");
    call.rows(call.size("batch") * call.size("seq") * call.size("choices"), |from, to| {
        for i in from..to {
            // SAFETY: choices from .. to belong to this task.
            unsafe {
                let slot = *slots.at(i) as usize;
                let to = y.slice(i * d, d);
                match slot < places {
                    true => to.copy_from_slice(rows.slice(slot * d, d)),
                    false => to.fill(T::of(f32::NAN)),
                }
            }
        }
    });
}
