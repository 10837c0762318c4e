//! Exchanges of the chain of the open image: an overlay on top, the same backing chain again, hooks.
//!
//! The overlay shows what the image shows from its creation until it is taken away, so whatever stops
//! the run meanwhile, the disk is read through it. It is merged into the image before anything else is
//! done than requests.

use std::cell::Cell;
use std::ffi::OsStr;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use zebu::block::{ChangeHook, Device, Format, HookFuture, OpenOptions, SharedDevice};
use zebu::jobs::{self, CommitOptions, CreateQcow2, NewBacking, create_qcow2};
use zebu::storage::{EngineKind, Memory, Queue};

use super::make::{IMAGE, base_name};
use super::{Flying, Run, Verdict, context};
use crate::cell::Time;
use crate::disk::SECTOR;
use crate::sched::{self, Driven, RequestFuture};
use crate::steps::{Exchange, ExchangeKind, Fate, Kind, Opening, Step, What};

/// The name of the overlay.
const OVERLAY: &str = "overlay";

/// An overlay.
pub(super) struct Overlay {
    /// It was taken away: the image is written from then on.
    is_gone: Rc<Cell<bool>>,
}

/// A hook that reads the old content, and counts.
#[derive(Debug, Default)]
pub(super) struct Watch {
    before: AtomicUsize,
    after: AtomicUsize,
}

impl ChangeHook for Watch {
    fn before<'a>(
        &'a self,
        device: &'a Device,
        queue: &'a Queue,
        range: Range<u64>,
    ) -> HookFuture<'a> {
        Box::pin(async move {
            let length = (range.end - range.start).min(4096) as usize;
            let read = device.read_buffer(queue, range.start, vec![0; length], length);
            // A fault is the job's, not the guest's.
            let _ = read.await;
            self.before.fetch_add(1, Ordering::SeqCst);
            Ok(())
        })
    }

    fn after(&self, _: Range<u64>) {
        self.after.fetch_add(1, Ordering::SeqCst);
    }
}

impl Watch {
    /// Whether each change that it was told of is over.
    fn is_even(&self) -> bool {
        self.before.load(Ordering::SeqCst) == self.after.load(Ordering::SeqCst)
    }
}

/// Merges the overlay into the image, and takes it away.
async fn take_off(
    device: SharedDevice,
    queue: Queue,
    is_gone: Rc<Cell<bool>>,
) -> zebu::Result<Vec<u8>> {
    let change = device.change(async |device| {
        device.commit_top(&queue).await?;
        let overlay = device.take_off_top(&queue).await?;
        is_gone.set(true);
        Ok(overlay)
    });
    let overlay = change.await?;
    overlay.close(&queue).await?;
    Ok(Vec::new())
}

impl Run<'_> {
    /// Whether the files that a session has are more than the image, or change in this step.
    pub(super) fn is_exchanged(&self, step: &Step) -> bool {
        let is_exchange = matches!(step.what, What::Exchange(_));
        is_exchange || self.overlay.is_some() || self.is_exchanging()
    }

    fn is_exchanging(&self) -> bool {
        let is_one = |flying: &Flying| matches!(flying.kind, Kind::Exchange(_));
        let session = self.session.as_ref();
        session.is_some_and(|session| session.flying.iter().any(is_one))
    }

    /// Begins an exchange.
    pub(super) fn exchange(&mut self, id: u32, exchange: &Exchange) -> Verdict {
        if self.damaged || self.session()?.is_none() {
            return Ok(());
        }
        if self.change_dropped || self.is_exchanging() {
            return Ok(());
        }
        let Some(session) = &self.session else {
            return Ok(());
        };
        let queue = session.queues[exchange.queue % session.queues.len()].clone();
        let device = session.device.clone();
        let future: Option<RequestFuture> = match (exchange.kind, &self.overlay) {
            (ExchangeKind::Overlay(_), Some(overlay)) => {
                let is_gone = overlay.is_gone.clone();
                Some(Box::pin(take_off(device, queue.clone(), is_gone)))
            }
            (ExchangeKind::Overlay(bits), None) => self.put_on(id, bits, device, queue.clone())?,
            (ExchangeKind::Below, None) => self.below_again(device, queue.clone())?,
            (ExchangeKind::Below, Some(_)) => None,
            (ExchangeKind::Hook, _) => {
                let (watch, is_there) = (session.watch.clone(), session.watched);
                Some(Box::pin(async move {
                    let hook: Arc<dyn ChangeHook> = watch;
                    let change = device.change(async |device| {
                        match is_there {
                            true => assert!(device.remove_hook(&hook)),
                            false => device.add_hook(hook),
                        }
                        Ok(Vec::new())
                    });
                    change.await
                }))
            }
        };
        let (Some(future), began) = (future, self.now()) else {
            return Ok(());
        };
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        session.note_change(Time::MAX);
        self.untidy |= matches!(exchange.fate, Fate::Drop(_) | Fate::StallDrop(_));
        let driven = Driven::spawn(&queue, future, exchange.fate, &session.polls);
        session.flying.push(Flying {
            id,
            kind: Kind::Exchange(exchange.kind),
            range: 0..0,
            began,
            reading: 0,
            driven,
        });
        for _ in 0..exchange.turns {
            self.turn()?;
        }
        Ok(())
    }

    /// Makes an overlay. The result puts it on top; None: not now.
    fn put_on(
        &mut self,
        id: u32,
        bits: u32,
        device: SharedDevice,
        queue: Queue,
    ) -> Verdict<Option<RequestFuture>> {
        // What the image is may be open.
        if !self.others.is_empty() || !self.former.is_empty() {
            return Ok(None);
        }
        let Some(session) = &self.session else {
            return Ok(None);
        };
        let opening = session.opening;
        let maker = sched::queue(4);
        let memory = Memory::new(Vec::new());
        let backing = NewBacking::new(IMAGE).format(Some("qcow2".into()));
        let create = CreateQcow2::default()
            .size(self.model.sectors() as u64 * SECTOR)
            .version(self.version)
            .cluster_bits(bits)
            .extended_l2(bits >= 14 && self.version == 3 && id & 1 == 1)
            .backing(Some(backing));
        let created = create_qcow2(&maker, &memory, None, &create, |_| {});
        maker
            .block_on(created)
            .map_err(context("create the overlay"))?;
        let file = self.disk.add_named(OVERLAY);
        self.disk.set_bytes(file, memory.to_vec());
        self.disk.sync_names();
        let overlay = match self.open_overlay(&maker, &opening) {
            Ok(overlay) => overlay,
            Err(_) if self.may_fail() => {
                let _ = self.disk.remove(OVERLAY);
                return Ok(None);
            }
            Err(e) => return Err(format!("error: open the overlay: {e}")),
        };
        self.overlay = Some(Overlay {
            is_gone: Rc::default(),
        });
        Ok(Some(Box::pin(async move {
            let change = device.change(async |device| device.put_on_top(&queue, overlay).await);
            change.await.map(|()| Vec::new())
        })))
    }

    fn open_overlay(&self, queue: &Queue, opening: &Opening) -> zebu::Result<Device> {
        self.disk.set_align(opening.align);
        let options = OpenOptions::default()
            .format(Some(Format::QCOW2))
            .write(true)
            .no_backing(true)
            .cache(opening.mode)
            .discard(Some(opening.discard))
            .detect_zeroes(Some(opening.detect_zeroes));
        self.open_name(queue, OVERLAY, &options)
    }

    /// Opens the backing chain again. The result exchanges it; None: there is none.
    fn below_again(
        &mut self,
        device: SharedDevice,
        queue: Queue,
    ) -> Verdict<Option<RequestFuture>> {
        let Some(number) = self.backing else {
            return Ok(None);
        };
        let below = match self.open_base(&sched::queue(4), number, false) {
            Ok(below) => below,
            Err(_) if self.may_fail() => return Ok(None),
            Err(e) => return Err(format!("error: open the base: {e}")),
        };
        let (name, format) = (base_name(number), self.bases[number].format);
        Ok(Some(Box::pin(async move {
            let change = device.change(async |device| {
                let (name, format) = (Some(OsStr::new(&name)), Some(format.name()));
                let replaced = device.replace_below(&queue, Some(below), name, format);
                replaced.await
            });
            change.await.map(|_| Vec::new())
        })))
    }

    /// An exchange has ended or was dropped.
    pub(super) fn exchanged(&mut self, kind: ExchangeKind, done: bool) -> Verdict {
        if !done {
            self.exchange_dropped = true;
            self.untidy = true;
        }
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        if kind == ExchangeKind::Hook && done {
            session.watched = !session.watched;
        }
        if !matches!(kind, ExchangeKind::Overlay(_)) {
            return Ok(());
        }
        let entered = session.queues[0].block_on(session.device.enter());
        let entered = entered.map_err(context("enter"))?;
        let is_on = entered.top().spec.file.name() == OVERLAY;
        drop(entered);
        if let Some(overlay) = &self.overlay {
            overlay.is_gone.set(!is_on);
        }
        self.forget_overlay();
        Ok(())
    }

    /// Removes the overlay if it is not on top.
    fn forget_overlay(&mut self) {
        if self.overlay.as_ref().is_some_and(|o| o.is_gone.get()) {
            self.overlay = None;
            // There is none if the machine has stopped.
            let _ = self.disk.remove(OVERLAY);
        }
    }

    /// Takes the overlay away while nothing is in flight. False if that has failed.
    pub(super) fn merge_live(&mut self) -> Verdict<bool> {
        let (Some(session), Some(overlay)) = (&self.session, &self.overlay) else {
            return Ok(true);
        };
        let queue = session.queues[0].clone();
        let merged = take_off(
            session.device.clone(),
            queue.clone(),
            overlay.is_gone.clone(),
        );
        let result = sched::run_or_drop(&queue, None, merged);
        self.forget_overlay();
        match result {
            Some(Err(e)) if !self.may_fail() => Err(format!("error: take the overlay away: {e}")),
            Some(Ok(_)) => Ok(true),
            _ => {
                self.exchange_dropped = true;
                self.untidy = true;
                Ok(false)
            }
        }
    }

    /// The disk is read through the overlay, which is merged into the image then.
    pub(super) fn merge_at_rest(&mut self, queue: &Queue) -> Verdict {
        self.forget_overlay();
        if self.overlay.take().is_none() {
            return Ok(());
        }
        let options = OpenOptions::default().format(Some(Format::QCOW2));
        let device = self.open_name(queue, OVERLAY, &options);
        let device = device.map_err(context("error: open the overlay"))?;
        let found = self.read_all(queue, &device)?;
        let checked = self.model.check(&found);
        checked.map_err(|e| format!("content: through the overlay: {e}"))?;
        self.check_status(queue, &device, &found)?;
        self.model.pin(&found, self.restarted);
        drop(device);
        let overlay = self.open_name(queue, OVERLAY, &options.write(true).no_backing(true));
        let overlay = overlay.map_err(context("error: open the overlay"))?;
        let options = OpenOptions::default().write(true).discard(Some(true));
        let image = self.open(queue, &Run::plain(), options);
        let image = image.map_err(context("error: open below the overlay"))?;
        let options = CommitOptions::default().engine(EngineKind::Threads);
        let merged = jobs::commit(queue, overlay, image, &options, |_| {});
        merged.map_err(|e| format!("error: merge the overlay: {e}"))?;
        let removed = self.disk.remove(OVERLAY);
        removed.map_err(|e| format!("remove the overlay: {e}"))?;
        self.disk.sync_names();
        Ok(())
    }

    /// No request is in flight: a hook was told so.
    pub(super) fn check_hook(&self) -> Verdict {
        match &self.session {
            Some(session) if !session.watch.is_even() => Err(format!(
                "promise: a change is not over: {:?}",
                session.watch
            )),
            _ => Ok(()),
        }
    }
}
