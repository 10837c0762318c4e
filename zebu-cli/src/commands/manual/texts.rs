//! What the man pages tell beyond options and examples.

/// A word and what it means.
pub type Entry = (&'static str, &'static str);

/// The exit status of a command.
pub fn exit_status(command: &str) -> &'static [Entry] {
    match command {
        "backup verify" => &[
            ("0", "All files are as they were written."),
            ("1", "The set could not be verified."),
            ("2", "A file is missing or damaged."),
        ],
        "check" => &[
            ("0", "The image has no errors, or they were repaired."),
            ("1", "The check could not be done."),
            ("2", "The image has errors."),
            ("3", "The image has leaked clusters, and no errors."),
            ("63", "Images of this format cannot be checked."),
        ],
        "compare" => &[
            ("0", "The images are the same."),
            ("1", "The images differ."),
            ("2", "The comparison could not be done."),
            ("3", "The tables of an image cannot be read."),
            ("4", "The data of an image cannot be read."),
        ],
        "import" => &[
            ("0", "The image is in the target."),
            ("1", "The arguments are wrong, or any other error."),
            ("2", "The image is refused."),
            ("3", "The source has another checksum."),
            ("4", "A limit was exceeded."),
            ("5", "The source could not be read."),
            ("6", "The target could not be written."),
            ("128 + n", "Signal n stopped it."),
        ],
        "nbd" | "vhost-user-blk" => &[
            (
                "0",
                "The server was stopped by SIGTERM, SIGINT or SIGHUP, or its last client left.",
            ),
            (
                "1",
                "The server could not start, or data could not be made durable.",
            ),
        ],
        _ => &[
            ("0", "Success."),
            ("1", "Failure; standard error says why."),
        ],
    }
}

/// The files of a command.
pub fn files(command: &str) -> &'static [Entry] {
    match command {
        "backup" => &[
            (
                "DIR/manifest.json",
                "The points in time, with sizes and SHA-256 of the files.",
            ),
            (
                "DIR/DISK.N.qcow2",
                "The disk as it was at point N: what has changed since the point before.",
            ),
            ("DIR/lock", "Locked by the program that changes the set."),
        ],
        "convert" | "import" => &[(
            "DIR of --spill",
            "A file without a name in it, for parts of a stream that come before it is known where they \
             belong.",
        )],
        "nbd" => &[
            (
                "DIR of --tls-certificates",
                "server-cert.pem, server-key.pem and ca-cert.pem, which signs the certificates of clients.",
            ),
            (
                "FILE of --tls-psk",
                "Lines USER:KEY, as psktool writes them.",
            ),
        ],
        _ => &[],
    }
}

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
