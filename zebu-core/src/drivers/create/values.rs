//! The values of the options that an image is created with.

use std::ffi::{OsStr, OsString};

use crate::Result;
use crate::drivers::{Preallocation, refused};
use crate::storage::{Secret, Secrets, find_secret};

/// The value of an option; its kind is that of
/// [`CreateOption::kind`](crate::block::CreateOption::kind).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CreateValue {
    /// A text, or one of a few words.
    Text(OsString),
    /// Bytes.
    Size(u64),
    /// A number.
    Number(u64),
    /// `on` or `off`.
    Switch(bool),
}

/// Values of options by name, with the secrets that they name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CreateValues {
    list: Vec<(String, CreateValue)>,
    secrets: Secrets,
}

impl CreateValues {
    /// With this value of the option `name`, instead of an earlier one.
    #[must_use]
    pub fn with(mut self, name: &str, value: CreateValue) -> Self {
        self.list.retain(|(other, _)| other != name);
        self.list.push((name.to_string(), value));
        self
    }

    /// With the secrets that options name by their ids.
    #[must_use]
    pub fn with_secrets(mut self, secrets: Secrets) -> Self {
        self.secrets = secrets;
        self
    }

    /// The secret that an option names, if it was given.
    ///
    /// # Errors
    /// If there is no secret with this id.
    #[doc(hidden)]
    pub fn secret(&self, name: &str) -> Result<Option<Secret>> {
        let id = self.text(name).map(OsStr::to_string_lossy);
        id.map(|id| find_secret(&self.secrets, &id)).transpose()
    }

    /// The value of an option, if it was given.
    pub fn get(&self, name: &str) -> Option<&CreateValue> {
        let found = self.list.iter().find(|(other, _)| other == name);
        found.map(|(_, value)| value)
    }

    /// The text of an option.
    #[doc(hidden)]
    pub fn text(&self, name: &str) -> Option<&OsStr> {
        match self.get(name)? {
            CreateValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The text of an option that is a word.
    #[doc(hidden)]
    pub fn word(&self, name: &str) -> Option<&str> {
        self.text(name)?.to_str()
    }

    /// The size or the number that an option is.
    #[doc(hidden)]
    pub fn number(&self, name: &str) -> Option<u64> {
        match self.get(name)? {
            CreateValue::Size(number) | CreateValue::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// The preallocation of a file that is made.
    ///
    /// # Errors
    /// If files have no such mode.
    #[doc(hidden)]
    pub fn file_preallocation(&self) -> Result<Preallocation> {
        let Some(name) = self.word("preallocation") else {
            return Ok(Preallocation::Off);
        };
        match Preallocation::from_name(name) {
            None => Err(refused(format!("invalid parameter value: {name}"))),
            Some(Preallocation::Metadata) => {
                Err(refused("Unsupported preallocation mode: metadata"))
            }
            Some(mode) => Ok(mode),
        }
    }

    /// Whether the `subformat` is `fixed`; otherwise it is `dynamic`, the default.
    #[doc(hidden)]
    pub fn is_fixed(&self) -> Result<bool> {
        let subformat = self.text("subformat").map(OsStr::to_string_lossy);
        match subformat.as_deref() {
            None | Some("dynamic") => Ok(false),
            Some("fixed") => Ok(true),
            Some(other) => Err(refused(format!(
                "Parameter 'subformat' does not accept value '{other}'"
            ))),
        }
    }

    /// Whether a switch is on; off unless it was given.
    #[doc(hidden)]
    pub fn is_on(&self, name: &str) -> bool {
        matches!(self.get(name), Some(CreateValue::Switch(true)))
    }
}
