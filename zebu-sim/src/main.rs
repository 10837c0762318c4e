//! `zebu-sim`: simulates seeds, and prints the fewest steps of one that fails.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use zebu_sim::shrink::{attempt, shrink};
use zebu_sim::steps::{KINDS, Scenario};

/// Tests zebu by simulations: each seed is an image, a list of steps and a schedule.
#[derive(Parser)]
struct Arguments {
    /// The seed to simulate.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// The seeds to simulate, N..M without M.
    #[arg(long, value_parser = parse_range)]
    seeds: Option<(u64, u64)>,
    /// Simulate for this number of seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Steps of each simulation.
    #[arg(long, default_value_t = 120)]
    steps: usize,
    /// Simulations for shrinking one that fails.
    #[arg(long, default_value_t = 3000)]
    attempts: usize,
    /// Kinds of steps to leave out.
    #[arg(long, value_delimiter = ',', value_parser = clap::builder::PossibleValuesParser::new(KINDS))]
    without: Vec<String>,
    /// Only steps with two programs.
    #[arg(long)]
    programs: bool,
    /// Failures after which it ends.
    #[arg(long, default_value_t = 1)]
    failures: usize,
    /// Show the steps of each simulation.
    #[arg(long)]
    show: bool,
}

fn parse_range(text: &str) -> Result<(u64, u64), String> {
    let (from, to) = text.split_once("..").ok_or("it is N..M")?;
    let number = |n: &str| n.parse().map_err(|e| format!("{n}: {e}"));
    Ok((number(from)?, number(to)?))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let (first, last) = match (arguments.seed, arguments.seeds) {
        (Some(seed), _) => (seed, seed + 1),
        (None, Some(range)) => range,
        (None, None) => (0, u64::MAX),
    };
    let start = Instant::now();
    let limit = match (arguments.seed, arguments.seeds, arguments.seconds) {
        (None, None, None) => Duration::from_secs(60),
        (.., None) => Duration::MAX,
        (.., Some(seconds)) => Duration::from_secs(seconds),
    };
    let (mut runs, mut steps, mut failures) = (0, 0, 0);
    for seed in first..last {
        if start.elapsed() >= limit {
            break;
        }
        let scenario = match arguments.programs {
            true => Scenario::of_programs(seed, arguments.steps),
            false => Scenario::random(seed, arguments.steps, &arguments.without),
        };
        if arguments.show {
            println!("seed {seed}\n{scenario}");
        }
        runs += 1;
        match attempt(&scenario) {
            Ok(report) => {
                steps += report.steps;
                if arguments.seed.is_some() {
                    println!(
                        "trace {:016x}, {} operations",
                        report.trace, report.operations
                    );
                }
            }
            Err(failure) => {
                failures += 1;
                let (seconds, count) = (start.elapsed().as_secs_f32(), arguments.steps);
                println!("seed {seed} failed after {runs} simulations, {seconds:.1} s: {failure}");
                let (least, failure) = shrink(&scenario, &failure, arguments.attempts);
                println!("the fewest steps that fail:\n{least}{failure}");
                let mut without = match arguments.without.is_empty() {
                    true => String::new(),
                    false => format!(" --without {}", arguments.without.join(",")),
                };
                if arguments.programs {
                    without = " --programs".into();
                }
                println!(
                    "again: cargo run -p zebu-sim -- --seed {seed} --steps {count}{without}\n"
                );
                if failures >= arguments.failures {
                    break;
                }
            }
        }
    }
    let seconds = start.elapsed().as_secs_f32();
    println!("cases: {runs} simulations, {steps} steps in {seconds:.0} s, {failures} failures");
    match failures {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
