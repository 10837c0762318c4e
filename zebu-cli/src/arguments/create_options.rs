//! The options of a new image (`-o`): `key=value,…`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

pub use zebu::internal::new_image::CreateOptions;
use zebu::names::split_list;

use crate::output::Shown;
use crate::program::Failure;

/// Whether `-o` requests the list of options.
pub fn asks_for_help(texts: &[OsString]) -> bool {
    let mut items = texts.iter().flat_map(|text| split_list(text));
    items.any(|item| item == "help" || item == "?")
}

/// Refuses a value of `-o` that is no list: empty, or with an empty item at an end.
pub fn check_list(text: &OsStr) -> Result<(), Failure> {
    let bytes = text.as_bytes();
    let commas = bytes.iter().rev().take_while(|b| **b == b',').count();
    match !bytes.is_empty() && !bytes.starts_with(b",") && commas.is_multiple_of(2) {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "Invalid option list: {}",
            text.shown()
        ))),
    }
}
