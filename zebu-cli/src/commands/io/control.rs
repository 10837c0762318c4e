//! The commands about the session itself.

use std::ffi::{OsStr, OsString};
use std::future::poll_fn;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use zebu::names::parse_integer;

use super::command::{Failure, Handler, Outcome};
use super::getopt::Getopt;
use super::opening::Opening;
use super::session::{Command, Session};
use super::words::size;

/// open, close, quit, help, sleep, abort, sigraise.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "open",
        alias: "o",
        args: Some("[-rsCnkU] [-t cache] [-d discard] [-o options] [path]"),
        summary: "open the file specified by path",
        help: "
 Opens the image that the other commands use:
 'open -n -o driver=raw /tmp/data' opens it as raw, without the page cache.

 -r  for reading only
 -s  writes go to a temporary overlay
 -C  copy on read
 -n  without the page cache, as -t none
 -U  although others may write to it
 -k  native AIO, as -i native
 -i  how I/O is done: threads, native or io_uring
 -t  the cache mode
 -d  the discard mode
 -o  options as --image-opts has them
",
        min: 1,
        max: None,
        needs_file: false,
        run: Handler::Names(open),
    },
    Command {
        name: "close",
        alias: "c",
        args: None,
        summary: "close the current open file",
        help: "",
        min: 0,
        max: Some(0),
        needs_file: true,
        run: Handler::Words(close),
    },
    Command {
        name: "quit",
        alias: "q",
        args: None,
        summary: "exit the program",
        help: "",
        min: 0,
        max: None,
        needs_file: false,
        run: Handler::Words(quit),
    },
    Command {
        name: "help",
        alias: "?",
        args: Some("[command]"),
        summary: "help for one or all commands",
        help: "",
        min: 0,
        max: Some(1),
        needs_file: false,
        run: Handler::Words(help),
    },
    Command {
        name: "sleep",
        alias: "",
        args: None,
        summary: "waits for the given value in milliseconds",
        help: "",
        min: 1,
        max: Some(1),
        needs_file: false,
        run: Handler::Words(sleep),
    },
    Command {
        name: "abort",
        alias: "",
        args: None,
        summary: "simulate a program crash using abort(3)",
        help: "",
        min: 0,
        max: Some(0),
        needs_file: false,
        run: Handler::Words(abort),
    },
    Command {
        name: "sigraise",
        alias: "",
        args: Some("signal"),
        summary: "raises a signal",
        help: "
 Sends this signal, a number, to the program itself: 'sigraise 9' ends it as
 if it had been killed.
",
        min: 1,
        max: Some(1),
        needs_file: false,
        run: Handler::Words(sigraise),
    },
];

fn open(session: &mut Session, args: &[&OsStr]) -> Outcome {
    let mut opening = Opening::default();
    let mut options = Getopt::new(args, "snCro:ki:t:d:U", &[]);
    for option in options.by_ref() {
        match option.map_err(Failure::Option)? {
            ('o', Some(text)) => join(&mut opening.options, text),
            (letter, value) => {
                let done = opening.set(letter, value).unwrap_or(Ok(()));
                done.map_err(Failure::Named)?;
            }
        }
    }
    match options.into_rest().as_slice() {
        [] if opening.options.is_some() => {}
        [name] => opening.name = Some((*name).to_owned()),
        _ => return Err(Failure::Usage),
    }
    session.open(&opening)
}

/// Adds more options to a list of options.
fn join(options: &mut Option<OsString>, more: &OsStr) {
    match options {
        Some(text) => {
            text.push(",");
            text.push(more);
        }
        None => *options = Some(more.to_owned()),
    }
}

fn close(session: &mut Session, _args: &[&str]) -> Outcome {
    session.close()
}

fn quit(session: &mut Session, _args: &[&str]) -> Outcome {
    session.quit = true;
    Ok(())
}

fn help(session: &mut Session, args: &[&str]) -> Outcome {
    let out = session.out.clone();
    let Some(name) = args.first() else {
        for command in session.commands() {
            let usage = command.usage(command.name);
            out.print(format_args!("{usage}\n"));
        }
        let hint = "Use 'help commandname' for extended help.";
        out.print(format_args!("\n{hint}\n"));
        return Ok(());
    };
    match session.command(name) {
        Some(command) => {
            let usage = command.usage(name);
            out.print(format_args!("{usage}\n{}", command.help));
        }
        None => return Err(Failure::Out(format!("command {name} not found"))),
    }
    Ok(())
}

fn sleep(session: &mut Session, args: &[&str]) -> Outcome {
    let milliseconds = parse_integer(args[0])
        .ok()
        .and_then(|n| u64::try_from(n).ok())
        .ok_or_else(|| Failure::Out(format!("{} is not a valid number", args[0])))?;
    session.out.flush();
    let time = Duration::from_millis(milliseconds);
    match &session.image {
        Some(image) if image.is_busy() => image.queue.block_on(pass(time)),
        _ => thread::sleep(time),
    }
    Ok(())
}

fn abort(session: &mut Session, _args: &[&str]) -> Outcome {
    session.out.flush();
    std::process::abort()
}

fn sigraise(session: &mut Session, args: &[&str]) -> Outcome {
    /// The highest signal there is.
    const MAX: u64 = 64;
    let signal = size(args[0])?;
    if signal > MAX {
        let text = args[0];
        return Err(Failure::Out(format!(
            "signal argument '{text}' is too large to be a valid signal"
        )));
    }
    session.out.flush();
    // SAFETY: `raise` takes a number, and handlers of signals are async-signal-safe.
    #[allow(unsafe_code)]
    unsafe {
        libc::raise(signal as i32);
    }
    Ok(())
}

/// Is ready after some time, while the queue drives what else there is.
async fn pass(time: Duration) {
    let end = Instant::now() + time;
    let mut alarm = None;
    poll_fn(|context| {
        if Instant::now() >= end {
            return Poll::Ready(());
        }
        if alarm.is_none() {
            let waker = context.waker().clone();
            alarm = thread::Builder::new()
                .spawn(move || {
                    thread::sleep(end.saturating_duration_since(Instant::now()));
                    waker.wake();
                })
                .ok();
        }
        match alarm {
            Some(_) => Poll::Pending,
            // No thread could be started, so nothing would wake this task.
            None => {
                thread::sleep(end.saturating_duration_since(Instant::now()));
                Poll::Ready(())
            }
        }
    })
    .await;
}
