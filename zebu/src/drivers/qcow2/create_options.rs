//! The options of new qcow2 images.

use crate::drivers::{CreateOption, OptionKind};

/// In the order in which they are shown.
pub(super) static CREATE_OPTIONS: [CreateOption; 24] = [
    CreateOption::new(
        "encryption",
        OptionKind::Switch,
        "Encrypt the image with format 'aes'. (Deprecated in favor of encrypt.format=aes)",
    ),
    CreateOption::new(
        "encrypt.format",
        OptionKind::Text,
        "Encrypt the image, format choices: 'aes', 'luks'",
    ),
    CreateOption::new(
        "encrypt.key-secret",
        OptionKind::Text,
        "ID of secret providing qcow AES key or LUKS passphrase",
    ),
    CreateOption::new(
        "encrypt.cipher-alg",
        OptionKind::Text,
        "Name of encryption cipher algorithm",
    ),
    CreateOption::new(
        "encrypt.cipher-mode",
        OptionKind::Text,
        "Name of encryption cipher mode",
    ),
    CreateOption::new(
        "encrypt.ivgen-alg",
        OptionKind::Text,
        "Name of IV generator algorithm",
    ),
    CreateOption::new(
        "encrypt.ivgen-hash-alg",
        OptionKind::Text,
        "Name of IV generator hash algorithm",
    ),
    CreateOption::new(
        "encrypt.hash-alg",
        OptionKind::Text,
        "Name of encryption hash algorithm",
    ),
    CreateOption::new(
        "encrypt.iter-time",
        OptionKind::Number,
        "Time to spend in PBKDF in milliseconds",
    ),
    CreateOption::new("cluster_size", OptionKind::Size, "qcow2 cluster size").or("65536"),
    CreateOption::new("extended_l2", OptionKind::Switch, "Extended L2 tables").or("off"),
    CreateOption::new(
        "preallocation",
        OptionKind::Text,
        "Preallocation mode (allowed values: off, metadata, falloc, full)",
    ),
    CreateOption::new(
        "compression_type",
        OptionKind::Text,
        "Compression method used for image cluster compression",
    )
    .or("zlib"),
    CreateOption::new(
        "keep_data_file",
        OptionKind::Switch,
        "Assume the external data file already exists and do not overwrite it",
    ),
    CreateOption::SIZE,
    CreateOption::new(
        "compat",
        OptionKind::Text,
        "Compatibility level (v2 [0.10] or v3 [1.1])",
    ),
    CreateOption::new(
        "backing_file",
        OptionKind::Text,
        "File name of a base image",
    ),
    CreateOption::new(
        "backing_fmt",
        OptionKind::Text,
        "Image format of the base image",
    ),
    CreateOption::new(
        "data_file",
        OptionKind::Text,
        "File name of an external data file",
    ),
    CreateOption::new(
        "data_file_raw",
        OptionKind::Switch,
        "The external data file must stay valid as a raw image",
    ),
    CreateOption::new(
        "lazy_refcounts",
        OptionKind::Switch,
        "Postpone refcount updates",
    )
    .or("off"),
    CreateOption::new(
        "refcount_bits",
        OptionKind::Number,
        "Width of a reference count entry in bits",
    )
    .or("16"),
    CreateOption::NOCOW,
    CreateOption::EXTENT_SIZE_HINT,
];
