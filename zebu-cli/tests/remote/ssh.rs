//! Files on SSH servers, with a real OpenSSH: every command reads and writes the same as with a local
//! file; keys of hosts, names that are attacks, servers that refuse, die or talk nonsense.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::thread;

use super::http::{qemu_img_with, qemu_modules};
use crate::common::server::wait_until;
use crate::common::sshd::{Sshd, run, run_with};
use crate::common::web::images;
use crate::common::{Answer, Lab, beyond_qemu, compare_answers};

const SUBSYSTEM: &str = "internal-sftp";

fn run_io(lab: &Lab, args: &[&str], script: &str) -> Answer {
    run_with(lab, &lab.path("ssh/ssh"), &[&["io"], args].concat(), script)
}

#[test]
fn all_commands_read_images() {
    if beyond_qemu("ssh by the program ssh") {
        return;
    }
    let lab = images(24 << 20);
    let server = Sshd::start(&lab, SUBSYSTEM);
    let name = server.name(&lab, "x.qcow2");
    for format in ["raw", "qcow2"] {
        let name = server.name(&lab, &format!("x.{format}"));
        run(
            &lab,
            &["convert", "-f", format, "-O", "raw", &name, "out.raw"],
        )
        .ok(&name);
        lab.assert_same_bytes("out.raw", "x.raw", &name);
    }
    run(&lab, &["compare", "-F", "raw", &name, "x.raw"]).ok("compare");
    run(&lab, &["check", &name]).ok("check");
    for command in [&["map", "--output=json"][..], &["measure", "-O", "qcow2"]] {
        let ours = run(&lab, &[command, &[&name]].concat()).ok("of the server");
        let file = lab
            .zebu(&[command, &["x.qcow2"]].concat())
            .ok("of the file");
        assert_eq!(ours.out, file.out, "{command:?}");
    }
    let script = "read 1M 64k\nread -v 5M 16\nmap\n";
    let ours = run_io(&lab, &["-r", &name], script);
    let file = lab.zebu_io_script(&["-r", "x.qcow2"], script);
    let dump = |answer: &Answer| answer.out.lines().filter(|l| l.contains("  ")).count();
    assert_eq!((ours.status, dump(&ours)), (0, dump(&file)), "{ours:#?}");

    // As a backing file, by an absolute name and by one that is relative to the server's.
    let args = [
        "create",
        "-f",
        "qcow2",
        "-b",
        &name,
        "-F",
        "qcow2",
        "top.qcow2",
    ];
    run(&lab, &args).ok("create");
    run(&lab, &["convert", "-O", "raw", "top.qcow2", "out.raw"]).ok("over it");
    lab.assert_same_bytes("out.raw", "x.raw", "over it");
    lab.make("img create -f qcow2 -b x.qcow2 -F qcow2 beside.qcow2");
    let beside = server.name(&lab, "beside.qcow2");
    run(&lab, &["convert", "-O", "raw", &beside, "out.raw"]).ok("beside it");
    lab.assert_same_bytes("out.raw", "x.raw", "beside it");
    // Extents that a descriptor names.
    lab.make("img convert -O vmdk -o subformat=monolithicFlat x.raw flat.vmdk");
    let flat = server.name(&lab, "flat.vmdk");
    run(&lab, &["convert", "-O", "raw", &flat, "out.raw"]).ok("extents");
    lab.assert_same_bytes("out.raw", "x.raw", "extents");
}

#[test]
fn all_commands_write_images() {
    if beyond_qemu("ssh by the program ssh") {
        return;
    }
    let lab = images(24 << 20);
    let server = Sshd::start(&lab, SUBSYSTEM);
    fs::create_dir(lab.path("here")).unwrap();
    fs::create_dir(lab.path("there")).unwrap();
    let steps = [
        "convert -f raw -O raw x.raw @a.raw",
        // Over a longer file.
        "create -f raw @b.raw 64M",
        "convert -f qcow2 -O raw x.qcow2 @b.raw",
        "convert -O qcow2 x.qcow2 @c.qcow2",
        "convert -O qcow2 -c x.qcow2 @d.qcow2",
        "convert -n -O qcow2 x.qcow2 @d.qcow2",
        "convert -O vmdk x.qcow2 @e.vmdk",
        "convert -O vhdx x.qcow2 @f.vhdx",
        "convert -O vdi x.qcow2 @g.vdi",
        "create -f qcow2 -o preallocation=full @h.qcow2 3M",
        "create -f qcow2 -b @c.qcow2 -F qcow2 @i.qcow2",
        "resize @c.qcow2 +8M",
        "resize -f raw @a.raw 20M --shrink",
        "snapshot -c one @c.qcow2",
        "snapshot -a one @c.qcow2",
        "bitmap --add @c.qcow2 bits",
        "amend -o refcount_bits=32 @d.qcow2",
        "dd -f raw -O qcow2 if=x.raw of=@j.qcow2 bs=1M count=5",
        "check -r all @d.qcow2",
    ];
    for step in steps {
        let there = step.replace('@', &server.name(&lab, "there/"));
        let here = step.replace('@', &lab.path("here/").display().to_string());
        let args: Vec<&str> = there.split(' ').collect();
        run(&lab, &args).ok(&there);
        let args: Vec<&str> = here.split(' ').collect();
        lab.zebu(&args).ok(&here);
    }
    let script = "write -P 7 1M 3M\nwrite -z 2M 64k\ndiscard 5M 1M\nflush\nwrite -P 1 100 300\n";
    let there = server.name(&lab, "there/i.qcow2");
    let written = run_io(&lab, &[&there], script);
    assert_eq!(written.status, 0, "{written:#?}");
    assert_eq!(lab.zebu_io_script(&["here/i.qcow2"], script).status, 0);
    run(&lab, &["commit", &there]).ok("commit");
    lab.zebu(&["commit", "here/i.qcow2"]).ok("commit");
    for name in ["a.raw", "b.raw"] {
        lab.assert_same_bytes(&format!("there/{name}"), &format!("here/{name}"), name);
    }
    for name in [
        "c.qcow2", "d.qcow2", "e.vmdk", "f.vhdx", "g.vdi", "h.qcow2", "j.qcow2",
    ] {
        let (there, here) = (format!("there/{name}"), format!("here/{name}"));
        lab.zebu(&["compare", &there, &here]).ok(name);
        if name.ends_with("qcow2") {
            let check = lab.zebu(&["check", &there]);
            assert_eq!(check.status, 0, "{check:#?}");
        }
    }
    // The source is not overwritten.
    let name = server.name(&lab, "x.raw");
    let answer = run(&lab, &["convert", "-f", "raw", "-O", "raw", &name, &name]);
    answer.fails_with("The input is read from this file");
    // What was there stays, if the image cannot be made; what was not is removed.
    let nowhere = server.name(&lab, "none/x.raw");
    run(&lab, &["create", "-f", "raw", &nowhere, "1M"]).fails_with("No such file");
    let new = server.name(&lab, "there/new.raw");
    let args = [
        "create",
        "-f",
        "raw",
        "-o",
        "preallocation=falloc",
        &new,
        "1M",
    ];
    assert_eq!(run(&lab, &args).status, 1);
    assert!(!lab.path("there/new.raw").exists());
}

#[test]
fn keys_of_hosts_are_checked() {
    if beyond_qemu("ssh by the program ssh") {
        return;
    }
    let lab = images(1 << 20);
    let server = Sshd::start(&lab, SUBSYSTEM);
    let path = lab.path("x.qcow2").display().to_string();
    let name = format!("ssh://{}@{}{path}", server.user(), server.address());
    run(&lab, &["info", &name]).ok("a known host");
    run(&lab, &["info", &format!("{name}?host_key_check=yes")]).ok("a known host");
    let known = fs::read_to_string(lab.path("ssh/known")).unwrap();
    let digest = |program: &str| {
        let script = format!("cut -d' ' -f3 ssh/known | base64 -d | {program}");
        let args = ["-c", &script];
        let answer = lab.run("sh".as_ref(), &args, b"", &Default::default());
        answer.out.split(' ').next().unwrap().to_string()
    };
    let hashes = ["md5", "sha1", "sha256"].map(|kind| (kind, digest(&format!("{kind}sum"))));
    let other = fs::read_to_string(lab.path("ssh/other.pub")).unwrap();
    let other = format!("[127.0.0.1]:{} {other}", server.port());
    // Known, unknown, and known with another key.
    for (nth, file) in [&*known, "", &other].into_iter().enumerate() {
        fs::write(lab.path("ssh/known"), file).unwrap();
        let answer = run(&lab, &["info", &name]);
        match nth {
            0 => drop(answer.ok("a known host")),
            _ => answer.fails_with("Host key verification failed"),
        }
        run(&lab, &["info", &format!("{name}?host_key_check=no")]).ok("no check");
        for (kind, hash) in &hashes {
            let ours = format!("{name}?host_key_check={kind}:{}", hash.to_uppercase());
            run(&lab, &["info", &ours]).ok(kind);
            let first = if hash.starts_with('0') { '1' } else { '0' };
            let wrong = format!("{name}?host_key_check={kind}:{first}{}", &hash[1..]);
            let answer = run(&lab, &["info", &wrong]);
            answer.fails_with("does not match 'host-key-check'");
        }
    }
    let options = format!(
        "driver=qcow2,file.driver=ssh,file.server.host=127.0.0.1,file.server.port={},\
         file.user={},file.path={path},file.host-key-check.mode",
        server.port(),
        server.user()
    );
    let (kind, hash) = &hashes[2];
    let hash = format!("=hash,file.host-key-check.type={kind},file.host-key-check.hash={hash}");
    for check in ["=none", &hash] {
        let options = format!("{options}{check}");
        run(&lab, &["info", "--image-opts", &options]).ok(check);
    }
    let answer = run(
        &lab,
        &["info", "--image-opts", &format!("{options}=known_hosts")],
    );
    answer.fails_with("Host key verification failed");
}

#[test]
fn names_are_those_of_qemu() {
    let Some(modules) = qemu_modules() else {
        println!("skipped: no QEMU with modules");
        return;
    };
    if beyond_qemu("modules of QEMU") {
        return;
    }
    let lab = images(1 << 20);
    let server = Sshd::start(&lab, SUBSYSTEM);
    let path = lab.path("x.qcow2").display().to_string();
    let (user, port) = (server.user(), server.port());
    let agent = Agent::start(&lab);
    let variables = format!(
        "QEMU_MODULE_DIR='{modules}' SSH_AUTH_SOCK='{}'",
        agent.socket.display()
    );
    let name = format!("ssh://{user}@127.0.0.1:{port}{path}?host_key_check=no");
    let raw = format!(
        "driver=raw,offset=512,size=1024,file.driver=ssh,file.server.host=127.0.0.1,\
         file.server.port={port},file.user={user},file.path={path},file.host_key_check=no"
    );
    let file = format!(
        "driver=ssh,server.host=127.0.0.1,server.port={port},user={user},path={path},\
         host_key_check=no"
    );
    for args in [
        &["info", &name][..],
        &["info", "--output=json", &name],
        &["info", "--image-opts", &raw],
        &["info", "--image-opts", &file],
        &["info", "--output=json", "--image-opts", &file],
        &["map", "--output=json", &name],
        &["info", "ssh:x"],
        &["info", "ssh://127.0.0.1"],
        &["info", &format!("ssh://h{path}?host_key_check=maybe")],
        &[
            "info",
            "--image-opts",
            "driver=raw,file.driver=ssh,file.path=/x",
        ],
        &[
            "info",
            "--image-opts",
            "driver=raw,file.driver=ssh,file.host=x",
        ],
    ] {
        let ours = run(&lab, args);
        let theirs = qemu_img_with(&lab, &variables, args);
        compare_answers(&ours, &theirs, args, &format!("{args:?}"));
    }
}

/// An agent with the key of a lab, for QEMU, which reads no configuration.
struct Agent {
    child: std::process::Child,
    socket: std::path::PathBuf,
}

impl Agent {
    fn start(lab: &Lab) -> Agent {
        let socket = lab.path("ssh/agent");
        let child = std::process::Command::new("ssh-agent")
            .arg("-D")
            .arg("-a")
            .arg(&socket)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let agent = Agent { child, socket };
        wait_until("the agent listens", || agent.socket.exists());
        let added = std::process::Command::new("ssh-add")
            .arg("-q")
            .arg(lab.path("ssh/client"))
            .env("SSH_AUTH_SOCK", &agent.socket)
            .status();
        assert!(added.unwrap().success());
        agent
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn what_is_refused_is_said() {
    if beyond_qemu("ssh by the program ssh") {
        return;
    }
    let lab = images(1 << 20);
    let mut server = Sshd::start(&lab, SUBSYSTEM);
    let info = |name: &str| run(&lab, &["info", name]);
    info(&server.name(&lab, "none")).fails_with("No such file or directory");
    info(&server.name(&lab, "ssh")).fails_with("is not a regular file");
    info("ssh://far").fails_with("missing remote path");
    info("ssh://u:p@far/x").fails_with("a URL has no password");
    let name = server.name(&lab, "x.qcow2");
    run(&lab, &["info", "--untrusted", &name]).fails_with("must be a path");
    let options = format!(
        "driver=qcow2,file.driver=ssh,file.host=far,file.path={}",
        lab.path("x.qcow2").display()
    );
    run(&lab, &["info", "--untrusted", "--image-opts", &options]).ok("named by the user");
    run(
        &lab,
        &[
            "create",
            "-f",
            "qcow2",
            "-b",
            &name,
            "-F",
            "qcow2",
            "top.qcow2",
        ],
    )
    .ok("create");
    let args = [
        "convert",
        "--untrusted",
        "-O",
        "raw",
        "top.qcow2",
        "out.raw",
    ];
    run(&lab, &args).fails_with("may not open");
    // Another key.
    let config = fs::read_to_string(lab.path("ssh/config")).unwrap();
    let wrong = config.replace("/client", "/other");
    fs::write(lab.path("ssh/config"), &wrong).unwrap();
    info(&name).fails_with("Permission denied");
    fs::write(lab.path("ssh/config"), config).unwrap();
    server.stop();
    info(&name).fails_with("Connection refused");
    run_with(&lab, "/nonexistent".as_ref(), &["info", &name], "")
        .fails_with("cannot run '/nonexistent'");
}

/// A host or a user that begins as an option, or that a command of the configuration would take for
/// one of its own.
#[test]
fn names_are_no_commands() {
    if beyond_qemu("ssh by the program ssh") {
        return;
    }
    let lab = images(1 << 20);
    let _server = Sshd::start(&lab, SUBSYSTEM);
    let config = fs::read_to_string(lab.path("ssh/config")).unwrap();
    let proxy = "ProxyCommand sh -c 'echo %h %r'\n";
    fs::write(lab.path("ssh/config"), config + proxy).unwrap();
    let marker = lab.path("marker").display().to_string();
    for host in [
        format!("-oProxyCommand=touch {marker}"),
        format!("-oProxyCommand%3Dtouch%20{marker}"),
        format!("$(touch%20{marker})"),
        format!("h;touch%20{marker}"),
        format!("h%27;touch%20{marker};%27"),
        format!("-oProxyCommand=touch%20{marker}@far"),
        format!("$(touch%20{marker})@far"),
    ] {
        let host = host.replace('/', "%2F");
        let answer = run(&lab, &["info", &format!("ssh://{host}/x")]);
        answer.fails_with("is not a name");
    }
    for option in ["host", "user"] {
        let other = if option == "user" {
            ",file.host=far"
        } else {
            ""
        };
        let options = format!(
            "driver=raw,file.driver=ssh,file.path=/x{other},file.{option}=-oProxyCommand=touch {marker}"
        );
        let answer = run(&lab, &["info", "--image-opts", &options]);
        answer.fails_with("is not a name");
    }
    assert!(!lab.path("marker").exists());
}

/// A name that a qcow2 header has, with a path that is long or strange.
#[test]
fn paths_are_taken_literally() {
    if beyond_qemu("ssh by the program ssh") {
        return;
    }
    let lab = images(1 << 20);
    let server = Sshd::start(&lab, SUBSYSTEM);
    for name in [
        "a b",
        "-x",
        "$(touch marker)",
        "a'b\"c",
        "%x",
        "ä",
        "a\\b",
        "*",
    ] {
        fs::copy(lab.path("x.raw"), lab.path(name)).unwrap();
        let folder = lab.path("").display().to_string();
        let options = format!("driver=raw,file.driver=ssh,file.host=far,file.path={folder}/{name}");
        let args = ["convert", "--image-opts", "-O", "raw", &options, "out.raw"];
        run(&lab, &args).ok(name);
        lab.assert_same_bytes("out.raw", "x.raw", name);
        let encoded: String = name.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let url = format!("{}{encoded}", server.name(&lab, ""));
        run(&lab, &["info", "-f", "raw", &url]).ok(name);
    }
    assert!(!lab.path("marker").exists());
}

/// Connections that are killed while an image is read: another one is made, unless the file has
/// changed, or cannot be had again.
#[test]
fn reading_goes_on_after_a_lost_connection() {
    if beyond_qemu("ssh by the program ssh") {
        return;
    }
    let lab = images(192 << 20);
    let mut server = Sshd::start(&lab, SUBSYSTEM);
    let name = server.name(&lab, "x.raw");
    for case in ["same", "changed", "gone"] {
        let converted = thread::scope(|scope| {
            let args = [
                "convert", "-f", "raw", "-O", "raw", "-r", "60M", &name, "out.raw",
            ];
            let (lab, server) = (&lab, &mut server);
            let convert = scope.spawn(move || run(lab, &args));
            let written = || {
                use std::os::unix::fs::MetadataExt as _;
                fs::metadata(lab.path("out.raw")).map_or(0, |m| m.blocks() * 512)
            };
            for round in 1..4 {
                wait_until("some bytes", || written() > round * (20 << 20));
                match case {
                    "same" => server.kill_connections(),
                    "changed" => {
                        let touched = fs::File::options().write(true).open(lab.path("x.raw"));
                        let past = std::time::SystemTime::UNIX_EPOCH;
                        touched.unwrap().set_modified(past).unwrap();
                        server.kill_connections();
                        break;
                    }
                    _ => {
                        server.kill_connections();
                        server.stop();
                        break;
                    }
                }
            }
            convert.join().unwrap()
        });
        match case {
            "same" => {
                converted.ok(case);
                lab.assert_same_bytes("out.raw", "x.raw", case);
            }
            "changed" => converted.fails_with("has changed since it was opened"),
            _ => converted.fails_with("Connection refused"),
        }
        fs::remove_file(lab.path("out.raw")).unwrap();
    }
}

#[test]
fn writing_ends_with_a_lost_connection() {
    if beyond_qemu("ssh by the program ssh") {
        return;
    }
    let lab = images(192 << 20);
    let server = Sshd::start(&lab, SUBSYSTEM);
    for format in ["raw", "qcow2"] {
        let name = server.name(&lab, "far");
        let answer = thread::scope(|scope| {
            let args = [
                "convert", "-f", "raw", "-O", format, "-r", "40M", "x.raw", &name,
            ];
            let (lab, server) = (&lab, &server);
            let convert = scope.spawn(move || run(lab, &args));
            wait_until("some bytes", || {
                use std::os::unix::fs::MetadataExt as _;
                fs::metadata(lab.path("far")).is_ok_and(|m| m.blocks() > (10 << 20) / 512)
            });
            server.kill_connections();
            convert.join().unwrap()
        });
        answer.fails_with("the connection was lost");
        fs::remove_file(lab.path("far")).unwrap();
    }
}

#[test]
fn servers_without_extensions() {
    if beyond_qemu("ssh by the program ssh") {
        return;
    }
    let lab = images(4 << 20);
    let server = Sshd::start(&lab, "internal-sftp -P limits,fsync");
    let (name, far) = (server.name(&lab, "x.qcow2"), server.name(&lab, "far.qcow2"));
    run(&lab, &["convert", "-O", "raw", &name, "out.raw"]).ok("small requests");
    lab.assert_same_bytes("out.raw", "x.raw", "small requests");
    let write = ["convert", "-O", "qcow2", "x.qcow2", &far];
    run(&lab, &write).fails_with("the server has no fsync");
    assert!(!lab.path("far.qcow2").exists());
    let unsafely = [&["convert", "-t", "unsafe"], &write[1..]].concat();
    run(&lab, &unsafely).ok("unsafe");
    lab.zebu(&["compare", "x.qcow2", "far.qcow2"]).ok("unsafe");
}

/// The server is this machine, so that the source has local names and others.
#[test]
fn the_source_is_found_under_other_names() {
    if beyond_qemu("it destroys the source") {
        return;
    }
    let lab = images(4 << 20);
    let server = Sshd::start(&lab, SUBSYSTEM);
    lab.shell("mkdir there; ln -s x.raw soft; ln x.raw hard; cp -p x.raw copy; cp x.raw before")
        .ok("names");
    let seconds = || {
        use std::os::unix::fs::MetadataExt as _;
        fs::metadata(lab.path("x.raw")).unwrap().mtime()
    };
    let changed = seconds();
    let plain = format!(
        "ssh://{}@{}{}",
        server.user(),
        server.address(),
        lab.path("x.raw").display()
    );
    let names = ["./x.raw", "there/../x.raw", "/x.raw", "soft", "hard"];
    let mut targets: Vec<String> = names.iter().map(|name| server.name(&lab, name)).collect();
    targets[2] = targets[0].replace("/./", "//");
    targets.push(plain);
    for (nth, target) in targets.iter().enumerate() {
        let there = server.name(&lab, "x.raw");
        let (source, existing) = (["x.raw", &there][nth % 2], nth % 3 == 1);
        let mut args = vec!["convert", "-f", "raw", "-O", "raw", source, target];
        args.extend(existing.then_some("-n"));
        run(&lab, &args).fails_with("The input is read from this file");
        lab.assert_same_bytes("x.raw", "before", target);
        assert_eq!(seconds(), changed, "{target}");
    }
    for target in ["soft", "hard"] {
        run(&lab, &["convert", "-f", "raw", &targets[0], target])
            .fails_with("The input is read from this file");
    }
    run(&lab, &["import", &targets[0], "hard"]);
    lab.assert_same_bytes("x.raw", "before", "a local target");
    // Another file is none, however like the source it is.
    let copy = server.name(&lab, "copy");
    run(
        &lab,
        &["convert", "-f", "raw", "-O", "qcow2", "x.raw", &copy],
    )
    .ok("a copy");
    lab.zebu(&["compare", "-F", "raw", "copy", "x.raw"])
        .ok("a copy");
}

/// Programs in the place of `ssh` that send nonsense.
#[test]
fn nonsense_is_an_error() {
    if beyond_qemu("ssh by the program ssh") {
        return;
    }
    let lab = Lab::new();
    let version = r"printf '\0\0\0\005\002\0\0\0\003'";
    for (what, script, text) in [
        (
            "a greeting",
            "echo Welcome to the machine; sleep 1",
            "does not speak SFTP",
        ),
        ("nothing", "exit 3", "exit status: 3"),
        (
            "only words",
            "echo one >&2; echo two >&2; exit 255",
            "one; two",
        ),
        (
            "an old version",
            r"printf '\0\0\0\005\002\0\0\0\002'",
            "version 2 of SFTP",
        ),
        (
            "a huge packet",
            r"printf '\177\377\377\377'",
            "does not speak SFTP",
        ),
        ("an end", version, "the connection was lost"),
        (
            "another reply",
            &format!(r"{version}; printf '\0\0\0\015\147\0\0\0\0\0\0\0\004aaaa'; sleep 1"),
            "the reply to another request",
        ),
        (
            "a reply that ends early",
            &format!(r"{version}; printf '\0\0\0\011\146\0\0\0\0\0\0\1\0'; sleep 1"),
            "ends within a field",
        ),
    ] {
        let file = lab.path("ssh");
        // It reads the first packet, or writing it may fail.
        let script = format!("#!/bin/sh\nhead -c 9 >/dev/null\n{script}\n");
        fs::write(&file, script).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        let answer = run_with(&lab, &file, &["info", "ssh://h/x"], "");
        assert!(answer.err.contains(text), "{what}: {answer:#?}");
        answer.failed_with_one_line(1, what);
    }
}

/// A program in the place of `ssh`, which runs a server of SFTP on this machine by `script`.
fn local_server(lab: &Lab, script: &str) -> std::path::PathBuf {
    let file = lab.path("local");
    fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    file
}

/// Where OpenSSH's server of SFTP is.
const SFTP_SERVER: &str = "/usr/lib/openssh/sftp-server";

/// A server that ends whenever something is read: connecting again has an end.
#[test]
fn connections_without_replies_have_an_end() {
    if beyond_qemu("ssh by the program ssh") {
        return;
    }
    let lab = images(1 << 20);
    let path = lab.path("x.raw").display().to_string();
    // The packets until the file is open, of which one has the path, and not the next one.
    let opening = 9 + 31 + (25 + path.len()) + 17;
    let calls = lab.path("calls").display().to_string();
    // It replies before it sees the end.
    let input = format!("{{ dd bs=1 count={opening} status=none; sleep 0.3; }}");
    let script = format!("echo >>'{calls}'; {input} | {SFTP_SERVER}");
    let ssh = local_server(&lab, &script);
    let name = format!("ssh://h{path}");
    let args = ["convert", "-f", "raw", "-O", "raw", &name, "out.raw"];
    run_with(&lab, &ssh, &args, "").fails_with("the connection was lost");
    assert_eq!(fs::read_to_string(&calls).unwrap().len(), 7);
}

/// `import` takes what the user names, within its limits.
#[test]
fn images_are_imported() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(4 << 20);
    let ssh = local_server(&lab, &format!("exec {SFTP_SERVER}"));
    let run = |args: &[&str]| run_with(&lab, &ssh, args, "");
    let path = lab.path("x.qcow2").display().to_string();
    let name = format!("ssh://h{path}");
    let options = format!("driver=qcow2,file.driver=ssh,file.host=h,file.path={path}");
    for args in [&[&*name][..], &["--image-opts", &options]] {
        let args = [&["import"], args, &["out.raw"]].concat();
        run(&args).ok(&name);
        lab.assert_same_bytes("out.raw", "x.raw", &name);
        fs::remove_file(lab.path("out.raw")).unwrap();
    }
    let script = "sha256sum x.qcow2 >sums";
    lab.run("sh".as_ref(), &["-c", script], b"", &Default::default())
        .ok(script);
    run(&["import", "--sums", "sums", &name, "out.raw"]).ok("sums");
    let answer = run(&["import", "--max-download", "64k", &name, "out.raw"]);
    assert_eq!(answer.status, 4, "{answer:#?}");
    lab.make("img create -f qcow2 -b x.qcow2 -F qcow2 over.qcow2");
    let over = format!("ssh://h{}", lab.path("over.qcow2").display());
    let answer = run(&["import", &over, "out.raw"]);
    assert_eq!(answer.status, 2, "{answer:#?}");
}

#[test]
fn a_server_that_says_nothing_is_given_up() {
    if beyond_qemu("a limit for SSH servers") {
        return;
    }
    let lab = Lab::new();
    let server = local_server(&lab, "while read -r line; do :; done");
    let options = "driver=raw,file.driver=ssh,file.host=h,file.path=/x,file.timeout=1";
    let answer = run_with(&lab, &server, &["info", "--image-opts", options], "");
    answer.fails_with("no answer for 1 s");
}
