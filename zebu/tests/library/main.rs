//! Tests of the library, a subject a module.

mod cache_options;
mod convert;
mod dropped_tasks;
mod engines;
mod event_loop;
mod examples;
mod exchanges;
mod file_from_fd;
mod format_header;
mod holes;
mod jobs_cancelled;
mod layers;
#[cfg(feature = "tls")]
mod nbd_client;
mod queue;
mod ready;
mod remote;
mod same_cluster;
mod shared_device;
mod write_errors;
mod written;

use zebu_testkit::library::{self as common};
