//! The chain of a device is exchanged while threads use it: an overlay is put on top and taken away, and the
//! backing chain is replaced by itself with other filters in it.

use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::task::{Context, Waker};

use zebu::Result;
use zebu::block::{Device, SharedDevice};
use zebu::storage::Queue;

use crate::common::Rng;
use crate::filters::Filters;
use crate::setup::{Opening, Setup};
use crate::trace;

/// The chain of one device.
pub struct Exchanges<'a> {
    pub setup: &'a Setup,
    pub folder: &'a Path,
    pub opening: &'a Opening,
    pub queue: &'a Queue,
    pub device: SharedDevice,
    pub rng: Rng,
    /// The overlay that is on top.
    overlay: Option<PathBuf>,
    count: u64,
}

impl<'a> Exchanges<'a> {
    pub fn new(
        setup: &'a Setup,
        folder: &'a Path,
        opening: &'a Opening,
        queue: &'a Queue,
        device: SharedDevice,
        rng: Rng,
    ) -> Self {
        Exchanges {
            setup,
            folder,
            opening,
            queue,
            device,
            rng,
            overlay: None,
            count: 0,
        }
    }

    /// One of them.
    pub fn exchange(&mut self) {
        match self.rng.below(6) {
            0 => self.drop_waiting(),
            1 | 2 if self.overlay.is_none() && self.setup.backing.is_some() => self.below(),
            _ if self.overlay.is_some() => self.take_off(),
            _ => self.put_on(),
        }
    }

    /// The image is the top one again.
    pub fn end(&mut self) {
        if self.overlay.is_some() {
            self.take_off();
        }
    }

    fn put_on(&mut self) {
        self.count += 1;
        let name = format!("overlay{}", self.count);
        trace(|| format!("put on {name}"));
        let path = (self.setup).make_overlay(self.folder, &name, self.setup.size());
        let overlay = self.opening.open_alone(self.queue, &path);
        let change = (self.device).change(async |device| put_on(self.queue, device, overlay).await);
        let put = self.queue.block_on(change);
        put.unwrap_or_else(|e| panic!("put on: {e}"));
        self.overlay = Some(path);
    }

    fn take_off(&mut self) {
        trace(|| "take off".into());
        let change = (self.device).change(async |device| take_off(self.queue, device).await);
        let taken = self.queue.block_on(change);
        taken.unwrap_or_else(|e| panic!("take off: {e}"));
        fs::remove_file(self.overlay.take().expect("an overlay")).unwrap();
    }

    fn below(&mut self) {
        let (queue, setup, opening) = (self.queue, self.setup, self.opening);
        let filters = Filters::random(&mut self.rng, setup);
        let below = opening.open_backing(queue, setup, self.folder, &filters);
        trace(|| format!("exchange the backing chain: {filters:?}"));
        let change = (self.device)
            .change(async |device| opening.put_below(queue, device, setup, below).await);
        let old = queue.block_on(change);
        drop(old.unwrap_or_else(|e| panic!("exchange the backing chain: {e}")));
    }

    /// An exchange that is dropped while it waits.
    fn drop_waiting(&mut self) {
        let used = self.queue.block_on(self.device.enter()).unwrap();
        {
            let queue = self.queue;
            let change = (self.device).change(async |device| take_off(queue, device).await);
            let mut change = pin!(change);
            let mut context = Context::from_waker(Waker::noop());
            assert!(change.as_mut().poll(&mut context).is_pending());
        }
        drop(used);
    }
}

/// Puts an overlay on top.
pub async fn put_on(queue: &Queue, device: &mut Device, overlay: Device) -> Result<()> {
    device.put_on_top(queue, overlay).await
}

/// Commits the overlay that is on top, and takes it away.
pub async fn take_off(queue: &Queue, device: &mut Device) -> Result<()> {
    device.commit_top(queue).await?;
    device.take_off_top(queue).await?.close(queue).await
}
