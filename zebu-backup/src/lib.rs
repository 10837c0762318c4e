//! Incremental backups of disks.
//!
//! A directory holds the backups of one or more disks: a [`Set`]. Each backup of the set is a point
//! in time, to which the disks can be restored. The first point of a disk is a full qcow2 image. Each
//! later one is a qcow2 image with what has changed, and the one before as its backing file; so every
//! tool that reads qcow2 reads a backup. A manifest ([`Manifest`], in `manifest.json`) lists the
//! points with sizes and hashes.
//!
//! What has changed is known from a dirty bitmap of the image, or of an NBD export; else it is found
//! by comparing the disk with the point before.
//!
//! # Order
//!
//! A point is valid once the manifest names it, which is the last step; its files are durable then.
//! An enabled bitmap for the next increment is added to the image *before* the disk is read, and the
//! bitmap that the increment is taken from is removed *after* the manifest is written. So whenever a
//! backup is interrupted, the bitmap of the last point in the manifest is there and has recorded
//! everything since that point.
#![deny(unsafe_code)]

mod chain;
mod error;
mod files;
mod manifest;
mod progress;
mod prune;
mod set;
mod take;
mod verify;

pub use error::{Error, Result};
pub use manifest::{Entry, Kind, Manifest, Merge, Point};
pub use progress::Step;
pub use set::Set;
pub use take::{Disk, TakeOptions};
pub use verify::Finding;
