//! A new connection in the place of a lost one: a thread tries it, as long as requests may wait.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::super::handshake::{self, NoAgreement};
use super::Link;

/// The longest wait between two attempts; it doubles each time.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Starts the thread, which tries first after `wait`.
pub(super) fn begin(link: &Arc<Link>, wait: Duration) {
    let weak = Arc::downgrade(link);
    let thread = std::thread::Builder::new().name("nbd-reconnect".into());
    if let Err(e) = thread.spawn(move || run(&weak, wait)) {
        link.give_up(format!("the connection was lost, and no thread began: {e}"));
    }
}

/// Ends when there is a connection, or none is needed any more.
fn run(weak: &Weak<Link>, mut wait: Duration) {
    loop {
        std::thread::sleep(wait);
        let Some(link) = weak.upgrade() else {
            return;
        };
        let Some(deadline) = link.wants_connection_until() else {
            return;
        };
        let options = link.options();
        // At least so much time for an attempt.
        let until = deadline.max(Instant::now() + Duration::from_millis(100));
        let error = match handshake::connect(options, until) {
            Ok(agreed) => return link.restore(agreed),
            Err(NoAgreement::Refused(text)) => {
                return link.give_up(format!("the connection was lost: {text}"));
            }
            Err(NoAgreement::Unreachable(text)) => text,
        };
        tracing::debug!("{error}");
        wait = (wait * 2).clamp(Duration::from_millis(50), LONGEST_WAIT);
        if Instant::now() + wait >= deadline {
            return link.give_up(format!("the connection was lost: {error}"));
        }
    }
}
