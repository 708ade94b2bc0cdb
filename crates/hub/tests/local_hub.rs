//! Names become folders, whatever the hub does on the way.

mod server;

use lockstep_hub::{Fetched, Hub, HubError, HubFiles, HubName, HubProgress, HubSettings};
use server::{COMMIT, LocalHub, Mischief, git_sha1, sha256};
use std::fs;
use std::path::Path;
use std::time::Duration;

const CONFIG: &str = r#"{ "model_type": "llama" }"#;
const INDEX: &str = r#"{ "weight_map": { "a": "model-1.safetensors", "b": "model-2.safetensors" } }"#;

struct Test {
    server: LocalHub,
    cache: tempfile::TempDir,
    settings: HubSettings,
}

/// A model of one file of weights, and an empty cache.
fn test() -> Test {
    let (server, cache) = (LocalHub::new(), tempfile::tempdir().unwrap());
    server
        .file("config.json", CONFIG, false)
        .file("tokenizer.json", "{}", false)
        .file("README.md", "not wanted", false)
        .file("pytorch_model.bin", "not wanted", true)
        .file("model.safetensors", weights(), true);
    let settings = HubSettings {
        endpoint: server.endpoint.clone(),
        cache: cache.path().to_owned(),
        token: None,
        offline: false,
        timeout: Duration::from_secs(2),
        pause: Duration::from_millis(5),
        certificates: None,
    };
    Test { server, cache, settings }
}

fn weights() -> Vec<u8> {
    (0..300_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

impl Test {
    fn hub(&self) -> Hub {
        Hub::new(self.settings.clone())
    }

    fn fetch(&self) -> Result<Fetched, HubError> {
        self.hub().fetch(&HubName::model("hf:org/name").unwrap(), &HubFiles::Model, &mut |_| ())
    }

    /// The requests for a file.
    fn heard(&self, end: &str) -> Vec<server::Heard> {
        self.server.heard().into_iter().filter(|heard| heard.path.ends_with(end)).collect()
    }

    fn repository(&self) -> std::path::PathBuf {
        self.cache.path().join("models--org--name")
    }
}

fn said(result: Result<Fetched, HubError>) -> String {
    let error = result.unwrap_err();
    format!("{error}\nhint: {}", error.hint())
}

#[test]
fn a_model_is_downloaded_into_the_layout_of_huggingface_hub_and_a_second_start_asks_nothing() {
    let test = test();
    let mut shown = Vec::new();
    let name = HubName::model("hf:org/name").unwrap();
    let fetched = test.hub().fetch(&name, &HubFiles::Model, &mut |at| {
        if let HubProgress::Downloading { done, total, .. } = at {
            shown.push((done, total));
        }
    });
    let fetched = fetched.unwrap();
    assert_eq!(fetched.name.to_string(), format!("hf:org/name@{COMMIT}"));
    assert_eq!(fetched.folder, test.repository().join("snapshots").join(COMMIT));
    assert_eq!(fs::read(fetched.folder.join("model.safetensors")).unwrap(), weights());
    let link = fs::read_link(fetched.folder.join("config.json")).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(git_sha1(CONFIG.as_bytes())));
    assert_eq!(fs::read_to_string(test.repository().join("refs/main")).unwrap(), COMMIT);
    let sum = format!("sha256:{}", sha256(&weights()));
    assert_eq!(fetched.files["model.safetensors"], sum);
    assert_eq!(fetched.files["config.json"], format!("git-sha1:{}", git_sha1(CONFIG.as_bytes())));
    assert!(!fetched.folder.join("pytorch_model.bin").exists() && !fetched.folder.join("README.md").exists());
    let (done, total) = *shown.last().unwrap();
    assert!(shown.is_sorted() && done == total && total > 300_000, "{shown:?}");
    assert!(!test.server.heard().is_empty());
    // Again, and as other names of the same.
    assert_eq!(test.fetch().unwrap(), fetched);
    let hub = test.hub();
    for name in [format!("hf:org/name@{COMMIT}"), "org/name".to_owned(), "hf:org/name@main".to_owned()] {
        hub.fetch(&HubName::model(&name).unwrap(), &HubFiles::Model, &mut |_| ()).unwrap();
    }
    hub.offline().fetch(&name, &HubFiles::Tokenizer, &mut |_| ()).unwrap();
    assert_eq!(test.server.heard().len(), 0);
}

#[test]
fn shards_are_those_of_the_index() {
    let test = test();
    let server = LocalHub::new();
    server.file("config.json", CONFIG, false).file("model.safetensors.index.json", INDEX, false);
    for shard in ["model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"] {
        server.file(shard, shard, true);
    }
    let hub = Hub::new(HubSettings { endpoint: server.endpoint.clone(), ..test.settings.clone() });
    let name = HubName::model("hf:org/name").unwrap();
    // The description alone first: the weights stay where they are.
    let small = hub.fetch(&name, &HubFiles::Description, &mut |_| ()).unwrap();
    assert_eq!(small.files.keys().collect::<Vec<_>>(), ["config.json"]);
    let fetched = hub.fetch(&name, &HubFiles::Model, &mut |_| ()).unwrap();
    let files = ["config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"];
    assert_eq!(fetched.files.keys().collect::<Vec<_>>(), files);
    // One of them is gone.
    fs::remove_file(fetched.folder.join("model-2.safetensors").canonicalize().unwrap()).unwrap();
    server.heard();
    hub.fetch(&name, &HubFiles::Model, &mut |_| ()).unwrap();
    let heard: Vec<String> = server.heard().into_iter().map(|heard| heard.path).collect();
    assert_eq!(heard, [format!("/org/name/resolve/{COMMIT}/model-2.safetensors")]);
}

#[test]
fn a_slow_hub_is_waited_for() {
    let test = test();
    // Longer in all than a connection may be silent.
    test.server.once("model.safetensors", Mischief::Slow);
    test.fetch().unwrap();
    assert_eq!(test.heard("model.safetensors").len(), 1);
}

#[test]
fn a_download_goes_on_where_a_connection_was_cut() {
    let test = test();
    test.server.once("main?blobs=true", Mischief::Cut(10));
    for bytes in [100_000, 0, 100_000, 10] {
        test.server.once("model.safetensors", Mischief::Cut(bytes));
    }
    let fetched = test.fetch().unwrap();
    assert_eq!(fs::read(fetched.folder.join("model.safetensors")).unwrap(), weights());
    let ranges: Vec<Option<String>> = test.heard("model.safetensors").into_iter().map(|heard| heard.range).collect();
    let from = |bytes: u32| Some(format!("bytes={bytes}-"));
    assert_eq!(ranges, [None, from(100_000), from(100_000), from(200_000), from(200_010)]);
}

#[test]
fn a_killed_download_goes_on_and_a_server_without_ranges_starts_over() {
    let test = test();
    let begun = test.repository().join(format!("blobs/{}.incomplete", sha256(&weights())));
    fs::create_dir_all(begun.parent().unwrap()).unwrap();
    fs::write(&begun, &weights()[..1000]).unwrap();
    test.server.once("model.safetensors", Mischief::Cut(500)).once("model.safetensors", Mischief::Whole);
    let fetched = test.fetch().unwrap();
    assert_eq!(fs::read(fetched.folder.join("model.safetensors")).unwrap(), weights());
    let ranges: Vec<_> = test.heard("model.safetensors").into_iter().filter_map(|heard| heard.range).collect();
    assert_eq!(ranges, ["bytes=1000-", "bytes=1500-"]);
    assert!(!begun.exists());
}

#[test]
fn what_has_another_checksum_is_fetched_once_more_and_then_refused() {
    let test = test();
    test.server.once("model.safetensors", Mischief::Wrong);
    test.fetch().unwrap();
    assert_eq!(test.heard("model.safetensors").len(), 2);

    let again = self::test();
    again.server.once("config.json", Mischief::Wrong).once("config.json", Mischief::Wrong);
    let error = said(again.fetch());
    assert!(error.starts_with("hf:org/name: config.json came with another checksum twice: "), "{error}");
    assert!(error.contains("`hf download org/name` fetches"), "{error}");
    let left: Vec<_> = fs::read_dir(again.repository().join("blobs")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    // The next start is not harmed by it.
    again.fetch().unwrap();
}

#[test]
fn a_hub_that_is_gone_names_the_command_that_fetches() {
    let mut test = test();
    test.settings.timeout = Duration::from_millis(300);
    // A pause and a moment of silence are waited for, not more of them.
    test.server.once("config.json", Mischief::Status(503, "Retry-After: 0\r\n"));
    test.server.once("config.json", Mischief::Silence(Duration::from_millis(600)));
    for _ in 0..5 {
        test.server.once("model.safetensors", Mischief::Silence(Duration::from_millis(600)));
    }
    let error = said(test.fetch());
    assert!(error.contains("cannot be reached: model.safetensors: ") && error.contains("(5 attempts)"), "{error}");
    assert!(error.contains("hint: the same command again goes on with the download;"), "{error}");
    assert!(error.contains("fetch it elsewhere (`hf download org/name`)"), "{error}");
    // Nobody listens there.
    test.settings.endpoint = "http://127.0.0.1:9".into();
    let error = said(test.fetch());
    assert!(error.starts_with("hf:org/name: http://127.0.0.1:9 cannot be reached: "), "{error}");
}

#[test]
fn a_token_is_asked_for_and_then_sent_to_the_hub_alone() {
    let mut test = test();
    let storage = LocalHub::new();
    storage.file("model.safetensors", weights(), true);
    test.server.asks_for("hf_secret").sends_large_files_to(&storage);
    let error = said(test.fetch());
    let page = format!("{}/org/name", test.server.endpoint);
    let expected = format!(
        "hf:org/name: access is restricted, and no token was found\nhint: agree to its terms on {page}; then `hf auth login` stores a \
         token, HF_TOKEN gives one"
    );
    assert_eq!(error, expected);
    test.settings.token = Some("hf_wrong".into());
    assert!(said(test.fetch()).contains("the token may not read it"));
    test.server.heard();

    test.settings.token = Some("hf_secret".into());
    storage.once("model.safetensors", Mischief::Cut(1000));
    let fetched = test.fetch().unwrap();
    assert_eq!(fs::read(fetched.folder.join("model.safetensors")).unwrap(), weights());
    assert!(test.server.heard().iter().all(|heard| heard.token.as_deref() == Some("hf_secret")));
    let heard = storage.heard();
    assert!(heard.len() == 2 && heard.iter().all(|heard| heard.token.is_none()), "{heard:?}");
    assert_eq!(heard[1].range.as_deref(), Some("bytes=1000-"));
}

#[test]
fn a_hub_that_lists_no_checksums_is_asked_for_them() {
    let test = test();
    let storage = LocalHub::new();
    storage.file("model.safetensors", weights(), true);
    test.server.lists_no_checksums().sends_large_files_to(&storage);
    storage.once("model.safetensors", Mischief::Wrong);
    let fetched = test.fetch().unwrap();
    assert_eq!(fetched.files["model.safetensors"], format!("sha256:{}", sha256(&weights())));
    assert_eq!(test.fetch().unwrap(), fetched);
}

#[test]
fn what_is_not_there_is_told_apart() {
    let test = test();
    let fetch =
        |name: &str, wanted: HubFiles| said(test.hub().fetch(&HubName::model(name).unwrap(), &wanted, &mut |_| ()));
    let nobody = fetch("hf:org/nobody", HubFiles::Model);
    assert!(nobody.contains("has no such repository") && nobody.contains("`hf download org/nobody`"), "{nobody}");
    let revision = fetch("hf:org/name@v9", HubFiles::Model);
    assert!(revision.starts_with("hf:org/name@v9: there is no revision `v9`\nhint: "), "{revision}");

    let server = LocalHub::new();
    server.file("config.json", CONFIG, false).file("pytorch_model.bin", "pickled", true);
    let hub = Hub::new(HubSettings { endpoint: server.endpoint.clone(), ..test.settings.clone() });
    let name = HubName::model("hf:org/name").unwrap();
    let pickled = said(hub.fetch(&name, &HubFiles::Model, &mut |_| ()));
    assert!(pickled.contains("has no model.safetensors\nhint: its weights are in another format"), "{pickled}");
    let tokenizer = said(hub.fetch(&name, &HubFiles::Tokenizer, &mut |_| ()));
    assert!(tokenizer.starts_with("hf:org/name: the repository has no tokenizer.json"), "{tokenizer}");
}

#[test]
fn offline_there_is_no_connection() {
    let mut test = test();
    test.settings.offline = true;
    let error = said(test.fetch());
    assert!(
        error.contains("is not in") && error.contains("HF_HUB_OFFLINE is set\nhint: unset HF_HUB_OFFLINE"),
        "{error}"
    );
    assert!(error.contains("`hf download org/name`"), "{error}");
    assert_eq!(test.server.heard().len(), 0);
}

#[test]
fn a_cache_that_another_program_filled_is_used_without_a_connection() {
    let test = test();
    let snapshot = test.repository().join("snapshots").join(COMMIT);
    for folder in [&snapshot, &test.repository().join("blobs"), &test.repository().join("refs")] {
        fs::create_dir_all(folder).unwrap();
    }
    fs::write(test.repository().join("refs/main"), COMMIT).unwrap();
    let put = |name: &str, bytes: &[u8]| {
        let sum = sha256(bytes);
        fs::write(test.repository().join("blobs").join(&sum), bytes).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{sum}"), snapshot.join(name)).unwrap();
    };
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        put(name, name.as_bytes());
    }
    // The weights are not there yet: the hub is asked.
    put("model.safetensors.index.json", INDEX.as_bytes());
    put("model-1.safetensors", b"1");
    let name = HubName::model("hf:org/name").unwrap();
    assert!(test.hub().offline().fetch(&name, &HubFiles::Model, &mut |_| ()).is_err());
    put("model-2.safetensors", b"2");
    let fetched = test.fetch().unwrap();
    assert_eq!(fetched.folder, snapshot);
    assert_eq!(fetched.files["model-2.safetensors"], format!("sha256:{}", sha256(b"2")));
    assert_eq!(test.server.heard().len(), 0);
    // Without a tokenizer, the hub is asked whether it has one; where it cannot be, the model is enough.
    fs::remove_file(snapshot.join("tokenizer.json")).unwrap();
    let nowhere = Hub::new(HubSettings { endpoint: "http://127.0.0.1:9".into(), ..test.settings.clone() });
    assert!(!nowhere.fetch(&name, &HubFiles::Model, &mut |_| ()).unwrap().files.contains_key("tokenizer.json"));
    // It is asked for the commit that is here, not for what the branch is by now.
    assert!(test.fetch().unwrap().files.contains_key("tokenizer.json"));
    assert!(test.server.heard()[0].path.ends_with(&format!("revision/{COMMIT}?blobs=true")));
}

#[test]
fn several_processes_download_once() {
    let test = test();
    test.server.once("model.safetensors", Mischief::Slow);
    let mut waited = 0;
    std::thread::scope(|scope| {
        let fetch = || {
            let mut waited = false;
            let name = HubName::model("hf:org/name").unwrap();
            let show = &mut |at: HubProgress<'_>| waited |= matches!(at, HubProgress::Waiting(_));
            test.hub().fetch(&name, &HubFiles::Model, show).unwrap();
            waited
        };
        let all: Vec<_> = (0..4).map(|_| scope.spawn(fetch)).collect();
        waited = all.into_iter().map(|one| one.join().unwrap()).filter(|waited| *waited).count();
    });
    assert_eq!((waited, test.heard("model.safetensors").len()), (3, 1));
}

#[test]
fn data_are_a_file_or_the_files_of_a_folder() {
    let test = test();
    let server = LocalHub::new();
    for name in
        ["README.md", "data/a.parquet", "data/b.jsonl", "data/.hidden.jsonl", "data/en/c.JSONL", "other/d.jsonl"]
    {
        server.file(name, name, name.ends_with("parquet"));
    }
    let hub = Hub::new(HubSettings { endpoint: server.endpoint.clone(), ..test.settings.clone() });
    let fetch = |name: &str| {
        let files = HubFiles::Data(vec!["jsonl".into(), "parquet".into()]);
        hub.fetch(&HubName::dataset(name).unwrap(), &files, &mut |_| ())
    };
    let one = fetch("hf:datasets/org/name/data/a.parquet").unwrap();
    assert_eq!(one.name.to_string(), format!("hf:datasets/org/name@{COMMIT}/data/a.parquet"));
    assert_eq!(one.files.keys().collect::<Vec<_>>(), ["data/a.parquet"]);
    let link = fs::read_link(one.folder.join("data/a.parquet")).unwrap();
    assert!(link.starts_with("../../../blobs"), "{link:?}");
    let folder = fetch("hf:org/name/data").unwrap();
    assert_eq!(folder.files.keys().collect::<Vec<_>>(), ["data/a.parquet", "data/b.jsonl", "data/en/c.JSONL"]);
    assert_eq!(fetch("hf:org/name").unwrap().files.len(), 4);
    assert!(
        said(fetch("hf:org/name/nothing")).contains("no file in nothing with one of the extensions jsonl, parquet")
    );
    server.heard();
    fetch("hf:org/name").unwrap();
    assert_eq!(server.heard().len(), 0);
}

#[test]
fn a_hub_that_lists_files_elsewhere_is_not_believed() {
    let test = test();
    test.server.file("../../outside.txt", "x", false);
    let error = said(test.fetch());
    assert!(error.contains("answers with the file name \"../../outside.txt\""), "{error}");
    assert!(!test.repository().exists());
}
