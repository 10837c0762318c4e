//! Reading the options of images and files.

use crate::block::{
    CommonOptions, DetectZeroes, OptionSet, OptionValue, OverlapChecks, Qcow2Options, RawOptions,
    VhdSize, VpcOptions,
};

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

/// Takes the options by which a Parallels image grows, which is only read.
pub(super) fn check_preallocation(options: &mut OptionSet) -> Result<(), String> {
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
