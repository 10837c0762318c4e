//! New image files.

use std::ffi::{OsStr, c_int};
use std::os::unix::ffi::OsStrExt;

use zebu::EngineKind;
use zebu::internal::new_image::Creation;

use crate::blocking;
use crate::error::{Failure, Out, Result, call_code};
use crate::text::Text;

/// The image that the caller wants.
pub fn creation(name: &OsStr, format: &str, options: Text) -> Result<Creation> {
    let options = OsStr::from_bytes(options.bytes().unwrap_or_default());
    let list = [options.to_owned()];
    let list = if options.is_empty() { &[] } else { &list[..] };
    Ok(Creation::new(name, format, list)?)
}

#[unsafe(no_mangle)]
extern "C" fn zebu_create(
    name: Text,
    format: Text,
    size: u64,
    options: Text,
    error: Out<'_>,
) -> c_int {
    call_code(error, || {
        let name = name.name("name")?;
        let format = format.word("format")?;
        let format = format.ok_or_else(|| Failure::null("format"))?;
        let queue = blocking::own_queue(EngineKind::best())?;
        let image = creation(name, format, options)?;
        let is_given = size != 0 || !image.has_backing();
        Ok(image.create(&queue, is_given.then_some(size))?)
    })
}
