//! Image formats besides qcow2 and raw for the library `zebu`: VMDK, VHDX, VHD, VDI, qcow, QED, Parallels, DMG,
//! cloop, Bochs.
//!
//! A format is a file or a folder with a `static DRIVER` and an implementation of
//! [`FormatImage`], its `mod` line, and a line in [`FORMATS`]. Programs use the crate
//! `zebu`, which registers them. To be read first: `vdi/`, which is written in place; what formats share is in
//! `table`, `pieces`, `levels`, `sectors` (tables and the map step) in `blocks`, `linear` (new
//! images) and in `places`, `tail`, `clearing` (writing in place).
#![deny(unsafe_code)]

mod blocks;
mod bochs;
mod clearing;
mod cloop;
mod dmg;
mod levels;
mod linear;
mod parallels;
mod pieces;
mod places;
mod qcow;
mod qed;
mod sectors;
mod table;
mod tail;
mod vdi;
mod vhdx;
mod vmdk;
mod vpc;

pub(crate) use blocks::{BlockLayout, NewBlocks};
pub(crate) use clearing::Clearing;
pub(crate) use linear::Linear;
pub(crate) use places::{Place, Places};
pub(crate) use tail::Tail;
use zebu_core::parts::drivers::*;
// What a format is made of.
use zebu_core::parts::{
    broken, codec, drivers, lock, offset, printable, progress, spelling, storage,
};
use zebu_core::{Error, Result};

#[cfg(test)]
zebu_core::register!(formats: [FORMATS], protocols: &[], encryption: &[]);

/// The formats, in the order of probing, for the crate `zebu` to register.
#[doc(hidden)]
pub static FORMATS: &[&Driver] = &[
    &bochs::DRIVER,
    &cloop::DRIVER,
    &dmg::DRIVER,
    &parallels::DRIVER,
    &qcow::DRIVER,
    &qed::DRIVER,
    &vdi::DRIVER,
    &vhdx::DRIVER,
    &vmdk::DRIVER,
    &vpc::DRIVER,
];

/// What the module `block` of `zebu` has of it.
pub mod block {
    pub use crate::vmdk::{Vmdk, VmdkExtent};
}
