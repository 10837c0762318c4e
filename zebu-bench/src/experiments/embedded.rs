//! The library in a program with an event loop of its own.

use super::{Experiment, NOT_SLOWER};
use crate::bench::{Bench, Requests};
use crate::error::Result;
use crate::inputs::filled;
use crate::measure::Program;
use crate::measure::child::command;
use crate::measure::meter::Meter;
use crate::results::{self, Group, Ratio, Row, Unit};
use crate::units::KIB;
use std::ffi::OsString;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "embedded",
    title: "In an event loop of a program",
    run,
};

/// The ways of `docs/embedding.md`, by the name that `zebu-queue-load` has for each.
const WAYS: [(&str, &str); 3] = [
    ("descriptor", "Rust, descriptor and turn"),
    ("c", "C, descriptor and zebu_queue_complete"),
    ("remote", "Rust, Remote with one thread"),
];
const FIRST: u64 = 2000;
const MOST: u64 = 2_000_000;

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    to.about = "Random reads of 4 KiB of an image in the page cache, without QEMU: the program \
                waits for the queue's descriptor, or awaits a Remote. io_uring, the default, is \
                judged against the same loop with native AIO."
        .into();
    let image = filled::qcow2(bench, bench.options.size, 64 * KIB)?;
    let load = bench.own_program("zebu-queue-load")?;
    let title = "4 KiB at random, cached";
    let mut group = Group::new(title, Unit::Requests, Ratio::SpeedOfNative);
    for (way, label) in WAYS {
        for depth in [1u64, 32] {
            let make = |count: u64| {
                let one = |name: &str, engine: &str| {
                    let mut line = command([load.as_os_str(), image.as_os_str()]);
                    let numbers = [depth.to_string(), count.to_string()];
                    line.extend([engine, way, &numbers[0], &numbers[1]].map(OsString::from));
                    Program::new(name, "", line, Meter::Client)
                };
                vec![one("native", "native"), one("zebu", "io_uring")]
            };
            let requests = Requests {
                depth,
                first: FIRST,
                most: MOST,
                make: &make,
            };
            let inputs = [image.clone()];
            let (count, all) = bench.measure_requests(&requests, &inputs, None);
            let label = format!("{label}, {depth} in flight");
            let row = Row::new(&label, Some(NOT_SLOWER), &all, |s| count as f64 / s);
            to.add(&mut group, row, &all);
        }
    }
    to.groups.push(group);
    Ok(())
}
