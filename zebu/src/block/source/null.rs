//! The options and names of `null-co` and `null-aio`.

use std::ffi::OsStr;
use std::time::Duration;

use super::options::{Options, Scalar};

/// A file that keeps nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NullSpec {
    /// `null-co` or `null-aio`, which are the same here.
    pub driver: &'static str,
    /// `size` in bytes.
    pub size: u64,
    /// `latency-ns`: how long a request takes.
    pub latency: Duration,
    /// `read-zeroes`: it is known to be zero.
    pub read_zeroes: bool,
    /// What QEMU shows of it, as members of a JSON object.
    shown: Vec<(String, String)>,
}

impl NullSpec {
    /// From the options of the driver, and its name.
    pub(super) fn take(
        options: &mut Options,
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
            if let Some(value) = options.get(key).map(Scalar::json) {
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

    /// The name that QEMU shows, if a name says all.
    pub(super) fn plain_name(&self) -> Option<String> {
        (self.shown.len() == 1).then(|| self.name())
    }

    /// The name without any options.
    pub(super) fn name(&self) -> String {
        format!("{}://", self.driver)
    }

    /// The members of its JSON.
    pub(super) fn members(&self) -> Vec<(String, String)> {
        self.shown.clone()
    }
}
