//! qcow2 images with LUKS inside, both ways: QEMU reads, checks and changes what zebu made, and zebu what QEMU made.

use std::fs;

use crate::common::{Lab, Rng, assert_same_answer, cases, compare_answers};

const SECRETS: [&str; 4] = [
    "--object",
    "secret,id=s,file=pass",
    "--object",
    "secret,id=wrong,file=other",
];
const DISK: &str = "driver=qcow2,encrypt.key-secret=s,file.filename=x.qcow2";
const NEW: &str = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
const SIZE: u64 = 3 << 20;

fn lab() -> Lab {
    let lab = Lab::new();
    fs::write(lab.path("pass"), "a passphrase").unwrap();
    fs::write(lab.path("other"), "another").unwrap();
    lab
}

/// A command with the secrets behind its name.
fn with_secrets<'a>(args: &[&'a str]) -> Vec<&'a str> {
    let (command, rest) = args.split_first().expect("a command");
    [&[*command], &SECRETS[..], rest].concat()
}

fn create(lab: &Lab, options: &str) {
    let options = format!("{NEW}{options}");
    let create = [
        "create", "-q", "-f", "qcow2", "-o", &options, "x.qcow2", "3M",
    ];
    lab.zebu(&with_secrets(&create)).ok("create");
}

/// Options of qemu-io that open the disk.
fn io() -> Vec<&'static str> {
    [&SECRETS[..], &["--image-opts", DISK]].concat()
}

/// Commands for qemu-io that write some ranges, which differ from each other.
fn writes(random: &mut Rng) -> String {
    let mut script = String::new();
    for number in 1..6 + random.below(10) {
        let at = random.below(SIZE);
        let length = (1 + random.below(200 << 10)).min(SIZE - at);
        script += &match random.below(4) {
            0 => format!("write -z {at} {length}\n"),
            1 => format!("write -z -u {at} {length}\n"),
            _ => format!("write -P {number} {at} {length}\n"),
        };
        if random.one_in(4) {
            script += "flush\n";
        }
    }
    script
}

#[test]
fn encrypted_images_are_made_read_and_written_as_by_qemu() {
    for seed in cases(4, "encrypted images") {
        let lab = lab();
        let mut random = Rng::new(seed);
        let kinds = [
            "",
            ",cluster_size=4k",
            ",extended_l2=on",
            ",compat=0.10",
            ",data_file=data",
            ",encrypt.cipher-alg=serpent-128,encrypt.hash-alg=sha512",
            ",encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,cluster_size=512",
        ];
        let kind = random.pick(&kinds);
        let what = &format!("seed {seed}, {kind}");
        let options = format!("{NEW}{kind}");
        let create = [
            "create", "-q", "-f", "qcow2", "-o", &options, "x.qcow2", "3M",
        ];
        match random.one_in(2) {
            true => lab.zebu(&with_secrets(&create)).ok(what),
            false => lab.qemu_img(&with_secrets(&create)).ok(what),
        };
        fs::write(lab.path("model"), vec![0; SIZE as usize]).unwrap();
        for _ in 0..2 {
            let script = writes(&mut random);
            lab.qemu_io_script(&["-f", "raw", "model"], &script)
                .ok(what);
            match random.one_in(2) {
                true => lab.zebu_io_script(&io(), &script).ok(what),
                false => lab.qemu_io_script(&io(), &script).ok(what),
            };
            lab.sync_files();
            for args in [
                &["info", "x.qcow2"][..],
                &["info", "--output=json", "x.qcow2"],
                &["map", "--output=json", "--image-opts", DISK],
                &["check", "--image-opts", DISK],
                &[
                    "compare",
                    "--image-opts",
                    DISK,
                    "driver=raw,file.filename=model",
                ],
                &["measure", "-O", "raw", "--image-opts", DISK],
                &["measure", "-O", "qcow2", "-o", NEW, "--size", "5M"],
            ] {
                assert_same_answer(&lab, &with_secrets(args), what);
            }
        }
        let convert = [
            "convert", "-O", "qcow2", "-o", NEW, "-f", "raw", "model", "y.qcow2",
        ];
        lab.zebu(&with_secrets(&convert)).ok(what);
        let copy = "driver=qcow2,encrypt.key-secret=s,file.filename=y.qcow2";
        let compare = ["compare", "--image-opts", copy, DISK];
        lab.qemu_img(&with_secrets(&compare)).ok(what);
        let back = ["convert", "-O", "raw", "--image-opts", copy, "back"];
        lab.zebu(&with_secrets(&back)).ok(what);
        lab.assert_same_bytes("back", "model", what);
    }
}

/// Snapshots, another size, bitmaps, a backing chain in which each image has a secret of its own.
#[test]
fn what_is_done_with_an_image_is_done_with_an_encrypted_one() {
    let lab = lab();
    create(&lab, "");
    lab.zebu_io_script(&io(), "write -P 1 0 2M\n").ok("write");
    let opened = ["--image-opts", DISK];
    let zebu = |args: &[&str]| lab.zebu(&with_secrets(args)).ok("zebu");
    zebu(&["snapshot", "-c", "one", opened[0], opened[1]]);
    zebu(&["bitmap", "--add", opened[0], opened[1], "b"]);
    zebu(&["resize", "-q", opened[0], opened[1], "5M"]);
    lab.qemu_io_script(&io(), "read -P 1 0 2M\nread -P 0 2M 3M\nwrite -P 2 1M 3M\n")
        .ok("QEMU");
    zebu(&[
        "resize",
        "-q",
        "--preallocation=falloc",
        opened[0],
        opened[1],
        "6M",
    ]);
    let read = lab
        .qemu_io_script(&io(), "read -P 0 5M 1M\nread -P 2 1M 3M\n")
        .ok("QEMU");
    assert!(!read.out.contains("failed"), "{read:?}");
    let snapshot = [
        "convert", "-l", "one", "-O", "raw", opened[0], opened[1], "one.raw",
    ];
    zebu(&snapshot);
    let one = fs::read(lab.path("one.raw")).unwrap();
    assert!(one[..2 << 20].iter().all(|byte| *byte == 1) && one[2 << 20..].iter().all(|b| *b == 0));
    lab.qemu_img(&with_secrets(&["check", opened[0], opened[1]]))
        .ok("check");
    let over = [
        "create",
        "-q",
        "-u",
        "-f",
        "qcow2",
        "-o",
        "encrypt.format=luks,encrypt.key-secret=wrong,encrypt.iter-time=10",
        "-b",
        "x.qcow2",
        "-F",
        "qcow2",
        "o.qcow2",
        "6M",
    ];
    zebu(&over);
    let top =
        "driver=qcow2,encrypt.key-secret=wrong,backing.encrypt.key-secret=s,file.filename=o.qcow2";
    let io_top = [&SECRETS[..], &["--image-opts", top]].concat();
    lab.zebu_io_script(&io_top, "write -P 7 1000 100000\n")
        .ok("write");
    let script =
        "read -P 1 0 1000\nread -P 7 1000 100000\nread -P 1 101000 900k\nread -P 2 1M 3M\n";
    let read = lab.qemu_io_script(&io_top, script).ok("read");
    assert!(!read.out.contains("failed"), "{read:?}");
    zebu(&["commit", "-q", "--image-opts", top]);
    let read = lab.qemu_io_script(&io(), script).ok("read");
    assert!(!read.out.contains("failed"), "{read:?}");
    zebu(&["snapshot", "-a", "one", opened[0], opened[1]]);
    zebu(&["snapshot", "-d", "one", opened[0], opened[1]]);
    let read = lab.qemu_io_script(&io(), "read -P 1 0 2M\n").ok("read");
    assert!(!read.out.contains("failed"), "{read:?}");
    lab.qemu_img(&with_secrets(&["check", opened[0], opened[1]]))
        .ok("check");
}

#[test]
fn what_cannot_be_is_one_line_and_changes_nothing() {
    let lab = lab();
    create(&lab, "");
    let before = fs::read(lab.path("x.qcow2")).unwrap();
    let o = |option: &str| format!("{NEW},{option}");
    for args in [
        &["map", "x.qcow2"][..],
        &["check", "x.qcow2"],
        &[
            "map",
            "--image-opts",
            "driver=qcow2,encrypt.key-secret=none,file.filename=x.qcow2",
        ],
        &[
            "map",
            "--image-opts",
            "driver=qcow2,encrypt.key-secret=wrong,file.filename=x.qcow2",
        ],
        &[
            "map",
            "--image-opts",
            "driver=qcow2,encrypt.format=aes,encrypt.key-secret=s,file.filename=x.qcow2",
        ],
        &[
            "create",
            "-f",
            "qcow2",
            "-o",
            "encrypt.format=luks",
            "y.qcow2",
            "1M",
        ],
        &[
            "create",
            "-f",
            "qcow2",
            "-o",
            "encrypt.key-secret=s",
            "y.qcow2",
            "1M",
        ],
        &[
            "create",
            "-f",
            "qcow2",
            "-o",
            "encrypt.format=x,encrypt.key-secret=s",
            "y.qcow2",
            "1M",
        ],
        &[
            "create",
            "-f",
            "qcow2",
            "-o",
            &o("encryption=on"),
            "y.qcow2",
            "1M",
        ],
        &[
            "create",
            "-f",
            "qcow2",
            "-o",
            &o("encrypt.cipher-alg=x"),
            "y.qcow2",
            "1M",
        ],
        &[
            "convert",
            "-c",
            "-O",
            "qcow2",
            "-o",
            NEW,
            "--image-opts",
            DISK,
            "y.qcow2",
        ],
    ] {
        let args = with_secrets(args);
        let (mut ours, mut theirs) = (lab.zebu(&args), lab.qemu_img(&args));
        // The order of options in this line is none.
        (ours.out, theirs.out) = (String::new(), String::new());
        compare_answers(&ours, &theirs, &args, "");
        assert_eq!(ours.status, 1, "{args:?}");
        let _ = fs::remove_file(lab.path("y.qcow2"));
    }
    for (option, why) in [
        (
            "preallocation=metadata",
            "Encryption is not possible with preallocation",
        ),
        (
            "data_file=d,data_file_raw=on",
            "Encryption is not possible with preallocation",
        ),
    ] {
        let args = ["create", "-f", "qcow2", "-o", &o(option), "y.qcow2", "1M"];
        lab.zebu(&with_secrets(&args)).fails_with(why);
        assert!(!lab.path("y.qcow2").exists() && !lab.path("d").exists());
    }
    let aes = [
        "create",
        "-f",
        "qcow2",
        "-o",
        "encrypt.format=aes,encrypt.key-secret=s",
        "y.qcow2",
        "1M",
    ];
    lab.zebu(&with_secrets(&aes))
        .fails_with("not safe: use encrypt.format=luks");
    // Compressed clusters would not be encrypted.
    let packed = lab.zebu_io_script(&io(), "write -c 0 64k\n");
    assert!(
        packed.out.contains("write failed: Operation not supported"),
        "{packed:?}"
    );
    assert!(fs::read(lab.path("x.qcow2")).unwrap() == before);
}

/// No file has what is on an encrypted disk.
#[test]
fn no_plain_text_is_left() {
    let lab = lab();
    let text = b"this text is on the disk and nowhere else. ";
    let plain: Vec<u8> = text.iter().copied().cycle().take(1 << 20).collect();
    fs::write(lab.path("plain"), &plain).unwrap();
    let convert = [
        "convert", "-f", "raw", "-O", "qcow2", "-o", NEW, "plain", "x.qcow2",
    ];
    lab.zebu(&with_secrets(&convert)).ok("convert");
    fs::remove_file(lab.path("plain")).unwrap();
    let script = "write -P 99 300 70000\nwrite -P 99 900k 1\nflush\n";
    lab.zebu_io_script(&io(), script).ok("write");
    for entry in fs::read_dir(lab.path("")).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        let has = |needle: &[u8]| bytes.windows(needle.len()).any(|bytes| bytes == needle);
        assert!(!has(&text[..24]) && !has(&[99; 24]), "{}", path.display());
    }
}
