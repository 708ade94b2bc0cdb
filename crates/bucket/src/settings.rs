//! Where the server is and who asks: the variables and files of the `aws` command, with the same meaning.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// What proves who asks.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The access key's name, which is no secret.
    pub key_id: String,
    /// The secret key.
    pub secret: String,
    /// The token of a session, for credentials that expire.
    pub token: Option<String>,
}

/// Without the secrets.
impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("key_id", &self.key_id).finish_non_exhaustive()
    }
}

/// Where things are, and how long to wait for them.
#[derive(Clone, Debug)]
pub struct BucketSettings {
    /// The server; none for Amazon's.
    pub endpoint: Option<String>,
    /// The region.
    pub region: String,
    /// Who asks; none for requests that are not signed.
    pub credentials: Option<Credentials>,
    /// Whether requests are meant not to be signed.
    pub anonymous: bool,
    /// How long a connection may be silent.
    pub timeout: Duration,
    /// How long to wait after a first failure; doubles with every further one.
    pub pause: Duration,
    /// Certificates to trust instead of those that are built in: a file in PEM.
    pub certificates: Option<PathBuf>,
    /// What the user of this process decides.
    pub limits: Limits,
}

/// What a run decides: where blocks are kept, how many bytes of them, and when to give up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The folder of the cache; the user's own if none is named.
    pub cache: Option<PathBuf>,
    /// Bytes that it may have; 0 for no cache on the disk.
    pub cache_bytes: u64,
    /// How long to try again while nothing comes.
    pub give_up: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { cache: None, cache_bytes: 16 << 30, give_up: Duration::from_secs(600) }
    }
}

impl BucketSettings {
    /// Those of the environment.
    pub fn from_env() -> Self {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    /// Those of these variables, and of the files that they name.
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Self {
        let given = |name: &str| variable(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        let first = |names: &[&str]| names.iter().find_map(|name| given(name));
        let on =
            |name: &str| given(name).is_some_and(|text| ["1", "on", "yes", "true"].contains(&&*text.to_lowercase()));
        let file = |name: &str, own: &str| {
            let path =
                given(name).map(PathBuf::from).or_else(|| Some(PathBuf::from(given("HOME")?).join(".aws").join(own)));
            path.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default()
        };
        let config = file("AWS_CONFIG_FILE", "config");
        let stored = file("AWS_SHARED_CREDENTIALS_FILE", "credentials");
        let named = first(&["AWS_PROFILE", "AWS_DEFAULT_PROFILE"]);
        let profile = named.clone().unwrap_or_else(|| "default".to_owned());
        let section = if profile == "default" { "default".to_owned() } else { format!("profile {profile}") };
        let (config, stored) = (keys_of(&config, &section), keys_of(&stored, &profile));

        let of = |key_id: Option<String>, secret: Option<String>, token: Option<String>| {
            // What no header can hold proves nothing.
            let sound = |text: &String| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
            Some(Credentials {
                key_id: key_id.filter(sound)?,
                secret: secret.filter(sound)?,
                token: token.filter(sound),
            })
        };
        let from = |keys: &BTreeMap<String, String>| {
            let key = |name: &str| keys.get(name).cloned();
            of(key("aws_access_key_id"), key("aws_secret_access_key"), key("aws_session_token"))
        };
        let of_env = of(given("AWS_ACCESS_KEY_ID"), given("AWS_SECRET_ACCESS_KEY"), given("AWS_SESSION_TOKEN"));
        // As with the command, variables come before files.
        let credentials = of_env.or_else(|| from(&stored)).or_else(|| from(&config));
        let anonymous = on("AWS_NO_SIGN_REQUEST") || on("AWS_SKIP_SIGNATURE");
        let endpoint =
            first(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]).or_else(|| config.get("endpoint_url").cloned());
        Self {
            endpoint: endpoint.map(|endpoint| endpoint.trim_end_matches('/').to_owned()),
            region: first(&["AWS_REGION", "AWS_DEFAULT_REGION"])
                .or_else(|| config.get("region").cloned())
                .unwrap_or_else(|| "us-east-1".to_owned()),
            credentials: credentials.filter(|_| !anonymous),
            anonymous,
            timeout: Duration::from_secs(30),
            pause: Duration::from_millis(500),
            certificates: first(&["AWS_CA_BUNDLE", "SSL_CERT_FILE"]).map(PathBuf::from),
            limits: Limits::default(),
        }
    }

    /// Whether there is a user name or a password in the server's address.
    pub(crate) fn endpoint_names_a_user(&self) -> bool {
        let endpoint = self.endpoint.as_deref().unwrap_or_default();
        let rest = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
        rest.split(['/', '?', '#']).next().is_some_and(|authority| authority.contains('@'))
    }
}

/// The folder of the cache where none is named.
pub(crate) fn own_cache() -> PathBuf {
    let given = |name: &str| std::env::var_os(name).filter(|text| !text.is_empty()).map(PathBuf::from);
    let home = given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")));
    home.unwrap_or_else(std::env::temp_dir).join("lockstep").join("buckets")
}

/// The keys of a section of an INI file.
fn keys_of(text: &str, section: &str) -> BTreeMap<String, String> {
    let mut keys = BTreeMap::new();
    let mut inside = false;
    for line in text.lines() {
        // Indented lines are of a nested table (`s3 =`).
        let nested = line.starts_with([' ', '\t']);
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            inside = name.split_whitespace().collect::<Vec<_>>().join(" ") == section;
        } else if let (true, false, Some((key, value))) =
            (inside, nested || line.starts_with(['#', ';']), line.split_once('='))
        {
            keys.insert(key.trim().to_lowercase(), value.trim().to_owned());
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(given: &[(&str, &str)]) -> BucketSettings {
        let given: BTreeMap<String, String> = given.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        BucketSettings::from_variables(&|name| given.get(name).cloned())
    }

    #[test]
    fn credentials_and_region_are_found_where_the_aws_command_finds_them() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join(".aws")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(home.path().join(".aws").join(name), text).unwrap();
        write(
            "credentials",
            "[default]\naws_access_key_id = AKIA1\naws_secret_access_key=s1\n# [x]\n[team]\naws_access_key_id=AKIA2\naws_secret_access_key=s2\naws_session_token=t2\n",
        );
        write(
            "config",
            "[default]\nregion = eu-west-1\n[profile team]\nregion=eu-north-1\nendpoint_url = http://minio:9000/\ns3 =\n  region = no\n",
        );
        let home = home.path().to_str().unwrap();
        let id = |s: &BucketSettings| s.credentials.as_ref().map(|c| c.key_id.clone()).unwrap_or_default();

        let plain = settings(&[("HOME", home)]);
        assert_eq!(
            (id(&plain).as_str(), plain.region.as_str(), plain.endpoint.as_deref()),
            ("AKIA1", "eu-west-1", None)
        );
        let team = settings(&[("HOME", home), ("AWS_PROFILE", "team")]);
        assert_eq!((id(&team).as_str(), team.region.as_str()), ("AKIA2", "eu-north-1"));
        assert_eq!(team.endpoint.as_deref(), Some("http://minio:9000"));
        assert_eq!(team.credentials.clone().unwrap().token.as_deref(), Some("t2"));
        let env =
            [("HOME", home), ("AWS_ACCESS_KEY_ID", "AKIA3"), ("AWS_SECRET_ACCESS_KEY", "s3"), ("AWS_REGION", "r")];
        assert_eq!((id(&settings(&env)).as_str(), settings(&env).region.as_str()), ("AKIA3", "r"));
        assert!(!format!("{:?}", settings(&env)).contains("s3\""), "secrets are not shown");
        let open = settings(&[("HOME", home), ("AWS_NO_SIGN_REQUEST", "true")]);
        assert!(open.anonymous && open.credentials.is_none());
        let both = [("AWS_ENDPOINT_URL", "http://a"), ("AWS_ENDPOINT_URL_S3", "http://b")];
        assert_eq!(settings(&both).endpoint.as_deref(), Some("http://b"));
        assert_eq!((settings(&[]).credentials, settings(&[]).region.as_str()), (None, "us-east-1"));
    }

    #[test]
    fn a_password_in_the_servers_address_is_refused_and_not_shown() {
        for (endpoint, refused) in [
            ("http://minio:9000", false),
            ("https://ceph.site.eu/objects@2", false),
            ("http://user:hunter2@minio:9000", true),
            ("https://hunter2@minio/path", true),
            ("user:hunter2@minio:9000", true),
        ] {
            for name in ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"] {
                let Err(error) = crate::Buckets::new(settings(&[(name, endpoint)])) else {
                    assert!(!refused, "{endpoint}");
                    continue;
                };
                let text = format!("{error} {}", error.hint());
                assert!(refused && error.is_request() && !text.contains("hunter2"), "{endpoint}: {text}");
                assert!(text.contains("has a user name or a password in it"), "{text}");
                assert!(text.contains("AWS_ACCESS_KEY_ID"), "{text}");
            }
        }
    }
}
