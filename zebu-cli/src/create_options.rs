//! The options of an image that is to be made (`-o`): `key=value,…`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use zebu::block::Format;
use zebu::names::split_list;

use crate::failure::Failure;

/// Keys and values in the order given; a later one counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CreateOptions {
    list: Vec<(String, OsString)>,
}

/// The options that are file names, of any bytes. The others are UTF-8.
const NAMES: [&str; 2] = ["backing_file", "data_file"];

impl CreateOptions {
    /// Reads the values of `-o`, of which there may be several. Commas in a
    /// value are doubled. An error is what is wrong with them.
    pub fn parse(format: Format, texts: &[OsString]) -> Result<Self, String> {
        let known: Vec<&str> = format.create_options().iter().map(|o| o.name).collect();
        Self::parse_known(&known, texts)
    }

    /// The same for options of these names.
    pub fn parse_known(known: &[&str], texts: &[OsString]) -> Result<Self, String> {
        let is_known = |key: &str| known.contains(&key);
        let mut options = CreateOptions::default();
        for item in texts.iter().flat_map(|text| split_list(text)) {
            let mut parts = item.as_bytes().splitn(2, |b| *b == b'=');
            let word = String::from_utf8_lossy(parts.next().unwrap_or_default());
            let (key, value) = match parts.next() {
                Some(value) => (&*word, OsStr::from_bytes(value)),
                None => match word.strip_prefix("no") {
                    Some(key) if !is_known(&word) => (key, OsStr::new("off")),
                    _ => (&*word, OsStr::new("on")),
                },
            };
            if !is_known(key) {
                return Err(format!("Invalid parameter '{key}'"));
            }
            if value.to_str().is_none() && !NAMES.contains(&key) {
                let value = value.display();
                return Err(format!("Parameter '{key}' does not accept value '{value}'"));
            }
            options.set(key, value);
        }
        Ok(options)
    }

    /// The names of the options that were given, in their order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.list.iter().map(|(name, _)| name.as_str())
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

    /// The value of an option that is no file's name.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.value(key)?.to_str()
    }
}

/// Whether `-o` asks for the list of options.
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
