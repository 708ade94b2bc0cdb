//! A program as text that people read.

use super::{Arg, Lifetime, Offsets, Slot, StepProgram, Stream, Sum};
use crate::mesh::Mesh;

impl std::fmt::Display for StepProgram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.mesh != Mesh::ONE {
            writeln!(f, "mesh {}, stage {}", self.mesh, self.stage)?;
        }
        writeln!(f, "arena {} bytes", self.arena_bytes)?;
        if self.host_bytes > 0 {
            writeln!(f, "host memory {} bytes", self.host_bytes)?;
        }
        for r in &self.regions {
            let (name, slots) = (r.lifetime.name(), r.slots);
            writeln!(f, "region {name:<11} at {:>12}: {} bytes × {slots}", r.offset, r.slot_bytes)?;
        }
        for t in &self.tensors {
            let b = &self.buffers[t.buffer.0];
            let lifetime = self.regions[b.region].lifetime.name();
            writeln!(f, "tensor {}: {} at {lifetime}+{}", t.name, t.ty, b.offset)?;
        }
        let arg = |a: &Arg| {
            let b = &self.buffers[a.buffer.0];
            let plus = if a.sum == Sum::No { "" } else { "+=" };
            let part = if a.part.is_empty() { String::new() } else { format!("+{}.index", a.part) };
            format!("{}{plus}@{}+{}{part}", self.values[a.value], self.regions[b.region].lifetime.name(), b.offset)
        };
        for s in &self.segments {
            writeln!(f, "segment {s}")?;
            for (n, i) in s.instrs.iter().enumerate() {
                let outputs: Vec<String> = i.outputs.iter().map(|o| o.as_ref().map_or("_".to_owned(), arg)).collect();
                let inputs: Vec<String> = i.inputs.iter().map(arg).collect();
                let stream = if i.stream == Stream::Compute { String::new() } else { format!("[{n}] ") };
                let (outputs, inputs) = (outputs.join(", "), inputs.join(", "));
                let (name, attributes) = (i.op.name(), i.op.attributes());
                write!(f, "  {} {stream}{outputs} = {name}({inputs}){attributes}", i.phase.letter())?;
                if i.tf32 {
                    write!(f, " in tf32")?;
                }
                if i.repeated {
                    write!(f, " repeated")?;
                }
                if let Some(Offsets { over, parts, whole }) = &i.offsets {
                    write!(f, " from {parts:?}[{over}.index] of {whole}")?;
                }
                if let Some(Offsets { over, parts, whole }) = &i.counted {
                    write!(f, " counted from {parts:?}[{over}.index] of {whole}")?;
                }
                if !i.waits.is_empty() {
                    write!(f, " after {:?}", i.waits)?;
                }
                if let Some(w) = i.workspace {
                    let b = &self.buffers[w.0];
                    let lifetime = self.regions[b.region].lifetime.name();
                    write!(f, " scratch {} bytes at {lifetime}+{}", b.bytes, b.offset)?;
                }
                if let Some(group) = s.group_of(n).filter(|g| g.instrs.start == n) {
                    write!(f, " as one with the next {} ({})", group.instrs.len() - 1, group.fusion.name())?;
                }
                writeln!(f)?;
            }
        }
        let pools: Vec<Lifetime> =
            self.regions.iter().map(|r| r.lifetime).filter(|l| matches!(l, Lifetime::Saved(_))).collect();
        for e in &self.entries {
            let slot = |s: &Slot| {
                let (segment, m) = (&self.segments[s.segment], s.micro_batch);
                let copies: Vec<usize> = pools.iter().map(|pool| s.copy(*pool)).collect();
                if copies.iter().all(|copy| *copy == m) {
                    return format!("{segment}({m})");
                }
                let copies: Vec<String> = copies.iter().map(usize::to_string).collect();
                format!("{segment}({m}, saved in {})", copies.join("/"))
            };
            let slots: Vec<String> = e.schedule.iter().map(slot).collect();
            writeln!(f, "entry {}: {}", e.name, slots.join(" "))?;
        }
        Ok(())
    }
}
