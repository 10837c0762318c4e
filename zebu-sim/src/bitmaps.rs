//! What must be dirty in the bitmaps of an image.
//!
//! An enabled bitmap must have everything as dirty that differs from the content when it was added,
//! cleared or enabled. More may be dirty. Only an interruption makes a bitmap inconsistent, and it
//! stays so until it is removed.

use std::rc::Rc;

use zebu::block::{BitmapInfo, DirtyBits};

use crate::cell::{Cell, UNREADABLE};
use crate::content::{self, Tag};
use crate::disk::SECTOR;
use crate::steps::NewBitmap;

/// A bitmap, and what must be dirty in it.
#[derive(Clone, Debug)]
pub struct Bitmap {
    /// Its name.
    pub name: String,
    /// Bytes of the disk to a bit, and whether it records changes.
    pub how: NewBitmap,
    /// It was found inconsistent.
    pub lost: bool,
    /// By sector: the contents that it may have had when the bitmap was added, cleared or enabled.
    since: Rc<Vec<Vec<Tag>>>,
    /// By sector: whether it is dirty, whatever it contains.
    dirty: Rc<Vec<bool>>,
}

/// A bitmap as it was found.
pub struct Found {
    /// How it is listed.
    pub info: BitmapInfo,
    /// None if it is inconsistent.
    pub bits: Option<DirtyBits>,
}

impl Found {
    /// Its name.
    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.info.name).into_owned()
    }
}

/// The contents that a disk may have. No change is in flight, and everything is durable.
fn contents(cells: &[Cell]) -> Rc<Vec<Vec<Tag>>> {
    Rc::new(cells.iter().map(|cell| cell.all().collect()).collect())
}

impl Bitmap {
    /// A new one.
    pub fn new(name: String, how: NewBitmap, cells: &[Cell]) -> Self {
        Bitmap {
            name,
            how,
            lost: false,
            since: contents(cells),
            dirty: Rc::new(vec![false; cells.len()]),
        }
    }

    /// Nothing is dirty any more.
    pub fn clear(&mut self, cells: &[Cell]) {
        *self = Bitmap::new(std::mem::take(&mut self.name), self.how, cells);
    }

    /// It records changes from now on, or does not.
    pub fn enable(&mut self, enabled: bool, cells: &[Cell]) {
        self.replaced(cells, cells);
        self.how.enabled = enabled;
    }

    /// The content has become another one without a write.
    pub fn replaced(&mut self, before: &[Cell], after: &[Cell]) {
        let differs = |(sector, cell): (usize, &Cell)| {
            let mut tags = cell.all();
            !cell.wild && tags.all(|tag| self.must_have(sector, tag))
        };
        self.dirty = Rc::new(before.iter().enumerate().map(differs).collect());
        self.since = contents(after);
    }

    /// What is dirty in another bitmap is dirty in this one.
    pub fn merge(&mut self, other: &DirtyBits) {
        let dirty = Rc::make_mut(&mut self.dirty);
        for range in other.ranges() {
            let start = (range.start / SECTOR) as usize;
            let end = (range.end.div_ceil(SECTOR) as usize).min(dirty.len());
            dirty[start.min(end)..end].fill(true);
        }
    }

    /// The disk has another size. What it gained is dirty if the bitmap records changes.
    pub fn resize(&mut self, sectors: usize) {
        if sectors != self.dirty.len() {
            Rc::make_mut(&mut self.since).resize(sectors, Vec::new());
            Rc::make_mut(&mut self.dirty).resize(sectors, self.how.enabled);
        }
    }

    /// Whether a sector with this content must be dirty.
    fn must_have(&self, sector: usize, tag: Tag) -> bool {
        let since = self.since.get(sector);
        let is_as_before = since.is_some_and(|since| since.contains(&tag));
        self.dirty.get(sector) == Some(&true)
            || self.how.enabled && tag != UNREADABLE && !is_as_before
    }

    /// Describes what is wrong with it as it was found, on a disk that was read as `contents`.
    /// `interrupted`: it may be inconsistent.
    fn check(
        &self,
        found: &Found,
        cells: &[Cell],
        contents: &[Tag],
        interrupted: bool,
    ) -> Result<(), String> {
        let bits = match (&found.bits, self.lost) {
            (Some(_), true) => return Err("it was inconsistent, and is not any more".into()),
            (None, lost) if lost || interrupted => return Ok(()),
            (None, _) => return Err("it is inconsistent, and nothing was interrupted".into()),
            (Some(bits), _) => bits,
        };
        let (info, size) = (&found.info, contents.len() as u64 * SECTOR);
        let is = (info.enabled, info.granularity, bits.size());
        let was = (self.how.enabled, self.how.granularity, size);
        if is != was || bits.granularity() != info.granularity {
            return Err(format!("it is {is:?} instead of {was:?}"));
        }
        let mut at = 0;
        while at < size {
            let (dirty, end) = bits.run(at, size);
            let mut sectors = (at / SECTOR) as usize..(end / SECTOR) as usize;
            at = end;
            let is_missed = |s: &usize| !cells[*s].wild && self.must_have(*s, contents[*s]);
            if !dirty && let Some(sector) = sectors.find(is_missed) {
                let was: Vec<_> = self.since[sector]
                    .iter()
                    .map(|t| content::name(*t))
                    .collect();
                return Err(format!(
                    "sector {sector:#x} is {}, was {}, and is not dirty",
                    content::name(contents[sector]),
                    was.join(" or ")
                ));
            }
        }
        Ok(())
    }
}

/// Describes the first bitmap of an image that is not as it must be. `contents`: what the disk was
/// read as. `interrupted`: bitmaps may be inconsistent.
pub fn check_bitmaps(
    bitmaps: &[Bitmap],
    found: &[Found],
    cells: &[Cell],
    contents: &[Tag],
    interrupted: bool,
) -> Result<(), String> {
    let is: Vec<_> = found.iter().map(Found::name).collect();
    let was: Vec<_> = bitmaps.iter().map(|bitmap| bitmap.name.clone()).collect();
    if is != was {
        return Err(format!("the bitmaps are {is:?} instead of {was:?}"));
    }
    for (bitmap, found) in bitmaps.iter().zip(found) {
        let checked = bitmap.check(found, cells, contents, interrupted);
        checked.map_err(|e| format!("bitmap {}: {e}", bitmap.name))?;
    }
    Ok(())
}

/// Notes which bitmaps are inconsistent.
pub fn note_lost(bitmaps: &mut [Bitmap], found: &[Found]) {
    for (bitmap, found) in bitmaps.iter_mut().zip(found) {
        bitmap.lost = found.bits.is_none();
    }
}
