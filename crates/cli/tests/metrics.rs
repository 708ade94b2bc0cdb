//! Where the metrics of a run go, the live page, reports and tasks, from whole commands.

mod common;

use common::{CONFIG, Place};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

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

/// Two packages of a CPU that have counted since long ago, and take 20 W each.
#[test]
fn energy_of_cpus_is_in_the_metrics_where_it_can_be_read() {
    let place = Place::new();
    let begun = Instant::now();
    let write = || {
        for package in ["0", "1"] {
            let zone = place.path(&format!("powercap/intel-rapl:{package}"));
            fs::create_dir_all(&zone).unwrap();
            let put = |name: &str, text: String| {
                // In one piece: a reader never sees half of it.
                fs::write(zone.join("new"), text).unwrap();
                fs::rename(zone.join("new"), zone.join(name)).unwrap();
            };
            put("name", format!("package-{package}\n"));
            put("max_energy_range_uj", "262143328850\n".into());
            put("energy_uj", format!("{}\n", 262_143_000_000 + begun.elapsed().as_micros() * 20));
        }
    };
    write();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                write();
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let mut command = place.command(&["train", "run.toml", "--run-dir", "run"]);
        let output = command.env("LOCKSTEP_POWERCAP", place.path("powercap")).output().unwrap();
        done.store(true, Ordering::Relaxed);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    });
    let most = 40.0 * begun.elapsed().as_secs_f64() / 3.6e6;
    let lines = lines(&place);
    let last = lines.last().unwrap();
    let number = |key: &str| last[key].as_f64().unwrap_or_else(|| panic!("{key}: {last}"));
    assert!(0.0 < number("energy_kwh") && number("energy_kwh") <= most, "{last}, at most {most} kWh");
    assert!((number("cpu_energy_j") / (256.0 * number("energy_per_token_j")) - 1.0).abs() < 1e-4, "{last}");
    assert!(number("power_w") > 0.0 && last.get("gpu_energy_j").is_none(), "{last}");
    // What may not be read is left out, and never 0.
    fs::remove_file(place.path("powercap/intel-rapl:1/energy_uj")).unwrap();
    let mut command = place.command(&["train", "run.toml", "--run-dir", "other", "--set", "train.steps=2"]);
    assert!(command.env("LOCKSTEP_POWERCAP", place.path("powercap")).output().unwrap().status.success());
    let text = fs::read_to_string(place.path("other/metrics.jsonl")).unwrap();
    assert!(!text.contains("energy") && !text.contains("power_w"), "{text}");
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
            && String::from_utf8_lossy(&output.stderr).contains("hint: `lockstep train RUN.TOML` makes one")
    );
}

#[test]
fn a_run_in_fp8_says_how_far_its_loss_is_from_that_in_bf16() {
    let place = Place::new();
    let set = [
        "precision.policy=fp8",
        "precision.fp8_weights=0",
        "precision.shadow_every=2",
        "train.steps=4",
        "parallel.dp=2",
    ];
    let set: Vec<&str> = set.into_iter().flat_map(|key| ["--set", key]).collect();
    place.ok(&[&["train", "run.toml", "--run-dir", "run"][..], &set].concat());
    place.ok(&[&["launch", "run.toml", "--run-dir", "processes", "--ranks", "2"][..], &set].concat());
    let compared = |dir| {
        let keys = "shadow_loss_bf16,shadow_loss_fp8,shadow_difference";
        place.ok(&["metrics", dir, "--format", "csv", "--keys", keys])
    };
    assert_eq!(compared("run"), compared("processes"));
    let there: Vec<bool> = compared("run").lines().skip(1).map(|line| !line.ends_with(",,,")).collect();
    assert_eq!(there, [true, true, false, true]);
    place.ok(&["report", "run", "-o", "report.html"]);
    let text = fs::read_to_string(place.path("report.html")).unwrap();
    let said = text.split_once("run: fp8 beside bf16</h2><p>").unwrap().1.split_once("</p>").unwrap().0;
    assert!(said.starts_with("Loss in fp8 from that in bf16 on the same tokens, 3 comparisons: mean "), "{said}");
    assert!(said.contains("% at step 4, largest ") && !said.contains("not finite"), "{said}");
    // A comparison in which fp8 has no loss is not forgotten.
    let file = place.path("run/metrics.jsonl");
    let (before, after) = ("\"shadow_loss_fp8\":", "\"shadow_loss_fp8\":null,\"was\":");
    let lines = fs::read_to_string(&file).unwrap();
    let lines: Vec<String> = lines
        .lines()
        .map(|line| if line.contains("\"step\":4,") { line.replace(before, after) } else { line.to_owned() })
        .collect();
    fs::write(&file, lines.join("\n") + "\n").unwrap();
    place.ok(&["report", "run", "-o", "report.html"]);
    let text = fs::read_to_string(place.path("report.html")).unwrap();
    let said = text.split_once("run: fp8 beside bf16</h2><p>").unwrap().1.split_once("</p>").unwrap().0;
    assert!(said.contains("3 comparisons: mean ") && said.contains("% at step 2, largest "), "{said}");
    assert!(said.ends_with("; at 1 of them the loss in fp8 was not finite."), "{said}");
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

/// A run directory of two steps that nobody has trained.
fn written(place: &Place) {
    std::fs::create_dir(place.path("run")).unwrap();
    let line = |step: u64| format!("{{\"step\":{step},\"loss\":2.5,\"\\u001b[2Jbad\\nname\":1}}\n");
    std::fs::write(place.path("run/metrics.jsonl"), line(1) + &line(2)).unwrap();
    std::fs::write(place.path("run/events.jsonl"), "{\"event\":\"start\",\"step\":0}\n").unwrap();
    std::fs::copy(place.path("run.toml"), place.path("run/run.toml")).unwrap();
}

#[test]
fn names_that_come_from_a_file_reach_no_terminal_raw() {
    let place = Place::new();
    written(&place);
    let shown = "\\u{1b}[2Jbad\\nname";
    let text = place.ok(&["metrics", "run"]);
    assert!(text.contains(&format!("  {shown} ")) && !text.contains('\u{1b}'), "{text:?}");
    let text = place.fails(2, &["metrics", "run", "--keys", "\u{1b}]0;title"]);
    assert!(text.contains("there is no metric `\\u{1b}]0;title`") && !text.contains('\u{1b}'), "{text:?}");
    assert!(text.contains("\\u{1b}[2Jbad"), "{text:?}");
    std::fs::create_dir(place.path("other\u{1b}[2J")).unwrap();
    for file in ["metrics.jsonl", "events.jsonl", "run.toml"] {
        std::fs::copy(place.path("run").join(file), place.path("other\u{1b}[2J").join(file)).unwrap();
    }
    std::fs::write(place.path("run/plan.json"), "{\"device\":\"\\u001b[31mred\"}").unwrap();
    let text = place.ok(&["diff", "run", "other\u{1b}[2J"]) + &place.ok(&["runs", "."]);
    assert!(text.contains("\\u{1b}[31mred") && text.contains("other\\u{1b}[2J"), "{text:?}");
    assert!(!text.contains('\u{1b}'), "{text:?}");
}

#[test]
fn zeros_that_a_file_system_has_left_are_left_out() {
    let place = Place::new();
    written(&place);
    let mut file = std::fs::File::options().append(true).open(place.path("run/metrics.jsonl")).unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(length + (24 << 20)).unwrap();
    file.write_all(b"\n{\"step\":3,\"loss\":1.5}\n").unwrap();
    file.set_len(length + (48 << 20)).unwrap();
    let output = place.run(&["metrics", "run", "--format", "csv", "--keys", "loss"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "step,loss\n1,2.5\n2,2.5\n3,1.5\n");
    let warning = "warning: 1 lines of metrics.jsonl are no objects of up to 1 MiB and are left out\n";
    assert_eq!(String::from_utf8_lossy(&output.stderr), warning);
    std::fs::File::create(place.path("run/metrics.jsonl")).unwrap().set_len(48 << 20).unwrap();
    assert!(place.fails(2, &["metrics", "run"]).contains("has no steps yet"));
    place.ok(&["runs", "."]);
}

#[test]
fn a_fifo_in_a_run_directory_is_named_and_hangs_no_command() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run", "--set", "train.steps=2"]);
    std::fs::rename(place.path("run"), place.path("sound")).unwrap();
    let train = ["train", "run.toml", "--run-dir", "run", "--set", "train.steps=3"];
    let commands: [(&[&str], &[&str]); 9] = [
        (&["metrics", "run"], &["metrics.jsonl"]),
        (&["checkpoint", "list", "run"], &["metrics.jsonl", "events.jsonl"]),
        (&["diff", "run", "sound"], &["metrics.jsonl", "run.toml", "starts.jsonl"]),
        (&["runs", "."], &["metrics.jsonl", "events.jsonl", "run.toml", "starts.jsonl"]),
        (&["watch", "run", "--port", "0"], &["metrics.jsonl", "events.jsonl", "run.toml", "plan.json"]),
        (&["report", "run", "-o", "page.html"], &["metrics.jsonl", "events.jsonl", "run.toml", "plan.json"]),
        (&["generate", "run", "--prompt", "a", "--max-tokens", "1"], &["run.toml"]),
        (&train, &["metrics.jsonl", "events.jsonl", "changes.json", "starts.jsonl", "plan.json", ".lock"]),
        (&[&train[..], &["--dry-run"]].concat(), &["changes.json"]),
    ];
    for (command, files) in commands {
        for file in files {
            assert!(
                Command::new("cp")
                    .args(["-r", "sound", "run"])
                    .current_dir(place.path("."))
                    .status()
                    .unwrap()
                    .success()
            );
            let path = place.path("run").join(file);
            let _ = std::fs::remove_file(&path);
            let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
            // SAFETY: the path is a C string.
            assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
            let mut child = place.command(command).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            let begun = Instant::now();
            while child.try_wait().unwrap().is_none() {
                let hangs = begun.elapsed() > Duration::from_secs(120);
                if hangs {
                    child.kill().unwrap();
                }
                assert!(!hangs, "{command:?} hangs with {file}");
                std::thread::sleep(Duration::from_millis(5));
            }
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(text.contains(file) && text.contains("not a regular file"), "{command:?} {file}: {text}");
            // A list has the other runs all the same.
            assert_eq!(output.status.success(), command[0] == "runs", "{command:?} {file}: {text}");
            std::fs::remove_dir_all(place.path("run")).unwrap();
        }
    }
}
