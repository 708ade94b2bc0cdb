//! Optimizer: appends the update, once per step: tied gradients are added, the global norm taken, every parameter moved.

use super::autodiff::gradient_name;
use crate::Context;
use lockstep_ir::graph::{Phase, State};
use lockstep_ir::{DType, Graph, Op, StepScalars, TensorType, TypeError, ValueId};

/// AdamW's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay, for the parameters that ask for it.
    pub decay: f32,
}

pub(super) fn optimizer(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    let find = |g: &Graph, name: &str| g.values.iter().position(|v| v.name == name).map(ValueId);
    let scalars = g.state(StepScalars::NAME, StepScalars::ty(), State::Scalars);
    let parameters: Vec<(ValueId, bool)> = g.parameters().map(|(id, _, p)| (id, p.decay)).collect();
    let mut grads = Vec::new();
    for &(w, decay) in &parameters {
        let name = gradient_name(&g.get(w).name);
        let Some(first) = find(&g, &name) else { continue };
        let grad = match find(&g, &format!("{name}.2")) {
            None => first,
            Some(second) => {
                let sum = g.node(Op::AddState, &[first, second], &format!("{name}.sum"), Phase::Update, None)?[0];
                g.updates.push((first, sum));
                sum
            }
        };
        grads.push((w, decay, grad));
    }
    let mut reads: Vec<ValueId> = grads.iter().map(|(_, _, grad)| *grad).collect();
    reads.push(scalars);
    let stats = g.node(Op::GlobalNorm, &reads, STATS, Phase::Update, None)?[0];
    g.outputs.push(stats);
    let AdamW { beta1, beta2, eps, decay } = context.optimizer;
    for (w, decays, grad) in grads {
        let name = g.get(w).name.clone();
        let ty = TensorType::new(DType::F32, g.ty(w).dims.clone());
        let moment = |which| (format!("{which}.{name}"), State::Moment { of: name.clone(), which });
        let [(m, m_state), (v, v_state)] = ["m", "v"].map(moment);
        let m = g.state(m, ty.clone(), m_state);
        let v = g.state(v, ty, v_state);
        let op = Op::AdamW { beta1, beta2, eps, decay: if decays { decay } else { 0.0 } };
        // Where the parameter itself is rounded, the update works on its f32 original and rounds once more.
        let rounded = g.ty(w).dtype == DType::BF16;
        let original = match rounded {
            true => g.state(format!("master.{name}"), g.ty(m).clone(), State::Master { of: name.clone() }),
            false => w,
        };
        let reads = [original, grad, m, v, scalars, stats];
        let new = g.node(op, &reads, &format!("{name}.next"), Phase::Update, None)?;
        g.updates.extend([(original, new[0]), (m, new[1]), (v, new[2])]);
        match (rounded, g.nodes.last_mut()) {
            (true, _) => g.updates.push((w, new[3])),
            (false, Some(node)) => node.outputs[3] = None,
            (false, None) => {}
        }
    }
    Ok(g)
}

/// Output of the training step: gradient norm, and the factor that was applied to gradients.
pub const STATS: &str = "gradient_stats";
