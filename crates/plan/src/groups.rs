//! Which parameters a group of the optimizer means.

use crate::{PlanError, Result};
use lockstep_compile::ParameterGroup;
use lockstep_config::{Config, fits_pattern, names_without_numbers};
use lockstep_ir::Graph;
use std::collections::BTreeMap;

/// The group of every parameter that is in one, by the name of its value.
pub(crate) fn resolve(config: &Config, model: &Graph) -> Result<BTreeMap<String, ParameterGroup>> {
    let groups = &config.optimizer.groups;
    let group_of = |name: &String| groups.iter().position(|group| fits_pattern(&group.pattern, name));
    let mut resolved = BTreeMap::new();
    let mut used = vec![false; groups.len()];
    for (_, value, parameter) in model.parameters() {
        let first = group_of(&parameter.parts[0]);
        if let Some(other) = parameter.parts.iter().find(|name| group_of(name) != first) {
            let (first, second) = (parameter.parts[0].clone(), other.clone());
            return Err(PlanError::SplitGroup { first, second, names: parameter.parts.clone() });
        }
        let Some(index) = first else { continue };
        used[index] = true;
        let lr_scale = groups[index].lr_scale.unwrap_or(1.0) as f32;
        let decay = groups[index].weight_decay.map(|x| x as f32);
        resolved.insert(value.name.clone(), ParameterGroup { lr_scale, decay });
    }
    let Some(unused) = used.iter().position(|used| !used) else { return Ok(resolved) };
    let pattern = groups[unused].pattern.clone();
    let taken = names(model).any(|name| fits_pattern(&pattern, name));
    let shown = names_without_numbers(names(model).map(String::as_str));
    Err(PlanError::EmptyGroup { pattern, taken, names: shown })
}

fn names(model: &Graph) -> impl Iterator<Item = &String> {
    model.parameters().flat_map(|(_, _, parameter)| &parameter.parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Hint;
    use lockstep_model::Form;

    fn groups(text: &str) -> Result<BTreeMap<String, ParameterGroup>> {
        let text = format!("[model]\nvocab_size = 8\nlayers = 2\ndim = 4\nheads = 2\nffn = 8\n{text}");
        let config = Config::parse(&text, "run.toml", &[]).unwrap_or_else(|error| panic!("{error}"));
        let form = Form::Loss { batch: 1, seq: 4, context: 4, documents: false };
        resolve(&config, &lockstep_model::build_form(&config.model, form).unwrap())
    }

    #[test]
    fn the_first_group_that_matches_counts() {
        let found = groups(
            "[[optimizer.groups]]\nmatch = \"*.0.mlp.*\"\nlr_scale = 0.5\n\
             [[optimizer.groups]]\nmatch = \"*.mlp.*\"\nlr_scale = 0.25\nweight_decay = 0.0\n",
        )
        .unwrap();
        let scales: Vec<(f32, Option<f32>)> = found.values().map(|g| (g.lr_scale, g.decay)).collect();
        assert_eq!(scales, [(0.5, None), (0.5, None), (0.25, Some(0.0)), (0.25, Some(0.0))]);
    }

    #[test]
    fn a_group_without_parameters_is_refused_with_the_names_that_there_are() {
        let refusal = |text: &str| groups(text).unwrap_err().with_hint();
        let error = refusal("[[optimizer.groups]]\nmatch = \"*.nrom.*\"\nlr_scale = 0.5\n");
        assert!(error.starts_with("optimizer.groups: \"*.nrom.*\" matches no parameter\nhint: "), "{error}");
        assert!(error.contains("model.layers.*.self_attn.q_proj.weight, "), "{error}");
        assert!(!error.contains(".0."), "{error}");
        let both = "[[optimizer.groups]]\nmatch = \"*\"\nlr_scale = 0.5\n[[optimizer.groups]]\nmatch = \"*norm*\"\n\
                    lr_scale = 2.0\n";
        assert!(refusal(both).contains("that groups before it have not taken"), "{}", refusal(both));
    }

    #[test]
    fn parameters_that_are_stored_together_are_in_one_group() {
        let error = groups("[[optimizer.groups]]\nmatch = \"*.q_proj.*\"\nlr_scale = 0.5\n").unwrap_err().with_hint();
        assert!(error.contains("must be in the same group\nhint: give a pattern that matches all of"), "{error}");
    }
}
