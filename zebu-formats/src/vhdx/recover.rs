//! Carrying out what is in the log, when an image is opened for writing.

use super::header::{self, Header};
use super::log::Changes;
use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::storage::{self, Queue, Storage};

/// Carries out the changes that are in the log, durably, and says in the header that there are none.
/// Until that is done it can be repeated: a change is a range that gets new bytes. Returns the new
/// header.
pub(super) async fn recover(
    queue: &Queue,
    file: &dyn Storage,
    header: Header,
    changes: Option<Changes>,
) -> Result<Header> {
    if header.log_id.is_none() {
        return Ok(header);
    }
    if let Some(changes) = changes {
        if changes.length > file.len()? {
            storage::set_len(file, queue, changes.length).await?;
        }
        for (range, bytes) in changes.patches.iter() {
            match bytes {
                Some(bytes) => storage::write_slice(file, queue, range.start, bytes).await?,
                None => {
                    let length = range.end - range.start;
                    storage::zero_range(file, queue, range.start, length).await?;
                }
            }
        }
        if !is_broken(Rule::RecoveredBeforeEmptyLog) {
            storage::flush(file, queue).await?;
        }
    }
    let clean = Header {
        log_id: None,
        ..header.next()?
    };
    let offset = header::OFFSETS[clean.place];
    storage::write_slice(file, queue, offset, &clean.encode()).await?;
    storage::flush(file, queue).await?;
    Ok(clean)
}
