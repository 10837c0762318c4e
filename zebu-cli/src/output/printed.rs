//! Names of images, and other texts of unknown origin, in what is printed: they neither forge a line
//! nor drive a terminal.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::io::{IsTerminal, stdout};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

pub use zebu::internal::printable;
use zebu::internal::printable_bytes;

/// Whether reports have names as they are.
static RAW: OnceLock<bool> = OnceLock::new();
/// Whether the program was called by a name of QEMU's.
static AS_QEMU: OnceLock<bool> = OnceLock::new();

/// Notes how the program was called. Scripts that call it by a name of QEMU's get names as QEMU
/// prints them; a terminal does not.
pub fn set_program(role: &str) {
    let is_qemu = role != "zebu";
    let _ = AS_QEMU.set(is_qemu);
    let _ = RAW.set(is_qemu && !stdout().is_terminal());
}

/// Whether the program was called by a name of QEMU's.
pub fn is_as_qemu() -> bool {
    AS_QEMU.get().is_some_and(|as_qemu| *as_qemu)
}

fn is_raw() -> bool {
    RAW.get().is_some_and(|raw| *raw)
}

/// A name in a report on standard output.
pub fn name(name: &[u8]) -> Cow<'_, [u8]> {
    match is_raw() {
        true => name.into(),
        false => printable_bytes(name).into(),
    }
}

/// The same for text.
pub fn text(text: &str) -> Cow<'_, str> {
    match is_raw() {
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

/// A message of one or more lines. Tabs stay, too: qemu-io quotes what was typed.
pub fn lines(text: &str) -> String {
    let mut shown = String::new();
    for part in text.split_inclusive(['\n', '\t']) {
        let plain = part.trim_end_matches(['\n', '\t']);
        shown += &printable(plain.as_bytes());
        shown += &part[plain.len()..];
    }
    shown
}
