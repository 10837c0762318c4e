//! Certificates as QEMU's options name them.

use std::path::Path;

use zebu_nbd::ServerTls;

use super::arguments::Arguments;
use crate::failure::Failure;

/// What TLS needs, if it is wanted.
pub fn server(arguments: &Arguments) -> Result<Option<ServerTls>, Failure> {
    let objects = arguments.object.iter().map(|text| Object::parse(text));
    let objects: Vec<Object> = objects.collect::<Result<_, _>>()?;
    let (directory, verify) = match (&arguments.tls_creds, &arguments.tls_certificates) {
        (Some(_), Some(_)) => {
            let text = "--tls-creds and --tls-certificates are mutually exclusive";
            return Err(Failure::new(text));
        }
        (None, None) => return Ok(None),
        (None, Some(directory)) => (directory.clone(), true),
        (Some(id), None) => {
            let object = objects.into_iter().find(|object| object.id == *id);
            let object =
                object.ok_or_else(|| Failure::new(format!("No TLS credentials with id '{id}'")))?;
            (object.directory, object.verify)
        }
    };
    let tls = ServerTls::load(Path::new(&directory), verify);
    tls.map(Some).map_err(|e| Failure::new(e.to_string()))
}

/// An `--object tls-creds-x509`.
struct Object {
    id: String,
    directory: String,
    verify: bool,
}

impl Object {
    fn parse(text: &str) -> Result<Self, Failure> {
        let fail = |why: &str| Failure::new(format!("--object {text}: {why}"));
        let mut parts = text.split(',');
        let kind = parts.next().unwrap_or_default();
        match kind.strip_prefix("qom-type=").unwrap_or(kind) {
            "tls-creds-x509" => {}
            "tls-creds-psk" => {
                let why = "pre-shared keys are not part of this version: its TLS library has none; \
                           use certificates (tls-creds-x509)";
                return Err(fail(why));
            }
            _ => return Err(fail("only tls-creds-x509 is part of this version")),
        }
        let (mut id, mut directory, mut server, mut verify) = (None, None, false, true);
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, "on"));
            match key {
                "id" => id = Some(value.to_string()),
                "dir" => directory = Some(value.to_string()),
                "endpoint" => server = value == "server",
                "verify-peer" => {
                    verify = match value {
                        "on" | "yes" | "true" | "y" => true,
                        "off" | "no" | "false" | "n" => false,
                        _ => return Err(fail("verify-peer expects 'on' or 'off'")),
                    }
                }
                _ => return Err(fail(&format!("no option '{key}' is part of this version"))),
            }
        }
        if !server {
            return Err(fail("Expecting TLS credentials with a server endpoint"));
        }
        Ok(Object {
            id: id.ok_or_else(|| fail("Parameter 'id' is missing"))?,
            directory: directory.ok_or_else(|| fail("Parameter 'dir' is missing"))?,
            verify,
        })
    }
}
