//! Names of internal snapshots.

use crate::drivers::qcow2::structures::Snapshot;

/// How a user names an internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SnapshotName {
    /// An id, or, if no snapshot has this id, a name.
    IdOrName(Vec<u8>),
    /// The parts that are given must agree.
    Exact {
        /// The id.
        id: Option<Vec<u8>>,
        /// The name.
        name: Option<Vec<u8>>,
    },
}

/// What is done with internal snapshots.
#[derive(Clone, Copy, Debug)]
pub enum SnapshotChange<'a> {
    /// One is taken, with this name.
    Create(&'a [u8]),
    /// The disk becomes what it was.
    Apply(&'a SnapshotName),
    /// One is deleted.
    Delete(&'a SnapshotName),
}

impl From<&str> for SnapshotName {
    fn from(text: &str) -> Self {
        SnapshotName::from(text.as_bytes())
    }
}

impl From<&[u8]> for SnapshotName {
    /// Reads the argument of `-l`: an id or name, or `snapshot.id=ID,snapshot.name=NAME`, either
    /// part of which may be left out.
    fn from(text: &[u8]) -> Self {
        let (mut id, mut name) = (None, None);
        for part in text.split(|b| *b == b',') {
            if let Some(value) = part.strip_prefix(b"snapshot.id=") {
                id = Some(value.to_vec());
            } else if let Some(value) = part.strip_prefix(b"snapshot.name=") {
                name = Some(value.to_vec());
            } else {
                return SnapshotName::IdOrName(text.to_vec());
            }
        }
        SnapshotName::Exact { id, name }
    }
}

impl SnapshotName {
    /// The name of this snapshot only.
    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        SnapshotName::Exact {
            id: Some(snapshot.id_text().to_vec()),
            name: Some(snapshot.name_text().to_vec()),
        }
    }

    /// The first snapshot of this name.
    pub(crate) fn find<'a>(&self, snapshots: &'a [Snapshot]) -> Option<&'a Snapshot> {
        self.position(snapshots).map(|index| &snapshots[index])
    }

    /// The index of the first snapshot of this name.
    pub(crate) fn position(&self, snapshots: &[Snapshot]) -> Option<usize> {
        match self {
            SnapshotName::IdOrName(text) => {
                let by_id = snapshots.iter().position(|s| s.id_text() == text);
                by_id.or_else(|| snapshots.iter().position(|s| s.name_text() == text))
            }
            SnapshotName::Exact { id, name } => snapshots.iter().position(|s| {
                id.as_ref().is_none_or(|id| s.id_text() == id)
                    && name.as_ref().is_none_or(|name| s.name_text() == name)
            }),
        }
    }
}
