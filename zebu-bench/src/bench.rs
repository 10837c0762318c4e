//! What every experiment is given: the programs, the rules, the sizes.

use crate::error::Result;
use crate::measure::alternate::Rules;
use crate::measure::cache::Temperature;
use crate::measure::child::{self, command};
use crate::measure::meter::Meter;
use crate::measure::{Cell, Contender, Series, alternate};
use crate::options::{Options, Writes};
use crate::peers::Peers;
use crate::units::{GIB, MIB};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The suite's surroundings.
#[derive(Debug)]
pub struct Bench {
    /// The command line.
    pub options: Options,
    /// Where images and outputs lie, absolute.
    pub dir: PathBuf,
    /// The zebu under test.
    pub zebu: PathBuf,
    /// The programs to measure against.
    pub peers: Peers,
}

/// Runs of a cell with one request in flight.
const RUNS_OF_ONE_IN_FLIGHT: usize = 9;

impl Bench {
    /// The size of images where the experiment does not set one.
    pub fn size(&self) -> u64 {
        self.options.size.unwrap_or(if self.options.quick {
            256 * MIB
        } else {
            2 * GIB
        })
    }

    /// The size of images that are full of data, for requests past the page cache.
    pub fn filled_size(&self) -> u64 {
        2 * self.size().max(512 * MIB)
    }

    /// How long a run is to last that may last as long as one likes: what the command line
    /// says, else `quick` or `whole`.
    pub fn seconds(&self, quick: f64, whole: f64) -> f64 {
        let usual = if self.options.quick { quick } else { whole };
        self.options.seconds.unwrap_or(usual)
    }

    /// Where the output of programs that are not measured goes.
    pub fn scratch(&self) -> PathBuf {
        let dir = self.dir.join("scratch");
        let _ = std::fs::create_dir_all(&dir);
        dir
    }

    /// How cells are run.
    pub fn rules(&self) -> Rules {
        Rules {
            runs: self.options.runs.unwrap_or(5).max(1),
            // With --quick there is no time for it: the median of five has room for a first run
            // that is slower.
            trial: !self.options.quick && !self.options.no_trial,
            temperature: if self.options.cold {
                Temperature::Cold
            } else {
                Temperature::Hot
            },
            dir: self.dir.clone(),
            // What is read, when it is cold, and what is written.
            room: 2 * self.size(),
        }
    }

    /// Runs a cell by the rules.
    pub fn alternate(&self, cell: &Cell<'_>) -> Vec<Series> {
        alternate(&self.rules(), cell)
    }

    /// The same for requests of which `depth` are in flight. With one, programs that wait for the
    /// disk differ by less than two runs of one do, so there are more runs.
    pub fn alternate_requests(&self, depth: u64, cell: &Cell<'_>) -> Vec<Series> {
        alternate(&self.rules_of_requests(depth), cell)
    }

    /// Its rules.
    pub fn rules_of_requests(&self, depth: u64) -> Rules {
        let mut rules = self.rules();
        if depth == 1 && self.options.runs.is_none() && !self.options.quick {
            rules.runs = RUNS_OF_ONE_IN_FLIGHT;
        }
        rules
    }

    /// A place for the output of a contender. Each has its own, so that nobody writes where
    /// another one's pages lie.
    pub fn output(&self, name: &str) -> PathBuf {
        let dir = self.dir.join("out");
        let _ = std::fs::create_dir_all(&dir);
        dir.join(name)
    }

    /// zebu as a contender. `flags` tell it from its other contenders and stand in its command
    /// line behind `verb`.
    pub fn zebu(&self, verb: &str, flags: &str, rest: &[&Path]) -> Contender {
        contender("zebu", &self.zebu, verb, flags, rest)
    }

    /// QEMU as a contender, likewise.
    pub fn qemu(&self, verb: &str, flags: &str, rest: &[&Path]) -> Contender {
        contender("QEMU", &self.peers.qemu.img, verb, flags, rest)
    }

    /// Whether write cells are run. `image` is one that may be written to with 0xff.
    pub fn writes(&self, image: &Path) -> bool {
        match self.options.writes {
            Writes::Always => true,
            Writes::Never => false,
            Writes::Auto => self.try_write(image).is_ok(),
        }
    }

    fn try_write(&self, image: &Path) -> Result<()> {
        let mut line = command([self.zebu.as_os_str()]);
        line.extend(words("bench -c 1 -d 1 -s 64k -f qcow2 -w --pattern 255"));
        line.push(image.into());
        child::run(&line, &self.scratch()).map(|_| ())
    }
}

fn contender(name: &str, program: &Path, verb: &str, flags: &str, rest: &[&Path]) -> Contender {
    let mut line = command([program.as_os_str()]);
    line.extend(words(verb).chain(words(flags)));
    line.extend(rest.iter().map(|p| p.as_os_str().to_owned()));
    let meter = match verb.starts_with("bench") {
        true => Meter::Bench,
        false => Meter::Wall,
    };
    Contender::new(name, flags, line, meter)
}

fn words(text: &str) -> impl Iterator<Item = OsString> + '_ {
    text.split_whitespace().map(OsString::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_is_program_verb_flags_and_files() {
        let c = contender(
            "QEMU",
            Path::new("qemu-img"),
            "convert -O raw",
            "-m 16 -W",
            &[Path::new("a b"), Path::new("c")],
        );
        assert_eq!(
            c.command,
            [
                "qemu-img", "convert", "-O", "raw", "-m", "16", "-W", "a b", "c"
            ]
            .map(OsString::from)
        );
        assert_eq!(c.meter, Meter::Wall);
        assert_eq!(
            contender("zebu", Path::new("z"), "bench", "", &[]).meter,
            Meter::Bench
        );
    }
}
