//! `--object`: credentials that images are named with (`tls-creds=ID`).
//!
//! They hold for every image that the process opens, like strict mode
//! (`untrusted.rs`), and are kept in the same way.

use std::sync::{Mutex, PoisonError};

use zebu::block::TlsObjects;
use zebu::storage::nbd::{TlsFiles, Verify};

use crate::failure::Failure;

static CREDENTIALS: Mutex<TlsObjects> = Mutex::new(TlsObjects::new());

/// Takes `tls-creds-x509,id=ID,dir=DIR,endpoint=client,verify-peer=on`, or the
/// same as JSON.
pub fn add(text: &str) -> Result<(), Failure> {
    let (id, files) = parse(text).map_err(|why| Failure::new(format!("--object {text}: {why}")))?;
    let mut kept = CREDENTIALS.lock().unwrap_or_else(PoisonError::into_inner);
    match kept.insert(id.clone(), files.clone()) {
        // The options of one command are looked at more than once.
        Some(other) if other != files => Err(Failure::new(format!(
            "--object {text}: attempt to add duplicate property '{id}' to object"
        ))),
        _ => Ok(()),
    }
}

/// All of them.
pub fn credentials() -> TlsObjects {
    let kept = CREDENTIALS.lock().unwrap_or_else(PoisonError::into_inner);
    kept.clone()
}

fn parse(text: &str) -> Result<(String, TlsFiles), String> {
    let members = match text.starts_with('{') {
        true => json(text)?,
        false => words(text),
    };
    let (mut kind, mut id, mut directory, mut verify) = (None, None, None, Verify::Name);
    for (key, value) in members {
        match &*key {
            "qom-type" => kind = Some(value),
            "id" => id = Some(value),
            "dir" => directory = Some(value),
            "endpoint" if value == "client" => {}
            "endpoint" => return Err("Expecting TLS credentials with a client endpoint".into()),
            "verify-peer" => {
                verify = match &*value {
                    "on" | "yes" | "true" | "y" => Verify::Name,
                    "off" | "no" | "false" | "n" => Verify::Nothing,
                    _ => return Err("verify-peer expects 'on' or 'off'".into()),
                }
            }
            // Of any other object these are options that nobody reads.
            _ if kind.as_deref() != Some("tls-creds-x509") => {}
            _ => return Err(format!("no option '{key}' is part of this version")),
        }
    }
    match kind.as_deref() {
        Some("tls-creds-x509") => {}
        Some("tls-creds-psk") => {
            return Err(
                "pre-shared keys are not part of this version: its TLS library has none; \
                        use certificates (tls-creds-x509)"
                    .into(),
            );
        }
        _ => {
            return Err("objects other than tls-creds-x509 are not part of this version".into());
        }
    }
    let id = id.ok_or("Parameter 'id' is missing")?;
    let directory = directory.ok_or("Parameter 'dir' is missing")?;
    let files = TlsFiles {
        directory: Some(directory.into()),
        verify,
    };
    Ok((id, files))
}

/// Options by commas, of which a doubled one is a comma; the first word is the
/// type.
fn words(text: &str) -> Vec<(String, String)> {
    let marked = text.replace(",,", "\0");
    let pair = |(place, word): (usize, &str)| {
        let (key, value) = match word.split_once('=') {
            Some(pair) => pair,
            None if place == 0 => ("qom-type", word),
            None => (word, "on"),
        };
        (key.to_string(), value.replace('\0', ","))
    };
    marked.split(',').enumerate().map(pair).collect()
}

fn json(text: &str) -> Result<Vec<(String, String)>, String> {
    let map: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|e| e.to_string())?;
    let mut members: Vec<(String, String)> = map
        .into_iter()
        .map(|(key, value)| match value {
            serde_json::Value::String(text) => (key, text),
            other => (key, other.to_string()),
        })
        .collect();
    // What it is comes first.
    members.sort_by_key(|(key, _)| key != "qom-type");
    Ok(members)
}

#[cfg(test)]
mod tests {
    //! Guards against credentials of another directory, or a server that is
    //! not looked at though it should be.
    use super::*;

    #[test]
    fn both_forms_are_read() {
        for text in [
            "tls-creds-x509,id=a,dir=/x,,y,endpoint=client",
            r#"{"id":"a","dir":"/x,y","qom-type":"tls-creds-x509","verify-peer":true}"#,
        ] {
            let (id, files) = parse(text).unwrap();
            assert_eq!((&*id, files.verify), ("a", Verify::Name), "{text}");
            assert_eq!(files.directory.unwrap().to_str(), Some("/x,y"));
        }
        let off = parse("tls-creds-x509,id=a,dir=/x,verify-peer=off").unwrap();
        assert_eq!(off.1.verify, Verify::Nothing);
        for text in [
            "",
            "secret,id=s,data=abc",
            "tls-creds-psk,id=a,dir=/x",
            "tls-creds-x509,dir=/x",
            "tls-creds-x509,id=a",
            "tls-creds-x509,id=a,dir=/x,endpoint=server",
            "tls-creds-x509,id=a,dir=/x,verify-peer=perhaps",
            "tls-creds-x509,id=a,dir=/x,priority=NORMAL",
            "{",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
