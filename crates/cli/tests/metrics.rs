//! Where the metrics of a run go, the live page, reports and tasks, from whole commands.

mod common;

use common::{CONFIG, Place};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

fn with_sinks(place: &Place) {
    place.config(&format!("{CONFIG}\n[telemetry]\ntensorboard = true\ncsv = true\n"));
}

/// Lines of metrics.jsonl.
fn lines(place: &Place) -> Vec<Value> {
    let text = fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What TensorBoard shows of the event files of a run: by tag, steps and values.
fn scalars(place: &Place) -> BTreeMap<String, Vec<(u64, f32)>> {
    let mut files: Vec<_> =
        fs::read_dir(place.path("run/tensorboard")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut all: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    for file in files {
        let mut data = &fs::read(file).unwrap()[..];
        while !data.is_empty() {
            let length = u64::from_le_bytes(data[..8].try_into().unwrap()) as usize;
            let event = &data[12..12 + length];
            data = &data[16 + length..];
            let fields = fields(event);
            let step = fields.iter().find(|(field, ..)| *field == 2).map_or(0, |(_, number, _)| *number);
            for (field, _, bytes) in fields {
                match field {
                    // A run that goes on: what others said of this step and later ones is no more.
                    7 => all.values_mut().for_each(|values| values.retain(|(at, _)| *at < step)),
                    5 => {
                        for (_, _, value) in self::fields(bytes) {
                            let value = self::fields(value);
                            let tag = String::from_utf8(value[0].2.to_vec()).unwrap();
                            all.entry(tag).or_default().push((step, f32::from_bits(value[1].1 as u32)));
                        }
                    }
                    _ => {}
                }
            }
        }
    }
    all.retain(|_, values| !values.is_empty());
    all
}

/// The fields of a protobuf message: number, value, bytes.
fn fields(mut data: &[u8]) -> Vec<(u64, u64, &[u8])> {
    fn varint(data: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = data[0];
            *data = &data[1..];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }
    let mut found = Vec::new();
    while !data.is_empty() {
        let key = varint(&mut data);
        let (value, bytes) = match key & 7 {
            0 => (varint(&mut data), &data[..0]),
            2 => (0, {
                let length = varint(&mut data) as usize;
                let bytes = &data[..length];
                data = &data[length..];
                bytes
            }),
            kind => {
                let length = if kind == 1 { 8 } else { 4 };
                let mut bytes = [0; 8];
                bytes[..length].copy_from_slice(&data[..length]);
                data = &data[length..];
                (u64::from_le_bytes(bytes), &data[..0])
            }
        };
        found.push((key >> 3, value, bytes));
    }
    found
}

/// Every number of metrics.jsonl is in the event files and in the CSV, and nothing else is.
fn check(place: &Place) {
    let mut expected: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    let lines = lines(place);
    for line in &lines {
        let step = line["step"].as_u64().unwrap();
        for (key, value) in line.as_object().unwrap().iter().filter(|(key, _)| *key != "step") {
            expected.entry(key.clone()).or_default().push((step, value.as_f64().unwrap() as f32));
        }
    }
    assert_eq!(scalars(place), expected);
    let csv = fs::read_to_string(place.path("run/metrics.csv")).unwrap();
    assert_eq!(csv, place.ok(&["metrics", "run", "--format", "csv"]));
    let header: Vec<&str> = csv.lines().next().unwrap().split(',').collect();
    assert_eq!(csv.lines().count(), lines.len() + 1);
    for (row, line) in csv.lines().skip(1).zip(&lines) {
        for (key, cell) in header.iter().zip(row.split(',')) {
            assert_eq!(cell.parse().ok(), line[key].as_f64(), "{key}");
        }
    }
}

#[test]
fn event_files_and_csv_have_the_numbers_of_the_run_also_when_it_goes_back() {
    let place = Place::new();
    with_sinks(&place);
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    check(&place);
    assert_eq!(lines(&place).len(), 20);
    place.ok(&["train", "run.toml", "--run-dir", "run", "--resume-from", "10", "--change", "train.steps=15"]);
    check(&place);
    assert_eq!(lines(&place).len(), 15);
    // What came after step 10 is a run directory of its own, with its event files.
    assert_eq!(fs::read_dir(place.path("run/old-1/tensorboard")).unwrap().count(), 1);
    assert_eq!(fs::read_to_string(place.path("run/old-1/metrics.csv")).unwrap().lines().count(), 21);
    place.ok(&["train", "run.toml", "--run-dir", "run", "--fresh", "--set", "train.steps=5"]);
    check(&place);
    assert_eq!(fs::read_dir(place.path("run/tensorboard")).unwrap().count(), 1);
}

#[test]
fn a_sink_that_cannot_be_written_does_not_stop_the_run() {
    let place = Place::new();
    with_sinks(&place);
    fs::create_dir_all(place.path("run/metrics.csv/in-the-way")).unwrap();
    fs::write(place.path("run/tensorboard"), "a file").unwrap();
    let output = place.run(&["train", "run.toml", "--run-dir", "run", "--set", "train.steps=3"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    for name in ["run/tensorboard", "run/metrics.csv"] {
        assert_eq!(stderr.matches(&format!("{name} is not written any more")).count(), 1, "{stderr}");
    }
    assert_eq!(lines(&place).len(), 3);
    let events = fs::read_to_string(place.path("run/events.jsonl")).unwrap();
    assert_eq!(events.matches("sink_failed").count(), 2, "{events}");
}

#[test]
fn metrics_are_shown_and_chosen_by_key() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run", "--set", "train.steps=6"]);
    let text = place.ok(&["metrics", "run"]);
    assert!(text.starts_with("steps 1 to 6, 6 lines\n") && text.contains("nats per token"), "{text}");
    let csv = place.ok(&["metrics", "run", "--format", "csv", "--keys", "val_loss,lr"]);
    assert_eq!(csv.lines().next(), Some("step,val_loss,lr"));
    assert!(csv.lines().nth(1).unwrap().starts_with("1,,"), "{csv}");
    let json: Value = serde_json::from_str(&place.ok(&["metrics", "run", "--format", "json"])).unwrap();
    let losses = json["columns"]["loss"].as_array().unwrap();
    assert!(losses.iter().zip(lines(&place)).all(|(loss, line)| *loss == line["loss"]) && losses.len() == 6);
    assert_eq!(json["columns"]["val_loss"][0], Value::Null);
    for (args, word) in [
        (&["metrics", "run", "--keys", "los"][..], "hint: there is step, tokens, loss"),
        (&["metrics", "nothing"], "hint: give a run directory"),
    ] {
        let output = place.run(args);
        assert_eq!(output.status.code(), Some(2));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains(word), "{stderr}");
    }
}

#[test]
fn a_report_is_one_file_with_charts_pictures_and_provenance() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "runs/a", "--set", "train.steps=4"]);
    place.ok(&["train", "run.toml", "--run-dir", "runs/b", "--set", "train.steps=3", "--set", "optimizer.lr=1e-3"]);
    place.ok(&["report", "runs", "-o", "report.html"]);
    let text = fs::read_to_string(place.path("report.html")).unwrap();
    for part in [
        "a: memory over time, pipeline, account",
        "(starts.jsonl)",
        "<svg",
        "planned memory of two steps",
        "b: provenance",
        "uPlot",
    ] {
        assert!(text.contains(part), "{part} is missing");
    }
    assert!(!text.contains("src=\"http") && !text.contains("href=\"http") && !text.contains("cannot plan"));
    let data = text.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["page"]["runs"][1]["config"]["optimizer.lr"], "0.001");
    assert_eq!(data["series"]["runs"][0]["loss"].as_array().unwrap().len(), 4);
    let output = place.run(&["report", "nothing"]);
    assert!(
        output.status.code() == Some(2)
            && String::from_utf8_lossy(&output.stderr).contains("hint: give a run directory")
    );
}

#[test]
fn tasks_are_evaluated_and_logged_by_item() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run", "--set", "train.steps=5"]);
    let lines = "{\"query\":\"the square of 3 is\",\"choices\":[\"9\",\"10\"],\"gold\":0}\n".repeat(3);
    fs::write(place.path("squares.jsonl"), lines).unwrap();
    fs::write(place.path("words.jsonl"), "{\"query\":\"the square\",\"target\":\"of\"}\n").unwrap();
    let args =
        ["eval", "run", "--tasks", "squares.jsonl", "words.jsonl", "--limit", "2", "--log-samples", "items.jsonl"];
    let text = place.ok(&args);
    assert!(text.contains("acc_norm") && text.contains("squares") && text.contains("up to 32 tokens"), "{text}");
    let items: Vec<Value> = fs::read_to_string(place.path("items.jsonl"))
        .unwrap()
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(items.len(), 3);
    assert_eq!(items[1]["log_likelihoods"].as_array().unwrap().len(), 2);
    assert!(items[2]["acc"].is_boolean() && items[2]["acc_norm"].is_null());
    let json: Value = serde_json::from_str(&place.ok(&[&args[..], &["--format", "json"]].concat())).unwrap();
    assert_eq!(json["tasks"][0]["items"], 2);
    assert!(json["tasks"][1]["perplexity"].as_f64().unwrap() > 1.0 && json["tasks"][0]["acc_stderr"].is_number());
    fs::write(place.path("bad.jsonl"), "{\"query\":\"a\"}\n").unwrap();
    let output = place.run(&["eval", "run", "--tasks", "bad.jsonl"]);
    assert!(output.status.code() == Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Starts `lockstep watch` and gives it with the URL that it prints.
fn watching(place: &Place, args: &[&str]) -> (std::process::Child, String) {
    let mut command = place.command(&[&["watch", "run", "--port", "0"], args].concat());
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    reader.read_line(&mut line).unwrap();
    // It has more to say.
    child.stdout = Some(reader.into_inner());
    let url = line.trim().split_once("http://").unwrap_or_else(|| panic!("{line}")).1.to_owned();
    (child, url)
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_run_is_watched_and_other_addresses_need_the_token() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run", "--set", "train.steps=3"]);
    let (mut child, url) = watching(&place, &[]);
    let address = url.trim_end_matches('/');
    assert!(address.starts_with("127.0.0.1:"), "{url}");
    assert!(get(address, "/").contains("<title>Lockstep</title>"));
    let status = get(address, "/api/status");
    assert!(status.contains("\"last_step\":3.0") && status.contains("\"ended\":\"finish\""), "{status}");
    child.kill().unwrap();
    child.wait().unwrap();
    let (mut child, url) = watching(&place, &["--host", "0.0.0.0"]);
    let (address, token) = url.split_once("/?token=").unwrap();
    let address = address.replace("0.0.0.0", "127.0.0.1");
    assert!(token.len() == 32, "{url}");
    assert!(get(&address, "/").starts_with("HTTP/1.1 401"));
    assert!(get(&address, &format!("/?token={token}")).starts_with("HTTP/1.1 200"));
    child.kill().unwrap();
    child.wait().unwrap();
    let output = place.run(&["watch", "corpus"]);
    assert!(output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains("no run directory"));
}
