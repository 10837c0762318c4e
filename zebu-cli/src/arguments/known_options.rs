//! The help of the options of formats (`-o`).

use std::ffi::OsStr;

use zebu::block::{CreateOption, Format, OptionKind};
pub use zebu::internal::new_image::number;

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
