//! `quantization_config`: how weights are kept in fewer bits. Those of a family that has such files are read, all others refused.

use super::HfError;
use super::families::{Family, QUANTIZATION};
use super::fields::{Fields, refused};
use serde_json::{Map, Value, json};

/// Which of a file's weights are in fewer bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantised {
    /// Experts in mxfp4.
    Mxfp4,
    /// Matrices in fp8, with a scale for each block of 128 × 128.
    Fp8,
}

impl Quantised {
    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Quantised::Mxfp4 => "mxfp4",
            Quantised::Fp8 => "fp8",
        }
    }
}

/// What fp8 may say of itself: the field, the values that are read, and the first of them where it is not there.
const FP8: [(&str, &[&str]); 4] = [
    ("fmt", &["e4m3"]),
    ("activation_scheme", &["dynamic"]),
    // How scales were rounded. They are read as they are.
    ("scale_fmt", &["float", "ue8m0"]),
    ("expert_dtype", &["fp8"]),
];
const BLOCK: &str = "weight_block_size";
/// What says again which tensors are in fp8, as their files do, and how transformers keeps them in memory.
const WITHOUT_EFFECT: [&str; 5] =
    ["quant_method", "modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"];

/// How the weights are quantised, if they are.
pub(super) fn read(family: &Family, fields: &Fields) -> Result<Option<Quantised>, HfError> {
    let Some(found) = fields.get(QUANTIZATION) else { return Ok(None) };
    match found["quant_method"].as_str() {
        Some("mxfp4") if family.mxfp4 => Ok(Some(Quantised::Mxfp4)),
        Some("fp8") if family.fp8 => match found {
            Value::Object(inner) => check_fp8(inner).map(|()| Some(Quantised::Fp8)),
            _ => Ok(None),
        },
        _ => {
            let taken = match (family.mxfp4, family.fp8) {
                (true, _) => ", and mxfp4",
                (_, true) => ", and fp8",
                _ => "",
            };
            Err(fields.unsupported(QUANTIZATION, &format!("only models without it are supported{taken}")))
        }
    }
}

fn check_fp8(fields: &Map<String, Value>) -> Result<(), HfError> {
    let wrong = |name: &str, value: &Value, hint: &str| {
        Err(refused(&format!("`{QUANTIZATION}.{name}` = {value} is not supported"), hint))
    };
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        if let Some((_, taken)) = FP8.iter().find(|(field, _)| field == name) {
            if !value.as_str().is_some_and(|text| taken.contains(&text)) {
                return wrong(name, value, &format!("only {} is supported", taken.join(" or ")));
            }
        } else if name == BLOCK {
            if *value != json!([128, 128]) {
                return wrong(name, value, "only [128, 128] is supported");
            }
        } else if !WITHOUT_EFFECT.contains(&name.as_str()) {
            return wrong(name, value, "what it says of weights in fp8 is not known: save the weights in bf16");
        }
    }
    Ok(())
}
