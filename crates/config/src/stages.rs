//! Rules of the virtual stages of a pipeline: how many there are if nothing is said, and what a list of their layers must keep.

use crate::conflict::{Conflict, Derived};
use crate::value::Value;
use crate::values::Values;
use lockstep_ir::Schedule;

/// The usual number of chunks of the schedule.
pub(crate) fn default_virtual(values: &Values) -> Derived {
    let schedule = values.word::<Schedule>("parallel.schedule");
    Ok(schedule.map(|schedule| Value::Count(*schedule.chunks().start() as u64)))
}

/// Every virtual stage has its layers, and every layer its stage.
pub(crate) fn stages_make_up_the_model(values: &Values) -> Option<Conflict> {
    let Value::Counts(stages) = values.get("parallel.stages")? else { return None };
    let [pp, chunks, layers] = ["parallel.pp", "parallel.virtual", "model.layers"].map(|path| values.count(path));
    let (count, layers) = (pp? * chunks?, layers?);
    if stages.is_empty() {
        return None;
    }
    let equal = || {
        let shares = (0..count).map(|stage| (stage + 1) * layers / count - stage * layers / count);
        let shown = Value::Counts(shares.collect());
        if layers >= count {
            format!("write {shown}, or remove parallel.stages")
        } else {
            "remove parallel.stages".into()
        }
    };
    if stages.len() as u64 != count {
        let keys = ["parallel.stages", "parallel.pp", "parallel.virtual"];
        let text = format!(
            "parallel.stages lists {} stages, and parallel.pp × parallel.virtual = {} × {} are {count}",
            stages.len(),
            pp?,
            chunks?
        );
        return Some(Conflict::new(&keys, text, equal()));
    }
    if let Some(empty) = stages[..stages.len() - 1].iter().position(|n| *n == 0) {
        let text = format!("parallel.stages gives stage {empty} no layer, and only the last one can do without");
        return Some(Conflict::new(&["parallel.stages"], text, equal()));
    }
    let sum: u64 = stages.iter().sum();
    (sum != layers).then(|| {
        let text = format!("parallel.stages has {sum} layers in all, and model.layers = {layers}");
        Conflict::new(&["parallel.stages", "model.layers"], text, equal())
    })
}
