//! What a command is, and how it can fail.

use std::ffi::OsStr;

/// A command of the language, which is executed on a session of the type `S`.
pub struct Command<S: 'static> {
    /// Its name.
    pub name: &'static str,
    /// A shorter name, or nothing.
    pub alias: &'static str,
    /// Its arguments, for the help; None if it takes none.
    pub args: Option<&'static str>,
    /// What it does, on one line.
    pub summary: &'static str,
    /// More help, or nothing.
    pub help: &'static str,
    /// Arguments at least, options counted.
    pub min: usize,
    /// Arguments at most; None: any number.
    pub max: Option<usize>,
    /// Whether a file must be open.
    pub needs_file: bool,
    /// Does it. The arguments come without the command's name.
    pub run: Handler<S>,
}

/// The function of a command. File names may have any bytes.
pub enum Handler<S> {
    Words(fn(&mut S, &[&str]) -> Outcome),
    Names(fn(&mut S, &[&OsStr]) -> Outcome),
}

/// What a command returns.
pub type Outcome = Result<(), Failure>;

/// Why a command failed, which decides what is printed where.
#[derive(Debug)]
pub enum Failure {
    /// A line on standard output.
    Out(String),
    /// A line on standard error.
    Err(String),
    /// A line on standard error that begins with the program's name.
    Named(String),
    /// A message of getopt, printed after the command's name as it was typed and before its usage.
    Option(String),
    /// The command's usage is shown.
    Usage,
    /// Everything was said.
    Told,
}

impl<S> Command<S> {
    /// Name, arguments and summary on one line, with the name that was used.
    pub fn usage(&self, name: &str) -> String {
        let args = self.args.map(|a| format!("{a} ")).unwrap_or_default();
        format!("{name} {args}-- {}", self.summary)
    }

    /// Refuses a wrong number of arguments.
    pub fn check_count(&self, name: &str, count: usize) -> Outcome {
        let expected = match self.max {
            _ if count >= self.min && self.max.is_none_or(|max| count <= max) => return Ok(()),
            None => format!("at least {} arguments", self.min),
            Some(max) if max == self.min => format!("{max} arguments"),
            Some(max) => format!("between {} and {max} arguments", self.min),
        };
        Err(Failure::Err(format!(
            "bad argument count {count} to {name}, expected {expected}"
        )))
    }
}
