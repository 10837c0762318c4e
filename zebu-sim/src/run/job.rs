//! Jobs on the closed image.

use std::ops::ControlFlow;

use zebu::block::{Device, FileSpec, Objects, OpenOptions};
use zebu::internal::new_image::Creation;
use zebu::jobs::{
    self, AmendOptions, CommitOptions, CompressOptions, ConvertOptions, RebaseOptions, RepairMode,
};
use zebu::storage::{CacheMode, EngineKind, LockRequest, Queue};

use super::make::IMAGE;
use super::{Run, Verdict, context, is_refusal};
use crate::bitmaps::Bitmap;
use crate::cell::Cell;
use crate::content::ZERO;
use crate::disk::{Class, Failure, Fault};
use crate::sched;
use crate::steps::{Job, Stop};

/// The name of an image that is to take the place of the image.
const NEW: &str = "new";

impl Run<'_> {
    pub(super) fn job(&mut self, id: u32, job: Job, stop: Stop) -> Verdict {
        if let Stop::Cut(operations, cut) = stop {
            self.disk.cut_after(operations, cut);
        }
        let result = match job {
            Job::Commit(empty) => self.commit(empty, id.is_multiple_of(2)),
            Job::Rebase(base, compress) => self.rebase(Some(compress), base, id.is_multiple_of(2)),
            Job::RebaseUnsafe(base) => self.rebase(None, base, true),
            Job::Amend(version, order, lazy) => self.amend(version, order, lazy),
            Job::Repair(mode) => self.repair(mode),
            Job::Convert(bits, compress, bitmaps) => self.convert(id, bits, compress, bitmaps),
        };
        let off = self.disk.is_off();
        let refused = match &result {
            Err(e) => e.starts_with("refused: "),
            Ok(()) => false,
        };
        if off || result.is_err() && !refused {
            self.untidy = true;
        }
        self.interrupted |= off || result.is_err();
        if let Err(e) = result
            && !refused
            && !self.may_fail()
        {
            return Err(format!("error: {job:?}: {e}"));
        }
        if off {
            return self.after_cut();
        }
        self.disk.cancel_cut();
        self.judge()
    }

    /// Opens the image for a job; None: it refuses.
    pub(super) fn open_for_job(&mut self, queue: &Queue, no_backing: bool) -> Verdict<Device> {
        let options = OpenOptions::default()
            .write(true)
            .discard(Some(true))
            .no_backing(no_backing);
        let device = self
            .open(queue, &Run::plain(), options)
            .map_err(context("open"))?;
        if self.damaged {
            self.regrow();
        }
        Ok(device)
    }

    /// `change_snapshots`: snapshots may change with the base. Else they stay as they are.
    pub(super) fn commit(&mut self, empty: bool, change_snapshots: bool) -> Verdict {
        let Some(number) = self.backing else {
            return Ok(());
        };
        let queue = sched::queue(4);
        let top = self.open_for_job(&queue, true)?;
        let base = self
            .open_base(&queue, number, true)
            .map_err(context("open the base"))?;
        let options = CommitOptions::default()
            .empty(empty)
            .change_snapshots(change_snapshots)
            .engine(EngineKind::Threads);
        let result = jobs::commit(&queue, top, base, &options, |_| {});
        if let Err(jobs::CommitError::Snapshot(e)) = &result {
            return self.snapshots_refuse(e);
        }
        // The base gets the data of the image, and the image reads as before.
        let now = self.now();
        let base = &mut self.bases[number].model;
        let below = &mut base.cells;
        if below.len() < self.model.cells.len() {
            below.resize_with(self.model.cells.len(), || Cell::new(ZERO));
        }
        for (cell, view) in below.iter_mut().zip(&self.model.cells) {
            let old = std::mem::take(cell);
            *cell = view.clone();
            if result.is_err() {
                cell.add_all(&old, now);
            }
        }
        base.resize_bitmaps();
        for model in self.models() {
            if empty {
                model.vm_state = None;
                model
                    .cells
                    .iter_mut()
                    .for_each(|cell| cell.explicit = false);
            }
        }
        if change_snapshots {
            self.shift_snapshots(number);
        }
        // Images above the base show its content.
        let mut changed = vec![number];
        for above in (0..number).rev() {
            let Some(below) = self.bases[above]
                .below
                .filter(|below| changed.contains(below))
            else {
                continue;
            };
            changed.push(above);
            let under = self.bases[below].model.cells.clone();
            let model = &mut self.bases[above].model;
            let before = model.cells.clone();
            for (cell, under) in model.cells.iter_mut().zip(under) {
                cell.add_all(&under, now);
            }
            model.replaced(&before);
        }
        result.map_err(|e| e.to_string())
    }

    /// Snapshots show the content of the base where they are unallocated.
    pub(super) fn shift_snapshots(&mut self, number: usize) {
        let now = self.now();
        let base = self.bases[number].model.cells.clone();
        for snapshot in &mut self.model.snapshots {
            for (sector, cell) in snapshot.cells.iter_mut().enumerate() {
                if !cell.explicit {
                    match base.get(sector) {
                        Some(base) => cell.add_all(base, now),
                        None => cell.add(ZERO, now),
                    }
                }
            }
        }
    }

    /// Another backing file is refused because of the snapshots.
    fn snapshots_refuse(&self, error: &zebu::Error) -> Verdict {
        let mut cells = self.model.snapshots.iter().flat_map(|s| &s.cells);
        let all_own = cells.all(|cell| cell.explicit) && !self.lost_snapshots;
        match all_own && !self.may_fail() {
            true => Err(format!("the snapshots have all data of their own: {error}")),
            false => Err(format!("refused: {error}")),
        }
    }

    pub(super) fn rebase(
        &mut self,
        safe: Option<bool>,
        base: usize,
        change_snapshots: bool,
    ) -> Verdict {
        if self.data_is_raw() {
            return Ok(());
        }
        let queue = sched::queue(4);
        let number = (base < self.bases.len()).then_some(base);
        let name = number.map(|number| self.backing_name(number));
        let overlay = self.open_for_job(&queue, safe.is_none())?;
        let result = match safe {
            Some(compress) => {
                let new = number.map(|number| self.open_base(&queue, number, false));
                let new = new.transpose().map_err(context("open the new base"))?;
                let options = RebaseOptions::default()
                    .compress(compress)
                    .change_snapshots(change_snapshots)
                    .engine(EngineKind::Threads);
                jobs::rebase(&queue, overlay, new, name.as_ref(), &options, |_| {})
            }
            None => jobs::rebase_unsafe(&queue, overlay, name.as_ref()),
        };
        if let Err(jobs::RebaseError::Snapshot(e)) = &result {
            return self.snapshots_refuse(e);
        }
        if safe.is_none() {
            let now = self.now();
            let below = number
                .map(|number| self.bases[number].model.cells.clone())
                .unwrap_or_default();
            for model in self.models() {
                let before = model.cells.clone();
                for (sector, cell) in model.cells.iter_mut().enumerate() {
                    if !cell.explicit {
                        match below.get(sector) {
                            Some(below) => cell.add_all(below, now),
                            None => cell.add(ZERO, now),
                        }
                    }
                }
                model.replaced(&before);
            }
        }
        match number {
            _ if !change_snapshots => {}
            Some(number) => self.shift_snapshots(number),
            None => {
                let now = self.now();
                let cells = self.model.snapshots.iter_mut().flat_map(|s| &mut s.cells);
                cells
                    .filter(|cell| !cell.explicit)
                    .for_each(|cell| cell.add(ZERO, now));
            }
        }
        let may_fail = self.may_fail();
        result.map_err(|e| match &e {
            // As in QEMU, a cluster that is allocated cannot be written compressed.
            jobs::RebaseError::Write(zebu::Error::Io(io))
                if safe == Some(true) && !may_fail && io.raw_os_error() == Some(libc::EIO) =>
            {
                format!("refused: {e}")
            }
            jobs::RebaseError::Header(e) | jobs::RebaseError::Write(e) if is_refusal(e) => {
                format!("refused: {e}")
            }
            e => e.to_string(),
        })
    }

    pub(super) fn data_is_raw(&self) -> bool {
        let data_file = &self.scenario.origin.create.data_file;
        self.data.is_some() && data_file.as_ref().is_some_and(|d| d.raw)
    }

    pub(super) fn amend(
        &mut self,
        version: Option<u32>,
        order: Option<u32>,
        lazy: Option<bool>,
    ) -> Verdict {
        let queue = sched::queue(4);
        let device = self.open_for_job(&queue, false)?;
        let options = AmendOptions::default()
            .version(version)
            .refcount_order(order)
            .lazy_refcounts(lazy);
        if version == Some(2) {
            // Version 2 has no zero clusters.
            for model in self.models() {
                let views = model.snapshots.iter_mut().map(|view| &mut view.cells);
                let cells = views.chain([&mut model.cells]).flatten();
                let zeroes = cells.filter(|cell| cell.may_be(ZERO));
                zeroes.for_each(|cell| cell.explicit = false);
            }
        }
        jobs::amend(&queue, device, &options, |_| {}).map_err(|e| match is_refusal(&e) {
            true => format!("refused: {e}"),
            false => e.to_string(),
        })
    }

    pub(super) fn repair(&mut self, mode: RepairMode) -> Verdict {
        let queue = sched::queue(4);
        let spec = FileSpec::new(IMAGE);
        let (caches, lock) = (&[CacheMode::WriteBack], LockRequest::QCOW2_WRITE);
        let file = self.unlocked(|| spec.open_locked(caches, lock, &Objects::default()));
        let file = file.map_err(context("open"))?.storage();
        let report = queue.block_on(jobs::repair(&queue, file, mode, &mut |_| {}, |_| {}));
        let report = report.map_err(|e| e.to_string())?;
        if self.damaged {
            // The model does not cover the repair of damaged clusters, so the run ends.
            self.refused = true;
            return Ok(());
        }
        if report.corruptions == 0 && mode == RepairMode::All {
            self.flags = false;
        }
        Ok(())
    }

    pub(super) fn convert(
        &mut self,
        id: u32,
        cluster_bits: u32,
        compress: bool,
        with_bitmaps: bool,
    ) -> Verdict {
        let queue = sched::queue(4);
        let source = self.open(&queue, &Run::plain(), OpenOptions::default());
        let source = source.map_err(context("open the source"))?;
        let bitmaps = match with_bitmaps && !self.damaged {
            true => self.find_bitmaps(&queue, &source)?,
            false => Vec::new(),
        };
        let bitmaps: Vec<_> = (bitmaps.into_iter())
            .filter_map(|found| Some((found.info, found.bits?)))
            .collect();
        let names: Vec<_> = bitmaps.iter().map(|(info, _)| info.name.clone()).collect();
        let extended = cluster_bits >= 14 && id & 1 == 1;
        let mut options = vec![format!("cluster_size={}", 1 << cluster_bits).into()];
        options.extend(extended.then(|| "extended_l2=on".into()));
        let new = Creation::new(NEW.as_ref(), "qcow2", &options).map_err(context("new image"))?;
        let compress = compress.then(CompressOptions::default);
        let begun = new.begin(&queue, &source, compress);
        let begun = begun.map_err(context("create the target"))?;
        let salvage = id.is_multiple_of(3) && !self.damaged;
        if salvage {
            // The first read fails, and then those of some of its sectors.
            self.disk.arm(Fault {
                class: Class::Read,
                skip: id % 7,
                count: 1 + id % 5,
                how: Failure::Error(libc::EIO),
            });
        }
        let options = ConvertOptions::default()
            .bitmaps(bitmaps)
            .salvage(salvage)
            .engine(EngineKind::Threads);
        let filled = begun.fill(source, options, |_| ControlFlow::Continue(()));
        if let Err(e) = filled {
            // There is none if the machine has stopped.
            let _ = self.disk.remove(NEW);
            return Err(e.to_string());
        }
        let file = self.disk.find(NEW).ok_or("the new image has no name")?;
        let renamed = self.disk.rename(NEW, IMAGE);
        renamed.map_err(|e| format!("rename the new image: {e}"))?;
        self.disk.sync_names();
        // The run continues with the new image.
        self.image = file;
        self.marked = None;
        self.data = None;
        self.cluster = 1 << (cluster_bits - 9);
        self.model.snapshots.clear();
        self.model.vm_state = None;
        let is_kept = |bitmap: &Bitmap| names.iter().any(|name| *name == bitmap.name.as_bytes());
        self.model.bitmaps.retain(is_kept);
        self.others.clear();
        self.former.clear();
        self.untidy = false;
        self.flags = false;
        if salvage && self.disk.hits().reads > 0 {
            // What could not be read is zero.
            let now = self.now();
            let cells = self.model.cells.iter_mut();
            cells.for_each(|cell| cell.add(ZERO, now));
        }
        for cell in &mut self.model.cells {
            let has_data = cell.now().all(|tag| tag != ZERO);
            cell.explicit = has_data;
        }
        if self.damaged {
            // All of the new image can be read.
            self.damaged = false;
            self.lost_snapshots = false;
        }
        Ok(())
    }
}
