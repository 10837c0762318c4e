//! All that the program knows of a command, in one value.

use std::ffi::OsString;

use zebu::block::CreateOption;

use crate::program::{Context, Outcome};

/// A command. Each has one in its own file.
#[derive(Clone, Copy)]
pub struct Command {
    pub name: &'static str,
    /// Its operands, as its usage line shows them.
    pub operands: &'static str,
    /// What it does.
    pub summary: &'static str,
    pub options: fn() -> clap::Command,
    pub run: fn(&Context, Vec<OsString>) -> Outcome,
    /// For the help and the man page: what is done, after `# `, and the line of a shell that does it. They can
    /// be run one after the other where their files are.
    pub examples: &'static str,
    /// For completions: what the values are of options and operands whose names do not tell it.
    pub values: &'static [(ValueOf, Values)],
    /// For the man page.
    pub exit_status: &'static [Entry],
    /// The same of subcommands that have another one than most commands.
    pub exit_status_of_subcommands: &'static [(&'static str, &'static [Entry])],
    /// The files that it reads and writes by themselves, for the man page.
    pub files: &'static [Entry],
}

/// A word and what it means.
pub type Entry = (&'static str, &'static str);

/// Where a value is.
#[derive(PartialEq, Eq)]
pub enum ValueOf {
    /// It is one of the option with this id.
    Option(&'static str),
    /// It is the operand of this number, from 0.
    Operand(usize),
    /// It is any other operand.
    Operands,
}

/// What a value may be.
#[derive(Clone, Copy)]
pub enum Values {
    Nothing,
    Files,
    Words(&'static [&'static str]),
    /// `NAME=VALUE` with these names, of which some have files as values.
    Assignments {
        files: &'static [&'static str],
        others: &'static [&'static str],
    },
    /// Names of formats: of all, and of those that images can be made of.
    Formats,
    NewFormats,
    /// Options of new images of the format that the line names, or these options of a format.
    NewOptions,
    OptionsOf(&'static str, fn() -> Vec<CreateOption>),
    /// Those of the image on the line.
    Snapshots,
    Bitmaps,
}

impl Command {
    /// What most commands have.
    pub const PLAIN: Command = Command {
        name: "",
        operands: "",
        summary: "",
        options: || clap::Command::new(""),
        run: |_, _| Ok(0),
        examples: "",
        values: &[],
        exit_status: &[
            ("0", "Success."),
            ("1", "Failure; standard error says why."),
        ],
        exit_status_of_subcommands: &[],
        files: &[],
    };

    /// Its options, as clap reads them.
    pub fn definition(&self) -> clap::Command {
        (self.options)().name(self.name).about(self.summary)
    }

    /// The examples as the help shows them; nothing if there are none.
    pub fn examples_in_help(&self) -> String {
        let examples = self.examples();
        let lines = examples.map(|(what, line)| format!("\n  # {what}\n  {line}"));
        let lines: String = lines.collect();
        match lines.is_empty() {
            true => lines,
            false => format!("Examples:{lines}"),
        }
    }

    /// The examples: what is done, and the line.
    pub fn examples(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let mut lines = self.examples.lines().map(str::trim).skip(1);
        std::iter::from_fn(move || Some((lines.next()?.trim_start_matches("# "), lines.next()?)))
    }
}
