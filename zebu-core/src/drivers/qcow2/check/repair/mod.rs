//! Repair: a check that corrects the image.
//!
//! Before anything is written, all tables are read and the uses of each cluster are recorded
//! (`super::uses`). If the header, an L1 table or the snapshot table overlaps something else, the
//! repair stops without a change, since it could destroy the right one of the two. Refcount
//! structures are an exception: they are rebuilt in free space. Other tables with a second use are
//! not changed.
//!
//! The order of the writes makes a repair safe to interrupt. Between two steps there is a barrier:
//! everything before it is durable.
//!
//! 1. Damaged bitmaps are removed, and invalid entries are cleared, so that they name no cluster.
//! 2. Refcounts are written. A lower one belongs to references that are gone, a higher one to
//!    references that exist. Those of clusters past the end of the file are zeroed, unless there are
//!    references to such clusters. Rebuilt refcounts are complete before the header names them;
//!    until then the old ones do not change.
//! 3. Copied flags are set to agree with the refcounts.
//! 4. A new snapshot table is written to clusters that are counted. Then the header names it, the
//!    clusters of the old one are freed, and copied flags are corrected again.
//! 5. The image is marked as sound.
//!
//! - `bitmaps`: the bitmaps that are removed;
//! - `writable`: the tables that may be written;
//! - `rebuild`: new refcounts;
//! - `snapshots`: a new snapshot table;
//! - `header`: the fields of the header that change.

mod bitmaps;
mod header;
mod rebuild;
mod snapshots;
#[cfg(test)]
mod tests;
mod writable;

use std::sync::Arc;

use super::counts::Counts;
use super::refcounts::{Fix, StoredRefcounts};
use super::uses::{Conflict, Use, Uses};
use super::{Check, CheckMessage, CheckReport, Metadata, RepairWriter, check_metadata, data_len};
use crate::drivers::RepairMode;
use crate::drivers::qcow2::Image;
use crate::progress::{IntoControlFlow, Progress, Report, Reporter};
use crate::storage::{Queue, Storage};
use crate::{Error, Result};

pub(super) use writable::Writable;

/// How often refcounts are rebuilt at most.
const REBUILDS: usize = 3;

/// Repairs the image in `file`, which nothing else may use meanwhile.
///
/// `emit` is called for everything found and repaired, in the order and the words of QEMU. The
/// report says what was repaired and what was not. If nothing is left but leaks, the image is no
/// longer marked as dirty or corrupt. Refcounts of clusters past the end of the file are zeroed, and
/// not reported. `on_progress` is called with the L1 entries looked at, which takes several passes;
/// see [`jobs`](crate::jobs).
///
/// # Errors
/// If the repair could not be done, or was cancelled. The image is no worse than it was, and can
/// be repaired again; so it is whenever the repair is interrupted.
pub async fn repair<G: IntoControlFlow>(
    queue: &Queue,
    file: Arc<dyn Storage>,
    mode: RepairMode,
    emit: &mut dyn FnMut(CheckMessage),
    on_progress: impl FnMut(Progress) -> G,
) -> Result<CheckReport> {
    repair_with(queue, file, None, mode, emit, &Reporter::new(on_progress)).await
}

/// [`repair`] of an open image: what an external data file lacks is reported, too.
///
/// # Errors
/// As [`repair`].
pub async fn repair_image<G: IntoControlFlow>(
    queue: &Queue,
    image: &Image,
    mode: RepairMode,
    emit: &mut dyn FnMut(CheckMessage),
    on_progress: impl FnMut(Progress) -> G,
) -> Result<CheckReport> {
    image
        .repair(queue, mode, emit, &Reporter::new(on_progress))
        .await
}

impl Image {
    /// See [`repair_image`].
    pub(crate) async fn repair(
        &self,
        queue: &Queue,
        mode: RepairMode,
        emit: &mut dyn FnMut(CheckMessage),
        reporter: &dyn Report,
    ) -> Result<CheckReport> {
        let (file, length) = (self.file().clone(), data_len(self)?);
        repair_with(queue, file, length, mode, emit, reporter).await
    }
}

/// Repairs an image whose external data file has `data_len` bytes, if it is known.
async fn repair_with(
    queue: &Queue,
    file: Arc<dyn Storage>,
    data_len: Option<u64>,
    mode: RepairMode,
    emit: &mut dyn FnMut(CheckMessage),
    reporter: &dyn Report,
) -> Result<CheckReport> {
    let mut metadata = Metadata::load(queue, &file, Some(mode), emit).await?;
    metadata.data_len = data_len;
    let repair = Repair {
        queue: queue.clone(),
        writer: RepairWriter::new(queue, &file),
        metadata,
        mode,
        reporter,
    };
    let report = repair.run(emit).await?;
    reporter.finish();
    Ok(report)
}

/// A repair that is running.
struct Repair<'a> {
    queue: Queue,
    writer: RepairWriter,
    /// The metadata of the image as they are now.
    metadata: Metadata,
    mode: RepairMode,
    reporter: &'a dyn Report,
}

/// The result of counting.
struct Counted {
    report: CheckReport,
    counts: Counts,
    stored: StoredRefcounts,
    /// Whether there may be references that were not counted.
    incomplete: bool,
    /// Whether refcounts need a rebuild.
    rebuild: bool,
    /// Whether a copied flag may be wrong.
    suspicious: bool,
}

impl Repair<'_> {
    async fn run(mut self, emit: &mut dyn FnMut(CheckMessage)) -> Result<CheckReport> {
        // Uses of clusters, references, and uses again before copied flags are written.
        self.reporter.plan(3 * self.metadata.l1_entries());
        let uses = self.look().await?;
        let (uses, removed) = self.bitmaps(uses, emit).await?;
        if let Some(Conflict { offset, uses }) = uses.conflict() {
            let mut report =
                check_metadata(&self.queue, &self.metadata, emit, self.reporter).await?;
            emit(CheckMessage::Conflict { offset, uses });
            report.check_errors += 1;
            report.corruptions_fixed += removed;
            return Ok(report);
        }
        self.clear_unknown_autoclear().await?;
        let damage = self.metadata.snapshots.errors;
        let Counted {
            mut report,
            counts,
            stored,
            incomplete,
            ..
        } = self.refcounts(uses, emit).await?;
        if damage != 0 && self.mode == RepairMode::All && !incomplete {
            let flags = self.rewrite_snapshots(counts, &stored, emit).await?;
            report.corruptions_fixed += damage + flags;
        } else {
            report.corruptions += damage;
        }
        report.corruptions_fixed += removed;
        if report.corruptions == 0 && report.check_errors == 0 {
            self.mark_sound().await?;
        }
        Ok(report)
    }

    /// Removes damaged bitmaps: the uses without them, and how many errors that repaired.
    async fn bitmaps(
        &mut self,
        uses: Uses,
        emit: &mut dyn FnMut(CheckMessage),
    ) -> Result<(Uses, u64)> {
        let conflict = uses.conflict();
        let elsewhere = conflict.is_some_and(|c| !c.uses.contains(&Use::Bitmaps));
        let removed = match self.mode {
            RepairMode::All if !elsewhere => self.remove_bitmaps(&uses, emit).await?,
            _ => 0,
        };
        if removed == 0 {
            return Ok((uses, 0));
        }
        self.reporter.plan(self.metadata.l1_entries());
        Ok((self.look().await?, removed))
    }

    /// Reads all tables and records the uses of each cluster.
    async fn look(&self) -> Result<Uses> {
        let mut emit = |_| {};
        let mut check = Check::new(&self.queue, &self.metadata, &mut emit, self.reporter)?;
        check.uses = Some(Uses::new(&self.metadata.geometry, check.file_len));
        check.count_all().await?;
        Ok(check.uses.take().expect("set above"))
    }

    /// Repairs tables, refcounts and copied flags.
    async fn refcounts(
        &mut self,
        uses: Uses,
        emit: &mut dyn FnMut(CheckMessage),
    ) -> Result<Counted> {
        let mut counted = self.count_and_repair(uses, emit).await?;
        if !counted.rebuild || counted.incomplete {
            return Ok(counted);
        }
        if self.mode == RepairMode::Leaks {
            emit(CheckMessage::NeedRebuild);
            return Err(Error::Io(std::io::Error::from_raw_os_error(libc::EIO)));
        }
        let before = counted.report;
        // A rebuild may grow the file over clusters that tables name already. These need another
        // rebuild.
        for _ in 0..REBUILDS {
            if !counted.rebuild {
                break;
            }
            emit(CheckMessage::Rebuilding);
            self.reporter.plan(2 * self.metadata.l1_entries());
            self.rebuild(&mut counted.counts).await?;
            counted = self.free_leaks(emit).await?;
        }
        if counted.rebuild {
            emit(CheckMessage::StillBroken);
        }
        let report = &mut counted.report;
        report.corruptions_fixed +=
            before.corruptions_fixed + before.corruptions.saturating_sub(report.corruptions);
        // Leaks that the rebuild made are not reported.
        report.leaks_fixed = before.leaks.saturating_sub(report.leaks);
        self.repair_copied(counted, emit).await
    }

    /// One check, with the repairs that need no new refcount structure.
    async fn count_and_repair(
        &self,
        uses: Uses,
        emit: &mut dyn FnMut(CheckMessage),
    ) -> Result<Counted> {
        let mut check = Check::new(&self.queue, &self.metadata, emit, self.reporter)?;
        let stored = StoredRefcounts::load(&check.reader, &self.metadata).await?;
        let zero = self.mode == RepairMode::All;
        check.writable = Some(self.writable(uses, zero));
        check.count_references(&stored).await?;
        let counted = check.report;
        check.compare(&stored, Fix::NOTHING).await?;
        if check.incomplete || check.rebuild {
            return Ok(Counted::of(check, stored));
        }
        // The entries cleared above named clusters that are freed here.
        self.writer.barrier().await?;
        check.report = counted;
        let fix = match self.mode {
            RepairMode::Leaks => Fix::LEAKS,
            RepairMode::All => Fix::ALL,
        };
        check.compare(&stored, fix).await?;
        let counted = Counted::of(check, stored);
        self.repair_copied(counted, emit).await
    }

    fn writable(&self, uses: Uses, zero: bool) -> Writable {
        Writable::new(&self.metadata.geometry, uses, &self.writer, zero)
    }

    /// Counts again, and frees clusters that lost their references when the header changed.
    async fn free_leaks(&self, emit: &mut dyn FnMut(CheckMessage)) -> Result<Counted> {
        let mut check = Check::new(&self.queue, &self.metadata, emit, self.reporter)?;
        let stored = StoredRefcounts::load(&check.reader, &self.metadata).await?;
        check.writable = Some(self.writable(self.look().await?, false));
        check.count_references(&stored).await?;
        check.compare(&stored, Fix::LEAKS).await?;
        Ok(Counted::of(check, stored))
    }

    /// Repairs the copied flags of the disk.
    async fn repair_copied(
        &self,
        counted: Counted,
        emit: &mut dyn FnMut(CheckMessage),
    ) -> Result<Counted> {
        // The flags depend on these refcounts.
        self.writer.barrier().await?;
        let fixed = counted.report.corruptions_fixed + counted.report.leaks_fixed;
        let clean = counted.report.corruptions == 0
            && counted.report.leaks == 0
            && counted.report.check_errors == 0;
        let mut check = Check::new(&self.queue, &self.metadata, emit, self.reporter)?;
        check.writable = Some(self.writable(self.look().await?, false));
        check.report = counted.report;
        check.counts = counted.counts;
        check.suspicious = counted.suspicious || fixed != 0;
        let fix = clean || self.mode == RepairMode::All;
        check.check_copied(&counted.stored, fix).await?;
        Ok(Counted {
            incomplete: counted.incomplete,
            rebuild: counted.rebuild,
            ..Counted::of(check, counted.stored)
        })
    }
}

impl Counted {
    fn of(check: Check<'_>, stored: StoredRefcounts) -> Self {
        let mut counts = check.counts;
        if let Some(writable) = check.writable {
            counts.lacks(writable.outside());
            counts.avoid(writable.reserved(stored.blocks()));
        }
        Counted {
            report: check.report,
            counts,
            stored,
            incomplete: check.incomplete,
            rebuild: check.rebuild,
            suspicious: check.suspicious,
        }
    }
}
