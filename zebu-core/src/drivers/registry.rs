//! All formats: raw and qcow2, and those that are registered (`registered.rs`).

use super::format::{Driver, Format};
use super::{qcow2, raw};
use crate::registered::linked;
use crate::{Error, printable};

linked! {
    /// Formats of other crates, in the order of probing.
    fn registered() -> &'static [&'static [&'static Driver]] = __zebu_core_0_1_formats
}

/// All formats, in the order of probing: what no other one recognizes is raw.
fn drivers() -> impl Iterator<Item = &'static Driver> {
    let others = registered().iter().copied().flatten().copied();
    [&qcow2::DRIVER]
        .into_iter()
        .chain(others)
        .chain([&raw::DRIVER])
}

/// Formats of QEMU that zebu does not create.
const OTHER_FORMATS: [&str; 4] = ["qcow", "qed", "parallels", "luks"];
/// Formats that cannot be created.
pub const READ_ONLY_FORMATS: [&str; 3] = ["bochs", "cloop", "dmg"];

impl Format {
    /// The bytes of the disk, as they are.
    pub const RAW: Format = Format::of(&raw::DRIVER);
    /// qcow2, versions 2 and 3.
    pub const QCOW2: Format = Format::of(&qcow2::DRIVER);

    /// All of them.
    pub fn all() -> impl Iterator<Item = Format> {
        drivers().map(Format::of)
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Format> {
        Format::all().find(|format| format.name() == name)
    }
}

/// Whether QEMU calls files of this machine so, as if that was a format.
fn is_local_file(name: &str) -> bool {
    ["file", "host_device", "host_cdrom"].contains(&name)
}

impl std::str::FromStr for Format {
    type Err = Error;
    /// The format of this name. QEMU's names for a file of this machine without a format, `file`,
    /// `host_device` and `host_cdrom`, mean raw.
    fn from_str(name: &str) -> Result<Self, Error> {
        if is_local_file(name) {
            return Ok(Format::RAW);
        }
        Format::named(name).ok_or_else(|| {
            Error::Refused(format!("Unknown driver '{}'", printable(name.as_bytes())))
        })
    }
}

/// Whether QEMU has a format of this name.
pub fn is_format(name: &str) -> bool {
    name.parse::<Format>().is_ok()
        || OTHER_FORMATS.contains(&name)
        || READ_ONLY_FORMATS.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_one_driver_accepts_any_content() {
        for format in Format::all() {
            assert_eq!(format.name().parse::<Format>().ok(), Some(format));
            let same = Format::all().filter(|other| *other == format);
            assert_eq!(same.count(), 1);
        }
        let rest = drivers().filter(|driver| driver.probe.is_none());
        assert_eq!(rest.count(), 1);
    }
}
