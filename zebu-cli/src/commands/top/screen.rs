//! The terminal while it shows one page: as it was when this is dropped.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use super::view::Line;
use crate::output::colours::{self, Style};

/// The other page of the terminal, no cursor, no automatic line breaks.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

/// A terminal on standard output.
pub struct Screen {
    /// The modes that standard input had, if it is a terminal.
    modes: Option<Termios>,
    has_colours: bool,
}

impl Screen {
    /// Takes the terminal.
    pub fn enter() -> io::Result<Self> {
        let stdin = io::stdin();
        let modes = match stdin.is_terminal() {
            true => Some(tcgetattr(&stdin)?),
            false => None,
        };
        // Also if what follows fails.
        let screen = Screen {
            modes,
            has_colours: colours::are_wanted(&io::stdout()),
        };
        if let Some(modes) = &screen.modes {
            let mut modes = modes.clone();
            modes.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
            tcsetattr(&stdin, OptionalActions::Now, &modes)?;
        }
        put(ENTER)?;
        Ok(screen)
    }

    /// Shows lines, as many as there is room for.
    pub fn show(&self, lines: &[Line]) -> io::Result<()> {
        let (columns, rows) = match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 => (size.ws_col.into(), size.ws_row.into()),
            _ => (80, 24),
        };
        let mut text = String::from("\x1b[H");
        for (nth, (line, style)) in fitting(lines, rows).iter().enumerate() {
            let line: String = line.chars().take(columns).collect();
            let line = match style {
                Some(style) => style.on(self.has_colours || *style == Style::Reverse, &line),
                None => line,
            };
            let end = if nth == 0 { "" } else { "\r\n" };
            let _ = write!(text, "{end}{line}\x1b[K");
        }
        text.push_str("\x1b[J");
        put(&text)
    }
}

/// Lines for so many rows. The last one says how many there is no room for.
fn fitting(lines: &[Line], rows: usize) -> Vec<Line> {
    let mut shown = lines[..rows.min(lines.len())].to_vec();
    if let Some(last) = shown.last_mut()
        && rows < lines.len()
    {
        let more = lines.len() - rows + 1;
        *last = (
            format!("{more} lines more: zebu top -n 1"),
            Some(Style::Faint),
        );
    }
    shown
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = put(LEAVE);
        if let Some(modes) = &self.modes {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, modes);
        }
    }
}

fn put(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_counted() {
        let lines: Vec<Line> = (0..5).map(|n| (n.to_string(), None)).collect();
        assert_eq!(fitting(&lines, 5), lines);
        assert_eq!(fitting(&lines, 9), lines);
        let shown = fitting(&lines, 3);
        assert_eq!(shown[..2], lines[..2]);
        assert_eq!(shown[2].0, "3 lines more: zebu top -n 1");
        assert!(fitting(&lines, 0).is_empty());
    }
}
