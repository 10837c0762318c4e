//! Feature bits, compression and encryption in the header. Section "Header".

use crate::error::FormatError;

/// Incompatible bit 0: refcounts may be inconsistent.
pub const INCOMPATIBLE_DIRTY: u64 = 1;
/// Incompatible bit 1: any structure may be corrupt; not to be written to.
pub const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
/// Incompatible bit 2: guest data is in an external data file.
pub const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
/// Incompatible bit 3: the compression type is not zlib.
pub const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
/// Incompatible bit 4: extended L2 entries.
pub const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
/// All incompatible bits that are known here.
pub const INCOMPATIBLE_KNOWN: u64 = INCOMPATIBLE_DIRTY
    | INCOMPATIBLE_CORRUPT
    | INCOMPATIBLE_DATA_FILE
    | INCOMPATIBLE_COMPRESSION
    | INCOMPATIBLE_EXTENDED_L2;
/// Compatible bit 0: refcount updates may be postponed.
pub const COMPATIBLE_LAZY_REFCOUNTS: u64 = 1;
/// Autoclear bit 0: the bitmaps extension is consistent.
pub const AUTOCLEAR_BITMAPS: u64 = 1;
/// Autoclear bit 1: the external data file is a raw image by itself.
pub const AUTOCLEAR_DATA_FILE_RAW: u64 = 1 << 1;
/// All autoclear bits that are known here. A writer clears the others.
pub const AUTOCLEAR_KNOWN: u64 = AUTOCLEAR_BITMAPS | AUTOCLEAR_DATA_FILE_RAW;

/// How compressed clusters are compressed. Section "Additional fields".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Raw deflate with a window of 4 KiB.
    #[default]
    Zlib,
    /// Zstandard.
    Zstd,
}

impl Compression {
    pub(super) fn from_byte(byte: u8) -> Result<Self, FormatError> {
        match byte {
            0 => Ok(Self::Zlib),
            1 => Ok(Self::Zstd),
            other => Err(FormatError::UnknownCompression(other)),
        }
    }

    pub(super) const fn byte(self) -> u8 {
        match self {
            Self::Zlib => 0,
            Self::Zstd => 1,
        }
    }

    /// The name that options and reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }
}

/// How guest data is encrypted. Section "Data encryption".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CryptMethod {
    /// Not at all.
    None,
    /// AES-CBC, the old way.
    Aes,
    /// LUKS.
    Luks,
    /// A method that is not known.
    Unknown(u32),
}
