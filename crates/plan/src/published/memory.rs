//! Bytes that a framework needs for what our program does: read off the program's memory plan, times what the framework does otherwise.

use lockstep_ir::graph::Phase;
use lockstep_ir::program::{Arg, Class, Instr, Lifetime};
use lockstep_ir::{MeshAxis, Op, StepProgram};

/// What a rank of one pipeline stage holds, by the program's own plan. In bytes, but for the logits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageMemory {
    /// Parameters in the type that is computed with.
    pub parameters: f64,
    /// Gradient accumulators.
    pub gradients: f64,
    /// Master weights and moments.
    pub optimizer: f64,
    /// Activations that one micro-batch saves for backward.
    pub saved: f64,
    /// Micro-batches in flight.
    pub in_flight: f64,
    /// What one micro-batch gathers in forward over tensor-parallel ranks.
    pub gathered: f64,
    /// Parameters of the layer that is gathered whole under ZeRO 3, twice: the next is gathered ahead.
    pub units: f64,
    /// How many logits the rank has of a micro-batch.
    pub logits: f64,
}

/// What a framework needs beside the program's plan: factors on its bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryTerms {
    /// Bytes beside those of parameters, per byte of them: gradients in the type of parameters, buckets, temporaries of the optimizer.
    pub parameters: f64,
    /// On saved activations: what is saved besides and what the allocator loses.
    pub saved: f64,
    /// Bytes per logit.
    pub logits: f64,
    /// Bytes whatever the program.
    pub fixed: f64,
    /// Temporaries of the update, per byte of parameters, where optimizer state is sharded: they do not overlap with activations.
    pub update: f64,
}

impl StageMemory {
    /// Of a program.
    pub fn of(program: &StepProgram) -> Self {
        let class = |class: Class| -> f64 {
            let held = |b: &&lockstep_ir::program::Buffer| {
                b.class == class && program.regions[b.region].lifetime == Lifetime::Run
            };
            program.buffers.iter().filter(held).map(|b| b.bytes as f64).sum()
        };
        let regions = program.regions.iter().filter(|r| matches!(r.lifetime, Lifetime::Saved(_)));
        let (mut saved, mut in_flight) = (0.0, 1.0f64);
        for region in regions {
            saved += region.bytes() as f64;
            in_flight = in_flight.max(region.slots as f64);
        }
        let (mut gathered, mut unit, mut logits) = (0.0, 0.0f64, 0.0);
        let bytes = |args: &[Option<Arg>]| -> f64 { args.iter().flatten().map(|a| a.ty.bytes() as f64).sum() };
        let forward = |i: &&Instr| i.phase == Phase::Forward;
        for segment in program.segments.iter().filter(|s| s.name == "forward") {
            for instr in segment.instrs.iter().filter(forward) {
                if let Op::AllGather { over, .. } = instr.op {
                    match over.contains(MeshAxis::Tp) {
                        true => gathered += bytes(&instr.outputs),
                        false => unit = unit.max(bytes(&instr.outputs)),
                    }
                }
                if let Op::LinearCrossEntropy { .. } = instr.op {
                    let [x, w] = [0, 1].map(|i| &instr.inputs[i].ty);
                    logits += (x.elements() / x.dims.last().map_or(1, |d| d.size()) * w.dims[0].size()) as f64;
                }
                if let Op::VocabLogits { .. } = instr.op {
                    logits += instr.outputs[0].as_ref().map_or(0.0, |a| a.ty.elements() as f64);
                }
            }
        }
        Self {
            parameters: class(Class::Parameters),
            gradients: class(Class::Gradients),
            optimizer: class(Class::Optimizer),
            saved: saved / in_flight,
            in_flight,
            gathered,
            units: 2.0 * unit,
            logits,
        }
    }

    /// What the framework needs, where `keeps` of the micro-batches in flight keep what they have gathered.
    pub fn bytes(&self, terms: &MemoryTerms, keeps: f64) -> f64 {
        let held = self.parameters * (1.0 + terms.parameters) + self.gradients + self.optimizer + terms.fixed;
        let activations =
            self.in_flight * self.saved * terms.saved + self.logits * terms.logits + self.gathered * keeps + self.units;
        held + activations.max(self.parameters * terms.update)
    }
}
