//! Encryption for the library `zebu`: the keys and ciphers of LUKS as pure functions, and a filter over a file,
//! whose sectors a [`Cipher`] encrypts.
//!
//! - `blocks`: block ciphers; `sectors`: their modes; `hash`: hashes, and keys of passphrases
//! - `split`: how a key is spread over the disk; `keys`: the slots of a header, each with the master key
//! - `luks/`: containers as an image format, over [`Encrypted`]
//! - [`luks2`]: containers of version 2: their header, slots, changes and new ones
//!
//! Nothing here is part of the API of `zebu` but what `block` has.
#![deny(unsafe_code)]

mod blocks;
mod hash;
mod keys;
mod luks;
pub mod luks2;
mod sectors;
mod split;

use std::fmt::Debug;

use thiserror::Error;
use zebu_core::parts::drivers::structures::{LuksCipher, LuksHash, LuksMode};
use zebu_core::parts::drivers::{Driver, Encryption};
use zebu_core::parts::filters::{Code, Content, Filter};

/// The formats, for the crate `zebu` to register.
#[doc(hidden)]
pub static FORMATS: &[&Driver] = &[&luks::DRIVER];

/// Encryption inside images, for the crate `zebu` to register.
#[doc(hidden)]
pub static ENCRYPTION: &[&dyn Encryption] = &[&luks::InImage];

/// What the module `block` of `zebu` has of it.
pub mod block {
    pub use crate::luks::Luks;
}

pub use keys::{MasterKey, material_bytes, protect, unlock};
pub use sectors::Sectors;

/// Why there is no such cipher.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CryptError {
    /// The key has another length.
    #[error("Algorithm '{0}' with key size {1} bytes not supported")]
    KeySize(LuksCipher, usize),
    /// The cipher does not have this mode.
    #[error("Cipher mode '{}' is not supported with '{cipher}'", .mode.name())]
    Mode {
        /// The cipher.
        cipher: LuksCipher,
        /// The mode.
        mode: LuksMode,
    },
    /// A hash without an implementation here.
    #[error("Hash algorithm '{}' is not supported by zebu", .0.name())]
    Hash(LuksHash),
}

#[cfg(test)]
zebu_core::register!(formats: [FORMATS], protocols: &[], encryption: ENCRYPTION);

/// What encrypts sectors. Shared by threads.
pub trait Cipher: Debug + Send + Sync {
    /// The size of a sector in bytes: a power of two.
    fn sector(&self) -> usize;

    /// Encrypts `data`, whole sectors of which the first has the number `first`.
    fn encrypt(&self, first: u64, data: &mut [u8]);

    /// Decrypts them.
    fn decrypt(&self, first: u64, data: &mut [u8]);
}

/// A file whose sectors are encrypted from an offset on, which is a multiple of their size. What is before that is
/// not read or written through it, and a part of a sector at its end is not there.
#[derive(Debug)]
pub struct Encrypted<C> {
    cipher: C,
    start: u64,
}

impl<C: Cipher> Encrypted<C> {
    /// A filter by `cipher`, for which the sector at `start` has the number 0.
    pub fn new(cipher: C, start: u64) -> Self {
        Encrypted { cipher, start }
    }

    fn sector_of(&self, offset: u64) -> u64 {
        offset.wrapping_sub(self.start) / self.cipher.sector() as u64
    }
}

impl<C: Cipher> Code for Encrypted<C> {
    fn unit(&self) -> usize {
        self.cipher.sector()
    }

    fn encode(&self, offset: u64, bytes: &mut [u8]) {
        self.cipher.encrypt(self.sector_of(offset), bytes);
    }

    fn decode(&self, offset: u64, bytes: &mut [u8]) {
        self.cipher.decrypt(self.sector_of(offset), bytes);
    }
}

impl<C: Cipher> Filter for Encrypted<C> {
    fn content(&self) -> Content<'_> {
        Content::Coded(self)
    }

    fn length(&self, below: u64) -> u64 {
        below - below % self.cipher.sector() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use zebu_core::parts::filters::FilteredFile;
    use zebu_core::parts::storage::{extent, read_vec, write_slice, zero_range};
    use zebu_core::storage::Memory;
    use zebu_core::{Queue, QueueOptions, Storage};

    /// Changes nothing.
    #[derive(Debug)]
    struct Null;

    impl Cipher for Null {
        fn sector(&self) -> usize {
            512
        }

        fn encrypt(&self, _first: u64, _data: &mut [u8]) {}

        fn decrypt(&self, _first: u64, _data: &mut [u8]) {}
    }

    /// Each byte is changed by the number of its sector.
    #[derive(Debug)]
    struct Numbered;

    impl Cipher for Numbered {
        fn sector(&self) -> usize {
            512
        }

        fn encrypt(&self, first: u64, data: &mut [u8]) {
            for (sector, bytes) in (first..).zip(data.chunks_mut(512)) {
                bytes
                    .iter_mut()
                    .for_each(|byte| *byte ^= sector as u8 ^ 0x5a);
            }
        }

        fn decrypt(&self, first: u64, data: &mut [u8]) {
            self.encrypt(first, data);
        }
    }
    fn over(cipher: impl Cipher + 'static) -> (Queue, Arc<Memory>, FilteredFile) {
        let file = Arc::new(Memory::new(vec![0; 8192]));
        let filter = Arc::new(Encrypted::new(cipher, 0));
        let queue = Queue::new(QueueOptions::default()).unwrap();
        (queue, file.clone(), FilteredFile::new(filter, file))
    }

    fn content(queue: &Queue, file: &dyn Storage) -> Vec<u8> {
        queue.block_on(read_vec(file, queue, 0, 8192)).unwrap()
    }

    #[test]
    fn what_was_written_is_read_at_any_alignment() {
        let (queue, below, above) = over(Numbered);
        let mut model = vec![0; 8192];
        queue
            .block_on(write_slice(&above, &queue, 0, &model))
            .unwrap();
        for (at, length) in [
            (0, 512),
            (3, 9),
            (500, 30),
            (1024, 4096),
            (8000, 192),
            (1, 8190),
        ] {
            let data: Vec<u8> = (0..length).map(|n| (n + at) as u8 | 1).collect();
            queue
                .block_on(write_slice(&above, &queue, at as u64, &data))
                .unwrap();
            model[at..at + length].copy_from_slice(&data);
            assert_eq!(content(&queue, &above), model, "{at} {length}");
        }
        let mut encrypted = model;
        Numbered.encrypt(0, &mut encrypted);
        assert_eq!(content(&queue, &*below), encrypted);
    }

    #[test]
    fn a_part_of_a_sector_at_the_end_is_not_there() {
        let file = Arc::new(Memory::new(vec![1; 1000]));
        let filter = Arc::new(Encrypted::new(Numbered, 0));
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let above = FilteredFile::new(filter, file.clone());
        assert_eq!(above.len().unwrap(), 512);
        let read = queue.block_on(read_vec(&above, &queue, 0, 512)).unwrap();
        let mut expected = vec![1; 512];
        Numbered.decrypt(0, &mut expected);
        assert_eq!(read, expected);
        queue
            .block_on(write_slice(&above, &queue, 1000, &[7; 536]))
            .unwrap();
        let read = queue.block_on(read_vec(&above, &queue, 512, 1024)).unwrap();
        assert_eq!(read[..488], [0; 488]);
        assert_eq!(read[488..], [7; 536]);
    }

    #[test]
    fn a_null_cipher_changes_nothing() {
        let (queue, below, above) = over(Null);
        queue
            .block_on(write_slice(&above, &queue, 700, b"a text"))
            .unwrap();
        assert_eq!(content(&queue, &*below), content(&queue, &above));
    }

    #[test]
    fn zeroes_are_encrypted_and_no_range_reads_as_zeroes_by_itself() {
        let (queue, below, above) = over(Numbered);
        queue
            .block_on(zero_range(&above, &queue, 100, 3000))
            .unwrap();
        assert_eq!(content(&queue, &above)[100..3100], [0; 3000]);
        assert_ne!(content(&queue, &*below)[512..1024], [0; 512]);
        assert!(!queue.block_on(extent(&above, &queue, 0)).unwrap().zero);
    }
}
