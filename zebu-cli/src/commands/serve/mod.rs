//! The frame of a server: what commands that serve images have in common.
//!
//! A command opens its exports and gives [`Process::serve`] what is its own: where it listens, and its
//! [`Server`]. The rest is here: `images` are the options of what is served, `daemon`, `signals`, `pid_file`
//! and `log` the life of the process, `metrics` what is told of it.

mod daemon;
mod images;
mod log;
mod metrics;
mod pid_file;
mod signals;

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;

use zebu::block::Device;
use zebu::internal::Statistics;
use zebu::storage::Queue;
use zebu_nbd::Listener;

use crate::commands::command::Entry;
use crate::output::Shown;
use crate::program::{Context, Failure, Outcome};
use daemon::Parent;
pub use images::ImageArguments;
use log::Log;
pub use metrics::MetricsArguments;
use pid_file::PidFile;
use signals::Signals;

/// The exit status of servers, for their man pages.
pub const EXIT_STATUS: [Entry; 2] = [
    (
        "0",
        "The server was stopped by SIGTERM, SIGINT or SIGHUP, or its last client left.",
    ),
    (
        "1",
        "The server could not start, or data could not be made durable.",
    ),
];

/// An export of any server.
pub trait Exported: Send + Sync + 'static {
    /// Its name.
    fn name(&self) -> &str;
    /// The device.
    fn device(&self) -> &Device;
    /// Bytes that are exported.
    fn size(&self) -> u64 {
        self.device().size()
    }
    /// Counters of its requests.
    fn statistics(&self) -> &Statistics;
    /// Looks whether the image has grown.
    fn refresh_size(&self) -> zebu::Result<bool> {
        self.device().refresh_size()
    }
    /// The device, when no server has the export any more.
    fn into_device(self) -> Device
    where
        Self: Sized;
}

/// A server that is ready to run.
pub trait Server {
    /// Serves connections to the listeners until `stop` is ready, at least. Then requests in flight are finished
    /// and all connections ended: nothing of it has an export any more.
    fn run(
        self,
        queue: &Queue,
        listeners: Vec<Listener>,
        stop: impl Future<Output = ()>,
    ) -> impl Future<Output = io::Result<()>>;
}

/// The process of a server: in the background, if that is wanted.
pub struct Process {
    parent: Option<Parent>,
    signals: Signals,
    log: Log,
}

/// What the command line says of a server of any kind.
pub struct Life<'a> {
    /// What it is called in its metrics.
    pub server: &'static str,
    pub metrics: &'a MetricsArguments,
    pub pid_file: Option<&'a OsStr>,
    pub stats: bool,
}

impl Process {
    /// Goes to the background with `fork`, and takes signals and messages from now on. Before it there is no
    /// thread.
    pub fn begin(fork: bool, verbose: bool) -> Result<Process, Failure> {
        let parent = match fork {
            true => Some(daemon::fork()?),
            false => None,
        };
        let signals = Signals::new().map_err(|e| failed("signals", &e))?;
        let log = Log::start(verbose).map_err(|e| failed("the log", &e))?;
        Ok(Process {
            parent,
            signals,
            log,
        })
    }

    /// Serves `exports` until a signal or the server ends it, and makes them durable. `listen` is called once
    /// clients may come, and `start` when nothing else can fail.
    pub fn serve<E: Exported, S: Server>(
        self,
        context: &Context,
        life: &Life<'_>,
        queue: &Queue,
        exports: Vec<Arc<E>>,
        listen: impl FnOnce(&[Arc<E>]) -> Result<Vec<Listener>, Failure>,
        start: impl FnOnce(&[Arc<E>], &[Listener]) -> Result<S, Failure>,
    ) -> Outcome {
        let log = &self.log;
        // Clients of the server find them.
        let metrics = life.metrics.start(life.server, &exports)?;
        let listeners = listen(&exports)?;
        let devices = exports.iter().map(|export| export.device());
        let _pid_file = PidFile::write(context, life.pid_file, devices)?;
        let server = start(&exports, &listeners)?;
        if let Some(parent) = self.parent {
            // From then on standard error is /dev/null.
            log.finish();
            parent.ready().map_err(|e| failed("the daemon", &e))?;
        }
        let print = || print_statistics(log, &exports);
        let stop = (self.signals).until_end(queue, print, || refresh_sizes(&exports));
        let served = queue.block_on(server.run(queue, listeners, stop));
        // The exports are only the server's again.
        drop(metrics);
        if life.stats {
            log.finish();
            print_statistics(log, &exports);
        }
        let served = served.map_err(|e| failed("a connection", &e));
        close(queue, exports).and(served).map(|()| 0)
    }
}

/// Refuses statistics that would go nowhere.
pub fn refuse_stats(fork: bool, stats: bool) -> Result<(), Failure> {
    match fork && stats {
        true => Err(Failure::new(
            "--stats: with --fork there is no standard error; use --metrics and 'zebu top'",
        )),
        false => Ok(()),
    }
}

/// The failure to set up `what`.
pub fn failed(what: &str, error: &io::Error) -> Failure {
    Failure::new(format!(
        "Failed to set up {what}: {}",
        zebu::strerror(error)
    ))
}

/// Makes all devices durable, which are not served any more.
fn close<E: Exported>(queue: &Queue, exports: Vec<Arc<E>>) -> Result<(), Failure> {
    let mut result = Ok(());
    for export in exports {
        let name = export.device().top().spec.display_name();
        // None: a thread still has it, although all have ended.
        let device = Arc::into_inner(export).map(E::into_device);
        result = result.and(close_one(queue, &name, device));
    }
    result
}

fn close_one(queue: &Queue, name: &OsStr, device: Option<Device>) -> Result<(), Failure> {
    let Some(device) = device else {
        // What is durable is; the rest is as after a crash.
        let text = format!(
            "Could not close '{}': a connection failed to end",
            name.shown()
        );
        return Err(Failure::new(text));
    };
    queue
        .block_on(device.close(queue))
        .map_err(|e| Failure::new(format!("Could not close '{}': {e}", name.shown())))
}

/// Prints what was done with each export.
fn print_statistics<E: Exported>(log: &Log, exports: &[Arc<E>]) {
    log.say(&exports.iter().map(|e| statistics(&**e)).collect::<String>());
}

fn statistics(export: &dyn Exported) -> String {
    let mut text = format!(
        "export '{}':\n{}",
        export.name().shown(),
        export.statistics()
    );
    if let Some(image) = export.device().top().as_qcow2() {
        let (hits, loads) = image.cache_hits_and_loads();
        text += &format!("  l2 cache: {hits} hits, {loads} loads\n");
    }
    text
}

/// Looks whether images have grown, and says so.
fn refresh_sizes<E: Exported>(exports: &[Arc<E>]) {
    for export in exports {
        let name = export.name();
        match export.refresh_size() {
            Ok(true) => {
                tracing::info!("export {name:?} has {} bytes now", export.device().size());
            }
            Ok(false) => {}
            Err(e) => tracing::warn!("export {name:?}: its size cannot be found: {e}"),
        }
    }
}
