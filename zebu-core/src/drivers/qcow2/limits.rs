//! The limits of an untrusted qcow2 image.

use crate::Result;
use crate::drivers::qcow2::structures::{Header, Snapshot};
use crate::drivers::{Limits, check_limit};

impl Limits {
    /// Refuses a header beyond the limits. `file_len` is the length of the file.
    pub(crate) fn check_header(&self, header: &Header, file_len: u64) -> Result<()> {
        self.check_size(header.size)?;
        let cluster_size = header.cluster_size();
        let l1 = u64::from(header.l1_size) * 8;
        self.check_table("The L1 table's length", l1)?;
        let refcounts = u64::from(header.refcount_table_clusters) * cluster_size;
        self.check_table("The refcount table's length", refcounts)?;
        let snapshots = u64::from(header.nb_snapshots);
        check_limit(
            "snapshots",
            "The number of snapshots",
            snapshots,
            self.snapshots,
        )?;
        if let Ok(Some(bitmaps)) = header.extensions.bitmaps() {
            let count = u64::from(bitmaps.count);
            check_limit("bitmaps", "The number of bitmaps", count, self.bitmaps)?;
            let directory = bitmaps.directory_size;
            self.check_table("The bitmap directory's length", directory)?;
        }
        let clusters = file_len.div_ceil(cluster_size);
        let memory = l1.saturating_add(clusters);
        check_limit("memory", "The need for memory", memory, self.memory)
    }

    /// Refuses snapshots with larger tables than allowed.
    pub(crate) fn check_snapshots(&self, snapshots: &[Snapshot]) -> Result<()> {
        for snapshot in snapshots {
            let length = u64::from(snapshot.l1_size) * 8;
            self.check_table("The length of a snapshot's L1 table", length)?;
        }
        Ok(())
    }

    /// Bytes of L2 tables that may be cached: `wanted`, or else `default`, within the limit of
    /// memory.
    pub(crate) fn l2_cache(&self, l1: u64, wanted: Option<u64>, default: u64) -> Result<u64> {
        let left = self.memory.saturating_sub(l1);
        match wanted {
            None => Ok(default.min(left)),
            Some(bytes) => {
                check_limit("memory", "The L2 cache's size", bytes, left)?;
                Ok(bytes)
            }
        }
    }
}
