//! An export: a device under a name.

use std::borrow::Cow;
use std::sync::Arc;

use zebu::block::{Device, DirtyBits};
use zebu::internal::Statistics;
use zebu::internal::nbd::{Command, ExportInfo, Info, MAX_PAYLOAD, transmission};

/// The id of `base:allocation` on every connection.
pub(crate) const ALLOCATION: u32 = 0;
/// The id of `qemu:allocation-depth`.
pub(crate) const DEPTH: u32 = 1;
/// The id of the first bitmap; the others follow.
pub(crate) const BITMAPS: u32 = 2;

/// The queries for lists of contexts that stand for all that begin so. No other query does: the name
/// of a bitmap may end with a colon.
const PREFIXES: [&str; 3] = ["base:", "qemu:", DIRTY_BITMAP];
/// The context of a bitmap is this, and its name.
const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";

/// The kinds of requests in the statistics; see [`kind`].
const KINDS: [&str; 7] = [
    "read",
    "write",
    "flush",
    "trim",
    "write-zeroes",
    "block-status",
    "cache",
];

/// The index in [`KINDS`] of a command.
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

/// Options of an [`Export`].
#[derive(Clone, Debug, Default)]
pub struct ExportOptions {
    /// The name that clients choose it by. The empty name is the default export.
    pub name: String,
    /// A description that clients may show.
    pub description: Option<String>,
    /// The first byte of the device that is exported.
    pub offset: u64,
    /// Whether the metadata context `qemu:allocation-depth` is offered.
    pub depth: bool,
    /// The bitmaps that are offered as metadata contexts `qemu:dirty-bitmap:NAME`, by name. They
    /// are of the device or of an image of its chain.
    pub bitmaps: Vec<(String, DirtyBits)>,
    /// Whether clients are told that several may be connected at once.
    pub shared: bool,
}

/// A device that clients choose by name.
#[derive(Debug)]
pub struct Export {
    device: Device,
    options: ExportOptions,
    statistics: Statistics,
}

impl Export {
    /// Exports the device from `options.offset` to its end; for writing if it was opened so.
    ///
    /// # Panics
    ///
    /// If the offset is behind the device's end.
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

    /// The device, when no server has the export any more.
    pub fn into_device(self) -> Device {
        self.device
    }

    /// Its options.
    pub fn options(&self) -> &ExportOptions {
        &self.options
    }

    /// Counters of its requests, of all connections.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.device.size() - self.options.offset
    }

    /// Size and flags for the handshake.
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

    /// The limits of requests. Those that are not aligned to a page may take a copy.
    pub(crate) fn block_size(&self) -> Info {
        Info::BlockSize {
            minimum: 1,
            preferred: 4096,
            maximum: MAX_PAYLOAD,
        }
    }

    /// The metadata contexts that are offered: ids and names.
    pub(crate) fn contexts(&self) -> impl Iterator<Item = (u32, Cow<'static, str>)> {
        let depth = self
            .options
            .depth
            .then_some((DEPTH, "qemu:allocation-depth"));
        let fixed = [Some((ALLOCATION, "base:allocation")), depth];
        let fixed = fixed.into_iter().flatten();
        let bitmaps = (BITMAPS..).zip(&self.options.bitmaps);
        let named = |(id, (name, _)): (u32, &(String, _))| (id, format!("{DIRTY_BITMAP}{name}"));
        fixed
            .map(|(id, name)| (id, Cow::Borrowed(name)))
            .chain(bitmaps.map(named).map(|(id, name)| (id, Cow::Owned(name))))
    }

    /// The contexts that one of `queries` names. With `list`, a query may stand for all with a
    /// prefix, and no queries stand for all contexts.
    pub(crate) fn find_contexts(
        &self,
        queries: &[String],
        list: bool,
    ) -> Vec<(u32, Cow<'static, str>)> {
        let found = |name: &str| {
            let mut queries = queries.iter().map(String::as_str);
            queries.any(|query| {
                name == query || list && PREFIXES.contains(&query) && name.starts_with(query)
            })
        };
        let all = list && queries.is_empty();
        self.contexts()
            .filter(|(_, name)| all || found(name))
            .collect()
    }

    /// The bitmap of a context, if it is one.
    pub(crate) fn bitmap(&self, context: u32) -> Option<&DirtyBits> {
        let index = context.checked_sub(BITMAPS)?;
        let bitmap = self.options.bitmaps.get(index as usize);
        bitmap.map(|(_, bits)| bits)
    }
}
