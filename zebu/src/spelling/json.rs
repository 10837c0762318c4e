//! The JSON of `json:` names, read as QEMU reads it.
//!
//! QEMU accepts strings in single quotes, refuses a key that occurs twice, and keeps numbers as
//! they are written. Names may come from untrusted images, so nesting is bounded. Objects become
//! dotted keys: `{"file":{"filename":"x"}}` is `file.filename=x`.

use super::option_set::{OptionSet, OptionValue};

/// How deep objects and lists nest at most.
const MAX_NESTING: usize = 64;

/// Reads `text` as one JSON object. The error is what QEMU prints after the name of the image.
pub(crate) fn parse(text: &[u8]) -> Result<OptionSet, String> {
    let text = std::str::from_utf8(text).map_err(|e| {
        let what = invalid(text, e.valid_up_to());
        format!("Could not parse the JSON options: JSON parse error, {what}")
    })?;
    let mut parser = Parser { text, at: 0 };
    let mut options = OptionSet::default();
    let parsed = parser.document(&mut options);
    match parsed {
        Ok(true) => Ok(options),
        Ok(false) => Err("Invalid JSON object given".into()),
        Err(what) => Err(format!("Could not parse the JSON options: {what}")),
    }
}

/// What is wrong with a text that is UTF-8 up to `end`, if nothing is before.
fn invalid(text: &[u8], end: usize) -> String {
    // Where the string begins in which the byte is, and its quote.
    let mut string = None;
    let mut bytes = text[..end].iter().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match (string, byte) {
            (None, b'"' | b'\'') => string = Some((at, byte)),
            (Some((_, quote)), byte) if byte == quote => string = None,
            (Some(_), b'\\') => drop(bytes.next()),
            _ => {}
        }
    }
    match (string, text[end]) {
        (Some(_), 0x80..0xc0 | 0xc2..0xf5) => "invalid UTF-8 sequence in string".into(),
        (string, _) => {
            let start = string.map_or(end, |(at, _)| at);
            format!("stray '{}'", String::from_utf8_lossy(&text[start..=end]))
        }
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

fn error<T>(what: impl std::fmt::Display) -> Result<T, String> {
    Err(format!("JSON parse error, {what}"))
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or("")
    }

    fn peek(&mut self) -> Option<char> {
        let rest = self.rest();
        let trimmed = rest.trim_start_matches([' ', '\t', '\r', '\n']);
        self.at += rest.len() - trimmed.len();
        trimmed.chars().next()
    }

    fn skip(&mut self, c: char) {
        self.at += c.len_utf8();
    }

    /// Whether the document is an object.
    fn document(&mut self, into: &mut OptionSet) -> Result<bool, String> {
        if self.peek().is_none() {
            return Err("Expecting a JSON value".into());
        }
        let object = self.peek() == Some('{');
        self.value(None, into, 0)?;
        match self.peek() {
            None => Ok(object),
            Some(_) => Err("Expecting at most one JSON value".into()),
        }
    }

    fn value(
        &mut self,
        key: Option<String>,
        into: &mut OptionSet,
        depth: usize,
    ) -> Result<(), String> {
        let value = match self.peek() {
            None => return error("premature EOI"),
            Some(open @ ('{' | '[')) => return self.items(open, key, into, depth),
            Some(quote @ ('"' | '\'')) => OptionValue::Text(self.string(quote)?.into()),
            Some('-' | '0'..='9') => OptionValue::Number(self.number()?),
            Some(c) if c.is_ascii_alphabetic() => match self.word() {
                "true" => OptionValue::Bool(true),
                "false" => OptionValue::Bool(false),
                "null" => OptionValue::Null,
                other => return error(format_args!("invalid keyword '{other}'")),
            },
            Some('}' | ']' | ':' | ',') => return error("expecting value"),
            Some(c) => return error(format_args!("stray '{}'", c)),
        };
        set(into, key, value);
        Ok(())
    }

    /// The items of an object or a list, which `open` begins.
    fn items(
        &mut self,
        open: char,
        key: Option<String>,
        into: &mut OptionSet,
        depth: usize,
    ) -> Result<(), String> {
        if depth >= MAX_NESTING {
            return Err("JSON nesting depth limit exceeded".into());
        }
        let (close, what) = match open {
            '{' => ('}', "dict"),
            _ => (']', "list"),
        };
        self.skip(open);
        if self.peek() == Some(close) {
            self.skip(close);
            set(into, key, OptionValue::Empty);
            return Ok(());
        }
        let mut seen = std::collections::HashSet::new();
        for index in 0u64.. {
            let name = match open {
                '{' => self.name()?,
                _ => index.to_string(),
            };
            let joined = join(key.as_deref(), &name);
            if !seen.insert(name) {
                return error("duplicate key");
            }
            self.value(joined, into, depth + 1)?;
            match self.peek() {
                None => return error("premature EOI"),
                Some(',') => self.skip(','),
                Some(c) if c == close => break,
                Some(_) => return error(format_args!("expected separator in {what}")),
            }
        }
        self.skip(close);
        Ok(())
    }

    /// The name of a member of an object, and the colon.
    fn name(&mut self) -> Result<String, String> {
        let name = match self.peek() {
            None => return error("premature EOI"),
            Some(quote @ ('"' | '\'')) => self.string(quote)?,
            Some(c) if c.is_ascii_alphabetic() => {
                let word = self.word();
                return error(format_args!("invalid keyword '{word}'"));
            }
            Some('}' | ']' | ':' | ',') => return error("expecting value"),
            Some(_) => return error("key is not a string in object"),
        };
        match self.peek() {
            None => error("premature EOI"),
            Some(':') => {
                self.skip(':');
                Ok(name)
            }
            Some(_) => error("missing : in object pair"),
        }
    }

    fn word(&mut self) -> &'a str {
        let rest = self.rest();
        let end = rest
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    fn number(&mut self) -> Result<String, String> {
        let rest = self.rest();
        let end = rest
            .find(|c: char| !c.is_ascii_digit() && !"+-.eE".contains(c))
            .unwrap_or(rest.len());
        let text = &rest[..end];
        self.at += end;
        let digits = text.strip_prefix('-').unwrap_or(text);
        let leading_zero =
            digits.len() > 1 && digits.starts_with('0') && digits.as_bytes()[1].is_ascii_digit();
        let whole = digits.bytes().all(|b| b.is_ascii_digit()) && !digits.is_empty();
        let number = digits.starts_with(|c: char| c.is_ascii_digit())
            && digits.ends_with(|c: char| c.is_ascii_digit())
            && text.parse::<f64>().is_ok_and(f64::is_finite);
        if leading_zero || !number {
            return error(format_args!("stray '{text}'"));
        }
        if whole {
            return Ok(text.to_string());
        }
        // As QEMU prints it: 512e0 is 512.
        Ok(text.parse::<f64>().unwrap_or_default().to_string())
    }

    fn string(&mut self, quote: char) -> Result<String, String> {
        let start = self.at;
        self.skip(quote);
        let mut value = String::new();
        let mut chars = self.rest().char_indices();
        let base = self.at;
        while let Some((at, c)) = chars.next() {
            match c {
                c if c == quote => {
                    self.at = base + at + c.len_utf8();
                    return Ok(value);
                }
                c if (c as u32) < 0x20 => break,
                '\\' => {
                    let escaped = match chars.next().map(|(_, c)| c) {
                        Some(c @ ('"' | '\'' | '\\' | '/')) => c,
                        Some('b') => '\u{8}',
                        Some('f') => '\u{c}',
                        Some('n') => '\n',
                        Some('r') => '\r',
                        Some('t') => '\t',
                        Some('u') => unicode(&mut chars)?,
                        _ => return error("invalid escape sequence in string"),
                    };
                    value.push(escaped);
                }
                c => value.push(c),
            }
        }
        let stray: String = self.text[start..].chars().take(40).collect();
        error(format_args!("stray '{}'", stray))
    }
}

/// The character of `\uXXXX`, of two such for those beyond 16 bits.
fn unicode(chars: &mut std::str::CharIndices<'_>) -> Result<char, String> {
    let first = unit(chars)?;
    let mut units = vec![first];
    if (0xd800..0xdc00).contains(&first) && chars.as_str().starts_with("\\u") {
        chars.nth(1);
        units.push(unit(chars)?);
    }
    match char::decode_utf16(units).next() {
        Some(Ok(c)) => Ok(c),
        _ => error(format_args!(
            "\\u{first:04x} is not a valid Unicode character"
        )),
    }
}

/// The number of four hexadecimal digits.
fn unit(chars: &mut std::str::CharIndices<'_>) -> Result<u16, String> {
    let mut unit = 0;
    for _ in 0..4 {
        match chars.next().and_then(|(_, c)| c.to_digit(16)) {
            Some(digit) => unit = unit << 4 | digit as u16,
            None => return error("invalid escape sequence in string"),
        }
    }
    Ok(unit)
}

/// The key of a member of what has this key; the document itself has none.
fn join(key: Option<&str>, name: &str) -> Option<String> {
    Some(match key {
        None => name.to_string(),
        Some(key) => format!("{key}.{name}"),
    })
}

fn set(into: &mut OptionSet, key: Option<String>, value: OptionValue) {
    if let Some(key) = key {
        into.set(key, value);
    }
}
