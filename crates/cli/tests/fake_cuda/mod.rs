//! A CUDA installation without a device, compiled from `fake.c` and the files beside it: which libraries it has, and what goes wrong in it.

use crate::common::{CONFIG, Place};
use std::path::Path;
use std::process::{Command, Output};

/// The libraries, by the names that Lockstep looks for.
pub const LIBRARIES: [&str; 6] =
    ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libnvidia-ml.so.1", "libnccl.so.2"];

/// A place with a fake installation in it.
pub struct Fake {
    pub place: Place,
}

impl Fake {
    /// With all libraries but these.
    pub fn without(missing: &[&str]) -> Self {
        let place = Place::new();
        // Heads as wide as cuDNN wants them.
        place.config(&CONFIG.replace("dim = 48", "dim = 64"));
        std::fs::create_dir(place.path("cuda")).unwrap();
        let built = place.path("fake.so");
        compile(&["-shared", "-fPIC"], &["fake.c", "device.c", "nccl.c"], &built);
        for name in LIBRARIES.iter().filter(|name| !missing.contains(name)) {
            std::fs::copy(&built, place.path("cuda").join(name)).unwrap();
        }
        Self { place }
    }

    /// A whole one.
    pub fn new() -> Self {
        Self::without(&[])
    }

    /// A command that finds the fake and nothing of the user's own.
    pub fn command(&self, args: &[&str], faults: &[(&str, &str)]) -> Command {
        let mut command = self.place.command(args);
        for variable in ["CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"] {
            command.env_remove(variable);
        }
        command.env("LOCKSTEP_CUDA_LIBRARIES", self.place.path("cuda"));
        command.env("LOCKSTEP_CACHE", self.place.path("cache"));
        command.env("FAKE_NCCL_WORLD", self.place.path("world"));
        command.envs(faults.iter().copied());
        command
    }

    /// Runs a command that must succeed, and gives what it printed on both streams.
    pub fn ok(&self, args: &[&str], faults: &[(&str, &str)]) -> String {
        let output = self.command(args, faults).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    }

    /// Runs a command that must fail with this exit code and one error, and gives that.
    pub fn fails(&self, code: i32, args: &[&str], faults: &[(&str, &str)]) -> String {
        let output = self.command(args, faults).output().unwrap();
        let text = text(&output);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(!text.contains("panicked") && text.matches("error: ").count() == 1, "{text}");
        text[text.find("error: ").unwrap()..].to_owned()
    }
}

/// Compiles these sources of this folder.
pub fn compile(options: &[&str], sources: &[&str], built: &Path) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_cuda");
    let mut command = Command::new("cc");
    command.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(built).args(options);
    let compiled = command.args(sources.iter().map(|file| folder.join(file))).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}
