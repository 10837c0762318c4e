//! A sound image made by hand, with each structure at a known place, for images that are damaged on
//! purpose.

use std::sync::Arc;

use zebu::internal::structures::{COPIED, Header};
use zebu::storage::Memory;

pub const CLUSTER: u64 = 4096;
pub const REFCOUNT_TABLE: u64 = CLUSTER;
pub const REFCOUNT_BLOCK: u64 = 2 * CLUSTER;
pub const L1: u64 = 3 * CLUSTER;
pub const L2: u64 = 4 * CLUSTER;
pub const DATA: u64 = 5 * CLUSTER;
pub const END: u64 = 6 * CLUSTER;

/// A header with the tables at the places of the constants.
pub fn header() -> Header {
    let mut header = Header::new(12, 16 << 20);
    header.refcount_table_offset = REFCOUNT_TABLE;
    header.refcount_table_clusters = 1;
    header.l1_offset = L1;
    header.l1_size = 8;
    header
}

/// An image with this header. One cluster has data: 0x5a.
pub fn with_header(header: &Header) -> Vec<u8> {
    let mut bytes = header.encode().expect("a sound header");
    bytes.resize(DATA as usize, 0);
    bytes.resize(END as usize, 0x5a);
    put(&mut bytes, REFCOUNT_TABLE, REFCOUNT_BLOCK);
    for cluster in 0..END / CLUSTER {
        bytes[(REFCOUNT_BLOCK + 2 * cluster) as usize + 1] = 1;
    }
    put(&mut bytes, L1, L2 | COPIED);
    put(&mut bytes, L2, DATA | COPIED);
    bytes
}

/// The sound image.
pub fn sound() -> Vec<u8> {
    with_header(&header())
}

/// Appends a cluster that begins with `content`, at [`END`], with a refcount of 1.
pub fn append_cluster(bytes: &mut Vec<u8>, content: &[u8]) {
    bytes.extend_from_slice(content);
    bytes.resize((END + CLUSTER) as usize, 0);
    bytes[(REFCOUNT_BLOCK + 2 * (END / CLUSTER)) as usize + 1] = 1;
}

pub fn put(bytes: &mut [u8], at: u64, value: u64) {
    bytes[at as usize..at as usize + 8].copy_from_slice(&value.to_be_bytes());
}

pub fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

pub fn memory(bytes: &[u8]) -> Arc<Memory> {
    Arc::new(Memory::new(bytes.to_vec()))
}
