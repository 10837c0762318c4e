//! The bitmaps of an image: what they must show after each session.

use std::path::Path;

use zebu::block::{Device, DirtyBits, Format};
use zebu::storage::Queue;

use crate::common::Rng;
use crate::dirty::Bitmap;
use crate::setup::{Opening, Setup};
use crate::trace;

/// Bytes of the disk to a bit.
const GRANULARITIES: [u64; 4] = [512, 4096, 64 << 10, 1 << 20];

/// The bitmaps of an image, in its order.
#[derive(Default)]
pub struct Bitmaps(Vec<Bitmap>);

impl Bitmaps {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether an image can have bitmaps.
    fn fit(setup: &Setup) -> bool {
        setup.format == Format::QCOW2 && setup.options.version == 3
    }

    /// Changes one, or adds one. Nothing is in flight.
    pub fn change(
        &mut self,
        setup: &Setup,
        queue: &Queue,
        device: &mut Device,
        rng: &mut Rng,
        content: &[u8],
    ) {
        if !Self::fit(setup) {
            return;
        }
        let count = self.0.len();
        let kind = rng.below(6);
        if count == 0 || count < 4 && kind == 0 {
            let enabled = !rng.one_in(4);
            let name = format!("b{}", rng.next());
            let new = Bitmap::new(name, rng.pick(&GRANULARITIES), enabled, content);
            trace(|| format!("add {}, {}, enabled: {enabled}", new.name, new.granularity));
            let add = device.bitmap_add(queue, &new.name, Some(new.granularity), enabled);
            done("add", queue.block_on(add));
            self.0.push(new);
            return;
        }
        let nth = rng.index(count);
        let bitmap = &mut self.0[nth];
        let name = bitmap.name.clone();
        match kind {
            0 => {
                trace(|| format!("remove {name}"));
                done("remove", queue.block_on(device.bitmap_remove(queue, &name)));
                self.0.remove(nth);
            }
            1 | 2 => {
                trace(|| format!("clear {name}"));
                done("clear", queue.block_on(device.bitmap_clear(queue, &name)));
                let bits = queue.block_on(device.bitmap(queue, &name)).unwrap();
                assert_eq!(bits.dirty_bytes(), 0, "cleared");
                bitmap.clear(content);
            }
            3 => {
                let size = content.len() as u64;
                let mut other = DirtyBits::new(size, rng.pick(&GRANULARITIES));
                let at = rng.below(size);
                other.set(at..at + rng.below(size));
                trace(|| format!("merge {:x?} into {name}", other.ranges().next()));
                let merge = device.bitmap_merge(queue, &name, &other);
                done("merge", queue.block_on(merge));
                bitmap.merge(&other);
            }
            _ => {
                let enabled = rng.one_in(2);
                trace(|| format!("{name} enabled: {enabled}"));
                let enable = device.bitmap_enable(queue, &name, enabled);
                done("enable", queue.block_on(enable));
                bitmap.enable(enabled, content);
            }
        }
        self.verify(queue, device, content, true);
    }

    /// The disk has another size.
    pub fn resize(&mut self, size: usize) {
        self.0.iter_mut().for_each(|bitmap| bitmap.resize(size));
    }

    /// Fails unless the bitmaps of an open device are right for this content. If it was not
    /// `closed`, some may be inconsistent: they are forgotten.
    fn verify(&mut self, queue: &Queue, device: &Device, content: &[u8], closed: bool) {
        let list = queue.block_on(device.bitmaps(queue)).unwrap();
        let names = self.0.iter().map(|b| b.name.clone().into_bytes());
        let names: Vec<Vec<u8>> = names.collect();
        let lost: Vec<_> = list.iter().filter(|b| b.inconsistent).collect();
        assert!(!closed || lost.is_empty(), "inconsistent: {lost:?}");
        let listed: Vec<_> = list.iter().map(|b| b.name.clone()).collect();
        assert_eq!(listed, names, "bitmaps");
        for (bitmap, info) in self
            .0
            .iter()
            .zip(&list)
            .filter(|(_, info)| !info.inconsistent)
        {
            assert_eq!(info.enabled, bitmap.enabled, "{}", bitmap.name);
            let bits = queue.block_on(device.bitmap(queue, &info.name));
            let right = bitmap.compare(&bits.unwrap(), content);
            right.unwrap_or_else(|why| panic!("bitmap {}: {why}", bitmap.name));
        }
    }

    /// Fails unless those of the image in its file are right for this content. If it was not
    /// `closed`, those that are inconsistent are removed.
    pub fn verify_file(&mut self, setup: &Setup, folder: &Path, content: &[u8], closed: bool) {
        if self.0.is_empty() {
            return;
        }
        let queue = Queue::new(Default::default()).unwrap();
        let device = Opening::plain().open(&queue, setup, folder, false);
        self.verify(&queue, &device, content, closed);
        let list = queue.block_on(device.bitmaps(&queue)).unwrap();
        drop(device);
        if list.iter().any(|bitmap| bitmap.inconsistent) {
            let mut device = Opening::plain().open(&queue, setup, folder, true);
            for lost in list.iter().filter(|bitmap| bitmap.inconsistent) {
                let remove = device.bitmap_remove(&queue, &lost.name);
                done("remove", queue.block_on(remove));
                self.0.retain(|bitmap| bitmap.name.as_bytes() != lost.name);
            }
            done("close", queue.block_on(device.close(&queue)));
        }
    }
}

fn done(what: &str, result: zebu::Result<()>) {
    result.unwrap_or_else(|e| panic!("{what}: {e}"));
}
