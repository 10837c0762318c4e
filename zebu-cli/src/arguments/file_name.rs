//! What the name of a file that is written means.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

pub use zebu::internal::new_image::{after_file, file_as, file_of, is_remote};
use zebu::names::protocol;

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
