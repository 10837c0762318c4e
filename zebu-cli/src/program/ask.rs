//! Asking the person at the terminal for a passphrase.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use zebu::block::Secret;
use zeroize::Zeroizing;

use crate::output::printed;

/// A terminal that shows nothing of what is typed, until this is dropped.
struct Hidden<'a> {
    terminal: &'a File,
    before: Termios,
}

impl<'a> Hidden<'a> {
    fn new(terminal: &'a File) -> Option<Self> {
        let before = tcgetattr(terminal).ok()?;
        let mut hidden = before.clone();
        hidden.local_modes.remove(LocalModes::ECHO);
        hidden.local_modes.insert(LocalModes::ECHONL);
        tcsetattr(terminal, OptionalActions::Flush, &hidden).ok()?;
        Some(Hidden { terminal, before })
    }
}

impl Drop for Hidden<'_> {
    fn drop(&mut self) {
        // There is nobody to be told.
        let _ = tcsetattr(self.terminal, OptionalActions::Flush, &self.before);
    }
}

/// The passphrase of an image. None: the process has no terminal, or nothing was typed.
pub fn passphrase(image: &OsStr) -> Option<Secret> {
    let mut terminal = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/tty")
        .ok()?;
    let name = printed::message(&image.to_string_lossy());
    write!(terminal, "Passphrase of '{name}': ").ok()?;
    let hidden = Hidden::new(&terminal)?;
    let mut line = Zeroizing::new(String::new());
    BufReader::new(hidden.terminal).read_line(&mut line).ok()?;
    let text = line.trim_end_matches('\n');
    (!text.is_empty()).then(|| Secret::new(text))
}
