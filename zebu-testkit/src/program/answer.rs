//! Answers of programs, and how those of zebu and QEMU are compared.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Lab;
use super::programs::peer;
use crate::newest_words;

/// The exit status and the output of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The exit status; 128 + signal when one ended it.
    pub status: i32,
    /// Standard output, as [`text`](super::bytes::text).
    pub out: String,
    /// Standard error; invalid UTF-8 is replaced.
    pub err: String,
}

impl Answer {
    /// Fails the test unless the status is 0.
    #[track_caller]
    pub fn ok(self, what: &str) -> Self {
        assert!(self.status == 0, "{what}: {self:#?}");
        self
    }

    /// Fails the test unless the program failed with this status and one line of
    /// message that begins with the program's name, and without a panic.
    #[track_caller]
    pub fn failed_with_one_line(&self, status: i32, what: &str) {
        self.orderly(what);
        assert!(
            self.status == status,
            "{what}: status {status} expected: {self:#?}"
        );
        let is_hint = |line: &&str| line.starts_with("hint: ");
        let lines: Vec<&str> = self.err.lines().filter(|line| !is_hint(line)).collect();
        assert!(
            lines.len() == 1,
            "{what}: one line on stderr expected: {self:#?}"
        );
        assert!(
            ["zebu:", "zebu io:", "qemu-img:", "qemu-io:"]
                .iter()
                .any(|name| lines[0].starts_with(name)),
            "{what}: the message must begin with the program's name: {self:#?}"
        );
    }

    /// As [`Answer::failed_with_one_line`] with status 1 and a message that has `text` in it.
    #[track_caller]
    pub fn fails_with(&self, text: &str) {
        self.failed_with_one_line(1, text);
        assert!(self.err.contains(text), "{text}: {self:#?}");
    }

    /// Fails the test if the program panicked or was ended by a signal, also by that
    /// of the time limit.
    #[track_caller]
    pub fn orderly(&self, what: &str) {
        assert!(
            self.status < 124 && !self.err.contains("panicked"),
            "{what}: a panic or a signal: {self:#?}"
        );
    }

    /// Whether QEMU crashed instead of answering. Then there is nothing to compare: it is counted and
    /// printed, and the test passes over the case.
    pub fn is_crash_of_qemu(&self, command: &str) -> bool {
        static CRASHES: AtomicU64 = AtomicU64::new(0);
        // One that the time limit kills is no crash.
        let crashed = self.status > 128 && self.status != 128 + libc::SIGKILL;
        if crashed {
            let count = 1 + CRASHES.fetch_add(1, Ordering::Relaxed);
            let message = self.err.lines().next().unwrap_or_default();
            println!(
                "passed over, QEMU crashed ({count}): status {}, {message} of {command}",
                self.status
            );
        }
        crashed
    }
}

/// Removes the reason of a read error: zebu says what is wrong where QEMU only has
/// "Input/output error". The offset stays.
fn without_reasons(text: &str) -> String {
    let mut kept = String::new();
    for line in text.split_inclusive('\n') {
        let found = line.find("rror while reading ").and_then(|at| {
            let length = line[at..].find(": ")?;
            Some(&line[..at + length])
        });
        match found {
            Some(start) => {
                kept.push_str(start);
                kept.push('\n');
            }
            None => kept.push_str(line),
        }
    }
    kept
}

/// Removes what zebu says about what to do next, which QEMU does not.
fn without_hints(text: &str) -> String {
    let lines = text.split_inclusive('\n');
    lines.filter(|line| !line.starts_with("hint: ")).collect()
}

/// Makes outputs of zebu and of older versions of QEMU comparable: removes
/// what versions 10 and 11 added, and renames what they renamed. With a current QEMU
/// the text is unchanged but for the program's name in messages.
pub fn comparable(text: &str) -> String {
    let mut text = without_hints(&without_reasons(&one_name(text)));
    if !peer().is_newest() {
        let since =
            |line: &&str| line.starts_with("  keep_data_file=") || line.starts_with("aio_discard ");
        let kept = text.split_inclusive('\n').filter(|line| !since(line));
        text = kept.map(newest_words).collect();
    }
    if peer().is_current() {
        return text;
    }
    let mut kept = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let indent = &line[..line.len() - line.trim_start().len()];
        if line.trim() == "\"children\": [" {
            let close = [format!("{indent}],"), format!("{indent}]")];
            for skipped in lines.by_ref() {
                if close.iter().any(|close| close == skipped) {
                    break;
                }
            }
            continue;
        }
        if line.starts_with("Child node '") {
            while lines.peek().is_some_and(|next| next.starts_with("    ")) {
                lines.next();
            }
            continue;
        }
        if ["detached header: ", "\"detached-header\": "]
            .iter()
            .any(|key| line.trim_start().starts_with(key))
        {
            continue;
        }
        let line = line
            .replace(", \"compressed\": false", "")
            .replace(", \"compressed\": true", "")
            .replace("[-abCqrv]", "[-abCqv]")
            .replace("[-Cqrv]", "[-Cqv]")
            .replace("[-Ciqrv]", "[-Ciqv]")
            .replace("[-bcCfnqruz]", "[-bcCfnquz]")
            .replace("[-Cfqr]", "[-Cfq]")
            .replace("[-Cfiqruz]", "[-Cfiquz]");
        kept.push_str(&snapshot_row(&line).unwrap_or(line));
        kept.push('\n');
    }
    if !text.ends_with('\n') {
        kept.pop();
    }
    kept
}

/// A row of the snapshot list in one form: version 10 made columns narrower, renamed
/// two of them, and writes hours of the VM clock with four digits.
fn snapshot_row(line: &str) -> Option<String> {
    if line.starts_with("ID ") && line.contains("TAG") {
        return Some("ID TAG VM_SIZE DATE VM_CLOCK ICOUNT".to_string());
    }
    let words: Vec<&str> = line.split_whitespace().collect();
    let clock = words.iter().position(|word| {
        word.len() >= 12 && word.matches(':').count() == 2 && word.contains('.')
    })?;
    if !line.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    let mut words: Vec<String> = words.into_iter().map(str::to_string).collect();
    words[clock] = words[clock].trim_start_matches('0').to_string();
    Some(words.join(" "))
}

/// Replaces the name of the program, which messages begin with.
fn one_name(text: &str) -> String {
    let mut named = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let rest = ["zebu io: ", "zebu: ", "qemu-img: ", "qemu-io: "]
            .iter()
            .find_map(|name| line.strip_prefix(name));
        if let Some(rest) = rest {
            named.push_str("PROGRAM: ");
            named.push_str(rest);
        } else {
            named.push_str(line);
        }
    }
    named
}

/// Runs a command with both programs and fails the test unless output, messages and
/// status are the same. Returns the answer of the program under test.
#[track_caller]
pub fn assert_same_answer(lab: &Lab, args: &[&str], what: &str) -> Answer {
    let ours = lab.zebu(args);
    let theirs = lab.qemu_img(args);
    compare_answers(&ours, &theirs, args, what);
    ours
}

/// Fails the test unless both answers are the same.
#[track_caller]
pub fn compare_answers(ours: &Answer, theirs: &Answer, args: &[&str], what: &str) {
    let command = args.join(" ");
    ours.orderly(what);
    for (name, ours, theirs) in [
        ("stdout", &ours.out, &theirs.out),
        ("stderr", &ours.err, &theirs.err),
    ] {
        let (ours, theirs) = (comparable(ours), comparable(theirs));
        assert!(
            ours == theirs,
            "{what}\n`{command}`: {name} differs\n--- ours\n{ours}\n--- QEMU's\n{theirs}\n--- first difference: {}",
            first_difference(&ours, &theirs)
        );
    }
    assert!(
        ours.status == theirs.status,
        "{what}\n`{command}`: status {} instead of {}: {ours:#?}",
        ours.status,
        theirs.status
    );
}

fn first_difference(ours: &str, theirs: &str) -> String {
    let (mut a, mut b) = (ours.lines(), theirs.lines());
    for number in 1.. {
        match (a.next(), b.next()) {
            (None, None) => break,
            (a, b) if a != b => return format!("line {number}: {a:?} instead of {b:?}"),
            _ => {}
        }
    }
    "in line endings".to_string()
}
