//! A front end for tests and measurements: a connection, memory, and virtqueues with a driver. It
//! also sends invalid messages.

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

/// Flag of a descriptor: another one follows.
pub const NEXT: u16 = 1;
/// Flag: the device writes to the memory.
pub const WRITE: u16 = 2;
/// Flag: the memory is a table of descriptors.
pub const INDIRECT: u16 = 4;

/// The guest's address 0 in the front end's address space.
const USER: u64 = 0x7a00_0000_0000;
/// Bytes of a ring of up to 1024 descriptors.
const RING: u64 = 64 << 10;
/// Bytes of a slot besides its data: header, status and indirect table.
const SLOT: u64 = 4096;
/// Offsets of the status and the table in a slot.
const STATUS: u64 = 64;
const TABLE: u64 = 128;
/// Descriptors in a slot's table.
const PIECES: usize = 240;

/// Parameters of a [`Machine`].
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The number of virtqueues.
    pub queues: u16,
    /// Descriptors of each queue.
    pub queue_size: u16,
    /// Requests in flight on each queue at most.
    pub slots: u16,
    /// Bytes of data of each request at most.
    pub bytes: u64,
    /// Feature bits that are not negotiated.
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

/// What outlives a connection when a server is replaced: memory with the rings, and the table of
/// requests in flight.
pub struct Machine {
    setup: Setup,
    memory: Arc<GuestMemoryMmap<()>>,
    features: u64,
    inflight: Option<(VhostUserInflight, File)>,
}

/// An invalid message.
#[derive(Clone, Copy, Debug)]
pub enum Disturb {
    /// The address of the available ring.
    RingAt(u64),
    /// The used ring extends past the end of memory.
    RingAtEnd,
    /// The number of descriptors of a ring.
    Size(u16),
    /// A virtqueue that does not exist.
    Index,
    /// Features that were not offered.
    Features,
    /// A region longer than its file.
    MemoryBehindEnd,
    /// Two regions at one address.
    MemoryTwice,
    /// Less memory for the table of requests in flight than it has entries.
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
    /// A machine with memory for its rings and their data.
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

    /// The same machine, for a second connection while its memory is borrowed. Must be called after
    /// the first connection.
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

    /// The guest's memory.
    pub fn memory(&self) -> &GuestMemoryMmap<()> {
        &self.memory
    }

    /// The features that were negotiated.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Connects and negotiates features. No ring runs yet.
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

    /// Marks the request of a ring whose first descriptor is `head` as one that a server had taken
    /// when it was killed. Must be called after the first connection.
    pub fn leave_in_flight(&self, ring: u16, head: u16) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        let (message, file) = self.inflight.as_ref().expect("connected");
        let at = crate::inflight::entry(ring, self.setup.queue_size, head);
        file.write_all_at(&[1], message.mmap_offset + at as u64)
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

    /// Connects and sends one invalid message. Returns the server's reply.
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
            // There is no reply. The connection may have ended.
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

    /// The driver of a ring, which is empty.
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
    /// Reads the configuration space.
    pub fn config(&mut self, offset: u32, size: u32) -> io::Result<Vec<u8>> {
        let flags = VhostUserConfigFlags::WRITABLE;
        let buffer = vec![0; size as usize];
        let answer = self.frontend.get_config(offset, size, flags, &buffer);
        answer.map(|answer| answer.1).map_err(other)
    }

    /// Writes to the configuration space.
    pub fn set_config(&mut self, offset: u32, bytes: &[u8]) -> io::Result<()> {
        let flags = VhostUserConfigFlags::WRITABLE;
        let answer = self.frontend.set_config(offset, flags, bytes);
        answer.map_err(other)
    }

    /// Gives the server a channel. It receives 12 bytes for each change of the configuration.
    pub fn channel(&mut self) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        self.frontend
            .set_backend_request_fd(&theirs)
            .map_err(other)?;
        Ok(ours)
    }

    /// The number of virtqueues of the server.
    pub fn queues(&mut self) -> io::Result<u64> {
        self.frontend.get_queue_num().map_err(other)
    }

    /// Starts a ring at its present index.
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
        // After a crash only the used index is known.
        frontend
            .set_vring_base(index, ring.used_index())
            .map_err(other)?;
        frontend.set_vring_addr(index, &addresses).map_err(other)?;
        frontend.set_vring_err(index, &ring.error).map_err(other)?;
        frontend.set_vring_call(index, &ring.call).map_err(other)?;
        frontend.set_vring_kick(index, &ring.kick).map_err(other)?;
        frontend.set_vring_enable(index, true).map_err(other)
    }

    /// Resets the device, and starts a ring with these features.
    pub fn reset(&mut self, features: u64, ring: &Ring) -> io::Result<()> {
        self.frontend.reset_owner().map_err(other)?;
        self.frontend.set_features(features).map_err(other)?;
        self.start(ring)
    }

    /// Replaces the descriptor of kicks.
    pub fn kick_by(&mut self, ring: &Ring, descriptor: OwnedFd) -> io::Result<()> {
        let index = usize::from(ring.index);
        // SAFETY: the event takes ownership of an open descriptor.
        #[allow(unsafe_code)]
        let event = unsafe { EventFd::from_raw_fd(descriptor.into_raw_fd()) };
        self.frontend.set_vring_kick(index, &event).map_err(other)
    }

    /// Stops a ring. Returns the index of the next request.
    pub fn stop(&mut self, ring: &Ring) -> io::Result<u32> {
        let index = usize::from(ring.index);
        self.frontend.get_vring_base(index).map_err(other)
    }

    /// The `vhost` crate's front end, for other messages.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }
}

/// A virtqueue and its driver. Each slot has its own header, data, status and descriptors.
pub struct Ring {
    memory: Arc<GuestMemoryMmap<()>>,
    index: u16,
    setup: Setup,
    descriptors: u64,
    available: u64,
    used: u64,
    data: u64,
    /// The number of requests that were added.
    next: u16,
    /// The number of completions that were consumed.
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

    /// The used index.
    pub fn used_index(&self) -> u16 {
        self.load(self.used + 2, Ordering::Acquire)
    }

    /// The address of a slot's header. Its status and table follow.
    pub fn header(&self, slot: u16) -> u64 {
        self.data + (SLOT + self.setup.bytes) * u64::from(slot)
    }

    /// The address of a slot's status.
    pub fn status(&self, slot: u16) -> u64 {
        self.header(slot) + STATUS
    }

    /// The address of a slot's data.
    pub fn data(&self, slot: u16) -> u64 {
        self.header(slot) + SLOT
    }

    /// The first descriptor of a slot. It has three if requests are not indirect.
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

    /// Writes a descriptor at an address.
    pub fn put_descriptor(&self, place: u64, address: u64, length: u32, flags: u16, next: u16) {
        self.put(place, Descriptor::new(address, length, flags, next));
    }

    /// Restarts the ring, as a driver does after a reset of the device.
    pub fn reset(&mut self) {
        for at in [self.available, self.available + 2, self.used, self.used + 2] {
            self.store(at, 0, Ordering::SeqCst);
        }
        (self.next, self.seen) = (0, 0);
        // The error event of the last run.
        if readable(&self.error, Duration::ZERO).unwrap_or(false) {
            let _ = self.error.read();
        }
    }

    /// Sets the event of completions to its maximum.
    pub fn fill_call(&self) -> io::Result<()> {
        loop {
            if readable(&self.call, Duration::ZERO)? {
                self.call.read()?;
            }
            match self.call.write(u64::MAX - 1) {
                // The back end has signalled in between.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return written,
            }
        }
    }

    /// Writes a request's header, and an invalid status.
    pub fn set_header(&self, slot: u16, kind: u32, sector: u64) {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        let header = GuestAddress(self.header(slot));
        self.memory.write_slice(&bytes, header).expect("ours");
        let status = GuestAddress(self.status(slot));
        self.memory.write_obj(0xffu8, status).expect("ours");
    }

    /// Adds a request for the first `length` bytes of the slot's data, which the device reads, or
    /// writes if `to_memory`. With indirect descriptors, `pieces` are the lengths of all
    /// descriptors but the last.
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

    /// Adds the chain that begins with the descriptor `head`.
    pub fn offer(&mut self, head: u16) {
        let place = self.available + 4 + 2 * u64::from(self.next % self.setup.queue_size);
        self.store(place, head, Ordering::Relaxed);
        self.next = self.next.wrapping_add(1);
        self.store(self.available + 2, self.next, Ordering::Release);
    }

    /// Sets the available index, also to an invalid one.
    pub fn set_available_index(&mut self, index: u16) {
        self.next = index;
        self.store(self.available + 2, index, Ordering::Release);
    }

    /// Kicks for `new` requests, if the device wants that.
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

    /// Kicks, whether or not the device wants that.
    pub fn kick_anyway(&self) -> io::Result<()> {
        self.kick.write(1)
    }

    /// The next completion: the first descriptor of its request, and the bytes written.
    pub fn answer(&mut self) -> Option<(u16, u32)> {
        if self.used_index() == self.seen {
            return None;
        }
        let place = self.used + 4 + 8 * u64::from(self.seen % self.setup.queue_size);
        let element: u64 = self.memory.read_obj(GuestAddress(place)).expect("ours");
        self.seen = self.seen.wrapping_add(1);
        Some((element as u16, (element >> 32) as u32))
    }

    /// The next completion: its slot and status.
    pub fn slot_answer(&mut self) -> Option<(u16, u8)> {
        let (head, _) = self.answer()?;
        let slot = if self.indirect { head } else { head / 3 };
        let status = self.memory.read_obj(GuestAddress(self.status(slot)));
        Some((slot, status.expect("ours")))
    }

    /// Waits for a completion. False: there is none in time.
    pub fn wait(&self, patience: Duration) -> io::Result<bool> {
        loop {
            if self.event_index {
                // The used event: the index that the driver wants to be notified of.
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

    /// Whether the device reports that the ring is broken.
    pub fn is_broken(&self, patience: Duration) -> io::Result<bool> {
        readable(&self.error, patience)
    }
}

fn readable(event: &EventFd, patience: Duration) -> io::Result<bool> {
    // SAFETY: `event` keeps the descriptor open meanwhile.
    #[allow(unsafe_code)]
    let descriptor = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    let mut fds = [PollFd::new(&descriptor, PollFlags::IN)];
    let patience = Timespec::try_from(patience).map_err(other)?;
    Ok(poll(&mut fds, Some(&patience))? > 0)
}
