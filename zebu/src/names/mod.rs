//! Names and options of images in QEMU's spelling: paths, `nbd://…`, `json:{…}`, `--image-opts`.
//!
//! [`Source::resolve`] turns one into an [`ImageSpec`](crate::block::ImageSpec), which
//! [`block`](crate::block) opens. Nothing is opened before that. Whatever is not understood is
//! refused, in QEMU's words where it has some: an ignored option might be the one that keeps the data safe.
//!
//! A program that has [storages](crate::Device::from_storages) of its own needs nothing of this.

mod blkdebug;
mod drivers;
#[cfg(feature = "http")]
mod http;
mod image_options;
mod json;
mod limits;
#[cfg(feature = "nbd")]
mod nbd;
mod null;
mod open;
mod options;
mod parse;
mod path;
mod quote;
#[cfg(feature = "rbd")]
mod rbd;
mod shown;
mod source;
#[cfg(feature = "ssh")]
mod ssh;
#[cfg(feature = "object-store")]
mod store;
mod text;
mod uri;

pub use crate::storage::secret::without_queries;
pub use path::protocol;
pub use quote::json_string;
pub use source::Source;
pub use text::{SizeError, first_item, parse_integer, parse_size, parse_switch, split_list};

#[cfg(test)]
mod tests;
