//! `lockstep data export`.

use super::inspect::{Inspected, open};
use crate::Format;
use crate::failure::Result;
use crate::progress::Progress;
use crate::table::table;
use crate::train::on_interrupt;
use lockstep_data::{ExportedTokens, export};
use lockstep_infer::RunCorpus;
use lockstep_ir::units;
use lockstep_ir::units::thousands;
use serde_json::json;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A run directory, a folder of prepared data, or a config file.
    #[arg(value_name = "RUN_OR_DATA")]
    path: PathBuf,
    /// The folder that the files go to: train.bin, train.idx, validation.bin, validation.idx; with a corpus' name and - before each
    /// where there are several.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// How to print the result.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: Args) -> Result<()> {
    let Inspected { data, .. } = open(&args.path)?;
    let stop = on_interrupt()?;
    let mut progress = Progress::new(0);
    if data.corpora().iter().any(|corpus| corpus.data.spec().is_masked()) {
        crate::warn(&["prompts are written as ordinary text: Megatron's files do not tell them apart".to_owned()]);
    }
    let parts = || {
        data.corpora().iter().flat_map(|RunCorpus { name, data, .. }| {
            let named = |split: &str| if name.is_empty() { split.to_owned() } else { format!("{name}-{split}") };
            let validation = data.validation().map(|tokens| (named("validation"), tokens));
            [Some((named("train"), data.train())), validation]
                .into_iter()
                .flatten()
                .map(|(name, tokens)| (name, tokens, data.vocabulary()))
        })
    };
    let total = parts().map(|(_, tokens, _)| tokens.len()).sum();
    let (mut before, mut written) = (0, Vec::new());
    for (name, tokens, vocabulary) in parts().filter(|(_, tokens, _)| !tokens.is_empty()) {
        let heard = &mut |done| {
            progress.work("writing tokens", before + done, total, |n| format!("{} tokens", units::count(n)));
        };
        let exported = export(tokens, vocabulary, &args.out, &name, &stop, heard);
        if exported.is_err() {
            progress.clear();
        }
        written.push(exported?);
        before += tokens.len();
    }
    progress.clear();
    let file = |e: &ExportedTokens| json!({ "index": e.index, "documents": e.documents, "tokens": e.tokens, "bytes": e.bytes });
    let row = |e: &ExportedTokens| {
        let name = e.index.with_extension("{bin,idx}").display().to_string();
        vec![name, thousands(e.documents), thousands(e.tokens), units::bytes(e.bytes)]
    };
    let rows = || written.iter().map(row).collect::<Vec<_>>();
    args.format.print(
        || json!({ "files": written.iter().map(file).collect::<Vec<_>>() }),
        || table(&["files", "documents", "tokens", "size"], &rows()),
    )
}
