//! Programs that are stopped by signals.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use super::{Lab, program};

/// Signals that end a job, and the exit status.
pub const STOPS: [(i32, i32); 4] = [
    (libc::SIGINT, 130),
    (libc::SIGTERM, 143),
    (libc::SIGHUP, 129),
    (libc::SIGQUIT, 131),
];

/// Starts a job with its output in pipes. Signals get their default actions, since a shell that runs
/// the tests in the background ignores some.
pub fn start(lab: &Lab, args: &[&str]) -> Child {
    start_with(lab, args, libc::SIG_DFL)
}

/// The same with this action of SIGHUP.
pub fn start_with(lab: &Lab, args: &[&str], hang_up: libc::sighandler_t) -> Child {
    let mut command = Command::new(program());
    // SAFETY: signal(2) is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            for (number, _) in STOPS {
                libc::signal(number, libc::SIG_DFL);
            }
            libc::signal(libc::SIGHUP, hang_up);
            Ok(())
        });
    }
    command
        .args(args)
        .current_dir(lab.path(""))
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program under test")
}

/// Stops a child; false if it has ended before.
pub fn is_stopped(child: &Child) -> bool {
    let id = child.id() as i32;
    // SAFETY: plain system calls on memory that is there.
    unsafe {
        assert_eq!(libc::kill(id, libc::SIGSTOP), 0);
        let mut found: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT;
        assert_eq!(
            libc::waitid(libc::P_PID, id as u32, &raw mut found, flags),
            0
        );
        found.si_code == libc::CLD_STOPPED
    }
}
