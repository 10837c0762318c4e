//! Space that is allocated ahead of being written.

use crate::Result;
use crate::storage::{self, Queue, Storage};

/// What is allocated ahead of being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// The mapping: every guest cluster has a host cluster, without data.
    Metadata,
    /// The mapping, and the space on the device of the file.
    Falloc,
    /// The mapping and the space, filled with zeroes.
    Full,
}

impl Preallocation {
    /// The name that options use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Metadata => "metadata",
            Self::Falloc => "falloc",
            Self::Full => "full",
        }
    }

    /// The mode of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Off, Self::Metadata, Self::Falloc, Self::Full]
            .into_iter()
            .find(|mode| mode.name() == name)
    }
}

/// Takes the space of `length - skip` bytes, or writes zeroes there.
pub async fn preallocate(
    file: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
    skip: u64,
    mode: Preallocation,
) -> Result<()> {
    let length = length.saturating_sub(skip);
    match mode {
        _ if length == 0 => {}
        Preallocation::Off | Preallocation::Metadata => {}
        Preallocation::Falloc if file.is_device() => {}
        Preallocation::Falloc => storage::allocate(file, queue, offset, length).await?,
        Preallocation::Full => storage::write_zeroes(file, queue, offset, length).await?,
    }
    Ok(())
}
