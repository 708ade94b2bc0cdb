//! Adapters (LoRA): beside a frozen weight W stand two thin matrices A and B, which are trained: y = W·x + alpha / rank · B·A·x.
//!
//! They are put into the graph that an architecture has built, so architectures do not know of them. What has a name of its own at Hugging
//! Face has an adapter of its own, as in PEFT: of Q·K·V, which we store as one, three. Experts have one each. A weight that latent attention
//! reads head by head, in generation, is adapted itself: W + alpha / rank · B·A.

use crate::names;
use lockstep_config::{LoraConfig, fits_pattern, names_without_numbers};
use lockstep_ir::graph::{Node, Parameter, Source, State};
use lockstep_ir::{Axis, DType, Dim, Graph, Init, Op, Section, TensorType, TypeError, ValueId, counter};

/// Why a model cannot have the adapters that a config asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum AdapterProblem {
    /// A bug in a pass.
    Type(TypeError),
    /// A target that no matmul of a layer has.
    NoTarget {
        /// The target.
        target: String,
        /// What there is, with `*` for numbers.
        modules: Vec<String>,
    },
    /// Dropout before adapters of experts.
    DropsBeforeExperts {
        /// A target that is a module of experts.
        target: String,
        /// One of these modules, with `*` for numbers.
        module: String,
    },
}

impl From<TypeError> for AdapterProblem {
    fn from(error: TypeError) -> Self {
        AdapterProblem::Type(error)
    }
}

/// The ends of the names of an adapter's matrices.
pub const A: &str = ".lora_A.weight";
/// See [`A`].
pub const B: &str = ".lora_B.weight";

/// Freezes all parameters of a graph and adds adapters to the matmuls of layers that the config names; nothing where it asks for none.
pub fn adapt(mut g: Graph, lora: &LoraConfig) -> Result<Graph, AdapterProblem> {
    let Some(rank) = lora.rank else { return Ok(g) };
    let modules = modules(&g);
    for target in &lora.targets {
        if !modules.iter().any(|module| is_target(target, module)) {
            let mut modules = names_without_numbers(modules.iter().map(String::as_str));
            modules.sort();
            return Err(AdapterProblem::NoTarget { target: target.clone(), modules });
        }
    }
    // A mask is of positions; experts read choices of tokens. PEFT refuses it too.
    if lora.dropout > 0.0 {
        let hit = |target: &&String| modules.iter().find(|m| m.contains(".experts.") && is_target(target, m));
        if let Some((target, module)) = lora.targets.iter().find_map(|target| Some((target, hit(&target)?))) {
            let module = names_without_numbers([module.as_str()].into_iter()).concat();
            return Err(AdapterProblem::DropsBeforeExperts { target: target.clone(), module });
        }
    }
    for value in &mut g.values {
        if let Source::State(State::Parameter(parameter)) = &mut value.source {
            // The bias of a router's choice stays too.
            (parameter.frozen, parameter.balance) = (true, None);
        }
    }
    let keys = if lora.dropout > 0.0 { dropout_keys(&mut g) } else { None };
    let adapters = Adapters {
        rank,
        scale: scale(lora),
        targets: &lora.targets,
        dropout: keys.map(|keys| (keys, lora.dropout as f32)),
    };
    let mut now: Vec<ValueId> = (0..g.values.len()).map(ValueId).collect();
    for mut node in std::mem::take(&mut g.nodes) {
        node.inputs.iter_mut().for_each(|v| *v = now[v.0]);
        if reads_by_head(&node)
            && let Some(adapted) = adapters.put_in_weight(&mut g, &node)?
        {
            now[node.inputs[1].0] = adapted;
            node.inputs[1] = adapted;
        }
        g.nodes.push(node.clone());
        if let (Some(y), Some(adapted)) = (node.outputs[0], adapters.put(&mut g, &node)?) {
            now[y.0] = adapted;
        }
    }
    g.outputs.iter_mut().for_each(|v| *v = now[v.0]);
    Ok(g)
}

/// What B·A·x is multiplied by.
pub fn scale(lora: &LoraConfig) -> f32 {
    // The schema gives every rank an alpha.
    lora.alpha.zip(lora.rank).map_or(0.0, |(alpha, rank)| alpha / rank as f64) as f32
}

/// The modules that can have adapters: weights of matmuls in layers, without `.weight`.
fn modules(g: &Graph) -> Vec<String> {
    let parts = g.nodes.iter().filter_map(|node| adaptable(g, node)).flat_map(|parameter| &parameter.parts);
    parts.map(|name| module(name).to_owned()).collect()
}

/// Whether heads each read rows of a weight: of that by which keys and values of latent attention expand.
fn reads_by_head(node: &Node) -> bool {
    matches!(node.op, Op::LatentHeads { absorbed: true, .. } | Op::LatentValues { .. })
}

/// The weight of a matmul of a layer. Routers, which stay in f32, have no adapters, nor have experts whose weights go by one name together.
fn adaptable<'a>(g: &'a Graph, node: &Node) -> Option<&'a Parameter> {
    node.layer.filter(|_| matches!(node.op, Op::Linear | Op::GroupedLinear { .. }) || reads_by_head(node))?;
    let w = g.get(node.inputs[1]);
    let entries = if w.ty.dims.len() == 3 { w.ty.dims[0].size() } else { 1 };
    match &w.source {
        Source::State(State::Parameter(parameter)) if !parameter.exact && parameter.parts.len() >= entries => {
            Some(parameter)
        }
        _ => None,
    }
}

/// What PEFT calls the module of a weight.
pub fn module(weight: &str) -> &str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

/// Whether a target is a module: by its whole name, or by its end after a dot.
fn is_target(target: &str, module: &str) -> bool {
    let ends = module.match_indices('.').map(|(dot, _)| &module[dot + 1..]);
    std::iter::once(module).chain(ends).any(|name| fits_pattern(target, name))
}

/// The keys of dropout, which a graph of generation has not.
fn dropout_keys(g: &mut Graph) -> Option<ValueId> {
    let find = |name: &str| g.values.iter().position(|v| v.name == name).map(ValueId);
    let (known, targets) = (find(names::DROPOUT_KEYS), find(names::TARGETS)?);
    let ty = TensorType::new(DType::U32, [g.ty(targets).dims[0].clone(), Dim::new(Axis::Scalar, 2)]);
    Some(known.unwrap_or_else(|| g.input(names::DROPOUT_KEYS, ty)))
}

struct Adapters<'a> {
    rank: usize,
    /// What B·A·x is multiplied by.
    scale: f32,
    targets: &'a [String],
    /// Keys and rate.
    dropout: Option<(ValueId, f32)>,
}

impl Adapters<'_> {
    /// What a matmul gives with its adapters, if it has any.
    fn put(&self, g: &mut Graph, node: &Node) -> Result<Option<ValueId>, TypeError> {
        let (Some(parameter), Some(y)) = (adaptable(g, node), node.outputs[0]) else { return Ok(None) };
        let (w, x, layer) = (g.get(node.inputs[1]).clone(), node.inputs[0], node.layer);
        let (stacked, dims) = match &w.ty.dims[..] {
            [outputs, inputs] => (None, [outputs.clone(), inputs.clone()]),
            [stacked, outputs, inputs] => (Some(stacked.clone()), [outputs.clone(), inputs.clone()]),
            _ => return Ok(None),
        };
        let entries = stacked.as_ref().map_or(1, Dim::size);
        // One name is that of all sections.
        let each = parameter.parts.len() / entries;
        let names = parameter.parts.clone();
        let names_of = |section: usize| names.iter().skip(section).step_by(each);
        let targeted = |section: &usize| names_of(*section).all(|name| self.is_targeted(name));
        let sections: Vec<usize> = (0..each).filter(targeted).collect();
        if sections.is_empty() {
            return Ok(None);
        }
        let outer = g.layer();
        g.enter_layer(layer);
        let low = Section { axis: Axis::LowRank, count: self.rank, unit: 1 };
        let [outputs, inputs] = dims;
        let adapter = |g: &mut Graph, kind: &str, end: &str, init: Init, dims: [Dim; 2], parts: Vec<&String>| {
            let dims: Vec<Dim> = stacked.clone().into_iter().chain(dims).collect();
            self.matrix(g, format!("{}.{kind}", w.name), (init, dims), (parts, end))
        };
        let init = drawn(&inputs);
        let all = (0..entries).flat_map(|entry| sections.iter().map(move |section| entry * each + section));
        let packed = Dim::packed(vec![low; sections.len()]);
        let a = adapter(g, "a", A, init, [packed, inputs], all.map(|at| &names[at]).collect());
        let x = match self.dropout {
            Some((keys, rate)) => {
                let seq = g.ty(x).dims[1].size();
                let name = format!("{}.dropped", w.name);
                let site = counter::key(0, &name);
                g.op(Op::Dropout { rate, site, seq }, &[x, keys], &name)?[0]
            }
            None => x,
        };
        let chosen = &node.inputs[2..];
        let low_rank = g.op(node.op, &[&[x, a], chosen].concat(), &format!("{}.low", w.name))?[0];
        let low_rank =
            g.op(Op::Scale { factor: self.scale, rounded: false }, &[low_rank], &format!("{}.scaled", w.name))?[0];
        let back = if stacked.is_some() { Op::GroupedLinear { each: true } } else { Op::Linear };
        let mut deltas = Vec::new();
        for (i, section) in sections.iter().enumerate() {
            let (suffix, rows) = match each {
                1 => (String::new(), outputs.clone()),
                _ => (format!(".{section}"), Dim::packed([outputs.sections[*section]])),
            };
            let kind = format!("b{suffix}");
            let b = adapter(g, &kind, B, Init::Zeros, [rows, Dim::packed([low])], names_of(*section).collect());
            let own = match sections.len() {
                1 => low_rank,
                _ => g.op(Op::Slice { first: i, count: 1 }, &[low_rank], &format!("{}.low{suffix}", w.name))?[0],
            };
            deltas.push(g.op(back, &[&[own, b], chosen].concat(), &format!("{}.delta{suffix}", w.name))?[0]);
        }
        let name = format!("{}.adapted", g.get(y).name);
        let adapted = match (sections.len() == each, &deltas[..]) {
            (true, [delta]) => g.op(Op::Add, &[y, *delta], &name)?[0],
            (true, _) => {
                let delta = g.op(Op::Concat, &deltas, &format!("{}.delta", w.name))?[0];
                g.op(Op::Add, &[y, delta], &name)?[0]
            }
            (false, _) => {
                let mut parts = Vec::new();
                for section in 0..each {
                    let part = format!("{name}.{section}");
                    let own = g.op(Op::Slice { first: section, count: 1 }, &[y], &format!("{part}.base"))?[0];
                    parts.push(match sections.iter().position(|s| *s == section) {
                        Some(i) => g.op(Op::Add, &[own, deltas[i]], &part)?[0],
                        None => own,
                    });
                }
                g.op(Op::Concat, &parts, &name)?[0]
            }
        };
        g.enter_layer(outer);
        Ok(Some(adapted))
    }

    /// The matrix of an adapter: of these modules, by the end of its names.
    fn matrix(
        &self,
        g: &mut Graph,
        name: String,
        (init, dims): (Init, Vec<Dim>),
        (of, end): (Vec<&String>, &str),
    ) -> ValueId {
        let parts = of.into_iter().map(|name| format!("{}{end}", module(name))).collect();
        let trained = Parameter::new(init, parts);
        g.state(name, TensorType::new(DType::F32, dims), State::Parameter(trained))
    }

    /// The weight that heads read in this node with its adapter, if it has one.
    fn put_in_weight(&self, g: &mut Graph, node: &Node) -> Result<Option<ValueId>, TypeError> {
        let Some(parameter) = adaptable(g, node) else { return Ok(None) };
        let (names, w) = (parameter.parts.clone(), g.get(node.inputs[1]).clone());
        let ([outputs, inputs], true) = (&w.ty.dims[..], names.iter().all(|name| self.is_targeted(name))) else {
            return Ok(None);
        };
        let outer = g.layer();
        g.enter_layer(node.layer);
        let low = Dim::new(Axis::LowRank, self.rank);
        let [down, up] = [vec![low.clone(), inputs.clone()], vec![outputs.clone(), low]];
        let a = self.matrix(g, format!("{}.a", w.name), (drawn(inputs), down), (names.iter().collect(), A));
        let b = self.matrix(g, format!("{}.b", w.name), (Init::Zeros, up), (names.iter().collect(), B));
        let delta = g.op(Op::LinearGradInput, &[b, a], &format!("{}.delta", w.name))?[0];
        let scale = Op::Scale { factor: self.scale, rounded: false };
        let scaled = g.op(scale, &[delta], &format!("{}.scaled", w.name))?[0];
        let adapted = g.op(Op::Add, &[node.inputs[1], scaled], &format!("{}.adapted", w.name))?[0];
        g.enter_layer(outer);
        Ok(Some(adapted))
    }

    /// Whether the config names the module of a weight.
    fn is_targeted(&self, weight: &str) -> bool {
        self.targets.iter().any(|target| is_target(target, module(weight)))
    }
}

/// How A is drawn, as in PEFT: of the variance of its uniform distribution. B begins as zeros, so that nothing changes at first.
fn drawn(inputs: &Dim) -> Init {
    Init::Normal { std: (1.0 / (3.0 * inputs.size() as f64)).sqrt() as f32 }
}
