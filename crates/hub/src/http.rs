//! Requests to the hub: redirects, the token, and what to do when a connection fails.

use crate::HubSettings;
use std::time::Duration;
use ureq::http::{Response, Uri, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

/// Redirects that are followed.
const REDIRECTS: usize = 5;

/// A client of one hub.
pub(crate) struct Client<'a> {
    agent: Agent,
    settings: &'a HubSettings,
}

/// What to ask for, besides the address.
#[derive(Clone, Copy, Default)]
pub(crate) struct Ask {
    /// Only the headers.
    pub head: bool,
    /// The bytes from here on.
    pub from: u64,
    /// Whether to follow redirects to other hosts: what the hub itself says of a file comes before them.
    pub stay: bool,
}

/// An answer, and what the hub said of the file on the way to it.
pub(crate) struct Answer {
    pub response: Response<Body>,
    /// `X-Linked-Etag`, or else `ETag`, without quotes.
    pub etag: Option<String>,
    /// `X-Linked-Size`.
    pub size: Option<u64>,
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum Failed {
    /// It may go better next time, after so long at least.
    Again { cause: String, after: Option<Duration> },
    /// It will not.
    Final(String),
}

impl<'a> Client<'a> {
    pub fn new(settings: &'a HubSettings) -> Result<Self, String> {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("lockstep/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(settings.timeout))
            .timeout_connect(Some(settings.timeout))
            .timeout_recv_response(Some(settings.timeout))
            .timeout_per_read(Some(settings.timeout));
        if let Some(path) = &settings.certificates {
            let pem =
                std::fs::read(path).map_err(|error| format!("the certificates in {}: {error}", path.display()))?;
            let certificates = parse_pem(&pem).filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            });
            let certificates: Vec<_> = certificates.collect();
            if certificates.is_empty() {
                return Err(format!("no certificate in {}", path.display()));
            }
            config =
                config.tls_config(TlsConfig::builder().root_certs(RootCerts::new_with_certs(&certificates)).build());
        }
        Ok(Self { agent: config.build().new_agent(), settings })
    }

    /// Asks for what is at `path` below the endpoint.
    pub fn ask(&self, path: &str, ask: Ask) -> Result<Answer, Failed> {
        let mut address = format!("{}/{path}", self.settings.endpoint);
        let (mut etag, mut size) = (None, None);
        for _ in 0..=REDIRECTS {
            let uri: Uri = address.parse().map_err(|_| Failed::Final(format!("{address:?} is no address")))?;
            let ours = self.is_hub(&uri);
            let response = self.send(&uri, ours, ask)?;
            if ours {
                let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
                let tag = text("x-linked-etag").or_else(|| text(header::ETAG.as_str()));
                etag = tag.map(|tag| tag.trim_start_matches("W/").trim_matches('"').to_owned()).or(etag);
                size = text("x-linked-size").and_then(|size| size.parse().ok()).or(size);
            }
            let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let (true, Some(location)) = (response.status().is_redirection(), location) else {
                return Ok(Answer { response, etag, size });
            };
            let next = joined(&uri, location).ok_or_else(|| Failed::Final(format!("a redirect to {location:?}")))?;
            if ask.stay && !next.parse().is_ok_and(|next| self.is_hub(&next)) {
                return Ok(Answer { response, etag, size });
            }
            address = next;
        }
        Err(Failed::Final(format!("more than {REDIRECTS} redirects")))
    }

    /// Whether an address is the hub's own: scheme, host and port.
    fn is_hub(&self, uri: &Uri) -> bool {
        let hub: Option<Uri> = self.settings.endpoint.parse().ok();
        hub.is_some_and(|hub| {
            let plain = |uri: &Uri| Some((uri.scheme_str()?.to_lowercase(), uri.host()?.to_lowercase(), port(uri)));
            plain(&hub).is_some() && plain(&hub) == plain(uri)
        })
    }

    fn send(&self, uri: &Uri, ours: bool, ask: Ask) -> Result<Response<Body>, Failed> {
        let mut request = if ask.head { self.agent.head(uri) } else { self.agent.get(uri) };
        // Lengths and ranges are those of the file itself.
        request = request.header(header::ACCEPT_ENCODING, "identity");
        if let Some(token) = self.settings.token.as_ref().filter(|_| ours) {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if ask.from > 0 {
            request = request.header(header::RANGE, format!("bytes={}-", ask.from));
        }
        let response = request.call().map_err(|error| match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::Tls(_) | ureq::Error::Rustls(_) => {
                Failed::Final(error.to_string())
            }
            error => Failed::Again { cause: error.to_string(), after: None },
        })?;
        let status = response.status();
        if status.is_server_error() || [408, 429].contains(&status.as_u16()) {
            let after = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
            let after = after.map(|seconds: u64| Duration::from_secs(seconds.min(60)));
            return Err(Failed::Again { cause: format!("it answers with {status}"), after });
        }
        Ok(response)
    }
}

/// Waits between attempts: twice as long every time.
pub(crate) struct Retries {
    most: u32,
    failed: u32,
    pause: Duration,
}

impl Retries {
    /// For this many failures in a row.
    pub fn new(most: u32, pause: Duration) -> Self {
        Self { most, failed: 0, pause }
    }

    /// Something went well.
    pub fn renew(&mut self) {
        self.failed = 0;
    }

    /// Waits for the next attempt; an error where there have been enough.
    pub fn wait(&mut self, failed: Failed) -> Result<(), String> {
        let (cause, after) = match failed {
            Failed::Final(cause) => return Err(cause),
            Failed::Again { cause, after } => (cause, after),
        };
        self.failed += 1;
        if self.failed >= self.most {
            return Err(format!("{cause} ({} attempts)", self.failed));
        }
        let pause = self.pause * 2u32.pow(self.failed - 1);
        std::thread::sleep(after.unwrap_or_default().max(pause));
        Ok(())
    }
}

fn port(uri: &Uri) -> u16 {
    uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 })
}

/// Where a redirect leads.
fn joined(from: &Uri, location: &str) -> Option<String> {
    let authority = || Some(format!("{}://{}", from.scheme_str()?, from.authority()?));
    if location.starts_with("https://") || location.starts_with("http://") {
        // What began encrypted stays so.
        return (from.scheme_str() == Some("http") || location.starts_with("https://")).then(|| location.to_owned());
    }
    match location.strip_prefix("//") {
        Some(rest) => Some(format!("{}://{rest}", from.scheme_str()?)),
        None if location.starts_with('/') => Some(authority()? + location),
        None => {
            let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
            Some(format!("{}{folder}/{location}", authority()?))
        }
    }
}
