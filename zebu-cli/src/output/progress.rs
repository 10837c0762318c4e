//! Progress of a long job, for terminals and for scripts, and the signals that request it or
//! stop the job.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use zebu::block::Device;
use zebu::internal::new_image::NewFiles;
use zebu::storage::Queue;

use crate::output::Shown;
use crate::output::work::Work;
use crate::program::{Context, Failure, signals};

/// The progress of a job over a number of bytes. There is one at a time.
pub struct Progress {
    total: u64,
    done: u64,
    display: Display,
    /// Where the work is, if that is known: else it is the same everywhere.
    work: Option<Work>,
}

/// How progress is shown.
enum Display {
    /// The option was not given.
    None,
    /// As qemu-img prints it; holds the hundredths of a percent last shown.
    Plain(Option<u64>),
    /// A bar with rate and time left, on a terminal.
    Bar(ProgressBar),
}

impl Progress {
    /// A job over `total` bytes begins, which signals can stop. Progress is shown if that
    /// was `asked` for.
    pub fn new(asked: bool, total: u64) -> Self {
        signals::catch_stops();
        Progress::only_shown(asked, total)
    }

    /// The same for a job that signals end as they end any program.
    pub fn only_shown(asked: bool, total: u64) -> Self {
        let display = match (asked, io::stdout().is_terminal()) {
            (false, _) => Display::None,
            (true, false) => Display::Plain(None),
            (true, true) => Display::Bar(bar(total, ProgressDrawTarget::stdout())),
        };
        Progress {
            total,
            done: 0,
            display,
            work: None,
        }
    }

    /// The progress of a command that writes data to standard output: it is shown if standard error
    /// is a terminal.
    pub fn beside_data(asked: bool) -> Self {
        let display = match asked && io::stderr().is_terminal() {
            true => Display::Bar(bar(0, ProgressDrawTarget::stderr())),
            false => Display::None,
        };
        Progress {
            total: 0,
            done: 0,
            display,
            work: None,
        }
    }

    /// Shows that the command has begun: 0 %, as qemu-img before it opens anything.
    pub fn begun(asked: bool) -> Self {
        let mut progress = Progress::only_shown(asked, 0);
        progress.show();
        progress
    }

    /// The job over `total` bytes begins, which signals can stop.
    pub fn job(&mut self, total: u64) {
        signals::catch_stops();
        self.resize(total);
    }

    /// The job turns out to be over `total` bytes.
    pub fn resize(&mut self, total: u64) {
        self.work = None;
        self.total = total;
        if let Display::Bar(bar) = &self.display {
            set_total(bar, total);
        }
    }

    /// The job is over these disks, one after the other, each of which is in one or more images: from now on
    /// only their data count.
    pub fn weigh(&mut self, context: &Context, queue: &Queue, disks: &[&[&Device]]) {
        // Lookups count as work of an untrusted image.
        if matches!(self.display, Display::None) || context.is_untrusted() {
            return;
        }
        self.work = Work::of(queue, disks);
        if let Some(work) = &self.work {
            self.total = work.total();
            if let Display::Bar(bar) = &self.display {
                set_total(bar, self.total);
            }
        }
    }

    /// So many bytes are done. Breaks after a signal that stops the job.
    pub fn set(&mut self, done: u64) -> ControlFlow<()> {
        self.done = self.work.as_ref().map_or(done, |work| work.before(done));
        self.show();
        match signals::stop_signal() {
            Some(_) => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        }
    }

    fn show(&mut self) {
        self.show_share(hundredths(self.done, self.total));
    }

    fn show_share(&mut self, now: u64) {
        match &mut self.display {
            Display::None => {
                if signals::take_progress_request() {
                    // An error of standard error cannot be reported.
                    let _ = writeln!(io::stderr(), "{}", percent(now));
                }
            }
            Display::Bar(bar) => bar.set_position(self.done),
            Display::Plain(shown) => {
                if shown.replace(now) != Some(now) {
                    let mut out = io::stdout().lock();
                    // A closed standard output does not stop the job.
                    let _ = write!(out, "{}\r", percent(now));
                    let _ = out.flush();
                }
            }
        }
    }

    /// Ends the display; at 100 % if `complete`.
    pub fn finish(&mut self, complete: bool) {
        match &self.display {
            Display::None => {}
            Display::Plain(_) => {
                match complete {
                    true => self.show_share(WHOLE),
                    false => self.show(),
                }
                crate::output::say("\n");
            }
            Display::Bar(bar) if complete => {
                if self.total == 0 {
                    set_total(bar, self.done);
                    set_style(bar, SHARE);
                }
                bar.finish();
            }
            Display::Bar(bar) => bar.abandon(),
        }
    }
}

/// The share of a check that is done, on a terminal's standard error: a check has other units of work
/// than bytes, and what it finds is printed meanwhile.
pub struct Share(Option<ProgressBar>);

impl Share {
    /// It is shown if that was `asked` for.
    pub fn new(asked: bool) -> Self {
        Share((asked && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(Some(WHOLE), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{percent:>3}% [{wide_bar}] {elapsed} {eta}");
            if let Ok(style) = style {
                bar.set_style(style.progress_chars("=> "));
            }
            bar
        }))
    }

    /// So much of `total` is done.
    pub fn set(&self, done: u64, total: u64) {
        let now = hundredths(done, total);
        match &self.0 {
            Some(bar) => bar.set_position(now),
            None => {
                if signals::take_progress_request() {
                    // An error of standard error cannot be reported.
                    let _ = writeln!(io::stderr(), "{}", percent(now));
                }
            }
        }
    }

    /// A writer to the same terminal, which hides the bar while it writes.
    pub fn beside<'a>(&'a self, out: impl Write + 'a) -> impl Write + 'a {
        Beside(self, out)
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// See [`Share::beside`].
struct Beside<'a, W>(&'a Share, W);

impl<W: Write> Write for Beside<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &self.0.0 {
            Some(bar) => bar.suspend(|| self.1.write(bytes)),
            None => self.1.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.1.flush()
    }
}

/// The failure of a job that a signal has stopped, if one has; `state` is what is left of
/// it.
pub fn interrupted(state: &str) -> Option<Failure> {
    let signal = signals::stop_signal()?;
    Some(Failure::new(format!("Interrupted; {state}")).with_status(signals::exit_status(signal)))
}

/// Marks a new image as incomplete, if it is one. Returns the text for the message.
pub fn incomplete(queue: &Queue, name: &OsStr, files: Option<&NewFiles>) -> String {
    if let Some(files) = files {
        files.mark(queue);
    }
    format!("'{}' is incomplete", name.shown())
}

/// What a bar shows where the size of the job is known.
const SHARE: &str =
    "{percent:>3}% [{wide_bar}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
/// What it shows until then.
const SO_FAR: &str = "{binary_bytes} {binary_bytes_per_sec}";

fn bar(total: u64, target: ProgressDrawTarget) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, target);
    set_total(&bar, total);
    bar
}

/// So many bytes are all; 0: that is not known yet, and a bar of nothing would be full.
fn set_total(bar: &ProgressBar, total: u64) {
    match total {
        0 => {
            set_style(bar, SO_FAR);
            bar.unset_length();
        }
        _ => {
            set_style(bar, SHARE);
            bar.set_length(total);
        }
    }
}

fn set_style(bar: &ProgressBar, template: &str) {
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
}

/// All of a job, in hundredths of a percent.
const WHOLE: u64 = 10_000;

/// Hundredths of a percent.
fn hundredths(done: u64, total: u64) -> u64 {
    match total {
        0 => 0,
        total => (u128::from(done) * u128::from(WHOLE) / u128::from(total)) as u64,
    }
}

/// As qemu-img has it.
fn percent(hundredths: u64) -> String {
    let (whole, part) = (hundredths / 100, hundredths % 100);
    format!("    ({whole}.{part:02}/100%)")
}
