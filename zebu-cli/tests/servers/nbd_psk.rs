//! TLS with pre-shared keys: client and server must refuse a peer without the key, transfer data
//! unchanged, and work with libnbd, nbdkit and QEMU, which use GnuTLS. A client without a key must
//! not block others.

use crate::common::other_server::{Other, images};
use crate::common::server::{Raw, Server, client, have, libnbd};
use crate::common::tls::{certificates, keys};
use crate::common::{Lab, beyond_qemu};
use std::io::{Read, Write};
use std::path::Path;
use zebu::internal::nbd::{OptionKind, OptionReplyKind};

const SERVER: &str = "tls-creds-psk,id=t,endpoint=server,dir=good";

/// A URI of the default export with the keys of a folder.
fn uri(lab: &Lab, socket: &Path, user: &str, folder: &str) -> String {
    format!(
        "nbds+unix://{user}@/?socket={}&tls-psk-file={}",
        socket.display(),
        lab.path(folder).join("keys.psk").display()
    )
}

#[test]
fn clients_with_a_key_are_served() {
    if beyond_qemu("an NBD server") || !have("psktool") || !have("nbdinfo") {
        return;
    }
    let lab = images();
    keys(&lab);
    let args = ["-t", "-f", "raw", "--object", SERVER, "--tls-creds=t"];
    let mut server = Server::start(&lab, &[&args[..], &["-e", "1", "x.raw"]].concat());
    let info = |user: &str, folder: &str| {
        let uri = uri(&lab, &server.socket, user, folder);
        client(&lab, "nbdinfo", &["--size", &uri])
    };
    // The server accepts one client: a refused one must be disconnected at once.
    for user in ["alice", "bob"] {
        assert_eq!(info(user, "good").ok(user).out, "25165824\n");
        for user in ["alice", "eve"] {
            let answer = info(user, "wrong");
            assert!(answer.status != 0, "{user}: {answer:?}");
        }
        let plain = client(&lab, "nbdinfo", &["--size", &server.uri("")]);
        assert!(plain.status != 0, "{plain:?}");
    }
    for words in [
        "another key of that user",
        "offers no key of a user that is known",
    ] {
        assert!(server.log().contains(words), "{words}: {}", server.log());
    }
    // Data that need many TLS records, to and from libnbd and QEMU.
    let alice = uri(&lab, &server.socket, "alice", "good");
    client(&lab, "nbdcopy", &[&alice, "out.raw"]).ok("nbdcopy");
    lab.assert_same_bytes("out.raw", "x.raw", "nbdcopy");
    client(&lab, "nbdcopy", &["out.raw", &alice]).ok("nbdcopy back");
    lab.assert_same_bytes("out.raw", "x.raw", "nbdcopy back");
    let options = format!("driver=nbd,path={},tls-creds=c", server.socket.display());
    for user in ["", ",username=bob"] {
        let object = format!("tls-creds-psk,id=c,endpoint=client,dir=good{user}");
        let qemu = ["--object", &object, "--image-opts"];
        let io = [&qemu[..], &[&options]].concat();
        lab.qemu_io_script(&io, "write -P 77 3333k 3M\nread -P 77 3333k 3M\n")
            .ok("qemu-io");
        let convert = [&["convert"], &qemu[..], &["-O", "raw", &options, "q.raw"]].concat();
        lab.qemu_img(&convert).ok("qemu-img");
        lab.assert_same_bytes("q.raw", "x.raw", "qemu-img");
    }
    server.stop();
    // The short form.
    let short = ["-f", "raw", "--tls-psk", "good/keys.psk", "x.raw"];
    let mut server = Server::start(&lab, &[&["-t"], &short[..]].concat());
    client(&lab, "nbdinfo", &["--size", &alice]).ok("--tls-psk");
    server.stop();
}

#[test]
fn clients_without_a_key_do_not_block_others() {
    if beyond_qemu("an NBD server") || !have("psktool") || !have("nbdinfo") {
        return;
    }
    let lab = images();
    keys(&lab);
    let args = ["-t", "-f", "raw", "--object", SERVER, "--tls-creds=t"];
    let more = ["--handshake-limit=0", "-e", "9", "x.raw"];
    let mut server = Server::start(&lab, &[&args[..], &more].concat());
    let starts_tls = || {
        let mut raw = Raw::new(&server);
        let answer = raw.option(OptionKind::StartTls, b"");
        assert_eq!(answer.0, OptionReplyKind::Ack);
        raw
    };
    let serves_others = || {
        let uri = uri(&lab, &server.socket, "alice", "good");
        client(&lab, "nbdinfo", &["--size", &uri]).ok("another client");
    };
    let silent = starts_tls();
    serves_others();
    // An incomplete record of a handshake.
    let mut slow = starts_tls();
    slow.put(&[22, 3, 1, 0x3f, 0xff, 1, 0, 0x3f, 0xfb, 3, 3]);
    serves_others();
    for garbage in [
        vec![0x55; 100_000],
        vec![0xaa; 100_000],
        vec![0; 100_000],
        b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n".repeat(2000),
        // Empty records, and a message of 16 MiB.
        [22, 3, 1, 0, 0].repeat(20_000),
        [&[22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff][..], &[7; 99_000]].concat(),
    ] {
        let mut raw = starts_tls();
        // The server may close the connection before it has received all.
        let _ = raw.stream.write_all(&garbage);
        // It may send an alert before.
        let mut rest = Vec::new();
        let _ = raw.stream.read_to_end(&mut rest);
        assert!(rest.len() < 100, "{rest:?}");
        serves_others();
    }
    drop((silent, slow));
    serves_others();
    server.stop();
}

/// Requests more than the socket buffers hold, and reads the replies after SIGTERM.
const READ_AFTER_SIGTERM: &str = r#"
import nbd, os, signal, sys, time
h = nbd.NBD()
h.set_uri_allow_local_file(True)
h.connect_uri(sys.argv[1])
size = 1 << 20
buffers = [nbd.Buffer(size) for _ in range(16)]
asked = [h.aio_pread(buffer, n * size) for n, buffer in enumerate(buffers)]
# The socket has a part of the replies then.
time.sleep(0.3)
os.kill(int(sys.argv[2]), signal.SIGTERM)
while h.aio_in_flight() and not h.aio_is_closed():
    # An error if the connection ends within an answer.
    h.poll(-1)
answered = 0
with open(sys.argv[3], "rb") as f:
    for cookie, buffer in zip(asked, buffers):
        right = f.read(size)
        try:
            if not h.aio_command_completed(cookie):
                continue
        except nbd.Error:
            continue
        assert buffer.to_bytearray() == right
        answered += 1
assert answered > 0
"#;

#[test]
fn sigterm_finishes_requests() {
    if beyond_qemu("an NBD server") || !have("psktool") {
        return;
    }
    let lab = images();
    let Some(python) = libnbd(&lab) else {
        return;
    };
    keys(&lab);
    let args = ["-t", "-f", "raw", "--tls-psk", "good/keys.psk", "x.raw"];
    let mut server = Server::start(&lab, &args);
    let uri = uri(&lab, &server.socket, "alice", "good");
    let pid = server.pid().to_string();
    client(
        &lab,
        python,
        &["-c", READ_AFTER_SIGTERM, &uri, &pid, "x.raw"],
    )
    .ok("answers after SIGTERM");
    assert_eq!(server.wait(), 0, "{}", server.log());
}

/// Tests the client with a server that has keys: data in both directions, and wrong keys.
#[track_caller]
fn serves_the_client(lab: &Lab, socket: &Path, what: &str) {
    let good = uri(lab, socket, "alice", "good");
    lab.zebu(&["convert", "-n", "-O", "raw", "x.raw", &good])
        .ok(&format!("{what}: to the server"));
    lab.assert_same_bytes("e.raw", "x.raw", what);
    lab.zebu(&["convert", "-f", "raw", "-O", "raw", &good, "out.raw"])
        .ok(&format!("{what}: from the server"));
    lab.assert_same_bytes("out.raw", "x.raw", what);
    for user in ["alice", "eve"] {
        let answer = lab.zebu(&["info", &uri(lab, socket, user, "wrong")]);
        answer.failed_with_one_line(1, what);
        let words = format!("it ended the handshake of TLS: perhaps it has no user '{user}'");
        assert!(answer.err.contains(&words), "{what}: {answer:?}");
    }
    // The default user is qemu; options of certificates have no effect.
    let options = format!(
        "driver=nbd,path={},tls-creds=c,tls-hostname=elsewhere",
        socket.display()
    );
    for more in ["", ",username=bob,verify-peer=on"] {
        let object = format!("tls-creds-psk,id=c,endpoint=client,dir=good{more}");
        lab.zebu(&["info", "--object", &object, "--image-opts", &options])
            .ok(what);
    }
    std::fs::write(lab.path("e.raw"), vec![0; 24 << 20]).unwrap();
}

#[test]
fn the_client_authenticates_servers_by_key() {
    if beyond_qemu("nbds:") || !have("psktool") {
        return;
    }
    let lab = images();
    keys(&lab);
    // qemu-nbd reads the file later, from another folder, so the path is absolute.
    let good = lab.path("good").display().to_string();
    let object = format!("tls-creds-psk,id=t,endpoint=server,dir={good}");
    let tls = ["--object", &object, "--tls-creds", "t"];
    let qemu = [&["-f", "raw", "-e", "9"], &tls[..], &["e.raw"]].concat();
    let server = Other::qemu_nbd(&lab, "q", &qemu);
    serves_the_client(&lab, &server.socket, "qemu-nbd");
    drop(server);
    let mut server = Server::start(&lab, &[&["-t"], &qemu[..]].concat());
    serves_the_client(&lab, &server.socket, "zebu");
    server.stop();
    if have("nbdkit") {
        let file = format!("--tls-psk={}", lab.path("good/keys.psk").display());
        let server = Other::nbdkit(&lab, "k", &["--tls=require", &file, "file", "e.raw"]);
        serves_the_client(&lab, &server.socket, "nbdkit");
    }
    // A server without TLS.
    let server = Other::qemu_nbd(&lab, "p", &["-f", "raw", "e.raw"]);
    let answer = lab.zebu(&["info", &uri(&lab, &server.socket, "alice", "good")]);
    answer.failed_with_one_line(1, "no TLS");
    assert!(answer.err.contains("refuses TLS"), "{answer:?}");
}

#[test]
fn certificates_do_not_replace_keys() {
    if beyond_qemu("nbds:") || !have("psktool") || !have("certtool") {
        return;
    }
    let lab = images();
    certificates(&lab);
    keys(&lab);
    // A server with a certificate, without the key.
    let good = lab.path("good").display().to_string();
    let object = format!("tls-creds-x509,id=t,endpoint=server,dir={good},verify-peer=off");
    let args = ["-e", "9", "-f", "raw", "--object", &object, "--tls-creds=t"];
    let theirs = Other::qemu_nbd(&lab, "q", &[&args[..], &["x.raw"]].concat());
    let mut ours = Server::start(&lab, &[&["-t"], &args[..], &["x.raw"]].concat());
    for socket in [&theirs.socket, &ours.socket] {
        let answer = lab.zebu(&["info", &uri(&lab, socket, "alice", "good")]);
        answer.failed_with_one_line(1, "a server with a certificate");
        assert!(answer.err.contains("TLS"), "{answer:?}");
    }
    ours.stop();
    // A client with a certificate, without the key.
    let args = ["-t", "-f", "raw", "--tls-psk", "good/keys.psk", "x.raw"];
    let mut server = Server::start(&lab, &args);
    let name = format!(
        "nbds+unix:///?socket={}&tls-certificates={}&tls-verify-peer=0",
        server.socket.display(),
        lab.path("good").display()
    );
    let answer = lab.zebu(&["info", &name]);
    answer.failed_with_one_line(1, "a client with a certificate");
    if have("nbdinfo") {
        let answer = client(&lab, "nbdinfo", &["--size", &name]);
        assert!(answer.status != 0, "{answer:?}");
    }
    server.stop();
}

#[test]
fn unusable_keys_are_reported() {
    if beyond_qemu("pre-shared keys") {
        return;
    }
    let lab = Lab::new();
    lab.make("raw x.raw 1000000");
    let key = "0123456789abcdef".repeat(2);
    let socket = lab.path("nbd.sock").display().to_string();
    let nbd = |tls: &[&str], words: &str| {
        let args = [&["nbd", "-k", &socket, "-f", "raw"], tls, &["x.raw"]].concat();
        let answer = lab.zebu(&args);
        answer.failed_with_one_line(1, words);
        assert!(answer.err.contains(words), "{tls:?}: {answer:?}");
    };
    let info = |args: &[&str], words: &str| {
        let answer = lab.zebu(&[&["info"], args].concat());
        answer.failed_with_one_line(1, words);
        assert!(answer.err.contains(words), "{args:?}: {answer:?}");
    };
    let options = format!("driver=nbd,path={socket},tls-creds=t");
    // Files that are invalid for client and server.
    for (name, text, words) in [
        (
            "odd",
            format!("qemu:{key}0\n"),
            "line 1: the key has an odd",
        ),
        ("none", "\nqemu:\n".into(), "line 2: the key is empty"),
        (
            "hex",
            "qemu:password\n".into(),
            "the key is not hexadecimal",
        ),
        (
            "short",
            "qemu:0123456789abcdef\n".into(),
            "has 8 bytes, at least 16",
        ),
        (
            "twice",
            format!("qemu:{key}\nqemu:{key}\n"),
            "a second key of 'qemu'",
        ),
        ("words", "qemu\n".into(), "line 1: not USER:KEY"),
        ("large", "\n".repeat(5 << 20), "more than"),
    ] {
        std::fs::create_dir(lab.path(name)).unwrap();
        std::fs::write(lab.path(name).join("keys.psk"), text).unwrap();
        let object = format!("tls-creds-psk,id=t,endpoint=server,dir={name}");
        nbd(&["--object", &object, "--tls-creds=t"], words);
        nbd(&["--tls-psk", &format!("{name}/keys.psk")], words);
        let object = format!("tls-creds-psk,id=t,endpoint=client,dir={name}");
        info(&["--object", &object, "--image-opts", &options], words);
        let file = lab.path(name).join("keys.psk");
        let uri = format!(
            "nbds+unix://qemu@/?socket={socket}&tls-psk-file={}",
            file.display()
        );
        info(&[&uri], words);
    }
    std::fs::create_dir(lab.path("good")).unwrap();
    std::fs::write(lab.path("good/keys.psk"), format!("alice:{key}\n")).unwrap();
    std::fs::write(lab.path("empty.psk"), "\n").unwrap();
    let server = |more: &str| format!("tls-creds-psk,id=t,endpoint=server,dir=good{more}");
    for (object, words) in [
        (server("").replace("server", "client"), "a server endpoint"),
        (server("").replace(",dir=good", ""), "'dir' is missing"),
        (server("").replace("good", "nowhere"), "No such file"),
        (server(",username=alice"), "username should not be set"),
        (server(",verify-peer=perhaps"), "'on' or 'off'"),
        (server(",priority=NORMAL"), "no option 'priority'"),
    ] {
        nbd(&["--object", &object, "--tls-creds=t"], words);
    }
    nbd(&["--tls-psk", "empty.psk"], "no key in it");
    nbd(&["--tls-psk", "nothing.psk"], "No such file");
    let object = server("");
    let both = ["--object", &object, "--tls-creds=t", "--tls-psk=empty.psk"];
    nbd(&both, "mutually exclusive");
    let answer = lab.zebu(&["nbd", "-L", "-k", &socket, "--tls-psk", "good/keys.psk"]);
    answer.failed_with_one_line(1, "lists over TLS are not part");
    let client = |more: &str| format!("tls-creds-psk,id=t,endpoint=client,dir=good{more}");
    for (object, words) in [
        (client("").replace("client", "server"), "a client endpoint"),
        (client("").replace(",dir=good", ""), "'dir' is missing"),
        (client("").replace("good", "nowhere"), "No such file"),
        // The default user is qemu.
        (client(""), "no key of user 'qemu'"),
        (client(",username=bob"), "no key of user 'bob'"),
    ] {
        info(&["--object", &object, "--image-opts", &options], words);
    }
    let name = format!("nbds+unix://alice@/?socket={socket}&tls-psk-file=good/keys.psk");
    info(&[&format!("{name}&tls-certificates=x")], "at the same time");
    info(&[&name.replace("alice", "bob")], "no key of user 'bob'");
    info(&[&name], "Failed to connect");
}
