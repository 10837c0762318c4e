//! Keys of passphrases, and what they cost.

use argon2::{Algorithm, Argon2, Block, Params, Version};
use serde_json::{Value, json};
use zebu_core::parts::drivers::structures::LuksHash;
use zeroize::Zeroizing;

use super::encryption::hash_named;
use super::error::{Luks2Error, shown};
use super::json::{Object, base64};
use crate::hash::pbkdf2;

/// The most memory that a passphrase may take whatever the limits are, in KiB.
const MOST_MEMORY: u32 = 4 << 20;
const SHORTEST_SALT: usize = argon2::MIN_SALT_LEN;

/// How a key is made of a passphrase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kdf {
    /// PBKDF2 of RFC 8018.
    Pbkdf2 {
        /// The hash.
        hash: LuksHash,
        /// Iterations.
        iterations: u32,
    },
    /// Argon2 of RFC 9106, version 1.3.
    Argon2 {
        /// The variant.
        variant: Argon2Variant,
        /// Iterations.
        time: u32,
        /// Memory in KiB.
        memory: u32,
        /// Lanes.
        cpus: u32,
    },
}

/// A variant of Argon2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argon2Variant {
    /// The order of its accesses does not depend on the passphrase.
    I,
    /// It does in part.
    Id,
}

/// What a passphrase may cost at most. Argon2 never takes more than 4 GiB of memory. The default is no other limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Iterations of PBKDF2.
    pub pbkdf2_iterations: u32,
    /// Iterations of Argon2.
    pub argon2_time: u32,
    /// Memory of Argon2 in KiB.
    pub argon2_memory: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            pbkdf2_iterations: u32::MAX,
            argon2_time: u32::MAX,
            argon2_memory: MOST_MEMORY,
        }
    }
}

impl Limits {
    /// Whether `what`, a slot or a digest, is within the limits.
    pub(super) fn check(&self, kdf: &Kdf, what: impl Fn() -> String) -> Result<(), Luks2Error> {
        let within = |asked: u32, allowed: u32, of: &'static str, text: fn(u32) -> String| {
            if asked <= allowed {
                return Ok(());
            }
            Err(Luks2Error::Expensive {
                what: what(),
                asked: text(asked),
                of,
                allowed: text(allowed),
            })
        };
        match *kdf {
            Kdf::Pbkdf2 { iterations, .. } => {
                within(iterations, self.pbkdf2_iterations, "iterations", |n| {
                    n.to_string()
                })
            }
            Kdf::Argon2 { time, memory, .. } => {
                within(
                    memory,
                    self.argon2_memory.min(MOST_MEMORY),
                    "of memory",
                    memory_text,
                )?;
                within(time, self.argon2_time, "iterations", |n| n.to_string())
            }
        }
    }
}

fn memory_text(kib: u32) -> String {
    match kib {
        _ if kib.is_multiple_of(1 << 20) => format!("{} GiB", kib >> 20),
        _ if kib.is_multiple_of(1 << 10) => format!("{} MiB", kib >> 10),
        _ => format!("{kib} KiB"),
    }
}

impl Argon2Variant {
    const fn name(self) -> &'static str {
        match self {
            Argon2Variant::I => "argon2i",
            Argon2Variant::Id => "argon2id",
        }
    }
}

impl Kdf {
    /// Reads it and its salt.
    pub(super) fn decode(fields: &Object<'_>) -> Result<(Self, Vec<u8>), Luks2Error> {
        let kdf = match fields.text("type")? {
            "pbkdf2" => Kdf::Pbkdf2 {
                hash: hash_named(fields.text("hash")?)?,
                iterations: fields.positive("iterations")?,
            },
            "argon2i" => Self::argon2(Argon2Variant::I, fields)?,
            "argon2id" => Self::argon2(Argon2Variant::Id, fields)?,
            other => {
                return Err(Luks2Error::Unsupported {
                    what: "key derivation",
                    name: shown(other),
                });
            }
        };
        let salt = fields.bytes("salt")?;
        if salt.len() < SHORTEST_SALT {
            return Err(fields.wrong("salt"));
        }
        kdf.check().map_err(|_| fields.wrong("memory"))?;
        Ok((kdf, salt))
    }

    fn argon2(variant: Argon2Variant, fields: &Object<'_>) -> Result<Self, Luks2Error> {
        Ok(Kdf::Argon2 {
            variant,
            time: fields.positive("time")?,
            memory: fields.positive("memory")?,
            cpus: fields.positive("cpus")?,
        })
    }

    pub(super) fn encode(&self, salt: &[u8]) -> Value {
        let salt = base64(salt);
        match self {
            Kdf::Pbkdf2 { hash, iterations } => json!({
                "type": "pbkdf2",
                "hash": hash.name(),
                "iterations": iterations,
                "salt": salt,
            }),
            Kdf::Argon2 {
                variant,
                time,
                memory,
                cpus,
            } => json!({
                "type": variant.name(),
                "time": time,
                "memory": memory,
                "cpus": cpus,
                "salt": salt,
            }),
        }
    }

    /// Whether its numbers are possible ones.
    pub(super) fn check(&self) -> Result<(), Luks2Error> {
        match *self {
            Kdf::Pbkdf2 { iterations, .. } => (iterations > 0).then_some(()),
            Kdf::Argon2 {
                time, memory, cpus, ..
            } => Params::new(memory, time, cpus, None).ok().map(|_| ()),
        }
        .ok_or(Luks2Error::Costs)
    }

    /// A key of so many bytes.
    pub(super) fn key(
        &self,
        passphrase: &[u8],
        salt: &[u8],
        length: usize,
    ) -> Result<Zeroizing<Vec<u8>>, Luks2Error> {
        match *self {
            Kdf::Pbkdf2 { hash, iterations } => {
                Ok(pbkdf2(hash, passphrase, salt, iterations, length)?)
            }
            Kdf::Argon2 {
                variant,
                time,
                memory,
                cpus,
            } => {
                let params =
                    Params::new(memory, time, cpus, Some(length)).map_err(|_| Luks2Error::Costs)?;
                argon2(variant, params, passphrase, salt, length)
            }
        }
    }
}

fn argon2(
    variant: Argon2Variant,
    params: Params,
    passphrase: &[u8],
    salt: &[u8],
    length: usize,
) -> Result<Zeroizing<Vec<u8>>, Luks2Error> {
    let algorithm = match variant {
        Argon2Variant::I => Algorithm::Argon2i,
        Argon2Variant::Id => Algorithm::Argon2id,
    };
    let mut blocks = Zeroizing::new(Vec::new());
    let count = params.block_count();
    blocks
        .try_reserve_exact(count)
        .map_err(|_| Luks2Error::Memory(memory_text(params.m_cost())))?;
    blocks.resize(count, Block::new());
    let mut key = Zeroizing::new(vec![0; length]);
    Argon2::new(algorithm, Version::V0x13, params)
        .hash_password_into_with_memory(passphrase, salt, &mut key, &mut blocks[..])
        .map_err(|_| Luks2Error::Costs)?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    //! Guards against keys that no other program makes of the passphrase, and against limits that do not hold.
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Vectors of the reference implementation of RFC 9106, which have no secret.
    #[test]
    fn published_keys() {
        for (variant, memory, expected) in [
            (
                Argon2Variant::I,
                1 << 16,
                "c1628832147d9720c5bd1cfd61367078729f6dfb6f8fea9ff98158e0d7816ed0",
            ),
            (
                Argon2Variant::Id,
                1 << 16,
                "09316115d5cf24ed5a15a31a3ba326e5cf32edc24702987c02b6566f61913cf7",
            ),
        ] {
            let kdf = Kdf::Argon2 {
                variant,
                time: 2,
                memory,
                cpus: 1,
            };
            let key = kdf.key(b"password", b"somesalt", 32).unwrap();
            assert_eq!(hex(&key), expected, "{variant:?}");
        }
    }

    #[test]
    fn limits_are_named() {
        let kdf = Kdf::Argon2 {
            variant: Argon2Variant::Id,
            time: 1 << 31,
            memory: 64 << 20,
            cpus: 4,
        };
        let check = |limits: Limits, kdf| {
            let result = limits.check(kdf, || "Keyslot 3".into());
            result.unwrap_err().to_string()
        };
        let limits = Limits {
            argon2_memory: u32::MAX,
            ..Limits::default()
        };
        assert_eq!(
            check(limits, &kdf),
            "Keyslot 3 asks for 64 GiB of memory for its passphrase, more than the 4 GiB allowed"
        );
        let kdf = Kdf::Pbkdf2 {
            hash: LuksHash::Sha256,
            iterations: 1001,
        };
        let limits = Limits {
            pbkdf2_iterations: 1000,
            ..limits
        };
        assert_eq!(
            check(limits, &kdf),
            "Keyslot 3 asks for 1001 iterations for its passphrase, more than the 1000 allowed"
        );
    }

    #[test]
    fn impossible_costs_are_errors() {
        for (time, memory, cpus) in [
            (0, 64, 1),
            (1, 7, 1),
            (1, 64, 0),
            (1, 64, 9),
            (1, 9, u32::MAX),
        ] {
            let kdf = Kdf::Argon2 {
                variant: Argon2Variant::I,
                time,
                memory,
                cpus,
            };
            assert_eq!(kdf.check(), Err(Luks2Error::Costs));
            assert!(kdf.key(b"a", b"12345678", 32).is_err());
        }
    }
}
