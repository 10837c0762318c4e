//! What is served: a device under a name.

use std::sync::Arc;

use zebu::block::Device;
use zebu::internal::Statistics;
use zebu::internal::nbd::{Command, ExportInfo, Info, MAX_PAYLOAD, transmission};

/// The number of `base:allocation` on every connection.
pub(crate) const ALLOCATION: u32 = 0;
/// The number of `qemu:allocation-depth`.
pub(crate) const DEPTH: u32 = 1;

/// The requests that statistics distinguish; see [`kind`].
const KINDS: [&str; 7] = [
    "read",
    "write",
    "flush",
    "trim",
    "write-zeroes",
    "block-status",
    "cache",
];

/// Which of [`KINDS`] a command is.
pub(crate) fn kind(command: Command) -> Option<usize> {
    Some(match command {
        Command::Read => 0,
        Command::Write => 1,
        Command::Flush => 2,
        Command::Trim => 3,
        Command::WriteZeroes => 4,
        Command::BlockStatus => 5,
        Command::Cache => 6,
        _ => return None,
    })
}

/// How a device is served.
#[derive(Clone, Debug, Default)]
pub struct ExportOptions {
    /// The name that clients choose it by; empty: the default export.
    pub name: String,
    /// A text for people.
    pub description: Option<String>,
    /// First byte of the device that is served.
    pub offset: u64,
    /// Whether `qemu:allocation-depth` is offered.
    pub depth: bool,
    /// Whether several clients may have it at once.
    pub shared: bool,
}

/// A device under a name.
#[derive(Debug)]
pub struct Export {
    device: Device,
    options: ExportOptions,
    statistics: Statistics,
}

impl Export {
    /// Serves the device from `options.offset`, which is at most its size, to
    /// its end; for writing if it was opened so.
    pub fn new(device: Device, options: ExportOptions) -> Arc<Self> {
        assert!(options.offset <= device.size());
        Arc::new(Export {
            device,
            options,
            statistics: Statistics::new(&KINDS),
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the device when nothing serves it any more.
    pub fn into_device(self) -> Device {
        self.device
    }

    /// How it is served.
    pub fn options(&self) -> &ExportOptions {
        &self.options
    }

    /// What was done with it so far.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// Bytes that are served.
    pub fn size(&self) -> u64 {
        self.device.size() - self.options.offset
    }

    /// Size and flags, for a connection with structured replies or without.
    pub(crate) fn info(&self, structured: bool, extended: bool) -> ExportInfo {
        use transmission::*;
        let mut flags = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_CACHE;
        if self.device.is_writable() {
            flags |= SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO;
        } else {
            flags |= READ_ONLY;
        }
        if self.options.shared {
            flags |= CAN_MULTI_CONN;
        }
        if structured {
            flags |= SEND_DF;
        }
        if extended {
            flags |= BLOCK_STAT_PAYLOAD;
        }
        ExportInfo {
            size: self.size(),
            flags,
        }
    }

    /// The sizes of requests: any will do; what is not aligned to a page may
    /// have to be copied.
    pub(crate) fn block_size(&self) -> Info {
        Info::BlockSize {
            minimum: 1,
            preferred: 4096,
            maximum: MAX_PAYLOAD,
        }
    }

    /// The metadata contexts that it has.
    pub(crate) fn contexts(&self) -> impl Iterator<Item = (u32, &'static str)> {
        let depth = self
            .options
            .depth
            .then_some((DEPTH, "qemu:allocation-depth"));
        std::iter::once((ALLOCATION, "base:allocation")).chain(depth)
    }

    /// Those of them that `query` names: exactly, or when `list`ing also by
    /// their beginning up to the colon.
    pub(crate) fn find_contexts(
        &self,
        query: &str,
        list: bool,
    ) -> impl Iterator<Item = (u32, &'static str)> {
        let found = move |name: &str| {
            name == query || list && query.ends_with(':') && name.starts_with(query)
        };
        self.contexts().filter(move |(_, name)| found(name))
    }
}
