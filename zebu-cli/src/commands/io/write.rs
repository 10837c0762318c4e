//! The commands that write: write, writev, aio_write.

use std::ffi::OsStr;

use zebu::block::Zeroing;

use super::command::{Failure, Handler, Outcome};
use super::content::Content;
use super::getopt::{Getopt, Word};
use super::number::MAX_REQUEST;
use super::request::{Job, Request};
use super::session::{Command, Session};
use super::words::{check_sectors, pattern, segments, size};

/// write, writev, aio_write.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "write",
        alias: "w",
        args: Some("[-bcCfnqruz] [-P pattern | -s source_file] off len"),
        summary: "writes a number of bytes at a specified offset",
        help: "
 Writes `len` bytes from `off` on and reports how long it took:
 'write -P 7 512 1k' fills the second and third sector with sevens.

 -b  write to the VM state instead of the disk
 -c  write whole clusters, compressed
 -C  report numbers for machines
 -f  durable when it is reported
 -n  with -z, fail rather than write zeroes as data
 -p  accepted and ignored
 -P  the byte to write, 0xcd by default
 -q  report nothing
 -r  accepted: buffers need no registration here
 -s  write what this file holds, again and again
 -u  with -z, space may be freed
 -z  write zeroes, without data where the format can
",
        min: 2,
        max: None,
        needs_file: true,
        run: Handler::Names(write),
    },
    Command {
        name: "writev",
        alias: "",
        args: Some("[-Cfqr] [-P pattern] off len [len..]"),
        summary: "writes a number of bytes at a specified offset",
        help: "
 As 'write', from one buffer for each `len`.

 -C  report numbers for machines
 -f  durable when it is reported
 -P  the byte to write, 0xcd by default
 -q  report nothing
 -r  accepted: buffers need no registration here
",
        min: 2,
        max: None,
        needs_file: true,
        run: Handler::Words(writev),
    },
    Command {
        name: "aio_write",
        alias: "",
        args: Some("[-Cfiqruz] [-P pattern] off len [len..]"),
        summary: "asynchronously writes a number of bytes",
        help: "
 As 'writev', without waiting: the next command may run before the result is
 printed. 'aio_flush' waits. The command succeeds once the request is made,
 whatever becomes of it.

 -C  report numbers for machines
 -f  durable when it is reported
 -i  make no request, for exercising statistics
 -P  the byte to write, 0xcd by default
 -q  report nothing
 -r  accepted: buffers need no registration here
 -u  with -z, space may be freed
 -z  write zeroes, without data where the format can
",
        min: 2,
        max: None,
        needs_file: true,
        run: Handler::Words(aio_write),
    },
];

/// What the options of a write say.
#[derive(Debug, Default)]
struct Flags<'a> {
    vm_state: bool,
    compressed: bool,
    machine: bool,
    durable: bool,
    invalid: bool,
    no_fallback: bool,
    quiet: bool,
    registered: bool,
    unmap: bool,
    zeroes: bool,
    pattern: Option<u8>,
    file: Option<&'a OsStr>,
}

impl<'a> Flags<'a> {
    fn parse<T: Word + ?Sized>(
        args: &'a [&'a T],
        letters: &'static str,
    ) -> Result<(Flags<'a>, Vec<&'a T>), Failure> {
        let mut flags = Flags::default();
        let mut options = Getopt::new(args, letters, &[]);
        for option in options.by_ref() {
            match option.map_err(Failure::Option)? {
                ('b', _) => flags.vm_state = true,
                ('c', _) => flags.compressed = true,
                ('C', _) => flags.machine = true,
                ('f', _) => flags.durable = true,
                ('i', _) => {
                    // Whatever else is wrong with the command.
                    flags.invalid = true;
                    break;
                }
                ('n', _) => flags.no_fallback = true,
                ('q', _) => flags.quiet = true,
                ('r', _) => flags.registered = true,
                ('u', _) => flags.unmap = true,
                ('z', _) => flags.zeroes = true,
                ('P', Some(value)) => {
                    flags.pattern = Some(pattern(&value.as_ref().to_string_lossy())?)
                }
                ('s', value) => flags.file = value.map(AsRef::as_ref),
                _ => {}
            }
        }
        Ok((flags, options.into_rest()))
    }

    /// Refuses options of `write` that contradict each other.
    fn check(&self) -> Outcome {
        let sources = [self.zeroes, self.pattern.is_some(), self.file.is_some()];
        let text = match self {
            _ if self.vm_state && self.zeroes => "-b and -z cannot be specified at the same time",
            _ if self.durable && (self.vm_state || self.compressed) => {
                "-f and -b or -c cannot be specified at the same time"
            }
            _ if self.no_fallback && !self.zeroes => "-n requires -z to be specified",
            _ if self.unmap && !self.zeroes => NEEDS_ZEROES,
            _ if sources.into_iter().filter(|given| *given).count() > 1 => {
                "Only one of -z, -P, and -s can be specified at the same time"
            }
            _ => return Ok(()),
        };
        Err(Failure::Out(text.into()))
    }

    /// Zeroes are in no buffer.
    fn check_registered(&self) -> Outcome {
        match self.registered && self.zeroes {
            true => Err(Failure::Out(
                "cannot combine zero write with registered I/O buffer".into(),
            )),
            false => Ok(()),
        }
    }

    /// What is done to the range.
    fn job(&self) -> Result<Job, Failure> {
        if self.zeroes {
            let zeroing = match self.unmap {
                true => Zeroing::Unmap,
                false => Zeroing::Keep,
            };
            return Ok(match self.no_fallback {
                true => Job::QuickZeroes(zeroing),
                false => Job::Zeroes(zeroing),
            });
        }
        let content = match self.file {
            Some(name) => Content::of_file(name).map_err(Failure::Err)?,
            None => Content::Byte(self.pattern.unwrap_or(Content::DEFAULT)),
        };
        Ok(match (self.vm_state, self.compressed) {
            (true, _) => Job::VmState(content),
            (false, true) => Job::Compressed(content),
            (false, false) => Job::Data(content),
        })
    }

    /// The request that is made.
    fn request(&self, verb: &'static str, offset: u64, count: u64) -> Result<Request, Failure> {
        Ok(Request {
            verb,
            offset,
            count,
            job: self.job()?,
            durable: self.durable,
            quiet: self.quiet,
            machine: self.machine,
        })
    }
}

const NEEDS_ZEROES: &str = "-u requires -z to be specified";

fn write(session: &mut Session, args: &[&OsStr]) -> Outcome {
    session.image_to_write()?;
    let (flags, rest) = Flags::parse(args, "bcCfnpP:qrs:uz")?;
    let &[offset, length] = rest.as_slice() else {
        return Err(Failure::Usage);
    };
    let (offset, length) = (offset.to_string_lossy(), length.to_string_lossy());
    flags.check()?;
    let (offset, count) = (size(&offset)?, size(&length)?);
    if count > MAX_REQUEST && !flags.no_fallback {
        return Err(Failure::Out(format!(
            "length cannot exceed {MAX_REQUEST} without -n, given {length}"
        )));
    }
    if flags.vm_state || flags.compressed {
        check_sectors(offset, count)?;
    }
    flags.check_registered()?;
    let request = flags.request("write", offset, count)?;
    request.run(session)
}

fn writev(session: &mut Session, args: &[&str]) -> Outcome {
    session.image_to_write()?;
    let (flags, rest) = Flags::parse(args, "CfP:qr")?;
    let (offset, count) = segments(&rest)?;
    flags.request("writev", offset, count as u64)?.run(session)
}

fn aio_write(session: &mut Session, args: &[&str]) -> Outcome {
    session.image_to_write()?;
    let (flags, rest) = Flags::parse(args, "CfiP:qruz")?;
    if flags.invalid {
        let text = "injecting invalid write request\n";
        session.out.print(format_args!("{text}"));
        return Ok(());
    }
    if rest.len() < 2 {
        return Err(Failure::Usage);
    }
    if flags.unmap && !flags.zeroes {
        return Err(Failure::Out(NEEDS_ZEROES.into()));
    }
    let (offset, count) = match (flags.zeroes, rest.as_slice()) {
        // No buffer, no limit.
        (true, &[offset, length]) => (size(offset)?, size(length)?),
        (true, _) => {
            let text = "-z supports only a single length parameter";
            return Err(Failure::Out(text.into()));
        }
        (false, rest) => segments(rest).map(|(offset, count)| (offset, count as u64))?,
    };
    flags.check_registered()?;
    flags.request("aio_write", offset, count)?.start(session)
}
