//! Names that mean the same thing: what a command writes — a pid file, a picture, a new image, an
//! export — is compared with all that it reads, under any name. And special files, which are not
//! even opened.
//!

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::server::{Server, wait_until};
use crate::common::{Answer, Lab, Limits, Loop, Rng, beyond_qemu, cases, program};

/// The files of a lab of [`readers`], of which each is read by one of [`SOURCES`].
const READ: [&str; 9] = [
    "number",
    "base.raw",
    "disk.q",
    "top.q",
    "data.raw",
    "meta.q",
    "flat.vmdk",
    "flat-flat.vmdk",
    "secret",
];

/// What is served: its format, the image, and the files that are read for it.
const SOURCES: [(&str, &str, &[&str]); 4] = [
    ("raw", "number", &["number"]),
    ("qcow2", "top.q", &["top.q", "disk.q", "base.raw"]),
    ("qcow2", "meta.q", &["meta.q", "data.raw"]),
    ("vmdk", "flat.vmdk", &["flat.vmdk", "flat-flat.vmdk"]),
];

/// Images of all kinds. Where a file can be, it is what a pid file may be: a number.
fn readers() -> Lab {
    let lab = Lab::new();
    for name in ["number", "base.raw", "secret"] {
        fs::write(lab.path(name), "4711\n").unwrap();
    }
    for line in [
        "create -q -f qcow2 -b base.raw -F raw disk.q 1M",
        "create -q -f qcow2 -b disk.q -F qcow2 top.q",
        "create -q -f qcow2 -o data_file=data.raw meta.q 1M",
        "create -q -f vmdk -o subformat=monolithicFlat flat.vmdk 1M",
    ] {
        let args: Vec<&str> = line.split(' ').collect();
        lab.zebu(&args).ok(line);
    }
    fs::write(lab.path("data.raw"), "4711\n").unwrap();
    lab
}

fn contents(lab: &Lab) -> Vec<Option<Vec<u8>>> {
    let read = READ.iter().map(|name| fs::read(lab.path(name)).ok());
    read.collect()
}

/// A name of a file: its own in some spelling, or that of a link with this ending.
fn spelling(lab: &Lab, rng: &mut Rng, file: &str, ending: &str) -> String {
    let alias = format!("alias{ending}");
    let link = |target: String| {
        let _ = fs::remove_file(lab.path(&alias));
        symlink(target, lab.path(&alias)).unwrap();
        alias.clone()
    };
    let absolute = lab.path(file).display().to_string();
    if !ending.is_empty() || rng.one_in(2) {
        return match rng.below(4) {
            0 => link(file.into()),
            1 => link(absolute),
            2 => link(format!(
                "../{}/{file}",
                lab.path("").file_name().unwrap().display()
            )),
            _ => {
                let _ = fs::remove_file(lab.path(&alias));
                fs::hard_link(lab.path(file), lab.path(&alias)).unwrap();
                alias
            }
        };
    }
    match rng.below(6) {
        0 => format!("./{file}"),
        1 => absolute,
        2 => absolute.replace('/', "//"),
        3 => format!("/proc/self/cwd/{file}"),
        4 => format!("./././/{file}"),
        _ => file.into(),
    }
}

#[test]
fn no_option_writes_what_is_read() {
    if beyond_qemu("options of zebu") {
        return;
    }
    let lab = readers();
    symlink(program().canonicalize().unwrap(), lab.path("qemu-nbd")).unwrap();
    let before = contents(&lab);
    let limits = Limits {
        time: Duration::from_secs(20),
        ..Limits::default()
    };
    let secret = ["--object", "secret,id=s,file=secret"];
    for step in cases(60, "names of files that are read") {
        let mut rng = Rng::new(step);
        let (format, image, reads) = SOURCES[rng.below(4) as usize];
        let file = reads[rng.below(reads.len() as u64) as usize];
        let socket = lab.path("server.sock").display().to_string();
        // An image by the name of a device that its file is behind.
        let device = match rng.one_in(6) && format == "raw" {
            true => Loop::on(&lab.path(image)),
            false => None,
        };
        let image = device.as_ref().map_or(image, |device| &device.0);
        let (name, args): (_, Vec<String>) = match rng.below(6) {
            kind @ 0..=2 => {
                let written = spelling(&lab, &mut rng, file, "");
                let [command, option] = match kind {
                    0 => ["vhost-user-blk", "--socket-path"],
                    _ => ["nbd", "-k"],
                };
                // A VMDK is only read.
                let read_only = if format == "vmdk" { "-r" } else { "-v" };
                let all = [
                    command,
                    option,
                    &socket,
                    read_only,
                    "-f",
                    format,
                    "--pid-file",
                    &written,
                    image,
                ];
                let name = if kind == 1 { "qemu-nbd" } else { "zebu" };
                let skip = usize::from(kind == 1);
                (name, all[skip..].iter().map(ToString::to_string).collect())
            }
            3 => {
                let written = spelling(&lab, &mut rng, file, ".svg");
                let all = ["map", "-f", format, "--picture", &written, image];
                ("zebu", all.map(String::from).into())
            }
            4 => {
                let written = spelling(&lab, &mut rng, "secret", "");
                let all = [
                    "create", secret[0], secret[1], "-f", "qcow2", &written, "1M",
                ];
                ("zebu", all.map(String::from).into())
            }
            _ => {
                let written = spelling(&lab, &mut rng, "secret", "");
                let all = [
                    "convert", secret[0], secret[1], "-f", format, image, &written,
                ];
                ("zebu", all.map(String::from).into())
            }
        };
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let what = format!("seed {step}: {name} {args:?}");
        let answer = match name {
            "zebu" => lab.zebu_limited(&args, &limits),
            _ => lab.run(&lab.path(name), &args, b"", &limits),
        };
        assert!(
            contents(&lab) == before,
            "{what}: a file has changed: {answer:#?}"
        );
        assert!(answer.status == 1, "{what}: {answer:#?}");
        let reasons = ["is read from this file"];
        assert!(
            reasons.iter().any(|why| answer.err.contains(why)),
            "{what}: {answer:#?}"
        );
    }
}

#[test]
fn a_pid_file_replaces_only_pid_files() {
    if beyond_qemu("the servers of zebu") {
        return;
    }
    let lab = readers();
    let socket = lab.path("server.sock").display().to_string();
    let args = |pid: &str| {
        [
            "nbd",
            "-t",
            "-k",
            &socket,
            "-f",
            "raw",
            "--pid-file",
            pid,
            "number",
        ]
        .map(String::from)
    };
    fs::write(lab.path("notes"), "not a number\n").unwrap();
    fs::create_dir(lab.path("folder")).unwrap();
    for (name, why) in [
        ("notes", "has not the number of a process"),
        ("folder", "not a regular file"),
    ] {
        let all = args(name);
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        lab.zebu(&all).fails_with(why);
    }
    assert_eq!(fs::read(lab.path("notes")).unwrap(), b"not a number\n");
    // One that was left behind is replaced, through a link, too, which stays.
    fs::write(lab.path("old"), "123456789\n").unwrap();
    symlink("old", lab.path("link")).unwrap();
    let all = args("link");
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let mut server = Server::spawn(&lab, &all);
    let own = format!("{}\n", server.pid());
    wait_until("the pid file", || {
        fs::read_to_string(lab.path("old")).is_ok_and(|now| now == own)
    });
    wait_until("the server listens", || lab.path("server.sock").exists());
    // What is another's stays.
    fs::remove_file(lab.path("server.sock")).unwrap();
    fs::write(lab.path("server.sock"), "another's").unwrap();
    server.stop();
    assert!(!lab.path("old").exists() && lab.path("link").is_symlink());
    assert!(lab.path("server.sock").exists());
}

/// A server at a free port of TCP.
fn tcp(lab: &Lab, host: &str, args: &[&str]) -> (Server, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let text = port.to_string();
    let mut all = vec!["nbd", "-t", "-e", "8", "-b", host, "-p", &text];
    all.extend(args);
    let server = Server::spawn(lab, &all);
    wait_until("the server listens", || {
        std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    (server, port)
}

#[test]
fn an_export_has_many_names() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    let mut rng = Rng::new(9);
    let random: Vec<u8> = (0..1 << 20).map(|_| rng.next() as u8).collect();
    fs::write(lab.path("a.raw"), &random).unwrap();
    // No two places of it differ.
    fs::write(lab.path("z.raw"), vec![0; 300_000]).unwrap();
    let (_tcp, port) = tcp(&lab, "localhost", &["-f", "raw", "a.raw"]);
    let server = Server::start(&lab, &["-t", "-e", "8", "-f", "raw", "z.raw"]);
    symlink("nbd.sock", lab.path("link.sock")).unwrap();
    fs::hard_link(&server.socket, lab.path("hard.sock")).unwrap();
    let at = |host: &str| format!("nbd://{host}:{port}");
    let socket = |name: &str| format!("nbd+unix:///?socket={}", lab.path(name).display());
    let mut names = vec![at("localhost"), at("127.0.0.1")];
    if std::net::TcpStream::connect(("::1", port)).is_ok() {
        names.push(at("[::1]"));
    }
    let sockets = ["nbd.sock", "link.sock", "hard.sock"].map(socket);
    let refused = |answer: Answer, what: &str| {
        assert!(answer.status == 1, "{what}: {answer:#?}");
        assert!(
            answer.err.contains("read from this file")
                || answer.err.contains("may be read from this export"),
            "{what}: {answer:#?}"
        );
    };
    for all in [&names[..], &sockets] {
        for (from, to) in all
            .iter()
            .flat_map(|from| all.iter().map(move |to| (from, to)))
        {
            let what = format!("{from} {to}");
            let convert = ["convert", "-n", "-f", "raw", "-O", "raw", from, to];
            refused(lab.zebu(&convert), &what);
            if from != to {
                let dd = [format!("if={from}"), format!("of={to}")];
                refused(
                    lab.zebu(&["dd", "-f", "raw", "-O", "raw", &dd[0], &dd[1]]),
                    &what,
                );
                let create = ["create", "-f", "qcow2", "-b", from, "-F", "raw", to];
                let answer = lab.zebu(&create);
                assert!(answer.status == 1, "{what}: {answer:#?}");
            }
        }
    }
    // The file of the export itself, as a file and as a target.
    let own = [
        "convert",
        "-n",
        "-U",
        "-f",
        "raw",
        "-O",
        "raw",
        "z.raw",
        &sockets[0],
    ];
    refused(lab.zebu(&own), "the file of an export");
    assert!(fs::read(lab.path("a.raw")).unwrap() == random);
    assert!(fs::read(lab.path("z.raw")).unwrap() == vec![0; 300_000]);
    // What reads itself: an image that is its own new backing file, or that is committed to itself.
    lab.zebu(&["create", "-q", "-f", "qcow2", "x.q", "1M"])
        .ok("create");
    let (_image, port) = tcp(&lab, "localhost", &["-f", "raw", "x.q"]);
    let [one, two] = ["localhost", "127.0.0.1"].map(|host| format!("nbd://{host}:{port}"));
    let rebase = |mode: &[&str]| {
        let all = ["rebase", "-f", "qcow2", "-b", &one, "-F", "raw", &two];
        lab.zebu(&[&all[..1], mode, &all[1..]].concat())
    };
    refused(rebase(&[]), "rebase");
    rebase(&["-u"]).ok("rebase -u");
    let image = fs::read(lab.path("x.q")).unwrap();
    refused(lab.zebu(&["commit", "-f", "qcow2", &two]), "commit");
    assert!(fs::read(lab.path("x.q")).unwrap() == image);
    // Another export of the same size and content is no reason.
    fs::write(lab.path("b.raw"), &random).unwrap();
    let (_other, port) = tcp(&lab, "127.0.0.1", &["-f", "raw", "b.raw"]);
    let other = format!("nbd://127.0.0.1:{port}");
    let convert = ["convert", "-n", "-f", "raw", "-O", "raw", &names[0], &other];
    lab.zebu(&convert).ok("a copy of it");
    assert!(fs::read(lab.path("b.raw")).unwrap() == random);
}

/// Runs a command that reads `from` and writes `to`, of the kind `nth`.
fn copy(lab: &Lab, nth: u64, from: &str, to: &str) -> Answer {
    let line = match nth {
        0 => format!("convert -n -f raw -O raw {from} {to}"),
        1 => format!("convert -f raw -O qcow2 {from} {to}"),
        2 => format!("dd -f raw -O raw if={from} of={to}"),
        3 => format!("create -q -f qcow2 -b {from} -F raw {to}"),
        _ => format!("convert -n --target-is-zero -f raw -O raw {from} {to}"),
    };
    lab.zebu(&line.split(' ').collect::<Vec<_>>())
}

#[test]
fn block_devices_over_the_same_bytes_are_one() {
    const BLOCK: u64 = 1 << 20;
    let lab = Lab::new();
    let mut rng = Rng::new(39);
    let random: Vec<u8> = (0..12 * BLOCK).map(|_| rng.next() as u8).collect();
    let file = lab.path("disk");
    for step in cases(20, "devices over the same bytes") {
        let mut rng = Rng::new(step);
        fs::write(&file, &random).unwrap();
        let mut range = || {
            let start = rng.below(9);
            start * BLOCK..(start + 1 + rng.below(3)) * BLOCK
        };
        let (one, other) = (range(), range());
        let (Some(from), Some(mut to)) =
            (Loop::at(&file, one.clone()), Loop::at(&file, other.clone()))
        else {
            println!("skipped: no loop devices");
            return;
        };
        let mut target = other.clone();
        // A device over a part of the device.
        if rng.one_in(3) {
            let Some(inner) = Loop::at(Path::new(&to.0), BLOCK / 2..BLOCK) else {
                return;
            };
            // It stays until the one above is gone.
            drop(to);
            to = inner;
            target = other.start + BLOCK / 2..other.start + BLOCK;
        }
        let kind = rng.below(5);
        let what = format!("seed {step}: {one:?} to {target:?}, kind {kind}");
        let answer = copy(&lab, kind, &from.0, &to.0);
        let overlap = one.start < target.end && target.start < one.end;
        match overlap {
            true => assert!(
                answer.status == 1 && answer.err.contains(" this file"),
                "{what}: {answer:#?}"
            ),
            // The target may be too short.
            false => assert!(!answer.err.contains(" this file"), "{what}: {answer:#?}"),
        }
        drop((from, to));
        let (now, target) = (
            fs::read(&file).unwrap(),
            target.start as usize..target.end as usize,
        );
        if overlap {
            assert!(now == random, "{what}: the file has changed");
        }
        let outside = |bytes: &[u8]| [&bytes[..target.start], &bytes[target.end..]].concat();
        assert!(
            outside(&now) == outside(&random),
            "{what}: bytes outside have changed"
        );
    }
}

/// What keeps bytes of its target is refused where the target may be the source: no byte is changed to
/// find out.
#[test]
fn what_stays_is_not_probed() {
    if beyond_qemu("an NBD server") {
        return;
    }
    const SIZE: usize = 4 << 20;
    let lab = Lab::new();
    let run = |line: &str| lab.zebu(&line.split(' ').collect::<Vec<_>>());
    // The same at the start, in the middle and at the end; the byte that a probe changes differs.
    let mut bytes = vec![1; SIZE];
    fs::write(lab.path("a.raw"), &bytes).unwrap();
    bytes[SIZE / 4..SIZE / 4 + 4096].fill(7);
    fs::write(lab.path("b.raw"), &bytes).unwrap();
    // Images with their tables at the start, and nothing at the other places.
    run("create -q -f qcow2 x.q 4M").ok("an image");
    fs::OpenOptions::new()
        .write(true)
        .open(lab.path("x.q"))
        .unwrap()
        .set_len(SIZE as u64)
        .unwrap();
    fs::copy(lab.path("x.q"), lab.path("y.q")).unwrap();
    lab.patch("y.q", SIZE as u64 / 4, &[7; 512]);
    let serve = |name: &str| {
        let (server, port) = tcp(&lab, "127.0.0.1", &["-f", "raw", name]);
        (server, format!("nbd://127.0.0.1:{port}"))
    };
    let servers = ["a.raw", "b.raw", "x.q", "y.q"].map(serve);
    let [a, b, x, y] = [0, 1, 2, 3].map(|nth: usize| servers[nth].1.as_str());
    // When each was written last.
    let written = || {
        ["a.raw", "b.raw", "x.q", "y.q"].map(|name| {
            let times = fs::metadata(lab.path(name)).unwrap();
            (times.mtime(), times.mtime_nsec())
        })
    };
    let before = written();
    for line in [
        format!("convert -n --target-is-zero -f raw -O raw {a} {b}"),
        format!("convert -n -f raw -O qcow2 {x} {y}"),
        format!("convert -n --target-is-zero -f raw -O qcow2 {x} {y}"),
        format!("rebase -f qcow2 -F raw -b {x} {y}"),
    ] {
        let answer = run(&line);
        assert!(
            answer.status == 1 && answer.err.contains("may be read from this export"),
            "{line}: {answer:#?}"
        );
        assert!(written() == before, "{line} writes to what stays");
    }
    // A target that is replaced is probed.
    for line in [
        format!("convert -n -f raw -O raw {a} {b}"),
        format!("convert -n -f raw -O raw {x} {y}"),
    ] {
        run(&line).ok(&line);
    }
    lab.assert_same_bytes("a.raw", "b.raw", "a copy");
    lab.assert_same_bytes("x.q", "y.q", "a copy");
}

/// A process that waits for a reader of a FIFO; killed when dropped.
struct Writer(Child);

impl Writer {
    fn of(lab: &Lab, name: &str) -> Writer {
        let child = Command::new("sh")
            .args(["-c", &format!("echo job > {name}")])
            .current_dir(lab.path(""))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let stat = format!("/proc/{}/stat", child.id());
        let sleeps = || fs::read_to_string(&stat).is_ok_and(|text| text.contains(") S "));
        wait_until("the writer waits", sleeps);
        Writer(child)
    }

    fn waits(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn special_files_that_an_image_names_are_not_opened() {
    if beyond_qemu("QEMU opens them") {
        return;
    }
    let lab = Lab::new();
    let zebu = |line: &str| {
        let args: Vec<&str> = line.split(' ').collect();
        lab.zebu(&args)
    };
    // Images whose other file becomes a FIFO.
    for line in [
        "create -q -f raw queue 1M",
        "create -q -f qcow2 -b queue -F raw backing.q",
        "create -q -f qcow2 -b json:{\"driver\":\"raw\",\"file\":{\"driver\":\"file\",\"filename\":\"queue\"}} -F raw json.q 1M",
        "create -q -f qcow2 -o data_file=data data.q 1M",
        "create -q -f vmdk -o subformat=monolithicFlat flat.vmdk 1M",
        "create -q -f vmdk base.vmdk 1M",
        "create -q -f vmdk -b base.vmdk -F vmdk child.vmdk",
    ] {
        zebu(line).ok(line);
    }
    for (file, image) in [
        ("queue", "backing.q"),
        ("queue", "json.q"),
        ("data", "data.q"),
        ("flat-flat.vmdk", "flat.vmdk"),
        ("base.vmdk", "child.vmdk"),
        ("named", "named"),
    ] {
        let _ = fs::remove_file(lab.path(file));
        lab.shell(&format!("mkfifo {file}")).ok(file);
        let mut writer = Writer::of(&lab, file);
        for line in [
            format!("info --backing-chain {image}"),
            format!("check {image}"),
            format!("compare {image} {image}"),
            format!("io -c quit {image}"),
            format!("map {image}"),
        ] {
            let answer = zebu(&line);
            answer.orderly(&line);
            assert!(writer.waits(), "{line} has opened {file}: {answer:#?}");
        }
    }
}
