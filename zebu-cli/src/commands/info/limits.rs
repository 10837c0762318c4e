//! "Block limits" (`--limits`): what requests to an image, and to its file, must be like.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use zebu::block::Layer;
use zebu::storage::Storage;

use crate::output::json::{Map, Value};

/// What QEMU's programs say of every image: their requests have at most so many segments.
const MAX_SEGMENTS: u64 = 1024;
/// The alignment of memory that is best: a page.
const PAGE: u64 = 4096;
const SECTOR: u64 = 512;

/// Limits by their names, in QEMU's order.
pub struct Limits(Vec<(&'static str, u64)>);

/// What they are made of.
#[derive(Default)]
struct Parts {
    write_zeroes: Option<u64>,
    request: u64,
    memory: u64,
    max_transfer: Option<u64>,
    discard: Option<u64>,
    max_segments: Option<u64>,
}

impl Limits {
    /// Those of an image.
    pub fn of_image(layer: &Layer) -> Limits {
        let file = parts_of(layer.file());
        let mut parts = Parts {
            request: 1,
            memory: file.memory,
            ..Parts::default()
        };
        if layer.as_raw().is_some() {
            parts = Parts {
                write_zeroes: None,
                request: match layer.file().is_device() {
                    true => file.request.max(SECTOR),
                    false => file.request,
                },
                ..file
            };
        } else if let Some(image) = layer.as_qcow2() {
            parts.write_zeroes = Some(image.geometry().subcluster_size());
            parts.discard = Some(image.cluster_size());
        } else {
            match layer.format().name() {
                "vmdk" => parts.write_zeroes = layer.cluster_size(),
                "vhdx" => parts.request = SECTOR,
                _ => {}
            }
        }
        parts.into_limits()
    }

    /// Those of a file.
    pub fn of_file(file: &dyn Storage) -> Limits {
        parts_of(file).into_limits()
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        let map = Map::new();
        let add = |map: Map, (name, value): &(&'static str, u64)| map.with(name, *value);
        self.0.iter().fold(map, add).into()
    }
}

impl Parts {
    fn into_limits(self) -> Limits {
        let all = [
            ("write-zeroes-alignment", self.write_zeroes),
            ("request-alignment", Some(self.request)),
            ("min-mem-alignment", Some(self.memory)),
            ("max-hw-transfer", self.max_transfer),
            ("discard-alignment", self.discard),
            ("opt-mem-alignment", Some(PAGE.max(self.memory))),
            ("max-iov", Some(MAX_SEGMENTS)),
            ("max-hw-iov", self.max_segments),
        ];
        let known = all
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        Limits(known.collect())
    }
}

fn parts_of(file: &dyn Storage) -> Parts {
    let alignment = file.alignment();
    let mut parts = Parts {
        request: alignment.offset as u64,
        memory: alignment.memory as u64,
        ..Parts::default()
    };
    if file.is_device()
        && let Some(queue) = queue_of(file.path())
    {
        let number = |name: &str| {
            let text = fs::read_to_string(queue.join(name)).ok()?;
            text.trim().parse::<u64>().ok().filter(|number| *number > 0)
        };
        parts.write_zeroes = number("logical_block_size");
        parts.max_transfer = number("max_sectors_kb").map(|kib| kib << 10);
        parts.discard = number("discard_granularity");
        parts.max_segments = number("max_segments");
    }
    parts
}

/// The folder in which the kernel describes the requests of a block device, or of the one that a partition
/// is in.
fn queue_of(path: &Path) -> Option<PathBuf> {
    let device = fs::metadata(path).ok()?.rdev();
    let (major, minor) = (libc::major(device), libc::minor(device));
    let folder = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let own = folder.join("queue");
    match own.is_dir() {
        true => Some(own),
        false => Some(folder.parent()?.join("queue")),
    }
}
