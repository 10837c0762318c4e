//! The seed's `dd` lines: requests of 20 MB past the page cache, one at a time.

use super::{ENGINES, Ground};
use crate::bench::Bench;
use crate::inputs::filled;
use crate::measure::child::command;
use crate::measure::meter::Meter;
use crate::measure::{Cell, Contender, Series};
use crate::report::Section;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::units::MIB;
use std::ffi::OsString;
use std::path::Path;

/// dd's `bs=20M`.
const BLOCK: u64 = 20 * MIB;

/// A row a program and engine, `dd` on the raw file first; MiB/s written and read.
pub fn lines(bench: &Bench, section: &mut Section, ground: &Ground, writes: bool) {
    let most = if bench.options.quick { 12 } else { u64::MAX };
    let count = most.min(ground.size / BLOCK);
    section.method(format!(
        "dd: the seed's `dd bs=20M oflag=direct` and `iflag=direct`, {count} blocks, on a raw file of \
         its own, in another place of the disk; beside it the same requests of 20 MiB, one at a time, by bench on the qcow2 image."
    ));
    let title = "dd: 20 MiB requests, one at a time, MiB/s";
    let mut table = Table::new(title, &["", "write", "read"]);
    let mut chart = Chart::new(title, "MiB a second, more is better");
    let files = filled::raw(bench, ground.size)
        .and_then(|raw| Ok((raw, filled::raw_to_overwrite(bench, ground.size)?)));
    let (raw, to_overwrite) = match files {
        Ok(files) => files,
        Err(e) => return section.note(format!("the dd lines are left out: {e}")),
    };
    let directions: &[bool] = if writes { &[true, false] } else { &[false] };
    let all: Vec<Vec<Series>> = directions
        .iter()
        .map(|write| {
            bench.alternate(&Cell {
                contenders: contenders(
                    bench,
                    ground,
                    if *write { &to_overwrite } else { &raw },
                    *write,
                    count,
                ),
                inputs: vec![],
                judge: None,
            })
        })
        .collect();
    let read = all.last().map_or(&[][..], |all| all);
    for (i, series) in read.iter().enumerate() {
        let rate = |s: Option<&Series>| match s {
            Some(s) if s.ok() => (count * BLOCK / MIB) as f64 / s.median(),
            _ => f64::NAN,
        };
        let written = if writes {
            rate(all[0].get(i))
        } else {
            f64::NAN
        };
        let shown = |r: f64| {
            if r.is_finite() {
                format!("{r:.0}")
            } else {
                "—".into()
            }
        };
        chart.group(
            &series.label(),
            [
                ("write".to_string(), written),
                ("read".to_string(), rate(Some(series))),
            ],
        );
        table.say(vec![
            series.label(),
            shown(written),
            shown(rate(Some(series))),
        ]);
    }
    for s in all.iter().flatten().filter(|s| !s.ok()) {
        let why = s.failure.clone().unwrap_or_default();
        section.note(format!("dd: {} is left out: {why}", s.label()));
    }
    section.table(table, Some(chart));
}

fn contenders(
    bench: &Bench,
    ground: &Ground,
    raw: &Path,
    write: bool,
    count: u64,
) -> Vec<Contender> {
    let file = |key: &str| {
        let mut text = OsString::from(key);
        text.push(raw);
        text
    };
    let mut line = command(["dd", "bs=20M", "status=none"]);
    line.push(format!("count={count}").into());
    match write {
        true => line.extend([
            "if=/dev/zero".into(),
            file("of="),
            "oflag=direct".into(),
            "conv=notrunc".into(),
        ]),
        false => line.extend([file("if="), "of=/dev/null".into(), "iflag=direct".into()]),
    }
    let mut all = vec![Contender::new("dd on the raw file", "", line, Meter::Wall)];
    let verb = format!(
        "bench -c {count} -d 1 -f qcow2 -t none -s {BLOCK}{}",
        if write { " -w --pattern 255" } else { "" }
    );
    for engine in ENGINES {
        let flags = format!("-i {engine}");
        all.push(bench.qemu(&verb, &flags, &[&ground.qcow2]));
        all.push(bench.zebu(&verb, &flags, &[&ground.qcow2]));
    }
    all
}
