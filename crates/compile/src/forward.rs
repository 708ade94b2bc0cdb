//! Programs without a training step: forward passes that share parameters and caches, an entry each.
//!
//! They hold no gradient and no optimizer state. States of the same name are one state; the inputs and outputs of an
//! entry are its own, named after it.

use crate::passes::EVALUATION_PASSES;
use crate::{CompileError, Context, FORWARD_PASSES, check, lower, placed, run};
use lockstep_ir::graph::{Source, Value};
use lockstep_ir::verify::{self, Unsound};
use lockstep_ir::{Graph, StepProgram, ValueId};

/// Compiles forward graphs, each with the name of its entry, to one program.
pub fn compile_forward(entries: &[(&'static str, Graph)], context: &Context) -> Result<StepProgram, CompileError> {
    let mut joined = Graph::new();
    let mut counts = Vec::new();
    for (entry, graph) in entries {
        let graph = FORWARD_PASSES.into_iter().try_fold(graph.clone(), |graph, pass| run(pass, &graph, context))?;
        let graph = graph.without_dead_code();
        let graph = EVALUATION_PASSES.into_iter().try_fold(graph, |graph, pass| run(pass, &graph, context))?;
        counts.push((*entry, graph.nodes.len()));
        check("join", join(&mut joined, entry, &graph))?;
    }
    check("join", verify::graph(&joined))?;
    let program = placed(lower::lower_forward(&joined, &counts, context)?, context);
    check("memory", verify::program(&program, context.device.alignment))?;
    Ok(program)
}

/// Appends a graph to another.
fn join(to: &mut Graph, entry: &str, graph: &Graph) -> Result<(), Unsound> {
    let mut ids: Vec<ValueId> = Vec::new();
    for (i, value) in graph.values.iter().enumerate() {
        let is_state = matches!(value.source, Source::State(_));
        let host = value.source == Source::Input || graph.outputs.contains(&ValueId(i));
        let known = to.values.iter().position(|v| is_state && v.name == value.name);
        ids.push(match known {
            Some(k) if to.values[k] == *value => ValueId(k),
            Some(_) => {
                let reason = format!("`{}` is another state in an entry before", value.name);
                return Err(Unsound { at: format!("entry {entry}"), reason });
            }
            None => {
                let name = if host { StepProgram::name_in(entry, &value.name) } else { value.name.clone() };
                to.values.push(Value { name, ..value.clone() });
                ValueId(to.values.len() - 1)
            }
        });
    }
    let new = |v: &ValueId| ids[v.0];
    for node in &graph.nodes {
        let mut node = node.clone();
        node.inputs = node.inputs.iter().map(new).collect();
        node.outputs = node.outputs.iter().map(|o| o.as_ref().map(new)).collect();
        to.nodes.push(node);
    }
    to.outputs.extend(graph.outputs.iter().map(new));
    to.updates.extend(graph.updates.iter().map(|(state, value)| (new(state), new(value))));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::tests::small_model;
    use lockstep_ir::Hint;
    use lockstep_ir::account;
    use lockstep_ir::program::Class;

    #[test]
    fn entries_share_parameters_and_nothing_else() {
        let (graph, context) = small_model();
        let program = compile_forward(&[("one", graph.clone()), ("two", graph)], &context).unwrap();
        let names: Vec<&str> = program.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(
            names,
            ["one.tokens", "one.targets", "table", "w1", "w2", "one.loss", "two.tokens", "two.targets", "two.loss"]
        );
        assert!(program.entry("one").is_some() && program.entry("two").is_some());
        let memory = account::memory(&program);
        assert_eq!(memory.classes[Class::Gradients.name()] + memory.classes[Class::Optimizer.name()], 0);
        assert_eq!(memory.total_bytes, program.arena_bytes);
    }

    #[test]
    fn a_state_that_two_entries_declare_differently_is_refused() {
        let (graph, context) = small_model();
        let mut other = graph.clone();
        let w1 = other.values.iter_mut().find(|v| v.name == "w1").unwrap();
        w1.source = Source::State(lockstep_ir::graph::State::Cache);
        let error = compile_forward(&[("one", graph), ("two", other)], &context).unwrap_err();
        assert!(error.with_hint().contains("entry two: `w1` is another state in an entry before"), "{error}");
    }
}
