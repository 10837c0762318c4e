//! streamOptimized VMDKs that are written from the start to the end: the tables follow the grains,
//! and the footer has the sector of the grain directory.

use std::path::Path;

use super::create::stream_descriptor;
use super::header::{AT_END, DIRECTORY_MARKER, FOOTER_MARKER, SECTOR, TABLE_MARKER};
use super::new_extent::{DESCRIPTOR, DESCRIPTOR_SECTORS, Layout, too_long};
use crate::Result;
use crate::drivers::CreateValues;

pub use super::new_extent::{GRAIN_BYTES, TABLE, push_grain};

/// The name of the image in its descriptor.
const NAME: &str = "disk.vmdk";
/// Sectors before the first grain.
const OVERHEAD: u64 = 128;

/// What precedes and follows the grains.
#[derive(Clone, Debug)]
pub struct StreamStart {
    layout: Layout,
    descriptor: String,
}

impl StreamStart {
    /// Of a disk of `size` bytes, with these options of the format.
    ///
    /// # Errors
    /// Those of a new image with them.
    pub fn new(size: u64, values: &CreateValues) -> Result<Self> {
        let (size, descriptor) = stream_descriptor(Path::new(NAME), size, values)?;
        Ok(StreamStart {
            layout: Layout::in_order(size / SECTOR, OVERHEAD),
            descriptor,
        })
    }

    /// Grain tables that the disk has.
    pub fn tables(&self) -> u64 {
        self.layout.table_count()
    }

    /// The number of the sector at a byte of the stream, a multiple of 512.
    pub fn sector(&self, at: u64) -> Result<u32> {
        u32::try_from(at / SECTOR).map_err(|_| too_long())
    }

    /// The first bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.layout.stream_header(AT_END).to_vec();
        bytes.resize((DESCRIPTOR * SECTOR) as usize, 0);
        bytes.extend(self.descriptor.as_bytes());
        debug_assert!(bytes.len() as u64 <= (DESCRIPTOR + DESCRIPTOR_SECTORS) * SECTOR);
        bytes.resize((OVERHEAD * SECTOR) as usize, 0);
        bytes
    }

    /// What follows the directory, which starts at a sector.
    pub fn end(&self, directory: u32) -> Vec<u8> {
        let mut bytes = marker(1, FOOTER_MARKER);
        bytes.extend(self.layout.stream_header(directory.into()));
        // The marker of the end.
        bytes.resize(bytes.len() + SECTOR as usize, 0);
        bytes
    }
}

/// A grain table with its marker, in whole sectors.
pub fn grain_table(entries: &[u32]) -> Vec<u8> {
    marked_entries(entries, TABLE_MARKER)
}

/// The grain directory with its marker, in whole sectors.
pub fn grain_directory(entries: &[u32]) -> Vec<u8> {
    marked_entries(entries, DIRECTORY_MARKER)
}

fn marked_entries(entries: &[u32], kind: u32) -> Vec<u8> {
    let sectors = (entries.len() as u64 * 4).div_ceil(SECTOR);
    let mut bytes = marker(sectors, kind);
    bytes.extend(entries.iter().flat_map(|entry| entry.to_le_bytes()));
    bytes.resize(bytes.len().next_multiple_of(SECTOR as usize), 0);
    bytes
}

/// The marker of metadata of so many sectors.
fn marker(sectors: u64, kind: u32) -> Vec<u8> {
    let mut bytes = vec![0; SECTOR as usize];
    bytes[..8].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..16].copy_from_slice(&kind.to_le_bytes());
    bytes
}
