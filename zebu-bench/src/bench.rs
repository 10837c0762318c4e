//! What every experiment is given: the programs, the sizes, and how rows are measured.

use crate::error::{Context, Result};
use crate::measure::alternate::{Case, Rules, alternate};
use crate::measure::child::command;
use crate::measure::meter::Meter;
use crate::measure::{Program, Series};
use crate::options::Run;
use crate::peers::Peers;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The suite's surroundings.
#[derive(Debug)]
pub struct Bench {
    /// The command line.
    pub options: Run,
    /// Where images and outputs lie, absolute.
    pub dir: PathBuf,
    /// The zebu under test.
    pub zebu: PathBuf,
    /// The programs to measure against.
    pub peers: Peers,
}

/// A probe must last this long to measure a rate: below 10 ms the clock of bench is too coarse.
const PROBE_SECONDS: f64 = 0.04;
/// No probe has more than this many times the requests of the first.
const PROBE_GROWTH: u64 = 64;

/// Requests of one kind, of which any number can be run.
pub struct Requests<'a> {
    /// How many are in flight.
    pub depth: u64,
    /// Requests of the first probe.
    pub first: u64,
    /// At most so many in a run.
    pub most: u64,
    /// The programs for a number of requests.
    pub make: &'a dyn Fn(u64) -> Vec<Program>,
}

impl Bench {
    /// Where the output of programs that are not measured goes.
    pub fn scratch(&self) -> PathBuf {
        let dir = self.dir.join("scratch");
        let _ = std::fs::create_dir_all(&dir);
        dir
    }

    fn rules(&self, runs: usize) -> Rules {
        Rules {
            runs,
            dir: self.dir.clone(),
            free_pages: self.options.size,
        }
    }

    /// Measures a row. Of several programs of one name (QEMU with different flags) the one that is
    /// fastest in one run is measured.
    pub fn measure(&self, mut case: Case<'_>) -> Vec<Series> {
        let (variants, mut programs) = variants(case.programs);
        let tried = Case {
            programs: variants,
            inputs: case.inputs.clone(),
            judge: None,
        };
        let seconds: Vec<f64> = alternate(&self.rules(1), &tried)
            .iter()
            .map(Series::least)
            .collect();
        case.programs = fastest_of_each(tried.programs, &seconds);
        case.programs.append(&mut programs);
        alternate(&self.rules(self.options.runs), &case)
    }

    /// Measures requests: how many a run has, and what came out. `judge` as in [`Case`].
    pub fn measure_requests(
        &self,
        requests: &Requests<'_>,
        inputs: &[PathBuf],
        judge: Option<&crate::measure::alternate::Judge<'_>>,
    ) -> (u64, Vec<Series>) {
        let case = |count| Case {
            programs: (requests.make)(count),
            inputs: inputs.to_vec(),
            judge,
        };
        let (count, seconds) = match self.probe(requests, &case) {
            Ok(probed) => probed,
            Err(failed) => return (1, failed),
        };
        let mut case = case(count);
        case.programs = fastest_of_each(case.programs, &seconds);
        (count, alternate(&self.rules(self.options.runs), &case))
    }

    /// The number of requests with which runs last about as long as the command line says, and the
    /// seconds of each program in a short run; what failed, if all did. Where the programs differ,
    /// some last longer and some shorter.
    fn probe<'a>(
        &self,
        requests: &Requests<'_>,
        case: &dyn Fn(u64) -> Case<'a>,
    ) -> std::result::Result<(u64, Vec<f64>), Vec<Series>> {
        let Requests {
            depth, first, most, ..
        } = *requests;
        let wanted = self.options.seconds;
        let mut count = first.min(most).max(depth);
        loop {
            let unjudged = Case {
                judge: None,
                ..case(count)
            };
            let all = alternate(&self.rules(1), &unjudged);
            let seconds: Vec<f64> = all.iter().map(Series::least).collect();
            let ran = seconds.iter().copied().filter(|s| s.is_finite());
            let (least, greatest) =
                ran.fold((f64::INFINITY, 0f64), |(a, b), s| (a.min(s), b.max(s)));
            if greatest == 0.0 {
                return Err(all);
            }
            let largest = count >= most.min(first * PROBE_GROWTH);
            if least >= PROBE_SECONDS || greatest >= wanted || largest {
                let middle = (least * greatest).sqrt();
                let count = (count as f64 * wanted / middle) as u64;
                let count = count.clamp(depth, most.max(depth)).next_multiple_of(depth);
                return Ok((count, seconds));
            }
            count = (count * 8).min(most).max(depth);
        }
    }

    /// A place for the output of a program. Each has its own, so that none writes where another
    /// one's pages lie.
    pub fn output(&self, name: &str) -> PathBuf {
        let dir = self.dir.join("out");
        let _ = std::fs::create_dir_all(&dir);
        dir.join(name)
    }

    /// zebu with these arguments; `flags` stand in its command line behind `verb`.
    pub fn zebu(&self, verb: &str, flags: &str, rest: &[&Path]) -> Program {
        program("zebu", &self.zebu, verb, flags, rest)
    }

    /// qemu-img likewise.
    pub fn qemu(&self, verb: &str, flags: &str, rest: &[&Path]) -> Program {
        program("QEMU", &self.peers.qemu.img, verb, flags, rest)
    }

    /// The program beside this one.
    pub fn own_program(&self, name: &str) -> Result<PathBuf> {
        let own = std::env::current_exe().context(|| "own path".into())?;
        Ok(own.with_file_name(name))
    }
}

/// The programs whose name occurs more than once, and the others.
fn variants(programs: Vec<Program>) -> (Vec<Program>, Vec<Program>) {
    let names: Vec<String> = programs.iter().map(|p| p.name.clone()).collect();
    let occurs = |name: &String| names.iter().filter(|n| *n == name).count();
    programs.into_iter().partition(|p| occurs(&p.name) > 1)
}

/// Of each name the program with the least seconds.
fn fastest_of_each(programs: Vec<Program>, seconds: &[f64]) -> Vec<Program> {
    let all: Vec<(Program, f64)> = programs.into_iter().zip(seconds.iter().copied()).collect();
    let is_fastest = |i: usize| {
        let (own, own_seconds) = &all[i];
        all.iter().enumerate().all(|(j, (other, seconds))| {
            let slower = seconds.is_nan() || own_seconds < seconds;
            j == i || other.name != own.name || slower || (own_seconds == seconds && i < j)
        })
    };
    let fastest: Vec<Program> = (0..all.len())
        .filter(|i| is_fastest(*i))
        .map(|i| all[i].0.clone())
        .collect();
    fastest
}

fn program(name: &str, path: &Path, verb: &str, flags: &str, rest: &[&Path]) -> Program {
    let mut line = command([path.as_os_str()]);
    line.extend(words(verb).chain(words(flags)));
    line.extend(rest.iter().map(|p| p.as_os_str().to_owned()));
    let meter = match verb.starts_with("bench") {
        true => Meter::Bench,
        false => Meter::Wall,
    };
    Program::new(name, flags, line, meter)
}

fn words(text: &str) -> impl Iterator<Item = OsString> + '_ {
    text.split_whitespace().map(OsString::from)
}

/// A step that scatters requests over an image: an odd number of blocks near 0.38 (the golden
/// section) of it. Odd, so on an image of 2^n blocks every block is visited before one comes
/// again; and less than the 2 GiB that bench allows.
pub fn scattering_step(size: u64, block: u64) -> u64 {
    let blocks = (size as f64 / block as f64 * 0.381_966) as u64;
    (blocks.min((1 << 31) / block - 2) | 1) * block
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{GIB, KIB, MIB};

    #[test]
    fn a_command_line_is_program_verb_flags_and_files() {
        let files = [Path::new("a b"), Path::new("c")];
        let c = program(
            "QEMU",
            Path::new("qemu-img"),
            "convert -O raw",
            "-m 16 -W",
            &files,
        );
        let wanted = [
            "qemu-img", "convert", "-O", "raw", "-m", "16", "-W", "a b", "c",
        ];
        assert_eq!(c.command, wanted.map(OsString::from));
        assert_eq!(c.meter, Meter::Wall);
        assert_eq!(
            program("zebu", Path::new("z"), "bench", "", &[]).meter,
            Meter::Bench
        );
    }

    #[test]
    fn of_several_variants_the_fastest_is_measured() {
        let one = |name: &str, flags: &str| program(name, Path::new("p"), "", flags, &[]);
        let all = vec![
            one("QEMU", "-n"),
            one("QEMU", "-i io_uring"),
            one("zebu", ""),
        ];
        let (two, one) = variants(all.clone());
        assert_eq!((two.len(), one.len()), (2, 1));
        let chosen = |seconds: &[f64]| -> Vec<String> {
            let fastest = fastest_of_each(all.clone(), seconds);
            fastest.into_iter().map(|p| p.name + &p.flags).collect()
        };
        assert_eq!(chosen(&[2.0, 1.0, 9.0]), ["QEMU-i io_uring", "zebu"]);
        assert_eq!(chosen(&[1.0, 1.0, 9.0]), ["QEMU-n", "zebu"]);
        assert_eq!(chosen(&[f64::NAN, 3.0, 9.0]), ["QEMU-i io_uring", "zebu"]);
    }

    #[test]
    fn the_step_visits_every_block_once_before_it_repeats() {
        let (size, block) = (64 * MIB, 4 * KIB);
        let step = scattering_step(size, block);
        let mut seen = vec![false; (size / block) as usize];
        let mut at = 0;
        for _ in 0..size / block {
            assert!(!std::mem::replace(&mut seen[(at / block) as usize], true));
            at = (at + step) % size;
        }
        for size in [GIB, 4 * GIB, 40 * GIB] {
            let step = scattering_step(size, block);
            assert!(step < 1 << 31 && (step / block) % 2 == 1);
        }
    }
}
