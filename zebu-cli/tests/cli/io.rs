//! `zebu io` must understand all commands of qemu-io, which test suites and scripts use, and give the
//! same answers. Times and rates are not compared.

use crate::common::pair::timeless_answer;
use crate::common::{Answer, Lab, compare_answers, peer};

const IMAGE: &str = "create base.qcow2 3M; random base.qcow2 5 20 w; \
    create -b base.qcow2 -F qcow2 x.qcow2 10M; \
    io x.qcow2: write -P 1 0 64k | write -P 2 64k 4k | write -z 1M 64k | write -c -P 5 2M 64k | \
    write -s noise 5M 150k | write -P 3 10485248 512; \
    raw r.raw 1000000";

#[track_caller]
fn same(lab: &Lab, args: &[&str], script: &str) -> Answer {
    let ours = timeless_answer(lab.zebu_io_script(args, script));
    let theirs = timeless_answer(lab.qemu_io_script(args, script));
    compare_answers(&ours, &theirs, args, script);
    ours
}

/// Compares each command in a process of its own, which gives its exit status, and then all in one
/// process, from arguments and from standard input.
#[track_caller]
fn same_commands(commands: &[&str]) {
    let lab = Lab::new();
    lab.make(IMAGE);
    for command in commands {
        same(&lab, &["-r", "-c", command, "x.qcow2"], "");
    }
    let mut args = vec!["-r"];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push("x.qcow2");
    same(&lab, &args, "");
    let script: String = commands
        .iter()
        .flat_map(|command| [*command, "\n"])
        .collect();
    same(&lab, &["-r", "x.qcow2"], &script);
}

#[test]
fn reads() {
    same_commands(&[
        "read 0 64k",
        "read 0 512",
        "read 3 7",
        "read 64k 1.5k",
        "read 0x10000 0x200",
        "read 60k 8k",
        "read 1M 100",
        "read 2M 64k",
        "read 2097253 1000",
        "read 5M 150k",
        "read 10485248 512",
        "read -p 0 4k",
        "read -q 0 4k",
        "read -C 0 64k",
        "read -C -q 0 64k",
        "read 0 0",
        "read 0 10M",
    ]);
}

#[test]
fn dumps() {
    same_commands(&[
        "read -v 0 64",
        "read -v 64k 17",
        "read -v 5M 300",
        "read -v 70000 1",
        "read -q -v 5M 100",
        "read -v -C 5M 20",
        "readv -v 5M 16 16",
        "aio_read -v 5M 40",
        "aio_flush",
        "read -v 2M 33",
    ]);
}

#[test]
fn patterns() {
    same_commands(&[
        "read -P 1 0 64k",
        "read -P 2 0 64k",
        "read -P 1 60k 8k",
        "read -P 0 1M 64k",
        "read -P 5 2M 64k",
        "read -P 0xa 2M 64k",
        "read -P 256 0 4k",
        "read -P -1 0 4k",
        "read -P x 0 4k",
        "read -P 1 -s 512 -l 1k 0 4k",
        "read -P 9 -s 512 -l 1k 0 4k",
        "read -P 9 -s 512 0 4k",
        "read -P 9 -l 1k 0 4k",
        "read -P 1 -s 4k 0 4k",
        "read -P 1 -s 1k -l 4k 0 4k",
        "read -P 1 -s 8k 0 4k",
        "read -s 512 0 4k",
        "read -l 512 0 4k",
        "read -q -P 9 0 4k",
        "read -P 3 10485248 512",
        "readv -P 1 0 4k 4k",
        "readv -P 2 0 4k 4k",
        "readv -P 1 60k 4k 4k",
    ]);
}

#[test]
fn vectors_and_asynchronous_reads() {
    same_commands(&[
        "readv 0 4k 4k",
        "readv 0 512 1k 1536",
        "readv -q 0 4k",
        "readv -C 0 4k 4k",
        "readv 0 513",
        "readv 0",
        "aio_read 0 4k",
        "aio_flush",
        "aio_read 0 4k 4k",
        "aio_flush",
        "aio_read -P 1 0 4k",
        "aio_flush",
        "aio_read -P 2 0 4k",
        "aio_flush",
        "aio_read -q 0 4k",
        "aio_flush",
        "aio_read -C 0 4k",
        "aio_flush",
        "aio_read 20M 4k",
        "aio_flush",
        "aio_read 0 x",
        "aio_flush",
        "aio_flush",
    ]);
}

#[test]
fn the_vm_state() {
    let lab = Lab::new();
    lab.make("create x.qcow2 4M; io x.qcow2: write -b -P 6 0 100k");
    for command in [
        "read -b 0 4k",
        "read -b -P 6 0 100k",
        "read -b -P 7 0 4k",
        "read -b -v 0 20",
    ] {
        same(&lab, &["-r", "-c", command, "x.qcow2"], "");
    }
}

#[test]
fn length_info_map_and_alloc() {
    same_commands(&[
        "length",
        "info",
        "map",
        "alloc 0",
        "alloc 1M",
        "alloc 0 1M",
        "alloc 512k 512k",
        "alloc 0 10M",
        "alloc 4M 512",
        "alloc 20M 4k",
        "alloc x",
        "alloc",
        "alloc 9M 5M",
        "length x",
    ]);
    let lab = Lab::new();
    lab.make(IMAGE);
    lab.make(
        "create -o compat=0.10 old.qcow2 3000320; \
         create -o extended_l2=on,compression_type=zstd,lazy_refcounts=on new.qcow2 1T; \
         create -o data_file=d.raw data.qcow2 1M; create one.qcow2 1M; img snapshot -c s one.qcow2",
    );
    for file in [
        "old.qcow2",
        "new.qcow2",
        "data.qcow2",
        "one.qcow2",
        "base.qcow2",
    ] {
        for command in ["length", "info", "map"] {
            same(&lab, &["-r", "-c", command, file], "");
        }
    }
    for command in ["length", "info", "map", "read -v 999990 10"] {
        same(&lab, &["-r", "-f", "raw", "-c", command, "r.raw"], "");
    }
}

#[test]
fn numbers_and_ranges() {
    same_commands(&[
        "read 9M 2M",
        "read 10M 1",
        "read 10485759 1",
        "read 20M 1",
        "read -1 4",
        "read x 4k",
        "read 0 x",
        "read 0 4q",
        "read 0 4kk",
        "read 0 1.5",
        "read 0 0x",
        "read 0 2G",
        "read 0 3G",
        "read 9223372036854775807 1",
        "read 9223372036854775808 1",
        "read 99999999999999999999 1",
        "read 0 1b",
        "read 0 1K",
        "read 1e3 1",
    ]);
}

#[test]
fn negative_numbers() {
    // QEMU before 10 does not accept negative numbers.
    if peer().is_current() {
        same_commands(&["read -- -1 4", "read 0 -1", "alloc -- -1"]);
    }
}

#[test]
fn mistakes() {
    same_commands(&[
        "nosuch",
        "NOSUCH 1 2",
        "read",
        "read 0",
        "read 0 1 2",
        "read -Z 0 4k",
        "read -P",
        "help nosuch",
        "  read 0 512",
        "read  0   512",
        "",
        " ",
        "map 1",
        "aio_flush 1",
        "quit now",
    ]);
}

#[test]
fn open_and_close() {
    let lab = Lab::new();
    lab.make(IMAGE);
    for script in [
        "length\n",
        "read 0 512\nlength\nmap\ninfo\nalloc 0\nclose\naio_flush\n",
        "open -r x.qcow2\nlength\nclose\nlength\nopen -r base.qcow2\nlength\n",
        "open x.qcow2\nread -P 1 0 4k\nclose\nopen x.qcow2\n",
        "open -r x.qcow2\nopen -r base.qcow2\nlength\n",
        "open nothing\nlength\n",
        "open -r -o driver=raw x.qcow2\nlength\n",
        "open -r -o driver=raw,file.filename=x.qcow2\nlength\n",
        "open -o bogus=1 x.qcow2\n",
        "open -n -r x.qcow2\nread -P 1 0 4k\n",
        "open -r -t none x.qcow2\nread -P 1 0 4k\n",
        "open -t bogus x.qcow2\n",
        "open -r -U x.qcow2\nlength\n",
        "open -Z x.qcow2\n",
        "open\n",
        "open a b\n",
        "close\n",
    ] {
        same(&lab, &[], script);
        let mut args = Vec::new();
        for command in script.lines() {
            args.extend(["-c", command]);
        }
        same(&lab, &args, "");
    }
}

#[test]
fn scripts_on_standard_input() {
    let lab = Lab::new();
    lab.make(IMAGE);
    for script in [
        "",
        "\n",
        "length\n",
        "length",
        "length\n\nlength\n",
        "read 0 512\nnosuch\nlength\nquit\nlength\n",
        "q\n",
        "quit",
        "read -P 9 0 512\nquit\n",
        "read -P 9 0 512\n",
        "aio_read 0 4k\nquit\n",
        "aio_read 0 4k\n",
    ] {
        same(&lab, &["-r", "x.qcow2"], script);
    }
    // Arguments come first, and then standard input is not read.
    same(&lab, &["-r", "-c", "length", "x.qcow2"], "nosuch\n");
    same(&lab, &["-r", "-c", "quit", "-c", "length", "x.qcow2"], "");
}

#[test]
fn options_of_the_program() {
    let lab = Lab::new();
    lab.make(IMAGE);
    for args in [
        &["-r", "--cmd", "length", "x.qcow2"][..],
        &["--read-only", "-c", "length", "x.qcow2"],
        &["-r", "-f", "qcow2", "-c", "length", "x.qcow2"],
        &["-r", "--format=raw", "-c", "length", "x.qcow2"],
        &["-r", "x.qcow2", "-c", "length"],
        &["-r", "-f", "qcow2", "-c", "length", "r.raw"],
        &["-r", "-f", "bogus", "-c", "length", "x.qcow2"],
        &["-r", "-c", "length", "nothing"],
        &["-r", "-t", "none", "-c", "read -P 1 100 4k", "x.qcow2"],
        &["-r", "-n", "-c", "read -P 1 100 4k", "x.qcow2"],
        &[
            "-r",
            "--cache=directsync",
            "-c",
            "read -P 1 100 4k",
            "x.qcow2",
        ],
        &["-r", "-t", "bogus", "-c", "length", "x.qcow2"],
        &["-r", "-i", "threads", "-c", "length", "x.qcow2"],
        &[
            "-r",
            "-i",
            "native",
            "-t",
            "none",
            "-c",
            "read -P 1 0 4k",
            "x.qcow2",
        ],
        &["-r", "-k", "-n", "-c", "read -P 1 0 4k", "x.qcow2"],
        &["-r", "-i", "bogus", "-c", "length", "x.qcow2"],
        &["-r", "-m", "-n", "-c", "read -P 1 0 4k", "x.qcow2"],
        &["-r", "-d", "unmap", "-c", "length", "x.qcow2"],
        &["-r", "-U", "-c", "length", "x.qcow2"],
        &[
            "-r",
            "--image-opts",
            "-c",
            "length",
            "driver=qcow2,file.filename=x.qcow2",
        ],
        &[
            "-r",
            "--image-opts",
            "-c",
            "length",
            "driver=raw,file.filename=x.qcow2",
        ],
        &[
            "-r",
            "--image-opts",
            "-c",
            "length",
            "driver=raw,offset=512,size=1k,file.filename=x.qcow2",
        ],
        &["-c", "length"],
    ] {
        same(&lab, args, "");
    }
}

#[test]
fn help_lists_all_commands() {
    let lab = Lab::new();
    let all = lab.zebu_io(&["-c", "help"]).ok("help");
    for command in [
        "abort",
        "aio_flush",
        "aio_read",
        "aio_write",
        "alloc",
        "close",
        "discard",
        "flush",
        "help",
        "info",
        "length",
        "map",
        "open",
        "quit",
        "read",
        "readv",
        "reopen",
        "sigraise",
        "truncate",
        "write",
        "writev",
    ] {
        assert!(
            all.out
                .lines()
                .any(|line| line.starts_with(&format!("{command} "))),
            "help does not list {command}:\n{}",
            all.out
        );
        let one = lab.zebu_io(&["-c", &format!("help {command}")]).ok(command);
        assert!(one.out.starts_with(command), "{one:#?}");
    }
    for option in ["--help", "-h"] {
        assert!(lab.zebu_io(&[option]).ok(option).out.contains("--cmd"));
    }
}
