//! Objects in buckets that speak the protocol of Amazon S3: `s3://bucket/key`.
//!
//! [`Buckets`] sends requests and reads objects in blocks, which a thread pool fetches ahead and a folder of bounded size keeps;
//! [`BucketFile`] is one object that is read like a file; uploads are in parts. Requests are signed with AWS Signature Version 4 by
//! credentials from where the `aws` command looks for them ([`BucketSettings`]).
//!
//! What fails in a way that may pass is tried again, with pauses that double and jitter, until nothing has come for
//! [`Limits::give_up`]. A body that ends too early is read on from where it ended. An object that changes while it is read
//! is an error: every range is checked against the ETag that the object was opened with.
//!
//! HTTP is `ureq`: blocking, on the caller's thread. This crate knows nothing of tokens, checkpoints and configs.

mod address;
mod blocks;
mod cache;
mod client;
mod error;
mod file;
mod http;
mod settings;
mod sign;
mod upload;
mod xml;

pub use address::{BucketAddress, SCHEME, is_address};
pub use client::{Buckets, Listed};
pub use error::{BucketError, BucketFault};
pub use file::{BucketFile, BucketReader, Reads};
pub use settings::{BucketSettings, Credentials, Limits};
