//! Zeroes and discards.
//!
//! The map has values for blocks that read as zeroes, but it does not lose a block: a place in the
//! middle that nothing leads to could not be told from one in use by the header's count, by which
//! QEMU appends. So blocks stay (`clearing.rs`), and one without a place is zero already. Nothing is
//! held: the map stays as it is.

use std::ops::Range;

use super::write::Writer;
use crate::Clearing;
use crate::Result;
use crate::drivers::{Clear, Mapping};
use crate::storage::Queue;

impl Writer {
    /// Takes the content of a range away.
    pub(super) async fn clear(&self, queue: &Queue, range: Range<u64>, how: Clear) -> Result<()> {
        self.commits.check()?;
        let mut clearing = Clearing::new(&*self.image.file, queue, how);
        let mut at = range.start;
        while at < range.end {
            let extent = self.image.extent(at, range.end - at);
            if let Mapping::Data { host } = extent.mapping {
                clearing.part(host.0, extent.length).await?;
            }
            at += extent.length;
        }
        clearing.end().await
    }
}
