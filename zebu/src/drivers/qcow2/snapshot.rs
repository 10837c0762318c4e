//! Which internal snapshot is meant.

use crate::format::Snapshot;

/// How a user names an internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SnapshotName {
    /// An id, or if there is none like it, a name.
    IdOrName(Vec<u8>),
    /// What of these is given must agree.
    Exact {
        /// The id.
        id: Option<Vec<u8>>,
        /// The name.
        name: Option<Vec<u8>>,
    },
}

impl From<&str> for SnapshotName {
    fn from(text: &str) -> Self {
        SnapshotName::from(text.as_bytes())
    }
}

impl From<&[u8]> for SnapshotName {
    /// Reads what `-l` takes: an id or name, or
    /// `snapshot.id=ID,snapshot.name=NAME`, either part of which may be left
    /// out.
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
    /// The first that it names.
    pub(crate) fn find<'a>(&self, snapshots: &'a [Snapshot]) -> Option<&'a Snapshot> {
        self.position(snapshots).map(|index| &snapshots[index])
    }

    /// Which is the first that it names.
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
