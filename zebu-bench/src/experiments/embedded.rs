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
use std::path::Path;

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
    (
        "remote",
        "Rust, Remote with one thread, both on one processor",
    ),
];
const FIRST: u64 = 2000;
const MOST: u64 = 2_000_000;

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    to.about = "Random reads of 4 KiB in one thread, without QEMU. In an event loop the program waits \
                for the queue's descriptor, or awaits a Remote, and the image is in the page cache: \
                io_uring, the default, is judged against the same loop with native AIO. With imago, a \
                Rust library for disk images, each library drives itself."
        .into();
    let image = filled::qcow2(bench, bench.options.size, 64 * KIB)?;
    let load = bench.own_program("zebu-queue-load")?;
    let title = "4 KiB at random, cached";
    let mut group = Group::new(title, Unit::Requests, Ratio::SpeedOfNative);
    for (way, label) in WAYS {
        for depth in [1u64, 32] {
            let make = |count: u64| {
                let one = |name: &str, engine: &str| {
                    // To wake another processor that is virtual and idle takes longer than a request.
                    let one_processor: &[&str] = match way {
                        "remote" => &["taskset", "-c", "0"],
                        _ => &[],
                    };
                    let mut line = command(one_processor);
                    line.extend(command([load.as_os_str(), image.as_os_str()]));
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
    with_imago(bench, to, &image)
}

/// The queue drives itself (`Queue::block_on`), beside imago in a runtime of one thread.
fn with_imago(bench: &Bench, to: &mut results::Experiment, image: &Path) -> Result<()> {
    let Some(imago) = &bench.peers.imago else {
        return Ok(());
    };
    let load = bench.own_program("zebu-queue-load")?;
    let title = "4 KiB at random, with imago";
    let mut group = Group::new(title, Unit::Requests, Ratio::SpeedOfImago);
    for (cache, label, most) in [("writeback", "cached", MOST), ("none", "disk", MOST / 20)] {
        for depth in [1u64, 32] {
            let make = |count: u64| {
                let numbers = [depth.to_string(), count.to_string()];
                let mut ours = command([load.as_os_str(), image.as_os_str()]);
                let words = ["io_uring", "driven", &numbers[0], &numbers[1], cache];
                ours.extend(words.map(OsString::from));
                let mut theirs = command([imago.program.as_os_str(), image.as_os_str()]);
                theirs.extend([cache, &numbers[0], &numbers[1]].map(OsString::from));
                vec![
                    Program::new("imago", "", theirs, Meter::Client),
                    Program::new("zebu", "", ours, Meter::Client),
                ]
            };
            let requests = Requests {
                depth,
                first: FIRST,
                most,
                make: &make,
            };
            let inputs = [image.to_owned()];
            let (count, all) = bench.measure_requests(&requests, &inputs, None);
            let label = format!("{label}, {depth} in flight");
            let row = Row::new(&label, Some(NOT_SLOWER), &all, |s| count as f64 / s);
            to.add(&mut group, row, &all);
        }
    }
    to.groups.push(group);
    Ok(())
}
