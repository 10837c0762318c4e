//! Seed 004's own tables: convert with 1, 2, 4 and 8 workers, in order and in any order, through
//! the page cache and past it, of images of which all, half or nothing is data.

use super::Experiment;
use super::conversion::{content, with_output};
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::fs_image::{self, Kind};
use crate::inputs::same::same;
use crate::inputs::utilization::{self, Utilization};
use crate::measure::series::find;
use crate::measure::{Cell, Contender, Series};
use crate::report::Section;
use crate::report::cells::Cells;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::units;
use std::path::PathBuf;

/// In order or not, through the page cache or past it. `-t unsafe` is what qemu-img does without
/// `-t`; zebu without it goes past the page cache.
const WAYS: [&str; 4] = ["-t unsafe", "-W -t unsafe", "-t none", "-W -t none"];
const WORKERS: [u32; 4] = [1, 2, 4, 8];

/// The experiment `workers`.
pub struct Workers;

/// One image, and how much of the table is measured with `--quick`.
struct Image {
    name: &'static str,
    raw: PathBuf,
    qcow2: PathBuf,
    quick_ways: &'static [&'static str],
}

impl Experiment for Workers {
    fn name(&self) -> &'static str {
        "workers"
    }

    fn about(&self) -> &'static str {
        "convert to raw with 1, 2, 4, 8 workers, ordered and -W, buffered and direct (seed 004's tables)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let fs = fs_image::raw(bench, bench.size())?;
        section.method(format!(
            "`convert -m N` to raw, each pair with the same flags; the ratio is against \
             QEMU with those flags. zlib and plain: the {}. Full: every cluster compressed, to a \
             little more than half. Half: every second cluster zero, as chance has it. Empty: nothing \
             in it. `-t unsafe` is buffered (what qemu-img does by default), `-t none` direct. \
             go-qcow2reader has N workers too; it is always buffered, in any order. With `--quick` \
             only 8 workers, ordered and buffered or neither, and no go-qcow2reader; of half and empty \
             only ordered and buffered, and full not at all.",
            content(bench, &fs)?
        ));
        for image in images(bench)? {
            table(bench, section, &image);
        }
        Ok(())
    }
}

fn images(bench: &Bench) -> Result<Vec<Image>> {
    let size = bench.size();
    let mut images = Vec::new();
    for kind in [Kind::Zlib, Kind::Plain] {
        images.push(Image {
            name: kind.name(),
            raw: fs_image::raw(bench, size)?,
            qcow2: fs_image::qcow2(bench, size, kind)?,
            quick_ways: &["-t unsafe", "-W -t none"],
        });
    }
    for (name, utilization, quick_ways) in [
        ("full", Utilization::Full, &[][..]),
        ("half", Utilization::Half, &["-t unsafe"]),
        ("empty", Utilization::Empty, &["-t unsafe"]),
    ] {
        if bench.options.quick && quick_ways.is_empty() {
            continue;
        }
        images.push(Image {
            name,
            raw: utilization::raw(bench, size, utilization)?,
            qcow2: utilization::zlib(bench, size, utilization)?,
            quick_ways,
        });
    }
    Ok(images)
}

fn table(bench: &Bench, section: &mut Section, image: &Image) {
    let quick = bench.options.quick;
    let workers = if quick { &WORKERS[3..] } else { &WORKERS[..] };
    let ways = if quick { image.quick_ways } else { &WAYS };
    let title = format!("Convert of {} with N workers: seconds", image.name);
    let mut heads = vec!["workers".to_string()];
    for way in ways {
        heads.extend([format!("`{way}`: QEMU"), "zebu".into(), "ratio".into()]);
    }
    if !quick {
        heads.push("go-qcow2reader".into());
    }
    let mut summary = Table {
        title: title.clone(),
        heads,
        rows: Vec::new(),
    };
    let mut chart = Chart::new(&title, "seconds, less is better");
    let mut cells = Cells::new(
        &format!("Convert of {}: every program", image.name),
        "flags",
    );
    for m in workers {
        let mut row = vec![m.to_string()];
        let mut go = None;
        for way in ways {
            let flags = format!("-m {m} {way}");
            let go_too = !quick && way == &ways[0];
            let all = measure(bench, image, &flags, go_too.then_some(*m));
            let qemu = find(&all, "QEMU", &flags);
            let zebu = find(&all, "zebu", &flags);
            cells.add(section, &flags, &all, qemu);
            let shown = |s: Option<&Series>| s.map_or("—".into(), |s| units::seconds(s.median()));
            let ratio = zebu.zip(qemu).map_or(f64::NAN, |(z, q)| z.speedup_over(q));
            row.extend([shown(qemu), shown(zebu), units::ratio(ratio)]);
            let bars = [("QEMU", qemu), ("zebu", zebu)];
            chart.group(
                &flags,
                bars.into_iter()
                    .filter_map(|(n, s)| Some((n.to_string(), s?.median()))),
            );
            go = go.or_else(|| {
                all.into_iter()
                    .find(|s| s.name == "go-qcow2reader" && s.ok())
            });
        }
        if !quick {
            row.push(go.map_or("—".into(), |s| units::seconds(s.median())));
        }
        summary.rows.push(row);
    }
    section.table(summary, Some(chart));
    cells.finish(section);
}

/// Runs a cell; with go-qcow2reader if it is given a number of workers.
fn measure(bench: &Bench, image: &Image, flags: &str, go: Option<u32>) -> Vec<Series> {
    let verb = "convert -f qcow2 -O raw";
    let input: &[&std::path::Path] = &[&image.qcow2];
    let mut contenders = vec![
        with_output(bench, bench.qemu(verb, flags, input), "qemu.raw"),
        with_output(bench, bench.zebu(verb, flags, input), "zebu.raw"),
    ];
    if let Some((peer, workers)) = bench.peers.go.as_ref().zip(go) {
        let go = peer.contender(&image.qcow2, Some(workers));
        contenders.push(with_output(bench, go, "go.raw"));
    }
    bench.alternate(&Cell {
        contenders,
        inputs: vec![image.qcow2.clone()],
        judge: Some(Box::new(|c: &Contender, _: &_| {
            let output = c.output.as_ref();
            output.map_or(Ok(()), |output| same(output, &image.raw))
        })),
    })
}
