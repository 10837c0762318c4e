//! Opens a VMDK from memory and reads everything, as `open_map_read` does with qcow2 images, and
//! checks it.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use zebu::block::{Device, OpenOptions};
use zebu::storage::Memory;
use zebu_fuzz::hostile_images;

fuzz_target!(|data: &[u8]| zebu_fuzz::with_queue(|queue| {
    hostile_images::exercise(queue, data);
    let options = OpenOptions::default().no_backing(true);
    let storage = Arc::new(Memory::new(data.to_vec()));
    if let Ok(device) = Device::from_storage(queue, storage, &options) {
        let _ = queue.block_on(device.top().check(queue, &mut |_| {}));
    }
}));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    zebu_fuzz::mutate_vmdk(data, size, max_size, seed)
});
