//! Changes of the whole image, within a session.

use zebu::block::Preallocation;
use zebu::qcow2::SnapshotName;
use zebu::storage::Buffer;

use super::{Run, Verdict, context, is_refusal};
use crate::cell::{Cell, Time};
use crate::content::ZERO;
use crate::disk::SECTOR;
use crate::model::Snapshot;
use crate::sched;
use crate::steps::{ImageChange, Stop};

impl Run<'_> {
    /// Changes the whole image.
    pub(super) fn change_image(&mut self, id: u32, change: ImageChange, stop: Stop) -> Verdict {
        if self.session()?.is_none() {
            return Ok(());
        }
        self.wait()?;
        if self.change_dropped || !self.merge_live()? {
            return Ok(());
        }
        let mut after = self.model.clone();
        let before = self.model.clone();
        let count = after.snapshots.len();
        let old = after.sectors();
        let mut new = old;
        let mut preallocation = Preallocation::Off;
        let mut action = None;
        let mut may_refuse = true;
        match change {
            ImageChange::Resize(more, how) => {
                new = (old as i64 + more).clamp(1, 4096) as usize;
                if new > old {
                    preallocation = how;
                }
                after.cells.resize_with(new, || Cell::new(ZERO));
                after.vm_state = None;
                after.resize_bitmaps();
            }
            ImageChange::Take => {
                let mut cells = after.cells.clone();
                cells.iter_mut().for_each(Cell::drop_replaced);
                after.snapshots.push(Snapshot {
                    name: format!("snapshot{id}"),
                    cells,
                    vm_state: after.vm_state,
                });
            }
            ImageChange::Apply(n) if count > 0 => {
                after.cells = after.snapshots[n % count].cells.clone();
                after.vm_state = None;
                if self.lost_snapshots {
                    after.cells.iter_mut().for_each(|cell| cell.wild = true);
                }
                after.resize_bitmaps();
            }
            ImageChange::Delete(n) if count > 0 => {
                after.snapshots.remove(n % count);
            }
            ImageChange::Bitmap(change) => {
                let Some(planned) = self.plan_bitmap(id, change, &mut after)? else {
                    return Ok(());
                };
                may_refuse = planned.1;
                action = Some(planned.0);
            }
            _ => return Ok(()),
        }
        after.all_durable();
        let began = self.now();
        let names: Vec<_> = self
            .model
            .snapshots
            .iter()
            .map(|s| s.name.clone())
            .collect();
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        session.note_change(match stop {
            Stop::Drop(_) => Time::MAX,
            Stop::No | Stop::Cut(..) => began,
        });
        let queue = session.queues[0].clone();
        let shared = session.device.clone();
        if let Stop::Cut(operations, cut) = stop {
            self.disk.cut_after(operations, cut);
        }
        let drop_after = match stop {
            Stop::Drop(polls) => Some(polls),
            _ => None,
        };
        let name = |n: usize| SnapshotName::from(names[n % count].as_str());
        let change_it = shared.change(async |device| match change {
            ImageChange::Resize(..) => {
                device
                    .resize(&queue, new as u64 * SECTOR, preallocation)
                    .await
            }
            ImageChange::Take => {
                device
                    .snapshot_create(&queue, &format!("snapshot{id}"))
                    .await
            }
            ImageChange::Apply(n) => device.snapshot_apply(&queue, &name(n)).await,
            ImageChange::Delete(n) => device.snapshot_delete(&queue, &name(n)).await,
            ImageChange::Bitmap(_) => match &action {
                Some(action) => action.perform(device, &queue).await,
                None => Ok(()),
            },
            ImageChange::VmState(_) => Ok(()),
        });
        let result = sched::run_or_drop(&queue, drop_after, change_it);
        let size = queue.block_on(shared.size()).map_err(context("size"))? / SECTOR;
        if self.disk.is_off() {
            self.flags |= change.is_of_snapshots();
            self.model = before;
            self.others.push(after);
            return self.after_cut();
        }
        self.disk.cancel_cut();
        match result {
            Some(Ok(())) => {
                self.others.clear();
                self.model = after;
                Ok(())
            }
            Some(Err(e)) if !self.may_fail() => {
                // Refused: the image is unchanged.
                match may_refuse && is_refusal(&e) && size == old as u64 {
                    true => Ok(()),
                    false => Err(format!("error: {change:?}: {e}")),
                }
            }
            // It failed, or was dropped.
            result => {
                self.change_dropped |= result.is_none();
                self.untidy = true;
                self.flags |= change.is_of_snapshots();
                if matches!(change, ImageChange::Resize(..))
                    && ![old, new].contains(&(size as usize))
                {
                    return Err(format!("promise: {change:?} has left {size} sectors"));
                }
                let failed_flush = self.disk.hits().flushes > 0;
                if matches!(change, ImageChange::Resize(..))
                    && let Some(Err(e)) = &result
                    && size != old as u64
                    && !failed_flush
                {
                    return Err(format!(
                        "promise: {change:?} failed ({e}), and the size has changed"
                    ));
                }
                // The device has one of the two sizes; the file may have the other one.
                self.others.push(match size == new as u64 && new != old {
                    true => std::mem::replace(&mut self.model, after),
                    false => {
                        self.model = before;
                        after
                    }
                });
                Ok(())
            }
        }
    }

    /// Writes VM state, which only a snapshot that is taken next has.
    pub(super) fn write_vm_state(&mut self, id: u32, sectors: usize) -> Verdict {
        if self.session()?.is_none() {
            return Ok(());
        }
        self.wait()?;
        if self.change_dropped || !self.merge_live()? {
            return Ok(());
        }
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        let queue = session.queues[0].clone();
        let device = session.device.clone();
        let length = sectors * SECTOR as usize;
        let byte = id as u8 | 1;
        let mut buffer = Buffer::new(length);
        buffer[..length].fill(byte);
        let written = device.change(async |device| {
            let written = device.write_vm_state(&queue, 0, buffer, length);
            written.await.1
        });
        let result = sched::run_or_drop(&queue, None, written);
        self.model.vm_state = match result {
            Some(Ok(())) => Some((byte, length)),
            Some(Err(e)) if !self.may_fail() && !is_refusal(&e) => {
                return Err(format!("error: VM state: {e}"));
            }
            _ => None,
        };
        Ok(())
    }
}
