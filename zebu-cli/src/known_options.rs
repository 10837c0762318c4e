//! The options that a format knows (`-o`): which there are, what their values
//! are, how they are reported.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;

use zebu::block::{CreateOption, Format, OptionKind};

use crate::create_options::CreateOptions;
use crate::file_name::as_value;
use crate::size;

/// What `-o help` prints.
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
        let kind = match option.kind {
            OptionKind::Text => "<str>",
            OptionKind::Size => "<size>",
            OptionKind::Number => "<num>",
            OptionKind::Switch => "<bool (on/off)>",
        };
        let left = format!("{}={kind}", option.name);
        text += &format!("  {left:<22} - {}\n", option.help);
    }
    if name.is_none() {
        text += "\nThe protocol level may support further options.\n\
                 Specify the target filename to include those options.\n";
    }
    text
}

/// Refuses values that are not of their option's kind.
pub fn check_values(format: Format, options: &CreateOptions) -> Result<(), String> {
    for CreateOption { name, kind, .. } in format.create_options() {
        let Some(value) = options.get(name) else {
            continue;
        };
        match kind {
            OptionKind::Text => {}
            OptionKind::Switch => {
                if !["on", "off", "yes", "no", "true", "false", "y", "n"].contains(&value) {
                    return Err(format!("Parameter '{name}' expects 'on' or 'off'"));
                }
            }
            OptionKind::Number => {
                number(value).ok_or_else(|| format!("Parameter '{name}' expects a number"))?;
            }
            OptionKind::Size => match size::parse(value) {
                Ok(_) => {}
                Err(size::SizeError::Range) => {
                    return Err(format!(
                        "Value '{value}' is out of range for parameter '{name}'"
                    ));
                }
                Err(size::SizeError::Syntax) => {
                    return Err(format!(
                        "Parameter '{name}' expects a non-negative number below 2^64\n\
                         Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, \
                         peta-\nand exabytes, respectively."
                    ));
                }
            },
        }
    }
    Ok(())
}

/// A number as C reads it; below zero it wraps around.
pub fn number(text: &str) -> Option<u64> {
    let text = text.trim_start();
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let (digits, base) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&digits[2..], 16),
        [b'0', _, ..] => (&digits[1..], 8),
        _ => (digits, 10),
    };
    // Rust would take a second sign.
    if digits.starts_with(['-', '+']) {
        return None;
    }
    let value = u64::from_str_radix(digits, base).ok()?;
    Some(match text.starts_with('-') {
        true => value.wrapping_neg(),
        false => value,
    })
}

/// The value of a size that [`check_values`] has seen.
pub fn size_of(options: &CreateOptions, name: &str) -> Option<u64> {
    size::parse(options.get(name)?).ok()
}

/// Whether a switch that [`check_values`] has seen is on.
pub fn is_on(options: &CreateOptions, name: &str) -> bool {
    matches!(options.get(name), Some("on" | "yes" | "true" | "y"))
}

/// The line that says what is created, with names of any bytes.
pub fn formatting(format: Format, name: &OsStr, options: &CreateOptions) -> Vec<u8> {
    let mut line = OsString::from("Formatting '");
    line.push(name);
    line.push(format!("', fmt={}", format.name()));
    for option in format.create_options() {
        let value = match (options.value(option.name), option.kind) {
            (Some(_), OptionKind::Size) => {
                size_of(options, option.name).map(|n| OsString::from(n.to_string()))
            }
            (Some(text), _) => Some(as_value(text)),
            (None, _) => option.default.map(OsString::from),
        };
        if let Some(value) = value {
            line.push(format!(" {}=", option.name));
            line.push(value);
        }
    }
    line.push("\n");
    line.into_vec()
}
