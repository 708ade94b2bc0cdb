//! Runs that send their metrics to a tracking server: a small one here that speaks what is needed of MLflow's, and fails when a test
//! says so. What the real server makes of it is in `bench/records/mlflow.txt`.

mod common;

use common::{CONFIG, Place, wait_for_steps, wait_until};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What goes wrong at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// It takes this long for every answer, in milliseconds.
    Slow(u64),
    /// It does what it is asked for, and cuts the connection before it answers.
    Cut,
    /// It answers with this status and does nothing.
    Status(u16),
}

/// What the server has.
#[derive(Default)]
struct Tracked {
    experiments: Vec<String>,
    runs: Vec<TrackedRun>,
    /// `METHOD path` and the value of the header `Authorization` of each request.
    asked: Vec<(String, String)>,
}

#[derive(Clone, Default)]
struct TrackedRun {
    name: String,
    status: String,
    params: BTreeMap<String, String>,
    tags: BTreeMap<String, String>,
    /// Values by key, then step and time: equal ones are one.
    metrics: BTreeMap<(String, u64, u64), Value>,
}

impl TrackedRun {
    /// Steps and values of a metric.
    fn values(&self, key: &str) -> Vec<(u64, Value)> {
        let of = self.metrics.iter().filter(|((name, ..), _)| name == key);
        of.map(|((_, step, _), value)| (*step, value.clone())).collect()
    }
}

/// A server on a port that nobody else has.
struct Server {
    port: u16,
    tracked: Arc<Mutex<Tracked>>,
    fault: Arc<Mutex<Fault>>,
}

impl Server {
    fn new() -> Self {
        let server = Self { port: 0, tracked: Arc::default(), fault: Arc::new(Mutex::new(Fault::None)) };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (tracked, fault) = (server.tracked.clone(), server.fault.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (tracked, fault) = (tracked.clone(), fault.clone());
                std::thread::spawn(move || serve(stream.unwrap(), &tracked, &fault));
            }
        });
        Self { port, ..server }
    }

    fn uri(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn set(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }

    /// Its only run.
    fn run(&self) -> TrackedRun {
        let tracked = self.tracked.lock().unwrap();
        assert_eq!(tracked.runs.len(), 1);
        tracked.runs[0].clone()
    }

    fn requests(&self) -> usize {
        self.tracked.lock().unwrap().asked.len()
    }
}

/// Answers requests until the connection ends.
fn serve(stream: TcpStream, tracked: &Mutex<Tracked>, fault: &Mutex<Fault>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    loop {
        let (mut request, mut length, mut authorization) = (String::new(), 0, String::new());
        if reader.read_line(&mut request).unwrap_or(0) == 0 {
            return;
        }
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let (name, value) = line.trim_end().split_once(": ").unwrap_or_default();
            match name.to_lowercase().as_str() {
                "content-length" => length = value.parse().unwrap(),
                "authorization" => authorization = value.to_owned(),
                "" => break,
                _ => {}
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let path = request.split(' ').nth(1).unwrap().to_owned();
        let fault = *fault.lock().unwrap();
        if let Fault::Slow(time) = fault {
            std::thread::sleep(Duration::from_millis(time));
        }
        let mut tracked = tracked.lock().unwrap();
        tracked.asked.push((path.clone(), authorization));
        let (status, answer) = match fault {
            Fault::Status(status) => (status, json!({ "error_code": "TEMPORARILY_UNAVAILABLE", "message": "not now" })),
            _ => {
                let body = serde_json::from_slice(&body).unwrap_or_default();
                tracked.answer(path.strip_prefix("/api/2.0/mlflow/").unwrap(), &body)
            }
        };
        drop(tracked);
        if fault == Fault::Cut {
            return;
        }
        let text = answer.to_string();
        let _ = write!(stream, "HTTP/1.1 {status} Said\r\nContent-Length: {}\r\n\r\n{text}", text.len());
    }
}

impl Tracked {
    fn answer(&mut self, path: &str, body: &Value) -> (u16, Value) {
        let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
        let refused = |why: &str| (400, json!({ "error_code": "INVALID_PARAMETER_VALUE", "message": why }));
        match path {
            _ if path.starts_with("experiments/get-by-name?experiment_name=") => {
                let name = path.split_once('=').unwrap().1.replace("%27", "'");
                match self.experiments.iter().position(|other| *other == name) {
                    Some(at) => (200, json!({ "experiment": { "experiment_id": at.to_string() } })),
                    None => (404, json!({ "error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none" })),
                }
            }
            "experiments/create" => {
                self.experiments.push(text("name"));
                (200, json!({ "experiment_id": (self.experiments.len() - 1).to_string() }))
            }
            "runs/search" => {
                let filter = text("filter");
                let (key, value) = filter.strip_prefix("tags.`").unwrap().split_once("` = '").unwrap();
                let found = self.runs.iter().position(|run| run.tags[key] == value.trim_end_matches('\''));
                let found = found.map(|at| json!({ "info": { "run_id": at.to_string() } }));
                (200, json!({ "runs": found.into_iter().collect::<Vec<_>>() }))
            }
            "runs/create" => {
                let mut run = TrackedRun { name: text("run_name"), status: "RUNNING".into(), ..TrackedRun::default() };
                run.add_tags(&body["tags"]);
                self.runs.push(run);
                (200, json!({ "run": { "info": { "run_id": (self.runs.len() - 1).to_string() } } }))
            }
            "runs/update" => {
                self.of(body).status = text("status");
                (200, json!({}))
            }
            "runs/log-batch" => {
                let all = ["metrics", "params", "tags"].map(|kind| body[kind].as_array().map_or(0, Vec::len));
                if all[0] > 1000 || all[1] > 100 || all[2] > 100 {
                    return refused("too many");
                }
                let run = self.of(body);
                for param in body["params"].as_array().into_iter().flatten() {
                    let [key, value] = ["key", "value"].map(|name| param[name].as_str().unwrap().to_owned());
                    if run.params.get(&key).is_some_and(|before| *before != value) {
                        return refused("changing param values is not allowed");
                    }
                    run.params.insert(key, value);
                }
                run.add_tags(&body["tags"]);
                for metric in body["metrics"].as_array().into_iter().flatten() {
                    let number = |name: &str| metric[name].as_u64().unwrap();
                    let key = metric["key"].as_str().unwrap().to_owned();
                    run.metrics.insert((key, number("step"), number("timestamp")), metric["value"].clone());
                }
                (200, json!({}))
            }
            _ => (404, json!({ "error_code": "ENDPOINT_NOT_FOUND" })),
        }
    }

    fn of(&mut self, body: &Value) -> &mut TrackedRun {
        &mut self.runs[body["run_id"].as_str().unwrap().parse::<usize>().unwrap()]
    }
}

impl TrackedRun {
    fn add_tags(&mut self, tags: &Value) {
        for tag in tags.as_array().into_iter().flatten() {
            let [key, value] = ["key", "value"].map(|name| tag[name].as_str().unwrap().to_owned());
            self.tags.insert(key, value);
        }
    }
}

/// A place whose run goes to a server.
fn place(server: &Server) -> Place {
    let place = Place::new();
    place.config(&format!("{CONFIG}\n[telemetry]\nmlflow = true\nmlflow_uri = \"{}\"\n", server.uri()));
    place
}

const TRAIN: [&str; 4] = ["train", "run.toml", "--run-dir", "run"];

/// Every number of the run's metrics is at the server, at its step.
fn check(place: &Place, server: &Server) {
    let run = server.run();
    let text = fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let step = line["step"].as_u64().unwrap();
        for key in ["loss", "grad_norm", "lr", "val_loss", "tokens_per_s"] {
            if let Some(value) = line.get(key) {
                let there = run.values(key);
                assert!(there.contains(&(step, value.clone())), "{key} of step {step}: {value} is not in {there:?}");
            }
        }
    }
}

#[test]
fn a_run_and_its_resumes_are_one_run_at_the_server() {
    let server = Server::new();
    let place = place(&server);
    let mut command = place.command(&TRAIN);
    command.env("MLFLOW_TRACKING_USERNAME", "ada").env("MLFLOW_TRACKING_PASSWORD", "pass word");
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !stderr.contains("MLflow"), "{stderr}");
    check(&place, &server);
    let run = server.run();
    assert_eq!((run.name.as_str(), run.status.as_str()), ("run", "FINISHED"));
    assert_eq!((run.params["model.layers"].as_str(), run.params["train.device"].as_str()), ("2", "auto"));
    assert_eq!(run.tags["lockstep.version"], env!("CARGO_PKG_VERSION"));
    assert!(run.tags["lockstep.hosts"].len() > 1 && run.tags["lockstep.run_dir"].ends_with("/run"), "{:?}", run.tags);
    assert!(run.tags["lockstep.event.checkpoint"].contains("\"step\":20"), "{:?}", run.tags);
    assert_eq!(run.values("events/checkpoint").iter().map(|(step, _)| *step).collect::<Vec<_>>(), [5, 10, 15, 20]);
    assert_eq!((run.values("loss").len(), run.values("system/arena_bytes").len()), (20, 20));
    let tracked = server.tracked.lock().unwrap();
    assert_eq!(tracked.experiments, ["lockstep"]);
    // ada:pass word
    assert!(tracked.asked.iter().all(|(_, who)| who == "Basic YWRhOnBhc3Mgd29yZA=="), "{:?}", tracked.asked);
    drop(tracked);

    // Parameters cannot be changed at the server: what a resume changes is a tag.
    place.ok(&[&TRAIN[..], &["--change", "train.steps=25"]].concat());
    check(&place, &server);
    let run = server.run();
    assert_eq!((run.params["train.steps"].as_str(), run.values("loss").len()), ("20", 25));
    assert!(run.tags["lockstep.changes"].contains("train.steps"), "{:?}", run.tags);
    // Another run is another one.
    place.ok(&[&TRAIN[..], &["--fresh", "--set", "train.steps=2"]].concat());
    assert_eq!(server.tracked.lock().unwrap().runs.len(), 2);
}

#[test]
fn what_a_server_does_not_take_is_sent_later_and_made_once() {
    let server = Server::new();
    let place = place(&server);
    // It makes the run, and nobody hears of it.
    server.set(Fault::Cut);
    let mut child = place
        .command(&[&TRAIN[..], &["--set", "train.steps=100000", "--set", "train.validate_every=0"]].concat())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until("the first request", || server.requests() > 0);
    wait_for_steps(&place, "run", 10);
    server.set(Fault::Status(500));
    let asked = server.requests();
    wait_until("an attempt that fails", || server.requests() > asked);
    server.set(Fault::Status(429));
    let asked = server.requests();
    wait_until("another", || server.requests() > asked);
    server.set(Fault::Slow(20));
    // The run goes on until all of this has happened, however fast the machine is.
    common::signal(child.id() as i32, libc::SIGTERM);
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(75), "{stderr}");
    check(&place, &server);
    let run = server.run();
    assert_eq!(run.status, "KILLED", "{stderr}");
    assert_eq!(run.values("loss").len(), common::steps(&place, "run"), "{stderr}");
    assert!(!stderr.contains("were not sent"), "{stderr}");
}

#[test]
fn what_was_not_sent_is_said_and_kept_and_sent_by_the_next_start() {
    let server = Server::new();
    let place = place(&server);
    place.ok(&[&TRAIN[..], &["--set", "train.steps=5"]].concat());
    server.set(Fault::Status(503));
    let begun = Instant::now();
    let output = place.run(&[&TRAIN[..], &["--change", "train.steps=10"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(begun.elapsed() < Duration::from_secs(60), "the end of a run waited for {:?}", begun.elapsed());
    let said = "were not sent to MLflow at http://127.0.0.1:";
    assert!(
        stderr.contains(said) && stderr.contains("503") && stderr.contains("resuming the run sends them"),
        "{stderr}"
    );
    assert!(stderr.contains("run/mlflow/queue.jsonl"), "{stderr}");
    assert_eq!(server.run().values("loss").len(), 5);
    server.set(Fault::None);
    let output = place.run(&[&TRAIN[..], &["--change", "train.steps=15"]].concat());
    assert!(output.status.success() && !String::from_utf8_lossy(&output.stderr).contains("MLflow"));
    check(&place, &server);
    assert_eq!((server.run().values("loss").len(), server.run().status.as_str()), (15, "FINISHED"));
}

#[test]
fn how_a_run_ends_is_its_status() {
    let server = Server::new();
    let place = place(&server);
    let long = [&TRAIN[..], &["--set", "train.steps=100000", "--set", "train.validate_every=0"]].concat();
    let mut child = place.command(&long).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    wait_for_steps(&place, "run", 3);
    common::signal(child.id() as i32, libc::SIGTERM);
    assert_eq!(child.wait().unwrap().code(), Some(75));
    assert_eq!(server.run().status, "KILLED");
    assert!(!server.run().values("events/interrupt").is_empty());
    // A kill tells nobody anything; what came before it is at the server when the run goes on.
    let mut child = place.command(&long).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    wait_until("the run goes on", || server.run().status == "RUNNING");
    wait_for_steps(&place, "run", 10);
    child.kill().unwrap();
    child.wait().unwrap();
    // One that fails says so.
    let rate = ["--set", "optimizer.lr=1e30", "--set", "optimizer.warmup_steps=0"];
    let error = place.fails(1, &[&TRAIN[..], &["--fresh"], &rate].concat());
    assert!(error.contains("not finite"), "{error}");
    let runs = server.tracked.lock().unwrap().runs.clone();
    assert_eq!(runs.iter().map(|run| run.status.as_str()).collect::<Vec<_>>(), ["RUNNING", "FAILED"]);
    assert!(!runs[1].values("events/skipped").is_empty(), "{:?}", runs[1].tags);
}

#[test]
fn a_server_that_nobody_names_or_that_is_none_is_refused_before_the_start() {
    let place = Place::new();
    place.config(&format!("{CONFIG}\n[telemetry]\nmlflow = true\n"));
    let error = place.fails(2, &TRAIN);
    assert!(
        error.starts_with("error: telemetry.mlflow: no tracking server is named\nhint: set telemetry.mlflow_uri"),
        "{error}"
    );
    let error = place.fails(2, &[&TRAIN[..], &["--set", "telemetry.mlflow_uri=sqlite:///mlflow.db"]].concat());
    assert!(error.contains("\"sqlite:///mlflow.db\" is not the address of a tracking server"), "{error}");
    assert!(place.fails(2, &[&TRAIN[..], &["--dry-run"]].concat()).contains("no tracking server"));
    assert!(!place.path("run").exists());
    let server = Server::new();
    let mut command = place.command(&[&TRAIN[..], &["--set", "train.steps=1"]].concat());
    command
        .env("MLFLOW_TRACKING_URI", server.uri())
        .env("MLFLOW_EXPERIMENT_NAME", "it's")
        .env("MLFLOW_TRACKING_TOKEN", "t");
    assert!(command.output().unwrap().status.success());
    let mut tracked = server.tracked.lock().unwrap();
    assert_eq!(tracked.experiments, ["it's"]);
    assert!(std::mem::take(&mut tracked.asked).iter().all(|(_, who)| who == "Bearer t"));
    drop(tracked);
    // A password in the address is sent to the server, and stands nowhere else.
    let mut command = place.command(&["train", "run.toml", "--run-dir", "other", "--set", "train.steps=1"]);
    let output = command.env("MLFLOW_TRACKING_URI", server.uri().replace("//", "//ada:pass%20word@")).output().unwrap();
    let mut shown = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{shown}");
    for file in ["run.toml", "starts.jsonl", "events.jsonl", "mlflow/state.json", "mlflow/queue.jsonl"] {
        shown += &fs::read_to_string(place.path("other").join(file)).unwrap();
    }
    let tracked = server.tracked.lock().unwrap();
    shown += &format!("{:?} {:?}", tracked.runs[1].params, tracked.runs[1].tags);
    assert!(shown.contains("127.0.0.1") && !shown.contains("ada:") && !shown.contains("pass%20word"), "{shown}");
    assert!(tracked.asked.iter().all(|(_, who)| who == "Basic YWRhOnBhc3Mgd29yZA=="), "{:?}", tracked.asked);
}
