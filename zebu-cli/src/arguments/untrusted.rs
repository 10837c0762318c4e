//! Strict mode, `--untrusted`: before the command or among its options, with
//! limits of the user's own or without.
//!
//! It holds for every image that the process opens, so it is kept in one place
//! that is read when an image is opened, not passed through every command.

use std::sync::{Mutex, PoisonError};

use zebu::Limits;
use zebu::block::{OpenOptions, Policy};

use crate::arguments::{block_cache, objects};
use crate::output::printed;
use crate::program::Failure;

/// The option's name, without dashes.
pub const NAME: &str = "untrusted";
/// What its value is called.
pub const VALUE: &str = "LIMIT=VALUE,...";
/// What it does, for the help.
pub const HELP: &str = "Open nothing that an image names, and enforce limits \
                        (virtual-size, table-size, snapshots, bitmaps, chain, memory, work, \
                        work-per-byte)";

/// The limits, once the option was given.
static LIMITS: Mutex<Option<Limits>> = Mutex::new(None);

/// Takes the option: `value` is what followed `=`, empty without. Given again, it
/// adds to what it was.
pub fn set(value: &str) -> Result<(), Failure> {
    let mut kept = LIMITS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut limits = kept.unwrap_or_default();
    let wrong = |message| Failure::new(format!("--{NAME}: {message}")).with_hint();
    limits.set_from(value).map_err(wrong)?;
    *kept = Some(limits);
    Ok(())
}

/// Takes an argument of the program if it is this option.
pub fn take(argument: &str) -> Option<Result<(), Failure>> {
    let rest = argument.strip_prefix("--")?.strip_prefix(NAME)?;
    match rest.strip_prefix('=') {
        Some(value) => Some(set(value)),
        None => rest.is_empty().then(|| set("")),
    }
}

/// What images may open.
pub fn policy() -> Policy {
    let kept = LIMITS.lock().unwrap_or_else(PoisonError::into_inner);
    kept.map_or(Policy::Follow, Policy::Untrusted)
}

/// Whether strict mode is on.
pub fn is_on() -> bool {
    policy().limits().is_some()
}

/// How an image is opened by default. Code that opens one
/// begins with this.
pub fn defaults() -> OpenOptions {
    OpenOptions::default()
        .policy(policy())
        .guess_as_qemu(printed::is_as_qemu())
        .objects(objects::all())
        .block_cache(block_cache::get())
}
