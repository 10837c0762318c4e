//! Detects targets that are read as a source: creating an image truncates its file.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use zebu::block::{Device, FileSpec, NbdSpec};

/// The message about such a target.
pub const READ_FROM: &str = "The input is read from this file";

/// Whether `sources`, with the images behind them, read the file, the device or the export
/// `target`, by whatever name.
pub fn reads(sources: &[Device], target: &FileSpec) -> bool {
    match target.nbd() {
        Some(nbd) => reads_export(sources, nbd),
        None => reads_file(sources, &target.path),
    }
}

fn reads_export(sources: &[Device], target: &NbdSpec) -> bool {
    let layers = sources.iter().flat_map(Device::layers);
    let mut files = layers.flat_map(|l| [Some(&l.spec.file), l.spec.data_file.as_ref()]);
    let same = |nbd: &NbdSpec| (&nbd.server, &nbd.export) == (&target.server, &target.export);
    files.any(|file| file.and_then(|f| f.bottom().nbd()).is_some_and(same))
}

fn reads_file(sources: &[Device], target: &Path) -> bool {
    let Ok(target) = fs::metadata(target) else {
        return false;
    };
    let same = |path: &Path| {
        fs::metadata(path).is_ok_and(|m| {
            let same_device = target.rdev() != 0 && m.rdev() == target.rdev();
            same_device || (m.dev(), m.ino()) == (target.dev(), target.ino())
        })
    };
    let layers = sources.iter().flat_map(Device::layers);
    let mut files = layers.flat_map(|l| [l.file(), l.data()]);
    files.any(|file| same(file.path()))
}
