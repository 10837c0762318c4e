//! Images that are made, by `create` and by `convert`.

use zebu::block::Format;
pub use zebu::internal::new_image::{
    NewFiles, NewImage, is_format, log2, parse_format, refuse_object,
};

/// The names of formats that `keep` is true of, for help texts.
pub fn format_names(keep: impl Fn(Format) -> bool) -> String {
    let mut names: Vec<_> = Format::all().filter(|format| keep(*format)).collect();
    names.sort_by_key(|format| format.name());
    let names: Vec<_> = names.iter().map(|format| format.name()).collect();
    names.join(", ")
}

/// The help of an option that takes the format of a new image.
pub fn new_format_help(of: &str) -> String {
    let names = format_names(Format::is_creatable);
    format!("Format of the {of}: {names} (default raw)")
}
