//! The JSON of `json:` names, read as QEMU reads it.
//!
//! QEMU accepts strings in single quotes, refuses a key that occurs twice, and keeps numbers as
//! they are written. Names may come from untrusted images, so nesting is bounded. Objects become
//! dotted keys: `{"file":{"filename":"x"}}` is `file.filename=x`.

use super::option_set::{OptionSet, OptionValue};

/// How deep objects and lists nest at most.
const MAX_NESTING: usize = 64;

/// Reads `text` as one JSON object. The error is what QEMU prints after the name of the image.
pub fn parse(text: &[u8]) -> Result<OptionSet, String> {
    let (valid, bad) = match std::str::from_utf8(text) {
        Ok(valid) => (valid, false),
        Err(e) => {
            let valid = &text[..e.valid_up_to()];
            (std::str::from_utf8(valid).unwrap_or_default(), true)
        }
    };
    let mut parser = Parser {
        text: valid,
        at: 0,
        token: 0,
        word: None,
    };
    if bad {
        let (start, what) = invalid(text, valid.len());
        let what = parser.error::<()>(start, what);
        return Err(format!(
            "Could not parse the JSON options: {}",
            what.unwrap_err()
        ));
    }
    let mut options = OptionSet::default();
    let parsed = parser.document(&mut options);
    match parsed {
        Ok(true) => Ok(options),
        Ok(false) => Err("Invalid JSON object given".into()),
        Err(what) => Err(format!("Could not parse the JSON options: {what}")),
    }
}

/// What is wrong with a text that is UTF-8 up to `end`, if nothing is before, and where.
fn invalid(text: &[u8], end: usize) -> (usize, String) {
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
    let start = string.map_or(end, |(at, _)| at);
    let what = match (string, text[end]) {
        (Some(_), 0x80..0xc0 | 0xc2..0xf5) => "invalid UTF-8 sequence in string".into(),
        _ => format!("stray '{}'", String::from_utf8_lossy(&text[start..=end])),
    };
    (start, what)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    /// Where the last token begins.
    token: usize,
    /// The end of the last number or keyword.
    word: Option<usize>,
}

impl<'a> Parser<'a> {
    /// An error at the token that begins at `at`, with line and column as QEMU counts them: what follows a
    /// number or a keyword directly was looked at before, and is a column further.
    fn error<T>(&self, at: usize, what: impl std::fmt::Display) -> Result<T, String> {
        let before = &self.text.as_bytes()[..at];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        let start = before.iter().rposition(|byte| *byte == b'\n');
        let column = before.len() - start.map_or(0, |at| at + 1) + 1;
        let column = column + usize::from(self.word == Some(at));
        Err(format!("{line}:{column}: JSON parse error, {what}"))
    }

    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or("")
    }

    /// The first character of the next token. It is an error if no token begins with that.
    fn peek(&mut self) -> Result<Option<char>, String> {
        let rest = self.rest();
        let trimmed = rest.trim_start_matches([' ', '\t', '\r', '\n']);
        self.at += rest.len() - trimmed.len();
        match trimmed.chars().next() {
            Some(c) if c.is_ascii_lowercase() || c.is_ascii_digit() => Ok(Some(c)),
            Some(c) if !"{}[]:,\"'-".contains(c) => {
                self.error(self.at, format_args!("stray '{c}'"))
            }
            other => Ok(other),
        }
    }

    /// The same of a token that must be there.
    fn next(&mut self) -> Result<char, String> {
        match self.peek()? {
            Some(c) => Ok(c),
            None => self.error(self.at, "premature end of input"),
        }
    }

    fn skip(&mut self, c: char) {
        self.token = self.at;
        self.at += c.len_utf8();
    }

    /// Whether the document is an object.
    fn document(&mut self, into: &mut OptionSet) -> Result<bool, String> {
        let first = self.peek()?;
        if first.is_none() {
            return Err("Expecting a JSON value".into());
        }
        self.value(None, into, 0)?;
        match self.peek() {
            Ok(None) => Ok(first == Some('{')),
            _ => Err("Expecting at most one JSON value".into()),
        }
    }

    fn value(
        &mut self,
        key: Option<String>,
        into: &mut OptionSet,
        depth: usize,
    ) -> Result<(), String> {
        let value = match self.next()? {
            open @ ('{' | '[') => return self.items(open, key, into, depth),
            quote @ ('"' | '\'') => OptionValue::Text(self.string(quote)?.into()),
            '-' | '0'..='9' => OptionValue::Number(self.number()?),
            'a'..='z' => match self.keyword() {
                "true" => OptionValue::Bool(true),
                "false" => OptionValue::Bool(false),
                "null" => OptionValue::Null,
                other => {
                    return self.error(self.token, format_args!("invalid keyword '{other}'"));
                }
            },
            _ => return self.error(self.at, "expecting value"),
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
        let close = match open {
            '{' => '}',
            _ => ']',
        };
        self.skip(open);
        if self.peek()? == Some(close) {
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
            self.value(joined, into, depth + 1)?;
            if !seen.insert(name) {
                return self.error(self.token, "duplicate key");
            }
            match self.next()? {
                ',' => self.skip(','),
                c if c == close => break,
                _ => {
                    let what = format_args!("expected ',' or '{close}'");
                    return self.error(self.at, what);
                }
            }
        }
        self.skip(close);
        Ok(())
    }

    /// The name of a member of an object, and the colon.
    fn name(&mut self) -> Result<String, String> {
        let name = match self.next()? {
            quote @ ('"' | '\'') => self.string(quote)?,
            '-' | '0'..='9' => {
                let start = self.at;
                self.number()?;
                return self.error(start, "expecting key");
            }
            _ => return self.error(self.at, "expecting key"),
        };
        match self.next()? {
            ':' => {
                self.skip(':');
                Ok(name)
            }
            _ => self.error(self.at, "expecting ':'"),
        }
    }

    fn keyword(&mut self) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c: char| !c.is_ascii_lowercase());
        let word = &rest[..end.unwrap_or(rest.len())];
        self.token = self.at;
        self.at += word.len();
        self.word = Some(self.at);
        word
    }

    fn number(&mut self) -> Result<String, String> {
        let rest = self.rest();
        let length = match scan_number(rest) {
            Ok(length) => length,
            // With the character that ends it.
            Err(at) => {
                let end = rest[at..].chars().next().map_or(0, char::len_utf8);
                return self.error(self.at, format_args!("stray '{}'", &rest[..at + end]));
            }
        };
        let text = &rest[..length];
        self.token = self.at;
        self.at += length;
        self.word = Some(self.at);
        match text.bytes().all(|b| b.is_ascii_digit() || b == b'-') {
            true => Ok(text.to_string()),
            // As QEMU prints it: 512e0 is 512.
            false => Ok(text.parse::<f64>().unwrap_or_default().to_string()),
        }
    }

    fn string(&mut self, quote: char) -> Result<String, String> {
        let start = self.at;
        let inside = &self.rest()[1..];
        let mut escaped = false;
        let end = inside.char_indices().find(|(_, c)| {
            let ends = *c < ' ' || *c == quote && !escaped;
            escaped = *c == '\\' && !escaped;
            ends
        });
        let Some((length, end)) = end.filter(|(_, c)| *c == quote) else {
            let length = end.map_or(inside.len(), |(at, _)| at + 1);
            let stray = &self.text[start..start + 1 + length];
            return self.error(start, format_args!("stray '{stray}'"));
        };
        self.token = start;
        self.at = start + 1 + length + end.len_utf8();
        let value = unescaped(&inside[..length], quote);
        value.or_else(|what| self.error(start, what))
    }
}

/// The length of the number that a text begins with, or where it ends to be one.
fn scan_number(text: &str) -> Result<usize, usize> {
    let bytes = text.as_bytes();
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let digits = |mut at: usize| match is_digit(at) {
        false => Err(at),
        true => {
            while is_digit(at) {
                at += 1;
            }
            Ok(at)
        }
    };
    let start = usize::from(bytes.first() == Some(&b'-'));
    let mut at = match bytes.get(start) {
        Some(b'0') if is_digit(start + 1) => return Err(start + 1),
        _ => digits(start)?,
    };
    if bytes.get(at) == Some(&b'.') {
        at = digits(at + 1)?;
    }
    if let Some(b'e' | b'E') = bytes.get(at) {
        let sign = matches!(bytes.get(at + 1), Some(b'+' | b'-'));
        at = digits(at + 1 + usize::from(sign))?;
    }
    Ok(at)
}

/// The characters of a string in these quotes.
fn unescaped(inside: &str, quote: char) -> Result<String, String> {
    let mut value = String::new();
    let mut chars = inside.chars();
    while let Some(c) = chars.next() {
        value.push(match c {
            '\\' => match chars.next() {
                Some(c @ ('"' | '\'' | '\\' | '/')) => c,
                Some('b') => '\u{8}',
                Some('f') => '\u{c}',
                Some('n') => '\n',
                Some('r') => '\r',
                Some('t') => '\t',
                Some('u') => unicode(&mut chars, quote)?,
                _ => return Err("invalid escape sequence in string".into()),
            },
            c => c,
        });
    }
    Ok(value)
}

/// The character of `\uXXXX`, of two such for those beyond 16 bits.
fn unicode(chars: &mut std::str::Chars<'_>, quote: char) -> Result<char, String> {
    let shown: String = chars.clone().chain([quote]).take(4).collect();
    let mut units: Vec<u16> = unit(chars).into_iter().collect();
    if units
        .first()
        .is_some_and(|first| (0xd800..0xdc00).contains(first))
        && chars.as_str().starts_with("\\u")
    {
        chars.nth(1);
        units.extend(unit(chars));
    }
    match char::decode_utf16(units).next() {
        Some(Ok(c)) => Ok(c),
        _ => Err(format!("\\u{shown} is not a valid Unicode character")),
    }
}

/// The number of four hexadecimal digits.
fn unit(chars: &mut std::str::Chars<'_>) -> Option<u16> {
    let mut unit = 0;
    for _ in 0..4 {
        unit = unit << 4 | chars.next()?.to_digit(16)? as u16;
    }
    Some(unit)
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
