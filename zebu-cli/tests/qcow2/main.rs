//! qcow2 images: what changes them, and what is said of them.

mod amend;
mod bitmap;
mod bitmap_damage;
mod commit;
mod convert_qcow2;
mod create;
mod data_file;
mod encryption;
mod measure;
mod measure_options;
mod options;
mod rebase;
mod repair;
mod resize;
mod snapshot;
mod snapshot_views;

use zebu_testkit::program as common;
