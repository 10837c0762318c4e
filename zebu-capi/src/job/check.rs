//! Check and repair.

use zebu::internal::check_device;
use zebu::jobs::{CheckReport, RepairMode};
use zebu::{Queue, QueueOptions};

use super::{Job, Outcome, start};
use crate::error::{Failure, Out, call_object};
use crate::open::{COpenOptions, Opening, WRITE};
use crate::text::{OptionsPointer, Text};

/// `zebu_check_result`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CCheckResult {
    pub corruptions: u64,
    pub leaks: u64,
    pub check_errors: u64,
    pub corruptions_fixed: u64,
    pub leaks_fixed: u64,
    pub total_clusters: u64,
    pub allocated_clusters: u64,
    pub fragmented_clusters: u64,
    pub compressed_clusters: u64,
    pub image_end_offset: u64,
}

impl From<CheckReport> for CCheckResult {
    fn from(report: CheckReport) -> CCheckResult {
        CCheckResult {
            corruptions: report.corruptions,
            leaks: report.leaks,
            check_errors: report.check_errors,
            corruptions_fixed: report.corruptions_fixed,
            leaks_fixed: report.leaks_fixed,
            total_clusters: report.total_clusters,
            allocated_clusters: report.allocated_clusters,
            fragmented_clusters: report.fragmented_clusters,
            compressed_clusters: report.compressed_clusters,
            image_end_offset: report.image_end_offset,
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn zebu_check(
    name: Text,
    options: OptionsPointer<COpenOptions>,
    repair: Text,
    error: Out<'_>,
) -> Option<Box<Job>> {
    call_object(error, || {
        let mode = match repair.word("repair")? {
            None => None,
            Some("leaks") => Some(RepairMode::Leaks),
            Some("all") => Some(RepairMode::All),
            Some(other) => {
                return Err(Failure::misuse(&format!("There is no repair '{other}'")));
            }
        };
        let mut options = options.get()?;
        options.flags &= !WRITE;
        let mut opening = Opening::new(name, "name", &options)?;
        opening.options = opening.options.write(mode.is_some()).check(true);
        let prepare = move || {
            let queue = Queue::new(QueueOptions::default().engine(opening.engine))?;
            let device = opening.open(&queue)?;
            Ok((queue, device))
        };
        start(prepare, move |(queue, device), state| {
            let progress = |now| state.progress(now);
            let mut emit = |_| {};
            let check = check_device(&queue, &device, mode, &mut emit, progress);
            let report = queue.block_on(check)?;
            Ok(Outcome::Checked(report.into()))
        })
    })
}
