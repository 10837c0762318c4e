//! A second program that does something with the files of the run, while a step goes on. It gets at an
//! image that is open for writing by no means, and what it reads does not change.

use super::make::{IMAGE, base_name};
use super::{Run, Verdict};
use crate::deeds::{Deed, Names};
use crate::programs::together;
use crate::steps::{Beside, Step, What};

impl Run<'_> {
    /// Carries out a step while another program runs.
    pub(super) fn step_beside(&mut self, step: &Step, beside: &Beside) -> Verdict {
        let goes_on = matches!(
            step.what,
            What::Request(_) | What::Wait | What::Change(..) | What::Fault(_)
        );
        let is_open = self.session.is_some() && goes_on;
        let base = beside.base.filter(|base| *base < self.bases.len());
        let name = base.map_or(IMAGE.into(), base_name);
        let deed = match beside.deed {
            _ if base.is_some() => Deed::Read,
            // It knows nothing of locks, or would change the image before or after the step.
            deed if deed.is_foreign() => Deed::Read,
            Deed::CreateNew(sectors) => Deed::CreateNew(sectors),
            deed if is_open || deed.only_looks() => deed,
            _ => Deed::Open,
        };
        let disk = self.disk.clone();
        if let Some(operations) = beside.dies {
            disk.kill_after(1, operations);
        }
        let second = {
            let disk = disk.clone();
            move || {
                let names = Names {
                    name: &name,
                    source: "base0",
                    other: "",
                    away: "",
                };
                deed.perform(&disk, &names)
            }
        };
        let (first, second) = together(&disk, beside.seed, || self.step_alone(step), second);
        disk.revive();
        first?;
        if let Some(violation) = disk.take_violation() {
            return Err(violation);
        }
        match second? {
            Err(e) if e.starts_with("promise: ") => Err(e),
            Ok(()) if is_open && base.is_none() => Err(format!(
                "lock: another program could do this to the open image: {deed:?}"
            )),
            Ok(()) if matches!(deed, Deed::CreateNew(_)) => {
                Err("promise: a file was made anew that is there".into())
            }
            _ => Ok(()),
        }
    }
}
