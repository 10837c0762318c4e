//! An export: a device as the disk of a virtual machine.

use std::sync::{Arc, Mutex, MutexGuard};

use zebu::block::Device;
use zebu::internal::Statistics;

use crate::channel::Channel;
use crate::config::Config;
use crate::request::{ID, SECTOR, Work};

/// The most virtqueues that an export may have.
pub const MAX_QUEUES: u16 = 256;

/// The kinds of requests in the statistics; see [`kind`].
const KINDS: [&str; 7] = [
    "read",
    "write",
    "flush",
    "discard",
    "write-zeroes",
    "get-id",
    "invalid",
];

/// The kind of invalid requests.
pub const INVALID: usize = 6;

/// The index in [`KINDS`] of a request.
pub fn kind(work: &Work) -> usize {
    match work {
        Work::Read { .. } => 0,
        Work::Write { .. } => 1,
        Work::Flush => 2,
        Work::Discard(_) => 3,
        Work::WriteZeroes(_) => 4,
        Work::Id(_) => 5,
        Work::Unknown(_) | Work::Invalid(_) => INVALID,
    }
}

/// Options of an [`Export`].
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// A name for messages. Its first 20 bytes are the disk's serial number.
    pub name: String,
    /// The number of virtqueues, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// The guest's logical block size in bytes: a power of two from 512 to 32768.
    pub block_size: u32,
}

/// A device that front ends connect to.
#[derive(Debug)]
pub struct Export {
    device: Device,
    options: ExportOptions,
    statistics: Statistics,
    /// The channel to the connected front end.
    channel: Mutex<Option<Channel>>,
}

impl Export {
    /// Exports a device, for writing if it was opened so.
    ///
    /// # Panics
    ///
    /// If the number of queues or the block size is out of range.
    pub fn new(device: Device, options: ExportOptions) -> Arc<Self> {
        assert!((1..=MAX_QUEUES).contains(&options.queues));
        let block = options.block_size;
        assert!(block.is_power_of_two() && (512..=32768).contains(&block));
        Arc::new(Export {
            device,
            options,
            statistics: Statistics::new(&KINDS),
            channel: Mutex::default(),
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The device, when no server has the export any more.
    pub fn into_device(self) -> Device {
        self.device
    }

    /// Updates the size of the disk after its file has grown; see [`Device::refresh_size`]. If it
    /// has changed, the front end is notified.
    ///
    /// # Errors
    ///
    /// As [`Device::refresh_size`].
    pub fn refresh_size(&self) -> zebu::Result<bool> {
        let has_grown = self.device.refresh_size()?;
        if has_grown {
            self.notify_front_end();
        }
        Ok(has_grown)
    }

    /// Notifies the front end that the configuration has changed, if it has given a channel.
    pub(crate) fn notify_front_end(&self) {
        if let Some(channel) = &*self.channel() {
            channel.config_changed();
        }
    }

    /// Replaces the channel.
    pub(crate) fn set_channel(&self, channel: Option<Channel>) {
        *self.channel() = channel;
    }

    fn channel(&self) -> MutexGuard<'_, Option<Channel>> {
        self.channel.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Its name, for messages.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Counters of its requests.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    pub(crate) fn queues(&self) -> u16 {
        self.options.queues
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.options.block_size
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.device.is_writable()
    }

    /// Whole sectors of the disk.
    pub(crate) fn sectors(&self) -> u64 {
        self.device.size() / SECTOR
    }

    /// The serial number, padded with zeroes.
    pub(crate) fn id(&self) -> [u8; ID] {
        let mut id = [0; ID];
        for (to, from) in id.iter_mut().zip(self.options.name.bytes()) {
            *to = from;
        }
        id
    }

    /// The configuration space. `write_back`: the state of the write cache.
    pub(crate) fn config(&self, write_back: bool) -> Config {
        let cluster = self.device.top().cluster_size().unwrap_or(4096);
        Config {
            sectors: self.sectors(),
            block_size: self.options.block_size,
            unit: u32::try_from(cluster).unwrap_or(4096),
            queues: self.options.queues,
            write_back,
        }
    }
}
