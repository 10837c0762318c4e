//! Names and options of images in QEMU's spelling: paths, `nbd://…`, `json:{…}`, `--image-opts`.
//!
//! [`Source::resolve`] turns one into an [`ImageSpec`](crate::block::ImageSpec), which
//! [`block`](crate::block) opens. Nothing is opened before that. Whatever is not understood is
//! refused, in QEMU's words where it has some: an ignored option might be the one that keeps the data safe.
//!
//! A program that has [storages](crate::Device::from_storages) of its own needs nothing of this.

mod limits;
mod open;
mod source;

pub use crate::spelling::path::protocol;
pub use crate::spelling::quote::json_string;
pub use crate::spelling::text::{
    SizeError, first_item, parse_integer, parse_size, parse_switch, split_list,
};
pub use crate::storage::secret::without_queries;
pub use source::Source;

#[cfg(test)]
mod tests;
