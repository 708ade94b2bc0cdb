//! The helpers of the tests of refusals.

use lockstep_config::Config;
use lockstep_ir::Hint;

/// The shortest config.
pub const TINY: &str = "[model]\npreset = \"llama-15m\"\n";

/// Parses `text` as `run.toml` and compares the error it gives.
pub fn check(text: &str, expected: &str) {
    check_set(text, &[], expected);
}

/// The same with overrides from the command line.
pub fn check_set(text: &str, overrides: &[&str], expected: &str) {
    let overrides: Vec<_> = overrides.iter().map(|s| s.to_string()).collect();
    let error = Config::parse(text, "run.toml", &overrides).expect_err("the config must be refused");
    assert_eq!(error.with_hint(), expected.trim_matches('\n'), "\nrendered:\n{error}\n");
}
