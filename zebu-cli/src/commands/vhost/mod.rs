//! `vhost-user-blk`: serves images as disks of virtual machines.

mod arguments;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::sync::Arc;

use clap::CommandFactory;
use zebu::block::Device;
use zebu::internal::Statistics;
use zebu::storage::Queue;
use zebu_nbd::Listener;
use zebu_vhost::{Export, ExportOptions, Server};

use super::command::Command;
use crate::arguments::{objects, parse};
use crate::commands::serve::{self, Exported, Life, Process, failed};
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
    let process = Process::begin(arguments.fork, arguments.verbose)?;
    let options = arguments.image.queue_options()?.force_async(2);
    let queue =
        Queue::new(options.clone()).map_err(|e| Failure::new(zebu::strerror(&e).to_string()))?;
    let exports = open(context, &queue, &arguments, &wanted)?;
    let life = Life {
        server: "vhost-user-blk",
        metrics: &arguments.metrics,
        pid_file: arguments.pid_file.as_deref(),
        stats: arguments.stats,
    };
    let listeners = |exports: &[Arc<Export>]| {
        let listeners = wanted.iter().map(|wanted| listen(&wanted.socket));
        let listeners: Vec<Listener> = listeners.collect::<Result<_, _>>()?;
        for (export, listener) in exports.iter().zip(&listeners) {
            tracing::info!("listening at {listener}, export {:?}", export.name());
        }
        Ok(listeners)
    };
    let start = |exports: &[Arc<Export>], listeners: &[Listener]| {
        let mut doors = Vec::new();
        for (export, listener) in exports.iter().zip(listeners) {
            if let Listener::Unix(listener, _) = listener {
                let listener = listener.try_clone().map_err(|e| failed("a socket", &e))?;
                doors.push((export.clone(), listener));
            }
        }
        Server::start(doors, &options).map_err(|e| failed("the server", &e))
    };
    process.serve(context, &life, &queue, exports, listeners, start)
}

impl Exported for Export {
    fn name(&self) -> &str {
        self.name()
    }
    fn device(&self) -> &Device {
        self.device()
    }
    fn statistics(&self) -> &Statistics {
        self.statistics()
    }
    fn refresh_size(&self) -> zebu::Result<bool> {
        self.refresh_size()
    }
    fn into_device(self) -> Device {
        self.into_device()
    }
}

impl serve::Server for Server {
    async fn run(
        self,
        _: &Queue,
        listeners: Vec<Listener>,
        stop: impl Future<Output = ()>,
    ) -> io::Result<()> {
        self.run_until(stop).await;
        drop(listeners);
        Ok(())
    }
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
