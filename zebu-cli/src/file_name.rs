//! What the name of a file that is written means.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use zebu::block::FileSpec;
use zebu::names::protocol;

/// The file, the export of a server or the object that a name means. What does not exist
/// yet is described by no options, so `json:` is refused.
pub fn file_of(name: &OsStr) -> Result<FileSpec, String> {
    if let Some(path) = after_file(name) {
        return Ok(FileSpec::new(path));
    }
    match protocol(name) {
        Some(protocol) if is_remote(&protocol) => {
            FileSpec::resolve(name, None).map_err(|e| e.to_string())
        }
        Some(protocol) => Err(format!("Unknown protocol '{protocol}'")),
        None => Ok(FileSpec::new(name)),
    }
}

/// Whether names with this protocol are of another machine.
pub fn is_remote(protocol: &str) -> bool {
    protocol.starts_with("nbd")
        || ["http", "https", "s3", "gs", "az", "rbd", "ssh"].contains(&protocol)
}

/// What follows `file:`, if a name begins with it.
pub fn after_file(name: &OsStr) -> Option<&OsStr> {
    name.as_bytes()
        .strip_prefix(b"file:")
        .map(OsStr::from_bytes)
}

/// A name that an image at `image` stores, as it is from here.
pub fn beside(name: &OsStr, image: &OsStr) -> OsString {
    let image = after_file(image).unwrap_or(image).as_bytes();
    match image.iter().rposition(|b| *b == b'/') {
        Some(slash) if !name.as_bytes().starts_with(b"/") && protocol(name).is_none() => {
            let mut path = OsStr::from_bytes(&image[..=slash]).to_owned();
            path.push(name);
            path
        }
        _ => name.to_owned(),
    }
}

/// A name as the value of an option, its commas doubled.
pub fn as_value(name: &OsStr) -> OsString {
    let mut value = OsString::new();
    for (place, part) in name.as_bytes().split(|b| *b == b',').enumerate() {
        if place > 0 {
            value.push(",,");
        }
        value.push(OsStr::from_bytes(part));
    }
    value
}
