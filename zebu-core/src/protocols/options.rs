//! How images and files are treated: the options of each driver.

pub use crate::drivers::VhdSize;
pub use crate::drivers::qcow2::OverlapChecks;
use crate::spelling::{OptionSet, OptionValue};
use crate::storage::EngineKind;

/// Options of an image. None: not given, the default holds.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ImageOptions {
    /// Options that every image and every file has.
    pub common: CommonOptions,
    /// Options of raw images.
    pub raw: RawOptions,
    /// Options of qcow2 images.
    pub qcow2: Qcow2Options,
    /// Options of VHD images.
    pub vpc: VpcOptions,
    /// Options of encrypted images.
    pub encryption: EncryptionOptions,
}

/// Options that every image and every file has.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CommonOptions {
    /// `read-only`
    pub read_only: Option<bool>,
    /// `force-share`: open although another process may write.
    pub force_share: Option<bool>,
    /// `cache.direct`: with `O_DIRECT`. A file without this option takes it from its image.
    pub direct: Option<bool>,
    /// `cache.no-flush`: ignore flushes. A file without this option takes it from its image.
    pub no_flush: Option<bool>,
    /// `discard=unmap` (true) or `discard=ignore` (false).
    pub discard: Option<bool>,
    /// `detect-zeroes`
    pub detect_zeroes: Option<DetectZeroes>,
}

/// What becomes of writes of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DetectZeroes {
    /// They are written as data.
    Off,
    /// They are stored as zeroes.
    On,
    /// They are stored as zeroes, and their clusters are freed.
    Unmap,
}

/// Options of raw images: the part of the file that is the disk.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RawOptions {
    /// `offset`: where it starts, in bytes.
    pub offset: Option<u64>,
    /// `size` in bytes; None: to the end of the file.
    pub size: Option<u64>,
    /// Both as they were written, in JSON, for the name that is shown.
    pub(crate) offset_json: Option<String>,
    pub(crate) size_json: Option<String>,
}

/// Options of qcow2 images.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Qcow2Options {
    /// `pass-discard-request`: punch holes into the file where the guest discards.
    pub pass_discard_request: Option<bool>,
    /// `pass-discard-snapshot`: punch holes into the file where deleting a snapshot frees clusters.
    pub pass_discard_snapshot: Option<bool>,
    /// `pass-discard-other`: punch holes into the file where anything else frees clusters.
    pub pass_discard_other: Option<bool>,
    /// `discard-no-unref`: a discarded cluster stays allocated.
    pub discard_no_unref: Option<bool>,
    /// `overlap-check` and `overlap-check.*`
    pub overlap_check: Option<OverlapChecks>,
    /// `cache-size`: bytes of L2 tables and refcount blocks together.
    pub cache_size: Option<u64>,
    /// `l2-cache-size`: bytes of L2 tables.
    pub l2_cache_size: Option<u64>,
    /// `l2-cache-entry-size`: bytes of one slice of an L2 table.
    pub l2_cache_entry_size: Option<u64>,
    /// `refcount-cache-size`: bytes of refcount blocks.
    pub refcount_cache_size: Option<u64>,
}

/// Options of VHD images (`vpc`).
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct VpcOptions {
    /// `force_size_calc`: how the size of the disk is determined.
    pub size: VhdSize,
}

/// Options of encrypted images.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EncryptionOptions {
    /// `encrypt.format`: how an image is encrypted that has another format.
    pub format: Option<String>,
    /// `key-secret` or `encrypt.key-secret`: the id of the secret that unlocks it.
    pub key_secret: Option<String>,
}

/// Options of a file. None: not given, the default holds.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FileOptions {
    /// Options that every image and every file has.
    pub common: CommonOptions,
    /// `aio`: the engine. [`EngineKind::Native`] needs direct I/O, which is checked when the file
    /// is opened, since the cache mode may come from elsewhere.
    pub aio: Option<EngineKind>,
    /// `locking`
    pub locking: Locking,
}

/// Whether a file is locked while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Locking {
    /// Where the system can (`auto`).
    #[default]
    Auto,
    /// Always (`on`).
    On,
    /// Never (`off`).
    Off,
}

/// The error of [`FileOptions::aio`] with [`EngineKind::Native`] without direct I/O, in QEMU's
/// words.
pub const NATIVE_NEEDS_DIRECT: &str =
    "aio=native was specified, but it requires cache.direct=on, which was not specified.";

impl OverlapChecks {
    pub(super) fn take(options: &mut OptionSet) -> Result<Option<OverlapChecks>, String> {
        const KEY: &str = "overlap-check";
        const TEMPLATE: &str = "overlap-check.template";
        let short = options.take_text(KEY);
        let long = options.take_text(TEMPLATE);
        if let (Some(a), Some(b)) = (&short, &long)
            && a != b
        {
            return Err(format!(
                "Conflicting values for qcow2 options '{KEY}' ('{a}') and '{TEMPLATE}' ('{b}')"
            ));
        }
        let mut checks = match short.as_deref().or(long.as_deref()) {
            None => None,
            Some("none") => Some(Self::NONE),
            Some("constant") => Some(Self::CONSTANT),
            Some("cached") => Some(Self::CACHED),
            Some("all") => Some(Self::ALL),
            Some(other) => {
                return Err(format!(
                    "Unsupported value '{other}' for qcow2 option '{KEY}'. \
                     Allowed are any of the following: none, constant, cached, all"
                ));
            }
        };
        for (bit, name) in Self::NAMES.iter().enumerate() {
            if let Some(on) = options.take_bool(&format!("{KEY}.{name}"))? {
                checks = Some(checks.unwrap_or_default().with(bit, on));
            }
        }
        Ok(checks)
    }
}

impl CommonOptions {
    pub(super) fn take(options: &mut OptionSet) -> Result<CommonOptions, String> {
        if let Some(name) = options.take_text("node-name") {
            let inside = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
            if !name.starts_with(|c: char| c.is_ascii_alphabetic()) || !name.chars().all(inside) {
                return Err(format!("Invalid node-name: '{}'", name));
            }
            if name.len() > 31 {
                return Err("Node name too long".into());
            }
        }
        // Checked, without effect.
        options.take_bool("auto-read-only")?;
        let common = CommonOptions {
            read_only: options.take_bool("read-only")?,
            force_share: options.take_bool("force-share")?,
            direct: options.take_bool("cache.direct")?,
            no_flush: options.take_bool("cache.no-flush")?,
            discard: match options.take_text("discard").as_deref() {
                None => None,
                Some("ignore" | "off") => Some(false),
                Some("unmap" | "on") => Some(true),
                Some(_) => return Err("Invalid discard option".into()),
            },
            detect_zeroes: match options.take_text("detect-zeroes").as_deref() {
                None => None,
                Some("off") => Some(DetectZeroes::Off),
                Some("on") => Some(DetectZeroes::On),
                Some("unmap") => Some(DetectZeroes::Unmap),
                Some(other) => return Err(format!("invalid parameter value: {other}")),
            },
        };
        if common.force_share == Some(true) && common.read_only == Some(false) {
            return Err("force-share=on can only be used with read-only images".into());
        }
        Ok(common)
    }
}

impl RawOptions {
    pub(super) fn take(options: &mut OptionSet) -> Result<RawOptions, String> {
        let json = |key| options.get(key).map(OptionValue::json);
        let (offset_json, size_json) = (json("offset"), json("size"));
        let raw = RawOptions {
            offset_json,
            size_json,
            offset: options.take_size("offset")?,
            size: options.take_size("size")?,
        };
        if raw.size.is_some_and(|size| size % 512 != 0) {
            return Err("Specified size is not multiple of 512".into());
        }
        Ok(raw)
    }
}

impl VpcOptions {
    pub(super) fn take(options: &mut OptionSet) -> Result<VpcOptions, String> {
        let size = match options.take_text("force_size_calc").as_deref() {
            None => VhdSize::ByCreator,
            Some("chs") => VhdSize::Chs,
            Some("current_size") => VhdSize::CurrentSize,
            Some(other) => return Err(format!("Invalid size calculation mode: '{other}'")),
        };
        Ok(VpcOptions { size })
    }
}

impl EncryptionOptions {
    pub(super) fn take(options: &mut OptionSet) -> EncryptionOptions {
        let of_container = options.take_string("key-secret");
        EncryptionOptions {
            format: options.take_string("encrypt.format"),
            key_secret: of_container.or_else(|| options.take_string("encrypt.key-secret")),
        }
    }
}

/// Takes the options by which a Parallels image grows, which is only read.
pub fn check_preallocation(options: &mut OptionSet) -> Result<(), String> {
    options.take_size("prealloc-size")?;
    match options.take_text("prealloc-mode").as_deref() {
        None | Some("falloc" | "truncate") => Ok(()),
        Some(other) => Err(format!("invalid parameter value: {other}")),
    }
}

impl Qcow2Options {
    pub(super) fn take(options: &mut OptionSet) -> Result<Qcow2Options, String> {
        // Checked, without effect.
        options.take_bool("lazy-refcounts")?;
        options.take_number("cache-clean-interval")?;
        let qcow2 = Qcow2Options {
            pass_discard_request: options.take_bool("pass-discard-request")?,
            pass_discard_snapshot: options.take_bool("pass-discard-snapshot")?,
            pass_discard_other: options.take_bool("pass-discard-other")?,
            discard_no_unref: options.take_bool("discard-no-unref")?,
            overlap_check: OverlapChecks::take(options)?,
            cache_size: options.take_size("cache-size")?,
            l2_cache_size: options.take_size("l2-cache-size")?,
            l2_cache_entry_size: options.take_size("l2-cache-entry-size")?,
            refcount_cache_size: options.take_size("refcount-cache-size")?,
        };
        if let Some(total) = qcow2.cache_size {
            let (l2, refcount) = (qcow2.l2_cache_size, qcow2.refcount_cache_size);
            if l2.is_some() && refcount.is_some() {
                return Err(
                    "cache-size, l2-cache-size and refcount-cache-size may not be set \
                            at the same time"
                        .into(),
                );
            }
            if l2.is_some_and(|l2| l2 > total) {
                return Err("l2-cache-size may not exceed cache-size".into());
            }
            if refcount.is_some_and(|refcount| refcount > total) {
                return Err("refcount-cache-size may not exceed cache-size".into());
            }
        }
        Ok(qcow2)
    }
}
