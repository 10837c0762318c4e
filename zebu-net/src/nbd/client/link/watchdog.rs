//! Time-outs of replies. One thread checks all connections now and then, while there are any.
//!
//! A timer for each request would cost as much as a small request.

use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use super::Link;

struct Watched {
    link: Weak<Link>,
    /// The number of receives when a reply was due, and since when it has not changed.
    since: Option<(u64, Instant)>,
}

#[derive(Default)]
struct Watchdog {
    links: Vec<Watched>,
    runs: bool,
}

static WATCHDOG: Mutex<Watchdog> = Mutex::new(Watchdog {
    links: Vec::new(),
    runs: false,
});

fn watchdog() -> MutexGuard<'static, Watchdog> {
    crate::lock(&WATCHDOG)
}

/// Checks `link` from now on, if it has a time-out.
pub(super) fn watch(link: &Arc<Link>) {
    if link.options().request_timeout.is_zero() {
        return;
    }
    let mut watchdog = watchdog();
    watchdog.links.push(Watched {
        link: Arc::downgrade(link),
        since: None,
    });
    if !watchdog.runs {
        let thread = std::thread::Builder::new().name("nbd-watchdog".into());
        // Without a thread there is no time-out.
        watchdog.runs = thread.spawn(run).is_ok();
    }
}

fn run() {
    let mut pause = Duration::from_millis(100);
    loop {
        std::thread::sleep(pause);
        let mut silent = Vec::new();
        let mut watchdog = watchdog();
        watchdog
            .links
            .retain_mut(|watched| match watched.link.upgrade() {
                None => false,
                Some(link) => {
                    watched.look(link, &mut silent);
                    true
                }
            });
        let shortest = watchdog.links.iter().filter_map(|w| w.link.upgrade());
        let shortest = shortest.map(|link| link.options().request_timeout).min();
        let Some(shortest) = shortest else {
            watchdog.runs = false;
            return;
        };
        drop(watchdog);
        for (link, progress) in silent {
            link.is_silent(progress);
        }
        pause = (shortest / 8).clamp(Duration::from_millis(100), Duration::from_secs(10));
    }
}

impl Watched {
    fn look(&mut self, link: Arc<Link>, silent: &mut Vec<(Arc<Link>, u64)>) {
        let Some(progress) = link.owes() else {
            self.since = None;
            return;
        };
        match self.since {
            Some((then, since)) if then == progress => {
                if since.elapsed() >= link.options().request_timeout {
                    silent.push((link, progress));
                    self.since = None;
                }
            }
            _ => self.since = Some((progress, Instant::now())),
        }
    }
}
