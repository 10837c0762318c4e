//! QEMU's image locks.
//!
//! A process states its permissions for a file by read locks on single bytes: byte 100 + n means
//! that it holds permission n, byte 200 + n that it does not share permission n. Read locks do not
//! exclude each other, so a process first locks its bytes and then tests those that conflict. The
//! locks belong to the open file description (`F_OFD_SETLK`) and end with it.
#![allow(unsafe_code)]

use std::io;
use std::ops::{BitAnd, BitOr, Not};
use std::os::fd::RawFd;
use std::path::Path;

use crate::{Error, Result};

/// The first byte of the locks for permissions that are held.
const HELD: libc::off_t = 100;
/// The first byte of the locks for permissions that are not shared.
const NOT_SHARED: libc::off_t = 200;

/// A set of permissions for a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Permissions(u64);

impl Permissions {
    /// None of them.
    pub const NONE: Permissions = Permissions(0);
    /// To read consistent data.
    pub const CONSISTENT_READ: Permissions = Permissions(1);
    /// To write.
    pub const WRITE: Permissions = Permissions(1 << 1);
    /// To write without changing what is read.
    pub const WRITE_UNCHANGED: Permissions = Permissions(1 << 2);
    /// To change the length.
    pub const RESIZE: Permissions = Permissions(1 << 3);
    /// All of them.
    pub const ALL: Permissions = Permissions(0b1111);

    /// QEMU's names, in the order of the bits.
    const NAMES: [&'static str; 4] = ["consistent read", "write", "write unchanged", "resize"];

    /// Whether all of `others` are among these.
    pub const fn contain(self, others: Permissions) -> bool {
        self.0 & others.0 == others.0
    }

    /// These and `others`.
    pub const fn and(self, others: Permissions) -> Permissions {
        Permissions(self.0 | others.0)
    }

    /// These without `others`.
    pub const fn without(self, others: Permissions) -> Permissions {
        Permissions(self.0 & !others.0)
    }

    /// The lock bytes of these permissions from `base` on, with their names.
    fn bytes(self, base: libc::off_t) -> impl Iterator<Item = (libc::off_t, &'static str)> {
        (0..)
            .zip(Self::NAMES)
            .filter(move |(n, _)| self.0 & 1 << n != 0)
            .map(move |(n, name)| (base + n, name))
    }
}

impl BitOr for Permissions {
    type Output = Permissions;
    fn bitor(self, others: Permissions) -> Permissions {
        self.and(others)
    }
}

impl BitAnd for Permissions {
    type Output = Permissions;
    fn bitand(self, others: Permissions) -> Permissions {
        Permissions(self.0 & others.0)
    }
}

impl Not for Permissions {
    type Output = Permissions;
    fn not(self) -> Permissions {
        Permissions::ALL.without(self)
    }
}

/// The permissions that a process holds for a file, and those that it shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockRequest {
    /// Permissions that are held.
    pub held: Permissions,
    /// Permissions that others may hold.
    pub shared: Permissions,
}

/// The constants are the requests of qemu-img and qemu-io 10 (by `/proc/locks`).
impl LockRequest {
    const NO_WRITE_OR_RESIZE: Permissions =
        Permissions::ALL.without(Permissions::WRITE.and(Permissions::RESIZE));
    const READ: Permissions = Permissions::CONSISTENT_READ;
    const READ_WRITE: Permissions = Self::READ.and(Permissions::WRITE);

    /// Nothing is held and everything is shared: no byte is locked.
    pub const NOTHING: LockRequest = LockRequest {
        held: Permissions::NONE,
        shared: Permissions::ALL,
    };
    /// The file of a qcow2 image that is read, at the top of a chain or as a
    /// backing file: no process may write to it.
    pub const QCOW2_READ: LockRequest = LockRequest {
        held: Self::READ,
        shared: Self::NO_WRITE_OR_RESIZE,
    };
    /// The file of a qcow2 image that is written to.
    pub const QCOW2_WRITE: LockRequest = LockRequest {
        held: Self::READ_WRITE.and(Permissions::RESIZE),
        shared: Self::NO_WRITE_OR_RESIZE,
    };
    /// The file of a raw image that is read, at the top of a chain or as a
    /// backing file: others may write to it.
    pub const RAW_READ: LockRequest = LockRequest {
        held: Self::READ,
        shared: Permissions::ALL,
    };
    /// The file of a raw image that is written to: others may do so, too.
    pub const RAW_WRITE: LockRequest = LockRequest {
        held: Self::READ_WRITE,
        shared: Permissions::ALL,
    };
    /// The external data file of an image that is read.
    pub const DATA_READ: LockRequest = LockRequest {
        held: Self::READ,
        shared: Permissions::ALL.without(Permissions::RESIZE),
    };
    /// The external data file of an image that is written to.
    pub const DATA_WRITE: LockRequest = LockRequest {
        held: Self::READ_WRITE.and(Permissions::RESIZE),
        shared: Permissions::ALL.without(Permissions::RESIZE),
    };
    /// A file that is created, or truncated.
    pub const CREATE: LockRequest = LockRequest {
        held: Permissions::WRITE.and(Permissions::RESIZE),
        shared: Permissions::ALL.without(Permissions::RESIZE),
    };
    /// Any file that is read with `force-share` (`-U`).
    pub const FORCE_SHARE: LockRequest = Self::RAW_READ;

    /// The same, and no other process may change the length: the request of qemu-nbd.
    pub const fn fixed_length(self) -> LockRequest {
        LockRequest {
            held: self.held,
            shared: self.shared.without(Permissions::RESIZE),
        }
    }

    /// The same, with the permission to change the length.
    pub const fn changing_length(self) -> LockRequest {
        LockRequest {
            held: self.held.and(Permissions::RESIZE),
            shared: self.shared,
        }
    }
}

/// The bytes of an open file by which it is locked.
pub trait LockBytes {
    /// Takes a read lock on a byte, or releases it.
    ///
    /// # Errors
    /// Those of fcntl(2).
    fn set(&self, byte: libc::off_t, locked: bool) -> io::Result<()>;

    /// Whether any other open file description has the byte locked.
    ///
    /// # Errors
    /// Those of fcntl(2).
    fn is_locked_by_others(&self, byte: libc::off_t) -> io::Result<bool>;
}

/// Locks the file of this descriptor, which is open for reading. `path` is for error messages.
///
/// Where the system or the file system has no such locks nothing is locked,
/// as with QEMU's `locking=auto`. The locks last until the last duplicate of
/// the descriptor is closed. After a failure no more is locked than before.
#[cfg(test)]
pub fn lock(fd: RawFd, path: &Path, request: LockRequest) -> Result<()> {
    relock(&fd, path, LockRequest::NOTHING, request)
}

/// Changes the locks from `old` to `new`: those of both stay locked meanwhile. After a failure
/// `old` is locked as before.
///
/// # Errors
/// [`Error::Locked`] if another process has a lock that conflicts.
pub fn relock(file: &dyn LockBytes, path: &Path, old: LockRequest, new: LockRequest) -> Result<()> {
    let bytes = |held: Permissions, not_shared: Permissions| {
        held.bytes(HELD).chain(not_shared.bytes(NOT_SHARED))
    };
    let release = |from: LockRequest, to: LockRequest| {
        for (byte, _) in bytes(from.held.without(to.held), to.shared.without(from.shared)) {
            // It fails only where taking the lock does, and closing releases it.
            let _ = file.set(byte, false);
        }
    };
    for (byte, _) in bytes(new.held.without(old.held), old.shared.without(new.shared)) {
        if let Err(error) = file.set(byte, true) {
            release(new, old);
            return match error.raw_os_error() {
                Some(libc::EINVAL | libc::ENOSYS | libc::ENOLCK | libc::EOPNOTSUPP) => Ok(()),
                // Another program has a write lock; QEMU takes none.
                _ => Err(Error::from(error).during(format!("Failed to lock byte {byte}"))),
            };
        }
    }
    // Conflicts: another process does not share what is held here, or holds what is not shared.
    let held = (new.held.bytes(NOT_SHARED)).map(|(byte, name)| (byte, format!("\"{name}\"")));
    let not_shared =
        ((!new.shared).bytes(HELD)).map(|(byte, name)| (byte, format!("shared \"{name}\"")));
    let mut tests: Vec<_> = held.chain(not_shared).collect();
    // QEMU gets the write permission of a data file after it has opened it, so its message names
    // what it does not share.
    if new == LockRequest::DATA_WRITE {
        tests.reverse();
    }
    for (byte, lock) in tests {
        let failure = match file.is_locked_by_others(byte) {
            Ok(false) => continue,
            Ok(true) => Error::Locked {
                lock,
                path: path.display().to_string(),
            },
            Err(error) => Error::from(error).during(format!("Failed to test byte {byte}")),
        };
        release(new, old);
        return Err(failure);
    }
    release(old, new);
    Ok(())
}

/// Releases all locks of this descriptor. Closing it does so, too, but not while a child process
/// that is being started has a duplicate of the descriptor.
pub fn unlock(fd: RawFd) {
    for base in [HELD, NOT_SHARED] {
        for (byte, _) in Permissions::ALL.bytes(base) {
            // It fails only where nothing could be locked.
            let _ = fd.set(byte, false);
        }
    }
}

fn one_byte(kind: libc::c_int, byte: libc::off_t) -> libc::flock {
    // SAFETY: a struct of integers, for which zero is a value; l_pid must be.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = byte;
    lock.l_len = 1;
    lock
}

/// The locks of this descriptor's open file description.
impl LockBytes for RawFd {
    fn set(&self, byte: libc::off_t, locked: bool) -> io::Result<()> {
        let lock = one_byte(if locked { libc::F_RDLCK } else { libc::F_UNLCK }, byte);
        loop {
            // SAFETY: the kernel reads the struct during the call, no more.
            if unsafe { libc::fcntl(*self, libc::F_OFD_SETLK, &lock) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    fn is_locked_by_others(&self, byte: libc::off_t) -> io::Result<bool> {
        let mut lock = one_byte(libc::F_WRLCK, byte);
        // SAFETY: the kernel reads and writes the struct during the call, no more.
        match unsafe { libc::fcntl(*self, libc::F_OFD_GETLK, &mut lock) } {
            0 => Ok(lock.l_type != libc::F_UNLCK as libc::c_short),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against two programs that write one image, or one that reads while another writes: the
    //! conflicts must be those of QEMU. And against locks that remain after a failure.

    use std::fs::File;
    use std::io::{BufRead, BufReader};
    use std::os::fd::AsRawFd;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Unlocked before it is closed, since other tests start processes.
    #[derive(Debug)]
    struct Locked(File);

    impl Drop for Locked {
        fn drop(&mut self) {
            unlock(self.0.as_raw_fd());
        }
    }

    fn open(path: &Path, request: LockRequest) -> Result<Locked, String> {
        let file = File::open(path).unwrap();
        match lock(file.as_raw_fd(), path, request) {
            Ok(()) => Ok(Locked(file)),
            Err(error) => Err(error.to_string().lines().next().unwrap().to_string()),
        }
    }

    #[test]
    fn the_message_names_the_lock_that_conflicts() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path();
        let no_write = Err("Failed to get \"write\" lock".to_string());
        let no_share = Err("Failed to get shared \"write\" lock".to_string());
        let said = |r| open(path, r).map(|_| ());
        let reader = open(path, LockRequest::QCOW2_READ).unwrap();
        assert_eq!(said(LockRequest::QCOW2_READ), Ok(()));
        assert_eq!(said(LockRequest::QCOW2_WRITE), no_write);
        drop(reader);
        let writer = open(path, LockRequest::QCOW2_WRITE).unwrap();
        assert_eq!(said(LockRequest::QCOW2_READ), no_share);
        assert_eq!(said(LockRequest::QCOW2_WRITE), no_write);
        assert_eq!(said(LockRequest::FORCE_SHARE), Ok(()));
        drop(writer);
        assert_eq!(said(LockRequest::QCOW2_WRITE), Ok(()));
    }

    #[test]
    fn a_failure_leaves_nothing_locked() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path();
        let reader = open(path, LockRequest::QCOW2_READ).unwrap();
        let refused = File::open(path).unwrap();
        let fd = refused.as_raw_fd();
        lock(fd, path, LockRequest::QCOW2_WRITE).unwrap_err();
        // The failed request left no lock.
        open(path, LockRequest::QCOW2_READ).unwrap();
        drop(reader);
        open(path, LockRequest::QCOW2_WRITE).unwrap();
        // Earlier locks are kept.
        lock(fd, path, LockRequest::QCOW2_READ).unwrap();
        let reader = open(path, LockRequest::QCOW2_READ).unwrap();
        let (read, write) = (LockRequest::QCOW2_READ, LockRequest::QCOW2_WRITE);
        relock(&fd, path, read, write).unwrap_err();
        drop(reader);
        open(path, LockRequest::QCOW2_WRITE).unwrap_err();
        relock(&fd, path, read, write).unwrap();
        open(path, LockRequest::QCOW2_READ).unwrap_err();
        relock(&fd, path, write, read).unwrap();
        open(path, LockRequest::QCOW2_READ).unwrap();
        relock(&fd, path, read, LockRequest::NOTHING).unwrap();
        open(path, LockRequest::QCOW2_WRITE).unwrap();
    }

    /// A use of a file: zebu's request, and the arguments of qemu-io for the same use. `N` is 1 or 2
    /// for two images that use the file.
    type Use = (LockRequest, &'static [&'static str]);

    /// Files, and the ways to use each.
    const USES: &[(&str, &[Use])] = &[
        (
            "x.qcow2",
            &[
                (LockRequest::QCOW2_READ, &["-r", "x.qcow2"]),
                (LockRequest::QCOW2_WRITE, &["x.qcow2"]),
                (LockRequest::FORCE_SHARE, &["-r", "-U", "x.qcow2"]),
                (LockRequest::QCOW2_READ, &["-r", "oN.qcow2"]),
                (LockRequest::QCOW2_READ, &["oN.qcow2"]),
                (LockRequest::FORCE_SHARE, &["-r", "-U", "oN.qcow2"]),
                (LockRequest::RAW_READ, &["-r", "-f", "raw", "x.qcow2"]),
                (LockRequest::RAW_WRITE, &["-f", "raw", "x.qcow2"]),
            ],
        ),
        (
            "x.raw",
            &[
                (LockRequest::RAW_READ, &["-r", "-f", "raw", "x.raw"]),
                (LockRequest::RAW_WRITE, &["-f", "raw", "x.raw"]),
                (LockRequest::RAW_READ, &["-r", "rN.qcow2"]),
                (LockRequest::RAW_READ, &["rN.qcow2"]),
                (LockRequest::DATA_READ, &["-r", "dN.qcow2"]),
                (LockRequest::DATA_WRITE, &["dN.qcow2"]),
            ],
        ),
    ];

    fn qemu_io(dir: &Path, args: &[&str], which: &str) -> Command {
        let name = std::env::var("ZEBU_QEMU_IO").unwrap_or_else(|_| "qemu-io".into());
        let mut command = Command::new(name);
        command
            .args(args.iter().map(|arg| arg.replace('N', which)))
            .current_dir(dir);
        command
    }

    /// A qemu-io process that keeps images open until it is dropped.
    struct Holder(Child);

    impl Holder {
        fn start(dir: &Path, args: &[&str]) -> Holder {
            let mut child = qemu_io(dir, args, "1")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            // When it replies, it has opened the image.
            io::Write::write_all(child.stdin.as_mut().unwrap(), b"length\n").unwrap();
            let mut line = String::new();
            let stdout = child.stdout.as_mut().unwrap();
            BufReader::new(stdout).read_line(&mut line).unwrap();
            assert!(!line.is_empty(), "qemu-io {args:?} holds");
            Holder(child)
        }
    }

    impl Drop for Holder {
        fn drop(&mut self) {
            drop(self.0.stdin.take());
            let _ = self.0.wait();
        }
    }

    /// The error of qemu-io if it cannot open an image.
    fn qemu_says(dir: &Path, args: &[&str]) -> Result<(), String> {
        let output = qemu_io(dir, args, "2")
            .args(["-c", "quit"])
            .output()
            .unwrap();
        if output.status.success() {
            return Ok(());
        }
        let error = String::from_utf8_lossy(&output.stderr);
        let line = error.lines().next().unwrap_or_default();
        Err(line.rsplit(": ").next().unwrap_or_default().to_string())
    }

    #[test]
    fn qemu_and_zebu_exclude_each_other_as_two_qemus_do() {
        let image = std::env::var("ZEBU_QEMU_IMG").unwrap_or_else(|_| "qemu-img".into());
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let there = |mut command: Command| command.arg("--version").output().is_ok();
        if !there(qemu_io(dir, &[], "")) || !there(Command::new(&image)) {
            eprintln!("skipped: no qemu-io and qemu-img on PATH");
            return;
        }
        for args in [
            "create -q -f raw x.raw 1M",
            "create -q -f qcow2 x.qcow2 1M",
            "create -q -f qcow2 -b x.qcow2 -F qcow2 o1.qcow2",
            "create -q -f qcow2 -b x.qcow2 -F qcow2 o2.qcow2",
            "create -q -f qcow2 -b x.raw -F raw r1.qcow2",
            "create -q -f qcow2 -b x.raw -F raw r2.qcow2",
            "create -q -f qcow2 -o data_file=x.raw d1.qcow2 1M",
            "create -q -f qcow2 -o data_file=x.raw d2.qcow2 1M",
        ] {
            let made = Command::new(&image)
                .args(args.split(' '))
                .current_dir(dir)
                .status();
            assert!(made.unwrap().success(), "{args}");
        }
        let (mut refused, mut pairs) = (0, 0);
        for (name, uses) in USES {
            let path = dir.join(name);
            for (first, first_args) in *uses {
                let holder = Holder::start(dir, first_args);
                let answers: Vec<_> = uses
                    .iter()
                    .map(|(second, args)| {
                        let theirs = qemu_says(dir, args);
                        let ours = open(&path, *second).map(|_| ());
                        assert_eq!(
                            ours, theirs,
                            "zebu as {args:?} after qemu-io {first_args:?}"
                        );
                        theirs
                    })
                    .collect();
                drop(holder);
                let holder = open(&path, *first).unwrap();
                for ((_, args), answer) in uses.iter().zip(answers) {
                    let theirs = qemu_says(dir, args);
                    assert_eq!(
                        theirs, answer,
                        "qemu-io {args:?} after zebu as {first_args:?}"
                    );
                    refused += usize::from(answer.is_err());
                    pairs += 2;
                }
                drop(holder);
            }
        }
        println!("cases: {pairs} pairs of uses");
        assert!(refused > 10, "QEMU refuses some");
    }
}
