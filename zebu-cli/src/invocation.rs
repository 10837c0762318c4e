//! How the program was called.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

use zebu::names::without_queries;

use crate::failure::Failure;
use crate::{printed, signals};

/// How the program was called.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// `argv[0]` as it was given; usage messages show it.
    pub argv0: String,
    /// Its base name, which starts every message.
    pub name: String,
    /// The subcommand; empty before there is one.
    pub command: String,
    /// Its operands, as its usage line shows them.
    pub operands: Option<&'static str>,
}

impl Invocation {
    pub fn new(argv0: Option<OsString>) -> Self {
        let argv0 = argv0.map_or_else(|| "zebu".to_string(), |a| a.to_string_lossy().into_owned());
        let name = Path::new(&argv0).file_name().map_or_else(
            || argv0.clone(),
            |name| name.to_string_lossy().trim_start_matches("lt-").to_string(),
        );
        Invocation {
            argv0,
            name,
            command: String::new(),
            operands: None,
        }
    }

    /// The same for one subcommand.
    pub fn with_command(&self, command: &str) -> Self {
        Invocation {
            command: command.to_string(),
            ..self.clone()
        }
    }

    /// What getopt would start its messages with: `ARGV0 info`.
    pub fn prefix(&self) -> String {
        if self.command.is_empty() {
            self.argv0.clone()
        } else {
            format!("{} {}", self.argv0, self.command)
        }
    }

    /// A line on standard error, after the program's name.
    pub fn say(&self, message: &str) {
        // A closed stderr cannot be reported.
        let message = without_queries(message);
        let _ = writeln!(
            std::io::stderr(),
            "{}: {}",
            self.name,
            printed::lines(&message)
        );
    }

    /// From now on signals that stop jobs end the program at once. It prints `state`, which tells what
    /// is left.
    pub fn end_on_stop(&self, state: &str) {
        signals::end_on_stop(format!(
            "{}: Interrupted; {}",
            self.name,
            printed::lines(state)
        ));
    }

    pub fn hint(&self) -> String {
        format!("Try '{} --help' for more info", self.prefix())
    }
}

/// The line that `--version` prints.
pub fn version(invocation: &Invocation) -> String {
    let ours = if invocation.name == "zebu" {
        ""
    } else {
        " (zebu)"
    };
    format!(
        "{} version {}{ours}\n",
        invocation.name,
        env!("CARGO_PKG_VERSION")
    )
}

/// The failure for an option that does not exist.
pub fn unrecognized(invocation: &Invocation, option: &str) -> Failure {
    let text = match option.strip_prefix("--") {
        Some(_) => {
            let name = option.split('=').next().unwrap_or(option);
            format!("{}: unrecognized option '{name}'", invocation.prefix())
        }
        None => {
            let letter = option.chars().nth(1).unwrap_or('-');
            format!("{}: invalid option -- '{letter}'", invocation.prefix())
        }
    };
    Failure::bare(text).with_hint()
}
