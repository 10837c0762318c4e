//! A file that injects errors: `blkdebug`.

mod names;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::shown::object;
use super::{Driver, FileDriver, FileSpec, Objects, OpenedFile, Protocol};
use crate::storage::{Action, Blkdebug, BlkdebugLimits, Rule};
use crate::{Error, Result, printable};

pub(super) static DRIVER: Driver = Driver {
    names: &["blkdebug"],
    parse: |given| {
        let debug = BlkdebugSpec::take(given)?;
        let path = debug.image.path.clone();
        Ok(FileSpec::of(path, FileDriver::Blkdebug(Box::new(debug))))
    },
    ..Driver::DEFAULT
};

/// A file that injects errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlkdebugSpec {
    /// What is below.
    pub image: Box<FileSpec>,
    /// `align`, `max-transfer` and so on.
    limits: BlkdebugLimits,
    /// A file with more rules.
    config: Option<PathBuf>,
    rules: Vec<Rule>,
    /// What QEMU shows of it but the image, as members of a JSON object.
    shown: Vec<(String, String)>,
}

impl BlkdebugSpec {
    /// The file with more rules, if there is one.
    pub fn config(&self) -> Option<&Path> {
        self.config.as_deref()
    }
}

impl Protocol for BlkdebugSpec {
    fn name(&self) -> &'static str {
        "blkdebug"
    }

    fn plain_name(&self, _file: &FileSpec) -> Option<OsString> {
        let is_name = |key: &str| key == "config" || key == "x-image";
        if self.shown.iter().any(|(key, _)| !is_name(key)) {
            return None;
        }
        let mut name = OsString::from("blkdebug:");
        name.push(self.config().unwrap_or(Path::new("")));
        name.push(":");
        name.push(self.image.plain_name()?);
        Some(name)
    }

    fn json(&self, _file: &FileSpec) -> String {
        let shown = self.shown.iter().filter(|(key, _)| key != "x-image");
        let mut members: Vec<_> = shown.cloned().collect();
        members.push(("driver".into(), "\"blkdebug\"".into()));
        members.push(("image".into(), self.image.json()));
        object(members)
    }

    fn below(&self) -> Option<(&'static str, &FileSpec)> {
        Some(("image", &self.image))
    }

    fn over(&self, below: OpenedFile, _objects: &Objects, _write: bool) -> Result<OpenedFile> {
        let mut rules = match &self.config {
            Some(config) => {
                names::read_config(config).map_err(|e| Error::Refused(printable(e.as_bytes())))?
            }
            None => Vec::new(),
        };
        rules.extend(self.rules.iter().cloned());
        // As in QEMU, rules that inject errors come before those that set the state.
        rules.sort_by_key(|rule| matches!(rule.action, Action::SetState(_)));
        let debug = Blkdebug::new(below.storage(), rules, self.limits).map_err(Error::Refused)?;
        Ok(below.over(Arc::new(debug)))
    }
}
