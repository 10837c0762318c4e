//! Strict mode, `--untrusted`: before the command or among its options, with
//! limits of the user's own or without. It holds for every image that the program opens.

use zebu::block::{OpenOptions, Policy};

use crate::arguments::{block_cache, objects};
use crate::program::{Context, Failure};

/// The option's name, without dashes.
pub const NAME: &str = "untrusted";
/// What its value is called.
pub const VALUE: &str = "LIMIT=VALUE,...";
/// What it does, for the help.
pub const HELP: &str = "Open nothing that an image names, and enforce limits \
                        (virtual-size, table-size, snapshots, bitmaps, chain, memory, work, \
                        work-per-byte)";

/// Takes the option: `value` is what followed `=`, empty without. Given again, it
/// adds to what it was.
pub fn set(context: &Context, value: &str) -> Result<(), Failure> {
    let mut limits = context.limits.get().unwrap_or_default();
    let wrong = |message| Failure::new(format!("--{NAME}: {message}")).with_hint();
    limits.set_from(value).map_err(wrong)?;
    context.limits.set(Some(limits));
    Ok(())
}

/// Takes an argument of the program if it is this option.
pub fn take(context: &Context, argument: &str) -> Option<Result<(), Failure>> {
    let rest = argument.strip_prefix("--")?.strip_prefix(NAME)?;
    match rest.strip_prefix('=') {
        Some(value) => Some(set(context, value)),
        None => rest.is_empty().then(|| set(context, "")),
    }
}

/// What images may open.
pub fn policy(context: &Context) -> Policy {
    context
        .limits
        .get()
        .map_or(Policy::Follow, Policy::Untrusted)
}

/// How an image is opened by default. Code that opens one
/// begins with this.
pub fn defaults(context: &Context) -> OpenOptions {
    OpenOptions::default()
        .policy(policy(context))
        .guess_as_qemu(context.is_as_qemu())
        .objects(objects::all(context))
        .block_cache(block_cache::get(context).map(Into::into))
}
