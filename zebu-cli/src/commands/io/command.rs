//! What a command is, and the one table of all of them.

use std::ffi::OsStr;

use super::session::Session;
use super::{breakpoint, change, control, look, read, reopen, write, zone};

/// A command of the language.
#[derive(Debug)]
pub struct Command {
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
    pub run: Handler,
}

/// What does a command. File names may have any bytes, so that the arguments of commands that
/// take some are no `str`.
#[derive(Debug)]
pub enum Handler {
    Words(fn(&mut Session, &[&str]) -> Outcome),
    Names(fn(&mut Session, &[&OsStr]) -> Outcome),
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
    /// What getopt says of an option, after the command's name as it was
    /// typed; the command's usage follows.
    Option(String),
    /// The command's usage is shown.
    Usage,
    /// Everything was said.
    Told,
}

/// The tables of the files that have some.
const TABLES: [&[Command]; 8] = [
    read::COMMANDS,
    write::COMMANDS,
    change::COMMANDS,
    look::COMMANDS,
    control::COMMANDS,
    reopen::COMMANDS,
    breakpoint::COMMANDS,
    zone::COMMANDS,
];

/// All commands, in the order of the help.
pub fn all() -> impl Iterator<Item = &'static Command> {
    let mut commands: Vec<_> = TABLES.into_iter().flatten().collect();
    commands.sort_by_key(|c| c.name);
    commands.into_iter()
}

/// The command of this name or alias.
pub fn find(name: &str) -> Option<&'static Command> {
    let mut commands = TABLES.into_iter().flatten();
    commands.find(|c| c.name == name || (!c.alias.is_empty() && c.alias == name))
}

impl Command {
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

#[cfg(test)]
mod tests {
    //! Guards against a table in which a command hides another.
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = all()
            .flat_map(|c| [c.name, c.alias])
            .filter(|n| !n.is_empty())
            .collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(names.iter().all(|name| find(name).is_some()));
    }

    #[test]
    fn counts() {
        let alloc = find("alloc").expect("alloc");
        let text = |count| match alloc.check_count("alloc", count) {
            Err(Failure::Err(text)) => text,
            _ => String::new(),
        };
        assert_eq!(
            text(3),
            "bad argument count 3 to alloc, expected between 1 and 2 arguments"
        );
        assert_eq!(text(1), "");
    }
}
