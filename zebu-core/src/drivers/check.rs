//! Check and repair of an image's metadata, as the layers above see them.

/// What a check found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckReport {
    /// Errors: what may lead to wrong data.
    pub corruptions: u64,
    /// Clusters of the file that nothing refers to; in qcow2, whose refcount is higher than the
    /// number of references.
    pub leaks: u64,
    /// Structures that could not be checked.
    pub check_errors: u64,
    /// Errors that were repaired; these are not in `corruptions`.
    pub corruptions_fixed: u64,
    /// Leaks that were repaired; these are not in `leaks`.
    pub leaks_fixed: u64,
    /// Where the last cluster in use ends, in bytes; 0: not known.
    pub image_end_offset: u64,
    /// Clusters of the virtual disk.
    pub total_clusters: u64,
    /// How many of them the active disk has allocated.
    pub allocated_clusters: u64,
    /// How many of these do not follow the one before in the file.
    pub fragmented_clusters: u64,
    /// How many are compressed.
    pub compressed_clusters: u64,
}

/// What is to be repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RepairMode {
    /// Leaked clusters; and copied flags, if nothing else is wrong.
    Leaks,
    /// Everything that can be repaired.
    All,
}
