//! The key of a container, which one of its slots gives for a passphrase.

use zebu_core::parts::drivers::refused;
use zebu_core::parts::drivers::structures::{LuksHeader, LuksSlot};
use zebu_core::parts::storage::{self, Secret};
use zebu_core::{Queue, Result, Storage};
use zeroize::Zeroizing;

use crate::keys::{MasterKey, material_bytes, unlock};

/// Iterations of a hash that an untrusted container may ask for: some seconds.
const MOST_ITERATIONS: u64 = 20_000_000;

/// The key of the payload, by the first active slot of which `secret` is the passphrase. `is_bounded`: the
/// container is of untrusted origin, and must not ask for more work than some seconds of it.
///
/// # Errors
/// If it is that of no slot, in QEMU's words; if the file cannot be read, or has an unsupported cipher.
pub async fn find_key(
    queue: &Queue,
    file: &dyn Storage,
    header: &LuksHeader,
    secret: &Secret,
    is_bounded: bool,
) -> Result<MasterKey> {
    if is_bounded {
        check_work(header)?;
    }
    let passphrase = secret.passphrase();
    for slot in header.slots.iter().filter(|slot| slot.active) {
        let key = try_slot(queue, file, header, slot, &passphrase).await?;
        if let Some(key) = key {
            return Ok(key);
        }
    }
    Err(refused("Invalid password, cannot unlock any keyslot"))
}

/// The key, if this is the passphrase of the slot.
pub async fn try_slot(
    queue: &Queue,
    file: &dyn Storage,
    header: &LuksHeader,
    slot: &LuksSlot,
    passphrase: &[u8],
) -> Result<Option<MasterKey>> {
    let length = material_bytes(header);
    let material = storage::read_vec(file, queue, slot.key_offset(), length).await;
    let material =
        material.map_err(|e| zebu_core::Error::from(e).during("Failed to read key material"))?;
    unlock(header, slot, Zeroizing::new(material), passphrase).map_err(|e| refused(e.to_string()))
}

/// Refuses more iterations of the hash, by all that has to be tried, than an untrusted container may ask for.
fn check_work(header: &LuksHeader) -> Result<()> {
    let blocks = u64::from(header.key_bytes.div_ceil(header.hash.digest_bytes()));
    let of_slot = |slot: &LuksSlot| {
        let own = u64::from(slot.iterations) * blocks;
        own + u64::from(header.digest_iterations)
    };
    let active = header.slots.iter().filter(|slot| slot.active);
    let all: u64 = active.map(of_slot).sum();
    match all > MOST_ITERATIONS {
        true => Err(refused(format!(
            "The passphrase would take {all} iterations of its hash, more than the {MOST_ITERATIONS} that an \
             untrusted container may ask for"
        ))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a container that takes hours of the processor.
    use super::*;
    use zebu_core::parts::drivers::structures::{
        LuksAlgorithm, LuksCipher, LuksHash, LuksIvGenerator, LuksMode,
    };

    #[test]
    fn the_iterations_of_all_slots_count() {
        let (mut slots, payload_sector) = LuksHeader::new_slots(64);
        slots[3].active = true;
        slots[3].iterations = 9_999_000;
        let mut header = LuksHeader {
            cipher: LuksCipher {
                algorithm: LuksAlgorithm::Aes,
                key_bytes: 32,
            },
            mode: LuksMode::Xts,
            iv_generator: LuksIvGenerator::Plain64,
            hash: LuksHash::Sha256,
            payload_sector,
            key_bytes: 64,
            digest: [0; 20],
            digest_salt: [0; 32],
            digest_iterations: 2000,
            uuid: Vec::new(),
            slots,
        };
        assert!(check_work(&header).is_ok());
        header.slots[4].active = true;
        header.slots[4].iterations = 1;
        assert!(check_work(&header).is_err());
    }
}
