//! The commands discard, flush and truncate.

use zebu::block::Preallocation;

use super::command::{Failure, Handler, Outcome};
use super::getopt::Getopt;
use super::number::MAX_REQUEST;
use super::request::{Job, Request};
use super::session::{Command, Session};
use super::words::{explain, size};

/// discard, flush, truncate.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "discard",
        alias: "d",
        args: Some("[-Cq] off len"),
        summary: "discards a number of bytes at a specified offset",
        help: "
 Tells that the content of a range is not needed any more. With '-d ignore'
 when the image is opened, nothing is done about it.

 -C  report numbers for machines
 -q  report nothing
",
        min: 2,
        max: None,
        needs_file: true,
        run: Handler::Words(discard),
    },
    Command {
        name: "aio_discard",
        alias: "",
        args: Some("[-Cq] off len"),
        summary: "asynchronously discards a number of bytes",
        help: "
 As 'discard', without waiting: the next command may run before the result is
 printed. 'aio_flush' waits. The command succeeds once the request is made,
 whatever becomes of it.

 -C  report numbers for machines
 -q  report nothing
",
        min: 2,
        max: None,
        needs_file: true,
        run: Handler::Words(aio_discard),
    },
    Command {
        name: "flush",
        alias: "f",
        args: None,
        summary: "flush all in-core file state to disk",
        help: "",
        min: 0,
        max: Some(0),
        needs_file: true,
        run: Handler::Words(flush),
    },
    Command {
        name: "truncate",
        alias: "t",
        args: Some("[-m prealloc_mode] off"),
        summary: "truncates the current file at the given offset",
        help: "
 Gives the disk another size: what is behind `off` is lost, what is new reads
 as zeroes.

 -m  what is preallocated of what is new: off, metadata, falloc or full
",
        min: 1,
        max: Some(3),
        needs_file: true,
        run: Handler::Words(truncate),
    },
];

fn discard(session: &mut Session, args: &[&str]) -> Outcome {
    session.image_to_write()?;
    let (request, length) = discarding("discard", args)?;
    if request.count > MAX_REQUEST {
        return Err(Failure::Out(format!(
            "length cannot exceed {MAX_REQUEST}, given {length}"
        )));
    }
    request.run(session)
}

fn aio_discard(session: &mut Session, args: &[&str]) -> Outcome {
    session.image_to_write()?;
    let (request, _) = discarding("aio_discard", args)?;
    request.start(session)
}

/// The request of the command `verb`, and its length as it was typed.
fn discarding<'a>(verb: &'static str, args: &'a [&'a str]) -> Result<(Request, &'a str), Failure> {
    let (mut machine, mut quiet) = (false, false);
    let mut options = Getopt::new(args, "Cq", &[]);
    for option in options.by_ref() {
        match option.map_err(Failure::Option)? {
            ('C', _) => machine = true,
            _ => quiet = true,
        }
    }
    let rest = options.into_rest();
    let &[offset, length] = rest.as_slice() else {
        return Err(Failure::Usage);
    };
    let (offset, count) = (size(offset)?, size(length)?);
    let request = Request {
        verb,
        offset,
        count,
        job: Job::Discard,
        durable: false,
        quiet,
        machine,
    };
    Ok((request, length))
}

fn flush(session: &mut Session, _args: &[&str]) -> Outcome {
    let out = session.out.clone();
    let image = session.image()?;
    if image.opening.read_only {
        return Ok(());
    }
    image
        .queue
        .block_on(image.device.flush(&image.queue))
        // qemu-io prints nothing on standard output.
        .map_err(|error| Failure::Named(explain(&out, "flush", &error)))
}

fn truncate(session: &mut Session, args: &[&str]) -> Outcome {
    session.image_to_write()?;
    let mut preallocation = Preallocation::Off;
    let mut options = Getopt::new(args, "m:", &[]);
    for option in options.by_ref() {
        let (_, mode) = option.map_err(Failure::Option)?;
        let mode = mode.unwrap_or_default();
        preallocation = Preallocation::from_name(mode)
            .ok_or_else(|| Failure::Named(format!("Invalid preallocation mode '{mode}'")))?;
    }
    let rest = options.into_rest();
    let size = size(rest.first().ok_or(Failure::Usage)?)?;
    session
        .image()?
        .resize(size, preallocation)
        .map_err(|error| Failure::Named(error.to_string()))
}
