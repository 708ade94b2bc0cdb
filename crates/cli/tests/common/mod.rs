//! Runs the `lockstep` binary in a folder of its own.
// Each test binary uses a part of this.
#![allow(dead_code)]

use lockstep_host::Devices;
use lockstep_ir::DType;
use lockstep_plan::Target;
use lockstep_sim::machine::{Family, Point, Table};
use lockstep_sim::{MachineProfile, Setting};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A folder with a small corpus and a small config.
pub struct Place {
    dir: tempfile::TempDir,
}

/// The config that tests start from.
pub const CONFIG: &str = "\
[model]
vocab_size = 256
layers = 2
dim = 48
heads = 4
kv_heads = 2
ffn = 96
tied_embeddings = true

[data]
paths = [\"corpus\"]

[train]
steps = 20
seq = 32
global_batch = 8
validate_every = 5

[optimizer]
lr = 3e-3
warmup_steps = 4

[checkpoint]
every = 5
";

impl Place {
    /// With the usual corpus and config.
    pub fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        std::fs::create_dir(place.path("corpus")).unwrap();
        for file in 0..8u64 {
            let line = |i: u64| format!("line {i}: the square of {} is {}.\n", i % 97, (i % 97) * (i % 97));
            let text: String = (0..180).map(|i| line(i * 7 + file * 31)).collect();
            std::fs::write(place.path(&format!("corpus/{file}.txt")), text).unwrap();
        }
        place.config(CONFIG);
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Replaces the config.
    pub fn config(&self, text: &str) {
        std::fs::write(self.path("run.toml"), text).unwrap();
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        // Not what the user has measured.
        command.env("LOCKSTEP_HARDWARE", self.path("hardware")).env("LOCKSTEP_MACHINES", self.path("machines"));
        // Nor libraries of CUDA: with NVRTC among them every `doctor` would compile all kernels, as the tests of lockstep-cuda do once.
        command.env_remove("LOCKSTEP_CUDA_LIBRARIES");
        // Nor a GPU that the machine has: ranks would look for theirs first, and take their time.
        command.env("CUDA_VISIBLE_DEVICES", "");
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs a command that must succeed and gives what it printed.
    pub fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command that must fail with this exit code and gives its error, this folder's name left out.
    pub fn fails(&self, code: i32, args: &[&str]) -> String {
        let output = self.run(args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(!text.contains("panicked"), "{text}");
        let start = text.find("error: ").unwrap_or_else(|| panic!("{text}"));
        let real = self.dir.path().canonicalize().unwrap();
        let text = text[start..].replace(&format!("{}/", real.display()), "");
        text.replace(&format!("{}/", self.dir.path().display()), "")
    }

    /// Starts the command of each attempt, kills it after a while, and again until one ends by itself.
    pub fn kill_until_done<'a>(&self, args: impl Fn(u64) -> Vec<&'a str>) {
        let mut kills = 0;
        for attempt in 0u64.. {
            let mut child = self.command(&args(attempt)).stderr(Stdio::null()).spawn().unwrap();
            // The first attempts end early on a fast machine too; later ones get more time, so that a busy one makes progress.
            let most = if attempt < 4 { 120 } else { 400 + 40 * attempt };
            let wait = 30 + lockstep_ir::counter::bits(5, attempt) % most;
            std::thread::sleep(Duration::from_millis(wait));
            if let Some(status) = child.try_wait().unwrap() {
                assert!(status.success());
                break;
            }
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
            assert!(kills < 200, "the run makes no progress");
        }
        assert!(kills > 2, "the run ended before it could be killed");
    }

    /// The lines of a run's metrics without the timings: step, loss, gradient norm, learning rate, validation loss.
    pub fn trajectory(&self, run_dir: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.path(run_dir).join("metrics.jsonl")).unwrap();
        let line = |line: &str| {
            let v: Value = serde_json::from_str(line).unwrap();
            format!("{} {} {} {} {}", v["step"], v["loss"], v["grad_norm"], v["lr"], v["val_loss"])
        };
        text.lines().map(line).collect()
    }
}

/// Flips one byte in the middle of a file.
pub fn damage(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

/// What takes so long hangs: no load makes anything that a test waits for this slow.
pub const HANG: Duration = Duration::from_secs(600);

/// What has failed ends within ten seconds on a machine that starts a run in one; beside a load all of it takes as much longer as the
/// start of the same run took.
pub fn soon(start: Duration) -> Duration {
    10 * start.max(Duration::from_secs(1))
}

/// Waits until something is so, and gives how long that took; says what never came where that hangs.
pub fn wait_until(what: &str, mut is: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < HANG, "{what}: not within {HANG:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    begun.elapsed()
}

/// Steps that a run has in its metrics.
pub fn steps(place: &Place, dir: &str) -> usize {
    std::fs::read_to_string(place.path(dir).join("metrics.jsonl")).unwrap_or_default().lines().count()
}

/// Waits until a run has this many lines of metrics, and gives how long that took.
pub fn wait_for_steps(place: &Place, dir: &str, count: usize) -> Duration {
    wait_until(&format!("step {count} of {dir}"), || steps(place, dir) >= count)
}

/// Sends a signal to a process that a test has started.
pub fn signal(pid: i32, signal: i32) {
    // SAFETY: a signal to a process that this test has started.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// A port that nobody uses: below those that the system gives out by itself, so that nobody gets it by chance either.
pub fn free_port() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let port = 10_000 + (std::process::id() as usize * 64 + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        if std::net::TcpListener::bind(("127.0.0.1", port as u16)).is_ok() {
            return port.to_string();
        }
    }
}

/// Sets the first number of a tensor in a safetensors file of f32.
pub fn plant(path: &Path, tensor: &str, value: f32) {
    let mut bytes = std::fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    assert_eq!(json[tensor]["dtype"], "F32", "{json}");
    let at = 8 + header + json[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
}

/// A profile of this machine whose rates nobody measured: matmuls at 1 TFLOP/s.
pub fn planted() -> MachineProfile {
    let points = vec![Point { size: vec![64.0, 64.0, 64.0, 1.0, 1.0], seconds: 2.0 * 64f64.powi(3) / 1e12 }];
    let table = Table { op: "linear".into(), dtype: DType::F32, family: Family::Matmul, points };
    let setting = Setting { threads: 1, tables: vec![table], ..Setting::nominal() };
    let processor = Devices::new().processor(Target::Cpu).unwrap();
    MachineProfile { name: "planted".into(), processor, saved_unix_s: 1, settings: vec![setting] }
}
