//! Another size of a raw image: that of its file.

use super::Raw;
use crate::drivers::Preallocation;
use crate::drivers::preallocate::preallocate;
use crate::storage::named::named_file;
use crate::storage::{self, Queue};
use crate::{Error, Result};

impl Raw {
    pub(super) async fn set_length(
        &mut self,
        queue: &Queue,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let old = self.size();
        if size < old && preallocation != Preallocation::Off {
            let text = "Cannot use preallocation for shrinking files";
            return Err(Error::Refused(text.into()));
        }
        if self.is_fixed() {
            return Err(Error::Refused("Cannot resize fixed-size raw disks".into()));
        }
        let file = self.storage.clone();
        if file.is_device() {
            return match size > old {
                true => Err(Error::Refused("Cannot grow device files".into())),
                false => Ok(()),
            };
        }
        if preallocation == Preallocation::Metadata {
            return Err(Error::Refused(
                "Unsupported preallocation mode: metadata".into(),
            ));
        }
        if let Some(file) = named_file(&*file) {
            file.lock_length()?;
        }
        let (end, at) = (self.offset.saturating_add(size), self.offset + old);
        if size < old {
            // Before the file is shorter, so that this holds if the future is dropped meanwhile.
            self.set_size(size);
        }
        if let Err(e) = storage::set_len(&*file, queue, end).await {
            self.set_size(old);
            if size > old {
                // A filter may have written a part of what is added. The error is the first one.
                let _ = storage::set_len(&*file, queue, at).await;
            }
            return Err(e.into());
        }
        if let Err(e) = preallocate(&*file, queue, at, size, old, preallocation).await {
            storage::set_len(&*file, queue, at).await?;
            return Err(e);
        }
        self.set_size(size);
        Ok(())
    }
}
