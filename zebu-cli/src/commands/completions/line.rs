//! Lines of bash, which splits words also at `=` and `:` and leaves quotation marks to others.

/// A line with a cursor.
pub struct Line {
    /// Its words, without quotation marks. That at the cursor ends there.
    pub words: Vec<String>,
    /// The one at the cursor.
    pub index: usize,
    /// What of that word stays: bash replaces only what follows.
    kept: String,
    /// The quotation mark that is open where that begins.
    quote: Option<char>,
    /// Whether that mark is the last character before it.
    follows_quote: bool,
}

impl Line {
    /// The line before the cursor, the line after it, and what of the first bash replaces.
    pub fn new(before: &str, after: &str, replaced: &str) -> Self {
        let (mut words, open) = split(before);
        let index = words.len() - 1;
        let after = match open {
            Some(quote) => after.split_once(quote).map_or("", |(_, rest)| rest),
            None => after,
        };
        let (rest, _) = split(after);
        // What touches the cursor belongs to its word.
        let touching = usize::from(!after.starts_with(char::is_whitespace));
        words.extend(rest.into_iter().skip(touching));
        let stays = before.strip_suffix(replaced).unwrap_or(before);
        let (kept, quote) = split(stays);
        Line {
            words,
            index,
            kept: kept.into_iter().nth(index).unwrap_or_default(),
            follows_quote: quote.is_some_and(|quote| stays.ends_with(quote)),
            quote,
        }
    }

    /// What bash has to insert for a word; None: it does not begin like that at the cursor.
    pub fn insertion(&self, word: &str) -> Option<String> {
        let rest = word.strip_prefix(&self.kept)?;
        let Some(quote) = self.quote else {
            return Some(quoted(rest));
        };
        let mut text = in_quotes(rest, quote);
        // Bash drops an open mark before a text that begins with one, and does not close it behind a text
        // that ends with one.
        if self.follows_quote && text.starts_with(quote) {
            text.insert(0, quote);
        }
        if text.ends_with(quote) {
            text.push(quote);
        }
        Some(text)
    }
}

/// Words, without quotation marks, and the mark that is open at the end. The last one is empty behind
/// a blank.
fn split(line: &str) -> (Vec<String>, Option<char>) {
    let mut words = Vec::new();
    let (mut word, mut has_begun, mut quote) = (String::new(), false, None);
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '\'' | '"') => (quote, has_begun) = (Some(c), true),
            (None | Some('"'), '\\') => {
                let next = chars.next();
                // One at the end is the beginning of what names have in common.
                if quote.is_some() && next.is_some_and(|c| !"$`\"\\".contains(c)) {
                    word.push('\\');
                }
                word.extend(next);
                has_begun = true;
            }
            (None, c) if c.is_whitespace() => {
                if std::mem::take(&mut has_begun) {
                    words.push(std::mem::take(&mut word));
                }
            }
            (_, c) => {
                word.push(c);
                has_begun = true;
            }
        }
    }
    words.push(word);
    (words, quote)
}

/// The word, so that a shell takes it as it is.
fn quoted(word: &str) -> String {
    let mut text = String::new();
    for c in word.chars() {
        if !is_plain(c) {
            text.push('\\');
        }
        text.push(c);
    }
    text
}

/// A part of a word in quotation marks, which stay open.
fn in_quotes(part: &str, quote: char) -> String {
    let mut text = String::new();
    for c in part.chars() {
        match (quote, c) {
            ('\'', '\'') => text.push_str("'\\''"),
            // A backslash before it would stay.
            ('"', '!') => text.push_str("\"'!'\""),
            ('"', '$' | '`' | '"' | '\\') => text.extend(['\\', c]),
            _ => text.push(c),
        }
    }
    text
}

/// Whether a character means nothing to a shell.
fn is_plain(c: char) -> bool {
    !c.is_ascii() || c.is_ascii_alphanumeric() || "_./:=,@%+-".contains(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_line() {
        for (before, after, replaced, words) in [
            ("zebu sn", "", "sn", &["zebu", "sn"][..]),
            ("  zebu  info ", "", "", &["zebu", "info", ""]),
            ("zebu a='b c", "", "b c", &["zebu", "a=b c"]),
            (
                "zebu \"a\\\"\\b\" c\\ d",
                "",
                "c\\ d",
                &["zebu", "a\"\\b", "c d"],
            ),
            ("zebu -a m", "on disk", "m", &["zebu", "-a", "m", "disk"]),
            (
                "zebu -a ",
                " disk 'a b'",
                "",
                &["zebu", "-a", "", "disk", "a b", ""],
            ),
            (
                "zebu -a \"m",
                "on\" disk",
                "m",
                &["zebu", "-a", "m", "disk"],
            ),
            ("zebu '' x\\", "", "x\\", &["zebu", "", "x"]),
        ] {
            let line = Line::new(before, after, replaced);
            let found: Vec<_> = line.words.iter().filter(|word| !word.is_empty()).collect();
            let words: Vec<_> = words.iter().filter(|word| !word.is_empty()).collect();
            assert_eq!(found, words, "{before}|{after}");
        }
    }

    #[test]
    fn nothing_that_is_inserted_means_anything() {
        let insertion =
            |before: &str, replaced, word| Line::new(before, "", replaced).insertion(word);
        let new = |text: &str| Some(text.to_string());
        assert_eq!(
            insertion("zebu a", "a", "a;b $(c)"),
            new("a\\;b\\ \\$\\(c\\)")
        );
        assert_eq!(insertion("zebu ", "", "~a"), new("\\~a"));
        assert_eq!(insertion("zebu -o a=", "", "a=b'"), new("b\\'"));
        assert_eq!(insertion("zebu 'a", "a", "a b"), new("a b"));
        assert_eq!(
            insertion("zebu \"a", "a", "a$b!c\\"),
            new("a\\$b\"'!'\"c\\\\")
        );
        assert_eq!(insertion("zebu \"a\\", "a\\", "a\""), new("a\\\"\""));
        assert_eq!(insertion("zebu \"", "", "!a"), new("\"\"'!'\"a"));
        assert_eq!(insertion("zebu 'a", "a", "a'b$"), new("a'\\''b$"));
        assert_eq!(insertion("zebu '", "", "'"), new("''\\'''"));
        assert_eq!(insertion("zebu a='", "", "b"), None);
    }
}
