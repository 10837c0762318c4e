//! The disk of an image as a file: `file.driver=qcow2`, a part of a file by `file.driver=raw`.

use std::ffi::OsString;
use std::sync::Arc;

use super::{FileSpec, Identity, ImageSpec, Objects, OpenedFile, Protocol};
use crate::Result;
use crate::drivers::{Format, Raw};
use crate::storage::{Storage, Window};

impl ImageSpec {
    /// Whether it is nothing but its file.
    pub fn is_whole_file(&self) -> bool {
        let raw = &self.options.raw;
        self.format == Some(Format::RAW) && raw.offset.unwrap_or(0) == 0 && raw.size.is_none()
    }
}

impl Protocol for ImageSpec {
    fn name(&self) -> &'static str {
        self.format_name()
    }

    fn plain_name(&self, _file: &FileSpec) -> Option<OsString> {
        self.plain_name()
    }

    fn json(&self, _file: &FileSpec) -> String {
        self.json(None)
    }

    fn below(&self) -> Option<(&'static str, &FileSpec)> {
        Some(("file", &self.file))
    }

    fn image(&self) -> Option<&ImageSpec> {
        (self.format != Some(Format::RAW)).then_some(self)
    }

    fn over(&self, below: OpenedFile, _objects: &Objects, _write: bool) -> Result<OpenedFile> {
        let raw = &self.options.raw;
        let part = Raw::part_of(below.storage(), raw.offset, raw.size)?;
        let storage: Arc<dyn Storage> = match (part.offset(), raw.size) {
            (0, None) => below.storage(),
            (offset, size) => Arc::new(Window::new(below.storage(), offset, size)),
        };
        let mut opened = below.over(storage);
        if !self.is_whole_file() {
            let part = |of| Identity::Part(Box::new(of), raw.offset, raw.size);
            opened.identity = opened.identity.map(part);
        }
        Ok(opened)
    }
}
