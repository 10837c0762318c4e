//! The commands that read.

use std::rc::Rc;
use std::time::Instant;

use zebu::block::Device;
use zebu::storage::{Buffer, Queue};

use super::command::{Failure, Handler, Outcome};
use super::getopt::Getopt;
use super::number::MAX_REQUEST;
use super::output::Output;
use super::report::{Dump, Statistics, is_filled_with, pattern_failure};
use super::session::{Command, Session};
use super::words::{check_sectors, explain, failed, pattern, segments, size};

/// read, readv, aio_read, aio_flush.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "read",
        alias: "r",
        args: Some("[-abCqrv] [-P pattern [-s off] [-l len]] off len"),
        summary: "reads a number of bytes at a specified offset",
        help: "
 Reads `len` bytes from `off` on and reports how long it took:
 'read -v 512 1k' shows the second and third sector.

 -b  read the VM state instead of the disk
 -C  report numbers for machines
 -l  with -P, how many bytes to compare
 -p  accepted and ignored
 -P  compare what is read with this byte
 -q  report nothing
 -r  accepted: buffers need no registration here
 -s  with -P, how far into what is read the comparison starts
 -v  dump what is read
",
        min: 2,
        max: None,
        needs_file: true,
        run: Handler::Words(read),
    },
    Command {
        name: "readv",
        alias: "",
        args: Some("[-Cqrv] [-P pattern] off len [len..]"),
        summary: "reads a number of bytes at a specified offset",
        help: "
 As 'read', into one buffer for each `len`.

 -C  report numbers for machines
 -P  compare what is read with this byte
 -q  report nothing
 -r  accepted: buffers need no registration here
 -v  dump what is read
",
        min: 2,
        max: None,
        needs_file: true,
        run: Handler::Words(readv),
    },
    Command {
        name: "aio_read",
        alias: "",
        args: Some("[-Ciqrv] [-P pattern] off len [len..]"),
        summary: "asynchronously reads a number of bytes",
        help: "
 As 'readv', without waiting: the next command may run before the result is
 printed. 'aio_flush' waits. The command succeeds once the request is made,
 whatever becomes of it.

 -C  report numbers for machines
 -i  make no request, for exercising statistics
 -P  compare what is read with this byte
 -q  report nothing
 -r  accepted: buffers need no registration here
 -v  dump what is read
",
        min: 2,
        max: None,
        needs_file: true,
        run: Handler::Words(aio_read),
    },
    Command {
        name: "aio_flush",
        alias: "",
        args: None,
        summary: "completes all outstanding aio requests",
        help: "",
        min: 0,
        max: Some(0),
        needs_file: true,
        run: Handler::Words(aio_flush),
    },
];

/// What the options of a read say.
#[derive(Clone, Copy, Debug, Default)]
struct Flags {
    vm_state: bool,
    machine: bool,
    invalid: bool,
    quiet: bool,
    dump: bool,
    pattern: Option<u8>,
    /// What is compared: where it starts in what is read, and its length.
    skip: Option<u64>,
    length: Option<u64>,
}

impl Flags {
    fn parse<'a>(
        args: &'a [&'a str],
        letters: &'static str,
    ) -> Result<(Flags, Vec<&'a str>), Failure> {
        let mut flags = Flags::default();
        let mut options = Getopt::new(args, letters, &[]);
        for option in options.by_ref() {
            let given = option.map_err(Failure::Option)?;
            match given {
                ('b', _) => flags.vm_state = true,
                ('C', _) => flags.machine = true,
                ('i', _) => flags.invalid = true,
                ('q', _) => flags.quiet = true,
                ('v', _) => flags.dump = true,
                ('P', Some(value)) => flags.pattern = Some(pattern(value)?),
                ('s', Some(value)) => flags.skip = Some(size(value)?),
                ('l', Some(value)) => flags.length = Some(size(value)?),
                _ => {}
            }
        }
        Ok((flags, options.into_rest()))
    }

    /// What to do with the `count` bytes of a read.
    fn report(&self, offset: u64, count: usize) -> Result<Report, Failure> {
        let skip = self.skip.unwrap_or(0);
        let length = self
            .length
            .unwrap_or_else(|| (count as u64).saturating_sub(skip));
        if skip
            .checked_add(length)
            .is_none_or(|end| end > count as u64)
        {
            return Err(Failure::Out(
                "pattern verification range exceeds end of read data".into(),
            ));
        }
        Ok(Report {
            flags: *self,
            offset,
            compare: (skip as usize, length as usize),
            start: Instant::now(),
        })
    }
}

/// Prints what came of a read.
struct Report {
    flags: Flags,
    offset: u64,
    compare: (usize, usize),
    start: Instant,
}

impl Report {
    /// Whether the bytes are the ones expected.
    fn print(&self, out: &Output, bytes: &[u8]) -> bool {
        let time = self.start.elapsed();
        let matches = self.verify(out, bytes);
        if self.flags.quiet {
            return matches;
        }
        let offset = self.offset;
        if self.flags.dump {
            out.print(format_args!("{}", Dump { offset, bytes }));
        }
        let statistics = Statistics {
            verb: "read",
            offset,
            bytes: bytes.len() as u64,
            time,
            machine: self.flags.machine,
        };
        out.print(format_args!("{statistics}"));
        matches
    }

    fn verify(&self, out: &Output, bytes: &[u8]) -> bool {
        let Some(pattern) = self.flags.pattern else {
            return true;
        };
        let (skip, length) = self.compare;
        let matches = is_filled_with(&bytes[skip..skip + length], pattern);
        if !matches {
            let text = pattern_failure(self.offset + skip as u64, length);
            out.print(format_args!("{text}\n"));
        }
        matches
    }
}

fn read(session: &mut Session, args: &[&str]) -> Outcome {
    let (flags, rest) = Flags::parse(args, "bCl:pP:qrs:v")?;
    let &[offset, length] = rest.as_slice() else {
        return Err(Failure::Usage);
    };
    if flags.pattern.is_none() && (flags.skip.is_some() || flags.length.is_some()) {
        return Err(Failure::Usage);
    }
    let (offset, count) = (size(offset)?, size(length)?);
    if count > MAX_REQUEST {
        return Err(Failure::Out(format!(
            "length cannot exceed {MAX_REQUEST}, given {length}"
        )));
    }
    let report = flags.report(offset, count as usize)?;
    if flags.vm_state {
        check_sectors(offset, count)?;
        return read_vm_state(session, &report, count as usize);
    }
    read_now(session, "read", &report, count as usize)
}

fn readv(session: &mut Session, args: &[&str]) -> Outcome {
    let (flags, rest) = Flags::parse(args, "CP:qrv")?;
    let (offset, count) = segments(&rest)?;
    let report = flags.report(offset, count)?;
    read_now(session, "readv", &report, count)
}

/// Reads, waits, and prints.
fn read_now(session: &mut Session, verb: &str, report: &Report, count: usize) -> Outcome {
    let out = session.out.clone();
    let image = session.image()?;
    if !image.has_range(report.offset, count as u64) {
        return Err(Failure::Out(failed(verb, libc::EIO)));
    }
    let buffer = image
        .take_buffer(count)
        .map_err(|error| Failure::Out(explain(&out, verb, &error)))?;
    let reading = image
        .device
        .read_buffer(&image.queue, report.offset, buffer, count);
    let (buffer, result) = image.queue.block_on(reading);
    let outcome = conclude(&out, verb, report, &buffer[..count], result);
    image.give_buffer(buffer);
    outcome
}

/// Prints what came of a read that was waited for.
fn conclude(
    out: &Output,
    verb: &str,
    report: &Report,
    bytes: &[u8],
    result: zebu::Result<()>,
) -> Outcome {
    match result {
        Ok(()) if report.print(out, bytes) => Ok(()),
        Ok(()) => Err(Failure::Told),
        Err(error) => Err(Failure::Out(explain(out, verb, &error))),
    }
}

fn aio_read(session: &mut Session, args: &[&str]) -> Outcome {
    let (flags, rest) = Flags::parse(args, "CiP:qrv")?;
    if flags.invalid {
        let text = "injecting invalid read request\n";
        session.out.print(format_args!("{text}"));
        return Ok(());
    }
    let (offset, count) = segments(&rest)?;
    let report = flags.report(offset, count)?;
    let out = session.out.clone();
    let image = session.image()?;
    if image.has_range(offset, count as u64) {
        let (device, queue) = (image.device.clone(), image.queue.clone());
        image.start(count, read_later(device, queue, out, report, count));
    } else {
        // The command itself succeeds.
        let text = failed("readv", libc::EIO);
        image.start(0, async move { out.print(format_args!("{text}\n")) });
    }
    Ok(())
}

/// Reads, and prints when done.
async fn read_later(device: Rc<Device>, queue: Queue, out: Output, report: Report, count: usize) {
    let read = async {
        let buffer = Buffer::try_new(count)?;
        let reading = device.read_buffer(&queue, report.offset, buffer, count);
        let (buffer, result) = reading.await;
        result.map(|()| buffer)
    };
    match read.await {
        Ok(buffer) => drop(report.print(&out, &buffer[..count])),
        Err(error) => {
            let text = explain(&out, "readv", &error);
            out.print(format_args!("{text}\n"));
        }
    }
}

fn aio_flush(session: &mut Session, _args: &[&str]) -> Outcome {
    session.image()?.finish_all();
    Ok(())
}

/// Reads from the VM state, which images of few formats have.
fn read_vm_state(session: &mut Session, report: &Report, count: usize) -> Outcome {
    let out = session.out.clone();
    let image = session.image()?;
    if image.device.top().vm_state_offset().is_none() {
        return Err(Failure::Out(failed("read", libc::EOPNOTSUPP)));
    }
    let buffer = image
        .take_buffer(count)
        .map_err(|error| Failure::Out(explain(&out, "read", &error)))?;
    let reading = image
        .device
        .read_vm_state(&image.queue, report.offset, buffer, count);
    let (buffer, result) = image.queue.block_on(reading);
    let outcome = conclude(&out, "read", report, &buffer[..count], result);
    image.give_buffer(buffer);
    outcome
}
