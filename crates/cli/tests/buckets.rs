//! Data and checkpoints in a bucket, from whole commands against a server of this machine that checks signatures and misbehaves.

mod common;
#[path = "../../bucket/tests/server/mod.rs"]
mod server;

use common::{CONFIG, Place};
use server::{KEY_ID, LocalS3, Mischief, REGION, SECRET};
use std::fs;
use std::path::Path;
use std::process::Output;

/// A folder, and a server with an empty bucket.
struct Test {
    place: Place,
    server: LocalS3,
}

impl Test {
    fn new() -> Self {
        Self { place: Place::new(), server: LocalS3::new("data") }
    }

    fn run_as(&self, secret: &str, args: &[&str]) -> Output {
        let mut command = self.place.command(args);
        for (name, _) in
            std::env::vars().filter(|(name, _)| name.starts_with("AWS_") || name.to_lowercase().ends_with("_proxy"))
        {
            command.env_remove(name);
        }
        command
            .env("HOME", self.place.path("home"))
            .env("XDG_CACHE_HOME", self.place.path("cache"))
            .env("AWS_ENDPOINT_URL_S3", &self.server.endpoint)
            .env("AWS_ACCESS_KEY_ID", KEY_ID)
            .env("AWS_SECRET_ACCESS_KEY", secret)
            .env("AWS_REGION", REGION)
            .output()
            .unwrap()
    }

    fn run(&self, args: &[&str]) -> Output {
        self.run_as(SECRET, args)
    }

    /// Trains with these settings, and gives what was written to stderr.
    fn train(&self, dir: &str, set: &[&str]) -> String {
        let output = self.run(&train(dir, set));
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        text
    }

    fn fails(&self, output: Output, code: i32) -> String {
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains("\nhint: ") && !text.contains("panicked"), "{text}");
        text
    }

    /// Puts the files of a folder into the bucket.
    fn upload(&self, folder: &str, key: &str) {
        fn walk(server: &LocalS3, folder: &Path, key: &str) {
            for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
                let key = format!("{key}/{}", entry.file_name().to_str().unwrap());
                match entry.path().is_dir() {
                    true => walk(server, &entry.path(), &key),
                    false => server.put("data", &key, fs::read(entry.path()).unwrap()),
                }
            }
        }
        walk(&self.server, &self.place.path(folder), key);
    }

    fn bytes_in(&self, folder: &str) -> u64 {
        fn walk(folder: &Path) -> u64 {
            let entries = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap());
            entries
                .map(|entry| if entry.path().is_dir() { walk(&entry.path()) } else { entry.metadata().unwrap().len() })
                .sum()
        }
        walk(&self.place.path(folder))
    }
}

fn train<'a>(dir: &'a str, set: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["train", "run.toml", "--quiet", "--run-dir", dir];
    args.extend(set.iter().flat_map(|set| ["--set", set]));
    args
}

/// The steps of the checkpoints in the bucket that are whole.
fn steps(server: &LocalS3, key: &str) -> Vec<u64> {
    let step = |key: String, prefix: &str| key.strip_prefix(prefix)?.strip_suffix("/manifest.json")?.parse().ok();
    let prefix = format!("{key}/step-");
    server.keys("data").into_iter().filter_map(|key| step(key, &prefix)).collect()
}

/// Prepared data of 12 MB, more than is fetched ahead: read from files and from a bucket whose server is slow, cuts bodies, refuses, goes
/// down and comes back.
#[test]
fn losses_from_a_bucket_are_those_from_files_whatever_its_server_does() {
    let test = Test::new();
    let text: String = (0..400_000u64).map(|i| format!("line {i}: the square is {}.\n", i * i % 9973)).collect();
    fs::write(test.place.path("corpus/long.txt"), text).unwrap();
    test.place.ok(&["data", "prepare", "run.toml", "--out", "tokens"]);
    test.upload("tokens", "tokens");
    let fixed = ["data.prepared=s3://data/tokens", "data.bucket_timeout=60"];
    test.train("files", &["data.prepared=tokens"]);
    let files = test.place.trajectory("files");
    assert_eq!(files.len(), 20);

    // Slow and rude, and waited for.
    for (mischief, times) in [
        (Mischief::Status(503, "SlowDown"), 3),
        (Mischief::Cut(100_000), 5),
        (Mischief::Forgets, 2),
        (Mischief::Status(500, "InternalError"), 3),
    ] {
        test.server.plant("GET", ".shard", mischief, times);
    }
    test.train("bucket", &fixed);
    assert_eq!(test.place.trajectory("bucket"), files);
    let ranges =
        test.server.heard().iter().filter(|heard| heard.path.ends_with(".shard") && heard.method == "GET").count();
    assert!(ranges > 20, "{ranges}");

    // On two ranks, from the cache alone; and with a cache that holds a few blocks.
    test.train("two", &[&fixed[..], &["parallel.dp=2"]].concat());
    assert_eq!(
        test.server.heard().iter().filter(|heard| heard.path.ends_with(".shard") && heard.method == "GET").count(),
        0
    );
    test.train("two-files", &["data.prepared=tokens", "parallel.dp=2"]);
    assert_eq!(test.place.trajectory("two"), test.place.trajectory("two-files"));
    test.train("small", &[&fixed[..], &["data.cache=small-cache", "data.cache_size=1 MiB"]].concat());
    assert_eq!(test.place.trajectory("small"), files);
    let cached = test.bytes_in("small-cache");
    assert!(cached > 0 && cached <= 1 << 20, "{cached}");

    // The server goes down in the middle: a checkpoint of the last step, an error, and nothing lost.
    test.server.goes_down_after(ranges * 3 / 4);
    let less = [
        "data.prepared=s3://data/tokens",
        "data.bucket_timeout=0.5",
        "data.cache_size=1 MiB",
        "data.cache=other-cache",
    ];
    let text = test.fails(test.run(&train("down", &less)), 1);
    assert!(text.contains("s3://data/tokens/") && text.contains("attempts in"), "{text}");
    let done = test.place.trajectory("down").len();
    assert!(done > 0 && done < 20 && test.place.trajectory("down") == files[..done], "{done} steps");
    assert!(test.place.path(&format!("down/checkpoints/step-{done:08}")).is_dir(), "{done} steps");
    test.server.set_down(false);
    test.train("down", &less);
    assert_eq!(test.place.trajectory("down"), files);

    // What is wrong is said before a step is computed.
    for (secret, prepared, said) in [
        ("wrong", "s3://data/tokens", "the server answers 403"),
        (SECRET, "s3://data/nothing", "no prepared data there"),
        (SECRET, "s3://other-bucket/tokens", "s3://other-bucket/tokens"),
        (SECRET, "s3://x/tokens", "a bucket's name has"),
    ] {
        let set = format!("data.prepared={prepared}");
        let output = test.run_as(secret, &train("wrong", &[&set]));
        let code = output.status.code().unwrap();
        let text = test.fails(output, code);
        assert!(text.contains(said) && !test.place.path("wrong/metrics.jsonl").exists(), "{prepared}: {text}");
    }
}

#[test]
fn text_in_a_bucket_becomes_the_tokens_that_its_files_become() {
    let test = Test::new();
    fs::create_dir_all(test.place.path("corpus/0/deep")).unwrap();
    for (name, text) in [
        ("0/deep/a b.txt", "in a folder\n".repeat(500)),
        ("0.txt", "beside it\n".repeat(300)),
        ("records.jsonl", "{\"text\": \"a record\"}\n".repeat(200)),
        (".hidden.txt", "not read".into()),
        ("picture.png", "not text".into()),
        ("empty.txt", String::new()),
    ] {
        fs::write(test.place.path("corpus").join(name), text).unwrap();
    }
    test.upload("corpus", "text");
    test.server.plant("GET", ".txt", Mischief::Cut(10), 3);
    test.server.lists_at_most(4);
    test.place.ok(&["data", "prepare", "run.toml", "--out", "files"]);
    test.place.config(&CONFIG.replace("\"corpus\"", "\"s3://data/text/\""));
    let output = test.run(&["data", "prepare", "run.toml", "--out", "bucket"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for name in ["train.shard", "validation.shard"] {
        let [files, bucket] = ["files", "bucket"].map(|folder| fs::read(test.place.path(folder).join(name)).unwrap());
        assert!(files == bucket, "{name}");
    }
    // The same text is known again, wherever it is.
    test.train("run", &["data.prepared=files", "train.steps=2"]);
    let output = test.run(&["data", "prepare", "run.toml", "--out", "s3://data/out"]);
    assert!(test.fails(output, 2).contains("aws s3 sync"));
    let output = test.run(&train("none", &["data.paths=[\"s3://data/none\"]"]));
    let code = output.status.code().unwrap();
    assert!(test.fails(output, code).contains("s3://data/none"));
}

#[test]
fn a_mirror_in_a_bucket_takes_over_and_is_complete_or_not_there() {
    let test = Test::new();
    let set = ["checkpoint.mirror=s3://data/runs", "data.bucket_timeout=1"];
    test.train("whole", &set);
    let whole = test.place.trajectory("whole");
    assert_eq!(steps(&test.server, "runs/whole"), [10, 15, 20]);
    for entry in fs::read_dir(test.place.path("whole/checkpoints/step-00000020")).unwrap() {
        let entry = entry.unwrap();
        let key = format!("runs/whole/step-00000020/{}", entry.file_name().to_str().unwrap());
        assert!(test.server.get("data", &key) == Some(fs::read(entry.path()).unwrap()), "{key}");
    }

    // Nothing is left of a run directory but the mirror.
    fs::remove_dir_all(test.place.path("whole")).unwrap();
    let more = [&set[..], &["train.steps=20"]].concat();
    let text = test.train("whole", &more);
    assert!(text.contains("using step 20 of s3://data/runs/whole"), "{text}");
    assert!(test.place.path("whole/checkpoints/step-00000020/manifest.json").exists());
    // One that is older than the mirror's, after one of the mirror's that lacks an object and one that is damaged.
    fs::remove_dir_all(test.place.path("whole/checkpoints")).unwrap();
    test.server.remove("data", "runs/whole/step-00000020/model.safetensors");
    test.server.begin_upload("data", "runs/whole/step-00000020/model.safetensors");
    let damaged = "runs/whole/step-00000015/model.safetensors";
    let model = test.server.get("data", damaged).unwrap();
    test.server.put("data", damaged, vec![0; model.len()]);
    let text = test.train("whole", &more);
    assert!(text.contains("is damaged (model.safetensors: no such object)"), "{text}");
    assert!(text.contains("is damaged (model.safetensors: checksum differs)"), "{text}");
    assert!(text.contains("using step 10 of s3://data/runs/whole"), "{text}");
    let again = test.place.trajectory("whole");
    assert_eq!(again[again.len() - 10..], whole[10..]);
    assert_eq!(steps(&test.server, "runs/whole"), [10, 15, 20]);
    assert!(test.server.get("data", damaged) == Some(model), "written again");
    assert_eq!(test.server.open_uploads(), 0);

    // A full server: the run goes on, and what came is no checkpoint.
    test.server.plant("PUT", "optimizer.safetensors", Mischief::Status(507, "InsufficientStorage"), 10_000);
    let text = test.train("full", &set);
    assert!(
        text.contains(
            "warning: the mirror has no copy of step 20: s3://data/runs/full/step-00000020/optimizer.safetensors: "
        ),
        "{text}"
    );
    assert_eq!((test.place.trajectory("full"), steps(&test.server, "runs/full")), (whole.clone(), vec![]));
    test.server.behave();

    // Who starts over does not find the other run there: a manifest comes after what it stands for.
    test.server.heard();
    let output = test.run(&[&train("whole", &set)[..], &["--fresh", "--set", "train.steps=5"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(steps(&test.server, "runs/whole"), [5]);
    assert_eq!(steps(&test.server, "runs/whole/old-1"), [10, 15, 20]);
    let copied = test.server.heard().into_iter().filter(|heard| heard.method == "PUT").map(|heard| heard.path);
    let copied: Vec<_> = copied.filter(|path| path.contains("/old-1/step-00000015/")).collect();
    assert!(copied.len() > 2 && copied.last().unwrap().ends_with("/manifest.json"), "{copied:?}");

    // Credentials that are wrong are told before a step, not after the first checkpoint.
    let text = test.fails(test.run_as("wrong", &train("denied", &set)), 1);
    assert!(text.contains("SignatureDoesNotMatch") && text.contains("AWS_PROFILE"), "{text}");
}
