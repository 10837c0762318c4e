//! What the orders of clusters have against each other and against the device, as fio sees it, and
//! the system calls of a request.

use super::super::requests::SystemCalls;
use super::place::Place;
use super::{Row, cell, label, split, tasks};
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::fragmented::Order;
use crate::measure::alternate::round;
use crate::measure::{Cell, Series, series};
use crate::peers::fio::Job;
use crate::report::Section;
use crate::report::cells::Cells;
use crate::units::{self, KIB, MIB};
use std::path::{Path, PathBuf};

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

    fn label(&self) -> String {
        let order = if self.block < MIB {
            "at random"
        } else {
            "in order"
        };
        let how = if self.write { "writes" } else { "reads" };
        let size = units::size(self.block);
        format!("{size} {order}, {} in flight, {how}", self.depth)
    }
}

/// zebu over every order of clusters, and fio with the requests that these make of a program's own.
pub struct Beside {
    /// zebu alone.
    pub rows: Vec<Row>,
    pub limits: Vec<Limit>,
}

/// Rounds of what is compared with each other: differences of a twentieth are asked about, and runs
/// of one cell differ by more.
const ROUNDS: usize = 9;

/// Measures in each round all orders and then fio, in one place. The same request over each order
/// follows at once, with nothing between but the exchange of tables: they are compared with each other,
/// and a disk is a tenth faster or slower a minute later.
pub fn beside(
    bench: &Bench,
    section: &mut Section,
    size: u64,
    mut place: Place,
    images: &[(Order, PathBuf)],
    writes: bool,
    engines: &[&str],
) -> Result<Beside> {
    let mut rules = bench.rules();
    if bench.options.runs.is_none() && !bench.options.quick {
        rules.runs = ROUNDS;
    }
    let tasks: Vec<_> = (images.iter())
        .map(|(order, _)| tasks(*order, place.file(), writes))
        .collect();
    // Of each image, a cell for each request and engine.
    let cells: Vec<Vec<Cell<'_>>> = (tasks.iter())
        .map(|t| alone(cell(bench, size, t, engines, &["zebu"])))
        .collect();
    let mut all: Vec<Vec<Series>> = (cells.iter())
        .map(|cells| cells.iter().flat_map(Cell::series).collect())
        .collect();
    let (mut limits, fio) = limits(bench, size, place.file(), writes);
    let mut device = fio.series();
    for number in 0..rules.rounds() {
        for request in 0..cells[0].len() {
            for i in 0..images.len() {
                let i = (i + number) % images.len();
                place.take(&images[i].1)?;
                let series = &mut all[i][request..=request];
                round(&rules, &cells[i][request], number, series);
            }
        }
        round(&rules, &fio, number, &mut device);
        place.spoil();
    }
    let rows: Vec<Row> = (tasks.iter().zip(all))
        .flat_map(|(t, all)| split(t, all, engines.len()))
        .collect();
    let mut table = Cells::new(
        "On the disk: zebu and fio shortly after one another",
        "requests",
    );
    for row in &rows {
        table.add(section, &label(row), &row.all, None);
    }
    for (limit, series) in limits.iter_mut().zip(device) {
        limit.all = vec![series];
        table.add(section, &limit.label(), &limit.all, None);
    }
    table.finish(section);
    Ok(Beside { rows, limits })
}

/// A cell for each contender of one.
fn alone(cell: Cell<'_>) -> Vec<Cell<'_>> {
    let one = |contender| Cell {
        contenders: vec![contender],
        inputs: vec![],
        judge: None,
    };
    cell.contenders.into_iter().map(one).collect()
}

/// fio's requests, in order and in the pieces of t-rand, without figures yet, and the cell of them.
fn limits(bench: &Bench, size: u64, file: &Path, writes: bool) -> (Vec<Limit>, Cell<'static>) {
    let (mut limits, mut contenders) = (Vec::new(), Vec::new());
    for write in [false, true].into_iter().filter(|w| !w || writes) {
        for (block, depth) in [(MIB, 1), (64 * KIB, PARTS), (64 * KIB, 2 * PARTS)] {
            let Some(fio) = &bench.peers.fio else {
                continue;
            };
            if bench.options.quick && depth > PARTS {
                continue;
            }
            contenders.push(fio.contender(&Job {
                engine: "native",
                random: block < MIB,
                write,
                block,
                depth,
                count: size / block,
                file,
                size,
                laid_out: true,
            }));
            limits.push(Limit {
                write,
                block,
                depth,
                all: Vec::new(),
            });
        }
    }
    let cell = Cell {
        contenders,
        inputs: vec![],
        judge: None,
    };
    (limits, cell)
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
