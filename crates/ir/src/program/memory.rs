//! Memory of a program: what a byte is for, how long it lives, and where.

use serde::Serialize;

/// Index of a buffer in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub usize);

/// What memory is for. Every byte of the arena belongs to exactly one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Weights, and constants beside them.
    Parameters,
    /// Gradient accumulators.
    Gradients,
    /// Optimizer moments and step scalars.
    Optimizer,
    /// Inputs, saved and temporary tensors of the forward and backward pass.
    Activations,
    /// Kernel scratch.
    Workspace,
    /// Collective buffers.
    Communication,
}

impl Class {
    /// All classes, in the order in which breakdowns list them.
    pub const ALL: [Class; 6] = [
        Class::Parameters,
        Class::Gradients,
        Class::Optimizer,
        Class::Activations,
        Class::Workspace,
        Class::Communication,
    ];

    /// The name in memory breakdowns.
    pub const fn name(self) -> &'static str {
        match self {
            Class::Parameters => "parameters",
            Class::Gradients => "gradients",
            Class::Optimizer => "optimizer",
            Class::Activations => "activations",
            Class::Workspace => "workspace",
            Class::Communication => "communication",
        }
    }
}

/// How long the buffers of a region live, and how often the region stands in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lifetime {
    /// From load to the end of the run: one copy.
    Run,
    /// From the start of a step to its update, in memory of the run that is free in between: weights in bf16 that the update writes anew.
    Step,
    /// Written or read by the host: one copy per micro-batch of a step.
    MicroBatch,
    /// From one part of a micro-batch's work to a later one: one copy per chunk and micro-batch in flight.
    Saved(Saved),
    /// Inside one segment: one copy, shared by all segments.
    Frame,
    /// As `Frame`, for segments that save nothing and read nothing saved, and for what comes from the host once that has been read: overlays
    /// the saved region and the frame.
    Overlay,
    /// As `Run`, in the second memory: that of the host beside a device.
    Host,
    /// As `Saved`, in that memory.
    SavedInHost(Saved),
}

impl Lifetime {
    /// The name in printed programs.
    pub const fn name(self) -> &'static str {
        match self {
            Lifetime::Run => "run",
            Lifetime::Step => "step",
            Lifetime::MicroBatch => "micro-batch",
            Lifetime::Saved(Saved::ForwardToBackward) => "saved",
            Lifetime::Saved(Saved::ForwardToWeightGrad) => "saved F-W",
            Lifetime::Saved(Saved::BackwardToWeightGrad) => "saved B-W",
            Lifetime::Frame => "frame",
            Lifetime::Overlay => "overlay",
            Lifetime::Host => "host",
            Lifetime::SavedInHost(Saved::ForwardToBackward) => "host saved",
            Lifetime::SavedInHost(Saved::ForwardToWeightGrad) => "host saved F-W",
            Lifetime::SavedInHost(Saved::BackwardToWeightGrad) => "host saved B-W",
        }
    }

    /// Whether it is in the memory of the host.
    pub const fn is_in_host(self) -> bool {
        matches!(self, Lifetime::Host | Lifetime::SavedInHost(_))
    }
}

/// From which part of a micro-batch's work to which something is saved. All chunks of a rank share the copies of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Saved {
    /// From the forward pass to the backward pass, or to the input gradients where the schedule separates B and W.
    ForwardToBackward,
    /// From the forward pass to the weight gradients.
    ForwardToWeightGrad,
    /// From the input gradients to the weight gradients.
    BackwardToWeightGrad,
}

impl Saved {
    /// All of them, in the order of [`Slot::saved`](super::Slot::saved).
    pub const ALL: [Saved; 3] = [Saved::ForwardToBackward, Saved::ForwardToWeightGrad, Saved::BackwardToWeightGrad];
}

/// A contiguous part of the arena.
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    /// Lifetime of its buffers.
    pub lifetime: Lifetime,
    /// Where it starts, in bytes: in the arena, or after it in the host's memory, which addresses count on.
    pub offset: u64,
    /// Bytes of one copy.
    pub slot_bytes: u64,
    /// Number of copies.
    pub slots: usize,
}

impl Region {
    /// Bytes of all copies.
    pub fn bytes(&self) -> u64 {
        self.slot_bytes * self.slots as u64
    }
}

/// A placed piece of memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// The value that it is named after.
    pub name: String,
    /// What it is for.
    pub class: Class,
    /// The layer that it belongs to.
    pub layer: Option<usize>,
    /// Index of its region.
    pub region: usize,
    /// Where it starts in one copy of the region, in bytes.
    pub offset: u64,
    /// Its size in bytes.
    pub bytes: u64,
}
