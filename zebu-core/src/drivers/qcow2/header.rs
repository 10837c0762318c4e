//! Changing the header of an open image.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::{Image, SharedImage};
use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::structures::{
    FormatError, Header, MAX_BACKING_FORMAT, MAX_BACKING_NAME,
};
use crate::storage::Queue;
use crate::{Error, Result};

/// Refuses a file name that an image cannot record: programs in C would take its beginning for it.
///
/// # Errors
/// [`Error::Refused`].
pub(crate) fn check_recorded(name: &OsStr) -> Result<()> {
    match name.as_bytes().contains(&0) {
        true => Err(Error::Refused(
            "The file name has a NUL byte, which an image cannot record".into(),
        )),
        false => Ok(()),
    }
}

impl SharedImage {
    /// Changes the header, after everything that it refers to is durable.
    pub(crate) async fn replace_header(
        &mut self,
        queue: &Queue,
        change: impl FnOnce(&mut Header),
    ) -> Result<()> {
        if !is_broken(Rule::DataBeforeBacking) {
            self.flush(queue).await?;
        }
        // The task of a dropped request may be about to change the header, too.
        self.wait_for_tasks().await;
        self.change_header(queue, change).await
    }

    /// Makes it an image of version 3, durably.
    pub(crate) async fn upgrade(&mut self, queue: &Queue) -> Result<()> {
        self.flush(queue).await?;
        self.own().await?.upgrade(queue).await
    }
}

impl Image {
    /// Refuses names of a backing file and its format that the header cannot have.
    pub(super) fn check_new_backing(
        &self,
        name: Option<&[u8]>,
        format: Option<&[u8]>,
    ) -> Result<()> {
        if name.is_some_and(|name| name.len() > MAX_BACKING_NAME)
            || format.is_some_and(|format| format.len() > MAX_BACKING_FORMAT)
            || (name.is_some() && self.header.is_data_file_raw())
        {
            return Err(Error::os(libc::EINVAL));
        }
        let mut after = self.header.clone();
        after.set_backing(name, format);
        match after.encode() {
            Err(FormatError::HeaderDoesNotFit { .. }) => {
                Err(Error::Refused("No space left in the file header".into()))
            }
            other => Ok(other.map(drop)?),
        }
    }
}
