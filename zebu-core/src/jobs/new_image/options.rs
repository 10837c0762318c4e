//! The options of a new image (`-o`): `key=value,…`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::block::{CreateOption, Format, OptionKind};
use crate::drivers::{CreateValue, CreateValues};
use crate::names::{SizeError, parse_integer, parse_size, parse_switch, split_list};
use crate::printable;
use crate::storage::Secrets;

/// The options that are file names, of any bytes. The others are UTF-8.
const NAMES: [&str; 2] = ["backing_file", "data_file"];

/// Options in the order given. The last value of a key counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CreateOptions {
    list: Vec<(String, OsString)>,
    secrets: Secrets,
}

impl CreateOptions {
    /// Parses the values of `-o`, of which there may be several. Commas in a value are doubled.
    ///
    /// # Errors
    ///
    /// The message for the first option that does not exist or has an invalid value.
    pub fn parse(format: Format, texts: &[OsString]) -> Result<Self, String> {
        Self::parse_known(format.create_options(), texts)
    }

    /// As [`CreateOptions::parse`], for the options `known`.
    pub fn parse_known(known: &[CreateOption], texts: &[OsString]) -> Result<Self, String> {
        let find = |key: &str| known.iter().find(|option| option.name == key);
        let mut options = CreateOptions::default();
        for item in texts.iter().flat_map(|text| split_list(text)) {
            let mut parts = item.as_bytes().splitn(2, |b| *b == b'=');
            let word = String::from_utf8_lossy(parts.next().unwrap_or_default());
            let (key, value) = match parts.next() {
                Some(value) => (&*word, OsStr::from_bytes(value)),
                None => match word.strip_prefix("no") {
                    Some(key) if find(&word).is_none() => (key, OsStr::new("off")),
                    _ => (&*word, OsStr::new("on")),
                },
            };
            // QEMU ends a name at a comma, also at a doubled one.
            let name = key.split(',').next().unwrap_or(key);
            let name = printable(name.as_bytes());
            let option = find(key).ok_or_else(|| format!("Invalid parameter '{name}'"))?;
            check_value(option, value)?;
            options.set(key, value);
        }
        Ok(options)
    }

    /// With the secrets that options name by their ids.
    #[must_use]
    pub fn with_secrets(mut self, secrets: Secrets) -> Self {
        self.secrets = secrets;
        self
    }

    /// Sets an option, as if it were given last.
    pub fn set(&mut self, key: &str, value: impl Into<OsString>) {
        self.list.push((key.to_string(), value.into()));
    }

    /// The value of an option.
    pub fn value(&self, key: &str) -> Option<&OsStr> {
        let of_key = |pair: &&(String, OsString)| pair.0 == key;
        self.list.iter().rev().find(of_key).map(|(_, v)| &**v)
    }

    /// The value of an option that is not a file name.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.value(key)?.to_str()
    }

    /// The value of a size in bytes.
    pub fn size(&self, key: &str) -> Option<u64> {
        parse_file_size(self.get(key)?).ok()
    }

    /// Whether a switch is on.
    pub fn is_on(&self, key: &str) -> bool {
        self.get(key).and_then(parse_switch) == Some(true)
    }

    /// The values of the options.
    pub fn values(&self, format: Format) -> CreateValues {
        let mut values = CreateValues::default().with_secrets(self.secrets.clone());
        for option in format.create_options() {
            let name = option.name;
            let value = match option.kind {
                OptionKind::Text => self.value(name).map(|t| CreateValue::Text(t.to_owned())),
                OptionKind::Size => self.size(name).map(CreateValue::Size),
                OptionKind::Number => self.get(name).and_then(number).map(CreateValue::Number),
                OptionKind::Switch => {
                    let given = self.get(name).and_then(parse_switch);
                    given.map(CreateValue::Switch)
                }
            };
            if let Some(value) = value {
                values = values.with(name, value);
            }
        }
        values
    }
}

/// Refuses a value that is not of the option's kind.
fn check_value(option: &CreateOption, value: &OsStr) -> Result<(), String> {
    let name = option.name;
    if value.as_bytes().contains(&0) {
        return Err(format!("Parameter '{name}' has a NUL byte"));
    }
    let Some(value) = value.to_str() else {
        return match NAMES.contains(&name) {
            true => Ok(()),
            false => Err(format!(
                "Parameter '{name}' does not accept value '{}'",
                printable(value.as_bytes())
            )),
        };
    };
    match option.kind {
        OptionKind::Switch if parse_switch(value).is_none() => {
            Err(format!("Parameter '{name}' expects 'on' or 'off'"))
        }
        OptionKind::Number if number(value).is_none() => {
            Err(format!("Parameter '{name}' expects a number"))
        }
        OptionKind::Size => match parse_file_size(value) {
            Ok(_) => Ok(()),
            Err(SizeError::Range) => Err(format!(
                "Value '{value}' is out of range for parameter '{name}'"
            )),
            Err(SizeError::Syntax) => Err(format!(
                "Parameter '{name}' expects a non-negative number below 2^64\n\
                 Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-\n\
                 and exabytes, respectively."
            )),
        },
        _ => Ok(()),
    }
}

/// A number as C reads it; below zero it wraps around.
pub fn number(text: &str) -> Option<u64> {
    parse_integer(text).ok().map(|number| number as u64)
}

/// Reads a size in bytes as everywhere ([`parse_size`]), up to 2^63 - 1.
pub fn parse_file_size(text: &str) -> Result<u64, SizeError> {
    match parse_size(text)? {
        size if size <= i64::MAX as u64 => Ok(size),
        _ => Err(SizeError::Range),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_counts() {
        let texts = ["cluster_size=4k".into(), "cluster_size=64k".into()];
        let options = CreateOptions::parse(Format::QCOW2, &texts).unwrap();
        assert_eq!(options.get("cluster_size"), Some("64k"));
        assert!(CreateOptions::parse(Format::RAW, &texts).is_err());
    }
}
