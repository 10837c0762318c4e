//! Slices of L2 tables against whole tables.

use super::{Make, Pattern, contenders, measure, note_failures, rate};
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::big;
use crate::measure::series;
use crate::report::Section;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::units::{self, KIB, MIB, TIB};

/// Entries of the cache that are whole tables of 64 KiB, or parts of them.
pub fn table(bench: &Bench, section: &mut Section) -> Result<()> {
    let image = big::preallocated(bench, TIB)?;
    let title = "Slices against whole tables: a cache of 1 MiB";
    section.method(
        "Slices: reads of a 1 TiB image with clusters of 64 KiB and all its tables (2048 of 64 KiB), \
         whose clusters are holes of the file, which are read without the device: what is left is \
         the cost of the tables. The cache has 1 MiB, in entries of 4 KiB to a whole table.",
    );
    let mut table = Table::new(
        title,
        &[
            "entry",
            "random reads: QEMU",
            "zebu",
            "ratio",
            "sequential reads: QEMU",
            "zebu ",
            "ratio ",
        ],
    );
    let mut chart = Chart::new(title, "random reads a second, more is better");
    let entries: &[u64] = match bench.options.quick {
        true => &[4 * KIB, 64 * KIB],
        false => &[4 * KIB, 16 * KIB, 64 * KIB],
    };
    for entry in entries.iter().copied() {
        let mut row = vec![units::size(entry)];
        for random in [true, false] {
            let pattern = Pattern {
                random,
                write: false,
                depth: 32,
            };
            let label = format!("entries of {}, {}", units::size(entry), pattern.name());
            let image = &image;
            let make: Box<Make<'_>> =
                Box::new(move |count| contenders(bench, image, TIB, (MIB, entry), pattern, count));
            let (count, all) = measure(bench, pattern.depth, &[make]).remove(0)?;
            note_failures(section, &label, &all);
            let of = |name: &str| {
                series::fastest(&all, name).map_or(f64::NAN, |s| count as f64 / s.median())
            };
            let (qemu, zebu) = (of("QEMU"), of("zebu"));
            row.extend([rate(qemu), rate(zebu), units::ratio(zebu / qemu)]);
            if random {
                chart.group(&row[0], [("QEMU".into(), qemu), ("zebu".into(), zebu)]);
            }
        }
        table.say(row);
    }
    section.table(table, Some(chart));
    Ok(())
}
