//! Detects targets that are read as a source: creating an image truncates its file.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

#[cfg(feature = "object-store")]
use zebu::block::StoreSpec;
use zebu::block::{Device, FileDriver, FileSpec, Layer, NbdSpec};

/// The message about such a target.
pub const READ_FROM: &str = "The input is read from this file";

/// Whether `sources` or their backing files read the file, device or export `target`, under any
/// name.
pub fn reads(sources: &[Device], target: &FileSpec) -> bool {
    let target = target.bottom();
    match &target.driver {
        FileDriver::Nbd(nbd) => reads_export(sources, nbd),
        #[cfg(feature = "rbd")]
        FileDriver::Rbd(rbd) => files(sources).any(|file| match &file.driver {
            FileDriver::Rbd(read) => read.is_same(rbd),
            _ => false,
        }),
        #[cfg(feature = "ssh")]
        FileDriver::Ssh(ssh) => files(sources).any(|file| match &file.driver {
            FileDriver::Ssh(read) => read.is_same(ssh),
            _ => false,
        }),
        _ => reads_file(sources, &target.path),
    }
}

/// Whether `source`, with the images behind it, reads one of `targets`.
pub fn reads_any(source: &Device, targets: &[Option<&FileSpec>]) -> bool {
    let mut targets = targets.iter().flatten();
    targets.any(|target| reads(std::slice::from_ref(source), target))
}

/// Whether `target` is the image's own file, or is read by what is behind it.
pub fn is_in_chain(image: &Device, target: &Path) -> bool {
    let behind = image.all_layers().skip(1);
    let mut files = behind.flat_map(Layer::storages);
    is_same(image.top().file().path(), target) || files.any(|file| is_same(file.path(), target))
}

/// Whether two names are those of one file or device.
pub fn is_same(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| {
        let metadata = fs::metadata(path).ok()?;
        Some(match metadata.rdev() {
            0 => (metadata.dev(), metadata.ino()),
            device => (u64::MAX, device),
        })
    };
    identity(one).is_some_and(|one| Some(one) == identity(other))
}

/// Whether `sources` or their backing files read this object.
#[cfg(feature = "object-store")]
pub fn reads_object(sources: &[Device], target: &StoreSpec) -> bool {
    files(sources).any(|file| match &file.driver {
        FileDriver::Store(store) => {
            (store.kind, &store.bucket, &store.key) == (target.kind, &target.bucket, &target.key)
        }
        _ => false,
    })
}

fn reads_export(sources: &[Device], target: &NbdSpec) -> bool {
    let same = |nbd: &NbdSpec| (&nbd.server, &nbd.export) == (&target.server, &target.export);
    files(sources).any(|file| file.nbd().is_some_and(same))
}

/// The files and exports that images and their backing files are in.
fn files(sources: &[Device]) -> impl Iterator<Item = &FileSpec> {
    let layers = sources.iter().flat_map(Device::all_layers);
    let files = layers.flat_map(|l| [Some(&l.spec.file), l.spec.data_file.as_ref()]);
    files.flatten().map(FileSpec::bottom)
}

fn reads_file(sources: &[Device], target: &Path) -> bool {
    let layers = sources.iter().flat_map(Device::all_layers);
    let mut files = layers.flat_map(Layer::storages);
    files.any(|file| is_same(file.path(), target))
}
