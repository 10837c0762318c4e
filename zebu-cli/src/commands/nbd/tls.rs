//! Certificates and pre-shared keys as QEMU's options name them.

use std::ffi::OsStr;
use std::path::Path;

use zebu::tls::ServerTls;

use super::arguments::Arguments;
use crate::arguments::objects::{self, KEYS, Kind, Object, note_file};
use crate::output::Shown;
use crate::program::{Context, Failure};

/// What TLS needs, if it is wanted.
pub fn server(context: &Context, arguments: &Arguments) -> Result<Option<ServerTls>, Failure> {
    let mut objects = Vec::new();
    for text in &arguments.object {
        if !objects::add_for_image(context, text)? {
            objects.push(object(text)?);
        }
    }
    let given = [
        arguments.tls_creds.is_some(),
        arguments.tls_certificates.is_some(),
        arguments.tls_psk.is_some(),
    ];
    if given.iter().filter(|given| **given).count() > 1 {
        let text = "--tls-creds, --tls-certificates and --tls-psk are mutually exclusive";
        return Err(Failure::new(text));
    }
    let tls = if let Some(id) = &arguments.tls_creds {
        let object = objects.into_iter().find(|object| object.id == *id);
        let object =
            object.ok_or_else(|| Failure::new(format!("No TLS credentials with id '{id}'")))?;
        note_file(context, &object.directory);
        match object.kind {
            Kind::Certificates => ServerTls::with_certificates(&object.directory, object.verify),
            Kind::Keys { .. } => ServerTls::with_keys(&object.directory.join(KEYS)),
        }
    } else if let Some(directory) = &arguments.tls_certificates {
        note_file(context, Path::new(directory));
        ServerTls::with_certificates(Path::new(directory), true)
    } else if let Some(file) = &arguments.tls_psk {
        note_file(context, Path::new(file));
        ServerTls::with_keys(Path::new(file))
    } else {
        return Ok(None);
    };
    tls.map(Some).map_err(|e| Failure::new(e.to_string()))
}

/// Credentials of a server.
fn object(text: &OsStr) -> Result<Object, Failure> {
    let fail = |why: &str| Failure::new(format!("--object {}: {why}", text.shown()));
    let object = Object::parse(text).map_err(|why| fail(&why))?;
    if object.is_server != Some(true) {
        return Err(fail("Expecting TLS credentials with a server endpoint"));
    }
    match object.kind {
        Kind::Keys { user: Some(_) } => {
            Err(fail("username should not be set when endpoint=server"))
        }
        _ => Ok(object),
    }
}
