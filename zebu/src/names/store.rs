//! Names and options of objects in object stores: `s3://BUCKET/KEY`, `gs://BUCKET/KEY`,
//! `az://CONTAINER/BLOB`, and the options of the drivers `s3`, `gs` and `az`, which QEMU has not.

use std::ffi::OsStr;

use crate::block::{OptionSet, RemoteOptions, StoreKind, StoreSpec};

impl StoreSpec {
    /// From the options of the driver, with a name if there is one.
    pub(super) fn take(
        options: &mut OptionSet,
        kind: StoreKind,
        name: Option<&OsStr>,
    ) -> Result<StoreSpec, String> {
        let driver = kind.name();
        let given = options.take_value("url");
        let url = given.as_deref().or(name);
        let url = url.ok_or(format!("The driver '{driver}' requires the option 'url'"))?;
        let wrong = || {
            let form = format!("{driver}://BUCKET/KEY");
            format!("'{}' is not of the form {form}", url.display())
        };
        let text = url.to_str().ok_or_else(wrong)?;
        let rest = text
            .strip_prefix(driver)
            .and_then(|rest| rest.strip_prefix("://"));
        // The key is taken literally, as by the stores' own tools.
        let (bucket, key) = rest
            .and_then(|rest| rest.split_once('/'))
            .ok_or_else(wrong)?;
        if bucket.is_empty() || key.is_empty() {
            return Err(wrong());
        }
        Ok(StoreSpec {
            kind,
            bucket: bucket.into(),
            key: key.into(),
            reading: RemoteOptions::take(options)?,
            url: text.into(),
        })
    }
}
