//! The options of new qcow2 images.

use std::ffi::OsStr;

use super::{CreateQcow2, NewBacking, NewDataFile, NewEncryption};
use crate::Result;
use crate::drivers::qcow2::structures::Compression;
use crate::drivers::{CreateOption, CreateValues, OptionKind, Preallocation, encryption, refused};

/// In the order in which they are shown.
pub(in super::super) static CREATE_OPTIONS: [CreateOption; 24] = [
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

/// How the image is encrypted, in QEMU's words if it cannot be.
fn encryption_of(options: &CreateValues) -> Result<Option<NewEncryption>> {
    let is_on = options.is_on("encryption");
    let format = match options.word("encrypt.format") {
        Some(_) if options.get("encryption").is_some() => {
            let why = "'encrypt.format' and its alias 'encryption' can't be used at the same time";
            return Err(refused(why));
        }
        None if is_on => "aes",
        Some(format) => format,
        None => {
            let is_given = |name: &str| name.starts_with("encrypt.") && options.get(name).is_some();
            return match CREATE_OPTIONS.iter().any(|option| is_given(option.name)) {
                true => Err(refused("Parameter 'encrypt.format' is missing")),
                false => Ok(None),
            };
        }
    };
    match (format, encryption::find()) {
        ("luks", Some(encryption)) => Ok(Some(NewEncryption(encryption.plan(options)?))),
        ("luks", None) => Err(refused("Encryption is not part of this version")),
        ("aes", _) => Err(refused(
            "Images with the encryption 'aes' are not made, since it is not safe: use encrypt.format=luks",
        )),
        (other, _) => {
            let why = format!("Parameter 'format' does not accept value '{other}'");
            Err(refused(why))
        }
    }
}

impl CreateQcow2 {
    /// The image that these options mean. Only [`CreateQcow2::check`] tells whether they go together.
    ///
    /// # Errors
    /// [`Error::Refused`](crate::Error::Refused), in QEMU's words.
    pub fn with_options(size: u64, options: &CreateValues) -> Result<CreateQcow2> {
        let wrong = |parameter: &str, value: &str| {
            refused(format!(
                "Parameter '{parameter}' does not accept value '{value}'"
            ))
        };
        let version = match options.word("compat") {
            None | Some("1.1" | "v3") => 3,
            Some("0.10" | "v2") => 2,
            Some(other) => return Err(wrong("version", other)),
        };
        let name = |key| options.text(key).map(OsStr::to_owned);
        let backing_format = options.word("backing_fmt").map(str::to_string);
        let preallocation = match options.word("preallocation") {
            None => Preallocation::Off,
            Some(name) => {
                Preallocation::from_name(name).ok_or_else(|| wrong("preallocation", name))?
            }
        };
        let compression = match options.word("compression_type") {
            None | Some("zlib") => Compression::Zlib,
            Some("zstd") => Compression::Zstd,
            Some(other) => return Err(wrong("compression-type", other)),
        };
        let encryption = encryption_of(options)?;
        let cluster_size = options.number("cluster_size").unwrap_or(65536);
        let refcount_bits = options.number("refcount_bits").unwrap_or(16);
        let backing =
            name("backing_file").map(|name| NewBacking::new(name).format(backing_format.clone()));
        let data_file = name("data_file").map(|name| {
            let file = NewDataFile::new(name).raw(options.is_on("data_file_raw"));
            file.keep(options.is_on("keep_data_file"))
        });
        let image = CreateQcow2::default()
            .size(size)
            .version(version)
            // What is no power of two is none that exists.
            .cluster_bits(log2(cluster_size))
            .refcount_order(log2(refcount_bits))
            .extended_l2(options.is_on("extended_l2"))
            .lazy_refcounts(options.is_on("lazy_refcounts"))
            .compression(compression)
            .preallocation(preallocation)
            .backing(backing)
            .data_file(data_file)
            .encryption(encryption);
        if image.backing.is_none() && backing_format.is_some() {
            return Err(refused(
                "Backing format cannot be used without backing file",
            ));
        }
        if image.data_file.is_none() && options.is_on("data_file_raw") {
            return Err(refused("data-file-raw requires data-file"));
        }
        if image.data_file.is_none() && options.is_on("keep_data_file") {
            return Err(refused(
                "Must not use 'keep_data_file=on' without 'data_file'",
            ));
        }
        Ok(image)
    }
}

/// The power of two; 64, which is out of every range, if it is none.
pub fn log2(value: u64) -> u32 {
    match value.is_power_of_two() {
        true => value.trailing_zeros(),
        false => 64,
    }
}
