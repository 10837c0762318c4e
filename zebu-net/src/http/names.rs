//! Names and options of objects on web servers: URLs, and the options of `driver=http` and
//! `driver=https`.

use std::ffi::OsStr;
use std::time::Duration;

use super::{HttpCookie, HttpSpec, RemoteOptions};
use crate::spelling::quote::json_string;
use crate::spelling::{OptionSet, OptionValue};
use crate::storage::Secret;

/// The largest `timeout` in seconds, as in QEMU.
const MOST_SECONDS: u64 = 10_000;
/// `readahead` is a multiple of this.
const SECTOR: u64 = 512;

impl HttpSpec {
    /// From the options of the driver, with a name if there is one.
    pub(super) fn take(
        options: &mut OptionSet,
        driver: &'static str,
        name: Option<&OsStr>,
    ) -> Result<HttpSpec, String> {
        let mut shown = vec![("driver".into(), format!("\"{driver}\""))];
        shown.extend(options.shown(SHOWN));
        let reading = RemoteOptions::take(options)?;
        let cookie = options.take_text("cookie");
        let cookie = match (cookie, options.take_text("cookie-secret")) {
            (Some(_), Some(_)) => {
                return Err("curl driver cannot handle both cookie and cookie secret".into());
            }
            (Some(text), None) => Some(HttpCookie::Text(Secret::new(text))),
            (None, Some(id)) => Some(HttpCookie::Secret(id)),
            (None, None) => None,
        };
        let verify = options.take_bool("sslverify")?.unwrap_or(true);
        let url = url(options, driver, name)?;
        if options.get("url").is_none() && name.is_some() {
            shown.push(("url".into(), json_string(url.as_bytes())));
        }
        options.take("url");
        let spec = HttpSpec {
            driver,
            url,
            reading,
            verify,
            authorities: options.take_value("cacert").map(Into::into),
            user: options.take_text("username"),
            password: options.take_text("password-secret"),
            token: options.take_text("token-secret"),
            cookie,
            proxy_user: options.take_text("proxy-username"),
            proxy_password: options.take_text("proxy-password-secret"),
            shown,
        };
        if spec.token.is_some() && (spec.user.is_some() || spec.password.is_some()) {
            return Err("token-secret and username cannot be used at the same time".into());
        }
        Ok(spec)
    }
}

/// Options that belong to a name, in QEMU's order as far as that is known.
const SHOWN: &[&str] = &[
    "url",
    "sslverify",
    "cookie",
    "cookie-secret",
    "username",
    "password-secret",
    "token-secret",
    "cacert",
    "proxy-username",
    "proxy-password-secret",
];

impl RemoteOptions {
    /// The options that objects of all kinds have.
    pub(crate) fn take(options: &mut OptionSet) -> Result<RemoteOptions, String> {
        let readahead = options.take_size("readahead")?;
        if let Some(bytes) = readahead.filter(|bytes| bytes % SECTOR != 0) {
            return Err(format!(
                "HTTP_READAHEAD_SIZE {bytes} is not a multiple of {SECTOR}"
            ));
        }
        let timeout = match options.take_number("timeout")? {
            Some(seconds) if seconds > MOST_SECONDS => {
                return Err("timeout parameter is too large or negative".into());
            }
            // The longest one, as good as none.
            Some(0) => Some(MOST_SECONDS),
            seconds => seconds,
        };
        Ok(RemoteOptions {
            readahead,
            timeout: timeout.map(Duration::from_secs),
            connections: options.take_connections()?,
        })
    }
}

/// The URL in the options or in the name.
fn url(options: &OptionSet, driver: &str, name: Option<&OsStr>) -> Result<String, String> {
    let given = match options.get("url") {
        Some(OptionValue::Text(url)) => Some(url.as_os_str()),
        _ => None,
    };
    let url = given
        .or(name)
        .ok_or("curl block driver requires an 'url' option")?;
    let text = url.to_str().ok_or("The URL is not UTF-8")?;
    let begin = format!("{driver}://");
    if !text.starts_with(&begin) {
        return Err(format!(
            "{driver} curl driver cannot handle the URL '{text}' (does not start with '{begin}')"
        ));
    }
    let parsed = reqwest::Url::parse(text).map_err(|e| format!("'{text}' is no URL: {e}"))?;
    if parsed.password().is_some() {
        // It would be visible in the list of processes, a header, or a message.
        return Err("a URL has no password: use 'username' and 'password-secret'".into());
    }
    Ok(text.into())
}
