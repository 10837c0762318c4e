//! The header of LUKS encryption.

use super::Image;
use crate::drivers::qcow2::structures::{
    CryptMethod, FormatError, LUKS_HEADER_BYTES, LuksError, LuksHeader,
};
use crate::storage::{self, Queue};
use crate::{Error, Result};

impl Image {
    /// Reads the LUKS header. None if the image is not encrypted with LUKS.
    #[doc(hidden)]
    pub async fn luks_header(&self, queue: &Queue) -> Result<Option<LuksHeader>> {
        let header = self.header();
        if header.crypt() != CryptMethod::Luks {
            return Ok(None);
        }
        let Some(place) = header.extensions.crypto() else {
            return Err(FormatError::CryptoMissing(header.crypt_method).into());
        };
        if place.length < LUKS_HEADER_BYTES as u64 {
            return Err(FormatError::from(LuksError::Short).into());
        }
        let bytes = storage::read_vec(&**self.file(), queue, place.offset, LUKS_HEADER_BYTES)
            .await
            .map_err(|e| Error::from(e).during("Could not read encryption header"))?;
        let luks = LuksHeader::decode(&bytes).map_err(FormatError::from)?;
        Ok(Some(luks))
    }
}
