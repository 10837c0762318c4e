//! `vhost-user-blk`: serves images as disks of virtual machines.

mod arguments;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;

use clap::CommandFactory;
use zebu::storage::Queue;
use zebu_nbd::Listener;
use zebu_vhost::{Export, ExportOptions, Server};

use super::command::Command;
use crate::arguments::{objects, parse};
use crate::commands::serve::{self, Log, Parent, PidFile, Signals, failed};
use crate::output::Shown;
use crate::program::{Context, Failure, Outcome};
pub use arguments::Arguments;
use arguments::Wanted;

pub const COMMAND: Command = Command {
    name: "vhost-user-blk",
    operands: "<FILENAME>",
    summary: "Serve images to virtual machines over vhost-user",
    options: Arguments::command,
    run,
    examples: "
        # A disk of four virtqueues, in the background
        zebu vhost-user-blk --fork --pid-file disk.pid --socket-path $PWD/disk.sock --num-queues 4 \
          disk.qcow2
        # Stop the server
        kill $(cat disk.pid)",
    exit_status: &serve::EXIT_STATUS,
    ..Command::PLAIN
};

/// The capabilities that vhost-user back ends report: the options `--read-only` and `--blk-file`
/// exist.
const CAPABILITIES: &str = "{\"type\": \"block\", \"features\": [\"read-only\", \"blk-file\"]}\n";

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = parse(context, arguments)?;
    if arguments.print_capabilities {
        return crate::output::report(CAPABILITIES);
    }
    serve::refuse_stats(arguments.fork, arguments.stats)?;
    arguments
        .object
        .iter()
        .try_for_each(|text| objects::add(context, text))?;
    let wanted = arguments.wanted()?;
    // Before any thread is there.
    let parent = match arguments.fork {
        true => Some(serve::fork()?),
        false => None,
    };
    let signals = Signals::new().map_err(|e| failed("signals", &e))?;
    let log = Log::start(arguments.verbose).map_err(|e| failed("the log", &e))?;
    serve(context, &arguments, &wanted, parent, signals, &log)
}

fn serve(
    context: &Context,
    arguments: &Arguments,
    wanted: &[Wanted],
    parent: Option<Parent>,
    signals: Signals,
    log: &Log,
) -> Outcome {
    let options = arguments.image.queue_options()?.force_async(2);
    let queue =
        Queue::new(options.clone()).map_err(|e| Failure::new(zebu::strerror(&e).to_string()))?;
    let exports = open(context, &queue, arguments, wanted)?;
    // Clients of the server find them.
    let metrics = arguments.metrics.start("vhost-user-blk", &exports)?;
    let listeners = wanted.iter().map(|wanted| listen(&wanted.socket));
    let listeners: Vec<Listener> = listeners.collect::<Result<_, _>>()?;
    let mut doors = Vec::new();
    for (export, listener) in exports.iter().zip(&listeners) {
        if let Listener::Unix(listener, _) = listener {
            let listener = listener.try_clone().map_err(|e| failed("a socket", &e))?;
            doors.push((export.clone(), listener));
        }
        tracing::info!("listening at {listener}, export {:?}", export.name());
    }
    let devices = exports.iter().map(|export| export.device());
    let _pid_file = PidFile::write(context, arguments.pid_file.as_deref(), devices)?;
    let server = Server::start(doors, &options).map_err(|e| failed("the server", &e))?;
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
    drop(queue.block_on(server.run_until(stop)));
    drop(listeners);
    // The exports are only the server's again.
    drop(metrics);
    if arguments.stats {
        log.finish();
        serve::print_statistics(log, &exports);
    }
    let devices = exports.into_iter().map(|export| {
        let name = export.device().top().spec.display_name();
        (name, Arc::into_inner(export).map(Export::into_device))
    });
    serve::close(&queue, devices).map(|()| 0)
}

fn open(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    wanted: &[Wanted],
) -> Result<Vec<Arc<Export>>, Failure> {
    let options = arguments.image.open_options(context)?;
    let mut names = HashSet::new();
    let mut exports = Vec::new();
    for wanted in wanted {
        if !names.insert(&wanted.name) {
            let text = format!("export name '{}' is there twice", wanted.name);
            return Err(Failure::new(text));
        }
        let mut options = options.clone();
        options.write &= wanted.writable;
        let device = arguments
            .image
            .open(context, queue, &wanted.image, &options)?;
        let options = ExportOptions {
            name: wanted.name.clone(),
            queues: wanted.queues,
            block_size: wanted.block_size,
        };
        exports.push(Export::new(device, options));
    }
    Ok(exports)
}

fn listen(path: &OsStr) -> Result<Listener, Failure> {
    // A server that runs in the background is elsewhere when it removes it.
    let listener = std::path::absolute(Path::new(path)).and_then(|path| Listener::unix(&path));
    listener.map_err(|e| {
        let why = zebu::strerror(&e);
        Failure::new(format!("Failed to bind socket to {}: {why}", path.shown()))
    })
}

/// Looks whether images have grown.
fn refresh_size(exports: &[Arc<Export>]) {
    for export in exports {
        serve::looked_again(export.name(), export.device(), export.refresh_size());
    }
}
