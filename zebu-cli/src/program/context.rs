//! How the program was called, and what its options say of every image that it opens.

use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::io::{IsTerminal, Write, stdout};
use std::path::{Path, PathBuf};

use zebu::Limits;
use zebu::block::Objects;
use zebu::internal::printable_message;
use zebu::names::without_queries;
use zebu::storage::BlockCache;

use crate::program::closest::closest;
use crate::program::{Failure, signals};

/// What holds for the whole run of the program. Every command gets it. Options are taken while arguments are
/// read, wherever they are; a clone has those that were taken before.
#[derive(Clone)]
pub struct Context {
    /// `argv[0]` as it was given; usage messages show it.
    pub argv0: String,
    /// Its base name, which starts every message.
    pub name: String,
    /// Which program it is by that name: `zebu`, or one of [`OF_QEMU`].
    pub role: &'static str,
    /// The subcommand; empty before there is one.
    pub command: &'static str,
    /// Its operands, as its usage line shows them.
    pub operands: Option<&'static str>,
    /// Its examples, as its help shows them.
    pub examples: String,
    /// Whether reports have names as they are: scripts that call the program by a name of QEMU's get names as
    /// QEMU prints them; a terminal does not.
    pub raw_names: bool,
    /// Those of `--untrusted`, once it was given.
    pub limits: Cell<Option<Limits>>,
    /// That of `--cache-dir`.
    pub cache: RefCell<Option<BlockCache>>,
    /// Those of `--object`.
    pub objects: RefCell<Objects>,
    /// The files with secrets and keys that are read, and folders with such files.
    pub key_files: RefCell<Vec<PathBuf>>,
}

impl Context {
    pub fn new(argv0: Option<OsString>) -> Self {
        let argv0 = argv0.map_or_else(|| "zebu".to_string(), |a| a.to_string_lossy().into_owned());
        let name = Path::new(&argv0).file_name().map_or_else(
            || argv0.clone(),
            |name| name.to_string_lossy().trim_start_matches("lt-").to_string(),
        );
        let role = role(&name);
        Context {
            role,
            argv0,
            name,
            command: "",
            operands: None,
            examples: String::new(),
            raw_names: role != "zebu" && !stdout().is_terminal(),
            limits: Cell::default(),
            cache: RefCell::default(),
            objects: RefCell::default(),
            key_files: RefCell::default(),
        }
    }

    /// Whether images are opened in strict mode: `--untrusted` was given.
    pub fn is_untrusted(&self) -> bool {
        self.limits.get().is_some()
    }

    /// Whether the program was called by a name of QEMU's.
    pub fn is_as_qemu(&self) -> bool {
        self.role != "zebu"
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
            printable_message(&message)
        );
    }

    /// From now on signals that stop jobs end the program at once. It prints `state`, which tells what
    /// is left.
    pub fn end_on_stop(&self, state: &str) {
        signals::end_on_stop(format!(
            "{}: Interrupted; {}",
            self.name,
            printable_message(state)
        ));
    }

    pub fn hint(&self) -> String {
        format!("Try '{} --help' for more information", self.prefix())
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
pub fn version(context: &Context) -> String {
    let (name, argv0) = (&context.name, &context.argv0);
    match context.role {
        role @ ("qemu-img" | "qemu-io") => {
            format!("{role} version {QEMU_VERSION} (zebu {VERSION})\n{COPYRIGHT}\n")
        }
        "qemu-nbd" => format!(
            "{argv0} {QEMU_VERSION} (zebu {VERSION})\nWritten by the zebu authors.\n\n{COPYRIGHT}\n\
             Licensed under the Apache License 2.0 or the MIT License, at your option.\n"
        ),
        _ => {
            let called = match context.command {
                "" => name.clone(),
                command => format!("{name} {command}"),
            };
            format!("{called} version {VERSION}\n")
        }
    }
}

/// The failure for an option that does not exist; `names` are the long ones that do.
pub fn unrecognized(context: &Context, option: &str, names: &[String]) -> Failure {
    let text = match option.strip_prefix("--") {
        Some(_) => {
            let name = option.split('=').next().unwrap_or(option);
            let text = format!("{}: unrecognized option '{name}'", context.prefix());
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
            format!("{}: invalid option -- '{letter}'", context.prefix())
        }
    };
    Failure::bare(text).with_hint()
}
