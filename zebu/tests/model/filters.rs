//! Filters at any place of a chain: over the image, over its file, over the backing file and over the file
//! of that.

use std::path::Path;

use zebu::block::{Format, ThrottleGroup, ThrottleGroups, ThrottleLimits};

use zebu::jobs::Preallocation;

use crate::common::Rng;
use crate::common::peer::text;
use crate::setup::Setup;

/// Filters over nodes, the uppermost first.
#[derive(Clone, Debug, Default)]
pub struct Filters {
    over: Vec<&'static str>,
    over_file: Vec<&'static str>,
    /// The same for the backing file, which is put below the open image then.
    backing: Option<(Vec<&'static str>, Vec<&'static str>)>,
    /// The step of `preallocate`.
    step: u64,
}

impl Filters {
    pub fn random(rng: &mut Rng, setup: &Setup) -> Filters {
        if rng.one_in(2) {
            return Filters::default();
        }
        // (A read through copy-on-read over compress fails where a cluster is allocated and a part of it
        // has no content, as in QEMU.)
        let is_allocated =
            setup.options.preallocation != Preallocation::Off || setup.options.extended_l2;
        let can_compress = setup.compresses() && !is_allocated;
        let below = setup.backing.filter(|_| rng.one_in(2));
        Filters {
            over: over_image(rng, can_compress, true),
            over_file: over_file(rng),
            backing: below.map(|(_, format)| {
                let is_qcow2 = format == Format::QCOW2;
                (over_image(rng, is_qcow2, false), over_file(rng))
            }),
            step: rng.below(3) << 18,
        }
    }

    /// Whether reads allocate clusters.
    pub fn copies_on_read(&self) -> bool {
        self.over.contains(&"copy-on-read")
    }

    /// Whether writes are refused where clusters are allocated.
    pub fn compresses(&self) -> bool {
        self.over.contains(&"compress")
    }

    /// Whether the backing file has some.
    pub fn are_below(&self) -> bool {
        self.backing.is_some()
    }

    /// The name of the image below these filters.
    pub fn name(&self, setup: &Setup, folder: &Path, write: bool) -> String {
        let image = setup.image(folder);
        let needs_writing = |filter: &&'static str| write || *filter != "copy-on-read";
        let over: Vec<_> = self.over.iter().copied().filter(needs_writing).collect();
        let node = self.node((&over, &self.over_file), setup.format, &image);
        format!("json:{node}")
    }

    /// The description of the backing file, if there is one.
    pub fn backing(&self, setup: &Setup, folder: &Path) -> Option<String> {
        let (_, format) = setup.backing?;
        let image = folder.join(format!("backing.{}", format.name()));
        let (over, over_file) = self.backing.clone().unwrap_or_default();
        Some(self.node((&over, &over_file), format, &image))
    }

    fn node(
        &self,
        (over, over_file): (&[&'static str], &[&'static str]),
        format: Format,
        image: &Path,
    ) -> String {
        let mut node = format!(r#"{{"driver":"file","filename":"{}"}}"#, text(image));
        for filter in over_file.iter().rev() {
            node = self.wrap(filter, &node);
        }
        node = format!(r#"{{"driver":"{}","file":{node}}}"#, format.name());
        for filter in over.iter().rev() {
            node = self.wrap(filter, &node);
        }
        node
    }

    fn wrap(&self, filter: &str, node: &str) -> String {
        let (options, child) = match filter {
            "throttle" => (r#","throttle-group":"g""#.into(), "file"),
            "preallocate" => {
                let step = self.step;
                let options = format!(r#","prealloc-align":65536,"prealloc-size":{step}"#);
                (options, "file")
            }
            "blkdebug" => (String::new(), "image"),
            _ => (String::new(), "file"),
        };
        format!(r#"{{"driver":"{filter}"{options},"{child}":{node}}}"#)
    }
}

fn over_image(rng: &mut Rng, can_compress: bool, is_top: bool) -> Vec<&'static str> {
    let mut over: Vec<&'static str> = Vec::new();
    while over.len() < 3 && !rng.one_in(2) {
        let filter = rng.pick(&["throttle", "compress", "copy-on-read"]);
        // Compressed data pass through the others.
        let fits = match filter {
            "compress" => can_compress && !over.contains(&filter),
            "copy-on-read" => is_top && !over.contains(&filter),
            _ => true,
        };
        if fits {
            over.push(filter);
        }
    }
    over
}

fn over_file(rng: &mut Rng) -> Vec<&'static str> {
    let mut over = Vec::new();
    while over.len() < 3 && rng.one_in(3) {
        over.push(rng.pick(&["throttle", "preallocate", "blkdebug"]));
    }
    over
}

/// Limits by which some requests wait for a moment.
pub fn throttle_groups() -> ThrottleGroups {
    let mut limits = ThrottleLimits::default();
    limits.set("iops-total", 20_000);
    limits.set("bps-write", 200 << 20);
    let group = ThrottleGroup::new(limits).expect("limits");
    ThrottleGroups::from([("g".to_string(), group)])
}
