//! One program alone: what it makes durable, and what it leaves of a symbolic link.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::program;
use crate::supervised::Supervised;
use crate::world::{Templates, run};

/// The calls of a program that succeeds.
fn calls(folder: &Path, line: &str, output: Stdio) -> Vec<String> {
    let mut command = Command::new(program());
    command.args(line.split(' ')).stdout(output);
    let mut program = Supervised::start(command, folder, None).expect("start");
    let mut calls = Vec::new();
    while !program.has_ended() {
        program.settle();
        if program.is_stopped() {
            calls.push(program.go_on());
        }
    }
    let ended = program.ended();
    assert_eq!(ended.status, 0, "{line}: {}", ended.err);
    calls
}

/// Whether a folder was opened and synced.
fn syncs(calls: &[String], folder: &str) -> bool {
    let mut pairs = calls.windows(2);
    pairs.any(|pair| pair[0] == format!("openat {folder}") && pair[1] == "fsync")
}

#[test]
fn the_names_of_new_files_are_durable() {
    let templates = Templates::new();
    let mut done = 0;
    for (line, folder) in [
        ("convert -f raw -O raw s0 t", ""),
        ("convert -f raw -O qcow2 s0 t", ""),
        ("convert -f raw -c -O qcow2 s0 t", ""),
        ("convert -f raw -O vmdk s0 t", ""),
        ("create -q -f raw t 1M", ""),
        ("create -q -f qcow2 t 1M", ""),
        ("create -q -f vpc t 1M", ""),
        ("create -q -f qcow2 -o data_file=d t 1M", ""),
        ("dd -f raw -O raw if=s0 of=t", ""),
        ("dd -f raw -O qcow2 if=s0 of=t", ""),
        ("import -f raw s0 t", ""),
        ("import -f raw -O qcow2 s0 t", ""),
        ("ova -f raw --name vm --output t s0", ""),
        ("backup -q -f raw --name disk --to set s0", "set"),
    ] {
        let at = templates.copy(0);
        let calls = calls(at.path(), line, Stdio::null());
        let found = syncs(&calls, folder) || syncs(&calls, &format!("/{folder}"));
        assert!(found, "{line}: {calls:#?}");
        done += 1;
    }
    let at = templates.copy(0);
    let calls = calls(
        at.path(),
        "convert -t unsafe -f raw -O raw s0 t",
        Stdio::null(),
    );
    assert!(!syncs(&calls, ""), "{calls:#?}");
    println!("cases: {done} commands");
}

/// As the same file by its own name.
#[test]
fn an_image_on_standard_output_is_durable() {
    let templates = Templates::new();
    for (line, is_durable) in [
        ("convert -f raw -O raw s0 -", true),
        ("convert -f raw -O qcow2 s0 /dev/stdout", true),
        ("convert -f raw -c -O qcow2 s0 /dev/fd/1", true),
        ("convert -t writethrough -f raw -O raw s0 -", true),
        ("convert -t unsafe -f raw -O raw s0 -", false),
    ] {
        let at = templates.copy(0);
        let output = File::create(at.path().join("out")).expect("create");
        let calls = calls(at.path(), line, output.into());
        let last = calls.iter().rposition(|call| call == "fsync");
        assert_eq!(last.is_some(), is_durable, "{line}: {calls:#?}");
        let has_name =
            syncs(&calls, "") && calls.iter().filter(|call| *call == "fsync").count() > 1;
        assert_eq!(has_name, is_durable, "{line}: {calls:#?}");
    }
}

#[test]
fn what_fails_leaves_a_symbolic_link() {
    let templates = Templates::new();
    let bad = format!("import -f raw --sha256 {} s0 t", "0".repeat(64));
    for line in [
        "create -q -f raw t 8M",
        "create -q -f qcow2 -o preallocation=full t 4M",
        "convert -f raw -O raw big t",
        "convert -f raw -O qcow2 -o preallocation=full big t",
        "dd -f raw -O raw if=big of=t",
        &bad,
    ] {
        for existed in [false, true] {
            let at = templates.copy(1);
            let behind = at.path().join("behind");
            if existed {
                fs::write(&behind, "old").expect("write");
            }
            let words: Vec<_> = line.split(' ').map(String::from).collect();
            let (status, _) = run(at.path(), &words, Some(1 << 20));
            assert_ne!(status, 0, "{line}");
            let link = fs::read_link(at.path().join("t")).expect(line);
            assert_eq!(link, Path::new("behind"), "{line}");
            let left = fs::read(&behind).ok();
            let is_right = match existed {
                // What it held is lost; the file is not taken for an image.
                true => left.as_ref().is_some_and(Vec::is_empty),
                false => left.is_none(),
            };
            assert!(
                is_right,
                "{line}, {existed}: {:?}",
                left.map(|left| left.len())
            );
        }
    }
}
