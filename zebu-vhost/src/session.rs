//! The connection of a front end: its memory, its features, and its rings.
//!
//! A ring runs when it is enabled, has valid addresses and a descriptor for kicks. Before anything
//! of it changes, it is stopped, which waits for requests in flight. Then it is started with the
//! new state.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vhost::vhost_user::message::*;
use vhost::vhost_user::{
    Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, message::VhostTransferStateDirection,
};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue as Virtqueue, QueueT};
use vm_memory::GuestAddress;
use zebu::storage::QueueOptions;

use crate::config;
use crate::export::Export;
use crate::inflight::Inflight;
use crate::memory::{MAX_REGIONS, Memory};
use crate::ring::Start;
use crate::worker::Worker;

/// The most descriptors that a virtqueue may have.
const MAX_QUEUE_SIZE: u16 = 1024;

/// Addresses of a ring in the front end's address space.
#[derive(Clone, Copy)]
struct Addresses {
    descriptors: u64,
    available: u64,
    used: u64,
}

/// The state of a ring, as the front end has set it.
#[derive(Default)]
struct Vring {
    size: Option<u16>,
    addresses: Option<Addresses>,
    /// The index of the next request.
    base: u16,
    kick: Option<File>,
    call: Option<File>,
    error: Option<File>,
    enabled: bool,
    /// Created when the ring first runs.
    worker: Option<Worker>,
    running: bool,
}

/// A connection.
pub struct Session {
    export: Arc<Export>,
    options: QueueOptions,
    features: u64,
    memory: Memory,
    inflight: Option<Inflight>,
    /// This server has created that memory.
    made_inflight: bool,
    /// The front end was connected to another server before, and may not have the size that the
    /// disk has now.
    may_be_behind: bool,
    /// The switch of the write cache. As with other features of the disk, a reset keeps it: a front
    /// end shows its guest the value that it wrote last, and does not write it again.
    cache_switch: bool,
    /// Whether there is a write cache: the switch is on, and the guest knows how to flush.
    write_back: Arc<AtomicBool>,
    vrings: Vec<Vring>,
}

/// An error that ends the connection.
fn failed<E: Into<Box<dyn std::error::Error + Send + Sync>>>(error: E) -> Error {
    Error::ReqHandlerError(io::Error::other(error))
}

/// Makes an event's descriptor non-blocking.
fn event(file: File) -> Result<File> {
    rustix::io::ioctl_fionbio(&file, true).map_err(failed)?;
    Ok(file)
}

impl Session {
    pub fn new(export: &Arc<Export>, options: &QueueOptions) -> Self {
        Session {
            export: export.clone(),
            options: options.clone(),
            features: 0,
            memory: Memory::default(),
            inflight: None,
            made_inflight: false,
            may_be_behind: false,
            cache_switch: true,
            write_back: Arc::new(AtomicBool::new(false)),
            vrings: (0..export.queues()).map(|_| Vring::default()).collect(),
        }
    }

    fn features() -> VhostUserVirtioFeatures {
        VhostUserVirtioFeatures::PROTOCOL_FEATURES
    }

    /// Changes the state of a ring, which is stopped meanwhile.
    fn change(&mut self, index: usize, change: impl FnOnce(&mut Vring)) -> Result<()> {
        self.stop(index)?;
        change(&mut self.vrings[index]);
        self.start(index)
    }

    fn index(&self, index: u32) -> Result<usize> {
        let index = index as usize;
        match index < self.vrings.len() {
            true => Ok(index),
            false => Err(Error::InvalidParam),
        }
    }

    /// Changes the state of all rings, which are stopped meanwhile.
    fn change_all(&mut self, change: impl FnOnce(&mut Self)) -> Result<()> {
        for index in 0..self.vrings.len() {
            self.stop(index)?;
        }
        change(self);
        for index in 0..self.vrings.len() {
            self.start(index)?;
        }
        Ok(())
    }

    fn stop(&mut self, index: usize) -> Result<()> {
        let vring = &mut self.vrings[index];
        if vring.running
            && let Some(worker) = &vring.worker
        {
            vring.base = worker.stop().map_err(failed)?;
            vring.running = false;
        }
        Ok(())
    }

    /// Starts a ring if its state is complete.
    fn start(&mut self, index: usize) -> Result<()> {
        let negotiated = self.features & Self::features().bits() != 0;
        let vring = &self.vrings[index];
        let enabled = vring.enabled || !negotiated;
        let (Some(addresses), Some(kick), true) = (vring.addresses, &vring.kick, enabled) else {
            return Ok(());
        };
        let clone = |file: &Option<File>| file.as_ref().map(File::try_clone).transpose();
        let size = vring.size.unwrap_or(MAX_QUEUE_SIZE);
        let start = Start {
            guest: self.memory.guest().clone(),
            virtqueue: self.virtqueue(size, vring.base, addresses)?,
            kick: kick.try_clone().map_err(failed)?,
            call: clone(&vring.call).map_err(failed)?,
            error: clone(&vring.error).map_err(failed)?,
            inflight: match &self.inflight {
                Some(inflight) => {
                    let queue = inflight.queue(index as u16, size);
                    Some(queue.ok_or_else(|| failed("too little memory for requests in flight"))?)
                }
                None => None,
            },
            write_back: self.write_back.clone(),
        };
        let vring = &mut self.vrings[index];
        if vring.worker.is_none() {
            let worker = Worker::new(&self.export, index, &self.options);
            vring.worker = Some(worker.map_err(failed)?);
        }
        if let Some(worker) = &vring.worker {
            worker.start(start);
            vring.running = true;
            if std::mem::take(&mut self.may_be_behind) {
                self.export.notify_front_end();
            }
            tracing::debug!("virtqueue {index} was started");
        }
        Ok(())
    }

    /// The ring at these addresses, which must be in the guest's memory.
    fn virtqueue(&self, size: u16, base: u16, addresses: Addresses) -> Result<Virtqueue> {
        let place = |address| {
            let found = self.memory.translate(address);
            found.ok_or_else(|| failed("a ring outside of the guest's memory"))
        };
        let mut virtqueue = Virtqueue::new(MAX_QUEUE_SIZE).map_err(failed)?;
        virtqueue.try_set_size(size).map_err(failed)?;
        let descriptors: GuestAddress = place(addresses.descriptors)?;
        virtqueue
            .try_set_desc_table_address(descriptors)
            .map_err(failed)?;
        virtqueue
            .try_set_avail_ring_address(place(addresses.available)?)
            .map_err(failed)?;
        virtqueue
            .try_set_used_ring_address(place(addresses.used)?)
            .map_err(failed)?;
        virtqueue.set_event_idx(config::has(self.features, VIRTIO_RING_F_EVENT_IDX));
        virtqueue.set_next_avail(base);
        virtqueue.set_ready(true);
        let guest = &**self.memory.guest();
        if !virtqueue.is_valid(guest) {
            return Err(failed("a ring outside of the guest's memory"));
        }
        let used = virtqueue.used_idx(guest, Ordering::Relaxed);
        virtqueue.set_next_used(used.map_err(failed)?.0);
        Ok(virtqueue)
    }

    /// Whether the guest knows how to flush.
    fn can_flush(&self) -> bool {
        config::has(self.features, VIRTIO_BLK_F_FLUSH)
            || config::has(self.features, VIRTIO_BLK_F_CONFIG_WCE)
    }

    fn set_cache_switch(&mut self, on: bool) {
        self.cache_switch = on;
        if let Some(inflight) = &self.inflight {
            inflight.set_cache_switch(on);
        }
        self.set_write_back();
    }

    fn set_write_back(&self) {
        let on = self.cache_switch && self.can_flush();
        self.write_back.store(on, Ordering::Relaxed);
    }

    fn reset(&mut self) -> Result<()> {
        for index in 0..self.vrings.len() {
            self.stop(index)?;
            self.vrings[index] = Vring::default();
        }
        Ok(())
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    /// Deprecated. QEMU sends it to stop the rings.
    fn reset_owner(&mut self) -> Result<()> {
        self.reset()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset()
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config::features(self.export.is_writable()))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !config::features(self.export.is_writable()) != 0 {
            return Err(Error::FeatureMismatch);
        }
        if features == self.features {
            return Ok(());
        }
        self.change_all(|session| {
            session.features = features;
            session.set_write_back();
        })
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(config::protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        match features & !config::protocol_features().bits() {
            0 => Ok(()),
            _ => Err(Error::FeatureMismatch),
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.vrings.len() as u64)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let mut memory = Memory::default();
        for (region, file) in regions.iter().zip(files) {
            memory = memory.with(region, file).map_err(failed)?;
        }
        self.change_all(|session| session.memory = memory)?;
        Ok(None)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        let memory = self.memory.with(region, file).map_err(failed)?;
        self.change_all(|session| session.memory = memory)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let (guest, user) = (region.guest_phys_addr, region.user_addr);
        let memory = self.memory.without(guest, user, region.memory_size);
        let memory = memory.map_err(failed)?;
        self.change_all(|session| session.memory = memory)
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> Result<()> {
        let index = self.index(index)?;
        let size = u16::try_from(size).map_err(|_| Error::InvalidParam)?;
        if size > MAX_QUEUE_SIZE || !size.is_power_of_two() {
            return Err(Error::InvalidParam);
        }
        self.change(index, |vring| vring.size = Some(size))
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let index = self.index(index)?;
        let addresses = Addresses {
            descriptors,
            available,
            used,
        };
        self.change(index, |vring| vring.addresses = Some(addresses))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let index = self.index(index)?;
        // The upper half is for packed rings.
        self.change(index, |vring| vring.base = base as u16)
    }

    /// Stops the ring and returns its index.
    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let at = self.index(index)?;
        self.stop(at)?;
        let vring = &mut self.vrings[at];
        vring.kick = None;
        vring.call = None;
        tracing::debug!("virtqueue {index} was stopped");
        Ok(VhostUserVringState::new(index, vring.base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let index = self.index(index.into())?;
        let file = file.ok_or_else(|| failed("rings without kicks are not supported"))?;
        let file = event(file)?;
        self.change(index, |vring| vring.kick = Some(file))
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let index = self.index(index.into())?;
        let file = file.map(event).transpose()?;
        self.change(index, |vring| vring.call = file)
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let index = self.index(index.into())?;
        let file = file.map(event).transpose()?;
        self.change(index, |vring| vring.error = file)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let index = self.index(index)?;
        self.change(index, |vring| vring.enabled = enable)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        // The front end may ask before there is a guest.
        let cached = self.cache_switch && (self.can_flush() || self.features == 0);
        let config = self.export.config(cached);
        config.read(offset, size).ok_or(Error::InvalidParam)
    }

    /// Only the switch of the write cache may be written.
    fn set_config(
        &mut self,
        offset: u32,
        bytes: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> Result<()> {
        match bytes {
            [wanted] if offset == config::WRITE_CACHE => {
                self.set_cache_switch(*wanted != 0);
                Ok(())
            }
            _ => Err(Error::InvalidParam),
        }
    }

    fn get_inflight_fd(
        &mut self,
        inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (inflight.num_queues, inflight.queue_size);
        if queues > self.export.queues() || size > MAX_QUEUE_SIZE {
            return Err(Error::InvalidParam);
        }
        self.made_inflight = true;
        Inflight::create(queues, size).map_err(failed)
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        if inflight.queue_size > MAX_QUEUE_SIZE {
            return Err(Error::InvalidParam);
        }
        let opened = Inflight::open(inflight, file);
        let opened = opened.ok_or_else(|| failed("memory for requests in flight is too small"))?;
        self.may_be_behind = !self.made_inflight;
        let switch = match self.made_inflight {
            true => self.cache_switch,
            false => opened.cache_switch(),
        };
        self.change_all(|session| {
            session.inflight = Some(opened);
            session.set_cache_switch(switch);
        })
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Result<()> {
        Err(Error::InvalidMessage)
    }

    fn get_shared_object(&mut self, _id: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidMessage)
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidMessage)
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidMessage)
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidMessage)
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(Error::InvalidMessage)
    }
}
