//! Every kernel that the sources declare is launched, with arguments of the kinds of its parameters. It needs no GPU: the fake driver of
//! the command's tests takes the launches, in a process of its own.

use crate::collectives::{self, Sent};
use crate::driver::{Device, Memory, Stream};
use crate::gpu::Gpu;
use crate::kernels::Value;
use crate::numbers::{Elements, Numbers};
use crate::progress::Progress;
use crate::sources::{COMMON, SOURCES};
use crate::{CudaExecutor, initial, profile};
use lockstep_compile::{
    AdamW, Context, Fp8, Moments, Offload, Optimizer, Precision, Recompute, Rule, Steps, compile, compile_forward,
};
use lockstep_config::{Config, ModelConfig};
use lockstep_exec::comm::processes::{JobSecret, Start, Waiting, host_at};
use lockstep_exec::comm::{Collective, Order, Piece, ProgramPlace};
use lockstep_exec::conformance;
use lockstep_exec::initial::{Initial, InitialPart};
use lockstep_exec::{ExecError, Executor};
use lockstep_ir::{DType, Init, Layout, StepProgram};
use lockstep_model::{CacheShape, Form};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The types of the parameters of every kernel, by source and name, and the kernels that were launched.
static DECLARED: OnceLock<BTreeMap<String, Vec<String>>> = OnceLock::new();
static LAUNCHED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Holds the arguments of a launch against what the kernel declares, in the process that has read that.
pub fn check((source, name): (&str, &str), begins_with_struct: bool, args: &[Value]) {
    let Some(declared) = DECLARED.get() else { return };
    let kernel = format!("{source}/{name}");
    let all = declared.get(&kernel).unwrap_or_else(|| panic!("no source declares {kernel}"));
    let (first, rest) = all.split_at(usize::from(begins_with_struct));
    assert!(!first.iter().any(|ty| is_number(ty)), "{kernel} begins with no struct: {all:?}");
    let fits = rest.len() == args.len() && rest.iter().zip(args).all(|(ty, arg)| fits(ty, arg));
    assert!(fits, "{kernel} takes {all:?} and is given {args:?}");
    LAUNCHED.lock().unwrap().insert(kernel);
}

fn is_number(ty: &str) -> bool {
    ty.ends_with('*') || ["u16", "int", "u32", "i64", "u64", "float", "double"].contains(&ty)
}

fn fits(ty: &str, arg: &Value) -> bool {
    match arg {
        Value::Address(_) => ty.ends_with('*'),
        Value::Long(_) => ["i64", "u64"].contains(&ty),
        Value::Word(_) => ["int", "u32"].contains(&ty),
        Value::Size(_) => ["u16", "int", "u32", "i64", "u64"].contains(&ty),
        Value::Float(_) => ty == "float",
        Value::Double(_) => ty == "double",
    }
}

/// The kernels of all sources and the types of their parameters, after the preprocessor: macros make many of them.
fn declarations() -> BTreeMap<String, Vec<String>> {
    let mut all = BTreeMap::new();
    for (source, text) in SOURCES {
        let mut cpp = Command::new("cc");
        cpp.args(["-E", "-P", "-D__CUDA_ARCH_FEAT_SM90_ALL", "-x", "c++", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut cpp = cpp.spawn().unwrap();
        cpp.stdin.take().unwrap().write_all(format!("{COMMON}{text}").as_bytes()).unwrap();
        let text = String::from_utf8(cpp.wait_with_output().unwrap().stdout).unwrap();
        let kernels = text.split("__global__").skip(1).map(|text| text.split_once('{').unwrap().0);
        for head in kernels {
            // What is before the parameters may have parentheses too: bounds of a launch.
            let (name, parameters) = head.trim_end().strip_suffix(')').unwrap().rsplit_once('(').unwrap();
            let name = name.rsplit(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap();
            let parameters = parameters.split(',').map(|parameter| {
                let (ty, _) = parameter.trim().rsplit_once([' ', '*']).unwrap();
                let pointer = if parameter.contains('*') { "*" } else { "" };
                let plain = |word: &&str| !["const", "volatile", "__grid_constant__"].contains(word);
                ty.split_whitespace().filter(plain).collect::<Vec<_>>().join(" ") + pointer
            });
            all.insert(format!("{source}/{name}"), parameters.collect());
        }
    }
    all
}

#[test]
fn every_kernel_is_launched_with_arguments_of_its_kinds() {
    const INSIDE: &str = "LOCKSTEP_LAUNCHES";
    if std::env::var_os(INSIDE).is_some() {
        return launch_all();
    }
    // The environment says where libraries are: another process has another one.
    let folder = std::env::temp_dir().join(format!("lockstep-launches-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/tests/fake_cuda");
    let built = folder.join("libcuda.so.1");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-shared", "-fPIC", "-pthread", "-o"]).arg(&built);
    let compiled = cc.args(["fake.c", "device.c", "nccl.c"].map(|file| fake.join(file))).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    for name in ["libnvrtc.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libnvidia-ml.so.1"] {
        std::fs::copy(&built, folder.join(name)).unwrap();
    }
    let mut inside = Command::new(std::env::current_exe().unwrap());
    inside.args(["--exact", "launches::every_kernel_is_launched_with_arguments_of_its_kinds"]);
    inside.env(INSIDE, "1").env("LOCKSTEP_CUDA_LIBRARIES", &folder).env("LOCKSTEP_CACHE", folder.join("cache"));
    let output = inside.output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

fn launch_all() {
    let declared = DECLARED.get_or_init(declarations);
    assert_eq!(Device::open(0).unwrap().name, "NVIDIA H200 (fake)");
    let gpu = Gpu::open(0, false).unwrap();
    gpu.watch(Duration::from_secs(600));
    collectives(&gpu);
    beside(&gpu);
    for (compute, deterministic) in [(DType::F32, false), (DType::BF16, true), (DType::F16, true)] {
        ops(&gpu, compute, deterministic);
        steps(&gpu, Precision::of(compute, DType::F32), deterministic);
    }
    let fp8 =
        Precision { fp8: Some(Fp8 { weights: Some(0), ..Fp8::default() }), ..Precision::of(DType::BF16, DType::F32) };
    steps(&gpu, fp8, false);
    steps(&gpu, Precision { tf32: true, ..Precision::FP32 }, false);
    let bf16 = Precision::of(DType::BF16, DType::BF16);
    for kept in
        [Precision { moments: Moments::Blocks, own_master: true, ..bf16 }, Precision { moments: Moments::Bf16, ..bf16 }]
    {
        step(&gpu, ("llama", (2048, 64)), Rule::AdamW(ADAMW), kept, false);
    }
    rules(&gpu);
    let [bf16, f16] = [DType::BF16, DType::F16].map(|compute| Precision::of(compute, DType::F32));
    let bytes = [DType::E4M3, DType::Int8].map(|frozen| Precision { frozen: Some(frozen), ..bf16 });
    for precision in [&[bf16, f16][..], &bytes].concat() {
        decoding(&gpu, precision);
    }
    let launched = LAUNCHED.lock().unwrap();
    let unused: Vec<_> = declared.keys().filter(|kernel| !launched.contains(*kernel)).collect();
    assert!(unused.is_empty(), "nobody launches {unused:?}");
}

/// All ops. What comes out is wrong: the driver has no device.
fn ops(gpu: &Arc<Gpu>, compute: DType, deterministic: bool) {
    let load = |p: StepProgram| -> Result<Box<dyn Executor>, ExecError> {
        Ok(Box::new(CudaExecutor::load(gpu, p, deterministic)?))
    };
    let profile = profile("cuda", compute, DType::Fixed64, deterministic);
    conformance::launch(&profile, compute, conformance::SEED, &mut { load }).unwrap();
}

const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };

/// Training steps with rows and heads of the lengths that kernels have variants for.
fn steps(gpu: &Arc<Gpu>, precision: Precision, deterministic: bool) {
    let sizes = [(64, 32), (2048, 64), (4096, 96), (8192, 128)];
    for (architecture, size) in ["gpt2", "llama"].into_iter().flat_map(|one| sizes.map(|size| (one, size))) {
        step(gpu, (architecture, size), Rule::AdamW(ADAMW), precision, deterministic);
    }
}

/// Steps of decoding, of as many rows and with matmuls of as many inputs and outputs as kernels have variants for.
fn decoding(gpu: &Arc<Gpu>, precision: Precision) {
    let cache = CacheShape { slots: 32, blocks: 32, page: 96, pages: 32, window_pages: 1, apart: true };
    // The norm before a wide matmul is of the head, or of an MLP whose activation is no part of the matmul.
    let sizes = [
        (128, 256, 16384, "silu"),
        (128, 64, 8192, "silu"),
        (8192, 64, 256, "silu"),
        (128, 2304, 256, "gelu"),
        (128, 8192, 256, "gelu"),
    ];
    for (dim, ffn, vocab, activation) in sizes {
        let model = format!(
            "vocab_size = {vocab}\nlayers = 2\ndim = {dim}\nheads = 2\nffn = {ffn}\nactivation = \"{activation}\""
        );
        let config = Config::parse(&format!("[model]\n{model}\n[data]\npaths = [\".\"]\n"), "run.toml", &[]).unwrap();
        let model = ModelConfig { head_dim: 64, ..config.model };
        let context = context(Rule::AdamW(ADAMW), precision, false);
        for (batch, entry) in StepProgram::DECODE.into_iter().filter(|(batch, _)| *batch <= 32) {
            let form = Form::NextToken { batch, positions: 1, cache, known: vocab };
            let graph = lockstep_model::build_form(&model, form).unwrap();
            let program = compile_forward(&[(entry, graph)], &context).unwrap();
            CudaExecutor::load(gpu, program, false).unwrap().run(entry).unwrap();
        }
    }
}

/// Training steps by all rules, for all types of gradient sums. The samples of ops round parameters to bf16 alone.
fn rules(gpu: &Arc<Gpu>) {
    let muon = Rule::Muon { momentum: 0.95, rest: ADAMW };
    let rules = [Rule::AdamW(ADAMW), Rule::Lion { beta1: 0.9, beta2: 0.99 }, Rule::Sgd { momentum: 0.9 }, muon];
    for gradients in [DType::F32, DType::BF16, DType::Fixed64] {
        for rule in rules {
            step(gpu, ("llama", (64, 32)), rule, Precision::of(DType::F16, gradients), false);
        }
    }
}

fn context(rule: Rule, precision: Precision, deterministic: bool) -> Context {
    let Precision { compute, gradients, .. } = precision;
    Context {
        device: profile("cuda", compute, gradients, deterministic),
        layout: Layout::single(1),
        optimizer: Optimizer { rule, decay: 0.1, groups: BTreeMap::new() },
        precision,
        recompute: Recompute::default(),
        stages: vec![],
        steps: Steps::default(),
        offload: Offload::default(),
    }
}

/// A training step of a model whose rows and heads have this many elements.
fn step(
    gpu: &Arc<Gpu>,
    (architecture, (dim, head)): (&str, (usize, usize)),
    rule: Rule,
    precision: Precision,
    deterministic: bool,
) {
    let context = context(rule, precision, deterministic);
    let model = format!("architecture = \"{architecture}\"\nvocab_size = 256\nlayers = 1\ndim = {dim}\nffn = 64");
    let text = format!("[model]\n{model}\nheads = 2\n[data]\npaths = [\".\"]\n");
    let config = Config::parse(&text, "run.toml", &[]).unwrap();
    // Heads that are not a row together: matrices stay small.
    let model = ModelConfig { head_dim: head, ..config.model };
    let form = Form::Loss { batch: 1, seq: 64, context: 64, documents: true };
    let graph = lockstep_model::build_form(&model, form).unwrap();
    let program = compile(&graph, &context).unwrap().programs.remove(0);
    CudaExecutor::load(gpu, program, deterministic).unwrap().run(StepProgram::TRAIN).unwrap();
}

fn collectives(gpu: &Gpu) {
    let memory = Memory::new(&gpu.device, 1 << 16).unwrap();
    let stream = Stream::new(&gpu.device).unwrap();
    let (on, at) = (gpu.kernels.on(&stream), memory.base as usize);
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64, DType::Fixed64] {
        let order = Order::Group;
        let piece = Piece::new(at as *mut u8, at as *mut u8, 8, dtype);
        let sent = Sent { rows: 1, elements: 8, parts: memory.base, stride: 64, order, dtype };
        // SAFETY: the pieces lie in the memory.
        unsafe {
            for kind in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
                collectives::queue(on, kind, &[vec![piece], vec![piece]]).unwrap();
            }
            let base = memory.base;
            collectives::add_sent(on, 0, 2, &[(sent, base, base)]).unwrap();
            collectives::parts(on, 2, true, &[(sent, base)]).unwrap();
        }
    }
    // Bytes are not added up.
    let (dtype, order) = (DType::E4M3, Order::Group);
    let piece = Piece::new(at as *mut u8, at as *mut u8, 8, dtype);
    let sent = Sent { rows: 1, elements: 8, parts: memory.base, stride: 64, order, dtype };
    // SAFETY: the pieces lie in the memory.
    unsafe {
        collectives::queue(on, Collective::AllGather, &[vec![piece], vec![piece]]).unwrap();
        collectives::parts(on, 2, true, &[(sent, memory.base)]).unwrap();
    }
}

/// What is launched beside ops: initial values, looks at numbers, and how far the device has come.
fn beside(gpu: &Arc<Gpu>) {
    let memory = Memory::new(&gpu.device, 1 << 10).unwrap();
    let stream = Stream::new(&gpu.device).unwrap();
    let on = gpu.kernels.on(&stream);
    let parts = vec![InitialPart { name: "w", columns: 8, elements: 64 }];
    let values = Initial { init: &Init::Normal { std: 0.02 }, seed: 1, parts };
    let mut numbers = Numbers::new(&gpu.device).unwrap();
    // SAFETY: the memory has room for as many elements.
    unsafe {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            initial::draw(on, memory.base, dtype, &values).unwrap();
        }
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            numbers.first(on, Elements { at: memory.base, elements: 8, dtype }, false).unwrap();
        }
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let start = Start {
        rank: 0,
        ranks: 1,
        address: listener.local_addr().unwrap().to_string(),
        timeout: Duration::from_secs(60),
        build: String::new(),
        mpi: None,
        secret: Some(JobSecret::random().unwrap()),
        board: None,
        waiting: Waiting::default(),
    };
    let progress = Progress::new(&gpu.device, &Arc::new(host_at(&start, listener).unwrap())).unwrap();
    let lane = progress.lane(true).unwrap();
    progress.around(on, lane, ProgramPlace::outside("test"), 0, || Ok(())).unwrap();
    progress.held(on, || Ok(())).unwrap();
}
