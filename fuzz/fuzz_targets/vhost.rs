//! Interprets bytes as actions of the front end or the guest of a vhost-user-blk server in this
//! process. The server must keep serving.
#![no_main]

#[path = "../../zebu-cli/tests/common/hostile_vhost.rs"]
mod hostile_vhost;

use std::sync::Mutex;

use hostile_vhost::Served;
use libfuzzer_sys::fuzz_target;

static SERVED: Mutex<Option<Served>> = Mutex::new(None);

fuzz_target!(|data: &[u8]| {
    let mut served = SERVED.lock().expect("nothing panics");
    served.get_or_insert_with(Served::new).exercise(data);
});
