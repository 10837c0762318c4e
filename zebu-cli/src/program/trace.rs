//! `-T`: trace events, of which QEMU has some hundreds and this program none.

use std::ffi::OsStr;

use zebu::names::split_list;

use crate::program::Context;

/// Takes the value of the option: as in QEMU, a pattern may fit no event, and the name of one that does not
/// exist is told.
pub fn warn(context: &Context, value: &OsStr) {
    for item in split_list(value) {
        let item = item.to_string_lossy();
        let name = match item.split_once('=') {
            None => &*item,
            Some(("enable", name)) => name,
            Some(_) => continue,
        };
        if !name.is_empty() && name != "help" && !name.contains(['*', '?']) {
            context.say(&format!("warning: trace event '{name}' does not exist"));
        }
    }
}
