//! A virtual machine's side of vhost-user-blk: a connection, memory, and
//! virtqueues with a driver. For tests and measurements.
//!
//! It sends what the test wants, also invalid messages.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;
use std::{fs::File, io};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{
    Address, Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap,
    GuestMemoryRegion,
};
use vmm_sys_util::eventfd::EventFd;

/// Descriptor flags: another follows.
pub const NEXT: u16 = 1;
/// The device writes to it.
pub const WRITE: u16 = 2;
/// It is a table of descriptors.
pub const INDIRECT: u16 = 4;

/// What the front end calls the guest's address 0.
const USER: u64 = 0x7a00_0000_0000;
/// Memory of a ring itself, of up to 1024 descriptors.
const RING: u64 = 64 << 10;
/// Bytes of a slot besides its data: header, status and indirect table.
const SLOT: u64 = 4096;
/// Where in it the status, and the table are.
const STATUS: u64 = 64;
const TABLE: u64 = 128;
/// Descriptors in the table.
const PIECES: usize = 240;

/// How to connect.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Virtqueues.
    pub queues: u16,
    /// Descriptors of each.
    pub queue_size: u16,
    /// Requests in flight on each at most.
    pub slots: u16,
    /// Bytes of data of each request at most.
    pub bytes: u64,
    /// Features that are not wanted.
    pub without: u64,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            queues: 1,
            queue_size: 128,
            slots: 32,
            bytes: 128 << 10,
            without: 0,
        }
    }
}

/// What outlives a connection, as in a virtual machine whose server is
/// replaced: memory with the rings in it, and what is in flight.
pub struct Machine {
    setup: Setup,
    memory: Arc<GuestMemoryMmap<()>>,
    features: u64,
    inflight: Option<(VhostUserInflight, File)>,
}

/// Something that makes no sense.
#[derive(Clone, Copy, Debug)]
pub enum Disturb {
    /// The available ring at this address.
    RingAt(u64),
    /// The used ring where memory ends.
    RingAtEnd,
    /// A ring of so many descriptors.
    Size(u16),
    /// A virtqueue that there is not.
    Index,
    /// Features that there are not.
    Features,
    /// Memory behind the end of its file.
    MemoryBehindEnd,
    /// Two regions at one place.
    MemoryTwice,
    /// Less memory for requests in flight than is said.
    Inflight,
}

/// A connection to a server.
pub struct Connection {
    frontend: Frontend,
}

fn other<E: std::fmt::Debug>(error: E) -> io::Error {
    io::Error::other(format!("{error:?}"))
}

impl Machine {
    /// With memory for its rings and their data.
    pub fn new(setup: Setup) -> io::Result<Self> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("guest", flags)?);
        let queue = RING + (SLOT + setup.bytes) * u64::from(setup.slots);
        let length = queue * u64::from(setup.queues);
        file.set_len(length)?;
        let region = (
            GuestAddress(0),
            length as usize,
            Some(FileOffset::new(file, 0)),
        );
        Ok(Machine {
            setup,
            memory: Arc::new(GuestMemoryMmap::from_ranges_with_files([region]).map_err(other)?),
            features: 0,
            inflight: None,
        })
    }

    /// The same machine once more: while its memory is lent out, connections
    /// can be made here. Made after the first connection.
    pub fn twin(&self) -> io::Result<Self> {
        let inflight = match &self.inflight {
            Some((message, file)) => Some((*message, file.try_clone()?)),
            None => None,
        };
        Ok(Machine {
            setup: self.setup,
            memory: self.memory.clone(),
            features: self.features,
            inflight,
        })
    }

    /// Its memory.
    pub fn memory(&self) -> &GuestMemoryMmap<()> {
        &self.memory
    }

    /// Features that were agreed on.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Connects and agrees on features; no ring runs.
    pub fn connect(&mut self, path: &Path) -> io::Result<Connection> {
        let queues = u64::from(self.setup.queues);
        let mut frontend = Frontend::connect(path, queues).map_err(other)?;
        frontend.set_owner().map_err(other)?;
        let offered = frontend.get_features().map_err(other)?;
        let protocol = frontend.get_protocol_features().map_err(other)?;
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        frontend
            .set_protocol_features(protocol & wanted)
            .map_err(other)?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        self.features = offered & !self.setup.without;
        frontend.set_features(self.features).map_err(other)?;
        if protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            self.share_inflight(&mut frontend)?;
        }
        let regions = self.regions()?;
        frontend.set_mem_table(&regions).map_err(other)?;
        Ok(Connection { frontend })
    }

    fn share_inflight(&mut self, frontend: &mut Frontend) -> io::Result<()> {
        if self.inflight.is_none() {
            let wanted = VhostUserInflight::new(0, 0, self.setup.queues, self.setup.queue_size);
            self.inflight = Some(frontend.get_inflight_fd(&wanted).map_err(other)?);
        }
        let (message, file) = self.inflight.as_ref().expect("just made");
        frontend
            .set_inflight_fd(message, file.as_raw_fd())
            .map_err(other)
    }

    fn regions(&self) -> io::Result<Vec<VhostUserMemoryRegionInfo>> {
        let region = |region: &vm_memory::GuestRegionMmap<()>| {
            let file = region.file_offset()?;
            Some(VhostUserMemoryRegionInfo {
                guest_phys_addr: region.start_addr().raw_value(),
                memory_size: region.len(),
                userspace_addr: USER + region.start_addr().raw_value(),
                mmap_offset: file.start(),
                mmap_handle: file.file().as_raw_fd(),
            })
        };
        let regions: Option<Vec<_>> = self.memory.iter().map(region).collect();
        regions.ok_or_else(|| other("memory without a file"))
    }

    /// Connects, and says one thing that makes no sense; what is answered.
    pub fn disturb(&mut self, path: &Path, disturb: Disturb) -> io::Result<()> {
        let mut ring = self.ring(0)?;
        let index = match disturb {
            Disturb::Index => usize::from(self.setup.queues),
            _ => 0,
        };
        if let Disturb::Features = disturb {
            let frontend = Frontend::connect(path, 1).map_err(other)?;
            frontend.set_owner().map_err(other)?;
            frontend.get_features().map_err(other)?;
            frontend.set_features(1 << 60).map_err(other)?;
            // It is not answered: the connection has ended, or not.
            return frontend.get_features().map(drop).map_err(other);
        }
        let mut connection = self.connect(path)?;
        let mut regions = self.regions()?;
        let frontend = &mut connection.frontend;
        match disturb {
            Disturb::Features => unreachable!("done"),
            Disturb::RingAt(at) => ring.available = at,
            Disturb::RingAtEnd => ring.used = regions[0].memory_size - 8,
            Disturb::Size(size) => return frontend.set_vring_num(0, size).map_err(other),
            Disturb::Index => {
                let mut more = Frontend::connect(path, 2 + index as u64).map_err(other)?;
                drop(connection);
                more.set_owner().map_err(other)?;
                more.get_features().map_err(other)?;
                more.get_protocol_features().map_err(other)?;
                let ack = VhostUserProtocolFeatures::REPLY_ACK;
                more.set_protocol_features(ack).map_err(other)?;
                more.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
                return more.set_vring_num(index, 128).map_err(other);
            }
            Disturb::MemoryBehindEnd => {
                regions[0].memory_size += 4096;
                return frontend.set_mem_table(&regions).map(drop).map_err(other);
            }
            Disturb::MemoryTwice => {
                regions.push(regions[0]);
                return frontend.set_mem_table(&regions).map(drop).map_err(other);
            }
            Disturb::Inflight => {
                let (message, file) = self.inflight.as_ref().expect("connected");
                let mut message = *message;
                message.queue_size = 1024;
                let said = frontend.set_inflight_fd(&message, file.as_raw_fd());
                return said.map_err(other);
            }
        }
        connection.start(&ring)
    }

    /// A ring at its place, with nothing on it.
    pub fn ring(&self, index: u16) -> io::Result<Ring> {
        let queue = RING + (SLOT + self.setup.bytes) * u64::from(self.setup.slots);
        let base = queue * u64::from(index);
        let size = u64::from(self.setup.queue_size);
        let available = base + 16 * size;
        let used = (available + 6 + 2 * size).next_multiple_of(4);
        assert!(used + 6 + 8 * size <= base + RING);
        let event = || EventFd::new(0);
        Ok(Ring {
            memory: self.memory.clone(),
            index,
            setup: self.setup,
            descriptors: base,
            available,
            used,
            data: base + RING,
            next: 0,
            seen: 0,
            event_index: self.features & 1 << 29 != 0,
            indirect: self.features & 1 << 28 != 0,
            kick: event()?,
            call: event()?,
            error: event()?,
        })
    }
}

impl Connection {
    /// Bytes of the device's configuration.
    pub fn config(&mut self, offset: u32, size: u32) -> io::Result<Vec<u8>> {
        let flags = VhostUserConfigFlags::WRITABLE;
        let buffer = vec![0; size as usize];
        let answer = self.frontend.get_config(offset, size, flags, &buffer);
        answer.map(|answer| answer.1).map_err(other)
    }

    /// Sets bytes of it.
    pub fn set_config(&mut self, offset: u32, bytes: &[u8]) -> io::Result<()> {
        let flags = VhostUserConfigFlags::WRITABLE;
        let answer = self.frontend.set_config(offset, flags, bytes);
        answer.map_err(other)
    }

    /// A channel by which the server says that the configuration has changed:
    /// 12 bytes each time.
    pub fn channel(&mut self) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        self.frontend
            .set_backend_request_fd(&theirs)
            .map_err(other)?;
        Ok(ours)
    }

    /// Virtqueues that the server has.
    pub fn queues(&mut self) -> io::Result<u64> {
        self.frontend.get_queue_num().map_err(other)
    }

    /// Runs a ring from where it is.
    pub fn start(&mut self, ring: &Ring) -> io::Result<()> {
        let (index, size) = (usize::from(ring.index), ring.setup.queue_size);
        let frontend = &mut self.frontend;
        let addresses = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: 0,
            desc_table_addr: USER + ring.descriptors,
            used_ring_addr: USER + ring.used,
            avail_ring_addr: USER + ring.available,
            log_addr: None,
        };
        frontend.set_vring_num(index, size).map_err(other)?;
        // After a crash nothing else is known than what was answered.
        frontend
            .set_vring_base(index, ring.used_index())
            .map_err(other)?;
        frontend.set_vring_addr(index, &addresses).map_err(other)?;
        frontend.set_vring_err(index, &ring.error).map_err(other)?;
        frontend.set_vring_call(index, &ring.call).map_err(other)?;
        frontend.set_vring_kick(index, &ring.kick).map_err(other)?;
        frontend.set_vring_enable(index, true).map_err(other)
    }

    /// Has the ring kicked by another descriptor from now on.
    pub fn kick_by(&mut self, ring: &Ring, descriptor: OwnedFd) -> io::Result<()> {
        let index = usize::from(ring.index);
        // SAFETY: it owns the descriptor, which is open.
        #[allow(unsafe_code)]
        let event = unsafe { EventFd::from_raw_fd(descriptor.into_raw_fd()) };
        self.frontend.set_vring_kick(index, &event).map_err(other)
    }

    /// Stops a ring; the index of the next request that would be taken.
    pub fn stop(&mut self, ring: &Ring) -> io::Result<u32> {
        let index = usize::from(ring.index);
        self.frontend.get_vring_base(index).map_err(other)
    }

    /// What is more can be said here.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }
}

/// A virtqueue and its driver. Each slot has a header, data, and a status of
/// its own, and its descriptors begin at a place of its own.
pub struct Ring {
    memory: Arc<GuestMemoryMmap<()>>,
    index: u16,
    setup: Setup,
    descriptors: u64,
    available: u64,
    used: u64,
    data: u64,
    /// Requests made available so far.
    next: u16,
    /// Answers seen so far.
    seen: u16,
    event_index: bool,
    indirect: bool,
    kick: EventFd,
    call: EventFd,
    error: EventFd,
}

impl Ring {
    fn load(&self, at: u64, order: Ordering) -> u16 {
        self.memory.load(GuestAddress(at), order).expect("ours")
    }

    fn store(&self, at: u64, value: u16, order: Ordering) {
        let stored = self.memory.store(value, GuestAddress(at), order);
        stored.expect("ours");
    }

    /// Answers that the device has given, modulo 2^16.
    pub fn used_index(&self) -> u16 {
        self.load(self.used + 2, Ordering::Acquire)
    }

    /// Where the slot's header is; its status and table follow.
    pub fn header(&self, slot: u16) -> u64 {
        self.data + (SLOT + self.setup.bytes) * u64::from(slot)
    }

    /// Where the slot's status is.
    pub fn status(&self, slot: u16) -> u64 {
        self.header(slot) + STATUS
    }

    /// Where the slot's data are.
    pub fn data(&self, slot: u16) -> u64 {
        self.header(slot) + SLOT
    }

    /// The first of the slot's descriptors, of which there are three if
    /// requests are not indirect.
    pub fn head(&self, slot: u16) -> u16 {
        if self.indirect { slot } else { slot * 3 }
    }

    /// Writes a descriptor of the ring's table.
    pub fn set_descriptor(&self, at: u16, address: u64, length: u32, flags: u16, next: u16) {
        let place = self.descriptors + 16 * u64::from(at);
        self.put(place, Descriptor::new(address, length, flags, next));
    }

    fn put(&self, place: u64, descriptor: Descriptor) {
        let put = self.memory.write_obj(descriptor, GuestAddress(place));
        put.expect("ours");
    }

    /// Writes a descriptor of a table anywhere.
    pub fn put_descriptor(&self, place: u64, address: u64, length: u32, flags: u16, next: u16) {
        self.put(place, Descriptor::new(address, length, flags, next));
    }

    /// Begins anew, as a driver does after a reset of the device.
    pub fn reset(&mut self) {
        for at in [self.available, self.available + 2, self.used, self.used + 2] {
            self.store(at, 0, Ordering::SeqCst);
        }
        (self.next, self.seen) = (0, 0);
        // What was said of the last one.
        if readable(&self.error, Duration::ZERO).unwrap_or(false) {
            let _ = self.error.read();
        }
    }

    /// Makes the counter of completion events full.
    pub fn fill_call(&self) -> io::Result<()> {
        if readable(&self.call, Duration::ZERO)? {
            self.call.read()?;
        }
        self.call.write(u64::MAX - 1)
    }

    /// Writes a request's header, and a status that no device gives.
    pub fn set_header(&self, slot: u16, kind: u32, sector: u64) {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        let header = GuestAddress(self.header(slot));
        self.memory.write_slice(&bytes, header).expect("ours");
        let status = GuestAddress(self.status(slot));
        self.memory.write_obj(0xffu8, status).expect("ours");
    }

    /// Makes a request available: `length` bytes of the slot's data, which the
    /// device reads, or writes if `to_memory`. With indirect descriptors they
    /// are cut into pieces of these lengths, and what is left.
    pub fn request(
        &mut self,
        slot: u16,
        kind: u32,
        sector: u64,
        (length, to_memory): (u64, bool),
        pieces: &[u64],
    ) {
        self.set_header(slot, kind, sector);
        let flags = if to_memory { WRITE } else { 0 };
        let mut all = vec![(self.header(slot), 16, 0)];
        let mut at = 0;
        for piece in pieces.iter().chain([&length]).take(PIECES - 2) {
            let piece = if all.len() == PIECES - 2 || !self.indirect {
                length
            } else {
                *piece
            };
            let piece = piece.min(length - at);
            if piece > 0 {
                all.push((self.data(slot) + at, piece as u32, flags));
                at += piece;
            }
        }
        all.push((self.status(slot), 1, WRITE));
        let head = self.head(slot);
        let table = match self.indirect {
            true => self.header(slot) + TABLE,
            false => self.descriptors + 16 * u64::from(head),
        };
        let base = if self.indirect { 0 } else { head };
        let last = all.len() - 1;
        for (n, (address, length, flags)) in all.iter().enumerate() {
            let next = if n < last { NEXT } else { 0 };
            let follows = base + n as u16 + 1;
            let descriptor = Descriptor::new(*address, *length, flags | next, follows);
            self.put(table + 16 * n as u64, descriptor);
        }
        if self.indirect {
            let bytes = 16 * all.len() as u32;
            self.set_descriptor(head, table, bytes, INDIRECT, 0);
        }
        self.offer(head);
    }

    /// Makes what begins with the descriptor `head` available.
    pub fn offer(&mut self, head: u16) {
        let place = self.available + 4 + 2 * u64::from(self.next % self.setup.queue_size);
        self.store(place, head, Ordering::Relaxed);
        self.next = self.next.wrapping_add(1);
        self.store(self.available + 2, self.next, Ordering::Release);
    }

    /// Says that so many requests were made available, true or not.
    pub fn set_available_index(&mut self, index: u16) {
        self.next = index;
        self.store(self.available + 2, index, Ordering::Release);
    }

    /// Notifies the device of `new` requests, if it wants that.
    pub fn kick(&self, new: u16) -> io::Result<()> {
        fence(Ordering::SeqCst);
        let wanted = match self.event_index {
            true => {
                let place = self.used + 4 + 8 * u64::from(self.setup.queue_size);
                let event = self.load(place, Ordering::Relaxed);
                self.next.wrapping_sub(event).wrapping_sub(1) < new
            }
            false => self.load(self.used, Ordering::Relaxed) & 1 == 0,
        };
        if wanted { self.kick.write(1) } else { Ok(()) }
    }

    /// Kicks whether the device wants it or not.
    pub fn kick_anyway(&self) -> io::Result<()> {
        self.kick.write(1)
    }

    /// The next answer: the first descriptor of its request, and how much was
    /// written.
    pub fn answer(&mut self) -> Option<(u16, u32)> {
        if self.used_index() == self.seen {
            return None;
        }
        let place = self.used + 4 + 8 * u64::from(self.seen % self.setup.queue_size);
        let element: u64 = self.memory.read_obj(GuestAddress(place)).expect("ours");
        self.seen = self.seen.wrapping_add(1);
        Some((element as u16, (element >> 32) as u32))
    }

    /// The next answer: its slot and status.
    pub fn slot_answer(&mut self) -> Option<(u16, u8)> {
        let (head, _) = self.answer()?;
        let slot = if self.indirect { head } else { head / 3 };
        let status = self.memory.read_obj(GuestAddress(self.status(slot)));
        Some((slot, status.expect("ours")))
    }

    /// Waits for an answer that was not seen; false: there is none in time.
    pub fn wait(&self, patience: Duration) -> io::Result<bool> {
        loop {
            if self.event_index {
                // Where the driver says which answer it wants to hear of.
                let place = self.available + 4 + 2 * u64::from(self.setup.queue_size);
                self.store(place, self.seen, Ordering::Relaxed);
            }
            fence(Ordering::SeqCst);
            if self.used_index() != self.seen {
                return Ok(true);
            }
            if !readable(&self.call, patience)? {
                return Ok(false);
            }
            self.call.read()?;
        }
    }

    /// Whether the device has said that the ring is broken.
    pub fn is_broken(&self, patience: Duration) -> io::Result<bool> {
        readable(&self.error, patience)
    }
}

fn readable(event: &EventFd, patience: Duration) -> io::Result<bool> {
    // SAFETY: `event` keeps it open as long as it is used here.
    #[allow(unsafe_code)]
    let descriptor = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    let mut fds = [PollFd::new(&descriptor, PollFlags::IN)];
    let patience = Timespec::try_from(patience).map_err(other)?;
    Ok(poll(&mut fds, Some(&patience))? > 0)
}
