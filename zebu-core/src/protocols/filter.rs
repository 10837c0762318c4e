//! A filter over a file or over an image, as it is described.

use std::ffi::OsString;
use std::sync::Arc;

use super::parse::{Naming, child, refuse_rest};
use super::shown::object;
use super::{Driver, FileDriver, FileSpec, Given, Objects, OpenedFile, Protocol};
use crate::filters::{self, Filter, FilteredFile, OpenFilter, Under};
use crate::spelling::OptionSet;
use crate::{Error, Result, printable};

pub static DRIVER: Driver = Driver {
    names: filters::NAMES,
    parse,
    ..Driver::DEFAULT
};

/// A filter: its requests are those of what is below it, or fewer, or later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterSpec {
    /// What is below: a file, or the disk of an image.
    pub file: FileSpec,
    driver: &'static str,
    /// Its own options, which are read when it is opened, and refused if it has no such one.
    pub(super) options: OptionSet,
}

fn parse(given: &mut Given<'_>) -> Result<FileSpec, String> {
    let naming = Naming::from(given.name);
    let file = child(&mut given.options, "file", naming, given.depth + 1)?;
    let path = file.path.clone();
    let spec = FilterSpec {
        file,
        driver: given.driver,
        options: OptionSet::default(),
    };
    Ok(FileSpec::of(path, FileDriver::Filter(Box::new(spec))))
}

impl FilterSpec {
    /// QEMU's name of the driver.
    pub fn name(&self) -> &'static str {
        self.driver
    }

    /// Makes the filter.
    pub(crate) fn filter(
        &self,
        objects: &Objects,
        write: bool,
        below: Under<'_>,
    ) -> Result<Arc<dyn Filter>> {
        let mut options = self.options.clone();
        let open = OpenFilter {
            options: &mut options,
            groups: &objects.throttle_groups,
            write,
        };
        let refused = |e: String| Error::Refused(printable(e.as_bytes()));
        let found = filters::find(self.driver);
        let found = found.ok_or_else(|| refused(format!("Unknown driver '{}'", self.driver)))?;
        let filter = (found.open)(open).map_err(refused)?;
        filter.may_be_over(below).map_err(refused)?;
        let name = self.driver;
        let what = format!("Block format '{name}' does not support the option");
        refuse_rest(&options, &what).map_err(refused)?;
        Ok(filter)
    }
}

impl Protocol for FilterSpec {
    fn name(&self) -> &'static str {
        FilterSpec::name(self)
    }

    fn plain_name(&self, _file: &FileSpec) -> Option<OsString> {
        None
    }

    fn json(&self, _file: &FileSpec) -> String {
        let shown = filters::find(self.driver).map_or(&[][..], |found| found.shown);
        let mut members: Vec<_> = self.options.shown(shown).collect();
        members.push(("driver".into(), format!("\"{}\"", self.driver)));
        members.push(("file".into(), self.file.json()));
        object(members)
    }

    fn below(&self) -> Option<(&'static str, &FileSpec)> {
        Some(("file", &self.file))
    }

    fn over(&self, below: OpenedFile, objects: &Objects, write: bool) -> Result<OpenedFile> {
        let under = Under {
            name: self.file.driver.name(),
            can_compress: false,
        };
        let filter = self.filter(objects, write, under)?;
        let filtered = FilteredFile::new(filter, below.storage());
        Ok(below.over(Arc::new(filtered)))
    }
}
