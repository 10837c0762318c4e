//! The options and names of `null-co` and `null-aio`.

use std::ffi::OsStr;
use std::time::Duration;

use crate::block::{NullSpec, OptionSet, OptionValue};

/// From the options of the driver, and its name.
pub(super) fn take(
    options: &mut OptionSet,
    driver: &'static str,
    name: Option<&OsStr>,
) -> Result<NullSpec, String> {
    let filename = options.take_value("filename");
    for name in [name, filename.as_deref()].into_iter().flatten() {
        if name.to_str().and_then(|n| n.strip_prefix(driver)) != Some("://") {
            return Err(format!(
                "The only allowed filename for this driver is '{driver}://'"
            ));
        }
    }
    let mut shown = vec![("driver".into(), format!("\"{driver}\""))];
    for key in ["size", "read-zeroes"] {
        if let Some(value) = options.get(key).map(OptionValue::json) {
            shown.push((key.into(), value));
        }
    }
    let latency = options.take_signed("latency-ns")?.unwrap_or(0);
    Ok(NullSpec {
        driver,
        size: options.take_size("size")?.unwrap_or(1 << 30),
        latency: u64::try_from(latency)
            .map(Duration::from_nanos)
            .map_err(|_| "latency-ns is invalid")?,
        read_zeroes: options.take_bool("read-zeroes")?.unwrap_or(false),
        shown,
    })
}

/// The name without any options.
pub(super) fn name(driver: &str) -> String {
    format!("{driver}://")
}
