//! Seed 000, P1: one request of 1 MiB that falls into sixteen pieces.

use super::{Experiment, NOT_SLOWER};
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::filled;
use crate::inputs::fragmented::{FILL, ORDERS, image};
use crate::measure::Case;
use crate::peers::fio::Job;
use crate::results::{self, Group, Ratio, Row, Scale, Unit};
use crate::units::{self, MIB};

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "fragmented",
    title: "Fragmented images, 1 MiB requests",
    run,
};

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    let size = bench.options.size;
    to.about = format!(
        "Images of {} whose 64 KiB clusters were written in order (`t-seq`), from the end \
         (`t-reverse`), shuffled (`t-rand`) or shuffled within each MiB (`t-part-rand`). Then \
         `bench -s 1m -d 1 -t none` over the whole image. The limit is fio: 1 MiB in order, \
         one in flight, on a part of a file without a gap.",
        units::size(size)
    );
    let (limit, start) = filled::qcow2_in_one_piece(bench, size)?;
    let mut group = Group::new(
        "1 MiB requests, one in flight",
        Unit::Throughput,
        Ratio::Speed,
    )
    .drawn(Scale::Absolute)
    .with_mean(1.6);
    for order in ORDERS {
        let file = image(bench, size, order)?;
        for write in [false, true] {
            let count = size / MIB;
            let w = match write {
                true => format!(" -w --pattern {FILL}"),
                false => String::new(),
            };
            let verb = format!("bench -c {count} -d 1 -f qcow2 -s 1m -t none{w}");
            let job = Job {
                engine: "io_uring",
                random: false,
                write,
                block: MIB,
                depth: 1,
                count,
                file: &limit,
                start,
                size,
            };
            let mut programs = vec![
                bench.qemu(&verb, "-n", &[&file]),
                bench.qemu(&verb, "-i io_uring", &[&file]),
                bench.zebu(&verb, "", &[&file]),
            ];
            programs.extend(bench.peers.fio.iter().map(|fio| fio.run(&job)));
            let all = bench.measure(Case {
                programs,
                inputs: vec![],
                judge: None,
            });
            let label = format!(
                "t-{}, {}",
                order.name(),
                if write { "write" } else { "read" }
            );
            let mib = (size / MIB) as f64;
            let row = Row::new(&label, Some(NOT_SLOWER), &all, |s| mib / s);
            to.add(&mut group, row, &all);
        }
    }
    to.groups.push(group);
    Ok(())
}
