//! The tables of the experiment, as the seed has them: a row a program and engine, a column a size
//! of request, written and read.

use super::{DEPTHS, ENGINES, Measured, PATTERNS, Pattern, Task};
use crate::measure::stats::geometric_mean;
use crate::report::Section;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::report::verdict::{Bound, Verdict};
use crate::units::{self, MIB};

const PROGRAMS: [&str; 3] = ["QEMU", "zebu", "fio"];

/// Throughput: MiB/s, and IOPS of random requests.
pub fn rates(section: &mut Section, measured: &[Measured], depth: u32) {
    let title = format!("Engines, {depth} in flight: MiB/s, and IOPS at random");
    let unit = |p: Pattern| if p.random { "IOPS" } else { "MiB/s" };
    let shown = |m: &Measured, program: &str| {
        let rate = m.rate(m.of(program)?);
        let pattern = m.task.pattern;
        Some(format!(
            "{:.0}",
            match pattern.random {
                true => rate,
                false => rate * pattern.block as f64 / MIB as f64,
            }
        ))
    };
    let mut table = table(measured, depth, &title, "", &shown);
    table.heads[0] = "program and engine".into();
    for (head, (pattern, _)) in table.heads[1..].iter_mut().zip(columns()) {
        *head = format!("{head}, {}", unit(pattern));
    }
    let mut chart = Chart::new(&format!("{title}: 4K random"), "IOPS, more is better");
    for m in of_depth(measured, depth).filter(|m| m.task.pattern.random) {
        let how = if m.task.write { "writes" } else { "reads" };
        let bars = PROGRAMS
            .into_iter()
            .filter_map(|p| Some((p.to_string(), m.rate(m.of(p)?))));
        chart.group(&format!("{}, {how}", m.task.engine), bars);
    }
    section.table(table, Some(chart));
}

/// CPU time a request: microseconds.
pub fn cpu(section: &mut Section, measured: &[Measured], depth: u32) {
    let title = format!("Engines, {depth} in flight: CPU µs a request");
    let shown = |m: &Measured, program: &str| Some(format!("{:.1}", m.cpu(program)? * 1e6));
    let table = table(measured, depth, &title, "", &shown);
    let mut chart = Chart::new(
        &format!("{title}, 4K random"),
        "microseconds, less is better",
    );
    for m in of_depth(measured, depth).filter(|m| m.task.pattern.random) {
        let how = if m.task.write { "writes" } else { "reads" };
        let bars = PROGRAMS
            .into_iter()
            .filter_map(|p| Some((p.to_string(), m.cpu(p)? * 1e6)));
        chart.group(&format!("{}, {how}", m.task.engine), bars);
    }
    section.table(table, Some(chart));
}

fn of_depth(measured: &[Measured], depth: u32) -> impl Iterator<Item = &Measured> {
    measured.iter().filter(move |m| m.task.depth == depth)
}

/// The seed's columns: written and read, a size of request after the other.
fn columns() -> impl Iterator<Item = (Pattern, bool)> {
    PATTERNS.into_iter().flat_map(|p| [(p, true), (p, false)])
}

/// A table whose cells `shown` makes; columns without a figure are dashes.
fn table(
    measured: &[Measured],
    depth: u32,
    title: &str,
    first: &str,
    shown: &dyn Fn(&Measured, &str) -> Option<String>,
) -> Table {
    let mut heads = vec![first.to_string()];
    heads.extend(columns().map(|(pattern, write)| {
        let what = if write { "write" } else { "read" };
        let random = if pattern.random { " random" } else { "" };
        format!("{what} {}{random}", units::size(pattern.block))
    }));
    let mut table = Table {
        title: title.into(),
        heads,
        rows: Vec::new(),
    };
    for engine in ENGINES {
        for program in PROGRAMS {
            let mut row = vec![format!("{program} {engine}")];
            row.extend(columns().map(|(pattern, write)| {
                let task = Task {
                    engine,
                    depth,
                    pattern,
                    write,
                };
                let cell = measured.iter().find(|m| m.task == task);
                cell.and_then(|m| shown(m, program))
                    .unwrap_or_else(|| "—".into())
            }));
            if row.iter().skip(1).any(|c| c != "—") {
                table.rows.push(row);
            }
        }
    }
    table
}

/// Speed against fio, and the processor time of native against that of threads.
pub fn verdicts(section: &mut Section, measured: &[Measured]) {
    for write in [false, true] {
        if !measured.iter().any(|m| m.task.write == write) {
            continue;
        }
        let how = if write { "writes" } else { "reads" };
        for engine in ENGINES {
            for depth in DEPTHS {
                against_fio(section, measured, (engine, depth, write), how);
            }
        }
        native_and_threads(section, measured, write, how);
    }
}

fn against_fio(
    section: &mut Section,
    measured: &[Measured],
    (engine, depth, write): (&str, u32, bool),
    how: &str,
) {
    for (what, random) in [
        ("4K random", true),
        ("sequential, geometric mean of sizes", false),
    ] {
        let ratios: Vec<f64> = of_depth(measured, depth)
            .filter(|m| (m.task.engine, m.task.write) == (engine, write))
            .filter(|m| m.task.pattern.random == random)
            .filter_map(|m| Some(m.of("zebu")?.speedup_over(m.of("fio")?)))
            .collect();
        if !ratios.is_empty() {
            section.verdict(Verdict::new(
                "P2",
                format!("{how}, {engine}, {depth} in flight, {what}: speed against fio"),
                Bound::AtLeast(0.9),
                geometric_mean(&ratios),
            ));
        }
    }
}

/// The target is of native against threads in all that was measured. With one in flight both
/// make one and the same system call in zebu: each depth is told beside.
fn native_and_threads(section: &mut Section, measured: &[Measured], write: bool, how: &str) {
    let of = |program: &str, depth: u32| {
        let cpu = |engine, pattern| {
            let task = Task {
                engine,
                depth,
                pattern,
                write,
            };
            measured.iter().find(|m| m.task == task)?.cpu(program)
        };
        let ratios: Vec<f64> = PATTERNS
            .iter()
            .filter_map(|p| Some(cpu("native", *p)? / cpu("threads", *p)?))
            .collect();
        (!ratios.is_empty()).then(|| geometric_mean(&ratios))
    };
    let depths: Option<Vec<f64>> = DEPTHS.into_iter().map(|depth| of("zebu", depth)).collect();
    if let Some(ratios) = depths {
        section.verdict(Verdict::new(
            "P2",
            format!(
                "{how}: CPU a request, zebu native against zebu threads (geometric mean of both \
                 depths)"
            ),
            Bound::AtMost(0.67),
            geometric_mean(&ratios),
        ));
    }
    for depth in DEPTHS {
        // QEMU has a pool, fio a blocking call in each thread, zebu both.
        let each: Vec<String> = PROGRAMS
            .into_iter()
            .filter_map(|name| Some(format!("{name} {}", units::ratio(of(name, depth)?))))
            .collect();
        if !each.is_empty() {
            section.note(format!(
                "{how}, {depth} in flight: CPU a request, native against threads: {}",
                each.join(", ")
            ));
        }
    }
}
