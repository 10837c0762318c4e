//! What commands that serve images have in common: which images, how the
//! process lives, and what it says.

mod daemon;
mod images;
mod log;
mod metrics;
mod pid_file;
mod signals;

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use zebu::block::Device;
use zebu::internal::Statistics;
use zebu::storage::Queue;

use crate::commands::command::Entry;
use crate::output::Shown;
use crate::program::Failure;
pub use daemon::{Parent, fork};
pub use images::ImageArguments;
pub use log::Log;
pub use metrics::MetricsArguments;
pub use pid_file::PidFile;
pub use signals::Signals;

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
pub trait Exported: Send + Sync {
    /// Its name.
    fn name(&self) -> &str;
    /// The device.
    fn device(&self) -> &Device;
    /// Bytes that are exported.
    fn size(&self) -> u64;
    /// Counters of its requests.
    fn statistics(&self) -> &Statistics;
}

impl Exported for zebu_nbd::Export {
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
}

impl Exported for zebu_vhost::Export {
    fn name(&self) -> &str {
        self.name()
    }
    fn device(&self) -> &Device {
        self.device()
    }
    fn size(&self) -> u64 {
        self.device().size()
    }
    fn statistics(&self) -> &Statistics {
        self.statistics()
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
pub fn failed(what: &str, error: &std::io::Error) -> Failure {
    Failure::new(format!(
        "Failed to set up {what}: {}",
        zebu::strerror(error)
    ))
}

/// Makes all devices durable, which are not served any more. They are given with their names; None:
/// a thread still has it, although all have ended.
pub fn close(
    queue: &Queue,
    devices: impl Iterator<Item = (OsString, Option<Device>)>,
) -> Result<(), Failure> {
    let mut result = Ok(());
    for (name, device) in devices {
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
pub fn print_statistics<E: Exported>(log: &Log, exports: &[Arc<E>]) {
    log.say(&exports.iter().map(|e| statistics(&**e)).collect::<String>());
}

fn statistics(export: &dyn Exported) -> String {
    let mut text = format!("export '{}':\n{}", export.name(), export.statistics());
    if let Some(image) = export.device().top().as_qcow2() {
        let (hits, loads) = image.cache_hits_and_loads();
        text += &format!("  l2 cache: {hits} hits, {loads} loads\n");
    }
    text
}

/// Says what came of a look whether the image of an export has grown.
pub fn looked_again(name: &str, device: &Device, looked: zebu::Result<bool>) {
    match looked {
        Ok(true) => tracing::info!("export {name:?} has {} bytes now", device.size()),
        Ok(false) => {}
        Err(e) => tracing::warn!("export {name:?}: its size cannot be found: {e}"),
    }
}
