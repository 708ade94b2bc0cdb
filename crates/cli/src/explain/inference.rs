//! `--inference`: what generation takes, by arithmetic.

use crate::table::table;
use lockstep_ir::units::{self, counted, thousands};
use lockstep_plan::{CacheKind, DecodeBound, InferenceAccount, InferenceOnGpu};

pub(super) fn as_text(account: &InferenceAccount) -> String {
    let InferenceAccount { context, weight_bytes, kinds, text_bytes, .. } = account;
    let mut text = format!(
        "weights {}\na token takes {}, and {} more for each position that it sees\n\n",
        units::bytes(*weight_bytes),
        units::flops(account.token_flops),
        units::flops(account.position_flops),
    );
    let row = |kind: &CacheKind| {
        let mark = if kind.kept { "yes" } else { "" };
        vec![kind.name.clone(), thousands(kind.token_bytes), mark.to_owned()]
    };
    let rows: Vec<_> = kinds.iter().map(row).collect();
    text.push_str(&table(&["KV cache of this model", "bytes a token", "kept"], &rows));
    text.push_str(&format!(
        "a text of {} tokens has a cache of {}\n",
        thousands(*context as u64),
        units::bytes(*text_bytes)
    ));
    match &account.gpus {
        Some(gpus) => text.push_str(&on_gpus(gpus, *context)),
        None => text.push_str("\nwith --gpu h100, say: how many texts fit, and what bounds their speed\n"),
    }
    text
}

fn on_gpus(on: &InferenceOnGpu, context: usize) -> String {
    let InferenceOnGpu { gpu, gpus, texts, balanced_texts, .. } = on;
    let split = if *gpus > 1 { format!(" (the fewest that hold it: tp {gpus})") } else { String::new() };
    let mut text = format!(
        "\n{} {gpu}{split}: {} of {} tokens fit beside the weights\n\
         reading prompts: at most {} tokens/s, bound by matmuls\n\
         decoding: bound by memory up to about {} short texts at once;\n\
         with texts that are half written:\n",
        gpus,
        counted(*texts as usize, "text"),
        thousands(context as u64),
        units::count(on.prefill_tokens_per_s as u64),
        thousands(balanced_texts.round() as u64),
    );
    let row = |bound: &DecodeBound| {
        vec![
            thousands(bound.texts),
            format!("{:.2} ms", 1e3 * bound.seconds),
            units::count(bound.tokens_per_s as u64),
            format!("{:.0}%", 100.0 * bound.cache_share),
            if bound.by_memory { "memory" } else { "matmuls" }.to_owned(),
        ]
    };
    let rows: Vec<_> = on.decode.iter().map(row).collect();
    text.push_str(&table(&["texts", "a token", "tokens/s", "of it K and V", "bound by"], &rows));
    text
}
