//! Programs of several ranks that do not go together are refused, and ranks that fail or stall are named.

use lockstep_config::Config;
use lockstep_exec::{Executor, ThreadWorld};
use lockstep_host::Devices;
use lockstep_ir::program::{Instr, StepProgram};
use lockstep_ir::{DType, Op, roles};
use lockstep_plan::plan;
use lockstep_train::Session;
use std::time::{Duration, Instant};

fn config(parallel: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 64\nlayers = 4\ndim = 16\nheads = 4\nkv_heads = 2\nffn = 32\n\
         [train]\nseq = 8\nglobal_batch = 8\nmicro_batch = 1\nthreads = 1\n[parallel]\ntimeout = 20.0\n{parallel}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

fn programs(parallel: &str) -> Vec<StepProgram> {
    plan(&Devices::new(), &config(parallel)).unwrap().compiled.programs
}

fn find(program: &mut StepProgram, wanted: impl Fn(&Op) -> bool) -> &mut Instr {
    let mut all = program.segments.iter_mut().flat_map(|s| &mut s.instrs);
    all.find(|i| wanted(&i.op)).unwrap()
}

fn remove(program: &mut StepProgram, wanted: impl Fn(&Op) -> bool) {
    program.segments.iter_mut().for_each(|s| s.instrs.retain(|i| !wanted(&i.op)));
}

fn refusal(programs: &[StepProgram]) -> String {
    roles::check(programs).unwrap_err().to_string()
}

fn is_send(op: &Op) -> bool {
    matches!(op, Op::Send { .. })
}

fn is_receive(op: &Op) -> bool {
    matches!(op, Op::Receive { .. })
}

#[test]
fn programs_of_stages_that_match_are_accepted() {
    for parallel in ["pp = 2", "pp = 4", "pp = 4\nschedule = \"gpipe\"", "pp = 2\ntp = 2\ndp = 2"] {
        roles::check(&programs(parallel)).unwrap();
    }
}

#[test]
fn another_number_of_elements_is_refused() {
    let mut p = programs("pp = 2");
    let arg = find(&mut p[1], is_receive).outputs[0].as_mut().unwrap();
    arg.ty.dims[1].sections[0].count -= 1;
    assert!(refusal(&p).contains("expects 112 f32, stage 0 sends 128 f32"), "{}", refusal(&p));
}

#[test]
fn another_type_is_refused() {
    let mut p = programs("pp = 2");
    find(&mut p[0], is_send).inputs[0].ty.dtype = DType::BF16;
    assert!(refusal(&p).contains("expects 128 f32, stage 0 sends 128 bf16"), "{}", refusal(&p));
}

#[test]
fn a_message_that_nobody_sends_is_refused() {
    let mut p = programs("pp = 2");
    remove(&mut p[0], is_send);
    assert!(refusal(&p).contains("can never run; waiting: rank 0 (stage 0), "), "{}", refusal(&p));
}

#[test]
fn a_message_that_nobody_takes_is_refused() {
    let mut p = programs("pp = 2");
    p[1].segments.iter_mut().filter(|s| s.name == "evaluate").for_each(|s| s.instrs.retain(|i| !is_receive(&i.op)));
    assert!(refusal(&p).contains("1 messages of stage 0 are never received"), "{}", refusal(&p));
}

#[test]
fn an_order_in_which_stages_wait_for_each_other_is_refused() {
    let mut p = programs("pp = 2");
    // The first stage wants the gradient of a micro-batch that it has not sent.
    let schedule = &mut p[0].entries[0].schedule;
    let forward: Vec<usize> = (0..schedule.len()).filter(|s| schedule[*s].segment == 0).collect();
    let backward = (0..schedule.len()).find(|s| schedule[*s].segment != 0).unwrap();
    schedule.swap(forward[0], backward);
    assert!(refusal(&p).contains("can never run"), "{}", refusal(&p));
}

#[test]
fn a_sum_over_all_stages_that_one_leaves_out_is_refused() {
    let mut p = programs("pp = 2");
    remove(&mut p[1], |op| matches!(op, Op::AllReduce { .. }));
    assert!(refusal(&p).contains("stage 1 has ended without taking part"), "{}", refusal(&p));
    let mut p = programs("pp = 2");
    find(&mut p[0], |op| matches!(op, Op::AllReduce { .. })).inputs[0].ty.dtype = DType::F64;
    assert!(refusal(&p).contains("adds 21 fixed64, stage 0 adds 21 f64") || refusal(&p).contains("adds 21 f64"));
}

#[test]
fn programs_of_other_stages_are_refused() {
    let mut p = programs("pp = 2");
    p.swap(0, 1);
    assert!(refusal(&p).contains("not those of the stages of one mesh"));
    assert!(refusal(&programs("pp = 2")[..1]).contains("not those of the stages of one mesh"));
}

#[test]
fn a_rank_that_fails_ends_the_run_with_its_name_op_and_layer() {
    let config = config("dp = 2");
    let mut session = Session::new(&Devices::new(), &config, &plan(&Devices::new(), &config).unwrap()).unwrap();
    // A token outside the vocabulary, for the second rank only.
    let mut tokens = [0u32; 16];
    tokens[8] = 1000;
    let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
    session.executor().write("tokens", 0, &bytes).unwrap();
    let start = Instant::now();
    let error = session.executor().run(StepProgram::TRAIN).unwrap_err().to_string();
    assert!(error.starts_with("rank 1 failed in embedding, micro-batch 0"), "{error}");
    assert!(error.contains("token 1000 is outside the vocabulary of 64"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5));
    // And nothing runs on afterwards.
    assert!(session.executor().run(StepProgram::TRAIN).is_err());
}

#[test]
fn a_rank_that_stalls_ends_the_run_within_its_timeout() {
    let mut p = programs("pp = 2");
    remove(&mut p[0], is_send);
    let mut ranks = ThreadWorld::on_cpu(p, 1, Duration::from_millis(500)).unwrap();
    let start = Instant::now();
    let error = ranks.run(StepProgram::TRAIN).unwrap_err().to_string();
    assert!(error.contains("rank 0") && error.contains("rank 1") && error.contains("receive, layer 2"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}
