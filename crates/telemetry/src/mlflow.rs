//! MLflow, by its REST API.
//!
//! A run of ours is one run there, over all of its starts: its id is kept in the run directory. Before one is made, we look whether the
//! server has made it already and the answer was lost, by a tag. Everything else can be sent twice: metrics have the time at
//! which they came, and the server keeps one of two that are equal.

mod server;

use crate::each_scalar;
use crate::queue::{Record, SendError, SendQueue, Transport, What};
use crate::random_text;
use crate::sink::{Opening, Sink, SinkRun};
use serde_json::{Map, Value, json};
pub(crate) use server::check;
use server::{Server, agent, server, variable};
use std::io;
use ureq::http::{Response, StatusCode, header};
use ureq::{Agent, Body, RequestBuilder};

/// The variable that names the experiment, as in MLflow's own client.
const EXPERIMENT: &str = "MLFLOW_EXPERIMENT_NAME";

/// Most of each in a request, by the server's limits, and most characters of their values.
const METRICS: usize = 1000;
const PARAMETERS: usize = 100;
const TAGS: usize = 100;
const PARAMETER_CHARACTERS: usize = 6000;
const TAG_CHARACTERS: usize = 5000;

/// The tag by which a run of ours is found.
const KEY: &str = "lockstep.key";

/// Opens the queue of a run.
pub(crate) fn open(opening: Opening<'_>) -> io::Result<Box<dyn Sink>> {
    let run = opening.run;
    SendQueue::open(&opening.place, run.start.clone(), |state| {
        let wrong = |problem| io::Error::other(format!("{problem:?}"));
        Mlflow::new(run, state, server(&run.to, &variable).map_err(wrong)?, agent().map_err(wrong)?)
    })
}

struct Mlflow {
    agent: Agent,
    server: Server,
    experiment: String,
    name: String,
    parameters: Vec<(String, String)>,
    dir: String,
    /// What its run has as a tag.
    key: String,
    run_id: Option<String>,
    /// Whether the run has its parameters, which cannot be changed there.
    has_parameters: bool,
    /// The step of the last line, for events that name none.
    step: u64,
}

/// What a request logs.
#[derive(Default)]
struct Batch {
    metrics: Vec<Value>,
    tags: Map<String, Value>,
}

impl Mlflow {
    fn new(run: &SinkRun, state: &Value, server: Server, agent: Agent) -> io::Result<Self> {
        let text = |name: &str| state[name].as_str().map(str::to_owned);
        Ok(Self {
            agent,
            server,
            experiment: run
                .to
                .experiment
                .clone()
                .or_else(|| variable(EXPERIMENT))
                .unwrap_or_else(|| "lockstep".to_owned()),
            name: run.name(),
            parameters: run.parameters(),
            dir: std::path::absolute(&run.dir).unwrap_or_else(|_| run.dir.clone()).display().to_string(),
            key: text("key").map_or_else(random_text, Ok)?,
            run_id: text("run_id"),
            has_parameters: state["has_parameters"] == true,
            step: 0,
        })
    }

    /// Asks the server for something.
    fn call(&self, path: &str, body: &Value) -> Result<Value, SendError> {
        let request = self.agent.post(self.address(path)).header(header::CONTENT_TYPE, "application/json");
        let (status, answer) = answered(self.signed(request).send(body.to_string()))?;
        if status.is_success() { Ok(answer) } else { Err(refusal(path, status, &answer)) }
    }

    fn address(&self, path: &str) -> String {
        format!("{}/api/2.0/mlflow/{path}", self.server.address)
    }

    fn signed<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        match &self.server.authorization {
            Some(authorization) => request.header(header::AUTHORIZATION, authorization),
            None => request,
        }
    }

    /// The id of the experiment, where it is there.
    fn find_experiment(&self) -> Result<Option<String>, SendError> {
        let path = "experiments/get-by-name";
        let request = self.agent.get(self.address(path)).query("experiment_name", &self.experiment);
        let (status, answer) = answered(self.signed(request).call())?;
        match (status.is_success(), answer["error_code"].as_str()) {
            (true, _) => Ok(answer["experiment"]["experiment_id"].as_str().map(str::to_owned)),
            (false, Some("RESOURCE_DOES_NOT_EXIST")) => Ok(None),
            (false, _) => Err(refusal(path, status, &answer)),
        }
    }

    /// The id of the experiment, made where it is not there.
    fn experiment(&self) -> Result<String, SendError> {
        if let Some(id) = self.find_experiment()? {
            return Ok(id);
        }
        match self.call("experiments/create", &json!({ "name": self.experiment })) {
            Ok(made) => {
                let id = made["experiment_id"].as_str().map(str::to_owned);
                id.ok_or_else(|| SendError::Later("no experiment was made".into()))
            }
            // Somebody was faster.
            Err(SendError::Refused(cause)) => self.find_experiment()?.ok_or(SendError::Later(cause)),
            Err(error) => Err(error),
        }
    }

    /// The id of the run, made where it is not there.
    fn run_id(&mut self, start: u64) -> Result<String, SendError> {
        if let Some(id) = &self.run_id {
            return Ok(id.clone());
        }
        let experiment = self.experiment().map_err(later)?;
        // An answer may have been lost.
        let filter = json!({ "experiment_ids": [experiment], "filter": format!("tags.`{KEY}` = '{}'", self.key), "max_results": 1 });
        let found = self.call("runs/search", &filter).map_err(later)?;
        let mut id = found["runs"][0]["info"]["run_id"].as_str().map(str::to_owned);
        if id.is_none() {
            let tags = [(KEY, self.key.clone()), ("lockstep.run_dir", self.dir.clone())];
            let made = self.call(
                "runs/create",
                &json!({ "experiment_id": experiment, "run_name": self.name, "start_time": start, "tags": tags.map(pair) }),
            );
            id = made.map_err(later)?["run"]["info"]["run_id"].as_str().map(str::to_owned);
        }
        let id = id.ok_or_else(|| SendError::Later("no run was made".into()))?;
        self.run_id = Some(id.clone());
        Ok(id)
    }

    /// Logs what a batch holds, in as many requests as the limits make necessary.
    fn log(&self, run: &str, batch: &mut Batch) -> Result<(), SendError> {
        let Batch { metrics, tags } = std::mem::take(batch);
        for part in metrics.chunks(METRICS) {
            self.call("runs/log-batch", &json!({ "run_id": run, "metrics": part }))?;
        }
        let tags: Vec<Value> = tags.into_iter().map(|(key, value)| json!({ "key": key, "value": value })).collect();
        for part in tags.chunks(TAGS) {
            self.call("runs/log-batch", &json!({ "run_id": run, "tags": part }))?;
        }
        Ok(())
    }

    /// A run that starts is running, and has its versions and hosts as tags; the first time, its config as parameters.
    fn started(&mut self, run: &str, start: &Value) -> Result<(), SendError> {
        self.call("runs/update", &json!({ "run_id": run, "status": "RUNNING" }))?;
        let mut batch = Batch { tags: tags_of_start(start), ..Batch::default() };
        self.log(run, &mut batch)?;
        if !self.has_parameters {
            let all: Vec<Value> = self.parameters.iter().map(|(key, value)| parameter(key, value)).collect();
            for part in all.chunks(PARAMETERS) {
                self.call("runs/log-batch", &json!({ "run_id": run, "params": part }))?;
            }
            self.has_parameters = true;
        }
        Ok(())
    }
}

impl Transport for Mlflow {
    fn name(&self) -> String {
        format!("MLflow at {}", self.server.address)
    }

    fn state(&self) -> Value {
        json!({
            "server": self.server.address,
            "experiment": self.experiment,
            "key": self.key,
            "run_id": self.run_id,
            "has_parameters": self.has_parameters,
        })
    }

    fn send(&mut self, records: &[Record]) -> Result<(), SendError> {
        let Some(first) = records.first() else { return Ok(()) };
        let run = self.run_id(first.unix_ms)?;
        let mut batch = Batch::default();
        for Record { unix_ms, what } in records {
            match what {
                What::Start(start) => {
                    self.log(&run, &mut batch)?;
                    self.started(&run, start)?;
                }
                What::Metrics(line) => {
                    self.step = line["step"].as_u64().unwrap_or(self.step);
                    metrics(line, *unix_ms, &mut batch.metrics);
                }
                What::Event(event) => {
                    let kind = event["event"].as_str().unwrap_or("event");
                    let step = event["step"].as_u64().unwrap_or(self.step);
                    // A point in a chart, and what was said last.
                    batch.metrics.push(metric(&format!("events/{kind}"), 1.0, step, *unix_ms));
                    batch.tags.insert(format!("lockstep.event.{kind}"), json!(cut(&event.to_string(), TAG_CHARACTERS)));
                }
                What::End(word) => {
                    self.log(&run, &mut batch)?;
                    let status = match word.as_str() {
                        "finished" => "FINISHED",
                        "interrupted" => "KILLED",
                        "continues" => continue,
                        _ => "FAILED",
                    };
                    self.call("runs/update", &json!({ "run_id": run, "status": status, "end_time": unix_ms }))?;
                }
            }
            if batch.metrics.len() >= METRICS {
                self.log(&run, &mut batch)?;
            }
        }
        self.log(&run, &mut batch)
    }
}

/// The status of an answer and what it says.
fn answered(response: Result<Response<Body>, ureq::Error>) -> Result<(StatusCode, Value), SendError> {
    let later = |error: ureq::Error| SendError::Later(error.to_string());
    let mut response = response.map_err(later)?;
    let status = response.status();
    let text = response.body_mut().read_to_string().map_err(later)?;
    match (serde_json::from_str(&text), status.is_success()) {
        (Ok(answer), _) => Ok((status, answer)),
        (Err(_), true) => Err(SendError::Later("its answer is not JSON: it is no MLflow server".into())),
        // A proxy before it may answer in HTML.
        (Err(_), false) => Ok((status, Value::Null)),
    }
}

fn refusal(path: &str, status: StatusCode, answer: &Value) -> SendError {
    let said = [&answer["error_code"], &answer["message"]].map(|part| part.as_str().unwrap_or_default());
    let cause = format!("it answers {path} with {status} {}", said.join(" "));
    let cause = cut(cause.trim_end(), 300);
    match status.as_u16() {
        400 | 413 | 422 => SendError::Refused(cause),
        _ => SendError::Later(cause),
    }
}

/// What is refused before there is a run is the fault of no line.
fn later(error: SendError) -> SendError {
    match error {
        SendError::Refused(cause) | SendError::Later(cause) => SendError::Later(cause),
    }
}

fn pair((key, value): (&str, String)) -> Value {
    json!({ "key": key, "value": cut(&value, TAG_CHARACTERS) })
}

fn parameter(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": cut(value, PARAMETER_CHARACTERS) })
}

fn cut(text: &str, most: usize) -> String {
    text.chars().take(most).collect()
}

/// The numbers of a line.
fn metrics(line: &Value, unix_ms: u64, to: &mut Vec<Value>) {
    let step = line["step"].as_u64().unwrap_or(0);
    // A line that was read once is one.
    let _ = each_scalar(&line.to_string(), &mut |key, value| {
        if key != "step" {
            to.push(metric(&named(key), value, step, unix_ms));
        }
    });
}

fn metric(key: &str, value: f64, step: u64, unix_ms: u64) -> Value {
    // JSON has no NaN; the server reads this word.
    let value = if value.is_nan() { json!("NaN") } else { json!(value) };
    json!({ "key": key, "value": value, "timestamp": unix_ms, "step": step })
}

/// A key as MLflow takes it, below `system/` where its page of system metrics shows it.
fn named(key: &str) -> String {
    let system = ["gpu_", "cpu_", "arena_", "power_", "energy_", "rank_busy_s", "data_wait_s"];
    let is_system = system.iter().any(|start| key.starts_with(start));
    let allowed = |c: char| if c.is_alphanumeric() || "_-./ ".contains(c) { c } else { '_' };
    let key: String = key.chars().map(allowed).collect();
    if is_system { format!("system/{key}") } else { key }
}

/// What `starts.jsonl` has of a start.
fn tags_of_start(start: &Value) -> Map<String, Value> {
    let text = |value: &Value| match value {
        Value::Null => None,
        Value::String(text) if text.is_empty() => None,
        Value::String(text) => Some(text.clone()),
        Value::Array(all) => Some(
            all.iter()
                .map(|one| one.as_str().map_or_else(|| one.to_string(), str::to_owned))
                .collect::<Vec<_>>()
                .join(" "),
        ),
        other => Some(other.to_string()),
    };
    let build = &start["build"];
    let all = [
        ("mlflow.source.type", Some("LOCAL".to_owned())),
        ("mlflow.source.name", text(&start["command"])),
        ("mlflow.source.git.commit", text(&build["commit"])),
        ("mlflow.user", variable("USER")),
        ("lockstep.version", text(&build["version"])),
        ("lockstep.uncommitted_changes", text(&build["dirty"])),
        ("lockstep.hosts", text(&start["hosts"])),
        ("lockstep.device", text(&start["device"])),
        ("lockstep.world", text(&start["world"])),
        ("lockstep.program", text(&start["program"])),
        ("lockstep.data", text(&start["data"])),
        ("lockstep.started_after_step", text(&start["step"])),
        ("lockstep.start_reason", text(&start["reason"])),
        (
            "lockstep.changes",
            start["changed"].as_array().filter(|all| !all.is_empty()).map(|_| start["changed"].to_string()),
        ),
    ];
    let there = all.into_iter().filter_map(|(key, value)| Some((key.to_owned(), json!(cut(&value?, TAG_CHARACTERS)))));
    there.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_that_the_server_takes() {
        assert_eq!(named("rank_busy_s/3"), "system/rank_busy_s/3");
        assert_eq!(named("gpu_power_w"), "system/gpu_power_w");
        assert_eq!(named("tasks/a:b(c)/acc"), "tasks/a_b_c_/acc");
        assert_eq!(named("val_loss"), "val_loss");
    }

    #[test]
    fn numbers_of_a_line_are_metrics_at_its_step() {
        let mut all = Vec::new();
        metrics(&json!({ "step": 7, "loss": null, "rank_busy_s": [0.5] }), 9, &mut all);
        let expected = [
            json!({ "key": "loss", "value": "NaN", "timestamp": 9, "step": 7 }),
            json!({ "key": "system/rank_busy_s/0", "value": 0.5, "timestamp": 9, "step": 7 }),
        ];
        assert_eq!(all, expected);
    }
}
