//! Completions of shells: the words that may be at the cursor. A shell's script (`completions SHELL`) asks
//! for them by the command `__complete INDEX WORD...`, which knows the options by the definitions
//! of the commands, and opens the image that is named for its snapshots and bitmaps.
//!
//! The first line of the answer is `words`, or `files` and the part of the word that comes before a file's
//! name; each further line is a word and what it means.
//!
//! For bash it is `__complete --bash BEFORE AFTER REPLACED`: the line before and after the cursor, and what is
//! replaced. Each further line of the answer is what takes the place of that.

mod line;
mod values;

use std::ffi::OsString;

use clap::{Arg, CommandFactory, Parser};

use super::command::{Command, ValueOf, Values};
use crate::arguments::parse;
use crate::commands::{self, manual};
use crate::output::{self, Shown};
use crate::program::{Context, Failure, Outcome};
use line::Line;

pub const COMMAND: Command = Command {
    name: "completions",
    operands: "<SHELL>",
    summary: "Print the completions of a shell: bash, zsh or fish",
    options: Arguments::command,
    run: print,
    examples: "
        # For bash
        zebu completions bash > zebu.bash
        # For fish
        zebu completions fish > zebu.fish",
    values: &[
        (ValueOf::Operand(0), Values::Words(&["bash", "zsh", "fish"])),
        (ValueOf::Operands, Values::Nothing),
    ],
    ..Command::PLAIN
};

/// The scripts.
const SCRIPTS: [(&str, &str); 3] = [
    ("bash", include_str!("zebu.bash")),
    ("zsh", include_str!("zebu.zsh")),
    ("fish", include_str!("zebu.fish")),
];

/// Print the completions of a shell
#[derive(Parser)]
pub struct Arguments {
    /// bash, zsh or fish
    #[arg(value_name = "SHELL")]
    names: Vec<OsString>,
}

/// Runs the command `completions`: prints the script of a shell.
pub fn print(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = parse(context, arguments)?;
    let [shell] = &arguments.names[..] else {
        return Err(Failure::new("Expecting a shell: bash, zsh or fish").with_hint());
    };
    match SCRIPTS.iter().find(|script| script.0 == shell) {
        Some((_, text)) => output::report(text),
        None => Err(Failure::new(format!(
            "There are completions for bash, zsh and fish, not for '{}'",
            shell.shown()
        ))),
    }
}

/// Runs the command `__complete`. There is no message: a shell would print it into the line.
pub fn run(arguments: &[OsString]) -> Outcome {
    let words: Vec<String> = arguments
        .iter()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let text = match &words[..] {
        [option, before, after, replaced] if option == "--bash" => {
            let line = Line::new(before, after, replaced);
            answer(&line.words, line.index).map(|answer| answer.text_for(&line))
        }
        [index, words @ ..] => {
            let index = index.parse().unwrap_or(0);
            answer(words, index).map(|answer| answer.text())
        }
        [] => None,
    };
    text.map_or(Ok(1), |text| output::report(&text))
}

/// What may be at the cursor.
#[derive(Default)]
struct Answer {
    /// Files, after this part of the word.
    files: Option<String>,
    /// Words, and what they mean.
    words: Vec<(String, String)>,
}

impl Answer {
    fn files(after: &str) -> Answer {
        Answer {
            files: Some(after.to_string()),
            words: Vec::new(),
        }
    }

    /// Those of the words that begin like what was typed, each after `before`.
    fn words(
        before: &str,
        typed: &str,
        words: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>,
    ) -> Answer {
        let words = words
            .into_iter()
            .map(|(word, what)| -> (String, String) { (word.into(), what.into()) });
        let fitting = words.filter(|(word, _): &(String, String)| word.starts_with(typed));
        Answer {
            files: None,
            words: fitting
                .map(|(word, what)| (format!("{before}{word}"), what))
                .collect(),
        }
    }

    fn kind(&self) -> String {
        match &self.files {
            Some(after) => format!("files\t{after}\n"),
            None => "words\n".into(),
        }
    }

    /// For bash.
    fn text_for(&self, line: &Line) -> String {
        let words = self
            .words
            .iter()
            .filter_map(|(word, _)| line.insertion(word));
        words.fold(self.kind(), |text, word| text + &word + "\n")
    }

    fn text(&self) -> String {
        let mut text = self.kind();
        for (word, what) in &self.words {
            let what = what.lines().next().unwrap_or_default();
            text.push_str(&format!("{word}\t{what}\n"));
        }
        text
    }
}

/// What may be at the word `index`; None: it is none of those after the program's name.
fn answer(words: &[String], index: usize) -> Option<Answer> {
    let before = words.get(1..index)?;
    let typed = words.get(index)?;
    let options_before = before.iter().take_while(|word| word.starts_with('-'));
    let at = 1 + options_before.count();
    Some(match words[at].as_str() {
        _ if at == index => commands_and_options(typed),
        "help" => Answer::words("", typed, command_names()),
        name => after_command(name, &words[at + 1..], index - at - 1),
    })
}

/// What may be at the word `index` of those behind the name of a command.
fn after_command(name: &str, words: &[String], index: usize) -> Answer {
    match commands::built().find(|command| command.get_name() == name) {
        Some(command) => in_command(&command, name, words, index),
        None => Answer::default(),
    }
}

fn command_names() -> impl Iterator<Item = (&'static str, &'static str)> {
    commands::COMMANDS
        .iter()
        .map(|command| (command.name, command.summary))
}

fn commands_and_options(typed: &str) -> Answer {
    if typed.starts_with('-') {
        return options(&manual::definition(), typed);
    }
    Answer::words("", typed, command_names().chain([("help", "")]))
}

/// The long options, and the letters if only a dash was typed.
fn options(command: &clap::Command, typed: &str) -> Answer {
    let mut all = Vec::new();
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        if let Some(letter) = arg.get_short().filter(|_| typed == "-") {
            all.push((format!("-{letter}"), help.clone()));
        }
        if let Some(name) = arg.get_long() {
            let value = if arg.is_require_equals_set() && requires_value(arg) {
                "="
            } else {
                ""
            };
            all.push((format!("--{name}{value}"), help));
        }
    }
    Answer::words("", typed, all)
}

/// Whether the option has a value, in the same word or in the next one.
fn takes_value(arg: &Arg) -> bool {
    arg.get_num_args()
        .is_some_and(|number| number.takes_values())
}

fn requires_value(arg: &Arg) -> bool {
    arg.get_num_args()
        .is_some_and(|number| number.min_values() > 0)
}

/// The words of a command, by what they are.
#[derive(Default)]
struct Words<'a> {
    /// Values of options, with their ids.
    values: Vec<(&'a str, String)>,
    operands: Vec<String>,
    /// The option whose value the next word is.
    awaits: Option<&'a Arg>,
}

impl<'a> Words<'a> {
    fn take(&mut self, command: &'a clap::Command, word: &str) {
        if let Some(arg) = self.awaits.take() {
            self.values.push((arg.get_id().as_str(), word.to_string()));
        } else if let Some(long) = word.strip_prefix("--").filter(|long| !long.is_empty()) {
            let (name, value) = match long.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (long, None),
            };
            let Some(arg) = find(command, |arg| arg.get_long() == Some(name)) else {
                return;
            };
            match value {
                Some(value) => self.values.push((arg.get_id().as_str(), value.to_string())),
                None => self.awaits = Some(arg).filter(|arg| awaits_value(arg)),
            }
        } else if word.len() > 1 && word.starts_with('-') {
            self.take_letters(command, &word[1..]);
        } else {
            self.operands.push(word.to_string());
        }
    }

    /// Letters after a dash, the last of which may have its value.
    fn take_letters(&mut self, command: &'a clap::Command, letters: &str) {
        for (at, letter) in letters.char_indices() {
            let Some(arg) = find(command, |arg| arg.get_short() == Some(letter)) else {
                return;
            };
            if takes_value(arg) {
                let rest = &letters[at + letter.len_utf8()..];
                match rest.is_empty() {
                    true => self.awaits = Some(arg).filter(|arg| awaits_value(arg)),
                    false => self.values.push((arg.get_id().as_str(), rest.to_string())),
                }
                return;
            }
        }
    }

    /// The last value of an option.
    fn value(&self, id: &str) -> Option<&str> {
        let mut values = self.values.iter().rev();
        values
            .find(|value| value.0 == id)
            .map(|value| value.1.as_str())
    }
}

fn awaits_value(arg: &Arg) -> bool {
    requires_value(arg) && !arg.is_require_equals_set()
}

fn find(command: &clap::Command, fits: impl Fn(&Arg) -> bool) -> Option<&Arg> {
    command.get_arguments().find(|arg| fits(arg))
}

/// What may be at the word `index` of those after the command's name.
fn in_command(command: &clap::Command, name: &str, words: &[String], index: usize) -> Answer {
    if let Some(word) = words.first()
        && index > 0
        && let Some(sub) = command.find_subcommand(word)
    {
        return in_command(sub, &format!("{name} {word}"), &words[1..], index - 1);
    }
    let mut line = Words::default();
    for word in &words[..index] {
        line.take(command, word);
    }
    let typed = words[index].as_str();
    let awaits = line.awaits.take();
    let operand = line.operands.len();
    // What follows the cursor is known as well: often the image.
    for word in &words[index + 1..] {
        line.take(command, word);
    }
    if let Some(arg) = awaits {
        return values::of(name, arg, &line, "", typed);
    }
    if let Some((option, value)) = typed.split_once('=')
        && let Some(long) = option.strip_prefix("--")
        && let Some(arg) = find(command, |arg| arg.get_long() == Some(long))
    {
        return values::of(name, arg, &line, &format!("{option}="), value);
    }
    if let Some(letter) = typed.strip_prefix('-').and_then(|rest| rest.chars().next())
        && typed.len() > 2
        && let Some(arg) = find(command, |arg| arg.get_short() == Some(letter))
        && takes_value(arg)
    {
        let (option, value) = typed.split_at(1 + letter.len_utf8());
        return values::of(name, arg, &line, option, value);
    }
    if typed.starts_with('-') {
        return options(command, typed);
    }
    let mut answer = values::of_operand(name, operand, &line, typed);
    if operand == 0 && command.has_subcommands() {
        let subs = command
            .get_subcommands()
            .filter(|sub| sub.get_name() != "help");
        let subs = subs.map(|sub| {
            (
                sub.get_name(),
                sub.get_about().map(ToString::to_string).unwrap_or_default(),
            )
        });
        answer.words.extend(Answer::words("", typed, subs).words);
    }
    answer
}
