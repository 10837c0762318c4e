//! Help texts in lines that are not too long to read.

use std::io::{IsTerminal, stdout};

use rustix::termios::tcgetwinsize;

/// Columns of a line at most, also on wider terminals.
const COLUMNS: usize = 100;
/// Columns that there are at least, also on narrower ones.
const LEAST: usize = 40;

/// The text in lines of the terminal's width, and of at most 100 columns.
pub fn to_terminal(text: &str) -> String {
    let width = match stdout().is_terminal() {
        true => tcgetwinsize(stdout()).map_or(0, |size| usize::from(size.ws_col)),
        false => 0,
    };
    let columns = match width {
        0 => COLUMNS,
        width => width.clamp(LEAST, COLUMNS),
    };
    // Commands are not broken, since they are copied.
    let examples = text.find("\nExamples:\n").unwrap_or(text.len());
    to_columns(&text[..examples], columns) + &text[examples..]
}

/// The text in lines of at most `columns`: what does not fit goes on below the second column of the line,
/// if it has two, else below its start.
pub fn to_columns(text: &str, columns: usize) -> String {
    let mut out = String::new();
    for line in text.split_inclusive('\n') {
        let (mut rest, end) = match line.strip_suffix('\n') {
            Some(line) => (line.to_string(), "\n"),
            None => (line.to_string(), ""),
        };
        let indent = second_column(&rest).filter(|at| at + 20 <= columns);
        let indent = indent.unwrap_or_else(|| leading(&rest).min(columns / 2));
        while rest.chars().count() > columns {
            let Some(at) = break_at(&rest, indent, columns) else {
                break;
            };
            out.push_str(rest[..at].trim_end());
            out.push('\n');
            rest = format!("{:indent$}{}", "", rest[at..].trim_start());
        }
        out.push_str(&rest);
        out.push_str(end);
    }
    out
}

/// Columns before the first word.
fn leading(line: &str) -> usize {
    line.chars().take_while(|c| *c == ' ').count()
}

/// Where the text begins that is apart from what is before it.
fn second_column(line: &str) -> Option<usize> {
    let start = leading(line);
    let gap = line[start..].find("  ")? + start;
    let text = line[gap..].trim_start();
    (!text.is_empty()).then(|| line[..line.len() - text.len()].chars().count())
}

/// The byte behind the last blank in the first `columns`, which is not in the indentation.
fn break_at(line: &str, indent: usize, columns: usize) -> Option<usize> {
    let blanks = line.char_indices().take(columns + 1).enumerate();
    let blanks = blanks.filter(|(column, (_, c))| *c == ' ' && *column > indent);
    let last = blanks.last().map(|(_, (at, _))| at);
    last.or_else(|| {
        // A word that is longer than a line.
        let after = line.char_indices().skip(columns.max(indent + 1));
        after.filter(|(_, c)| *c == ' ').map(|(at, _)| at).next()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_go_on_below_themselves() {
        let text = "  -a, --all  one two three four five\nplain words that are long\n";
        assert_eq!(
            to_columns(text, 34),
            "  -a, --all  one two three four\n             five\nplain words that are long\n"
        );
        assert_eq!(
            to_columns("      six and seven", 12),
            "      six\n      and\n      seven"
        );
        assert_eq!(to_columns("aaaaaaaaaaaa b", 8), "aaaaaaaaaaaa\nb");
    }
}
