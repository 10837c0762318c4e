//! Files that store nothing: `null-co` and `null-aio`.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use super::shown::object;
use super::{Driver, FileDriver, FileSpec, Given, Objects, OpenedFile, Protocol};
use crate::Result;
use crate::storage::{Null, OpenFile};

pub static DRIVER: Driver = Driver {
    names: &["null-co", "null-aio"],
    parse,
    ..Driver::DEFAULT
};

/// A file that stores nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NullSpec {
    /// `null-co` or `null-aio`, which are the same here.
    pub driver: &'static str,
    /// `size` in bytes.
    pub size: u64,
    /// `latency-ns`: how long a request takes.
    pub latency: Duration,
    /// `read-zeroes`: it is known to be zero.
    pub read_zeroes: bool,
    /// What QEMU shows of it, as members of a JSON object.
    shown: Vec<(String, String)>,
}

fn parse(given: &mut Given<'_>) -> Result<FileSpec, String> {
    let (driver, options) = (given.driver, &mut given.options);
    let filename = options.take_value("filename");
    for name in [given.name, filename.as_deref()].into_iter().flatten() {
        if name.to_str().and_then(|n| n.strip_prefix(driver)) != Some("://") {
            return Err(format!(
                "The only allowed filename for this driver is '{driver}://'"
            ));
        }
    }
    let mut shown = vec![("driver".into(), format!("\"{driver}\""))];
    shown.extend(options.shown(&["size", "read-zeroes"]));
    let latency = options.take_signed("latency-ns")?.unwrap_or(0);
    let spec = NullSpec {
        driver,
        size: options.take_size("size")?.unwrap_or(1 << 30),
        latency: u64::try_from(latency)
            .map(Duration::from_nanos)
            .map_err(|_| "latency-ns is invalid")?,
        read_zeroes: options.take_bool("read-zeroes")?.unwrap_or(false),
        shown,
    };
    let path = format!("{driver}://");
    Ok(FileSpec::of(path, FileDriver::Null(Box::new(spec))))
}

impl Protocol for NullSpec {
    fn name(&self) -> &'static str {
        self.driver
    }

    fn plain_name(&self, file: &FileSpec) -> Option<OsString> {
        (self.shown.len() == 1).then(|| file.name().to_owned())
    }

    fn json(&self, _file: &FileSpec) -> String {
        object(self.shown.clone())
    }

    fn takes_new_images(&self) -> bool {
        false
    }

    fn open(&self, file: &FileSpec, _how: OpenFile, _objects: &Objects) -> Result<OpenedFile> {
        let null = Null::new(&file.path, self.size, self.latency, self.read_zeroes);
        Ok(OpenedFile::new(Arc::new(null)))
    }
}
