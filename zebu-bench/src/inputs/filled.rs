//! A raw file and a qcow2 image that are full of data, for requests that bypass the page cache.
//! Every block is written: a block of a file that was only reserved is answered without I/O.

use super::kept;
use super::random::Random;
use crate::bench::Bench;
use crate::error::{Context, Result};
use crate::peers::qemu::done;
use crate::units;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// A raw file of `size` bytes that do not compress.
pub fn raw(bench: &Bench, size: u64) -> Result<PathBuf> {
    kept(
        bench
            .dir
            .join(format!("images/filled-{}.raw", units::size(size))),
        |part| {
            let name = || part.display().to_string();
            let mut file = File::create(part).context(name)?;
            let mut random = Random::new(1);
            let mut buffer = vec![0; 1 << 20];
            for _ in 0..size >> 20 {
                random.fill(&mut buffer);
                file.write_all(&buffer).context(name)?;
            }
            file.sync_all().context(name)
        },
    )
}

/// The same bytes as a qcow2 image with every cluster allocated, in order.
pub fn qcow2(bench: &Bench, size: u64) -> Result<PathBuf> {
    let raw = raw(bench, size)?;
    kept(
        bench
            .dir
            .join(format!("images/filled-{}.qcow2", units::size(size))),
        |part| {
            let mut command = Command::new(&bench.peers.qemu.img);
            command
                .args(["convert", "-f", "raw", "-O", "qcow2"])
                .arg(raw)
                .arg(part);
            done(command)
        },
    )
}
