//! The NBD server with real clients: data, block status, the options of qemu-nbd, and TLS, which must
//! refuse clients without a certificate.

use crate::common::server::{Server, client, have, libnbd};
use crate::common::tls::certificates;
use crate::common::{Lab, beyond_qemu};

/// An image with data, zeroes and holes, over a base.
fn images() -> Lab {
    let lab = Lab::new();
    lab.make(
        "create base.qcow2 16M; io base.qcow2: write -P 7 0 3M | write -P 9 8M 100k; \
         create -b base.qcow2 -F qcow2 x.qcow2; io x.qcow2: write -P 1 1M 64k | write -z 2M 512k; \
         create empty.qcow2 16M; raw data.raw 3000000",
    );
    lab
}

const ENGINES: [&[&str]; 3] = [
    &["--aio=threads"],
    &["--aio=native", "--cache=none"],
    &["--aio=io_uring"],
];

#[test]
fn nbdinfo_and_list() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    let mut server = Server::start(
        &lab,
        &[
            "-t",
            "-e",
            "4",
            "-A",
            "-D",
            "a text",
            "-f",
            "qcow2",
            "-x",
            "one",
            "x.qcow2",
            "--export",
            "two=empty.qcow2",
        ],
    );
    let listed = lab.zebu(&["nbd", "-L", "-k", server.socket.to_str().unwrap()]);
    let listed = listed.ok("-L").out;
    assert_eq!(
        listed,
        "exports available: 2\n export: 'one'\n  description: a text\n  size:  16777216\n  \
         flags: 0x1ded ( flush fua trim zeroes df multi cache fast-zero block-status-payload )\n  \
         min block: 1\n  opt block: 4096\n  max block: 33554432\n  transaction size: 64-bit\n  \
         available meta contexts: 2\n   base:allocation\n   qemu:allocation-depth\n \
         export: 'two'\n  description: a text\n  size:  16777216\n  \
         flags: 0x1ded ( flush fua trim zeroes df multi cache fast-zero block-status-payload )\n  \
         min block: 1\n  opt block: 4096\n  max block: 33554432\n  transaction size: 64-bit\n  \
         available meta contexts: 2\n   base:allocation\n   qemu:allocation-depth\n"
    );
    if have("nbdinfo") {
        let info = client(&lab, "nbdinfo", &["--list", &server.uri("")]).ok("nbdinfo");
        for line in [
            "export=\"one\":",
            "export=\"two\":",
            "description: a text",
            "can_multi_conn: true",
            "can_fast_zero: true",
            "qemu:allocation-depth",
            "block_size_maximum: 33554432",
            "is_read_only: false",
            "can_df: true",
        ] {
            assert!(info.out.contains(line), "{line}: {}", info.out);
        }
        let missing = client(&lab, "nbdinfo", &[&server.uri("three")]);
        assert!(
            missing.status != 0 && missing.err.contains("three"),
            "{missing:?}"
        );
    }
    server.stop();
    assert!(!server.socket.exists());
}

#[test]
fn nbdcopy_reads_and_writes() {
    if beyond_qemu("an NBD server") || !have("nbdcopy") {
        return;
    }
    for engine in ENGINES {
        let lab = images();
        let mut args = vec!["-t", "-e", "8", "--discard=unmap", "-x", "x", "x.qcow2"];
        args.extend(["--export", "empty=empty.qcow2"]);
        args.extend(engine);
        let mut server = Server::start(&lab, &args);
        let (from, to) = (server.uri("x"), server.uri("empty"));
        client(&lab, "nbdcopy", &["--connections=4", &from, "out.raw"]).ok("nbdcopy from");
        lab.qemu_img(&["compare", "-U", "x.qcow2", "out.raw"])
            .ok("read");
        client(
            &lab,
            "nbdcopy",
            &["--connections=4", "--flush", "out.raw", &to],
        )
        .ok("nbdcopy to");
        client(&lab, "nbdcopy", &[&from, &to]).ok("nbdcopy from the server to itself");
        server.stop();
        lab.qemu_img(&["compare", "x.qcow2", "empty.qcow2"])
            .ok("written");
        lab.qemu_img(&["check", "empty.qcow2"]).ok("check");
        lab.qemu_img(&["check", "x.qcow2"]).ok("check");
    }
}

#[test]
fn qemu_reads_writes_and_maps() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    let args = [
        "-t",
        "-e",
        "0",
        "-A",
        "--discard=unmap",
        "-x",
        "x",
        "x.qcow2",
        "--export",
        "empty=empty.qcow2",
    ];
    let mut server = Server::start(&lab, &args);
    let (from, to) = (server.uri("x"), server.uri("empty"));
    lab.qemu_img(&["convert", "-n", "-f", "raw", "-O", "raw", &from, &to])
        .ok("convert");
    lab.qemu_img(&["compare", "-f", "raw", "-F", "raw", &from, &to])
        .ok("compare");
    // Block status must equal the map of the image.
    let map = |args: &[&str]| lab.qemu_img(args).ok("map").out;
    let ours = map(&["map", "--output=json", "-f", "raw", &from]);
    let theirs = map(&["map", "-U", "--output=json", "-f", "qcow2", "x.qcow2"]);
    let plain = |text: &str| -> Vec<(u64, u64, bool, bool)> {
        let all: Vec<serde_json::Value> = serde_json::from_str(text).unwrap();
        let mut merged: Vec<(u64, u64, bool, bool)> = Vec::new();
        for one in &all {
            let number = |key: &str| one[key].as_u64().unwrap();
            let (start, length) = (number("start"), number("length"));
            let (zero, data) = (one["zero"] == true, one["data"] == true);
            match merged.last_mut() {
                Some(last) if last.2 == zero && last.3 == data => last.1 += length,
                _ => merged.push((start, length, zero, data)),
            }
        }
        merged
    };
    assert_eq!(plain(&ours), plain(&theirs));
    if have("nbdinfo") {
        let depth = ["--map=qemu:allocation-depth", &from];
        let depth = client(&lab, "nbdinfo", &depth).ok("depth").out;
        let lines: Vec<Vec<&str>> = depth
            .lines()
            .map(|line| line.split_whitespace().take(4).collect())
            .collect();
        assert_eq!(lines[0], ["0", "1048576", "2", "backing"], "{depth}");
        assert_eq!(lines[1], ["1048576", "65536", "1", "local"], "{depth}");
    }
    let script = "write -P 5 100 1000\nwrite -z 4096 65536\nwrite -zu 1M 1M\nwrite -f -P 6 3M 1M\n\
                  discard 5M 1M\naio_write -P 8 9M 2M\naio_read -P 8 12M 1\naio_flush\nflush\n\
                  read -P 5 100 1000\nread -P 0 4096 65536\nread -P 6 3M 1M\nread -P 8 9M 2M\n";
    let answer = lab.qemu_io_script(&["-f", "raw", &to], script);
    let wrong = answer.out.matches("verification failed").count();
    // The read at 12M has a wrong pattern, so that one error is expected.
    assert!(answer.status == 0 && wrong == 1, "{answer:?}");
    server.stop();
    for image in ["x.qcow2", "empty.qcow2"] {
        lab.qemu_img(&["check", image]).ok("check");
    }
    let read = lab.qemu_io(&[
        "-r",
        "-c",
        "read -P 8 9M 2M",
        "-c",
        "read -P 5 100 1000",
        "empty.qcow2",
    ]);
    assert!(!read.ok("read").out.contains("failed"));
}

#[test]
fn fio_verifies_what_it_wrote() {
    if beyond_qemu("an NBD server") || !have("fio") {
        return;
    }
    let lab = Lab::new();
    if !client(&lab, "fio", &["--enghelp"]).out.contains("nbd") {
        println!("skipped: fio has no nbd engine");
        return;
    }
    for engine in ENGINES {
        let lab = Lab::new();
        lab.make("create x.qcow2 64M");
        let mut args = vec!["-t", "-e", "4", "x.qcow2"];
        args.extend(engine);
        let mut server = Server::start(&lab, &args);
        let uri = format!("--uri={}", server.uri(""));
        let common = [
            "--ioengine=nbd",
            &uri,
            "--bsrange=512-64k",
            "--iodepth=32",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--name=w",
            "--size=16M",
            "--rw=randwrite",
            "--numjobs=4",
            "--offset_increment=16M",
            "--end_fsync=1",
            "--group_reporting",
        ];
        client(&lab, "fio", &common).ok("fio");
        server.stop();
        lab.qemu_img(&["check", "x.qcow2"]).ok("check");
    }
}

/// Flags of every command, many requests in flight, and replies in chunks, with libnbd.
const LIBNBD: &str = r#"
import errno, nbd, sys
a, b = nbd.NBD(), nbd.NBD()
for h in (a, b):
    h.add_meta_context("base:allocation")
    h.connect_uri(sys.argv[1])
assert a.can_multi_conn() and a.can_fua() and a.can_fast_zero() and a.can_cache() and a.can_df()
assert a.get_structured_replies_negotiated()
size = a.get_size()
# Writes of one connection are flushed and read by the other.
a.pwrite(b"x" * 8192, 4096)
b.flush()
assert b.pread(8192, 4096) == b"x" * 8192
a.pwrite(b"y" * 512, 4096, nbd.CMD_FLAG_FUA)
b.zero(4096, 8192, nbd.CMD_FLAG_FUA | nbd.CMD_FLAG_NO_HOLE)
a.zero(65536, 65536)
a.trim(1 << 20, 1 << 20, nbd.CMD_FLAG_FUA)
a.cache(size, 0)
# Chunks: data, a hole, data.
a.pwrite(b"d" * 65536, 0)
a.pwrite(b"e" * 65536, 131072)
pieces = []
def chunk(buffer, offset, status, error):
    pieces.append((offset, len(buffer), status))
got = b.pread_structured(196608, 0, chunk)
assert got == b"d" * 65536 + bytes(65536) + b"e" * 65536
assert (65536, 65536, nbd.READ_HOLE) in pieces, pieces
pieces.clear()
assert b.pread_structured(196608, 0, chunk, nbd.CMD_FLAG_DF) == got
assert len(pieces) == 1, pieces
extents = []
a.block_status(size, 0, lambda context, offset, entries, error: extents.extend(entries))
assert sum(extents[::2]) == size and len(extents) > 2, extents
extents.clear()
a.block_status(size, 0, lambda context, offset, entries, error: extents.extend(entries), nbd.CMD_FLAG_REQ_ONE)
assert len(extents) == 2, extents
# Many in flight, in any order.
buffers = [nbd.Buffer.from_bytearray(bytearray([n]) * 4096) for n in range(200)]
cookies = [a.aio_pwrite(buffer, n * 4096) for n, buffer in enumerate(buffers)]
while cookies:
    a.poll(-1)
    cookies = [c for c in cookies if not a.aio_command_completed(c)]
for n in range(200):
    assert b.pread(4096, n * 4096) == bytes([n]) * 4096
# An error ends one request, not the connection.
a.set_strict_mode(0)
for ask in (lambda: a.pread(4096, size), lambda: a.pread(4096, size - 1), lambda: a.zero(2, size - 1)):
    try:
        ask()
        raise Exception("no error")
    except nbd.Error as e:
        assert e.errnum in (errno.EINVAL, errno.ENOSPC), e
assert a.pread(1, 0) == bytes(1)
a.shutdown()
b.shutdown()
"#;

#[test]
fn libnbd_from_python() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let Some(python) = libnbd(&Lab::new()) else {
        return;
    };
    for aio in ["--aio=threads", "--aio=io_uring"] {
        let lab = Lab::new();
        lab.make("create x.qcow2 16M");
        let mut server = Server::start(&lab, &["-t", "-e", "2", "--discard=unmap", aio, "x.qcow2"]);
        client(&lab, python, &["-c", LIBNBD, &server.uri("")]).ok("libnbd");
        server.stop();
        lab.qemu_img(&["check", "x.qcow2"]).ok("check");
    }
}

#[test]
fn read_only_offset_and_snapshot_options() {
    if beyond_qemu("an NBD server") || !have("nbdinfo") {
        return;
    }
    let lab = images();
    lab.qemu_img(&["snapshot", "-c", "then", "x.qcow2"])
        .ok("snapshot");
    lab.qemu_io(&["-c", "write -P 44 1M 64k", "x.qcow2"])
        .ok("write");
    let size = |server: &Server| {
        let answer = client(&lab, "nbdinfo", &["--size", &server.uri("")]);
        answer.ok("size").out.trim().to_owned()
    };
    let read = |server: &Server, command: &str| {
        let answer = lab.qemu_io(&["-r", "-f", "raw", "-c", command, &server.uri("")]);
        let answer = answer.ok("read");
        assert!(!answer.out.contains("failed"), "{answer:?}");
    };
    let mut server = Server::start(&lab, &["-t", "-r", "-o", "1M", "x.qcow2"]);
    assert_eq!(size(&server), "15728640");
    read(&server, "read -P 44 0 64k");
    let refused = lab.qemu_io(&["-f", "raw", "-c", "write 0 1k", &server.uri("")]);
    assert!(refused.status != 0 || refused.out.contains("failed") || !refused.err.is_empty());
    server.stop();
    let mut server = Server::start(&lab, &["-t", "-l", "then", "x.qcow2"]);
    read(&server, "read -P 1 1M 64k");
    server.stop();
    // Without -t it ends with its last client. -s does not write to the image.
    let mut server = Server::start(&lab, &["-s", "x.qcow2"]);
    let write = [
        "-f",
        "raw",
        "-c",
        "write -P 3 1M 64k",
        "-c",
        "read -P 3 1M 64k",
        &server.uri(""),
    ];
    lab.qemu_io(&write).ok("write");
    assert_eq!(server.wait(), 0);
    let read = lab
        .qemu_io(&["-r", "-c", "read -P 44 1M 64k", "x.qcow2"])
        .ok("read");
    assert!(!read.out.contains("failed"), "{read:?}");
}

#[test]
fn invalid_options() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    let socket = lab.path("s").display().to_string();
    for (args, words) in [
        (&["-k", "s", "x.qcow2"][..], "socket path must be absolute"),
        (
            &["-k", &socket, "-b", "127.0.0.1", "x.qcow2"],
            "can't be combined",
        ),
        (&["-k", &socket], "Invalid number of arguments"),
        (
            &["-k", &socket, "x.qcow2", "y.qcow2"],
            "Invalid number of arguments",
        ),
        (&["-k", &socket, "none.qcow2"], "No such file or directory"),
        (
            &["-k", &socket, "-B", "b", "x.qcow2"],
            "Bitmap 'b' is not found",
        ),
        (&["-c", "/dev/nbd0", "x.qcow2"], "kernel's nbd driver"),
        (
            &["-k", &socket, "--cache=some", "x.qcow2"],
            "Invalid cache mode",
        ),
        (&["-k", &socket, "--aio=native", "x.qcow2"], "aio=native"),
        (&["-k", &socket, "-p", "0", "x.qcow2"], "can't be combined"),
        (&["-p", "70000", "x.qcow2"], "Invalid port"),
        (&["-k", &socket, "-o", "17M", "x.qcow2"], "past the end"),
        (
            &["-k", &socket, "--tls-creds=t", "x.qcow2"],
            "No TLS credentials",
        ),
        (
            &[
                "-k",
                &socket,
                "--tls-creds=t",
                "--object",
                "tls-creds-psk,id=t,endpoint=server,dir=/nowhere",
                "x.qcow2",
            ],
            "Unable to load /nowhere/keys.psk: No such file",
        ),
        (
            &["-k", &socket, "--export", "=empty.qcow2", "x.qcow2"],
            "there twice",
        ),
    ] {
        let mut all = vec!["nbd"];
        all.extend(args);
        let answer = lab.zebu(&all);
        assert!(
            answer.status == 1 && answer.err.contains(words),
            "{args:?}: {answer:?}"
        );
    }
    let named = lab.zebu_called("qemu-nbd", &["--version"]).ok("--version");
    assert!(named.out.contains("qemu-nbd 11.1."), "{named:?}");
}

#[test]
fn tls_requires_a_client_certificate() {
    if beyond_qemu("an NBD server") || !have("certtool") || !have("nbdinfo") {
        return;
    }
    let lab = images();
    certificates(&lab);
    // Over TCP, since certificates are of host names.
    let port = (20_000 + std::process::id() % 20_000).to_string();
    let object = "tls-creds-x509,id=t,endpoint=server,dir=good";
    let args = [
        "nbd",
        "-v",
        "-t",
        "-e",
        "4",
        "-b",
        "127.0.0.1",
        "-p",
        &port,
        "--object",
        object,
        "--tls-creds=t",
        "x.qcow2",
    ];
    let mut server = Server::spawn(&lab, &args);
    crate::common::server::wait_until("it listens", || server.log().contains("listening"));
    let info = |scheme: &str, certificates: &str| {
        let folder = lab.path(certificates).display().to_string();
        let uri = format!("{scheme}://localhost:{port}/?tls-certificates={folder}");
        client(&lab, "nbdinfo", &["--size", &uri])
    };
    assert_eq!(info("nbds", "good").ok("right").out, "16777216\n");
    for (scheme, certificates) in [("nbds", "wrong"), ("nbds", "none"), ("nbds", "other")] {
        let answer = info(scheme, certificates);
        assert!(answer.status != 0, "{scheme} {certificates}: {answer:?}");
    }
    let plain = client(
        &lab,
        "nbdinfo",
        &["--size", &format!("nbd://localhost:{port}/")],
    );
    assert!(plain.status != 0, "{plain:?}");
    // Data that need several TLS records.
    let folder = lab.path("good").display().to_string();
    let uri = format!("nbds://localhost:{port}/?tls-certificates={folder}");
    client(&lab, "nbdcopy", &[&uri, "out.raw"]).ok("nbdcopy");
    client(&lab, "nbdcopy", &["out.raw", &uri]).ok("nbdcopy back");
    server.stop();
    lab.qemu_img(&["compare", "x.qcow2", "out.raw"])
        .ok("compare");
}
