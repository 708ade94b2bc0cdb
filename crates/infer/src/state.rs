//! What a checkpoint holds of a program: every parameter and its moments, unpacked and under their own names.
//!
//! Parameters are master weights under Hugging Face names, so that a checkpoint does not depend on how a program packs or rounds them. They and
//! moments are stored as the run keeps them: f32, or fewer bits where the config says so. A program that keeps them otherwise converts them.

mod formats;

pub use formats::{Converted, converted};

use crate::Result;
use lockstep_checkpoint::{CheckpointError, Loaded, TensorBytes, TensorCopy, TensorGroup, TensorRef, TensorSource};
use lockstep_exec::Executor;
use lockstep_exec::initial::{Initial, InitialPart, encode_rows};
use lockstep_ir::graph::{Parameter, State};
use lockstep_ir::program::{Role, Tensor};
use lockstep_ir::{DType, StepProgram, TensorType};
use std::ops::Range;

/// One unpacked tensor: a range of rows of a program's tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its own name.
    pub name: String,
    /// Sizes of its dimensions.
    pub shape: Vec<usize>,
    /// Where it starts in the packed tensor, in elements.
    pub start: usize,
    /// How many elements it has.
    pub elements: usize,
}

/// The unpacked tensors of a parameter, in storage order.
pub fn parts(parameter: &Parameter, ty: &TensorType) -> Vec<Part> {
    let names = &parameter.parts;
    let stacked = names.len() > 1 && names.len() != ty.dims[0].sections.len();
    let (entries, dims) = if stacked { (ty.dims[0].size(), &ty.dims[1..]) } else { (1, &ty.dims[..]) };
    // One name covers a whole tensor, however many sections it has.
    let rows: Vec<usize> = match names.len() / entries.max(1) {
        1 => vec![dims[0].size()],
        _ => dims[0].sections.iter().map(|s| s.size()).collect(),
    };
    let inner: Vec<usize> = dims[1..].iter().map(|d| d.size()).collect();
    let columns: usize = inner.iter().product();
    let mut start = 0;
    let part = |(name, rows): (&String, usize)| {
        let shape = [&[rows], &inner[..]].concat();
        let part = Part { name: name.clone(), shape, start, elements: rows * columns };
        start += part.elements;
        part
    };
    let all = (0..entries).flat_map(|_| rows.iter().copied());
    names.iter().zip(all).map(part).collect()
}

/// The tensors of all stages of a run, each once.
pub fn tensors(programs: &[StepProgram]) -> Vec<Tensor> {
    let mut all: Vec<Tensor> = Vec::new();
    for tensor in programs.iter().flat_map(|p| &p.tensors) {
        if !all.iter().any(|t| t.name == tensor.name) {
            all.push(tensor.clone());
        }
    }
    all
}

/// Groups of a checkpoint.
pub const GROUPS: [&str; 2] = [MODEL, OPTIMIZER];
pub(crate) const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

/// (group, name in the group, tensor of the program, part of it) for everything that a checkpoint holds. The parts of a tensor
/// follow each other, in storage order.
pub fn stored(tensors: &[Tensor]) -> Vec<(&'static str, String, &Tensor, Part)> {
    let mut result = Vec::new();
    for tensor in tensors {
        if is_frozen(tensor) {
            continue;
        }
        if is_history(tensor) {
            let (shape, elements) = (tensor.whole.sizes(), tensor.whole.elements());
            let whole = Part { name: tensor.name.clone(), shape, start: 0, elements };
            result.push((OPTIMIZER, tensor.name.clone(), tensor, whole));
        }
        let Role::State(State::Parameter(parameter)) = &tensor.role else { continue };
        result.extend(weights(tensors, tensor).into_iter().map(|(of, p)| (MODEL, p.name.clone(), of, p)));
        for moment in tensors {
            let Role::State(State::Moment { of, which }) = &moment.role else { continue };
            if *of == tensor.value {
                let named = |p: Part| (OPTIMIZER, format!("{which}.{}", p.name), moment, p);
                result.extend(parts(parameter, &moment.whole).into_iter().map(named));
            }
        }
    }
    result
}

/// The parts of a parameter, and what holds them: of one in bf16 or fp16 the f32 master weights, where it has some. None of other tensors.
fn weights<'a>(tensors: &'a [Tensor], tensor: &'a Tensor) -> Vec<(&'a Tensor, Part)> {
    let Role::State(State::Parameter(parameter)) = &tensor.role else { return Vec::new() };
    let of = master(tensors, tensor).unwrap_or(tensor);
    parts(parameter, &tensor.whole).into_iter().map(|part| (of, part)).collect()
}

/// Whether a tensor is a parameter that training leaves as it is.
fn is_frozen(tensor: &Tensor) -> bool {
    matches!(&tensor.role, Role::State(State::Parameter(parameter)) if parameter.frozen)
}

/// Whether a tensor is what earlier steps have left, which a checkpoint may lack: that of a run that did without.
fn is_history(tensor: &Tensor) -> bool {
    matches!(tensor.role, Role::State(State::History(_)))
}

/// The f32 master weights of a parameter that is stored in bf16 or fp16.
fn master<'a>(tensors: &'a [Tensor], parameter: &Tensor) -> Option<&'a Tensor> {
    let is_master = |t: &&Tensor| matches!(t.role, Role::State(State::Master { of }) if of == parameter.value);
    tensors.iter().find(is_master)
}

/// The units of the rows of a parameter that is kept in bytes.
fn unit<'a>(tensors: &'a [Tensor], parameter: &Tensor) -> Option<&'a Tensor> {
    let is_unit = |t: &&Tensor| matches!(t.role, Role::State(State::Unit { of }) if of == parameter.value);
    tensors.iter().find(is_unit)
}

/// Where the parameters of a program come from.
#[derive(Clone, Copy)]
pub enum Weights<'a> {
    /// Drawn, as before the first step.
    Initial,
    /// A checkpoint; moments too, where the program has any.
    Checkpoint(&'a Loaded),
    /// Tensors of another origin, such as a Hugging Face folder, and which of them.
    Copies((TensorSource<'a>, &'a [TensorCopy])),
    /// Adapters, in a checkpoint, and the weights that they stand beside: tensors of another origin, or drawn.
    Adapters {
        /// The adapters.
        checkpoint: &'a Loaded,
        /// The weights.
        base: Option<(TensorSource<'a>, &'a [TensorCopy])>,
    },
    /// Another program of the same model that runs.
    Live(&'a dyn Executor),
}

/// Writes every parameter and constant of a program. Moments, gradients and caches start as the arena's zeros.
pub fn load(tensors: &[Tensor], executor: &mut dyn Executor, weights: Weights, seed: u64) -> Result<()> {
    let drawn = matches!(weights, Weights::Initial | Weights::Adapters { base: None, .. });
    initialise(tensors, executor, drawn, seed)?;
    match weights {
        Weights::Initial => Ok(()),
        Weights::Checkpoint(checkpoint) => restore_counting(tensors, executor, checkpoint, false).map(|_| ()),
        Weights::Copies(copies) => start_from(tensors, executor, copies),
        Weights::Adapters { checkpoint, base } => {
            base.map_or(Ok(()), |base| start_from(tensors, executor, base))?;
            restore_counting(tensors, executor, checkpoint, false).map(|_| ())
        }
        Weights::Live(other) => {
            let copied =
                |t: &&Tensor| matches!(t.role, Role::State(State::Parameter(_) | State::Unit { .. })) || is_history(t);
            for tensor in tensors.iter().filter(copied) {
                executor.write(&tensor.name, 0, &other.read(&tensor.name, 0)?)?;
            }
            Ok(())
        }
    }
}

/// Writes zeros into every moment of the optimizer.
pub fn clear_moments(tensors: &[Tensor], executor: &mut dyn Executor) -> Result<()> {
    for tensor in tensors.iter().filter(|t| matches!(t.role, Role::State(State::Moment { .. }))) {
        executor.write(&tensor.name, 0, &vec![0; tensor.whole.bytes() as usize])?;
    }
    Ok(())
}

/// Whether a checkpoint holds every parameter of a program: training changes all of them.
pub fn are_all_stored(tensors: &[Tensor]) -> bool {
    !tensors.iter().any(is_frozen)
}

/// Writes every constant of a program.
pub fn constants(tensors: &[Tensor], executor: &mut dyn Executor, seed: u64) -> Result<()> {
    initialise(tensors, executor, false, seed)
}

/// Writes constants, and where asked for the initial value of every parameter.
fn initialise(tensors: &[Tensor], executor: &mut dyn Executor, parameters: bool, seed: u64) -> Result<()> {
    for tensor in tensors {
        let columns = |shape: &[usize]| shape.last().copied().unwrap_or(1);
        let own = (tensor.name.as_str(), tensor.whole.dtype);
        match &tensor.role {
            Role::State(State::Parameter(parameter)) if parameters => {
                let parts = parts(parameter, &tensor.whole);
                let part = |p| -> InitialPart {
                    let Part { name, shape, elements, .. }: &Part = p;
                    InitialPart { name, columns: columns(shape), elements: *elements }
                };
                let values = Initial { init: &parameter.init, seed, parts: parts.iter().map(part).collect() };
                if let Some(unit) = unit(tensors, tensor) {
                    put_rows(executor, tensor, unit, &values.draw())?;
                    continue;
                }
                let master = master(tensors, tensor).map(|t| (t.name.as_str(), t.whole.dtype));
                executor.fill(&[Some(own), master].into_iter().flatten().collect::<Vec<_>>(), &values)?;
            }
            Role::State(State::Constant(init) | State::History(init)) => {
                let (columns, elements) = (columns(&tensor.whole.sizes()), tensor.whole.elements());
                let parts = vec![InitialPart { name: &tensor.name, columns, elements }];
                executor.fill(&[own], &Initial { init, seed, parts })?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Writes a checkpoint's tensors into the executor, having checked every name and shape, and says which of them are kept in another type now.
/// One tensor of the program is in memory at a time.
pub fn restore(tensors: &[Tensor], executor: &mut dyn Executor, checkpoint: &Loaded) -> Result<Vec<Converted>> {
    restore_counting(tensors, executor, checkpoint, true)
}

fn restore_counting(
    tensors: &[Tensor],
    executor: &mut dyn Executor,
    checkpoint: &Loaded,
    counts: bool,
) -> Result<Vec<Converted>> {
    let mut converted = Vec::new();
    let all = stored(tensors);
    for parts in all.chunk_by(|a, b| a.2.name == b.2.name) {
        let (group, first, tensor, _) = &parts[0];
        if is_history(tensor) && !checkpoint.has(group, first) {
            continue;
        }
        let to = tensor.whole.dtype;
        let mut views = Vec::new();
        for (group, name, _, part) in parts {
            let view = checkpoint.tensor(group, name)?;
            if !is_kept(view.dtype) || formats::numbers(view.dtype, view.shape) != formats::numbers(to, &part.shape) {
                return Err(CheckpointError::Damaged {
                    path: checkpoint.path.clone(),
                    file: view.file().to_owned(),
                    cause: format!("{name} is {} {:?}, the model wants {to} {:?}", view.dtype, view.shape, part.shape),
                }
                .into());
            }
            views.push(view);
        }
        // As they are, one after the other; in f32 where they are of several types.
        let from = views[0].dtype;
        let alike = views.iter().all(|view| view.dtype == from);
        let mut data = match alike {
            true => {
                let mut data = vec![0; tensor.whole.elements() * to.numbers() / from.numbers() * from.bytes()];
                let mut rest = &mut data[..];
                for view in &views {
                    let bytes = view.shape.iter().product::<usize>() * from.bytes();
                    let (here, behind) = rest.split_at_mut(bytes);
                    view.copy_to(here);
                    rest = behind;
                }
                data
            }
            false => views.iter().flat_map(|v| formats::converted(&v.bytes(), v.dtype, DType::F32)).collect(),
        };
        let from = if alike { from } else { DType::F32 };
        if from == to && to != DType::F32 {
            executor.write(&tensor.name, 0, &data)?;
            continue;
        }
        if from != to && counts {
            formats::count(&mut converted, (group, from, to), &data);
        }
        if from != DType::F32 {
            data = formats::converted(&data, from, DType::F32);
        }
        // What is rounded from them is written too.
        put(tensors, executor, tensor, data)?;
    }
    Ok(converted)
}

/// Whether parameters and moments may be kept in this type.
fn is_kept(dtype: DType) -> bool {
    dtype.is_float() || dtype.is_block()
}

/// Writes weights of any origin into the executor; parameters that none of them are stay as they are. One tensor of the program is in memory
/// at a time.
pub fn start_from(
    tensors: &[Tensor],
    executor: &mut dyn Executor,
    (source, copies): (TensorSource<'_>, &[TensorCopy]),
) -> Result<()> {
    let mut data: Vec<u8> = Vec::new();
    for (tensor, part) in tensors.iter().flat_map(|tensor| weights(tensors, tensor)) {
        let Some(copy) = copies.iter().find(|copy| copy.to == part.name) else { continue };
        if part.start == 0 {
            data.clear();
            data.reserve_exact(tensor.whole.elements() * 4);
        }
        source.stream(copy, DType::F32, &mut |chunk| {
            data.extend_from_slice(chunk);
            Ok(())
        })?;
        if part.start + part.elements == tensor.whole.elements() {
            put(tensors, executor, tensor, std::mem::take(&mut data))?;
        }
    }
    Ok(())
}

/// Writes the f32 values of a stored tensor, and those of the parameter whose master weights it holds. They are rounded in place.
fn put(tensors: &[Tensor], executor: &mut dyn Executor, tensor: &Tensor, mut data: Vec<u8>) -> Result<()> {
    let parameter = match &tensor.role {
        Role::State(State::Master { of }) => tensors.iter().find(|t| t.value == *of),
        _ => None,
    };
    if let Some(unit) = unit(tensors, tensor) {
        let numbers: Vec<f32> = data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        return put_rows(executor, tensor, unit, &numbers);
    }
    // Rounding is in place, so the master weights go first.
    for to in [Some(tensor), parameter].into_iter().flatten() {
        formats::round(&mut data, to.whole.dtype);
        executor.write(&to.name, 0, &data)?;
    }
    Ok(())
}

/// Writes numbers into a parameter that is kept in bytes, and the units of its rows.
fn put_rows(executor: &mut dyn Executor, tensor: &Tensor, unit: &Tensor, numbers: &[f32]) -> Result<()> {
    let columns = tensor.whole.sizes().last().copied().unwrap_or(1);
    let (bytes, units) = encode_rows(numbers, tensor.whole.dtype, columns);
    executor.write(&tensor.name, 0, &bytes)?;
    executor.write(&unit.name, 0, &units.iter().flat_map(|u| u.to_le_bytes()).collect::<Vec<_>>())?;
    Ok(())
}

/// Bytes of the tensors of a checkpoint.
pub fn bytes_of(tensors: &[Tensor]) -> u64 {
    stored(tensors).iter().map(|(_, _, of, part)| (part.elements * of.whole.dtype.bytes()) as u64).sum()
}

/// Some bytes of a tensor, fetched when they are wanted.
pub fn bytes<'a>(executor: &'a dyn Executor, tensor: &str, bytes: Range<usize>) -> TensorBytes<'a> {
    let (name, first) = (tensor.to_owned(), bytes.start);
    TensorBytes::new(bytes.len(), move |range, take| {
        let range = first + range.start..first + range.end;
        take(&executor.read_range(&name, 0, range).map_err(std::io::Error::other)?)
    })
}

/// The tensors of a checkpoint of one rank.
pub fn groups<'a>(tensors: &[Tensor], executor: &'a dyn Executor) -> [TensorGroup<'a>; 2] {
    let mut groups = GROUPS.map(|name| TensorGroup { name, tensors: Vec::new() });
    for (group, name, tensor, part) in stored(tensors) {
        let (dtype, width) = (tensor.whole.dtype, tensor.whole.dtype.bytes());
        let data = bytes(executor, &tensor.name, part.start * width..(part.start + part.elements) * width);
        let to = groups.iter_mut().find(|g| g.name == group);
        if let Some(to) = to {
            to.tensors.push(TensorRef { name, dtype, shape: part.shape, data });
        }
    }
    groups
}

#[cfg(test)]
mod tests;
