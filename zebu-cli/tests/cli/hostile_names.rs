//! Names in images, of servers and of files that would drive a terminal, forge a line of a report, or
//! be executed by a shell that completes them.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Stdio};

use crate::common::server::{Server, have, wait_until};
use crate::common::terminal::terminal;
use crate::common::{Answer, Lab, Rng, beyond_qemu, cases, program};

/// What names are made of.
const PIECES: [&str; 18] = [
    "a",
    "é",
    " ",
    "\t",
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\u{9b}31m",
    "\u{202e}",
    "\x7f",
    "\r",
    "\n    would open: nothing else",
    "\nimage: other",
    "'",
    "\"",
    "\\",
    "$(id)",
    "`id`",
    ";id",
];

/// A name of up to 6 pieces, with something in it that must not be printed.
pub fn name(rng: &mut Rng) -> String {
    loop {
        let pieces = (0..1 + rng.below(6)).map(|_| rng.pick(&PIECES));
        let name: String = pieces.collect();
        if name.contains(is_active) {
            return name;
        }
    }
}

pub fn is_active(c: char) -> bool {
    c.is_control() || c == '\u{202e}'
}

/// An image whose parts, and the file itself, have this name.
pub fn make(lab: &Lab, name: &str) -> String {
    let file = format!("./{name}.qcow2");
    let backing = format!("./{name}");
    fs::write(lab.path(&backing), vec![1; 65536]).unwrap();
    let make = [
        "create", "-q", "-f", "qcow2", "-b", &backing, "-F", "raw", &file,
    ];
    lab.zebu(&make).ok(name);
    lab.zebu(&["io", "-c", "write 0 4k", &file]).ok(name);
    lab.zebu(&["snapshot", "-c", name, &file]).ok(name);
    lab.zebu(&["bitmap", "--add", &file, name]).ok(name);
    file
}

/// Standard output has no control characters, and as many lines as `twin`.
#[track_caller]
fn assert_harmless(answer: &Answer, twin: &Answer, what: &str) {
    let shown = |text: &str| text.contains(|c: char| is_active(c) && c != '\n');
    assert!(
        !shown(&answer.out) && !shown(&answer.err),
        "{what}: {answer:#?}"
    );
    let lines = |answer: &Answer| {
        (
            answer.status,
            answer.out.lines().count(),
            answer.err.lines().count(),
        )
    };
    assert_eq!(lines(answer), lines(twin), "{what}: {answer:#?} {twin:#?}");
}

#[test]
fn reports_have_no_control_characters() {
    if beyond_qemu("names that are escaped") {
        return;
    }
    let lab = Lab::new();
    let twin = make(&lab, "plain");
    const COMMANDS: [&[&str]; 8] = [
        &["info"],
        &["info", "--backing-chain"],
        &["info", "--human"],
        &["info", "--untrusted"],
        &["info", "--untrusted", "--backing-chain"],
        &["map"],
        &["snapshot", "-l"],
        &["check"],
    ];
    for seed in cases(6, "names of images") {
        let name = name(&mut Rng::new(seed));
        let file = make(&lab, &name);
        for command in COMMANDS {
            let of = |file: &str| lab.zebu(&[command, &[file]].concat());
            assert_harmless(&of(&file), &of(&twin), &format!("{command:?} {file:?}"));
        }
        // The backing file is gone.
        fs::remove_file(lab.path(&name)).unwrap();
        fs::rename(lab.path("plain"), lab.path("gone")).unwrap();
        let of = |file: &str| lab.zebu(&["info", "--backing-chain", file]);
        assert_harmless(&of(&file), &of(&twin), &name);
        fs::rename(lab.path("gone"), lab.path("plain")).unwrap();
    }
    // Scripts get what qemu-img prints.
    let (file, name) = (make(&lab, "a\x1bb"), "a\x1bb");
    let answer = lab.zebu_called("qemu-img", &["snapshot", "-l", &file]);
    assert!(answer.out.contains(name), "{answer:#?}");
}

#[test]
fn lists_of_servers_have_no_control_characters() {
    if beyond_qemu("names that are escaped") {
        return;
    }
    let list = |name: &str, description: &str| {
        let lab = Lab::new();
        lab.make("create x.qcow2 1M");
        let args = ["-t", "-x", name, "-D", description, "x.qcow2"];
        let mut server = Server::start(&lab, &args);
        let answer = lab.zebu(&["nbd", "-L", "-k", "nbd.sock"]).ok("list");
        server.stop();
        answer
    };
    let twin = list("a", "b");
    for seed in cases(2, "names of exports") {
        let mut rng = Rng::new(seed);
        let (export, description) = (name(&mut rng), name(&mut rng));
        assert_harmless(&list(&export, &description), &twin, &export);
    }
}

/// Names of snapshots that shells must quote.
const SNAPSHOTS: [&str; 17] = [
    "plain",
    "$(touch pwned)",
    "`touch pwned`",
    "a;touch pwned",
    "a&touch pwned",
    "a b  c",
    "it's",
    "a\"b",
    "a\\b",
    "~root",
    "*{x,y}?[z]",
    "#a|b>c<d!e",
    "!a!",
    "'",
    "\"",
    "ends with '",
    "ends with \"",
];

/// Folder with images that have one snapshot each, and a `zebu` that notes how it was called.
fn lab() -> Lab {
    let lab = Lab::new();
    for (n, name) in SNAPSHOTS.iter().enumerate() {
        let file = format!("disk {n}.qcow2");
        lab.zebu(&["create", "-q", "-f", "qcow2", &file, "1M"])
            .ok(name);
        lab.zebu(&["snapshot", "-c", name, &file]).ok(name);
        // These are never offered.
        for bad in ["b\nc", "b\x1b[2Jc", "b\tc"] {
            lab.zebu(&["snapshot", "-c", bad, &file]).ok(bad);
        }
    }
    fs::create_dir(lab.path(".bin")).unwrap();
    symlink(program().canonicalize().unwrap(), lab.path(".bin/real")).unwrap();
    let script = "#!/bin/sh\nif [ \"$1\" = __complete ]; then exec \"${0%/*}/real\" \"$@\"; fi\n\
                  printf '%s\\0' \"$@\" > called.new\nmv called.new called\n";
    fs::write(lab.path(".bin/zebu"), script).unwrap();
    fs::set_permissions(lab.path(".bin/zebu"), fs::Permissions::from_mode(0o755)).unwrap();
    lab
}

/// Types lines with a Tab where there is one into a shell; `zebu` must get the words.
fn types(shell: &str, options: &[&str], start: &str) {
    if beyond_qemu("completions") || !have(shell) || !have("setsid") {
        return;
    }
    let lab = lab();
    let script = lab.zebu(&["completions", shell]).ok(shell).out;
    fs::write(lab.path("completions"), script).unwrap();
    let (mut ours, theirs) = terminal();
    let handle = || Stdio::from(theirs.try_clone().unwrap());
    let path = format!(
        "{}:{}",
        lab.path(".bin").display(),
        std::env::var("PATH").unwrap()
    );
    let mut child = Command::new("setsid")
        .args(["-c", shell])
        .args(options)
        .current_dir(lab.path(""))
        .envs([
            ("PATH", &*path),
            ("TERM", "dumb"),
            ("LC_ALL", "C.UTF-8"),
            ("PS1", "> "),
        ])
        .env("HOME", lab.path(".bin").parent().unwrap())
        .stdin(handle())
        .stdout(handle())
        .stderr(handle())
        .spawn()
        .unwrap();
    drop(theirs);
    let mut echo = ours.try_clone().unwrap();
    let shown = std::thread::spawn(move || {
        let mut shown = Vec::new();
        let _ = echo.read_to_end(&mut shown);
        String::from_utf8_lossy(&shown).into_owned()
    });
    let called = |line: &str, ours: &mut fs::File| {
        let _ = fs::remove_file(lab.path("called"));
        ours.write_all(line.as_bytes()).unwrap();
        wait_until(line, || lab.path("called").exists());
        let words = fs::read_to_string(lab.path("called")).unwrap();
        words
            .split_terminator('\0')
            .map(String::from)
            .collect::<Vec<_>>()
    };
    called(start, &mut ours);
    for (n, name) in SNAPSHOTS.iter().enumerate() {
        if shell == "fish" && name.starts_with('~') {
            // Not offered.
            continue;
        }
        let file = format!("disk {n}.qcow2");
        // Also in quotation marks that are open, with what a name begins with or without.
        let first = name.chars().next().filter(char::is_ascii_alphabetic);
        let first = first.map_or_else(String::new, String::from);
        let quoted = ["'", "\""].map(|mark| [mark.to_string(), format!("{mark}{first}")]);
        for start in [String::new()].iter().chain(quoted.as_flattened()) {
            let line = format!("zebu snapshot 'disk {n}.qcow2' -a {start}\t\n");
            let words = called(&line, &mut ours);
            assert_eq!(words, ["snapshot", &file, "-a", name], "{shell}: {line}");
        }
    }
    // Words that have begun, an image behind them, files.
    for (line, words) in [
        (
            "zebu snapshot 'disk 1.qcow2' -a \\$\t\n",
            &["snapshot", "disk 1.qcow2", "-a", SNAPSHOTS[1]][..],
        ),
        (
            "zebu snapshot ~/disk\\ 5.qcow2 -a 'a \t\n",
            &["snapshot", "HOME", "-a", SNAPSHOTS[5]],
        ),
        ("zebu info disk\\ 10\t\n", &["info", "disk 10.qcow2"]),
        ("zebu info \"disk 10\t\n", &["info", "disk 10.qcow2"]),
        ("zebu create --fo\tq\t\n", &["create", "--format", "qcow2"]),
    ] {
        let found = called(line, &mut ours);
        let home = lab.path("disk 5.qcow2");
        let words: Vec<_> = words
            .iter()
            .map(|word| match *word {
                "HOME" => home.to_str().unwrap(),
                word => word,
            })
            .collect();
        assert_eq!(found, words, "{shell}: {line}");
    }
    drop(ours);
    child.kill().unwrap();
    child.wait().unwrap();
    let shown = shown.join().unwrap();
    assert!(!lab.path("pwned").exists(), "{shell}: {shown}");
}

#[test]
fn bash_executes_no_name() {
    types(
        "bash",
        &["--norc", "--noprofile", "-i"],
        ". ./completions; zebu start\n",
    );
}

#[test]
fn zsh_executes_no_name() {
    let start = "autoload -Uz compinit; compinit -D -u; source ./completions; zebu start\n";
    types("zsh", &["-f", "-i"], start);
}

#[test]
fn fish_executes_no_name() {
    types("fish", &["-N", "-i"], "source completions; zebu start\n");
}
