//! The tables of the experiment, as the seed has them.

use super::task::{BLOCK, Layout, Task};
use super::{EMPTY, EMPTY_STEP, Ground, Measured};
use crate::measure::stats::geometric_mean;
use crate::report::Section;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::report::verdict::{Bound, NO_SLOWER, Verdict};
use crate::units::{self, KIB};

/// How it is done.
pub fn method(section: &mut Section, ground: &Ground<'_>) {
    section.method(format!(
        "`bench -w -s 4096 -S STEP -t none` into a new image, which qemu-img makes before each run. \
         Without a backing file the image is of {} and the step {} bytes, so that the writes fall all \
         over the disk; bench has no random mode. With a backing file it is of {}, not 40 GiB, since \
         every cluster of the backing file (qcow2, clusters of 64 KiB) is there, and the step near \
         0.38 of it. The number of writes is chosen for each cell so that nearly all go to new \
         clusters; it is the same for both programs. QEMU is the better of `-n` and `-i io_uring` \
         (with `--quick` the one that a probe finds better), zebu has its default engine. After the \
         first run each image has to pass `qemu-img check`.",
        units::size(EMPTY),
        EMPTY_STEP,
        units::size(ground.base_size),
    ));
    section.method(
        "Today's format has 32 subclusters a cluster; the seed's prototype had 8. They need clusters \
         of 16 KiB or more, since a subcluster has at least 512 bytes.",
    );
    section.method(
        "How a new cluster is initialised: QEMU fills it with `fallocate(FALLOC_FL_ZERO_RANGE)`, or, \
         where its driver says that it cannot (here `blkdebug` says so), by writing zeroes around the \
         data. zebu has no such switch: a new cluster lies past everything that was ever written to \
         the file, reads as zeroes already, and is neither filled nor written. A cluster that is \
         used again gets its zeroes with the data, or by fallocate beyond 64 KiB. So the columns of \
         zebu are the same figure of one run for both ways of QEMU, each measured beside it.",
    );
}

/// A cell on the terminal.
pub fn say(cell: &Measured) {
    println!(
        "{}: QEMU {:.0}, zebu {:.0} IOPS, {}",
        cell.task.label(),
        cell.rate("QEMU"),
        cell.rate("zebu"),
        units::ratio(cell.ratio())
    );
}

/// Everything that was measured. `limits` are fio's rates: (in flight, into a hole, over data).
pub fn all(section: &mut Section, measured: &[Measured], limits: &[(u64, f64, f64)]) {
    for measured in measured {
        for s in measured.all.iter().filter(|s| !s.ok()) {
            let why = s.failure.clone().unwrap_or_default();
            let label = measured.task.label();
            section.note(format!("{label}: {} is left out: {why}", s.label()));
        }
    }
    for backed in [true, false] {
        for depth in [32, 1] {
            rates(section, measured, limits, backed, depth);
        }
    }
    request_sizes(section, measured);
    cost(section, measured);
    verdicts(section, measured);
}

fn place(backed: bool) -> &'static str {
    match backed {
        true => "over a fully populated backing file",
        false => "without a backing file",
    }
}

/// The seed's table: a row a cluster size, IOPS with subclusters and without.
fn rates(
    section: &mut Section,
    measured: &[Measured],
    limits: &[(u64, f64, f64)],
    backed: bool,
    depth: u64,
) {
    let title = format!("IOPS {}, {depth} in flight", place(backed));
    let find = |layout, written| {
        let task = Task {
            layout,
            backed,
            depth,
            block: BLOCK,
            written,
        };
        measured.iter().find(|m| m.task == task)
    };
    let with_written = measured
        .iter()
        .any(|m| m.task.written && (m.task.backed, m.task.depth) == (backed, depth));
    let mut heads = vec!["Cluster size (subcluster)".to_string()];
    for state in ["on", "off"] {
        let column = |what: &str| format!("{state}: {what}");
        heads.push(column(if with_written {
            "QEMU, fallocate"
        } else {
            "QEMU"
        }));
        heads.push(column("zebu"));
        heads.push(column("ratio"));
        if with_written {
            heads.push(column("QEMU, pwritev"));
            heads.push(column("zebu beside it"));
            heads.push(column("ratio, pwritev"));
        }
    }
    let mut table = Table {
        title: title.clone(),
        heads,
        rows: Vec::new(),
    };
    let mut chart = Chart::new(&title, "writes a second, more is better");
    for cluster in clusters(measured, backed, depth) {
        let layout = |extended| Layout { cluster, extended };
        let widest = find(layout(true), false).map_or(layout(false), |m| m.task.layout);
        let mut row = vec![widest.name()];
        let mut bars = Vec::new();
        for extended in [true, false] {
            let state = if extended { "on" } else { "off" };
            let ways: &[bool] = if with_written {
                &[false, true]
            } else {
                &[false]
            };
            for written in ways {
                let cell = find(layout(extended), *written);
                let of = |name: &str| cell.map_or(f64::NAN, |m| m.rate(name));
                row.push(rate(of("QEMU")));
                row.push(rate(of("zebu")));
                row.push(units::ratio(of("zebu") / of("QEMU")));
                if *written {
                    bars.push((format!("QEMU, subclusters {state}, pwritev"), of("QEMU")));
                } else {
                    bars.push((format!("QEMU, subclusters {state}"), of("QEMU")));
                    bars.push((format!("zebu, subclusters {state}"), of("zebu")));
                }
            }
        }
        chart.group(&widest.name(), bars);
        table.rows.push(row);
    }
    if table.rows.is_empty() {
        return;
    }
    if let Some((_, hole, data)) = limits.iter().find(|l| l.0 == depth) {
        for (what, figure) in [("a sparse raw file", hole), ("a full raw file", data)] {
            let mut row = vec![format!("limit: fio, {what}"), rate(*figure)];
            row.resize(table.heads.len(), "—".into());
            table.rows.push(row);
        }
    }
    section.table(table, Some(chart));
}

fn clusters(measured: &[Measured], backed: bool, depth: u64) -> Vec<u64> {
    let mut all: Vec<u64> = measured
        .iter()
        .map(|m| m.task)
        .filter(|t| (t.backed, t.depth, t.block) == (backed, depth, BLOCK))
        .map(|t| t.layout.cluster)
        .collect();
    all.sort_unstable();
    all.dedup();
    all.reverse();
    all
}

/// The points between 4 and 32 KiB that were asked for.
fn request_sizes(section: &mut Section, measured: &[Measured]) {
    let title = "IOPS with larger requests, clusters of 64 KiB, 32 in flight";
    let heads = ["requests", "image", "subclusters", "QEMU", "zebu", "ratio"];
    let mut table = Table::new(title, &heads);
    let mut chart = Chart::new(title, "writes a second, more is better");
    for m in measured {
        let t = m.task;
        if t.layout.cluster != 64 * KIB || t.depth != 32 || t.written {
            continue;
        }
        let image = if t.backed { "backed" } else { "empty" };
        let state = if t.layout.extended { "on" } else { "off" };
        table.rows.push(vec![
            units::size(t.block),
            image.into(),
            state.into(),
            rate(m.rate("QEMU")),
            rate(m.rate("zebu")),
            units::ratio(m.ratio()),
        ]);
        let label = format!("{}, {image}, {state}", units::size(t.block));
        chart.group(&label, ["QEMU", "zebu"].map(|n| (n.to_string(), m.rate(n))));
    }
    table.rows.sort_by_key(|r| {
        let size = units::parse_size(&r[0]).unwrap_or(0);
        (r[1].clone(), r[2].clone(), size)
    });
    section.table(table, Some(chart));
}

/// What the writes cost besides time.
fn cost(section: &mut Section, measured: &[Measured]) {
    let title = "CPU, memory and host space, 32 in flight";
    let heads = [
        "image",
        "written MiB",
        "on the disk: QEMU MiB",
        "zebu MiB",
        "CPU µs a write: QEMU",
        "zebu",
        "peak MiB: QEMU",
        "zebu ",
    ];
    let mut table = Table::new(title, &heads);
    let chart_title = "Host space for each MiB written, 32 in flight";
    let mut chart = Chart::new(chart_title, "MiB, less is better");
    for m in measured {
        let t = m.task;
        if t.depth != 32 || t.block != BLOCK || t.written {
            continue;
        }
        let grown = |name: &str| {
            let space = m.space.get(name).map_or(f64::NAN, |s| *s as f64);
            space / (m.count * t.block) as f64
        };
        chart.group(
            &t.label(),
            ["QEMU", "zebu"].map(|n| (n.to_string(), grown(n))),
        );
        let space = |name: &str| m.space.get(name).map_or("—".into(), |s| units::mib(*s));
        let cpu = |name: &str| {
            m.of(name).map_or("—".into(), |s| {
                format!("{:.1}", s.cpu_median() / m.count as f64 * 1e6)
            })
        };
        let peak = |name: &str| m.of(name).map_or("—".into(), |s| units::mib(s.peak));
        table.rows.push(vec![
            t.label(),
            units::mib(m.count * t.block),
            space("QEMU"),
            space("zebu"),
            cpu("QEMU"),
            cpu("zebu"),
            peak("QEMU"),
            peak("zebu"),
        ]);
    }
    section.table(table, Some(chart));
}

fn verdicts(section: &mut Section, measured: &[Measured]) {
    let own: Vec<&Measured> = measured
        .iter()
        .filter(|m| m.task.block == BLOCK && !m.task.written && m.ratio().is_finite())
        .collect();
    for depth in [32, 1] {
        for backed in [true, false] {
            let slowest = own
                .iter()
                .filter(|m| (m.task.depth, m.task.backed) == (depth, backed))
                .min_by(|a, b| a.ratio().total_cmp(&b.ratio()));
            if let Some(slowest) = slowest {
                section.verdict(Verdict::new(
                    "P3",
                    format!(
                        "the slowest cell {}: {}",
                        place(backed),
                        slowest.task.label()
                    ),
                    Bound::AtLeast(NO_SLOWER),
                    slowest.ratio(),
                ));
            }
        }
    }
    let ratios: Vec<f64> = own.iter().map(|m| m.ratio()).collect();
    section.verdict(Verdict::new(
        "P3",
        format!("geometric mean over {} cells", ratios.len()),
        Bound::AtLeast(2.0),
        geometric_mean(&ratios),
    ));
}

/// A rate, or a dash if there is none.
pub fn rate(r: f64) -> String {
    if r.is_finite() {
        format!("{r:.0}")
    } else {
        "—".into()
    }
}
