//! What the orders of clusters have against each other and against the device, as fio sees it, and
//! the system calls of a request.

use super::super::requests::SystemCalls;
use super::place::Place;
use super::{Row, cell, label, split, tasks};
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::fragmented::Order;
use crate::measure::alternate::round;
use crate::measure::child::command;
use crate::measure::meter::Meter;
use crate::measure::{Cell, Contender, Series, series};
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
    let rules = bench.rules_of_requests(1);
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
    let kernel = pieces(size, place.file(), writes);
    let mut in_pieces = kernel.series();
    for number in 0..rules.rounds() {
        for request in 0..cells[0].len() {
            for i in order(images.len(), number) {
                place.take(&images[i].1)?;
                let series = &mut all[i][request..=request];
                round(&rules, &cells[i][request], number, series);
            }
        }
        // These write over the tables, too.
        round(&rules, &kernel, number, &mut in_pieces);
        round(&rules, &fio, number, &mut device);
        if writes {
            place.spoil();
        }
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
    table.add(section, "1M in order, without an image", &in_pieces, None);
    table.finish(section);
    tell_pieces(section, &in_pieces);
    Ok(Beside { rows, limits })
}

/// Pieces of memory that a request over clusters in another order has.
const PIECES: [&str; 2] = ["1", "16"];

/// Requests in one piece of memory and in sixteen, by the kernel alone.
fn pieces(size: u64, file: &Path, writes: bool) -> Cell<'static> {
    let own = std::env::current_exe().unwrap_or_default();
    let program = own.with_file_name("zebu-pieces");
    let mut contenders = Vec::new();
    for write in [false, true].into_iter().filter(|w| !w || writes) {
        for count in PIECES {
            let mut line = command([program.as_os_str(), file.as_os_str()]);
            line.extend([size.to_string().into(), count.into()]);
            line.extend(write.then(|| "-w".into()));
            let name = if write { "pwritev" } else { "preadv" };
            let flags = format!("{count} piece{}", if count == "1" { "" } else { "s" });
            contenders.push(Contender::new(name, &flags, line, Meter::Bench));
        }
    }
    Cell {
        contenders,
        inputs: vec![],
        judge: None,
    }
}

/// Says what the disk takes for memory in pieces, which no program can be rid of.
fn tell_pieces(section: &mut Section, all: &[Series]) {
    for pair in all.chunks(2) {
        let [one, many] = pair else { continue };
        if one.ok() && many.ok() {
            section.note(format!(
                "For 1 MiB in sixteen pieces of memory, as t-reverse and t-part-rand have it, the disk takes \
                 {} of the time for one piece: {} alone, without zebu.",
                units::ratio(one.speedup_over(many)),
                one.name
            ));
        }
    }
}

/// In which order so many images have their turn in a round: each begins now and then, and is
/// followed by its neighbour as often as it follows it, since a disk may still be busy with what
/// was before.
fn order(count: usize, number: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |i| {
        let i = if number.is_multiple_of(2) {
            i
        } else {
            count - 1 - i
        };
        (i + number / 2) % count
    })
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
                start: 0,
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
