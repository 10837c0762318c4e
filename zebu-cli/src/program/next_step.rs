//! What to do next about messages that many commands have, and that are QEMU's.

use zebu::block::Format;

use crate::program::closest::closest;

/// What follows a message where its command has nothing of its own to say; or nothing.
pub fn after(message: &str) -> String {
    let quoted = |start: &str| Some(message.split_once(start)?.1.split_once('\'')?.0);
    let meant = |name: Option<&str>| name.map(|name| format!("did you mean '{name}'?"));
    let next = if message.contains("expects a non-negative number below 2^64") {
        Some("a size is a number of bytes, or one with k, M, G, T, P or E by powers of 1024: 64k, 10G".into())
    } else if message.contains("backing format must be specified") {
        Some("say the format of the backing file with -F: -F qcow2, -F raw".into())
    } else if let Some(word) = quoted("Invalid parameter '") {
        let options = Format::all().flat_map(|format| format.create_options());
        meant(closest(word, options.map(|option| option.name)))
    } else if let Some(word) = quoted("Unknown file format '").or(quoted("Unknown driver '")) {
        meant(closest(word, Format::all().map(|format| format.name())))
    } else {
        None
    };
    next.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_meant() {
        for (message, next) in [
            (
                "x: Invalid parameter 'clster_size'",
                "did you mean 'cluster_size'?",
            ),
            ("Unknown file format 'qcow3'", "did you mean 'qcow2'?"),
            (
                "Could not open 'r': Unknown driver 'vmkd'",
                "did you mean 'vmdk'?",
            ),
            ("Invalid parameter 'something_else'", ""),
            ("Invalid parameter", ""),
            ("No such file or directory", ""),
        ] {
            assert_eq!(after(message), next, "{message}");
        }
    }
}
