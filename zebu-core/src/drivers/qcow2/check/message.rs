//! The messages of a check, in QEMU's words, since scripts parse them.

use std::fmt;

use super::uses::Use;
use crate::drivers::qcow2::structures::MAX_SNAPSHOT_EXTRA;
use crate::error::c_hex;
use crate::printable;

/// A message of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum CheckMessage {
    /// A structure lies a cluster or more after the end of the file.
    OutsideFile { offset: u64, length: u64 },
    /// Data past the end of the external data file.
    OutsideDataFile { offset: u64 },
    /// More references to a cluster than a refcount can store.
    Overflow { offset: u64 },
    /// Reserved bits in an L1 entry.
    L1Reserved { entry: u64 },
    /// An L2 table or a refcount block that is not wholly inside the file.
    TableCut { what: Use, offset: u64 },
    /// An L2 table that does not start at a cluster.
    L2Unaligned { offset: u64 },
    /// Too many unaligned L2 tables: the rest were not read.
    L2UnalignedSkipped,
    /// Reserved bits in an L2 entry.
    L2Reserved { entry: u64 },
    /// A compressed cluster with the copied flag.
    CompressedCopied { offset: u64 },
    /// A compressed cluster in an image with an external data file.
    CompressedInDataFile { index: usize, entry: u64 },
    /// A compressed cluster with subclusters.
    CompressedSubclusters { index: usize, entry: u64 },
    /// A subcluster that is allocated and zero at once.
    SubclustersCorrupt { offset: u64 },
    /// An allocated subcluster without a cluster.
    SubclustersUnallocated,
    /// A data cluster that does not start at a cluster of the file.
    DataUnaligned { offset: u64 },
    /// The same for a cluster without data yet.
    PreallocatedUnaligned { offset: u64 },
    /// A snapshot whose L1 table does not start at a cluster.
    SnapshotL1Unaligned {
        id: String,
        name: String,
        offset: u64,
    },
    /// A snapshot whose L1 table is above the limit.
    SnapshotL1TooLarge {
        id: String,
        name: String,
        entries: u32,
    },
    /// A snapshot whose L1 table is too short for its disk.
    SnapshotL1TooSmall {
        id: String,
        name: String,
        entries: u32,
    },
    /// A cluster has two uses that exclude each other. Repairing one could destroy the other, so
    /// nothing is repaired.
    Conflict { offset: u64, uses: [Use; 2] },
    /// The L1 tables of the snapshots overlap and were not read.
    SnapshotL1Overlap,
    /// A bitmap that QEMU would refuse.
    Bitmap { name: String },
    /// An invalid bitmap table entry.
    BitmapTableEntry { name: String, entry: u64 },
    /// The tables of bitmaps overlap and were not read.
    BitmapTablesOverlap,
    /// Another bitmap has the same name.
    BitmapName { name: String },
    /// The directory of the bitmaps cannot be read.
    BitmapDirectory { why: String },
    /// A bitmap was removed.
    BitmapRemoved { name: String, why: &'static str },
    /// All bitmaps were removed.
    BitmapsRemoved { why: &'static str },
    /// Reserved bits in an entry of the refcount table.
    RefcountTableReserved { index: usize },
    /// A refcount block that does not start at a cluster.
    RefcountBlockUnaligned { index: usize },
    /// A refcount block after the end of the file.
    RefcountBlockOutside { index: usize },
    /// A refcount block that has another use, too.
    RefcountBlockShared { index: usize, references: u64 },
    /// The refcount table has an invalid offset for a block.
    RefblockCorrupt { offset: u64, index: u64 },
    /// The refcount of a cluster cannot be read.
    NoRefcount { cluster: u64 },
    /// A cluster with more references than its refcount.
    TooLow {
        cluster: u64,
        refcount: u64,
        references: u64,
    },
    /// A cluster with fewer references than its refcount.
    Leaked {
        cluster: u64,
        refcount: u64,
        references: u64,
    },
    /// An L1 entry whose copied flag does not agree with the refcount.
    CopiedL2 {
        index: u64,
        entry: u64,
        refcount: u64,
    },
    /// The same for an L2 entry.
    CopiedData { entry: u64, refcount: u64 },
    /// A snapshot without the extra data that version 3 requires.
    SnapshotIncomplete { index: usize },
    /// The header has an invalid offset for the snapshot table.
    SnapshotTableOffset,
    /// This many snapshots above the limit.
    SnapshotTableTooLarge { more: u32 },
    /// A snapshot with extra data above the limit.
    SnapshotExtraTooLarge { index: u32 },
    /// A repair drops the snapshots above the limit.
    SnapshotsDiscarded { count: u32 },
    /// A repair drops snapshots since the table is too long.
    SnapshotsTooBigDiscarded { count: u32 },
    /// A repair cuts extra data of this many bytes.
    SnapshotExtraDiscarded { index: u32, extra: u32 },
    /// Refcounts need a rebuild, which a repair of leaks does not do.
    NeedRebuild,
    /// Refcounts are rebuilt.
    Rebuilding,
    /// Refcounts do not agree with the references after a rebuild.
    StillBroken,
    /// This error is repaired.
    Repairing(Box<CheckMessage>),
}

impl CheckMessage {
    /// Whether QEMU prints the program's name in front of it.
    pub fn names_program(&self) -> bool {
        use CheckMessage as M;
        matches!(
            self,
            M::SnapshotTableOffset
                | M::SnapshotTableTooLarge { .. }
                | M::SnapshotExtraTooLarge { .. }
        )
    }
}

impl fmt::Display for CheckMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use CheckMessage as M;
        match self {
            M::OutsideFile { offset, length } => write!(
                f,
                "ERROR: counting reference for region exceeding the end of the file by one \
                 cluster or more: offset {offset:#x} size {length:#x}"
            ),
            M::OutsideDataFile { offset } => write!(
                f,
                "ERROR: data cluster past the end of the external data file: offset {offset:#x}"
            ),
            M::Overflow { offset } => write!(
                f,
                "ERROR: overflow cluster offset={offset:#x}\nUse qemu-img amend to increase the \
                 refcount entry width or qemu-img convert to create a clean copy if the image \
                 cannot be opened for writing"
            ),
            M::L1Reserved { entry } => {
                write!(f, "ERROR found L1 entry with reserved bits set: {entry:x}")
            }
            M::TableCut { what, offset } => write!(
                f,
                "ERROR {} at offset {offset:#x} is cut off by the end of the file",
                what.name()
            ),
            M::L2Unaligned { offset } => write!(
                f,
                "ERROR l2_offset={offset:x}: Table is not cluster aligned; L1 entry corrupted"
            ),
            M::L2UnalignedSkipped => {
                write!(
                    f,
                    "ERROR too many unaligned L2 tables, the rest not checked"
                )
            }
            M::L2Reserved { entry } => {
                write!(f, "ERROR found l2 entry with reserved bits set: {entry:x}")
            }
            M::CompressedCopied { offset } => write!(
                f,
                "ERROR: coffset={offset:#x}: copied flag must never be set for compressed clusters"
            ),
            M::CompressedInDataFile { index, entry } => write!(
                f,
                "ERROR compressed cluster {index} with data file, entry={entry:#x}"
            ),
            M::CompressedSubclusters { index, entry } => write!(
                f,
                "ERROR compressed cluster {index} with non-zero subcluster allocation bitmap, \
                 entry={entry:#x}"
            ),
            M::SubclustersCorrupt { offset } => write!(
                f,
                "ERROR offset={offset:x}: Allocated cluster has corrupted subcluster allocation \
                 bitmap"
            ),
            M::SubclustersUnallocated => write!(
                f,
                "ERROR: Unallocated cluster has non-zero subcluster allocation map"
            ),
            M::DataUnaligned { offset } => write!(
                f,
                "ERROR offset={offset:x}: Data cluster is not properly aligned; L2 entry corrupted."
            ),
            M::PreallocatedUnaligned { offset } => write!(
                f,
                "ERROR offset={offset:x}: Preallocated cluster is not properly aligned; L2 entry \
                 corrupted."
            ),
            M::SnapshotL1Unaligned { id, name, offset } => write!(
                f,
                "ERROR snapshot {} ({}) l1_offset={offset:#x}: L1 table is not cluster \
                 aligned; snapshot table entry corrupted",
                printable(id.as_bytes()),
                printable(name.as_bytes())
            ),
            M::SnapshotL1TooLarge { id, name, entries } => write!(
                f,
                "ERROR snapshot {} ({}) l1_size={entries:#x}: L1 table is too large; \
                 snapshot table entry corrupted",
                printable(id.as_bytes()),
                printable(name.as_bytes())
            ),
            M::SnapshotL1TooSmall { id, name, entries } => write!(
                f,
                "ERROR snapshot {} ({}) l1_size={entries:#x}: L1 table is too small; \
                 snapshot table entry corrupted",
                printable(id.as_bytes()),
                printable(name.as_bytes())
            ),
            M::Conflict {
                offset,
                uses: [one, other],
            } => write!(
                f,
                "ERROR cluster at offset {offset:#x} is named as {} and as {}: nothing is \
                 repaired, since that could destroy what is right",
                one.name(),
                other.name()
            ),
            M::SnapshotL1Overlap => {
                write!(
                    f,
                    "ERROR L1 tables of snapshots overlap, they are not checked"
                )
            }
            M::Bitmap { name } => {
                write!(
                    f,
                    "ERROR bitmap '{}' doesn't satisfy the constraints",
                    printable(name.as_bytes())
                )
            }
            M::BitmapTableEntry { name, entry } => {
                write!(
                    f,
                    "ERROR bitmap '{}': invalid table entry {entry:#x}",
                    printable(name.as_bytes())
                )
            }
            M::BitmapTablesOverlap => {
                write!(f, "ERROR tables of bitmaps overlap, they are not checked")
            }
            M::BitmapName { name } => {
                write!(
                    f,
                    "ERROR more than one bitmap is called '{}'",
                    printable(name.as_bytes())
                )
            }
            M::BitmapDirectory { why } => write!(f, "ERROR bitmap directory: {why}"),
            M::BitmapRemoved { name, why } => {
                write!(
                    f,
                    "Repairing bitmap '{}': {why}, so it is removed",
                    printable(name.as_bytes())
                )
            }
            M::BitmapsRemoved { why } => {
                write!(f, "Repairing bitmaps: {why}, so all are removed")
            }
            M::RefcountTableReserved { index } => {
                write!(
                    f,
                    "ERROR refcount table entry {index} has reserved bits set"
                )
            }
            M::RefcountBlockUnaligned { index } => write!(
                f,
                "ERROR refcount block {index} is not cluster aligned; refcount table entry \
                 corrupted"
            ),
            M::RefcountBlockOutside { index } => {
                write!(f, "ERROR refcount block {index} is outside image")
            }
            M::RefcountBlockShared { index, references } => {
                write!(f, "ERROR refcount block {index} refcount={references}")
            }
            M::RefblockCorrupt { offset, index } => write!(
                f,
                "qcow2: Image is corrupt: Refblock offset {offset:#x} unaligned (reftable index: {}); \
                 further non-fatal corruption events will be suppressed",
                c_hex(*index)
            ),
            M::NoRefcount { cluster } => write!(
                f,
                "Can't get refcount for cluster {cluster}: Input/output error"
            ),
            M::TooLow {
                cluster,
                refcount,
                references,
            } => write!(
                f,
                "ERROR cluster {cluster} refcount={refcount} reference={references}"
            ),
            M::Leaked {
                cluster,
                refcount,
                references,
            } => write!(
                f,
                "Leaked cluster {cluster} refcount={refcount} reference={references}"
            ),
            M::CopiedL2 {
                index,
                entry,
                refcount,
            } => write!(
                f,
                "ERROR OFLAG_COPIED L2 cluster: l1_index={index} l1_entry={entry:x} \
                 refcount={refcount}"
            ),
            M::CopiedData { entry, refcount } => write!(
                f,
                "ERROR OFLAG_COPIED data cluster: l2_entry={entry:x} refcount={refcount}"
            ),
            M::SnapshotIncomplete { index } => {
                write!(f, "ERROR snapshot table entry {index} is incomplete")
            }
            M::SnapshotTableOffset => write!(f, "ERROR snapshot table offset invalid"),
            M::SnapshotTableTooLarge { more } => write!(
                f,
                "ERROR snapshot table too large\nYou can force-remove all {more} overhanging \
                 snapshots with qemu-img check -r all"
            ),
            M::SnapshotExtraTooLarge { index } => write!(
                f,
                "ERROR failed to read the snapshot table: Too much extra metadata in snapshot \
                 table entry {index}\nYou can force-remove this extra metadata with qemu-img \
                 check -r all"
            ),
            M::SnapshotsDiscarded { count } => {
                write!(f, "Discarding {count} overhanging snapshots")
            }
            M::SnapshotsTooBigDiscarded { count } => write!(
                f,
                "Discarding {count} overhanging snapshots (snapshot table is too big)"
            ),
            M::SnapshotExtraDiscarded { index, extra } => write!(
                f,
                "Discarding too much extra metadata in snapshot table entry {index} ({extra} > \
                 {MAX_SNAPSHOT_EXTRA})"
            ),
            M::NeedRebuild => write!(f, "ERROR need to rebuild refcount structures"),
            M::Rebuilding => write!(f, "Rebuilding refcount structure"),
            M::StillBroken => write!(f, "ERROR rebuilt refcount structure is still broken"),
            M::Repairing(what) => {
                let text = what.to_string();
                let what = ["ERROR ", "Leaked "]
                    .iter()
                    .find_map(|prefix| text.strip_prefix(prefix));
                write!(f, "Repairing {}", what.unwrap_or(&text))
            }
        }
    }
}
