//! How an image is opened, and which files it may open.

use std::sync::Arc;

use crate::block::{DetectZeroes, Device, Format, Objects};
use crate::drivers::Limits;
use crate::drivers::qcow2::SnapshotName;
use crate::storage::{CacheMode, RemoteCache, Storage};

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
        /// [`ImageSpec::looks_like`](crate::block::ImageSpec::looks_like) tells. Else it is refused, or read as what it is. No effect
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
        /// Bytes of a slice of an L2 table of the top image, the unit of that cache: a power of two from
        /// 512 to the cluster size; None: 4 KiB, or the cluster size if that is smaller.
        pub l2_cache_entry_size: Option<u64>,
        /// Carry out discards (`discard=unmap`): free the clusters, and punch holes into the file
        /// where its space becomes free. None: by the options of the image, else no.
        pub discard: Option<bool>,
        /// Look for zeroes in what is written, and store these as such. None: by the options of the
        /// image, else no.
        pub detect_zeroes: Option<DetectZeroes>,
        /// Write what is read from behind the image into it, as the filter `copy-on-read` does. The device
        /// must be open for writing.
        pub copy_on_read: bool,
        /// Store dirty bitmaps with each flush, not only when the device is closed: after a crash,
        /// bitmaps of an image that was not written since are consistent. Costs writes and three
        /// flushes of the file for each flush after a change.
        pub store_bitmaps: bool,
        /// Open this internal snapshot, read-only, instead of the active disk.
        pub snapshot: Option<SnapshotName>,
        /// Credentials and secrets by the ids that names may have.
        pub objects: Objects,
        /// Where blocks of files on other machines are kept, which are opened to be read.
        pub block_cache: Option<Arc<dyn RemoteCache>>,
    }
}

/// Whether the length of a raw image may change while it is open, and by which programs. In other
/// formats only the image's writer changes the length of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Length {
    /// Other processes may change it.
    #[default]
    Shared,
    /// No other process may change it: NBD clients rely on the size.
    Fixed,
    /// This process is about to change it, and no other may.
    Changing,
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
