//! Hashes by their names in headers, and keys made of passphrases.

use sha1::Digest;
use zebu_core::parts::drivers::structures::LuksHash;
use zeroize::Zeroizing;

use crate::CryptError;

/// Runs `$body` with the type `$hash` of a hash.
macro_rules! with_hash {
    (@ $type:ty, $hash:ident => $body:expr) => {{
        type $hash = $type;
        Ok($body)
    }};
    ($value:expr, $hash:ident => $body:expr) => {
        match $value {
            LuksHash::Sha1 => with_hash!(@ sha1::Sha1, $hash => $body),
            LuksHash::Sha224 => with_hash!(@ sha2::Sha224, $hash => $body),
            LuksHash::Sha256 => with_hash!(@ sha2::Sha256, $hash => $body),
            LuksHash::Sha384 => with_hash!(@ sha2::Sha384, $hash => $body),
            LuksHash::Sha512 => with_hash!(@ sha2::Sha512, $hash => $body),
            LuksHash::Ripemd160 => with_hash!(@ ripemd::Ripemd160, $hash => $body),
            other @ (LuksHash::Md5 | LuksHash::Sm3) => Err(CryptError::Hash(other)),
        }
    };
}

/// The digest of some pieces, one behind the other.
pub fn digest(hash: LuksHash, pieces: &[&[u8]]) -> Result<Zeroizing<Vec<u8>>, CryptError> {
    with_hash!(hash, H => {
        let mut state = H::new();
        pieces.iter().for_each(|piece| state.update(piece));
        Zeroizing::new(state.finalize().to_vec())
    })
}

/// A key of `length` bytes, made of a passphrase: PBKDF2 of RFC 8018.
pub fn pbkdf2(
    hash: LuksHash,
    passphrase: &[u8],
    salt: &[u8],
    iterations: u32,
    length: usize,
) -> Result<Zeroizing<Vec<u8>>, CryptError> {
    let mut key = Zeroizing::new(vec![0; length]);
    with_hash!(hash, H => pbkdf2::pbkdf2_hmac::<H>(passphrase, salt, iterations, &mut key))?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    //! Guards against keys that no other program makes of the passphrase.
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// RFC 6070, and the same input with other hashes.
    #[test]
    fn published_keys() {
        for (hash, iterations, expected) in [
            (
                LuksHash::Sha1,
                1,
                "0c60c80f961f0e71f3a9b524af6012062fe037a6",
            ),
            (
                LuksHash::Sha1,
                4096,
                "4b007901b765489abead49d926f721d065a429c1",
            ),
            (
                LuksHash::Sha256,
                1,
                "120fb6cffcf8b32c43e7225256c4f837a86548c9",
            ),
            (
                LuksHash::Sha512,
                1,
                "867f70cf1ade02cff3752599a3a53dc4af34c7a6",
            ),
        ] {
            let key = pbkdf2(hash, b"password", b"salt", iterations, 20).unwrap();
            assert_eq!(hex(&key), expected, "{hash:?} {iterations}");
        }
        let long = pbkdf2(
            LuksHash::Sha1,
            b"passwordPASSWORDpassword",
            b"saltSALTsaltSALTsaltSALTsaltSALTsalt",
            4096,
            25,
        );
        assert_eq!(
            hex(&long.unwrap()),
            "3d2eec4fe41c849b80c8d83662c0e44a8b291a964cf2f07038"
        );
    }
}
