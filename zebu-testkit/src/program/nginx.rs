//! nginx, which serves the folder of a test.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use super::Lab;
use super::server::wait_until;

/// nginx on a port of its own, with the lab's folder, until it is dropped.
pub struct Nginx {
    child: Child,
    port: u16,
}

impl Nginx {
    /// With these lines in the server's configuration.
    pub fn new(lab: &Lab, lines: &str) -> Nginx {
        // Another process may take the port meanwhile, hardly.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let folder = lab.path("").display().to_string();
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("{kind}_temp_path {folder}/tmp-{kind};"))
            .concat();
        let tls = if lines.contains("ssl_") { " ssl" } else { "" };
        let config = format!(
            "daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
             events {{}}
             http {{ access_log off; {temporary}
             server {{ listen 127.0.0.1:{port}{tls}; root {folder}; {lines} }} }}"
        );
        fs::write(lab.path("nginx.conf"), config).unwrap();
        let mut command = Command::new("nginx");
        command.arg("-e").arg(lab.path("nginx.log"));
        command.arg("-c").arg(lab.path("nginx.conf"));
        let mut nginx = Nginx {
            child: command.stderr(Stdio::null()).spawn().unwrap(),
            port,
        };
        wait_until("nginx listens", || {
            let ended = nginx.child.try_wait().unwrap();
            assert!(
                ended.is_none(),
                "{ended:?}: {:?}",
                fs::read_to_string(lab.path("nginx.log"))
            );
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        nginx
    }

    /// The URL of a file.
    pub fn url(&self, scheme: &str, file: &str) -> String {
        format!("{scheme}://localhost:{}/{file}", self.port)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
