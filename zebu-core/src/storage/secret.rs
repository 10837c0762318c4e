//! Text that is not printed.

use std::collections::BTreeMap;
use std::fmt;

use zeroize::Zeroizing;

use crate::{Error, Result};

/// A password, a token or a cookie, which is not printed, and is wiped when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    text: Zeroizing<String>,
    /// A line feed follows in its file.
    has_line_end: bool,
}

impl Secret {
    /// This text.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret {
            text: Zeroizing::new(text.into()),
            has_line_end: false,
        }
    }

    /// The content of a file. A line feed at its end is part of the passphrase of an image, as in QEMU, and not
    /// of a password.
    pub fn of_file(content: impl Into<String>) -> Secret {
        let mut text = Zeroizing::new(content.into());
        let has_line_end = text.ends_with('\n');
        if has_line_end {
            text.pop();
        }
        Secret { text, has_line_end }
    }

    /// The passphrase of an image.
    #[doc(hidden)]
    pub fn passphrase(&self) -> Zeroizing<Vec<u8>> {
        let end: &[u8] = if self.has_line_end { b"\n" } else { b"" };
        Zeroizing::new([self.text.as_bytes(), end].concat())
    }

    /// The text.
    pub fn reveal(&self) -> &str {
        &self.text
    }
}

/// Secrets by their ids.
pub type Secrets = BTreeMap<String, Secret>;

/// The secret with this id.
///
/// # Errors
/// [`Error::Refused`] in QEMU's words if there is none.
pub fn find_secret(secrets: &Secrets, id: &str) -> Result<Secret> {
    let secret = secrets.get(id).cloned();
    secret.ok_or_else(|| Error::Refused(format!("No secret with id '{id}'")))
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// `text` without the queries of the URLs in it, for messages: `https://host/disk?...`. A signed URL
/// has its credentials there.
pub fn without_queries(text: &str) -> String {
    let mut shown = String::new();
    let mut rest = text;
    let start = |text: &str| {
        let found = ["http://", "https://"]
            .iter()
            .filter_map(|scheme| text.find(scheme));
        found.min()
    };
    while let Some(at) = start(rest) {
        let url = &rest[at..];
        let end = url.find(|c: char| c.is_whitespace() || "\"'".contains(c));
        let url = url[..end.unwrap_or(url.len())].trim_end_matches(':');
        let (plain, query) = url.split_at(url.find('?').unwrap_or(url.len()));
        shown += &rest[..at];
        shown += plain;
        if !query.is_empty() {
            shown += "?...";
        }
        rest = &rest[at + url.len()..];
    }
    shown + rest
}

#[cfg(test)]
mod tests {
    //! Guards against credentials in messages.
    use super::*;

    #[test]
    fn queries_are_left_out() {
        for (text, shown) in [
            ("", ""),
            ("a?b", "a?b"),
            ("http://h/x", "http://h/x"),
            ("https://h/x?sig=a%3D,b:c", "https://h/x?..."),
            ("https://h/x?sig=a: it's?", "https://h/x?...: it's?"),
            (
                "'https://h/x?a' and http://h?b, y",
                "'https://h/x?...' and http://h?... y",
            ),
            (
                "json:{\"url\": \"http://h/x?a\", \"driver\": \"http\"}",
                "json:{\"url\": \"http://h/x?...\", \"driver\": \"http\"}",
            ),
            (
                "driver=http,url=http://h/x?a,timeout=1",
                "driver=http,url=http://h/x?...",
            ),
            ("http://http://?", "http://http://?..."),
        ] {
            assert_eq!(without_queries(text), shown, "{text}");
            assert_eq!(without_queries(shown), shown, "{text}");
        }
    }
}
