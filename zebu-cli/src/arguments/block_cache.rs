//! `--cache-dir` and `--cache-size`: a cache on a local disk of blocks of what is read of other
//! machines. It holds for every image that the program opens.

use std::ffi::OsStr;

use zebu::block::OpenedFile;
use zebu::storage::{BlockCache, BlockCacheOptions};

use crate::arguments::size;
use crate::program::{Context, Failure};

/// The options' names, without dashes: the folder and its size.
pub const DIR: &str = "cache-dir";
pub const SIZE: &str = "cache-size";
/// What they do, for the help.
pub const DIR_HELP: &str = "Keep blocks of images on other machines, which are only read, in this \
                            folder";
pub const SIZE_HELP: &str = "Bytes in the folder at most (default: 10G)";

/// Whether an option is one of these, which QEMU's programs do not have.
pub fn is_option(name: &str) -> bool {
    [DIR, SIZE].contains(&name)
}

/// Takes the options.
pub fn set(context: &Context, folder: Option<&OsStr>, most: Option<&str>) -> Result<(), Failure> {
    let Some(folder) = folder else {
        return match most {
            None => Ok(()),
            Some(_) => Err(Failure::new(format!("--{SIZE} needs --{DIR}"))),
        };
    };
    let mut options = BlockCacheOptions::default().warn(Some(warn));
    if let Some(most) = most {
        options.size = size::parse_option(&format!("--{SIZE}"), most)?;
    }
    let cache = BlockCache::open(folder, &options)
        .map_err(|e| Failure::new(format!("Could not use the cache {e}")))?;
    context.cache.replace(Some(cache));
    Ok(())
}

/// The cache for images that are opened.
pub fn get(context: &Context) -> Option<BlockCache> {
    context.cache.borrow().clone()
}

/// A file that was opened to be read, with the cache over it.
pub fn over(context: &Context, file: OpenedFile) -> zebu::Result<OpenedFile> {
    match get(context) {
        Some(cache) => file.cached(&cache),
        None => Ok(file),
    }
}

fn warn(text: &str) {
    Context::new(std::env::args_os().next()).say(&format!("Warning: {text}"));
}
