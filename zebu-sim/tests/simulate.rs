//! Runs simulations (see the crate's documentation). A failure is printed with the fewest steps that
//! fail, and the command that repeats it.

use std::time::{Duration, Instant};

use zebu_sim::deeds::Deed;
use zebu_sim::shrink::{attempt, shrink};
use zebu_sim::steps::{Before, Pair, PairStop, Scenario, Step, What};
use zebu_testkit::cases;

/// Steps of each simulation.
const STEPS: usize = 120;

fn scenario(seed: u64) -> Scenario {
    Scenario::random(seed, STEPS, &[])
}

#[test]
fn any_seed() {
    let mut steps = 0;
    let seeds = cases(u64::MAX, format!("simulations of {STEPS} steps"));
    for seed in seeds.for_time(Duration::from_secs(15)) {
        let scenario = scenario(seed);
        match attempt(&scenario) {
            Ok(report) => steps += report.steps,
            Err(failure) => {
                let (least, least_failure) = shrink(&scenario, &failure, 2000);
                panic!(
                    "seed {seed}: {failure}\nthe fewest steps that fail:\n{least}{least_failure}\n\
                     again: cargo run -p zebu-sim -- --seed {seed} --steps {STEPS}"
                );
            }
        }
    }
    println!("{steps} steps");
}

/// As [`any_seed`], with nothing but two programs and one name.
#[test]
fn any_two_programs() {
    const STEPS: usize = 10;
    let seeds = cases(u64::MAX, "pairs of programs");
    let mut seeds = seeds.for_time(Duration::from_secs(10));
    while let Some(seed) = seeds.next() {
        let scenario = Scenario::of_programs(seed, STEPS);
        if let Err(failure) = attempt(&scenario) {
            let (least, least_failure) = shrink(&scenario, &failure, 500);
            panic!(
                "seed {seed}: {failure}\nthe fewest steps that fail:\n{least}{least_failure}\n\
                 again: cargo run -p zebu-sim -- --programs --seed {seed} --steps {STEPS}"
            );
        }
        seeds.add(STEPS as u64);
    }
}

/// Two programs do this with one name, in the turns of each of so many seeds.
fn turns(deeds: [Deed; 2], before: Before, seeds: u32) -> Scenario {
    let Scenario { origin, .. } = Scenario::of_programs(3, 0);
    let steps = (1..=seeds).map(|id| Step {
        id,
        seed: id.into(),
        what: What::Pair(Pair {
            deeds,
            by_link: [id % 4 == 1, id % 3 == 1],
            before,
            stop: PairStop::No,
        }),
        beside: None,
    });
    let steps = steps.collect();
    Scenario { origin, steps }
}

fn together(deeds: [Deed; 2], before: Before, seeds: u32) {
    if let Err(failure) = attempt(&turns(deeds, before, seeds)) {
        panic!("{failure}");
    }
}

/// The one that does not get the lock leaves the file to the other one, and if neither gets it there is
/// no file.
#[test]
fn two_new_images_of_one_name() {
    let convert = Deed::Convert("qcow2", false, None);
    together([convert, convert], Before::Nothing, 30);
    together(
        [convert, Deed::Convert("raw", false, None)],
        Before::Nothing,
        60,
    );
}

/// The one that made the file may lock it after the other one has filled it.
#[test]
fn what_another_program_has_filled_is_not_new() {
    let deeds = [Deed::Convert("qcow2", false, None), Deed::CreateNew(700)];
    together(deeds, Before::Nothing, 50);
}

#[test]
fn a_new_image_that_loses_its_name_is_an_error() {
    for deed in [
        Deed::Convert("qcow2", false, None),
        Deed::Convert("vdi", false, None),
        Deed::Create("qcow2", 800),
    ] {
        for foreign in [Deed::Remove, Deed::Replace, Deed::MoveAway] {
            together([deed, foreign], Before::Raw, 10);
        }
    }
}

/// A failure can only be repeated and shrunk if nothing but the seed matters.
#[test]
fn a_seed_always_gives_the_same_result() {
    let outcome = |scenario: &Scenario| match attempt(scenario) {
        Ok(report) => format!("{:016x} {}", report.trace, report.operations),
        Err(failure) => failure,
    };
    for seed in 1000..1016 {
        // Images of other formats have random identifiers.
        let scenario = Scenario::random(seed, STEPS, &["programs".into()]);
        assert_eq!(outcome(&scenario), outcome(&scenario), "seed {seed}");
    }
    let deeds = [Deed::Convert("qcow2", true, None), Deed::CreateNew(700)];
    let scenario = turns(deeds, Before::Nothing, 8);
    assert_eq!(outcome(&scenario), outcome(&scenario));
}

/// Rules of bitmaps are broken, for the whole process, and a simulation fails. (The crash replay
/// notices all of them.)
#[cfg(debug_assertions)]
#[test]
#[ignore = "alone in its process"]
fn breaks_of_bitmaps() {
    use zebu::internal::broken::{Rule, break_rule};
    for rule in [Rule::InUseBeforeChange, Rule::BitsBeforeFlag] {
        let start = Instant::now();
        break_rule(Some(rule));
        let failure = (1..3000).find_map(|seed| Some((seed, attempt(&scenario(seed)).err()?)));
        break_rule(None);
        let (seed, failure) = failure.unwrap_or_else(|| panic!("{rule:?} is not noticed"));
        let line = failure.lines().next().unwrap_or_default();
        println!("{rule:?}, seed {seed}, {:?}: {line}", start.elapsed());
    }
}
