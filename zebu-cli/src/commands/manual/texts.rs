//! What the man pages tell beyond what the commands know of themselves.

use crate::commands::command::Entry;

/// The environment of all commands, in the page of the program.
pub const ENVIRONMENT: &[Entry] = &[
    (
        "http_proxy, https_proxy, all_proxy, no_proxy",
        "Proxies for images on web servers and in object stores, as with curl(1).",
    ),
    (
        "NO_COLOR",
        "If it is not empty, reports on a terminal have no colours.",
    ),
    (
        "SSL_CERT_FILE, SSL_CERT_DIR",
        "Certificates of the authorities that are trusted, instead of the system's.",
    ),
    (
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL",
        "Credentials and place of objects named s3://BUCKET/KEY. docs/remote.md of the project has the others.",
    ),
    (
        "GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT",
        "Credentials for objects named gs://BUCKET/KEY.",
    ),
    (
        "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY",
        "Credentials for objects named az://CONTAINER/BLOB; docs/remote.md has the others.",
    ),
    (
        "ZEBU_SSH",
        "The program for ssh://HOST/PATH instead of ssh(1).",
    ),
    (
        "CEPH_CONF",
        "The configuration of Ceph for rbd:POOL/IMAGE; /etc/ceph/ceph.conf or ~/.ceph/ceph.conf without it.",
    ),
    (
        "TMPDIR",
        "The folder of temporary overlays (-s); /var/tmp without it.",
    ),
    (
        "LISTEN_FDS, LISTEN_PID",
        "Sockets that the service manager passes to a server: see sd_listen_fds(3).",
    ),
];

/// How images are named, in the page of the program.
pub const NAMES: &[Entry] = &[
    (
        "PATH",
        "A file or a block device. ./a:b is a path with a colon.",
    ),
    ("-", "Standard input or output, for convert and import."),
    (
        "nbd://HOST[:PORT]/EXPORT, nbd+unix:///EXPORT?socket=PATH, nbds://...",
        "An export of an NBD server.",
    ),
    (
        "http://..., https://...",
        "An object on a web server, which is only read.",
    ),
    (
        "s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/BLOB",
        "An object in a store. Only convert writes one.",
    ),
    (
        "ssh://[USER@]HOST[:PORT]/PATH",
        "A file on an SSH server, by the program ssh(1).",
    ),
    (
        "rbd:POOL/IMAGE[@SNAPSHOT][:OPTION=VALUE...]",
        "An image in Ceph. The static programs of the packages cannot open it.",
    ),
    (
        "json:{...}, driver=FORMAT,file.filename=PATH,...",
        "Options as QEMU has them; the latter with --image-opts.",
    ),
    (
        "FILE.ova, FILE.ovf",
        "An appliance; convert takes the number of its disk with --disk.",
    ),
];
