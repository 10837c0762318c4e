//! Header extensions: the optional sections between the header and the
//! backing file name. Section "Header extensions".

use super::bounds::{MAX_BITMAP_DIRECTORY_BYTES, MAX_BITMAPS};
use super::bytes::{be32, be64, pad8, slice};
use crate::error::FormatError;
use crate::printable;

/// Type of the marker that ends the extension area.
pub const EXTENSION_END: u32 = 0;
/// Type of the backing format name.
pub const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
/// Type of the feature name table.
pub const EXTENSION_FEATURE_NAMES: u32 = 0x6803_f857;
/// Type of the bitmaps extension.
pub const EXTENSION_BITMAPS: u32 = 0x2385_2875;
/// Type of the full disk encryption header pointer.
pub const EXTENSION_CRYPTO: u32 = 0x0537_be77;
/// Type of the external data file name.
pub const EXTENSION_DATA_FILE: u32 = 0x4441_5441;

/// Longest backing format name that QEMU opens, in bytes.
pub const MAX_BACKING_FORMAT: usize = 15;

/// Length of an entry of the feature name table in bytes.
pub const FEATURE_NAME_ENTRY: usize = 48;

/// One header extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extension {
    /// Name of the backing file's format, such as `qcow2` or `raw`.
    BackingFormat(Vec<u8>),
    /// Names for feature bits.
    FeatureNames(FeatureNames),
    /// Where the bitmap directory is.
    Bitmaps(BitmapsExtension),
    /// Where the encryption header is.
    Crypto(CryptoExtension),
    /// Name of the external data file.
    DataFile(Vec<u8>),
    /// An extension of a type not known here, or a bitmaps extension of another length than
    /// [`BitmapsExtension::LEN`]; kept as it is.
    Unknown {
        /// Its type.
        kind: u32,
        /// Its data, without the padding.
        data: Vec<u8>,
    },
}

impl Extension {
    /// The type, as it is stored.
    #[must_use]
    pub fn kind(&self) -> u32 {
        match self {
            Self::BackingFormat(_) => EXTENSION_BACKING_FORMAT,
            Self::FeatureNames(_) => EXTENSION_FEATURE_NAMES,
            Self::Bitmaps(_) => EXTENSION_BITMAPS,
            Self::Crypto(_) => EXTENSION_CRYPTO,
            Self::DataFile(_) => EXTENSION_DATA_FILE,
            Self::Unknown { kind, .. } => *kind,
        }
    }

    /// Length of the data in bytes, without the padding.
    #[must_use]
    pub fn data_len(&self) -> usize {
        match self {
            Self::BackingFormat(s) | Self::DataFile(s) => s.len(),
            Self::FeatureNames(names) => names.0.len(),
            Self::Bitmaps(_) => BitmapsExtension::LEN,
            Self::Crypto(_) => CryptoExtension::LEN,
            Self::Unknown { data, .. } => data.len(),
        }
    }

    fn decode(kind: u32, data: &[u8]) -> Result<Self, FormatError> {
        Ok(match kind {
            EXTENSION_BACKING_FORMAT => {
                if data.len() > MAX_BACKING_FORMAT {
                    return Err(FormatError::BackingFormatTooLong(data.len()));
                }
                Self::BackingFormat(data.to_vec())
            }
            EXTENSION_FEATURE_NAMES => Self::FeatureNames(FeatureNames(data.to_vec())),
            EXTENSION_BITMAPS => match BitmapsExtension::decode(data) {
                Some(bitmaps) => Self::Bitmaps(bitmaps),
                // Damage of bitmaps is no reason not to use the image.
                None => Self::Unknown {
                    kind,
                    data: data.to_vec(),
                },
            },
            EXTENSION_CRYPTO => Self::Crypto(CryptoExtension::decode(data)?),
            EXTENSION_DATA_FILE => Self::DataFile(data.to_vec()),
            _ => Self::Unknown {
                kind,
                data: data.to_vec(),
            },
        })
    }

    fn put(&self, out: &mut Vec<u8>) -> Result<(), FormatError> {
        let len = u32::try_from(self.data_len()).map_err(|_| FormatError::TooLong {
            what: "header extension",
            length: self.data_len(),
            max: u32::MAX as usize,
        })?;
        out.extend_from_slice(&self.kind().to_be_bytes());
        out.extend_from_slice(&len.to_be_bytes());
        match self {
            Self::BackingFormat(s) if s.len() > MAX_BACKING_FORMAT => {
                return Err(FormatError::BackingFormatTooLong(s.len()));
            }
            Self::BackingFormat(s) | Self::DataFile(s) => out.extend_from_slice(s),
            Self::FeatureNames(names) => out.extend_from_slice(&names.0),
            Self::Bitmaps(b) => {
                out.extend_from_slice(&b.count.to_be_bytes());
                out.extend_from_slice(&b.reserved.to_be_bytes());
                out.extend_from_slice(&b.directory_size.to_be_bytes());
                out.extend_from_slice(&b.directory_offset.to_be_bytes());
            }
            Self::Crypto(c) => {
                out.extend_from_slice(&c.offset.to_be_bytes());
                out.extend_from_slice(&c.length.to_be_bytes());
            }
            Self::Unknown { kind, data } => {
                let is_damaged = *kind == EXTENSION_BITMAPS && data.len() != BitmapsExtension::LEN;
                if is_known(*kind) && !is_damaged {
                    return Err(FormatError::Inconsistent(
                        "a known header extension is given as an unknown one",
                    ));
                }
                out.extend_from_slice(data);
            }
        }
        out.resize(pad8(out.len()), 0);
        Ok(())
    }

    /// The place that QEMU gives an extension of this type in the header.
    fn rank(kind: u32) -> u8 {
        match kind {
            EXTENSION_BACKING_FORMAT => 0,
            EXTENSION_DATA_FILE => 1,
            EXTENSION_CRYPTO => 2,
            EXTENSION_FEATURE_NAMES => 3,
            EXTENSION_BITMAPS => 4,
            _ => 5,
        }
    }
}

fn is_known(kind: u32) -> bool {
    kind == EXTENSION_END || Extension::rank(kind) < 5
}

/// The bitmaps extension. Section "Bitmaps extension".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// Number of bitmaps in the image.
    pub count: u32,
    /// Reserved; zero.
    pub reserved: u32,
    /// Size of the bitmap directory in bytes.
    pub directory_size: u64,
    /// Offset of the bitmap directory in the image file, in bytes.
    pub directory_offset: u64,
}

impl BitmapsExtension {
    /// Length in bytes.
    pub const LEN: usize = 24;

    fn decode(data: &[u8]) -> Option<Self> {
        let data = (data.len() == Self::LEN).then_some(data)?;
        Some(Self {
            count: be32(data, 0)?,
            reserved: be32(data, 4)?,
            directory_size: be64(data, 8)?,
            directory_offset: be64(data, 16)?,
        })
    }

    /// Refuses what QEMU refuses while the autoclear bit is set.
    pub(super) fn check(&self, cluster_size: u64) -> Result<(), FormatError> {
        if self.reserved != 0 {
            return Err(FormatError::BitmapsReserved);
        }
        if self.count > MAX_BITMAPS {
            return Err(FormatError::TooManyBitmaps(self.count));
        }
        if self.count == 0 {
            return Err(FormatError::ZeroBitmaps);
        }
        if !self.directory_offset.is_multiple_of(cluster_size)
            || self.directory_offset > i64::MAX as u64 - MAX_BITMAP_DIRECTORY_BYTES
        {
            return Err(FormatError::BitmapDirectoryOffset(self.directory_offset));
        }
        if self.directory_size > MAX_BITMAP_DIRECTORY_BYTES {
            return Err(FormatError::BitmapDirectoryTooLarge(self.directory_size));
        }
        Ok(())
    }
}

/// The full disk encryption header pointer. Section of the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CryptoExtension {
    /// Offset of the encryption header in the image file, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
}

impl CryptoExtension {
    /// Length in bytes.
    pub const LEN: usize = 16;

    fn decode(data: &[u8]) -> Result<Self, FormatError> {
        match (be64(data, 0), be64(data, 8)) {
            (Some(offset), Some(length)) if data.len() == Self::LEN => Ok(Self { offset, length }),
            _ => Err(FormatError::CryptoLength(data.len())),
        }
    }
}

/// Which of the three feature bitmaps a bit belongs to. Section "Feature name
/// table".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FeatureKind {
    /// Bytes 72 to 79 of the header.
    Incompatible,
    /// Bytes 80 to 87 of the header.
    Compatible,
    /// Bytes 88 to 95 of the header.
    Autoclear,
    /// A type that is not known.
    Other(u8),
}

/// One entry of the feature name table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureName<'a> {
    /// The bitmap that the bit is in.
    pub kind: FeatureKind,
    /// Number of the bit, 0 to 63.
    pub bit: u8,
    /// The name, without its padding.
    pub name: &'a [u8],
}

/// The feature name table, as it is stored: entries of 48 bytes. Section
/// "Feature name table".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FeatureNames(pub Vec<u8>);

impl FeatureNames {
    /// The table that QEMU (7.2 to 10) writes into new version 3 images.
    #[must_use]
    pub fn standard() -> Self {
        let entries: [(u8, u8, &str); 8] = [
            (0, 0, "dirty bit"),
            (0, 1, "corrupt bit"),
            (0, 2, "external data file"),
            (0, 3, "compression type"),
            (0, 4, "extended L2 entries"),
            (1, 0, "lazy refcounts"),
            (2, 0, "bitmaps"),
            (2, 1, "raw external data"),
        ];
        let mut table = vec![0; entries.len() * FEATURE_NAME_ENTRY];
        for (entry, (kind, bit, name)) in table.chunks_exact_mut(FEATURE_NAME_ENTRY).zip(entries) {
            entry[0] = kind;
            entry[1] = bit;
            entry[2..2 + name.len()].copy_from_slice(name.as_bytes());
        }
        Self(table)
    }

    /// The entries in order. A last one that is too short is padded with zeroes, as
    /// in QEMU.
    pub fn iter(&self) -> impl Iterator<Item = FeatureName<'_>> {
        self.0.chunks(FEATURE_NAME_ENTRY).map(|entry| {
            let byte = |at: usize| entry.get(at).copied().unwrap_or(0);
            let name = until_nul(entry.get(2..).unwrap_or(&[]));
            FeatureName {
                kind: match byte(0) {
                    0 => FeatureKind::Incompatible,
                    1 => FeatureKind::Compatible,
                    2 => FeatureKind::Autoclear,
                    other => FeatureKind::Other(other),
                },
                bit: byte(1),
                name,
            }
        })
    }

    /// The name of a bit, if the table has one. The table ends at an entry
    /// without a name, as it does for QEMU.
    #[must_use]
    pub fn name(&self, kind: FeatureKind, bit: u8) -> Option<&[u8]> {
        self.iter()
            .take_while(|entry| !entry.name.is_empty())
            .find(|entry| entry.kind == kind && entry.bit == bit)
            .map(|entry| entry.name)
    }
}

/// The bytes before the first NUL. QEMU keeps the strings of an image as C
/// strings, so that is where they end for it.
pub(super) fn until_nul(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    &bytes[..end]
}

/// The header extensions in the order in which they are stored. Each type
/// should appear at most once; if one is repeated, all are kept and the last
/// counts, as it does for QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    list: Vec<Extension>,
}

impl Extensions {
    /// No extensions.
    #[must_use]
    pub const fn new() -> Self {
        Self { list: Vec::new() }
    }

    /// Reads the extensions between `start` and `end` (bytes from the start
    /// of the file) of `bytes`, which start at the start of the file too.
    ///
    /// `bytes` may end before `end`: what a short file lacks reads as zeros,
    /// and a zero ends the list.
    pub fn decode(bytes: &[u8], start: usize, end: usize) -> Result<Self, FormatError> {
        let mut list = Vec::new();
        walk(bytes, start, end, |kind, data| {
            list.push(Extension::decode(kind, data)?);
            Ok(())
        })?;
        Ok(Self { list })
    }

    /// All extensions in order, the end marker not among them.
    pub fn iter(&self) -> std::slice::Iter<'_, Extension> {
        self.list.iter()
    }

    /// Number of extensions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Adds an extension after all others.
    pub fn push(&mut self, extension: Extension) {
        self.list.push(extension);
    }

    /// Puts `extension` in the place of the first of its type and removes
    /// others of that type. If there is none, it goes where QEMU would put it.
    pub fn set(&mut self, extension: Extension) {
        let kind = extension.kind();
        let at = self.list.iter().position(|e| e.kind() == kind);
        self.remove(kind);
        let at = at.unwrap_or_else(|| {
            let rank = Extension::rank(kind);
            self.list
                .iter()
                .position(|e| Extension::rank(e.kind()) > rank)
                .unwrap_or(self.list.len())
        });
        self.list.insert(at, extension);
    }

    /// Removes all extensions of a type. False if there were none.
    pub fn remove(&mut self, kind: u32) -> bool {
        let before = self.list.len();
        self.list.retain(|e| e.kind() != kind);
        self.list.len() != before
    }

    /// Name of the backing file's format, up to a NUL.
    #[must_use]
    pub fn backing_format(&self) -> Option<&[u8]> {
        self.last(|e| match e {
            Extension::BackingFormat(name) => Some(until_nul(name)),
            _ => None,
        })
    }

    /// Name of the external data file, up to a NUL.
    #[must_use]
    pub fn data_file(&self) -> Option<&[u8]> {
        self.last(|e| match e {
            Extension::DataFile(name) => Some(until_nul(name)),
            _ => None,
        })
    }

    /// The bitmaps extension. It counts only while the autoclear bit
    /// [`AUTOCLEAR_BITMAPS`](super::AUTOCLEAR_BITMAPS) is set.
    ///
    /// # Errors
    ///
    /// If one has another length than [`BitmapsExtension::LEN`].
    pub fn bitmaps(&self) -> Result<Option<BitmapsExtension>, FormatError> {
        let mut last = None;
        for extension in &self.list {
            match extension {
                Extension::Bitmaps(bitmaps) => last = Some(*bitmaps),
                Extension::Unknown {
                    kind: EXTENSION_BITMAPS,
                    data,
                } => return Err(FormatError::BitmapsLength(data.len())),
                _ => {}
            }
        }
        Ok(last)
    }

    /// Where the encryption header is.
    #[must_use]
    pub fn crypto(&self) -> Option<CryptoExtension> {
        self.last(|e| match e {
            Extension::Crypto(crypto) => Some(*crypto),
            _ => None,
        })
    }

    /// The feature name table.
    #[must_use]
    pub fn feature_names(&self) -> Option<&FeatureNames> {
        self.last(|e| match e {
            Extension::FeatureNames(names) => Some(names),
            _ => None,
        })
    }

    fn last<'a, T>(&'a self, pick: impl Fn(&'a Extension) -> Option<T>) -> Option<T> {
        self.list.iter().rev().find_map(pick)
    }

    /// Bytes that the extensions take in the header, the end marker included.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        self.list
            .iter()
            .map(|e| 8 + pad8(e.data_len()))
            .sum::<usize>()
            + 8
    }

    /// Adds the stored form to `out`, the end marker included.
    pub(super) fn put(&self, out: &mut Vec<u8>) -> Result<(), FormatError> {
        for extension in &self.list {
            let mut one = Vec::with_capacity(8 + pad8(extension.data_len()));
            extension.put(&mut one)?;
            out.extend_from_slice(&one);
        }
        out.extend_from_slice(&[0; 8]);
        Ok(())
    }
}

impl<'a> IntoIterator for &'a Extensions {
    type Item = &'a Extension;
    type IntoIter = std::slice::Iter<'a, Extension>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Calls `each` with type and data of every extension in turn.
fn walk(
    bytes: &[u8],
    start: usize,
    end: usize,
    mut each: impl FnMut(u32, &[u8]) -> Result<(), FormatError>,
) -> Result<(), FormatError> {
    let mut at = start;
    // Every round moves on by at least eight bytes, so this ends.
    while at < end {
        let kind = be32(bytes, at).unwrap_or(EXTENSION_END);
        let len = be32(bytes, at.saturating_add(4)).unwrap_or(0);
        at = at.saturating_add(8);
        if at > end || u64::from(len) > (end - at) as u64 {
            return Err(FormatError::ExtensionTooLarge {
                kind,
                offset: at as u64,
                length: u64::from(len),
            });
        }
        if kind == EXTENSION_END {
            return Ok(());
        }
        let len = len as usize;
        let Some(data) = slice(bytes, at, len) else {
            return Err(FormatError::Truncated {
                what: "header extension",
                offset: at as u64,
                need: len as u64,
                have: bytes.len().saturating_sub(at) as u64,
            });
        };
        each(kind, data)?;
        at = at.saturating_add(pad8(len));
    }
    Ok(())
}

/// The message that names unknown incompatible features: names from the
/// table in the order of the table, then a mask of those without a name.
/// A table that is broken names what comes before the break.
pub(super) fn unsupported_features(
    bytes: &[u8],
    start: usize,
    end: usize,
    mut mask: u64,
) -> FormatError {
    let mut table = FeatureNames::default();
    // An error here is not the one to report: the feature is.
    let _ = walk(bytes, start, end, |kind, data| {
        if kind == EXTENSION_FEATURE_NAMES {
            table = FeatureNames(data.to_vec());
        }
        Ok(())
    });
    let mut names: Vec<String> = Vec::new();
    for entry in table.iter().take_while(|entry| !entry.name.is_empty()) {
        let bit = 1u64.checked_shl(u32::from(entry.bit)).unwrap_or(0);
        if entry.kind == FeatureKind::Incompatible && mask & bit != 0 {
            names.push(printable(entry.name));
            mask &= !bit;
        }
    }
    if mask != 0 {
        names.push(format!("Unknown incompatible feature: {mask:x}"));
    }
    FormatError::UnsupportedFeatures(names.join(", "))
}
