//! File names as bytes: the protocol that one may begin with, and the folder
//! that a relative one belongs to.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The protocol of a name: what precedes the first colon, if no slash does.
pub fn protocol(name: &OsStr) -> Option<Cow<'_, str>> {
    let name = name.as_bytes();
    let end = name.iter().position(|b| b":/".contains(b))?;
    (name[end] == b':').then(|| String::from_utf8_lossy(&name[..end]))
}

/// A name that means this path, also if that looks like a name with a protocol.
pub fn as_name(path: &Path) -> OsString {
    let mut name = OsString::new();
    if protocol(path.as_os_str()).is_some() {
        name.push("./");
    }
    name.push(path);
    name
}

/// Whether a name is that of an open file of the process, which is in no folder: names that are
/// relative to it belong to the current directory.
pub fn is_descriptor(name: &OsStr) -> bool {
    let name = Path::new(name);
    let folder = name.parent();
    folder.is_some_and(|folder| {
        ["/proc/self/fd", "/dev/fd"]
            .map(Path::new)
            .contains(&folder)
    })
}

/// What follows `PROTOCOL:`, if the name begins with it.
pub fn after_protocol<'a>(name: &'a OsStr, protocol: &str) -> Option<&'a OsStr> {
    let name = name.as_bytes().strip_prefix(protocol.as_bytes())?;
    name.strip_prefix(b":").map(OsStr::from_bytes)
}

/// `path`, relative to the folder of the file `of`.
pub fn in_folder_of(of: &OsStr, path: &OsStr) -> OsString {
    let folder = match of.as_bytes().iter().rposition(|b| *b == b'/') {
        Some(slash) if !path.as_bytes().starts_with(b"/") && !is_descriptor(of) => slash + 1,
        _ => 0,
    };
    joined(OsStr::from_bytes(&of.as_bytes()[..folder]), path)
}

/// The path `name`, relative to the folder of `relative_to`.
pub fn beside<'a>(name: &'a OsStr, relative_to: Option<&OsStr>) -> Result<Cow<'a, OsStr>, String> {
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
    Ok(in_folder_of(of, name).into())
}

/// Both names in a row.
pub fn joined(first: &OsStr, second: &OsStr) -> OsString {
    let mut joined = first.to_owned();
    joined.push(second);
    joined
}
