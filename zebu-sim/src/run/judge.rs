//! Reads the image after a session, compares it with the model, and checks it.

use zebu::block::{Device, OpenOptions};
use zebu::jobs;
use zebu::qcow2::SnapshotName;
use zebu::storage::{Buffer, Queue};

use super::{Contents, Run, Verdict, context};
use crate::bitmaps::{Found, check_bitmaps, note_lost};
use crate::cell::UNREADABLE;
use crate::content::{self, Tag, ZERO};
use crate::disk::{Cut, SECTOR};
use crate::model::{Model, check_cells};
use crate::sched;
use zebu_testkit::library::allowed_flags::allowed_flags;

impl Run<'_> {
    /// Reads a device in full. Sectors of a damaged image may be [`UNREADABLE`].
    pub(super) fn read_all(&self, queue: &Queue, device: &Device) -> Verdict<Vec<Tag>> {
        let sectors = (device.size() / SECTOR) as usize;
        let mut tags = Vec::with_capacity(sectors);
        while tags.len() < sectors {
            let at = tags.len();
            let mut bytes = vec![0; (sectors - at).min(128) * 512];
            match device.read_blocking(queue, at as u64 * SECTOR, &mut bytes) {
                Ok(()) => tags.extend(identify_all(&bytes, at)),
                Err(e) if !self.damaged => {
                    return Err(format!("error: read at sector {at:#x}: {e}"));
                }
                Err(_) => {
                    for (n, sector) in bytes.chunks_mut(512).enumerate() {
                        let at = at + n;
                        let read = device.read_blocking(queue, at as u64 * SECTOR, sector);
                        tags.push(match read {
                            Ok(()) => content::identify(sector, at as u64),
                            Err(_) => UNREADABLE,
                        });
                    }
                }
            }
        }
        Ok(tags)
    }

    /// Opens the image, reads it in full, compares it with the model and checks it.
    pub(super) fn judge(&mut self) -> Verdict {
        if self.disk.hits().flushes > 0 {
            // Data that the failed flush covered may be lost, and no later flush makes them durable.
            self.disk.cut(Cut::Power);
            self.disk.power_on();
            self.models().for_each(Model::crashed);
            self.restarted = true;
            self.interrupted = true;
            self.undo_marks();
        }
        if self.restarted {
            self.others.append(&mut self.former);
        }
        // Clusters whose refcounts could not be read are not freed, which fails no request.
        self.untidy |= self.disk.hits().reads > 0;
        self.disk.clear_faults();
        self.change_dropped = false;
        self.exchange_dropped = false;
        let queue = sched::queue(4);
        self.merge_at_rest(&queue)?;
        self.find_backing(&queue)?;
        let read_only = OpenOptions::default();
        let device = match self.open(&queue, &Run::plain(), read_only) {
            Ok(device) => device,
            Err(_) if self.damaged => {
                // The image is refused. A later step may repair it.
                return Ok(());
            }
            Err(e) => return Err(format!("error: open to look: {e}")),
        };
        let found = self.read_all(&queue, &device)?;
        let snapshots = self.read_snapshots(&queue, &device)?;
        let bitmaps = self.find_bitmaps(&queue, &device)?;
        let fits = |model: &Model| {
            model.check(&found)?;
            self.compare_snapshots(model, &snapshots)?;
            self.compare_bitmaps(model, &bitmaps, &found)
        };
        if let Err(e) = fits(&self.model) {
            match self.others.iter().position(|other| fits(other).is_ok()) {
                Some(which) => std::mem::swap(&mut self.model, &mut self.others[which]),
                None => {
                    let others: Vec<_> = self.others.iter().map(|o| fits(o).unwrap_err()).collect();
                    let others = match others.is_empty() {
                        true => String::new(),
                        false => {
                            format!("; nor is it as it might be instead: {}", others.join("; "))
                        }
                    };
                    return Err(format!("content: {e}{others}"));
                }
            }
        }
        let others = std::mem::take(&mut self.others);
        match std::mem::take(&mut self.closed) || self.restarted {
            true => self.former.clear(),
            false => self.former.extend(others),
        }
        match self.damaged {
            false => note_lost(&mut self.model.bitmaps, &bitmaps),
            true if bitmaps.len() != self.model.bitmaps.len() => self.model.bitmaps.clear(),
            true => {}
        }
        self.model.pin(&found, std::mem::take(&mut self.restarted));
        self.check_status(&queue, &device, &found)?;
        self.check_mark()?;
        self.check_behind_end()?;
        self.check_tables(&queue, &device)?;
        for number in 0..self.bases.len() {
            self.judge_base(&queue, number)?;
        }
        self.interrupted = false;
        Ok(())
    }

    fn compare_bitmaps(&self, model: &Model, bitmaps: &[Found], found: &[Tag]) -> Verdict {
        // A damaged image may have lost its bitmaps.
        if self.lost_snapshots || self.damaged && bitmaps.len() != model.bitmaps.len() {
            return Ok(());
        }
        let interrupted = self.interrupted || self.damaged;
        check_bitmaps(&model.bitmaps, bitmaps, &model.cells, found, interrupted)
    }

    /// Finds the base that the image names, which may be an old one or a new one.
    pub(super) fn find_backing(&mut self, queue: &Queue) -> Verdict {
        if self.scenario.origin.other.is_some() {
            return Ok(());
        }
        let inspect = OpenOptions::default().inspect(true);
        let device = match self.open(queue, &Run::plain(), inspect) {
            Ok(device) => device,
            Err(_) if self.damaged => return Ok(()),
            Err(e) => return Err(format!("error: look at the header: {e}")),
        };
        let Some(image) = device.top().as_qcow2() else {
            return Err("error: it is not a qcow2 image any more".into());
        };
        self.version = image.header().version;
        let name = image.header().backing_file();
        let number = |name: &[u8]| {
            let digits = name.strip_prefix(b"base")?;
            let number: usize = std::str::from_utf8(digits).ok()?.parse().ok()?;
            (number < self.bases.len()).then_some(number)
        };
        self.backing = match name {
            None => None,
            Some(name) => match number(name) {
                Some(number) => Some(number),
                None if self.damaged => None,
                None => {
                    return Err(format!(
                        "content: it names {:?}",
                        name.escape_ascii().to_string()
                    ));
                }
            },
        };
        Ok(())
    }

    /// Names and contents of the snapshots; None if the model does not have them.
    pub(super) fn read_snapshots(
        &self,
        queue: &Queue,
        device: &Device,
    ) -> Verdict<Option<Contents>> {
        let Some(snapshots) = device.top().snapshots() else {
            return Ok(None);
        };
        if self.lost_snapshots {
            return Ok(None);
        }
        let mut found = Vec::new();
        for snapshot in snapshots {
            let name = String::from_utf8_lossy(&snapshot.name).into_owned();
            let options = OpenOptions::default().snapshot(Some(SnapshotName::from(name.as_str())));
            match self.open(queue, &Run::plain(), options) {
                Ok(device) => {
                    let content = self.read_all(queue, &device)?;
                    self.check_vm_state(queue, &device, &name)?;
                    found.push((name, content));
                }
                Err(_) if self.damaged => found.push((name, Vec::new())),
                Err(e) => return Err(format!("error: open {name}: {e}")),
            }
        }
        Ok(Some(found))
    }

    /// A snapshot must have its VM state.
    fn check_vm_state(&self, queue: &Queue, device: &Device, name: &str) -> Verdict {
        let models = [&self.model].into_iter().chain(&self.others);
        let snapshot = models
            .flat_map(|model| &model.snapshots)
            .find(|snapshot| snapshot.name == name);
        let Some((byte, length)) = snapshot.and_then(|snapshot| snapshot.vm_state) else {
            return Ok(());
        };
        if self.damaged {
            return Ok(());
        }
        let buffer = Buffer::new(length);
        let (buffer, read) = queue.block_on(device.read_vm_state(queue, 0, buffer, length));
        read.map_err(|e| format!("error: VM state of {name}: {e}"))?;
        match buffer[..length].iter().position(|is| *is != byte) {
            None => Ok(()),
            Some(at) => Err(format!(
                "content: VM state of {name}: byte {at:#x} is {:#x} instead of {byte:#x}",
                buffer[at]
            )),
        }
    }

    pub(super) fn compare_snapshots(&self, model: &Model, found: &Option<Contents>) -> Verdict {
        let Some(found) = found else {
            return Ok(());
        };
        let is: Vec<_> = found.iter().map(|(name, _)| name).collect();
        let was: Vec<_> = model.snapshots.iter().map(|s| &s.name).collect();
        if is != was {
            return Err(format!("the snapshots are {is:?} instead of {was:?}"));
        }
        for ((name, tags), snapshot) in found.iter().zip(&model.snapshots) {
            let (is, was) = (tags.len(), snapshot.cells.len());
            if is != was && !self.damaged {
                return Err(format!("{name} has {is:#x} sectors instead of {was:#x}"));
            }
            check_cells(&snapshot.cells, tags).map_err(|e| format!("{name}: {e}"))?;
        }
        Ok(())
    }

    /// Sectors whose status is zero must read as zeroes.
    pub(super) fn check_status(&self, queue: &Queue, device: &Device, found: &[Tag]) -> Verdict {
        let size = device.size();
        let mut at = 0;
        while at < size {
            let status = match queue.block_on(device.status(queue, at, size - at)) {
                Ok(status) => status,
                Err(_) if self.damaged => {
                    at += SECTOR;
                    continue;
                }
                Err(e) => return Err(format!("error: status at {at:#x}: {e}")),
            };
            let sectors = at.div_ceil(SECTOR)..(at + status.length) / SECTOR;
            for sector in sectors {
                let cell = &self.model.cells[sector as usize];
                if status.zero && found[sector as usize] != ZERO && !cell.may_be(ZERO) {
                    return Err(format!(
                        "content: status says that sector {sector:#x} is zero, it reads as {}, and was {}",
                        match found[sector as usize] {
                            UNREADABLE => "an error".into(),
                            tag => content::name(tag),
                        },
                        cell.now()
                            .map(content::name)
                            .collect::<Vec<_>>()
                            .join(" or ")
                    ));
                }
            }
            at += status.length;
        }
        Ok(())
    }

    /// A check must find at most leaked clusters, and none if nothing was interrupted.
    pub(super) fn check_tables(&mut self, queue: &Queue, device: &Device) -> Verdict {
        if self.damaged {
            return Ok(());
        }
        if let Some(other) = &self.scenario.origin.other {
            return other.check(queue, device.top(), self.untidy);
        }
        let Some(image) = device.top().as_qcow2() else {
            return Ok(());
        };
        let mut messages = Vec::new();
        let report = queue.block_on(jobs::check(
            queue,
            image,
            &mut |message| messages.push(message),
            |_| {},
        ));
        let report = report.map_err(context("check"))?;
        // With a leaked reference, a change of snapshots treats an L2 table as shared.
        let allowed = match self.flags || self.untidy {
            true => allowed_flags(&messages, image.geometry().cluster_size()),
            false => 0,
        };
        let bad = report.corruptions > allowed
            || report.check_errors > 0
            || report.leaks > 0 && !self.untidy;
        match bad {
            true => {
                let messages: Vec<_> = messages.iter().take(10).map(ToString::to_string).collect();
                Err(format!("check: {report:?}\n{}", messages.join("\n")))
            }
            false => Ok(()),
        }
    }

    pub(super) fn judge_base(&mut self, queue: &Queue, number: usize) -> Verdict {
        let device = self
            .open_base(queue, number, false)
            .map_err(context("open a base"))?;
        let sectors = device.size().div_ceil(SECTOR) as usize;
        let mut bytes = vec![0; sectors * SECTOR as usize];
        let length = device.size() as usize;
        let read = device.read_blocking(queue, 0, &mut bytes[..length]);
        read.map_err(context("read a base"))?;
        let found: Vec<_> = identify_all(&bytes, 0).collect();
        let bitmaps = self.find_bitmaps(queue, &device)?;
        let interrupted = self.interrupted;
        let model = &mut self.bases[number].model;
        let verdict = check_cells(&model.cells, &found);
        verdict.map_err(|e| format!("content: base {number}: {e}"))?;
        // A commit that failed may have enlarged it or not.
        model
            .bitmaps
            .iter_mut()
            .for_each(|bitmap| bitmap.resize(found.len()));
        let verdict = check_bitmaps(&model.bitmaps, &bitmaps, &model.cells, &found, interrupted);
        verdict.map_err(|e| format!("bitmaps: base {number}: {e}"))?;
        note_lost(&mut model.bitmaps, &bitmaps);
        Ok(())
    }
}

/// Identifies the contents of sectors.
fn identify_all(bytes: &[u8], first: usize) -> impl Iterator<Item = Tag> + '_ {
    let sectors = (first as u64..).zip(bytes.chunks(SECTOR as usize));
    sectors.map(|(sector, bytes)| content::identify(bytes, sector))
}
