//! One qcow2 image: map, then read; caches.

use std::sync::Arc;

use crate::format::{Geometry, Header, Snapshot};
use crate::storage::Storage;

/// An open qcow2 image.
#[derive(Debug)]
pub struct Image {
    file: Arc<dyn Storage>,
    header: Header,
    geometry: Geometry,
    snapshots: Vec<Snapshot>,
}

impl Image {
    /// The header, as it was read.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// What the header's numbers mean.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The file that holds the metadata (and the data, unless there is an
    /// external data file).
    pub fn file(&self) -> &Arc<dyn Storage> {
        &self.file
    }

    /// Where the guest's clusters are: an external data file, or the file.
    pub fn data(&self) -> &Arc<dyn Storage> {
        &self.file
    }

    /// The internal snapshots.
    pub fn snapshots(&self) -> &[Snapshot] {
        &self.snapshots
    }
}
