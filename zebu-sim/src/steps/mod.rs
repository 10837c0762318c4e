//! A scenario as data: an image and a list of steps, drawn from a seed. Any part of the list is a
//! scenario, too, so that failing ones can be shrunk. `origin` is the image, `draw` draws the steps.

mod draw;
mod origin;

use std::fmt;

use zebu::block::{DetectZeroes, Preallocation, Zeroing};
use zebu::jobs::RepairMode;
use zebu::storage::CacheMode;

use crate::deeds::Deed;
use crate::disk::{Cut, Fault};
pub use crate::sched::Fate;
pub use origin::{Base, NewBitmap, Origin};

/// A simulation.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The image that it begins with.
    pub origin: Origin,
    /// The steps.
    pub steps: Vec<Step>,
}

/// A step. It has its own seed, and its data contain its number, so neither changes when other steps
/// are left out.
#[derive(Clone, Debug)]
pub struct Step {
    /// The tag of what it writes.
    pub id: u32,
    /// The seed of disk and scheduler while it runs.
    pub seed: u64,
    /// Its kind.
    pub what: What,
    /// What another program does meanwhile.
    pub beside: Option<Beside>,
}

/// What another program does with the files of the simulation.
#[derive(Clone, Copy, Debug)]
pub struct Beside {
    /// What it does.
    pub deed: Deed,
    /// The base that it reads instead of the image; none if there is no such base.
    pub base: Option<usize>,
    /// It is killed after so many operations.
    pub dies: Option<u32>,
    /// The seed of the turns.
    pub seed: u64,
}

/// Two programs that do something with one name at once.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// What they do.
    pub deeds: [Deed; 2],
    /// Whether by a symbolic link.
    pub by_link: [bool; 2],
    /// What is there before.
    pub before: Before,
    /// What stops them.
    pub stop: PairStop,
}

/// What a name leads to at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// Nothing.
    Nothing,
    /// An empty file.
    Empty,
    /// A raw disk.
    Raw,
    /// A qcow2 image.
    Qcow2,
}

/// What stops two programs.
#[derive(Clone, Copy, Debug)]
pub enum PairStop {
    /// Nothing.
    No,
    /// The disk stops after so many operations.
    Cut(u32, Cut),
    /// One of them is killed after so many operations.
    Kill(usize, u32),
    /// Operations fail.
    Fault(Fault),
}

/// The kind of a step.
#[derive(Clone, Debug)]
pub enum What {
    /// Opens the image for writing, if it is not open.
    Open(Opening),
    /// Begins a request, and lets some time pass.
    Request(Request),
    /// Waits until all requests have ended.
    Wait,
    /// Changes the whole image while nothing else is in flight.
    Change(ImageChange, Stop),
    /// Exchanges the chain of the open image while requests are in flight.
    Exchange(Exchange),
    /// Operations of the disk fail from now on.
    Fault(Fault),
    /// Closes the image.
    Close(Stop),
    /// Drops all requests, then the device, without closing it.
    Abandon,
    /// The process or the machine stops now.
    Cut(Cut),
    /// A job, with the image closed.
    Job(Job, Stop),
    /// Two programs and one name, with the image closed.
    Pair(Pair),
    /// Zeroes at the end of the file are cut off, down to this length, as QEMU leaves files.
    Trim(u64),
    /// Another program leaves an autoclear bit that nobody knows in the header.
    Mark(u32),
    /// The file is damaged.
    Damage(Damage),
}

/// How a step is interrupted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stop {
    /// Not at all.
    #[default]
    No,
    /// The disk stops after so many operations.
    Cut(u32, Cut),
    /// Its future is dropped after so many polls.
    Drop(u32),
}

/// How a device is opened.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    /// Queues that requests come from.
    pub queues: usize,
    /// Whether discards are carried out.
    pub discard: bool,
    /// How writes of zeroes are treated.
    pub detect_zeroes: DetectZeroes,
    /// Bytes of L2 slices.
    pub cache: Option<(u64, u64)>,
    /// The cache mode.
    pub mode: CacheMode,
    /// The alignment of direct I/O.
    pub align: usize,
    /// The most parts of a request in flight.
    pub parts: usize,
    /// Whether each flush stores dirty bitmaps.
    pub store_bitmaps: bool,
    /// Whether inconsistent bitmaps are removed first.
    pub forget: bool,
    /// The filter `copy-on-read` over the image.
    pub copy_on_read: bool,
    /// The filter `preallocate` over its file.
    pub preallocate: bool,
}

/// A request for a range of the disk.
#[derive(Clone, Debug)]
pub struct Request {
    /// The queue that drives it.
    pub queue: usize,
    /// Its kind.
    pub kind: Kind,
    /// First sector, modulo the size of the disk.
    pub start: usize,
    /// The number of sectors.
    pub count: usize,
    /// What happens to its future.
    pub fate: Fate,
    /// Turns of the scheduler after it has begun.
    pub turns: u32,
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Write whole clusters compressed.
    Compressed,
    /// Make zero.
    Zero(Zeroing),
    /// Discard.
    Discard,
    /// Make durable.
    Flush,
    /// Exchange the chain.
    Exchange(ExchangeKind),
}

impl Kind {
    /// Whether it changes the disk.
    pub fn is_change(self) -> bool {
        !matches!(self, Kind::Read | Kind::Flush | Kind::Exchange(_))
    }
}

/// An exchange of the chain.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    /// The queue that drives it.
    pub queue: usize,
    /// What is exchanged.
    pub kind: ExchangeKind,
    /// What happens to its future.
    pub fate: Fate,
    /// Turns of the scheduler after it has begun.
    pub turns: u32,
}

/// What is exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeKind {
    /// An overlay is put on top, with clusters of so many bits, or is committed and taken away if there is
    /// one.
    Overlay(u32),
    /// The backing chain is opened again, and takes the place of itself.
    Below,
    /// A hook is added, or removed if there is one.
    Hook,
}

/// A change of the whole image.
#[derive(Clone, Copy, Debug)]
pub enum ImageChange {
    /// A resize by this number of sectors.
    Resize(i64, Preallocation),
    /// A snapshot is created.
    Take,
    /// A snapshot is applied: its index, modulo their number.
    Apply(usize),
    /// A snapshot is deleted, likewise.
    Delete(usize),
    /// This number of sectors of VM state is written.
    VmState(usize),
    /// The dirty bitmaps are changed.
    Bitmap(BitmapChange),
}

impl ImageChange {
    /// Whether it changes snapshots.
    pub fn is_of_snapshots(&self) -> bool {
        match self {
            ImageChange::Take | ImageChange::Apply(_) | ImageChange::Delete(_) => true,
            ImageChange::Resize(..) | ImageChange::VmState(_) | ImageChange::Bitmap(_) => false,
        }
    }
}

/// A change of one dirty bitmap: its index, modulo their number.
#[derive(Clone, Copy, Debug)]
pub enum BitmapChange {
    /// It is added.
    Add(NewBitmap),
    /// It is removed.
    Remove(usize),
    /// It is cleared.
    Clear(usize),
    /// It records changes from now on, or does not.
    Enable(usize, bool),
    /// Another bitmap is merged into it.
    Merge(usize, usize),
    /// Random bits are merged into it, drawn from this seed.
    MergeRandom(usize, u64),
}

/// A job on the closed image.
#[derive(Clone, Copy, Debug)]
pub enum Job {
    /// Commit into the backing file; whether the image is emptied then.
    Commit(bool),
    /// Rebase to another base; whether written clusters are compressed.
    Rebase(usize, bool),
    /// An unsafe rebase, which only changes the name of the base.
    RebaseUnsafe(usize),
    /// Amend: version, refcount order, lazy refcounts.
    Amend(Option<u32>, Option<u32>, Option<bool>),
    /// A repair.
    Repair(RepairMode),
    /// Convert to a new image: cluster bits, whether compressed, whether with its bitmaps.
    Convert(u32, bool, bool),
}

/// Damage to the file of a closed image.
#[derive(Clone, Copy, Debug)]
pub enum Damage {
    /// A bit of an L1 entry is set that makes it invalid, or is ignored.
    L1(u64),
    /// The same for an L2 entry.
    L2(u64),
    /// The same for a refcount table entry.
    Refcount(u64),
    /// The file is truncated.
    Truncate(u64),
    /// This number of bytes of noise is appended.
    Extend(u64),
}

/// Kinds of steps that a simulation can leave out.
pub const KINDS: &[&str] = &[
    "drops",
    "stalls",
    "faults",
    "damage",
    "cuts",
    "jobs",
    "wholes",
    "bitmaps",
    "programs",
    "exchanges",
    "formats",
];

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Origin {
            other,
            create,
            bases,
            backing,
            bitmaps,
        } = &self.origin;
        if let Some(other) = other {
            writeln!(f, "  of another format: {other:?}")?;
        }
        writeln!(f, "  image: {create:?}, {bitmaps:?}")?;
        for (n, base) in bases.iter().enumerate() {
            let below = if n == *backing { " (behind it)" } else { "" };
            writeln!(f, "  base {n}{below}: {base:?}")?;
        }
        for step in &self.steps {
            write!(f, "  {:>4}  {:?}", step.id, step.what)?;
            match &step.beside {
                Some(beside) => writeln!(f, " beside {beside:?}")?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }
}
