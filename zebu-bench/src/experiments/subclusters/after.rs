//! What a random fill leaves: fragments, space taken, and how fast the disk is read in order.

use super::task::{BLOCK, Layout};
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::experiments::requests::scattering_step;
use crate::inputs::fragmented::{Order, image};
use crate::inputs::fs_image::allocated;
use crate::measure::child;
use crate::measure::{Cell, series};
use crate::peers::on_path;
use crate::report::Section;
use crate::report::machine::said;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::units::{self, KIB, MIB};
use std::path::{Path, PathBuf};

/// Requests of the fill in flight.
const DEPTH: u64 = 32;

/// Fills images of each layout by each program, block by block in scattered order, and looks at
/// them; beside them one that was written in order.
pub fn random_fill(bench: &Bench, section: &mut Section) -> Result<()> {
    let size = bench.size();
    let title = "After a random fill: fragments, space and sequential reads";
    let heads = [
        "image",
        "filled by",
        "extents in the image",
        "in the file system",
        "MiB on the disk",
        "read by QEMU, MiB/s",
        "by zebu, MiB/s",
        "ratio",
    ];
    section.method(format!(
        "After a random fill: every 4 KiB block of an empty image of {} is written once in scattered \
         order, {DEPTH} in flight, by QEMU (`-n`) or by zebu. Then extents of `qemu-img map` and of \
         filefrag, blocks of the file, and sequential reads of 1 MiB (`bench -d 1 -s 1m -t none`) by \
         both programs. The last row is an image that was written in order.",
        units::size(size)
    ));
    let mut table = Table::new(title, &heads);
    let mut chart = Chart::new(title, "MiB a second, more is better");
    for layout in layouts(bench.options.quick) {
        for program in ["QEMU", "zebu"] {
            let label = format!(
                "{}{}",
                layout.name(),
                if layout.extended {
                    ""
                } else {
                    ", no subclusters"
                }
            );
            let file = bench.output(&format!("fill-{program}.qcow2"));
            let row = fill(bench, layout, program, size, &file)
                .and_then(|()| look(bench, &file, size, &label, program));
            let _ = std::fs::remove_file(&file);
            match row {
                Ok(row) => add(&mut table, &mut chart, row),
                Err(e) => section.note(format!("{label}, filled by {program}, is left out: {e}")),
            }
        }
    }
    let in_order = image(bench, size, Order::Seq)?;
    let row = look(
        bench,
        &in_order,
        size,
        "64K, no subclusters",
        "QEMU, in order",
    )?;
    add(&mut table, &mut chart, row);
    section.table(table, Some(chart));
    Ok(())
}

fn layouts(quick: bool) -> Vec<Layout> {
    let layout = |cluster, extended| Layout { cluster, extended };
    let mut all = vec![layout(64 * KIB, false)];
    if !quick {
        all.extend([
            layout(64 * KIB, true),
            layout(2 * MIB, true),
            layout(4 * KIB, false),
            layout(16 * KIB, false),
            layout(128 * KIB, true),
            layout(2 * MIB, false),
        ]);
    }
    all
}

/// What was found of one image.
struct Found {
    label: String,
    program: String,
    extents: [String; 2],
    space: u64,
    /// MiB a second, by QEMU and by zebu.
    read: [f64; 2],
}

fn add(table: &mut Table, chart: &mut Chart, found: Found) {
    let [qemu, zebu] = found.read;
    let [in_image, in_file] = found.extents;
    let group = format!("{}, by {}", found.label, found.program);
    chart.group(
        &group,
        [("read by QEMU".into(), qemu), ("by zebu".into(), zebu)],
    );
    table.say(vec![
        found.label,
        found.program,
        in_image,
        in_file,
        units::mib(found.space),
        super::tables::rate(qemu),
        super::tables::rate(zebu),
        units::ratio(zebu / qemu),
    ]);
}

fn fill(bench: &Bench, layout: Layout, program: &str, size: u64, file: &Path) -> Result<()> {
    let _ = std::fs::remove_file(file);
    let options = layout.options();
    let create = format!("create -q -f qcow2 -o {options}");
    let size_text = PathBuf::from(size.to_string());
    let verb = format!(
        "bench -c {} -d {DEPTH} -f qcow2 -t none -s {BLOCK} -S {} -w --pattern 1",
        size / BLOCK,
        scattering_step(size, BLOCK)
    );
    let fill = match program {
        "zebu" => bench.zebu(&verb, "", &[file]),
        _ => bench.qemu(&verb, "-n", &[file]),
    };
    let scratch = bench.scratch();
    child::run(
        &bench.qemu(&create, "", &[file, &size_text]).command,
        &scratch,
    )?;
    child::run(&fill.command, &scratch).map(|_| ())
}

fn look(bench: &Bench, file: &Path, size: u64, label: &str, program: &str) -> Result<Found> {
    let verb = format!("bench -c {} -d 1 -f qcow2 -s 1m -t none", size / MIB);
    let all = bench.alternate(&Cell {
        contenders: vec![
            bench.qemu(&verb, "-n", &[file]),
            bench.zebu(&verb, "", &[file]),
        ],
        inputs: vec![],
        judge: None,
    });
    let rate = |name: &str| {
        series::fastest(&all, name).map_or(f64::NAN, |s| (size / MIB) as f64 / s.median())
    };
    Ok(Found {
        label: label.into(),
        program: program.into(),
        extents: [in_image(bench, file)?.to_string(), in_file_system(file)],
        space: allocated(file)?,
        read: [rate("QEMU"), rate("zebu")],
    })
}

/// Extents of the guest's disk that lie in one piece in the image.
fn in_image(bench: &Bench, file: &Path) -> Result<usize> {
    let map = bench.qemu("map -f qcow2 --output=json", "", &[file]);
    let said = child::run(&map.command, &bench.scratch())?.stdout;
    count_extents(&said)
}

fn count_extents(json: &str) -> Result<usize> {
    let map: serde_json::Value = serde_json::from_str(json).context(|| "qemu-img map".into())?;
    let extents = map
        .as_array()
        .ok_or_else(|| Error::new("qemu-img map gives no list"))?;
    Ok(extents.iter().filter(|e| e["data"] == true).count())
}

/// Extents of the file, as filefrag counts them; a dash without it.
fn in_file_system(file: &Path) -> String {
    let Some(filefrag) = on_path("filefrag") else {
        return "—".into();
    };
    let line = said(&filefrag.to_string_lossy(), &[&file.to_string_lossy()]);
    filefrag_count(&line).map_or("—".into(), |n| n.to_string())
}

/// `FILE: 12 extents found`.
fn filefrag_count(line: &str) -> Option<u64> {
    let (before, _) = line.rsplit_once(" extent")?;
    before.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_counted_where_there_are_data() {
        let json = r#"[{"start":0,"data":true},{"start":1,"data":false},{"start":2,"data":true}]"#;
        assert_eq!(count_extents(json), Ok(2));
        assert!(count_extents("{}").is_err() && count_extents("x").is_err());
    }

    #[test]
    fn the_line_of_filefrag_is_read() {
        assert_eq!(filefrag_count("/a b: 12 extents found"), Some(12));
        assert_eq!(filefrag_count("f: 1 extent found"), Some(1));
        assert_eq!(filefrag_count("f: no"), None);
    }
}
