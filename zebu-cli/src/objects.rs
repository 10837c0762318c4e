//! `--object`: credentials that images are named with (`tls-creds=ID`).
//!
//! They hold for every image that the process opens, like strict mode
//! (`untrusted.rs`), and are kept in the same way.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use zebu::block::TlsObjects;
use zebu::names::{parse_switch, split_list};
use zebu::tls::{KeyFile, TlsCredentials, TlsFiles, Verify};

use crate::failure::Failure;

static CREDENTIALS: Mutex<TlsObjects> = Mutex::new(TlsObjects::new());

/// Takes `tls-creds-x509,id=ID,dir=DIR,endpoint=client,verify-peer=on` or
/// `tls-creds-psk,id=ID,dir=DIR,endpoint=client,username=qemu`, or the same as
/// JSON.
pub fn add(text: &OsStr) -> Result<(), Failure> {
    let (id, credentials) =
        parse(text).map_err(|why| Failure::new(format!("--object {}: {why}", text.display())))?;
    let mut kept = CREDENTIALS.lock().unwrap_or_else(PoisonError::into_inner);
    match kept.insert(id.clone(), credentials.clone()) {
        // The options of one command may be processed more than once.
        Some(other) if other != credentials => Err(Failure::new(format!(
            "--object {}: attempt to add duplicate property '{id}' to object",
            text.display()
        ))),
        _ => Ok(()),
    }
}

/// All of them.
pub fn credentials() -> TlsObjects {
    let kept = CREDENTIALS.lock().unwrap_or_else(PoisonError::into_inner);
    kept.clone()
}

fn parse(text: &OsStr) -> Result<(String, TlsCredentials), String> {
    let object = Object::parse(text)?;
    if object.is_server == Some(true) {
        return Err("Expecting TLS credentials with a client endpoint".into());
    }
    let credentials = match object.kind {
        Kind::Certificates => TlsCredentials::Certificates(
            TlsFiles::default()
                .directory(Some(object.directory))
                .verify(match object.verify {
                    true => Verify::Name,
                    false => Verify::Nothing,
                }),
        ),
        Kind::Keys { user } => TlsCredentials::Key(
            KeyFile::new(object.directory.join(KEYS))
                .user(Some(user.unwrap_or_else(|| "qemu".into()))),
        ),
    };
    Ok((object.id, credentials))
}

/// The name of a file of pre-shared keys, as QEMU has it.
pub const KEYS: &str = "keys.psk";

/// Credentials as they were given.
pub struct Object {
    pub id: String,
    pub directory: PathBuf,
    /// Which endpoint was said.
    pub is_server: Option<bool>,
    /// Of certificates; with keys it means nothing, as in QEMU.
    pub verify: bool,
    pub kind: Kind,
}

/// What is in the directory.
pub enum Kind {
    Certificates,
    Keys { user: Option<String> },
}

impl Object {
    /// Reads `TYPE,id=ID,...` or JSON.
    pub fn parse(text: &OsStr) -> Result<Object, String> {
        let mut members = match text.as_bytes().starts_with(b"{") {
            true => json(text)?,
            false => words(text),
        };
        let place = members.iter().position(|(key, _)| key == "qom-type");
        let of_type = place.map(|place| members.remove(place).1);
        let mut kind = match of_type.as_deref().and_then(OsStr::to_str) {
            Some("tls-creds-x509") => Kind::Certificates,
            Some("tls-creds-psk") => Kind::Keys { user: None },
            _ => {
                let why = "objects other than tls-creds-x509 and tls-creds-psk are not part of \
                           this version";
                return Err(why.into());
            }
        };
        let (mut id, mut directory, mut is_server, mut verify) = (None, None, None, true);
        for (key, value) in members {
            if key == "dir" {
                directory = Some(value);
                continue;
            }
            let Ok(value) = value.into_string() else {
                return Err(format!("the value of '{key}' is not UTF-8"));
            };
            match (&*key, &mut kind) {
                ("id", _) => id = Some(value),
                ("endpoint", _) => {
                    is_server = match &*value {
                        "server" => Some(true),
                        "client" => Some(false),
                        _ => return Err(format!("endpoint does not accept value '{value}'")),
                    }
                }
                ("verify-peer", _) => {
                    verify = parse_switch(&value).ok_or("verify-peer expects 'on' or 'off'")?;
                }
                ("username", Kind::Keys { user }) => *user = Some(value),
                _ => return Err(format!("no option '{key}' is part of this version")),
            }
        }
        Ok(Object {
            id: id.ok_or("Parameter 'id' is missing")?,
            directory: directory.ok_or("Parameter 'dir' is missing")?.into(),
            is_server,
            verify,
            kind,
        })
    }
}

/// Options by commas, of which a doubled one is a comma; the first word is the
/// type.
fn words(text: &OsStr) -> Vec<(String, OsString)> {
    let pair = |(place, word): (usize, OsString)| {
        let mut parts = word.as_bytes().splitn(2, |b| *b == b'=');
        let key = parts.next().unwrap_or_default();
        let (key, value) = match parts.next() {
            Some(value) => (key, value),
            None if place == 0 => (&b"qom-type"[..], key),
            None => (key, &b"on"[..]),
        };
        let key = String::from_utf8_lossy(key).into_owned();
        (key, OsStr::from_bytes(value).to_owned())
    };
    split_list(text).into_iter().enumerate().map(pair).collect()
}

fn json(text: &OsStr) -> Result<Vec<(String, OsString)>, String> {
    let map: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(text.as_bytes()).map_err(|e| e.to_string())?;
    let members = map
        .into_iter()
        .map(|(key, value)| match value {
            serde_json::Value::String(text) => (key, text.into()),
            other => (key, other.to_string().into()),
        })
        .collect();
    Ok(members)
}

#[cfg(test)]
mod tests {
    //! Guards against credentials of another directory, and a server that is not verified.
    use super::*;

    fn files(directory: &str, verify: Verify) -> TlsCredentials {
        TlsCredentials::Certificates(
            TlsFiles::default()
                .directory(Some(directory.into()))
                .verify(verify),
        )
    }

    #[test]
    fn both_forms_are_read() {
        for text in [
            "tls-creds-x509,id=a,dir=/x,,y,endpoint=client",
            r#"{"id":"a","dir":"/x,y","qom-type":"tls-creds-x509","verify-peer":true}"#,
        ] {
            let (id, credentials) = parse(OsStr::new(text)).unwrap();
            assert_eq!(
                (&*id, credentials),
                ("a", files("/x,y", Verify::Name)),
                "{text}"
            );
        }
        let off = parse(OsStr::new("tls-creds-x509,id=a,dir=/x,verify-peer=off")).unwrap();
        assert_eq!(off.1, files("/x", Verify::Nothing));
        for (text, user) in [
            ("tls-creds-psk,id=a,dir=/x", "qemu"),
            (
                "tls-creds-psk,id=a,dir=/x,endpoint=client,username=u,verify-peer=off",
                "u",
            ),
            (
                r#"{"qom-type":"tls-creds-psk","id":"a","dir":"/x","username":"u"}"#,
                "u",
            ),
        ] {
            let key = TlsCredentials::Key(KeyFile::new("/x/keys.psk").user(Some(user.into())));
            assert_eq!(parse(OsStr::new(text)).unwrap().1, key, "{text}");
        }
        for text in [
            "",
            "secret,id=s,data=abc",
            "tls-creds-psk,id=a",
            "tls-creds-psk,id=a,dir=/x,endpoint=server",
            "tls-creds-psk,id=a,dir=/x,endpoint=neither",
            "tls-creds-psk,id=a,dir=/x,verify-peer=perhaps",
            "tls-creds-psk,id=a,dir=/x,priority=NORMAL",
            "tls-creds-x509,id=a,dir=/x,username=u",
            "tls-creds-x509,dir=/x",
            "tls-creds-x509,id=a",
            "tls-creds-x509,id=a,dir=/x,endpoint=server",
            "tls-creds-x509,id=a,dir=/x,verify-peer=perhaps",
            "tls-creds-x509,id=a,dir=/x,priority=NORMAL",
            "{",
        ] {
            assert!(parse(OsStr::new(text)).is_err(), "{text}");
        }
    }
}
