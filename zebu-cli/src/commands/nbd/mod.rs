//! `nbd`: serves images over NBD, with qemu-nbd's options and under its name.

mod arguments;
mod images;
mod label;
mod list;
mod tls;

use clap::CommandFactory;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use zebu::block::Device;
use zebu::internal::Statistics;
use zebu::internal::nbd::DEFAULT_PORT;
use zebu::storage::Queue;
use zebu_nbd::{Export, Listener, Server, ServerOptions};

use super::command::{Command, ValueOf, Values};
use crate::arguments::parse;
use crate::commands::serve::{self, Exported, Life, Process, failed};
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
    values: &[(ValueOf::Option("bitmap"), Values::Bitmaps)],
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
    // qemu-nbd prints nothing about clients, also with -v.
    let verbose = arguments.verbose && context.role != "qemu-nbd";
    let process = Process::begin(arguments.fork, verbose)?;
    serve(context, &arguments, passed, process)
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
    process: Process,
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
    let life = Life {
        server: "nbd",
        metrics: &arguments.metrics,
        pid_file: arguments.pid_file.as_deref(),
        stats: arguments.stats,
    };
    let listen = |_: &[_]| listeners(arguments, passed);
    let start = |exports: &[Arc<Export>], listeners: &[Listener]| {
        let names: Vec<&str> = exports.iter().map(|export| export.name()).collect();
        for listener in listeners {
            tracing::info!("listening at {listener}, exports {names:?}");
        }
        Server::new(exports.to_vec(), options).map_err(|e| failed("the server", &e))
    };
    process.serve(context, &life, &queue, exports, listen, start)
}

impl Exported for Export {
    fn name(&self) -> &str {
        &self.options().name
    }
    fn device(&self) -> &Device {
        self.device()
    }
    fn size(&self) -> u64 {
        self.size()
    }
    fn statistics(&self) -> &Statistics {
        self.statistics()
    }
    fn into_device(self) -> Device {
        self.into_device()
    }
}

impl serve::Server for Server {
    async fn run(
        self,
        queue: &Queue,
        listeners: Vec<Listener>,
        stop: impl Future<Output = ()>,
    ) -> io::Result<()> {
        self.run(queue, listeners, stop).await.map(drop)
    }
}
