//! What a dirty bitmap must show, by the content of the disk.

use std::sync::Arc;

use zebu::block::DirtyBits;

/// The unit in which contents are compared, in bytes.
const SECTOR: usize = 512;

/// A bitmap, and what must be dirty in it. More may be.
#[derive(Clone, Debug)]
pub struct Bitmap {
    pub name: String,
    pub granularity: u64,
    pub enabled: bool,
    /// The content of the disk when it was added, cleared or enabled last: what differs now is dirty.
    since: Arc<Vec<u8>>,
    /// By sector: what else is dirty.
    dirty: Arc<Vec<bool>>,
}

impl Bitmap {
    /// A new one, of a disk with this content.
    pub fn new(name: String, granularity: u64, enabled: bool, content: &[u8]) -> Self {
        Bitmap {
            name,
            granularity,
            enabled,
            since: Arc::new(content.to_vec()),
            dirty: Arc::new(vec![false; content.len() / SECTOR]),
        }
    }

    pub fn clear(&mut self, content: &[u8]) {
        let name = std::mem::take(&mut self.name);
        *self = Bitmap::new(name, self.granularity, self.enabled, content);
    }

    pub fn enable(&mut self, enabled: bool, content: &[u8]) {
        self.replace(content, content);
        self.enabled = enabled;
    }

    /// The content becomes another one without a write: what differs now need not be dirty.
    pub fn replace(&mut self, before: &[u8], after: &[u8]) {
        let all = (0..before.len() / SECTOR).map(|sector| self.is_dirty(sector, before));
        self.dirty = Arc::new(all.collect());
        self.since = Arc::new(after.to_vec());
    }

    /// Another bitmap, of a disk of any size, is merged into it.
    pub fn merge(&mut self, other: &DirtyBits) {
        let dirty = Arc::make_mut(&mut self.dirty);
        for range in other.ranges() {
            let end = (range.end as usize / SECTOR).min(dirty.len());
            let start = (range.start as usize / SECTOR).min(end);
            dirty[start..end].fill(true);
        }
    }

    /// The disk has another size. What it gained is dirty in an enabled bitmap.
    pub fn resize(&mut self, size: usize) {
        self.resize_with(size, self.enabled);
    }

    /// The disk has another size. `dirty`: whether what it gained is.
    pub fn resize_with(&mut self, size: usize, dirty: bool) {
        if size != self.since.len() {
            Arc::make_mut(&mut self.since).resize(size, 0);
            Arc::make_mut(&mut self.dirty).resize(size / SECTOR, dirty);
        }
    }

    /// Whether a sector of a disk with this content must be dirty.
    fn is_dirty(&self, sector: usize, content: &[u8]) -> bool {
        let range = sector * SECTOR..(sector + 1) * SECTOR;
        self.dirty.get(sector) == Some(&true)
            || self.enabled && self.since.get(range.clone()) != content.get(range)
    }

    /// Fails unless it has all as dirty that it must have, for a disk with this content.
    pub fn compare(&self, bits: &DirtyBits, content: &[u8]) -> Result<(), String> {
        let size = content.len() as u64;
        if (bits.size(), bits.granularity()) != (size, self.granularity) {
            let (size, granularity) = (bits.size(), bits.granularity());
            return Err(format!(
                "it is of {size} bytes, with a granularity of {granularity}"
            ));
        }
        let mut at = 0;
        while at < size {
            let (dirty, end) = bits.run(at, size);
            let mut sectors = at as usize / SECTOR..end as usize / SECTOR;
            if let Some(missed) = sectors.find(|sector| !dirty && self.is_dirty(*sector, content)) {
                let at = missed * SECTOR;
                return Err(format!("it has not {at:#x} as dirty"));
            }
            at = end;
        }
        Ok(())
    }
}
