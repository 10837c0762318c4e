//! Options as getopt_long(3) reads them: short ones together (`-qP 7`), long
//! ones by any unambiguous start, options after arguments, `--` to end them.

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

/// Goes through the arguments of one program or command.
pub struct Getopt<'a> {
    args: &'a [&'a str],
    /// Letters, one that takes a value followed by `:`.
    short: &'static str,
    long: &'static [Long],
    next: usize,
    /// What is left of a word of short options.
    word: &'a str,
    rest: Vec<&'a str>,
}

/// An option that was given: its letter, and its value if it takes one.
pub type Given<'a> = (char, Option<&'a str>);

impl<'a> Getopt<'a> {
    /// Options of `args` by `short` (`"vP:"`) and `long`.
    pub fn new(args: &'a [&'a str], short: &'static str, long: &'static [Long]) -> Self {
        Getopt {
            args,
            short,
            long,
            next: 0,
            word: "",
            rest: Vec::new(),
        }
    }

    /// The arguments that are no options, once all options were taken.
    pub fn into_rest(self) -> Vec<&'a str> {
        self.rest
    }

    /// The value of an option: the rest of its word, or the next argument.
    fn value(&mut self) -> Option<&'a str> {
        let value = *self.args.get(self.next)?;
        self.next += 1;
        Some(value)
    }

    fn short_option(&mut self) -> Result<Given<'a>, String> {
        let mut letters = self.word.chars();
        let letter = letters.next().unwrap_or_default();
        self.word = letters.as_str();
        let takes_value = match self.short.find(letter).filter(|_| letter != ':') {
            Some(at) => self.short[at + letter.len_utf8()..].starts_with(':'),
            None => return Err(format!("invalid option -- '{letter}'")),
        };
        if !takes_value {
            return Ok((letter, None));
        }
        let value = match std::mem::take(&mut self.word) {
            "" => self.value(),
            rest => Some(rest),
        };
        match value {
            Some(value) => Ok((letter, Some(value))),
            None => Err(format!("option requires an argument -- '{letter}'")),
        }
    }

    fn long_option(&mut self, text: &'a str) -> Result<Given<'a>, String> {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (text, None),
        };
        let &(full, takes, letter) = self.find_long(name, text)?;
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
        let mut candidates = self.long.iter().filter(|l| l.0.starts_with(name));
        match (candidates.next(), candidates.next()) {
            (Some(one), None) => Ok(one),
            (None, _) => Err(format!("unrecognized option '--{text}'")),
            (Some(a), Some(b)) => Err(format!(
                "option '--{text}' is ambiguous; possibilities: '--{}' '--{}'",
                a.0, b.0
            )),
        }
    }
}

impl<'a> Iterator for Getopt<'a> {
    /// The option, or what is wrong with it in getopt's words.
    type Item = Result<Given<'a>, String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if !self.word.is_empty() {
                return Some(self.short_option());
            }
            let arg = self.value()?;
            if arg == "--" {
                self.rest.extend(&self.args[self.next..]);
                self.next = self.args.len();
            } else if let Some(name) = arg.strip_prefix("--").filter(|_| !self.long.is_empty()) {
                return Some(self.long_option(name));
            } else if arg.len() > 1 && arg.starts_with('-') {
                self.word = &arg[1..];
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
