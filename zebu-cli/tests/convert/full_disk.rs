//! Full file systems and the limit of the file size (`ulimit -f`), with a real kernel. Errors must
//! be reported, the image must be consistent, data written before must stay, and the program must
//! not be killed by a signal.
//!
//! A full file system needs a loop device and mount namespaces; tests without them are skipped.

use crate::common::{Lab, Limits, beyond_qemu, testing_qemu};
use crate::common::{part, rotated};

/// Mounts a small file system, and runs the rest of the script in it.
const MOUNT: &str = "mount -o loop fs small && echo mounted && ";

/// An ext4 file system of 24 MiB in the file `fs`, and the folder to mount it on.
fn make_file_system(lab: &Lab, block: &str) {
    std::fs::create_dir(lab.path("small")).expect("folder");
    let file = std::fs::File::create(lab.path("fs")).expect("file");
    file.set_len(24 << 20).expect("length");
    let mke2fs = ["-q", "-F", "-t", "ext4", "-b", block, "-m", "0", "fs"];
    lab.run("/sbin/mke2fs".as_ref(), &mke2fs, b"", &Limits::default())
        .ok("mke2fs");
}

/// Runs a script in the file system; `None` if it cannot be mounted.
fn in_small(lab: &Lab, rest: &str, args: &[&str]) -> Option<crate::common::Answer> {
    lab.in_namespace(&format!("{MOUNT}{rest}"), args, &Limits::default())
}

#[test]
fn writes_to_a_full_file_system() {
    for (options, cache) in [
        ("cluster_size=64k", "none"),
        ("cluster_size=64k", "writeback"),
        ("cluster_size=64k,extended_l2=on", "none"),
        ("cluster_size=4k", "none"),
        ("cluster_size=4k", "writeback"),
    ] {
        let what = format!("{options}, {cache}");
        let lab = Lab::new();
        make_file_system(&lab, "4096");
        lab.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "disk", "64M"])
            .ok(&what);
        // Half a MiB each: in sum more than the file system has.
        let writes: Vec<String> = (0..80u64)
            .map(|nth| format!("write -P {} {} 512k", nth + 1, nth * 37 % 80 * (512 << 10)))
            .collect();
        let commands: Vec<&str> = writes.iter().map(String::as_str).collect();
        let mut args = vec!["io", "-f", "qcow2", "-t", cache];
        for (nth, command) in commands.iter().enumerate() {
            args.extend(["-c", command]);
            if nth % 8 == 7 {
                args.extend(["-c", "flush"]);
            }
        }
        // Allocated clusters can be written on a full file system.
        args.extend(["-c", "write -P 99 0 512k", "-c", "flush", "small/disk"]);
        let rest = "cp disk small/disk && { \"$0\" \"$@\"; echo status $?; }";
        let Some(answer) = in_small(&lab, rest, &args) else {
            println!("skipped: no loop devices or mount namespaces here");
            return;
        };
        answer.orderly(&what);
        let ended = |nth: u64| {
            let at = nth * 37 % 80 * (512 << 10);
            let line = format!("wrote 524288/524288 bytes at offset {at}\n");
            answer.out.contains(&line)
        };
        let (done, failed): (Vec<u64>, Vec<u64>) = (0..80).partition(|nth| ended(*nth));
        assert!(
            !done.is_empty() && !failed.is_empty(),
            "{what}: {answer:#?}"
        );
        let all = format!("{}{}", answer.out, answer.err);
        let errors = all.matches("No space left on device").count();
        assert_eq!(errors, failed.len(), "{what}: {answer:#?}");
        in_small(&lab, "cp small/disk copy", &[]).expect("mounted before");
        let check = lab.qemu_img(&["check", "-q", "-f", "qcow2", "copy"]);
        assert!(matches!(check.status, 0 | 3), "{what}: {check:#?}");
        let mut reads = vec!["-f".to_string(), "qcow2".into()];
        for nth in &done {
            let byte = if *nth == 0 { 99 } else { nth + 1 };
            let at = nth * 37 % 80 * (512 << 10);
            reads.extend(["-c".into(), format!("read -P {byte} {at} 512k")]);
        }
        reads.push("copy".into());
        let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
        let read = lab.qemu_io(&reads).ok(&what);
        assert!(
            !read.out.contains("verification failed"),
            "{what}: {read:#?}"
        );
        println!("cases: {} writes, {} of them failed", 80, failed.len());
    }
}

/// Changes of the whole image while nothing can be allocated. Those that need no space succeed;
/// those that fail have changed nothing.
#[test]
fn changes_on_a_full_file_system() {
    let mut cases = 0;
    let kinds = [
        ("1024", "cluster_size=512"),
        ("1024", "cluster_size=4k,preallocation=metadata"),
        ("1024", "cluster_size=8k"),
        ("1024", "cluster_size=64k,extended_l2=on"),
        ("4096", "cluster_size=1k,preallocation=metadata"),
        ("4096", "cluster_size=16k,refcount_bits=1"),
    ];
    for (i, (block, options)) in kinds.into_iter().enumerate() {
        let changes = [
            ("resize -q --shrink small/disk 16777728", true),
            ("resize -q --shrink small/disk 1049088", true),
            ("resize -q small/disk +16M", false),
            ("snapshot -q -c s small/disk", false),
            ("amend -q -o compat=1.1,lazy_refcounts=on small/disk", false),
            (
                "io -t none -c 'truncate 9437696' -c 'write -P 7 0 4k' small/disk",
                true,
            ),
        ];
        for (change, must_succeed) in part(2, rotated(changes, i)) {
            let what = format!("blocks of {block}, {options}: {change}");
            let lab = Lab::new();
            make_file_system(&lab, block);
            lab.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "disk", "32M"])
                .ok(&what);
            lab.qemu_io(&["-f", "qcow2", "-c", "write -P 5 0 1M", "disk"])
                .ok(&what);
            let rest = format!(
                "cp --sparse=always disk small/disk && sync && {{ cat /dev/zero >small/fill; \
                 dd if=/dev/zero of=small/fill2 bs=1k; sync; \"$0\" {change}; \
                 echo status $?; rm small/fill; }}"
            );
            let Some(answer) = in_small(&lab, &rest, &[]) else {
                println!("skipped: no loop devices or mount namespaces here");
                return;
            };
            let succeeded = answer.out.contains("status 0\n");
            assert!(succeeded || !must_succeed, "{what}: {answer:#?}");
            in_small(&lab, "cp small/disk copy", &[]).expect("mounted before");
            let check = lab.qemu_img(&["check", "-q", "-f", "qcow2", "copy"]);
            assert!(
                matches!(check.status, 0 | 3) && !(succeeded && check.status == 3),
                "{what}: {check:#?}"
            );
            let info = lab.qemu_img(&["info", "copy"]).ok(&what);
            let unchanged = info.out.contains("32 MiB (33554432 bytes)");
            assert!(succeeded || unchanged, "{what}: {info:#?}");
            let read = ["-f", "qcow2", "-c", "read -P 5 4k 1020k", "copy"];
            let read = lab.qemu_io(&read).ok(&what);
            assert!(
                !read.out.contains("verification failed"),
                "{what}: {read:#?}"
            );
            cases += 1;
        }
    }
    println!("cases: {cases} changes on full file systems");
}

/// The message names the output.
#[test]
fn convert_to_a_full_file_system() {
    let lab = Lab::new();
    lab.make("create x.qcow2 8M; io x.qcow2: write -s noise 0 8M");
    std::fs::create_dir(lab.path("small")).expect("folder");
    // A file system of 1 MiB that only this command sees.
    let script = "mount -t tmpfs -o size=1m none small && echo mounted && exec \"$0\" \"$@\"";
    for options in [
        &["-O", "raw"][..],
        &["-O", "qcow2"],
        &["-O", "qcow2", "-c"],
        &["-O", "qcow2", "-t", "writethrough"],
    ] {
        let args = [&["convert"], options, &["x.qcow2", "small/out"]].concat();
        let Some(answer) = lab.in_namespace(script, &args, &Limits::default()) else {
            println!("skipped: no mount namespaces here");
            return;
        };
        answer.orderly("disk full");
        assert_eq!(answer.status, 1, "{options:?}: {answer:#?}");
        let says = |words: &str| answer.err.contains(words);
        assert!(says("No space left on device"), "{options:?}: {answer:#?}");
        if !testing_qemu() {
            answer.failed_with_one_line(1, "disk full");
            assert!(says("small/out"), "{options:?}: {answer:#?}");
        }
    }
}

/// What does not fit leaves no part of an image, also in a file that was there.
#[test]
fn import_to_a_full_file_system() {
    if beyond_qemu("import") {
        return;
    }
    let lab = Lab::new();
    make_file_system(&lab, "4096");
    lab.shell("head -c 48M /dev/urandom > disk").ok("disk");
    let rest = r#"
        for before in - old; do
            for options in "-O raw" "-O raw -o preallocation=falloc" "-O raw -o preallocation=full" \
                "-O qcow2" "-O qcow2 -o preallocation=metadata" "-O qcow2 -o preallocation=falloc" \
                "-O qcow2 -o preallocation=full"; do
                rm -f small/out
                test $before = - || head -c 5000 /dev/urandom > small/out
                "$0" import $options disk small/out > verdict
                echo "status $? $(stat -c %s small/out) $before $options"
            done
        done"#;
    let Some(answer) = in_small(&lab, rest, &[]) else {
        println!("skipped: no loop devices or mount namespaces here");
        return;
    };
    let results: Vec<&str> = answer
        .out
        .lines()
        .filter(|l| l.starts_with("status"))
        .collect();
    assert_eq!(results.len(), 14, "{answer:#?}");
    for result in results {
        // Gone or empty.
        assert!(
            result.starts_with("status 6  ") || result.starts_with("status 6 0 old"),
            "{answer:#?}"
        );
    }
}

/// Runs the program with a limit of the file size in KiB.
fn limited(lab: &Lab, kib: u64, args: &[&str]) -> crate::common::Answer {
    // POSIX counts in blocks of 512 bytes, bash in KiB.
    let script = format!("ulimit -f {kib} && exec \"$0\" \"$@\"");
    let program = crate::common::program().to_str().expect("UTF-8");
    let mut all = vec!["-c", &script, program];
    all.extend(args);
    lab.run("bash".as_ref(), &all, b"", &Limits::default())
}

#[test]
fn writes_beyond_the_file_size_limit() {
    for cache in ["none", "writeback"] {
        let lab = Lab::new();
        lab.zebu(&["create", "-q", "-f", "qcow2", "disk", "64M"])
            .ok("create");
        let writes: Vec<String> = (0..16)
            .map(|nth| format!("write -P {} {}M 1M", nth + 1, nth * 3))
            .collect();
        let mut args = vec!["io", "-t", cache];
        for command in &writes {
            args.extend(["-c", command]);
        }
        args.extend(["-c", "flush", "-c", "write -P 99 0 64k", "disk"]);
        let answer = limited(&lab, 8 << 10, &args);
        answer.orderly(cache);
        let ended = |nth: u64| {
            let line = format!(
                "wrote 1048576/1048576 bytes at offset {}\n",
                (nth * 3) << 20
            );
            answer.out.contains(&line)
        };
        let done = (0..16).filter(|nth| ended(*nth)).count();
        let all = format!("{}{}", answer.out, answer.err);
        let failed = all.matches("File too large").count();
        assert!(failed > 0 && done > 0 && failed + done == 16, "{answer:#?}");
        let check = lab.qemu_img(&["check", "-q", "-f", "qcow2", "disk"]);
        assert!(matches!(check.status, 0 | 3), "{cache}: {check:#?}");
        for nth in (1..16).filter(|nth| ended(*nth)) {
            let read = format!("read -P {} {}M 1M", nth + 1, nth * 3);
            let read = lab.qemu_io(&["-f", "qcow2", "-c", &read, "disk"]).ok(cache);
            assert!(!read.out.contains("verification failed"), "{read:#?}");
        }
    }
}

/// A resize that fails leaves the size unchanged: repeated, it adds its bytes only once.
#[test]
fn a_failed_resize_changes_nothing() {
    let lab = Lab::new();
    lab.make("create disk 1M; random disk 2 20 wz");
    let full = ["resize", "--preallocation=full", "disk", "+8M"];
    for _ in 0..2 {
        let answer = limited(&lab, 4 << 10, &full);
        answer.failed_with_one_line(1, "over the limit");
        let info = lab.qemu_img(&["info", "disk"]).ok("info");
        assert!(info.out.contains("1 MiB (1048576 bytes)"), "{info:#?}");
        lab.qemu_img(&["check", "-q", "disk"]).ok("check");
    }
    lab.zebu(&full).ok("without the limit");
    let info = lab.qemu_img(&["info", "disk"]).ok("info");
    assert!(info.out.contains("9 MiB (9437184 bytes)"), "{info:#?}");
}
