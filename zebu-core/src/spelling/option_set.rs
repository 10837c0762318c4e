//! Options as they were given, by dotted key. Options that are read are taken out; the rest is refused
//! at the end.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use super::quote::json_string;
use super::text::{SizeError, first_item, parse_integer, parse_size, parse_switch, unescape};

/// One value, as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionValue {
    /// A text.
    Text(OsString),
    /// A number, as it is spelt.
    Number(String),
    /// `true` or `false`.
    Bool(bool),
    /// `null`.
    Null,
    /// `{}` or `[]`.
    Empty,
}

/// Options by dotted key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OptionSet(pub BTreeMap<String, OptionValue>);

impl OptionValue {
    /// The value as an option takes it; None: not a value of an option.
    fn value(&self) -> Option<&OsStr> {
        match self {
            OptionValue::Text(s) => Some(s),
            OptionValue::Number(s) => Some(OsStr::new(s)),
            OptionValue::Bool(on) => Some(OsStr::new(if *on { "on" } else { "off" })),
            OptionValue::Null | OptionValue::Empty => None,
        }
    }

    /// As JSON.
    pub fn json(&self) -> String {
        match self {
            OptionValue::Text(s) => json_string(s.as_bytes()),
            OptionValue::Number(s) => s.clone(),
            OptionValue::Bool(on) => on.to_string(),
            OptionValue::Null => "null".into(),
            OptionValue::Empty => "{}".into(),
        }
    }
}

impl OptionSet {
    /// Gives `key` a value.
    pub fn set(&mut self, key: String, value: OptionValue) {
        self.0.insert(key, value);
    }

    /// Reads `a=1,b.c=x,,y`: a doubled comma is a comma of the value, a first
    /// word without `=` is the value of `file`, and a later one is a switch
    /// (`x` is `x=on`, `nox` is `x=off`).
    pub fn parse(text: &OsStr) -> OptionSet {
        let mut options = OptionSet::default();
        let mut rest = text.as_bytes();
        let mut first = true;
        while !rest.is_empty() {
            let end = rest.iter().position(|b| b"=,".contains(b));
            let end = end.unwrap_or(rest.len());
            // A key that is no UTF-8 is unknown, whatever is shown of it.
            let word = String::from_utf8_lossy(&rest[..end]);
            if rest[end..].starts_with(b"=") {
                let (value, after) = first_item(&rest[end + 1..]);
                options.set(word.into_owned(), OptionValue::Text(unescape(value)));
                rest = after;
            } else if first {
                let (value, after) = first_item(rest);
                options.set("file".into(), OptionValue::Text(unescape(value)));
                rest = after;
            } else {
                let (key, on) = match word.strip_prefix("no") {
                    Some(key) => (key, "off"),
                    None => (&*word, "on"),
                };
                options.set(key.to_string(), OptionValue::Text(on.into()));
                rest = rest.get(end + 1..).unwrap_or_default();
            }
            first = false;
        }
        options
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&OptionValue> {
        self.0.get(key)
    }

    /// Removes `key`, and returns its value.
    pub fn take(&mut self, key: &str) -> Option<OptionValue> {
        self.0.remove(key)
    }

    /// Takes out all `prefix.KEY` as `KEY`.
    pub fn take_under(&mut self, prefix: &str) -> OptionSet {
        let start = format!("{prefix}.");
        let mut under = OptionSet::default();
        let mut tail = self.0.split_off(&start);
        while let Some(entry) = tail.first_entry() {
            let Some(key) = entry.key().strip_prefix(&start) else {
                break;
            };
            let key = key.to_string();
            under.0.insert(key, entry.remove());
        }
        self.0.append(&mut tail);
        under
    }

    /// Takes out all `KEY` and `KEY.…` of `keys`.
    pub fn take_all(&mut self, keys: &[&str]) -> OptionSet {
        let is_own = |key: &String| keys.contains(&key.split('.').next().unwrap_or_default());
        let (own, rest) = std::mem::take(&mut self.0)
            .into_iter()
            .partition(|(key, _)| is_own(key));
        self.0 = rest;
        OptionSet(own)
    }

    /// Whether there is any `prefix.KEY`.
    pub fn has_under(&self, prefix: &str) -> bool {
        self.0.keys().any(|key| {
            key.strip_prefix(prefix)
                .is_some_and(|rest| rest.starts_with('.'))
        })
    }

    /// Adds what is not there yet.
    pub fn add_defaults(&mut self, defaults: OptionSet) {
        for (key, value) in defaults.0 {
            self.0.entry(key).or_insert(value);
        }
    }

    /// Those of `keys` that are given, with their values as JSON.
    pub fn shown(&self, keys: &[&str]) -> impl Iterator<Item = (String, String)> {
        let shown = |key| Some((String::from(key), self.get(key)?.json()));
        keys.iter().copied().filter_map(shown)
    }

    /// All keys with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &OptionValue)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Whether there are no options.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first key, for the message that refuses it.
    pub fn first_key(&self) -> Option<&str> {
        self.0.keys().next().map(String::as_str)
    }

    /// A file's name. Numbers are none.
    pub fn take_name(&mut self, key: &str) -> Option<OsString> {
        match self.0.get(key) {
            Some(OptionValue::Text(text)) => {
                let text = text.clone();
                self.0.remove(key);
                Some(text)
            }
            _ => None,
        }
    }

    /// A word. A number is none. What is not UTF-8 stays, and is refused with the unknown options.
    pub fn take_string(&mut self, key: &str) -> Option<String> {
        match self.0.get(key) {
            Some(OptionValue::Text(text)) => {
                let text = text.to_str()?.to_owned();
                self.0.remove(key);
                Some(text)
            }
            _ => None,
        }
    }

    /// Any value. `null` counts as absent.
    pub fn take_value(&mut self, key: &str) -> Option<OsString> {
        match self.0.get(key)? {
            OptionValue::Empty => None,
            value => {
                let value = value.value().map(OsStr::to_owned);
                self.0.remove(key);
                value
            }
        }
    }

    /// Any value as text. What is not UTF-8 stays, and is refused with the unknown options.
    pub fn take_text(&mut self, key: &str) -> Option<String> {
        match self.0.get(key)? {
            OptionValue::Text(text) if text.to_str().is_none() => None,
            _ => self.take_value(key)?.into_string().ok(),
        }
    }

    /// `on` or `off`, by QEMU's spellings.
    pub fn take_bool(&mut self, key: &str) -> Result<Option<bool>, String> {
        let Some(text) = self.take_text(key) else {
            return Ok(None);
        };
        match parse_switch(&text) {
            None => Err(format!("Parameter '{key}' expects 'on' or 'off'")),
            on => Ok(on),
        }
    }

    /// A size in bytes, with a suffix or in hexadecimal.
    pub fn take_size(&mut self, key: &str) -> Result<Option<u64>, String> {
        let Some(text) = self.take_text(key) else {
            return Ok(None);
        };
        parse_size(&text).map(Some).map_err(|e| match e {
            SizeError::Range => format!("Value '{text}' is out of range for parameter '{key}'"),
            SizeError::Syntax => {
                format!("Parameter '{key}' expects a non-negative number below 2^64")
            }
        })
    }

    /// A plain number.
    pub fn take_number(&mut self, key: &str) -> Result<Option<u64>, String> {
        let Some(text) = self.take_text(key) else {
            return Ok(None);
        };
        text.parse()
            .map(Some)
            .map_err(|_| format!("Parameter '{key}' expects a number"))
    }

    /// How many connections are made at most, if that is given.
    pub fn take_connections(&mut self) -> Result<Option<usize>, String> {
        const MOST: u64 = 64;
        match self.take_number("connections")? {
            None => Ok(None),
            Some(number @ 1..=MOST) => Ok(Some(number as usize)),
            Some(_) => Err(format!(
                "Parameter 'connections' expects a number from 1 to {MOST}"
            )),
        }
    }

    /// A number as C reads it: hexadecimal after `0x`, octal after `0`, and below
    /// zero as well.
    pub fn take_signed(&mut self, key: &str) -> Result<Option<i64>, String> {
        let Some(text) = self.take_text(key) else {
            return Ok(None);
        };
        // As in QEMU, what is above 2^63 wraps around.
        parse_integer(&text)
            .map(|number| Some(number as i64))
            .map_err(|_| format!("Parameter '{key}' expects a number"))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against lists of options that are parsed differently from QEMU.
    use super::*;

    #[test]
    fn a_doubled_comma_is_a_comma() {
        let mut options = OptionSet::parse(OsStr::new("driver=raw,file.filename=a,,b,,,x,nolazy,"));
        assert_eq!(options.take_string("file.filename").unwrap(), "a,b,");
        assert_eq!(options.take_bool("x"), Ok(Some(true)));
        assert_eq!(options.take_bool("lazy"), Ok(Some(false)));
        assert_eq!(options.take_string("driver").unwrap(), "raw");
        assert!(options.is_empty());
    }

    #[test]
    fn keys_under_a_prefix_are_split_off() {
        let mut options =
            OptionSet::parse(OsStr::new("file-x=1,file.a=2,file.b.c=3,file=4,filf.d=5"));
        let mut under = options.take_under("file");
        assert_eq!(under.take_text("a").unwrap(), "2");
        assert_eq!(under.take_text("b.c").unwrap(), "3");
        assert!(under.is_empty());
        for key in ["file-x", "file", "filf.d"] {
            assert!(options.take(key).is_some(), "{key}");
        }
        assert!(options.is_empty());
    }
}
