//! Two programs at once on one name: each of their system calls that opens, locks, changes, renames or
//! removes a file waits until the test lets it go on (`supervised.rs`), in an order that a seed gives.
//! Afterwards the files hold what one order of the two programs gives, or what the one that succeeded
//! gives alone.
//!
//! A run that fails prints its seed, the two commands and the order of their calls.

mod alone;
mod commands;
mod new_images;
mod supervised;
mod world;

use zebu_testkit::program::{self as common};

use std::collections::HashMap;
use std::fs::File;
use std::process::{Command, Stdio};

use commands::{COMMANDS, STATES};
use common::{Rng, cases, program};
use supervised::{Ended, Supervised};
use world::{Found, Templates, found, run};

/// A run: a state, two commands and the order of their calls.
struct Run {
    state: usize,
    pair: [usize; 2],
}

/// What a run gave.
struct Outcome {
    ended: [Ended; 2],
    found: Found,
    /// The calls, each with the number of its program.
    trace: Vec<String>,
}

/// An outcome without an order: which programs succeeded, and what the files hold.
type Serial = ([bool; 2], Found);

/// Which program goes on next, as long as both wait.
trait Schedule {
    fn next(&mut self) -> usize;
}

/// Turns of random lengths.
struct Turns {
    rng: Rng,
    /// The mean number of calls of a turn.
    mean: u64,
    now: usize,
}

impl Schedule for Turns {
    fn next(&mut self) -> usize {
        if self.rng.one_in(self.mean) {
            self.now = 1 - self.now;
        }
        self.now
    }
}

/// Program 0 makes so many calls, program 1 so many, and then program 0 the rest of its.
struct Held {
    first: usize,
    second: usize,
}

impl Schedule for Held {
    fn next(&mut self) -> usize {
        match (&mut self.first, &mut self.second) {
            (0, 0) => 0,
            (0, second) => {
                *second -= 1;
                1
            }
            (first, _) => {
                *first -= 1;
                0
            }
        }
    }
}

impl Run {
    fn random(rng: &mut Rng) -> Run {
        let command = |rng: &mut Rng| rng.below(COMMANDS.len() as u64) as usize;
        loop {
            let run = Run {
                state: rng.below(STATES.len() as u64) as usize,
                pair: [command(rng), command(rng)],
            };
            if run.has_one_content() {
                return run;
            }
        }
    }

    /// Whether its order determines all bytes of `t`. What writes to an image as to a raw disk shows the
    /// time and the random numbers in it.
    fn has_one_content(&self) -> bool {
        let words = self.pair.map(|command| COMMANDS[command].words);
        let has = |parts: &[&str]| {
            words
                .iter()
                .any(|words| parts.iter().any(|part| words.contains(part)))
        };
        let is_raw = has(&["io -f raw", "resize -f raw"]);
        !(is_raw && has(&["snapshot -c", "-O vmdk", "ova", "backup"]))
    }

    fn words(&self, number: usize) -> Vec<String> {
        COMMANDS[self.pair[number]].of(number)
    }

    /// Runs both at once.
    fn together(&self, templates: &Templates, schedule: &mut dyn Schedule) -> Outcome {
        let folder = templates.copy(self.state);
        let mut programs = [0, 1].map(|number| {
            let mut command = Command::new(program());
            command.args(self.words(number)).stdout(Stdio::null());
            let most = COMMANDS[self.pair[number]].most;
            Supervised::start(command, folder.path(), most).expect("start")
        });
        let mut trace = Vec::new();
        loop {
            for program in &mut programs {
                program.settle();
            }
            let next = match [0, 1].map(|number| programs[number].is_stopped()) {
                [true, true] => schedule.next(),
                [true, false] => 0,
                [false, true] => 1,
                [false, false] => match programs.iter().all(Supervised::has_ended) {
                    true => break,
                    false => continue,
                },
            };
            let what = programs[next].go_on();
            trace.push(format!("{next} {what}"));
        }
        Outcome {
            ended: programs.map(Supervised::ended),
            found: found(folder.path()),
            trace,
        }
    }

    /// Runs those of these numbers one after the other, if `is_made` with an empty file where `t` is not
    /// there. Without one, that has not succeeded.
    fn in_order(&self, templates: &Templates, order: &[usize], is_made: bool) -> Serial {
        let folder = templates.copy(self.state);
        if is_made && folder.path().join("t").symlink_metadata().is_err() {
            File::create(folder.path().join("t")).expect("an empty file");
        }
        let mut ended = [false; 2];
        for number in order {
            let most = COMMANDS[self.pair[*number]].most;
            ended[*number] = run(folder.path(), &self.words(*number), most).0 == 0;
        }
        (ended, found(folder.path()))
    }

    /// Why an outcome is wrong. `known` has the outcomes of orders that were tried before.
    fn check(
        &self,
        templates: &Templates,
        outcome: &Outcome,
        known: &mut HashMap<(&'static [usize], bool), Serial>,
    ) -> Result<(), String> {
        // One that has failed may have done nothing.
        const ORDERS: [&[usize]; 5] = [&[0], &[1], &[0, 1], &[1, 0], &[]];
        // A new file is empty until the program that makes it has locked it: the other one may read that.
        let orders = [false, true].map(|is_made| ORDERS.map(|order| (order, is_made)));
        let succeeded = outcome.ended.each_ref().map(|ended| ended.status == 0);
        let mut allowed = Vec::new();
        for (order, is_made) in orders.into_iter().flatten() {
            let serial = known
                .entry((order, is_made))
                .or_insert_with(|| self.in_order(templates, order, is_made));
            if serial.0 != succeeded {
                continue;
            }
            if self.is_as_expected(&serial.1, outcome, is_made) {
                return Ok(());
            }
            allowed.push(serial.1.clone());
        }
        let ended = outcome.ended.each_ref();
        let ended = ended.map(|ended| format!("status {}: {}", ended.status, ended.err));
        let found = &outcome.found;
        Err(format!(
            "found {found:#?}\nallowed {allowed:#?}\n{}",
            ended.join("\n")
        ))
    }

    /// Whether what was found is what was expected. A file may be empty where nothing was, if the
    /// programs have kept each other from filling it; and a copy that failed is incomplete. If `is_made`,
    /// an empty file was there until the program that made it removed it.
    fn is_as_expected(&self, expected: &Found, outcome: &Outcome, is_made: bool) -> bool {
        let is_incomplete = |name: &str| {
            let is_copy = |number: &usize| {
                let words = self.words(*number);
                words
                    .iter()
                    .any(|word| word.strip_prefix("of=").unwrap_or(word) == name)
            };
            let mut copies = [0, 1].into_iter().filter(is_copy).peekable();
            name.starts_with('u')
                && copies.peek().is_some()
                && copies.all(|number| outcome.ended[number].status != 0)
        };
        expected.iter().all(|(name, expected)| {
            let found = &outcome.found[name];
            let filled = found.replace("an empty file", "nothing");
            let is_removed = is_made && expected == "an empty file" && found == "nothing";
            expected == found || *expected == filled || is_removed || is_incomplete(name)
        })
    }

    fn name(&self) -> String {
        let [first, second] = [0, 1].map(|number| self.words(number).join(" "));
        format!("{}: '{first}' and '{second}'", STATES[self.state].name)
    }
}

fn fail(run: &Run, which: &str, outcome: &Outcome, why: &str) -> ! {
    let trace = outcome.trace.join("\n");
    panic!("{which}: {}\n{trace}\n{why}", run.name());
}

/// Pairs of commands, in random orders of their calls.
#[test]
fn programs_at_once() {
    let templates = Templates::new();
    for seed in cases(20, "runs of two programs") {
        let mut rng = Rng::new(seed);
        let run = Run::random(&mut rng);
        let mean = 1 << rng.below(5);
        let now = rng.below(2) as usize;
        let outcome = run.together(&templates, &mut Turns { rng, mean, now });
        if let Err(why) = run.check(&templates, &outcome, &mut HashMap::new()) {
            fail(&run, &format!("seed {seed}"), &outcome, &why);
        }
    }
}

/// The index of a command.
fn index(words: &str) -> usize {
    let found = COMMANDS.iter().position(|command| command.words == words);
    found.expect("a command")
}

/// The one that looks for a target before the other has made it must not take it away: program 0 is
/// stopped at each of its first calls, while program 1 makes some of its own, or all.
#[test]
fn a_new_target_is_filled_by_one_program() {
    const RAW: &str = "convert -f raw -O raw sN t";
    let templates = Templates::new();
    let pairs = [
        [RAW, RAW],
        // The winner removes it in the end.
        [RAW, "import -f raw --sha256 BAD sN t"],
        // The windows between the making of an image and its filling.
        [
            "convert -f raw -O qcow2 sN t",
            "dd -f raw -O raw if=sN of=t",
        ],
    ];
    let mut done = 0;
    for (number, pair) in pairs.into_iter().enumerate() {
        let run = Run {
            state: number % 2,
            pair: pair.map(index),
        };
        let mut known = HashMap::new();
        for first in [3, 6, 9, 12] {
            for second in [24, usize::MAX] {
                let mut schedule = Held { first, second };
                let outcome = run.together(&templates, &mut schedule);
                if let Err(why) = run.check(&templates, &outcome, &mut known) {
                    fail(
                        &run,
                        &format!("after {first} and {second} calls"),
                        &outcome,
                        &why,
                    );
                }
                done += 1;
            }
        }
    }
    println!("cases: {done} runs of two programs");
}
