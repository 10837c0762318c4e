//! Images on other machines and in streams.

mod cache_dir;
mod http;
mod import;
mod pipes;
mod pipes_generated;
mod rbd;
mod ssh;
mod stores;
mod uploads;

use zebu_testkit::program as common;
