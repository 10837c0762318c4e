//! Opening an image and the files that it names, as far as the caller's policy allows.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::pin::Pin;
use std::sync::Arc;

use super::device::{Device, Layer, Stamped, WriteMode};
use super::objects::Objects;
use super::opened::{ATTEMPTS, Identity, OpenedFile, OpenedImage, REPLACED};
use super::resolver::{NameResolver, Paths};
use super::spec::{
    BackingSpec, BlkdebugSpec, CommonOptions, DetectZeroes, FileDriver, FileSpec, ImageSpec,
    Locking, NATIVE_NEEDS_DIRECT,
};
use super::stacked::Stacked;
use crate::drivers::qcow2::{CacheOptions, SnapshotName, WriteOptions};
use crate::drivers::{
    BackingName, BoxFuture, Format, Guess, Limits, OpenRequest, OtherFiles, Purpose, Qcow2Opening,
    Raw, RawPart, probe,
};
#[cfg(feature = "cache")]
use crate::storage::BlockCache;
use crate::storage::{
    Action, Blkdebug, CacheMode, EngineKind, FileStamp, LockRequest, OpenFile, Queue, Storage,
    Window,
};
use crate::{Error, Result, printable};

/// Images in one chain at most: each takes open files and caches.
const MAX_CHAIN: usize = 200;

/// Which files may be opened because an image names them.
///
/// ```no_run
/// use zebu::{Device, ErrorKind, Limits, OpenOptions, Policy, Queue, QueueOptions, Source};
///
/// let queue = Queue::new(QueueOptions::default())?;
/// let limits = Limits::default().virtual_size(1 << 40);
/// let options = OpenOptions::default().policy(Policy::Untrusted(limits));
/// match Device::open(&queue, &Source::Name("upload.qcow2".into()), &options) {
///     Ok(device) => println!("{} bytes", device.size()),
///     Err(error) if error.kind() == ErrorKind::Limit => println!("too large: {error}"),
///     Err(error) => return Err(error),
/// }
/// # Ok::<(), zebu::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Policy {
    /// All, as in qemu-img.
    #[default]
    Follow,
    /// None: a backing file, a data file or an extent in another file is an error.
    Nothing,
    /// None, and the image itself may be malicious: strict mode, the program's `--untrusted`. Each
    /// of several images has its own limits.
    ///
    /// - A [`Source::Name`](crate::Source::Name) is the path of a file. `json:` names and names
    ///   with a protocol (`file:` among them) are refused.
    /// - No file is opened because a header names it. Files that the caller's options name
    ///   (`backing.file.filename=…`, `data-file.filename=…`) are opened, and are untrusted too.
    /// - The format of an image that is opened for writing must be given. It is not guessed from
    ///   what a guest may have written.
    /// - The [`Limits`] hold.
    Untrusted(Limits),
}

impl Policy {
    /// The limits that images are held to, if there are any.
    pub fn limits(&self) -> Option<&Limits> {
        match self {
            Policy::Untrusted(limits) => Some(limits),
            Policy::Follow | Policy::Nothing => None,
        }
    }
}

options! {
    /// How to open a [`Device`].
    #[derive(Clone, Debug, Default)]
    pub struct OpenOptions {
        /// The format; None: it is found by the content.
        pub format: Option<Format>,
        /// Take a file for a raw disk that QEMU takes for one when the format is not given, though it
        /// looks like something else: an archive, a compressed file, an image in an unusual form.
        /// [`ImageSpec::looks_like`] tells. Else it is refused, or read as what it is. No effect
        /// under [`Policy::Untrusted`].
        pub guess_as_qemu: bool,
        /// Open for writing too.
        pub write: bool,
        /// Whether I/O is direct, and when it is durable.
        pub cache: CacheMode,
        /// Open although another process may write to the image (`-U`).
        pub force_share: bool,
        /// Refuse also a raw image that another process has open for writing, as is done for qcow2
        /// images.
        pub exclude_writers: bool,
        /// The formats of the chain when it was opened before, the image's own first. An image whose
        /// format is not given, and whose content now says another one, is refused before anything that
        /// it names is opened: a guest can write the header of another format to a raw disk.
        pub formats_before: Vec<Format>,
        /// Whether the length of a raw image may change while it is open.
        pub length: Length,
        /// Which other files may be opened.
        pub policy: Policy,
        /// Leave the backing file closed. Its data read as unallocated.
        pub no_backing: bool,
        /// Open for the metadata only: no data file and no backing file. An encrypted image opens,
        /// and reads are refused.
        pub inspect: bool,
        /// Open the top image to check or repair it: damage is no error, and its tables are not
        /// read.
        pub check: bool,
        /// The last data cluster of the file of a qcow2 image must be complete: the file has come from
        /// elsewhere, and may have been cut off. Else what it lacks reads as zeroes.
        pub whole_clusters: bool,
        /// Bytes of cached L2 tables; None: enough for the disk, up to 32 MiB.
        pub l2_cache_size: Option<u64>,
        /// Bytes of a slice of an L2 table, the unit of that cache; None: 4 KiB.
        pub l2_cache_entry_size: Option<u64>,
        /// Carry out discards (`discard=unmap`): free the clusters, and punch holes into the file
        /// where its space becomes free. None: by the options of the image, else no.
        pub discard: Option<bool>,
        /// Look for zeroes in what is written, and store these as such. None: by the options of the
        /// image, else no.
        pub detect_zeroes: Option<super::DetectZeroes>,
        /// Store dirty bitmaps with each flush, not only when the device is closed: after a crash,
        /// bitmaps of an image that was not written since are consistent. Costs writes and three
        /// flushes of the file for each flush after a change.
        pub store_bitmaps: bool,
        /// Open this internal snapshot, read-only, instead of the active disk.
        pub snapshot: Option<SnapshotName>,
        /// Credentials and secrets by the ids that names may have.
        pub objects: Objects,
        /// Where blocks of files on other machines are kept, which are opened to be read.
        #[cfg(feature = "cache")]
        pub block_cache: Option<BlockCache>,
    }
}

/// Whether the length of a raw image may change while it is open, and who may change it. In other
/// formats only the image's writer changes the length of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Length {
    /// Other processes may change it.
    #[default]
    Shared,
    /// No other process may change it: NBD clients rely on the size.
    Fixed,
    /// This process is about to change it.
    Changing,
}

impl Device {
    /// Opens an image and, unless disabled, its backing chain.
    pub(crate) async fn open_with(
        queue: &Queue,
        spec: ImageSpec,
        options: &OpenOptions,
        names: &dyn NameResolver,
    ) -> Result<Device> {
        let shared = options.force_share || spec.options.common.force_share == Some(true);
        if options.write && shared {
            // Without locks, two writers would take the same clusters.
            let why = "force-share=on can only be used with read-only images";
            return Err(Error::Refused(why.into()));
        }
        let mut opening = Opening::new(queue, options, names);
        opening.chain(spec).await?;
        Ok(opening.into_device())
    }

    /// [`Device::open_with`] of an image whose own file, and data file, the caller has opened and
    /// locked: no other program gets at them in between.
    pub(crate) async fn open_over(
        queue: &Queue,
        spec: ImageSpec,
        options: &OpenOptions,
        names: &dyn NameResolver,
        file: &OpenedFile,
        data: Option<Arc<dyn Storage>>,
    ) -> Result<Device> {
        let mut opening = Opening::new(queue, options, names);
        opening.top = Some(file);
        opening.data = data;
        opening.chain(spec).await?;
        Ok(opening.into_device())
    }

    /// Opens an image in a storage, which may be in memory. Blocks.
    ///
    /// No file is opened because the image names it, whatever [`OpenOptions::policy`] is: a data
    /// file is an error, and so is a backing file unless [`OpenOptions::no_backing`] is set. The
    /// options for opening and locking files are ignored.
    ///
    /// # Errors
    ///
    /// If the image is damaged, is refused by [`OpenOptions::policy`], or cannot be read.
    ///
    /// # Panics
    ///
    /// Within a future of the same queue: see [`Queue::block_on`].
    pub fn from_storage(
        queue: &Queue,
        storage: Arc<dyn Storage>,
        options: &OpenOptions,
    ) -> Result<Device> {
        Device::from_storages(queue, Storages::new(storage), options)
    }

    /// [`Device::from_storage`] for an image with a data file or a backing file, which the caller
    /// has opened. Blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Device::from_storage`].
    ///
    /// # Panics
    ///
    /// Within a future of the same queue: see [`Queue::block_on`].
    pub fn from_storages(
        queue: &Queue,
        storages: Storages,
        options: &OpenOptions,
    ) -> Result<Device> {
        let Storages {
            image,
            data,
            backing,
        } = storages;
        let policy = match options.policy {
            Policy::Follow => Policy::Nothing,
            strict => strict,
        };
        let options = &OpenOptions {
            policy,
            ..options.clone()
        };
        let mut spec = ImageSpec::new(options.format, FileSpec::new(image.path()));
        let mut opening = Opening::new(queue, options, &Paths);
        opening.data = data;
        opening.has_backing = backing.is_some();
        queue.block_on(async {
            let format = opening.format(&mut spec, &*image, Role::Top).await?;
            opening.image(spec, image, format, Role::Top).await
        })?;
        let write = opening.write_mode();
        let (mut layers, mut nested) = (opening.layers, opening.nested.into_inner());
        if let Some((behind, files)) = backing.map(Device::into_parts) {
            if let (Some(above), Some(below)) = (layers.last(), behind.first()) {
                above.image.check_backing(&*below.image)?;
            }
            layers.extend(behind);
            nested.extend(files);
        }
        let mut device = Device::new(layers, options.inspect, write);
        device.nested = nested;
        Ok(device)
    }
}

options! {
    /// An image in opened storages, for [`Device::from_storages`].
    #[derive(Debug)]
    pub struct Storages {
        /// The image.
        pub image: Arc<dyn Storage>,
        /// Its external data file.
        pub data: Option<Arc<dyn Storage>>,
        /// Its backing file, whether the image names one or not.
        pub backing: Option<Device>,
    }
}

impl Storages {
    /// An image without other files.
    pub fn new(image: Arc<dyn Storage>) -> Self {
        Storages {
            image,
            data: None,
            backing: None,
        }
    }
}

/// A chain that is being opened.
struct Opening<'a> {
    queue: &'a Queue,
    options: &'a OpenOptions,
    names: &'a dyn NameResolver,
    layers: Vec<Layer>,
    /// The files of the chain: a file that occurs twice is a loop.
    seen: Vec<Identity>,
    /// The file of the top image, if the caller has opened and locked it.
    top: Option<&'a OpenedFile>,
    /// The data file of the top image, if the caller has opened it.
    data: Option<Arc<dyn Storage>>,
    /// Whether the caller has opened the backing file.
    has_backing: bool,
    /// Images whose disks are files of this one.
    nested: RefCell<Vec<Arc<Device>>>,
    /// The files of the image that is being opened, as they were before anything was read of them.
    stamps: RefCell<Vec<Stamped>>,
}

/// The use of a file that is opened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Top,
    Backing,
    Data,
    /// Another file of an image, which is only read.
    Other {
        has_tables: bool,
    },
}

impl<'a> Opening<'a> {
    fn new(queue: &'a Queue, options: &'a OpenOptions, names: &'a dyn NameResolver) -> Self {
        Opening {
            queue,
            options,
            names,
            layers: Vec::new(),
            seen: Vec::new(),
            top: None,
            data: None,
            has_backing: false,
            nested: RefCell::default(),
            stamps: RefCell::default(),
        }
    }
}

impl Opening<'_> {
    /// Whether only files with tables are opened: a check needs no others, and in strict mode it
    /// opens no others.
    fn only_tables(&self) -> bool {
        let strict = self.options.policy.limits().is_some();
        self.options.inspect || (self.options.check && strict)
    }

    /// How the opened device is written, if it is.
    fn write_mode(&self) -> Option<WriteMode> {
        let own = &self.layers[0].spec.options.common;
        self.options.write.then(|| WriteMode {
            discard: self.options.discard.or(own.discard).unwrap_or(false),
            detect_zeroes: self
                .options
                .detect_zeroes
                .or(own.detect_zeroes)
                .unwrap_or(DetectZeroes::Off),
        })
    }

    /// The device of the chain that was opened.
    fn into_device(self) -> Device {
        let write = self.write_mode();
        let mut device = Device::new(self.layers, self.options.inspect, write);
        device.nested = self.nested.into_inner();
        device
    }

    async fn chain(&mut self, top: ImageSpec) -> Result<()> {
        let mut next = Some(top);
        while let Some(spec) = next {
            let depth = self.layers.len();
            next = self
                .layer(spec, depth)
                .await
                // QEMU repeats this part for each image on the way.
                .map_err(|e| (0..depth).fold(e, |e, _| e.during("Could not open backing file")))?;
        }
        Ok(())
    }

    /// Opens one image. The result is its backing file, which is to be opened next.
    async fn layer(&mut self, spec: ImageSpec, depth: usize) -> Result<Option<ImageSpec>> {
        let role = match depth {
            0 => Role::Top,
            MAX_CHAIN => {
                return Err(Error::Refused(format!(
                    "The backing chain is longer than {MAX_CHAIN} images"
                )));
            }
            _ => Role::Backing,
        };
        if let Some(limits) = self.options.policy.limits() {
            limits.check_chain(depth + 1)?;
        }
        let read_only = |options: &CommonOptions| options.read_only == Some(true);
        if self.writes(role)
            && (read_only(&spec.options.common) || read_only(&spec.file.options.common))
        {
            return Err(Error::Refused("Block node is read-only".into()));
        }
        let discards = self.options.discard.or(spec.options.common.discard);
        if spec.options.common.detect_zeroes == Some(DetectZeroes::Unmap) && discards != Some(true)
        {
            return Err(Error::Refused(
                "setting detect-zeroes to unmap is not allowed without setting discard operation \
                 to unmap"
                    .into(),
            ));
        }
        if let (Role::Top, Some(file)) = (role, self.top) {
            let mut spec = spec;
            self.check_loop(file, &spec.file)?;
            let storage = file.storage();
            let format = self.format(&mut spec, &*storage, role).await?;
            return self.image(spec, storage, format, role).await;
        }
        for _ in 0..ATTEMPTS {
            let mut spec = spec.clone();
            let seen = self.seen.len();
            let file = self.file(&spec.options.common, &spec.file, role).await?;
            self.check_loop(&file, &spec.file)?;
            let storage = file.storage();
            let before = own_stamp(&*storage);
            let format = self.format(&mut spec, &*storage, role).await?;
            self.lock(&file, &spec, &spec.file, role, format)?;
            // Changes of a file that has no name any more would be lost.
            if self.writes(role) && !file.is_at_its_path() {
                self.seen.truncate(seen);
                continue;
            }
            if spec.is_guessed && own_stamp(&*storage) != before {
                // Another program has written to it until it was locked.
                let now = probe(self.queue, &*storage, self.guesses_as_qemu()).await?;
                if now.format != format {
                    let why = "Another program has changed the image while it was opened";
                    return Err(Error::Refused(why.into()));
                }
            }
            return self.image(spec, storage, format, role).await;
        }
        Err(Error::Refused(REPLACED.into()))
    }

    /// Whether what QEMU takes for a raw disk is one.
    fn guesses_as_qemu(&self) -> bool {
        self.options.guess_as_qemu && self.options.policy.limits().is_none()
    }

    /// The format of an image, found by the content if it is not given.
    async fn format(&self, spec: &mut ImageSpec, file: &dyn Storage, role: Role) -> Result<Format> {
        if let Some(format) = spec.format {
            return Ok(format);
        }
        let before = self.options.formats_before.get(self.layers.len());
        let strict = self.options.policy.limits().is_some();
        if self.writes(role) && strict {
            return Err(Error::Refused(
                "The format of an untrusted image that is written must be given".into(),
            ));
        }
        let Guess { format, looks_like } = probe(self.queue, file, self.guesses_as_qemu()).await?;
        if let Some(before) = before.filter(|before| **before != format) {
            let (before, now) = (before.name(), format.name());
            return Err(Error::Refused(format!(
                "The format of the image was '{before}' before and by its content is '{now}' now, \
                 which a guest can cause: say the format that is meant (-f, and of a backing file \
                 'zebu rebase -u -F')"
            )));
        }
        spec.format = Some(format);
        spec.is_guessed = true;
        spec.looks_like = looks_like.map(|found| found.what);
        self.names.format_options(spec, format)?;
        Ok(format)
    }

    /// Opens an image whose file is open. The result is its backing file.
    async fn image(
        &mut self,
        mut spec: ImageSpec,
        file: Arc<dyn Storage>,
        format: Format,
        role: Role,
    ) -> Result<Option<ImageSpec>> {
        let for_check = self.options.check && role == Role::Top;
        let common = &spec.options.common;
        let discards = self.options.discard.or(common.discard) == Some(true);
        let own = &spec.options.qcow2;
        let qcow2 = Qcow2Opening {
            caches: CacheOptions {
                size: self
                    .options
                    .l2_cache_size
                    .or(own.l2_cache_size)
                    .or(own.cache_size),
                entry_size: self.options.l2_cache_entry_size.or(own.l2_cache_entry_size),
            },
            write: WriteOptions {
                punch_request: discards && own.pass_discard_request.unwrap_or(true),
                punch_snapshot: discards && own.pass_discard_snapshot.unwrap_or(true),
                punch_other: discards && own.pass_discard_other.unwrap_or(false),
                keep_discarded: own.discard_no_unref.unwrap_or(false),
                overlap_checks: own.overlap_check.unwrap_or_default(),
                store_bitmaps: self.options.store_bitmaps,
            },
            snapshot: self.options.snapshot.clone().filter(|_| role == Role::Top),
            whole_clusters: self.options.whole_clusters && role == Role::Top,
        };
        let raw = RawPart {
            offset: spec.options.raw.offset,
            size: spec.options.raw.size,
            is_bare: spec.bare,
            is_guessed: spec.is_guessed,
        };
        let vpc = spec.options.vpc.size;
        let driver = format.driver();
        if self.writes(role) && !driver.is_writable && !for_check {
            return Err(Error::Refused(format!(
                "zebu does not write to existing images of format '{}'",
                driver.name
            )));
        }
        let image = (driver.open)(OpenRequest {
            queue: self.queue,
            file,
            write: self.writes(role),
            purpose: match for_check {
                true => Purpose::Check {
                    encrypted: self.options.inspect,
                },
                false if self.options.inspect => Purpose::Metadata,
                false => Purpose::Data,
            },
            limits: self.options.policy.limits(),
            others: &mut Others {
                opening: self,
                spec: &mut spec,
                role,
            },
            raw,
            qcow2,
            vpc,
        })
        .await?;
        // A check does not read what is behind the image.
        if let Some(above) = self.layers.last()
            && !self.options.check
        {
            above.image.check_backing(&*image)?;
        }
        let is_shared = self.is_shared(&spec);
        let backing = match driver.has_backing {
            true => self.backing(&spec, image.backing())?,
            false => None,
        };
        self.layers.push(Layer {
            spec,
            image,
            known_data: Default::default(),
            stamps: self.stamps.take(),
            is_shared,
        });
        Ok(backing)
    }

    /// The external data file of an image, if it has one.
    fn data_file(
        &self,
        spec: &ImageSpec,
        named: Option<Option<&[u8]>>,
    ) -> Result<Option<FileSpec>> {
        let Some(name) = named else {
            return match spec.data_file.is_none() && self.data.is_none() {
                true => Ok(None),
                false => Err(Error::Refused(
                    "'data-file' can only be set for images with an external data file".into(),
                )),
            };
        };
        if let Some(data_file) = &spec.data_file {
            return Ok(Some(data_file.clone()));
        }
        if self.data.is_some() {
            return Ok(None);
        }
        let Some(name) = name else {
            return Err(Error::Refused(
                "'data-file' is required for this image".into(),
            ));
        };
        let name = OsStr::from_bytes(name);
        if self.options.policy != Policy::Follow && !self.only_tables() {
            return Err(Error::Refused(format!(
                "The image names a data file ('{}'), which it may not open",
                printable(name.as_bytes())
            )));
        }
        match self.names.data_file(name) {
            // A name that is only shown may be any.
            Err(_) if self.options.policy != Policy::Follow => Ok(None),
            resolved => resolved.map(Some),
        }
    }

    /// The backing file of an image, if it is to be opened.
    fn backing(
        &self,
        spec: &ImageSpec,
        named: Option<BackingName<'_>>,
    ) -> Result<Option<ImageSpec>> {
        if self.options.no_backing || self.only_tables() || self.has_backing {
            return Ok(None);
        }
        let behind = |e: Error| e.during("Could not open backing file");
        let name = named.map(|named| OsStr::from_bytes(named.name));
        let (name, more) = match (&spec.backing, name) {
            (BackingSpec::None, _) | (BackingSpec::Default, None) => return Ok(None),
            (BackingSpec::Image(image), _) => return Ok(Some((**image).clone())),
            (BackingSpec::Default, Some(name)) => (name, None),
            (BackingSpec::Options(more), Some(name)) => (name, Some(more)),
            (BackingSpec::Options(more), None) => {
                let of = spec.file.name();
                let backing = self.names.backing(None, of, None, Some(more));
                return backing.map(Some).map_err(behind);
            }
        };
        if self.options.policy != Policy::Follow {
            return Err(Error::Refused(format!(
                "The image names a backing file ('{}'), which it may not open",
                printable(name.as_bytes())
            )));
        }
        let format = match named.and_then(|named| named.format) {
            None => None,
            Some(format) => Some(String::from_utf8_lossy(format).parse().map_err(behind)?),
        };
        let of = spec.file.name();
        let backing = self.names.backing(Some(name), of, format, more);
        backing.map(Some).map_err(behind)
    }

    fn check_loop(&mut self, file: &OpenedFile, spec: &FileSpec) -> Result<()> {
        let Some(identity) = file.identity(spec)? else {
            return Ok(());
        };
        if self.seen.contains(&identity) {
            return Err(Error::Refused(format!(
                "Backing file '{}' creates an infinite loop.",
                printable(spec.name().as_bytes())
            )));
        }
        self.seen.push(identity);
        Ok(())
    }

    /// Opens one file of an image. The `inherited` options of the image hold where the file has
    /// none of its own.
    fn file<'a>(
        &'a self,
        inherited: &'a CommonOptions,
        spec: &'a FileSpec,
        role: Role,
    ) -> Pin<Box<dyn Future<Output = Result<OpenedFile>> + 'a>> {
        let own = &spec.options.common;
        let (direct, no_flush) = (
            own.direct.or(inherited.direct),
            own.no_flush.or(inherited.no_flush),
        );
        let common = CommonOptions {
            direct,
            no_flush,
            ..own.clone()
        };
        let cache = cache_mode(self.options.cache, direct, no_flush);
        Box::pin(async move {
            match &spec.driver {
                FileDriver::Blkdebug(debug) => {
                    let below = self.file(&common, &debug.image, role).await?;
                    let storage = self.debugged(debug, below.storage())?;
                    Ok(OpenedFile::Over(Arc::new(storage), Box::new(below)))
                }
                FileDriver::Image(image) if image.format == Some(Format::RAW) => {
                    let below = self.file(&common, &image.file, role).await?;
                    let raw = &image.options.raw;
                    let part = Raw::part_of(below.storage(), raw.offset, raw.size)?;
                    let storage: Arc<dyn Storage> = match (part.offset(), raw.size) {
                        (0, None) => below.storage(),
                        (offset, size) => Arc::new(Window::new(below.storage(), offset, size)),
                    };
                    Ok(OpenedFile::Over(storage, Box::new(below)))
                }
                FileDriver::Image(image) => self.stacked(image, cache, role).await,
                _ if spec.options.aio == Some(EngineKind::Native) && !cache.is_direct() => {
                    Err(Error::Refused(NATIVE_NEEDS_DIRECT.into()))
                }
                _ => {
                    let how = OpenFile {
                        write: self.writes(role),
                        create: false,
                        cache,
                    };
                    let opened = spec.open_async(how, &self.options.objects).await?;
                    #[cfg(feature = "cache")]
                    if let Some(cache) = self.options.block_cache.as_ref().filter(|_| !how.write) {
                        return opened.cached(cache);
                    }
                    Ok(opened)
                }
            }
        })
    }

    /// Opens an image, with its backing chain, whose disk is the file of another image.
    async fn stacked(&self, image: &ImageSpec, cache: CacheMode, role: Role) -> Result<OpenedFile> {
        let options = &OpenOptions {
            format: None,
            write: self.writes(role),
            cache,
            no_backing: false,
            inspect: false,
            check: false,
            l2_cache_size: None,
            l2_cache_entry_size: None,
            // As in QEMU: an image below another one carries out discards unless its options forbid
            // it.
            discard: Some(image.options.common.discard.unwrap_or(true)),
            detect_zeroes: None,
            snapshot: None,
            formats_before: Vec::new(),
            ..self.options.clone()
        };
        let mut opening = Opening::new(self.queue, options, self.names);
        opening.seen = self.seen.clone();
        opening.chain(image.clone()).await.map_err(|e| match e {
            // A repair of the image above would not repair this one.
            e if e.is_dirty() => Error::Refused(format!(
                "'{}': {e}",
                printable(image.file.name().as_bytes())
            )),
            e => e,
        })?;
        let identity = opening.seen.get(self.seen.len()).cloned();
        let device = Arc::new(opening.into_device());
        let storage = Arc::new(Stacked::new(device.clone()));
        self.nested.borrow_mut().push(device);
        Ok(OpenedFile::Image(OpenedImage { storage, identity }))
    }
}

/// The other files of an image that is being opened.
struct Others<'a, 'o> {
    opening: &'a Opening<'o>,
    spec: &'a mut ImageSpec,
    /// The use of the image.
    role: Role,
}

impl OtherFiles for Others<'_, '_> {
    fn data_file<'a>(
        &'a mut self,
        named: Option<Option<&'a [u8]>>,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Storage>>>> {
        Box::pin(async move {
            let opening = self.opening;
            let Some(data_file) = opening.data_file(self.spec, named)? else {
                return Ok(opening.data.clone());
            };
            let data = match opening.only_tables() {
                true => None,
                false => {
                    let common = &self.spec.options.common;
                    let role = match opening.writes(self.role) {
                        true => Role::Data,
                        false => Role::Other { has_tables: false },
                    };
                    let file = opening.file(common, &data_file, role).await?;
                    opening.lock(&file, self.spec, &data_file, role, Format::RAW)?;
                    if role == Role::Data && !file.is_at_its_path() {
                        return Err(Error::Refused(REPLACED.into()));
                    }
                    Some(file.storage())
                }
            };
            self.spec.data_file = Some(data_file);
            Ok(data)
        })
    }

    fn extent<'a>(
        &'a mut self,
        name: &'a [u8],
        has_tables: bool,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Storage>>>> {
        Box::pin(async move {
            let (opening, name) = (self.opening, OsStr::from_bytes(name));
            let follows = opening.options.policy == Policy::Follow;
            if !follows && !opening.only_tables() {
                return Err(Error::Refused(format!(
                    "The image names an extent ('{}'), which it may not open",
                    printable(name.as_bytes())
                )));
            }
            let file = match self.spec.file.beside(name) {
                // A name that is only shown may be any.
                Err(_) if !follows => FileSpec::new(name),
                found => found?,
            };
            let storage = match follows {
                false => None,
                true => {
                    let common = &self.spec.options.common;
                    let role = Role::Other { has_tables };
                    let opened = opening.file(common, &file, role).await?;
                    opening.lock(&opened, self.spec, &file, role, Format::RAW)?;
                    Some(opened.storage())
                }
            };
            self.spec.extents.push(file);
            Ok(storage)
        })
    }
}

impl Opening<'_> {
    /// Locks one file of an image, as QEMU would, and notes how it is.
    fn lock(
        &self,
        file: &OpenedFile,
        image: &ImageSpec,
        spec: &FileSpec,
        role: Role,
        format: Format,
    ) -> Result<()> {
        self.lock_only(file, image, spec, role, format)?;
        let storage = file.storage();
        if !self.writes(role)
            && let Some(stamp) = own_stamp(&*storage)
        {
            self.stamps.borrow_mut().push((storage, stamp));
        }
        Ok(())
    }

    fn lock_only(
        &self,
        file: &OpenedFile,
        image: &ImageSpec,
        spec: &FileSpec,
        role: Role,
        format: Format,
    ) -> Result<()> {
        let write = self.writes(role);
        let shared = self.is_shared(image);
        let request = match role {
            _ if spec.bottom().options.locking == Locking::Off => return Ok(()),
            _ if shared => LockRequest::FORCE_SHARE,
            Role::Data if write => LockRequest::DATA_WRITE,
            Role::Data | Role::Other { has_tables: false } => LockRequest::DATA_READ,
            Role::Other { has_tables: true } => LockRequest::QCOW2_READ,
            _ if write => format.driver().locks[1],
            Role::Top | Role::Backing if self.options.exclude_writers => LockRequest::QCOW2_READ,
            _ => format.driver().locks[0],
        };
        file.lock(match self.options.length {
            _ if role != Role::Top || shared => request,
            Length::Shared => request,
            Length::Fixed => request.fixed_length(),
            Length::Changing => request.changing_length(),
        })
    }

    /// `storage` with injected errors.
    fn debugged(&self, spec: &BlkdebugSpec, storage: Arc<dyn Storage>) -> Result<Blkdebug> {
        let mut rules = match &spec.config {
            Some(config) => self.names.blkdebug_rules(config)?,
            None => Vec::new(),
        };
        rules.extend(spec.rules.iter().cloned());
        // As in QEMU, rules that inject errors come before those that set the state.
        rules.sort_by_key(|rule| matches!(rule.action, Action::SetState(_)));
        Blkdebug::new(storage, rules, spec.limits).map_err(Error::Refused)
    }

    fn is_shared(&self, image: &ImageSpec) -> bool {
        self.options.force_share || image.options.common.force_share == Some(true)
    }

    fn writes(&self, role: Role) -> bool {
        self.options.write && matches!(role, Role::Top | Role::Data)
    }
}

/// How a file of this machine is. One on another machine would have to be asked for it.
fn own_stamp(file: &dyn Storage) -> Option<FileStamp> {
    match file.is_remote() {
        true => None,
        false => file.stamp()?.ok(),
    }
}

/// `base`, changed by `cache.direct` and `cache.no-flush` where these are given.
fn cache_mode(base: CacheMode, direct: Option<bool>, no_flush: Option<bool>) -> CacheMode {
    if direct.is_none() && no_flush.is_none() {
        return base;
    }
    let direct = direct.unwrap_or(base.is_direct());
    let no_flush = no_flush.unwrap_or(base.ignores_flushes());
    match (direct, base.is_write_through()) {
        (false, _) if no_flush => CacheMode::Unsafe,
        (true, true) => CacheMode::DirectSync,
        (true, false) => CacheMode::None,
        (false, true) => CacheMode::WriteThrough,
        (false, false) => CacheMode::WriteBack,
    }
}
