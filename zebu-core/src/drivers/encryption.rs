//! Encryption inside images of other formats: what the crate zebu-crypt registers (`registered.rs`), and the drivers
//! of these formats ask for.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use super::{BoxFuture, CreateValues};
use crate::Result;
use crate::registered::linked;
use crate::storage::{Queue, Secret, Storage};

linked! {
    /// What encrypts, if a crate has it.
    fn registered() -> &'static [&'static dyn Encryption] = __zebu_core_0_1_encryption
}

/// LUKS inside images.
pub trait Encryption: Debug + Sync {
    /// What the guest's data are read and written through, whose sectors are numbered from the start of their file.
    ///
    /// # Errors
    /// If the header is damaged, if there is no secret, or if it is that of no slot: in QEMU's words.
    fn open<'a>(&'a self, request: OpenEncryption<'a>) -> BoxFuture<'a, Result<Arc<dyn Storage>>>;

    /// A new header. The names of its options begin with `encrypt.`.
    ///
    /// # Errors
    /// If a value is wrong, or there is no secret: in QEMU's words.
    fn plan(&self, options: &CreateValues) -> Result<Arc<dyn NewEncryption>>;
}

/// An encrypted image that is opened.
pub struct OpenEncryption<'a> {
    /// The caller's queue.
    pub queue: &'a Queue,
    /// The file that has the header.
    pub file: Arc<dyn Storage>,
    /// Where in it the header is, with the key material of its slots.
    pub place: Range<u64>,
    /// The file that has the guest's data, which may be the same.
    pub data: Arc<dyn Storage>,
    /// Finds the secret, as for an [`OpenRequest`](super::OpenRequest).
    pub key: &'a dyn Fn() -> Result<Option<Secret>>,
    /// Whether the image is of untrusted origin.
    pub is_untrusted: bool,
}

/// The encryption of a new image.
pub trait NewEncryption: Debug + Send + Sync {
    /// Bytes of the header, with its key material.
    fn length(&self) -> u64;

    /// A header with a new key. Takes as long as a passphrase is to take.
    ///
    /// # Errors
    /// If there are no random bytes.
    fn header(&self) -> Result<Vec<u8>>;

    /// The secret that unlocks it.
    fn secret(&self) -> &Secret;
}

/// What encrypts, if the library has it.
pub(crate) fn find() -> Option<&'static dyn Encryption> {
    registered().first().copied()
}
