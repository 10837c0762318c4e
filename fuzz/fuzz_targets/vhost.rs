//! Interprets bytes as actions of the front end or the guest of a vhost-user-blk server in this
//! process. The server must keep serving.
#![no_main]

use std::sync::Mutex;

use libfuzzer_sys::fuzz_target;
use zebu_testkit::program::hostile_vhost::Served;

static SERVED: Mutex<Option<Served>> = Mutex::new(None);

fuzz_target!(|data: &[u8]| {
    let mut served = SERVED.lock().expect("nothing panics");
    served.get_or_insert_with(Served::new).exercise(data);
});
