//! The table of sizes: a row a size of the cache, a column a pattern.

use super::{BLOCK, Ground, Measured, Pattern, patterns, rate, run_seconds};
use crate::experiments::requests::probe;
use crate::inputs::filled;
use crate::measure::{Cell, series};
use crate::peers::fio::Job;
use crate::report::Section;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::units;

/// A row a size of the cache, IOPS and CPU.
pub fn table(ground: &Ground<'_>, section: &mut Section, measured: &[Measured]) {
    for depth in [32, 1] {
        let patterns: Vec<Pattern> = patterns(false)
            .into_iter()
            .filter(|p| p.depth == depth)
            .collect();
        let title = format!("4 KiB requests with an L2 cache of N tables, {depth} in flight: IOPS");
        let mut heads = vec!["tables in the cache".to_string()];
        for p in &patterns {
            let what = p.name();
            heads.extend([format!("{what}: QEMU"), "zebu".into(), "ratio".into()]);
        }
        heads.push("zebu: CPU µs a random read".into());
        let mut table = Table {
            title: title.clone(),
            heads,
            rows: Vec::new(),
        };
        let mut chart = Chart::new(&title, "random reads a second, more is better");
        let mut sizes: Vec<u64> = measured.iter().map(|m| m.tables).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for tables in sizes {
            let find = |p: &Pattern| {
                measured
                    .iter()
                    .find(|m| m.tables == tables && m.pattern == *p)
            };
            let mut row = vec![match tables == ground.tables {
                true => format!("all {tables}"),
                false => tables.to_string(),
            }];
            for p in &patterns {
                let of = |name: &str| find(p).map_or(f64::NAN, |m| m.rate(name));
                let (qemu, zebu) = (of("QEMU"), of("zebu"));
                row.extend([rate(qemu), rate(zebu), units::ratio(zebu / qemu)]);
            }
            let random = find(&patterns[0]);
            let cpu = random.and_then(|m| {
                let s = series::fastest(&m.all, "zebu")?;
                Some(s.cpu_median() / m.count as f64 * 1e6)
            });
            row.push(cpu.map_or("—".into(), |c| format!("{c:.1}")));
            if let Some(m) = random {
                chart.group(
                    &row[0],
                    ["QEMU", "zebu"].map(|n| (n.to_string(), m.rate(n))),
                );
            }
            if row.iter().skip(1).any(|c| c != "—") {
                table.rows.push(row);
            }
        }
        if !table.rows.is_empty() {
            let limit = limit(ground, section, &patterns, table.heads.len());
            table.rows.extend(limit);
        }
        section.table(table, Some(chart));
    }
}

/// The row of fio, on a raw file with the same bytes.
fn limit(
    ground: &Ground<'_>,
    section: &mut Section,
    patterns: &[Pattern],
    columns: usize,
) -> Option<Vec<String>> {
    let fio = ground.bench.peers.fio.as_ref()?;
    let file = match filled::raw(ground.bench, ground.size) {
        Ok(file) => file,
        Err(e) => {
            section.note(format!("the limit is left out: {e}"));
            return None;
        }
    };
    let mut row = vec!["limit: fio, raw file".to_string()];
    for p in patterns {
        let make = |count| {
            vec![fio.contender(&Job {
                engine: "native",
                random: p.random,
                write: p.write,
                block: BLOCK,
                depth: p.depth as u32,
                count,
                file: &file,
                start: 0,
                size: ground.size,
                laid_out: true,
            })]
        };
        let count = probe(
            ground.bench,
            p.depth * 64,
            p.depth,
            u64::MAX / 2,
            run_seconds(ground.bench),
            &make,
        );
        let figure = count.map_or(f64::NAN, |probed| {
            let all = ground.bench.alternate(&Cell {
                contenders: make(probed.count),
                inputs: vec![],
                judge: None,
            });
            series::fastest(&all, "fio").map_or(f64::NAN, |s| probed.count as f64 / s.median())
        });
        row.extend([rate(figure), "—".into(), "—".into()]);
    }
    row.resize(columns, "—".into());
    Some(row)
}
