//! What a conversion writes to: a new image, or one that is there.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::str::FromStr;
use std::sync::Arc;

use zebu::block::{Device, FileSpec, Format, NbdSpec, OpenOptions, in_first};
use zebu::jobs::{ConvertError, ConvertOptions, Filling, Target};
use zebu::names::Source;
use zebu::storage::{CacheMode, LockRequest, Queue, Storage};

use super::{Arguments, bitmaps};
use crate::arguments::create_options::CreateOptions;
use crate::arguments::file_name::{after_file, as_value, beside, file_as};
use crate::arguments::{objects, target_cache, untrusted};
use crate::images::new_image::{NewFiles, check_level, other_files, parse_format, plan_to_fill};
use crate::images::same_file::{self, Fate};
use crate::images::{appliance, open};
use crate::output::Shown;
use crate::program::{Context, Failure};

/// What a target gets.
pub struct Content<'a> {
    /// What is read.
    sources: &'a [Device],
    /// Bytes of the disk. None if they are more than 2^64.
    size: Option<u64>,
    /// The size is only known at the end.
    is_open: bool,
}

impl<'a> Content<'a> {
    /// The content of these images, one after the other.
    pub fn of(sources: &'a [Device]) -> Self {
        let mut sizes = sources.iter().map(Device::size);
        Content {
            sources,
            size: sizes.try_fold(0u64, |sum, size| sum.checked_add(size)),
            is_open: false,
        }
    }

    /// A disk of this size that is not an open image, over `backing`. None: the size is known at the
    /// end.
    pub fn stream(size: Option<u64>, backing: &'a [Device]) -> Self {
        Content {
            sources: backing,
            size: Some(size.unwrap_or(0)),
            is_open: size.is_none(),
        }
    }
}

/// A target that is open.
pub struct Opened {
    pub target: Target,
    /// The files of a new image, which are locked as long as this is there.
    pub files: Option<NewFiles>,
}

/// What to do about a target that is a source.
const ANOTHER_NAME: &str = "give the target another name than what is read";

/// Why a target could not be opened.
pub struct Unopened {
    pub why: Failure,
    /// The files of a new image, if what they held is lost. Otherwise they are as they were.
    pub touched: Option<Box<NewFiles>>,
}

impl From<Failure> for Unopened {
    fn from(why: Failure) -> Self {
        Unopened { why, touched: None }
    }
}

impl From<Unopened> for Failure {
    fn from(unopened: Unopened) -> Self {
        unopened.why
    }
}

/// Creates the target unless it must exist, and opens it. Sets what is known of its content in
/// `options`.
pub fn open(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    name: &OsStr,
    content: &Content<'_>,
    options: &mut ConvertOptions,
) -> Result<Opened, Unopened> {
    let sources = content.sources;
    let wanted = Wanted {
        context,
        queue,
        arguments,
        name,
        sources,
        total: total(context, arguments, name, content)?,
        // Writes are aligned if the disk is, and each source.
        aligned: content.is_open
            || content.size.is_some_and(|size| size % 4096 == 0)
                && sources.iter().all(|s| s.size().is_multiple_of(4096)),
        concatenated: sources.len() > 1,
        cache: match &arguments.target_cache {
            None => None,
            Some(cache) => Some(target_cache(Some(cache))?),
        },
    };
    match arguments.no_create {
        true => Ok(Opened {
            target: wanted.existing(options)?,
            files: None,
        }),
        false => wanted.new_image(options),
    }
}

fn total(
    context: &Context,
    arguments: &Arguments,
    name: &OsStr,
    content: &Content<'_>,
) -> Result<u64, Failure> {
    if content.is_open && arguments.target_format() == Format::QCOW2.name() {
        return Ok(open_qcow2_size(context, arguments));
    }
    content.size.ok_or_else(|| {
        let why = ConvertError::TooLarge.to_string();
        creation_failure(name, arguments.target_format(), &why)
    })
}

/// The size of a new qcow2 image that gets its own size at the end: what an L1 table of one cluster,
/// or of 64 KiB, maps.
fn open_qcow2_size(context: &Context, arguments: &Arguments) -> u64 {
    if arguments.no_create {
        return 0;
    }
    let create = CreateOptions::parse(Format::QCOW2, &arguments.options).unwrap_or_default();
    let cluster = create.size("cluster_size").unwrap_or(65536);
    let entry = match create.is_on("extended_l2") {
        true => 16,
        false => 8,
    };
    let tables = cluster.max(65536) / 8;
    // In strict mode a larger one would not be opened.
    let limits = untrusted::policy(context);
    let most = limits
        .limits()
        .map_or(1 << 60, |l| l.virtual_size / 512 * 512);
    tables
        .saturating_mul(cluster / entry)
        .saturating_mul(cluster)
        .min(most)
}

fn creation_failure(name: &OsStr, format: &str, why: &str) -> Failure {
    // As in QEMU, where the target's server has no such thing.
    if why.starts_with("Protocol driver '") && why.contains("does not support image creation") {
        return Failure::new(why);
    }
    Failure::new(format!(
        "{}: error while converting {format}: {why}",
        name.shown()
    ))
}

/// The target as it shall be.
struct Wanted<'a> {
    context: &'a Context,
    queue: &'a Queue,
    arguments: &'a Arguments,
    name: &'a OsStr,
    sources: &'a [Device],
    /// Size of the disk in bytes.
    total: u64,
    /// Every source ends at a block.
    aligned: bool,
    concatenated: bool,
    /// The cache mode of the command line.
    cache: Option<CacheMode>,
}

impl Wanted<'_> {
    /// The cache modes to try. Without `-t`, direct I/O if the file system supports it and writes
    /// are whole blocks, else the page cache.
    fn caches(&self, whole_blocks: bool) -> Vec<CacheMode> {
        // Compressed clusters are not aligned, and the kernel copies (-C) through the page cache or
        // by sharing blocks.
        let is_direct = whole_blocks && !self.arguments.compress && !self.arguments.copy_range;
        match self.cache {
            Some(cache) => vec![cache],
            None if is_direct => vec![CacheMode::None, CacheMode::WriteBack],
            None => vec![CacheMode::WriteBack],
        }
    }

    /// Refuses files that a source reads, or that messages go to.
    fn check_not_read(&self, files: &[Option<&FileSpec>]) -> Result<(), Failure> {
        let refused = match self.arguments.no_create {
            true => same_file::refused,
            false => same_file::refused_new,
        };
        // Disks of an appliance are read in place, its descriptor before.
        let appliance = self.arguments.appliance();
        let is_of = |file: &FileSpec| {
            appliance.is_some_and(|name| appliance::has_file(name, &file.bottom().path))
        };
        let why = files.iter().flatten().find_map(|file| {
            let why = refused(self.context, self.sources, file);
            why.or_else(|| is_of(file).then_some(same_file::READ_FROM))
        });
        self.refuse(why)
    }

    /// The same of files that are open, by what they are.
    fn check_open(&self, files: &[Arc<dyn Storage>]) -> Result<(), Failure> {
        // The tables of an image that is there stay, and what is left out of a target of zeroes.
        let arguments = self.arguments;
        let is_raw = arguments.target_format() == "raw" && !arguments.target_image_opts;
        let is_kept = arguments.no_create && (!is_raw || arguments.target_is_zero);
        let fate = if is_kept { Fate::Kept } else { Fate::Replaced };
        let read = same_file::refused_open(self.sources, files, fate);
        let appliance = self.arguments.appliance().into_iter();
        let mut own = appliance.flat_map(|name| appliance::own_files(name));
        self.refuse(read.or_else(|| {
            own.find_map(|own| {
                let mut files = files.iter();
                files.find_map(|file| same_file::reads_elsewhere(&own, &**file, fate))
            })
        }))
    }

    fn refuse(&self, why: Option<&str>) -> Result<(), Failure> {
        let format = self.arguments.target_format();
        why.map_or(Ok(()), |why| {
            let failure = creation_failure(self.name, format, why);
            Err(failure.with_next(ANOTHER_NAME))
        })
    }

    /// Refuses what targets of the format cannot have.
    fn check_format(&self, format: Format) -> Result<(), Failure> {
        let (arguments, name) = (self.arguments, format.name());
        let without_backing = |what| {
            let why = format!("{what} not supported for file format '{name}'");
            Err(Failure::new(why))
        };
        if arguments.bitmaps && format != Format::QCOW2 {
            Err(bitmaps::unsupported(name))
        } else if arguments.backing.is_some() && !format.is_created_over_backing() {
            without_backing("Backing file")
        } else if arguments.backing_format.is_some() && !format.is_created_over_backing() {
            without_backing("Backing file format")
        } else if arguments.compress && !format.can_compress() {
            Err(Failure::new(ConvertError::NotCompressible.to_string()))
        } else {
            Ok(())
        }
    }
}

/// Targets that are there.
impl Wanted<'_> {
    fn existing(&self, options: &mut ConvertOptions) -> Result<Target, Failure> {
        let source = match self.arguments.target_image_opts {
            true => Source::Options(self.name.to_owned()),
            false => {
                let name = self.arguments.target_format();
                let format = parse_format(name).map_err(Failure::new)?;
                if format == Format::RAW && !self.name.as_bytes().starts_with(b"json:") {
                    return self.existing_raw();
                }
                self.source(self.arguments.backing.as_deref(), self.backing_format())
            }
        };
        // Opening it may repair it. The locks of the sources prevent that, but exports have
        // no locks, and with -U files have none either.
        if let Ok(spec) = source.resolve(None, None) {
            let is_unlocked = |file: &&FileSpec| {
                self.arguments.source.force_share || file.bottom().driver.get::<NbdSpec>().is_some()
            };
            let files = [Some(&spec.file), spec.data_file.as_ref()];
            self.check_not_read(&files.map(|file| file.filter(is_unlocked)))?;
        }
        let device = self.open_device(&source, &self.caches(false), options)?;
        self.check_not_read(&[Some(&FileSpec::new(device.top().data().path()))])?;
        self.check_open(&device.top().storages())?;
        self.check_size(device.size())?;
        if self.arguments.bitmaps {
            bitmaps::check_target(self.queue, &device, &options.bitmaps)?;
        }
        // Its content past the end of the backing file is unknown.
        options.above_backing = self.arguments.backing.is_some();
        Ok(Target::Image(device))
    }

    fn existing_raw(&self) -> Result<Target, Failure> {
        self.check_format(Format::RAW)?;
        let spec = file_as(self.name, self.arguments.target_format());
        let spec = spec.map_err(|e| open::failure(self.name, &e))?;
        let (caches, lock) = (self.caches(self.aligned), LockRequest::RAW_WRITE);
        let file = spec.open_locked(&caches, lock, &objects::all(self.context));
        let file = file.map_err(|e| open::failure(self.name, &e))?;
        self.check_not_read(&[Some(&spec)])?;
        let storage = file.storage();
        self.check_open(std::slice::from_ref(&storage))?;
        let length = storage.len();
        let length = length.map_err(|e| Failure::new(zebu::strerror(&e).to_string()))?;
        // Of a raw image a part of the last sector may be missing, here and in a source.
        self.check_size(length.next_multiple_of(512))?;
        Ok(Target::Raw(storage))
    }

    fn backing_format(&self) -> Option<&str> {
        self.arguments.backing_format.as_deref()
    }

    /// The target with `backing`. In strict mode the backing file is opened because the user named
    /// it, not because the target does.
    fn source(&self, backing: Option<&OsStr>, format: Option<&str>) -> Source {
        let Some(backing) = backing.filter(|_| self.context.is_untrusted()) else {
            return Source::Name(self.name.to_owned());
        };
        let mut options = OsString::from("file.filename=");
        options.push(as_value(after_file(self.name).unwrap_or(self.name)));
        options.push(",backing.file.filename=");
        options.push(as_value(&beside(backing, self.name)));
        if let Some(format) = format {
            options.push(format!(",backing.driver={format}"));
        }
        Source::Options(options)
    }

    fn check_size(&self, size: u64) -> Result<(), Failure> {
        match size < self.total {
            true => Err(Failure::new("output file is smaller than input file")),
            false => Ok(()),
        }
    }

    /// Opens an image for writing.
    fn open_device(
        &self,
        source: &Source,
        caches: &[CacheMode],
        options: &ConvertOptions,
    ) -> Result<Device, Failure> {
        let opened = in_first(caches, |cache| {
            open::repaired(self.context, self.queue, source, &self.how(cache, options))
        });
        opened.map_err(|e| open::failure(self.name, &e))
    }

    /// How an image is opened for writing.
    fn how(&self, cache: CacheMode, options: &ConvertOptions) -> OpenOptions {
        let format = match self.arguments.target_image_opts {
            true => None,
            false => Format::from_str(self.arguments.target_format()).ok(),
        };
        untrusted::defaults(self.context)
            .format(format)
            .write(true)
            .cache(cache)
            // Zeroes free what was there, if the target may have holes.
            .discard(Some(options.sparse > 0))
    }
}

/// New targets.
impl Wanted<'_> {
    fn new_image(&self, options: &mut ConvertOptions) -> Result<Opened, Unopened> {
        let format_name = self.arguments.target_format();
        let format = parse_format(format_name).map_err(Failure::new)?;
        let file = file_as(self.name, format_name).map_err(Failure::new)?;
        let failure = |e: zebu::Error| creation_failure(self.name, format_name, &e.to_string());
        let create = self.create_options(format)?;
        let plan = plan_to_fill(format, &file.path, self.total, &create).map_err(failure)?;
        if self.arguments.compress && plan.key().is_some() && format.can_compress() {
            let why = "Compression and encryption not supported at the same time";
            return Err(Failure::new(why).into());
        }
        let level = check_level(&*plan, self.arguments.level);
        level.map_err(|e| Failure::new(e.to_string()))?;
        if self.arguments.bitmaps && plan.filling() == Filling::Qcow2(2) {
            return Err(bitmaps::unsupported(format.name()).into());
        }
        let others = other_files(&*plan).map_err(failure)?;
        let caches = self.caches(self.aligned && plan.alignment() >= 4096);
        let files =
            NewFiles::open(&file, plan, &caches, &objects::all(self.context)).map_err(|e| {
                // Its lock is in the way if it is a source.
                let is_read = self.check_not_read(&[Some(&file)]).is_err();
                failure(e).with_next(if is_read { ANOTHER_NAME } else { "" })
            });
        let mut files = files?;
        let written: Vec<_> = [&file].into_iter().chain(&others).map(Some).collect();
        // Locks find this too, but not with -U.
        self.check_not_read(&written)?;
        self.check_open(&files.storages())?;
        let backing = self.look_at_backing(&create, &written, &files)?;
        if files.is_shorter_device().map_err(failure)? {
            // As the error of making it, which would not tell that nothing was written.
            return Err(failure(zebu::Error::Refused("Cannot grow device files".into())).into());
        }
        options.above_backing = backing.is_some();
        match self.begin(&mut files, &create, options) {
            Ok(target) => {
                options.zero_from = backing.or(files.reads_as_zeroes().then_some(0));
                let files = Some(files);
                Ok(Opened { target, files })
            }
            Err(why) => Err(Unopened {
                why,
                touched: Some(Box::new(files)),
            }),
        }
    }

    /// Begins the image, which is to be filled.
    fn begin(
        &self,
        files: &mut NewFiles,
        create: &CreateOptions,
        options: &mut ConvertOptions,
    ) -> Result<Target, Failure> {
        let source = self.source(create.value("backing_file"), create.get("backing_fmt"));
        let how = self.how(files.cache_mode(), options);
        let begun = files.begin(self.queue, &source, &how);
        let target = begun.map_err(|e| match e {
            zebu::Error::Open { source, .. } => open::failure(self.name, &source),
            e => creation_failure(self.name, self.arguments.target_format(), &e.to_string()),
        })?;
        if let Target::New(new) = &target
            && options.compress.is_some()
            && new.zlib_block().is_none()
        {
            // As with QEMU: the format could, the image does not.
            if !new.has_order() {
                return Err(Failure::new("invalid cluster size"));
            }
            options.compress = None;
        }
        Ok(target)
    }

    /// The options of the image, including those of the command line.
    fn create_options(&self, format: Format) -> Result<CreateOptions, Failure> {
        let arguments = self.arguments;
        let create = CreateOptions::parse(format, &arguments.options).map_err(Failure::new)?;
        let mut create = create.with_secrets(objects::all(self.context).secrets);
        self.check_format(format)?;
        if let Some(backing) = &arguments.backing {
            create.set("backing_file", backing.as_os_str());
        }
        if let Some(format) = &arguments.backing_format {
            create.set("backing_fmt", format.as_str());
        }
        let why = if create.value("backing_file").is_some() && self.concatenated {
            "Having a backing file for the target makes no sense when concatenating multiple \
             input images"
        } else if create.value("backing_file").is_some() && create.get("backing_fmt").is_none() {
            "Use of backing file requires explicit backing format"
        } else if create.value("backing_file").is_some() && format != Format::QCOW2 {
            "Only a qcow2 image can be converted to over a backing file"
        } else if arguments.compress && create.get("preallocation").is_some_and(|p| p != "off") {
            "Compression and preallocation not supported at the same time"
        } else if arguments.compress && create.value("data_file").is_some() {
            "Compression and an external data file not supported at the same time"
        } else {
            return Ok(create);
        };
        let next = match why.ends_with("explicit backing format") {
            true => "say the format of the backing file with -F: -F qcow2, -F raw",
            false => "",
        };
        Err(Failure::new(why).with_next(next))
    }

    /// Opens the backing file, if there is one, before existing data are lost. Returns its size.
    fn look_at_backing(
        &self,
        create: &CreateOptions,
        targets: &[Option<&FileSpec>],
        files: &NewFiles,
    ) -> Result<Option<u64>, Failure> {
        let Some(backing) = create.value("backing_file") else {
            return Ok(None);
        };
        let format = create.get("backing_fmt");
        let opened = Source::with_driver(beside(backing, self.name), format).and_then(|source| {
            let options = untrusted::defaults(self.context);
            open::repaired(self.context, self.queue, &source, &options)
        });
        match opened {
            Ok(device) => {
                let is_read = same_file::reads_any(&device, targets);
                let why = is_read.then_some(same_file::READ_FROM);
                let size = device.size();
                self.refuse(why.or_else(|| {
                    same_file::refused_open(&[device], &files.storages(), Fate::Replaced)
                }))?;
                Ok(Some(size))
            }
            Err(e) => Err(open::failure(
                self.name,
                &e.during("Could not open backing file"),
            )),
        }
    }
}
