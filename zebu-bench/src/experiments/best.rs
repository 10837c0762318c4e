//! QEMU's best flags for a cell, found by trying.

use crate::bench::Bench;
use crate::measure::alternate::Rules;
use crate::measure::{Cell, Contender, alternate};
use crate::report::Section;

/// Tries each candidate once (with `--quick`), or twice after a trial that is not counted, and
/// returns the one with the least seconds. A candidate that fails is left out with a note.
pub fn of(bench: &Bench, section: &mut Section, label: &str, cell: Cell<'_>) -> Option<Contender> {
    let rules = Rules {
        runs: if bench.options.quick { 1 } else { 2 },
        trial: !bench.options.quick,
        ..bench.rules()
    };
    let all = alternate(&rules, &cell);
    for s in all.iter().filter(|s| !s.ok()) {
        let why = s.failure.clone().unwrap_or_default();
        section.note(format!("{label}: {} is left out: {why}", s.label()));
    }
    let least = |s: &crate::measure::Series| crate::measure::stats::least(&s.seconds);
    all.iter()
        .zip(cell.contenders)
        .filter(|(s, _)| s.ok())
        .min_by(|(a, _), (b, _)| least(a).total_cmp(&least(b)))
        .map(|(_, c)| c)
}
