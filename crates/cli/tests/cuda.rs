//! What goes wrong on a GPU ends in one clear error that says what to do, and loses no checkpoint. No test here needs a GPU:
//! a fake driver stands in for one.

mod common;
mod fake_cuda;

use fake_cuda::Fake;
use serde_json::Value;
use std::io::Write;

/// A short run in bf16 with a checkpoint every second step.
const TRAIN: [&str; 16] = [
    "train",
    "run.toml",
    "--run-dir",
    "run",
    "--set",
    "train.device=cuda",
    "--set",
    "precision.policy=bf16",
    "--set",
    "train.steps=12",
    "--set",
    "checkpoint.every=2",
    "--set",
    "train.validate_every=6",
    "--set",
    "train.validation_sequences=8",
];

/// The same, with another device.
fn train_on(device: &'static str) -> Vec<&'static str> {
    TRAIN.iter().map(|arg| if *arg == "train.device=cuda" { device } else { arg }).collect()
}

/// Steps of the checkpoints of a run.
fn checkpoints(fake: &Fake) -> Vec<u64> {
    let entries = std::fs::read_dir(fake.place.path("run/checkpoints")).into_iter().flatten();
    let step = |e: std::fs::DirEntry| e.file_name().to_str()?.strip_prefix("step-")?.parse().ok();
    let mut steps: Vec<u64> = entries.filter_map(|e| step(e.unwrap())).collect();
    steps.sort();
    steps
}

fn steps_of_metrics(fake: &Fake) -> Vec<u64> {
    let lines = fake.place.trajectory("run");
    lines.iter().map(|line| line.split(' ').next().unwrap().parse().unwrap()).collect()
}

/// A machine with libraries of its own in places where every program looks cannot be made to miss them.
fn installed_here(fake: &Fake, what: &str) -> bool {
    let report = fake.ok(&["doctor"], &[]);
    let found = report.lines().any(|line| line.starts_with(what) && line.contains(" found "));
    if found {
        // Past the test runner, which hides what a test that passes prints.
        let _ = writeln!(std::io::stderr(), "skipped: this machine has {what} itself");
    }
    found
}

#[test]
fn doctor_reports_a_whole_installation() {
    let fake = Fake::new();
    let report = fake.ok(&["doctor"], &[]);
    for part in [
        "speaks CUDA 13.0",
        "NVIDIA H200 (fake), compute capability 9.0, 132 multiprocessors, 1.0 GiB, 1.0 GiB free",
        "500 W, 1800 MHz, 50 °C",
        "sources compiled for sm_90",
        "ready to train on the GPU: train.device = \"cuda\"",
    ] {
        assert!(report.contains(part), "{part} is not in\n{report}");
    }
    assert!(!report.contains("missing"), "{report}");
}

#[test]
fn experts_train_on_a_device() {
    let fake = Fake::new();
    let experts = ["model.architecture=mixtral", "model.experts=4", "model.experts_per_token=2"];
    let experts: Vec<&str> = experts.iter().flat_map(|key| ["--set", key]).collect();
    // Gate and up are in blocks that the tensor cores take, down is not.
    let text = fake.ok(&[&TRAIN[..], &experts].concat(), &[("FAKE_CUDA_COUNT", "cuTensorMapEncodeTiled")]);
    assert!(text.contains("finished 12 steps"), "{text}");
    assert!(text.contains("cuTensorMapEncodeTiled was called"), "{text}");
}

#[test]
fn a_run_steps_saves_and_finishes() {
    let fake = Fake::new();
    let text = fake.ok(&TRAIN, &[]);
    assert!(text.contains("finished 12 steps") && !text.contains("not finite"), "{text}");
    assert_eq!(steps_of_metrics(&fake), (1..=12).collect::<Vec<_>>());
    assert_eq!(checkpoints(&fake).last(), Some(&12));
    // What the device tells is in the first lines, in every line of metrics, and in the progress line.
    let lines = std::fs::read_to_string(fake.place.path("run/metrics.jsonl")).unwrap();
    let told = r#""gpu_power_w":500.0,"gpu_temperature_c":50,"gpu_sm_clock_mhz":1800,"gpu_utilisation_percent":0"#;
    assert!(lines.lines().all(|line| line.contains(told)), "{lines}");
    assert!(text.contains("\nGPU memory: arena 0.") && text.contains(" left, 500 W, "), "{text}");
    // In fp32 the peak is measured too, and what is finished can be generated from and evaluated.
    fake.ok(&["train", "run.toml", "--run-dir", "fp32", "--set", "train.device=cuda", "--set", "train.steps=4"], &[]);
    fake.ok(&["eval", "run", "--validation"], &[]);
}

/// The lines of a run's metrics, and its events.
fn recorded(fake: &Fake) -> [Vec<Value>; 2] {
    ["metrics", "events"].map(|name| {
        let text = std::fs::read_to_string(fake.place.path(&format!("run/{name}.jsonl"))).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    })
}

/// A device that takes 500 W: lines that have a reading have the joules of its steps, and the run the kilowatt-hours of all starts.
#[test]
fn joules_of_steps_and_tokens_and_kilowatt_hours_of_a_run_come_from_the_counter() {
    let fake = Fake::new();
    let none = fake.place.path("nothing");
    std::fs::create_dir(&none).unwrap();
    let none = ("LOCKSTEP_POWERCAP", none.to_str().unwrap());
    let kwh = |event: &Value| event["energy_kwh"].as_f64().unwrap();
    let check = || {
        let [lines, events] = recorded(&fake);
        let read: Vec<&Value> = lines.iter().filter(|line| line["power_w"].is_number()).collect();
        for line in &read {
            let number = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key}: {line}"));
            // Whoever is kept off its core between counter and clock reads another power; what all readings add up to is held below.
            assert!((number("power_w") / 500.0 - 1.0).abs() < 0.5, "{line}");
            // Of 8 sequences of 32 tokens.
            assert!((number("gpu_energy_j") / (256.0 * number("energy_per_token_j")) - 1.0).abs() < 1e-4, "{line}");
            assert!(line.get("cpu_energy_j").is_none(), "{line}");
        }
        let last = lines.last().unwrap();
        assert!(last["power_w"].is_number(), "the last step has a reading: {last}");
        let of = |kind: &str| events.iter().rev().find(|event| event["event"] == kind).unwrap().clone();
        let [start, finish] = ["start", "finish"].map(of);
        let seconds = finish["unix_s"].as_f64().unwrap() - start["unix_s"].as_f64().unwrap();
        let begun = start["energy_kwh"].as_f64().unwrap_or(0.0);
        let joules = 3.6e6 * (kwh(&finish) - begun);
        assert!(0.0 < joules && joules <= 500.0 * (seconds + 0.1), "{joules} J in {seconds} s");
        assert!(begun < kwh(last) && kwh(last) <= kwh(&finish), "{last} {finish}");
        (begun, kwh(&finish))
    };
    fake.ok(&TRAIN, &[none]);
    let (begun, first) = check();
    assert_eq!(begun, 0.0);
    // Lines after step 8 are made again; what they took stays.
    fake.ok(&[&TRAIN[..], &["--resume-from", "8"]].concat(), &[none]);
    let (begun, second) = check();
    assert!(begun == first && second > first, "{begun} {first} {second}");
    fake.place.ok(&["report", "run", "-o", "report.html"]);
    let report = std::fs::read_to_string(fake.place.path("report.html")).unwrap();
    assert!(report.contains("run: energy") && report.contains(" J a token"), "no energy in the report");

    // A device without the counter has its power added up over time, and one that tells nothing has nothing.
    let no_counter = ("FAKE_CUDA_FAIL", "nvmlDeviceGetTotalEnergyConsumption:1=3");
    fake.ok(&[&TRAIN[..], &["--fresh", "--set", "train.steps=400"]].concat(), &[none, no_counter]);
    let [lines, _] = recorded(&fake);
    let powers: Vec<f64> = lines.iter().filter_map(|line| line["power_w"].as_f64()).collect();
    assert!(!powers.is_empty() && powers.iter().all(|power| (power / 500.0 - 1.0).abs() < 0.6), "{powers:?}");
    let fake = Fake::without(&["libnvidia-ml.so.1"]);
    if !installed_here(&fake, "NVML") {
        fake.ok(&TRAIN, &[none]);
        let text = format!("{:?}", recorded(&fake)[0]);
        assert!(!text.contains("energy") && !text.contains("power_w"), "{text}");
    }
}

#[test]
fn a_lost_device_ends_the_run_and_the_same_command_goes_on_from_the_checkpoint() {
    for (status, name, advice) in [
        (719, "unspecified launch failure (CUDA_ERROR_LAUNCH_FAILED, 719)", "for lines with Xid, `dmesg`"),
        (214, "uncorrectable ECC error encountered (CUDA_ERROR_ECC_UNCORRECTABLE, 214)", "nvidia-smi --gpu-reset"),
        (46, "busy or unavailable (CUDA_ERROR_DEVICE_UNAVAILABLE, 46)", "another program may hold it alone"),
        (999, "unknown error (CUDA_ERROR_UNKNOWN, 999)", "see `nvidia-smi`"),
    ] {
        let fake = Fake::new();
        let fault = format!("cuGraphLaunch:7={status}");
        let text = fake.fails(1, &TRAIN, &[("FAKE_CUDA_LOSE", &fault)]);
        assert!(text.starts_with("error: the device was lost: ") && text.contains(name), "{text}");
        assert!(text.contains("in `train` or what was queued after it\nhint: ") && text.contains(advice), "{text}");
        assert!(text.contains("the same command again goes on from the latest"), "{text}");
        let saved = *checkpoints(&fake).last().expect("a checkpoint before the device was lost");
        assert!(saved < 12);
        let text = fake.ok(&TRAIN, &[]);
        assert!(text.contains(&format!("resuming at step {saved}")) && text.contains("finished 12 steps"), "{text}");
        assert_eq!(steps_of_metrics(&fake), (1..=12).collect::<Vec<_>>());
    }
}

#[test]
fn a_device_lost_while_a_checkpoint_is_written_leaves_the_one_before_it() {
    let fake = Fake::new();
    fake.ok(&TRAIN, &[]);
    let whole = checkpoints(&fake);
    // Going back to the last but one, its successor is written again: every copy from the device may fail.
    let last = format!("run/checkpoints/step-{:08}", whole.last().unwrap());
    std::fs::remove_dir_all(fake.place.path(&last)).unwrap();
    let mut failed = 0;
    for call in [1, 20, 40, 60, 80] {
        let fault = format!("cuMemcpyDtoHAsync_v2:{call}=719");
        let output = fake.command(&TRAIN, &[("FAKE_CUDA_FAIL", &fault)]).output().unwrap();
        if output.status.success() {
            break;
        }
        failed += 1;
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), text.matches("hint: ").count()), (Some(1), 1), "at copy {call}: {text}");
        assert_eq!(checkpoints(&fake), whole[..whole.len() - 1], "at copy {call}");
    }
    assert!(failed > 1, "{failed} runs failed");
    let text = fake.ok(&TRAIN, &[]);
    assert!(text.contains("finished 12 steps"), "{text}");
    assert_eq!(checkpoints(&fake).last(), whole.last());
}

#[test]
fn a_device_that_does_not_get_on_is_abandoned_and_the_op_named_in_a_graph_too() {
    let fake = Fake::new();
    // In the validation before the first step, and in the fifth step: a step has four marks, the last after it.
    for mark in [2, 21] {
        let stuck = [("FAKE_CUDA_STUCK", format!("passed:{mark}=1"))];
        let stuck = stuck.each_ref().map(|(name, value)| (*name, value.as_str()));
        let args = [&TRAIN[..], &["--fresh", "--set", "parallel.timeout=0.5"]].concat();
        let text = fake.fails(1, &args, &stuck);
        assert!(text.starts_with("error: the GPU has done nothing for 0.5 s: it is in one of the "), "{text}");
        assert!(text.contains(" ops from ") && text.contains(", micro-batch ") && text.contains(", layer"), "{text}");
        assert!(text.contains("the same command again goes on") && text.contains("raise parallel.timeout"), "{text}");
    }
    assert!(steps_of_metrics(&fake).len() > 2);
    let text = fake.ok(&[&TRAIN[..], &["--set", "parallel.timeout=0.5"]].concat(), &[]);
    assert!(text.contains("resuming at step ") && text.contains("finished 12 steps"), "{text}");
}

#[test]
fn debug_nans_looks_at_all_that_a_device_makes_without_graphs() {
    let fake = Fake::new();
    let train = |dir: &'static str, more: &[&'static str]| {
        let short =
            ["train", "run.toml", "--quiet", "--run-dir", dir, "--set", "train.device=cuda", "--set", "train.steps=4"];
        [&short[..], &["--set", "train.validation_sequences=0"], more].concat()
    };
    let graphs = [("FAKE_CUDA_COUNT", "cuGraphLaunch")];
    assert!(fake.ok(&train("plain", &[]), &graphs).contains("cuGraphLaunch was called"));
    assert!(!fake.ok(&train("looked", &["--debug-nans"]), &graphs).contains("cuGraphLaunch"));
    fake.ok(&["checkpoint", "export", "plain", "--out", "hf"], &[]);
    common::plant(&fake.place.path("hf/model.safetensors"), "model.layers.1.mlp.down_proj.weight", f32::NAN);
    // The kernels of the fake make nothing, so that the weight is seen where it is updated.
    let text = fake.fails(1, &train("damaged", &["--set", "train.init_from=hf", "--debug-nans"]), &[]);
    assert!(text.starts_with("error: step 1: `layers.1.wdown.next` has NaN at element 0 of "), "{text}");
    assert!(text.contains(": made by adamw") && text.contains(", the update, micro-batch 0"), "{text}");
}

#[test]
fn an_old_driver_is_refused_and_auto_says_why_it_takes_the_cpu() {
    let fake = Fake::new();
    let old = [("FAKE_CUDA_VERSION", "12040")];
    let text = fake.fails(1, &TRAIN, &old);
    let problem = "the NVIDIA driver speaks CUDA 12.4, 13.0 is needed";
    assert!(text.starts_with(&format!("error: {problem}\nhint: install driver 580 or newer")), "{text}");
    let report = fake.ok(&["doctor"], &old);
    assert!(report.contains(problem) && report.contains("device: install driver 580"), "{report}");
    let text = fake.ok(&train_on("train.device=auto"), &old);
    assert!(text.contains(&format!("warning: training on the CPU: {problem} (install")), "{text}");
}

#[test]
fn no_device_is_refused_and_auto_says_why_it_takes_the_cpu() {
    let fake = Fake::new();
    let none = [("FAKE_CUDA_DEVICES", "0")];
    let text = fake.fails(1, &TRAIN, &none);
    assert!(text.starts_with("error: no CUDA device was found\nhint: check `nvidia-smi`"), "{text}");
    let report = fake.ok(&["doctor"], &none);
    assert!(report.contains("speaks CUDA 13.0") && report.contains("no CUDA device was found"), "{report}");
    let text = fake.ok(&train_on("train.device=auto"), &none);
    assert!(text.contains("warning: training on the CPU: no CUDA device was found (check"), "{text}");
    // What the device does not do is said too, where there is one.
    let text =
        fake.ok(&[&train_on("train.device=auto")[..], &["--fresh", "--set", "train.reproducible=true"]].concat(), &[]);
    assert!(text.contains("warning: training on the CPU: train.reproducible does not run with"), "{text}");
    // And nothing where there is nothing of CUDA.
    let bare = Fake::without(&fake_cuda::LIBRARIES);
    if !installed_here(&bare, "NVIDIA driver") {
        let text = bare.ok(&train_on("train.device=auto"), &[]);
        assert!(!text.contains("warning: training on the CPU"), "{text}");
    }
}

#[test]
fn a_gpu_without_fp8_is_refused_and_trains_in_bf16() {
    let fake = Fake::new();
    let older = [("FAKE_CUDA_CAPABILITY", "80")];
    let fp8 = ["--set", "precision.policy=fp8", "--set", "precision.fp8_weights=0"];
    let text = fake.fails(1, &[&TRAIN[..], &fp8].concat(), &older);
    assert!(text.contains("has no matmuls in fp8: its compute capability is 8.0, and 8.9"), "{text}");
    assert!(text.contains("hint: train in bf16"), "{text}");
    fake.ok(&[&TRAIN[..], &["--fresh"]].concat(), &older);
}

#[test]
fn fp8_is_compared_with_bf16_between_steps_that_are_queued() {
    let fake = Fake::new();
    let set = ["precision.policy=fp8", "precision.fp8_weights=0", "precision.shadow_every=5"];
    let set: Vec<&str> = set.into_iter().flat_map(|key| ["--set", key]).collect();
    fake.ok(&[&TRAIN[..], &set].concat(), &[]);
    let csv = fake.ok(&["metrics", "run", "--format", "csv", "--keys", "shadow_loss_fp8"], &[]);
    let compared: Vec<&str> = csv.lines().skip(1).filter_map(|line| line.strip_suffix(",0")).collect();
    assert_eq!(compared, ["1", "5", "10"], "{csv}");
}

#[test]
fn tf32_trains_on_any_gpu() {
    let fake = Fake::new();
    let tf32 = [&TRAIN[..], &["--set", "precision.policy=tf32"]].concat();
    fake.ok(&tf32, &[]);
    fake.ok(&[&tf32[..], &["--fresh"]].concat(), &[("FAKE_CUDA_CAPABILITY", "75")]);
}

#[test]
fn a_driver_that_does_not_start_says_what_to_do() {
    let fake = Fake::new();
    let text = fake.fails(1, &TRAIN, &[("FAKE_CUDA_FAIL", "cuInit:1=802")]);
    assert!(text.starts_with("error: the NVIDIA driver does not start: system not yet initialized"), "{text}");
    assert!(text.contains("hint: the machine's NVSwitch is not up: start the service nvidia-fabricmanager"), "{text}");
    // What fails before the first step was never there to be lost.
    let text = fake.fails(1, &TRAIN, &[("FAKE_CUDA_FAIL", "cuInit:1=999")]);
    assert!(text.starts_with("error: the NVIDIA driver does not start: unknown error"), "{text}");
    let text = fake.fails(1, &TRAIN, &[("FAKE_CUDA_FAIL", "cuDevicePrimaryCtxRetain:1=46")]);
    assert!(text.starts_with("error: the device cannot be opened: ") && text.contains("busy or unavailable"), "{text}");
    assert!(text.contains("compute mode") && !text.contains("checkpoint"), "{text}");
}

#[test]
fn a_folder_of_libraries_may_be_relative() {
    let fake = Fake::new();
    let report = fake.ok(&["doctor"], &[("LOCKSTEP_CUDA_LIBRARIES", "cuda")]);
    let folder = fake.place.path("cuda").canonicalize().unwrap();
    for file in fake_cuda::LIBRARIES {
        assert!(report.contains(&folder.join(file).display().to_string()), "{report}");
    }
}

#[test]
fn a_missing_library_is_named_with_the_package_to_install() {
    for (file, name, package) in [
        ("libcuda.so.1", "NVIDIA driver", "install the NVIDIA driver, version 580 or newer"),
        ("libnvrtc.so.13", "NVRTC", "`pip install nvidia-cuda-nvrtc==13.0.88`"),
        ("libcublasLt.so.13", "cuBLASLt", "`pip install nvidia-cublas`"),
    ] {
        let fake = Fake::without(&[file]);
        if installed_here(&fake, name) {
            continue;
        }
        // One of CUDA 12 is none.
        let other = file.replace(".so.13", ".so.12");
        if other != file {
            std::fs::copy(fake.place.path("fake.so"), fake.place.path("cuda").join(&other)).unwrap();
        }
        let text = fake.fails(1, &TRAIN, &[]);
        assert!(text.starts_with(&format!("error: {name} was not found\nhint: ")), "{text}");
        assert!(text.contains(package) && text.contains("LOCKSTEP_CUDA_LIBRARIES"), "{text}");
        let report = fake.ok(&["doctor"], &[]);
        assert!(report.contains(package) && report.contains("ready to train on the CPU"), "{report}");
    }
}

#[test]
fn a_library_that_is_not_whole_is_named_with_the_reason() {
    let fake = Fake::new();
    std::fs::write(fake.place.path("cuda/libnvrtc.so.13"), "cut off").unwrap();
    let text = fake.fails(1, &TRAIN, &[]);
    assert!(text.starts_with("error: NVRTC cannot be opened: ") && text.contains("file too short"), "{text}");
    // What is whole and of another version lacks functions.
    let empty = fake.place.path("empty.c");
    std::fs::write(&empty, "").unwrap();
    let args = ["-shared", "-o", "cuda/libnvrtc.so.13", "empty.c"];
    assert!(std::process::Command::new("cc").args(args).current_dir(fake.place.path(".")).status().unwrap().success());
    let text = fake.fails(1, &TRAIN, &[]);
    assert!(text.contains("libnvrtc.so.13 has no function nvrtcVersion: it is of another version\nhint: "), "{text}");
}

#[test]
fn without_cudnn_a_run_warns_and_goes_on() {
    let fake = Fake::without(&["libcudnn.so.9"]);
    if installed_here(&fake, "cuDNN") {
        return;
    }
    let text = fake.ok(&TRAIN, &[]);
    assert!(text.contains("warning: attention runs on a slow kernel: cuDNN was not found"), "{text}");
    assert!(text.contains("nvidia-cudnn-cu13") && text.contains("finished 12 steps"), "{text}");
}

#[test]
fn a_cudnn_that_is_too_old_is_none() {
    let fake = Fake::new();
    let old = [("FAKE_CUDNN_VERSION", "91300")];
    let text = fake.ok(&TRAIN, &old);
    assert!(text.contains("warning: attention runs on a slow kernel: cuDNN 9.13.0 is too old: "), "{text}");
    assert!(text.contains("install cuDNN 9.14 or newer") && text.contains("finished 12 steps"), "{text}");
    let report = fake.ok(&["doctor"], &old);
    assert!(report.contains("9.13.0 is too old") && report.contains("ready to train on the GPU"), "{report}");
}

/// A model with GELUs, of this many layers, in bf16.
fn train_gpt2(fake: &Fake, layers: usize) -> Vec<&'static str> {
    let config = common::CONFIG.replace("[model]", "[model]\narchitecture = \"gpt2\"").replace("dim = 48", "dim = 64");
    fake.place.config(&config.replace("kv_heads = 2\n", "").replace("layers = 2", &format!("layers = {layers}")));
    [&TRAIN[..], &["--fresh"]].concat()
}

/// What is kept on disk of choices that were timed.
fn kept(fake: &Fake) -> Vec<&'static str> {
    let names = std::fs::read_dir(fake.place.path("cache")).into_iter().flatten();
    let names: Vec<String> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let kinds = ["cudnn", "epilogue", "matmul"];
    kinds.into_iter().filter(|kind| names.iter().any(|name| name.starts_with(kind))).collect()
}

#[test]
fn memory_of_the_host_that_cannot_be_pinned_is_told() {
    let fake = Fake::new();
    let train = [&TRAIN[..], &["--set", "offload.optimizer=true"]].concat();
    let text = fake.fails(1, &train, &[("FAKE_CUDA_FAIL", "cuMemHostAlloc:1=2")]);
    assert!(text.contains("of the host's memory cannot be pinned: the host does not have"), "{text}");
    assert!(text.contains("keep less in the host's memory"), "{text}");
}

#[test]
fn choices_that_could_not_be_timed_are_not_kept() {
    let fake = Fake::new();
    let train = train_gpt2(&fake, 2);
    // Too little to try anything out beside the arena.
    let text = fake.ok(&train, &[("FAKE_CUDA_MEMORY", "250000000")]);
    assert!(text.contains("finished 12 steps") && !text.contains("slow kernel"), "{text}");
    assert!(kept(&fake).is_empty(), "{:?}", kept(&fake));
    // Memory that is gone while something is tried out.
    for (fault, timed) in
        [("cublasLtMatmul:1=3", &["cudnn"][..]), ("cudnnBackendExecute:1=4004", &["epilogue", "matmul"])]
    {
        let _ = std::fs::remove_dir_all(fake.place.path("cache"));
        let text = fake.fails(1, &train, &[("FAKE_CUDA_FAIL", fault)]);
        assert!(text.starts_with("error: the device has no memory left"), "{text}");
        assert_eq!(kept(&fake), timed, "{fault}");
    }
    fake.ok(&train, &[]);
    assert_eq!(kept(&fake), ["cudnn", "epilogue", "matmul"]);
    // A plan that is known and fails.
    let text = fake.fails(1, &train, &[("FAKE_CUDA_FAIL", "cudnnBackendExecute:1=5000")]);
    assert!(text.starts_with("error: the device was lost: cudnnBackendExecute says "), "{text}");
}

#[test]
fn without_a_cache_a_choice_is_timed_once_for_all_layers() {
    let fake = Fake::new();
    std::fs::write(fake.place.path("file"), "").unwrap();
    let trials = |layers: usize| {
        // A third step would be timed too.
        let train = [&train_gpt2(&fake, layers)[..], &["--set", "train.steps=2"]].concat();
        let cache = [("LOCKSTEP_CACHE", "file/cache"), ("FAKE_CUDA_COUNT", "cuEventElapsedTime")];
        let text = fake.ok(&train, &cache);
        let count = text.lines().find_map(|line| line.strip_prefix("fake: cuEventElapsedTime was called "));
        count.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    assert_eq!(trials(2), trials(6));
}

#[test]
fn too_little_memory_is_refused_with_the_bill_and_a_refused_allocation_is_named() {
    let fake = Fake::new();
    let text = fake.fails(2, &TRAIN, &[("FAKE_CUDA_MEMORY", "30000000")]);
    assert!(text.starts_with("error: the step needs ") && text.contains("MiB are free:"), "{text}");
    assert!(text.contains("\n  parameters ") && text.contains("\nhint: "), "{text}");
    // The memory is there by count, and still cannot be had in one piece.
    let text = fake.fails(1, &TRAIN, &[("FAKE_CUDA_LARGEST", "20000000")]);
    assert!(text.starts_with("error: the device has no room for the arena of "), "{text}");
    assert!(text.contains("hint: end other programs on it (see `nvidia-smi`)"), "{text}");
    assert!(checkpoints(&fake).is_empty());
    fake.ok(&TRAIN, &[]);
}

#[test]
fn a_library_that_fails_says_why() {
    let fake = Fake::new();
    // Where matmuls are timed, and where their plans are known.
    for _ in 0..2 {
        let text = fake.fails(1, &TRAIN, &[("FAKE_CUDA_FAIL", "cublasLtMatmul:1=3")]);
        assert!(text.starts_with("error: the device has no memory left\nhint: end other programs"), "{text}");
        let text = fake.fails(1, &TRAIN, &[("FAKE_CUDA_FAIL", "cublasLtMatmul:1=13")]);
        assert!(text.starts_with("error: the device was lost: cublasLtMatmul says execution failed"), "{text}");
        let other = ["train", "run.toml", "--run-dir", "other", "--set", "train.device=cuda"];
        fake.ok(&[&other[..], &["--set", "precision.policy=bf16"]].concat(), &[]);
    }
}

#[test]
fn a_matmul_that_the_library_does_not_have_is_told_from_a_library_that_fails() {
    let fake = Fake::new();
    let heuristic = |status: i32| {
        let fault = format!("cublasLtMatmulAlgoGetHeuristic:1={status}");
        let output = fake.command(&TRAIN, &[("FAKE_CUDA_FAIL", &fault)]).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    for status in [7, 15] {
        let text = heuristic(status);
        assert!(text.contains("error: internal error: cuBLASLt proposes nothing for "), "{text}");
    }
    let text = heuristic(14);
    assert!(text.contains("error: the device was lost: cublasLtMatmulAlgoGetHeuristic says "), "{text}");
    let text = heuristic(3);
    assert!(text.contains("error: the device has no memory left"), "{text}");
}

#[test]
fn ranks_that_share_a_lost_device_end_with_one_error() {
    let fake = Fake::new();
    let ranks = [&TRAIN[..], &["--set", "parallel.dp=2", "--set", "train.micro_batch=2"]].concat();
    let text = fake.fails(1, &ranks, &[("FAKE_CUDA_LOSE", "cuLaunchKernel:200=719")]);
    assert!(text.starts_with("error: rank ") && text.contains("the device was lost: "), "{text}");
    assert!(text.contains("` or what was queued after it\nhint: "), "{text}");
    let text = fake.ok(&ranks, &[]);
    assert!(text.contains("finished 12 steps"), "{text}");
}

#[test]
fn ranks_that_capture_a_graph_end_with_the_error_of_the_one_that_fails() {
    let fake = Fake::new();
    let settings = ["--set", "parallel.dp=2", "--set", "train.micro_batch=2", "--set", "parallel.timeout=60"];
    let ranks = [&TRAIN[..], &settings].concat();
    let faults = [
        "cuLaunchKernel:1=900",
        "cuLaunchKernel:40=900",
        "cuEventRecord:2=900",
        "cuStreamWaitEvent:1=905",
        "cuStreamEndCapture:1=901",
    ];
    for fault in faults {
        let begin = std::time::Instant::now();
        let text = fake.fails(1, &ranks, &[("FAKE_CUDA_CAPTURE", fault)]);
        let (function, _) = fault.split_once(':').unwrap();
        assert!(text.contains(function), "{fault}: {text}");
        assert!(text.contains("rank ") && !text.contains("no sign of life"), "{fault}: {text}");
        assert!(begin.elapsed().as_secs() < 50, "{fault}: ranks waited for each other");
    }
    let text = fake.ok(&ranks, &[]);
    assert!(text.contains("finished 12 steps"), "{text}");
}
