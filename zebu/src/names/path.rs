//! File names as bytes: the protocol that one may begin with, and the folder
//! that a relative one belongs to.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::block::is_descriptor;

/// The protocol of a name: what precedes the first colon, if no slash does.
pub fn protocol(name: &OsStr) -> Option<Cow<'_, str>> {
    let name = name.as_bytes();
    let end = name.iter().position(|b| b":/".contains(b))?;
    (name[end] == b':').then(|| String::from_utf8_lossy(&name[..end]))
}

/// Refuses an empty path, and one with a zero byte.
pub(super) fn check_path(path: &OsStr) -> Result<(), String> {
    if path.is_empty() {
        return Err("The 'file' block driver requires a file name".into());
    }
    if path.as_bytes().contains(&0) {
        return Err("The file name has a zero byte in it".into());
    }
    Ok(())
}

/// A file's name without the driver that it may begin with.
pub(super) fn without_prefix(name: &OsStr, driver: &str) -> OsString {
    let Some(path) = after_protocol(name, driver) else {
        return name.into();
    };
    match protocol(path) {
        // So that the shown name does not begin with a protocol.
        Some(_) if driver == "file" => joined(OsStr::new("./"), path),
        _ => path.into(),
    }
}

/// What follows `PROTOCOL:`, if the name begins with it.
pub(super) fn after_protocol<'a>(name: &'a OsStr, protocol: &str) -> Option<&'a OsStr> {
    let name = name.as_bytes().strip_prefix(protocol.as_bytes())?;
    name.strip_prefix(b":").map(OsStr::from_bytes)
}

/// The path `name`, relative to the directory of `relative_to`.
pub(super) fn beside<'a>(
    name: &'a OsStr,
    relative_to: Option<&OsStr>,
) -> Result<Cow<'a, OsStr>, String> {
    let Some(of) = relative_to else {
        return Ok(name.into());
    };
    if name.is_empty() || name.as_bytes().starts_with(b"/") || is_descriptor(of) {
        return Ok(name.into());
    }
    if of.as_bytes().starts_with(b"json:") || of.is_empty() {
        return Err(format!(
            "Cannot use relative backing file names for '{}'",
            of.display()
        ));
    }
    Ok(match of.as_bytes().iter().rposition(|b| *b == b'/') {
        Some(slash) => joined(OsStr::from_bytes(&of.as_bytes()[..=slash]), name).into(),
        None => name.into(),
    })
}

/// Both names in a row.
pub(super) fn joined(first: &OsStr, second: &OsStr) -> OsString {
    let mut joined = first.to_owned();
    joined.push(second);
    joined
}
