//! Zeroes and discards in blocks that stay where they are: zeroes go into the file, as holes where space
//! may be freed. No request that found a block has to fear that its place gets another use.

use crate::drivers::Clear;
use crate::storage::{self, Queue, Storage};
use crate::{Error, Result};

/// The change of one range of the disk, which may be in several parts of the file.
pub(crate) struct Clearing<'a> {
    file: &'a dyn Storage,
    queue: &'a Queue,
    how: Clear,
    /// What is to be done quickly: its offset and length in the file.
    quick: Option<(u64, u64)>,
}

impl<'a> Clearing<'a> {
    pub(crate) fn new(file: &'a dyn Storage, queue: &'a Queue, how: Clear) -> Self {
        Clearing {
            file,
            queue,
            how,
            quick: None,
        }
    }

    /// Takes the content of a part away, or puts that off until the end.
    pub(crate) async fn part(&mut self, at: u64, length: u64) -> Result<()> {
        let (file, queue) = (self.file, self.queue);
        match self.how {
            Clear::Zero => storage::zero_range(file, queue, at, length).await?,
            // Also on a server, where a discard may leave any content.
            Clear::Unmap | Clear::Discard => storage::punch_hole(file, queue, at, length).await?,
            // All or nothing: the second of two parts could fail after the first has changed.
            Clear::Quickly => match &mut self.quick {
                None => self.quick = Some((at, length)),
                Some((start, before)) if *start + *before == at => *before += length,
                Some(_) => return Err(Error::os(libc::EOPNOTSUPP)),
            },
        }
        Ok(())
    }

    /// Does what was put off.
    pub(crate) async fn end(self) -> Result<()> {
        match self.quick {
            Some((at, length)) => {
                Ok(storage::zero_quickly(self.file, self.queue, at, length).await?)
            }
            None => Ok(()),
        }
    }
}
