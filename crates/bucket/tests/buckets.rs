//! Objects read and written through a server that checks signatures and misbehaves.

mod server;

use lockstep_bucket::{BucketAddress, BucketError, BucketFault, BucketSettings, Buckets, Credentials, Limits, Reads};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use server::{KEY_ID, LocalS3, Mischief, REGION, SECRET};
use std::io::{Read, Seek, SeekFrom};
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn settings(server: &LocalS3, cache: Option<&Path>) -> BucketSettings {
    BucketSettings {
        endpoint: Some(server.endpoint.clone()),
        region: REGION.into(),
        credentials: Some(Credentials { key_id: KEY_ID.into(), secret: SECRET.into(), token: None }),
        anonymous: false,
        timeout: Duration::from_secs(20),
        pause: Duration::from_millis(5),
        certificates: None,
        limits: Limits {
            cache: cache.map(Path::to_owned),
            cache_bytes: if cache.is_some() { 100 << 20 } else { 0 },
            give_up: Duration::from_secs(60),
        },
    }
}

/// Gives up soon from now on.
fn give_up_soon(buckets: &Buckets) {
    buckets.set_limits(Limits { cache: None, cache_bytes: 0, give_up: Duration::from_secs(1) });
}

fn buckets(server: &LocalS3) -> Buckets {
    Buckets::new(settings(server, None)).unwrap()
}

fn at(key: &str) -> BucketAddress {
    BucketAddress::parse(&format!("s3://data/{key}")).unwrap()
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|i| (i * i / 7 + i) as u8).collect()
}

fn refused<T: std::fmt::Debug>(result: Result<T, BucketError>, fault: BucketFault) -> String {
    let error = result.unwrap_err();
    assert_eq!(error.fault, fault, "{error}");
    assert!(!error.hint().is_empty());
    error.to_string()
}

#[test]
fn an_object_is_read_like_a_file_from_anywhere_and_from_front_to_back() {
    let server = LocalS3::new("data");
    let content = bytes(5 << 20);
    server.put("data", "a/b ü+c.bin", content.clone());
    for reads in [Reads::Scattered, Reads::InOrder] {
        let file = buckets(&server).open(&at("a/b ü+c.bin"), reads).unwrap();
        assert_eq!(file.len(), content.len() as u64);
        for (from, count) in [(0, 10), (262_140, 8), (content.len() - 3, 3), (1_000_000, 3_000_000), (7, 0)] {
            let mut some = vec![0; count];
            file.expect(from as u64, count as u64);
            file.read_at(from as u64, &mut some).unwrap();
            assert_eq!(some, content[from..from + count], "{from}");
        }
        let mut reader = file.reader(0);
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        assert!(all == content);
        reader.seek(SeekFrom::End(-2)).unwrap();
        all.clear();
        reader.read_to_end(&mut all).unwrap();
        assert_eq!(all, content[content.len() - 2..]);
    }
}

#[test]
fn a_cut_body_is_read_on_from_where_it_was_cut() {
    let server = LocalS3::new("data");
    let content = bytes(200_000);
    server.put("data", "a", content.clone());
    server.plant("GET", "a", Mischief::Cut(150_000), 1);
    server.plant("GET", "a", Mischief::Cut(0), 1);
    server.plant("GET", "a", Mischief::Cut(20_000), 1);
    assert_eq!(buckets(&server).read(&at("a"), 1 << 20).unwrap(), Some(content));
    let ranges: Vec<_> = server.heard().into_iter().filter_map(|heard| heard.range).collect();
    assert_eq!(ranges, ["bytes=0-199999", "bytes=150000-199999", "bytes=150000-199999", "bytes=170000-199999"]);
}

#[test]
fn what_may_pass_is_tried_again_and_what_does_not_is_an_error_in_time() {
    let server = LocalS3::new("data");
    server.put("data", "a", "text");
    for mischief in [
        Mischief::Status(503, "SlowDown"),
        Mischief::Status(500, "InternalError"),
        Mischief::Status(429, ""),
        Mischief::Forgets,
    ] {
        server.plant("GET", "a", mischief, 2);
    }
    server.plant("HEAD", "a", Mischief::Silence(Duration::from_millis(2000)), 1);
    let timeout = Duration::from_millis(500);
    let own = Buckets::new(BucketSettings { timeout, ..settings(&server, None) }).unwrap();
    assert_eq!(own.read(&at("a"), 10).unwrap(), Some(b"text".to_vec()));

    give_up_soon(&own);
    server.set_down(true);
    let lines = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let heard = lines.clone();
    own.on_wait(move |line| heard.lock().unwrap().push(line.to_owned()));
    let begun = Instant::now();
    let text = refused(own.look(&at("a")), BucketFault::Unreachable);
    assert!(text.contains("attempts in") && begun.elapsed() < Duration::from_secs(20), "{text}");
    server.set_down(false);
    own.look(&at("a")).unwrap();
    let lines = lines.lock().unwrap();
    assert!(
        lines.len() == 2 && lines[0].contains("tried again for") && lines[1].contains("answers again"),
        "{lines:?}"
    );
}

#[test]
fn what_is_wrong_is_told_apart() {
    let server = LocalS3::new("data");
    server.put("data", "a", "text");
    let wrong = |change: &dyn Fn(&mut BucketSettings)| {
        let mut settings = settings(&server, None);
        change(&mut settings);
        Buckets::new(settings).unwrap().read(&at("a"), 10)
    };
    let text = refused(wrong(&|s| s.credentials.as_mut().unwrap().secret = "other".into()), BucketFault::Denied);
    assert!(text.contains("403"), "{text}");
    refused(wrong(&|s| s.credentials = None), BucketFault::NoCredentials);
    refused(
        wrong(&|s| {
            s.credentials = None;
            s.anonymous = true;
        }),
        BucketFault::Denied,
    );
    server.answers_all();
    let open = wrong(&|s| {
        s.credentials = None;
        s.anonymous = true;
    });
    assert_eq!(open.unwrap(), Some(b"text".to_vec()));
    let own = buckets(&server);
    assert_eq!(own.read(&at("b"), 10).unwrap(), None);
    refused(own.open(&at("b"), Reads::InOrder), BucketFault::Missing);
    refused(own.list(&BucketAddress::parse("s3://other/a").unwrap()), BucketFault::NoBucket);
    refused(own.read(&at("a"), 3), BucketFault::Refused);
    server.plant("GET", "a", Mischief::Status(403, "RequestTimeTooSkewed"), 1);
    refused(own.read(&at("a"), 10), BucketFault::Clock);
    server.plant("PUT", "a", Mischief::Status(403, "QuotaExceeded"), 1);
    assert!(refused(own.write(&at("a"), b"x"), BucketFault::Refused).contains("QuotaExceeded"));
}

#[test]
fn an_object_that_changes_is_an_error_and_no_mixture() {
    let server = LocalS3::new("data");
    server.put("data", "a", bytes(600_000));
    let file = buckets(&server).open(&at("a"), Reads::Scattered).unwrap();
    file.read_at(0, &mut [0; 10]).unwrap();
    server.put("data", "a", bytes(600_001));
    refused(file.read_at(300_000, &mut [0; 10]), BucketFault::Changed);
}

#[test]
fn listings_have_every_page_in_order_and_only_what_can_be_a_path() {
    let server = LocalS3::new("data");
    server.lists_at_most(3);
    for key in [
        "t/b.txt",
        "t/a c.txt",
        "t/a/x.txt",
        "t/a/y&z.txt",
        "t/ü.txt",
        "tt/no.txt",
        "t/folder/",
        "t/../etc",
        "t//x",
        "t/new\nline",
    ] {
        server.put("data", key, key);
    }
    let found = buckets(&server).list(&at("t")).unwrap();
    let keys: Vec<_> = found.iter().map(|listed| (listed.address.key(), listed.bytes)).collect();
    assert_eq!(keys, [("t/a c.txt", 9), ("t/a/x.txt", 9), ("t/a/y&z.txt", 11), ("t/b.txt", 7), ("t/ü.txt", 8)]);
    server.plant("GET", "", Mischief::Status(503, "SlowDown"), 1);
    assert_eq!(buckets(&server).list(&at("nothing")).unwrap(), []);
}

#[test]
fn a_second_process_reads_from_the_cache_and_not_what_was_written_since() {
    let server = LocalS3::new("data");
    let cache = tempfile::tempdir().unwrap();
    let own = || Buckets::new(settings(&server, Some(cache.path()))).unwrap();
    server.put("data", "a", bytes(600_000));
    let read = |buckets: Buckets| {
        let file = buckets.open(&at("a"), Reads::Scattered).unwrap();
        let mut some = vec![0; 500_000];
        file.read_at(50_000, &mut some).unwrap();
        some
    };
    let gets = || server.heard().iter().filter(|heard| heard.method == "GET").count();
    assert_eq!(read(own()), bytes(600_000)[50_000..550_000]);
    assert_eq!(gets(), 3);
    assert_eq!(read(own()), bytes(600_000)[50_000..550_000]);
    assert_eq!(gets(), 0);
    server.put("data", "a", vec![7; 600_000]);
    assert_eq!(read(own()), vec![7; 500_000]);
}

#[test]
fn blocks_that_are_expected_come_side_by_side_and_once() {
    let server = LocalS3::new("data");
    let content = bytes(8 << 20);
    server.put("data", "a", content.clone());
    let own = buckets(&server);
    let file = own.open(&at("a"), Reads::Scattered).unwrap();
    server.heard();
    for _ in 0..3 {
        file.expect(0, content.len() as u64);
    }
    let mut all = vec![0; content.len()];
    file.read_at(0, &mut all).unwrap();
    assert!(all == content);
    let mut ranges: Vec<_> = server.heard().into_iter().filter_map(|heard| heard.range).collect();
    assert_eq!(ranges.len(), 32);
    ranges.dedup();
    assert_eq!(ranges.len(), 32);
}

#[test]
fn long_objects_go_up_in_parts_which_are_sent_again_or_taken_away() {
    let server = LocalS3::new("data");
    let own = buckets(&server);
    let content = bytes(40 << 20);
    server.plant("PUT", "partNumber=2&uploadId=upload-1", Mischief::Status(507, "Full"), 2);
    server.plant("POST", "uploadId=upload-1", Mischief::Forgets, 1);
    own.upload(&at("a"), &mut &content[..], content.len() as u64).unwrap();
    assert!(server.get("data", "a").unwrap() == content);
    own.upload(&at("short"), &mut &b"text"[..], 4).unwrap();
    assert_eq!(server.get("data", "short").unwrap(), b"text");

    // A full server is waited for, and no part stays where it remains so.
    give_up_soon(&own);
    server.plant("PUT", "partNumber=3&uploadId=upload-2", Mischief::Status(507, "Full"), 10_000);
    let text = refused(own.upload(&at("b"), &mut &content[..], content.len() as u64), BucketFault::Unreachable);
    assert!(text.contains("507 Full"), "{text}");
    assert_eq!((server.open_uploads(), server.get("data", "b")), (0, None));
    // A file that is shorter than it was.
    let own = buckets(&server);
    let short = &content[..content.len() - 1];
    refused(own.upload(&at("b"), &mut &short[..], content.len() as u64), BucketFault::Local);
    assert_eq!((server.open_uploads(), server.get("data", "b")), (0, None));

    // An object of before that has the same length is not what was sent.
    server.plant("POST", "uploadId=upload-4", Mischief::Status(404, "NoSuchUpload"), 1);
    let other = vec![7; content.len()];
    let text = refused(own.upload(&at("a"), &mut &other[..], other.len() as u64), BucketFault::Refused);
    assert!(text.contains("has lost the upload") && server.get("data", "a").unwrap() == content, "{text}");

    own.copy(&at("short"), &at("c d"), 4).unwrap();
    own.remove(&at("short")).unwrap();
    own.remove(&at("short")).unwrap();
    assert_eq!(server.keys("data"), ["a", "c d"]);
}

#[test]
fn long_objects_are_copied_in_ranges_that_do_not_take_long() {
    let server = LocalS3::new("data");
    server.put("data", "a", "short");
    // The object is shorter than that, so it is no copy in the end.
    refused(buckets(&server).copy(&at("a"), &at("b"), (128 << 20) + 3), BucketFault::Refused);
    let mut ranges: Vec<_> = server.heard().into_iter().filter_map(|heard| heard.range).collect();
    ranges.sort();
    assert_eq!(ranges, ["bytes=0-134217727", "bytes=134217728-134217730"]);
}

#[test]
fn parts_of_uploads_that_nobody_completes_are_taken_away() {
    let server = LocalS3::new("data");
    for key in ["run/a", "run/old 1/b", "running/c"] {
        server.begin_upload("data", key);
    }
    // Who may not list them has them still, and no error.
    server.plant("GET", "uploads=", Mischief::Status(501, "NotImplemented"), 1);
    buckets(&server).remove_unfinished(&at("run"));
    assert_eq!(server.open_uploads(), 3);
    buckets(&server).remove_unfinished(&at("run"));
    assert_eq!(server.open_uploads(), 1);
    buckets(&server).remove_unfinished(&BucketAddress::parse("s3://data").unwrap());
    assert_eq!(server.open_uploads(), 0);
}

/// A server with a certificate that nobody has signed.
#[test]
fn a_certificate_that_is_not_trusted_is_an_error_at_once() {
    let pem = include_bytes!("server/self-signed.pem");
    let certificate = CertificateDer::from_pem_slice(pem).unwrap();
    let key = PrivateKeyDer::from_pem_slice(pem).unwrap();
    let provider = rustls::crypto::ring::default_provider().into();
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("https://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut connection = rustls::ServerConnection::new(config.clone()).unwrap();
            let _ = connection.complete_io(&mut stream);
        }
    });
    let local = LocalS3::new("data");
    let own = Buckets::new(BucketSettings { endpoint: Some(endpoint), ..settings(&local, None) }).unwrap();
    give_up_soon(&own);
    let error = own.look(&at("a")).unwrap_err();
    assert_eq!(error.fault, BucketFault::Unreachable);
    assert!(error.problem.contains("certificate") && !error.problem.contains("attempts"), "{error}");
    assert!(error.hint().contains("AWS_CA_BUNDLE"), "{}", error.hint());
}
