//! Commands for zoned devices. They fail as with any image without zones.

use super::command::{Failure, Handler, Outcome};
use super::session::{Command, Session};
use super::words::{failed, size};

/// zone_append, zone_close, zone_finish, zone_open, zone_report, zone_reset.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "zone_append",
        alias: "",
        args: Some("offset len [len..]"),
        summary: "append write a number of bytes at a specified offset",
        help: "",
        min: 3,
        max: Some(4),
        needs_file: true,
        run: Handler::Words(|session, args| refuse(session, "zone append", args)),
    },
    Command {
        name: "zone_close",
        alias: "",
        args: Some("offset len"),
        summary: "close a range of zones in zone block device",
        help: "",
        min: 2,
        max: Some(2),
        needs_file: true,
        run: Handler::Words(|session, args| refuse(session, "zone close", args)),
    },
    Command {
        name: "zone_finish",
        alias: "",
        args: Some("offset len"),
        summary: "finish a range of zones in zone block device",
        help: "",
        min: 2,
        max: Some(2),
        needs_file: true,
        run: Handler::Words(|session, args| refuse(session, "zone finish", args)),
    },
    Command {
        name: "zone_open",
        alias: "",
        args: Some("offset len"),
        summary: "explicit open a range of zones in zone block device",
        help: "",
        min: 2,
        max: Some(2),
        needs_file: true,
        run: Handler::Words(|session, args| refuse(session, "zone open", args)),
    },
    Command {
        name: "zone_report",
        alias: "",
        args: Some("offset number"),
        summary: "report zone information",
        help: "",
        min: 2,
        max: Some(2),
        needs_file: true,
        run: Handler::Words(|session, args| refuse(session, "zone report", args)),
    },
    Command {
        name: "zone_reset",
        alias: "",
        args: Some("offset len"),
        summary: "reset a zone write pointer in zone block device",
        help: "",
        min: 2,
        max: Some(2),
        needs_file: true,
        run: Handler::Words(|session, args| refuse(session, "zone reset", args)),
    },
];

/// There are no zones, and nothing beyond the end of the disk.
fn refuse(session: &mut Session, verb: &str, args: &[&str]) -> Outcome {
    let (offset, _) = (size(args[0])?, size(args[1])?);
    let errno = match session.image()?.has_range(offset, 0) {
        true => libc::ENOTSUP,
        false => libc::EIO,
    };
    Err(Failure::Out(failed(verb, errno)))
}
