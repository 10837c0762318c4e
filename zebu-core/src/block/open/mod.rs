//! Opening an image and the files that it names, as far as the caller's policy allows.
//!
//! | file | subject |
//! |---|---|
//! | `options.rs` | how an image is opened, and the policy |
//! | `files.rs` | opening and locking its files |

mod files;
mod options;

use std::cell::RefCell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use super::device::{Device, Layer, Stamped, WriteMode};
use super::filtered::Peeled;
use super::{
    ATTEMPTS, BackingSpec, CommonOptions, DetectZeroes, FileSpec, Identity, ImageSpec, OpenedFile,
    REPLACED,
};
use crate::drivers::qcow2::{CacheOptions, WriteOptions};
use crate::drivers::{
    BackingName, Format, Guess, OpenRequest, Purpose, Qcow2Opening, RawPart, probe,
};
use crate::storage::{FileStamp, Queue, Secret, Storage};
use crate::{Error, Result, printable};
use files::Others;
pub use options::{Length, OpenOptions, Policy, Storages};

/// Images in one chain at most: each takes open files and caches.
pub(super) const MAX_CHAIN: usize = 200;

impl Device {
    /// Opens an image and, unless disabled, its backing chain.
    pub(crate) async fn open_with(
        queue: &Queue,
        spec: ImageSpec,
        options: &OpenOptions,
    ) -> Result<Device> {
        let shared = options.force_share || spec.options.common.force_share == Some(true);
        if options.write && shared {
            // Without locks, two writers would take the same clusters.
            let why = "force-share=on can only be used with read-only images";
            return Err(Error::Refused(why.into()));
        }
        let mut opening = Opening::new(queue, options);
        opening.chain(spec).await?;
        let mut device = opening.into_device();
        if options.copy_on_read && options.write {
            device.filters.copy_on_read();
            device.find_filters();
        }
        Ok(device)
    }

    /// [`Device::open_with`] of an image whose own file, and data file, the caller has opened and
    /// locked: no other program gets at them in between. `made` is known of one that was just made.
    pub(crate) async fn open_over(
        queue: &Queue,
        spec: ImageSpec,
        options: &OpenOptions,
        file: &OpenedFile,
        data: Option<Arc<dyn Storage>>,
        made: JustMade,
    ) -> Result<Device> {
        let mut opening = Opening::new(queue, options);
        opening.made = made;
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
        Device::from_made(queue, storages, options, JustMade::default())
    }

    /// [`Device::from_storages`] for an image that was just made.
    pub(crate) fn from_made(
        queue: &Queue,
        storages: Storages,
        options: &OpenOptions,
        made: JustMade,
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
        let mut opening = Opening::new(queue, options);
        opening.data = data;
        opening.has_backing = backing.is_some();
        opening.made = made;
        queue.block_on(async {
            let format = opening.format(&mut spec, &*image, Role::Top).await?;
            opening.image(spec, image, format, Role::Top).await
        })?;
        let mut layers = opening.layers;
        if let Some(behind) = backing.map(Device::into_layers) {
            if let (Some(above), Some(below)) = (layers.last(), behind.first()) {
                above.image.check_backing(&*below.image)?;
            }
            layers.extend(behind);
        }
        Ok(Device::new(layers, options.inspect))
    }
}

/// What is known of an image that was just made, besides what its file says.
#[derive(Debug, Default)]
pub(crate) struct JustMade {
    /// The version that a qcow2 image will have when it is finished.
    pub unfinished: Option<u32>,
    /// What unlocks an encrypted one.
    pub key: Option<Secret>,
}

/// A chain that is being opened.
struct Opening<'a> {
    queue: &'a Queue,
    options: &'a OpenOptions,
    layers: Vec<Layer>,
    /// The files of the chain: a file that occurs twice is a loop.
    seen: Vec<Identity>,
    /// The file of the top image, if the caller has opened and locked it.
    top: Option<&'a OpenedFile>,
    /// The data file of the top image, if the caller has opened it.
    data: Option<Arc<dyn Storage>>,
    /// What is known of the top image, if it was just made.
    made: JustMade,
    /// Whether the caller has opened the backing file.
    has_backing: bool,
    /// Images whose disks are files of the image that is being opened.
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
    fn new(queue: &'a Queue, options: &'a OpenOptions) -> Self {
        Opening {
            queue,
            options,
            layers: Vec::new(),
            seen: Vec::new(),
            top: None,
            data: None,
            made: JustMade::default(),
            has_backing: false,
            nested: RefCell::default(),
            stamps: RefCell::default(),
        }
    }
}

impl Device {
    /// Refuses an image over this one, with which the chain would be too long to be opened.
    pub(crate) fn check_overlay(&self) -> Result<()> {
        match self.layers.len() >= MAX_CHAIN {
            true => Err(too_long()),
            false => Ok(()),
        }
    }
}

fn too_long() -> Error {
    Error::Refused(format!(
        "The backing chain is longer than {MAX_CHAIN} images"
    ))
}

impl Opening<'_> {
    /// Whether only files with tables are opened: a check needs no others, and in strict mode it
    /// opens no others.
    fn only_tables(&self) -> bool {
        let strict = self.options.policy.limits().is_some();
        self.options.inspect || (self.options.check && strict)
    }

    /// How an image is written, if it is.
    fn write_mode(&self, own: &CommonOptions, role: Role) -> Option<WriteMode> {
        self.writes(role).then(|| WriteMode {
            discard: self.options.discard.or(own.discard).unwrap_or(false),
            detect_zeroes: self
                .options
                .detect_zeroes
                .or(own.detect_zeroes)
                .unwrap_or(DetectZeroes::Off),
        })
    }

    /// The device of the chain that was opened. The filters of its top image are over whatever is on top.
    fn into_device(mut self) -> Device {
        let filters = std::mem::take(&mut self.layers[0].filters);
        let mut device = Device::new(self.layers, self.options.inspect);
        device.filters = filters;
        device.find_filters();
        device
    }

    async fn chain(&mut self, top: ImageSpec) -> Result<()> {
        let mut next = Some(top);
        while let Some(spec) = next {
            let depth = self.layers.len();
            next = self
                .filtered_layer(spec, depth)
                .await
                // QEMU repeats this part for each image on the way.
                .map_err(|e| (0..depth).fold(e, |e, _| e.during("Could not open backing file")))?;
        }
        Ok(())
    }

    /// Opens one image, with the filters over it. The result is its backing file, which is to be opened
    /// next.
    async fn filtered_layer(&mut self, spec: ImageSpec, depth: usize) -> Result<Option<ImageSpec>> {
        let (peeled, spec) = Peeled::take(spec);
        let next = self.layer(spec, depth).await?;
        if let Some(peeled) = peeled {
            let (objects, layer) = (&self.options.objects, &mut self.layers[depth]);
            let write = layer.write.is_some();
            layer.filters = peeled.over(layer.format(), objects, write)?;
        }
        Ok(next)
    }

    /// Opens one image. The result is its backing file, which is to be opened next.
    async fn layer(&mut self, spec: ImageSpec, depth: usize) -> Result<Option<ImageSpec>> {
        let role = match depth {
            0 => Role::Top,
            MAX_CHAIN => return Err(too_long()),
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
        spec.read_pending(format)?;
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
                // An image below may have smaller clusters.
                entry_size: self
                    .options
                    .l2_cache_entry_size
                    .filter(|_| role == Role::Top)
                    .or(own.l2_cache_entry_size),
            },
            write: WriteOptions {
                punch_request: discards && own.pass_discard_request.unwrap_or(true),
                punch_snapshot: discards && own.pass_discard_snapshot.unwrap_or(true),
                punch_other: discards && own.pass_discard_other.unwrap_or(false),
                keep_discarded: own.discard_no_unref.unwrap_or(false),
                overlap_checks: own.overlap_check.unwrap_or_default(),
                store_bitmaps: self.options.store_bitmaps,
            },
            whole_clusters: self.options.whole_clusters && role == Role::Top,
            encryption: spec.options.encryption.format.clone(),
            unfinished: self.made.unfinished.filter(|_| role == Role::Top),
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
        let snapshot = self.options.snapshot.as_ref();
        let snapshot = snapshot.filter(|_| role == Role::Top);
        if snapshot.is_some() && self.writes(role) {
            return Err(Error::Refused(
                "Internal snapshots can only be opened read-only".into(),
            ));
        }
        let purpose = match for_check {
            true => Purpose::Check {
                encrypted: self.options.inspect,
            },
            false if self.options.inspect => Purpose::Metadata,
            false => Purpose::Data,
        };
        let key_secret = spec.options.encryption.key_secret.clone();
        let name = spec.file.name().to_owned();
        let objects = &self.options.objects;
        let own = self.made.key.as_ref().filter(|_| role == Role::Top);
        let key = &|| match &key_secret {
            _ if own.is_some() => Ok(own.cloned()),
            Some(id) => objects.secret(id).map(Some),
            None => Ok(objects.ask_passphrase(&name)),
        };
        let mut image = (driver.open)(OpenRequest {
            queue: self.queue,
            file,
            write: self.writes(role),
            purpose,
            limits: self.options.policy.limits(),
            others: &mut Others {
                opening: self,
                spec: &mut spec,
                role,
            },
            raw,
            qcow2,
            vpc,
            key,
        })
        .await?;
        if let Some(name) = snapshot {
            image.show_snapshot(self.queue, name).await?;
        }
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
            write: self.write_mode(&spec.options.common, role),
            resting: None,
            nested: self.nested.take(),
            filters: Default::default(),
            spec,
            image,
            known_data: Default::default(),
            stamps: self.stamps.take(),
            is_shared,
        });
        Ok(backing)
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
                let backing = ImageSpec::behind(None, of, None, Some(more));
                return backing.map(Some).map_err(behind);
            }
        };
        if self.options.policy != Policy::Follow {
            return Err(Error::Refused(format!(
                "The image names a backing file ('{}'), which it may not open",
                printable(name.as_bytes())
            )));
        }
        let driver = named.and_then(|named| named.format);
        let driver = driver.map(String::from_utf8_lossy);
        let of = spec.file.name();
        let backing = ImageSpec::behind(Some(name), of, driver.as_deref(), more);
        backing.map(Some).map_err(behind)
    }
}

/// How a file of this machine is. One on another machine would have to be asked for it.
fn own_stamp(file: &dyn Storage) -> Option<FileStamp> {
    match file.is_remote() {
        true => None,
        false => file.stamp()?.ok(),
    }
}
