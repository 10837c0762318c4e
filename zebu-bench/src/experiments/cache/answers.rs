//! The reviewer's questions, answered from the figures.

use super::look_up::Costs;
use super::{Measured, Pattern, TABLE};
use crate::report::verdict::NO_SLOWER;
use crate::units;

/// A cache is the right size if all tables would make it faster by less than this.
const CLOSE: f64 = 0.95;

/// Two sizes of the cache in one pattern, one the next larger.
pub struct Step {
    pub smaller: u64,
    pub larger: u64,
    pub pattern: Pattern,
    /// How many times as fast the larger one is.
    pub ratio: f64,
}

/// The three answers.
pub fn all(measured: &[Measured], costs: &Costs) -> Vec<String> {
    if measured.iter().all(|m| !m.rate("zebu").is_finite()) {
        return Vec::new();
    }
    vec![
        ever_slower(measured, costs),
        size_one(measured),
        right_number(measured),
    ]
}

/// The step to a larger cache that gains least in this pattern, or loses most.
pub fn worst_step(measured: &[Measured], pattern: Pattern) -> Option<Step> {
    let all = of(measured, pattern);
    let steps = all.iter().zip(all.iter().skip(1)).map(|(a, b)| Step {
        smaller: a.0,
        larger: b.0,
        pattern,
        ratio: b.1 / a.1,
    });
    steps.min_by(|a, b| a.ratio.total_cmp(&b.ratio))
}

/// The same over all patterns.
fn worst_of_all(measured: &[Measured]) -> Option<Step> {
    let steps = patterns(measured).into_iter();
    let steps = steps.filter_map(|pattern| worst_step(measured, pattern));
    steps.min_by(|a, b| a.ratio.total_cmp(&b.ratio))
}

/// The patterns, each once.
pub fn patterns(measured: &[Measured]) -> Vec<Pattern> {
    let mut all: Vec<Pattern> = Vec::new();
    for m in measured {
        if !all.contains(&m.pattern) {
            all.push(m.pattern);
        }
    }
    all
}

/// Tables and zebu's rates of a pattern, the smallest cache first.
fn of(measured: &[Measured], pattern: Pattern) -> Vec<(u64, f64)> {
    let mut all: Vec<(u64, f64)> = measured
        .iter()
        .filter(|m| m.pattern == pattern && m.rate("zebu").is_finite())
        .map(|m| (m.tables, m.rate("zebu")))
        .collect();
    all.sort_by_key(|a| a.0);
    all
}

fn ever_slower(measured: &[Measured], costs: &Costs) -> String {
    let hit = match costs.hit.is_finite() && costs.miss.is_finite() {
        true => format!(
            " A hit costs {:.0} ns, a miss on the device {:.0} µs, so looking a table up in the cache \
             pays if one of {:.0} look-ups finds it.",
            costs.hit,
            costs.miss / 1e3,
            (costs.miss / costs.hit).max(1.0)
        ),
        false => String::new(),
    };
    match worst_of_all(measured) {
        Some(w) if w.ratio < NO_SLOWER => format!(
            "*Is it ever slower with the cache?* In one step of this run: {} tables have {} the rate of \
             {} at {}.{hit}",
            w.larger,
            units::ratio(w.ratio),
            w.smaller,
            w.pattern.name()
        ),
        Some(w) => format!(
            "*Is it ever slower with the cache?* No: each larger cache is at least as fast as the next \
             smaller one, within {:.0} % (the least is {} from {} to {} tables, {}).{hit}",
            (1.0 - NO_SLOWER) * 100.0,
            units::ratio(w.ratio),
            w.smaller,
            w.larger,
            w.pattern.name()
        ),
        None => format!("*Is it ever slower with the cache?* Not measured.{hit}"),
    }
}

fn size_one(measured: &[Measured]) -> String {
    let parts: Vec<String> = patterns(measured)
        .into_iter()
        .filter_map(|pattern| {
            let all = of(measured, pattern);
            let (first, last) = (all.first()?, all.last()?);
            Some(format!(
                "{} {}",
                pattern.name(),
                units::ratio(first.1 / last.1)
            ))
        })
        .collect();
    format!(
        "*What if the size is 1?* It works, at this rate against a cache of all tables: {}. Requests in \
         order need one table at a time; scattered ones read a table each.",
        parts.join(", ")
    )
}

fn right_number(measured: &[Measured]) -> String {
    let parts: Vec<String> = patterns(measured)
        .into_iter()
        .filter_map(|pattern| {
            let all = of(measured, pattern);
            let most = all.last()?.1;
            let right = all.iter().find(|a| a.1 >= CLOSE * most)?.0;
            Some(format!(
                "{right} ({} KiB) for {}",
                right * TABLE / units::KIB,
                pattern.name()
            ))
        })
        .collect();
    format!(
        "*What is the right number?* The least that reaches {:.0} % of the rate with all tables: {}. \
         Where requests are scattered, what counts is whether all tables that they use fit; so by \
         default zebu keeps what the whole disk needs, up to 32 MiB.",
        CLOSE * 100.0,
        parts.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Series;

    const RANDOM: Pattern = Pattern {
        random: true,
        write: false,
        depth: 32,
    };
    const IN_ORDER: Pattern = Pattern {
        random: false,
        ..RANDOM
    };

    fn cell(tables: u64, pattern: Pattern, rate: f64) -> Measured {
        let zebu = Series {
            name: "zebu".into(),
            seconds: vec![1000.0 / rate],
            ..Series::default()
        };
        Measured {
            tables,
            pattern,
            count: 1000,
            all: vec![zebu],
        }
    }

    fn figures() -> Vec<Measured> {
        vec![
            cell(1, RANDOM, 50.0),
            cell(8, RANDOM, 60.0),
            cell(512, RANDOM, 100.0),
            cell(1, IN_ORDER, 100.0),
            cell(8, IN_ORDER, 90.0),
            cell(512, IN_ORDER, 100.0),
        ]
    }

    const COSTS: Costs = Costs {
        hit: 50.0,
        miss: 100_000.0,
    };

    #[test]
    fn the_worst_step_is_the_one_that_loses_most() {
        let step = worst_of_all(&figures()).expect("a step");
        assert_eq!((step.smaller, step.larger, step.pattern), (1, 8, IN_ORDER));
        assert!((step.ratio - 0.9).abs() < 1e-9);
    }

    #[test]
    fn answers_are_made_of_the_figures() {
        let [slower, one, right] = &all(&figures(), &COSTS)[..] else {
            panic!("three answers");
        };
        assert!(slower.contains("In one step") && slower.contains("0.90×"));
        assert!(slower.contains("50 ns") && slower.contains("2000 look-ups"));
        assert!(one.contains("random reads 0.50×") && one.contains("sequential reads 1.00×"));
        assert!(right.contains("512 (2048 KiB) for random reads"));
        assert!(right.contains("1 (4 KiB) for sequential reads"));
        let better = [cell(1, RANDOM, 50.0), cell(8, RANDOM, 60.0)];
        assert!(all(&better, &COSTS)[0].contains("No: each larger cache"));
        assert!(all(&[], &COSTS).is_empty());
    }
}
