//! Says what the binary is built from: the commit, whether sources had changes beyond it, the profile, the compiler.

use std::process::Command;

/// What a command prints, in a line; none where it cannot be run.
fn told(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

fn main() {
    let set = |name: &str, value: Option<String>| println!("cargo::rustc-env={name}={}", value.unwrap_or_default());
    set("LOCKSTEP_COMMIT", told("git", &["rev-parse", "HEAD"]));
    let changed = told("git", &["status", "--porcelain", "--", ".."]);
    set("LOCKSTEP_DIRTY", changed.map(|text| (!text.is_empty()).to_string()));
    let profile = ["PROFILE", "TARGET"].map(|name| std::env::var(name).unwrap_or_default());
    set("LOCKSTEP_PROFILE", Some(profile.join(" ")));
    set("LOCKSTEP_RUSTC", told(&std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into()), &["--version"]));
    // Of all crates: a change of any of them may make the sources dirty, or clean.
    println!("cargo::rerun-if-changed=..");
    for file in ["HEAD", "logs/HEAD"] {
        if let Some(path) = told("git", &["rev-parse", "--git-path", file]) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
}
