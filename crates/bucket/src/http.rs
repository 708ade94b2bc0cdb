//! One request and its answer, and what to do when there is none.

use crate::address::escaped;
use crate::sign::{Signed, now, sha256};
use crate::xml;
use crate::{BucketAddress, BucketError, BucketFault, BucketSettings, Credentials};
use std::collections::BTreeMap;
use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use ureq::Agent;
use ureq::http::{HeaderMap, Method, Response, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

/// Bytes of an answer that is no object: a listing of a thousand keys has less.
const MOST_TEXT: u64 = 16 << 20;
/// The longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(20);

/// A request.
#[derive(Clone, Default)]
pub(crate) struct Ask<'a> {
    pub method: Method,
    /// Names and values, not escaped.
    pub query: Vec<(&'static str, String)>,
    pub headers: Vec<(&'static str, String)>,
    pub body: &'a [u8],
    /// Statuses that are answers, besides those of success.
    pub also: &'static [u16],
}

/// An answer, with all of its body.
pub(crate) struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
    /// Why the body is not all that was announced.
    pub cut: Option<String>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The ETag, without quotes.
    pub fn etag(&self) -> Option<String> {
        self.header("etag").map(|tag| tag.trim_start_matches("W/").trim_matches('"').to_owned())
    }
}

/// Why there is no answer.
pub(crate) enum Failed {
    /// It may go better next time, after so long at least.
    Again { cause: String, after: Option<Duration> },
    /// It will not.
    Final(BucketError),
}

/// A client of one server.
pub(crate) struct Client {
    agent: Agent,
    pub settings: BucketSettings,
    credentials: Mutex<Option<Credentials>>,
    /// The regions of buckets that are elsewhere.
    regions: Mutex<BTreeMap<String, String>>,
    limits: Mutex<crate::Limits>,
    /// Whether somebody was told that the server is waited for.
    told: AtomicBool,
    tell: Mutex<Option<Tell>>,
}

/// Hears, in a line, that a server is waited for, and that it is back.
pub(crate) type Tell = Box<dyn Fn(&str) + Send + Sync>;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    pub fn new(settings: BucketSettings) -> Result<Self, BucketError> {
        let wrong = |cause: String| BucketError::of("AWS_CA_BUNDLE", BucketFault::Local, cause);
        if settings.endpoint_names_a_user() {
            // Without the address: it may hold a password.
            let problem = "the server's address has a user name or a password in it, and requests are signed instead";
            let names = "AWS_ENDPOINT_URL_S3 (or AWS_ENDPOINT_URL, or endpoint_url of the profile)";
            return Err(BucketError::of(names, BucketFault::Endpoint, problem));
        }
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_idle_connections(64)
            .max_idle_connections_per_host(32)
            .user_agent(concat!("lockstep/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(settings.timeout))
            .timeout_connect(Some(settings.timeout))
            .timeout_recv_response(Some(settings.timeout * 2))
            .timeout_per_read(Some(settings.timeout))
            .timeout_per_write(Some(settings.timeout));
        if let Some(path) = &settings.certificates {
            let pem = std::fs::read(path).map_err(|error| wrong(format!("{}: {error}", path.display())))?;
            let certificates: Vec<_> = parse_pem(&pem)
                .filter_map(|item| match item {
                    Ok(PemItem::Certificate(certificate)) => Some(certificate),
                    _ => None,
                })
                .collect();
            if certificates.is_empty() {
                return Err(wrong(format!("no certificate in {}", path.display())));
            }
            let tls = TlsConfig::builder().root_certs(RootCerts::new_with_certs(&certificates)).build();
            config = config.tls_config(tls);
        }
        Ok(Self {
            agent: config.build().new_agent(),
            credentials: Mutex::new(settings.credentials.clone()),
            regions: Mutex::default(),
            limits: Mutex::new(settings.limits.clone()),
            settings,
            told: AtomicBool::new(false),
            tell: Mutex::new(None),
        })
    }

    pub fn limits(&self) -> crate::Limits {
        lock(&self.limits).clone()
    }

    pub fn set_limits(&self, limits: crate::Limits) {
        *lock(&self.limits) = limits;
    }

    pub fn set_tell(&self, tell: Tell) {
        *lock(&self.tell) = Some(tell);
    }

    /// Asks until there is an answer, or for as long as it is tried.
    pub fn ask(&self, address: &BucketAddress, ask: &Ask<'_>) -> Result<Answer, BucketError> {
        let mut attempts = Attempts::new(self, address);
        loop {
            match self.once(address, ask) {
                Ok(Answer { cut: Some(cause), .. }) => attempts.wait(Failed::Again { cause, after: None })?,
                Ok(answer) => {
                    attempts.succeeded();
                    return Ok(answer);
                }
                Err(failed) => attempts.wait(failed)?,
            }
        }
    }

    /// Asks once, and once more where the server says that the bucket is in another region or the credentials have expired and others are
    /// there by now.
    pub fn once(&self, address: &BucketAddress, ask: &Ask<'_>) -> Result<Answer, Failed> {
        let mut again = true;
        loop {
            let credentials = lock(&self.credentials).clone();
            if credentials.is_none() && !self.settings.anonymous {
                return Err(Failed::Final(BucketError::at(
                    address,
                    BucketFault::NoCredentials,
                    "there are no credentials",
                )));
            }
            let answer = self.send(address, ask, credentials.as_ref())?;
            let status = answer.status;
            if (200..300).contains(&status) || ask.also.contains(&status) {
                return Ok(answer);
            }
            let text = answer.text();
            let code = xml::text(&text, "Code").unwrap_or_default();
            let region = answer.header("x-amz-bucket-region").map(str::to_owned).or_else(|| xml::text(&text, "Region"));
            if std::mem::take(&mut again) {
                let known = region.as_ref().is_none_or(|region| *region == self.region(address));
                if let (301 | 307 | 400, false, Some(region)) = (status, known, region) {
                    lock(&self.regions).insert(address.bucket().to_owned(), region);
                    continue;
                }
                let renewed = BucketSettings::from_env().credentials;
                if code == "ExpiredToken" && renewed.is_some() && renewed != credentials {
                    *lock(&self.credentials) = renewed;
                    continue;
                }
            }
            return Err(refused(address, &answer, &code, &text));
        }
    }

    fn region(&self, address: &BucketAddress) -> String {
        lock(&self.regions).get(address.bucket()).cloned().unwrap_or_else(|| self.settings.region.clone())
    }

    fn send(
        &self,
        address: &BucketAddress,
        ask: &Ask<'_>,
        credentials: Option<&Credentials>,
    ) -> Result<Answer, Failed> {
        let last = |cause: String| Failed::Final(BucketError::at(address, BucketFault::Refused, cause));
        let region = self.region(address);
        let key = escaped(address.key(), true);
        // With a dot, no certificate fits the bucket's own host.
        let by_path = || format!("/{}/{key}", address.bucket());
        let (server, path) = match &self.settings.endpoint {
            Some(endpoint) => (endpoint.clone(), by_path()),
            None if address.bucket().contains('.') => (format!("https://s3.{region}.amazonaws.com"), by_path()),
            None => (format!("https://{}.s3.{region}.amazonaws.com", address.bucket()), format!("/{key}")),
        };
        let mut query: Vec<String> = ask
            .query
            .iter()
            .map(|(name, value)| format!("{}={}", escaped(name, false), escaped(value, false)))
            .collect();
        query.sort();
        let query = query.join("&");
        let text = if query.is_empty() { format!("{server}{path}") } else { format!("{server}{path}?{query}") };
        let uri: Uri = text.parse().map_err(|_| last(format!("{text:?} is no address")))?;
        let Some(host) = uri.authority().map(|authority| authority.as_str().to_owned()) else {
            return Err(last(format!("{text:?} is no address; check AWS_ENDPOINT_URL_S3")));
        };
        // An endpoint may itself have a path.
        let path = uri.path().to_owned();
        let (payload, time) = (sha256(ask.body), now());
        let mut headers: Vec<(String, String)> =
            ask.headers.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        headers.push(("host".into(), host));
        headers.push(("x-amz-content-sha256".into(), payload.clone()));
        headers.push(("x-amz-date".into(), time.clone()));
        if let Some(token) = credentials.and_then(|credentials| credentials.token.as_ref()) {
            headers.push(("x-amz-security-token".into(), token.clone()));
        }
        headers.sort();
        let authorization = credentials.map(|credentials| {
            let method = ask.method.as_str();
            Signed {
                method,
                path: &path,
                query: &query,
                headers: &headers,
                payload: &payload,
                time: &time,
                region: &region,
            }
            .authorization(credentials)
        });
        let sent = match ask.method {
            Method::PUT | Method::POST => {
                let mut request = if ask.method == Method::PUT { self.agent.put(&uri) } else { self.agent.post(&uri) };
                for (name, value) in headers.iter().filter(|(name, _)| name != "host") {
                    request = request.header(name, value);
                }
                request = request.header("content-type", "application/octet-stream");
                if let Some(value) = authorization {
                    request = request.header("authorization", value);
                }
                request.send(ask.body)
            }
            _ => {
                let mut request = match ask.method {
                    Method::HEAD => self.agent.head(&uri),
                    Method::DELETE => self.agent.delete(&uri),
                    _ => self.agent.get(&uri),
                };
                // Lengths and ranges are those of the object itself.
                request = request.header("accept-encoding", "identity");
                for (name, value) in headers.iter().filter(|(name, _)| name != "host") {
                    request = request.header(name, value);
                }
                if let Some(value) = authorization {
                    request = request.header("authorization", value);
                }
                request.call()
            }
        };
        let response = sent.map_err(|error| match is_final(&error) {
            true => Failed::Final(BucketError::at(address, BucketFault::Unreachable, error.to_string())),
            false => Failed::Again { cause: error.to_string(), after: None },
        })?;
        let body = ask.method != Method::HEAD;
        whole(response, if body { MOST_TEXT.max(range_bytes(ask)) } else { 0 })
    }
}

/// Whether a request will fail in the same way again.
fn is_final(error: &ureq::Error) -> bool {
    use ureq::Error::{BadUri, Http, Io, Rustls, Tls};
    match error {
        BadUri(_) | Http(_) | Tls(_) | Rustls(_) => true,
        // A handshake fails inside of an I/O error.
        Io(error) => {
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
            matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
        }
        _ => false,
    }
}

/// The bytes that a request for a range asks for.
fn range_bytes(ask: &Ask<'_>) -> u64 {
    let range =
        ask.headers.iter().find(|(name, _)| *name == "range").and_then(|(_, value)| value.strip_prefix("bytes="));
    let numbers = range.and_then(|range| range.split_once('-')).map(|(from, to)| (from.parse(), to.parse()));
    match numbers {
        Some((Ok::<u64, _>(from), Ok::<u64, _>(to))) => (to + 1).saturating_sub(from),
        _ => 0,
    }
}

/// Reads a body. What came before a connection failed counts.
fn whole(mut response: Response<ureq::Body>, most: u64) -> Result<Answer, Failed> {
    let announced = response.body().content_length().filter(|_| most > 0);
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let mut body = Vec::new();
    let read = response.body_mut().as_reader().take(most).read_to_end(&mut body);
    let cut = match (read, announced) {
        (Err(error), _) => Some(error.to_string()),
        (Ok(_), Some(announced)) if (body.len() as u64) < announced.min(most) => {
            Some(format!("the connection ended after {} of {announced} bytes", body.len()))
        }
        _ => None,
    };
    Ok(Answer { status, headers, body, cut })
}

/// What an answer means that is none.
fn refused(address: &BucketAddress, answer: &Answer, code: &str, text: &str) -> Failed {
    let status = answer.status;
    let said = xml::text(text, "Message").unwrap_or_default();
    let said: String = said.chars().filter(|c| !c.is_control()).take(200).collect();
    let name = if code.is_empty() { String::new() } else { format!(" {code}") };
    let problem = match said.is_empty() {
        true => format!("the server answers {status}{name}"),
        false => format!("the server answers {status}{name}: {said}"),
    };
    if matches!(status, 500..=599 | 408 | 429) || ["RequestTimeout", "SlowDown"].contains(&code) {
        let after = answer.header("retry-after").and_then(|text| text.parse().ok());
        return Failed::Again { cause: problem, after: after.map(|seconds: u64| Duration::from_secs(seconds.min(60))) };
    }
    let fault = match (status, code) {
        (_, "RequestTimeTooSkewed") => BucketFault::Clock,
        (_, "NoSuchBucket") => BucketFault::NoBucket,
        (403, code) if code.contains("Quota") || code.contains("Full") => BucketFault::Refused,
        (401 | 403, _) => BucketFault::Denied,
        (404, _) => BucketFault::Missing,
        (412, _) => BucketFault::Changed,
        _ => BucketFault::Refused,
    };
    Failed::Final(BucketError::at(address, fault, problem))
}

/// Attempts in a row that bring nothing.
pub(crate) struct Attempts<'a> {
    client: &'a Client,
    address: &'a BucketAddress,
    /// When the first of them failed.
    since: Option<Instant>,
    failed: u32,
}

impl<'a> Attempts<'a> {
    pub fn new(client: &'a Client, address: &'a BucketAddress) -> Self {
        Self { client, address, since: None, failed: 0 }
    }

    /// Something came.
    pub fn succeeded(&mut self) {
        if self.client.told.swap(false, Ordering::Relaxed)
            && let Some(tell) = &*lock(&self.client.tell)
        {
            tell(&format!("{}: the server answers again", self.address));
        }
        (self.since, self.failed) = (None, 0);
    }

    /// Waits for the next attempt; an error where it has been tried for long enough.
    pub fn wait(&mut self, failed: Failed) -> Result<(), BucketError> {
        let (cause, after) = match failed {
            Failed::Final(error) => return Err(error),
            Failed::Again { cause, after } => (cause, after),
        };
        let since = *self.since.get_or_insert_with(Instant::now);
        self.failed += 1;
        let pause = self.client.settings.pause * 2u32.pow(self.failed.min(16) - 1);
        // Between half and all of it, so that many ranks do not come back at once.
        let random =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.subsec_nanos() % 1024);
        let pause = pause.min(LONGEST_PAUSE).mul_f64(0.5 + f64::from(random) / 2048.0).max(after.unwrap_or_default());
        let give_up = self.client.limits().give_up;
        if since.elapsed() + pause > give_up {
            let problem = format!("{cause} ({} attempts in {:.0} s)", self.failed, since.elapsed().as_secs_f64());
            return Err(BucketError::at(self.address, BucketFault::Unreachable, problem));
        }
        if self.failed == 2
            && !self.client.told.swap(true, Ordering::Relaxed)
            && let Some(tell) = &*lock(&self.client.tell)
        {
            tell(&format!("{}: {cause}; tried again for {:.0} s", self.address, give_up.as_secs_f64()));
        }
        std::thread::sleep(pause);
        Ok(())
    }
}
