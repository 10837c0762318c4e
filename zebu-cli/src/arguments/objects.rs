//! `--object`: what images are named with by id: credentials (`tls-creds=ID`), secrets
//! (`password-secret=ID`), limits (`throttle-group=ID`).
//! They hold for every image that the program opens.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use zebu::block::{Objects, Passphrases, Secret, ThrottleGroup, ThrottleLimits};
use zebu::names::{parse_switch, split_list};
use zebu::tls::{KeyFile, TlsCredentials, TlsFiles, Verify};
use zeroize::Zeroizing;

use crate::output::Shown;
use crate::program::{Context, Failure, ask, process};

/// The names of the files in the folder of an object.
const IN_FOLDERS: [&str; 7] = [
    "ca-cert.pem",
    "ca-crl.pem",
    "client-cert.pem",
    "client-key.pem",
    "server-cert.pem",
    "server-key.pem",
    KEYS,
];

/// Keeps the name of a file with a secret or keys, or of a folder with such files, which no command
/// may write to.
pub fn note_file(context: &Context, path: &Path) {
    let mut files = context.key_files.borrow_mut();
    if !files.iter().any(|file| file == path) {
        files.push(path.to_owned());
    }
}

/// The files that secrets and keys are read from, as far as they are known.
pub fn files(context: &Context) -> Vec<PathBuf> {
    let noted = context.key_files.borrow();
    let own = |path: &PathBuf| match path.is_dir() {
        true => IN_FOLDERS.map(|name| path.join(name)).to_vec(),
        false => vec![path.clone()],
    };
    noted.iter().flat_map(own).collect()
}

/// Takes `tls-creds-x509,id=ID,dir=DIR,endpoint=client,verify-peer=on`,
/// `tls-creds-psk,id=ID,dir=DIR,endpoint=client,username=qemu`, `secret,id=ID,file=FILE` or
/// `throttle-group,id=ID,limits.iops-total=100`, or the same as JSON.
pub fn add(context: &Context, text: &OsStr) -> Result<(), Failure> {
    let wrong = |why: String| match is_secret(text) {
        // Without the text, which may have it.
        true => Failure::new(why),
        false => Failure::new(format!("--object {}: {why}", text.shown())),
    };
    let members = members(text).map_err(wrong)?;
    let mut kept = context.objects.borrow_mut();
    // The options of one command may be processed more than once.
    let (id, is_same) = if members.kind == "throttle-group" {
        // In QEMU's words, which have no more than this.
        let (id, group) = throttle_group(members).map_err(Failure::new)?;
        let is_new = !kept.tls.contains_key(&id) && !kept.secrets.contains_key(&id);
        let limits = group.limits();
        let kept = kept.throttle_groups.entry(id.clone()).or_insert(group);
        (id, is_new && kept.limits() == limits)
    } else if members.kind == "secret" {
        let (id, secret) = secret(context, members).map_err(wrong)?;
        let is_new = !kept.tls.contains_key(&id) && !kept.throttle_groups.contains_key(&id);
        let other = kept.secrets.insert(id.clone(), secret.clone());
        (id, is_new && other.is_none_or(|other| other == secret))
    } else {
        let (id, credentials) = credentials(context, members).map_err(wrong)?;
        let is_new = !kept.secrets.contains_key(&id) && !kept.throttle_groups.contains_key(&id);
        let other = kept.tls.insert(id.clone(), credentials.clone());
        (id, is_new && other.is_none_or(|other| other == credentials))
    };
    match is_same {
        true => Ok(()),
        false => Err(wrong(format!(
            "attempt to add duplicate property '{id}' to object"
        ))),
    }
}

/// Takes an object that an image may be named with, and no server has. False: it is none.
pub fn add_for_image(context: &Context, text: &OsStr) -> Result<bool, Failure> {
    let kind = members(text).map(|members| members.kind);
    match kind.as_deref() {
        Ok("secret" | "throttle-group") => add(context, text).map(|()| true),
        _ => Ok(false),
    }
}

/// All of them. A person at a terminal is asked for passphrases that no secret gives, but under no name of QEMU.
pub fn all(context: &Context) -> Objects {
    let ask = Passphrases::new(|image| {
        process::keep_out_of_core_dumps();
        ask::passphrase(image)
    });
    let ask = (context.role == "zebu").then_some(ask);
    context.objects.borrow().clone().passphrases(ask)
}

/// Limits that nodes keep to together.
fn throttle_group(members: Members) -> Result<(String, ThrottleGroup), String> {
    let (mut id, mut limits) = (None, ThrottleLimits::default());
    for (key, value) in members.rest {
        let value = value.to_string_lossy().into_owned();
        if key == "id" {
            id = Some(value);
            continue;
        }
        let unexpected = || format!("Parameter '{key}' is unexpected");
        let name = key.strip_prefix("x-").or(key.strip_prefix("limits."));
        let name = name.ok_or_else(unexpected)?;
        if !limits.set(name, 0) {
            return Err(unexpected());
        }
        let number: i64 = value
            .parse()
            .map_err(|_| format!("Parameter '{key}' expects integer"))?;
        let number = u64::try_from(number).map_err(|_| "Property values cannot be negative")?;
        limits.set(name, number);
    }
    let id = id.ok_or("Parameter 'id' is missing")?;
    let group = ThrottleGroup::new(limits).map_err(|e| e.to_string())?;
    Ok((id, group))
}

/// A secret, in QEMU's words if it is none.
fn secret(context: &Context, members: Members) -> Result<(String, Secret), String> {
    let (mut id, mut file, mut data, mut is_base64) = (None, None, None, false);
    for (key, value) in members.rest {
        match (&*key, value.to_str()) {
            ("file", _) => file = Some(value),
            ("id", Some(value)) => id = Some(value.to_owned()),
            ("format", Some("raw")) => is_base64 = false,
            ("format", Some("base64")) => is_base64 = true,
            ("format", _) => {
                let value = value.to_string_lossy();
                return Err(format!(
                    "Parameter 'format' does not accept value '{value}'"
                ));
            }
            ("data", _) => data = Some(Zeroizing::new(value.into_vec())),
            ("keyid" | "iv", _) => {
                return Err(format!("no option '{key}' is part of this version"));
            }
            _ => return Err(format!("Parameter '{key}' is unexpected")),
        }
    }
    let id = id.ok_or("Parameter 'id' is missing")?;
    let secret = match (file, data) {
        (Some(_), Some(_)) => return Err("'file' and 'data' are mutually exclusive".into()),
        (None, None) => return Err("Either 'file' or 'data' must be provided".into()),
        (None, Some(data)) => Secret::new(text_of(data.to_vec(), is_base64, &id)?),
        (Some(file), None) => {
            note_file(context, Path::new(&file));
            read_secret(Path::new(&file), is_base64, &id)?
        }
    };
    // No file of a crash has it.
    process::keep_out_of_core_dumps();
    Ok((id, secret))
}

/// Whether an object may be a secret, whose text is not shown.
fn is_secret(text: &OsStr) -> bool {
    let is_there = |word: &[u8]| {
        text.as_bytes()
            .windows(word.len())
            .any(|found| found == word)
    };
    is_there(b"secret")
}

/// The text of a secret.
fn text_of(bytes: Vec<u8>, is_base64: bool, id: &str) -> Result<String, String> {
    let bytes = match is_base64 {
        true => BASE64_STANDARD
            .decode(bytes.trim_ascii())
            .map_err(|_| "Base64 data contains invalid characters")?,
        false => bytes,
    };
    String::from_utf8(bytes).map_err(|_| format!("Data from secret {id} is not valid UTF-8"))
}

/// The text of a file.
fn read_secret(file: &Path, is_base64: bool, id: &str) -> Result<Secret, String> {
    let bytes = std::fs::read(file);
    let bytes = bytes.map_err(|e| format!("{}: {}", file.shown(), zebu::strerror(&e)))?;
    text_of(bytes, is_base64, id).map(Secret::of_file)
}

/// Credentials for TLS of a client.
fn credentials(context: &Context, members: Members) -> Result<(String, TlsCredentials), String> {
    let object = Object::of(members)?;
    if object.is_server == Some(true) {
        return Err("Expecting TLS credentials with a client endpoint".into());
    }
    note_file(context, &object.directory);
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

/// An object's type and its other members.
struct Members {
    kind: String,
    rest: Vec<(String, OsString)>,
}

/// Reads `TYPE,id=ID,...` or JSON.
fn members(text: &OsStr) -> Result<Members, String> {
    let mut rest = match text.as_bytes().starts_with(b"{") {
        true => json(text)?,
        false => words(text),
    };
    let place = rest.iter().position(|(key, _)| key == "qom-type");
    let kind = place.map(|place| rest.remove(place).1);
    let kind = kind.and_then(|kind| kind.into_string().ok());
    Ok(Members {
        kind: kind.unwrap_or_default(),
        rest,
    })
}

impl Object {
    /// Reads `TYPE,id=ID,...` or JSON.
    pub fn parse(text: &OsStr) -> Result<Object, String> {
        Object::of(members(text)?)
    }

    fn of(members: Members) -> Result<Object, String> {
        let mut kind = match &*members.kind {
            "tls-creds-x509" => Kind::Certificates,
            "tls-creds-psk" => Kind::Keys { user: None },
            "secret" => return Err("a secret is no TLS credentials".into()),
            _ => {
                let why = "objects other than tls-creds-x509, tls-creds-psk, secret and \
                           throttle-group are not part of this version";
                return Err(why.into());
            }
        };
        let (mut id, mut directory, mut is_server, mut verify) = (None, None, None, true);
        for (key, value) in members.rest {
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
    let mut members = Vec::new();
    for (key, value) in map {
        match value {
            serde_json::Value::String(text) => members.push((key, text.into())),
            serde_json::Value::Object(inner) => {
                let inner = inner.into_iter();
                members.extend(
                    inner.map(|(name, value)| (format!("{key}.{name}"), value.to_string().into())),
                );
            }
            other => members.push((key, other.to_string().into())),
        }
    }
    Ok(members)
}

#[cfg(test)]
mod tests {
    //! Guards against credentials of another directory, and a server that is not verified.
    use super::*;

    fn parse(text: &OsStr) -> Result<(String, TlsCredentials), String> {
        credentials(&Context::new(None), members(text)?)
    }

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

    #[test]
    fn limits_are_read_under_both_names() {
        let of = |text: &str| throttle_group(members(OsStr::new(text))?);
        for text in [
            "throttle-group,id=g,x-iops-total=10,limits.bps-read=5",
            r#"{"qom-type":"throttle-group","id":"g","limits":{"iops-total":10,"bps-read":5}}"#,
        ] {
            let (id, group) = of(text).unwrap();
            let limits = group.limits();
            assert_eq!((&*id, limits.requests[0].average), ("g", 10), "{text}");
            assert_eq!(limits.bytes[1].average, 5, "{text}");
        }
        for (text, why) in [
            ("throttle-group,x-iops-total=1", "Parameter 'id' is missing"),
            (
                "throttle-group,id=g,x-foo=1",
                "Parameter 'x-foo' is unexpected",
            ),
            (
                "throttle-group,id=g,iops-total=1",
                "Parameter 'iops-total' is unexpected",
            ),
            (
                "throttle-group,id=g,x-iops-total=a",
                "Parameter 'x-iops-total' expects integer",
            ),
            (
                "throttle-group,id=g,x-iops-total=-1",
                "Property values cannot be negative",
            ),
            (
                "throttle-group,id=g,x-iops-size=1",
                "iops size requires an iops value to be set",
            ),
        ] {
            assert_eq!(of(text).unwrap_err(), why, "{text}");
        }
    }

    #[test]
    fn secrets_are_in_files_or_in_the_option() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("s");
        let of = |text: String| secret(&Context::new(None), members(OsStr::new(&text))?);
        for (content, format, expected) in [
            ("pass word", "", Some("pass word")),
            ("line\n", "", Some("line")),
            ("line\n", ",format=raw", Some("line")),
            ("cGFzcw==\n", ",format=base64", Some("pass")),
            ("?", ",format=base64", None),
            ("x", ",format=aes", None),
        ] {
            std::fs::write(&file, content).unwrap();
            let secret = of(format!("secret,id=s,file={}{format}", file.display()));
            let text = secret.ok().map(|(_, secret)| secret.reveal().to_owned());
            assert_eq!(text.as_deref(), expected, "{content:?}{format}");
        }
        let (_, given) = of("secret,id=s,data=YQ==,format=base64".into()).unwrap();
        assert_eq!(given.reveal(), "a");
        for text in [
            "secret,id=s",
            "secret,data=abc",
            "secret,id=s,data=abc,file=/nowhere",
            "secret,id=s,file=/nowhere",
        ] {
            assert!(of(text.into()).is_err(), "{text}");
        }
    }
}
