//! The table of all commands.

use super::session::Command;
use super::{breakpoint, change, control, look, read, reopen, write, zone};

/// All commands, by the file that they are in.
pub const COMMANDS: [&[Command]; 8] = [
    read::COMMANDS,
    write::COMMANDS,
    change::COMMANDS,
    look::COMMANDS,
    control::COMMANDS,
    reopen::COMMANDS,
    breakpoint::COMMANDS,
    zone::COMMANDS,
];

#[cfg(test)]
mod tests {
    //! Guards against a table in which a command hides another.
    use super::super::command::Failure;
    use super::super::session::Session;
    use super::*;

    #[test]
    fn names_are_unique() {
        let session = Session::silent(&COMMANDS);
        let mut names: Vec<_> = (session.commands())
            .flat_map(|c| [c.name, c.alias])
            .filter(|n| !n.is_empty())
            .collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(names.iter().all(|name| session.command(name).is_some()));
    }

    #[test]
    fn counts() {
        let session = Session::silent(&COMMANDS);
        let alloc = session.command("alloc").expect("alloc");
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
