//! QEMU's spelling of names and options as pure values: `json:{…}`, `a.b=c,d=e`, URIs, sizes. A file each: `json`,
//! `option_set`, `path`, `quote`, `text` (sizes and lists), `encoding`.

pub mod encoding;
pub mod json;
pub mod option_set;
pub mod path;
pub mod quote;
pub mod text;

pub use option_set::{OptionSet, OptionValue};
