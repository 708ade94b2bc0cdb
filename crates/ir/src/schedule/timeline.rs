//! When the slots of a pipeline run, for any order of them.

use super::{PipeSlot, Pipeline, Work};

/// How long the work of a virtual stage takes for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ChunkCosts {
    /// Its forward pass.
    pub forward: f64,
    /// Its input gradients.
    pub input_grad: f64,
    /// Its weight gradients.
    pub weight_grad: f64,
}

impl ChunkCosts {
    fn of(&self, work: Work) -> f64 {
        match work {
            Work::Forward => self.forward,
            Work::Backward => self.input_grad + self.weight_grad,
            Work::InputGrad => self.input_grad,
            Work::WeightGrad => self.weight_grad,
        }
    }
}

/// How long the work of a pipeline takes, in any unit of time.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// By virtual stage.
    pub chunks: Vec<ChunkCosts>,
    /// From the end of a slot to the arrival of its message at another rank.
    pub transfer: f64,
}

/// When each slot of each stage runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// By stage, in order: the slot, its start and its end.
    pub slots: Vec<Vec<(PipeSlot, f64, f64)>>,
    /// The end of the last slot.
    pub total: f64,
}

impl Timeline {
    /// Pipeline bubble: the fraction of all stages' time in which they are idle. Of GPipe and 1F1B with p equal stages, m micro-batches
    /// and free transfers it is (p - 1) / (m + p - 1).
    pub fn bubble(&self) -> f64 {
        let whole = self.total * self.slots.len() as f64;
        let busy: f64 = self.slots.iter().flatten().map(|(_, start, end)| end - start).sum();
        if whole > 0.0 { (whole - busy) / whole } else { 0.0 }
    }

    /// The longest time from a rank's first slot to the end of its last. Steps could follow each other as fast if no rank waited for
    /// the others at the end of a step, as all do for the gradient norm.
    pub fn longest_window(&self) -> f64 {
        let window = |slots: &Vec<(PipeSlot, f64, f64)>| match (slots.first(), slots.last()) {
            (Some((_, start, _)), Some((_, _, end))) => end - start,
            _ => 0.0,
        };
        self.slots.iter().map(window).fold(0.0, f64::max)
    }

    /// One line per stage, its time drawn on `width` columns: `F3`, `B3` or `W3` and dashes for a slot, `.` for idle time. A
    /// slot too narrow for its number shows only its letter.
    pub fn picture(&self, width: usize) -> String {
        let column = |time: f64| if self.total > 0.0 { (time / self.total * width as f64).round() as usize } else { 0 };
        let digits = self.slots.len().saturating_sub(1).to_string().len();
        let mut picture = String::new();
        for (stage, slots) in self.slots.iter().enumerate() {
            let mut line = vec!['.'; width];
            for (slot, start, end) in slots {
                let columns = &mut line[column(*start).min(width)..column(*end).min(width)];
                columns.fill('-');
                let label = slot.to_string();
                let shown = if label.len() <= columns.len() { label.len() } else { 1 };
                for (place, letter) in columns.iter_mut().zip(label.chars().take(shown)) {
                    *place = letter;
                }
            }
            picture += &format!("stage {stage:>digits$}  {}\n", line.into_iter().collect::<String>());
        }
        picture
    }
}

/// A pipeline that stops before its end: every stage that is not done, and what it waits for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, lockstep_ir::Hint)]
#[error("the pipeline stops before its end: {}", stuck.iter().map(Stuck::to_string).collect::<Vec<_>>().join("; "))]
#[hint(
    "order the slots of neighbouring stages alike, each backward pass after its forward pass, or give send \
     buffers more copies"
)]
pub struct Deadlock {
    /// The stages that are not done, in order.
    pub stuck: Vec<Stuck>,
}

/// A stage that waits forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The stage.
    pub stage: usize,
    /// The slot that cannot start, or whose result cannot be sent.
    pub slot: PipeSlot,
    /// Its place among the slots of the stage.
    pub index: usize,
    /// What it waits for.
    pub waits_for: WaitsFor,
}

/// What a slot waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitsFor {
    /// A slot of the same stage that has not run: the forward pass before a backward pass.
    Own(PipeSlot),
    /// The result of a neighbour's slot.
    Result {
        /// The neighbour.
        stage: usize,
        /// Its slot.
        slot: PipeSlot,
    },
    /// Room in the send buffer: a neighbour has yet to take an earlier result.
    Room {
        /// The neighbour.
        stage: usize,
        /// Its slot that would take the oldest of these results; none where the send buffer holds nothing at all.
        slot: Option<PipeSlot>,
    },
    /// Nothing can help it: it stands twice among the slots of its stage.
    Repeated,
}

impl std::fmt::Display for Stuck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Stuck { stage, slot, .. } = self;
        match self.waits_for {
            WaitsFor::Own(own) => write!(f, "stage {stage} at {slot} waits for its own {own}"),
            WaitsFor::Result { stage: from, slot: sent } => {
                write!(f, "stage {stage} at {slot} waits for {sent} of stage {from}")
            }
            WaitsFor::Room { stage: to, slot: Some(taker) } => {
                write!(f, "stage {stage} after {slot} waits for stage {to} to start {taker}")
            }
            WaitsFor::Room { stage: to, slot: None } => {
                write!(f, "stage {stage} after {slot} waits for a send buffer to stage {to}, which has no copies")
            }
            WaitsFor::Repeated => write!(f, "stage {stage} has {slot} twice"),
        }
    }
}

/// When the slots of every rank run. A slot starts when the one before it is done and its inputs are there: the message of the
/// virtual stage before it (after it, for gradients) and its rank's own results. A slot is done when its result is in the send
/// buffer of its virtual stage and direction, which holds `copies`; a copy is free again when the slot that needs it has started.
///
/// # Panics
///
/// Where `costs` are not of as many virtual stages as the pipeline has.
pub fn evaluate(pipeline: &Pipeline, costs: &Costs, copies: usize) -> Result<Timeline, Deadlock> {
    assert_eq!(costs.chunks.len(), pipeline.stages(), "costs of every virtual stage");
    let all = || pipeline.slots.iter().flatten();
    let micro_batches = all().map(|slot| slot.micro_batch + 1).max().unwrap_or(0);
    let chunks = all().map(|slot| slot.chunk + 1).max().unwrap_or(0);
    let ranks = pipeline.slots.iter().map(|slots| Rank::new(slots, chunks, micro_batches)).collect();
    let send_buffer = || SendBuffer { arrivals: vec![f64::NAN; micro_batches], ..Default::default() };
    let send_buffers = (0..pipeline.stages()).map(|_| [send_buffer(), send_buffer()]).collect();
    let mut run = Run { pipeline, costs, copies, places: pipeline.places(), ranks, send_buffers };
    // A rank runs as far as it can. What it waits for then is another's doing, so the order of turns changes no time.
    loop {
        let mut moved = false;
        for rank in 0..run.ranks.len() {
            while run.step(rank).is_ok_and(|more| more) {
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck = (0..run.ranks.len()).filter_map(|rank| run.step(rank).err()).collect::<Vec<_>>();
    if !stuck.is_empty() {
        return Err(Deadlock { stuck });
    }
    let slots: Vec<_> = run.ranks.into_iter().map(|rank| rank.ran).collect();
    let total = slots.iter().flatten().fold(0.0, |latest: f64, (_, _, end)| latest.max(*end));
    Ok(Timeline { slots, total })
}

/// One direction of a virtual stage's results.
#[derive(Default)]
struct SendBuffer {
    /// When each result arrives, by micro-batch; not a number for those that have not been sent.
    arrivals: Vec<f64>,
    /// Results that were sent and not taken, oldest first.
    untaken: Vec<usize>,
    /// When results were taken, in order. The receiver's slots start in order, so these times never fall.
    taken: Vec<f64>,
}

struct Rank<'a> {
    slots: &'a [PipeSlot],
    ran: Vec<(PipeSlot, f64, f64)>,
    /// By chunk, work and micro-batch.
    done: Vec<bool>,
    micro_batches: usize,
    /// When the last slot's result was in its send buffer.
    free: f64,
    /// A slot has ended and its result is not in the send buffer yet.
    sending: bool,
}

impl<'a> Rank<'a> {
    fn new(slots: &'a [PipeSlot], chunks: usize, micro_batches: usize) -> Self {
        let done = vec![false; chunks * Work::ALL.len() * micro_batches];
        Rank { slots, ran: Vec::with_capacity(slots.len()), done, micro_batches, free: 0.0, sending: false }
    }

    /// Whether a slot has run. One that no rank has never does.
    fn done(&mut self, slot: PipeSlot) -> &mut bool {
        &mut self.done[(slot.chunk * Work::ALL.len() + slot.work as usize) * self.micro_batches + slot.micro_batch]
    }
}

/// The way of a slot's messages: from virtual stage to virtual stage up (activations) or down (gradients).
#[derive(Clone, Copy)]
enum Direction {
    Up,
    Down,
}

impl Direction {
    fn of(work: Work) -> Option<Self> {
        match work {
            Work::Forward => Some(Direction::Up),
            Work::Backward | Work::InputGrad => Some(Direction::Down),
            Work::WeightGrad => None,
        }
    }

    /// The virtual stage after `stage` this way.
    fn next(self, stage: usize, stages: usize) -> Option<usize> {
        match self {
            Direction::Up => Some(stage + 1).filter(|&next| next < stages),
            Direction::Down => stage.checked_sub(1),
        }
    }

    fn reversed(self) -> Self {
        match self {
            Direction::Up => Direction::Down,
            Direction::Down => Direction::Up,
        }
    }
}

struct Run<'a> {
    pipeline: &'a Pipeline,
    costs: &'a Costs,
    copies: usize,
    /// Rank and chunk of every virtual stage.
    places: Vec<(usize, usize)>,
    ranks: Vec<Rank<'a>>,
    /// By virtual stage and direction.
    send_buffers: Vec<[SendBuffer; 2]>,
}

impl Run<'_> {
    /// Moves a rank on by half a slot, the computing or the sending: whether it did, or what it waits for.
    fn step(&mut self, rank: usize) -> Result<bool, Stuck> {
        match (self.ranks[rank].sending, self.ranks[rank].ran.last()) {
            (true, Some(&(slot, _, end))) => self.send(rank, slot, end),
            _ => self.compute(rank),
        }
    }

    fn send(&mut self, rank: usize, slot: PipeSlot, end: f64) -> Result<bool, Stuck> {
        let stage = self.pipeline.virtual_stages[rank][slot.chunk];
        let mut sent = end;
        let way = Direction::of(slot.work);
        if let Some((way, next)) = way.and_then(|way| Some((way, way.next(stage, self.places.len())?))) {
            let (to, chunk) = self.places[next];
            let transfer = if to == rank { 0.0 } else { self.costs.transfer };
            let send_buffer = &mut self.send_buffers[stage][way as usize];
            if send_buffer.untaken.len() >= self.copies {
                let slot_there =
                    send_buffer.untaken.first().map(|&micro_batch| PipeSlot { chunk, micro_batch, ..slot });
                let waits_for = WaitsFor::Room { stage: to, slot: slot_there };
                return Err(Stuck { stage: rank, slot, index: self.ranks[rank].ran.len() - 1, waits_for });
            }
            // Of the results before it, all but `copies - 1` had to be taken first.
            let before = send_buffer.untaken.len() + send_buffer.taken.len();
            if let Some(&room) = before.checked_sub(self.copies).and_then(|index| send_buffer.taken.get(index)) {
                sent = sent.max(room);
            }
            send_buffer.arrivals[slot.micro_batch] = sent + transfer;
            send_buffer.untaken.push(slot.micro_batch);
        }
        let this = &mut self.ranks[rank];
        (this.free, this.sending) = (sent, false);
        Ok(true)
    }

    fn compute(&mut self, rank: usize) -> Result<bool, Stuck> {
        let this = &mut self.ranks[rank];
        let index = this.ran.len();
        let Some(&slot) = this.slots.get(index) else { return Ok(false) };
        let stuck = |waits_for| Stuck { stage: rank, slot, index, waits_for };
        if *this.done(slot) {
            return Err(stuck(WaitsFor::Repeated));
        }
        let own = match slot.work {
            Work::Forward => None,
            Work::Backward | Work::InputGrad => Some(PipeSlot { work: Work::Forward, ..slot }),
            Work::WeightGrad => Some(PipeSlot { work: Work::InputGrad, ..slot }),
        };
        if let Some(own) = own.filter(|own| !*this.done(*own)) {
            return Err(stuck(WaitsFor::Own(own)));
        }
        let stage = self.pipeline.virtual_stages[rank][slot.chunk];
        let mut start = this.free;
        let way = Direction::of(slot.work);
        if let Some((way, before)) = way.and_then(|way| Some((way, way.reversed().next(stage, self.places.len())?))) {
            let send_buffer = &mut self.send_buffers[before][way as usize];
            let arrival = send_buffer.arrivals[slot.micro_batch];
            if arrival.is_nan() {
                let (from, chunk) = self.places[before];
                return Err(stuck(WaitsFor::Result { stage: from, slot: PipeSlot { chunk, ..slot } }));
            }
            start = start.max(arrival);
            send_buffer.untaken.retain(|&untaken| untaken != slot.micro_batch);
            send_buffer.taken.push(start);
        }
        let this = &mut self.ranks[rank];
        this.ran.push((slot, start, start + self.costs.chunks[stage].of(slot.work)));
        *this.done(slot) = true;
        this.sending = true;
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
