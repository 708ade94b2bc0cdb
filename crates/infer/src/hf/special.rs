//! The tokens that end, begin and pad a text, as the files beside a Hugging Face model name them.

use super::{CONFIG, GENERATION, Kept, SPECIAL_TOKENS, TOKENIZER, TOKENIZER_CONFIG};
use lockstep_data::{DataError, TokenNames};
use serde_json::{Value, json};
use std::path::Path;

/// What the files of a folder say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpecialTokens {
    /// The EOS token, where the tokenizer would take another by itself.
    pub(crate) eos: Option<String>,
    /// The BOS token, where the tokenizer adds one to each text.
    pub(crate) bos: Option<String>,
    /// What contradicts what, a line each.
    pub(crate) warnings: Vec<String>,
}

/// Kinds of tokens: what fields are called after, and what such a token does.
const KINDS: [(&str, &str); 3] = [("eos", "ends a text with"), ("bos", "begins a text with"), ("pad", "pads with")];

/// Files that name a token by its text, and files that name it by its number; the first that says one counts.
const BY_TEXT: [&str; 2] = [TOKENIZER_CONFIG, SPECIAL_TOKENS];
const BY_NUMBER: [&str; 2] = [GENERATION, CONFIG];

impl SpecialTokens {
    /// Those of the files beside a `tokenizer.json`.
    pub(crate) fn read(folder: &Path, tokenizer: &[u8], kept: &Kept) -> Result<Self, DataError> {
        let names = TokenNames::of_json(&folder.join(TOKENIZER), tokenizer)?;
        let mut special = SpecialTokens::default();
        let (template, adds) = (template_bos(tokenizer), kept.json(TOKENIZER_CONFIG)["add_bos_token"].as_bool());
        for (kind, does) in KINDS {
            let mut said: Vec<(&str, Vec<u32>)> = Vec::new();
            for file in BY_TEXT {
                let Some(token) = text_of(&kept.json(file)[format!("{kind}_token")]) else { continue };
                match names.id(&token) {
                    Some(id) => said.push((file, vec![id])),
                    None => special.warnings.push(format!(
                        "{}: {file} {does} {token:?}, which {TOKENIZER} does not have: it is passed over",
                        folder.display()
                    )),
                }
            }
            for file in BY_NUMBER {
                let ids = ids_of(&kept.json(file)[format!("{kind}_token_id")]);
                said.extend(Some((file, ids)).filter(|(_, ids)| !ids.is_empty()));
            }
            let Some((first, others)) = said.split_first() else { continue };
            let chosen = first.1[0];
            for (file, ids) in others.iter().filter(|(_, ids)| !ids.contains(&chosen)) {
                let (own, other) = (shown(&names, &first.1[..1]), shown(&names, ids));
                let counts = match kind {
                    "eos" => format!("a run that starts from it takes {own}, and data.eos_token another"),
                    _ => "an export keeps both".to_owned(),
                };
                special.warnings.push(format!(
                    "{}: {} {does} {own}, {file} with {other}: {counts}",
                    folder.display(),
                    first.0
                ));
            }
            if kind == "eos" && names.usual_eos() != Some(chosen) {
                special.eos = names.token(chosen);
            }
            if kind == "bos" && adds == Some(true) {
                special.bos = names.token(chosen);
            }
        }
        if adds == Some(true) && special.bos.is_none() {
            special.warnings.push(format!(
                "{}: {TOKENIZER_CONFIG} has add_bos_token, and no file names the token: documents begin with none; data.bos_token names one",
                folder.display()
            ));
        }
        if adds.is_none() {
            special.bos = template.filter(|token| names.id(token).is_some());
        }
        Ok(special)
    }
}

/// The token that the post-processor of a `tokenizer.json` puts before a text, if it does.
pub(super) fn template_bos(tokenizer: &[u8]) -> Option<String> {
    let file: Value = serde_json::from_slice(tokenizer).ok()?;
    let processor = &file["post_processor"];
    let several = processor["processors"].as_array().into_iter().flatten();
    std::iter::once(processor).chain(several).find_map(|processor| {
        let is_template = processor["type"] == "TemplateProcessing";
        let token = processor["single"][0]["SpecialToken"]["id"].as_str().filter(|_| is_template)?;
        Some(token.to_owned())
    })
}

/// A token as `tokenizer_config.json` has it: its text, or an object with it.
pub(crate) fn text_of(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// A number, or a list of them.
pub(super) fn ids_of(value: &Value) -> Vec<u32> {
    let ids = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

fn shown(names: &TokenNames, ids: &[u32]) -> String {
    let one =
        |id: &u32| names.token(*id).map_or_else(|| format!("token {id}"), |token| format!("{token:?} (token {id})"));
    ids.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Makes a token one of the EOS tokens of `config.json` or `generation_config.json`, the first where it is none. Says whether that
/// changed anything.
pub(super) fn put_eos_id(file: &mut Value, eos: u32) -> bool {
    let ids = ids_of(&file["eos_token_id"]);
    match (ids.contains(&eos), &ids[..]) {
        (true, _) => return false,
        (false, []) => file["eos_token_id"] = json!(eos),
        (false, others) => file["eos_token_id"] = json!([&[eos], others].concat()),
    }
    true
}

/// Makes a token the BOS token of `tokenizer_config.json`, or says that none is added; `template` is the one that the tokenizer's
/// post-processor adds. Says whether that changed anything.
pub(super) fn put_bos_text(file: &mut Value, bos: Option<&str>, template: Option<&str>) -> bool {
    let adds = file["add_bos_token"].as_bool();
    let named = text_of(&file["bos_token"]);
    let added = match adds {
        Some(adds) => named.as_deref().filter(|_| adds),
        None => template,
    };
    if added == bos {
        return false;
    }
    file["add_bos_token"] = json!(bos.is_some());
    if bos.is_some() && named.as_deref() != bos {
        file["bos_token"] = json!(bos);
    }
    true
}

/// Makes a token the EOS token of `tokenizer_config.json` or `special_tokens_map.json`. Says whether that changed anything.
pub(super) fn put_eos_text(file: &mut Value, eos: &str) -> bool {
    if text_of(&file["eos_token"]).as_deref() == Some(eos) {
        return false;
    }
    file["eos_token"] = json!(eos);
    true
}
