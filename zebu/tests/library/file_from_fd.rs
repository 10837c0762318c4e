//! Devices over descriptors that the caller has opened ([`zebu::storage::file_from_fd`]).
//!
//! Guards against a descriptor that is used in a way that it was not opened for.

use std::fs::OpenOptions as File;
use std::os::fd::OwnedFd;

use zebu::block::{Device, OpenOptions};
use zebu::storage::{CacheMode, LockRequest, Queue, QueueOptions, file_from_fd};

#[test]
fn a_device_over_a_descriptor() {
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, [7; 4096]).unwrap();
    let open = || OwnedFd::from(File::new().read(true).write(true).open(&path).unwrap());
    let storage = file_from_fd(open(), "fd 3", CacheMode::WriteBack).unwrap();
    let file = storage.host_file().unwrap();
    file.lock(LockRequest::RAW_WRITE).unwrap();
    let options = OpenOptions::default()
        .format(Some("raw".parse().unwrap()))
        .write(true);
    let device = Device::from_storage(&queue, storage, &options).unwrap();
    device.write_blocking(&queue, 512, &[1; 512]).unwrap();
    let mut read = [0; 1024];
    device.read_blocking(&queue, 0, &mut read).unwrap();
    assert_eq!(read, *[[7; 512], [1; 512]].as_flattened());
    queue.block_on(device.close(&queue)).unwrap();
    assert_eq!(std::fs::read(&path).unwrap()[512..1024], [1; 512]);

    // A descriptor without `O_DIRECT`, and a directory.
    assert!(file_from_fd(open(), "fd 3", CacheMode::None).is_err());
    let directory = std::fs::File::open(directory.path()).unwrap();
    assert!(file_from_fd(directory.into(), "fd 3", CacheMode::WriteBack).is_err());
}
