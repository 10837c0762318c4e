//! A B B A: the contenders of a cell run in turn, and each round begins with another one, so that
//! what the machine does meanwhile, and what a run leaves to the next, hits all alike.

use super::cache::{self, Temperature};
use super::child::{self, Outcome};
use super::meter::Meter;
use super::series::Series;
use crate::error::Result;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// One program with its arguments in one cell.
#[derive(Debug, Clone)]
pub struct Contender {
    /// Its name: `zebu`, `QEMU`, …
    pub name: String,
    /// The flags that tell it from other contenders of that name.
    pub flags: String,
    /// Program and arguments.
    pub command: Vec<OsString>,
    /// Where its seconds are read.
    pub meter: Meter,
    /// Commands that make ready what it runs on, before each run and outside of its time.
    pub setup: Vec<Vec<OsString>>,
    /// The file it makes, or that its setup makes for it, if any.
    pub output: Option<PathBuf>,
}

impl Contender {
    /// A contender that needs no setup and makes no file.
    pub fn new(name: &str, flags: &str, command: Vec<OsString>, meter: Meter) -> Self {
        Contender {
            name: name.into(),
            flags: flags.into(),
            command,
            meter,
            setup: Vec::new(),
            output: None,
        }
    }
}

/// Judges a contender's first run: its output file, what it printed.
pub type Judge<'a> = dyn Fn(&Contender, &Outcome) -> Result<()> + 'a;

/// One cell of a table: contenders that do the same work.
pub struct Cell<'a> {
    /// Who runs, in this order.
    pub contenders: Vec<Contender>,
    /// What is read, to be brought to the same page-cache state before each run. Empty where
    /// O_DIRECT leaves the page cache out of it.
    pub inputs: Vec<PathBuf>,
    /// Whether the first run was right.
    pub judge: Option<Box<Judge<'a>>>,
}

/// How cells are run.
#[derive(Debug, Clone)]
pub struct Rules {
    /// Counted runs of each contender.
    pub runs: usize,
    /// Whether each has a run before these that is not counted.
    pub trial: bool,
    /// State of the page cache before each run.
    pub temperature: Temperature,
    /// The directory whose file system is written to.
    pub dir: PathBuf,
    /// Bytes of memory that a contender which makes a file finds at hand.
    pub room: u64,
}

impl Rules {
    /// Rounds in all: a trial that is not counted, if there is one, then those that are.
    pub fn rounds(&self) -> usize {
        self.runs + usize::from(self.trial)
    }
}

impl Cell<'_> {
    /// A series without figures for each contender.
    pub fn series(&self) -> Vec<Series> {
        (self.contenders.iter())
            .map(|c| Series {
                name: c.name.clone(),
                flags: c.flags.clone(),
                ..Series::default()
            })
            .collect()
    }
}

/// Runs a cell in rounds. Whoever fails is left out with the reason.
pub fn alternate(rules: &Rules, cell: &Cell<'_>) -> Vec<Series> {
    let mut all = cell.series();
    for number in 0..rules.rounds() {
        round(rules, cell, number, &mut all);
    }
    let _ = remove_outputs(cell);
    all
}

/// Round `number` of a cell, in which every contender runs once. In the first round, 0, the results
/// are judged.
pub fn round(rules: &Rules, cell: &Cell<'_>, number: usize, all: &mut [Series]) {
    let counted = number >= usize::from(rules.trial);
    let count = all.len();
    for i in 0..count {
        let i = (i + number) % count;
        let (contender, series) = (&cell.contenders[i], &mut all[i]);
        if series.failure.is_some() {
            continue;
        }
        match once(rules, cell, contender, number == 0) {
            Ok((seconds, outcome)) if counted => {
                series.seconds.push(seconds);
                series.cpu.push(contender.meter.cpu(&outcome));
                series.peak = series.peak.max(outcome.peak);
            }
            Ok(_) => {}
            Err(e) => series.failure = Some(e.to_string()),
        }
    }
}

fn once(
    rules: &Rules,
    cell: &Cell<'_>,
    contender: &Contender,
    first: bool,
) -> Result<(f64, Outcome)> {
    let writes = remove_outputs(cell);
    if writes {
        cache::settle(&rules.dir)?;
    }
    let scratch = scratch(&rules.dir);
    for command in &contender.setup {
        child::run(command, &scratch)?;
    }
    cache::prepare(&cell.inputs, rules.temperature)?;
    if writes {
        cache::pages_at_hand(rules.room);
    }
    let outcome = child::run(&contender.command, &scratch)?;
    let seconds = contender.meter.seconds(&outcome)?;
    if let (true, Some(judge)) = (first, &cell.judge) {
        judge(contender, &outcome)?;
    }
    Ok((seconds, outcome))
}

/// Removes what contenders made; removed before it is written back it costs the device nothing.
/// Tells whether this cell writes at all.
fn remove_outputs(cell: &Cell<'_>) -> bool {
    let mut writes = false;
    for path in cell.contenders.iter().filter_map(|c| c.output.as_ref()) {
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

    fn rules(name: &str) -> Rules {
        let dir =
            std::env::temp_dir().join(format!("zebu-bench-alt-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Rules {
            runs: 2,
            trial: true,
            temperature: Temperature::Hot,
            dir,
            room: 1 << 20,
        }
    }

    fn contender(name: &str, script: &str) -> Contender {
        Contender::new(name, "", child::command(["sh", "-c", script]), Meter::Wall)
    }

    #[test]
    fn contenders_take_turns_and_the_trial_is_not_counted() {
        let rules = rules("turns");
        let log = rules.dir.join("log");
        let write = |c: char| format!("printf {c} >> '{}'", log.display());
        let cell = Cell {
            contenders: vec![contender("a", &write('a')), contender("b", &write('b'))],
            inputs: vec![],
            judge: None,
        };
        let all = alternate(&rules, &cell);
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "abbaab");
        assert!(all.iter().all(|s| s.seconds.len() == 2 && s.cpu.len() == 2));
        std::fs::remove_dir_all(rules.dir).unwrap();
    }

    #[test]
    fn what_a_run_needs_is_made_before_each_and_removed_after_the_last() {
        let rules = Rules {
            trial: false,
            ..rules("setup")
        };
        let file = rules.dir.join("f");
        let grow = |c: char| format!("printf {c} >> '{}'", file.display());
        let mut one = contender(
            "a",
            &format!("{}; test $(cat '{}') = ab", grow('b'), file.display()),
        );
        one.setup = vec![child::command(["sh", "-c", &grow('a')])];
        one.output = Some(file.clone());
        let cell = Cell {
            contenders: vec![one],
            inputs: vec![],
            judge: None,
        };
        let all = alternate(&rules, &cell);
        assert_eq!(all[0].failure, None);
        assert_eq!(all[0].seconds.len(), 2);
        assert!(!file.exists());
        std::fs::remove_dir_all(rules.dir).unwrap();
    }

    #[test]
    fn whoever_fails_or_is_judged_wrong_is_left_out_with_the_reason() {
        let rules = rules("fail");
        let cell = Cell {
            contenders: vec![
                contender("good", "true"),
                contender("bad", "exit 2"),
                contender("wrong", "true"),
            ],
            inputs: vec![],
            judge: Some(Box::new(|c, _| {
                if c.name == "wrong" {
                    Err(Error::new("output differs"))
                } else {
                    Ok(())
                }
            })),
        };
        let all = alternate(&rules, &cell);
        assert!(all[0].ok());
        assert_eq!(all[1].failure.as_deref(), Some("exit status 2"));
        assert_eq!(all[2].failure.as_deref(), Some("output differs"));
        std::fs::remove_dir_all(rules.dir).unwrap();
    }
}
