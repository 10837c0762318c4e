//! The table at the top: each target of the project and how it came out.

use super::table::Table;
use super::verdict::Verdict;

/// The targets: name and what is asked.
const TARGETS: [(&str, &str); 8] = [
    (
        "P1",
        "1 MiB requests over shuffled clusters: on the disk no cell slower than QEMU, part-rand and \
         reverse within 5 % of seq, CPU ≤ 0.6×; on tmpfs ≥ 1.5× QEMU's best engine",
    ),
    (
        "P2",
        "threads, native, io_uring: within 10 % of fio with the same engine on a raw file; native's \
         CPU ≤ 0.67× that of threads",
    ),
    (
        "P3",
        "4 KiB writes into an empty image, with a backing file and without, subclusters on and off: \
         no cell slower than QEMU, geometric mean ≥ 2×",
    ),
    (
        "P4",
        "L2 cache of 1 table to all: a larger one is never slower, a hit ≤ 200 ns, ≥ 1.3× QEMU at \
         each size",
    ),
    (
        "P5",
        "convert to raw ≥ 3× (zlib), ≥ 2× (zstd), ≥ 1.25× (plain) QEMU, ≥ 5× go-qcow2reader; to \
         qcow2 ≥ 1.5× (plain), ≥ 6× (zlib), ≥ 2× (zstd), ≤ 1.02× its size; compare ≥ 4×",
    ),
    (
        "P6",
        "NBD on a unix socket, against qemu-nbd: 4 KiB random ≥ 1.5× with 32 in flight, ≥ 1.2× with one; \
         1 MiB in order ≥ 1.2×; vhost-user-blk against qemu-storage-daemon ≥ 1.2×",
    ),
    (
        "P7",
        "images of terabytes: not slower than QEMU; memory does not grow with the image",
    ),
    ("P8", "peak memory of convert ≤ 64 MiB, default flags"),
];

/// One row a target. A target whose experiment did not run has a row too, so that what is missing
/// shows.
pub fn table(verdicts: &[&Verdict]) -> Table {
    let mut table = Table::new(
        "",
        &[
            "target",
            "what it asks",
            "figures met",
            "the worst figure",
            "outcome",
        ],
    );
    for (name, asks) in TARGETS {
        let own: Vec<&Verdict> = verdicts
            .iter()
            .copied()
            .filter(|v| v.target == name)
            .collect();
        let mut row = vec![name.to_string(), asks.to_string()];
        row.extend(outcome(&own));
        table.rows.push(row);
    }
    table
}

/// How many figures are met, the worst, and the outcome in a word.
fn outcome(own: &[&Verdict]) -> [String; 3] {
    let measured: Vec<&Verdict> = own.iter().copied().filter(|v| v.measured()).collect();
    let Some(worst) = measured
        .iter()
        .min_by(|a, b| a.margin().total_cmp(&b.margin()))
    else {
        return ["—".into(), "—".into(), "not measured".into()];
    };
    let met = measured.iter().filter(|v| v.met()).count();
    let outcome = match (met == measured.len(), measured.len() == own.len()) {
        (true, true) => "met".into(),
        (true, false) => format!("met, but {} not measured", own.len() - measured.len()),
        (false, _) => worst.outcome(),
    };
    [
        format!("{met} of {}", own.len()),
        format!(
            "{}: {} (asked: {})",
            worst.what,
            worst.got(),
            worst.wanted()
        ),
        outcome,
    ]
}

#[cfg(test)]
mod tests {
    use super::super::verdict::Bound;
    use super::*;

    fn row(verdicts: &[Verdict], name: &str) -> Vec<String> {
        let table = table(&verdicts.iter().collect::<Vec<_>>());
        let row = table.rows.iter().find(|r| r[0] == name);
        row.expect("a row").clone()
    }

    #[test]
    fn a_target_is_met_if_all_its_figures_are() {
        let good = Verdict::new("P5", "zlib", Bound::AtLeast(3.0), 3.5);
        let bad = Verdict::new("P5", "zstd", Bound::AtLeast(2.0), 1.8);
        let worse = Verdict::new("P5", "size", Bound::AtMost(1.0), 2.0);
        let alone = row(std::slice::from_ref(&good), "P5");
        assert_eq!(alone[2..], ["1 of 1", "zlib: 3.50× (asked: ≥ 3×)", "met"]);
        let all = row(&[good, bad, worse], "P5");
        assert_eq!(all[2], "1 of 3");
        assert_eq!(all[3], "size: 2.00× (asked: ≤ 1×)");
        assert_eq!(all[4], "missed by 100.0 %");
    }

    #[test]
    fn what_was_not_measured_is_not_met() {
        let nothing = Verdict::new("P4", "hit", Bound::AtMost(200.0), f64::NAN);
        let good = Verdict::new("P4", "ratio", Bound::AtLeast(1.3), 2.0);
        assert_eq!(row(std::slice::from_ref(&nothing), "P4")[4], "not measured");
        assert_eq!(row(&[], "P3")[4], "not measured");
        assert_eq!(row(&[nothing, good], "P4")[4], "met, but 1 not measured");
    }
}
