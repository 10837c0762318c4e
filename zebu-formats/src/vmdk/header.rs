//! Headers of sparse extents as pure values. Numbers are little-endian, and offsets are in sectors
//! of 512 bytes.
//!
//! `KDMV` and `COWD` are those of VMware's "Virtual Disk Format", version 5.0. seSparse has no
//! official description; it is read as QEMU reads it.

use std::ops::Range;

use super::refused;
use crate::Result;
use crate::drivers::disk_size;
use crate::table::array;

/// Bytes of a sector.
pub const SECTOR: u64 = 512;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 512;
/// Bytes at the end of a stream that hold the footer: its marker, it, and the marker of the end.
pub const FOOTER_BYTES: u64 = 3 * SECTOR;
/// Begins a sparse extent of VMware's hosted products.
pub const HOSTED_MAGIC: &[u8; 4] = b"KDMV";
/// Begins a sparse extent of ESX.
pub const ESX_MAGIC: &[u8; 4] = b"COWD";

/// Sectors of the largest grain, as in QEMU: 1 GiB.
const MAX_GRAIN: u64 = 0x20_0000;
/// Sectors of the largest grain that is compressed: 2 MiB, the largest cluster of other formats.
const MAX_COMPRESSED_GRAIN: u64 = 4096;
/// Entries of the longest grain directory, as in QEMU.
const MAX_DIRECTORY: u64 = 32 << 20;
/// The sector of a grain directory that only the footer locates.
pub const AT_END: u64 = u64::MAX;

/// Flag of an extent whose grain table entry 1 is a grain of zeroes.
pub const ZERO_GRAINS: u32 = 1 << 2;
/// Flag of an extent whose compressed grains have a marker before them.
pub const MARKERS: u32 = 1 << 17;
/// Bytes of the marker before a compressed grain: its sector on the disk, and its length.
pub const MARKER_BYTES: u64 = 12;
/// Type of the marker before a grain table.
pub const TABLE_MARKER: u32 = 1;
/// Type of the marker before the grain directory.
pub const DIRECTORY_MARKER: u32 = 2;
/// Type of the marker before the footer.
pub const FOOTER_MARKER: u32 = 3;

/// Where the tables of a sparse extent are, and what their entries mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Sectors of the disk.
    pub sectors: u64,
    /// Sectors of a grain, at least 1.
    pub grain: u64,
    /// The first sector of the grain directory.
    pub directory: u64,
    /// Entries of the grain directory.
    pub directory_len: u64,
    /// Entries of a grain table, at least 1.
    pub table_len: u64,
    /// What the entries mean.
    pub entries: Entries,
}

/// What the entries of the directory and of the tables mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entries {
    /// 32 bits: a sector. 0 is nothing.
    Sectors {
        /// 1 is a grain of zeroes.
        zero_grains: bool,
        /// Whether grains are zlib streams, and if so, whether a marker is before each.
        compressed: Option<bool>,
    },
    /// 64 bits with a type, of seSparse.
    Typed {
        /// The first sector of the tables.
        tables: u64,
        /// The first sector of the grains.
        grains: u64,
    },
}

impl Layout {
    /// Bytes of a grain.
    pub const fn grain_bytes(&self) -> u64 {
        self.grain * SECTOR
    }

    /// Bytes of an entry.
    pub const fn entry_bytes(&self) -> u64 {
        match self.entries {
            Entries::Sectors { .. } => 4,
            Entries::Typed { .. } => 8,
        }
    }

    /// Bytes of a grain table.
    pub const fn table_bytes(&self) -> u64 {
        self.table_len * self.entry_bytes()
    }

    /// Whether grains are compressed.
    pub const fn is_compressed(&self) -> bool {
        matches!(
            self.entries,
            Entries::Sectors {
                compressed: Some(_),
                ..
            }
        )
    }

    /// Refuses what is too large to be used.
    fn check(self) -> Result<Self> {
        let most = match self.is_compressed() {
            true => MAX_COMPRESSED_GRAIN,
            false => MAX_GRAIN,
        };
        if self.grain == 0 || self.grain > most {
            return refused("Invalid granularity, image may be corrupt");
        }
        if self.directory_len > MAX_DIRECTORY {
            return refused("L1 size too big");
        }
        disk_size(self.sectors)?;
        Ok(self)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// The header of a sparse extent of VMware's hosted products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostedHeader {
    version: u32,
    flags: u32,
    capacity: u64,
    grain: u64,
    descriptor: u64,
    descriptor_len: u64,
    table_len: u32,
    directory: u64,
    overhead: u64,
    compression: u16,
}

impl HostedHeader {
    /// Decodes a sector that begins with [`HOSTED_MAGIC`].
    pub fn decode(bytes: &[u8]) -> Self {
        HostedHeader {
            version: u32_at(bytes, 4),
            flags: u32_at(bytes, 8),
            capacity: u64_at(bytes, 12),
            grain: u64_at(bytes, 20),
            descriptor: u64_at(bytes, 28),
            descriptor_len: u64_at(bytes, 36),
            table_len: u32_at(bytes, 44),
            directory: u64_at(bytes, 56),
            overhead: u64_at(bytes, 64),
            compression: u16::from_le_bytes(array(bytes, 77)),
        }
    }

    /// The header that is in the footer, the last [`FOOTER_BYTES`] of a file.
    pub fn decode_footer(bytes: &[u8]) -> Result<Self> {
        // A marker is a number, the size of data, and a type.
        const MARKER_SIZE: usize = 8;
        const MARKER_TYPE: usize = 12;
        let mut sectors = bytes.chunks(SECTOR as usize);
        let mut sector = || sectors.next().unwrap_or_default();
        let (marker, header, end) = (sector(), sector(), sector());
        let is_valid = header.starts_with(HOSTED_MAGIC)
            && u32_at(marker, MARKER_SIZE) == 0
            && u32_at(marker, MARKER_TYPE) == FOOTER_MARKER
            && end.starts_with(&[0; MARKER_TYPE + 4]);
        match is_valid {
            true => Ok(Self::decode(header)),
            false => refused("Invalid footer"),
        }
    }

    /// The byte at which a descriptor starts that takes the place of the extent's data.
    pub fn descriptor_instead(&self) -> Option<u64> {
        let instead = self.capacity == 0 && self.descriptor != 0;
        instead.then(|| self.descriptor.saturating_mul(SECTOR))
    }

    /// Where the embedded descriptor is, in bytes; None: there is none.
    pub fn embedded_descriptor(&self) -> Option<Range<u64>> {
        let start = self.descriptor.saturating_mul(SECTOR);
        let length = self.descriptor_len.saturating_mul(SECTOR);
        (start != 0).then(|| start..start.saturating_add(length))
    }

    /// The sector at which grains begin, or markers.
    pub fn overhead(&self) -> u64 {
        self.overhead
    }

    /// The first sector of the grain directory.
    pub fn directory(&self) -> u64 {
        self.directory
    }

    /// Whether another header of the same extent is equal to this one but for where the grain
    /// directory is.
    pub fn is_same_extent(&self, other: &Self) -> bool {
        let plain = |header: &Self| HostedHeader {
            directory: 0,
            ..*header
        };
        plain(self) == plain(other)
    }

    /// Whether the footer takes the place of this header.
    pub fn is_in_footer(&self) -> bool {
        self.directory == AT_END
    }

    /// The layout of an extent in a file of `file_len` bytes.
    pub fn layout(&self, file_len: u64) -> Result<Layout> {
        let compressed = match self.compression {
            0 => None,
            1 => Some(self.flags & MARKERS != 0),
            other => {
                return refused(format!("Unsupported VMDK compression algorithm {other}"));
            }
        };
        if self.version > 3 {
            return refused(format!("Unsupported VMDK version {}", self.version));
        }
        if self.table_len > 512 {
            return refused("L2 table size too big");
        }
        // In 32 bits, as in QEMU; the granularity is checked below.
        let covered = (self.grain as u32).wrapping_mul(self.table_len);
        if covered == 0 {
            return refused("L1 entry size is invalid");
        }
        if file_len.div_ceil(SECTOR) < self.overhead {
            return refused(format!(
                "File truncated, expecting at least {} bytes",
                self.overhead.wrapping_mul(SECTOR) as i64
            ));
        }
        Layout {
            sectors: self.capacity,
            grain: self.grain,
            directory: self.directory,
            directory_len: self.capacity.div_ceil(covered.into()),
            table_len: self.table_len.into(),
            entries: Entries::Sectors {
                zero_grains: self.flags & ZERO_GRAINS != 0,
                compressed,
            },
        }
        .check()
    }
}

/// The layout of a sparse extent of ESX, by a sector that begins with [`ESX_MAGIC`].
pub fn esx(bytes: &[u8]) -> Result<Layout> {
    Layout {
        sectors: u32_at(bytes, 12).into(),
        grain: u32_at(bytes, 16).into(),
        directory: u32_at(bytes, 20).into(),
        directory_len: u32_at(bytes, 24).into(),
        table_len: 4096,
        entries: Entries::Sectors {
            zero_grains: false,
            compressed: None,
        },
    }
    .check()
}

/// The layout of a seSparse extent, and the first byte of its volatile header.
pub fn se_sparse(bytes: &[u8]) -> Result<(Layout, u64)> {
    const MAGIC: u64 = 0xcafe_babe;
    const VERSION: u64 = 0x2_0000_0001;
    /// Sectors of a grain, and of a grain table.
    const GRAIN: u64 = 8;
    const TABLE: u64 = 64;
    let field = |nth: usize| u64_at(bytes, nth * 8);
    if field(0) != MAGIC {
        return refused(format!("Bad const header magic: 0x{:016x}", field(0)));
    }
    if field(1) != VERSION {
        return refused(format!("Unsupported version: 0x{:016x}", field(1)));
    }
    if field(3) != GRAIN {
        return refused(format!("Unsupported grain size: {}", field(3)));
    }
    if field(4) != TABLE {
        return refused(format!("Unsupported grain table size: {}", field(4)));
    }
    if field(5) != 0 {
        return refused(format!("Unsupported flags: 0x{:016x}", field(5)));
    }
    let reserved = [6, 7, 8, 9].map(field);
    if reserved != [0; 4] {
        let words = reserved.map(|word| format!("0x{word:016x}"));
        let words = words.join(" ");
        return refused(format!("Unsupported reserved bits: {words}"));
    }
    if bytes.iter().skip(208).any(|b| *b != 0) {
        return refused("Unsupported non-zero const header padding");
    }
    let layout = Layout {
        sectors: field(2),
        grain: GRAIN,
        directory: field(16),
        directory_len: field(17).saturating_mul(SECTOR / 8),
        table_len: TABLE * SECTOR / 8,
        entries: Entries::Typed {
            tables: field(18),
            grains: field(24),
        },
    };
    Ok((layout.check()?, field(10).saturating_mul(SECTOR)))
}

/// Refuses a seSparse extent by its volatile header.
pub fn check_volatile(bytes: &[u8]) -> Result<()> {
    const MAGIC: u64 = 0xcafe_cafe;
    let field = |nth: usize| u64_at(bytes, nth * 8);
    if field(0) != MAGIC {
        return refused(format!("Bad volatile header magic: 0x{:016x}", field(0)));
    }
    if field(3) != 0 {
        return refused("Image is dirty, Replaying journal not supported");
    }
    match bytes.iter().skip(32).any(|b| *b != 0) {
        true => refused("Unsupported non-zero volatile header padding"),
        false => Ok(()),
    }
}
