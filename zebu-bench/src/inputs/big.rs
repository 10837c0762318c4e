//! Images of terabytes that take little space on the disk.

use super::fragmented::qemu_io;
use super::kept;
use crate::bench::Bench;
use crate::error::Result;
use crate::peers::qemu::done;
use crate::units::{self, KIB};
use std::path::{Path, PathBuf};
use std::process::Command;

/// An image without a cluster.
pub fn empty(bench: &Bench, size: u64) -> Result<PathBuf> {
    kept(
        bench
            .dir
            .join(format!("images/empty-{}.qcow2", units::size(size))),
        |part| create(bench, part, size),
    )
}

/// An image with one cluster of data in each `step` bytes.
pub fn scattered(bench: &Bench, size: u64, step: u64) -> Result<PathBuf> {
    let name = format!(
        "images/scattered-{}-{}.qcow2",
        units::size(size),
        units::size(step)
    );
    kept(bench.dir.join(name), |part| {
        create(bench, part, size)?;
        let writes = (0..size / step).map(|i| format!("write -P 0xff {} {}", i * step, 64 * KIB));
        qemu_io(bench, part, writes)
    })
}

fn create(bench: &Bench, path: &Path, size: u64) -> Result<()> {
    let mut command = Command::new(&bench.peers.qemu.img);
    command
        .args(["create", "-q", "-f", "qcow2"])
        .arg(path)
        .arg(size.to_string());
    done(command)
}
