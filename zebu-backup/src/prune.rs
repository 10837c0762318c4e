//! Forgetting old points: the increment after the oldest point is merged into the full backup.
//!
//! First the manifest is written without the oldest point and with a note of the merge. Then the
//! increment is committed into the full backup, which leaves all later points as they are at every
//! instant, also if it is done twice. The merged file takes the name of the increment, so later files
//! need not change. The last step is the manifest without the note.

use std::fs;

use zebu::jobs::{self, CommitOptions};
use zebu::storage::Queue;
use zebu::{Device, Format, OpenOptions, Preallocation, Source};

use crate::error::{Error, Result, refuse};
use crate::files;
use crate::manifest::{Kind, Manifest, Merge};
use crate::set::Set;
use crate::take::{OnProgress, Step};

impl Set {
    /// Forgets the oldest points, so that `keep` are left, and removes what only they need.
    ///
    /// # Errors
    ///
    /// If `keep` is 0, or a file cannot be read or written. The points that are to be kept can be
    /// restored after the next call, which goes on.
    pub fn keep(&mut self, queue: &Queue, keep: usize, on_progress: OnProgress<'_>) -> Result<()> {
        if keep == 0 {
            return refuse("at least one point is kept");
        }
        self.finish_merges(queue, on_progress)?;
        while self.manifest().points.len() > keep {
            let mut manifest = self.manifest().clone();
            let oldest = manifest.points.remove(0);
            for (disk, entry) in &oldest.disks {
                let mut later = manifest
                    .points
                    .iter()
                    .filter_map(|point| point.disks.get(disk));
                match later.next() {
                    Some(next) if next.kind == Kind::Increment => manifest.merging.push(Merge {
                        disk: disk.clone(),
                        base: entry.file.clone(),
                        top: next.file.clone(),
                    }),
                    // The next one is full, or there is none: the file goes below.
                    _ => {}
                }
            }
            self.save(manifest)?;
            self.finish_merges(queue, on_progress)?;
            for entry in oldest.disks.values() {
                if !self.manifest().files().contains(&*entry.file) {
                    files::remove(&self.path(&entry.file))?;
                }
            }
        }
        Ok(())
    }

    /// Finishes merges, those that were interrupted among them.
    pub(crate) fn finish_merges(
        &mut self,
        queue: &Queue,
        on_progress: OnProgress<'_>,
    ) -> Result<()> {
        while let Some(merge) = self.manifest().merging.first().cloned() {
            let (base, top) = (self.path(&merge.base), self.path(&merge.top));
            if fs::exists(&base).map_err(Error::file(&base))? {
                self.merge(queue, &merge, on_progress)?;
                files::rename(&base, &top)?;
            } else {
                // The merged file needs no other; an increment whose base is lost cannot be opened.
                self.open_image(queue, &merge.top)?;
            }
            let mut done = 0;
            let total = fs::metadata(&top).map_err(Error::file(&top))?.len();
            let (length, sha256) = files::hash(&top, |count| {
                done += count;
                on_progress(Step::Hash, &merge.top, done, total).is_continue()
            })?;
            let mut manifest: Manifest = self.manifest().clone();
            manifest.merging.remove(0);
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
            self.save(manifest)?;
        }
        Ok(())
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
