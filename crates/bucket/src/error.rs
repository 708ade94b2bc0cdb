use crate::BucketAddress;

/// Why an object could not be read or written.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{address}: {problem}")]
pub struct BucketError {
    /// What was asked for.
    pub address: String,
    /// What kind of failure it is.
    pub fault: BucketFault,
    /// What the server or the connection said.
    pub problem: String,
}

/// The kinds of failures, by what helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketFault {
    /// The text is no address.
    Address,
    /// The server's address has a user name or a password in it.
    Endpoint,
    /// There is no such object.
    Missing,
    /// There is no such bucket.
    NoBucket,
    /// The credentials may not do this, or are wrong.
    Denied,
    /// A signature is asked for, and there are no credentials.
    NoCredentials,
    /// The clocks differ by too much.
    Clock,
    /// The object is another than when it was opened.
    Changed,
    /// Nothing came for too long.
    Unreachable,
    /// The server refuses, or says what cannot be.
    Refused,
    /// A file of this machine could not be read while it was uploaded.
    Local,
}

impl BucketError {
    pub(crate) fn of(address: impl ToString, fault: BucketFault, problem: impl Into<String>) -> Self {
        Self { address: address.to_string(), fault, problem: problem.into() }
    }

    pub(crate) fn at(address: &BucketAddress, fault: BucketFault, problem: impl Into<String>) -> Self {
        Self::of(address, fault, problem)
    }

    /// Whether the request was wrong, rather than the world around it.
    pub fn is_request(&self) -> bool {
        use BucketFault::{Address, Denied, Endpoint, Missing, NoBucket, NoCredentials};
        matches!(self.fault, Address | Endpoint | Missing | NoBucket | Denied | NoCredentials)
    }

    /// What to do about it.
    pub fn hint(&self) -> String {
        match self.fault {
            BucketFault::Address => "write s3://BUCKET/KEY".into(),
            BucketFault::Endpoint => {
                "write it as https://HOST:PORT; requests are signed with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or with those of AWS_PROFILE".into()
            }
            BucketFault::Missing => {
                let folder = self.address.rsplit_once('/').map_or(&*self.address, |(folder, _)| folder);
                format!("check the address; `aws s3 ls {folder}/` shows what is there")
            }
            BucketFault::NoBucket => {
                "check the bucket's name, and AWS_ENDPOINT_URL_S3 where it is not at Amazon; `aws s3 ls` shows your buckets".into()
            }
            BucketFault::Denied => {
                "check AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (`aws sts get-caller-identity` shows whose they are), and what they may do in \
                 this bucket"
                    .into()
            }
            BucketFault::NoCredentials => {
                "`aws configure` stores credentials, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY give them; for a public bucket set AWS_NO_SIGN_REQUEST=true".into()
            }
            BucketFault::Clock => "set the clock of this machine (NTP)".into(),
            BucketFault::Changed => "let nobody write to it while it is read; the same command again reads it as it is now".into(),
            BucketFault::Unreachable if self.problem.contains("certificate") => {
                "a proxy may have certificates of its own: name a file with them, as PEM, in AWS_CA_BUNDLE".into()
            }
            BucketFault::Unreachable => {
                "check the connection, AWS_ENDPOINT_URL_S3 and AWS_REGION; the same command again goes on where this one ended".into()
            }
            BucketFault::Refused => "the server's own message says why; its quota or its disk may be full".into(),
            BucketFault::Local => "check the file and its permissions".into(),
        }
    }
}
