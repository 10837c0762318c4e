//! The anti-forensic splitter of LUKS: a key is spread over many stripes, all of which are needed to
//! get it back, so that losing one block of the disk destroys it. LUKS1 On-Disk Format Specification, "The
//! anti-forensic splitter".

use zebu_core::parts::drivers::structures::LuksHash;
use zeroize::Zeroizing;

use crate::CryptError;
use crate::hash::digest;

/// Gets the key of `length` bytes back from its stripes.
pub fn merge(
    hash: LuksHash,
    material: &[u8],
    length: usize,
) -> Result<Zeroizing<Vec<u8>>, CryptError> {
    let mut key = Zeroizing::new(vec![0; length]);
    let count = material.len() / length;
    for (nth, stripe) in material.chunks_exact(length).enumerate() {
        xor(&mut key, stripe);
        if nth + 1 < count {
            diffuse(hash, &mut key)?;
        }
    }
    Ok(key)
}

/// Spreads a key over stripes. `material` has random bytes, of which the last stripe is replaced.
pub fn split(hash: LuksHash, key: &[u8], material: &mut [u8]) -> Result<(), CryptError> {
    let last = material.len() - key.len();
    let (stripes, end) = material.split_at_mut(last);
    let mut state = Zeroizing::new(vec![0; key.len()]);
    for stripe in stripes.chunks_exact(key.len()) {
        xor(&mut state, stripe);
        diffuse(hash, &mut state)?;
    }
    end.copy_from_slice(key);
    xor(end, &state);
    Ok(())
}

fn xor(to: &mut [u8], with: &[u8]) {
    to.iter_mut().zip(with).for_each(|(to, with)| *to ^= with);
}

/// Replaces each piece, as long as a digest, by the digest of its number and itself.
fn diffuse(hash: LuksHash, bytes: &mut [u8]) -> Result<(), CryptError> {
    for (nth, piece) in (0u32..).zip(bytes.chunks_mut(hash.digest_bytes() as usize)) {
        let digest = digest(hash, &[&nth.to_be_bytes(), piece])?;
        piece.copy_from_slice(&digest[..piece.len()]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Guards against a key that does not come back.
    use super::*;

    #[test]
    fn a_split_key_comes_back() {
        for (hash, length) in [
            (LuksHash::Sha1, 16),
            (LuksHash::Sha256, 64),
            (LuksHash::Ripemd160, 33),
        ] {
            let key: Vec<u8> = (0..length).map(|n| (n * 7) as u8).collect();
            let mut material: Vec<u8> = (0..length * 50).map(|n| (n * n) as u8).collect();
            split(hash, &key, &mut material).unwrap();
            assert_eq!(*merge(hash, &material, length).unwrap(), key);
            material[3] ^= 1;
            assert_ne!(*merge(hash, &material, length).unwrap(), key);
        }
    }
}
