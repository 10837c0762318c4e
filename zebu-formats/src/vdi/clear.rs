//! Zeroes and discards.
//!
//! The map has values for blocks that read as zeroes, but it does not lose a block: a place in the
//! middle that nothing leads to could not be told from one in use by the header's count, by which
//! QEMU appends. So zeroes go into the file, as holes where space may be freed, and a block without a
//! place is zero already. Nothing is held: the map stays as it is.

use std::ops::Range;

use super::write::Writer;
use crate::drivers::{Clear, Mapping};
use crate::storage::{self, Queue};
use crate::{Error, Result};

impl Writer {
    /// Takes the content of a range away.
    pub(super) async fn clear(&self, queue: &Queue, range: Range<u64>, how: Clear) -> Result<()> {
        self.commits.check()?;
        let file = &*self.image.file;
        let mut parts = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let extent = self.image.extent(at, range.end - at);
            if let Mapping::Data { host } = extent.mapping {
                parts.push((host.0, extent.length));
            }
            at += extent.length;
        }
        // Either all of it is done quickly, or nothing.
        if how == Clear::Quickly && parts.len() > 1 {
            return Err(Error::os(libc::EOPNOTSUPP));
        }
        for (host, length) in parts {
            match how {
                Clear::Zero => storage::zero_range(file, queue, host, length).await?,
                // Also on a server, where a discard may leave any content.
                Clear::Unmap | Clear::Discard => {
                    storage::punch_hole(file, queue, host, length).await?;
                }
                Clear::Quickly => storage::zero_quickly(file, queue, host, length).await?,
            }
        }
        Ok(())
    }
}
