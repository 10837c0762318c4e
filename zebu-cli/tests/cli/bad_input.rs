//! Damaged images. The program must print one line that says what is wrong and exit with status 1,
//! without a panic, a hang, or memory in proportion to a number in the file.
//!
//! Every command runs with a time limit and an address space of 2 GB. Messages must have the main
//! words of QEMU's, which scripts may look for.

use crate::common::part;
use crate::common::{Answer, Lab, Limits, assert_same_answer, beyond_qemu, peer, testing_qemu};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

const L1: u64 = 0x30000;
const L2: u64 = 0x40000;
const REFCOUNT_TABLE: u64 = 0x10000;

/// An intact image of 4 MiB with clusters of 64 KiB, of which the first MiB is written. QEMU places
/// its tables at the offsets of the constants above. Its copy `x.qcow2` is damaged by the tests.
const INTACT: &str = "create g.qcow2 4M; io g.qcow2: write -s noise 0 1M";

fn limits() -> Limits {
    Limits {
        time: Duration::from_secs(20),
        memory: Some(2_000_000),
        ..Limits::default()
    }
}

/// `g.qcow2` and its copy.
fn intact() -> Lab {
    let lab = Lab::new();
    lab.make(INTACT);
    assert_eq!(lab.u64_at("g.qcow2", 40), L1, "QEMU's layout has changed");
    assert_eq!(lab.u64_at("g.qcow2", L1) & 0x00ff_ffff_ffff_ff00, L2);
    fs::copy(lab.path("g.qcow2"), lab.path("x.qcow2")).expect("copy");
    lab
}

/// Runs all commands that read an image.
fn read_commands(lab: &Lab, name: &str) -> Vec<(&'static str, Answer)> {
    let _ = fs::remove_file(lab.path("out.raw"));
    [
        ("info", &["info", name][..]),
        ("map", &["map", "--output=json", name]),
        ("check", &["check", name]),
        ("measure", &["measure", "-O", "qcow2", name]),
        ("compare", &["compare", name, name]),
        ("bench", &["bench", "-c", "4", name]),
        ("convert", &["convert", "-O", "raw", name, "out.raw"]),
    ]
    .into_iter()
    .map(|(command, args)| (command, lab.zebu_limited(args, &limits())))
    .collect()
}

/// Fails the test unless every command refuses an image with these bytes replaced, with a message
/// that has `Could not open 'x.qcow2'` and these words.
#[track_caller]
fn refused_by_all(patches: &[(u64, &[u8])], words: &str) {
    refused_by(
        &["info", "map", "check", "measure", "bench", "convert"],
        patches,
        words,
    );
}

/// The same for some commands; the others must not panic or hang.
#[track_caller]
fn refused_by(commands: &[&str], patches: &[(u64, &[u8])], words: &str) {
    let lab = intact();
    for (offset, bytes) in patches {
        lab.patch("x.qcow2", *offset, bytes);
    }
    for (command, answer) in read_commands(&lab, "x.qcow2") {
        let what = format!("{command} of an image for which {words:?} is expected");
        answer.orderly(&what);
        if !commands.contains(&command) {
            continue;
        }
        answer.failed_with_one_line(1, &what);
        assert!(
            answer.err.contains("Could not open 'x.qcow2'") && answer.err.contains(words),
            "{what}: {answer:#?}"
        );
        assert!(
            command != "convert" || !lab.path("out.raw").exists(),
            "{what}: the output was created before the input was opened"
        );
    }
}

#[test]
fn header_numbers_out_of_range() {
    let all = u32::MAX.to_be_bytes();
    for bits in [8u32, 22, 31, 32, 63, 64, u32::MAX] {
        refused_by_all(
            &[(20, &bits.to_be_bytes())],
            &format!("Unsupported cluster size: 2^{bits}"),
        );
    }
    for order in [7u32, 31, 32, 255, u32::MAX] {
        refused_by_all(
            &[(96, &order.to_be_bytes())],
            "Reference count entry width too large",
        );
    }
    refused_by_all(&[(4, &4u32.to_be_bytes())], "Unsupported qcow2 version 4");
    refused_by_all(&[(100, &32u32.to_be_bytes())], "qcow2 header too short");
    refused_by_all(&[(100, &all)], "qcow2 header exceeds cluster size");
    refused_by_all(
        &[(8, &0x10_0000u64.to_be_bytes())],
        "Invalid backing file offset",
    );
    refused_by_all(&[(104, &[3])], "compression type");
}

#[test]
fn invalid_sizes() {
    // 2^64 - 1, 2^63, and 2^52 with an L1 table for 4 MiB.
    refused_by_all(&[(24, &[0xff; 8])], "");
    refused_by_all(&[(24, &(1u64 << 63).to_be_bytes())], "");
    refused_by_all(
        &[(24, &(1u64 << 52).to_be_bytes())],
        "L1 table is too small",
    );
}

#[test]
fn invalid_l1_tables() {
    refused_by_all(
        &[(36, &0x7fff_ffffu32.to_be_bytes())],
        "Active L1 table too large",
    );
    refused_by_all(&[(36, &0u32.to_be_bytes())], "L1 table is too small");
    refused_by_all(
        &[(40, &(L1 + 1).to_be_bytes())],
        "Active L1 table offset invalid",
    );
    refused_by_all(
        &[(40, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0])],
        "Active L1 table offset invalid",
    );
    // 32 MiB of L1 are allowed; they are not in the file.
    if !beyond_qemu("it reads an L1 table beyond the end as zeroes") {
        refused_by(
            &["map", "convert"],
            &[(40, &(1u64 << 40).to_be_bytes())],
            "L1 table",
        );
    }
}

#[test]
fn invalid_refcount_tables() {
    refused_by_all(
        &[(56, &0x7fff_ffffu32.to_be_bytes())],
        "Reference count table too large",
    );
    refused_by_all(
        &[(48, &(REFCOUNT_TABLE + 1).to_be_bytes())],
        "Reference count table offset invalid",
    );
    refused_by(
        &["info", "map", "convert"],
        &[(56, &0u32.to_be_bytes())],
        "Image does not contain a reference count table",
    );
}

#[test]
fn invalid_snapshot_tables() {
    refused_by(
        &["info", "map", "convert"],
        &[(60, &u32::MAX.to_be_bytes())],
        "Snapshot table too large",
    );
    let mut one_unaligned = [0; 12];
    one_unaligned[3] = 1;
    one_unaligned[11] = 1;
    refused_by(
        &["info", "map", "convert"],
        &[(60, &one_unaligned)],
        "Snapshot table offset invalid",
    );
}

#[test]
fn header_extensions_that_overlap() {
    // The length of the first extension.
    refused_by_all(
        &[(116, &u32::MAX.to_be_bytes())],
        "Header extension too large",
    );
    refused_by_all(
        &[(116, &0x1_0000u32.to_be_bytes())],
        "Header extension too large",
    );
    // A backing file name in the middle of the extensions.
    refused_by_all(
        &[(8, &0x100u64.to_be_bytes()), (16, &0xffffu32.to_be_bytes())],
        "Header extension too large",
    );
}

#[test]
fn unknown_features_are_named() {
    refused_by_all(
        &[(72, &0x100u64.to_be_bytes())],
        "Unsupported qcow2 feature(s): Unknown incompatible feature: 100",
    );
    refused_by_all(
        &[(72, &(1u64 << 63).to_be_bytes())],
        "Unsupported qcow2 feature(s): Unknown incompatible feature: 8000000000000000",
    );
    // The first entry of the feature name table becomes the name of bit 63.
    let mut name = [0u8; 48];
    name[1] = 63;
    name[2..16].copy_from_slice(b"time travelled");
    refused_by_all(
        &[(72, &(1u64 << 63).to_be_bytes()), (120, &name)],
        "Unsupported qcow2 feature(s): time travelled",
    );
}

#[test]
fn external_data_file_without_a_name() {
    refused_by(&["map", "convert"], &[(72, &4u64.to_be_bytes())], "data");
}

#[test]
fn encrypted_images_are_refused() {
    refused_by(
        &["map", "convert", "measure", "bench"],
        &[(32, &1u32.to_be_bytes())],
        "encrypt",
    );
    refused_by_all(
        &[(32, &9u32.to_be_bytes())],
        "Unsupported encryption method 9",
    );

    let lab = luks("");
    assert_same_answer(&lab, &["info", "x.qcow2"], "an encrypted image");
    for (command, answer) in read_commands(&lab, "x.qcow2") {
        if !["info", "check", "compare"].contains(&command) {
            answer.failed_with_one_line(1, command);
            assert!(answer.err.contains("encrypt"), "{command}: {answer:#?}");
        }
    }
}

/// Where the recipe of `luks` puts the LUKS header.
const LUKS: u64 = 0x40000;

/// A small LUKS image, `x.qcow2`.
fn luks(options: &str) -> Lab {
    let lab = Lab::new();
    let options = format!("encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10{options}");
    // qemu-img fails if its processor time decreases, which happens on some virtual machines.
    let made = (0..50).any(|_| {
        let mut args = vec!["create", "-q", "-f", "qcow2"];
        args.extend(["--object", "secret,id=s,data=abc", "-o", &options]);
        args.extend(["x.qcow2", "1M"]);
        let answer = lab.qemu_img(&args);
        let has_failed = answer.err.contains("accurate CPU usage");
        if !has_failed {
            answer.ok(&options);
        }
        !has_failed
    });
    assert!(made, "qemu-img made no image with {options}");
    lab.sync_files();
    lab
}

#[test]
fn luks_headers_are_shown_as_qemu_shows_them() {
    let all = [
        ",encrypt.cipher-alg=aes-128",
        ",encrypt.cipher-alg=serpent-192,encrypt.hash-alg=sha512",
        ",encrypt.cipher-alg=twofish-256,encrypt.ivgen-alg=plain,encrypt.hash-alg=sha1",
        ",encrypt.cipher-alg=cast5-128,encrypt.cipher-mode=cbc,encrypt.hash-alg=ripemd160",
        ",encrypt.cipher-mode=ctr,encrypt.ivgen-hash-alg=sha512",
        ",encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256",
    ];
    for options in part(6, all) {
        let lab = luks(options);
        for args in [
            &["info", "x.qcow2"][..],
            &["info", "--output=json", "x.qcow2"],
        ] {
            assert_same_answer(&lab, args, options);
        }
    }

    let lab = luks("");
    lab.make(
        "img amend --object secret,id=s,data=abc --object secret,id=t,data=def \
         -o encrypt.state=active,encrypt.new-secret=t,encrypt.iter-time=10,encrypt.keyslot=5 \
         --image-opts driver=qcow2,encrypt.key-secret=s,file.filename=x.qcow2",
    );
    lab.sync_files();
    assert_same_answer(&lab, &["info", "x.qcow2"], "two key slots");
}

#[test]
fn luks_headers_that_are_damaged() {
    if !peer().is_current() {
        println!("skipped: QEMU 7.2 knows fewer hashes, and crashes on one of these");
        return;
    }
    let lab = luks("");
    let slot = |n: u64| LUKS + 208 + 48 * n;
    for (offset, bytes) in [
        // The extension of the qcow2 header: its type, offset and length.
        (0x70, &[0][..]),
        (0x78, &1u64.to_be_bytes()),
        (0x78, &0x230000u64.to_be_bytes()),
        (0x78, &(1u64 << 40).to_be_bytes()),
        (0x80, &591u64.to_be_bytes()),
        (0x80, &u64::MAX.to_be_bytes()),
        (LUKS, b"X"),
        (LUKS + 6, &[0, 2]),
        (LUKS + 8, &[b'x'; 32]),
        (LUKS + 8, b"des\0"),
        (LUKS + 40, b"xts-essiv:sha1\0"),
        (LUKS + 40, b"xts-essiv:sm3\0"),
        (LUKS + 72, b"none\0"),
        (LUKS + 104, &4039u32.to_be_bytes()),
        (LUKS + 104, &u32::MAX.to_be_bytes()),
        (LUKS + 108, &u32::MAX.to_be_bytes()),
        (LUKS + 164, &0u32.to_be_bytes()),
        (LUKS + 168, &[b'z'; 40]),
        (slot(0), &[0; 8]),
        (slot(0) + 4, &u32::MAX.to_be_bytes()),
        (slot(0) + 40, &u32::MAX.to_be_bytes()),
        (slot(1) + 40, &511u32.to_be_bytes()),
        (slot(7) + 44, &u32::MAX.to_be_bytes()),
    ] {
        fs::copy(lab.path("x.qcow2"), lab.path("y.qcow2")).expect("copy");
        lab.patch("y.qcow2", offset, bytes);
        let what = format!("{bytes:02x?} at {offset:#x}");
        lab.sync_files();
        assert_same_answer(&lab, &["info", "y.qcow2"], &what);
    }
}

/// Fails the test unless an image with these bytes replaced can be opened but not read.
#[track_caller]
fn unreadable(patches: &[(u64, &[u8])], map_fails: bool) {
    let lab = intact();
    for (offset, bytes) in patches {
        lab.patch("x.qcow2", *offset, bytes);
    }
    for (command, answer) in read_commands(&lab, "x.qcow2") {
        let what = format!("{command} with {patches:02x?}");
        answer.orderly(&what);
        match command {
            "info" => assert_eq!(answer.status, 0, "{what}: {answer:#?}"),
            "compare" if map_fails => assert_eq!(answer.status, 3, "{what}: {answer:#?}"),
            "convert" | "map" if command == "convert" || map_fails => {
                assert_eq!(answer.status, 1, "{what}: {answer:#?}");
                // QEMU prints "Image is corrupt" in a separate line.
                if !testing_qemu() {
                    answer.failed_with_one_line(1, &what);
                }
            }
            _ => {}
        }
    }
}

#[test]
fn tables_that_are_unaligned() {
    unreadable(&[(L1, &(1 << 63 | (L2 + 512)).to_be_bytes())], true);
    unreadable(&[(L2, &(1u64 << 63 | 0x50200).to_be_bytes())], true);
}

#[test]
fn tables_beyond_the_end_of_the_file() {
    if beyond_qemu("it reads tables beyond the end as zeroes") {
        return;
    }
    unreadable(&[(L1, &(1u64 << 63 | 1 << 40).to_be_bytes())], true);
    unreadable(
        &[(L1, &(1u64 << 63 | 0x00ff_ffff_ffff_0000).to_be_bytes())],
        true,
    );
}

#[test]
fn tables_that_overlap_metadata_are_errors_of_the_check() {
    for (name, entry, table) in [
        ("an L1 entry that points to the L1 table", 1 << 63 | L1, L1),
        ("a data cluster in the header", 1 << 63, L2),
        ("a data cluster in the L2 table", 1 << 63 | L2, L2),
        ("two data clusters at one place", 1 << 63 | 0x60000, L2),
    ] {
        let lab = intact();
        lab.patch("x.qcow2", table, &u64::to_be_bytes(entry));
        for (_, answer) in read_commands(&lab, "x.qcow2") {
            answer.orderly(name);
        }
        assert_same_answer(&lab, &["check", "x.qcow2"], name);
        assert_same_answer(&lab, &["check", "--output=json", "x.qcow2"], name);
    }
}

#[test]
fn check_counts_as_qemu() {
    for (name, patches) in [
        ("intact", &[][..]),
        (
            "a data cluster beyond the end",
            &[(L2, 1u64 << 63 | 1 << 40)],
        ),
        ("an L2 table beyond the end", &[(L1, 1u64 << 63 | 1 << 40)]),
        ("an unaligned data cluster", &[(L2, 1u64 << 63 | 0x50200)]),
        ("reserved bits", &[(L2, 1u64 << 63 | 0x5003e)]),
        ("a leak", &[(L2, 0)]),
        (
            "a compressed cluster beyond the end",
            &[(L2, 1u64 << 62 | 1 << 40)],
        ),
        ("no COPIED flag", &[(L2, 0x50000)]),
        ("no COPIED flag in L1", &[(L1, L2)]),
        (
            "refcounts that are too low and too high",
            &[(0x20000, 0x0001_0000_0001_0003)],
        ),
        (
            "a refcount block beyond the end",
            &[(REFCOUNT_TABLE, 1 << 40)],
        ),
        (
            "a zero cluster with an offset",
            &[(L2, 1u64 << 63 | 0x50001)],
        ),
    ] {
        let lab = intact();
        for (offset, entry) in patches {
            lab.patch("x.qcow2", *offset, &entry.to_be_bytes());
        }
        assert_same_answer(&lab, &["check", "x.qcow2"], name);
        assert_same_answer(&lab, &["check", "--output=json", "x.qcow2"], name);
        assert_same_answer(&lab, &["check", "-q", "x.qcow2"], name);
    }
}

#[test]
fn compressed_clusters_outside_or_damaged() {
    // Outside of the file; with the largest numbers; raw data as a stream.
    unreadable(&[(L2, &(1u64 << 62 | 1 << 40).to_be_bytes())], false);
    unreadable(&[(L2, &(u64::MAX >> 1).to_be_bytes())], false);
    unreadable(&[(L2, &(1u64 << 62 | 0x50000).to_be_bytes())], false);

    for kind in ["zlib", "zstd"] {
        let lab = Lab::new();
        lab.make(&format!(
            "img convert -c -O qcow2 -o compression_type={kind} text x.qcow2"
        ));
        let l2 = lab.u64_at("x.qcow2", lab.u64_at("x.qcow2", 40)) & 0x00ff_ffff_ffff_fe00;
        let at = lab.u64_at("x.qcow2", l2) & ((1 << 54) - 1);
        lab.patch("x.qcow2", at + 20, &[0x5a; 300]);
        lab.patch("x.qcow2", at, &[0xff; 4]);
        for (command, answer) in read_commands(&lab, "x.qcow2") {
            let what = format!("{command}, {kind}");
            answer.orderly(&what);
            if command == "convert" {
                answer.failed_with_one_line(1, &what);
                assert!(
                    answer.err.contains("error while reading at byte 0: "),
                    "{answer:#?}"
                );
            }
            if command == "compare" {
                assert_eq!(answer.status, 4, "{what}: {answer:#?}");
            }
        }
    }
}

#[test]
fn truncated_files() {
    // In the header.
    for length in [50, 71, 100] {
        let lab = intact();
        lab.make(&format!("cut x.qcow2 {length}"));
        for (command, answer) in read_commands(&lab, "x.qcow2") {
            if command != "compare" {
                answer.failed_with_one_line(1, &format!("{command}, {length} bytes left"));
                assert!(answer.err.contains("qcow2 header too short"), "{answer:#?}");
            }
        }
    }
    // Before the L2 table, in it, and in the data: check reports it.
    const IN_TABLE: u64 = 0x40000 + 4096;
    for length in [200_000, IN_TABLE, 0x50000, 0x50000 + 70_000] {
        let lab = intact();
        lab.make(&format!("cut x.qcow2 {length}"));
        for (command, answer) in read_commands(&lab, "x.qcow2") {
            answer.orderly(&format!("{command}, {length} bytes left"));
        }
        if length == IN_TABLE && !beyond_qemu("it does not see that the table is cut off") {
            let answer = lab.zebu(&["check", "x.qcow2"]);
            assert!(answer.out.contains("17 errors"), "{answer:?}");
            assert!(answer.err.contains("is cut off"), "{answer:?}");
        } else {
            assert_same_answer(&lab, &["check", "x.qcow2"], "truncated");
            assert_same_answer(&lab, &["check", "--output=json", "x.qcow2"], "truncated");
        }
        if length < 0x40000 && !beyond_qemu("it reads tables beyond the end as zeroes") {
            lab.zebu_limited(&["convert", "-O", "raw", "x.qcow2", "out.raw"], &limits())
                .failed_with_one_line(1, "the L2 table is cut off");
        }
    }
}

/// The file has only the first clusters of an extent. A read that starts in them must not return
/// zeroes for the others.
#[test]
fn reads_of_a_truncated_extent() {
    if beyond_qemu("it reads zeroes") {
        return;
    }
    let lab = intact();
    let end = L2 + 0x10000 + 5 * 0x10000;
    lab.make(&format!("cut x.qcow2 {end}"));
    for (read, status) in [("read 0 320k", 0), ("read 0 384k", 1), ("read 320k 1k", 1)] {
        let answer = lab.zebu_io(&["-r", "-c", read, "x.qcow2"]);
        assert_eq!(answer.status, status, "{read}: {answer:?}");
    }
    let answer = lab.zebu(&["convert", "-O", "raw", "x.qcow2", "out.raw"]);
    answer.failed_with_one_line(1, "convert");
    assert!(answer.err.contains("at byte 327680"), "{answer:?}");
}

/// A sparse file of 4 EiB costs nothing to make, so the work must not be in proportion to its
/// length.
#[test]
fn a_file_of_4_eib() {
    if beyond_qemu("it reads the map of every cluster") {
        return;
    }
    let lab = Lab::new();
    lab.make("create -o cluster_size=512 x.qcow2 1M; io x.qcow2: write -s noise 0 64k");
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        println!("skipped: there is no /dev/shm");
        return;
    };
    let path = dir.path().join("x.qcow2");
    let long = fs::copy(lab.path("x.qcow2"), &path)
        .and_then(|_| fs::OpenOptions::new().write(true).open(&path))
        .and_then(|file| file.set_len(1 << 62));
    if long.is_err() {
        println!("skipped: /dev/shm has no such files");
        return;
    }
    let name = path.to_str().expect("UTF-8");
    for args in [&["map", name][..], &["convert", "-O", "raw", name, "o.raw"]] {
        lab.zebu_limited(args, &limits()).ok(args[0]);
    }
}

#[test]
fn files_that_are_not_qcow2() {
    let lab = intact();
    fs::create_dir(lab.path("folder")).expect("mkdir");
    fs::write(lab.path("empty"), b"").expect("write");
    fs::copy(lab.path("g.qcow2"), lab.path("magic")).expect("copy");
    lab.patch("magic", 0, b"QFI!");
    for (name, format, words) in [
        ("folder", None, "requires 'folder' to be a regular file"),
        (
            "folder",
            Some("qcow2"),
            "requires 'folder' to be a regular file",
        ),
        ("nothing", None, "No such file or directory"),
        ("empty", Some("qcow2"), "Image is not in qcow2 format"),
        ("magic", Some("qcow2"), "Image is not in qcow2 format"),
        ("g.qcow2", Some("qcow9"), "Unknown driver 'qcow9'"),
    ] {
        for command in ["info", "map", "check", "measure", "convert"] {
            let mut args = vec![command];
            args.extend(format.into_iter().flat_map(|format| ["-f", format]));
            args.push(name);
            if command == "convert" {
                args.extend(["-O", "raw", "out.raw"]);
            }
            let answer = lab.zebu_limited(&args, &limits());
            answer.failed_with_one_line(1, &args.join(" "));
            assert!(
                answer.err.contains(&format!("Could not open '{name}'"))
                    && answer.err.contains(words),
                "{args:?}: {answer:#?}"
            );
        }
    }
    // Without -f both are raw, as with QEMU.
    for name in ["empty", "magic"] {
        lab.sync_files();
        assert_same_answer(&lab, &["info", name], name);
        assert_same_answer(&lab, &["map", "--output=json", name], name);
        let check = assert_same_answer(&lab, &["check", name], name);
        assert_eq!(check.status, 63, "{check:#?}");
    }
}

#[test]
fn backing_files_missing_or_in_a_loop() {
    let lab = Lab::new();
    lab.make(
        "create -u -b missing.qcow2 -F qcow2 x.qcow2 1M; create -u -b x.qcow2 -F qcow2 y.qcow2 1M",
    );
    for (command, answer) in read_commands(&lab, "y.qcow2") {
        if command != "info" && command != "compare" {
            answer.failed_with_one_line(1, command);
            assert!(
                answer
                    .err
                    .contains("Could not open 'y.qcow2': Could not open backing file")
                    && answer.err.contains("missing.qcow2")
                    && answer.err.contains("No such file or directory"),
                "{command}: {answer:#?}"
            );
        }
    }
    assert_same_answer(&lab, &["info", "--backing-chain", "x.qcow2"], "missing");

    let lab = Lab::new();
    lab.make(
        "create -u -b y.qcow2 -F qcow2 x.qcow2 1M; create -u -b x.qcow2 -F qcow2 y.qcow2 1M; \
         create self.qcow2 1M; img rebase -u -F qcow2 -b self.qcow2 self.qcow2",
    );
    for name in ["x.qcow2", "self.qcow2"] {
        let chain = lab.zebu_limited(&["info", "--backing-chain", name], &limits());
        chain.failed_with_one_line(1, name);
        assert!(chain.err.contains("creates an infinite loop"), "{chain:#?}");
        if beyond_qemu("a loop of backing files makes it run until memory is full") {
            continue;
        }
        for (command, answer) in read_commands(&lab, name) {
            match command {
                "info" => assert_eq!(answer.status, 0, "{answer:#?}"),
                "compare" => assert_eq!(answer.status, 2, "{answer:#?}"),
                _ => {
                    answer.failed_with_one_line(1, command);
                    assert!(
                        answer.err.contains("loop") && answer.err.contains(name),
                        "{command}: {answer:#?}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_corrupt_bit_does_not_prevent_reads() {
    let lab = intact();
    lab.patch("x.qcow2", 79, &[2]);
    lab.sync_files();
    let info = assert_same_answer(&lab, &["info", "x.qcow2"], "corrupt bit");
    assert!(info.out.contains("corrupt: true"), "{info:#?}");
    assert_same_answer(&lab, &["check", "x.qcow2"], "corrupt bit");
    lab.zebu(&["convert", "-O", "raw", "x.qcow2", "x.raw"])
        .ok("corrupt bit");
    lab.zebu(&["convert", "-O", "raw", "g.qcow2", "g.raw"])
        .ok("intact");
    lab.assert_same_bytes("x.raw", "g.raw", "corrupt bit");
}

#[test]
fn no_permission() {
    // SAFETY: no arguments, cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    let lab = intact();
    fs::set_permissions(lab.path("."), fs::Permissions::from_mode(0o777)).expect("chmod");
    fs::set_permissions(lab.path("g.qcow2"), fs::Permissions::from_mode(0o000)).expect("chmod");
    let limits = Limits {
        user: root.then_some(65534),
        ..limits()
    };
    if root && !lab.can_run_as(65534) {
        println!("skipped: cannot run programs as another user");
        return;
    }
    for command in ["info", "map", "check", "measure"] {
        let answer = lab.zebu_limited(&[command, "g.qcow2"], &limits);
        answer.failed_with_one_line(1, command);
        assert!(
            answer.err.contains("Could not open 'g.qcow2'")
                && answer.err.contains("Permission denied"),
            "{answer:#?}"
        );
    }
}

#[test]
fn messages_begin_with_the_name_of_the_program() {
    let lab = Lab::new();
    let called = lab.zebu_called("qemu-img", &["info", "nothing"]);
    assert_eq!(
        called.err,
        "qemu-img: Could not open 'nothing': Could not open 'nothing': No such file or directory\n"
    );
    assert_eq!(called.status, 1);
}

/// A check counts everything, and prints a part of what an image can be made to print.
#[test]
fn messages_of_a_check_are_bounded() {
    if beyond_qemu("a bound on messages") {
        return;
    }
    let lab = Lab::new();
    let options = "preallocation=metadata,cluster_size=4096";
    lab.zebu(&["create", "-q", "-f", "qcow2", "-o", options, "x", "7M"])
        .ok("create");
    let block = lab.u64_at("x", lab.u64_at("x", 48));
    lab.patch("x", block, &[0; 4096]);
    let answer = lab.zebu(&["check", "x"]);
    let lines = |what: &str| answer.err.lines().filter(|l| l.contains(what)).count();
    // 1000, and the one that says what the others are like.
    assert_eq!(lines("refcount=0 reference=1"), 1001, "{answer:?}");
    let count: u64 = answer
        .out
        .lines()
        .find_map(|line| line.strip_suffix(" errors were found on the image."))
        .map(|count| count.parse().unwrap())
        .unwrap();
    assert!(count > 1700, "{count}");
    let more: u64 = answer
        .err
        .lines()
        .filter_map(|line| {
            line.strip_prefix("... and ")?
                .strip_suffix(" more like this one")
        })
        .map(|more| more.parse::<u64>().unwrap())
        .sum();
    let said = answer
        .err
        .lines()
        .filter(|l| !l.starts_with("... "))
        .count() as u64;
    assert_eq!(said + more, count, "{answer:?}");
}

/// What could not be opened is not made.
#[test]
fn a_chain_that_would_be_too_long_is_not_made() {
    let lab = Lab::new();
    lab.make("create 0.q 1M; create x.q 1M");
    for depth in 1..200 {
        let (below, name) = (format!("{}.q", depth - 1), format!("{depth}.q"));
        lab.zebu(&[
            "create", "-q", "-f", "qcow2", "-b", &below, "-F", "qcow2", &name,
        ])
        .ok("create");
    }
    lab.zebu(&["convert", "-O", "raw", "199.q", "raw"])
        .ok("the longest");
    let over = lab.zebu(&[
        "create", "-f", "qcow2", "-b", "199.q", "-F", "qcow2", "200.q",
    ]);
    let below = lab.zebu(&["rebase", "-b", "199.q", "-F", "qcow2", "x.q"]);
    for refused in [over, below] {
        assert_eq!(refused.status, 1, "{refused:?}");
        assert!(
            refused.err.contains("longer than 200 images"),
            "{refused:?}"
        );
    }
    assert!(!lab.path("200.q").exists());
}
