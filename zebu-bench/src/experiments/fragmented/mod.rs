//! P1: seed 000. One request of 1 MiB that falls into sixteen pieces.

mod limits;
mod place;

use super::Experiment;
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::inputs::fragmented::{FILL, ORDERS, Order, image};
use crate::measure::alternate::round;
use crate::measure::stats::geometric_mean;
use crate::measure::{Cell, Contender, Series, series};
use crate::peers::qemu::done;
use crate::report::Section;
use crate::report::cells::Cells;
use crate::report::machine::{available_memory, free_space};
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::report::verdict::{Bound, NO_SLOWER, Verdict};
use crate::units::{self, GIB, MIB};
use limits::{Beside, Limit, beside, system_calls};
use place::Place;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The experiment `fragmented`.
pub struct Fragmented;

/// One row of the seed's table: a file, read or written, and what was measured.
struct Row {
    order: Order,
    write: bool,
    all: Vec<Series>,
}

impl Experiment for Fragmented {
    fn name(&self) -> &'static str {
        "fragmented"
    }

    fn about(&self) -> &'static str {
        "1 MiB requests over shuffled clusters, on the disk and on tmpfs (seed 000, P1)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let size = if bench.options.quick {
            bench.size()
        } else {
            // The target (P1) asks for as much.
            bench.size().max(2 * GIB)
        };
        section.method(format!(
            "Four images of {} made by 64 KiB writes in four orders, as the seed's generator makes \
             them (with a shuffle that is the same in each run). Then `bench -c {} -d 1 -f qcow2 \
             -s 1m -t none` with `-n` or `-i`, and `-w --pattern 255` for writes. Seconds as bench \
             says them. The limit is fio (native): 1 MiB in order, one in flight; for t-rand, whose \
             requests fall into sixteen pieces of which zebu has eight in flight, 64 KiB at random, \
             eight in flight. On the disk the images take turns in one file, whose blocks \
             stay where they are, and fio has these blocks too: parts of one disk \
             differ by as much as a third. The data of all images are the same byte, so only their \
             tables are exchanged. What orders have against each other and against fio is \
             measured by itself, {} times, the same request over each order at once after the \
             other, since a disk is faster or slower a minute later; the \
             column of fio in the seed's table is from there, and not from its neighbours' minutes.",
            units::size(size),
            size / MIB,
            bench.rules_of_requests(1).runs
        ));
        if let Err(e) = disk(bench, section, size) {
            section.note(format!("the half on the disk is left out: {e}"));
        }
        if let Err(e) = tmpfs(bench, section, size) {
            section.note(format!("the tmpfs half is left out: {e}"));
        }
        Ok(())
    }
}

/// The half on the disk: what a user gets.
fn disk(bench: &Bench, section: &mut Section, size: u64) -> Result<()> {
    let engines: &[&str] = if bench.options.quick {
        &["-n", "-i io_uring"]
    } else {
        &["-n", "-i io_uring", "-i threads"]
    };
    let images = images(bench, size)?;
    let mut place = Place::new(bench);
    place.take(&images[0].1)?;
    let writes = bench.writes(place.file());
    if !writes {
        section.note("writes are left out: zebu has no bench -w yet, or --writes never is given");
    }
    let rows = in_turn(bench, section, size, &mut place, &images, writes, engines)?;
    let mut cells = Cells::new("On the disk: every program", "file");
    for row in &rows {
        let peer = series::find(&row.all, "QEMU", engines[0]);
        cells.add(section, &label(row), &row.all, peer);
    }
    system_calls(bench, section, &images, engines);
    cells.finish(section);
    let beside = beside(bench, section, size, place, &images, writes, engines)?;
    seed_table(section, "On the disk", &rows, engines, &beside.limits);
    for engine in engines {
        verdicts_against_qemu(section, &rows, engine);
        verdicts_of_orders(section, &beside, engine);
    }
    Ok(())
}

/// Measures all rows of all images in one place, since they are compared with each other too: in
/// each round every image comes there, and every program does its rows. After the last one
/// qemu-img looks at what the writes have left.
fn in_turn(
    bench: &Bench,
    section: &mut Section,
    size: u64,
    place: &mut Place,
    images: &[(Order, PathBuf)],
    writes: bool,
    engines: &[&str],
) -> Result<Vec<Row>> {
    let rules = bench.rules();
    let tasks: Vec<Vec<Task>> = (images.iter())
        .map(|(order, _)| tasks(*order, place.file(), writes))
        .collect();
    let cells: Vec<Cell<'_>> = tasks
        .iter()
        .map(|t| cell(bench, size, t, engines, &BOTH))
        .collect();
    let mut all: Vec<Vec<Series>> = cells.iter().map(Cell::series).collect();
    for number in 0..rules.rounds() {
        for (i, (_, image)) in images.iter().enumerate() {
            place.take(image)?;
            round(&rules, &cells[i], number, &mut all[i]);
            if writes && number + 1 == rules.rounds() {
                check_written(bench, section, place, image);
            }
        }
    }
    let rows = tasks.iter().zip(all);
    Ok(rows
        .flat_map(|(t, all)| split(t, all, 2 * engines.len()))
        .collect())
}

/// The half on tmpfs: the engine's own cost, as no device hides it.
fn tmpfs(bench: &Bench, section: &mut Section, size: u64) -> Result<()> {
    let dir = bench
        .options
        .tmpfs
        .join(format!("zebu-bench-{}", std::process::id()));
    let room = available_memory().min(free_space(&bench.options.tmpfs)) / 2;
    if size > room {
        return Err(Error::new(format!(
            "{} MiB are more than half of what is free",
            size / MIB
        )));
    }
    std::fs::create_dir_all(&dir).context(|| dir.display().to_string())?;
    let outcome = tmpfs_in(bench, section, size, &dir);
    let _ = std::fs::remove_dir_all(&dir);
    outcome
}

fn tmpfs_in(bench: &Bench, section: &mut Section, size: u64, dir: &Path) -> Result<()> {
    let engines: &[&str] = if bench.options.quick {
        &["-n", "-i threads"]
    } else {
        &["-n", "-i io_uring", "-i threads"]
    };
    let mut rows = Vec::new();
    let mut cells = Cells::new("On tmpfs: every program", "file");
    let mut writes = None;
    for (order, file) in images(bench, size)? {
        // One image at a time: tmpfs is memory.
        let copy = dir.join("t.qcow2");
        std::fs::copy(&file, &copy).context(|| copy.display().to_string())?;
        let writes = *writes.get_or_insert_with(|| bench.writes(&copy));
        let tasks = tasks(order, &copy, writes);
        let all = bench.alternate(&cell(bench, size, &tasks, engines, &BOTH));
        for row in split(&tasks, all, 2 * engines.len()) {
            cells.add(
                section,
                &label(&row),
                &row.all,
                series::fastest(&row.all, "QEMU"),
            );
            rows.push(row);
        }
        std::fs::remove_file(&copy).context(|| copy.display().to_string())?;
    }
    seed_table(section, "On tmpfs", &rows, engines, &[]);
    let ratios: Vec<f64> = rows
        .iter()
        .filter_map(|r| series::fastest(&r.all, "zebu").zip(series::fastest(&r.all, "QEMU")))
        .map(|(z, q)| z.speedup_over(q))
        .collect();
    section.verdict(Verdict::new(
        "P1",
        format!(
            "tmpfs: geometric mean over {} cells, best engine against best engine",
            ratios.len()
        ),
        Bound::AtLeast(1.5),
        geometric_mean(&ratios),
    ));
    cells.finish(section);
    Ok(())
}

fn images(bench: &Bench, size: u64) -> Result<Vec<(Order, PathBuf)>> {
    ORDERS
        .iter()
        .map(|o| Ok((*o, image(bench, size, *o)?)))
        .collect()
}

/// What a row measures.
struct Task {
    order: Order,
    file: PathBuf,
    write: bool,
}

/// Reads and, if there are to be any, writes of a file.
fn tasks(order: Order, file: &Path, writes: bool) -> Vec<Task> {
    let kinds = if writes { &[false, true][..] } else { &[false] };
    let task = |write: &bool| Task {
        order,
        file: file.to_path_buf(),
        write: *write,
    };
    kinds.iter().map(task).collect()
}

/// The programs that do the tasks, in turn.
const BOTH: [&str; 2] = ["QEMU", "zebu"];

/// A cell in which each of `programs` does every task with every engine.
fn cell<'a>(
    bench: &Bench,
    size: u64,
    tasks: &[Task],
    engines: &[&str],
    programs: &[&str],
) -> Cell<'a> {
    let contenders = |task: &Task| -> Vec<Contender> {
        let w = if task.write {
            format!(" -w --pattern {FILL}")
        } else {
            String::new()
        };
        let verb = format!("bench -c {} -d 1 -f qcow2 -s 1m -t none{w}", size / MIB);
        let file: &[&Path] = &[&task.file];
        (engines.iter())
            .flat_map(|e| [bench.qemu(&verb, e, file), bench.zebu(&verb, e, file)])
            .filter(|contender| programs.contains(&&*contender.name))
            .collect()
    };
    Cell {
        contenders: tasks.iter().flat_map(contenders).collect(),
        inputs: vec![],
        judge: None,
    }
}

/// The rows of a cell's tasks, of `each` series.
fn split(tasks: &[Task], all: Vec<Series>, each: usize) -> Vec<Row> {
    let mut all = all.into_iter();
    tasks
        .iter()
        .map(|task| Row {
            order: task.order,
            write: task.write,
            all: all.by_ref().take(each).collect(),
        })
        .collect()
}

fn label(row: &Row) -> String {
    format!(
        "t-{}{}",
        row.order.name(),
        if row.write { " -w" } else { "" }
    )
}

/// The seed's table: the same rows, seconds of each program with each engine, and ratios.
fn seed_table(
    section: &mut Section,
    place: &str,
    rows: &[Row],
    engines: &[&str],
    limits: &[Limit],
) {
    let mut heads = vec!["file".to_string()];
    for e in engines {
        heads.extend([
            format!("QEMU `{e}`"),
            format!("zebu `{e}`"),
            "speed".into(),
            "CPU".into(),
        ]);
    }
    if !limits.is_empty() {
        heads.push("limit: fio".into());
    }
    let title = format!("{place}: seconds, as in the seed");
    let mut table = Table {
        title: title.clone(),
        heads,
        rows: Vec::new(),
    };
    let mut chart = Chart::new(&title, "seconds, less is better");
    for row in rows {
        let mut line = vec![label(row)];
        for e in engines {
            let (q, z) = (
                series::find(&row.all, "QEMU", e),
                series::find(&row.all, "zebu", e),
            );
            let shown = |s: Option<&Series>| s.map_or("—".into(), |s| units::seconds(s.median()));
            let both = z.zip(q);
            line.extend([
                shown(q),
                shown(z),
                units::ratio(both.map_or(f64::NAN, |(z, q)| z.speedup_over(q))),
                units::ratio(both.map_or(f64::NAN, |(z, q)| z.cpu_against(q))),
            ]);
        }
        if !limits.is_empty() {
            let limit = limits.iter().find(|l| l.is_of(row)).and_then(Limit::series);
            line.push(limit.map_or("—".into(), |s| units::seconds(s.median())));
        }
        table.rows.push(line);
        chart.group(
            &label(row),
            row.all
                .iter()
                .filter(|s| s.ok())
                .map(|s| (s.label(), s.median())),
        );
    }
    let mut line = vec!["CPU seconds, all rows".to_string()];
    for e in engines {
        let cpu = |name: &str| {
            let of = rows.iter().filter_map(|r| series::find(&r.all, name, e));
            of.map(Series::cpu_median).sum::<f64>()
        };
        let (q, z) = (cpu("QEMU"), cpu("zebu"));
        let shown = [
            units::seconds(q),
            units::seconds(z),
            "—".into(),
            units::ratio(z / q),
        ];
        line.extend(shown);
    }
    line.resize(table.heads.len(), "—".into());
    table.rows.push(line);
    section.table(table, Some(chart));
}

fn verdicts_against_qemu(section: &mut Section, rows: &[Row], engine: &str) {
    let both: Vec<(&Row, &Series, &Series)> = rows
        .iter()
        .filter_map(|r| {
            Some((
                r,
                series::find(&r.all, "zebu", engine)?,
                series::find(&r.all, "QEMU", engine)?,
            ))
        })
        .collect();
    if let Some((row, z, q)) = both
        .iter()
        .min_by(|a, b| a.1.speedup_over(a.2).total_cmp(&b.1.speedup_over(b.2)))
    {
        section.verdict(Verdict::new(
            "P1",
            format!(
                "disk `{engine}`: the slowest cell ({}) against QEMU",
                label(row)
            ),
            Bound::AtLeast(NO_SLOWER),
            z.speedup_over(q),
        ));
        let cpu = |s: fn(&(&Row, &Series, &Series)) -> f64| both.iter().map(s).sum::<f64>();
        section.verdict(Verdict::new(
            "P1",
            format!("disk `{engine}`: CPU seconds of all cells against QEMU"),
            Bound::AtMost(0.6),
            cpu(|b| b.1.cpu_median()) / cpu(|b| b.2.cpu_median()),
        ));
    }
}

/// The orders against each other, and those requests that fall into pieces against the device.
fn verdicts_of_orders(section: &mut Section, beside: &Beside, engine: &str) {
    let own: Vec<(&Row, &Series)> = (beside.rows.iter())
        .filter_map(|row| Some((row, series::find(&row.all, "zebu", engine)?)))
        .collect();
    for (row, own) in own.iter().filter(|(row, _)| row.order == Order::Rand) {
        let limit = beside.limits.iter().find(|limit| limit.is_of(row));
        if let Some(limit) = limit.and_then(Limit::series) {
            section.verdict(Verdict::new(
                "P1",
                format!(
                    "disk `{engine}`: {} against fio's 64 KiB at random, 8 in flight",
                    label(row)
                ),
                Bound::AtLeast(0.9),
                own.speedup_over(limit),
            ));
        }
    }
    for (row, own_seconds) in &own {
        let seq = own
            .iter()
            .find(|(other, _)| other.order == Order::Seq && other.write == row.write);
        let (true, Some((_, seq))) = (matches!(row.order, Order::PartRand | Order::Reverse), seq)
        else {
            continue;
        };
        let how = if row.write { "writes" } else { "reads" };
        section.verdict(Verdict::new(
            "P1",
            format!(
                "disk `{engine}`: {how} of t-{} against zebu's own t-seq, time",
                row.order.name()
            ),
            Bound::AtMost(1.05),
            own_seconds.median() / seq.median(),
        ));
    }
}

/// What the writes have made of an image is asked of qemu-img.
fn check_written(bench: &Bench, section: &mut Section, place: &Place, image: &Path) {
    let mut check = Command::new(&bench.peers.qemu.img);
    check.args(["check", "-q", "-f", "qcow2"]).arg(place.file());
    if let Err(e) = done(check) {
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        section.note(format!(
            "WRONG: after the writes {name} does not pass qemu-img check ({e})"
        ));
    }
}
