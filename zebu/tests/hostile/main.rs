//! Hostile images: no panic, no endless loop, no memory in proportion to a number in the file, no
//! file that is opened against the caller's policy, and no sound data lost.

mod bounds;
mod changes;
#[cfg(feature = "bzip2")]
mod formats;
mod history;
mod images;
#[cfg(feature = "bzip2")]
mod sound;
mod vhdx;
mod written;

use zebu_testkit::library::{
    self as common, hostile_changes, hostile_images, hostile_vhdx, hostile_vmdk, small_images,
    vhdx_image,
};
