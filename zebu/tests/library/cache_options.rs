//! Options of the caches, and the images that they are for.

use std::ffi::OsString;
use std::path::Path;

use zebu::block::{Device, OpenOptions};
use zebu::internal::new_image::Creation;
use zebu::names::Source;
use zebu::storage::{Queue, QueueOptions};

/// A slice is a part of a cluster. One that the top image has room for may be too large for an image below.
#[test]
fn the_slice_of_the_top_image_need_not_fit_the_image_below() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let [base, top] = ["base", "top"].map(|name| folder.path().join(name));
    let backing = format!("backing_file={}", base.display());
    for (name, options) in [
        (&base, vec!["cluster_size=1024"]),
        (&top, vec![backing.as_str(), "backing_fmt=qcow2"]),
    ] {
        let options: Vec<OsString> = options.into_iter().map(OsString::from).collect();
        let creation = Creation::new(name.as_os_str(), "qcow2", &options).unwrap();
        creation.create(&queue, Some(1 << 20)).unwrap();
    }
    let open = |name: &Path, bytes| {
        let options = OpenOptions::default().l2_cache_entry_size(Some(bytes));
        Device::open(&queue, &Source::Name(name.into()), &options)
    };
    assert!(open(&base, 2048).is_err());
    let device = open(&top, 2048).unwrap();
    let mut bytes = vec![1; 4096];
    device.read_blocking(&queue, 0, &mut bytes).unwrap();
    assert_eq!(bytes, vec![0; 4096]);
}
