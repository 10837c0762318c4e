//! Detects targets that are read as a source, or that messages go to: creating an image truncates its
//! file.

use std::io;
use std::path::Path;
use std::sync::Arc;

use zebu::block::{Device, FileDriver, FileSpec, Layer, Objects};
pub use zebu::internal::is_same;
use zebu::storage::{self, FileStamp, OpenFile, Queue, QueueOptions, Storage};

use crate::arguments::objects;
use crate::images::streams;
use crate::program::Context;

/// The message about such a target.
pub const READ_FROM: &str = "The input is read from this file";
/// The message about a target for which nothing tells that it is another file.
const MAY_BE_READ_FROM: &str = "The input may be read from this file, which has the same size and \
                                time of change: remove it first if it is another one";
/// The message about an export of which parts stay, for which nothing tells that it is another one.
const MAY_BE_THE_SAME: &str = "The input may be read from this export, which has the same size, and \
                               the same content at its start, middle and end";
/// The message about an export that was changed to learn whether it is read, and is lost now.
const NOT_RESTORED: &str = "The byte of this export at a quarter of its size, rounded down to 4096, was \
                             inverted to learn whether the input is read from it, and could \
                            not be written back";
/// The message about a target that messages would go to.
pub const PRINTED_TO: &str = "Standard output or standard error goes to this file";

/// The message about a target that a secret or a key is read from.
pub const KEYS_FROM: &str = "A secret or a key is read from this file";

/// The message about a target that is called by the number of a descriptor.
pub const IS_OPEN: &str = "This is an open file that has content, which a new image would replace: call \
                       it by its own name";

/// Why a target that is named so is not written: `sources` or their backing files read the file,
/// device or export, under any name of this machine, or messages go to it.
pub fn refused(context: &Context, sources: &[Device], target: &FileSpec) -> Option<&'static str> {
    if reads(sources, target) {
        return Some(READ_FROM);
    }
    match is_local(target) {
        true => refused_by_command(context, &target.bottom().path),
        false => None,
    }
}

/// Why a file that is no image — the number of a process — is not written at this name.
pub fn refused_beside<'a>(
    context: &Context,
    devices: impl Iterator<Item = &'a Device>,
    path: &Path,
) -> Option<&'static str> {
    let mut files = devices
        .flat_map(Device::all_layers)
        .flat_map(Layer::storages);
    match files.any(|file| is_same(file.path(), path)) {
        true => Some(READ_FROM),
        false => refused_by_command(context, path),
    }
}

/// Why the command does not write to this name, whatever images it reads.
fn refused_by_command(context: &Context, path: &Path) -> Option<&'static str> {
    let has_keys = || objects::files(context).iter().any(|own| is_same(own, path));
    match is_printed_to(path) {
        true => Some(PRINTED_TO),
        false => has_keys().then_some(KEYS_FROM),
    }
}

/// As [`refused`], of a target that is to be a new image.
pub fn refused_new(
    context: &Context,
    sources: &[Device],
    target: &FileSpec,
) -> Option<&'static str> {
    let is_open = is_local(target) && streams::is_open_file(target.bottom().path.as_os_str());
    refused(context, sources, target).or(is_open.then_some(IS_OPEN))
}

/// Whether `sources` or their backing files read the file, device or export `target`, under any
/// name of this machine.
pub fn reads(sources: &[Device], target: &FileSpec) -> bool {
    let target = target.bottom();
    if !target.is_local() {
        return files(sources).any(|file| file.is_same(target));
    }
    let mut rules = all_files(sources).filter_map(rules);
    rules.any(|rules| is_same(rules, &target.path)) || reads_file(sources, &target.path)
}

/// The file with rules of a file that injects errors, or of one below it.
fn rules(file: &FileSpec) -> Option<&Path> {
    match &file.driver {
        FileDriver::Blkdebug(debug) => debug.config().or_else(|| rules(&debug.image)),
        FileDriver::Filter(filter) => rules(&filter.file),
        FileDriver::Image(image) => rules(&image.file),
        _ => None,
    }
}

/// Whether `source`, with the images behind it, reads one of `targets`.
pub fn reads_any(source: &Device, targets: &[Option<&FileSpec>]) -> bool {
    let mut targets = targets.iter().flatten();
    targets.any(|target| reads(std::slice::from_ref(source), target))
}

/// What becomes of the bytes of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// All of them are written, or mean nothing any more: one may be changed to learn what is read.
    Replaced,
    /// Some of them stay.
    Kept,
}

/// As [`refused`], of a target that is open and was not changed yet: also by the name of a file on
/// another machine, which may have many names, or be this one.
pub fn refused_open(
    sources: &[Device],
    targets: &[Arc<dyn Storage>],
    fate: Fate,
) -> Option<&'static str> {
    let layers = sources.iter().flat_map(Device::all_layers);
    let read: Vec<_> = layers.flat_map(Layer::storages).collect();
    let mut pairs = targets
        .iter()
        .flat_map(|target| read.iter().map(move |read| (read, target)));
    pairs.find_map(|(read, target)| same_elsewhere(&**read, &**target, fate))
}

/// Why a target is not written that may be the file `read`, if one of them is on another machine.
/// Files of the same size and time of change are told apart by a change of the target's time, which
/// is undone; exports, which have no times, by [`same_bytes`].
pub fn same_elsewhere(
    read: &dyn Storage,
    target: &dyn Storage,
    fate: Fate,
) -> Option<&'static str> {
    if !read.is_remote() && !target.is_remote() {
        return None;
    }
    if read.export().is_some() || target.export().is_some() {
        let same = same_bytes(read, target, fate);
        // What cannot be read fails with its own message later.
        return same.unwrap_or(None);
    }
    // Objects are asked for their time by a request of its own.
    if read.len().ok()? != target.len().ok()? {
        return None;
    }
    let (read_now, target_now) = (
        read.stamp_by_request()?.ok()?,
        target.stamp_by_request()?.ok()?,
    );
    let key = |stamp: FileStamp| (stamp.size, stamp.seconds);
    if key(read_now) != key(target_now) {
        return None;
    }
    let seconds = target_now.seconds;
    let other = seconds.checked_sub(1).unwrap_or(1);
    // Only the owner of a file may set its times.
    if target.set_modified(other).is_err() {
        return Some(MAY_BE_READ_FROM);
    }
    let follows = match read.stamp_by_request() {
        Some(Ok(now)) => now.seconds == other,
        _ => true,
    };
    let _ = target.set_modified(seconds);
    follows.then_some(READ_FROM)
}

/// Why a target is not written that has the bytes of `read`, where one of them is an export of an NBD
/// server. A server may have many names and a file many exports, and nothing of the protocol tells
/// which are one. So their content is compared in three places; where it is the same, a byte of a
/// target that is replaced is changed, which is seen in the source if they are one, and changed
/// back. Of a target that keeps bytes nothing is changed: a kill could leave it so.
fn same_bytes(
    read: &dyn Storage,
    target: &dyn Storage,
    fate: Fate,
) -> io::Result<Option<&'static str>> {
    const PIECE: u64 = 64 << 10;
    // Servers round the sizes of files up to blocks.
    let blocks = |length: u64| length.div_ceil(4096);
    let length = read.len()?.min(target.len()?);
    if length == 0 || blocks(read.len()?) != blocks(target.len()?) {
        return Ok(None);
    }
    let queue = Queue::new(QueueOptions::default())?;
    let piece = |of: &dyn Storage, at: u64| {
        let count = PIECE.min(length - at) as usize;
        queue.block_on(storage::read_vec(of, &queue, at, count))
    };
    let middle = length / 2 / 4096 * 4096;
    for at in [0, middle, length.saturating_sub(PIECE) / 4096 * 4096] {
        let before = piece(read, at)?;
        // Another program may write to it meanwhile.
        if before != piece(target, at)? && before == piece(read, at)? {
            return Ok(None);
        }
    }
    if fate == Fate::Kept {
        return Ok(Some(MAY_BE_THE_SAME));
    }
    // Where nothing was read before, which a server could have kept.
    let at = length / 4 / 4096 * 4096;
    let old = piece(target, at)?;
    let write = |byte: u8| queue.block_on(storage::write_slice(target, &queue, at, &[byte]));
    if write(!old[0]).is_err() {
        // Whether it is refused or has failed, it may have happened.
        let _ = write(old[0]);
        return Ok(None);
    }
    let seen = piece(read, at);
    // A second attempt goes over a new connection, if the first one was lost.
    if write(old[0]).or_else(|_| write(old[0])).is_err() {
        return Ok(Some(NOT_RESTORED));
    }
    let follows = seen?[0] == !old[0];
    Ok(follows.then_some(READ_FROM))
}

/// [`same_elsewhere`] of the local file of this name, if it can be opened, and one that is open: the
/// time of the local one is set.
pub fn file_elsewhere(path: &Path, other: &dyn Storage) -> Option<&'static str> {
    if !other.is_remote() {
        return None;
    }
    let opened = FileSpec::new(path).open(OpenFile::default(), &Objects::default());
    same_elsewhere(other, &*opened.ok()?.storage(), Fate::Kept)
}

/// [`same_elsewhere`] of the local file of this name, if it can be opened, which is read, and a target
/// that is open.
pub fn reads_elsewhere(path: &Path, target: &dyn Storage, fate: Fate) -> Option<&'static str> {
    if !target.is_remote() {
        return None;
    }
    let opened = FileSpec::new(path).open(OpenFile::default(), &Objects::default());
    same_elsewhere(&*opened.ok()?.storage(), target, fate)
}

/// Whether standard output or standard error goes to the file or block device of this name.
pub fn is_printed_to(path: &Path) -> bool {
    let mut outputs = ["/proc/self/fd/1", "/proc/self/fd/2"].into_iter();
    outputs.any(|own| is_same(own.as_ref(), path))
}

/// Whether `target` is the image's own file, or is read by what is behind it.
pub fn is_in_chain(image: &Device, target: &Path) -> bool {
    let behind = image.all_layers().skip(1);
    let mut files = behind.flat_map(Layer::storages);
    is_same(image.top().file().path(), target) || files.any(|file| is_same(file.path(), target))
}

/// Whether what is written is a file or a device of this machine.
pub fn is_local(target: &FileSpec) -> bool {
    target.bottom().is_local()
}

/// The files and exports that images and their backing files are in.
fn files(sources: &[Device]) -> impl Iterator<Item = &FileSpec> {
    all_files(sources).map(FileSpec::bottom)
}

/// The same as they are named, with the filters above them.
fn all_files(sources: &[Device]) -> impl Iterator<Item = &FileSpec> {
    let layers = sources.iter().flat_map(Device::all_layers);
    let files = layers.flat_map(|l| [Some(&l.spec.file), l.spec.data_file.as_ref()]);
    files.flatten()
}

/// Whether `sources` or their backing files read the file or block device of this name.
pub fn reads_file(sources: &[Device], target: &Path) -> bool {
    let layers = sources.iter().flat_map(Device::all_layers);
    let mut files = layers.flat_map(Layer::storages);
    files.any(|file| is_same(file.path(), target))
}
