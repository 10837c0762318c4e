//! Opening and closing devices.

use std::ffi::{OsStr, c_int};
use std::str::FromStr;

use zebu::qcow2::SnapshotName;
use zebu::{
    CacheMode, Device, EngineKind, Format, Limits, OpenOptions, Policy, Queue, SharedDevice,
    Source, jobs,
};

use crate::blocking;
use crate::device::Handle;
use crate::error::{Failure, Out, Result, call_code, call_object};
use crate::fork::Process;
use crate::text::{Options, OptionsPointer, Text, check_flags, check_reserved};

pub const WRITE: u32 = 1 << 0;
const IMAGE_OPTIONS: u32 = 1 << 1;
const UNTRUSTED: u32 = 1 << 2;
const NO_BACKING: u32 = 1 << 3;
const FORCE_SHARE: u32 = 1 << 4;
const DISCARD: u32 = 1 << 5;

/// `zebu_open_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct COpenOptions {
    pub struct_size: usize,
    pub flags: u32,
    pub reserved: u32,
    pub format: Text,
    pub cache: Text,
    pub engine: Text,
    pub snapshot: Text,
    pub limits: Text,
    pub l2_cache_size: u64,
}

// SAFETY: numbers, and pointers that may be NULL.
unsafe impl Options for COpenOptions {
    const NAME: &'static str = "zebu_open_options";
}

/// What is opened, and how, decoded.
#[derive(Clone)]
pub struct Opening {
    source: Source,
    pub options: OpenOptions,
    pub engine: EngineKind,
}

impl Opening {
    pub fn new(name: Text, what: &str, options: &COpenOptions) -> Result<Opening> {
        let known = WRITE | IMAGE_OPTIONS | UNTRUSTED | NO_BACKING | FORCE_SHARE | DISCARD;
        check_flags(options.flags, known)?;
        check_reserved(options.reserved)?;
        let has = |flag| options.flags & flag != 0;
        let name = name.name(what)?.to_owned();
        let driver = options.format.word("format")?;
        let source = match has(IMAGE_OPTIONS) {
            true => Source::Options(name),
            false => Source::with_driver(name, driver)?,
        };
        let format = driver.filter(|_| has(IMAGE_OPTIONS)).map(Format::from_str);
        let limits = options.limits.word("limits")?;
        let policy = match has(UNTRUSTED) {
            true => Policy::Untrusted(parse_limits(limits.unwrap_or(""))?),
            false if limits.is_some() => {
                return Err(Failure::misuse("limits need ZEBU_OPEN_UNTRUSTED"));
            }
            false => Policy::Follow,
        };
        let cache = options.l2_cache_size;
        let snapshot = options.snapshot.bytes().map(SnapshotName::from);
        let open = OpenOptions::default()
            .format(format.transpose()?)
            .write(has(WRITE))
            .cache(cache_mode(options.cache)?)
            .policy(policy)
            .no_backing(has(NO_BACKING))
            .force_share(has(FORCE_SHARE))
            .discard(has(DISCARD).then_some(true))
            .l2_cache_size((cache != 0).then_some(cache))
            .snapshot(snapshot);
        Ok(Opening {
            source,
            options: open,
            engine: engine(options.engine)?,
        })
    }

    /// Opens the device.
    pub fn open(&self, queue: &Queue) -> Result<Device> {
        // What a repair says has no place to go.
        Ok(jobs::open(queue, &self.source, &self.options, &mut |_| {})?)
    }

    /// The image's name for messages.
    pub fn name(&self) -> &OsStr {
        match &self.source {
            Source::Name(name) | Source::Options(name) | Source::NameWithOptions(name, _) => name,
        }
    }
}

/// The engine of this name.
pub fn engine(text: Text) -> Result<EngineKind> {
    match text.word("engine")? {
        None => Ok(EngineKind::best()),
        Some(name) => EngineKind::from_str(name).map_err(|why| Failure::misuse(&why.to_string())),
    }
}

fn cache_mode(text: Text) -> Result<CacheMode> {
    match text.word("cache")? {
        None => Ok(CacheMode::WriteBack),
        Some(name) => CacheMode::from_str(name).map_err(|why| Failure::misuse(&why.to_string())),
    }
}

/// `virtual-size=1T,work=64G`.
fn parse_limits(text: &str) -> Result<Limits> {
    let mut limits = Limits::default();
    limits
        .set_from(text)
        .map_err(|message| Failure::misuse(&message))?;
    Ok(limits)
}

#[unsafe(no_mangle)]
extern "C" fn zebu_open(
    name: Text,
    options: OptionsPointer<COpenOptions>,
    error: Out<'_>,
) -> Option<Box<Handle>> {
    call_object(error, || {
        let opening = Opening::new(name, "name", &options.get()?)?;
        let queue = blocking::own_queue(opening.engine)?;
        let device = opening.open(&queue).map_err(|failure| {
            failure.during(&format!("Could not open '{}'", opening.name().display()))
        })?;
        Ok(Handle {
            process: Process::current(),
            device: SharedDevice::new(device),
            engine: opening.engine,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_close(device: Option<Box<Handle>>, error: Out<'_>) -> c_int {
    call_code(error, || {
        let handle = device.ok_or_else(|| Failure::null("device"))?;
        if !handle.process.is_current() {
            // To give it up would release the locks of the parent.
            std::mem::forget(handle);
            return Ok(());
        }
        let device = handle.device.clone();
        blocking::wait(
            handle.engine,
            |queue| async move { device.close(&queue).await },
        )
    })
}
