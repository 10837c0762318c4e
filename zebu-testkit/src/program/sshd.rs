//! An OpenSSH server with keys and a configuration of its own, on the loopback interface.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use super::server::wait_until;
use super::{Answer, Lab, Limits, program};

/// Where the server is, which must be called by its path.
const PROGRAM: &str = "/usr/sbin/sshd";

/// A server that lets the user of the test in by a key, until it is dropped.
pub struct Sshd {
    child: Child,
    port: u16,
    /// `NAME@` of the user.
    user: String,
}

/// A port that is free. It is none that the system gives to clients and to the servers of other
/// tests, which would take it before sshd does.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = (std::process::id() % 10_000) as u16;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let mut ports = std::iter::repeat_with(|| {
        20_000 + first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000
    });
    ports.find(is_free).expect("a port")
}

impl Sshd {
    /// Starts one with its files in the lab. `subsystem` is what serves SFTP. The program `ssh` that
    /// zebu calls in this lab has a `Host far`, which is the server, and knows its key.
    ///
    /// # Panics
    /// If there is none (Debian: openssh-server).
    pub fn start(lab: &Lab, subsystem: &str) -> Sshd {
        let port = free_port();
        let folder = lab.path("ssh");
        let at = |name: &str| folder.join(name).display().to_string();
        fs::create_dir_all(&folder).unwrap();
        for key in ["host", "client", "other"] {
            let file = at(key);
            let args = ["-q", "-t", "ed25519", "-N", "", "-f", &file];
            let made = Command::new("ssh-keygen").args(args).status();
            assert!(made.unwrap().success());
        }
        let key = fs::read_to_string(at("host.pub")).unwrap();
        fs::write(at("known"), format!("[127.0.0.1]:{port} {key}")).unwrap();
        let config = format!(
            "ListenAddress 127.0.0.1\nPort {port}\nHostKey {}\nAuthorizedKeysFile {}\n\
             PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n\
             KbdInteractiveAuthentication no\nMaxStartups 100\nSubsystem sftp {subsystem}\n",
            at("host"),
            at("client.pub")
        );
        fs::write(at("sshd_config"), config).unwrap();
        let config = format!(
            "Host far\nHostName 127.0.0.1\nPort {port}\n\
             Match all\nIdentityFile {}\nIdentitiesOnly yes\nIdentityAgent none\n\
             UserKnownHostsFile {}\nGlobalKnownHostsFile /dev/null\n",
            at("client"),
            at("known")
        );
        fs::write(at("config"), config).unwrap();
        let script = format!("#!/bin/sh\nexec ssh -F '{}' \"$@\"\n", at("config"));
        fs::write(at("ssh"), script).unwrap();
        fs::set_permissions(at("ssh"), fs::Permissions::from_mode(0o755)).unwrap();
        // Where the server of root locks itself up; the system makes the folder when it starts its
        // own server.
        let _ = fs::create_dir("/run/sshd");
        let log = fs::File::create(at("log")).unwrap();
        let mut child = Command::new(PROGRAM)
            .args(["-D", "-e", "-f", &at("sshd_config")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|e| panic!("{PROGRAM}: {e}"));
        wait_until("sshd listens", || {
            let log = fs::read_to_string(at("log")).unwrap();
            assert!(child.try_wait().unwrap().is_none(), "sshd: {log}");
            log.contains("Server listening on")
        });
        let user = Command::new("id").arg("-un").output().unwrap().stdout;
        let user = String::from_utf8(user).unwrap();
        Sshd {
            child,
            port,
            user: user.trim().into(),
        }
    }

    /// `HOST:PORT`
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn user(&self) -> &str {
        &self.user
    }

    /// The name of a file of the lab.
    pub fn name(&self, lab: &Lab, file: &str) -> String {
        format!("ssh://far{}", lab.path(file).display())
    }

    /// Ends all connections, as if their processes had crashed.
    pub fn kill_connections(&self) {
        // Each connection is a child of the server, perhaps with children of its own. After the
        // last one was killed the next one may be on its way.
        let connections = || children(self.child.id());
        wait_until("there is a connection", || !connections().is_empty());
        for child in connections() {
            for pid in children_and(child) {
                // It may have ended already.
                let _ = Command::new("kill")
                    .args(["-9", &pid.to_string()])
                    .stderr(Stdio::null())
                    .status();
            }
        }
    }

    /// Ends the server; what is connected goes on.
    pub fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        self.stop();
    }
}

fn children(pid: u32) -> Vec<u32> {
    let output = Command::new("pgrep")
        .args(["-P", &pid.to_string()])
        .output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

fn children_and(pid: u32) -> Vec<u32> {
    let below = children(pid).into_iter().flat_map(children_and);
    below.chain([pid]).collect()
}

/// Runs the program with the `ssh` of the lab.
pub fn run(lab: &Lab, args: &[&str]) -> Answer {
    run_with(lab, &lab.path("ssh/ssh"), args, "")
}

/// As [`run`] with another program, and input.
pub fn run_with(lab: &Lab, ssh: &Path, args: &[&str], input: &str) -> Answer {
    let script = format!("ZEBU_SSH='{}' exec \"$0\" \"$@\"", ssh.display());
    let mut all = vec!["-c", &script, program().to_str().unwrap()];
    all.extend(args);
    lab.run("sh".as_ref(), &all, input.as_bytes(), &Limits::default())
}
