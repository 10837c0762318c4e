//! Objects in object stores, which QEMU has not: `s3://BUCKET/KEY`, `gs://BUCKET/KEY`,
//! `az://CONTAINER/BLOB`, and the options of the drivers `s3`, `gs` and `az`.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::Result;
use crate::http::{RemoteOptions, open, refuse_writes};
pub use crate::object::StoreKind;
use crate::object::{ObjectPlace, StoreOptions, Upload};
use crate::protocols::shown::object;
use crate::protocols::{Driver, FileDriver, FileSpec, Objects, OpenedFile, Protocol};
use crate::spelling::OptionSet;
use crate::spelling::quote::json_string;
use crate::storage::OpenFile;
use crate::storage::secret::without_queries;
use zebu_core::jobs::StreamSink;

pub(crate) static DRIVER: Driver = Driver {
    names: &["s3", "gs", "az"],
    is_remote: true,
    parse: |given| {
        let kind = match given.driver {
            "s3" => StoreKind::S3,
            "gs" => StoreKind::Google,
            _ => StoreKind::Azure,
        };
        let store = StoreSpec::take(&mut given.options, kind, given.name)?;
        let path = store.name().to_owned();
        Ok(FileSpec::of(path, FileDriver::other(store)))
    },
    ..Driver::DEFAULT
};

/// An object in an object store (`s3`, `gs`, `az`).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreSpec {
    /// The protocol of the store.
    pub kind: StoreKind,
    /// The bucket or container.
    pub bucket: String,
    /// The object's name in it.
    pub key: String,
    /// How it is read.
    pub reading: RemoteOptions,
    /// `s3://BUCKET/KEY`
    url: PathBuf,
}

impl StoreSpec {
    /// From the options of the driver, with a name if there is one.
    pub(crate) fn take(
        options: &mut OptionSet,
        kind: StoreKind,
        name: Option<&OsStr>,
    ) -> Result<StoreSpec, String> {
        let driver = kind.name();
        let given = options.take_value("url");
        let url = given.as_deref().or(name);
        let url = url.ok_or(format!("The driver '{driver}' requires the option 'url'"))?;
        let wrong = || {
            let form = format!("{driver}://BUCKET/KEY");
            format!("'{}' is not of the form {form}", url.display())
        };
        let text = url.to_str().ok_or_else(wrong)?;
        let rest = text
            .strip_prefix(driver)
            .and_then(|rest| rest.strip_prefix("://"));
        // The key is taken literally, as by the stores' own tools.
        let (bucket, key) = rest
            .and_then(|rest| rest.split_once('/'))
            .ok_or_else(wrong)?;
        if bucket.is_empty() || key.is_empty() {
            return Err(wrong());
        }
        Ok(StoreSpec {
            kind,
            bucket: bucket.into(),
            key: key.into(),
            reading: RemoteOptions::take(options)?,
            url: text.into(),
        })
    }

    /// Its URL as a name.
    pub fn name(&self) -> &Path {
        &self.url
    }

    fn store_options(&self) -> StoreOptions {
        StoreOptions {
            kind: self.kind,
            bucket: self.bucket.clone(),
            key: self.key.clone(),
        }
    }

    /// Begins to write the object. Once `stop` returns true, what waits for the store ends with
    /// `ECANCELED`. Blocks.
    ///
    /// # Errors
    /// [`Error::Refused`](crate::Error::Refused) if the store does not allow it.
    pub fn upload(&self, stop: impl Fn() -> bool + Send + Sync + 'static) -> Result<Upload> {
        let name = without_queries(&self.url.to_string_lossy());
        Upload::begin(&self.store_options(), name, &self.reading, Arc::new(stop))
    }
}

impl StreamSink for Upload {
    fn expect(&mut self, length: u64) {
        Upload::expect(self, length);
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        Upload::send(self, bytes)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.complete()
    }
}

impl Protocol for StoreSpec {
    fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn json(&self, file: &FileSpec) -> String {
        let members = [
            ("driver", self.kind.name()),
            ("url", &file.path.to_string_lossy()),
        ];
        let members = members.map(|(k, v)| (k.into(), json_string(v.as_bytes())));
        object(members.into())
    }

    fn is_object(&self) -> bool {
        true
    }

    fn is_same(&self, other: &FileDriver) -> bool {
        let key = |store: &StoreSpec| (store.kind, store.bucket.clone(), store.key.clone());
        other
            .get::<StoreSpec>()
            .is_some_and(|other| key(self) == key(other))
    }

    fn connects(&self) -> bool {
        true
    }

    fn open(&self, file: &FileSpec, how: OpenFile, _objects: &Objects) -> Result<OpenedFile> {
        refuse_writes(self.kind.name(), how)?;
        open(
            file,
            ObjectPlace::Store(self.store_options()),
            &self.reading,
        )
    }
}
