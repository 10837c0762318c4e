//! The arguments of commands.
//!
//! Here clap reads them. `options` are those that many commands have, `size` numbers, `file_name` names of files,
//! `create_options` and `known_options` those of formats (`-o`). What holds for every image that is opened is in
//! `untrusted`, `objects` and `block_cache`.

pub mod block_cache;
pub mod create_options;
pub mod file_name;
pub mod known_options;
pub mod metrics_address;
pub mod objects;
pub mod options;
pub mod size;
pub mod untrusted;

use std::any::TypeId;
use std::ffi::OsString;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
pub use options::{
    NameOptions, OutputFormat, Reporting, SourceOptions, one_name, rate, source_cache, target_cache,
};

use crate::output::{self, wrapped};
use crate::program::{Context, Failure, unrecognized};

/// Parses a command's arguments with clap. Errors are in getopt's words, on which scripts may depend.
///
/// # Errors
///
/// The message, or the success of printing the help.
pub fn parse<T: clap::Parser>(context: &Context, arguments: Vec<OsString>) -> Result<T, Failure> {
    parse_by(context, arguments, T::command())
}

/// As [`parse`]. Values that are not UTF-8 are left to the checks of the option, as in qemu-img:
/// no valid value has a replacement character.
pub fn parse_lossy<T: clap::Parser>(
    context: &Context,
    arguments: Vec<OsString>,
) -> Result<T, Failure> {
    let lossy = OsStringValueParser::new().map(|text| text.to_string_lossy().into_owned());
    let command = T::command().mut_args(|arg| {
        match arg.get_value_parser().type_id() == TypeId::of::<String>() {
            true => arg.value_parser(lossy.clone()),
            false => arg,
        }
    });
    parse_by(context, arguments, command)
}

fn parse_by<T: clap::Parser>(
    context: &Context,
    arguments: Vec<OsString>,
    mut command: clap::Command,
) -> Result<T, Failure> {
    let prefix = context.prefix();
    let last = arguments.last().cloned().unwrap_or_default();
    if let Some(operands) = context.operands {
        let help = help_of_operands(&command);
        let help = help.map_or_else(String::new, |text| {
            format!("\n\nArguments:\n  {operands}  {text}")
        });
        command = with_usage(command, format!("{prefix} [OPTIONS] {operands}{help}"));
    }
    let command = with_examples(command, context);
    let command = with_any_values(with_command_options(command, &prefix));
    let names = long_names(&command);
    let known = known_names(&command);
    let command = with_abbreviations(command, &names);
    let all = std::iter::once(OsString::from(&prefix)).chain(arguments);
    let result = command.try_get_matches_from(all).and_then(|mut matches| {
        let value = matches.remove_one::<String>(untrusted::NAME);
        let folder = matches.remove_one::<OsString>(block_cache::DIR);
        let size = matches.remove_one::<String>(block_cache::SIZE);
        let common = (value, folder, size);
        Ok((common, T::from_arg_matches_mut(&mut matches)?))
    });
    let ((value, folder, size), parsed) = result.map_err(|error| match unknown_option(&error) {
        Some(option) => ambiguous(context, &option, &names)
            .unwrap_or_else(|| unrecognized(context, &option, &known)),
        None => usage_failure(context, &error, &last.to_string_lossy()),
    })?;
    value.map_or(Ok(()), |value| untrusted::set(context, &value))?;
    block_cache::set(context, folder.as_deref(), size.as_deref())?;
    Ok(parsed)
}

/// The command, whose options take whatever follows them as the value that they require, as with getopt:
/// also what begins with a dash.
pub(crate) fn with_any_values(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let requires_value = arg.get_action().takes_values()
            && arg
                .get_num_args()
                .is_none_or(|number| number.min_values() > 0);
        match requires_value && !arg.is_positional() && !arg.is_require_equals_set() {
            true => arg.allow_hyphen_values(true),
            false => arg,
        }
    });
    command.mut_subcommands(with_any_values)
}

/// The command, which takes abbreviations that are unique without the options of the cache: QEMU, which
/// does not have these, accepts them.
fn with_abbreviations(command: clap::Command, names: &[String]) -> clap::Command {
    let is_one = |start: &&str| {
        let meant = names.iter().filter(|name| name.starts_with(start));
        let (own, others): (Vec<_>, Vec<_>) = meant.partition(|name| block_cache::is_option(name));
        !own.is_empty() && others.len() == 1
    };
    command.mut_args(|arg| match arg.get_long() {
        Some(name) if !block_cache::is_option(name) => {
            let starts = (1..name.len()).filter_map(|end| name.get(..end));
            // clap wants them for as long as the process lives: these are some bytes, once.
            let starts = starts
                .filter(is_one)
                .map(|start| &*start.to_string().leak());
            let starts: Vec<&str> = starts.collect();
            arg.aliases(starts)
        }
        _ => arg,
    })
}

/// What the help says of the operands, which are one list to clap.
pub fn help_of_operands(command: &clap::Command) -> Option<String> {
    let operands = command.get_positionals().next()?;
    Some(operands.get_help()?.to_string())
}

/// The command with a usage that names its operands, instead of clap's name of their list.
pub fn with_usage(command: clap::Command, usage: String) -> clap::Command {
    (command.override_usage(usage)).mut_args(|arg| match arg.is_positional() {
        true => arg.hide(true),
        false => arg,
    })
}

/// The command with its examples at the end of the help, which QEMU's programs do not have.
pub fn with_examples(command: clap::Command, context: &Context) -> clap::Command {
    if context.role != "zebu" || context.examples.is_empty() {
        return command;
    }
    let before = command.get_after_help();
    let before = before.map_or_else(String::new, |text| format!("{text}\n\n"));
    command.after_help(before + &context.examples)
}

/// The command, called by `prefix`, with the options that every command has.
pub fn with_common_options(command: clap::Command, prefix: &str) -> clap::Command {
    command
        .bin_name(prefix)
        .args_override_self(true)
        .infer_long_args(true)
        .disable_version_flag(true)
        .arg(untrusted_option())
}

/// A command with these and with those that are given behind its name only.
pub fn with_command_options(command: clap::Command, prefix: &str) -> clap::Command {
    let option = |name, value, help| {
        (clap::Arg::new(name).long(name))
            .value_name(value)
            .help(help)
    };
    with_common_options(command, prefix).args([
        option(block_cache::DIR, "DIR", block_cache::DIR_HELP)
            .value_parser(clap::value_parser!(OsString)),
        option(block_cache::SIZE, "SIZE", block_cache::SIZE_HELP),
    ])
}

/// `--untrusted`, which every command has.
fn untrusted_option() -> clap::Arg {
    clap::Arg::new(untrusted::NAME)
        .long(untrusted::NAME)
        .value_name(untrusted::VALUE)
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("")
        .help(untrusted::HELP)
}

/// The option that does not exist, if that is the error.
fn unknown_option(error: &clap::Error) -> Option<String> {
    let is_unknown = error.kind() == ErrorKind::UnknownArgument;
    let argument = is_unknown.then(|| argument_of(error));
    argument.filter(|argument| argument.starts_with('-'))
}

/// The argument that an error is about.
fn argument_of(error: &clap::Error) -> String {
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(list)) => list.join(" "),
        _ => String::new(),
    }
}

/// `last` is the last argument: the one that misses its value, if one does.
fn usage_failure(context: &Context, error: &clap::Error, last: &str) -> Failure {
    let argument = argument_of(error);
    match error.kind() {
        ErrorKind::DisplayHelp => match output::report(&wrapped::to_terminal(&error.to_string())) {
            Ok(_) => Failure::Said(0),
            Err(failure) => failure,
        },
        ErrorKind::InvalidValue | ErrorKind::NoEquals | ErrorKind::WrongNumberOfValues
            if error.get(ContextKind::InvalidValue).is_none_or(is_empty) =>
        {
            missing_value(context, &argument, last)
        }
        ErrorKind::MissingRequiredArgument if !argument.is_empty() => {
            Failure::new(format!("Expecting {argument}")).with_hint()
        }
        _ => {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            Failure::new(line.trim_start_matches("error: ")).with_hint()
        }
    }
}

/// The long names of a command's options, without aliases, some of which QEMU lacks.
fn long_names(command: &clap::Command) -> Vec<String> {
    let names = command.get_arguments().filter_map(clap::Arg::get_long);
    names.map(str::to_string).collect()
}

/// The long names and the aliases of a command's options, without those that are not shown.
fn known_names(command: &clap::Command) -> Vec<String> {
    let options = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let names = options.flat_map(|arg| {
        arg.get_long()
            .into_iter()
            .chain(arg.get_all_aliases().into_iter().flatten())
    });
    names.map(str::to_string).collect()
}

/// The failure if an option is the beginning of several.
fn ambiguous(context: &Context, argument: &str, names: &[String]) -> Option<Failure> {
    let given = argument.strip_prefix("--")?;
    let start = given.split('=').next().unwrap_or(given);
    let meant: Vec<String> = (names.iter())
        .filter(|name| name.starts_with(start))
        .map(|name| format!(" '--{name}'"))
        .collect();
    let prefix = context.prefix();
    let text = match &meant[..] {
        [] => return None,
        // It is an option of another action.
        [_] if !given.contains('=') => return None,
        [name] => format!("{prefix}: option{name} doesn't allow an argument"),
        _ => format!(
            "{prefix}: option '{argument}' is ambiguous; possibilities:{}",
            meant.concat()
        ),
    };
    Some(Failure::bare(text).with_hint())
}

fn is_empty(value: &ContextValue) -> bool {
    matches!(value, ContextValue::String(text) if text.is_empty())
}

/// `argument` is as clap shows it: `--format <FMT>`.
fn missing_value(context: &Context, argument: &str, last: &str) -> Failure {
    let option = argument.split_whitespace().next().unwrap_or(argument);
    let prefix = context.prefix();
    if last.starts_with('-') && !last.starts_with("--") {
        let letter = last.chars().last().unwrap_or('-');
        let text = format!("{prefix}: option requires an argument -- '{letter}'");
        return Failure::bare(text).with_hint();
    }
    Failure::bare(format!("{prefix}: option '{option}' requires an argument")).with_hint()
}
