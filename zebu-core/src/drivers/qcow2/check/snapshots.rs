//! The snapshot table as a check reads it: entries for which an image is not opened are reported,
//! and a repair reduces them to what can be kept.

use super::{CheckMessage, RepairMode};
use crate::drivers::qcow2::structures::{
    Header, MAX_SNAPSHOT_EXTRA, MAX_SNAPSHOT_TABLE_BYTES, MAX_SNAPSHOTS, SNAPSHOT_HEADER_BYTES,
    Snapshot,
};
use crate::storage::{self, Queue, Storage};
use crate::{Error, Result};

/// Extra data that a snapshot of a version 3 image must have, in bytes: size
/// of the VM state and size of the disk.
const NEEDED_EXTRA: usize = 16;

/// The snapshots of an image, and what is wrong with their table.
#[derive(Default)]
pub(super) struct SnapshotTable {
    pub(super) snapshots: Vec<Snapshot>,
    /// Bytes that the table takes up in the file.
    pub(super) bytes: u64,
    /// Errors found, which a new table would not have.
    pub(super) errors: u64,
}

impl SnapshotTable {
    /// Reads the table. What cannot be kept is an error, unless everything is to be repaired: then
    /// it is left out.
    pub(super) async fn load(
        queue: &Queue,
        file: &dyn Storage,
        header: &Header,
        mode: Option<RepairMode>,
        emit: &mut dyn FnMut(CheckMessage),
    ) -> Result<Self> {
        let start = header.snapshots_offset;
        if !start.is_multiple_of(header.cluster_size()) || start > i64::MAX as u64 {
            emit(CheckMessage::SnapshotTableOffset);
            return Err(os_error(libc::EINVAL));
        }
        let mut loading = Loading {
            queue,
            file,
            file_len: file.len()?,
            at: start,
        };
        let discard = mode == Some(RepairMode::All);
        let mut table = SnapshotTable::default();
        let mut count = header.nb_snapshots;
        if let Some(more @ 1..) = count.checked_sub(MAX_SNAPSHOTS) {
            if !discard {
                emit(CheckMessage::SnapshotTableTooLarge { more });
                return Err(os_error(libc::EFBIG));
            }
            emit(CheckMessage::SnapshotsDiscarded { count: more });
            table.errors += u64::from(more);
            count = MAX_SNAPSHOTS;
        }
        for index in 0..count {
            let (snapshot, extra) = loading.next().await?;
            if extra as usize > MAX_SNAPSHOT_EXTRA {
                if !discard {
                    emit(CheckMessage::SnapshotExtraTooLarge { index });
                    return Err(os_error(libc::EFBIG));
                }
                emit(CheckMessage::SnapshotExtraDiscarded { index, extra });
                table.errors += 1;
            }
            if loading.at - start > MAX_SNAPSHOT_TABLE_BYTES as u64 {
                let count = count - index;
                if !discard {
                    emit(CheckMessage::SnapshotTableTooLarge { more: count });
                    return Err(os_error(libc::EFBIG));
                }
                emit(CheckMessage::SnapshotsTooBigDiscarded { count });
                table.errors += u64::from(count);
                break;
            }
            table.bytes = loading.at - start;
            table.snapshots.push(snapshot);
        }
        table.find_incomplete(header, discard, emit);
        Ok(table)
    }

    /// Reports snapshots without the extra data that version 3 requires.
    fn find_incomplete(
        &mut self,
        header: &Header,
        repairing: bool,
        emit: &mut dyn FnMut(CheckMessage),
    ) {
        if header.version < 3 {
            return;
        }
        for (index, snapshot) in self.snapshots.iter().enumerate() {
            if snapshot.extra.len() < NEEDED_EXTRA {
                let message = CheckMessage::SnapshotIncomplete { index };
                emit(match repairing {
                    true => CheckMessage::Repairing(Box::new(message)),
                    false => message,
                });
                self.errors += 1;
            }
        }
    }
}

/// A table that is being read.
struct Loading<'a> {
    queue: &'a Queue,
    file: &'a dyn Storage,
    file_len: u64,
    /// Where the last entry read ends.
    at: u64,
}

impl Loading<'_> {
    /// The next entry with its extra data up to the limit, and the stored length of that data.
    async fn next(&mut self) -> Result<(Snapshot, u32)> {
        let fixed = SNAPSHOT_HEADER_BYTES;
        let start = self.at.next_multiple_of(8);
        let mut entry = self.read(start, fixed).await?;
        let number = |at: usize| u16::from_be_bytes([entry[at], entry[at + 1]]);
        let names = u64::from(number(12)) + u64::from(number(14));
        let claimed = u32::from_be_bytes([entry[36], entry[37], entry[38], entry[39]]);
        let kept = claimed.min(MAX_SNAPSHOT_EXTRA as u32);
        entry[36..].copy_from_slice(&kept.to_be_bytes());
        entry.extend(self.read(start + fixed, u64::from(kept)).await?);
        let names_at = start + fixed + u64::from(claimed);
        entry.extend(self.read(names_at, names).await?);
        self.at = names_at + names;
        // It is whole, so this never is `None`.
        let snapshot = Snapshot::decode(&entry, 0)?.map(|(snapshot, _)| snapshot);
        Ok((snapshot.unwrap_or_default(), claimed))
    }

    /// At most 128 KiB; what lies after the end of the file is zero.
    async fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let inside = length.min(self.file_len.saturating_sub(offset));
        let mut bytes = storage::read_vec(self.file, self.queue, offset, inside as usize).await?;
        bytes.resize(length as usize, 0);
        Ok(bytes)
    }
}

fn os_error(number: i32) -> Error {
    Error::Io(std::io::Error::from_raw_os_error(number))
}
