//! Check and repair.

use zebu::jobs::{self, CheckReport, RepairMode};
use zebu::{Device, Error, Queue, QueueOptions};

use super::{Job, Outcome, State, start};
use crate::error::{Failure, Out, Result, call_object};
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

/// Checks the image, and repairs it first in the mode given.
fn check(
    queue: &Queue,
    device: &Device,
    mode: Option<RepairMode>,
    state: &State,
) -> Result<CheckReport> {
    let no_check = || Error::Refused("This image format does not support checks".into());
    let Some(image) = device.top().as_qcow2() else {
        if mode.is_some() {
            let why = "Only qcow2 images are repaired";
            return Err(Error::Refused(why.into()).into());
        }
        let report = queue.block_on(device.top().check(queue, &mut |_| {}))?;
        return Ok(report.ok_or_else(no_check)?);
    };
    let check = || {
        let progress = |now| state.progress(now);
        queue.block_on(jobs::check(queue, image, &mut |_| {}, progress))
    };
    let Some(mode) = mode else {
        return Ok(check()?);
    };
    let progress = |now| state.progress(now);
    let repaired = queue.block_on(jobs::repair_image(
        queue,
        image,
        mode,
        &mut |_| {},
        progress,
    ))?;
    if repaired.corruptions_fixed == 0 && repaired.leaks_fixed == 0 {
        return Ok(repaired);
    }
    let mut report = check()?;
    report.corruptions_fixed = repaired.corruptions_fixed;
    report.leaks_fixed = repaired.leaks_fixed;
    Ok(report)
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
            let report = check(&queue, &device, mode, state)?;
            Ok(Outcome::Checked(report.into()))
        })
    })
}
