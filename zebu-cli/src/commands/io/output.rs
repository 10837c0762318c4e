//! Standard output, written in large pieces to save system calls.

use std::cell::{Cell, RefCell};
use std::fmt::{Arguments, Display};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::rc::Rc;

use crate::output::printed;

/// Buffered standard output, shared by the session and by requests in flight.
#[derive(Clone)]
pub struct Output(Rc<Inner>);

struct Inner {
    stdout: RefCell<BufWriter<Box<dyn Write>>>,
    silent: bool,
    terminal: bool,
    waiting: Cell<bool>,
}

impl Output {
    /// Of this process.
    pub fn new() -> Self {
        let stdout = io::stdout();
        let terminal = stdout.is_terminal();
        Output::to(Box::new(stdout), terminal, false)
    }

    /// Discarded.
    pub fn silent() -> Self {
        Output::to(Box::new(io::sink()), false, true)
    }

    fn to(writer: Box<dyn Write>, terminal: bool, silent: bool) -> Self {
        Output(Rc::new(Inner {
            stdout: RefCell::new(BufWriter::with_capacity(64 << 10, writer)),
            silent,
            terminal,
            waiting: Cell::new(false),
        }))
    }

    /// Writes text. As in qemu-io, a closed or full standard output affects neither commands nor
    /// the exit status.
    pub fn print(&self, text: Arguments<'_>) {
        self.write(|out| out.write_fmt(text));
    }

    /// The same for bytes.
    pub fn print_bytes(&self, text: &[u8]) {
        self.write(|out| out.write_all(text));
    }

    fn write(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
        let _ = write(&mut *self.0.stdout.borrow_mut());
        if self.0.waiting.get() {
            self.flush();
        }
    }

    /// Marks that the session waits for input. Text that is printed meanwhile is written at once.
    pub fn set_waiting(&self, waiting: bool) {
        self.0.waiting.set(waiting);
        if waiting {
            self.flush();
        }
    }

    /// Flushes everything written so far to the reader.
    pub fn flush(&self) {
        let _ = self.0.stdout.borrow_mut().flush();
    }

    /// [`Output::flush`] if a person may be looking.
    pub fn flush_if_terminal(&self) {
        if self.0.terminal {
            self.flush();
        }
    }

    /// A line on standard error, after everything written so far.
    pub fn error(&self, text: impl Display) {
        self.flush();
        if !self.0.silent {
            // An error of standard error cannot be reported.
            let _ = writeln!(io::stderr(), "{}", printed::message(&text.to_string()));
        }
    }
}
