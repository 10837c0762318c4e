//! The check of a VMDK, which is QEMU's: each grain must be found, and begin inside its file. It ends
//! at the first error.

use super::header::{MARKER_BYTES, SECTOR};
use super::sparse::Stored;
use super::{Content, Region, Vmdk, closed};
use crate::drivers::FormatImage;
use crate::storage::Queue;
use crate::{Error, Result};

impl Vmdk {
    /// Looks at all grains. Passes an error in them to `say`, and ends with QEMU's error number.
    pub(super) async fn check_grains(
        &self,
        queue: &Queue,
        say: &mut dyn FnMut(String),
    ) -> Result<()> {
        let mut at = 0;
        while at < self.size() {
            let region = self.shared.region(at);
            let sector = |at: u64| at / SECTOR;
            let step = match region.step(&self.shared, queue, at).await? {
                Step::Sound(bytes) => bytes,
                Step::Unknown => {
                    say(format!(
                        "ERROR: could not get cluster_offset for sector {}",
                        sector(at)
                    ));
                    return Err(Error::os(libc::EPERM));
                }
                Step::PastEnd(bytes) => {
                    say(format!(
                        "ERROR: cluster offset for sector {} points after EOF",
                        sector(at + bytes)
                    ));
                    return Err(Error::os(libc::EINVAL));
                }
            };
            at += step;
        }
        Ok(())
    }
}

/// What is found at an offset.
enum Step {
    /// So many bytes are sound: whole units of the region, counted from the offset.
    Sound(u64),
    /// The grain cannot be found.
    Unknown,
    /// The grain so many bytes further on begins past the end of the file.
    PastEnd(u64),
}

impl Region {
    /// Looks at the grain at `guest`, and at those that are stored alike.
    async fn step(&self, shared: &super::Shared, queue: &Queue, guest: u64) -> Result<Step> {
        shared.spend(crate::drivers::LOOKUP_WORK)?;
        let rest = self.size - (guest - self.start);
        let sparse = match &self.content {
            Content::Zero => return Ok(Step::Sound(rest)),
            Content::Closed => return Err(closed()),
            Content::Flat { host, file_len } => {
                return Ok(match *host < file_len.next_multiple_of(SECTOR) {
                    true => Step::Sound(self.size),
                    false => Step::PastEnd(0),
                });
            }
            Content::Sparse(sparse) => sparse,
        };
        let span = sparse
            .load(queue, &shared.groups, guest - self.start, rest)
            .await?;
        let grain = sparse.layout().grain_bytes();
        let end = sparse.file_len().next_multiple_of(SECTOR);
        // In steps of a grain, also where the extent before ended within one.
        let units = span.length.div_ceil(grain);
        Ok(match span.stored {
            Stored::Nowhere | Stored::Zero => Step::Sound(units * grain),
            Stored::Damaged(_) => Step::Unknown,
            Stored::Compressed { host, .. } => {
                let marker = match host % SECTOR {
                    0 => 0,
                    _ => MARKER_BYTES,
                };
                match host - marker < end {
                    true => Step::Sound(grain),
                    false => Step::PastEnd(0),
                }
            }
            Stored::Data(host) => match end.saturating_sub(host).div_ceil(grain) {
                there if there >= units => Step::Sound(units * grain),
                there => Step::PastEnd(there * grain),
            },
        })
    }
}
