//! The program from its arguments to its exit status: finds the command by the program's name or its first
//! argument, runs it, and reports a failure.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use crate::arguments::untrusted;
use crate::commands::{self, completions};
use crate::output::{self, printed};
use crate::program::closest::closest;
use crate::program::{
    Context, Failure, Outcome, descriptors, file_limit, next_step, process, signals, trace,
    unrecognized, version,
};

/// Runs the program; the first argument is its name.
pub fn main(mut arguments: Vec<OsString>) -> ExitCode {
    process::hide_secrets();
    file_limit::make_an_error();
    descriptors::allow_all();
    signals::catch_progress_requests();
    let argv0 = (!arguments.is_empty()).then(|| arguments.remove(0));
    let mut context = Context::new(argv0);
    let outcome = match context.role {
        "qemu-io" => commands::io::run(&context, arguments),
        "qemu-nbd" => commands::nbd::run(&context, arguments),
        _ => dispatch(&mut context, arguments),
    };
    ExitCode::from(finish(&context, outcome))
}

/// Prints a failure and returns the exit status.
fn finish(context: &Context, outcome: Outcome) -> u8 {
    match outcome {
        Ok(status) => status,
        Err(Failure::Said(status)) => status,
        Err(Failure::Message {
            text,
            hint,
            status,
            bare,
            next,
        }) => {
            if bare {
                let _ = writeln!(std::io::stderr(), "{}", printed::message(&text));
            } else {
                context.say(&text);
            }
            let next = match next.is_empty() {
                true => next_step::after(&text),
                false => next,
            };
            if !next.is_empty() && context.role == "zebu" {
                let hint = if next.starts_with('\n') { "" } else { "hint: " };
                let _ = writeln!(std::io::stderr(), "{hint}{}", printed::lines(&next));
            }
            if hint {
                let _ = writeln!(std::io::stderr(), "{}", context.hint());
            }
            status
        }
    }
}

/// Finds the command among the arguments and runs it.
fn dispatch(context: &mut Context, mut arguments: Vec<OsString>) -> Outcome {
    if arguments.is_empty() {
        let failure = Failure::new("Not enough arguments").with_next(commands::OVERVIEW);
        return Err(match context.role {
            "zebu" => failure,
            _ => failure.with_hint(),
        });
    }
    let first = arguments.remove(0).to_string_lossy().into_owned();
    if let Some(taken) = untrusted::take(context, &first) {
        taken?;
        return dispatch(context, arguments);
    }
    match first.as_str() {
        "help" if !arguments.is_empty() => {
            let words: Vec<_> = arguments
                .iter()
                .map(|word| word.to_string_lossy())
                .collect();
            match &words[..] {
                [_] => {}
                [command, sub]
                    if commands::with_subcommand(sub)
                        .is_some_and(|found| found.name == *command) => {}
                _ => return Err(Failure::new("Expecting one command after 'help'").with_hint()),
            }
            arguments.push("--help".into());
            return dispatch(context, arguments);
        }
        "-h" | "--help" | "help" => return output::report(&commands::help(context)),
        "__complete" => return completions::run(&arguments),
        "-V" | "--version" => return output::report(&version(context)),
        option if is_trace(option) => {
            let value = match option
                .strip_prefix("--trace=")
                .or(option.strip_prefix("-T"))
            {
                Some(value) if !value.is_empty() => value.into(),
                _ if arguments.is_empty() => {
                    let why = format!("option '{option}' requires an argument");
                    return Err(Failure::new(why).with_hint());
                }
                _ => arguments.remove(0),
            };
            trace::warn(context, &value);
            return dispatch(context, arguments);
        }
        option if option.len() > 1 && option.starts_with('-') => {
            let names = ["help", "version", "untrusted", "trace"].map(String::from);
            return Err(unrecognized(context, option, &names));
        }
        _ => {}
    }
    match commands::run(context, &first, arguments) {
        Some(outcome) => outcome,
        None => {
            let failure = Failure::new(format!("Command not found: {first}"));
            let names = commands::COMMANDS.iter().map(|command| command.name);
            let meant = match commands::with_subcommand(&first) {
                Some(command) => Some(format!("{} {first}", command.name)),
                None => closest(&first, names).map(String::from),
            };
            let meant = meant.map(|name| format!("did you mean '{name}'?"));
            Err(failure.with_next(meant.unwrap_or_default()).with_hint())
        }
    }
}

/// Whether it is the option that trace events are chosen with, also with its value.
fn is_trace(option: &str) -> bool {
    option == "--trace" || option.starts_with("--trace=") || option.starts_with("-T")
}
