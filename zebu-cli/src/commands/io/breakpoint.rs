//! Commands for breakpoints in requests, which need QEMU's blkdebug driver:
//! known, so that a script gets the answer that it gets from any image
//! without that driver.

use super::command::{Command, Failure, Outcome};
use super::session::Session;
use super::words::strerror;

/// break, remove_break, resume, wait_break.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "break",
        alias: "",
        args: Some("event tag"),
        summary: "sets a breakpoint on event and tags the stopped request as tag",
        help: "",
        min: 2,
        max: Some(2),
        needs_file: true,
        run: |_, _| refuse("Could not set breakpoint"),
    },
    Command {
        name: "remove_break",
        alias: "",
        args: Some("tag"),
        summary: "remove a breakpoint by tag",
        help: "",
        min: 1,
        max: Some(1),
        needs_file: true,
        run: remove,
    },
    Command {
        name: "resume",
        alias: "",
        args: Some("tag"),
        summary: "resumes the request tagged as tag",
        help: "",
        min: 1,
        max: Some(1),
        needs_file: true,
        run: |_, _| refuse("Could not resume request"),
    },
    Command {
        name: "wait_break",
        alias: "",
        args: Some("tag"),
        summary: "waits for the suspension of a request",
        help: "",
        min: 1,
        max: Some(1),
        needs_file: true,
        // QEMU would wait for ever.
        run: |_, _| refuse("Could not wait for a suspension"),
    },
];

fn remove(_session: &mut Session, args: &[&str]) -> Outcome {
    refuse(&format!("Could not remove breakpoint {}", args[0]))
}

fn refuse(what: &str) -> Outcome {
    let why = strerror(libc::ENOTSUP);
    Err(Failure::Out(format!("{what}: {why}")))
}
