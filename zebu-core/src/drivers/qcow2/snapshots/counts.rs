//! Refcounts of everything that an L1 table refers to.

use super::super::Image;
use super::super::allocation::frees::Freed;
use super::super::map::table::L1Table;
use crate::storage::Queue;
use crate::{Error, Result};

impl Image {
    /// Adds one reference to everything that an L1 table refers to, in memory.
    /// After an error all are as they were.
    pub(super) async fn raise(&self, queue: &Queue, l1: &L1Table) -> Result<()> {
        let mut raised = 0;
        let result = self.raise_counting(queue, l1, &mut raised).await;
        if result.is_err() {
            // That it cannot be raised is reported, whatever the result of this: at
            // worst refcounts stay too high.
            let _ = self.lower(queue, l1, raised).await;
        }
        result
    }

    async fn raise_counting(&self, queue: &Queue, l1: &L1Table, raised: &mut u64) -> Result<()> {
        let mut references = self.references(queue, l1, false);
        while let Some(mut rest) = references.next().await? {
            while rest.count > 0 {
                let (refcount, count) = self.counted(queue, rest).await?;
                if refcount >= self.geometry.refcount_max() {
                    let offset = rest.first * self.geometry.cluster_size();
                    return Err(Error::RefcountOverflow { offset });
                }
                self.change_refcounts(queue, rest.first, count, 1).await?;
                *raised += count;
                rest = behind(rest, count);
            }
            self.write_back_if_needed(queue).await?;
        }
        Ok(())
    }

    /// Takes away again what [`Image::raise`] added to the first `count`
    /// clusters.
    pub(super) async fn lower(&self, queue: &Queue, l1: &L1Table, mut count: u64) -> Result<()> {
        let mut references = self.references(queue, l1, false);
        while count > 0
            && let Some(mut rest) = references.next().await?
        {
            rest.count = rest.count.min(count);
            count -= rest.count;
            while rest.count > 0 {
                let (_, alike) = self.refcounts_alike(queue, rest.first, rest.count).await?;
                self.change_refcounts(queue, rest.first, alike, -1).await?;
                rest = behind(rest, alike);
            }
            self.write_back_if_needed(queue).await?;
        }
        Ok(())
    }

    /// Refuses an L1 table that refers to something that counts as free.
    pub(super) async fn check_references(&self, queue: &Queue, l1: &L1Table) -> Result<()> {
        let mut references = self.references(queue, l1, false);
        while let Some(reference) = references.next().await? {
            self.check_counted(queue, reference).await?;
        }
        Ok(())
    }

    /// Refuses a reference to what counts as free.
    pub(super) async fn check_counted(&self, queue: &Queue, mut rest: Freed) -> Result<()> {
        while rest.count > 0 {
            let (_, count) = self.counted(queue, rest).await?;
            rest = behind(rest, count);
        }
        Ok(())
    }

    /// The refcount, not 0, of the first clusters of a reference, and of how
    /// many.
    async fn counted(&self, queue: &Queue, reference: Freed) -> Result<(u64, u64)> {
        let (first, most) = (reference.first, reference.count);
        let (refcount, count) = self.refcounts_alike(queue, first, most).await?;
        if refcount == 0 {
            let offset = first * self.geometry.cluster_size();
            return Err(Error::Refused(format!(
                "The cluster at {offset:#x} is in use, but its refcount is 0"
            )));
        }
        Ok((refcount, count))
    }

    /// Takes one reference away from everything that an L1 table refers to,
    /// which nothing on the disk leads to any more, durably; frees what has
    /// none left.
    pub(super) async fn release(&self, queue: &Queue, l1: &L1Table, punch: bool) -> Result<()> {
        let mut references = self.references(queue, l1, punch);
        while let Some(reference) = references.next().await? {
            self.release_one(queue, reference).await?;
            self.write_back_if_needed(queue).await?;
        }
        Ok(())
    }

    /// The same for one reference.
    pub(super) async fn release_one(&self, queue: &Queue, reference: Freed) -> Result<()> {
        let result = self.drop_reference(queue, reference).await;
        result.map_err(|(_, error)| error)
    }
}

/// A reference without its first `count` clusters.
fn behind(reference: Freed, count: u64) -> Freed {
    Freed {
        first: reference.first + count,
        count: reference.count - count,
        ..reference
    }
}
