//! The options of a new image (`-o`): `key=value,…`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use zebu::block::{CreateOption, Format, OptionKind};
use zebu::jobs::{CreateValue, CreateValues};
use zebu::names::{parse_switch, split_list};

use crate::failure::Failure;
use crate::known_options::{check_value, number};
use crate::size;

/// Options in the order given. The last value of a key counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CreateOptions {
    list: Vec<(String, OsString)>,
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
            let option = find(key).ok_or_else(|| format!("Invalid parameter '{name}'"))?;
            check_value(option, value)?;
            options.set(key, value);
        }
        Ok(options)
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
        size::parse(self.get(key)?).ok()
    }

    /// Whether a switch is on.
    pub fn is_on(&self, key: &str) -> bool {
        self.get(key).and_then(parse_switch) == Some(true)
    }

    /// The values of the options that belong to the format and not to the file.
    pub fn values(&self, format: Format) -> CreateValues {
        let mut values = CreateValues::default();
        for option in format.create_options().iter().filter(|o| !o.of_file) {
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

/// Whether `-o` requests the list of options.
pub fn asks_for_help(texts: &[OsString]) -> bool {
    let mut items = texts.iter().flat_map(|text| split_list(text));
    items.any(|item| item == "help" || item == "?")
}

/// Refuses a value of `-o` that is no list: empty, or with an empty item at an end.
pub fn check_list(text: &OsStr) -> Result<(), Failure> {
    let bytes = text.as_bytes();
    let commas = bytes.iter().rev().take_while(|b| **b == b',').count();
    match !bytes.is_empty() && !bytes.starts_with(b",") && commas.is_multiple_of(2) {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "Invalid option list: {}",
            text.display()
        ))),
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
