//! What bounds the experiment: the device, as fio sees it, and the system calls of a request.

use super::super::requests::SystemCalls;
use super::Row;
use super::place::Place;
use crate::bench::Bench;
use crate::inputs::fragmented::Order;
use crate::measure::{Cell, Series, series};
use crate::peers::fio::Job;
use crate::report::Section;
use crate::report::cells::Cells;
use crate::units::{KIB, MIB};
use std::path::PathBuf;

/// What the device gives: fio with the requests that an image makes of the programs' own.
pub struct Limit {
    write: bool,
    block: u64,
    depth: u32,
    all: Vec<Series>,
}

/// A request of 1 MiB over clusters at random is sixteen of 64 KiB, of which zebu has at most this
/// many in flight.
const PARTS: u32 = 8;

impl Limit {
    /// Whether it is that of a row: pieces at random, or whole requests where the clusters of a
    /// request lie together.
    pub fn is_of(&self, row: &Row) -> bool {
        let pieces = (64 * KIB, PARTS);
        let whole = (MIB, 1);
        let own = if row.order == Order::Rand {
            pieces
        } else {
            whole
        };
        self.write == row.write && (self.block, self.depth) == own
    }

    pub fn series(&self) -> Option<&Series> {
        series::fastest(&self.all, "fio")
    }
}

/// fio on the blocks that the images had, in order, and in the pieces of t-rand. The writes destroy
/// what is there.
pub fn limits(
    bench: &Bench,
    section: &mut Section,
    size: u64,
    place: Place,
    writes: bool,
) -> Vec<Limit> {
    let Some(fio) = &bench.peers.fio else {
        return Vec::new();
    };
    let mut cells = Cells::new("The device's limit: fio on a file", "requests");
    let mut limits = Vec::new();
    for write in [false, true].into_iter().filter(|w| !w || writes) {
        for (what, block, depth) in [
            ("1 MiB in order, 1 in flight", MIB, 1),
            ("64 KiB at random, 8 in flight", 64 * KIB, PARTS),
            ("64 KiB at random, 16 in flight", 64 * KIB, 2 * PARTS),
        ] {
            if bench.options.quick && depth > PARTS {
                continue;
            }
            let job = Job {
                engine: "native",
                random: block < MIB,
                write,
                block,
                depth,
                count: size / block,
                file: place.file(),
                size,
                laid_out: true,
            };
            let all = bench.alternate(&Cell {
                contenders: vec![fio.contender(&job)],
                inputs: vec![],
                judge: None,
            });
            let how = if write { "writes" } else { "reads" };
            cells.add(section, &format!("{what}, {how}"), &all, None);
            limits.push(Limit {
                write,
                block,
                depth,
                all,
            });
        }
    }
    cells.finish(section);
    limits
}

/// A request that falls into pieces against one that does not, in system calls.
pub fn system_calls(
    bench: &Bench,
    section: &mut Section,
    images: &[(Order, PathBuf)],
    engines: &[&str],
) {
    let mut calls = SystemCalls::new("file");
    for (order, file) in images {
        let told = match order {
            Order::Rand | Order::Seq => true,
            Order::PartRand => !bench.options.quick,
            Order::Reverse => false,
        };
        if !told {
            continue;
        }
        let make = |count: u64| {
            let verb = format!("bench -c {count} -d 1 -f qcow2 -s 1m -t none");
            let pairs = engines
                .iter()
                .flat_map(|e| [bench.qemu(&verb, e, &[file]), bench.zebu(&verb, e, &[file])]);
            pairs.collect()
        };
        calls.add(bench, section, &format!("t-{}", order.name()), 80, &make);
    }
    calls.finish(section);
}
