//! How a command ends badly.

use std::io;

/// What a command returns: its exit status, or what went wrong.
pub type Outcome = Result<u8, Failure>;

/// Why the program ends with a status other than its result's.
#[derive(Debug)]
pub enum Failure {
    /// All is said; this is the exit status.
    Said(u8),
    /// To be printed on standard error.
    Message {
        /// One line (QEMU has two for a lock).
        text: String,
        /// Whether a line follows that names the help.
        hint: bool,
        /// The exit status.
        status: u8,
        /// Whether the text has its own prefix, as getopt's messages have.
        bare: bool,
        /// What to do next, on a line of its own, which QEMU does not have; or nothing.
        next: String,
    },
}

impl Failure {
    /// A message with exit status 1.
    pub fn new(text: impl Into<String>) -> Self {
        Failure::Message {
            text: text.into(),
            hint: false,
            status: 1,
            bare: false,
            next: String::new(),
        }
    }

    /// A message that is printed as it is.
    pub fn bare(text: impl Into<String>) -> Self {
        match Self::new(text) {
            Failure::Message { text, .. } => Failure::Message {
                text,
                hint: false,
                status: 1,
                bare: true,
                next: String::new(),
            },
            other => other,
        }
    }

    /// The same with another exit status.
    #[must_use]
    pub fn with_status(mut self, new: u8) -> Self {
        if let Failure::Message { status, .. } = &mut self {
            *status = new;
        }
        self
    }

    /// The same, followed by what to do next unless the program is called by a name of QEMU's.
    #[must_use]
    pub fn with_next(mut self, what: impl Into<String>) -> Self {
        if let Failure::Message { next, .. } = &mut self {
            *next = what.into();
        }
        self
    }

    /// The exit status.
    pub fn status(&self) -> u8 {
        match self {
            Failure::Said(status) | Failure::Message { status, .. } => *status,
        }
    }

    /// Whether the arguments are wrong: the line that names the help follows.
    pub fn is_usage(&self) -> bool {
        matches!(self, Failure::Message { hint: true, .. })
    }

    /// The same, followed by the line that names the help.
    #[must_use]
    pub fn with_hint(mut self) -> Self {
        if let Failure::Message { hint, .. } = &mut self {
            *hint = true;
        }
        self
    }
}

impl From<io::Error> for Failure {
    /// An error of a report on standard output. A closed pipe is no failure, as in
    /// qemu-img.
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            Failure::Said(0)
        } else {
            let why = zebu::strerror(&error);
            Failure::new(format!("Could not write to standard output: {why}"))
        }
    }
}
