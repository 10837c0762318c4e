//! A Linux guest in a virtual machine of QEMU, with disks of a server under test. Kernel and programs
//! are made by `scripts/get-guest.sh`; the guest runs a script of the test.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::Lab;
use super::server::have;

/// The time limit of a guest, of which every instruction is emulated.
const TIME_LIMIT: Duration = Duration::from_secs(900);

/// The folder with kernel and initramfs, made once. Prints a line and returns `None` if they cannot be
/// made.
pub fn kernel() -> Option<&'static Path> {
    static FILES: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = || {
        if !have("qemu-system-x86_64") {
            return None;
        }
        let folder = crate::temporary().join("guest");
        let script = crate::repository("scripts/get-guest.sh");
        let output = Command::new("sh").arg(script).arg(&folder).output().ok()?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr);
            println!("skipped: no guest: {why}");
            return None;
        }
        Some(folder)
    };
    FILES.get_or_init(made).as_deref()
}

/// A running guest, killed when dropped.
pub struct Guest {
    child: Child,
    console: PathBuf,
}

/// A machine without disks.
const MACHINE: [&str; 14] = [
    "-machine",
    "q35",
    "-cpu",
    "max",
    "-smp",
    "2",
    "-nodefaults",
    "-display",
    "none",
    "-no-reboot",
    "-accel",
    "tcg,thread=multi",
    "-m",
    "512",
];

impl Guest {
    /// Starts a machine that runs the shell script `job` with `sh -e`. Its root is the disk `root`
    /// (`/dev/vda`) or, without one, memory. `args` are QEMU's, for disks and other devices. `name`
    /// must be unique in the folder.
    pub fn start(lab: &Lab, name: &str, root: Option<&str>, job: &str, args: &[&str]) -> Guest {
        let files = kernel().expect("the kernel");
        let initramfs = lab.path(&format!("{name}.initramfs"));
        let mut bytes = fs::read(files.join("initramfs")).unwrap();
        bytes.extend(archive("job", job.as_bytes()));
        fs::write(&initramfs, bytes).unwrap();
        // The kernel's test of the timer fails on a busy host.
        let mut line = "no_timer_check console=ttyS0 quiet panic=-1".to_owned();
        if let Some(root) = root {
            line += &format!(" zebu.root={root}");
        }
        let console = lab.path(&format!("{name}.console"));
        let child = Command::new("qemu-system-x86_64")
            .args(MACHINE)
            .arg("-kernel")
            .arg(files.join("vmlinuz"))
            .arg("-initrd")
            .arg(&initramfs)
            .args(["-append", &line, "-serial"])
            .arg(format!("file:{}", console.display()))
            .args(args)
            .current_dir(lab.path(""))
            .stdin(Stdio::null())
            .stderr(fs::File::create(lab.path(&format!("{name}.qemu"))).unwrap())
            .spawn()
            .unwrap();
        Guest { child, console }
    }

    /// The output on the console so far.
    pub fn console(&self) -> String {
        let bytes = fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\r', "")
    }

    /// Waits for `text` on the console.
    #[track_caller]
    pub fn wait_for(&mut self, text: &str) {
        let start = Instant::now();
        while !self.console().contains(text) {
            let ended = self.child.try_wait().unwrap();
            assert!(
                ended.is_none() && start.elapsed() < TIME_LIMIT,
                "timeout of {text:?}: {}",
                self.console()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the machine is off. The job must have succeeded. Returns the output.
    #[track_caller]
    pub fn finish(mut self) -> String {
        let start = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            let late = start.elapsed() >= TIME_LIMIT;
            assert!(!late, "timeout of the power-off: {}", self.console());
            std::thread::sleep(Duration::from_millis(20));
        }
        // The last line is complete only when the machine is off.
        let console = self.console();
        assert!(console.contains("guest: ended 0\n"), "{console}");
        console
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An archive (cpio, newc) with one file, to be appended to another archive.
fn archive(name: &str, content: &[u8]) -> Vec<u8> {
    // The kernel expects an archive at a multiple of four bytes; cpio pads to one of 512.
    let mut out = Vec::new();
    for (name, mode, content) in [(name, 0o100_755, content), ("TRAILER!!!", 0, &b""[..])] {
        let fields = [
            1,
            mode,
            0,
            0,
            1,
            0,
            content.len(),
            0,
            0,
            0,
            0,
            name.len() + 1,
            0,
        ];
        out.extend(b"070701");
        for field in fields {
            write!(out, "{field:08x}").unwrap();
        }
        out.extend(name.as_bytes());
        out.push(0);
        out.resize(out.len().next_multiple_of(4), 0);
        out.extend(content);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    out
}

/// Makes a file system with a copy of this system, writes a file with many requests in flight, and
/// verifies it.
pub const INSTALL: &str = r#"
    mkfs.ext4 -q -E discard /dev/vda
    mount /dev/vda /mnt
    cp -a /bin /lib /lib64 /etc /init /modules /mnt/
    mkdir /mnt/proc /mnt/sys /mnt/dev /mnt/tmp /mnt/mnt /mnt/new
    storm write /mnt/tmp/storm 12 direct
    storm verify /mnt/tmp/storm 12 direct
    umount /mnt
    fsck.ext4 -fn /dev/vda
"#;

/// The job of a guest with its root on the disk.
pub const LIVE: &str = r#"
    grep -q '^/dev/vda / ext4' /proc/mounts
    storm verify /tmp/storm 12
    dd if=/dev/urandom of=/tmp/more bs=1M count=8 conv=fsync 2>/dev/null
    cp /tmp/more /tmp/again
    sync
    echo 3 >/proc/sys/vm/drop_caches
    cmp /tmp/more /tmp/again
    rm /tmp/more
    fstrim /
    mount -o remount,ro /
    fsck.ext4 -fn /dev/vda
"#;

/// Writes files. Each is durable when its number is printed.
pub const WRITE: &str = r#"
    mkfs.ext4 -q /dev/vda
    mount /dev/vda /mnt
    n=0
    while true; do
        n=$((n + 1))
        yes "file $n" | dd of=/mnt/$n bs=4k count=20 iflag=fullblock conv=fsync 2>/dev/null
        echo "durable $n."
    done
"#;

/// Verifies the first `durable` files of `WRITE`, and the file system.
pub fn read(durable: usize) -> String {
    format!(
        r#"
    fsck.ext4 -fp /dev/vda || test $? -lt 4
    mount /dev/vda /mnt
    n=0
    while [ $n -lt {durable} ]; do
        n=$((n + 1))
        yes "file $n" | dd bs=4k count=20 iflag=fullblock 2>/dev/null | cmp - /mnt/$n
    done
    umount /mnt
    fsck.ext4 -fn /dev/vda
"#
    )
}
