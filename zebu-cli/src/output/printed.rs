//! Names of images, and other texts of unknown origin, in what is printed: they neither forge a line
//! nor drive a terminal.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use zebu::internal::printable_bytes;
pub use zebu::internal::{printable, printable_message as message};

use crate::program::Context;

/// A name in a report on standard output.
pub fn name<'a>(context: &Context, name: &'a [u8]) -> Cow<'a, [u8]> {
    match context.raw_names {
        true => name.into(),
        false => printable_bytes(name).into(),
    }
}

/// The same for text.
pub fn text<'a>(context: &Context, text: &'a str) -> Cow<'a, str> {
    match context.raw_names {
        true => text.into(),
        false => printable(text.as_bytes()).into(),
    }
}

/// A name in a message.
pub trait Shown {
    /// The name on one line, with escapes.
    fn shown(&self) -> String;
}

impl<T: AsRef<OsStr> + ?Sized> Shown for T {
    fn shown(&self) -> String {
        printable(self.as_ref().as_bytes())
    }
}

/// A text of several lines: a name in it that may have line breaks is escaped already.
pub fn lines(text: &str) -> String {
    let mut shown = String::new();
    for part in text.split_inclusive('\n') {
        let plain = part.trim_end_matches('\n');
        shown += &printable(plain.as_bytes());
        shown += &part[plain.len()..];
    }
    shown
}
