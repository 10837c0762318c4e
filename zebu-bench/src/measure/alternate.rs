//! A B B A: the programs of a row run in turn, and each round begins with another one, so that
//! what the machine does meanwhile, and what a run leaves to the next, affects all alike.

use super::cache;
use super::child::{self, Outcome};
use super::meter::Meter;
use super::stats::least;
use crate::error::Result;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// One program with its arguments.
#[derive(Debug, Clone)]
pub struct Program {
    /// Its name: `zebu`, `QEMU`, …
    pub name: String,
    /// The flags that distinguish it from other variants of that name.
    pub flags: String,
    /// Program and arguments.
    pub command: Vec<OsString>,
    /// Where its seconds are read.
    pub meter: Meter,
    /// Commands that prepare what it runs on, before each run and outside of its time.
    pub setup: Vec<Vec<OsString>>,
    /// The file it makes, or that its setup makes for it, if any.
    pub output: Option<PathBuf>,
}

impl Program {
    /// A program that needs no setup and makes no file.
    pub fn new(name: &str, flags: &str, command: Vec<OsString>, meter: Meter) -> Self {
        Program {
            name: name.into(),
            flags: flags.into(),
            command,
            meter,
            setup: Vec::new(),
            output: None,
        }
    }

    /// The same with its output file as the last argument.
    pub fn to(mut self, output: PathBuf) -> Self {
        self.command.push(output.clone().into());
        self.output = Some(output);
        self
    }
}

/// Judges the result of a program's first run by its output file.
pub type Judge<'a> = dyn Fn(&Program) -> Result<()> + 'a;

/// One row of a table: programs that do the same work.
pub struct Case<'a> {
    /// What runs, in this order.
    pub programs: Vec<Program>,
    /// What is read, to be brought into the page cache before each run. Empty where O_DIRECT
    /// leaves the page cache out of it.
    pub inputs: Vec<PathBuf>,
    /// Whether the first run was right.
    pub judge: Option<&'a Judge<'a>>,
}

/// How cases are run.
#[derive(Debug, Clone)]
pub struct Rules {
    /// Runs of each program.
    pub runs: usize,
    /// The directory whose file system is written to.
    pub dir: PathBuf,
    /// Bytes of free memory that a program which makes a file finds, see [`cache::touch_pages`].
    pub free_pages: u64,
}

/// The runs of one program in one case, or why there are none.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// The program's name.
    pub name: String,
    /// The flags that distinguish it from the same program's other variants.
    pub flags: String,
    /// Seconds of each run, by the program's meter.
    pub seconds: Vec<f64>,
    /// Peak memory of each run, bytes.
    pub peak: Vec<f64>,
    /// Why it was left out, if it was.
    pub failure: Option<String>,
}

impl Series {
    /// Whether it has figures.
    pub fn ok(&self) -> bool {
        self.failure.is_none() && !self.seconds.is_empty()
    }

    /// Seconds of the fastest run; NaN if it failed.
    pub fn least(&self) -> f64 {
        match self.ok() {
            true => least(&self.seconds),
            false => f64::NAN,
        }
    }

    /// Name and flags.
    pub fn label(&self) -> String {
        format!("{} {}", self.name, self.flags)
            .trim_end()
            .to_owned()
    }
}

/// Runs a case. A program that fails is left out with the reason.
pub fn alternate(rules: &Rules, case: &Case<'_>) -> Vec<Series> {
    let mut all: Vec<Series> = (case.programs.iter())
        .map(|p| Series {
            name: p.name.clone(),
            flags: p.flags.clone(),
            ..Series::default()
        })
        .collect();
    let count = all.len();
    for round in 0..rules.runs {
        for i in 0..count {
            let i = (i + round) % count;
            let (program, series) = (&case.programs[i], &mut all[i]);
            if series.failure.is_some() {
                continue;
            }
            match once(rules, case, program, round == 0) {
                Ok((seconds, outcome)) => {
                    series.seconds.push(seconds);
                    series.peak.push(outcome.peak as f64);
                }
                Err(e) => series.failure = Some(e.to_string()),
            }
        }
    }
    remove_outputs(case);
    all
}

fn once(rules: &Rules, case: &Case<'_>, program: &Program, first: bool) -> Result<(f64, Outcome)> {
    let writes = remove_outputs(case);
    if writes {
        cache::write_back(&rules.dir)?;
    }
    let scratch = scratch(&rules.dir);
    for command in &program.setup {
        child::run(command, &scratch)?;
    }
    case.inputs.iter().try_for_each(|p| cache::read_in(p))?;
    if writes {
        cache::touch_pages(rules.free_pages);
    }
    let outcome = child::run(&program.command, &scratch)?;
    let seconds = program.meter.seconds(&outcome)?;
    if let (true, Some(judge)) = (first, case.judge) {
        judge(program)?;
    }
    Ok((seconds, outcome))
}

/// Removes what programs made; removed before it is written back it costs the device nothing.
/// Returns whether this case writes at all.
fn remove_outputs(case: &Case<'_>) -> bool {
    let mut writes = false;
    for path in case.programs.iter().filter_map(|p| p.output.as_ref()) {
        writes = true;
        let _ = std::fs::remove_file(path);
    }
    writes
}

/// Where the output of programs goes.
fn scratch(dir: &Path) -> PathBuf {
    let path = dir.join("scratch");
    let _ = std::fs::create_dir_all(&path);
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn rules(name: &str, runs: usize) -> Rules {
        let dir =
            std::env::temp_dir().join(format!("zebu-bench-alt-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Rules {
            runs,
            dir,
            free_pages: 1 << 20,
        }
    }

    fn program(name: &str, script: &str) -> Program {
        Program::new(name, "", child::command(["sh", "-c", script]), Meter::Wall)
    }

    #[test]
    fn programs_run_in_turn() {
        let rules = rules("turns", 3);
        let log = rules.dir.join("log");
        let write = |c: char| format!("printf {c} >> '{}'", log.display());
        let case = Case {
            programs: vec![program("a", &write('a')), program("b", &write('b'))],
            inputs: vec![],
            judge: None,
        };
        let all = alternate(&rules, &case);
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "abbaab");
        assert!(
            all.iter()
                .all(|s| s.seconds.len() == 3 && s.peak.len() == 3)
        );
        std::fs::remove_dir_all(rules.dir).unwrap();
    }

    #[test]
    fn what_fails_or_is_judged_wrong_is_left_out_with_the_reason() {
        let rules = rules("fail", 2);
        let judge = |p: &Program| match p.name == "wrong" {
            true => Err(Error::new("output differs")),
            false => Ok(()),
        };
        let case = Case {
            programs: vec![
                program("good", "true"),
                program("bad", "exit 2"),
                program("wrong", "true"),
            ],
            inputs: vec![],
            judge: Some(&judge),
        };
        let all = alternate(&rules, &case);
        assert!(all[0].ok());
        assert_eq!(all[1].failure.as_deref(), Some("exit status 2"));
        assert_eq!(all[2].failure.as_deref(), Some("output differs"));
        std::fs::remove_dir_all(rules.dir).unwrap();
    }
}
