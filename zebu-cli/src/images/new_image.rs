//! Images that are made, by `create` and by `convert`.

use std::path::Path;

use zebu::block::Format;
pub use zebu::internal::new_image::{
    NewFiles, check_level, is_driver, log2, other_files, parse_format, plan, plan_to_fill,
    refuse_object,
};
use zebu::jobs::{CreateQcow2, ExportFormat};

use crate::arguments::create_options::CreateOptions;

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

/// A raw or qcow2 image, whose size is set later.
pub fn export_format(
    format: Format,
    create: &CreateOptions,
    scan: bool,
) -> zebu::Result<ExportFormat> {
    plan(format, Path::new(""), 0, create, None)?;
    if format == Format::RAW {
        return Ok(ExportFormat::Raw);
    }
    let image = CreateQcow2::with_options(0, &create.values(format))?;
    let image = Box::new(image);
    Ok(ExportFormat::Qcow2 { image, scan })
}
