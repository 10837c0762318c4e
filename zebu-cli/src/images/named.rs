//! Whether the files of a target still have their names: without them, what was written is lost.

use std::sync::Arc;

use zebu::internal::new_image::{NewFiles, check_names};
use zebu::jobs::Target;
use zebu::storage::Storage;

use crate::program::Failure;

/// The files of a target.
pub struct Named(Vec<Arc<dyn Storage>>);

impl Named {
    /// Those of `target`, and of the image that it is, if that is new.
    pub fn of(target: &Target, files: Option<&NewFiles>) -> Named {
        Named(match (files, target) {
            (Some(files), _) => files.storages(),
            (None, Target::Raw(storage)) => vec![storage.clone()],
            (None, Target::Image(device)) => device.top().storages(),
            (None, _) => Vec::new(),
        })
    }

    /// These.
    pub fn from(files: Vec<Arc<dyn Storage>>) -> Named {
        Named(files)
    }

    /// Refuses files that were removed, or replaced by others of their names, meanwhile.
    pub fn check(&self) -> Result<(), Failure> {
        check_names(&self.0).map_err(|why| Failure::new(why.to_string()))
    }
}
