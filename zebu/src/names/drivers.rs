//! The drivers of files that QEMU has.

/// Whether QEMU has a driver of this name that is no image format.
pub(super) fn is_protocol(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "file",
        "host_device",
        "host_cdrom",
        "nbd",
        "null-co",
        "null-aio",
        "blkdebug",
        #[cfg(feature = "http")]
        "http",
        #[cfg(feature = "http")]
        "https",
        #[cfg(feature = "object-store")]
        "s3",
        #[cfg(feature = "object-store")]
        "gs",
        #[cfg(feature = "object-store")]
        "az",
        #[cfg(feature = "rbd")]
        "rbd",
        #[cfg(feature = "ssh")]
        "ssh",
    ];
    NAMES.contains(&name)
}

/// Drivers that QEMU has and zebu has not.
const LACKING: &[&str] = &[
    "blklogwrites",
    "blkreplay",
    "blkverify",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "ftp",
    "ftps",
    "gluster",
    #[cfg(not(feature = "http"))]
    "http",
    #[cfg(not(feature = "http"))]
    "https",
    "io_uring",
    "iscsi",
    "iser",
    "luks",
    "nfs",
    "nvme",
    "nvme-io_uring",
    "preallocate",
    "quorum",
    #[cfg(not(feature = "rbd"))]
    "rbd",
    "replication",
    "snapshot-access",
    #[cfg(not(feature = "ssh"))]
    "ssh",
    "throttle",
    "virtio-blk-vfio-pci",
    "virtio-blk-vhost-user",
    "virtio-blk-vhost-vdpa",
    "vvfat",
];

/// Why no image or file of this driver is opened.
pub(super) fn unknown_driver(name: &str) -> String {
    match LACKING.contains(&name) {
        true => format!("Driver '{name}' is not supported by zebu"),
        false => format!("Unknown driver '{name}'"),
    }
}
