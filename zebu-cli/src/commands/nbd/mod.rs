//! `nbd`: serves images over NBD, with qemu-nbd's options and under its name.

mod arguments;
mod daemon;
mod descriptors;
mod images;
mod list;
mod signals;
mod tls;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use zebu::block::LayerImage;
use zebu::nbd::DEFAULT_PORT;
use zebu::storage::Queue;
use zebu_nbd::{Export, Listener, Server, ServerOptions};

use crate::failure::{Failure, Outcome};
use crate::program::{self, Invocation};
use arguments::Arguments;
use daemon::Parent;
use signals::{Event, Signals};

/// Clients at a time at most, where no limit is given.
const MOST_CLIENTS: usize = 1024;

/// Runs the command.
pub fn run(invocation: &Invocation, arguments: Vec<OsString>) -> Outcome {
    let version = ["-V", "--version"];
    if arguments.iter().any(|a| version.iter().any(|v| a == *v)) {
        return crate::output::print(&program::version(invocation));
    }
    let arguments: Arguments = program::parse(invocation, arguments)?;
    arguments.refuse()?;
    if arguments.list {
        return list::run(&arguments);
    }
    // Before any other descriptor is made.
    let passed = Listener::passed().map_err(|e| failed("the sockets that were passed", &e))?;
    check_addresses(&arguments, &passed)?;
    // Before any thread is there.
    let parent = match arguments.fork {
        true => Some(daemon::fork()?),
        false => None,
    };
    let signals = Signals::new().map_err(|e| failed("signals", &e))?;
    log_to_stderr(arguments.verbose);
    serve(invocation, &arguments, passed, parent, signals)
}

fn failed(what: &str, error: &std::io::Error) -> Failure {
    Failure::new(format!(
        "Failed to set up {what}: {}",
        zebu::strerror(error)
    ))
}

fn log_to_stderr(verbose: bool) {
    let level = match verbose {
        true => tracing::Level::DEBUG,
        false => tracing::Level::WARN,
    };
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_target(false)
        .with_ansi(false)
        .with_writer(std::io::stderr);
    // Another one is there in no case.
    let _ = subscriber.try_init();
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
        let listener = Listener::unix(Path::new(path)).map_err(|e| {
            Failure::new(format!(
                "Failed to bind socket to {path}: {}",
                zebu::strerror(&e)
            ))
        })?;
        return Ok(vec![listener]);
    }
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
    invocation: &Invocation,
    arguments: &Arguments,
    passed: Vec<Listener>,
    parent: Option<Parent>,
    signals: Signals,
) -> Outcome {
    let queue_options = images::queue_options(arguments)?;
    let queue = Queue::new(queue_options.clone())
        .map_err(|e| Failure::new(zebu::strerror(&e).to_string()))?;
    let clients = arguments.clients()?;
    descriptors::allow_all();
    let options = ServerOptions {
        clients: if clients == 0 { MOST_CLIENTS } else { clients },
        persistent: arguments.persistent,
        handshake_limit: match arguments.handshake_limit()? {
            0 => None,
            seconds => Some(Duration::from_secs(seconds)),
        },
        tls: tls::server(arguments)?,
        queue: queue_options,
    };
    let exports = images::open(&queue, arguments, clients != 1, &invocation.name)?;
    let names = exports.iter().map(|export| export.options().name.clone());
    let names: Vec<String> = names.collect();
    let listeners = listeners(arguments, passed)?;
    let _pid_file = PidFile::write(arguments.pid_file.as_deref())?;
    for listener in &listeners {
        tracing::info!("listening at {listener}, exports {names:?}");
    }
    let server = Server::new(exports.clone(), options).map_err(|e| failed("the server", &e))?;
    if let Some(parent) = parent {
        parent.ready().map_err(|e| failed("the daemon", &e))?;
    }
    let stop = async {
        loop {
            match signals.next(&queue).await {
                Ok(Event::Statistics) => print_statistics(&exports),
                Ok(Event::End) | Err(_) => return,
            }
        }
    };
    let result = queue.block_on(server.run(&queue, listeners, stop));
    if arguments.stats {
        print_statistics(&exports);
    }
    let served = result.map(drop).map_err(|e| failed("a connection", &e));
    close(&queue, exports).and(served).map(|()| 0)
}

/// Makes everything durable.
fn close(queue: &Queue, exports: Vec<Arc<Export>>) -> Result<(), Failure> {
    let mut result = Ok(());
    for export in exports {
        let name = export.device().top().name.clone();
        let Some(export) = Arc::into_inner(export) else {
            // What is durable is; the rest is as after a crash.
            let text = format!("Could not close '{name}': a connection failed to end");
            result = Err(Failure::new(text));
            continue;
        };
        if let Err(e) = queue.block_on(export.into_device().close(queue)) {
            result = Err(Failure::new(format!("Could not close '{name}': {e}")));
        }
    }
    result
}

fn print_statistics(exports: &[Arc<Export>]) {
    let mut text = String::new();
    for export in exports {
        text += &format!(
            "export '{}':\n{}",
            export.options().name,
            export.statistics()
        );
        if let LayerImage::Qcow2(image) = &export.device().top().image {
            let (hits, loads) = image.cache_hits_and_loads();
            text += &format!("  l2 cache: {hits} hits, {loads} loads\n");
        }
    }
    // Nobody is left to tell that stderr is closed.
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
}

/// The file with the process's number, which goes with the process.
struct PidFile(Option<PathBuf>);

impl PidFile {
    fn write(path: Option<&str>) -> Result<Self, Failure> {
        let Some(path) = path else {
            return Ok(PidFile(None));
        };
        fs::write(path, format!("{}\n", std::process::id())).map_err(|e| {
            Failure::new(format!(
                "Cannot write pid file {path}: {}",
                zebu::strerror(&e)
            ))
        })?;
        Ok(PidFile(std::path::absolute(path).ok()))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Gone already is as good.
            let _ = fs::remove_file(path);
        }
    }
}
