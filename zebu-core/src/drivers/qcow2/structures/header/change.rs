//! Changing a header: backing file, data file, version, features.

use super::super::extensions::{
    CryptoExtension, EXTENSION_BACKING_FORMAT, EXTENSION_BITMAPS, EXTENSION_DATA_FILE,
    EXTENSION_FEATURE_NAMES, Extension,
};
use super::super::features::{Compression, INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_EXTENDED_L2};
use super::{COMPRESSION_AT, HEADER_LENGTH_MIN, HEADER_LENGTH_V3, Header};

impl Header {
    /// Gives the image a backing file, with the name of its format, or takes
    /// it away. The name is placed anew, right after the extensions.
    pub fn set_backing(&mut self, name: Option<&[u8]>, format: Option<&[u8]>) {
        self.backing_offset = 0;
        self.backing_name = name.filter(|n| !n.is_empty()).map(<[u8]>::to_vec);
        match format.filter(|_| self.backing_name.is_some()) {
            Some(format) => self
                .extensions
                .set(Extension::BackingFormat(format.to_vec())),
            None => {
                self.extensions.remove(EXTENSION_BACKING_FORMAT);
            }
        }
        if let Ok((offset, _)) = self.backing_place() {
            self.backing_offset = offset;
        }
    }

    /// Gives the image an external data file by name, or takes the name away.
    /// The feature bit is left as it is.
    pub fn set_data_file_name(&mut self, name: Option<&[u8]>) {
        match name {
            Some(name) => self.extensions.set(Extension::DataFile(name.to_vec())),
            None => {
                self.extensions.remove(EXTENSION_DATA_FILE);
            }
        }
    }

    /// Makes the image one that is encrypted with LUKS, whose header is there.
    pub fn set_luks(&mut self, place: CryptoExtension) {
        self.crypt_method = 2;
        self.extensions.set(Extension::Crypto(place));
    }

    /// Makes it a header of version 2 or 3. Fields that version 2 does not have are left out. The
    /// caller makes sure that the image has no features and refcounts of 16 bits then. The backing
    /// file name is placed anew.
    pub fn set_version(&mut self, version: u32) {
        let model = match version {
            2 => Self::new_v2(self.cluster_bits, self.size),
            _ => Self::new(self.cluster_bits, self.size),
        };
        self.version = model.version;
        self.header_length = model.header_length;
        self.unknown_fields = model.unknown_fields;
        if version < 3 {
            self.incompatible = 0;
            self.compatible = 0;
            self.autoclear = 0;
            self.extensions.remove(EXTENSION_FEATURE_NAMES);
            self.extensions.remove(EXTENSION_BITMAPS);
        }
        for extension in &model.extensions {
            self.extensions.set(extension.clone());
        }
        // If it still does not fit, `encode` fails.
        let _ = self.fit();
    }

    /// Sets the compression type together with its feature bit. Zstandard
    /// needs a header with space for the field, which is extended if necessary.
    pub fn set_compression(&mut self, compression: Compression) {
        self.compression = compression;
        self.set_incompatible(INCOMPATIBLE_COMPRESSION, compression != Compression::Zlib);
        if compression != Compression::Zlib && self.header_length == HEADER_LENGTH_MIN {
            self.header_length = HEADER_LENGTH_V3;
            self.unknown_fields = vec![0; HEADER_LENGTH_V3 as usize - COMPRESSION_AT - 1];
        }
    }

    /// Sets or clears the extended L2 entries bit.
    pub fn set_extended_l2(&mut self, on: bool) {
        self.set_incompatible(INCOMPATIBLE_EXTENDED_L2, on);
    }

    /// Sets or clears incompatible feature bits.
    pub fn set_incompatible(&mut self, bits: u64, on: bool) {
        if on {
            self.incompatible |= bits;
        } else {
            self.incompatible &= !bits;
        }
    }
}
