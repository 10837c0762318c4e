//! Raw images of which a known part is data: nothing, half or all of the clusters.

use super::kept;
use super::random::Random;
use crate::bench::Bench;
use crate::error::{Context, Result};
use crate::peers::qemu::done;
use crate::units::{self, KIB};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

const CLUSTER: u64 = 64 * KIB;

/// How much of the image is data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Utilization {
    /// Nothing.
    Empty,
    /// Every second cluster, as chance has it; the others are zeroes.
    Half,
    /// Every cluster.
    Full,
}

impl Utilization {
    fn name(self) -> &'static str {
        match self {
            Utilization::Empty => "empty",
            Utilization::Half => "half",
            Utilization::Full => "full",
        }
    }

    fn has(self, random: &mut Random) -> bool {
        match self {
            Utilization::Empty => false,
            // A high bit: the low ones of such generators are the worst.
            Utilization::Half => random.next() >> 63 == 1,
            Utilization::Full => true,
        }
    }
}

/// The raw image.
pub fn raw(bench: &Bench, size: u64, utilization: Utilization) -> Result<PathBuf> {
    kept(path(bench, size, utilization, "raw"), |part| {
        write(part, size, utilization).context(|| part.display().to_string())
    })
}

/// The same, compressed with zlib by qemu-img.
pub fn zlib(bench: &Bench, size: u64, utilization: Utilization) -> Result<PathBuf> {
    let raw = raw(bench, size, utilization)?;
    kept(path(bench, size, utilization, "zlib.qcow2"), |part| {
        let mut command = Command::new(&bench.peers.qemu.img);
        command
            .args([
                "convert", "-m", "16", "-W", "-c", "-f", "raw", "-O", "qcow2",
            ])
            .arg(&raw)
            .arg(part);
        done(command)
    })
}

fn path(bench: &Bench, size: u64, utilization: Utilization, end: &str) -> PathBuf {
    let name = format!("images/{}-{}.{end}", utilization.name(), units::size(size));
    bench.dir.join(name)
}

fn write(path: &Path, size: u64, utilization: Utilization) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.set_len(size)?;
    let mut random = Random::new(2);
    let mut buffer = vec![0; CLUSTER as usize];
    for offset in (0..size).step_by(CLUSTER as usize) {
        if utilization.has(&mut random) {
            random.fill(&mut buffer);
            compressible(&mut buffer);
            file.seek(SeekFrom::Start(offset))?;
            file.write_all(&buffer)?;
        }
    }
    file.sync_all()
}

/// Leaves four bits of each byte, so that it compresses to a little more than half.
fn compressible(buffer: &mut [u8]) {
    buffer
        .iter_mut()
        .for_each(|byte| *byte = b'a' + (*byte & 15));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::fs_image::allocated;

    #[test]
    fn as_much_is_data_as_the_name_says() {
        let dir = std::env::temp_dir().join(format!("zebu-bench-half-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let size = 256 * CLUSTER;
        let share = |utilization| {
            let path = dir.join("raw");
            write(&path, size, utilization).unwrap();
            assert_eq!(path.metadata().unwrap().len(), size);
            let share = allocated(&path).unwrap() as f64 / size as f64;
            std::fs::remove_file(path).unwrap();
            share
        };
        assert!(share(Utilization::Empty) < 0.01);
        assert!((0.4..0.6).contains(&share(Utilization::Half)));
        assert!(share(Utilization::Full) > 0.99);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
