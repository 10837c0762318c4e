//! The steps of an import.

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use zebu::block::{Device, Format, OpenOptions, Storages};
use zebu::jobs::{self, ConvertError, ConvertEvent, ConvertOptions, ImageStream, Target};
use zebu::names::Source;
use zebu::storage::{self, FileStamp, Queue, Storage};
use zebu::{ErrorKind, Limits};

use super::source::{Bounded, Opened, Seekable};
use super::verdict::{Cause, Record, Trouble};
use super::{Bounds, Digests, Wanted, Watch};
use crate::arguments::untrusted;
use crate::commands::convert::{self, stream, target};
use crate::images::named::Named;
use crate::images::new_image::NewFiles;
use crate::images::open;
use crate::output::{Progress, Shown};
use crate::program::{Context, Failure};

/// Bytes of a list of checksums at most.
const LIST: usize = 4 << 20;
/// Bytes at the start and at the end of a device that tell what is on it.
const ENDS: u64 = 1 << 20;

/// How much is done, for the thread that shows it.
#[derive(Clone, Debug, Default)]
pub struct Done(Arc<[AtomicU64; 2]>);

impl Done {
    fn set(&self, done: u64, total: u64) {
        self.0[0].store(done, Ordering::Relaxed);
        self.0[1].store(total, Ordering::Relaxed);
    }

    /// Shows it.
    pub fn show(&self, progress: &mut Progress) {
        let [done, total] = &*self.0;
        progress.resize(total.load(Ordering::Relaxed));
        // What signals do is looked at elsewhere.
        let _ = progress.set(done.load(Ordering::Relaxed));
    }
}

/// An import.
pub struct Job {
    context: Context,
    wanted: Wanted,
    record: Record,
    watch: Watch,
    /// How much is done.
    pub progress: Done,
}

impl Job {
    pub fn new(context: Context, wanted: Wanted, record: Record, watch: Watch) -> Job {
        Job {
            context,
            wanted,
            record,
            watch,
            progress: Done::default(),
        }
    }

    /// Does all of it. What fails leaves no image.
    pub fn run(self) -> Result<(), Trouble> {
        self.steps().map_err(|trouble| self.cause_of(trouble))
    }

    /// What has led to this: what a thread has met that reads, or a stop.
    fn cause_of(&self, trouble: Trouble) -> Trouble {
        let first = self.record.lock().trouble.clone();
        first.or_else(|| self.watch.stopped()).unwrap_or(trouble)
    }

    fn steps(&self) -> Result<(), Trouble> {
        let wanted = &self.wanted;
        let queue = open::queue().map_err(other)?;
        let source = Opened::open(&self.context, &wanted.source, &wanted.arguments.name)?;
        let target = Path::new(super::path(&wanted.target));
        if source.is_file(target) {
            let why = "The source and the target are the same file";
            return Err(Trouble::new(Cause::Other, why));
        }
        let digests = self.digests(&source)?;
        let format = self.format(&source)?;
        let bounds = Bounds::new(wanted.max_download);
        let seekable = source.seekable()?;
        // What is to be verified is read once, in order: a server may answer otherwise the next time.
        let remote = source.remote().filter(|_| digests.0.is_empty());
        let fetched = source.fetch(wanted.max_download, digests, &self.record)?;
        let refused = |e: zebu::Error| Trouble::of_image(&e);
        let (reader, compression) = jobs::unpacked(Box::new(fetched)).map_err(refused)?;
        self.record.lock().compression = Some(compression.map_or("none", |c| c.name()));
        let reader = Bounded::new(reader, &self.record, bounds.clone());
        let policy = untrusted::policy(&self.context);
        let stream = ImageStream::open_unpacked(&queue, Box::new(reader), format, &policy);
        let stream = stream.map_err(refused)?;
        self.note(stream.format(), stream.size());
        self.record
            .note_stream_names(stream.backing(), stream.data_file());
        if let Some(trouble) = self.record.refused_names() {
            return Err(trouble);
        }
        let arguments = convert::Arguments::of_import(
            wanted.arguments.target_format.clone(),
            wanted.arguments.options.clone(),
            [&wanted.source, &wanted.target],
            wanted.arguments.spill.clone(),
            wanted.arguments.spill_size.clone(),
        );
        let why = stream::needs_file(&arguments, &stream, false);
        // The tables of a qcow2 image may come after what they map.
        let is_better_in_place = why.is_some() || stream.format() == Format::QCOW2;
        let remote = remote.filter(|_| compression.is_none() && wanted.arguments.spill.is_none());
        let format = stream.format();
        match (seekable, why) {
            (Some(source), _) if compression.is_none() && is_better_in_place => {
                self.in_place(&queue, &arguments, stream, &source)
            }
            (_, None) => {
                let result = self.as_it_comes(&queue, &arguments, stream, &bounds);
                match (result, remote) {
                    (Err(trouble), Some(storage)) if trouble.cause == Cause::NeedsFile => {
                        self.by_ranges(&queue, &arguments, &storage, format)
                    }
                    (result, _) => result,
                }
            }
            (_, Some(why)) => match remote {
                Some(storage) => {
                    drop(stream);
                    self.by_ranges(&queue, &arguments, &storage, format)
                }
                None => self.after_spill(&queue, &arguments, stream, &why),
            },
        }
    }

    /// The checksums that the source must have.
    fn digests(&self, source: &Opened) -> Result<Digests, Trouble> {
        let mut digests = self.wanted.digests.clone();
        let Some(list) = &self.wanted.arguments.sums else {
            return Ok(digests);
        };
        let Some(name) = &source.base_name else {
            let why = "--sums needs a source that has a name";
            return Err(Trouble::new(Cause::Other, why));
        };
        let opened = Opened::open(&self.context, list, &Default::default())?;
        if opened.is_file(Path::new(super::path(&self.wanted.target))) {
            let why = "The list of checksums and the target are the same file";
            return Err(Trouble::new(Cause::Other, why));
        }
        let bytes = opened.read_all(LIST);
        let bytes = bytes.map_err(|e| {
            let why = format!("'{}': {}", list.shown(), zebu::strerror(&e));
            Trouble::new(Cause::Source, why)
        })?;
        let listed = digests.add_listed(&bytes, name);
        listed
            .map_err(|why| Trouble::new(Cause::Checksum, format!("'{}': {why}", list.shown())))?;
        Ok(digests)
    }

    /// The format that was given, or that the name of the source tells.
    fn format(&self, source: &Opened) -> Result<Option<Format>, Trouble> {
        match &self.wanted.arguments.name.format {
            // As where files are opened: the start of one does not tell.
            None => Ok(source.format.or_else(|| source.format_by_name())),
            Some(name) => match name.parse() {
                Ok(format) => Ok(Some(format)),
                Err(e) => Err(Trouble::new(Cause::Other, format!("{e}"))),
            },
        }
    }

    fn note(&self, format: Format, size: Option<u64>) {
        let mut known = self.record.lock();
        known.format = Some(format.name());
        known.virtual_size = size;
    }

    /// Converts a stream while it comes.
    fn as_it_comes(
        &self,
        queue: &Queue,
        arguments: &convert::Arguments,
        stream: ImageStream,
        bounds: &Bounds,
    ) -> Result<(), Trouble> {
        let size = stream.size();
        let is_raw = size.is_none();
        if is_raw {
            // As the disk has whole sectors.
            bounds.is_disk_of(limits(&self.context).virtual_size / 512 * 512);
        }
        let content = target::Content::stream(size, &[]);
        let spill = stream::spill(arguments).map_err(other)?;
        let (target, files, options) = self.open_target(queue, arguments, &content)?;
        let how = stream::stream_options(arguments, &target, size).map(|how| how.spill(spill));
        let result = how.map_err(other).and_then(|how| {
            if is_raw {
                bounds.fits_in(how.most);
            }
            let watched = |event| self.watched(&event, size);
            let result = jobs::convert_stream(stream, target, how, &options, watched);
            result.map_err(|e| Trouble::of_conversion(&e))
        });
        let is_read = || self.record.lock().digests.is_some();
        let result = result.and_then(|()| match is_read() {
            true => Ok(()),
            false => Err(Trouble::new(
                Cause::Refused,
                "The image ends before the source",
            )),
        });
        self.close_target(queue, files, result)?;
        if is_raw {
            let mut known = self.record.lock();
            known.virtual_size = Some(known.image_bytes.next_multiple_of(512));
        }
        Ok(())
    }

    /// Reads a file to its end, to verify it, and then again by its tables.
    fn in_place(
        &self,
        queue: &Queue,
        arguments: &convert::Arguments,
        stream: ImageStream,
        source: &Seekable,
    ) -> Result<(), Trouble> {
        let format = stream.format();
        let failed = |e| Trouble::new(Cause::Source, zebu::strerror(&e).to_string());
        stream.skip().map_err(failed)?;
        let checked = || source.check_unchanged();
        self.convert_file(queue, arguments, &source.file, format, checked)
    }

    /// Converts what is elsewhere by its tables, and nothing of it is verified.
    fn by_ranges(
        &self,
        queue: &Queue,
        arguments: &convert::Arguments,
        storage: &Arc<dyn Storage>,
        format: Format,
    ) -> Result<(), Trouble> {
        let open = |options: &OpenOptions| {
            Device::from_storages(queue, Storages::new(storage.clone()), options)
        };
        let stamp = || storage.stamp().and_then(Result::ok);
        let before = stamp();
        let checked = || match FileStamp::is_same_content(stamp(), before) {
            true => Ok(()),
            false => {
                let why = "The source was changed while it was read";
                Err(Trouble::new(Cause::Source, why))
            }
        };
        if let Ok(length) = storage.len() {
            self.record.lock().image_bytes = length;
        }
        self.convert_opened(queue, arguments, &open, format, checked)
    }

    /// Keeps a stream in a file, which is verified before it is converted.
    fn after_spill(
        &self,
        queue: &Queue,
        arguments: &convert::Arguments,
        stream: ImageStream,
        why: &str,
    ) -> Result<(), Trouble> {
        let Some(file) = stream::spill_file(arguments).map_err(other)? else {
            let why = format!("{why}; --spill DIR keeps it in a temporary file there");
            return Err(Trouble::new(Cause::NeedsFile, why));
        };
        let most = stream::spill_size(arguments).map_err(other)?;
        let format = stream.format();
        stream.keep(&file, most).map_err(|e| {
            let cause = match (e.kind(), e.raw_os_error()) {
                (io::ErrorKind::FileTooLarge, _) => Cause::Limit,
                (_, Some(_)) => Cause::Other,
                // What cannot be decompressed.
                (_, None) => Cause::Refused,
            };
            Trouble::new(cause, zebu::strerror(&e).to_string())
        })?;
        self.convert_file(queue, arguments, &file, format, || Ok(()))
    }

    /// Converts a verified file. `checked` says in the end whether it is still that.
    fn convert_file(
        &self,
        queue: &Queue,
        arguments: &convert::Arguments,
        file: &File,
        format: Format,
        checked: impl Fn() -> Result<(), Trouble>,
    ) -> Result<(), Trouble> {
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        let source = Source::Name(name.into());
        let open = |options: &OpenOptions| Device::open(queue, &source, options);
        self.convert_opened(queue, arguments, &open, format, checked)
    }

    /// Converts an image that `open` opens.
    fn convert_opened(
        &self,
        queue: &Queue,
        arguments: &convert::Arguments,
        open: &dyn Fn(&OpenOptions) -> zebu::Result<Device>,
        format: Format,
        checked: impl Fn() -> Result<(), Trouble>,
    ) -> Result<(), Trouble> {
        let how = untrusted::defaults(&self.context).format(Some(format));
        let how = how.whole_clusters(true);
        let is_unreadable = |e: &zebu::Error| e.kind() == ErrorKind::Io;
        let of_source = |e: zebu::Error| match is_unreadable(&e) {
            true => Trouble::new(Cause::Source, e.to_string()),
            false => Trouble::of_image(&e),
        };
        // First only its header, to report what that names.
        let named = how.clone().inspect(true);
        if let Ok(device) = open(&named) {
            self.note(format, Some(device.size()));
            self.record.note_names(&device);
        }
        if let Some(trouble) = self.record.refused_names() {
            return Err(trouble);
        }
        let device = open(&how.l2_cache_size(Some(crate::images::open::ONCE_THROUGH)));
        let sources = [device.map_err(of_source)?];
        let size = sources[0].size();
        let content = target::Content::of(&sources);
        let (target, files, options) = self.open_target(queue, arguments, &content)?;
        let watched = |event| self.watched(&event, Some(size));
        let result = jobs::convert(sources.into(), target, &options, watched);
        let result = result.map_err(|e| match e {
            ConvertError::Read { ref source, .. } if is_unreadable(source) => {
                Trouble::new(Cause::Source, e.to_string())
            }
            e => Trouble::of_conversion(&e),
        });
        self.close_target(queue, files, result.and_then(|()| checked()))
    }

    /// What is done with an event of a conversion.
    fn watched(&self, event: &ConvertEvent, size: Option<u64>) -> ControlFlow<()> {
        if let ConvertEvent::Progress(now) = event {
            self.progress.set(now.done, size.unwrap_or(0));
        }
        match self.watch.stopped() {
            Some(_) => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        }
    }

    /// Opens the target, unless all was stopped. If that fails before anything was written, a file that
    /// was there is left alone.
    fn open_target(
        &self,
        queue: &Queue,
        arguments: &convert::Arguments,
        content: &target::Content<'_>,
    ) -> Result<(Target, Option<NewFiles>, ConvertOptions), Trouble> {
        self.watch.begin()?;
        let mut options = ConvertOptions::default();
        match target::open(
            &self.context,
            queue,
            arguments,
            &self.wanted.target,
            content,
            &mut options,
        ) {
            Ok(opened) => Ok((opened.target, opened.files, options)),
            Err(unopened) => {
                let trouble = failed(Cause::Target, unopened.why);
                Err(self.give_up(queue, unopened.touched.map(|files| *files), trouble))
            }
        }
    }

    /// The result of filling the target. If that has failed, the target holds no image any more.
    fn close_target(
        &self,
        queue: &Queue,
        files: Option<NewFiles>,
        result: Result<(), Trouble>,
    ) -> Result<(), Trouble> {
        let files_of = files.as_ref().map(NewFiles::storages);
        let named = Named::from(files_of.unwrap_or_default());
        result.map_err(|trouble| self.give_up(queue, files, trouble))?;
        named.check().map_err(|why| failed(Cause::Target, why))
    }

    /// Clears the files of the target after `trouble`, and says what made it fail.
    fn give_up(&self, queue: &Queue, files: Option<NewFiles>, trouble: Trouble) -> Trouble {
        let trouble = self.cause_of(trouble);
        let cleared = files.map_or(Ok(()), |files| clear(queue, &files));
        if let Err(e) = cleared {
            let path = Path::new(super::path(&self.wanted.target));
            let (name, why) = (path.shown(), zebu::strerror(&e));
            let state = format!("'{name}' is incomplete, and could not be cleared: {why}");
            let reason = format!("{}; {state}", trouble.reason);
            self.record.lock().trouble = Some(Trouble::new(trouble.cause, reason));
        }
        trouble
    }
}

/// The limits of strict mode, which is on.
fn limits(context: &Context) -> Limits {
    untrusted::policy(context)
        .limits()
        .copied()
        .unwrap_or_default()
}

fn other(failure: Failure) -> Trouble {
    failed(Cause::Other, failure)
}

fn failed(cause: Cause, failure: Failure) -> Trouble {
    match failure {
        Failure::Message { text, .. } => Trouble::new(cause, text),
        Failure::Said(_) => Trouble::new(cause, "The import has failed"),
    }
}

/// Discards what was written; of a device the ends, which tell what is on it.
fn clear(queue: &Queue, files: &NewFiles) -> io::Result<()> {
    let device = files.storage();
    if !device.is_device() {
        return files.discard(queue);
    }
    let length = device.len()?;
    let ends = ENDS.min(length);
    queue.block_on(async {
        for at in [0, length - ends] {
            storage::write_zeroes(&**device, queue, at, ends).await?;
        }
        storage::flush(&**device, queue).await.map(drop)
    })
}
