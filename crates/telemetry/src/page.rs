//! The page: live over HTTP, or as one file.

mod followed;
mod http;
mod view;

use crate::unit;
use followed::FollowedRun;
use http::{Answer, Asked, Gate};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use view::{Buckets, push_array};

/// The runs that a page shows.
pub struct RunPage {
    runs: Vec<FollowedRun>,
    followed: Instant,
}

/// Files are looked at no more often than this.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Buckets of a chart where a request names none.
const USUAL_BUCKETS: usize = 800;

/// Buckets of a chart in a file.
const FILE_BUCKETS: usize = 1500;

impl RunPage {
    /// Reads some run directories. They are called by what of their paths differs.
    pub fn new(dirs: &[PathBuf]) -> Self {
        let names = names(dirs);
        // A long run takes a second to read.
        let runs = std::thread::scope(|scope| {
            let reading: Vec<_> =
                dirs.iter().zip(names).map(|(dir, name)| scope.spawn(|| FollowedRun::new(dir, name))).collect();
            reading.into_iter().map(|thread| thread.join().expect("reading a run does not panic")).collect()
        });
        Self { runs, followed: Instant::now() }
    }

    /// Serves the page until the process ends. Without a token only a listener on a loopback address answers.
    pub fn serve(self, listener: &TcpListener, token: Option<String>) -> io::Result<()> {
        let page = Mutex::new(self);
        http::serve(listener, Gate { token }, move |asked| {
            let mut page = page.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            page.answer(asked)
        })
    }

    /// The page as one file that needs nothing around it; `more` is HTML that follows the charts.
    pub fn file(&self, more: &str) -> String {
        let runs: Vec<Value> = self.runs.iter().map(|run| merged(run.description(), run.status())).collect();
        let from = self.runs.iter().map(FollowedRun::first_step).fold(f64::INFINITY, f64::min);
        let to = self.runs.iter().map(FollowedRun::last_step).fold(0.0, f64::max);
        let keys: Vec<&str> = self.runs.iter().flat_map(|run| run.columns.keys()).collect();
        let series = self.series(&keys, Buckets::over(from.min(to), to, FILE_BUCKETS));
        let data = json!({ "runs": runs, "units": units(&self.runs), "made_s": followed::now() }).to_string();
        let data = format!("{{\"page\":{data},\"series\":{series}}}");
        let policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:";
        let meta = format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">");
        // The end of a script could stand in a name.
        html("", &meta, &data.replace('<', "\\u003c"), more)
    }

    fn answer(&mut self, asked: &Asked<'_>) -> Option<Answer> {
        if asked.path == "/" {
            let nonce = random_text().ok()?;
            let body = html(&nonce, "", "null", "").into_bytes();
            return Some(Answer { kind: "text/html; charset=utf-8", body, nonce: Some(nonce) });
        }
        if !matches!(asked.path, "/api/status" | "/api/runs" | "/api/series") {
            return None;
        }
        if self.followed.elapsed() > LOOK_EVERY {
            self.runs.iter_mut().for_each(FollowedRun::follow);
            self.followed = Instant::now();
        }
        let text = match asked.path {
            "/api/status" => {
                json!({ "runs": self.runs.iter().map(FollowedRun::status).collect::<Vec<_>>() }).to_string()
            }
            "/api/runs" => {
                let runs: Vec<Value> = self.runs.iter().map(|run| merged(run.description(), run.status())).collect();
                json!({ "runs": runs, "units": units(&self.runs) }).to_string()
            }
            _ => {
                let number = |name: &str| asked.parameter(name).and_then(|text| text.parse::<f64>().ok());
                let keys: Vec<&str> = asked.parameter("keys").unwrap_or_default().split(',').take(256).collect();
                let to = self.runs.iter().map(FollowedRun::last_step).fold(0.0, f64::max);
                let most = number("buckets").map_or(USUAL_BUCKETS, |buckets| buckets as usize);
                let buckets = Buckets::over(number("from").unwrap_or(0.0), number("to").unwrap_or(to), most);
                self.series(&keys, buckets)
            }
        };
        Some(Answer { kind: "application/json", body: text.into_bytes(), nonce: None })
    }

    /// The numbers of some keys, of every run, as JSON.
    fn series(&self, keys: &[&str], buckets: Buckets) -> String {
        let Buckets { from, width, count } = buckets;
        let head = json!({ "from": from, "width": width, "count": count, "slots": buckets.slots() });
        let mut text = format!("{{\"buckets\":{head},\"runs\":[");
        for (index, run) in self.runs.iter().enumerate() {
            text.push_str(if index == 0 { "{" } else { ",{" });
            // Every key once.
            let mut own: Vec<&str> = run.columns.keys().filter(|key| *key != "step" && keys.contains(key)).collect();
            own.dedup();
            let mut means = String::new();
            let push = |to: &mut String, key: &str, values: &[f64]| {
                to.push_str(if to.is_empty() || to.ends_with('{') { "" } else { "," });
                to.push_str(&json!(key).to_string());
                to.push(':');
                push_array(to, values);
            };
            for key in own {
                let (values, mean) = buckets.of(&run.columns, key).unwrap_or_default();
                push(&mut text, key, &values);
                push(&mut means, key, &mean);
            }
            // A step is its own mean.
            let means = if buckets.slots() == 1 { "null".to_owned() } else { format!("{{{means}}}") };
            text.push_str(if text.ends_with('{') { "" } else { "," });
            text.push_str(&format!("\"means\":{means}}}"));
        }
        text + "]}"
    }
}

/// A token that nobody guesses, also a nonce: 32 hexadecimal digits.
pub fn random_text() -> io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn merged(mut one: Value, other: Value) -> Value {
    if let (Some(one), Value::Object(other)) = (one.as_object_mut(), other) {
        one.extend(other);
    }
    one
}

fn units(runs: &[FollowedRun]) -> Value {
    runs.iter().flat_map(|run| run.columns.keys()).map(|key| (key.to_owned(), json!(unit(key)))).collect()
}

fn html(nonce: &str, meta: &str, data: &str, more: &str) -> String {
    let nonce = if nonce.is_empty() { String::new() } else { format!(" nonce=\"{nonce}\"") };
    let page = include_str!("page/page.html");
    // What stands for something is replaced where the page has it, not in what it is replaced by.
    let mut out = String::with_capacity(page.len() + data.len() + more.len() + (64 << 10));
    let mut rest = page;
    while let Some((before, behind)) = rest.split_once("{{") {
        let (name, behind) = behind.split_once("}}").unwrap_or((behind, ""));
        out.push_str(before);
        out.push_str(match name {
            "nonce" => &nonce,
            "meta" => meta,
            "style" => concat!(include_str!("page/uPlot.min.css"), include_str!("page/page.css")),
            "uplot" => include_str!("page/uPlot.iife.min.js"),
            "script" => include_str!("page/page.js"),
            "data" => data,
            "more" => more,
            _ => "",
        });
        rest = behind;
    }
    out + rest
}

/// A short name for each path: its last parts, as many as tell it from the others.
fn names(dirs: &[PathBuf]) -> Vec<String> {
    let tail = |dir: &Path, parts: usize| {
        let full = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let all: Vec<String> = full.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
        all[all.len().saturating_sub(parts)..].join("/")
    };
    let name = |dir: &PathBuf| {
        let unique = |parts: &usize| dirs.iter().filter(|other| tail(other, *parts) == tail(dir, *parts)).count() == 1;
        tail(dir, (1..16).find(unique).unwrap_or(1))
    };
    dirs.iter().map(name).collect()
}
