//! Runs tests that need a GPU, and says of each that it was skipped where there is none. The test runner of the standard
//! library cannot: it hides what a test that passes has to say.
//!
//! It takes what `cargo test` and `cargo nextest` give it: a part of a name, `--exact`, `--list`, `--ignored`.

use lockstep_cuda::Gpu;
use std::panic::catch_unwind;
use std::process::ExitCode;
use std::time::Instant;

/// A test and its name.
pub type Test = (&'static str, fn());

/// The main function of such a test binary.
pub fn run(tests: &[Test]) -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let given = |option: &str| args.iter().any(|arg| arg == option);
    // Options that stand before a value of their own.
    let valued = ["--format", "--test-threads", "--color", "--skip", "-Z"];
    let plain = |i: &usize| !args[*i].starts_with('-') && (*i == 0 || !valued.contains(&args[i - 1].as_str()));
    let filters: Vec<&String> = (0..args.len()).filter(plain).map(|i| &args[i]).collect();
    let named = |name: &str| filters.iter().any(|f| if given("--exact") { name == *f } else { name.contains(*f) });
    // No test is marked as ignored.
    let chosen = tests.iter().filter(|(name, _)| !given("--ignored") && (filters.is_empty() || named(name)));
    if given("--list") {
        chosen.for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let missing = Gpu::check().err().map(|error| error.to_string());
    let [mut passed, mut failed, mut skipped] = [0; 3];
    for (name, test) in chosen {
        if let Some(why) = &missing {
            println!("test {name} ... skipped: no CUDA device ({why})");
            skipped += 1;
            continue;
        }
        let start = Instant::now();
        let ok = catch_unwind(test).is_ok();
        println!("test {name} ... {} ({:.1} s)", if ok { "ok" } else { "FAILED" }, start.elapsed().as_secs_f64());
        *(if ok { &mut passed } else { &mut failed }) += 1;
    }
    println!("\ntest result: {passed} passed; {failed} failed; {skipped} skipped");
    ExitCode::from(u8::from(failed > 0))
}
