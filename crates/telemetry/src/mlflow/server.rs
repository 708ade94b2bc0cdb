//! Which server, and who asks: from the config and the environment.

use crate::sink::{SinkAddress, SinkProblem};
use std::time::Duration;
use ureq::Agent;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

/// What the environment says, in the names that MLflow's own client reads.
const SERVER: &str = "MLFLOW_TRACKING_URI";
const TOKEN: &str = "MLFLOW_TRACKING_TOKEN";
const USER: &str = "MLFLOW_TRACKING_USERNAME";
const PASSWORD: &str = "MLFLOW_TRACKING_PASSWORD";
const CERTIFICATES: &str = "MLFLOW_TRACKING_SERVER_CERT_PATH";

/// How long a server may take to take a connection, and to answer.
const CONNECT: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_secs(30);

/// Refuses what cannot be sent to, before a run starts.
pub(crate) fn check(to: &SinkAddress) -> Result<(), SinkProblem> {
    server(to, &variable)?;
    agent().map(|_| ())
}

pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Where requests go, and the value of the header that says who asks.
#[derive(Debug, PartialEq)]
pub(crate) struct Server {
    pub(crate) address: String,
    pub(crate) authorization: Option<String>,
}

/// The server of the config, or of the environment. What its address says of who asks goes into the header: the address is shown and stored.
pub(crate) fn server(to: &SinkAddress, variable: &dyn Fn(&str) -> Option<String>) -> Result<Server, SinkProblem> {
    let given = to.server.clone().or_else(|| variable(SERVER)).ok_or(SinkProblem::NoServer)?;
    let (scheme, rest) = given.split_once("://").unwrap_or_default();
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let who = host.rsplit_once('@').map(|(who, _)| who);
    let rest = who.map_or(rest, |who| &rest[who.len() + 1..]);
    let address = format!("{scheme}://{}", rest.trim_end_matches('/'));
    let is_address = !rest.is_empty() && format!("{address}/").parse::<ureq::http::Uri>().is_ok();
    if !is_address || !["http", "https"].contains(&scheme) {
        // Whatever stands before an @ may be a password.
        return Err(SinkProblem::BadServer(given.rsplit('@').next().unwrap_or_default().to_owned()));
    }
    Ok(Server { address, authorization: authorization(who, variable) })
}

pub(crate) fn agent() -> Result<Agent, SinkProblem> {
    let mut config = Agent::config_builder()
        .http_status_as_error(false)
        .user_agent(concat!("lockstep/", env!("CARGO_PKG_VERSION")))
        .timeout_resolve(Some(CONNECT))
        .timeout_connect(Some(CONNECT))
        .timeout_send_body(Some(ANSWER))
        .timeout_recv_response(Some(ANSWER))
        .timeout_recv_body(Some(ANSWER));
    if let Some(path) = variable(CERTIFICATES) {
        let wrong = |why: String| SinkProblem::Certificates(format!("{CERTIFICATES} = {path}: {why}"));
        let pem = std::fs::read(&path).map_err(|error| wrong(error.to_string()))?;
        let certificates: Vec<_> = parse_pem(&pem)
            .filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            })
            .collect();
        if certificates.is_empty() {
            return Err(wrong("it holds no certificate".into()));
        }
        config = config.tls_config(TlsConfig::builder().root_certs(RootCerts::new_with_certs(&certificates)).build());
    }
    Ok(config.build().new_agent())
}

/// The value of the header, from the variables, or else from what stands before the host of the address.
fn authorization(who: Option<&str>, variable: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let basic = |user: &[u8], password: &[u8]| format!("Basic {}", base64(&[user, password].join(&b':')));
    match (variable(USER), variable(TOKEN), who) {
        (Some(user), ..) => Some(basic(user.as_bytes(), variable(PASSWORD).unwrap_or_default().as_bytes())),
        (None, Some(token), _) => Some(format!("Bearer {token}")),
        (None, None, Some(who)) => {
            let (user, password) = who.split_once(':').unwrap_or((who, ""));
            Some(basic(&percent_decoded(user), &percent_decoded(password)))
        }
        (None, None, None) => None,
    }
}

/// The bytes of a text in which some may be written as `%41`.
fn percent_decoded(text: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let [byte, after @ ..] = rest {
        let digits = if *byte == b'%' { after.get(..2) } else { None };
        let decoded = digits
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(decoded.unwrap_or(*byte));
        rest = if decoded.is_some() { &after[2..] } else { after };
    }
    bytes
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for three in bytes.chunks(3) {
        let bits = three.iter().fold(0, |bits, byte| bits << 8 | usize::from(*byte)) << (8 * (3 - three.len()));
        for digit in 0..4 {
            let at = bits >> (18 - 6 * digit) & 63;
            out.push(if digit > three.len() { '=' } else { DIGITS[at] as char });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_encoded_as_the_rfc_has_them() {
        for (text, expected) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("é:", "w6k6")]
        {
            assert_eq!(base64(text.as_bytes()), expected);
        }
    }

    fn of(text: &str, variables: &[(&str, &str)]) -> Result<Server, SinkProblem> {
        let given = |name: &str| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned());
        server(&SinkAddress { server: Some(text.into()), experiment: None }, &given)
    }

    #[test]
    fn a_server_has_an_address() {
        assert_eq!(of("http://host:5000/base/", &[]).unwrap().address, "http://host:5000/base");
        for wrong in ["host:5000", "file:///tmp/x", "https://", "http://a b", "databricks"] {
            assert_eq!(of(wrong, &[]), Err(SinkProblem::BadServer(wrong.into())), "{wrong}");
        }
        assert_eq!(of("ftp://ada:p/w@host", &[]), Err(SinkProblem::BadServer("host".into())));
    }

    #[test]
    fn a_password_in_the_address_goes_into_the_header_alone() {
        let text = "https://ada:pass%20word@host:5000/@base/";
        let in_address = of(text, &[]).unwrap();
        assert_eq!(in_address.address, "https://host:5000/@base");
        // ada:pass word
        assert_eq!(in_address.authorization.as_deref(), Some("Basic YWRhOnBhc3Mgd29yZA=="));
        assert_eq!(of("https://ada%@host", &[]).unwrap().authorization, Some(format!("Basic {}", base64(b"ada%:"))));
        assert_eq!(of(text, &[(TOKEN, "t")]).unwrap().authorization.as_deref(), Some("Bearer t"));
        let variables = [(USER, "eve"), (PASSWORD, "x"), (TOKEN, "t")];
        assert_eq!(of(text, &variables).unwrap().authorization, Some(format!("Basic {}", base64(b"eve:x"))));
    }
}
