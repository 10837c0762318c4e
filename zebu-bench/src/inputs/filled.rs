//! qcow2 images that are full of data, for requests that bypass the page cache. Every block is
//! written: a block of a file that was only reserved is answered without I/O.

use super::kept;
use super::random::Random;
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::peers::qemu::done;
use crate::units;
use serde_json::Value;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// A raw file of `size` bytes that do not compress.
fn raw(bench: &Bench, size: u64) -> Result<PathBuf> {
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
pub fn qcow2(bench: &Bench, size: u64, cluster: u64) -> Result<PathBuf> {
    let raw = raw(bench, size)?;
    let name = format!(
        "images/filled-{}-{}.qcow2",
        units::size(size),
        units::size(cluster)
    );
    kept(bench.dir.join(name), |part| {
        let mut command = Command::new(&bench.peers.qemu.img);
        command
            .args(["convert", "-m", "16", "-f", "raw", "-O", "qcow2", "-o"])
            .arg(format!("cluster_size={cluster}"))
            .arg(raw)
            .arg(part);
        done(command)
    })
}

/// The same bytes as a qcow2 image whose data lie in order and without a gap, and the host offset
/// at which they begin: fio does on that part of the file what it does on a raw file, and in the
/// same place of the disk. (Two files on one disk may differ by a third.)
pub fn qcow2_in_one_piece(bench: &Bench, size: u64) -> Result<(PathBuf, u64)> {
    let raw = raw(bench, size)?;
    let name = format!("images/filled-{}-one-piece.qcow2", units::size(size));
    let img = &bench.peers.qemu.img;
    let image = kept(bench.dir.join(name), |part| {
        let mut create = Command::new(img);
        create
            .args(["create", "-q", "-f", "qcow2", "-o", "preallocation=falloc"])
            .arg(part)
            .arg(size.to_string());
        done(create)?;
        let mut convert = Command::new(img);
        convert
            .args(["convert", "-n", "-f", "raw", "-O", "qcow2"])
            .arg(raw)
            .arg(part);
        done(convert)
    })?;
    let map = Command::new(img)
        .args(["map", "--output=json"])
        .arg(&image)
        .output()
        .context(|| "qemu-img map".into())?;
    let extents: Value = serde_json::from_slice(&map.stdout).context(|| "qemu-img map".into())?;
    match (extents[0]["length"].as_u64(), extents[0]["offset"].as_u64()) {
        (Some(length), Some(start)) if length == size => Ok((image, start)),
        _ => Err(Error::new(format!(
            "{} is not in one piece",
            image.display()
        ))),
    }
}
