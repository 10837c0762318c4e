//! Runs one program and measures it: wall clock and peak memory.

use crate::error::{Context, Error, Result};
use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long one run may take before it is stopped and counted as a failure.
pub const TIME_LIMIT: Duration = Duration::from_secs(5 * 60);

/// At most this much of a program's output is kept.
const OUTPUT_KEPT: u64 = 64 << 20;

/// What one run of a program cost.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Wall clock from start to reaping, seconds.
    pub wall: f64,
    /// Peak resident memory in bytes, of the largest such process. The kernel counts the moment
    /// before `exec` too, so this is never less than the few MiB that the suite has then.
    pub peak: u64,
    /// What it wrote to standard output.
    pub stdout: String,
}

/// Runs `command` (program and arguments) to its end.
///
/// Output goes to files in `scratch`, so that no reader in the suite takes CPU from the program.
/// An exit status other than zero is an error that carries the first line of standard error.
pub fn run(command: &[OsString], scratch: &Path) -> Result<Outcome> {
    let out_path = scratch.join("stdout");
    let err_path = scratch.join("stderr");
    let create = |p: &Path| File::create(p).context(|| p.display().to_string());
    forget_own_peak();
    let started = Instant::now();
    let mut child = Command::new(&command[0])
        .args(&command[1..])
        .stdin(Stdio::null())
        .stdout(create(&out_path)?)
        .stderr(create(&err_path)?)
        .spawn()
        .context(|| command[0].to_string_lossy().into_owned())?;
    let pid = child.id();

    // The watchdog owns the child; it kills only while the child is marked as not yet reaped.
    let (reaped, wait) = mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        let late = wait.recv_timeout(TIME_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout);
        if late {
            let _ = child.kill();
        }
        late
    });
    let (status, usage) = wait4(pid);
    let wall = started.elapsed().as_secs_f64();
    let _ = reaped.send(());
    let late = watchdog.join().unwrap_or(false);

    let outcome = Outcome {
        wall,
        peak: usage.ru_maxrss as u64 * 1024,
        stdout: read_text(&out_path)?,
    };
    if late {
        return Err(Error::new(format!(
            "stopped after {} s",
            TIME_LIMIT.as_secs()
        )));
    }
    if libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0 {
        return Ok(outcome);
    }
    let how = if libc::WIFSIGNALED(status) {
        format!("killed by signal {}", libc::WTERMSIG(status))
    } else {
        format!("exit status {}", libc::WEXITSTATUS(status))
    };
    let err = read_text(&err_path)?;
    let line = err.lines().find(|l| !l.trim().is_empty()).unwrap_or("");
    Err(Error::new(
        format!("{how}: {line}").trim_end_matches(": ").to_string(),
    ))
}

/// Makes the suite's own peak of memory what it has now, where the kernel can (proc(5),
/// `clear_refs`): a child begins with its parent's.
fn forget_own_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Waits for a child and takes its resource usage with it.
#[allow(unsafe_code)]
fn wait4(pid: u32) -> (i32, libc::rusage) {
    let mut status = 0;
    // SAFETY: `rusage` is plain integers, for which all-zero bytes are a value; both pointers are
    // to live locals of the types that wait4 writes; `pid` is a child that nothing else reaps,
    // since its `Child` handle is only ever used to kill.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        while libc::wait4(pid as libc::pid_t, &mut status, 0, &mut usage) < 0 {
            if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
                break;
            }
        }
        (status, usage)
    }
}

fn read_text(path: &Path) -> Result<String> {
    use std::io::Read;
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|f| f.take(OUTPUT_KEPT).read_to_end(&mut bytes))
        .context(|| path.display().to_string())?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A command line from its parts.
pub fn command<I, S>(parts: I) -> Vec<OsString>
where
    I: IntoIterator<Item = S>,
    S: Into<OsString>,
{
    parts.into_iter().map(Into::into).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> std::path::PathBuf {
        let dir =
            std::env::temp_dir().join(format!("zebu-bench-child-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn a_run_has_output_time_and_memory() {
        let dir = scratch("ok");
        let o = run(&command(["sh", "-c", "echo hello; sleep 0.05"]), &dir).unwrap();
        assert_eq!(o.stdout, "hello\n");
        assert!(o.wall >= 0.05);
        assert!(o.peak > 0);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_failure_carries_the_first_line_of_stderr() {
        let dir = scratch("fail");
        let e = run(
            &command(["sh", "-c", "echo broken >&2; echo more >&2; exit 3"]),
            &dir,
        )
        .unwrap_err();
        assert_eq!(e.0, "exit status 3: broken");
        assert!(run(&command(["/nonexistent/program"]), &dir).is_err());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
