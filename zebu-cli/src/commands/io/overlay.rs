//! The temporary image that takes the writes of `-s`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use zebu::block::Device;
use zebu::jobs::{CreateQcow2, NewBacking, create_qcow2};
use zebu::names::{Source, first_item, protocol};
use zebu::storage::{self, CacheMode, OpenFile, Queue, QueueOptions};

use super::opening::Opening;
use crate::arguments::file_name::as_value;
use crate::arguments::untrusted;
use crate::images::open;
use crate::output::Shown;
use crate::program::Context;

/// The directory of temporary images, without `TMPDIR`. They may be large, and `/tmp` is often
/// memory.
const DIRECTORY: &str = "/var/tmp";

/// An image in an unlinked file: the kernel frees it when the process ends in any way.
#[derive(Debug)]
pub struct Overlay {
    file: File,
    /// Options of the image behind it, if these are not in its header.
    backing: OsString,
}

impl Overlay {
    /// Creates an empty overlay over the image that `opening` names.
    ///
    /// # Errors
    ///
    /// The text that follows `can't open device NAME: `.
    pub fn new(context: &Context, opening: &Opening) -> Result<Overlay, String> {
        let queue = Queue::new(QueueOptions::default()).map_err(|e| e.to_string())?;
        let base = look_at(context, &queue, opening)?;
        let (name, backing) = match opening.source() {
            // In strict mode no name in an image is followed, not even in this one.
            Source::Name(name) if context.is_untrusted() => (None, {
                let format = base.top().format().name();
                let mut options = OsString::from(format!("driver={format},file.filename="));
                options.push(as_value(&absolute(&name)));
                under_backing(&options)
            }),
            Source::Name(name) => (Some(absolute(&name)), OsString::new()),
            Source::Options(text) => (None, under_backing(&text)),
            Source::NameWithOptions(name, text) => (Some(absolute(&name)), under_backing(&text)),
        };
        let directory = std::env::var_os("TMPDIR").map_or_else(|| DIRECTORY.into(), PathBuf::from);
        let file = tempfile::tempfile_in(&directory).map_err(|error| {
            format!(
                "Could not create a temporary file in '{}': {}",
                directory.shown(),
                zebu::strerror(&error)
            )
        })?;
        let overlay = Overlay { file, backing };
        let how = OpenFile::default().write(true).cache(CacheMode::Unsafe);
        let options =
            CreateQcow2::default()
                .size(base.size())
                .backing(name.map(|name| {
                    NewBacking::new(name).format(Some(base.top().format().name().to_owned()))
                }));
        let storage = storage::open_file(overlay.path(), how).map_err(|e| e.to_string())?;
        queue
            .block_on(create_qcow2(&queue, &*storage, None, &options, |_| {}))
            .map_err(|e| e.to_string())?;
        Ok(overlay)
    }

    /// The file, by a name that lasts as long as it is open.
    fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.file.as_raw_fd())
    }

    /// The name by which it is opened. Flushes are ignored, since it does not outlive the process.
    pub fn source(&self) -> Source {
        let path = self.path();
        let own = format!("driver=qcow2,file.filename={path},cache.direct=off,cache.no-flush=on");
        let mut options = OsString::from(own);
        options.push(&self.backing);
        Source::Options(options)
    }
}

/// Opens the backing image for its metadata.
fn look_at(context: &Context, queue: &Queue, opening: &Opening) -> Result<Device, String> {
    let format = match &opening.format {
        Some(name) => Some(name.parse().map_err(|e: zebu::Error| e.to_string())?),
        None => None,
    };
    let how = untrusted::defaults(context)
        .format(format)
        .cache(opening.cache_mode())
        .inspect(true);
    open::repaired(context, queue, &opening.source(), &how).map_err(|e| e.to_string())
}

/// A name that means the same from any directory.
fn absolute(name: &OsStr) -> OsString {
    let is_path = protocol(name).is_none();
    match std::path::absolute(Path::new(name)) {
        Ok(path) if is_path => path.into_os_string(),
        _ => name.to_owned(),
    }
}

/// The options of an image as those of a backing file, each after a comma.
fn under_backing(text: &OsStr) -> OsString {
    let mut all = OsString::new();
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let (option, after) = first_item(rest);
        all.push(",backing.");
        all.push(OsStr::from_bytes(option));
        rest = after;
    }
    all
}

#[cfg(test)]
mod tests {
    //! Guards against an overlay over another image than the one that was
    //! named.
    use super::*;

    #[test]
    fn options_are_moved_behind() {
        let under_backing = |text| under_backing(OsStr::new(text));
        assert_eq!(
            under_backing("driver=qcow2,file.filename=a,,b,lazy-refcounts=on"),
            ",backing.driver=qcow2,backing.file.filename=a,,b,backing.lazy-refcounts=on"
        );
        assert_eq!(under_backing(""), "");
        assert_eq!(under_backing("a=1,"), ",backing.a=1");
    }

    #[test]
    fn names_become_absolute() {
        let absolute = |name| absolute(OsStr::new(name)).into_string().unwrap();
        assert!(absolute("x").starts_with('/') && absolute("./x:y").ends_with("/x:y"));
        // As the name of a protocol, which is refused if there is none.
        assert_eq!(absolute("blkdebug::x"), "blkdebug::x");
        assert_eq!(absolute("json:{}"), "json:{}");
        assert_eq!(absolute("/a/b"), "/a/b");
        assert_eq!(absolute("https://h/x"), "https://h/x");
        assert_eq!(absolute("nbd+unix://?socket=a"), "nbd+unix://?socket=a");
    }
}
