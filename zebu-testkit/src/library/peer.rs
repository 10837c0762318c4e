//! QEMU's programs: they create and verify images.
//!
//! | variable         | meaning                                      |
//! |------------------|----------------------------------------------|
//! | `ZEBU_QEMU_IMG`  | the peer qemu-img; else `qemu-img` on `PATH` |
//! | `ZEBU_QEMU_IO`   | the peer qemu-io; else `qemu-io` on `PATH`   |

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use super::encryption::PASSPHRASE;
use crate::{Written, is_leak};

/// The output of a program and its exit status.
#[derive(Debug)]
pub struct Answer {
    pub status: i32,
    pub out: String,
    pub err: String,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "status {}\n{}{}", self.status, self.out, self.err)
    }
}

impl Answer {
    /// Fails the test unless the status is 0.
    #[track_caller]
    pub fn ok(self, what: &str) -> Self {
        assert!(self.status == 0, "{what}: {self}");
        self
    }
}

fn run(variable: &str, default: &str, folder: &Path, args: &[&str]) -> Answer {
    let program = std::env::var_os(variable).unwrap_or_else(|| default.into());
    let output = Command::new(&program)
        .args(with_keys(args))
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| {
            panic!(
                "cannot run {}: {e}. These tests compare with QEMU: install qemu-utils (Debian, \
                 Ubuntu) or qemu-img (Fedora), or name the programs in ZEBU_QEMU_IMG and \
                 ZEBU_QEMU_IO",
                program.display()
            )
        });
    Answer {
        status: output.status.code().unwrap_or(-1),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Arguments, in which encrypted qcow2 images are named with their secret.
fn with_keys(args: &[&str]) -> Vec<String> {
    let mut named: Vec<String> = args.iter().map(|arg| arg.to_string()).collect();
    let encrypted: Vec<usize> = (0..args.len())
        .filter(|nth| is_encrypted(Path::new(args[*nth])))
        .collect();
    for nth in &encrypted {
        named[*nth] = format!(
            "json:{{'driver':'qcow2','encrypt.key-secret':'s','file':{{'driver':'file','filename':'{}'}}}}",
            args[*nth]
        );
    }
    if !encrypted.is_empty() {
        // The format is in the name. qemu-io has no command before its options.
        if let Some(at) = named.windows(2).position(|pair| pair == ["-f", "qcow2"]) {
            named.drain(at..at + 2);
        }
        let at = usize::from(!args[0].starts_with('-'));
        let secret = format!("secret,id=s,data={PASSPHRASE}");
        named.splice(at..at, ["--object".to_string(), secret]);
    }
    named
}

/// Whether this is an encrypted qcow2 image, by its header.
fn is_encrypted(image: &Path) -> bool {
    let mut header = [0; 36];
    let read = std::fs::File::open(image).and_then(|mut file| file.read_exact(&mut header));
    read.is_ok() && header.starts_with(b"QFI\xfb") && header[32..36] != [0; 4]
}

pub fn qemu_img(args: &[&str]) -> Answer {
    run("ZEBU_QEMU_IMG", "qemu-img", Path::new("."), args)
}

/// Runs qemu-img in the folder of the image. QEMU opens an external data file with a relative name
/// in the current folder.
fn qemu_img_at(image: &Path, args: &[&str]) -> Answer {
    let folder = image.parent().expect("images of tests are in a folder");
    run("ZEBU_QEMU_IMG", "qemu-img", folder, args)
}

/// Runs `commands` of qemu-io on an image, with `-t unsafe`, since no test stops the machine.
pub fn qemu_io(image: &Path, format: &str, options: &[&str], commands: &[String]) -> Answer {
    let mut args = vec!["-f", format, "-t", "unsafe"];
    args.extend(options);
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(text(image));
    let answer = run("ZEBU_QEMU_IO", "qemu-io", Path::new("."), &args);
    // Old versions of qemu-io exit with 0 after errors, too.
    let failed = ["failed", "Pattern verification"]
        .iter()
        .any(|word| answer.out.contains(word) || answer.err.contains(word));
    Answer {
        status: if failed { 1 } else { answer.status },
        ..answer
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are UTF-8")
}

/// Fails the test unless QEMU finds neither errors nor leaks in a qcow2 image.
#[track_caller]
pub fn assert_clean(image: &Path, what: &str) {
    qemu_img_at(image, &["check", "-f", "qcow2", text(image)])
        .ok(&format!("{what}: qemu-img check"));
}

/// Fails the test if QEMU finds errors. Leaks are repaired.
#[track_caller]
pub fn assert_consistent(image: &Path, what: &str) {
    let answer = qemu_img_at(image, &["check", "-f", "qcow2", text(image)]);
    if answer.status != 3 {
        answer.ok(&format!("{what}: qemu-img check"));
        return;
    }
    qemu_img_at(image, &["check", "-r", "leaks", "-f", "qcow2", text(image)])
        .ok(&format!("{what}: qemu-img check -r leaks"));
}

/// Fails the test if QEMU finds errors in an image of any format that is written in place, or leaks
/// unless its last writer was `interrupted`.
#[track_caller]
pub fn assert_sound(image: &Path, written: &Written, interrupted: bool, what: &str) {
    if interrupted {
        carry_out_log(image, written);
    }
    if !written.is_checked {
        return;
    }
    let answer = qemu_img_at(image, &["check", "-f", written.name, text(image)]);
    let lines = answer.out.lines().chain(answer.err.lines());
    let mut errors = lines.filter(|line| line.starts_with("ERROR"));
    let only_leaks = match answer.status {
        2 => errors.all(is_leak),
        status => status == 3,
    };
    if !(interrupted && only_leaks) {
        answer.ok(&format!("{what}: qemu-img check"));
    }
}

/// QEMU carries out the log of an image whose writer was interrupted, which it does not read else.
pub fn carry_out_log(image: &Path, written: &Written) {
    if let Some(repair) = written.repair() {
        let args = [&repair[..], &[text(image)]].concat();
        qemu_img_at(image, &args).ok("the log is carried out");
    }
}

/// Fails the test unless QEMU reads these bytes from the image.
#[track_caller]
pub fn assert_content(image: &Path, format: &str, expected: &[u8], what: &str) {
    let raw = image.with_extension("expected");
    write_sparse(&raw, expected);
    let args = [
        "compare",
        "-f",
        format,
        "-F",
        "raw",
        text(image),
        text(&raw),
    ];
    qemu_img_at(image, &args).ok(&format!("{what}: qemu-img compare with what was written"));
    let _ = std::fs::remove_file(raw);
}

/// Fails the test unless QEMU reads these bytes at an offset. (It compares all of a large VHDX byte by
/// byte, since it does not know where that has nothing.)
#[track_caller]
pub fn assert_part(image: &Path, format: &str, (offset, expected): (u64, &[u8]), what: &str) {
    let part = image.with_extension("part");
    let (name, length) = (text(image), expected.len());
    let window = format!(
        "json:{{'driver':'raw','offset':{offset},'size':{length},\
         'file':{{'driver':'{format}','file':{{'driver':'file','filename':'{name}'}}}}}}"
    );
    let args = ["convert", "-O", "raw", &window, text(&part)];
    qemu_img_at(image, &args).ok(&format!("{what}: qemu-img convert"));
    let found = std::fs::read(&part).unwrap();
    let is_same = found == expected;
    assert!(is_same, "{what}: QEMU reads something else at {offset}");
    let _ = std::fs::remove_file(part);
}

/// Writes a file with these bytes, with holes for zeroes.
pub fn write_sparse(path: &Path, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    const BLOCK: usize = 64 << 10;
    for (n, block) in bytes.chunks(BLOCK).enumerate() {
        if block.iter().any(|b| *b != 0) {
            file.write_all_at(block, (n * BLOCK) as u64).unwrap();
        }
    }
}
