//! AWS Signature Version 4 in the `Authorization` header.

use crate::Credentials;
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use std::time::{SystemTime, UNIX_EPOCH};

/// A request as it is signed.
pub(crate) struct Signed<'a> {
    pub method: &'a str,
    /// The path, escaped.
    pub path: &'a str,
    /// The query, escaped and sorted, without `?`.
    pub query: &'a str,
    /// Lower-case names and their values, sorted by name.
    pub headers: &'a [(String, String)],
    /// SHA-256 of the body, in hexadecimal.
    pub payload: &'a str,
    /// `20130524T000000Z`.
    pub time: &'a str,
    pub region: &'a str,
}

impl Signed<'_> {
    /// The value of the header.
    pub fn authorization(&self, credentials: &Credentials) -> String {
        let names: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        let names = names.join(";");
        let mut canonical = format!("{}\n{}\n{}\n", self.method, self.path, self.query);
        for (name, value) in self.headers {
            canonical += &format!("{name}:{}\n", value.trim());
        }
        canonical += &format!("\n{names}\n{}", self.payload);
        let day = &self.time[..8];
        let scope = format!("{day}/{}/s3/aws4_request", self.region);
        let text = format!("AWS4-HMAC-SHA256\n{}\n{scope}\n{}", self.time, sha256(canonical.as_bytes()));
        let mut key = format!("AWS4{}", credentials.secret).into_bytes();
        for part in [day, self.region, "s3", "aws4_request"] {
            key = hmac(&key, part.as_bytes());
        }
        let signature = hexadecimal(&hmac(&key, text.as_bytes()));
        format!(
            "AWS4-HMAC-SHA256 Credential={}/{scope},SignedHeaders={names},Signature={signature}",
            credentials.key_id
        )
    }
}

fn hmac(key: &[u8], text: &[u8]) -> Vec<u8> {
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(text);
    mac.finalize().into_bytes().to_vec()
}

/// SHA-256 in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The time now, as signatures have it.
pub(crate) fn now() -> String {
    at(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

fn at(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01, in eras of 400 years (Howard Hinnant's civil_from_days).
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let from_march = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * from_march + 2) / 5 + 1, (from_march + 2) % 12 + 1);
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}{month:02}{day:02}T{:02}{:02}{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of "Authenticating Requests: Using the Authorization Header" in the S3 API reference.
    #[test]
    fn the_published_examples_have_their_published_signatures() {
        let credentials = Credentials {
            key_id: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            token: None,
        };
        let check = |method, path, query, more: &[(&str, &str)], body: &str, signature: &str| {
            let payload = sha256(body.as_bytes());
            let always = [
                ("host", "examplebucket.s3.amazonaws.com"),
                ("x-amz-content-sha256", &*payload),
                ("x-amz-date", "20130524T000000Z"),
            ];
            let mut headers: Vec<(String, String)> =
                always.iter().chain(more).map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            headers.sort();
            let (time, region, payload) = ("20130524T000000Z", "us-east-1", &*payload);
            let signed = Signed { method, path, query, headers: &headers, payload, time, region };
            let header = signed.authorization(&credentials);
            assert!(header.ends_with(&format!(",Signature={signature}")), "{header}");
            assert!(
                header.starts_with(
                    "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,SignedHeaders="
                ),
                "{header}"
            );
        };
        check(
            "GET",
            "/test.txt",
            "",
            &[("range", "bytes=0-9")],
            "",
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        );
        check(
            "PUT",
            "/test%24file.text",
            "",
            &[("date", "Fri, 24 May 2013 00:00:00 GMT"), ("x-amz-storage-class", "REDUCED_REDUNDANCY")],
            "Welcome to Amazon S3.",
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        );
        check("GET", "/", "lifecycle=", &[], "", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
        check(
            "GET",
            "/",
            "max-keys=2&prefix=J",
            &[],
            "",
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        );
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(at(0), "19700101T000000Z");
        assert_eq!(at(951_782_400), "20000229T000000Z");
        assert_eq!(at(1_369_353_600), "20130524T000000Z");
        assert_eq!(at(1_735_689_599), "20241231T235959Z");
        assert_eq!(at(4_107_542_399), "21000228T235959Z");
    }
}
