//! Commands for breakpoints of the blkdebug driver.

use std::time::Duration;

use zebu::internal::blkdebug::{Blkdebug, Event};

use super::command::{Failure, Handler, Outcome};
use super::session::{Command, Session};
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
        run: Handler::Words(set),
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
        run: Handler::Words(remove),
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
        run: Handler::Words(resume),
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
        run: Handler::Words(wait),
    },
];

/// How often is looked whether a request is suspended.
const LOOK: Duration = Duration::from_millis(1);

/// The blkdebug driver below the image.
fn blkdebug(session: &mut Session) -> Result<Option<&Blkdebug>, Failure> {
    Ok(session.image()?.device.top().file().blkdebug())
}

fn set(session: &mut Session, args: &[&str]) -> Outcome {
    const WHAT: &str = "Could not set breakpoint";
    let Some(debug) = blkdebug(session)? else {
        return refuse(WHAT, libc::ENOTSUP);
    };
    match args[0].parse::<Event>() {
        Ok(event) => debug.suspend_at(event, args[1]),
        Err(()) => return refuse(WHAT, libc::ENOENT),
    }
    Ok(())
}

fn remove(session: &mut Session, args: &[&str]) -> Outcome {
    let what = format!("Could not remove breakpoint {}", args[0]);
    match blkdebug(session)? {
        None => refuse(&what, libc::ENOTSUP),
        Some(debug) if debug.forget_tag(args[0]) => Ok(()),
        Some(_) => refuse(&what, libc::ENOENT),
    }
}

fn resume(session: &mut Session, args: &[&str]) -> Outcome {
    const WHAT: &str = "Could not resume request";
    match blkdebug(session)? {
        None => refuse(WHAT, libc::ENOTSUP),
        Some(debug) if debug.resume(args[0]) => {
            session.report_suspensions();
            session.image()?.advance();
            Ok(())
        }
        Some(_) => refuse(WHAT, libc::ENOENT),
    }
}

fn wait(session: &mut Session, args: &[&str]) -> Outcome {
    let image = session.image()?;
    let Some(debug) = image.device.top().file().blkdebug() else {
        // QEMU would wait for ever.
        return refuse("Could not wait for a suspension", libc::ENOTSUP);
    };
    image.queue.block_on(async {
        while !debug.is_suspended(args[0]) {
            if image.queue.sleep(LOOK).await.is_err() {
                break;
            }
        }
    });
    Ok(())
}

fn refuse(what: &str, errno: i32) -> Outcome {
    Err(Failure::Out(format!("{what}: {}", strerror(errno))))
}
