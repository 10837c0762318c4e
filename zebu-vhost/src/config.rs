//! Features, and the device's configuration space: `struct virtio_blk_config`.

use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::request::{MAX_RANGES, MAX_SECTORS, SECTOR};

/// Segments of data of one request. With header and status they fit into a queue of 128
/// descriptors.
const SEGMENTS: u32 = 128 - 2;
/// Bytes of the configuration; the rest of [`SPACE`] is zero.
const LENGTH: usize = 60;
/// Bytes of the configuration space.
const SPACE: usize = 256;
/// The offset of the write-cache switch.
pub const WRITE_CACHE: u32 = 32;

/// Whether the feature bit `number` is set.
pub fn has(features: u64, number: u32) -> bool {
    features & 1 << number != 0
}

/// The features that are offered to guests.
pub fn features(writable: bool) -> u64 {
    let common = [
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_CONFIG_WCE,
        VIRTIO_BLK_F_MQ,
    ];
    let writing = [VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES];
    let own: &[u32] = if writable {
        &writing
    } else {
        &[VIRTIO_BLK_F_RO]
    };
    let virtio = common.iter().chain(own);
    virtio.fold(
        VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(),
        |all, number| all | 1 << number,
    )
}

/// The protocol features that are offered to front ends.
pub fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
}

/// The contents of the configuration space.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Whole sectors of 512 bytes.
    pub sectors: u64,
    /// The guest's logical block size in bytes.
    pub block_size: u32,
    /// The optimal unit of writes and discards in bytes.
    pub unit: u32,
    pub queues: u16,
    /// Whether writes are durable only after a flush.
    pub write_back: bool,
}

impl Config {
    fn encode(&self) -> [u8; LENGTH] {
        // The physical block: smaller writes take a read.
        let physical = (4096 / self.block_size).max(1).ilog2() as u8;
        let unit = self.unit.max(self.block_size);
        let aligned = unit / SECTOR as u32;
        let mut bytes = [0; LENGTH];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.sectors.to_le_bytes());
        put(12, &SEGMENTS.to_le_bytes());
        put(20, &self.block_size.to_le_bytes());
        put(24, &[physical, 0]);
        put(26, &1u16.to_le_bytes());
        put(28, &(unit / self.block_size).to_le_bytes());
        put(WRITE_CACHE as usize, &[self.write_back.into()]);
        put(34, &self.queues.to_le_bytes());
        for at in [36, 48] {
            put(at, &MAX_SECTORS.to_le_bytes());
            put(at + 4, &(MAX_RANGES as u32).to_le_bytes());
        }
        put(44, &aligned.to_le_bytes());
        put(56, &[1]);
        bytes
    }

    /// `size` bytes from `offset` on; `None` if the space has fewer.
    pub fn read(&self, offset: u32, size: u32) -> Option<Vec<u8>> {
        let mut space = vec![0; SPACE];
        space[..LENGTH].copy_from_slice(&self.encode());
        let end = offset.checked_add(size)?;
        space.get(offset as usize..end as usize).map(Vec::from)
    }
}
