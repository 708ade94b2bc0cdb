//! The live page's server, as a browser and as others see it.

use lockstep_telemetry::RunPage;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

fn run_dir(dir: &Path, steps: u64) {
    std::fs::create_dir_all(dir).unwrap();
    let line = |step| format!("{{\"step\":{step},\"loss\":{},\"step_s\":0.5}}\n", 8.0 / step as f64);
    std::fs::write(dir.join("metrics.jsonl"), (1..=steps).map(line).collect::<String>()).unwrap();
    std::fs::write(
        dir.join("events.jsonl"),
        "{\"event\":\"checkpoint\",\"step\":2}\n{\"event\":\"validation\",\"step\":2}\n",
    )
    .unwrap();
    std::fs::write(dir.join("run.toml"), "[train]\nsteps = 10  # default\n# seq is not set\n").unwrap();
    std::fs::write(dir.join("plan.json"), "{\"parameters\": 12}").unwrap();
    std::fs::write(dir.join("secret"), "secret").unwrap();
}

fn served(dirs: &[&Path], token: Option<&str>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let page = RunPage::new(&dirs.iter().map(|dir| dir.to_path_buf()).collect::<Vec<_>>());
    let token = token.map(str::to_owned);
    std::thread::spawn(move || page.serve(&listener, token));
    address
}

/// Sends bytes and gives the whole answer; empty where there is none.
fn sent(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    // A server that has heard enough hangs up.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn get(address: SocketAddr, path: &str, headers: &str) -> String {
    sent(address, format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{headers}\r\n").as_bytes())
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or("none")
}

fn body(answer: &str) -> serde_json::Value {
    assert_eq!(status(answer), "200", "{answer}");
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

#[test]
fn a_page_shows_runs_and_what_they_add() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (folder.path().join("a/run"), folder.path().join("b/run"));
    run_dir(&one, 4);
    run_dir(&two, 2);
    let address = served(&[&one, &two], None);
    let page = get(address, "/", "");
    assert!(page.contains("Content-Security-Policy: default-src 'none'; script-src 'nonce-"), "{page}");
    assert!(page.contains("uPlot") && !page.contains("{{") && !page.contains("src=\"http"));
    let runs = body(&get(address, "/api/runs", ""));
    assert_eq!([&runs["runs"][0]["name"], &runs["runs"][1]["name"]], ["a/run", "b/run"]);
    assert_eq!(runs["runs"][0]["config"]["train.steps"], "10");
    assert_eq!(runs["runs"][0]["events"].as_array().unwrap().len(), 1);
    assert_eq!(runs["units"]["loss"], "nats per token");
    let series = body(&get(address, "/api/series?keys=loss,none&from=1&to=4&buckets=100", ""));
    assert_eq!(series["runs"][0]["loss"], serde_json::json!([8, 4, 2.6666667, 2]));
    assert_eq!(series["runs"][1]["loss"], serde_json::json!([8, 4, null, null]));
    let coarse = body(&get(address, "/api/series?keys=loss&from=1&to=4&buckets=2", ""));
    assert_eq!(coarse["runs"][1]["means"]["loss"], serde_json::json!([6, null]));
    let mut file = std::fs::File::options().append(true).open(one.join("metrics.jsonl")).unwrap();
    file.write_all(b"{\"step\":5,\"loss\":1.5,\"val_loss\":1.75}\n").unwrap();
    let begun = Instant::now();
    loop {
        let status = body(&get(address, "/api/status", ""));
        if status["runs"][0]["last_step"] == 5.0 {
            assert_eq!(status["runs"][0]["last"]["val_loss"], 1.75);
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{status}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn others_get_nothing() {
    let folder = tempfile::tempdir().unwrap();
    run_dir(&folder.path().join("run"), 3);
    let open = served(&[&folder.path().join("run")], None);
    for (path, headers, expected) in [
        ("/api/status", "", "200"),
        ("/api/status", "Origin: http://evil.example\r\n", "403"),
        ("/", "Origin: null\r\n", "403"),
        ("/api/status", "Sec-Fetch-Site: cross-site\r\n", "403"),
        ("/api/status", "Sec-Fetch-Site: same-origin\r\n", "200"),
        ("/api/status", "Host: other\r\n", "400"),
        ("/../run/secret", "", "404"),
        ("/secret", "", "404"),
        ("/%2e%2e/secret", "", "404"),
        ("/api/runs/../../secret", "", "404"),
        ("//etc/passwd", "", "404"),
        ("http://evil.example/", "", "400"),
        ("/api/series?keys=../secret&from=-1&to=1e999&buckets=99999999999", "", "200"),
        ("/api/status", "no header\r\n", "400"),
    ] {
        let answer = get(open, path, headers);
        assert_eq!(status(&answer), expected, "{path} {headers}");
        assert!(!answer.contains("secret\""), "{answer}");
    }
    let named = |host: &str| sent(open, format!("GET /api/status HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
    for (host, expected) in [
        ("localhost:9", "200"),
        ("[::1]:80", "200"),
        ("127.0.0.1", "200"),
        ("evil.example", "403"),
        ("127.0.0.1.evil.example", "403"),
        ("10.0.0.1", "403"),
    ] {
        assert_eq!(status(&named(host)), expected, "{host}");
    }
    for (request, expected) in [
        (&b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..], "405"),
        (b"DELETE /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n", "405"),
        (b"GET / HTTP/1.1\r\n\r\n", "400"),
        (b"GET  / HTTP/1.1\r\nHost: localhost\r\n\r\n", "400"),
        (b"\xff\xfe\r\n\r\n", "400"),
        (b"\r\n\r\n", "400"),
    ] {
        assert_eq!(status(&sent(open, request)), expected, "{}", String::from_utf8_lossy(request));
    }
}

#[test]
fn a_token_opens_the_page_and_nothing_else_does() {
    let folder = tempfile::tempdir().unwrap();
    run_dir(&folder.path().join("run"), 3);
    let address = served(&[&folder.path().join("run")], Some("0123456789abcdef"));
    for (path, headers, expected) in [
        ("/", "", "401"),
        ("/?token=", "", "401"),
        ("/?token=0123456789abcde", "", "401"),
        ("/?token=0123456789abcdeff", "", "401"),
        ("/?token=0123456789abcdeF", "", "401"),
        ("/?token=0123456789abcdef", "", "200"),
        ("/api/runs", "Authorization: Bearer 0123456789abcdef\r\n", "200"),
        ("/api/runs", "Authorization: Basic 0123456789abcdef\r\n", "401"),
        ("/api/runs", "Cookie: token=0123456789abcdef\r\n", "401"),
        ("/api/runs", "Authorization: Bearer 0123456789abcdef\r\nOrigin: http://evil.example\r\n", "403"),
        ("/nothing", "", "401"),
    ] {
        assert_eq!(status(&get(address, path, headers)), expected, "{path} {headers}");
    }
}

#[test]
fn a_huge_request_is_not_read_and_a_slow_one_does_not_block_others() {
    let folder = tempfile::tempdir().unwrap();
    run_dir(&folder.path().join("run"), 3);
    let address = served(&[&folder.path().join("run")], None);
    let _slow: Vec<TcpStream> = (0..8)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\nX: ").unwrap();
            stream
        })
        .collect();
    let huge = format!("GET /{} HTTP/1.1\r\nHost: {address}\r\n\r\n", "a".repeat(4 << 20));
    let answer = sent(address, huge.as_bytes());
    // What was still on its way when the server hung up may have reset the connection.
    assert!(answer.is_empty() || status(&answer) == "431", "{answer}");
    assert_eq!(status(&get(address, "/api/status", "")), "200");
}

#[test]
fn a_request_of_8_kib_is_read_and_one_byte_more_is_not() {
    let folder = tempfile::tempdir().unwrap();
    run_dir(&folder.path().join("run"), 3);
    let address = served(&[&folder.path().join("run")], None);
    let of = |bytes: usize| {
        let request = format!("GET /api/status HTTP/1.1\r\nHost: {address}\r\nX: \r\n\r\n");
        let filled = request.replace("X: ", &format!("X: {}", "a".repeat(bytes - request.len())));
        assert_eq!(filled.len(), bytes);
        status(&sent(address, filled.as_bytes())).to_owned()
    };
    assert_eq!([of(8 << 10), of((8 << 10) + 1), of(9_000)], ["200", "431", "431"]);
}

#[test]
fn silent_connections_keep_nobody_out() {
    let folder = tempfile::tempdir().unwrap();
    run_dir(&folder.path().join("run"), 3);
    let address = served(&[&folder.path().join("run")], None);
    let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
    // Those that came last wait for what they ask.
    for mut stream in silent.iter().rev().take(8) {
        stream.write_all(format!("GET /api/status HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes()).unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200");
    }
    assert_eq!(status(&get(address, "/api/status", "")), "200");
}

#[test]
fn the_page_cuts_no_legend_and_stacks_events_on_a_phone() {
    let file = RunPage::new(&[]).file("");
    let rule = |name: &str| {
        let found = file.split_once(&format!("\n{name} {{"));
        found.unwrap_or_else(|| panic!("no rule for {name}")).1.split_once('}').unwrap().0.to_owned()
    };
    // Names of runs are of any length: legends grow with them, and scroll where there are very many.
    let legend = rule(".chart .values");
    assert!(!legend.contains("overflow: hidden") && !legend.contains(" height:"), "{legend}");
    assert!(legend.contains("min-height") && legend.contains("overflow-y: auto"), "{legend}");
    // Cells of a narrow table stand below each other, none out of sight.
    let phone = file.split_once("@media (max-width: 600px) {").unwrap().1.split_once("\n}").unwrap().0;
    assert!(phone.contains(".events tr { display: block; }"), "{phone}");
    assert!(phone.contains(".events td:last-child { display: block; min-width: 0;"), "{phone}");
    assert!(file.contains("}), \"events\"));"), "the table of events has the class");
}

#[test]
fn a_file_has_everything_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("</script><b>");
    run_dir(&dir, 3);
    let file = RunPage::new(&[dir]).file("<p>more</p>");
    assert!(file.contains("<p>more</p>") && !file.contains("</script><b>") && !file.contains("src=\"http"));
    let data = file.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["series"]["runs"][0]["loss"].as_array().unwrap().len(), 3);
    assert_eq!(data["page"]["runs"][0]["name"], "script><b>");
}
