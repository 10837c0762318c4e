//! Block ciphers of any kind, over many blocks at once.

use aes::{Aes128, Aes192, Aes256};
use cast5::Cast5;
use cipher::{
    Array, BlockCipherDecrypt, BlockCipherEncrypt, BlockSizeUser, KeyInit, typenum::Unsigned,
};
use serpent::Serpent;
use twofish::Twofish;
use zebu_core::parts::drivers::structures::{LuksAlgorithm, LuksCipher};

use crate::CryptError;

/// A block cipher with its key. The key is wiped when it is dropped.
pub trait Blocks: Send + Sync {
    /// The bytes of a block: 8 or 16.
    fn size(&self) -> usize;

    /// Encrypts whole blocks, each by itself.
    fn encrypt(&self, blocks: &mut [u8]);

    /// Decrypts them.
    fn decrypt(&self, blocks: &mut [u8]);
}

struct Of<C>(C);

impl<C: BlockCipherEncrypt + BlockCipherDecrypt + BlockSizeUser + Send + Sync> Blocks for Of<C> {
    fn size(&self) -> usize {
        C::BlockSize::USIZE
    }

    fn encrypt(&self, blocks: &mut [u8]) {
        let (blocks, rest) = Array::slice_as_chunks_mut(blocks);
        debug_assert!(rest.is_empty());
        self.0.encrypt_blocks(blocks);
    }

    fn decrypt(&self, blocks: &mut [u8]) {
        let (blocks, rest) = Array::slice_as_chunks_mut(blocks);
        debug_assert!(rest.is_empty());
        self.0.decrypt_blocks(blocks);
    }
}

/// The cipher with this key, of as many bytes as the cipher takes.
pub fn blocks(cipher: LuksCipher, key: &[u8]) -> Result<Box<dyn Blocks>, CryptError> {
    fn of<C>(key: &[u8]) -> Option<Box<dyn Blocks>>
    where
        C: KeyInit
            + BlockCipherEncrypt
            + BlockCipherDecrypt
            + BlockSizeUser
            + Send
            + Sync
            + 'static,
    {
        Some(Box::new(Of(C::new_from_slice(key).ok()?)))
    }
    let found = match (cipher.algorithm, key.len()) {
        (LuksAlgorithm::Aes, 16) => of::<Aes128>(key),
        (LuksAlgorithm::Aes, 24) => of::<Aes192>(key),
        (LuksAlgorithm::Aes, 32) => of::<Aes256>(key),
        (LuksAlgorithm::Serpent, 16 | 24 | 32) => of::<Serpent>(key),
        (LuksAlgorithm::Twofish, 16 | 24 | 32) => of::<Twofish>(key),
        (LuksAlgorithm::Cast5, 16) => of::<Cast5>(key),
        _ => None,
    };
    found.ok_or(CryptError::KeySize(cipher, key.len()))
}
