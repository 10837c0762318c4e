//! Which internal snapshot is meant.

use crate::format::Snapshot;

/// How a user names an internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotName {
    /// An id, or if there is none like it, a name.
    IdOrName(String),
    /// What of these is given must agree.
    Exact {
        /// The id.
        id: Option<String>,
        /// The name.
        name: Option<String>,
    },
}

impl From<&str> for SnapshotName {
    /// Reads what `-l` takes: an id or name, or
    /// `snapshot.id=ID,snapshot.name=NAME`, either part of which may be left
    /// out.
    fn from(text: &str) -> Self {
        let (mut id, mut name) = (None, None);
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("snapshot.id", value)) => id = Some(value.to_string()),
                Some(("snapshot.name", value)) => name = Some(value.to_string()),
                _ => return SnapshotName::IdOrName(text.to_string()),
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
                let wanted = text.as_bytes();
                let by_id = snapshots.iter().position(|s| s.id_text() == wanted);
                by_id.or_else(|| snapshots.iter().position(|s| s.name_text() == wanted))
            }
            SnapshotName::Exact { id, name } => snapshots.iter().position(|s| {
                id.as_ref().is_none_or(|id| s.id_text() == id.as_bytes())
                    && name
                        .as_ref()
                        .is_none_or(|name| s.name_text() == name.as_bytes())
            }),
        }
    }
}
