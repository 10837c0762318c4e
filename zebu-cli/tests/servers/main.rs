//! NBD and vhost-user-blk: servers, and the NBD client.

mod metrics;
mod nbd;
mod nbd_bad_input;
mod nbd_bitmaps;
mod nbd_client;
mod nbd_client_hostile;
mod nbd_client_lost;
mod nbd_guest;
mod nbd_lifecycle;
#[cfg(feature = "psk")]
mod nbd_psk;
mod server_memory;
mod storage_daemon;
mod vhost_bad_input;
mod vhost_grow;
mod vhost_guest;
mod vhost_user_blk;
mod written;

use zebu_testkit::program as common;
