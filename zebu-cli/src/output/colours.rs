//! Colours of text on a terminal.

use std::io::IsTerminal;

/// Whether text for `stream` has colours: it is a terminal that has them, and NO_COLOR
/// (<https://no-color.org>) is not set.
pub fn are_wanted(stream: &impl IsTerminal) -> bool {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_none_or(|value| value == "dumb");
    stream.is_terminal() && !unwanted && !is_dumb
}

/// How text is shown: parameters of the control sequence SGR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Bold,
    Faint,
    Reverse,
    Red,
    Yellow,
    Cyan,
}

impl Style {
    /// The control sequence that begins it.
    pub fn begin(self) -> &'static str {
        match self {
            Style::Bold => "\x1b[1m",
            Style::Faint => "\x1b[2m",
            Style::Reverse => "\x1b[7m",
            Style::Red => "\x1b[31m",
            Style::Yellow => "\x1b[33m",
            Style::Cyan => "\x1b[36m",
        }
    }

    /// The one that ends all.
    pub const END: &'static str = "\x1b[0m";

    /// `text` in this style, if colours are `wanted`.
    pub fn on(self, wanted: bool, text: &str) -> String {
        match wanted {
            true => format!("{}{text}{}", self.begin(), Style::END),
            false => text.into(),
        }
    }
}
