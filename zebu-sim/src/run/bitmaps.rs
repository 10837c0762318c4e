//! Dirty bitmaps: changes within a session, and reading those of an image.

use zebu::block::{Device, DirtyBits};
use zebu::storage::Queue;

use super::{Run, Verdict};
use crate::bitmaps::{Bitmap, Found};
use crate::disk::SECTOR;
use crate::model::Model;
use crate::steps::{BitmapChange, ImageChange, NewBitmap, Stop};
use zebu_testkit::Rng;

/// The most bitmaps that steps add.
const MOST: usize = 5;

/// A change of a bitmap, with its name.
pub(super) enum Action {
    Add(String, NewBitmap),
    Remove(String),
    Clear(String),
    Enable(String, bool),
    Merge(String, DirtyBits),
}

impl Action {
    pub(super) async fn perform(&self, device: &mut Device, queue: &Queue) -> zebu::Result<()> {
        match self {
            Action::Add(name, how) => {
                let granularity = Some(how.granularity);
                let add = device.bitmap_add(queue, name, granularity, how.enabled);
                add.await
            }
            Action::Remove(name) => device.bitmap_remove(queue, name).await,
            Action::Clear(name) => device.bitmap_clear(queue, name).await,
            Action::Enable(name, enabled) => device.bitmap_enable(queue, name, *enabled).await,
            Action::Merge(name, bits) => device.bitmap_merge(queue, name, bits).await,
        }
    }
}

impl Run<'_> {
    /// What a change of bitmaps does to the open image, applied to `after`; None: nothing. Also
    /// whether it may be refused.
    pub(super) fn plan_bitmap(
        &self,
        id: u32,
        change: BitmapChange,
        after: &mut Model,
    ) -> Verdict<Option<(Action, bool)>> {
        let count = after.bitmaps.len();
        if self.lost_snapshots {
            return Ok(None);
        }
        // All that was written is durable first.
        after.all_durable();
        let nth = match change {
            BitmapChange::Add(_) if count >= MOST => return Ok(None),
            BitmapChange::Add(how) => {
                // Some names make the directory longer than a cluster.
                let name = format!("b{id}{}", "-".repeat(id as usize % 5 * 100));
                let new = Bitmap::new(name.clone(), how, &after.cells);
                after.bitmaps.push(new);
                return Ok(Some((Action::Add(name, how), self.version < 3)));
            }
            _ if count == 0 => return Ok(None),
            BitmapChange::Remove(n)
            | BitmapChange::Clear(n)
            | BitmapChange::Enable(n, _)
            | BitmapChange::Merge(n, _)
            | BitmapChange::MergeRandom(n, _) => n % count,
        };
        let other = match change {
            BitmapChange::Merge(_, m) => self.read_bitmap(&after.bitmaps[m % count])?,
            BitmapChange::MergeRandom(_, seed) => Some(random_bits(seed, after.sectors())),
            _ => None,
        };
        let bitmap = &mut after.bitmaps[nth];
        let (name, is_lost) = (bitmap.name.clone(), bitmap.lost);
        let action = match change {
            BitmapChange::Add(_) | BitmapChange::Remove(_) => {
                after.bitmaps.remove(nth);
                return Ok(Some((Action::Remove(name), false)));
            }
            BitmapChange::Clear(_) => {
                bitmap.clear(&after.cells);
                Action::Clear(name)
            }
            BitmapChange::Enable(_, enabled) => {
                bitmap.enable(enabled, &after.cells);
                Action::Enable(name, enabled)
            }
            BitmapChange::Merge(..) | BitmapChange::MergeRandom(..) => {
                let Some(other) = other else {
                    return Ok(None);
                };
                bitmap.merge(&other);
                Action::Merge(name, other)
            }
        };
        Ok(Some((action, is_lost)))
    }

    /// What is dirty in a bitmap of the open image; None: it cannot be read.
    fn read_bitmap(&self, bitmap: &Bitmap) -> Verdict<Option<DirtyBits>> {
        let Some(session) = &self.session else {
            return Ok(None);
        };
        let queue = &session.queues[0];
        let read = async {
            session
                .device
                .enter()
                .await?
                .bitmap(queue, &bitmap.name)
                .await
        };
        match queue.block_on(read) {
            Ok(bits) => Ok(Some(bits)),
            Err(_) if bitmap.lost || self.may_fail() => Ok(None),
            Err(e) => Err(format!("error: read bitmap {}: {e}", bitmap.name)),
        }
    }

    /// Removes the inconsistent bitmaps of the open image.
    pub(super) fn forget_bitmaps(&mut self) -> Verdict {
        while let Some(lost) = self.model.bitmaps.iter().position(|bitmap| bitmap.lost) {
            let count = self.model.bitmaps.len();
            let change = ImageChange::Bitmap(BitmapChange::Remove(lost));
            self.change_image(0, change, Stop::No)?;
            if self.model.bitmaps.len() == count {
                break;
            }
        }
        Ok(())
    }

    /// The power was cut: marks of bitmaps that were found may not have been durable.
    pub(super) fn undo_marks(&mut self) {
        let bases = self.bases.iter_mut().map(|base| &mut base.model);
        let models = std::iter::once(&mut self.model).chain(&mut self.others);
        for bitmap in models.chain(bases).flat_map(|model| &mut model.bitmaps) {
            self.interrupted |= std::mem::take(&mut bitmap.lost);
        }
    }

    /// The bitmaps of an image. Those of a damaged one may be unreadable.
    pub(super) fn find_bitmaps(&self, queue: &Queue, device: &Device) -> Verdict<Vec<Found>> {
        let list = match queue.block_on(device.bitmaps(queue)) {
            Ok(list) => list,
            Err(_) if self.damaged => return Ok(Vec::new()),
            Err(e) => return Err(format!("error: list the bitmaps: {e}")),
        };
        let mut found = Vec::new();
        for info in list {
            let bits = match queue.block_on(device.bitmap(queue, &info.name)) {
                Ok(_) if info.inconsistent => {
                    return Err("bitmap: an inconsistent bitmap can be read".into());
                }
                Ok(bits) => Some(bits),
                Err(_) if info.inconsistent || self.damaged => None,
                Err(e) => return Err(format!("error: read a bitmap: {e}")),
            };
            found.push(Found { info, bits });
        }
        Ok(found)
    }
}

/// Random bits, of a disk of nearly this size.
fn random_bits(seed: u64, sectors: usize) -> DirtyBits {
    let mut rng = Rng::new(seed);
    let size = (sectors as u64 + rng.below(9)) * SECTOR;
    let mut bits = DirtyBits::new(size, rng.pick(&[512, 512, 4096, 1 << 20]));
    for _ in 0..rng.below(4) {
        let at = rng.below(size);
        bits.set(at..at + rng.below(64 << 10));
    }
    bits
}
