//! Text to packed tokens, and packed tokens to training samples.
//!
//! [`prepare`] reads files and writes a folder of token shards and a `data.json`; [`Prepared`] opens such a folder;
//! [`Shard`] is one memory-mapped file of tokens, [`IndexedTokens`] one of Megatron's (`.bin` and `.idx`, read where they are, and
//! written by [`export`]), and [`TokenStream`] several of them end to end; [`Sampler`] says which
//! tokens the n-th sample of a run holds, over one corpus or a mixture. The way of the text:
//!
//! ```text
//! scan (which files) → source (stretches of text) → workers (tokens, on all cores) → partial (shards) → Prepared
//! ```
//!
//! Records may be conversations, which a chat template makes text of: [`Chat`].
//!
//! Every choice here (which text is held out, which sample comes when) is a pure function of a seed and a logical
//! index, so any layout of ranks sees the same tokens in the same order.
//!
//! This crate knows nothing of models, of the training loop, of ranks or of `run.toml`.

mod chat;
mod cut;
mod error;
mod guard;
mod holdout;
mod indexed;
mod indexed_writer;
mod mix;
mod new_file;
mod output;
mod partial;
mod prepare;
mod prepared;
mod sampler;
mod scan;
mod shard;
mod shard_writer;
mod source;
mod spec;
mod special;
mod stop;
mod stream;
mod token_file;
mod tokenizer;
mod workers;

pub use chat::{Chat, ChatSpec, Conversation, TrainOn};
pub use error::{DataError, DataHint, DataSetting, Result, ShardFault};
pub use indexed::{IndexedTokens, token_files};
pub use indexed_writer::{ExportedTokens, export};
pub use prepare::{
    Excerpt, PrepareOptions, Progress, Survey, excerpt, is_current, is_same_text, prepare, prepare_with, survey,
};
pub use prepared::{Prepared, SplitSummary};
pub use sampler::{Corpus, SamplePlace, Sampler};
pub use shard::Shard;
pub use shard_writer::ShardSummary;
pub use spec::PrepareSpec;
pub use special::SpecialInText;
pub use stream::TokenStream;
pub use token_file::{Document, Origin, TokenFile};
pub use tokenizer::{TokenNames, Tokenizer, TokenizerSpec};

/// Number of distinct tokens of byte-level text.
pub const BYTE_VOCABULARY: u32 = 256;

/// The token after each document of byte-level text.
pub const EOS_BYTE: u8 = 0;
