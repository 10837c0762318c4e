//! Formats of other programs; those that are only read and small are in `small_formats`.

mod luks;
mod new_formats;
mod ova;
mod vdi;
mod vhdx;
mod vhdx_create;
mod vmdk;
mod vmdk_create;
mod written;

use zebu_testkit::program as common;
