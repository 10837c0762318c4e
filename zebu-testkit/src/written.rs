//! The formats whose images are written in place: the dimension "format of the written image" of all
//! generators. A format joins by its lines in [`WRITTEN`].

use std::ffi::OsString;
use std::sync::Arc;

use zebu::block::{Format, Layer};
use zebu::internal::new_image::CreateOptions;
use zebu::jobs::{PlanRequest, create_image};
use zebu::storage::{Queue, Storage};

use crate::Rng;

/// Images of a format that is written in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The format's name, as `-f` takes it.
    pub name: &'static str,
    /// Options of the image, as `-o` takes them; may be empty.
    pub options: &'static str,
    /// Bytes that are allocated together.
    pub block: u64,
    /// Whether QEMU checks such images.
    pub is_checked: bool,
    /// Whether the disk can get another size.
    pub is_resized: bool,
    /// Whether changes are in a log after its last writer was interrupted. QEMU only opens an image to
    /// read it when these were carried out, by [`Written::repair`].
    pub has_log: bool,
}

impl Written {
    pub const RAW: Written = Written {
        name: "raw",
        options: "",
        block: 512,
        is_checked: false,
        is_resized: true,
        has_log: false,
    };
    pub const QCOW2: Written = Written {
        name: "qcow2",
        options: "",
        block: 64 << 10,
        is_checked: true,
        is_resized: true,
        has_log: false,
    };
    const VDI: Written = Written {
        name: "vdi",
        options: "static=off",
        block: 1 << 20,
        is_checked: true,
        is_resized: false,
        has_log: false,
    };
    const VHDX: Written = Written {
        name: "vhdx",
        options: "subformat=dynamic,block_size=1M",
        block: 1 << 20,
        is_checked: true,
        is_resized: false,
        has_log: true,
    };
}

/// All of them.
pub const WRITTEN: &[Written] = &[
    Written::RAW,
    Written::QCOW2,
    Written::VDI,
    Written {
        options: "static=on",
        ..Written::VDI
    },
    Written::VHDX,
    Written {
        options: "subformat=fixed,block_size=1M",
        ..Written::VHDX
    },
];

impl Written {
    /// Those besides raw and qcow2, for which most generators have kinds of their own.
    pub fn others() -> Vec<Written> {
        let is_other = |written: &&Written| !["raw", "qcow2"].contains(&written.name);
        WRITTEN.iter().filter(is_other).copied().collect()
    }

    /// Images of a format that get space block by block.
    pub fn dynamic(name: &str) -> Written {
        let images = [Written::VDI, Written::VHDX];
        let found = images.into_iter().find(|written| written.name == name);
        found.expect("a format of dynamic images")
    }

    /// One of these.
    pub fn other(rng: &mut Rng) -> Written {
        rng.pick(&Written::others())
    }

    /// The format.
    pub fn format(&self) -> Format {
        self.name.parse().expect("a format")
    }

    /// The options of `create` for such an image.
    pub fn create(&self) -> Vec<&'static str> {
        match self.options {
            "" => vec!["create", "-q", "-f", self.name],
            options => vec!["create", "-q", "-f", self.name, "-o", options],
        }
    }

    /// The options of `check` that carry out a log, if there may be one.
    pub fn repair(&self) -> Option<[&'static str; 6]> {
        let repair = ["check", "-q", "-f", self.name, "-r", "all"];
        self.has_log.then_some(repair)
    }

    /// Makes `file` such an image of an empty disk.
    pub fn make(&self, queue: &Queue, file: Arc<dyn Storage>, size: u64) {
        let format = self.format();
        let texts: Vec<OsString> = match self.options {
            "" => Vec::new(),
            options => vec![options.into()],
        };
        let options = CreateOptions::parse(format, &texts).expect("options");
        let plan = format.plan(&PlanRequest {
            path: "x".as_ref(),
            size,
            options: &options.values(format),
            backing_id: None,
        });
        let plan = plan.unwrap_or_else(|e| panic!("{self:?}: {e}"));
        let made = queue.block_on(create_image(queue, &*plan, vec![file]));
        made.unwrap_or_else(|e| panic!("{self:?}: {e}"));
    }
    /// Checks an open image. After its last writer was interrupted there may be leaks.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self, queue: &Queue, layer: &Layer, interrupted: bool) -> Result<(), String> {
        let mut messages = Vec::new();
        let mut say = |message| messages.push(message);
        let report = queue.block_on(layer.check(queue, &mut say));
        let Some(report) = report.map_err(|e| format!("check: {e}"))? else {
            return Ok(());
        };
        let is_allowed = interrupted && messages.iter().all(|message| is_leak(message));
        match report.check_errors == 0 && (report.corruptions + report.leaks == 0 || is_allowed) {
            true => Ok(()),
            false => Err(format!("check: {report:?}\n{}", messages.join("\n"))),
        }
    }
}

/// Whether a message of a check, of zebu or of QEMU, says only that space is lost: of a VDI, that the
/// header counts more blocks than there are.
pub fn is_leak(message: &str) -> bool {
    let Some(counts) = message.strip_prefix("ERROR: allocated blocks mismatch, is ") else {
        return message.starts_with("Leaked ");
    };
    let mut counts = counts
        .split(", should be ")
        .map(|n| n.trim().parse::<u32>());
    match (counts.next(), counts.next()) {
        (Some(Ok(is)), Some(Ok(said))) => is < said,
        _ => false,
    }
}
