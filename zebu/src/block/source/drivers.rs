//! The drivers of files, by QEMU's names.

#[cfg(feature = "nbd")]
use super::NbdSpec;
use super::{BlkdebugSpec, ImageSpec, NullSpec};

/// What a file is.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum FileDriver {
    /// A regular file or a device: it was named without a driver.
    #[default]
    Any,
    /// A regular file (`file`).
    File,
    /// A device (`host_device`).
    HostDevice,
    /// A device as well (`host_cdrom`).
    HostCdrom,
    /// An NBD server's export (`nbd`).
    #[cfg(feature = "nbd")]
    Nbd(Box<NbdSpec>),
    /// Nothing at all (`null-co`, `null-aio`).
    Null(NullSpec),
    /// A file that fails on purpose (`blkdebug`).
    Blkdebug(Box<BlkdebugSpec>),
    /// The disk of an image (`raw`, `qcow2`), whose format is known.
    Image(Box<ImageSpec>),
}

impl FileDriver {
    /// QEMU's name: `file`, `host_device`, `nbd`, …
    pub fn name(&self) -> &'static str {
        match self {
            FileDriver::Any | FileDriver::File => "file",
            FileDriver::HostDevice => "host_device",
            FileDriver::HostCdrom => "host_cdrom",
            #[cfg(feature = "nbd")]
            FileDriver::Nbd(_) => "nbd",
            FileDriver::Null(null) => null.driver,
            FileDriver::Blkdebug(_) => "blkdebug",
            FileDriver::Image(image) => image.format_name(),
        }
    }

    /// Whether QEMU has a driver of this name that is no image format.
    pub(super) fn is_protocol(name: &str) -> bool {
        const NAMES: [&str; 7] = [
            "file",
            "host_device",
            "host_cdrom",
            "nbd",
            "null-co",
            "null-aio",
            "blkdebug",
        ];
        NAMES.contains(&name)
    }
}
/// Drivers that QEMU has and zebu has not.
const LACKING: &[&str] = &[
    "blklogwrites",
    "blkreplay",
    "blkverify",
    "bochs",
    "cloop",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "dmg",
    "ftp",
    "ftps",
    "gluster",
    "http",
    "https",
    "io_uring",
    "iscsi",
    "iser",
    "luks",
    "nfs",
    "nvme",
    "nvme-io_uring",
    "parallels",
    "preallocate",
    "qcow",
    "qed",
    "quorum",
    "rbd",
    "replication",
    "snapshot-access",
    "ssh",
    "throttle",
    "vdi",
    "vhdx",
    "virtio-blk-vfio-pci",
    "virtio-blk-vhost-user",
    "virtio-blk-vhost-vdpa",
    "vmdk",
    "vpc",
    "vvfat",
];

/// Why no image or file of this driver is opened.
pub(super) fn unknown_driver(name: &str) -> String {
    match LACKING.contains(&name) {
        true => format!("Driver '{name}' is not supported by zebu"),
        false => format!("Unknown driver '{name}'"),
    }
}
