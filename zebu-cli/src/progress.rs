//! How far a long command has come, for people and for scripts.

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};

/// Shows progress on standard output: a bar with rate and time left on a
/// terminal, else the line that qemu-img prints.
pub enum Progress {
    /// Not asked for.
    None,
    /// As qemu-img prints it; holds the bytes in all, and the hundredths of a
    /// percent last shown.
    Plain(u64, Option<u64>),
    /// On a terminal.
    Bar(ProgressBar),
}

impl Progress {
    /// Progress over `total` bytes, if it was asked for.
    pub fn new(asked: bool, total: u64) -> Self {
        if !asked {
            return Progress::None;
        }
        if !io::stdout().is_terminal() {
            return Progress::Plain(total, None);
        }
        let bar = ProgressBar::new(total);
        let style = ProgressStyle::with_template(
            "{percent:>3}% [{wide_bar}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
        );
        if let Ok(style) = style {
            bar.set_style(style.progress_chars("=> "));
        }
        Progress::Bar(bar)
    }

    /// So many bytes are done.
    pub fn set(&mut self, done: u64) {
        match self {
            Progress::None => {}
            Progress::Bar(bar) => bar.set_position(done),
            Progress::Plain(total, shown) => {
                let hundredths = match *total {
                    0 => 10_000,
                    total => (u128::from(done) * 10_000 / u128::from(total)) as u64,
                };
                if *shown != Some(hundredths) {
                    *shown = Some(hundredths);
                    let (whole, part) = (hundredths / 100, hundredths % 100);
                    let mut out = io::stdout().lock();
                    // Progress that nobody reads is no reason to stop.
                    let _ = write!(out, "    ({whole}.{part:02}/100%)\r");
                    let _ = out.flush();
                }
            }
        }
    }

    /// Ends the display; at 100 % if `complete`.
    pub fn finish(&mut self, complete: bool) {
        if let Progress::Plain(total, _) = self {
            if complete {
                let total = *total;
                self.set(total);
            }
            println!();
        }
        if let Progress::Bar(bar) = self {
            match complete {
                true => bar.finish(),
                false => bar.abandon(),
            }
        }
    }
}
