//! Taking a backup.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use zebu::block::{FileSpec, NbdSpec, Objects};
use zebu::internal::new_image::NewFiles;
use zebu::jobs::{
    self, CompareError, CompressOptions, ConvertError, ConvertEvent, ConvertOptions, CreateQcow2,
    NewBacking, Target, Unchanged,
};
use zebu::qcow2::Compression;
use zebu::storage::{CacheMode, EngineKind, Queue};
use zebu::{Device, DirtyBits, ErrorKind, Format, Layer, OpenOptions, Source};

use crate::chain::{chain_files_sha256, chain_sha256, source_sha256};
use crate::error::{Error, Result, refuse, shown};
use crate::files;
use crate::manifest::{Entry, Kind, Point, check_name, file_name, number_in, part};
use crate::progress::{OnProgress, Step};
use crate::set::{Set, path_of};

/// Bytes to a bit where disks are compared.
const GRANULARITY: u64 = 64 << 10;
/// Modes for files of the set: without the page cache where the file system can.
const CACHES: [CacheMode; 2] = [CacheMode::None, CacheMode::WriteBack];

/// A disk that is to be backed up.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Its name in the set: letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Where it is.
    pub source: Source,
    /// How it is opened. Whether it is written does not matter.
    pub options: OpenOptions,
    /// The bitmap of an NBD export that has what changed since the last point. None: the set's own
    /// bitmap, if the disk is a qcow2 image; else the disk is compared with the last point.
    pub bitmap: Option<String>,
}

impl Disk {
    /// How it is opened for reading: no other program may write to it, also if it is a raw image.
    fn reading(&self) -> OpenOptions {
        self.options.clone().write(false).exclude_writers(true)
    }
}

/// How a backup is taken.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TakeOptions {
    /// Take full backups, not increments.
    pub full: bool,
    /// Compress the files of the set with this codec.
    pub compress: Option<Compression>,
    /// Compare each disk with its backup afterwards, and hash its content.
    pub verify: bool,
    /// Bytes of data a second at most.
    pub rate: Option<u64>,
}

impl Set {
    /// Takes a backup of disks as one new point, and returns its number. No program must write to
    /// the disks meanwhile: images are locked, and of NBD exports the caller takes care.
    ///
    /// # Errors
    ///
    /// If a disk or the set cannot be read or written, or the set was opened by [`Set::open`]. The set
    /// has its old points then.
    pub fn take(
        &mut self,
        queue: &Queue,
        disks: &[Disk],
        options: &TakeOptions,
        on_progress: OnProgress<'_>,
    ) -> Result<u64> {
        let made = self.made.take();
        let mut bitmaps = Vec::new();
        let taken = self.take_point(queue, disks, options, &mut bitmaps, on_progress);
        if made.is_some() && taken.is_err() {
            // Bitmaps have the id of a new set in their names: it stays if they do.
            let mut stay = false;
            for (nth, disk) in disks.iter().enumerate().take(bitmaps.len() + 1) {
                let had_one = bitmaps.get(nth).is_some_and(Option::is_some);
                stay |= !self.end_bitmaps(queue, disk) && had_one;
            }
            self.made = made.filter(|_| !stay);
        }
        taken
    }

    fn take_point(
        &mut self,
        queue: &Queue,
        disks: &[Disk],
        options: &TakeOptions,
        bitmaps: &mut Vec<Option<String>>,
        on_progress: OnProgress<'_>,
    ) -> Result<u64> {
        self.check_disks(queue, disks, options)?;
        self.begin_change()?;
        let number = self.next_number()?;
        // The set's id is durable before a bitmap has it in its name, and the names of the new files
        // before they exist: files of a point that the manifest never gets are removed.
        let mut manifest = self.manifest().clone();
        let files = disks.iter().map(|disk| file_name(&disk.name, number));
        manifest.removing = files.collect();
        self.save(manifest)?;
        let disks: Vec<_> = disks.iter().map(|disk| self.as_before(disk)).collect();
        // Before the image is written.
        let past: Vec<_> = disks
            .iter()
            .map(|disk| is_written_past(queue, disk))
            .collect();
        for disk in &disks {
            bitmaps.push(self.begin_bitmap(queue, disk, number)?);
        }
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut point = Point {
            number,
            time: time.map_or(0, |time| time.as_secs()),
            disks: BTreeMap::new(),
        };
        let held: Vec<_> = disks
            .iter()
            .zip(past)
            .map(|(disk, past)| Held::new(queue, disk, past))
            .collect::<Result<_>>()?;
        for ((disk, bitmap), held) in disks.iter().zip(&*bitmaps).zip(held) {
            let copied = self.copy(queue, disk, &held, number, options, on_progress);
            let copied = copied.and_then(|entry| held.check(disk).map(|()| entry));
            drop(held);
            if matches!(copied, Err(Error::Differs { .. } | Error::Changed { .. })) {
                // Without a bitmap, the disk is compared with its last point.
                let mut manifest = self.manifest().clone();
                manifest.forget_bitmap(&disk.name);
                self.save(manifest)?;
            }
            let bitmap = bitmap.clone();
            let entry = Entry { bitmap, ..copied? };
            point.disks.insert(disk.name.clone(), entry);
        }
        for entry in point.disks.values() {
            let part = self.path(&part(&entry.file));
            files::rename(&part, &self.path(&entry.file))?;
        }
        let mut manifest = self.manifest().clone();
        manifest.points.push(point);
        manifest.removing.clear();
        self.save(manifest)?;
        for disk in &disks {
            self.end_bitmaps(queue, disk);
        }
        Ok(number)
    }

    fn check_disks(&self, queue: &Queue, disks: &[Disk], options: &TakeOptions) -> Result<()> {
        let mut names = BTreeSet::new();
        for disk in disks {
            check_name(&disk.name)?;
            if !names.insert(&disk.name) {
                return refuse(format!("two disks have the name '{}'", disk.name));
            }
            self.refuse_backup(disk)?;
            // An increment on a chain that is not whole would be worth nothing.
            if !options.full
                && let Some((point, _)) = self.manifest().latest(&disk.name)
            {
                self.verify_chain(queue, &disk.name, point.number)?;
            }
        }
        match names.is_empty() {
            true => refuse("no disk is given"),
            false => Ok(()),
        }
    }

    /// Refuses a file of a set of backups: a bitmap that it gets would change it.
    fn refuse_backup(&self, disk: &Disk) -> Result<()> {
        self.refuse_own(&disk.source)?;
        let path = path_of(&disk.source).and_then(|path| fs::canonicalize(path).ok());
        match path.as_deref().and_then(Path::parent) {
            Some(directory) => match Set::open(directory) {
                Ok(set) => set.refuse_own(&disk.source),
                Err(_) => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// The number of the next point. Removes unfinished files. A finished one that the manifest does
    /// not have at all stays, in case the manifest is an old one; its number is not used again.
    fn next_number(&self) -> Result<u64> {
        let mut last = self
            .manifest()
            .points
            .last()
            .map_or(0, |point| point.number);
        for file in self.own_files()? {
            match file.strip_suffix(".part") {
                Some(_) => files::remove(&self.path(&file))?,
                None => last = last.max(number_in(&file).unwrap_or(0)),
            }
        }
        match last.checked_add(1) {
            Some(next) => Ok(next),
            None => refuse(format!("no point can follow point {last}")),
        }
    }

    /// The files of the directory that have the names of backups, finished or not.
    pub(crate) fn own_files(&self) -> Result<Vec<String>> {
        let directory = self.directory();
        let mut own = Vec::new();
        for entry in fs::read_dir(directory).map_err(Error::file(directory))? {
            let name = entry.map_err(Error::file(directory))?.file_name();
            let Ok(name) = name.into_string() else {
                continue;
            };
            if number_in(name.strip_suffix(".part").unwrap_or(&name)).is_some() {
                own.push(name);
            }
        }
        Ok(own)
    }

    /// The disk, of which the formats that are not given are to be those of its last point.
    fn as_before(&self, disk: &Disk) -> Disk {
        let mut disk = disk.clone();
        let of_name = self.manifest().latest(&disk.name).map(|(_, entry)| entry);
        let source = source_sha256(&disk.source);
        let is_same = |entry: &&Entry| source.is_some() && entry.source_sha256 == source;
        let points = self.manifest().points.iter().rev();
        // A guest that has made its raw disk look like another image gains nothing by a new name.
        let before = of_name
            .filter(is_same)
            .or_else(|| points.flat_map(|p| p.disks.values()).find(is_same))
            .or(of_name);
        if let Some(entry) = before {
            disk.options.formats_before = entry.formats();
        }
        disk
    }

    /// Opens a disk for reading, which keeps others from writing to it, in the state in which `held` has
    /// found it the first time.
    fn open_disk(&self, queue: &Queue, disk: &Disk, held: &Held) -> Result<Device> {
        let device = Device::open(queue, &disk.source, &disk.reading());
        let device = device.map_err(Error::image(&disk.name))?;
        match held.unchanged.get() {
            Some(unchanged) if !unchanged.is_of(&device) => {
                // That has the name of the file.
                held.check(disk)?;
                let what = "another file took its place while it was read";
                Err(changed(disk, what.into()))
            }
            Some(_) => Ok(device),
            None => {
                self.look_at(disk, &device)?;
                let unchanged = Unchanged::of(std::slice::from_ref(&device));
                // It was empty.
                let _ = held.unchanged.set(unchanged);
                Ok(device)
            }
        }
    }

    /// Refuses a disk that may change while it is read, and notes what was guessed of it.
    fn look_at(&self, disk: &Disk, device: &Device) -> Result<()> {
        let name = &disk.name;
        for layer in device.all_layers() {
            if layer.spec.options.common.force_share == Some(true) {
                return refuse(format!(
                    "{name}: a disk that another program writes cannot be backed up (force-share)"
                ));
            }
            if layer.is_encrypted() {
                // A set of backups has no key.
                return refuse(format!(
                    "{name}: the disk is encrypted, and its backup would not be (a LUKS container is backed up as it \
                     is with -f raw)"
                ));
            }
            for file in layer.storages().iter().filter(|file| !file.is_remote()) {
                if files::is_inside(file.path(), self.directory())? {
                    let file = shown(file.path());
                    return refuse(format!(
                        "{name}: {file} is in the directory of the backups, which they change"
                    ));
                }
            }
        }
        if disk.options.formats_before.is_empty() {
            let guessed = |layer: &&Layer| layer.spec.is_guessed();
            for layer in device.layers().iter().filter(guessed) {
                let file = shown(layer.file().path());
                let (format, is_top) = (layer.format().name(), std::ptr::eq(layer, device.top()));
                let names_others = layer.backing().is_some() || layer.storages().len() > 1;
                let (and, how) = match (layer.format() == Format::RAW, is_top) {
                    (true, true) => ("", "give -f raw".to_owned()),
                    (_, false) if names_others || layer.format() == Format::RAW => {
                        ("", format!("say it: zebu rebase -u -b {file} -F {format}"))
                    }
                    // A guest can write such an image to its raw disk, to read files of the host.
                    (false, true) if names_others => (
                        ", and it names other files",
                        format!("give -f {format}, or -f raw if that is the disk of a guest"),
                    ),
                    _ => continue,
                };
                self.note(
                    name,
                    &format!("the format of {file} was guessed: {format}{and} ({how})"),
                );
            }
        }
        Ok(())
    }

    /// Adds a bitmap to the image that records changes for the increment after this point, and
    /// returns its name; none if the image cannot have it.
    fn begin_bitmap(&self, queue: &Queue, disk: &Disk, number: u64) -> Result<Option<String>> {
        let Some(mut device) = open_for_bitmaps(queue, disk)? else {
            return Ok(None);
        };
        // The disk's name is a part of it: disks whose names were exchanged are compared.
        let random = files::new_id()?;
        let name = format!("{}{number}-{random}-{}", self.bitmap_prefix(), disk.name);
        let begun = queue.block_on(async {
            self.remove_bitmaps(queue, disk, &mut device).await?;
            device.bitmap_add(queue, &name, None, true).await
        });
        let closed = queue.block_on(device.close(queue));
        match begun.and(closed) {
            Ok(()) => Ok(Some(name)),
            // The image is too large or too small for a bitmap, or its list of bitmaps is damaged.
            Err(error) if matches!(error.kind(), ErrorKind::Refused | ErrorKind::Corrupt) => {
                self.note(&disk.name, &format!("changes are not recorded: {error}"));
                Ok(None)
            }
            Err(error) => Err(Error::image(&disk.name)(error)),
        }
    }

    /// Removes the set's bitmaps from an image, except that of the last point: those of interrupted
    /// backups and of earlier points.
    async fn remove_bitmaps(
        &self,
        queue: &Queue,
        disk: &Disk,
        device: &mut Device,
    ) -> zebu::Result<()> {
        let prefix = self.bitmap_prefix();
        let last = self.manifest().latest(&disk.name);
        let kept = last.and_then(|(_, entry)| entry.bitmap.as_deref());
        for bitmap in device.bitmaps(queue).await? {
            let is_kept = kept.is_some_and(|kept| kept.as_bytes() == bitmap.name);
            if bitmap.name.starts_with(prefix.as_bytes()) && !is_kept {
                device.bitmap_remove(queue, &bitmap.name).await?;
            }
        }
        Ok(())
    }

    /// Removes the bitmaps of earlier points, and says whether there are none any more. If that fails the next
    /// backup does it.
    fn end_bitmaps(&self, queue: &Queue, disk: &Disk) -> bool {
        let mut device = match open_for_bitmaps(queue, disk) {
            Ok(Some(device)) => device,
            Ok(None) => return true,
            Err(_) => return false,
        };
        let ended = queue.block_on(self.remove_bitmaps(queue, disk, &mut device));
        let closed = queue.block_on(device.close(queue));
        let ended = ended.and(closed);
        if let Err(error) = &ended {
            self.note(&disk.name, &format!("old bitmaps are not removed: {error}"));
        }
        ended.is_ok()
    }

    /// How the names of the set's bitmaps begin.
    fn bitmap_prefix(&self) -> String {
        format!("zebu-{}-", self.manifest().id)
    }

    /// Copies a disk, or what has changed of it, to a new file of the set.
    fn copy(
        &self,
        queue: &Queue,
        disk: &Disk,
        held: &Held,
        number: u64,
        options: &TakeOptions,
        on_progress: OnProgress<'_>,
    ) -> Result<Entry> {
        let name = &*disk.name;
        let before = match options.full {
            true => None,
            false => self.manifest().latest(name).map(|(_, entry)| entry),
        };
        let changed = match before {
            Some(before) => Some(self.changed(queue, disk, held, before, on_progress)?),
            None => None,
        };
        let source = self.open_disk(queue, disk, held)?;
        let formats = source.layers().iter().map(|layer| layer.format());
        let formats = formats.map(|format| format.name().to_owned()).collect();
        let (size, chain_sha256) = (source.size(), chain_sha256(&source));
        let chain_files_sha256 = Some(chain_files_sha256(&source));
        let raw_length = raw_length(&source);
        if let Some(changed) = changed.as_ref().filter(|changed| changed.size() != size) {
            return refuse(format!(
                "{name}: the size changed from {} to {size} while it was backed up",
                changed.size()
            ));
        }
        let file = file_name(name, number);
        let part_name = part(&file);
        let part = self.path(&part_name);
        let target = self.new_target(queue, &part, size, before, options)?;
        let convert = ConvertOptions::default()
            .zero_from(before.is_none().then_some(0))
            .only(changed.clone().map(Arc::new))
            .compress(options.compress.map(|_| CompressOptions::default()))
            .rate(options.rate);
        let mut cancelled = false;
        let converted = jobs::convert(vec![source], target, &convert, |event| {
            let ConvertEvent::Progress(progress) = event else {
                return ControlFlow::Continue(());
            };
            let flow = on_progress(Step::Copy, name, progress.done, progress.total);
            cancelled |= flow.is_break();
            flow
        });
        if let Err(error) = converted {
            // The manifest names it, so the next change removes what stays.
            let _ = files::remove(&part);
            return Err(match (error, cancelled) {
                (_, true) => Error::Cancelled,
                (ConvertError::Write { source, .. }, _) => Error::image(&file)(source),
                (ConvertError::Read { source, .. }, _) => Error::image(name)(source),
                (other, _) => Error::Refused(format!("{name}: {other}")),
            });
        }
        files::sync_file(&part)?;
        let content_sha256 = match options.verify {
            true => Some(self.verify_copy(queue, disk, held, &part_name, on_progress)?),
            false => None,
        };
        let (length, sha256) = self.hash(&part_name, on_progress)?;
        Ok(Entry {
            kind: match before {
                Some(_) => Kind::Increment,
                None => Kind::Full,
            },
            file,
            size,
            raw_length,
            changed: changed.map_or(size, |changed| changed.dirty_bytes().min(size)),
            length,
            sha256,
            content_sha256,
            bitmap: None,
            formats,
            chain_sha256: Some(chain_sha256),
            chain_files_sha256,
            source_sha256: source_sha256(&disk.source),
        })
    }

    /// What has changed of a disk since its last point.
    fn changed(
        &self,
        queue: &Queue,
        disk: &Disk,
        held: &Held,
        before: &Entry,
        on_progress: OnProgress<'_>,
    ) -> Result<DirtyBits> {
        if let Some(bitmap) = &disk.bitmap {
            return external_bitmap(queue, disk, bitmap).map_err(Error::image(&disk.name));
        }
        let device = self.open_disk(queue, disk, held)?;
        let is_as_before = |chain: &String| *chain == chain_sha256(&device);
        let are_as_before = |files: &String| *files == chain_files_sha256(&device);
        if !before.chain_sha256.as_ref().is_none_or(is_as_before) {
            let why = "compared with its last backup: it has another backing file or data file";
            self.note(&disk.name, why);
        } else if !before.chain_files_sha256.as_ref().is_none_or(are_as_before) {
            let why = "compared with its last backup: a backing file or data file was changed or replaced";
            self.note(&disk.name, why);
        } else if held.is_written_past {
            let why = "compared with its last backup: its data file was written after the image was closed";
            self.note(&disk.name, why);
        } else if let Some(bitmap) = &before.bitmap {
            match queue.block_on(recorded(queue, &device, bitmap)) {
                Ok(mut bits) => {
                    // QEMU does not record that a disk was made larger, which may show what a longer
                    // backing file has there.
                    bits.set(before.size.min(bits.size())..bits.size());
                    return Ok(bits);
                }
                Err(error) if error.kind() == ErrorKind::Io => {
                    return Err(Error::image(&disk.name)(error));
                }
                Err(error) => {
                    let why = format!("compared with its last backup: {error}");
                    self.note(&disk.name, &why);
                }
            }
        }
        let devices = [device, self.open_image(queue, &before.file)?];
        compare(&disk.name, devices, Step::Compare, on_progress)
    }

    /// Makes the image that a disk is copied to, above the file of the point before.
    fn new_target(
        &self,
        queue: &Queue,
        path: &Path,
        size: u64,
        before: Option<&Entry>,
        options: &TakeOptions,
    ) -> Result<Target> {
        let name = shown(path);
        files::remove(path)?;
        let backing = before.map(|before| {
            NewBacking::new(&before.file).format(Some(Format::QCOW2.name().to_owned()))
        });
        let create = CreateQcow2::default()
            .size(size)
            .compression(options.compress.unwrap_or(Compression::Zlib))
            .backing(backing);
        let caches = match options.compress {
            // Compressed clusters are not aligned.
            Some(_) => &CACHES[1..],
            None => &CACHES,
        };
        let make = || {
            let (file, plan) = (FileSpec::new(path), create.plan()?);
            let mut files = NewFiles::open(&file, plan, caches, &Objects::default())?;
            let options = OpenOptions::default()
                .format(Some(Format::QCOW2))
                .write(true)
                .cache(files.cache_mode());
            files.begin(queue, &Source::Name(path.into()), &options)
        };
        make().map_err(Error::image(&name))
    }

    /// Compares a disk with its new backup, and hashes the content.
    fn verify_copy(
        &self,
        queue: &Queue,
        disk: &Disk,
        held: &Held,
        file: &str,
        on_progress: OnProgress<'_>,
    ) -> Result<String> {
        let devices = [
            self.open_disk(queue, disk, held)?,
            self.open_image(queue, file)?,
        ];
        let different = compare(&disk.name, devices, Step::Verify, on_progress)?;
        if let Some(range) = different.ranges().next() {
            return Err(Error::Differs {
                disk: disk.name.clone(),
                offset: range.start,
            });
        }
        self.hash_content(queue, file, on_progress)
    }
}

/// A disk that no program writes to.
struct Held {
    /// Keeps it locked; none of an export.
    _locked: Option<Device>,
    /// How it was when it was opened the first time.
    unchanged: OnceCell<Unchanged>,
    /// [`is_written_past`]
    is_written_past: bool,
}

impl Held {
    /// Opens the image of a disk, so that no program writes to it until the result is dropped. Not an NBD
    /// export: its server may admit one client at a time.
    fn new(queue: &Queue, disk: &Disk, is_written_past: bool) -> Result<Held> {
        let hold = || {
            let spec = disk.source.resolve(None, disk.options.format)?;
            match spec.file.driver.get::<NbdSpec>() {
                Some(_) => Ok(None),
                None => {
                    let options = disk.reading().no_backing(true);
                    Device::open(queue, &disk.source, &options).map(Some)
                }
            }
        };
        Ok(Held {
            _locked: hold().map_err(Error::image(&disk.name))?,
            unchanged: OnceCell::new(),
            is_written_past,
        })
    }

    /// Refuses what was read if the disk was changed meanwhile.
    fn check(&self, disk: &Disk) -> Result<()> {
        let Some(unchanged) = self.unchanged.get() else {
            return Ok(());
        };
        // The bitmap for the next point is in what was opened, and knows of no file that took its place.
        let checked = unchanged.check().and_then(|()| unchanged.check_names());
        checked.map_err(|why| changed(disk, why.to_string()))
    }
}

/// Whether the data file of a disk was changed after its image was. A program that writes to the image closes
/// it last, so another one has written to the data file, and no bitmap knows that.
fn is_written_past(queue: &Queue, disk: &Disk) -> bool {
    let Ok(device) = Device::open(queue, &disk.source, &disk.reading().no_backing(true)) else {
        // It fails with its own message later.
        return false;
    };
    let changed = |path: &Path| fs::metadata(path).and_then(|found| found.modified());
    let (file, data) = (device.top().file(), device.top().data());
    let times = (changed(file.path()), changed(data.path()));
    matches!(times, (Ok(file), Ok(data)) if data > file)
}

fn changed(disk: &Disk, what: String) -> Error {
    let disk = disk.name.clone();
    Error::Changed { disk, what }
}

/// [`Entry::raw_length`] of a disk.
fn raw_length(device: &Device) -> Option<u64> {
    const SECTOR: u64 = 512;
    let raw = device.top().as_raw()?;
    let length = raw.storage().len().ok()?;
    let is_filled_up = length % SECTOR != 0 && length.next_multiple_of(SECTOR) == device.size();
    (is_filled_up && raw.offset() == 0).then_some(length)
}

/// Opens a disk to change its bitmaps; none if it cannot have any, or if the bitmap of an export is
/// used.
fn open_for_bitmaps(queue: &Queue, disk: &Disk) -> Result<Option<Device>> {
    if disk.bitmap.is_some() || is_read_only(&disk.source) {
        return Ok(None);
    }
    // Opened for reading first, so that nothing but a qcow2 image is opened for writing.
    let device = Device::open(queue, &disk.source, &disk.reading());
    let device = device.map_err(Error::image(&disk.name))?;
    let can = device.top().stores_bitmaps();
    drop(device);
    if !can {
        return Ok(None);
    }
    let options = disk.options.clone().write(true).format(Some(Format::QCOW2));
    match Device::open(queue, &disk.source, &options) {
        Ok(device) => Ok(Some(device)),
        // It is only read then, so nothing changes that a bitmap would record.
        Err(error) if error.kind() == ErrorKind::NotPermitted => Ok(None),
        Err(error) => Err(Error::image(&disk.name)(error)),
    }
}

/// Whether the options of an image say that it is only read.
fn is_read_only(image: &Source) -> bool {
    image.resolve(None, None).is_ok_and(|spec| {
        let (image, file) = (&spec.options.common, &spec.file.options.common);
        [image.read_only, file.read_only].contains(&Some(true))
    })
}

/// What is dirty in the bitmap of the last point. An error unless it is enabled and consistent.
async fn recorded(queue: &Queue, device: &Device, name: &str) -> zebu::Result<DirtyBits> {
    let list = device.bitmaps(queue).await?;
    if list
        .iter()
        .any(|bitmap| bitmap.name == name.as_bytes() && !bitmap.enabled)
    {
        return Err(zebu::Error::Refused(format!("Bitmap '{name}' is disabled")));
    }
    device.bitmap(queue, name).await
}

/// What is dirty in a bitmap of an NBD export.
///
/// It is asked for by the connection of a device of its own: a server may admit one client at a time.
fn external_bitmap(queue: &Queue, disk: &Disk, name: &str) -> zebu::Result<DirtyBits> {
    let context = format!("qemu:dirty-bitmap:{name}");
    let mut spec = disk.source.resolve(None, disk.options.format)?;
    if let Some(nbd) = spec.file.driver.get_mut::<NbdSpec>() {
        nbd.context = Some(context.clone());
    }
    let device = Device::open_spec(queue, spec, &disk.reading())?;
    queue.block_on(device.remote_bitmap(queue, &context))
}

/// What differs of the first device from the second one.
fn compare(
    name: &str,
    devices: [Device; 2],
    step: Step,
    on_progress: OnProgress<'_>,
) -> Result<DirtyBits> {
    let mut cancelled = false;
    let different = jobs::differences(devices, GRANULARITY, EngineKind::best(), |progress| {
        let flow = on_progress(step, name, progress.done, progress.total);
        cancelled |= flow.is_break();
        flow
    });
    different.map_err(|error| match error {
        _ if cancelled => Error::Cancelled,
        CompareError::Read { source, .. } => Error::image(name)(source),
        other => Error::Refused(format!("{name}: {other}")),
    })
}
