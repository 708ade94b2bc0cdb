//! Where the cache and the hub are: the environment variables of `huggingface_hub`, with the same meaning.

use std::path::PathBuf;
use std::time::Duration;

/// Where things are, and how long to wait for them.
#[derive(Clone)]
pub struct HubSettings {
    /// The hub.
    pub endpoint: String,
    /// The folder of the cache.
    pub cache: PathBuf,
    /// What proves who asks; sent to the endpoint and nobody else.
    pub token: Option<String>,
    /// Whether to use the cache alone.
    pub offline: bool,
    /// How long a connection may be silent.
    pub timeout: Duration,
    /// How long to wait after a first failure; doubles with every further one.
    pub pause: Duration,
    /// Certificates to trust instead of those that are built in: a file in PEM.
    pub certificates: Option<PathBuf>,
}

impl HubSettings {
    /// Those of the environment.
    pub fn from_env() -> Self {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Self {
        let given = |name: &str| variable(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        let path = |name: &str| given(name).map(PathBuf::from);
        let first = |names: &[&str]| names.iter().find_map(|name| given(name));
        let on =
            |name: &str| given(name).is_some_and(|text| ["1", "ON", "YES", "TRUE"].contains(&&*text.to_uppercase()));
        let cache_home = || path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
        let home = path("HF_HOME").unwrap_or_else(|| cache_home().unwrap_or_default().join("huggingface"));
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let stored = || std::fs::read_to_string(token_file).ok().map(|text| text.trim().to_owned());
        let token = first(&["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]).or_else(stored);
        let seconds =
            given("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|text| text.parse().ok()).filter(|s| *s > 0.0 && *s < 1e6);
        Self {
            endpoint: given("HF_ENDPOINT").map_or_else(
                || "https://huggingface.co".to_owned(),
                |endpoint| endpoint.trim_end_matches('/').to_owned(),
            ),
            cache: path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).unwrap_or_else(|| home.join("hub")),
            // What no header can hold proves nothing.
            token: token.filter(|token| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic())),
            offline: on("HF_HUB_OFFLINE") || on("TRANSFORMERS_OFFLINE"),
            timeout: Duration::from_secs_f64(seconds.unwrap_or(30.0)),
            pause: Duration::from_secs(1),
            certificates: first(&["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"]).map(PathBuf::from),
        }
    }
}

/// Without the token.
impl std::fmt::Debug for HubSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { endpoint, cache, offline, .. } = self;
        f.debug_struct("HubSettings")
            .field("endpoint", endpoint)
            .field("cache", cache)
            .field("offline", offline)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn settings(given: &[(&str, &str)]) -> HubSettings {
        let given: BTreeMap<String, String> = given.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        HubSettings::from_variables(&|name| given.get(name).cloned())
    }

    #[test]
    fn variables_mean_what_they_mean_to_huggingface_hub() {
        let plain = settings(&[("HOME", "/home/ada")]);
        assert_eq!(plain.cache, PathBuf::from("/home/ada/.cache/huggingface/hub"));
        assert_eq!((plain.endpoint.as_str(), plain.offline, plain.token), ("https://huggingface.co", false, None));
        assert_eq!(settings(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).cache, PathBuf::from("/x/huggingface/hub"));
        assert_eq!(settings(&[("HF_HOME", "/hf"), ("HOME", "/h")]).cache, PathBuf::from("/hf/hub"));
        assert_eq!(settings(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/hf")]).cache, PathBuf::from("/c"));
        for (text, offline) in [("1", true), ("true", true), ("on", true), ("0", false), ("", false)] {
            assert_eq!(settings(&[("HF_HUB_OFFLINE", text)]).offline, offline, "{text:?}");
        }
        assert_eq!(settings(&[("HF_ENDPOINT", "http://mirror/")]).endpoint, "http://mirror");
    }

    #[test]
    fn the_token_is_found_in_its_usual_places_and_never_shown() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_stored\n").unwrap();
        let home = home.path().to_str().unwrap();
        assert_eq!(settings(&[("HF_HOME", home)]).token.as_deref(), Some("hf_stored"));
        let given = settings(&[("HF_HOME", home), ("HF_TOKEN", "hf_given"), ("HUGGING_FACE_HUB_TOKEN", "hf_old")]);
        assert_eq!(given.token.as_deref(), Some("hf_given"));
        assert!(!format!("{given:?}").contains("hf_given"));
        assert_eq!(settings(&[("HF_TOKEN", "two\r\nlines")]).token, None);
    }
}
