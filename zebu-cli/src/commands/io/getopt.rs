//! Options as getopt_long(3) reads them: short ones together (`-qP 7`), long
//! ones by any unambiguous start, options after arguments, `--` to end them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::arguments::block_cache;

/// A long option: its name, whether it takes a value, and the letter that
/// [`Getopt`] reports for it.
pub type Long = (&'static str, Takes, char);

/// Whether a long option takes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// No.
    Nothing,
    /// Always: after `=`, or the next argument.
    Value,
    /// After `=` only.
    ValueOrNothing,
}

/// An iterator over the options of one program or command. Arguments with file names are `OsStr`,
/// others `str`.
pub struct Getopt<'a, T: Word + ?Sized = str> {
    args: &'a [&'a T],
    /// Letters, one that takes a value followed by `:`.
    short: &'static str,
    long: &'static [Long],
    next: usize,
    /// What is left of a word of short options.
    word: Option<&'a T>,
    rest: Vec<&'a T>,
}

/// An argument.
pub trait Word: AsRef<OsStr> {
    /// The same from this byte on, which follows a whole character.
    fn after(&self, at: usize) -> &Self;
}

impl Word for str {
    fn after(&self, at: usize) -> &str {
        &self[at..]
    }
}

impl Word for OsStr {
    fn after(&self, at: usize) -> &OsStr {
        OsStr::from_bytes(&self.as_bytes()[at..])
    }
}

/// An option that was given: its letter, and its value if it takes one.
pub type Given<'a, T = str> = (char, Option<&'a T>);

impl<'a, T: Word + ?Sized> Getopt<'a, T> {
    /// Options of `args` by `short` (`"vP:"`) and `long`.
    pub fn new(args: &'a [&'a T], short: &'static str, long: &'static [Long]) -> Self {
        Getopt {
            args,
            short,
            long,
            next: 0,
            word: None,
            rest: Vec::new(),
        }
    }

    /// The arguments that are not options. Must be called after the iteration.
    pub fn into_rest(self) -> Vec<&'a T> {
        self.rest
    }

    /// The value of an option: the rest of its word, or the next argument.
    fn value(&mut self) -> Option<&'a T> {
        let value = *self.args.get(self.next)?;
        self.next += 1;
        Some(value)
    }

    fn short_option(&mut self, word: &'a T) -> Result<Given<'a, T>, String> {
        // What is not UTF-8 is not an option and ends the word.
        let letters = word.as_ref().to_string_lossy();
        let letter = letters.chars().next().unwrap_or_default();
        let length = letter.len_utf8();
        self.word = match word.as_ref().len() > length {
            true => Some(word.after(length)),
            false => None,
        };
        let takes_value = match self.short.find(letter).filter(|_| letter != ':') {
            Some(at) => self.short[at + length..].starts_with(':'),
            None => return Err(format!("invalid option -- '{letter}'")),
        };
        if !takes_value {
            return Ok((letter, None));
        }
        match self.word.take().or_else(|| self.value()) {
            Some(value) => Ok((letter, Some(value))),
            None => Err(format!("option requires an argument -- '{letter}'")),
        }
    }

    /// `word` begins with the two dashes.
    fn long_option(&mut self, word: &'a T) -> Result<Given<'a, T>, String> {
        let bytes = word.as_ref().as_bytes();
        let equals = bytes.iter().position(|b| *b == b'=');
        let name = String::from_utf8_lossy(&bytes[2..equals.unwrap_or(bytes.len())]);
        let value = equals.map(|at| word.after(at + 1));
        let text = String::from_utf8_lossy(&bytes[2..]);
        let &(full, takes, letter) = self.find_long(&name, &text)?;
        match (takes, value) {
            (Takes::Value | Takes::ValueOrNothing, Some(value)) => Ok((letter, Some(value))),
            (Takes::Value, None) => match self.value() {
                Some(value) => Ok((letter, Some(value))),
                None => Err(format!("option '--{full}' requires an argument")),
            },
            (Takes::Nothing, Some(_)) => {
                Err(format!("option '--{full}' doesn't allow an argument"))
            }
            (Takes::Nothing | Takes::ValueOrNothing, None) => Ok((letter, None)),
        }
    }

    fn find_long(&self, name: &str, text: &str) -> Result<&'static Long, String> {
        if let Some(exact) = self.long.iter().find(|l| l.0 == name) {
            return Ok(exact);
        }
        let meant = self.long.iter().filter(|l| l.0.starts_with(name));
        // An abbreviation that is unique in QEMU's program is here as well.
        let (own, theirs): (Vec<&Long>, Vec<&Long>) =
            meant.partition(|l| block_cache::is_option(l.0));
        match (&*theirs, &*own) {
            (&[one], _) | ([], &[one]) => Ok(one),
            ([], []) => Err(format!("unrecognized option '--{text}'")),
            ([a, b, ..], _) | ([], [a, b, ..]) => Err(format!(
                "option '--{text}' is ambiguous; possibilities: '--{}' '--{}'",
                a.0, b.0
            )),
        }
    }
}

impl<'a, T: Word + ?Sized> Iterator for Getopt<'a, T> {
    /// The option, or what is wrong with it in getopt's words.
    type Item = Result<Given<'a, T>, String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(word) = self.word.take() {
                return Some(self.short_option(word));
            }
            let arg = self.value()?;
            let bytes = arg.as_ref().as_bytes();
            if bytes == b"--" {
                self.rest.extend(&self.args[self.next..]);
                self.next = self.args.len();
            } else if bytes.starts_with(b"--") && !self.long.is_empty() {
                return Some(self.long_option(arg));
            } else if bytes.len() > 1 && bytes[0] == b'-' {
                self.word = Some(arg.after(1));
            } else {
                self.rest.push(arg);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against options read otherwise than the shell scripts that give
    //! them mean.
    use super::*;

    type Outcome = (Vec<(char, Option<String>)>, Vec<String>, Option<String>);

    fn parse(line: &str) -> Outcome {
        const LONG: &[Long] = &[
            ("count", Takes::Value, 'c'),
            ("quiet", Takes::Nothing, 'q'),
            ("co", Takes::Nothing, 'o'),
            ("maybe", Takes::ValueOrNothing, 'm'),
        ];
        let args: Vec<&str> = line.split(' ').filter(|a| !a.is_empty()).collect();
        let mut options = Getopt::new(&args, "qvP:", LONG);
        let (mut given, mut error) = (Vec::new(), None);
        for option in options.by_ref() {
            match option {
                Ok((letter, value)) => given.push((letter, value.map(str::to_owned))),
                Err(e) => {
                    error = Some(e);
                    break;
                }
            }
        }
        let rest = options.into_rest().iter().map(|s| s.to_string()).collect();
        (given, rest, error)
    }

    #[test]
    fn options_and_arguments_mix() {
        let (given, rest, error) = parse("0 -qP 7 1k -v -- -x");
        assert_eq!(given, [('q', None), ('P', Some("7".into())), ('v', None)]);
        assert_eq!(rest, ["0", "1k", "-x"]);
        assert_eq!(error, None);
        assert_eq!(parse("-P0x5").0, [('P', Some("0x5".into()))]);
        assert_eq!(parse("- a").1, ["-", "a"]);
    }

    #[test]
    fn long_options_may_be_shortened() {
        assert_eq!(parse("--cou=3").0, [('c', Some("3".into()))]);
        assert_eq!(parse("--count 3").0, [('c', Some("3".into()))]);
        assert_eq!(parse("--co").0, [('o', None)]);
        assert_eq!(parse("--maybe=3 4").0, [('m', Some("3".into()))]);
        assert_eq!(parse("--maybe 4").0, [('m', None)]);
        assert_eq!(parse("--qui").0, [('q', None)]);
    }

    #[test]
    fn errors_are_named() {
        let error = |line| parse(line).2.unwrap_or_default();
        assert_eq!(error("-z"), "invalid option -- 'z'");
        assert_eq!(error("-:"), "invalid option -- ':'");
        assert_eq!(error("-P"), "option requires an argument -- 'P'");
        assert_eq!(error("--no"), "unrecognized option '--no'");
        assert_eq!(error("--count"), "option '--count' requires an argument");
        assert_eq!(
            error("--quiet=1"),
            "option '--quiet' doesn't allow an argument"
        );
        assert!(error("--c").contains("ambiguous"));
    }
}
