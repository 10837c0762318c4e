//! The four images of the first seed, made as its generator makes them: 64 KiB writes of 0xff
//! in a given order, through qemu-io, so that host clusters lie in the order of the writes.

use super::kept;
use super::random::Random;
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::peers::qemu::done;
use crate::units::{self, KIB, MIB};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The byte that they are full of, which `bench -w --pattern` writes again.
pub const FILL: u8 = 0xff;

const BLOCK: u64 = 64 * KIB;
const GROUP: u64 = MIB;

/// The order of the writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// From start to end.
    Seq,
    /// From end to start.
    Reverse,
    /// Shuffled.
    Rand,
    /// Shuffled within each MiB.
    PartRand,
}

/// All of them, in the order of the seed's table.
pub const ORDERS: [Order; 4] = [Order::PartRand, Order::Rand, Order::Reverse, Order::Seq];

impl Order {
    /// The name in the seed's table, after `t-`.
    pub fn name(self) -> &'static str {
        match self {
            Order::Seq => "seq",
            Order::Reverse => "reverse",
            Order::Rand => "rand",
            Order::PartRand => "part-rand",
        }
    }

    /// The offsets that are written, in turn. The seed shuffles anew each time; here a shuffle
    /// is the same in every run.
    pub fn offsets(self, size: u64) -> Vec<u64> {
        let mut writes: Vec<u64> = (0..size).step_by(BLOCK as usize).collect();
        let mut random = Random::new(0);
        match self {
            Order::Seq => {}
            Order::Reverse => writes.reverse(),
            Order::Rand => random.shuffle(&mut writes),
            Order::PartRand => writes
                .chunks_mut((GROUP / BLOCK) as usize)
                .for_each(|g| random.shuffle(g)),
        }
        writes
    }
}

/// The image `t-ORDER.qcow2` of that size.
pub fn image(bench: &Bench, size: u64, order: Order) -> Result<PathBuf> {
    let name = format!("images/t-{}-{}.qcow2", order.name(), units::size(size));
    kept(bench.dir.join(name), |part| {
        let mut create = Command::new(&bench.peers.qemu.img);
        create
            .args(["create", "-q", "-f", "qcow2"])
            .arg(part)
            .arg(size.to_string());
        done(create)?;
        let writes = order
            .offsets(size)
            .into_iter()
            .map(|offset| format!("write -P {FILL} {offset} {BLOCK}"));
        qemu_io(bench, part, writes)
    })
}

/// Gives commands to qemu-io, one a line.
pub fn qemu_io(bench: &Bench, image: &Path, lines: impl Iterator<Item = String>) -> Result<()> {
    let name = bench.peers.qemu.io.display().to_string();
    let mut child = Command::new(&bench.peers.qemu.io)
        .args(["-f", "qcow2"])
        .arg(image)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context(|| name.clone())?;
    if let Some(mut stdin) = child.stdin.take() {
        let text: String = lines.flat_map(|l| [l, "\n".into()]).collect();
        stdin
            .write_all(text.as_bytes())
            .and_then(|()| stdin.write_all(b"q\n"))
            .context(|| name.clone())?;
    }
    let status = child.wait().context(|| name.clone())?;
    if status.success() {
        Ok(())
    } else {
        Err(Error::new(format!("{name}: {status}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_writes_each_block_once() {
        let size = 16 * MIB;
        let all = Order::Seq.offsets(size);
        assert_eq!(all.len(), 256);
        for order in ORDERS {
            let mut offsets = order.offsets(size);
            if order != Order::Seq {
                assert_ne!(offsets, all);
            }
            if order == Order::PartRand {
                let groups = offsets.chunks(16).enumerate();
                groups.for_each(|(i, g)| assert!(g.iter().all(|o| o / GROUP == i as u64)));
            }
            offsets.sort_unstable();
            assert_eq!(offsets, all);
        }
    }
}
