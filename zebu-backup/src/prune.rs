//! Forgetting old points: increments are merged into the full backup before them.
//!
//! Before anything changes, the files that are needed later are compared with the manifest. The
//! manifest first forgets the oldest point and notes the merge. Then the increment is committed into
//! the full backup, which leaves all later points as they are at every instant, also if it is done
//! twice. The merged file takes the name of the increment, so later files need not change. The last
//! step is the manifest without the note.

use zebu::jobs::{self, CommitOptions};
use zebu::storage::Queue;
use zebu::{Device, Format, OpenOptions, Preallocation, Source};

use crate::error::{Error, Result, refuse};
use crate::files;
use crate::manifest::{Entry, Kind, Manifest, Merge};
use crate::progress::{OnProgress, Step};
use crate::set::Set;

/// The number of a point, and a disk's entry there.
type Own = (u64, Entry);

impl Set {
    /// Forgets the oldest points of each disk of which `is_meant` is true, so that `keep` points of
    /// it are left, and removes what only they need. Finishes what was interrupted.
    ///
    /// # Errors
    ///
    /// If `keep` is 0, if the set was opened by [`Set::open`], if a file cannot be read or written, or if
    /// one that is needed later is not as in the manifest. All points that the manifest has then are as
    /// they were.
    pub fn keep(
        &mut self,
        queue: &Queue,
        keep: usize,
        is_meant: &dyn Fn(&str) -> bool,
        on_progress: OnProgress<'_>,
    ) -> Result<()> {
        if keep == 0 {
            return refuse("at least one point is kept");
        }
        self.begin_change()?;
        for disk in self.manifest().disks() {
            if is_meant(&disk) {
                self.keep_disk(queue, &disk, keep, on_progress)?;
            }
        }
        Ok(())
    }

    fn keep_disk(
        &mut self,
        queue: &Queue,
        disk: &str,
        keep: usize,
        on_progress: OnProgress<'_>,
    ) -> Result<()> {
        let own = self.manifest().of_disk(disk);
        let cut = own.len().saturating_sub(keep);
        // What is before a full backup that goes or stays is needed by nothing, damaged or not.
        let is_full = |(_, entry): &Own| entry.kind == Kind::Full;
        if let Some(full) = own
            .iter()
            .take(cut + 1)
            .rposition(is_full)
            .filter(|f| *f > 0)
        {
            self.check_kept(queue, disk, &own[full..], 1, on_progress)?;
            self.forget(disk, &own[..full])?;
        }
        self.finish_interrupted(queue, disk, on_progress)?;
        let own = self.manifest().of_disk(disk);
        let cut = own.len().saturating_sub(keep);
        if cut > 0 {
            self.check_kept(queue, disk, &own, cut + 1, on_progress)?;
        }
        for pair in own[..own.len().min(cut + 1)].windows(2) {
            let [(number, base), (_, top)] = pair else {
                continue;
            };
            let mut manifest = self.manifest().clone();
            manifest.remove(disk, *number);
            let merge = Merge {
                disk: disk.to_owned(),
                base: base.file.clone(),
                top: top.file.clone(),
            };
            manifest.merging.push(merge.clone());
            self.save(manifest)?;
            self.finish_merge(queue, &merge, on_progress)?;
        }
        Ok(())
    }

    /// Refuses a change if a file of these points is not as the manifest says. Of the first `hashed`
    /// ones, all of the content is compared.
    fn check_kept(
        &self,
        queue: &Queue,
        disk: &str,
        own: &[Own],
        hashed: usize,
        on_progress: OnProgress<'_>,
    ) -> Result<()> {
        for (nth, (number, entry)) in own.iter().enumerate() {
            self.verify_file(queue, disk, *number)?;
            if nth < hashed {
                self.verify_hash(entry, on_progress)?;
            }
        }
        Ok(())
    }

    /// Forgets the oldest points of a disk, which no later point needs, and removes their files.
    fn forget(&mut self, disk: &str, own: &[Own]) -> Result<()> {
        let mut manifest = self.manifest().clone();
        for (number, entry) in own {
            manifest.remove(disk, *number);
            manifest.removing.push(entry.file.clone());
        }
        let merging = std::mem::take(&mut manifest.merging).into_iter();
        let (dropped, others): (Vec<_>, _) = merging.partition(|merge| merge.disk == disk);
        manifest.merging = others;
        let bases = dropped.into_iter().map(|merge| merge.base);
        manifest.removing.extend(bases);
        self.save(manifest)?;
        self.remove_unused()
    }

    /// Finishes a merge of a disk that was interrupted. The base was changed already, so it cannot be
    /// compared with anything.
    fn finish_interrupted(
        &mut self,
        queue: &Queue,
        disk: &str,
        on_progress: OnProgress<'_>,
    ) -> Result<()> {
        let mut merging = self.manifest().merging.iter();
        let Some(merge) = merging.find(|merge| merge.disk == disk).cloned() else {
            return Ok(());
        };
        let own = self.manifest().of_disk(disk);
        if self.has_base(&merge)?
            && let Some((number, entry)) = own.iter().find(|(_, entry)| entry.file == merge.top)
        {
            self.verify_file(queue, disk, *number)?;
            self.verify_hash(entry, on_progress)?;
        }
        self.finish_merge(queue, &merge, on_progress)
    }

    /// Does what is left to be done of a merge that the manifest notes.
    fn finish_merge(
        &mut self,
        queue: &Queue,
        merge: &Merge,
        on_progress: OnProgress<'_>,
    ) -> Result<()> {
        let (base, top) = (self.path(&merge.base), self.path(&merge.top));
        if self.has_base(merge)? {
            self.merge(queue, merge, on_progress)?;
            files::rename(&base, &top)?;
        } else {
            // The merged file needs no other; an increment whose base is lost is refused.
            self.verify_merged(queue, merge)?;
        }
        let (length, sha256) = self.hash(&merge.top, on_progress)?;
        let mut manifest: Manifest = self.manifest().clone();
        manifest.merging.retain(|other| other != merge);
        let entries = manifest
            .points
            .iter_mut()
            .flat_map(|point| point.disks.values_mut());
        for entry in entries.filter(|entry| entry.file == merge.top) {
            entry.kind = Kind::Full;
            entry.changed = entry.size;
            entry.length = length;
            entry.sha256.clone_from(&sha256);
        }
        self.save(manifest)
    }

    /// Commits an increment into the full backup.
    fn merge(&self, queue: &Queue, merge: &Merge, on_progress: OnProgress<'_>) -> Result<()> {
        let open = |file: &str, alone: bool| {
            let options = OpenOptions::default()
                .format(Some(Format::QCOW2))
                .write(true)
                .no_backing(alone);
            let source = Source::Name(self.path(file).into());
            Device::open(queue, &source, &options).map_err(Error::image(file))
        };
        let mut base = open(&merge.base, false)?;
        let top = open(&merge.top, true)?;
        if base.size() > top.size() {
            let resized = base.resize(queue, top.size(), Preallocation::Off);
            queue.block_on(resized).map_err(Error::image(&merge.base))?;
        }
        let mut cancelled = false;
        let options = CommitOptions::default();
        let committed = jobs::commit(queue, top, base, &options, |progress| {
            let flow = on_progress(Step::Merge, &merge.top, progress.done, progress.total);
            cancelled |= flow.is_break();
            flow
        });
        match committed {
            Ok(()) => Ok(()),
            Err(_) if cancelled => Err(Error::Cancelled),
            Err(error) => refuse(format!("{}: {error}", merge.base)),
        }
    }
}
