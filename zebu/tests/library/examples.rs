//! The programs in `examples/`, on small images.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use zebu::jobs::{CreateQcow2, create_qcow2};
use zebu::storage::{OpenFile, open_file};
use zebu::{Device, OpenOptions, Queue, QueueOptions, Source};

const SIZE: u64 = 8 << 20;

/// The example that cargo has built beside this test.
fn example(name: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().unwrap().parent().unwrap();
    let program = profile.join("examples").join(name);
    assert!(program.exists(), "first: cargo build -p zebu --examples");
    Command::new(program)
}

/// A qcow2 image with data at 1 MiB and at 5 MiB.
fn image(directory: &Path) -> (PathBuf, Vec<u8>) {
    let path = directory.join("disk.qcow2");
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let how = OpenFile::default().write(true).create(true);
    let file = open_file(&path, how).unwrap();
    let create = CreateQcow2::default().size(SIZE);
    queue
        .block_on(create_qcow2(&queue, &*file, None, &create, |_| {}))
        .unwrap();
    drop(file);
    let device = open(&queue, &path, true);
    let mut content = vec![0; SIZE as usize];
    for (at, length) in [(1 << 20, 300_000), (5 << 20, 70_000)] {
        let part = &mut content[at..at + length];
        for (i, byte) in part.iter_mut().enumerate() {
            *byte = (i % 251) as u8 + 1;
        }
        device.write_blocking(&queue, at as u64, part).unwrap();
    }
    queue.block_on(device.close(&queue)).unwrap();
    (path, content)
}

fn open(queue: &Queue, path: &Path, write: bool) -> Device {
    let options = OpenOptions::default().write(write);
    Device::open(queue, &Source::Name(path.into()), &options).unwrap()
}

#[test]
fn vmm_needs_one_thread() {
    let directory = tempfile::tempdir().unwrap();
    let (path, _) = image(directory.path());
    let out = example("vmm").arg(&path).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    if !out.status.success() {
        let error = String::from_utf8_lossy(&out.stderr);
        let options = QueueOptions::default().engine(zebu::EngineKind::IoUring);
        assert!(Queue::new(options).is_err(), "{error}");
        return eprintln!("skipped: no io_uring");
    }
    assert_eq!(said, "3 virtqueues, 42 blocks each, 1 thread(s)\n");
    // The image has the guest's data.
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let mut bytes = vec![0; 42 << 16];
    open(&queue, &path, false)
        .read_blocking(&queue, 0, &mut bytes)
        .unwrap();
    for (block, bytes) in bytes.chunks(1 << 16).enumerate() {
        assert!(bytes.iter().all(|b| *b == block as u8 | 1));
    }
}

#[test]
fn the_server_sends_ranges() {
    let directory = tempfile::tempdir().unwrap();
    let (path, content) = image(directory.path());
    let mut server = example("serve_ranges")
        .arg(&path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let address = line.trim().trim_start_matches("http://");
    let address = address.trim_end_matches('/');
    let ask = |method: &str, range: &str| {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(stream, "{method} / HTTP/1.1\r\nHost: x\r\n{range}\r\n").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let end = answer.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
        let body = answer.split_off(end);
        (String::from_utf8(answer).unwrap(), body)
    };
    let (header, body) = ask("GET", "");
    assert!(header.starts_with("HTTP/1.1 200 "), "{header}");
    assert!(body == content);
    let (header, body) = ask("GET", "range: bytes=1048570-1400000\r\n");
    assert!(header.starts_with("HTTP/1.1 206 "), "{header}");
    assert!(header.contains("Content-Range: bytes 1048570-1400000/8388608\r\n"));
    assert!(body == content[1_048_570..=1_400_000]);
    let (_, body) = ask("GET", "Range: bytes=-7\r\n");
    assert!(body == content[content.len() - 7..]);
    let (header, body) = ask("HEAD", "");
    assert!(header.contains("Content-Length: 8388608\r\n") && body.is_empty());
    let (header, _) = ask("GET", "Range: bytes=8388608-\r\n");
    assert!(header.starts_with("HTTP/1.1 416 "), "{header}");
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn the_backup_is_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let (path, content) = image(directory.path());
    let target = directory.path().join("copy.raw");
    let out = example("backup").arg(&path).arg(&target).output().unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    assert!(std::fs::read(&target).unwrap() == content);
    // Whole clusters of 64 KiB: five and two.
    let said = String::from_utf8_lossy(&out.stdout);
    assert_eq!(said, format!("{} bytes of data copied\n", 7 << 16));
}
