//! How the program was called.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

use zebu::names::without_queries;

use crate::output::printed;
use crate::program::closest::closest;
use crate::program::{Failure, signals};

/// How the program was called.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// `argv[0]` as it was given; usage messages show it.
    pub argv0: String,
    /// Its base name, which starts every message.
    pub name: String,
    /// Which program it is by that name: `zebu`, or one of [`OF_QEMU`].
    pub role: &'static str,
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
            role: role(&name),
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

/// The programs of QEMU that this one is by their names.
const OF_QEMU: [&str; 3] = ["qemu-img", "qemu-io", "qemu-nbd"];

/// Which program has this name. Distributions and wrappers add to QEMU's names: `qemu-img-10`, `qemu-img.real`.
fn role(name: &str) -> &'static str {
    let is_one = |program: &&str| {
        let rest = name.strip_prefix(program);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '.']))
    };
    OF_QEMU.into_iter().find(is_one).unwrap_or("zebu")
}

/// The version of QEMU whose options, output and status the programs with its names have.
const QEMU_VERSION: &str = "11.1.3";
/// The version of this program.
const VERSION: &str = env!("CARGO_PKG_VERSION");
const COPYRIGHT: &str = "Copyright (c) 2026 The zebu authors";

/// What `--version` prints. Under names of QEMU's, scripts compare the first number, and find it where QEMU
/// has it.
pub fn version(invocation: &Invocation) -> String {
    let (name, argv0) = (&invocation.name, &invocation.argv0);
    match invocation.role {
        role @ ("qemu-img" | "qemu-io") => {
            format!("{role} version {QEMU_VERSION} (zebu {VERSION})\n{COPYRIGHT}\n")
        }
        "qemu-nbd" => format!(
            "{argv0} {QEMU_VERSION} (zebu {VERSION})\nWritten by the zebu authors.\n\n{COPYRIGHT}\n\
             Licensed under the Apache License 2.0 or the MIT License, at your option.\n"
        ),
        _ => {
            let called = match invocation.command.as_str() {
                "" => name.clone(),
                command => format!("{name} {command}"),
            };
            format!("{called} version {VERSION}\n")
        }
    }
}

/// The failure for an option that does not exist; `names` are the long ones that do.
pub fn unrecognized(invocation: &Invocation, option: &str, names: &[String]) -> Failure {
    let text = match option.strip_prefix("--") {
        Some(_) => {
            let name = option.split('=').next().unwrap_or(option);
            let text = format!("{}: unrecognized option '{name}'", invocation.prefix());
            let meant = closest(
                name.trim_start_matches('-'),
                names.iter().map(String::as_str),
            );
            let meant = meant.map(|name| format!("did you mean '--{name}'?"));
            let failure = Failure::bare(text).with_next(meant.unwrap_or_default());
            return failure.with_hint();
        }
        None => {
            let letter = option.chars().nth(1).unwrap_or('-');
            format!("{}: invalid option -- '{letter}'", invocation.prefix())
        }
    };
    Failure::bare(text).with_hint()
}
