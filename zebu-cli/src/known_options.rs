//! The options that a format knows (`-o`): which there are, what their values
//! are, how they are told.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;

use zebu::block::Format;

use crate::create_options::CreateOptions;
use crate::file_name::as_value;
use crate::size;

/// What a value of an option is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Size,
    Number,
    Switch,
}

/// An option, its kind, its value if it is not given, and where it is shown.
pub struct Known {
    /// What it is called.
    pub name: &'static str,
    kind: Kind,
    default: Option<&'static str>,
    help: &'static str,
}

const fn known(name: &'static str, kind: Kind, help: &'static str) -> Known {
    Known {
        name,
        kind,
        default: None,
        help,
    }
}

const fn with_default(mut option: Known, default: &'static str) -> Known {
    option.default = Some(default);
    option
}

const SIZE: Known = known("size", Kind::Size, "Virtual disk size");
const NOCOW: Known = known(
    "nocow",
    Kind::Switch,
    "Turn off copy-on-write (valid only on btrfs)",
);
const EXTENT_SIZE_HINT: Known = known(
    "extent_size_hint",
    Kind::Size,
    "Extent size hint for the image file, 0 to disable",
);

/// The options of raw images, in the order in which they are shown.
const RAW: [Known; 4] = [
    SIZE,
    known(
        "preallocation",
        Kind::Text,
        "Preallocation mode (allowed values: off, falloc, full)",
    ),
    NOCOW,
    EXTENT_SIZE_HINT,
];

/// The options of qcow2 images, alike.
const QCOW2: [Known; 23] = [
    known(
        "encryption",
        Kind::Switch,
        "Encrypt the image with format 'aes'. (Deprecated in favor of encrypt.format=aes)",
    ),
    known(
        "encrypt.format",
        Kind::Text,
        "Encrypt the image, format choices: 'aes', 'luks'",
    ),
    known(
        "encrypt.key-secret",
        Kind::Text,
        "ID of secret providing qcow AES key or LUKS passphrase",
    ),
    known(
        "encrypt.cipher-alg",
        Kind::Text,
        "Name of encryption cipher algorithm",
    ),
    known(
        "encrypt.cipher-mode",
        Kind::Text,
        "Name of encryption cipher mode",
    ),
    known(
        "encrypt.ivgen-alg",
        Kind::Text,
        "Name of IV generator algorithm",
    ),
    known(
        "encrypt.ivgen-hash-alg",
        Kind::Text,
        "Name of IV generator hash algorithm",
    ),
    known(
        "encrypt.hash-alg",
        Kind::Text,
        "Name of encryption hash algorithm",
    ),
    known(
        "encrypt.iter-time",
        Kind::Number,
        "Time to spend in PBKDF in milliseconds",
    ),
    with_default(
        known("cluster_size", Kind::Size, "qcow2 cluster size"),
        "65536",
    ),
    with_default(
        known("extended_l2", Kind::Switch, "Extended L2 tables"),
        "off",
    ),
    known(
        "preallocation",
        Kind::Text,
        "Preallocation mode (allowed values: off, metadata, falloc, full)",
    ),
    with_default(
        known(
            "compression_type",
            Kind::Text,
            "Compression method used for image cluster compression",
        ),
        "zlib",
    ),
    SIZE,
    known(
        "compat",
        Kind::Text,
        "Compatibility level (v2 [0.10] or v3 [1.1])",
    ),
    known("backing_file", Kind::Text, "File name of a base image"),
    known("backing_fmt", Kind::Text, "Image format of the base image"),
    known(
        "data_file",
        Kind::Text,
        "File name of an external data file",
    ),
    known(
        "data_file_raw",
        Kind::Switch,
        "The external data file must stay valid as a raw image",
    ),
    with_default(
        known("lazy_refcounts", Kind::Switch, "Postpone refcount updates"),
        "off",
    ),
    with_default(
        known(
            "refcount_bits",
            Kind::Number,
            "Width of a reference count entry in bits",
        ),
        "16",
    ),
    NOCOW,
    EXTENT_SIZE_HINT,
];

/// The options of a format, in the order in which they are shown.
pub fn known_options(format: Format) -> &'static [Known] {
    match format {
        Format::Raw => &RAW,
        Format::Qcow2 => &QCOW2,
    }
}

/// What `-o help` prints.
pub fn option_help(format: Format, name: Option<&OsStr>) -> String {
    // What is of the file and not of the format is told with a file name.
    let of_file = |option: &Known| match format {
        Format::Raw => option.name != "size",
        Format::Qcow2 => ["nocow", "extent_size_hint"].contains(&option.name),
    };
    let mut list: Vec<&Known> = known_options(format).iter().collect();
    list.retain(|option| name.is_some() || !of_file(option));
    list.sort_by_key(|option| option.name);
    let mut text = match name {
        Some(_) => "Supported options:\n".to_string(),
        None => format!("Supported {} options:\n", format.name()),
    };
    for option in list {
        let kind = match option.kind {
            Kind::Text => "<str>",
            Kind::Size => "<size>",
            Kind::Number => "<num>",
            Kind::Switch => "<bool (on/off)>",
        };
        let left = format!("{}={kind}", option.name);
        text += &format!("  {left:<22} - {}\n", option.help);
    }
    if name.is_none() {
        text += "\nThe protocol level may support further options.\n\
                 Specify the target filename to include those options.\n";
    }
    text
}

/// Refuses values that are not of their option's kind.
pub fn check_values(format: Format, options: &CreateOptions) -> Result<(), String> {
    for Known { name, kind, .. } in known_options(format) {
        let Some(value) = options.get(name) else {
            continue;
        };
        match kind {
            Kind::Text => {}
            Kind::Switch => {
                if !["on", "off", "yes", "no", "true", "false", "y", "n"].contains(&value) {
                    return Err(format!("Parameter '{name}' expects 'on' or 'off'"));
                }
            }
            Kind::Number => {
                number(value).ok_or_else(|| format!("Parameter '{name}' expects a number"))?;
            }
            Kind::Size => match size::parse(value) {
                Ok(_) => {}
                Err(size::SizeError::Range) => {
                    return Err(format!(
                        "Value '{value}' is out of range for parameter '{name}'"
                    ));
                }
                Err(size::SizeError::Syntax) => {
                    return Err(format!(
                        "Parameter '{name}' expects a non-negative number below 2^64\n\
                         Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, \
                         peta-\nand exabytes, respectively."
                    ));
                }
            },
        }
    }
    Ok(())
}

/// A number as C reads it; below zero it wraps around.
pub fn number(text: &str) -> Option<u64> {
    let text = text.trim_start();
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let (digits, base) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&digits[2..], 16),
        [b'0', _, ..] => (&digits[1..], 8),
        _ => (digits, 10),
    };
    // Rust would take a second sign.
    if digits.starts_with(['-', '+']) {
        return None;
    }
    let value = u64::from_str_radix(digits, base).ok()?;
    Some(match text.starts_with('-') {
        true => value.wrapping_neg(),
        false => value,
    })
}

/// The value of a size that [`check_values`] has seen.
pub fn size_of(options: &CreateOptions, name: &str) -> Option<u64> {
    size::parse(options.get(name)?).ok()
}

/// Whether a switch that [`check_values`] has seen is on.
pub fn is_on(options: &CreateOptions, name: &str) -> bool {
    matches!(options.get(name), Some("on" | "yes" | "true" | "y"))
}

/// The line that tells what is made, with names of any bytes.
pub fn formatting(format: Format, name: &OsStr, options: &CreateOptions) -> Vec<u8> {
    let mut line = OsString::from("Formatting '");
    line.push(name);
    line.push(format!("', fmt={}", format.name()));
    for option in known_options(format) {
        let value = match (options.value(option.name), option.kind) {
            (Some(_), Kind::Size) => {
                size_of(options, option.name).map(|n| OsString::from(n.to_string()))
            }
            (Some(text), _) => Some(as_value(text)),
            (None, _) => option.default.map(OsString::from),
        };
        if let Some(value) = value {
            line.push(format!(" {}=", option.name));
            line.push(value);
        }
    }
    line.push("\n");
    line.into_vec()
}
