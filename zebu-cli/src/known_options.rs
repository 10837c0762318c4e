//! The options of formats (`-o`): their values and their help.

use std::ffi::OsStr;

use zebu::block::{CreateOption, Format, OptionKind};
use zebu::names::{parse_integer, parse_switch};

use crate::size;

/// The options that are file names, of any bytes. The others are UTF-8.
const NAMES: [&str; 2] = ["backing_file", "data_file"];

/// The line of an option in the output of `-o help`.
pub fn help_line(option: &CreateOption) -> String {
    let kind = match option.kind {
        OptionKind::Text => "<str>",
        OptionKind::Size => "<size>",
        OptionKind::Number => "<num>",
        OptionKind::Switch => "<bool (on/off)>",
    };
    let left = format!("{}={kind}", option.name);
    format!("  {left:<22} - {}\n", option.help)
}

/// The output of `-o help`. `name`: the file name, if one was given.
pub fn option_help(format: Format, name: Option<&OsStr>) -> String {
    // Options of the file and not of the format are reported with a file name.
    let mut list: Vec<&CreateOption> = format.create_options().iter().collect();
    list.retain(|option| name.is_some() || !option.of_file);
    list.sort_by_key(|option| option.name);
    let mut text = match name {
        Some(_) => "Supported options:\n".to_string(),
        None => format!("Supported {} options:\n", format.name()),
    };
    for option in list {
        text += &help_line(option);
    }
    if name.is_none() {
        text += "\nThe protocol level may support further options.\n\
                 Specify the target filename to include those options.\n";
    }
    text
}

/// Refuses a value that is not of the option's kind.
pub fn check_value(option: &CreateOption, value: &OsStr) -> Result<(), String> {
    let name = option.name;
    let Some(value) = value.to_str() else {
        return match NAMES.contains(&name) {
            true => Ok(()),
            false => Err(format!(
                "Parameter '{name}' does not accept value '{}'",
                value.display()
            )),
        };
    };
    match option.kind {
        OptionKind::Switch if parse_switch(value).is_none() => {
            Err(format!("Parameter '{name}' expects 'on' or 'off'"))
        }
        OptionKind::Number if number(value).is_none() => {
            Err(format!("Parameter '{name}' expects a number"))
        }
        OptionKind::Size => match size::parse(value) {
            Ok(_) => Ok(()),
            Err(size::SizeError::Range) => Err(format!(
                "Value '{value}' is out of range for parameter '{name}'"
            )),
            Err(size::SizeError::Syntax) => Err(format!(
                "Parameter '{name}' expects a non-negative number below 2^64\n\
                 Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-\n\
                 and exabytes, respectively."
            )),
        },
        _ => Ok(()),
    }
}

/// A number as C reads it; below zero it wraps around.
pub fn number(text: &str) -> Option<u64> {
    parse_integer(text).ok().map(|number| number as u64)
}
