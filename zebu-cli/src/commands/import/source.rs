//! The source: a file, a stream or a file elsewhere, read once, from its start to its end.
//!
//! A thread reads it, counts it and computes its checksums. What it read goes through a channel to
//! the conversion. The end of the source is passed on as such only if the checksums are right,
//! so that nothing is finished of a source that is not verified.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use zebu::block::{FileDriver, FileOptions, FileSpec, Format, ImageSpec, NbdSpec};
use zebu::names::Source;
use zebu::storage::{self, FileStamp, OpenFile, Queue, QueueOptions, Storage};

use super::digest::{Digests, Hashing};
use super::verdict::{Cause, Record, Trouble};
use crate::arguments::{NameOptions, block_cache, objects, size};
use crate::images::same_file;
use crate::images::streams::{self, Input};
use crate::output::Shown;
use crate::program::Context;

/// Bytes that are read at a time, and pieces of that size that wait for the conversion.
const PIECE: usize = 1 << 20;
const WAITING: usize = 4;

/// A source that was opened.
pub struct Opened {
    bytes: Bytes,
    /// The format that its name says.
    pub format: Option<Format>,
    /// The name of its file, without folders.
    pub base_name: Option<OsString>,
    /// Whether it is a stream by its name, such as standard input.
    is_stream: bool,
}

/// A file that is read more than once.
pub struct Seekable {
    pub file: File,
    /// What tells its states apart.
    state: FileStamp,
}

impl Seekable {
    fn new(file: &File) -> io::Result<Option<Seekable>> {
        Ok(match file.metadata()?.is_file() {
            true => Some(Seekable {
                file: file.try_clone()?,
                state: state(file)?,
            }),
            false => None,
        })
    }

    /// Fails if the file was written since it was opened.
    pub fn check_unchanged(&self) -> Result<(), Trouble> {
        match state(&self.file) {
            Ok(now) if now.has_content_of(&self.state) => Ok(()),
            _ => Err(Trouble::new(
                Cause::Source,
                "The source was changed while it was read",
            )),
        }
    }
}

fn state(file: &File) -> io::Result<FileStamp> {
    Ok(FileStamp::of(&file.metadata()?))
}

enum Bytes {
    File(File),
    Remote(Arc<dyn Storage>),
}

impl Opened {
    /// Opens what a name means, or with `--image-opts` the options of a file.
    pub fn open(context: &Context, name: &OsStr, options: &NameOptions) -> Result<Opened, Trouble> {
        let (file, format) = match options.image_opts {
            true => described(name).map_err(|why| Trouble::new(Cause::Other, why))?,
            false => (named(name)?, None),
        };
        let trouble = |e: zebu::Error| {
            let name = name.shown();
            Trouble::new(Cause::Source, format!("Could not open '{name}': {e}"))
        };
        if let Some(file) = file.as_ref().filter(|file| is_remote(file)) {
            let opened = file.open(OpenFile::default(), &objects::all(context));
            let opened = opened.and_then(|file| block_cache::over(context, file));
            let storage = opened.map_err(trouble)?.storage();
            return Ok(Opened {
                bytes: Bytes::Remote(storage),
                format,
                base_name: base_name_elsewhere(file),
                is_stream: false,
            });
        }
        let path = file.map_or_else(|| super::path(name).to_owned(), |file| file.path.into());
        let base_name = Path::new(&path)
            .file_name()
            .filter(|_| path != streams::STANDARD);
        let base_name = base_name.map(OsStr::to_owned);
        let input = streams::input(&path).map_err(|e| trouble(e.into()))?;
        let is_stream = matches!(input, Input::Stream(_));
        let file = match input {
            Input::Stream(file) => Ok(file),
            Input::File(path) => File::open(&path),
        };
        Ok(Opened {
            bytes: Bytes::File(file.map_err(|e| trouble(e.into()))?),
            format,
            base_name,
            is_stream,
        })
    }

    /// Whether it is the file of this path, or may be.
    pub fn is_file(&self, path: &Path) -> bool {
        match &self.bytes {
            Bytes::File(file) => same_file::is_same(&streams::name_of(file), path),
            Bytes::Remote(storage) => same_file::file_elsewhere(path, &**storage).is_some(),
        }
    }

    /// The file, if parts of it can be read in any order.
    pub fn seekable(&self) -> Result<Option<Seekable>, Trouble> {
        let found = match &self.bytes {
            Bytes::File(file) if !self.is_stream => Seekable::new(file),
            _ => Ok(None),
        };
        found.map_err(|e| Trouble::new(Cause::Source, zebu::strerror(&e).to_string()))
    }

    /// The format that its name tells, with its end where that must agree.
    pub fn format_by_name(&self) -> Option<Format> {
        let name = self.base_name.as_deref().map(Path::new);
        let ending = name.and_then(Path::extension)?;
        if ending.eq_ignore_ascii_case("dmg") {
            return Format::named("dmg");
        }
        let is_vhd =
            ending.eq_ignore_ascii_case("vhd") && self.last_sector()?.starts_with(b"conectix");
        Format::named("vpc").filter(|_| is_vhd)
    }

    /// The last 512 bytes, if they can be read now.
    fn last_sector(&self) -> Option<Vec<u8>> {
        const SECTOR: u64 = 512;
        match &self.bytes {
            Bytes::File(_) if self.is_stream => None,
            Bytes::File(file) => {
                let at = file.metadata().ok()?.len().checked_sub(SECTOR)?;
                let mut sector = vec![0; SECTOR as usize];
                file.read_exact_at(&mut sector, at).ok()?;
                Some(sector)
            }
            Bytes::Remote(storage) => {
                let at = storage.len().ok()?.checked_sub(SECTOR)?;
                let queue = crate::images::open::queue().ok()?;
                let read = storage::read_vec(&**storage, &queue, at, SECTOR as usize);
                queue.block_on(read).ok()
            }
        }
    }

    /// What is elsewhere, if parts of it can be read in any order.
    pub fn remote(&self) -> Option<Arc<dyn Storage>> {
        match &self.bytes {
            Bytes::File(_) => None,
            Bytes::Remote(storage) => Some(storage.clone()),
        }
    }

    /// All of it, if it has no more than `most` bytes.
    pub fn read_all(self, most: usize) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        let mut reader = self.bytes.reader()?;
        reader
            .by_ref()
            .take(most as u64 + 1)
            .read_to_end(&mut all)?;
        match all.len() > most {
            true => Err(io::Error::other(format!("it has more than {most} bytes"))),
            false => Ok(all),
        }
    }

    /// Begins to read it. It may have `most` bytes, and must have the checksums `wanted`.
    pub fn fetch(self, most: u64, wanted: Digests, record: &Record) -> Result<Fetched, Trouble> {
        let failed = |e: io::Error| Trouble::new(Cause::Source, zebu::strerror(&e).to_string());
        if let Bytes::Remote(storage) = &self.bytes
            && storage.len().map_err(failed)? > most
        {
            return Err(too_long(most));
        }
        let (sender, receiver) = sync_channel(WAITING);
        let record = record.clone();
        std::thread::Builder::new()
            .name("zebu-import".into())
            .spawn(move || {
                let fetched = fetch(self.bytes, most, &wanted, &record, &sender);
                if let Err(trouble) = fetched {
                    // What follows is an error for the reader.
                    record.fail(trouble);
                }
            })
            .map_err(|e| Trouble::new(Cause::Other, zebu::strerror(&e).to_string()))?;
        Ok(Fetched {
            receiver,
            piece: io::Cursor::default(),
            has_ended: false,
        })
    }
}

/// Whether it is an object, a file on an SSH server or an image in Ceph.
fn is_remote(file: &FileSpec) -> bool {
    crate::arguments::file_name::is_remote(file.driver.name())
        && file.driver.get::<NbdSpec>().is_none()
}

/// The name of a file or of what is elsewhere.
fn named(name: &OsStr) -> Result<Option<FileSpec>, Trouble> {
    match zebu::names::protocol(name).as_deref() {
        Some("http" | "https" | "s3" | "gs" | "az" | "rbd" | "ssh") => {
            FileSpec::resolve(name, None)
                .map(Some)
                .map_err(|e| Trouble::new(Cause::Other, e.to_string()))
        }
        None | Some("file") => Ok(None),
        Some(protocol) => {
            let why = format!("'{protocol}:' names no source that can be imported");
            Err(Trouble::new(Cause::Other, why))
        }
    }
}

/// The file and the format that options describe.
fn described(options: &OsStr) -> Result<(Option<FileSpec>, Option<Format>), String> {
    let spec = Source::Options(options.to_owned()).resolve(None, None);
    let spec = spec.map_err(|e| e.to_string())?;
    let mut plain = ImageSpec::new(spec.format, spec.file.clone());
    plain.bare = spec.bare;
    if spec != plain {
        return Err("The source has no options but those of its file and 'driver'".into());
    }
    let is_file = matches!(spec.file.driver, FileDriver::Any | FileDriver::File);
    if spec.file.options != FileOptions::default() || !is_file && !is_remote(&spec.file) {
        return Err("The source must be a file, an object, or what 'ssh' or 'rbd' names".into());
    }
    let format = spec.format.filter(|_| !spec.bare);
    Ok((Some(spec.file), format))
}

/// What follows the last slash of a name.
fn base_name_elsewhere(file: &FileSpec) -> Option<OsString> {
    base_name_of_url(file.name_there())
}

/// What follows the last slash of a URL.
fn base_name_of_url(url: &OsStr) -> Option<OsString> {
    let is_web = url.as_bytes().starts_with(b"http");
    let end = url
        .as_bytes()
        .iter()
        .position(|byte| is_web && b"?#".contains(byte));
    let path = &url.as_bytes()[..end.unwrap_or(url.len())];
    let base = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    (!base.is_empty()).then(|| OsStr::from_bytes(base).to_owned())
}

impl Bytes {
    /// What tells, as often as it is called, whether a file was changed.
    fn stamp(&self) -> io::Result<Box<dyn Fn() -> Option<FileStamp>>> {
        Ok(match self {
            Bytes::File(file) => {
                let file = file.try_clone()?;
                Box::new(move || {
                    let metadata = file.metadata().ok().filter(fs::Metadata::is_file)?;
                    Some(FileStamp::of(&metadata))
                })
            }
            Bytes::Remote(storage) => {
                let storage = storage.clone();
                Box::new(move || storage.stamp()?.ok())
            }
        })
    }

    /// To be used on the thread that calls.
    fn reader(self) -> io::Result<Box<dyn Read>> {
        Ok(match self {
            Bytes::File(file) => {
                streams::widen(&file);
                Box::new(file)
            }
            Bytes::Remote(storage) => Box::new(StorageReader {
                queue: Queue::new(QueueOptions::default())?,
                end: storage.len()?,
                storage,
                at: 0,
            }),
        })
    }
}

/// Reads a storage in order. An object itself reads ahead.
struct StorageReader {
    queue: Queue,
    storage: Arc<dyn Storage>,
    at: u64,
    end: u64,
}

impl Read for StorageReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = (out.len() as u64).min(self.end - self.at) as usize;
        if count > 0 {
            let read = storage::read_vec(&*self.storage, &self.queue, self.at, count);
            out[..count].copy_from_slice(&self.queue.block_on(read)?);
            self.at += count as u64;
        }
        Ok(count)
    }
}

fn too_long(most: u64) -> Trouble {
    let most = size::human(most);
    let why = format!("The source has more than the {most} of --max-download");
    Trouble::new(Cause::Limit, why)
}

/// Reads all, and sends it: pieces, and an empty one at the end.
fn fetch(
    bytes: Bytes,
    most: u64,
    wanted: &Digests,
    record: &Record,
    sender: &SyncSender<Vec<u8>>,
) -> Result<(), Trouble> {
    let failed = |e: io::Error| Trouble::new(Cause::Source, zebu::strerror(&e).to_string());
    let stamp = bytes.stamp().map_err(failed)?;
    let before = stamp();
    let mut reader = bytes.reader().map_err(failed)?;
    let mut hashing = Hashing::new(wanted);
    let mut read = 0;
    loop {
        let mut piece = vec![0; PIECE];
        let count = match reader.read(&mut piece) {
            Ok(count) => count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(failed(e)),
        };
        piece.truncate(count);
        read += count as u64;
        record.lock().bytes_read = read;
        if read > most {
            return Err(too_long(most));
        }
        if count == 0 {
            break;
        }
        hashing.add(&piece);
        if sender.send(piece).is_err() {
            // It was refused.
            return Ok(());
        }
    }
    if !FileStamp::is_same_content(stamp(), before) {
        let why = "The source was changed while it was read";
        return Err(Trouble::new(Cause::Source, why));
    }
    let found = hashing.finish();
    let verified = wanted.verify(&found);
    let mut known = record.lock();
    known.digests = Some(found);
    known.verified = verified.map_err(|why| Trouble::new(Cause::Checksum, why))?;
    drop(known);
    let _ = sender.send(Vec::new());
    Ok(())
}

/// What the thread has read. Its end comes only if the source is verified; otherwise there is an
/// error, whose cause is in the record.
pub struct Fetched {
    receiver: Receiver<Vec<u8>>,
    piece: io::Cursor<Vec<u8>>,
    has_ended: bool,
}

impl Read for Fetched {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.piece.position() == self.piece.get_ref().len() as u64 && !self.has_ended {
            let piece = self.receiver.recv();
            let piece = piece.map_err(|_| io::Error::other("the source could not be read"))?;
            self.has_ended = piece.is_empty();
            self.piece = io::Cursor::new(piece);
        }
        self.piece.read(out)
    }
}

/// The image in the source, after decompression, which may have so many bytes.
pub struct Bounded<R> {
    reader: R,
    record: Record,
    read: u64,
    /// The number, and what exceeding it means.
    bounds: super::Bounds,
}

impl<R: Read> Bounded<R> {
    pub fn new(reader: R, record: &Record, bounds: super::Bounds) -> Self {
        Bounded {
            reader,
            record: record.clone(),
            read: 0,
            bounds,
        }
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(out)?;
        self.read += count as u64;
        self.record.lock().image_bytes = self.read;
        match self.bounds.exceeded(self.read) {
            None => Ok(count),
            Some(trouble) => {
                let error = io::Error::other(trouble.reason.clone());
                self.record.fail(trouble);
                Err(error)
            }
        }
    }
}
