//! `nbd`: serves images over NBD, with qemu-nbd's options and under its name.

mod arguments;
mod images;
mod label;
mod list;
mod tls;

use clap::CommandFactory;
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use zebu::internal::nbd::DEFAULT_PORT;
use zebu::storage::Queue;
use zebu_nbd::{Export, Listener, Server, ServerOptions};

use super::command::{Command, Place, Values};
use crate::arguments::parse;
use crate::commands::serve::{self, Log, Parent, PidFile, Signals, failed};
use crate::output::Shown;
use crate::program::{Context, Failure, Outcome, trace, version};
pub use arguments::Arguments;
use label::SocketLabel;

pub const COMMAND: Command = Command {
    name: "nbd",
    operands: "[FILENAME]",
    summary: "Serve images over NBD",
    options: Arguments::command,
    run,
    examples: "
        # In the background, until it is killed
        zebu nbd --fork --pid-file disk.pid -t -e 8 -k $PWD/disk.sock disk.qcow2
        # What a server has
        zebu nbd -L -k $PWD/disk.sock
        # Copy from the server
        zebu convert \"nbd+unix:///?socket=$PWD/disk.sock\" copy.raw
        # Stop the server
        kill $(cat disk.pid)",
    values: &[(Place::Option("bitmap"), Values::Bitmaps)],
    exit_status: &serve::EXIT_STATUS,
    files: &[
        (
            "DIR of --tls-certificates",
            "server-cert.pem, server-key.pem and ca-cert.pem, which signs the certificates of clients.",
        ),
        (
            "FILE of --tls-psk",
            "Lines USER:KEY, as psktool writes them.",
        ),
    ],
    ..Command::PLAIN
};

/// Clients at a time at most, where no limit is given.
const MOST_CLIENTS: usize = 1024;

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    if arguments.iter().any(|a| a == "-V" || a == "--version") {
        return crate::output::report(&version(context));
    }
    let arguments: Arguments = parse(context, arguments)?;
    arguments.refuse()?;
    for events in &arguments.trace {
        trace::warn(context, events);
    }
    if arguments.list {
        return list::run(context, &arguments);
    }
    // Before any other descriptor is made.
    let passed = Listener::passed().map_err(|e| failed("the sockets that were passed", &e))?;
    check_addresses(&arguments, &passed)?;
    // Before any thread is there.
    let parent = match arguments.fork {
        true => Some(serve::fork()?),
        false => None,
    };
    let signals = Signals::new().map_err(|e| failed("signals", &e))?;
    // qemu-nbd prints nothing about clients, also with -v.
    let verbose = arguments.verbose && context.role != "qemu-nbd";
    let log = Log::start(verbose).map_err(|e| failed("the log", &e))?;
    serve(context, &arguments, passed, parent, signals, &log)
}

fn check_addresses(arguments: &Arguments, passed: &[Listener]) -> Result<(), Failure> {
    let address = arguments.bind.is_some() || arguments.port.is_some();
    if arguments.socket.is_some() && address {
        let text = "Unix socket can't be combined with --bind or --port";
        return Err(Failure::new(text));
    }
    if !passed.is_empty() && (address || arguments.socket.is_some()) {
        let text = "--socket, --bind and --port can't be used when using socket activation";
        return Err(Failure::new(text));
    }
    match &arguments.socket {
        Some(path) if !Path::new(path).is_absolute() => {
            Err(Failure::new("socket path must be absolute"))
        }
        _ => Ok(()),
    }
}

fn listeners(arguments: &Arguments, passed: Vec<Listener>) -> Result<Vec<Listener>, Failure> {
    if !passed.is_empty() {
        return Ok(passed);
    }
    if let Some(path) = &arguments.socket {
        let _label = SocketLabel::set(arguments.selinux_label.as_deref())?;
        let listener = Listener::unix(Path::new(path)).map_err(|e| {
            Failure::new(format!(
                "Failed to bind socket to {}: {}",
                path.shown(),
                zebu::strerror(&e)
            ))
        })?;
        return Ok(vec![listener]);
    }
    let _label = SocketLabel::set(arguments.selinux_label.as_deref())?;
    let host = arguments.bind.as_deref().unwrap_or("0.0.0.0");
    let port = arguments.port()?.unwrap_or(DEFAULT_PORT);
    Listener::tcp(host, port).map_err(|e| {
        Failure::new(format!(
            "Failed to listen at {host}:{port}: {}",
            zebu::strerror(&e)
        ))
    })
}

fn serve(
    context: &Context,
    arguments: &Arguments,
    passed: Vec<Listener>,
    parent: Option<Parent>,
    signals: Signals,
    log: &Log,
) -> Outcome {
    let queue_options = arguments.image.queue_options()?;
    let queue = Queue::new(queue_options.clone())
        .map_err(|e| Failure::new(zebu::strerror(&e).to_string()))?;
    let clients = arguments.clients()?;
    let options = ServerOptions {
        clients: if clients == 0 { MOST_CLIENTS } else { clients },
        persistent: arguments.persistent,
        handshake_limit: match arguments.handshake_limit()? {
            0 => None,
            seconds => Some(Duration::from_secs(seconds)),
        },
        tls: tls::server(context, arguments)?,
        queue: queue_options,
    };
    let exports = images::open(context, &queue, arguments, clients != 1)?;
    // Clients of the server find them.
    let metrics = arguments.metrics.start("nbd", &exports)?;
    let names = exports.iter().map(|export| export.options().name.clone());
    let names: Vec<String> = names.collect();
    let listeners = listeners(arguments, passed)?;
    let devices = exports.iter().map(|export| export.device());
    let _pid_file = PidFile::write(context, arguments.pid_file.as_deref(), devices)?;
    for listener in &listeners {
        tracing::info!("listening at {listener}, exports {names:?}");
    }
    let server = Server::new(exports.clone(), options).map_err(|e| failed("the server", &e))?;
    if let Some(parent) = parent {
        // From then on standard error is /dev/null.
        log.finish();
        parent.ready().map_err(|e| failed("the daemon", &e))?;
    }
    let stop = signals.until_end(
        &queue,
        || serve::print_statistics(log, &exports),
        || refresh_size(&exports),
    );
    let result = queue.block_on(server.run(&queue, listeners, stop));
    // The exports are only the server's again.
    drop(metrics);
    if arguments.stats {
        log.finish();
        serve::print_statistics(log, &exports);
    }
    let served = result.map(drop).map_err(|e| failed("a connection", &e));
    let devices = exports.into_iter().map(|export| {
        let name = export.device().top().spec.display_name();
        (name, Arc::into_inner(export).map(Export::into_device))
    });
    serve::close(&queue, devices).and(served).map(|()| 0)
}

/// Looks whether images have grown: clients that come from now on see it.
fn refresh_size(exports: &[Arc<Export>]) {
    for export in exports {
        let device = export.device();
        serve::looked_again(&export.options().name, device, device.refresh_size());
    }
}
