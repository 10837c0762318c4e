//! The images that a server serves: options that its commands have in common,
//! and opening them.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use clap::Args;
use zebu::block::{DetectZeroes, Device, NATIVE_NEEDS_DIRECT, OpenOptions, Policy};
use zebu::qcow2::SnapshotName;
use zebu::storage::{CacheMode, EngineKind, Queue, QueueOptions};

use crate::arguments::{size, untrusted};
use crate::commands::io::opening::Opening;
use crate::commands::io::overlay::Overlay;
use crate::images::open;
use crate::output::Shown;
use crate::program::{Context, Failure};

/// A thread that waits for longer has nothing to do, and sleeps.
const MAX_POLL: Duration = Duration::from_secs(1);

/// The image to open, and the options of opening.
#[derive(Debug, Args)]
pub struct ImageArguments {
    /// Format of the image
    #[arg(short = 'f', long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Open read-only
    #[arg(short = 'r', long)]
    pub read_only: bool,
    /// Write to a temporary overlay
    #[arg(short = 's', long)]
    pub snapshot: bool,
    /// Serve an internal snapshot, read-only
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    pub load_snapshot: Option<OsString>,
    /// Same as --cache=none
    #[arg(short = 'n', long)]
    pub nocache: bool,
    /// Cache mode: none, writeback (default), writethrough, directsync or unsafe
    #[arg(long, value_name = "MODE")]
    pub cache: Option<String>,
    /// AIO mode: threads, native or io_uring
    #[arg(long, value_name = "MODE")]
    pub aio: Option<String>,
    /// Maximum time in nanoseconds that a thread polls before it sleeps (default 40000); 0: no
    /// polling (not in qemu-nbd)
    #[arg(long, value_name = "N")]
    pub poll_max_ns: Option<String>,
    /// Discard mode: ignore (default) or unmap
    #[arg(long, value_name = "MODE")]
    pub discard: Option<String>,
    /// Detection of zeroes: off, on or unmap
    #[arg(long, value_name = "MODE")]
    pub detect_zeroes: Option<String>,
    /// Store dirty bitmaps with each flush, not only at the end: they are consistent after a crash
    /// if nothing was written since (not in qemu-nbd)
    #[arg(long)]
    pub store_bitmaps: bool,
    /// Interpret the name as options (driver=qcow2,file.filename=PATH)
    #[arg(long)]
    pub image_opts: bool,
}

impl ImageArguments {
    /// Options of each connection's queue.
    pub fn queue_options(&self) -> Result<QueueOptions, Failure> {
        let engine = match &self.aio {
            None => EngineKind::best(),
            Some(name) => name
                .parse()
                .map_err(|_| Failure::new(format!("invalid aio mode '{name}'")))?,
        };
        if engine == EngineKind::Native && !self.cache()?.is_direct() {
            return Err(Failure::new(NATIVE_NEEDS_DIRECT));
        }
        Ok(QueueOptions::default().engine(engine).poll(self.poll()?))
    }

    fn poll(&self) -> Result<Duration, Failure> {
        let Some(text) = &self.poll_max_ns else {
            return Ok(QueueOptions::SERVERS_POLL);
        };
        match size::number(text).map(Duration::from_nanos) {
            Ok(time) if time <= MAX_POLL => Ok(time),
            _ => Err(Failure::new(format!(
                "Invalid polling time '{text}': 0 to {} nanoseconds are possible",
                MAX_POLL.as_nanos()
            ))),
        }
    }

    fn cache(&self) -> Result<CacheMode, Failure> {
        match &self.cache {
            _ if self.nocache => Ok(CacheMode::None),
            None => Ok(CacheMode::WriteBack),
            Some(name) => name
                .parse()
                .map_err(|_| Failure::new(format!("Invalid cache mode `{name}'"))),
        }
    }

    /// Options by which images are opened.
    pub fn open_options(&self, context: &Context) -> Result<OpenOptions, Failure> {
        if self.image_opts && self.format.is_some() {
            let text = "--image-opts and -f are mutually exclusive";
            return Err(Failure::new(text));
        }
        let discard = match self.discard.as_deref() {
            None => None,
            Some("ignore" | "off") => Some(false),
            Some("unmap" | "on") => Some(true),
            Some(mode) => return Err(Failure::new(format!("Invalid discard mode `{mode}'"))),
        };
        let detect_zeroes = match &self.detect_zeroes {
            None => None,
            Some(mode) => Some(detect_zeroes(mode)?),
        };
        if detect_zeroes == Some(DetectZeroes::Unmap) && discard != Some(true) {
            let text = "setting detect-zeroes to unmap is not allowed without setting discard \
                        operation to unmap";
            return Err(Failure::new(text));
        }
        let snapshot = self.load_snapshot.as_deref().map(OsStr::as_bytes);
        let mut defaults = untrusted::defaults(context);
        if let Policy::Untrusted(limits) = &mut defaults.policy {
            // Requests of clients are not bounded by the limit of work.
            limits.work = u64::MAX;
        }
        Ok(defaults
            .write(!self.read_only && snapshot.is_none())
            .cache(self.cache()?)
            .discard(discard)
            .detect_zeroes(detect_zeroes)
            .store_bitmaps(self.store_bitmaps)
            .snapshot(snapshot.map(SnapshotName::from)))
    }

    /// Opens an image.
    pub fn open(
        &self,
        context: &Context,
        queue: &Queue,
        name: &OsStr,
        options: &OpenOptions,
    ) -> Result<Device, Failure> {
        let failure = |why: String| {
            Failure::new(format!(
                "Failed to blk_new_open '{0}': Could not open '{0}': {why}",
                name.shown()
            ))
        };
        let mut options = options.clone();
        if let Some(format) = &self.format {
            options.format = open::format(format).map_err(|e| failure(e.to_string()))?;
        }
        let mut source = open::named(name, self.image_opts, self.format.as_deref());
        if self.snapshot {
            let overlay = self.overlay(context, name, &options).map_err(failure)?;
            source = overlay.source();
            options.format = None;
            // The image has no name: its descriptor must stay open as long as
            // the device, which is as long as the process.
            std::mem::forget(overlay);
        }
        let snapshot = options.snapshot.take();
        let device = open::repaired(context, queue, &source, &options);
        let device = device.map_err(|e| failure(e.to_string()))?;
        open::showing(queue, device, snapshot.as_ref())
    }

    /// A temporary image over `name`.
    fn overlay(
        &self,
        context: &Context,
        name: &OsStr,
        options: &OpenOptions,
    ) -> Result<Overlay, String> {
        let opening = Opening {
            name: (!self.image_opts).then(|| name.into()),
            options: self.image_opts.then(|| name.into()),
            format: self.format.clone(),
            cache: Some(options.cache),
            ..Opening::default()
        };
        Overlay::new(context, &opening)
    }
}

fn detect_zeroes(mode: &str) -> Result<DetectZeroes, Failure> {
    match mode {
        "off" => Ok(DetectZeroes::Off),
        "on" => Ok(DetectZeroes::On),
        "unmap" => Ok(DetectZeroes::Unmap),
        _ => {
            let text = format!("Failed to parse detect_zeroes mode: Invalid parameter '{mode}'");
            Err(Failure::new(text))
        }
    }
}
