//! zebu behind the block traits of virtual machine monitors. Each module is an adapter to be copied
//! into a fork of the monitor, where its `shape` is replaced by the monitor's own trait.
//!
//! | module | monitor | trait | memory of requests |
//! |---|---|---|---|
//! | [`cloud_hypervisor`] | cloud-hypervisor | `AsyncIo` | the guest's, which the operation owns |
//! | [`crosvm`] | crosvm | `AsyncDisk`, `DiskFile` | the guest's, by a reference count |
//! | [`openvmm`] | OpenVMM | `DiskIo` | copied |
//! | [`imago`] | libkrun | `imago::Storage` (of the published crate) | copied |
//!
//! All use [`Remote`]: its threads do the I/O, and its requests are futures that any executor
//! polls. A request goes on if its future is dropped. So its memory must be its own: where a trait
//! only lends the guest's memory to a future, data are copied.
#![warn(missing_docs)]

pub mod cloud_hypervisor;
pub mod crosvm;
pub mod imago;
pub mod openvmm;

use std::io;

use zebu::{Device, OpenOptions, Queue, QueueOptions, Remote, SharedDevice, Source};

/// Opens an image, whose requests `threads` threads execute.
///
/// # Errors
/// If it cannot be opened.
pub fn open(name: &str, options: &OpenOptions, threads: usize) -> zebu::Result<Remote> {
    let queue = Queue::new(QueueOptions::default())?;
    let device = Device::open(&queue, &Source::Name(name.into()), options)?;
    let device = SharedDevice::new(device);
    Ok(Remote::new(device, threads, &QueueOptions::default())?)
}

/// The error for interfaces of the standard library.
fn io_error(error: zebu::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use zebu::jobs::{CreateQcow2, create_qcow2};
    use zebu::storage::{OpenFile, open_file};

    use super::*;

    pub const SIZE: u64 = 8 << 20;

    /// A new qcow2 image of [`SIZE`] bytes.
    pub fn new_image(path: &Path) -> Remote {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let file = open_file(path, OpenFile::default().write(true).create(true)).unwrap();
        let image = CreateQcow2::default().size(SIZE);
        queue
            .block_on(create_qcow2(&queue, &*file, None, &image, |_| {}))
            .unwrap();
        drop(file);
        let options = OpenOptions::default().write(true).discard(Some(true));
        open(path.to_str().unwrap(), &options, 2).unwrap()
    }

    /// Bytes of a pattern that no other number has.
    pub fn pattern(number: usize, length: usize) -> Vec<u8> {
        let byte = |at: usize| (at * 31 + number * 7 + at / 256) as u8;
        (0..length).map(byte).collect()
    }
}
