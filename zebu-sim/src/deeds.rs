//! What a program does with a name, by the library or without it, and what is found under a name.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;

use zebu::block::{Device, Format, OpenOptions};
use zebu::internal::new_image::Creation;
use zebu::jobs::{CompressOptions, ConvertOptions, Preallocation};
use zebu::names::Source;
use zebu::storage::Queue;

use crate::content::{self, Tag};
use crate::disk::{Disk, SECTOR};
use crate::sched;
use zebu_testkit::Rng;

/// The formats of new images.
pub const FORMATS: &[&str] = &[
    "qcow2", "qcow2", "qcow2", "raw", "raw", "raw", "vmdk", "vmdk", "vdi", "vpc", "vhdx",
];

/// What a program does with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// Converts a disk to a new image: its format, whether compressed, and the steps of progress after
    /// which it is cancelled.
    Convert(&'static str, bool, Option<u32>),
    /// Makes an empty image of this format and of this number of sectors.
    Create(&'static str, u64),
    /// The same, of qcow2, if there is no file.
    CreateNew(u64),
    /// Writes this to some sectors of a qcow2 image; the number of polls after which that is dropped.
    Write(Tag, Option<u32>),
    /// Creates a snapshot in a qcow2 image, and a bitmap.
    Snapshot,
    /// Makes a qcow2 image larger by so many sectors.
    Grow(u64),
    /// Opens a qcow2 image for writing, and closes it.
    Open,
    /// Reads the whole disk, twice.
    Read,
    /// Removes the name.
    Remove,
    /// Gives the name to another file.
    Replace,
    /// Gives the file another name.
    MoveAway,
}

impl Deed {
    /// A deed at random; `tag` is what it writes.
    pub fn draw(rng: &mut Rng, tag: Tag, cancels: bool) -> Deed {
        let polls = 1 + rng.below(6) as u32;
        let stop = (cancels && rng.one_in(4)).then_some(polls);
        match rng.below(16) {
            0..6 => {
                let format = rng.pick(FORMATS);
                let compress = format == "qcow2" && rng.one_in(3);
                Deed::Convert(format, compress, stop)
            }
            6 | 7 => Deed::Create(rng.pick(FORMATS), 8 * (1 + rng.below(256))),
            8 => Deed::CreateNew(1 + rng.below(2048)),
            9 | 10 => Deed::Write(tag, stop),
            11 => Deed::Snapshot,
            12 => Deed::Grow(1 + rng.below(300)),
            13 => rng.pick(&[Deed::Read, Deed::Open]),
            14 => Deed::Remove,
            _ => rng.pick(&[Deed::Replace, Deed::MoveAway]),
        }
    }

    /// Whether it knows nothing of locks.
    pub fn is_foreign(self) -> bool {
        matches!(self, Deed::Remove | Deed::Replace | Deed::MoveAway)
    }

    /// Whether it makes an image, in the place of what is there.
    pub fn makes(self) -> bool {
        matches!(
            self,
            Deed::Convert(..) | Deed::Create(..) | Deed::CreateNew(_)
        )
    }

    /// Whether it changes nothing.
    pub fn only_looks(self) -> bool {
        matches!(self, Deed::Read | Deed::Open)
    }

    /// The format of the image that it makes or changes.
    pub fn format(self) -> &'static str {
        match self {
            Deed::Convert(format, ..) | Deed::Create(format, _) => format,
            _ => "qcow2",
        }
    }

    /// Does it with `name`. `source` is what is converted, `other` what takes the place of the name's
    /// file, `away` where that goes.
    ///
    /// # Errors
    /// Why it has failed, or `promise:` and what is wrong.
    pub fn perform(self, disk: &Arc<Disk>, names: &Names) -> Result<(), String> {
        let Names {
            name,
            source,
            other,
            away,
        } = *names;
        let queue = sched::queue(4);
        let creation = |format: &str| {
            Creation::new(name.as_ref(), format, &[]).map_err(|e| format!("promise: {e}"))
        };
        let text = |e: zebu::Error| e.to_string();
        match self {
            Deed::Convert(format, compress, stop) => {
                let creation = creation(format)?;
                let source = open(&queue, source, &OpenOptions::default())?;
                let compress = compress.then(CompressOptions::default);
                let begun = creation.begin(&queue, &source, compress).map_err(text)?;
                let left = Cell::new(stop);
                let go_on = |_| match left.get() {
                    Some(0) => ControlFlow::Break(()),
                    Some(more) => {
                        left.set(Some(more - 1));
                        ControlFlow::Continue(())
                    }
                    None => ControlFlow::Continue(()),
                };
                let filled = begun.fill(source, ConvertOptions::default(), go_on);
                filled.map_err(text)
            }
            Deed::Create(format, sectors) => {
                let creation = creation(format)?;
                creation
                    .create(&queue, Some(sectors * SECTOR))
                    .map_err(text)
            }
            Deed::CreateNew(sectors) => {
                let device = Device::create(&queue, name, sectors * SECTOR).map_err(text)?;
                queue.block_on(device.close(&queue)).map_err(text)
            }
            Deed::Write(tag, stop) => {
                let device = open(&queue, name, &for_writing())?;
                let sectors = device.size() / SECTOR;
                let mut rng = Rng::new(tag.into());
                let written = sched::run_or_drop(&queue, stop, async {
                    for _ in 0..3 {
                        let at = rng.below(sectors.max(1));
                        let count = (1 + rng.below(40)).min(sectors - at.min(sectors));
                        let bytes = content::bytes_of((0..count).map(|_| tag), at);
                        write(&device, &queue, at * SECTOR, bytes).await?;
                    }
                    device.flush(&queue).await
                });
                match written {
                    Some(result) => result.map_err(text)?,
                    None => return Err("it was dropped".into()),
                }
                queue.block_on(device.close(&queue)).map_err(text)
            }
            Deed::Snapshot => {
                let mut device = open(&queue, name, &for_writing())?;
                queue.block_on(async {
                    device.snapshot_create(&queue, "deed").await.map_err(text)?;
                    let bitmap = device.bitmap_add(&queue, "deed", Some(4096), true);
                    bitmap.await.map_err(text)?;
                    device.close(&queue).await.map_err(text)
                })
            }
            Deed::Grow(sectors) => {
                let mut device = open(&queue, name, &for_writing())?;
                let size = device.size() + sectors * SECTOR;
                queue.block_on(async {
                    let resize = device.resize(&queue, size, Preallocation::Off);
                    resize.await.map_err(text)?;
                    device.close(&queue).await.map_err(text)
                })
            }
            Deed::Open => {
                let device = open(&queue, name, &for_writing())?;
                queue.block_on(device.close(&queue)).map_err(text)
            }
            Deed::Read => {
                let device = open(&queue, name, &OpenOptions::default())?;
                let first = read(&queue, &device)?;
                let again = read(&queue, &device)?;
                let is_raw = device.top().format() == Format::RAW;
                match first == again || is_raw {
                    true => Ok(()),
                    false => Err("promise: an image changed while it was open".into()),
                }
            }
            Deed::Remove => disk.remove(name).map_err(|e| e.to_string()),
            Deed::Replace => disk.rename(other, name).map_err(|e| e.to_string()),
            Deed::MoveAway => disk.rename(name, away).map_err(|e| e.to_string()),
        }
    }
}

/// The names that a deed is done with.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a> {
    /// What it is done with.
    pub name: &'a str,
    /// The disk that is converted.
    pub source: &'a str,
    /// What takes the place of the name's file.
    pub other: &'a str,
    /// Where the name's file goes.
    pub away: &'a str,
}

fn for_writing() -> OpenOptions {
    let options = OpenOptions::default().write(true);
    options.format(Some(Format::QCOW2))
}

fn open(queue: &Queue, name: &str, options: &OpenOptions) -> Result<Device, String> {
    let device = Device::open(queue, &Source::Name(name.into()), options);
    device.map_err(|e| e.to_string())
}

async fn write(device: &Device, queue: &Queue, at: u64, bytes: Vec<u8>) -> zebu::Result<()> {
    let length = bytes.len();
    let mut buffer = zebu::Buffer::new(length);
    buffer[..length].copy_from_slice(&bytes);
    device.write_buffer(queue, at, buffer, length).await.1
}

fn read(queue: &Queue, device: &Device) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; device.size() as usize];
    let read = device.read_blocking(queue, 0, &mut bytes);
    read.map(|()| bytes).map_err(|e| e.to_string())
}

/// What is found under a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum View {
    /// Nothing.
    Absent,
    /// An empty file.
    Empty,
    /// A file of this length that is no image.
    Unopenable(usize, String),
    /// A disk: format, bytes (as a sum and their number), and what else the image has.
    Disk(String, u64, u64, String),
}

impl View {
    /// Looks at a name. All operations of `disk` end at once, and no file is open.
    pub fn of(disk: &Arc<Disk>, name: &str) -> View {
        let Some(file) = disk.find(name) else {
            return View::Absent;
        };
        let length = disk.bytes(file).len();
        if length == 0 {
            return View::Empty;
        }
        let queue = sched::queue(4);
        let device = match open(&queue, name, &OpenOptions::default()) {
            Ok(device) => device,
            Err(why) => return View::Unopenable(length, why),
        };
        let bytes = match read(&queue, &device) {
            Ok(bytes) => bytes,
            Err(why) => return View::Unopenable(length, why),
        };
        let sum = bytes.iter().fold(0u64, |sum, byte| {
            (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let snapshots = device.top().snapshots().map(<[_]>::len);
        let bitmaps = queue.block_on(device.bitmaps(&queue)).map(|all| all.len());
        let more = format!("{snapshots:?} snapshots, {:?} bitmaps", bitmaps.ok());
        View::Disk(
            device.top().format().name().into(),
            sum,
            device.size(),
            more,
        )
    }
}
