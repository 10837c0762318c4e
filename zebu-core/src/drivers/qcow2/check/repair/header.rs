//! What a repair changes in the header. The last write is within the first 512 bytes, which a disk
//! writes atomically. Fields other than the changed ones are kept, unknown ones, too.

use super::Repair;
use crate::Result;
use crate::drivers::qcow2::structures::{
    AUTOCLEAR_KNOWN, Header, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DIRTY,
};
use crate::storage;

/// Where the fields are. Section "Header".
const REFCOUNT_TABLE_AT: u64 = 48;
const SNAPSHOTS_AT: u64 = 60;
const INCOMPATIBLE_AT: u64 = 72;
const AUTOCLEAR_AT: u64 = 88;

impl Repair<'_> {
    /// Clears the unknown autoclear bits, as is required of a program that
    /// writes to the image.
    pub(super) async fn clear_unknown_autoclear(&mut self) -> Result<()> {
        let header = &mut self.metadata.header;
        let known = header.autoclear & AUTOCLEAR_KNOWN;
        if known != header.autoclear {
            header.autoclear = known;
            self.writer
                .write(AUTOCLEAR_AT, &known.to_be_bytes())
                .await?;
            self.writer.barrier().await?;
        }
        Ok(())
    }

    /// Changes extensions of the header.
    pub(super) async fn replace_header(&mut self, change: impl FnOnce(&mut Header)) -> Result<()> {
        let old = self.metadata.header.clone();
        let mut header = old.clone();
        change(&mut header);
        let file = &*self.metadata.file;
        let length = header.replaced_len(&old).min(file.len()?);
        let bytes = storage::read_vec(file, &self.queue, 0, length as usize).await?;
        let replacement = header.replace(&old, &bytes)?;
        if let Some((at, bytes)) = &replacement.before {
            self.writer.write(*at, bytes).await?;
            self.writer.barrier().await?;
        }
        self.writer.write(0, &replacement.last).await?;
        self.metadata.header = header;
        self.writer.barrier().await
    }

    /// Names a refcount table. The caller has made it durable.
    pub(super) async fn switch_refcount_table(&mut self, offset: u64, clusters: u32) -> Result<()> {
        self.metadata.header.refcount_table_offset = offset;
        self.metadata.header.refcount_table_clusters = clusters;
        let mut fields = offset.to_be_bytes().to_vec();
        fields.extend(clusters.to_be_bytes());
        self.writer.write(REFCOUNT_TABLE_AT, &fields).await?;
        self.writer.barrier().await
    }

    /// Names a snapshot table. The caller has made it durable.
    pub(super) async fn switch_snapshot_table(&mut self, offset: u64, count: u32) -> Result<()> {
        self.metadata.header.snapshots_offset = offset;
        self.metadata.header.nb_snapshots = count;
        let mut fields = count.to_be_bytes().to_vec();
        fields.extend(offset.to_be_bytes());
        self.writer.write(SNAPSHOTS_AT, &fields).await?;
        self.writer.barrier().await
    }

    /// Clears the marks of an image that has to be checked.
    pub(super) async fn mark_sound(&mut self) -> Result<()> {
        let marks = INCOMPATIBLE_DIRTY | INCOMPATIBLE_CORRUPT;
        self.writer.barrier().await?;
        let header = &mut self.metadata.header;
        if header.incompatible & marks != 0 {
            header.set_incompatible(marks, false);
            let bits = header.incompatible.to_be_bytes();
            self.writer.write(INCOMPATIBLE_AT, &bits).await?;
            self.writer.barrier().await?;
        }
        Ok(())
    }
}
