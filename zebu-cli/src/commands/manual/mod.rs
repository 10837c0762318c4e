//! What users read about the commands: examples, in the help too, and man pages.
//!
//! The pages come from the same definitions as the help. The command `manual` writes them to a folder.

mod texts;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::ops::{Range, RangeInclusive};
use std::path::Path;

use clap::{CommandFactory, Parser};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};
use zebu::internal::printable;

use super::COMMANDS;
use super::command::{Command, Entry, ValueOf, Values};
use crate::arguments::{
    help_of_operands, parse, with_command_options, with_common_options, with_usage,
};
use crate::output::Shown;
use crate::program::{Context, Failure, Outcome};

pub const COMMAND: Command = Command {
    name: "manual",
    operands: "<FOLDER> [DATE]",
    summary: "Write the man pages to a folder",
    options: Arguments::command,
    run,
    examples: "
        # All pages, into a new folder
        zebu manual man1
        # With a date
        zebu manual man1 \"$(date +%F)\"",
    values: &[
        (ValueOf::Operand(0), Values::Files),
        (ValueOf::Operands, Values::Nothing),
    ],
    ..Command::PLAIN
};

/// The name of the program.
const PROGRAM: &str = "zebu";

/// What it is.
const ABOUT: &str = "disk image utility, compatible with qemu-img, qemu-io and qemu-nbd";

/// Write the man pages to a folder
#[derive(Parser)]
pub struct Arguments {
    /// The folder, which is made if it does not exist, and the date that the pages have (none by default)
    #[arg(value_name = "FOLDER")]
    names: Vec<OsString>,
}

/// Runs the command `manual`: writes the pages to a folder. The date that they have is an argument, so that
/// they are the same bytes whenever they are written.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = parse(context, arguments)?;
    let (folder, date) = match &arguments.names[..] {
        [folder] if !folder.is_empty() => (folder, String::new()),
        [folder, date] if !folder.is_empty() => (folder, date.to_string_lossy().into_owned()),
        [folder] | [folder, _] if folder.is_empty() => {
            return Err(Failure::new("The name of the folder is empty"));
        }
        _ => return Err(Failure::new("Expecting a folder, and perhaps a date").with_hint()),
    };
    if !date.is_empty() && !is_date(&date) {
        let date = printable(date.as_bytes());
        let why = format!("Invalid date '{date}': it must be YYYY-MM-DD");
        return Err(Failure::new(why));
    }
    let folder = Path::new(folder);
    let failed = |error| Failure::new(format!("{}: {error}", folder.shown()));
    fs::create_dir_all(folder).map_err(failed)?;
    for page in pages() {
        let path = folder.join(format!("{}.1", page.name.replace(' ', "-")));
        let text = page.render(&date).map_err(failed)?;
        // A link is replaced, not followed.
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
            _ => {
                let new = File::options().write(true).create_new(true).open(&path);
                new.and_then(|mut page| page.write_all(&text))
                    .map_err(failed)?;
            }
        }
    }
    Ok(0)
}

/// Whether it is YYYY-MM-DD.
fn is_date(text: &str) -> bool {
    let number = |range: Range<usize>, bounds: RangeInclusive<u32>| {
        let digits = text.get(range).unwrap_or_default();
        digits.bytes().all(|b| b.is_ascii_digit())
            && digits.parse().is_ok_and(|number| bounds.contains(&number))
    };
    let dashes = [4, 7].map(|at| text.as_bytes().get(at) == Some(&b'-'));
    text.len() == 10
        && dashes == [true, true]
        && number(0..4, 0..=9999)
        && number(5..7, 1..=12)
        && number(8..10, 1..=31)
}

/// A man page.
struct Page {
    /// As it is called: `zebu backup list`.
    name: String,
    /// What is told of it: of a subcommand or the program, what there is.
    command: Command,
    definition: clap::Command,
    /// The operands and what the help says of them, where clap knows them as a list.
    operands: Option<(&'static str, String)>,
}

/// All pages.
fn pages() -> Vec<Page> {
    let mut all = vec![Page {
        name: PROGRAM.into(),
        command: Command::PLAIN,
        definition: definition(),
        operands: None,
    }];
    for command in COMMANDS {
        let definition = command.definition();
        let operands = command.operands;
        let name = format!("{PROGRAM} {}", command.name);
        let help = help_of_operands(&definition).unwrap_or_default();
        all.extend(definition.get_subcommands().map(|sub| {
            let own = command.exit_status_of_subcommands.iter();
            let own = own.filter(|status| status.0 == sub.get_name());
            let name = format!("{name} {}", sub.get_name());
            Page {
                command: Command {
                    exit_status: own
                        .map(|status| status.1)
                        .next()
                        .unwrap_or(Command::PLAIN.exit_status),
                    ..Command::PLAIN
                },
                definition: sub.clone().bin_name(&name),
                name,
                operands: None,
            }
        }));
        let definition = with_usage(definition, format!("{name} [OPTIONS] {operands}"));
        all.push(Page {
            definition: with_command_options(definition, &name),
            name,
            command: *command,
            operands: Some((operands, help)),
        });
    }
    all
}

/// The program, with its commands.
pub fn definition() -> clap::Command {
    let commands = COMMANDS.iter().map(Command::definition);
    with_common_options(clap::Command::new(PROGRAM), PROGRAM)
        .about(ABOUT)
        .override_usage(format!(
            "{PROGRAM} [--untrusted] COMMAND [OPTIONS]\n{PROGRAM} help [COMMAND]\n{PROGRAM} --version"
        ))
        .subcommand_help_heading("COMMANDS")
        .disable_help_subcommand(true)
        .subcommands(commands)
}

impl Page {
    fn render(self, date: &str) -> std::io::Result<Vec<u8>> {
        let title = self.name.replace(' ', "-");
        let definition = (self.definition.clone()).display_name(&title);
        // The values that are possible are in the help of each option.
        let definition = (definition.disable_help_subcommand(true)).mut_args(|arg| {
            let has_some = !arg.get_possible_values().is_empty();
            match has_some && arg.get_action().takes_values() {
                true => arg.hide_possible_values(true),
                false => arg,
            }
        });
        let trailer = self.definition.get_after_help().map(ToString::to_string);
        let man = Man::new(definition);
        let mut out = Vec::new();
        // clap_mangen leaves an empty date out, and what follows takes its place.
        let (title, version) = (title.to_uppercase(), env!("CARGO_PKG_VERSION"));
        writeln!(out, ".TH {title} 1 \"{date}\" \"zebu {version}\" zebu")?;
        man.render_name_section(&mut out)?;
        man.render_synopsis_section(&mut out)?;
        let mut roff = Roff::default();
        if self.is_program() {
            roff.control("SH", ["DESCRIPTION"]);
            roff.text([roman(WHAT)]);
        }
        if let Some((operands, help)) = &self.operands {
            roff.control("SH", ["OPERANDS"]);
            roff.control("TP", []);
            roff.text([italic(*operands)]);
            roff.text([roman(help.as_str())]);
        }
        roff.to_writer(&mut out)?;
        man.render_options_section(&mut out)?;
        if self.definition.has_subcommands() {
            man.render_subcommands_section(&mut out)?;
        }
        let mut roff = Roff::default();
        if let Some(text) = trailer {
            roff.control("SH", ["NOTES"]);
            literal(&mut roff, &text);
        }
        show_examples(&mut roff, &self.command);
        entries(&mut roff, "EXIT STATUS", self.command.exit_status);
        entries(&mut roff, "FILES", self.command.files);
        if self.is_program() {
            entries(&mut roff, "NAMES OF IMAGES", texts::NAMES);
            entries(&mut roff, "ENVIRONMENT", texts::ENVIRONMENT);
        }
        roff.control("SH", ["SEE ALSO"]);
        roff.text(self.see_also());
        roff.to_writer(&mut out)?;
        Ok(out)
    }

    fn is_program(&self) -> bool {
        self.name == PROGRAM
    }

    fn see_also(&self) -> Vec<clap_mangen::roff::Inline> {
        match self.name.rsplit_once(' ') {
            Some((parent, _)) => vec![bold(parent.replace(' ', "-")), roman("(1)")],
            None => {
                let others =
                    ["qemu-img", "qemu-io", "qemu-nbd"].map(|name| [bold(name), roman("(1)")]);
                others.join(&roman(", "))
            }
        }
    }
}

/// What the page of the program says first.
const WHAT: &str = "Each command has a page of its own; \"zebu help COMMAND\" prints a shorter text. \
    Commands that qemu-img has take its options and print what it prints. Called by the name qemu-img, \
    qemu-io or qemu-nbd, the program is that one.";

fn show_examples(roff: &mut Roff, command: &Command) {
    for (index, (what, line)) in command.examples().enumerate() {
        match index {
            0 => roff.control("SH", ["EXAMPLES"]),
            _ => roff.control("PP", []),
        };
        roff.text([roman(format!("{what}:"))]);
        roff.control("RS", ["4"]);
        literal(roff, line);
        roff.control("RE", []);
    }
}

/// Lines as they are.
fn literal(roff: &mut Roff, text: &str) {
    roff.control("nf", []);
    for line in text.lines() {
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
}

fn entries(roff: &mut Roff, heading: &str, entries: &[Entry]) {
    if entries.is_empty() {
        return;
    }
    roff.control("SH", [heading]);
    for (word, text) in entries {
        roff.control("TP", []);
        roff.text([bold(*word)]);
        roff.text([roman(*text)]);
    }
}
