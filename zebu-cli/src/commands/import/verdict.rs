//! What is known of an import, and how it ends: the verdict on standard output, and the exit status.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zebu::Error;
use zebu::block::{BackingName, Device};
use zebu::jobs::ConvertError;
use zebu::names::without_queries;

use super::digest::{Digest, Digests};
use crate::output::Shown;
use crate::output::json::{self, Map, Value};
use crate::program::signals;

/// Why an import fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// What is none of the others.
    Other,
    /// The image is damaged, unsupported, or names other files.
    Refused,
    /// The source does not have the checksum.
    Checksum,
    /// A limit is exceeded.
    Limit,
    /// The source could not be read.
    Source,
    /// The target could not be written.
    Target,
    /// The image cannot be converted as it comes, and there is no folder for a temporary file.
    NeedsFile,
    /// A signal.
    Interrupted,
}

impl Cause {
    /// The member `result` of the verdict.
    pub fn result(self) -> &'static str {
        match self {
            Cause::Other => "failed",
            Cause::Refused => "refused",
            Cause::Checksum => "checksum-mismatch",
            Cause::Limit => "limit",
            Cause::Source => "source-failed",
            Cause::Target => "target-failed",
            Cause::NeedsFile => "needs-file",
            Cause::Interrupted => "interrupted",
        }
    }

    /// The exit status.
    pub fn status(self) -> u8 {
        match self {
            Cause::Other => 1,
            Cause::Refused => 2,
            Cause::Checksum => 3,
            Cause::Limit => 4,
            Cause::Source => 5,
            Cause::Target => 6,
            Cause::NeedsFile => 7,
            Cause::Interrupted => signals::exit_status(signals::stop_signal().unwrap_or(0)),
        }
    }
}

/// How an import has failed.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub cause: Cause,
    /// One line.
    pub reason: String,
}

impl Trouble {
    pub fn new(cause: Cause, reason: impl Into<String>) -> Trouble {
        Trouble {
            cause,
            reason: reason.into(),
        }
    }

    /// Of an image that the library does not take.
    pub fn of_image(error: &Error) -> Trouble {
        let cause = match error.limit() {
            Some(_) => Cause::Limit,
            None if error.is_out_of_order() => Cause::NeedsFile,
            None => Cause::Refused,
        };
        Trouble::new(cause, error.to_string())
    }

    /// Of a conversion.
    pub fn of_conversion(error: &ConvertError) -> Trouble {
        let cause = match error {
            ConvertError::Read { source, .. } | ConvertError::Stream { source, .. } => {
                Trouble::of_image(source).cause
            }
            ConvertError::Write { .. } => Cause::Target,
            _ => Cause::Other,
        };
        Trouble::new(cause, error.to_string())
    }
}

/// What is known of an import, shared by its threads.
#[derive(Clone, Debug, Default)]
pub struct Record(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
pub struct Known {
    pub format: Option<&'static str>,
    /// None: not known yet.
    pub compression: Option<&'static str>,
    pub virtual_size: Option<u64>,
    /// Bytes of the source that were read, and of the image in it.
    pub bytes_read: u64,
    pub image_bytes: u64,
    /// Of the whole source, once it was read.
    pub digests: Option<Digests>,
    /// What the source was compared with.
    pub verified: Vec<Digest>,
    pub backing_file: Option<Vec<u8>>,
    pub data_file: Option<Vec<u8>>,
    pub extents: Vec<OsString>,
    /// The first failure of a thread that reads. It is the cause of what others report.
    pub trouble: Option<Trouble>,
}

impl Record {
    pub fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a failure, unless there was one before.
    pub fn fail(&self, trouble: Trouble) {
        self.lock().trouble.get_or_insert(trouble);
    }

    /// Notes what an image names whose header was read.
    pub fn note_names(&self, device: &Device) {
        let layer = device.top();
        let mut known = self.lock();
        known.backing_file = layer.backing().map(|backing| backing.name.to_vec());
        known.data_file = layer.data_file().map(Into::into);
        let extents = layer.spec.extents.iter();
        known.extents = extents.map(|extent| extent.name().to_owned()).collect();
    }

    /// Notes what the header of a stream names.
    pub fn note_stream_names(&self, backing: Option<BackingName<'_>>, data_file: Option<&[u8]>) {
        let mut known = self.lock();
        known.backing_file = backing.map(|backing| backing.name.to_vec());
        known.data_file = data_file.map(<[u8]>::to_vec);
    }

    /// Why the image is refused for what it names.
    pub fn refused_names(&self) -> Option<Trouble> {
        let known = self.lock();
        let name = |name: &[u8]| OsStr::from_bytes(name).shown();
        let (what, name) = if let Some(backing) = &known.backing_file {
            ("a backing file", name(backing))
        } else if let Some(data) = &known.data_file {
            ("an external data file", name(data))
        } else {
            ("an extent", name(known.extents.first()?.as_bytes()))
        };
        let reason = format!("The image names {what} ('{name}'), which it may not open");
        Some(Trouble::new(Cause::Refused, reason))
    }

    /// The verdict as JSON.
    pub fn verdict(&self, source: &OsStr, target: &OsStr, trouble: Option<&Trouble>) -> String {
        let known = self.lock();
        let result = trouble.map_or("ok", |trouble| trouble.cause.result());
        let mut map = Map::new().with("result", result);
        if let Some(trouble) = trouble {
            map.add("reason", &*without_queries(&trouble.reason));
        }
        match source.to_str() {
            Some(name) => map.add("source", &*without_queries(name)),
            None => map.add("source", source),
        }
        map.add("target", target);
        let mut text = |key, value: Option<&[u8]>| {
            if let Some(value) = value {
                map.add(key, value);
            }
        };
        text("format", known.format.map(str::as_bytes));
        text("compression", known.compression.map(str::as_bytes));
        text("backing-file", known.backing_file.as_deref());
        text("data-file", known.data_file.as_deref());
        if !known.extents.is_empty() {
            let extents: Vec<Value> = known.extents.iter().map(Value::from).collect();
            map.add("extents", extents);
        }
        if let Some(size) = known.virtual_size {
            map.add("virtual-size", size);
        }
        map.add("bytes-read", known.bytes_read);
        map.add("image-bytes", known.image_bytes);
        if let Some(digests) = &known.digests {
            let mut checksums = Map::new();
            for (kind, hex) in &digests.0 {
                checksums.add(kind.name(), hex.as_str());
            }
            map.add("checksums", Value::Object(checksums));
        }
        let verified: Vec<Value> = known.verified.iter().map(|v| v.name().into()).collect();
        map.add("verified", verified);
        json::pretty(&map.into())
    }
}
