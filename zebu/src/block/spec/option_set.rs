//! Options as they were given: by dotted key, and not yet read.

use std::collections::BTreeMap;
use std::ffi::OsString;

/// One value, as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OptionValue {
    Text(OsString),
    Number(String),
    Bool(bool),
    Null,
    /// `{}` or `[]`.
    Empty,
}

/// Options by dotted key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OptionSet(pub BTreeMap<String, OptionValue>);
