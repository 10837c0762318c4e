//! QEMU's spelling of names and options as pure values: `json:{…}`, `a.b=c,d=e`, URIs, sizes.

pub(crate) mod json;
pub(crate) mod option_set;
pub(crate) mod path;
pub(crate) mod quote;
pub(crate) mod text;
pub(crate) mod uri;

pub(crate) use option_set::{OptionSet, OptionValue};
