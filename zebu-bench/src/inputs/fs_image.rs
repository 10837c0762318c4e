//! A file-system image of real files, raw and in other forms: what people convert.

use super::{kept, staging};
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::peers::on_path;
use crate::peers::qemu::done;
use crate::units;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How an image holds its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// qcow2, clusters as they are.
    Plain,
    /// qcow2, every cluster compressed with zlib.
    Zlib,
    /// qcow2, every cluster compressed with zstd.
    Zstd,
    /// VMDK, a stream of grains compressed with zlib.
    Stream,
    /// VHDX, blocks as they are.
    Vhdx,
    /// VDI, blocks as they are.
    Vdi,
}

impl Kind {
    /// Its name in tables and file names.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Plain => "plain",
            Kind::Zlib => "zlib",
            Kind::Zstd => "zstd",
            Kind::Stream => "streamOptimized",
            Kind::Vhdx => "VHDX",
            Kind::Vdi => "VDI",
        }
    }

    /// Its format, as the programs name it.
    pub fn format(self) -> &'static str {
        match self {
            Kind::Plain | Kind::Zlib | Kind::Zstd => "qcow2",
            Kind::Stream => "vmdk",
            Kind::Vhdx => "vhdx",
            Kind::Vdi => "vdi",
        }
    }

    /// Whether its data are compressed.
    pub fn is_compressed(self) -> bool {
        matches!(self, Kind::Zlib | Kind::Zstd | Kind::Stream)
    }

    /// The options of `convert` that make it.
    pub fn options(self) -> &'static [&'static str] {
        match self {
            Kind::Plain | Kind::Vhdx | Kind::Vdi => &[],
            Kind::Zlib => &["-c"],
            Kind::Zstd => &["-c", "-o", "compression_type=zstd"],
            Kind::Stream => &["-o", "subformat=streamOptimized"],
        }
    }
}

/// The raw image: ext4 of `size` bytes, filled to about 70 % with real files, as far as the
/// tree goes. A real image has free space too.
pub fn raw(bench: &Bench, size: u64) -> Result<PathBuf> {
    kept(path(bench, size, "raw"), |part| {
        let mke2fs =
            on_path("mke2fs").ok_or_else(|| Error::new("mke2fs is not there (e2fsprogs)"))?;
        let stage = bench.dir.join("stage");
        let _ = std::fs::remove_dir_all(&stage);
        let used = staging::stage(&bench.options.tree, &stage, size / 10 * 7)?;
        println!(
            "{} MiB of files from {}",
            used >> 20,
            bench.options.tree.display()
        );
        let mut command = Command::new(mke2fs);
        command
            .args(["-q", "-F", "-t", "ext4", "-m", "0", "-N"])
            // As many inodes as a tree of small files needs.
            .arg((size / 8192).to_string())
            .arg("-d")
            .arg(&stage)
            .arg(part)
            .arg(format!("{}k", size >> 10));
        let outcome = done(command);
        let _ = std::fs::remove_dir_all(&stage);
        outcome
    })
}

/// The image of that kind, made by qemu-img.
pub fn image(bench: &Bench, size: u64, kind: Kind) -> Result<PathBuf> {
    let raw = raw(bench, size)?;
    kept(
        path(bench, size, &format!("{}.{}", kind.name(), kind.format())),
        |part| {
            let mut command = Command::new(&bench.peers.qemu.img);
            command
                .args([
                    "convert",
                    "-m",
                    "16",
                    "-W",
                    "-f",
                    "raw",
                    "-O",
                    kind.format(),
                ])
                .args(kind.options())
                .arg(&raw)
                .arg(part);
            done(command)
        },
    )
}

/// Bytes that a file takes on its disk.
pub fn allocated(path: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(path
        .metadata()
        .context(|| path.display().to_string())?
        .blocks()
        * 512)
}

fn path(bench: &Bench, size: u64, end: &str) -> PathBuf {
    let tree = slug(&bench.options.tree.to_string_lossy());
    bench
        .dir
        .join(format!("images/fs-{tree}-{}.{end}", units::size(size)))
}

fn slug(path: &str) -> String {
    let text: String = path
        .chars()
        .map(|c| if c.is_alphanumeric() { c } else { '-' })
        .collect();
    text.trim_matches('-').to_owned()
}
