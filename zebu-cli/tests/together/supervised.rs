//! A program whose system calls wait until the test lets them go on (seccomp user notification).
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read};
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Calls that stop a program, with their names and the number of the argument that is a path.
const CALLS: &[(libc::c_long, &str, Option<usize>)] = &[
    (libc::SYS_openat, "openat", Some(1)),
    (libc::SYS_statx, "statx", Some(1)),
    (libc::SYS_newfstatat, "fstatat", Some(1)),
    (libc::SYS_unlinkat, "unlinkat", Some(1)),
    (libc::SYS_linkat, "linkat", Some(1)),
    (libc::SYS_renameat2, "renameat2", Some(1)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_unlink, "unlink", Some(0)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_rename, "rename", Some(0)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_renameat, "renameat", Some(1)),
    (libc::SYS_flock, "flock", None),
    (libc::SYS_ftruncate, "ftruncate", None),
    (libc::SYS_fallocate, "fallocate", None),
    (libc::SYS_fsync, "fsync", None),
    (libc::SYS_fdatasync, "fdatasync", None),
    (libc::SYS_pwrite64, "pwrite", None),
    (libc::SYS_pwritev, "pwritev", None),
    (libc::SYS_pwritev2, "pwritev2", None),
    (libc::SYS_io_uring_enter, "io_uring_enter", None),
    // Only for the locks of open file descriptions.
    (libc::SYS_fcntl, "fcntl", None),
];

/// How long a program may compute between two calls before the other one goes on meanwhile.
const QUIET: Duration = Duration::from_secs(5);
/// How often it is looked whether a program has ended.
const LOOK: Duration = Duration::from_millis(20);
/// How long a program may take at most.
const LIMIT: Duration = Duration::from_secs(120);

/// A system call that waits.
struct Call {
    id: u64,
    what: String,
}

/// A program under supervision.
pub struct Supervised {
    child: Child,
    listener: OwnedFd,
    folder: PathBuf,
    waiting: Vec<Call>,
    status: Option<i32>,
    begun: Instant,
}

/// What a program left.
#[derive(Clone, Debug)]
pub struct Ended {
    pub status: i32,
    pub err: String,
}

impl Supervised {
    /// Starts a program in a folder, with files of at most `most` bytes. Its standard output is the
    /// caller's choice, and must take all of it.
    pub fn start(mut command: Command, folder: &Path, most: Option<u64>) -> io::Result<Supervised> {
        let mut ends = [0; 2];
        // SAFETY: the call fills an array of two descriptors.
        if unsafe { libc::socketpair(libc::AF_UNIX, CLOEXEC, 0, ends.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptors were just made.
        let [own, theirs] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let (filter, socket) = (filter(), theirs.as_raw_fd());
        command
            .current_dir(folder)
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        // SAFETY: only system calls are made, on memory that was allocated before the fork.
        unsafe {
            command.pre_exec(move || {
                if let Some(most) = most {
                    let limit = libc::rlimit {
                        rlim_cur: most,
                        rlim_max: most,
                    };
                    libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
                    libc::setrlimit(libc::RLIMIT_FSIZE, &limit);
                }
                send(socket, install(&filter)?)
            });
        }
        let child = command.spawn()?;
        drop(theirs);
        Ok(Supervised {
            child,
            listener: receive(own.as_raw_fd())?,
            folder: folder.to_owned(),
            waiting: Vec::new(),
            status: None,
            begun: Instant::now(),
        })
    }

    /// Waits until it stops at a call, ends, or has computed for long.
    pub fn settle(&mut self) {
        let begun = Instant::now();
        while self.waiting.is_empty() && self.status.is_none() && begun.elapsed() < QUIET {
            self.look(LOOK);
        }
        assert!(
            self.begun.elapsed() < LIMIT,
            "a program does not end: {:?}",
            self.child
        );
    }

    /// Whether a call waits.
    pub fn is_stopped(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.status.is_some()
    }

    /// Lets the first of the calls that wait go on. Returns what it is.
    pub fn go_on(&mut self) -> String {
        let call = self.waiting.remove(0);
        self.answer(call.id);
        call.what
    }

    /// Its exit status and its messages. It has ended.
    pub fn ended(mut self) -> Ended {
        let mut err = String::new();
        if let Some(mut pipe) = self.child.stderr.take() {
            let _ = pipe.read_to_string(&mut err);
        }
        Ended {
            status: self.status.expect("it has ended"),
            err,
        }
    }

    fn look(&mut self, wait: Duration) {
        let mut poll = libc::pollfd {
            fd: self.listener.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry, valid for the call.
        let ready = unsafe { libc::poll(&mut poll, 1, wait.as_millis() as i32) };
        if ready > 0 && poll.revents & libc::POLLIN != 0 {
            self.take();
        } else if let Some(status) = self.child.try_wait().expect("waitpid") {
            self.status = Some(status.code().unwrap_or(-1));
        }
    }

    /// Takes a call. One that has nothing to do with the folder goes on at once.
    fn take(&mut self) {
        // SAFETY: a struct of integers, for which zero is a value; the kernel demands that.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel fills the struct.
        let taken = unsafe {
            let fd = self.listener.as_raw_fd();
            libc::ioctl(fd, libc::SECCOMP_IOCTL_NOTIF_RECV as _, &mut call)
        };
        if taken != 0 {
            // The thread was killed meanwhile.
            return;
        }
        let number = libc::c_long::from(call.data.nr);
        let (_, name, path) = CALLS.iter().find(|c| c.0 == number).expect("in the filter");
        let what = match path {
            None => name.to_string(),
            Some(argument) => {
                let path = read_path(call.pid, call.data.args[*argument]);
                let own = self.folder.as_os_str().as_encoded_bytes();
                let is_own = path.starts_with(own) || !path.starts_with(b"/") && !path.is_empty();
                if !is_own {
                    return self.answer(call.id);
                }
                let path = path.strip_prefix(own).unwrap_or(&path);
                format!("{name} {}", String::from_utf8_lossy(path))
            }
        };
        self.waiting.push(Call { id: call.id, what });
    }

    fn answer(&self, id: u64) {
        let mut answer = libc::seccomp_notif_resp {
            id,
            val: 0,
            error: 0,
            flags: libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32,
        };
        // SAFETY: the kernel reads the struct. It fails if the thread was killed meanwhile.
        unsafe {
            let fd = self.listener.as_raw_fd();
            libc::ioctl(fd, libc::SECCOMP_IOCTL_NOTIF_SEND as _, &mut answer)
        };
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        if self.status.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

const CLOEXEC: libc::c_int = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;

/// The path at this address of a thread.
fn read_path(thread: u32, address: u64) -> Vec<u8> {
    let mut bytes = [0; 512];
    let memory = File::open(format!("/proc/{thread}/mem"));
    let count = memory.and_then(|memory| memory.read_at(&mut bytes, address));
    let bytes = &bytes[..count.unwrap_or(0)];
    bytes
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default()
        .to_vec()
}

/// A program for the kernel that reports [`CALLS`].
fn filter() -> Vec<libc::sock_filter> {
    let step = |code: u32, k: u32, yes: usize, no: usize| libc::sock_filter {
        code: code as u16,
        jt: yes as u8,
        jf: no as u8,
        k,
    };
    let load = |offset| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0);
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let end = |action| step(libc::BPF_RET | libc::BPF_K, action, 0, 0);
    let (others, fcntl) = CALLS.split_at(CALLS.len() - 1);
    // Number, then the low half of the second argument.
    let mut filter = vec![load(0), step(equal, fcntl[0].0 as u32, 0, 3), load(24)];
    filter.push(step(equal, libc::F_OFD_SETLK as u32, others.len() + 2, 0));
    filter.push(step(
        equal,
        libc::F_OFD_GETLK as u32,
        others.len() + 1,
        others.len(),
    ));
    // A call that is not fcntl(2) jumps here.
    filter[1].jf = 3;
    for (index, call) in others.iter().enumerate() {
        filter.push(step(equal, call.0 as u32, others.len() - index, 0));
    }
    filter.push(end(libc::SECCOMP_RET_ALLOW));
    filter.push(end(libc::SECCOMP_RET_USER_NOTIF));
    filter
}

/// Installs the filter in this process. Returns the descriptor that reports.
fn install(filter: &[libc::sock_filter]) -> io::Result<RawFd> {
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel reads the program during the call.
    let listener = unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &program,
        )
    };
    match listener {
        0.. => Ok(listener as RawFd),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A message of one byte, with room for a descriptor.
struct Message {
    byte: [u8; 1],
    part: libc::iovec,
    control: [u64; 4],
}

impl Message {
    fn new() -> Message {
        Message {
            byte: [0],
            part: libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 1,
            },
            control: [0; 4],
        }
    }

    fn header(&mut self) -> libc::msghdr {
        self.part.iov_base = self.byte.as_mut_ptr().cast();
        // SAFETY: a struct of integers and pointers, for which zero is a value.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &mut self.part;
        header.msg_iovlen = 1;
        header.msg_control = self.control.as_mut_ptr().cast();
        // SAFETY: arithmetic.
        header.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as _;
        header
    }
}

fn send(socket: RawFd, fd: RawFd) -> io::Result<()> {
    let mut message = Message::new();
    let header = message.header();
    // SAFETY: the control message is within `message.control`.
    let sent = unsafe {
        let control = libc::CMSG_FIRSTHDR(&header);
        (*control).cmsg_level = libc::SOL_SOCKET;
        (*control).cmsg_type = libc::SCM_RIGHTS;
        (*control).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
        libc::CMSG_DATA(control).cast::<RawFd>().write_unaligned(fd);
        libc::sendmsg(socket, &header, 0)
    };
    match sent {
        1 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn receive(socket: RawFd) -> io::Result<OwnedFd> {
    let mut message = Message::new();
    let mut header = message.header();
    // SAFETY: the kernel fills what the header points to, and gives a descriptor.
    unsafe {
        if libc::recvmsg(socket, &mut header, libc::MSG_CMSG_CLOEXEC) != 1 {
            return Err(io::Error::last_os_error());
        }
        let control = libc::CMSG_FIRSTHDR(&header);
        if control.is_null() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let fd = libc::CMSG_DATA(control).cast::<RawFd>().read_unaligned();
        Ok(OwnedFd::from_raw_fd(fd))
    }
}
