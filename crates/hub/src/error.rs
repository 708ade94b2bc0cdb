use crate::HubName;
use std::path::PathBuf;

/// Why something of the hub is not here.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A text names nothing.
    #[error("{name}: {problem}")]
    Name {
        /// The text.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// It is not in the cache, and connections are forbidden.
    #[error("{name} is not in {}, and HF_HUB_OFFLINE is set", cache.display())]
    Offline {
        /// What was asked for.
        name: Box<HubName>,
        /// The cache.
        cache: PathBuf,
    },
    /// The hub does not answer.
    #[error("{name}: {endpoint} cannot be reached: {cause}")]
    Unreachable {
        /// What was asked for.
        name: Box<HubName>,
        /// The hub.
        endpoint: String,
        /// Why.
        cause: String,
    },
    /// The hub does not have it, or does not say so without a token.
    #[error("{name}: {endpoint} has no such repository{}", if *with_token { ", or the token may not see it" } else { ", or shows it only with a token" })]
    NotThere {
        /// What was asked for.
        name: Box<HubName>,
        /// The hub.
        endpoint: String,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// There is no such branch, tag or commit.
    #[error("{name}: there is no revision `{}`", name.revision())]
    NoRevision {
        /// What was asked for.
        name: Box<HubName>,
    },
    /// One may read it who has agreed to its terms.
    #[error("{name}: access is restricted{}", if *with_token { ", and the token may not read it" } else { ", and no token was found" })]
    Gated {
        /// What was asked for.
        name: Box<HubName>,
        /// Its page.
        page: String,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The repository lacks a file that is needed.
    #[error("{name}: the repository has no {file}")]
    NoFile {
        /// What was asked for.
        name: Box<HubName>,
        /// Which one.
        file: String,
    },
    /// What came is not what the hub says it is.
    #[error("{name}: {file} came with another checksum twice: {found}, the hub says {expected}")]
    Checksum {
        /// What was asked for.
        name: Box<HubName>,
        /// Which file.
        file: String,
        /// What the hub says.
        expected: String,
        /// What came.
        found: String,
    },
    /// The hub says something that cannot be.
    #[error("{name}: {endpoint} answers with {problem}")]
    Nonsense {
        /// What was asked for.
        name: Box<HubName>,
        /// The hub.
        endpoint: String,
        /// What.
        problem: String,
    },
    /// The cache cannot be written or read.
    #[error("{}: {cause}", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
}

impl HubError {
    /// What to do about it.
    pub fn hint(&self) -> String {
        let token = "`hf auth login` stores a token, HF_TOKEN gives one";
        match self {
            HubError::Name { .. } => {
                "write hf:OWNER/NAME, hf:OWNER/NAME@REVISION or hf:datasets/OWNER/NAME/PATH".to_owned()
            }
            HubError::Offline { name, .. } => format!(
                "unset HF_HUB_OFFLINE, or fetch it where there is a connection (`{}`) and set HF_HOME to that folder",
                name.command()
            ),
            HubError::Unreachable { cause, .. } if cause.contains("certificate") => {
                "a proxy may have certificates of its own: name a file with them, as PEM, in SSL_CERT_FILE".to_owned()
            }
            HubError::Unreachable { name, .. } => format!(
                "the same command again goes on with the download; where no connection is possible, fetch it elsewhere (`{}`) and \
                 set HF_HOME to that folder, or HF_ENDPOINT to a mirror",
                name.command()
            ),
            HubError::NotThere { name, .. } => {
                format!("check the name (`{}` fetches it); for a private repository, {token}", name.command())
            }
            HubError::NoRevision { name } => {
                format!("name a branch, a tag or a commit after @, or none: {}", name.without_revision())
            }
            HubError::Gated { page, .. } => format!("agree to its terms on {page}; then {token}"),
            HubError::NoFile { file, .. } if file.ends_with("safetensors") => {
                "its weights are in another format: choose a repository with safetensors, or convert them with \
                 save_pretrained(safe_serialization=True)"
                    .to_owned()
            }
            HubError::NoFile { name, .. } => format!("name another repository or path than {name}"),
            HubError::Checksum { name, .. } => {
                format!("a proxy or a mirror (HF_ENDPOINT) may change files; `{}` fetches them too", name.command())
            }
            HubError::Nonsense { name, .. } => {
                format!("check HF_ENDPOINT; `{}` fetches it by the hub's own tool", name.command())
            }
            HubError::Cache { .. } => "check the disk and its permissions, or set HF_HOME to another folder".to_owned(),
        }
    }

    /// Whether the request was wrong, rather than the world around it.
    pub fn is_request(&self) -> bool {
        !matches!(self, HubError::Unreachable { .. } | HubError::Checksum { .. } | HubError::Cache { .. })
    }
}
