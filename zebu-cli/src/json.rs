//! JSON as qemu-img prints it: four spaces a level, a line for each item,
//! brackets of empty lists on two lines, and only ASCII.

use std::fmt::Write;

use serde_json::Value;

/// The text of a value, with a line feed at its end.
pub fn pretty(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value, 0);
    out.push('\n');
    out
}

fn write_value(out: &mut String, value: &Value, level: usize) {
    match value {
        Value::Array(items) => {
            let items = items.iter().map(|item| (None, item));
            write_items(out, ('[', ']'), items, level);
        }
        Value::Object(map) => {
            let items = map.iter().map(|(key, item)| (Some(key.as_str()), item));
            write_items(out, ('{', '}'), items, level);
        }
        Value::String(text) => write_string(out, text),
        other => out.push_str(&other.to_string()),
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
            write_string(out, key);
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

/// A string in quotes, everything but printable ASCII as escapes.
pub fn write_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            ' '..='~' => out.push(c),
            other => {
                for unit in other.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04X}");
                }
            }
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn as_qemu_prints_it() {
        let value = json!({"a": [], "b": {}, "c": [1, {"d": true}], "e": "x\"é\n"});
        let text = "{\n    \"a\": [\n    ],\n    \"b\": {\n    },\n    \"c\": [\n        1,\n        \
                    {\n            \"d\": true\n        }\n    ],\n    \"e\": \"x\\\"\\u00E9\\n\"\n}\n";
        assert_eq!(pretty(&value), text);
    }
}
