//! The conditions that the bitmaps of an image must meet after a power cut.
//!
//! - A change of the list of bitmaps is atomic.
//! - A bitmap is consistent and has everything as dirty that differs from the content when it was
//!   added, cleared or enabled; or it is marked as in use.
//! - After a store, until the next change, none is marked as in use.

use zebu::block::{BitmapInfo, Device, DirtyBits};
use zebu::storage::Queue;

use crate::judge::{Model, Verdict, said};

/// A bitmap as it was found.
pub struct Found {
    pub info: BitmapInfo,
    /// None if it is inconsistent.
    pub bits: Option<DirtyBits>,
}

impl Found {
    fn name(&self) -> String {
        String::from_utf8_lossy(&self.info.name).into_owned()
    }
}

/// Reads the bitmaps of an image.
pub fn look(queue: &Queue, device: &Device) -> Result<Vec<Found>, String> {
    let list = queue.block_on(device.bitmaps(queue));
    let mut found = Vec::new();
    for info in list.map_err(said("list the bitmaps"))? {
        let bits = queue.block_on(device.bitmap(queue, &info.name));
        let bits = match (bits, info.inconsistent) {
            (Err(zebu::Error::Refused(_)), true) => None,
            (Ok(_), true) => return Err("an inconsistent bitmap can be read".into()),
            (bits, _) => Some(bits.map_err(said("read a bitmap"))?),
        };
        found.push(Found { info, bits });
    }
    Ok(found)
}

/// Fails unless these are the bitmaps of one of the models. `stored`: none may be in use.
pub fn compare(found: &[Found], content: &[u8], models: &[&Model], stored: bool) -> Verdict {
    let names: Vec<String> = found.iter().map(Found::name).collect();
    let is_listed = |m: &&&Model| m.bitmaps.iter().map(|b| &b.name).eq(&names);
    let models: Vec<_> = models.iter().filter(is_listed).collect();
    if models.is_empty() {
        return Err(format!("the bitmaps are {names:?}"));
    }
    for (nth, bitmap) in found.iter().enumerate() {
        let Some(bits) = &bitmap.bits else {
            match stored {
                true => return Err(format!("{} is in use after a store", bitmap.name())),
                false => continue,
            }
        };
        let mut verdicts = models.iter().map(|model| {
            let right = &model.bitmaps[nth];
            match right.enabled == bitmap.info.enabled {
                true => right.compare(bits, content),
                false => Err(format!("enabled: {}", bitmap.info.enabled)),
            }
        });
        let first = verdicts.next().unwrap_or(Ok(()));
        if let Err(why) = first
            && !verdicts.any(|verdict| verdict.is_ok())
        {
            return Err(format!("bitmap {}: {why}", bitmap.name()));
        }
    }
    Ok(())
}

/// Fails unless bitmaps are what the ones before become when the whole disk is overwritten.
pub fn compare_overwritten(before: &[Found], after: &[Found]) -> Verdict {
    let names = |all: &[Found]| all.iter().map(Found::name).collect::<Vec<_>>();
    if names(before) != names(after) {
        return Err(format!("the bitmaps are {:?}", names(after)));
    }
    for (old, new) in before.iter().zip(after) {
        let is_right = match (&old.bits, &new.bits) {
            (None, None) => true,
            (Some(_), Some(new)) if old.info.enabled => {
                new.run(0, new.size()) == (true, new.size())
            }
            (Some(old), Some(new)) => {
                let size = old.size().min(new.size());
                let mut both = old.ranges().zip(new.ranges());
                old.ranges().count() == new.ranges().count()
                    && both.all(|(a, b)| a.start == b.start && a.end.min(size) == b.end.min(size))
            }
            _ => false,
        };
        if !is_right {
            return Err(format!("bitmap {} is wrong: {:?}", new.name(), new.bits));
        }
    }
    Ok(())
}
