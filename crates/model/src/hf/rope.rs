//! The fields of rotary embeddings, of both versions of transformers: 5 writes `rope_parameters`, 4 `rope_theta` and
//! `rope_scaling`. Of a file that has both, both must say the same.

use super::HfError;
use super::families::Family;
use super::fields::{Fields, contradiction, is_same, refused};
use super::patterns::{FULL, SLIDING, Slides};
use lockstep_config::{ModelConfig, RopeScalingConfig};
use serde_json::{Map, Value, json};

const PARAMETERS: &str = "rope_parameters";
const SCALING: &str = "rope_scaling";
const THETA: &str = "rope_theta";
const ALL_DIM: &str = "mscale_all_dim";
const PARTIAL: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";

/// The fields that every rotary family has.
pub(super) const FIELDS: [&str; 5] = [PARAMETERS, SCALING, THETA, PARTIAL, ORIGINAL];

/// An object with the parameters of a rotary embedding, and its name.
type Named<'a> = (String, Fields<'a>);

/// The keys of the rotary embeddings of a model.
pub(super) fn read(family: &Family, fields: &Fields, slides: &Slides) -> Result<String, HfError> {
    check_partial(fields)?;
    let parameters = object(fields, PARAMETERS)?;
    let scaling = object(fields, SCALING)?.map(|inner| (SCALING.to_owned(), inner));
    let Some((field, default)) = family.local_theta else {
        if parameters.as_ref().is_some_and(|inner| inner.0.values().all(Value::is_object)) {
            let problem = format!("`{PARAMETERS}` differs between layers");
            return Err(refused(&problem, "one for all layers is supported"));
        }
        let parameters = parameters.map(|inner| (PARAMETERS.to_owned(), inner));
        let objects = [parameters, scaling];
        let mut rope = one(&objects, fields, family.theta)?;
        if objects.iter().all(Option::is_none) {
            rope.scaling = family.scaling.clone();
        }
        let scaled = rope.scaling.as_ref().is_some_and(|scaling| scaling.name() != "yarn");
        for (name, inner) in objects.iter().flatten().filter(|_| family.latent && scaled) {
            if inner.number_or_zero(ALL_DIM)?.is_some_and(|weight| weight > 0.0) {
                let problem = format!("`{name}.{ALL_DIM}` is not supported where the scaling is not yarn");
                return Err(refused(&problem, "only yarn may have it"));
            }
        }
        return Ok(if family.latent { rope } else { rope.without_score_factor() }.table());
    };
    let [full, sliding] = match &parameters {
        None => [None, None],
        Some(inner) if inner.0.keys().all(|kind| [FULL, SLIDING].contains(&kind.as_str())) => {
            let of = |kind: &str| Ok(object(inner, kind)?.map(|inner| (format!("{PARAMETERS}.{kind}"), inner)));
            [of(FULL)?, of(SLIDING)?]
        }
        Some(_) => {
            let hint = format!("give one for {} and one for {}", FULL, SLIDING);
            return Err(refused(&format!("`{PARAMETERS}` does not say which layers it is of"), &hint));
        }
    };
    // Classes with several do not look for it here.
    for (name, inner) in [&full, &sliding, &scaling].into_iter().flatten() {
        if inner.flag("truncate")? == Some(false) {
            return Err(refused(&format!("`{name}.truncate` = false is not supported"), "only true is supported"));
        }
    }
    let local = local(fields, sliding, field, default)?;
    let global = one(&[full, scaling], fields, family.theta)?.without_score_factor();
    Ok(match (slides.window, slides.pattern.is_empty()) {
        (Some(_), true) => format!("{THETA} = {local:?}\n"),
        (Some(_), false) => format!("{}rope_local_theta = {local:?}\n", global.table()),
        (None, _) => global.table(),
    })
}

/// The base of layers with a window.
fn local(fields: &Fields, own: Option<Named>, field: Option<&str>, default: f64) -> Result<f64, HfError> {
    let own = own.map(|(name, inner)| {
        if let Some(scaling) = scaling(&name, &inner, fields)? {
            let hint = format!("only the layers of {} may have a scaled RoPE", FULL);
            return Err(refused(
                &format!("`{name}` has {} RoPE scaling, which is not supported", scaling.name()),
                &hint,
            ));
        }
        check_partial(&inner)?;
        Ok(inner.number(THETA)?.map(|theta| (format!("{name}.{THETA}"), theta)))
    });
    let own = own.transpose()?.flatten();
    let other = match field {
        Some(field) => fields.number(field)?.map(|theta| (field.to_owned(), theta)),
        None => None,
    };
    match (own, other) {
        (Some(own), Some(other)) if own.1 != other.1 => {
            Err(contradiction((&own.0, &json!(own.1)), (&other.0, &json!(other.1))))
        }
        (Some((_, theta)), _) | (None, Some((_, theta))) => Ok(theta),
        (None, None) => match fields.number(THETA)?.filter(|theta| field.is_none() && *theta != default) {
            // Version 4 takes it for all layers, version 5 not for those with a window.
            Some(_) => {
                let hint = format!("give `{PARAMETERS}` with one for {} and one for {}", FULL, SLIDING);
                Err(refused(&format!("`{THETA}` does not say whether layers with a window have it too"), &hint))
            }
            None => Ok(default),
        },
    }
}

/// The object of this name, if it has anything.
fn object<'a>(fields: &Fields<'a>, name: &str) -> Result<Option<Fields<'a>>, HfError> {
    match fields.get(name) {
        None => Ok(None),
        Some(Value::Object(inner)) if inner.is_empty() => Ok(None),
        Some(Value::Object(inner)) => Ok(Some(Fields(inner))),
        Some(_) => Err(fields.unsupported(name, "it should be an object")),
    }
}

/// The base and the scaling of one rotary embedding.
struct Rope {
    theta: f64,
    scaling: Option<RopeScalingConfig>,
}

impl Rope {
    /// That of families which take `mscale_all_dim` for cosines and sines alone.
    fn without_score_factor(mut self) -> Self {
        if let Some(RopeScalingConfig::Yarn { mscale_all_dim, .. }) = &mut self.scaling {
            *mscale_all_dim = None;
        }
        self
    }

    /// As keys of `[model]`.
    fn table(&self) -> String {
        let scaling = self.scaling.as_ref().map_or(String::new(), |scaling| format!("rope_scaling = {scaling}\n"));
        format!("{THETA} = {:?}\n{scaling}", self.theta)
    }
}

/// What objects and the field outside say of one rotary embedding.
fn one(objects: &[Option<Named>], fields: &Fields, default: f64) -> Result<Rope, HfError> {
    let mut thetas: Vec<(String, &Value)> = Vec::new();
    let mut scalings: Vec<(&Named, Option<RopeScalingConfig>)> = Vec::new();
    for named @ (name, inner) in objects.iter().flatten() {
        check_partial(inner)?;
        inner.number(THETA)?;
        thetas.extend(inner.get(THETA).map(|theta| (format!("{name}.{THETA}"), theta)));
        scalings.push((named, scaling(name, inner, fields)?));
    }
    if let [(a, first), (b, second)] = &scalings[..]
        && first != second
    {
        let value = |(_, inner): &Named| Value::Object(inner.0.clone());
        return Err(contradiction((&a.0, &value(a)), (&b.0, &value(b))));
    }
    fields.number(THETA)?;
    thetas.extend(fields.get(THETA).map(|theta| (THETA.to_owned(), theta)));
    if let [first, others @ ..] = &thetas[..]
        && let Some(other) = others.iter().find(|other| !is_same(other.1, first.1))
    {
        return Err(contradiction((&first.0, first.1), (&other.0, other.1)));
    }
    let theta = thetas.first().and_then(|(_, theta)| theta.as_f64()).unwrap_or(default);
    Ok(Rope { theta, scaling: scalings.into_iter().find_map(|(_, scaling)| scaling) })
}

fn check_partial(fields: &Fields) -> Result<(), HfError> {
    match fields.number(PARTIAL)? {
        Some(factor) if factor != 1.0 => Err(fields.unsupported(PARTIAL, "only 1.0 is supported")),
        _ => Ok(()),
    }
}

/// The scaling that an object of this name has.
fn scaling(name: &str, inner: &Fields, outer: &Fields) -> Result<Option<RopeScalingConfig>, HfError> {
    let (new, old) = (inner.text("rope_type")?, inner.text("type")?);
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        let field = |field| format!("{name}.{field}");
        return Err(contradiction((&field("rope_type"), &json!(new)), (&field("type"), &json!(old))));
    }
    let kind = new.or(old).unwrap_or("default");
    let unset = |field: &str| refused(&format!("`{name}.{field}` is not set"), &format!("a {kind} scaling needs it"));
    let needed = |field: &str| inner.number(field)?.ok_or_else(|| unset(field));
    let original_context = || {
        let both = (inner.count(ORIGINAL)?, outer.count(ORIGINAL)?);
        if let (Some(own), Some(outside)) = both
            && own != outside
        {
            let own = (&*format!("{name}.{ORIGINAL}"), &json!(own));
            return Err(contradiction(own, (ORIGINAL, &json!(outside))));
        }
        both.0.or(both.1).ok_or_else(|| unset(ORIGINAL))
    };
    match kind {
        "default" => Ok(None),
        "linear" => Ok(Some(RopeScalingConfig::Linear { factor: needed("factor")? })),
        "llama3" => Ok(Some(RopeScalingConfig::Llama3 {
            original_context: original_context()?,
            low_freq_factor: needed("low_freq_factor")?,
            high_freq_factor: needed("high_freq_factor")?,
            factor: needed("factor")?,
        })),
        "yarn" => {
            let factor = needed("factor")?;
            Ok(Some(RopeScalingConfig::Yarn {
                factor,
                original_context: original_context()?,
                beta_fast: inner.number("beta_fast")?.unwrap_or(32.0),
                beta_slow: inner.number("beta_slow")?.unwrap_or(1.0),
                attention_factor: attention_factor(inner, factor)?,
                mscale_all_dim: inner.number_or_zero(ALL_DIM)?.filter(|weight| *weight > 0.0),
                truncate: inner.flag("truncate")?.unwrap_or(true),
            }))
        }
        _ => {
            let field = if new.is_some() { "rope_type" } else { "type" };
            Err(inner.unsupported(field, "default, linear, llama3 and yarn are supported"))
        }
    }
}

/// What YaRN multiplies cosines and sines by, where it is not the usual: given itself, or by two weights of the logarithm.
fn attention_factor(inner: &Fields, factor: f64) -> Result<Option<f64>, HfError> {
    let weights = (inner.number_or_zero("mscale")?, inner.number_or_zero(ALL_DIM)?);
    let by = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
    Ok(match (inner.number("attention_factor")?, weights) {
        (Some(given), _) => Some(given),
        (None, (Some(own), Some(all))) if own > 0.0 && all > 0.0 => Some(by(own) / by(all)),
        (None, _) => None,
    })
}

/// The fields of a model's rotary embeddings, as both versions read them.
pub(super) fn write(family: &Family, model: &ModelConfig) -> Vec<(&'static str, Value)> {
    if !family.rotary {
        return Vec::new();
    }
    let scaling = model.rope_scaling.as_ref().map(written);
    let mut fields = vec![(THETA, json!(model.rope_theta))];
    // A family that scales its RoPE where nothing is said must hear that it does not.
    let unscaled = || family.scaling.as_ref().map(|_| Map::from_iter([("rope_type".to_owned(), json!("default"))]));
    fields.extend(scaling.clone().or_else(unscaled).map(|scaling| (SCALING, Value::Object(scaling))));
    let local = model.rope_local_theta.unwrap_or(model.rope_theta);
    match family.local_theta {
        Some((Some(field), _)) => fields.push((field, json!(local))),
        // Version 4 has one base for all layers, and version 5 must hear of both.
        Some((None, _)) => {
            let mut full = scaling.unwrap_or_else(|| Map::from_iter([("rope_type".to_owned(), json!("default"))]));
            full.insert(THETA.to_owned(), json!(model.rope_theta));
            let sliding = json!({ "rope_type": "default", THETA: local });
            fields.push((PARAMETERS, json!({ FULL: full, SLIDING: sliding })));
        }
        None => {}
    }
    fields
}

fn written(scaling: &RopeScalingConfig) -> Map<String, Value> {
    let value = match scaling {
        RopeScalingConfig::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            ORIGINAL: original_context,
        }),
        RopeScalingConfig::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScalingConfig::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
            mscale_all_dim,
            truncate,
        } => {
            let mut value = json!({
                "rope_type": "yarn",
                "factor": factor,
                ORIGINAL: original_context,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "truncate": truncate,
            });
            if let Some(attention_factor) = attention_factor {
                value["attention_factor"] = json!(attention_factor);
            }
            if let Some(weight) = mscale_all_dim {
                value[ALL_DIM] = json!(weight);
                // Code that does not know `attention_factor` divides by these.
                if *attention_factor == Some(1.0) {
                    value["mscale"] = json!(weight);
                }
            }
            value
        }
    };
    if let Value::Object(fields) = value { fields } else { Map::new() }
}
