//! The NBD client: every command with an export as its image must read and write the same data, with
//! qemu-nbd, nbdkit and zebu's own server, also over TLS.

use crate::common::other_server::{Other, images};
use crate::common::server::{Server, have};
use crate::common::tls::certificates;
use crate::common::{Answer, Lab, beyond_qemu};

#[track_caller]
fn same(lab: &Lab, ours: &str, theirs: &str) {
    let what = format!("{ours} and {theirs}");
    lab.qemu_img(&["compare", ours, theirs]).ok(&what);
}

/// Reads all of `source` into files and compares them with `x.raw`.
#[track_caller]
fn read_all(lab: &Lab, source: &str, format: &str) {
    for (out, target) in [("raw", "out.raw"), ("qcow2", "out.qcow2")] {
        lab.zebu(&["convert", "-f", format, "-O", out, source, target])
            .ok(&format!("{source} to {out}"));
        same(lab, "x.raw", target);
        std::fs::remove_file(lab.path(target)).unwrap();
    }
}

#[test]
fn reads_from_servers() {
    if beyond_qemu("servers of many kinds") {
        return;
    }
    let lab = images();
    for args in [
        &["-f", "raw", "x.raw"][..],
        &["-f", "raw", "-e", "9", "-x", "a/b c", "x.raw"],
        &["-r", "-f", "qcow2", "-e", "9", "x.qcow2"],
    ] {
        let server = Other::qemu_nbd(&lab, "q", args);
        let export = if args.len() > 5 { "a/b%20c" } else { "" };
        let export = if args.contains(&"x.qcow2") {
            ""
        } else {
            export
        };
        read_all(&lab, &server.uri(export), "raw");
    }
    // The server exports the qcow2 file as raw, and the client reads the format.
    let server = Other::qemu_nbd(&lab, "q", &["-f", "raw", "-r", "x.qcow2"]);
    read_all(&lab, &server.uri(""), "qcow2");
    drop(server);
    if !have("nbdkit") {
        return;
    }
    for args in [
        &["file", "x.raw"][..],
        &["--no-sr", "file", "x.raw"],
        &["--mask-handshake=0", "file", "x.raw"],
        &[
            "--filter=blocksize-policy",
            "file",
            "x.raw",
            "blocksize-minimum=4096",
            "blocksize-preferred=8192",
            "blocksize-maximum=65536",
            "blocksize-error-policy=error",
        ],
        &["--filter=noextents", "file", "x.raw"],
        &["--filter=delay", "file", "x.raw", "rdelay=5ms"],
        &[
            "--filter=noparallel",
            "file",
            "x.raw",
            "serialize=connections",
        ],
    ] {
        println!("{args:?}");
        let server = Other::nbdkit(&lab, "k", args);
        read_all(&lab, &server.uri(""), "raw");
    }
}

/// The protocol before 2011: one export without a name, and no options.
#[test]
fn oldstyle_servers() {
    if beyond_qemu("it compares zebu with QEMU") || !have("nbdkit") {
        return;
    }
    let lab = images();
    let server = Other::nbdkit(&lab, "o", &["--oldstyle", "file", "x.raw"]);
    read_all(&lab, &server.uri(""), "raw");
    // This server announces flush and zeroes, and refuses both.
    let uri = server.uri("");
    let script = "write -P 77 1M 64k\nread -P 77 1M 64k\nread -P 2 1088k 64k\n";
    let answer = lab.zebu_io_script(&["-t", "writeback", "-f", "raw", &uri], script);
    assert!(!answer.out.contains("verification failed"), "{answer:?}");
    assert_eq!(answer.out.matches(" 65536/65536 ").count(), 3, "{answer:?}");
    let named = server.uri("a");
    for (name, words) in [
        (
            named.clone(),
            "Server does not support non-empty export names",
        ),
        (
            server.uri("").replace("nbd+", "nbds+"),
            "Server does not support STARTTLS",
        ),
    ] {
        let answer = lab.zebu(&["info", &name]);
        assert_eq!(answer.status, 1, "{answer:?}");
        assert!(answer.err.contains(words), "{answer:?}");
    }
    let theirs = lab.qemu_img(&["info", &named]);
    let ours = lab.zebu(&["info", &named]);
    assert_eq!(
        ours.err.replace("zebu: ", ""),
        theirs.err.replace("qemu-img: ", "")
    );
}

#[test]
fn writes_to_servers() {
    if beyond_qemu("servers of many kinds") {
        return;
    }
    let lab = images();
    let fill = || {
        lab.qemu_io_script(&["-f", "raw", "e.raw"], "write -P 99 0 24M\n")
            .ok("fill");
    };
    let kits: &[&[&str]] = match have("nbdkit") {
        true => &[
            &["file", "e.raw"],
            &["--no-sr", "file", "e.raw"],
            &[
                "--filter=nozero",
                "--filter=fua",
                "file",
                "e.raw",
                "zeromode=none",
                "fuamode=emulate",
            ],
            &[
                "--filter=blocksize-policy",
                "file",
                "e.raw",
                "blocksize-minimum=4096",
                "blocksize-preferred=8192",
                "blocksize-maximum=65536",
                "blocksize-error-policy=error",
            ],
        ],
        false => &[],
    };
    let qemu: &[&[&str]] = &[&["-f", "raw", "e.raw"], &["-f", "raw", "-e", "9", "e.raw"]];
    for (kit, args) in qemu
        .iter()
        .map(|a| (false, a))
        .chain(kits.iter().map(|a| (true, a)))
    {
        println!("{args:?}");
        let start = || match kit {
            true => Other::nbdkit(&lab, "s", args),
            false => Other::qemu_nbd(&lab, "s", args),
        };
        // Over old data: holes must become zeroes.
        fill();
        let server = start();
        let uri = server.uri("");
        lab.zebu(&["convert", "-n", "-O", "raw", "x.qcow2", &uri])
            .ok("raw");
        let answer = lab
            .zebu(&["compare", "-f", "raw", "-F", "raw", &uri, "x.raw"])
            .ok("compare");
        assert_eq!(answer.out, "Images are identical.\n");
        drop(server);
        lab.assert_same_bytes("e.raw", "x.raw", "raw");
        // Without -n, an image inside the export.
        fill();
        let server = start();
        lab.zebu(&["convert", "-O", "qcow2", "x.raw", &uri])
            .ok("qcow2");
        lab.zebu(&["check", "-f", "qcow2", &uri]).ok("check");
        drop(server);
        lab.qemu_img(&["check", "-f", "qcow2", "e.raw"]).ok("check");
        lab.qemu_img(&["compare", "-f", "qcow2", "-F", "raw", "e.raw", "x.raw"])
            .ok("compare");
        // Small writes, in both formats.
        for format in ["qcow2", "raw"] {
            if format == "raw" {
                fill();
            }
            let server = start();
            let script = "write -P 7 1000 3000\nwrite -f -P 8 5M 1234567\nwrite -z 2M 70k\n\
                          write -zu 3M 1M\ndiscard 8M 1M\naio_write -P 9 10M 64k\n\
                          aio_write -P 10 11M 512\naio_flush\nflush\nread -P 7 1000 3000\n";
            lab.zebu_io_script(&["-f", format, &uri], script).ok("io");
            drop(server);
            let read = lab.qemu_io(&[
                "-r",
                "-f",
                format,
                "-c",
                "read -P 7 1000 3000",
                "-c",
                "read -P 8 5M 1234567",
                "-c",
                "read -P 0 2M 70k",
                "-c",
                "read -P 0 3M 1M",
                "-c",
                "read -P 9 10M 64k",
                "-c",
                "read -P 10 11M 512",
                "e.raw",
            ]);
            let read = read.ok("read");
            assert!(!read.out.contains("failed"), "{args:?} {format}: {read:?}");
        }
    }
}

#[test]
fn reports_as_of_qemu() {
    if !crate::common::peer().is_current() {
        println!("skipped: an older QEMU has other reports");
        return;
    }
    let lab = images();
    let raw = Other::qemu_nbd(&lab, "r", &["-f", "raw", "-e", "9", "x.raw"]);
    let named = Other::qemu_nbd(&lab, "n", &["-f", "raw", "-e", "9", "-x", "a:b", "x.raw"]);
    let inner = Other::qemu_nbd(&lab, "i", &["-f", "raw", "-r", "-e", "9", "x.qcow2"]);
    let path = raw.socket.display().to_string();
    let options = |rest: &str| {
        format!(
            "json:{{\"driver\":\"raw\",{rest}\"file\":{{\"driver\":\"nbd\",\"server\":{{\"type\":\"unix\",\"path\":\"{path}\"}}}}}}"
        )
    };
    for name in [
        raw.uri(""),
        named.uri("a:b"),
        named.uri("a%3ab"),
        inner.uri(""),
        format!("nbd:unix:{path}"),
        format!("nbd:unix:{}:exportname=a:b", named.socket.display()),
        options(""),
        options("\"offset\":512,"),
        format!("json:{{\"driver\":\"nbd\",\"path\":\"{path}\",\"reconnect-delay\":3}}"),
        format!(
            "json:{{\"driver\":\"nbd\",\"server.type\":\"unix\",\"server.path\":\"{path}\",\"export\":\"\"}}"
        ),
    ] {
        for args in [
            &["info"][..],
            &["info", "--output=json"],
            &["map"],
            &["map", "--output=json"],
            &["measure", "-O", "qcow2"],
        ] {
            let args: Vec<&str> = args.iter().copied().chain([&*name]).collect();
            let (ours, theirs) = (lab.zebu(&args), lab.qemu_img(&args));
            assert_eq!(ours.ok(&name).out, theirs.ok(&name).out, "{args:?}");
        }
    }
    // As a backing file, and as options.
    lab.make(&format!(
        "img create -q -f qcow2 -F raw -b {} over.qcow2",
        raw.uri("")
    ));
    let opts = format!("driver=raw,file.driver=nbd,file.path={path}");
    for args in [
        &["info", "--backing-chain", "over.qcow2"][..],
        &["map", "--output=json", "over.qcow2"],
        &["info", "--image-opts", &opts],
        &["check", "--image-opts", &opts],
    ] {
        let (ours, theirs) = (lab.zebu(args), lab.qemu_img(args));
        assert_eq!(
            (ours.status, ours.out),
            (theirs.status, theirs.out),
            "{args:?}"
        );
    }
    lab.zebu(&["convert", "over.qcow2", "out.raw"])
        .ok("convert");
    lab.assert_same_bytes("out.raw", "x.raw", "the backing file");
    let refused = lab.zebu(&["--untrusted", "convert", "over.qcow2", "out2.raw"]);
    refused.failed_with_one_line(1, "--untrusted");
    assert!(refused.err.contains("may not open"), "{refused:?}");
    let refused = lab.zebu(&["--untrusted", "info", &raw.uri("")]);
    refused.failed_with_one_line(1, "--untrusted");
}

#[test]
fn every_command_accepts_an_export() {
    if beyond_qemu("an image within an export") {
        return;
    }
    let lab = images();
    lab.make("img create -q -f raw big.raw 64M; img create -q -f raw t.raw 64M");
    let server = Other::qemu_nbd(&lab, "s", &["-f", "raw", "-e", "9", "big.raw"]);
    let target = Other::qemu_nbd(&lab, "t", &["-f", "raw", "-e", "9", "t.raw"]);
    let (uri, to) = (server.uri(""), target.uri(""));
    lab.zebu(&["create", "-q", "-f", "qcow2", &uri, "24M"])
        .ok("create");
    lab.zebu(&["convert", "-n", "-O", "qcow2", "x.raw", &uri])
        .ok("convert -n");
    lab.zebu(&["convert", "-n", "-O", "qcow2", &uri, &uri])
        .failed_with_one_line(1, "convert onto itself");
    lab.zebu(&["snapshot", "-c", "one", &uri]).ok("snapshot");
    lab.zebu_io(&["-c", "write -P 77 0 1M", &uri]).ok("write");
    lab.zebu(&["convert", "-l", "one", &uri, "out.raw"])
        .ok("convert -l");
    lab.assert_same_bytes("out.raw", "x.raw", "a snapshot");
    lab.zebu(&["snapshot", "-a", "one", &uri]).ok("snapshot -a");
    lab.zebu(&["resize", &uri, "32M"]).ok("resize");
    lab.zebu(&["amend", "-o", "lazy_refcounts=on", &uri])
        .ok("amend");
    lab.zebu(&["bench", "-c", "300", "-d", "16", "-f", "qcow2", &uri])
        .ok("bench");
    lab.zebu(&["bench", "-w", "-c", "300", "-d", "16", "-f", "raw", &to])
        .ok("bench -w");
    lab.zebu(&[
        "dd",
        "-f",
        "qcow2",
        "-O",
        "raw",
        "bs=1M",
        "count=24",
        &format!("if={uri}"),
        "of=dd.raw",
    ])
    .ok("dd from");
    lab.assert_same_bytes("dd.raw", "x.raw", "dd");
    lab.zebu(&[
        "dd",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "bs=1M",
        "if=x.raw",
        &format!("of={to}"),
    ])
    .ok("dd to");
    lab.zebu(&["compare", "-f", "qcow2", "-F", "raw", &to, "x.raw"])
        .ok("compare");
    let itself = lab.zebu(&["dd", "if=x.qcow2", &format!("of={to}"), "-O", "raw"]);
    itself.ok("dd to raw");
    let itself = lab.zebu(&["dd", &format!("if={to}"), &format!("of={to}")]);
    itself.failed_with_one_line(1, "dd onto itself");
    // As backing file: commit and rebase.
    lab.make(&format!(
        "img create -q -f qcow2 -F qcow2 -b {uri} over.qcow2; io over.qcow2: write -P 55 0 64k"
    ));
    lab.zebu(&["commit", "over.qcow2"]).ok("commit");
    lab.zebu(&["rebase", "-b", "", "over.qcow2"]).ok("rebase");
    let answer = lab.zebu(&["compare", "over.qcow2", &uri]).ok("compare");
    assert_eq!(answer.out, "Images are identical.\n");
    lab.zebu_io(&["-s", "-c", "write -P 1 0 1M", &uri])
        .ok("io -s");
    drop((server, target));
    lab.qemu_img(&["check", "-f", "qcow2", "big.raw"])
        .ok("check");
    lab.qemu_img(&[
        "compare",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "big.raw",
        "over.qcow2",
    ])
    .ok("compare");
}

#[test]
fn client_and_server_of_zebu() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    lab.make("img create -q -f qcow2 e.qcow2 24M");
    let mut server = Server::start(
        &lab,
        &[
            "-t",
            "-e",
            "9",
            "--export",
            "x=x.qcow2",
            "--export",
            "e=e.qcow2",
        ],
    );
    let (x, e) = (server.uri("x"), server.uri("e"));
    read_all(&lab, &x, "raw");
    lab.zebu(&["convert", "-n", "-f", "raw", "-O", "raw", &x, &e])
        .ok("from the server to itself");
    let script = "write -f -P 8 5M 1234567\nwrite -z 2M 70k\ndiscard 8M 1M\nflush\n";
    lab.zebu_io_script(&["-f", "raw", &x], script).ok("io");
    lab.zebu_io_script(&["-f", "raw", &e], script).ok("io");
    server.stop();
    same(&lab, "x.qcow2", "e.qcow2");
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
}

#[test]
fn errors_of_opening() {
    if beyond_qemu("it has other messages") {
        return;
    }
    let lab = images();
    let server = Other::qemu_nbd(
        &lab,
        "s",
        &["-r", "-f", "raw", "-e", "9", "-x", "a", "x.raw"],
    );
    let path = server.socket.display().to_string();
    let failed = |answer: Answer, words: &str| {
        answer.failed_with_one_line(1, words);
        assert!(answer.err.contains(words), "{words}: {answer:?}");
    };
    let info = |name: &str| lab.zebu(&["info", name]);
    failed(info(&server.uri("b")), "export 'b' not present");
    failed(
        info("nbd+unix:///?socket=none"),
        "Failed to connect to 'none': No such file",
    );
    failed(
        info("nbd://127.0.0.1:1/x"),
        "Failed to connect to '127.0.0.1:1': Connection refused",
    );
    failed(info("nbd:nobody"), "error parsing address");
    failed(info("nbd+unix:///x"), "No valid URL");
    failed(
        info(&format!("nbds+unix:///a?socket={path}&tls-verify-peer=0")),
        "refuses TLS",
    );
    for (options, words) in [
        ("driver=nbd", "NBD server address missing"),
        (
            "driver=nbd,path=a,host=b",
            "may not be used at the same time",
        ),
        (
            "driver=nbd,path=a,blah=1",
            "doesn't support the option 'blah'",
        ),
        (
            "driver=nbd,path=a,tls-creds=t",
            "No TLS credentials with id 't'",
        ),
        ("driver=nbd,path=a,connections=0", "'connections'"),
        ("driver=nbd,server.type=unix", "Parameter 'path' is missing"),
        (
            "driver=nbd,server.type=vsock,server.cid=1,server.port=1",
            "vsock",
        ),
    ] {
        failed(lab.zebu(&["info", "--image-opts", options]), words);
    }
    // A read-only export.
    let uri = server.uri("a");
    failed(
        lab.zebu(&["convert", "-n", "-O", "raw", "x.raw", &uri]),
        "read-only",
    );
    failed(
        lab.zebu(&["create", "-q", "-f", "qcow2", &uri, "1M"]),
        "read-only",
    );
    failed(lab.zebu(&["resize", "-f", "raw", &uri, "1G"]), "read-only");
    lab.zebu_io(&["-r", "-f", "raw", "-c", "read -P 1 0 64k", &uri])
        .ok("read");
    // An export that is too small.
    let small = Other::qemu_nbd(&lab, "small", &["-f", "raw", "-e", "9", "e.raw"]);
    failed(
        lab.zebu(&["create", "-q", "-f", "raw", &small.uri(""), "1G"]),
        "Cannot grow",
    );
    failed(lab.zebu(&["resize", "-f", "raw", &small.uri(""), "1G"]), "");
}

#[test]
fn tls_with_certificates() {
    if beyond_qemu("nbds:") || !have("certtool") {
        return;
    }
    let lab = images();
    certificates(&lab);
    let object = format!(
        "tls-creds-x509,id=t,endpoint=server,dir={}",
        lab.path("good").display()
    );
    let server = Other::qemu_nbd(
        &lab,
        "s",
        &[
            "-f",
            "raw",
            "-e",
            "9",
            "--object",
            &object,
            "--tls-creds",
            "t",
            "e.raw",
        ],
    );
    let path = server.socket.display().to_string();
    let uri = |folder: &str, rest: &str| {
        format!(
            "nbds+unix:///?socket={path}&tls-certificates={}{rest}",
            lab.path(folder).display()
        )
    };
    // TLS records have other boundaries than requests.
    let good = uri("good", "&tls-hostname=localhost");
    lab.zebu(&["convert", "-n", "-O", "raw", "x.raw", &good])
        .ok("to the server");
    lab.zebu(&["convert", "-f", "raw", "-O", "raw", &good, "out.raw"])
        .ok("from the server");
    lab.assert_same_bytes("out.raw", "x.raw", "TLS");
    lab.zebu(&["info", &uri("good", "")])
        .ok("a unix socket has no name");
    let object = format!(
        "tls-creds-x509,id=c,endpoint=client,dir={}",
        lab.path("good").display()
    );
    let options = format!("driver=nbd,path={path},tls-creds=c,tls-hostname=localhost");
    lab.zebu(&["info", "--object", &object, "--image-opts", &options])
        .ok("--object");
    let raw = format!("driver=raw,file.driver=nbd,file.path={path},file.tls-creds=c");
    lab.zebu_io(&["--object", &object, "--image-opts", "-c", "read 0 1M", &raw])
        .ok("io --object");
    for (name, words) in [
        (uri("good", "&tls-hostname=elsewhere"), "TLS"),
        (uri("other", "&tls-hostname=localhost"), "TLS"),
        (uri("missing", ""), "Unable to load"),
        (server.uri(""), "wants TLS"),
    ] {
        let answer = lab.zebu(&["info", &name]);
        answer.failed_with_one_line(1, words);
        assert!(answer.err.contains(words), "{name}: {answer:?}");
    }
    // The server demands a client certificate.
    lab.zebu(&["info", &uri("none", "")])
        .failed_with_one_line(1, "no certificate");
}
