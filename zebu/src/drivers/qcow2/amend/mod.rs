//! Changes of an image that is not open as one: its version, the width of its refcounts.

mod header;
mod refcounts;

pub(crate) use header::{read_header, write_header};
pub(crate) use refcounts::{change_width, check_width, used_end};
