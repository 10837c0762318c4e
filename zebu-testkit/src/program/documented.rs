//! Files and servers that the documentation names, and running its lines.

use std::fs;
use std::os::unix::fs::symlink;

use super::store::Store;
use super::web::{Behaviour, Web};
use super::{Answer, Lab, Limits, program};

/// A server that is killed still has its image open for a moment. The lines wait for its end.
const KILL: &str = "kill() {
    command kill \"$@\"
    for _ in 1 2 3 4 5 6 7 8 9; do
        command kill -0 \"$1\" 2>/dev/null || break
        sleep 0.2
    done
}";

/// A folder with the images that examples name. `zebu` is a program there, https://example.org/ is
/// a server with `disk.qcow2`, and s3://bucket/ an object store.
pub struct Documented {
    pub lab: Lab,
    web: Web,
    store: Store,
}

impl Documented {
    pub fn new() -> Self {
        let lab = Lab::new();
        let zebu = |line: &str| {
            let args: Vec<&str> = line.split(' ').collect();
            lab.zebu(&args).ok(line);
        };
        let content: Vec<u8> = (0..16 << 20)
            .map(|at: u32| (at >> 12) as u8 & (at >> 19) as u8)
            .collect();
        fs::write(lab.path("disk.raw"), content).unwrap();
        zebu("convert -O qcow2 disk.raw disk.qcow2");
        for name in ["base.qcow2", "other.qcow2"] {
            fs::copy(lab.path("disk.qcow2"), lab.path(name)).unwrap();
        }
        zebu("create -q -f qcow2 -b base.qcow2 -F qcow2 overlay.qcow2");
        fs::create_dir(lab.path(".bin")).unwrap();
        symlink(program().canonicalize().unwrap(), lab.path(".bin/zebu")).unwrap();
        let web = Web::new(&lab.path("base.qcow2"), Behaviour::default());
        Documented {
            lab,
            web,
            store: Store::new(),
        }
    }

    /// Runs lines of a shell, until one fails.
    pub fn run(&self, lines: &str) -> Answer {
        let web = format!("http://127.0.0.1:{}/", self.web.port());
        let lines = lines.replace("https://example.org/", &web);
        let script = format!(
            "set -eu; PATH=$PWD/.bin:$PATH AWS_ACCESS_KEY_ID=id AWS_SECRET_ACCESS_KEY=key AWS_REGION=here
             AWS_ENDPOINT_URL=http://127.0.0.1:{}
             export PATH AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_REGION AWS_ENDPOINT_URL
             {KILL}
             {lines}",
            self.store.port()
        );
        self.lab
            .run("sh".as_ref(), &["-c", &script], b"", &Limits::default())
    }
}
