//! A LUKS header inside an image of another format, whose data clusters are the payload.

use std::sync::Arc;

use zebu_core::parts::drivers::structures::{
    FormatError, LUKS_HEADER_BYTES, LuksError, LuksHeader,
};
use zebu_core::parts::drivers::{
    BoxFuture, CreateValues, Encryption, NewEncryption, OpenEncryption,
};
use zebu_core::parts::filters::FilteredFile;
use zebu_core::parts::storage::{self, Window};
use zebu_core::{Result, Storage};

use super::header::NewHeader;
use super::options::Named;
use super::{failed, no_key, slots};
use crate::Encrypted;

/// What the names of its options begin with.
const PREFIX: &str = "encrypt.";

/// LUKS inside images.
#[derive(Debug)]
pub struct InImage;

impl Encryption for InImage {
    fn open<'a>(&'a self, request: OpenEncryption<'a>) -> BoxFuture<'a, Result<Arc<dyn Storage>>> {
        Box::pin(open(request))
    }

    fn plan(&self, options: &CreateValues) -> Result<Arc<dyn NewEncryption>> {
        let new = NewHeader::of(Named {
            values: options,
            prefix: PREFIX,
        })?;
        Ok(Arc::new(new))
    }
}

async fn open(request: OpenEncryption<'_>) -> Result<Arc<dyn Storage>> {
    let (queue, place) = (request.queue, request.place);
    let length = place.end - place.start;
    if length < LUKS_HEADER_BYTES as u64 {
        return Err(FormatError::from(LuksError::Short).into());
    }
    let inside = Window::new(request.file, place.start, Some(length));
    let bytes = storage::read_vec(&inside, queue, 0, LUKS_HEADER_BYTES).await?;
    let header = LuksHeader::decode(&bytes).map_err(FormatError::from)?;
    let secret = (request.key)()?.ok_or_else(|| no_key(PREFIX))?;
    let key = slots::find_key(queue, &inside, &header, &secret, request.is_untrusted).await?;
    let cipher = key.cipher(&header).map_err(failed)?;
    let filter = Arc::new(Encrypted::new(cipher, 0));
    Ok(Arc::new(FilteredFile::with_gaps(filter, request.data)))
}
