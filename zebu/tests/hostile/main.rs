//! Hostile images: no panic, no endless loop, no memory in proportion to a number in the file, no
//! file that is opened against the caller's policy, and no sound data lost.

mod bounds;
mod changes;
#[path = "../common/mod.rs"]
mod common;
#[cfg(feature = "bzip2")]
mod formats;
mod history;
#[path = "../common/hostile_changes.rs"]
mod hostile_changes;
#[path = "../common/hostile_images.rs"]
mod hostile_images;
#[path = "../common/hostile_vhdx.rs"]
mod hostile_vhdx;
#[path = "../common/hostile_vmdk.rs"]
mod hostile_vmdk;
mod images;
#[cfg(feature = "bzip2")]
#[path = "../common/small_images.rs"]
mod small_images;
mod sound;
mod vhdx;
#[path = "../common/vhdx_image.rs"]
mod vhdx_image;
