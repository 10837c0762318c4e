//! Signals to a long command: SIGUSR1 requests its progress, others stop it.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};

/// What stops a job.
const STOPS: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

// A signal is the process's, and its handler cannot be given anything: what it notes is static, here alone.

/// Set by SIGUSR1.
fn progress_requested() -> &'static Arc<AtomicBool> {
    static REQUESTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    REQUESTED.get_or_init(Arc::default)
}

/// The number of the signal that ended the job, or 0.
fn stopped_by() -> &'static Arc<AtomicUsize> {
    static STOPPED_BY: OnceLock<Arc<AtomicUsize>> = OnceLock::new();
    STOPPED_BY.get_or_init(Arc::default)
}

/// From now on SIGUSR1 does not end the program.
pub fn catch_progress_requests() {
    // It fails for signals that cannot be caught.
    let _ = flag::register(SIGUSR1, progress_requested().clone());
}

/// From now on SIGHUP, SIGINT, SIGQUIT and SIGTERM are handled by the job, which polls
/// [`stop_signal`]. A second one of them ends the program at once. A signal that is ignored stays
/// ignored: shells start background programs so, and nohup any program.
pub fn catch_stops() {
    let (stopped, again) = (stopped_by(), Arc::new(AtomicBool::new(false)));
    for signal in without_ignored(&STOPS) {
        let status = exit_status(signal).into();
        let _ = flag::register_conditional_shutdown(signal, status, again.clone());
        let _ = flag::register(signal, again.clone());
        let _ = flag::register_usize(signal, stopped.clone(), signal as usize);
    }
}

/// From now on the same signals end the program with the exit status that shells report, after
/// `message` on standard error: for changes that are safe to be interrupted at any
/// time. Signals that are ignored stay ignored.
pub fn end_on_stop(message: String) {
    // It fails where there can be no pipe: signals have their default action then.
    let Ok(mut signals) = Signals::new(without_ignored(&STOPS)) else {
        return;
    };
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            let _ = writeln!(std::io::stderr(), "{message}");
            low_level::exit(exit_status(signal).into());
        }
    });
}

/// Those that are not ignored.
pub fn without_ignored(signals: &[i32]) -> Vec<i32> {
    let signals = signals.iter().copied();
    signals.filter(|signal| !is_ignored(*signal)).collect()
}

#[allow(unsafe_code)]
fn is_ignored(signal: i32) -> bool {
    // SAFETY: with no new action this only writes the present one, and zeroes are one.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut now);
        now.sa_sigaction == libc::SIG_IGN
    }
}

/// The signal that was received since [`catch_stops`].
pub fn stop_signal() -> Option<i32> {
    let signal = stopped_by().load(Ordering::Relaxed);
    (signal != 0).then_some(signal as i32)
}

/// The message of [`end_on_stop`] for changes that are atomic in a crash.
pub const WHOLE: &str = "the image is whole, and the change may not have happened";

/// Whether SIGUSR1 was received since the last call.
pub fn take_progress_request() -> bool {
    progress_requested().swap(false, Ordering::Relaxed)
}

/// The exit status after a signal, as shells report it.
pub fn exit_status(signal: i32) -> u8 {
    128 + signal as u8
}
