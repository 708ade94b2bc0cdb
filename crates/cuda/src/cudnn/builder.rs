//! Graphs under construction, and the choice of their plans.

use super::{Cudnn, Data, Descriptor, Handle, Plan, Pointwise, Reduction, Storage, descriptor, kind};
use crate::best::Best;
use crate::{CudaError, cache};
use lockstep_ir::units;
use std::ffi::c_int;

/// A tensor of a graph under construction.
#[derive(Clone, Copy)]
pub struct TensorId(usize);

/// A graph under construction.
pub struct Builder {
    cudnn: Cudnn,
    tensors: Vec<(Descriptor, [i64; 4])>,
    operations: Vec<Descriptor>,
    parts: Vec<Descriptor>,
    next: i64,
}

/// The first number of tensors that live nowhere.
const VIRTUAL_IDS: i64 = 1000;

impl Builder {
    /// An empty one.
    pub fn new(cudnn: &Cudnn) -> Self {
        Self { cudnn: cudnn.clone(), tensors: vec![], operations: vec![], parts: vec![], next: VIRTUAL_IDS }
    }

    /// Declares a tensor.
    pub fn tensor(
        &mut self,
        dims: [i64; 4],
        strides: [i64; 4],
        data: Data,
        place: Storage,
    ) -> Result<TensorId, CudaError> {
        self.ragged(dims, strides, data, place, None)
    }

    /// Declares a tensor whose batch entries start at `offsets`, in elements, where those are given.
    pub fn ragged(
        &mut self,
        dims: [i64; 4],
        strides: [i64; 4],
        data: Data,
        place: Storage,
        offsets: Option<TensorId>,
    ) -> Result<TensorId, CudaError> {
        let t = self.cudnn.make(descriptor::TENSOR)?;
        let id = match place {
            Storage::Memory(id) | Storage::Value(id) => id,
            Storage::Virtual => {
                self.next += 1;
                self.next
            }
        };
        t.set(901, kind::DATA_TYPE, &[data as c_int])?
            .set(902, kind::INT64, &dims)?
            .set(903, kind::INT64, &strides)?
            .set(906, kind::INT64, &[id])?
            .set(900, kind::INT64, &[16i64])?;
        match place {
            Storage::Memory(_) => {}
            Storage::Virtual => {
                t.set(907, kind::BOOLEAN, &[true])?;
            }
            Storage::Value(_) => {
                t.set(908, kind::BOOLEAN, &[true])?;
            }
        }
        if let Some(offsets) = offsets {
            t.set_descriptor(913, self.handle(offsets))?;
        }
        self.tensors.push((t.finish()?, dims));
        Ok(TensorId(self.tensors.len() - 1))
    }

    /// A number of the host.
    pub fn value(&mut self, id: i64) -> Result<TensorId, CudaError> {
        self.tensor([1; 4], [1; 4], Data::Float, Storage::Value(id))
    }

    /// A tensor between operations, its elements one after the other.
    pub fn between(&mut self, dims: [i64; 4], data: Data) -> Result<TensorId, CudaError> {
        let [_, b, c, d] = dims;
        self.tensor(dims, [b * c * d, c * d, d, 1], data, Storage::Virtual)
    }

    fn handle(&self, t: TensorId) -> &Descriptor {
        &self.tensors[t.0].0
    }

    /// c = a · b; `sizes` are the rows of a, the columns of b and what is between in each batch entry, where they are fewer than
    /// the tensors say.
    pub fn matmul(
        &mut self,
        a: TensorId,
        b: TensorId,
        c: TensorId,
        sizes: [Option<TensorId>; 3],
    ) -> Result<(), CudaError> {
        let what = self.cudnn.make(descriptor::MATMUL)?;
        what.set(1500, kind::DATA_TYPE, &[Data::Float as c_int])?;
        if sizes.iter().any(Option::is_some) {
            what.set(1503, kind::DOUBLE, &[0f64])?;
        }
        let what = what.finish()?;
        let op = self.cudnn.make(descriptor::OPERATION_MATMUL)?;
        op.set_descriptor(1520, self.handle(a))?
            .set_descriptor(1521, self.handle(b))?
            .set_descriptor(1522, self.handle(c))?
            .set_descriptor(1523, &what)?;
        for (attribute, size) in (1525..).zip(sizes) {
            if let Some(size) = size {
                op.set_descriptor(attribute, self.handle(size))?;
            }
        }
        self.parts.push(what);
        self.operations.push(op.finish()?);
        Ok(())
    }

    /// y = mode(x, b, t), elementwise.
    pub fn pointwise(
        &mut self,
        mode: Pointwise,
        operands: (TensorId, Option<TensorId>, Option<TensorId>),
        y: TensorId,
    ) -> Result<(), CudaError> {
        let precision = match mode {
            Pointwise::Greater | Pointwise::GreaterEqual | Pointwise::Less | Pointwise::And => Data::Boolean,
            Pointwise::Add
            | Pointwise::Mul
            | Pointwise::Div
            | Pointwise::Sub
            | Pointwise::Exp
            | Pointwise::Log
            | Pointwise::Identity
            | Pointwise::Index
            | Pointwise::Select => Data::Float,
        };
        self.elementwise((mode, precision, None), operands, y)
    }

    /// y = each element's index along a dimension of x, computed in `precision`.
    pub fn index(&mut self, x: TensorId, y: TensorId, axis: i64, precision: Data) -> Result<(), CudaError> {
        self.elementwise((Pointwise::Index, precision, Some(axis)), (x, None, None), y)
    }

    fn elementwise(
        &mut self,
        (mode, precision, axis): (Pointwise, Data, Option<i64>),
        (x, b, t): (TensorId, Option<TensorId>, Option<TensorId>),
        y: TensorId,
    ) -> Result<(), CudaError> {
        let what = self.cudnn.make(descriptor::POINTWISE)?;
        what.set(0, kind::POINTWISE_MODE, &[mode as c_int])?.set(1, kind::DATA_TYPE, &[precision as c_int])?;
        if let Some(axis) = axis {
            what.set(9, kind::INT64, &[axis])?;
        }
        let what = what.finish()?;
        let op = self.cudnn.make(descriptor::OPERATION_POINTWISE)?;
        op.set_descriptor(750, &what)?.set_descriptor(751, self.handle(x))?.set_descriptor(753, self.handle(y))?;
        for (attribute, operand) in [(752, b), (758, t)] {
            if let Some(operand) = operand {
                op.set_descriptor(attribute, self.handle(operand))?;
            }
        }
        self.parts.push(what);
        self.operations.push(op.finish()?);
        Ok(())
    }

    /// y = x with dimensions of `y` that are one reduced.
    pub fn reduce(&mut self, how: Reduction, x: TensorId, y: TensorId) -> Result<(), CudaError> {
        let what = self.cudnn.make(descriptor::REDUCTION)?;
        what.set(1600, kind::REDUCTION, &[how as c_int])?.set(1601, kind::DATA_TYPE, &[Data::Float as c_int])?;
        let what = what.finish()?;
        let op = self.cudnn.make(descriptor::OPERATION_REDUCTION)?;
        op.set_descriptor(1612, &what)?.set_descriptor(1610, self.handle(x))?.set_descriptor(1611, self.handle(y))?;
        self.parts.push(what);
        self.operations.push(op.finish()?);
        Ok(())
    }

    /// y = x, seen with other strides.
    pub fn reshape(&mut self, x: TensorId, y: TensorId) -> Result<(), CudaError> {
        let op = self.cudnn.make(descriptor::OPERATION_RESHAPE)?;
        op.set_descriptor(2200, self.handle(x))?.set_descriptor(2201, self.handle(y))?;
        self.operations.push(op.finish()?);
        Ok(())
    }

    /// A plan for the graph with at most `most` bytes of scratch: the fastest of the library's first by `time`, which runs one and
    /// says how long it took, or without that the first; `key` says what the graph is, so that its plan can be kept on disk, unless
    /// there was no room to time them all.
    pub fn plan(self, key: &str, most: u64, time: Option<Timer>) -> Result<Plan, CudaError> {
        let cudnn = self.cudnn.clone();
        let device = &cudnn.0.device;
        let key = format!("{} {} {} {key}", device.name, device.processors, cudnn.version());
        if let Some(plan) = cache::get("cudnn", &key).and_then(|text| Plan::kept(&cudnn, &text).ok())
            && plan.workspace <= most
        {
            return Ok(plan);
        }
        let mut last = CudaError::Unsupported("cuDNN proposes no plan".into());
        let mut best = Best::new();
        for config in self.proposals()? {
            match Plan::of(&cudnn, &config) {
                Ok(plan) if plan.workspace > most => {
                    let [needs, has] = [plan.workspace, most].map(units::bytes);
                    last =
                        CudaError::Unsupported(format!("a plan of cuDNN needs {needs} of scratch, {has} are planned"));
                }
                // The first does.
                Ok(plan) if time.is_none() => {
                    best.add(Some(0.0), plan);
                    break;
                }
                Ok(plan) => match time.map_or(Ok(None), |time| time(&plan)) {
                    Ok(seconds) => best.add(seconds, plan),
                    Err(error) => last = error,
                },
                Err(error) => last = error,
            }
        }
        let (plan, all_timed) = best.take().ok_or(last)?;
        if let Some(text) = plan.text().filter(|_| all_timed) {
            cache::put("cudnn", &key, &text);
        }
        Ok(plan)
    }

    /// The library's first proposals, best first.
    fn proposals(&self) -> Result<Vec<Descriptor>, CudaError> {
        const ASKED: usize = 3;
        const HEURISTIC_A: c_int = 3;
        let cudnn = &self.cudnn;
        let (handle, _alone) = cudnn.0.alone()?;
        let operations: Vec<Handle> = self.operations.iter().map(|o| o.handle).collect();
        let graph = cudnn.make(descriptor::GRAPH)?;
        graph.set(801, kind::DESCRIPTOR, &operations)?.set(800, kind::HANDLE, &[handle])?;
        let graph = graph.finish()?;
        let heuristic = cudnn.make(descriptor::HEURISTIC)?;
        heuristic.set_descriptor(201, &graph)?.set(200, kind::HEUR_MODE, &[HEURISTIC_A])?;
        let heuristic = heuristic.finish()?;
        let mut configs = (0..ASKED).map(|_| cudnn.make(descriptor::ENGINE_CONFIG)).collect::<Result<Vec<_>, _>>()?;
        let mut handles: Vec<Handle> = configs.iter().map(|c| c.handle).collect();
        let mut count = 0;
        // SAFETY: the addresses are valid for the call.
        let status = unsafe {
            let (to, most) = (handles.as_mut_ptr().cast(), ASKED as i64);
            (cudnn.0.functions.get)(heuristic.handle, 202, kind::DESCRIPTOR, most, &mut count, to)
        };
        cudnn.check("cudnnBackendGetAttribute", status)?;
        configs.truncate(count.max(0) as usize);
        Ok(configs)
    }
}

/// Runs a plan and gives the seconds that it took; none where there was no room for it.
pub type Timer<'a> = &'a dyn Fn(&Plan) -> Result<Option<f64>, CudaError>;
