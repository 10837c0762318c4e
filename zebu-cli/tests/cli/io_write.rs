//! Commands of `zebu io` that write must give the answers of qemu-io and leave the same disk.
//!
//! Both programs run the same commands on copies of an image. Times and rates are not compared.

use std::fmt::Write as _;
use std::fs;

use crate::common::pair::Pair;
use crate::common::{Lab, Rng, cases, peer};

const IMAGE: &str = "create x.qcow2 10M; io x.qcow2: write -P 1 0 256k | write -c -P 5 2M 64k; \
    create -b x.qcow2 -F qcow2 top.qcow2; create -o compat=0.10 old.qcow2 4M; \
    create -o extended_l2=on sub.qcow2 4M; raw r.raw 1000448";

/// Compares each command in a process of its own, which gives its exit status, then all in one
/// process, then from standard input. At the end the disks must be the same.
#[track_caller]
fn same_commands(file: &str, format: &str, options: &[&str], commands: &[&str]) {
    let pair = Pair::new(IMAGE);
    let with = |more: &[&'static str]| [&["-f", format], options, more].concat();
    for command in commands {
        let mut args = with(&["-c"]);
        args.extend([*command, file]);
        pair.same_io(&args, "");
    }
    let mut args = with(&[]);
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(file);
    pair.same_io(&args, "");
    let script: String = commands.iter().flat_map(|c| [*c, "\n"]).collect();
    let mut args = with(&[]);
    args.push(file);
    pair.same_io(&args, &script);
    pair.assert_same_disk(file, format);
}

const WRITES: &[&str] = &[
    "write 0 64k",
    "write -P 7 64k 4k",
    "write 3 5",
    "write -P 0xa 60k 8k",
    "write -P 1 150000 600000",
    "write -q 0 4k",
    "write -C 0 4k",
    "write -C -q 0 4k",
    "write -p 0 4k",
    "write -f 0 4k",
    "write -s text 900k 30000",
    "write -s noise 900001 512",
    "write -s noise 0 300000",
    "write 0 0",
    "write 100M 0",
    "write 100M 1",
    "write 900k 20M",
    "write -z 64k 64k",
    "write -z 3 5",
    "write -z 5000 200000",
    "write -z -u 128k 64k",
    "write -z -f 0 4k",
    "write -z -q 0 100",
    "write -z 0 0",
    "write -z 900k 20M",
    "writev 0 4k 4k",
    "writev -P 9 1 513 3",
    "writev -q 0 4k",
    "writev -C 0 4k",
    "writev -f 0 4k",
    "writev 0 0",
    "writev 900k 20M",
    "discard 0 64k",
    "discard 100k 300k",
    "discard -q 0 64k",
    "discard -C 0 64k",
    "discard 3 5",
    "discard 0 0",
    "discard 900k 20M",
    "flush",
    "read -P 7 70k 4k",
];

#[test]
fn writes() {
    same_commands("x.qcow2", "qcow2", &[], WRITES);
}

#[test]
fn writes_over_a_backing_file() {
    same_commands("top.qcow2", "qcow2", &[], WRITES);
}

#[test]
fn writes_to_other_kinds_of_images() {
    same_commands("old.qcow2", "qcow2", &["-d", "unmap"], WRITES);
    same_commands("sub.qcow2", "qcow2", &["-d", "unmap"], WRITES);
    same_commands("r.raw", "raw", &["-d", "unmap"], WRITES);
}

#[test]
fn writes_in_every_cache_mode() {
    for mode in ["none", "writethrough", "directsync", "unsafe"] {
        same_commands("x.qcow2", "qcow2", &["-t", mode], &WRITES[..8]);
    }
}

#[test]
fn compressed_writes() {
    same_commands(
        "x.qcow2",
        "qcow2",
        &[],
        &[
            "write -c 4M 64k",
            "write -c -s text 5M 128k",
            "write -c -s noise 6M 64k",
            "write -c 4M 64k",
            "write -c 0 64k",
            "write -c 7M 4k",
            "write -c 7169k 64k",
            "write -c 10420224 64k",
            "write -c 1000 4k",
            "write -c 1M 3",
            "write -c -z 1M 64k",
            "write -c 9M 2M",
            "write -P 3 4M 4k",
            "read -P 3 4M 4k",
            "map",
        ],
    );
    same_commands("r.raw", "raw", &[], &["write -c 0 64k", "write -b 0 64k"]);
}

#[test]
fn the_vm_state() {
    for file in ["x.qcow2", "top.qcow2", "old.qcow2", "sub.qcow2"] {
        same_commands(
            file,
            "qcow2",
            &[],
            &[
                "write -b 0 4k",
                "write -b -P 6 512 100k",
                "write -b -c -s text 1M 64k",
                "write -b 10G 512",
                "write -b 1 512",
                "write -b -z 0 512",
                "read -b -P 6 512 100k",
                "read -b -P 0xcd 10G 512",
                "read -b -v 0 16",
                "write -P 3 1M 64k",
                "map",
                "length",
            ],
        );
    }
}

#[test]
fn zeroes_without_fallback() {
    for (file, format) in [
        ("x.qcow2", "qcow2"),
        ("top.qcow2", "qcow2"),
        ("old.qcow2", "qcow2"),
        ("sub.qcow2", "qcow2"),
        ("r.raw", "raw"),
    ] {
        same_commands(
            file,
            format,
            &[],
            &[
                "write -z -n 64k 64k",
                "write -z -n 64k 4k",
                "write -z -n 0 4k",
                "write -z -n 4096 2k",
                "write -z -n 100 70000",
                "write -z -n -u 128k 64k",
                "write -z -n 3M 64k",
                "write -z -n 3M 4k",
                "write -z -n 0 3G",
                "write -z -n -C 0 64k",
                "map",
            ],
        );
    }
}

#[test]
fn asynchronous_writes() {
    same_commands(
        "x.qcow2",
        "qcow2",
        &[],
        &[
            "aio_write 0 4k",
            "aio_flush",
            "aio_write -P 3 4k 4k 4k",
            "aio_flush",
            "aio_write -f 0 4k",
            "aio_flush",
            "aio_write -z 64k 64k",
            "aio_flush",
            "aio_write -z -u 128k 64k",
            "aio_flush",
            "aio_write -q 0 4k",
            "aio_flush",
            "aio_write -C 0 4k",
            "aio_flush",
            "aio_write 20M 4k",
            "aio_flush",
            "aio_write -z 20M 4k",
            "aio_flush",
            "aio_write -z 0 3G",
            "aio_flush",
            "aio_write 0 0",
            "aio_flush",
            "aio_write -i 0 4k",
            "aio_write -i x",
            "aio_write -u 0 4k",
            "aio_write -u x",
            "aio_write -z 0 4k 4k",
            "aio_write -P 300 0 4k",
            "aio_write 0 x",
            "aio_write 0",
            "aio_write -c 0 4k",
            "read -P 3 4k 8k",
        ],
    );
}

#[test]
fn mistakes() {
    same_commands(
        "x.qcow2",
        "qcow2",
        &[],
        &[
            "write",
            "write 0",
            "write 0 1 2",
            "write -Z 0 4k",
            "write x 4",
            "write 0 x",
            "write 0 3G",
            "write -z 0 3G",
            "write -P 256 0 4k",
            "write -P x 0 4k",
            "write -P 1 0",
            "write -P 300 -Z 0",
            "write -s nothing 0 4k",
            "write -s . 0 4k",
            "write -s nothing -c 3 3",
            "write -s nothing x 4",
            "write -z -P 1 0",
            "write -z -P 1 0 4k",
            "write -z -s text 0 4k",
            "write -s text -P 1 0 4k",
            "write -b -z 0 64k",
            "write -b -z -P 1 0 4k",
            "write -f -b 0 4k",
            "write -f -c 0 64k",
            "write -f -b -u 0 4k",
            "write -u 0 4k",
            "write -n 0 4k",
            "write -n x 4",
            "write -n 0 3G",
            "write -b 3 512",
            "write -b 0 5",
            "writev 0",
            "writev x 1",
            "writev 0 x",
            "writev 0 3G",
            "writev 0 1G 1G 1G",
            "writev -P 256 0 4k",
            "writev -z 0 4k",
            "discard 0",
            "discard 0 64k 3",
            "discard 0 3G",
            "discard x 0",
            "discard -Z 0 4",
            "flush 1",
            "truncate",
            "sigraise x",
            "sigraise 999",
            "sigraise 0",
            "resize 20M",
            "break a b",
            "remove_break a",
            "resume a",
        ],
    );
}

#[test]
fn commands_since_qemu_10() {
    if peer().is_current() {
        let commands = [
            "write -r 0 4k",
            "writev -r 0 4k",
            "write -r -z 0 4k",
            "write -r -z 0 x",
            "aio_write -r -z 0 4k",
            "zone_report 0 1",
            "zone_open 0 64k",
            "zone_open 20M 1",
            "zone_close 0 1",
            "zone_finish 0 1",
            "zone_reset x 1",
            "zone_append 0 64k",
            "zone_append 0 64k 3",
        ];
        same_commands("x.qcow2", "qcow2", &[], &commands);
    }
}

#[test]
fn writes_with_an_empty_pattern_file() {
    let pair = Pair::new(IMAGE);
    for lab in [&pair.ours, &pair.theirs] {
        fs::write(lab.path("empty"), b"").expect("write");
    }
    pair.same_io(&["-c", "write -s empty 0 4k", "x.qcow2"], "");
}

#[test]
fn read_only_images_refuse_writes() {
    let commands = [
        "write 0 64k",
        "write -z 0 x",
        "write -Z 0 4k",
        "write -s nothing 0 4k",
        "write 0",
        "writev 0 4k",
        "aio_write 0 4k",
        "aio_write -i 0 4k",
        "discard 0 64k",
        "truncate 5M",
        "flush",
        "aio_flush",
    ];
    same_commands("x.qcow2", "qcow2", &["-r"], &commands);
    same_commands("x.qcow2", "qcow2", &["-r", "-s"], &commands);
    same_commands("r.raw", "raw", &["-r"], &commands);
}

#[test]
fn discard_option() {
    let commands = [
        "write -P 9 0 1M",
        "discard 64k 128k",
        "map",
        "write -z -u 256k 64k",
        "map",
        "read -P 0 256k 64k",
    ];
    for mode in ["ignore", "off", "unmap", "on"] {
        same_commands("x.qcow2", "qcow2", &["-d", mode], &commands);
    }
    let pair = Pair::new(IMAGE);
    let name = "driver=qcow2,file.filename=x.qcow2,discard=unmap";
    let mut args = vec!["--image-opts"];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(name);
    pair.same_io(&args, "");
    pair.assert_same_disk("x.qcow2", "qcow2");
    let args = ["-d", "bogus", "-c", "length", "x.qcow2"];
    pair.same_io(&args, "");
}

#[test]
fn temporary_snapshots_leave_the_image_unchanged() {
    let again = "close\nopen -s x.qcow2\nread -P 1 0 4k\nwrite 0 1\n";
    let script = "read -P 1 0 4k\nwrite -P 9 0 64k\nread -P 9 0 4k\nread -P 1 64k 4k\nmap\n\
        length\ninfo\nwrite -z 64k 64k\ndiscard 0 64k\naio_write 5M 64k\naio_flush\nreopen\n\
        read -P 0 64k 64k\nread -P 0xcd 5M 64k\nflush\n";
    for args in [
        &["-s", "x.qcow2"][..],
        &["-s", "top.qcow2"],
        &["-s", "-f", "raw", "r.raw"],
        &["-s", "-t", "none", "x.qcow2"],
        &["-s", "-d", "unmap", "x.qcow2"],
        &["-s", "--image-opts", "driver=qcow2,file.filename=x.qcow2"],
        &[
            "-s",
            "--image-opts",
            "driver=raw,offset=512,size=64k,file.filename=x.qcow2",
        ],
        &["-s", "nothing"],
    ] {
        let pair = Pair::new(IMAGE);
        let before = fs::read(pair.ours.path("x.qcow2")).expect("read");
        pair.same_io(args, script);
        if !args.contains(&"--image-opts") {
            pair.same_io(args, &format!("{script}{again}"));
        }
        assert_eq!(fs::read(pair.ours.path("x.qcow2")).expect("read"), before);
    }
}

#[test]
fn copy_on_read() {
    let script = "read 0 4k\nread 2M 1M\nmap\nread 5242883 7\naio_read 6M 64k\naio_flush\n\
        aio_write -P 8 128k 64k\nreadv 100k 64k\nread -P 8 128k 64k\nread 9M 2M\nmap\n";
    for args in [
        &["-C", "top.qcow2"][..],
        &["-C", "x.qcow2"],
        &["-C", "sub.qcow2"],
        &["-C", "-f", "raw", "r.raw"],
        &["-C", "-s", "top.qcow2"],
        &["-C", "-r", "top.qcow2"],
    ] {
        let file = args[args.len() - 1];
        if file == "sub.qcow2" && !peer().is_current() {
            // Older versions copy whole clusters.
            continue;
        }
        let pair = Pair::new(IMAGE);
        pair.same_io(args, script);
        let format = if file == "r.raw" { "raw" } else { "qcow2" };
        pair.assert_same_disk(file, format);
    }
}

#[test]
fn reopening() {
    let pair = Pair::new(IMAGE);
    for script in [
        "reopen\nwrite 0 4k\n",
        "reopen -r\nwrite 0 4k\nreopen -w\nwrite -P 2 0 4k\nread -P 2 0 4k\n",
        "reopen -r -w\nreopen -r -r\nreopen -c bogus\nreopen x\nreopen -Z\nlength\n",
        "reopen -c none\nwrite -P 3 100 1000\nreopen -c writethrough\nread -P 3 100 1000\n",
        "reopen -o lazy-refcounts=on\nwrite -P 4 1M 64k\nreopen -o lazy-refcounts=off\n",
        "reopen -o bogus=1\nreopen -o driver=raw\nreopen -o driver=qcow2\nwrite 0 1\n",
        "reopen -o lazy-refcounts=x\nreopen -o discard=bogus\nreopen -o detect-zeroes=x\n",
        "reopen -o cache.direct=x\nreopen -c none -o cache.direct=on\nlength\n",
        "reopen -o cache.direct=on\nwrite -P 5 5 1000\nreopen -o cache.direct=off\n",
        "reopen -r -o read-only=on\nreopen -o read-only=off\nwrite 0 1\n",
        "reopen -r\nreopen -o read-only=on\nwrite 0 1\nreopen -o read-only=off\nwrite 0 1\n",
        "reopen -o discard=unmap\ndiscard 0 64k\nmap\nreopen -o detect-zeroes=unmap\n\
         write -P 0 64k 64k\nmap\n",
        "reopen -o overlap-check=all\nreopen -o l2-cache-size=1M\nwrite 3M 1M\n",
        "reopen -o encrypt=x\n",
    ] {
        pair.same_io(&["x.qcow2"], script);
        pair.same_io(&["-r", "x.qcow2"], script);
        let options = "driver=qcow2,file.filename=x.qcow2";
        pair.same_io(&["--image-opts", options], script);
    }
    pair.assert_same_disk("x.qcow2", "qcow2");
    let raw = "reopen -o lazy-refcounts=on\nreopen -r\nwrite 0 1\nreopen -w\nwrite 0 1\n";
    pair.same_io(&["-f", "raw", "r.raw"], raw);
}

#[test]
fn sigraise_and_abort() {
    let pair = Pair::new(IMAGE);
    for command in ["sigraise 9", "sigraise 15"] {
        let args = [
            "-c",
            "write 0 1",
            "-c",
            command,
            "-c",
            "write 0 2",
            "x.qcow2",
        ];
        let answer = pair.ours.zebu_io(&args);
        assert_eq!(answer.status, pair.theirs.qemu_io(&args).status);
        assert!(answer.out.starts_with("wrote 1/1") && !answer.out.contains("2/2"));
    }
    let args = ["-c", "write -P 9 1M 64k", "-c", "abort", "x.qcow2"];
    assert_eq!(pair.ours.zebu_io(&args).status, 128 + libc::SIGABRT);
    let check = ["check", pair.ours.path("x.qcow2").to_str().expect("UTF-8")].map(String::from);
    // Only leaks are allowed.
    let check = pair.theirs.qemu_img(&[&check[0], &check[1]]);
    assert!([0, 3].contains(&check.status), "{check:#?}");
}

/// Regression: without a cache mode writes were not durable before a flush.
#[test]
fn writes_are_durable_by_default() {
    for mode in [&[][..], &["-t", "writethrough"], &["-t", "directsync"]] {
        let pair = Pair::new("create x.qcow2 4M");
        let script = ["-c", "write -P 9 1M 64k", "-c", "abort", "x.qcow2"];
        let args = [mode, &script].concat();
        pair.ours.zebu_io(&args);
        pair.theirs.qemu_io(&args);
        for lab in [&pair.ours, &pair.theirs] {
            lab.qemu_io(&["-r", "-c", "read -P 9 1M 64k", "x.qcow2"])
                .ok("after a crash");
        }
    }
}

#[test]
fn dirty_images_are_repaired_on_opening() {
    let recipe = "create -o lazy_refcounts=on lazy.qcow2 4M; \
        crash lazy.qcow2: write -P 3 0 128k | write -P 4 1M 64k";
    for args in [
        &["-c", "write -P 5 2M 64k", "lazy.qcow2"][..],
        &["-r", "-c", "read -P 3 0 128k", "lazy.qcow2"],
    ] {
        let pair = Pair::new(recipe);
        pair.same_io(args, "");
        if !args.contains(&"-r") {
            pair.assert_same_disk("lazy.qcow2", "qcow2");
        }
    }
    let script = "reopen -w\nwrite -P 5 2M 64k\n";
    let pair = Pair::new(recipe);
    let answer = pair.ours.zebu_io_script(&["-r", "lazy.qcow2"], script);
    assert!(answer.out.contains("wrote 65536/65536"), "{answer:#?}");
    pair.theirs
        .qemu_io(&["-c", "write -P 5 2M 64k", "lazy.qcow2"]);
    pair.assert_same_disk("lazy.qcow2", "qcow2");
}

/// Scripts like those that make the images of published benchmarks.
#[test]
fn generated_scripts() {
    let pair = Pair::new("create seq.qcow2 32M; create rand.qcow2 32M; create aio.qcow2 32M");
    let mut order: Vec<u64> = (0..512).collect();
    let script = |verb: &str, order: &[u64]| {
        let mut text = String::new();
        for block in order {
            let _ = writeln!(text, "{verb} -P 0xff {} 65536", block * 65536);
        }
        text + "q\n"
    };
    pair.same_io(&["seq.qcow2"], &script("write", &order));
    let mut random = Rng::new(3);
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i as u64 + 1) as usize);
    }
    pair.same_io(&["rand.qcow2"], &script("write", &order));
    // The requests end in any order.
    for answer in [
        pair.ours
            .zebu_io_script(&["aio.qcow2"], &script("aio_write -q", &order)),
        pair.theirs
            .qemu_io_script(&["aio.qcow2"], &script("aio_write -q", &order)),
    ] {
        assert!(
            answer.status == 0 && !answer.out.contains("failed"),
            "{answer:#?}"
        );
    }
    for file in ["seq.qcow2", "rand.qcow2", "aio.qcow2"] {
        pair.assert_same_disk(file, "qcow2");
    }
}

/// Up to 20 requests of all kinds in flight, which do not overlap; the next ones overlap them.
#[test]
fn concurrent_requests() {
    for seed in cases(4, "scripts of concurrent requests") {
        let pair = Pair::new(IMAGE);
        let mut random = Rng::new(seed);
        let mut script = String::new();
        for round in 0..20 {
            // Each request in flight has a range of its own.
            for place in 0..20u64 {
                let at = place * 500_000 + random.below(100_000);
                let length = 1 + random.below(390_000);
                let _ = match random.below(4) {
                    0 => writeln!(script, "aio_write -q -z {at} {length}"),
                    1 => writeln!(script, "aio_write -q -z -u {at} {length}"),
                    _ => writeln!(script, "aio_write -q -P {} {at} {length}", 1 + round),
                };
            }
            script.push_str("aio_flush\n");
        }
        let args = ["-d", "unmap", "top.qcow2"];
        pair.same_io(&args, &script);
        pair.assert_same_disk("top.qcow2", "qcow2");
    }
}

#[test]
fn images_that_cannot_be_written() {
    let pair = Pair::new(IMAGE);
    for options in ["read-only=on", "file.read-only=on", "auto-read-only=on"] {
        let name = format!("driver=qcow2,file.filename=x.qcow2,{options}");
        pair.same_io(&["--image-opts", "-c", "write 0 1", &name], "");
    }
    pair.same_io(&["-U", "-c", "write 0 1", "x.qcow2"], "");
    pair.same_io(&["-t", "bogus", "-c", "write 0 1", "x.qcow2"], "");
    if peer().is_current() {
        pair.same_io(&["-c", "write 0 1"], "");
    }
}

#[test]
fn truncating() {
    let commands = [
        "truncate 5M",
        "length",
        "truncate 20M",
        "read -P 0 6M 14M",
        "truncate -m off 21M",
        "truncate -m metadata 22M",
        "truncate -m falloc 23M",
        "truncate -m full 24M",
        "length",
        "truncate -m bogus 30M",
        "truncate -m falloc 5M",
        "truncate 513",
        "length",
        "write -P 2 513 20",
        "read -P 2 513 20",
        "read 0 1k",
        "truncate x",
        "truncate -Z 1",
        "truncate -m",
        "truncate a b c d",
        "truncate 9000000000G",
        "write 23M 1M",
        "write 24M 1",
        "truncate 0",
        "length",
        "write 0 1",
        "truncate 1M",
        "read -P 0 0 1M",
    ];
    same_commands("x.qcow2", "qcow2", &[], &commands);
    same_commands("old.qcow2", "qcow2", &[], &commands);
    same_commands("sub.qcow2", "qcow2", &[], &commands);
    same_commands("r.raw", "raw", &[], &commands);
    same_commands("x.qcow2", "qcow2", &["-s"], &commands);
}

/// Requests in flight together, which a version without zero clusters writes as data, follow each other in
/// the file as they do on the disk.
#[test]
fn zeroes_of_version_2_are_laid_out_in_order() {
    let lab = Lab::new();
    fs::write(lab.path("base"), vec![7; 4 << 20]).unwrap();
    for command in ["write -z", "write -P 1"] {
        let create = [
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "compat=0.10",
            "-b",
            "base",
            "-F",
            "raw",
        ];
        lab.zebu(&[&create[..], &["x.qcow2"]].concat()).ok("create");
        // There is a table: a request that begins when it has just been made overtakes those that waited.
        let first = "write -P 2 3M 64k\n".to_owned();
        let all = (0..32).map(|nth| format!("aio_{command} {}k 64k\n", nth * 64));
        let script: String = [first].into_iter().chain(all).collect();
        lab.zebu_io_script(&["-f", "qcow2", "x.qcow2"], &(script + "aio_flush\n"))
            .ok(command);
        let map = lab.zebu(&["map", "--output=json", "x.qcow2"]).ok("map");
        assert!(
            map.out.contains("\"start\": 0, \"length\": 2097152,"),
            "{command}: {}",
            map.out
        );
    }
}
