//! The modes of LUKS: sectors that block ciphers encrypt, each with an initialisation vector of its number.

use std::fmt;

use zebu_core::parts::drivers::structures::{LuksCipher, LuksIvGenerator, LuksMode};

use crate::blocks::{Blocks, blocks};
use crate::hash::digest;
use crate::{Cipher, CryptError};

/// The unit of the numbers that initialisation vectors are made of, in bytes.
const UNIT: usize = 512;
/// Blocks that are encrypted at once: enough for the processor's widest instructions.
const AT_ONCE: usize = 256;
/// The bytes of the largest block.
const LARGEST: usize = 16;

/// A cipher of sectors, with its key.
pub struct Sectors {
    cipher: Box<dyn Blocks>,
    mode: Mode,
    iv: Iv,
    /// The bytes of a sector.
    size: usize,
    /// What is added to the numbers of the initialisation vectors.
    start: u64,
}

enum Mode {
    Ecb,
    Cbc,
    Ctr,
    /// With the cipher that encrypts the initialisation vectors.
    Xts(Box<dyn Blocks>),
}

enum Iv {
    Plain,
    Plain64,
    /// With the cipher that encrypts the number.
    Essiv(Box<dyn Blocks>),
}

impl fmt::Debug for Sectors {
    /// Without the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sectors")
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl Sectors {
    /// The cipher with this key, which has two halves for XTS, for sectors of `size` bytes: a power of two
    /// from 512 to 4096.
    ///
    /// # Errors
    /// If there is no such cipher, or not with this mode.
    pub fn new(
        cipher: LuksCipher,
        mode: LuksMode,
        iv: LuksIvGenerator,
        key: &[u8],
        size: usize,
    ) -> Result<Self, CryptError> {
        let (data_key, tweak_key) = match mode {
            LuksMode::Xts => key.split_at(key.len() / 2),
            LuksMode::Ecb | LuksMode::Cbc | LuksMode::Ctr => (key, &[][..]),
        };
        let data = blocks(cipher, data_key)?;
        let mode = match mode {
            LuksMode::Ecb => Mode::Ecb,
            LuksMode::Cbc => Mode::Cbc,
            LuksMode::Ctr => Mode::Ctr,
            LuksMode::Xts if data.size() == LARGEST => Mode::Xts(blocks(cipher, tweak_key)?),
            LuksMode::Xts => {
                return Err(CryptError::Mode {
                    cipher,
                    mode: LuksMode::Xts,
                });
            }
        };
        let iv = match iv {
            LuksIvGenerator::Plain => Iv::Plain,
            LuksIvGenerator::Plain64 => Iv::Plain64,
            LuksIvGenerator::Essiv(hash) => Iv::Essiv(blocks(cipher, &digest(hash, &[key])?)?),
        };
        Ok(Sectors {
            cipher: data,
            mode,
            iv,
            size,
            start: 0,
        })
    }

    /// The same, but `number` is that of the first sector, in units of 512 bytes whatever the size of a sector is.
    #[must_use]
    pub fn starting_at(self, number: u64) -> Self {
        Sectors {
            start: number,
            ..self
        }
    }

    /// The initialisation vector of a sector; as many of its bytes count as a block has.
    fn iv(&self, sector: u64) -> [u8; LARGEST] {
        let number = sector.wrapping_mul((self.size / UNIT) as u64);
        let number = number.wrapping_add(self.start);
        let number = match self.iv {
            Iv::Plain => number & 0xffff_ffff,
            Iv::Plain64 | Iv::Essiv(_) => number,
        };
        let mut iv = [0; LARGEST];
        iv[..8].copy_from_slice(&number.to_le_bytes());
        if let Iv::Essiv(cipher) = &self.iv {
            cipher.encrypt(&mut iv[..cipher.size()]);
        }
        iv
    }

    fn xts(&self, tweak: &dyn Blocks, first: u64, data: &mut [u8], step: impl Fn(&mut [u8])) {
        let mut tweaks = [0u128; AT_ONCE];
        let mut sector = first;
        for batch in data.chunks_mut(AT_ONCE * LARGEST) {
            let mut ivs = [0; AT_ONCE * LARGEST * LARGEST / UNIT];
            let count = batch.len() / self.size;
            for iv in ivs.chunks_exact_mut(LARGEST).take(count) {
                iv.copy_from_slice(&self.iv(sector));
                sector = sector.wrapping_add(1);
            }
            let ivs = &mut ivs[..count * LARGEST];
            tweak.encrypt(ivs);
            let of_sectors = tweaks.chunks_exact_mut(self.size / LARGEST);
            for (iv, tweaks) in ivs.chunks_exact(LARGEST).zip(of_sectors) {
                let mut next = u128::from_le_bytes(array(iv));
                for tweak in tweaks {
                    *tweak = next;
                    // Times x in GF(2^128).
                    next = (next << 1) ^ (next >> 127).wrapping_mul(0x87);
                }
            }
            xor_all(batch, &tweaks);
            step(batch);
            xor_all(batch, &tweaks);
        }
    }

    fn encrypt_cbc(&self, first: u64, data: &mut [u8]) {
        let block = self.cipher.size();
        for (sector, data) in (first..).zip(data.chunks_mut(self.size)) {
            let mut before = self.iv(sector);
            for block in data.chunks_exact_mut(block) {
                xor(block, &before);
                self.cipher.encrypt(block);
                before[..block.len()].copy_from_slice(block);
            }
        }
    }

    fn decrypt_cbc(&self, first: u64, data: &mut [u8]) {
        let block = self.cipher.size();
        let mut encrypted = [0; AT_ONCE * LARGEST];
        for (sector, data) in (first..).zip(data.chunks_mut(self.size)) {
            let encrypted = &mut encrypted[..data.len()];
            encrypted.copy_from_slice(data);
            self.cipher.decrypt(data);
            let (start, rest) = data.split_at_mut(block);
            xor(start, &self.iv(sector));
            xor(rest, encrypted);
        }
    }

    /// The counter is the whole block, big-endian, from the initialisation vector on.
    fn ctr(&self, first: u64, data: &mut [u8]) {
        let block = self.cipher.size();
        let mut stream = [0; AT_ONCE * LARGEST];
        for (sector, data) in (first..).zip(data.chunks_mut(self.size)) {
            let stream = &mut stream[..data.len()];
            let iv = self.iv(sector);
            let unused = 8 * (LARGEST - block);
            // The vector is at the upper end, so that the counter wraps within a block.
            let mut counter = u128::from_be_bytes(iv);
            for block in stream.chunks_exact_mut(block) {
                block.copy_from_slice(&counter.to_be_bytes()[..block.len()]);
                counter = counter.wrapping_add(1 << unused);
            }
            self.cipher.encrypt(stream);
            xor(data, stream);
        }
    }
}

impl Cipher for Sectors {
    fn sector(&self) -> usize {
        self.size
    }

    fn encrypt(&self, first: u64, data: &mut [u8]) {
        match &self.mode {
            Mode::Ecb => self.cipher.encrypt(data),
            Mode::Cbc => self.encrypt_cbc(first, data),
            Mode::Ctr => self.ctr(first, data),
            Mode::Xts(tweak) => self.xts(&**tweak, first, data, |data| self.cipher.encrypt(data)),
        }
    }

    fn decrypt(&self, first: u64, data: &mut [u8]) {
        match &self.mode {
            Mode::Ecb => self.cipher.decrypt(data),
            Mode::Cbc => self.decrypt_cbc(first, data),
            Mode::Ctr => self.ctr(first, data),
            Mode::Xts(tweak) => self.xts(&**tweak, first, data, |data| self.cipher.decrypt(data)),
        }
    }
}

fn array(block: &[u8]) -> [u8; LARGEST] {
    let mut array = [0; LARGEST];
    array.copy_from_slice(block);
    array
}

fn xor(to: &mut [u8], with: &[u8]) {
    to.iter_mut().zip(with).for_each(|(to, with)| *to ^= with);
}

fn xor_all(data: &mut [u8], tweaks: &[u128]) {
    for (block, tweak) in data.chunks_exact_mut(LARGEST).zip(tweaks) {
        let value = u128::from_ne_bytes(array(block)) ^ tweak.to_le();
        block.copy_from_slice(&value.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    //! Guards against sectors that no other program decrypts.
    use super::*;
    use zebu_core::parts::drivers::structures::{LuksAlgorithm, LuksHash};

    fn aes(key: &[u8], mode: LuksMode, iv: LuksIvGenerator, size: usize) -> Sectors {
        let key_bytes = match mode {
            LuksMode::Xts => key.len() / 2,
            _ => key.len(),
        };
        let cipher = LuksCipher {
            algorithm: LuksAlgorithm::Aes,
            key_bytes: key_bytes as u32,
        };
        Sectors::new(cipher, mode, iv, key, size).unwrap()
    }

    /// IEEE 1619-2007, vector 4, its first block.
    #[test]
    fn published_xts_sectors() {
        let data: Vec<u8> = (0..512).map(|n| n as u8).collect();
        let e = [
            0x27, 0x18, 0x28, 0x18, 0x28, 0x45, 0x90, 0x45, 0x23, 0x53, 0x60, 0x28, 0x74, 0x71,
            0x35, 0x26,
        ];
        let pi = [
            0x31, 0x41, 0x59, 0x26, 0x53, 0x58, 0x97, 0x93, 0x23, 0x84, 0x62, 0x64, 0x33, 0x83,
            0x27, 0x95,
        ];
        let mut sector = data.clone();
        let cipher = aes(
            &[e, pi].concat(),
            LuksMode::Xts,
            LuksIvGenerator::Plain64,
            512,
        );
        cipher.encrypt(0, &mut sector);
        assert_eq!(
            sector[..16],
            [
                0x27, 0xa7, 0x47, 0x9b, 0xef, 0xa1, 0xd4, 0x76, 0x48, 0x9f, 0x30, 0x8c, 0xd4, 0xcf,
                0xa6, 0xe2
            ]
        );
        cipher.decrypt(0, &mut sector);
        assert_eq!(sector, data);
    }

    #[test]
    fn what_was_encrypted_comes_back_whatever_is_encrypted_at_once() {
        let ivs = [
            LuksIvGenerator::Plain,
            LuksIvGenerator::Plain64,
            LuksIvGenerator::Essiv(LuksHash::Sha256),
        ];
        for mode in [LuksMode::Ecb, LuksMode::Cbc, LuksMode::Ctr, LuksMode::Xts] {
            for iv in ivs {
                for size in [512, 1024, 4096] {
                    let key: Vec<u8> = (0..64).collect();
                    let key = if mode == LuksMode::Xts {
                        &key[..]
                    } else {
                        &key[..32]
                    };
                    let cipher = aes(key, mode, iv, size);
                    let data: Vec<u8> = (0..size * 19).map(|n| (n * n) as u8).collect();
                    let mut together = data.clone();
                    cipher.encrypt(u64::from(u32::MAX) - 3, &mut together);
                    let mut apart = data.clone();
                    for (nth, sector) in apart.chunks_mut(size).enumerate() {
                        cipher.encrypt(u64::from(u32::MAX) - 3 + nth as u64, sector);
                    }
                    assert!(together == apart, "{mode:?} {iv:?} {size}");
                    assert!(together != data);
                    cipher.decrypt(u64::from(u32::MAX) - 3, &mut together);
                    assert!(together == data, "{mode:?} {iv:?} {size}");
                }
            }
        }
    }

    #[test]
    fn a_block_of_eight_bytes_has_no_xts() {
        let cipher = LuksCipher {
            algorithm: LuksAlgorithm::Cast5,
            key_bytes: 16,
        };
        let made = Sectors::new(
            cipher,
            LuksMode::Xts,
            LuksIvGenerator::Plain64,
            &[0; 32],
            512,
        );
        assert!(made.is_err());
        let made = Sectors::new(
            cipher,
            LuksMode::Cbc,
            LuksIvGenerator::Plain64,
            &[0; 16],
            512,
        )
        .unwrap();
        let mut data = vec![3; 2048];
        made.encrypt(7, &mut data);
        made.decrypt(7, &mut data);
        assert_eq!(data, vec![3; 2048]);
    }
}
