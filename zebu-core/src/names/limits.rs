//! Lists of limits, as options have them.

use super::parse_size;
use crate::Limits;

impl Limits {
    /// Changes the bounds that a list such as `virtual-size=1T,work=64G` names. Sizes have the
    /// suffixes of QEMU's.
    ///
    /// # Errors
    /// The message, if there is no bound of a name or a value is no size. The settings before the
    /// wrong one stay.
    pub fn set_from(&mut self, list: &str) -> std::result::Result<(), String> {
        for setting in list.split(',').filter(|setting| !setting.is_empty()) {
            let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
            let limit = self
                .by_name(name)
                .ok_or_else(|| format!("There is no limit '{name}'"))?;
            *limit =
                parse_size(value).map_err(|_| format!("'{value}' is no value for '{name}'"))?;
        }
        Ok(())
    }
}
