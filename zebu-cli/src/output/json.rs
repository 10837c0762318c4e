//! JSON as qemu-img prints it: four spaces a level, a line for each item,
//! brackets of empty lists on two lines, and only ASCII.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use zebu::names::json_string;

/// A value. Texts are names, of any bytes: reports for people show these as they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Bool(bool),
    Number(u64),
    Text(Vec<u8>),
    List(Vec<Value>),
    Object(Map),
}

/// The members of an object, in the order in which they were added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Map(pub Vec<(&'static str, Value)>);

impl Map {
    pub fn new() -> Map {
        Map::default()
    }

    /// Adds a member.
    pub fn add(&mut self, key: &'static str, value: impl Into<Value>) {
        self.0.push((key, value.into()));
    }

    /// The same with a member more.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl Into<Value>) -> Map {
        self.add(key, value);
        self
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Value {
        Value::Bool(value)
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Value {
        Value::Number(value)
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Value {
        Value::Number(value.into())
    }
}

impl From<&[u8]> for Value {
    fn from(value: &[u8]) -> Value {
        Value::Text(value.into())
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Value {
        value.as_bytes().into()
    }
}

impl From<&OsStr> for Value {
    fn from(value: &OsStr) -> Value {
        value.as_bytes().into()
    }
}

impl From<&OsString> for Value {
    fn from(value: &OsString) -> Value {
        value.as_bytes().into()
    }
}

impl<T: Into<Value>> From<Vec<T>> for Value {
    fn from(value: Vec<T>) -> Value {
        Value::List(value.into_iter().map(T::into).collect())
    }
}

impl From<Map> for Value {
    fn from(value: Map) -> Value {
        Value::Object(value)
    }
}

/// The text of a value, with a line feed at its end.
pub fn pretty(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value, 0);
    out.push('\n');
    out
}

fn write_value(out: &mut String, value: &Value, level: usize) {
    match value {
        Value::List(items) => {
            let items = items.iter().map(|item| (None, item));
            write_items(out, ('[', ']'), items, level);
        }
        Value::Object(map) => {
            let items = map.0.iter().map(|(key, item)| (Some(*key), item));
            write_items(out, ('{', '}'), items, level);
        }
        Value::Text(text) => out.push_str(&json_string(text)),
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Value::Number(number) => out.push_str(&number.to_string()),
    }
}

fn write_items<'a>(
    out: &mut String,
    (open, close): (char, char),
    items: impl Iterator<Item = (Option<&'a str>, &'a Value)>,
    level: usize,
) {
    out.push(open);
    let mut first = true;
    for (key, item) in items {
        out.push_str(if first { "\n" } else { ",\n" });
        first = false;
        indent(out, level + 1);
        if let Some(key) = key {
            out.push_str(&json_string(key.as_bytes()));
            out.push_str(": ");
        }
        write_value(out, item, level + 1);
    }
    out.push('\n');
    indent(out, level);
    out.push(close);
}

fn indent(out: &mut String, level: usize) {
    out.extend(std::iter::repeat_n("    ", level));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_qemu_prints_it() {
        let list = vec![Value::from(1u32), Map::new().with("d", true).into()];
        let value = Map::new()
            .with("a", Value::List(Vec::new()))
            .with("b", Map::new())
            .with("c", list)
            .with("e", &b"x\"\xc3\xa9\n\xff"[..])
            .into();
        let text = "{\n    \"a\": [\n    ],\n    \"b\": {\n    },\n    \"c\": [\n        1,\n        \
                    {\n            \"d\": true\n        }\n    ],\n    \"e\": \"x\\\"\\u00E9\\n\\uFFFD\"\n}\n";
        assert_eq!(pretty(&value), text);
    }
}
