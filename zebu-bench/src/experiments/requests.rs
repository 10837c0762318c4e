//! What the experiments with `bench` share: where scattered requests fall, how many there are, and
//! how many system calls each costs.

use crate::bench::Bench;
use crate::measure::alternate::Rules;
use crate::measure::{Cell, Contender, Series, alternate};
use crate::measure::{stats, syscalls};
use crate::report::Section;
use crate::report::svg::Chart;
use crate::report::table::Table;

/// A probe must last this long to tell a rate: below 10 ms the clock of bench is too coarse.
const PROBE_SECONDS: f64 = 0.04;
/// No probe has more than this many times the requests of the first.
const PROBE_GROWTH: u64 = 64;

/// A step that scatters requests over an image: an odd number of blocks near 0.38 (the golden
/// section) of it. Odd, so on an image of 2^n blocks every block has its turn before one comes
/// again; and less than the 2 GiB that bench allows.
pub fn scattering_step(size: u64, block: u64) -> u64 {
    let blocks = (size as f64 / block as f64 * 0.381_966) as u64;
    (blocks.min((1 << 31) / block - 2) | 1) * block
}

/// What a probe found.
#[derive(Debug, Clone)]
pub struct Probed {
    /// Requests of a run, a multiple of the depth.
    pub count: u64,
    /// Seconds that each contender took, by its place; NaN for one that failed.
    seconds: Vec<f64>,
}

impl Probed {
    /// Which of two contenders was quicker, by place; the first if neither ran.
    pub fn quicker(&self, a: usize, b: usize) -> usize {
        let seconds = |i: usize| self.seconds.get(i).copied().unwrap_or(f64::NAN);
        match seconds(b) < seconds(a) || seconds(a).is_nan() {
            true if !seconds(b).is_nan() => b,
            _ => a,
        }
    }
}

/// The number of requests with which the runs of a cell last about `seconds`, at most `most`:
/// found with a short run of the contenders that `make` makes for a number of requests. Where they
/// differ, some last longer and some shorter. None if all fail.
pub fn probe(
    bench: &Bench,
    first: u64,
    depth: u64,
    most: u64,
    seconds: f64,
    make: &dyn Fn(u64) -> Vec<Contender>,
) -> Option<Probed> {
    let mut count = first.min(most).max(depth);
    loop {
        let all = once(bench, make(count));
        let times: Vec<f64> = all
            .iter()
            .map(|s| if s.ok() { s.median() } else { f64::NAN })
            .collect();
        let (least, greatest) = (stats::least(&times), stats::greatest(&times));
        if least.is_nan() {
            return None;
        }
        let (lasts_enough, largest) = (
            least >= PROBE_SECONDS,
            count >= most.min(first * PROBE_GROWTH),
        );
        // A slow one settles it: the larger probe would last as long as a run.
        if lasts_enough || largest || greatest >= seconds {
            let middle = (least * greatest).sqrt();
            let wanted = (count as f64 * seconds / middle) as u64;
            let count = wanted.clamp(depth, most.max(depth)).next_multiple_of(depth);
            return Some(Probed {
                count,
                seconds: times,
            });
        }
        count = (count * 8).min(most).max(depth);
    }
}

fn once(bench: &Bench, contenders: Vec<Contender>) -> Vec<Series> {
    let rules = Rules {
        runs: 1,
        trial: false,
        ..bench.rules()
    };
    let cell = Cell {
        contenders,
        inputs: vec![],
        judge: None,
    };
    alternate(&rules, &cell)
}

/// A table of system calls a request, one row a contender.
pub struct SystemCalls {
    table: Table,
    chart: Chart,
}

impl SystemCalls {
    /// An empty table; `what` is the head of its first column.
    pub fn new(what: &str) -> Self {
        let heads = [what, "program", "calls a request", "most of them"];
        let title = "System calls a request";
        SystemCalls {
            table: Table::new(title, &heads),
            chart: Chart::new(title, "calls, less is better"),
        }
    }

    /// Adds rows for the contenders that `make` makes for a number of requests. Without strace, or
    /// where it fails, there is a note instead.
    pub fn add(
        &mut self,
        bench: &Bench,
        section: &mut Section,
        label: &str,
        few: u64,
        make: &dyn Fn(u64) -> Vec<Contender>,
    ) {
        let Some(strace) = &bench.peers.strace else {
            return;
        };
        let many = few * 3;
        let mut bars = Vec::new();
        for (short, long) in make(few).into_iter().zip(make(many)) {
            let runs = [(&*short.command, few), (&*long.command, many)];
            let counted = syscalls::per_request(strace, &long.setup, runs, &bench.scratch());
            if let Some(output) = &long.output {
                let _ = std::fs::remove_file(output);
            }
            let name = match short.flags.is_empty() {
                true => short.name.clone(),
                false => format!("{} `{}`", short.name, short.flags),
            };
            match counted {
                Ok(per) => {
                    bars.push((name.clone(), per.all));
                    self.table.say(vec![
                        label.into(),
                        name,
                        format!("{:.2}", per.all),
                        per.named(),
                    ]);
                }
                Err(e) => section.note(format!("system calls, {label}: {name} is left out: {e}")),
            }
        }
        self.chart.group(label, bars);
    }

    /// Puts the table into the section.
    pub fn finish(self, section: &mut Section) {
        section.table(self.table, Some(self.chart));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{GIB, KIB, MIB};

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
    }

    #[test]
    fn the_quicker_of_two_is_one_that_ran() {
        let probed = |seconds: &[f64]| Probed {
            count: 1,
            seconds: seconds.to_vec(),
        };
        assert_eq!(probed(&[2.0, 1.0]).quicker(0, 1), 1);
        assert_eq!(probed(&[1.0, 2.0]).quicker(0, 1), 0);
        assert_eq!(probed(&[f64::NAN, 2.0]).quicker(0, 1), 1);
        assert_eq!(probed(&[1.0, f64::NAN]).quicker(0, 1), 0);
        assert_eq!(probed(&[f64::NAN]).quicker(0, 1), 0);
    }

    #[test]
    fn the_step_is_one_that_bench_takes() {
        for size in [GIB, 4 * GIB, 40 * GIB, 64 * GIB] {
            let step = scattering_step(size, 4 * KIB);
            assert!(step < 1 << 31 && step.is_multiple_of(4 * KIB) && (step / (4 * KIB)) % 2 == 1);
        }
    }
}
