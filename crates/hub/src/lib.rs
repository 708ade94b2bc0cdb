//! Names on the Hugging Face Hub as folders of this machine.
//!
//! `hf:org/name`, `hf:org/name@revision` and `hf:datasets/org/name/path` are looked up in the local cache first, in the layout of
//! `huggingface_hub`, and else downloaded into it, so that both programs share what either has fetched. What was fetched once needs
//! no connection again. Every file is checked against the hub's checksum before it appears in the cache.
//!
//! This crate owns names, the cache and HTTP. It knows nothing of models, configs and terminals.
//!
//! - `name.rs`: how names are written.
//! - `settings.rs`: the environment variables of `huggingface_hub`.
//! - `cache.rs`: the folders and links of the cache.
//! - `listing.rs`: the files of a revision, and which of them are wanted.
//! - `http.rs`: requests, redirects, the token, retries.
//! - `download.rs`: one file: resumed, checked, put into place.
//! - `hub.rs`: all of it together.
#![forbid(unsafe_code)]

mod cache;
mod download;
mod error;
mod http;
mod hub;
mod listing;
mod name;
mod settings;

pub use error::HubError;
pub use hub::{Fetched, Hub, HubProgress};
pub use listing::HubFiles;
pub use name::{HubName, PREFIX};
pub use settings::HubSettings;
