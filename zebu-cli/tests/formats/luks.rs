//! LUKS containers, both ways: what QEMU made is read, written and resized, and QEMU and cryptsetup open what zebu
//! made; in each cipher, mode, generator of initialisation vectors and hash that both have.

use std::fs;

use crate::common::{Lab, Rng, assert_same_answer, cases, compare_answers};

/// `-o` of a new container, but for its secret.
const KINDS: &[&str] = &[
    "cipher-alg=aes-256",
    "cipher-alg=aes-128,hash-alg=sha1",
    "cipher-mode=xts,ivgen-alg=plain,hash-alg=sha512",
    "cipher-mode=xts,ivgen-alg=essiv,ivgen-hash-alg=sha256,hash-alg=sha384",
    "cipher-mode=cbc,ivgen-alg=plain64,hash-alg=sha224",
    "cipher-mode=cbc,ivgen-alg=essiv,hash-alg=ripemd160",
    "cipher-alg=aes-128,cipher-mode=ecb",
    "cipher-mode=ctr",
    "cipher-alg=serpent-256",
    "cipher-alg=twofish-256,cipher-mode=cbc",
    "cipher-alg=cast5-128,cipher-mode=cbc",
];

const SECRETS: [&str; 4] = [
    "--object",
    "secret,id=s,file=pass",
    "--object",
    "secret,id=wrong,file=other",
];
const DISK: &str = "driver=luks,key-secret=s,file.filename=x.luks";
const SIZE: u64 = 3 << 20;

/// What these tests do in a lab.
trait LuksLab {
    fn with_secrets() -> Lab;
}

impl LuksLab for Lab {
    fn with_secrets() -> Lab {
        let lab = Lab::new();
        fs::write(lab.path("pass"), "a passphrase").unwrap();
        fs::write(lab.path("other"), "another").unwrap();
        lab
    }
}

/// A command with the secrets behind its name.
fn with_secrets<'a>(args: &[&'a str]) -> Vec<&'a str> {
    let (command, rest) = args.split_first().expect("a command");
    [&[*command], &SECRETS[..], rest].concat()
}

/// Commands for qemu-io that write some ranges, which differ from each other.
fn writes(random: &mut Rng) -> String {
    let mut script = String::new();
    for number in 1..6 + random.below(10) {
        let at = random.below(SIZE);
        let length = (1 + random.below(200 << 10)).min(SIZE - at);
        script += &match random.below(4) {
            0 => format!("write -z {at} {length}\n"),
            _ => format!("write -P {number} {at} {length}\n"),
        };
        if random.one_in(4) {
            script += "flush\n";
        }
    }
    script
}

#[test]
fn containers_are_made_read_and_written_as_by_qemu() {
    for seed in cases(6, "containers") {
        let lab = Lab::with_secrets();
        let mut random = Rng::new(seed);
        let kind = random.pick(KINDS);
        let what = &format!("seed {seed}, {kind}");
        let options = format!("key-secret=s,iter-time=10,{kind}");
        let (ours, size) = (random.one_in(2), SIZE.to_string());
        let create = [
            "create", "-q", "-f", "luks", "-o", &options, "x.luks", &size,
        ];
        match ours {
            true => lab.zebu(&with_secrets(&create)).ok(what),
            false => lab.qemu_img(&with_secrets(&create)).ok(what),
        };
        // What is not written is not defined: the whole disk is.
        let all = format!("write -P 77 0 {SIZE}\n");
        let io = [&SECRETS[..], &["--image-opts", DISK]].concat();
        lab.zebu_io_script(&io, &all).ok(what);
        fs::write(lab.path("model"), vec![77; SIZE as usize]).unwrap();
        for _ in 0..2 {
            let script = writes(&mut random);
            lab.qemu_io_script(&["-f", "raw", "model"], &script)
                .ok(what);
            match random.one_in(2) {
                true => lab.zebu_io_script(&io, &script).ok(what),
                false => lab.qemu_io_script(&io, &script).ok(what),
            };
            lab.sync_files();
            for args in [
                &["info", "x.luks"][..],
                &["info", "--output=json", "x.luks"],
                &["map", "--output=json", "--image-opts", DISK],
                &["map", "--image-opts", DISK],
                &["check", "x.luks"],
                &["snapshot", "-l", "--image-opts", DISK],
                &[
                    "compare",
                    "--image-opts",
                    DISK,
                    "driver=raw,file.filename=model",
                ],
                &["measure", "-O", "qcow2", "--image-opts", DISK],
                &[
                    "measure",
                    "-O",
                    "luks",
                    "-o",
                    "key-secret=s",
                    "--size",
                    "5M",
                ],
            ] {
                assert_same_answer(&lab, &with_secrets(args), what);
            }
        }
        let convert = [
            "convert", "-O", "luks", "-o", &options, "-f", "raw", "model", "y.luks",
        ];
        lab.zebu(&with_secrets(&convert)).ok(what);
        let copy = "driver=luks,key-secret=s,file.filename=y.luks";
        let compare = ["compare", "--image-opts", copy, DISK];
        lab.qemu_img(&with_secrets(&compare)).ok(what);
        let back = ["convert", "-O", "raw", "--image-opts", copy, "back"];
        lab.zebu(&with_secrets(&back)).ok(what);
        lab.assert_same_bytes("back", "model", what);
    }
}

#[test]
fn another_size_is_that_of_qemu_and_what_is_added_is_zero() {
    let lab = Lab::with_secrets();
    let create = [
        "create",
        "-q",
        "-f",
        "luks",
        "-o",
        "key-secret=s,iter-time=10",
        "x.luks",
        "1M",
    ];
    lab.zebu(&with_secrets(&create)).ok("create");
    let io = [&SECRETS[..], &["--image-opts", DISK]].concat();
    lab.zebu_io_script(&io, "write -P 9 0 1M\n").ok("write");
    for (args, size) in [
        (&["resize", "--image-opts", DISK, "+512k"][..], 1536),
        (&["resize", "--shrink", "--image-opts", DISK, "512k"], 512),
        (
            &["resize", "--preallocation=full", "--image-opts", DISK, "2M"],
            2048,
        ),
    ] {
        let args = with_secrets(args);
        lab.zebu(&args).ok("resize");
        let info = lab.qemu_img(&["info", "--output=json", "x.luks"]);
        let bytes = format!("\"virtual-size\": {}", size << 10);
        assert!(info.out.contains(&bytes), "{args:?}: {info:?}");
    }
    let script = "read -P 9 0 512k\nread -P 0 512k 1536k\n";
    let read = lab.qemu_io_script(&io, script).ok("read");
    assert!(!read.out.contains("failed"), "{read:?}");
}

#[test]
fn without_the_right_secret_there_is_one_line_as_of_qemu() {
    let lab = Lab::with_secrets();
    let create = [
        "create",
        "-q",
        "-f",
        "luks",
        "-o",
        "key-secret=s,iter-time=10",
        "x.luks",
        "1M",
    ];
    lab.zebu(&with_secrets(&create)).ok("create");
    let before = fs::read(lab.path("x.luks")).unwrap();
    for args in [
        &["convert", "-O", "raw", "x.luks", "y"][..],
        &["map", "x.luks"],
        &[
            "map",
            "--image-opts",
            "driver=luks,key-secret=none,file.filename=x.luks",
        ],
        &[
            "map",
            "--image-opts",
            "driver=luks,key-secret=wrong,file.filename=x.luks",
        ],
        &["create", "-f", "luks", "y.luks", "1M"],
        &[
            "create",
            "-f",
            "luks",
            "-o",
            "key-secret=none",
            "y.luks",
            "1M",
        ],
        &[
            "create",
            "-f",
            "luks",
            "-o",
            "key-secret=s,cipher-alg=x",
            "y.luks",
            "1M",
        ],
        &[
            "create",
            "-f",
            "luks",
            "-o",
            "key-secret=s,cipher-mode=x",
            "y.luks",
            "1M",
        ],
        &[
            "create",
            "-f",
            "luks",
            "-o",
            "key-secret=s,ivgen-alg=x",
            "y.luks",
            "1M",
        ],
        &[
            "create",
            "-f",
            "luks",
            "-o",
            "key-secret=s,hash-alg=x",
            "y.luks",
            "1M",
        ],
        &[
            "create",
            "-f",
            "luks",
            "-o",
            "key-secret=s,ivgen-hash-alg=x",
            "y.luks",
            "1M",
        ],
        &["measure", "-O", "luks", "--size", "1M"],
        &["rebase", "-u", "-b", "", "--image-opts", DISK],
    ] {
        let args = with_secrets(args);
        let (mut ours, mut theirs) = (lab.zebu(&args), lab.qemu_img(&args));
        // The order of options in this line is none.
        (ours.out, theirs.out) = (String::new(), String::new());
        compare_answers(&ours, &theirs, &args, "");
        assert_eq!(ours.status, 1, "{args:?}");
    }
    assert!(fs::read(lab.path("x.luks")).unwrap() == before);
    assert!(!lab.path("y.luks").exists());
}

#[test]
fn the_chain_of_an_overlay_has_its_own_secret() {
    let lab = Lab::with_secrets();
    let create = [
        "create",
        "-q",
        "-f",
        "luks",
        "-o",
        "key-secret=s,iter-time=10",
        "x.luks",
        "1M",
    ];
    lab.zebu(&with_secrets(&create)).ok("create");
    let io = [&SECRETS[..], &["--image-opts", DISK]].concat();
    lab.zebu_io_script(&io, "write -P 9 0 1M\n").ok("write");
    let over = [
        "create", "-q", "-u", "-f", "qcow2", "-b", "x.luks", "-F", "luks", "o.qcow2", "1M",
    ];
    lab.zebu(&over).ok("overlay");
    let top = "driver=qcow2,file.filename=o.qcow2,backing.key-secret=s";
    let io_top = [&SECRETS[..], &["--image-opts", top]].concat();
    lab.zebu_io_script(&io_top, "write -P 8 1000 100000\n")
        .ok("write");
    let script = "read -P 9 0 1000\nread -P 8 1000 100000\nread -P 9 101000 900k\n";
    let read = lab.qemu_io_script(&io_top, script).ok("read");
    assert!(!read.out.contains("failed"), "{read:?}");
    lab.zebu(&["map", "o.qcow2"])
        .fails_with("Parameter 'key-secret' is required for cipher");
    lab.zebu(&with_secrets(&["commit", "-q", "--image-opts", top]))
        .ok("commit");
    let read = lab.qemu_io_script(&io, script).ok("read");
    assert!(!read.out.contains("failed"), "{read:?}");
}

/// A line feed at the end of a secret's file belongs to the passphrase, as in QEMU; and a secret may be an option,
/// which no other user sees.
#[test]
fn secrets_are_those_of_qemu_and_are_hidden() {
    let lab = Lab::with_secrets();
    fs::write(lab.path("line"), "a passphrase\n").unwrap();
    let line = ["--object", "secret,id=s,file=line"];
    let create = [
        "create",
        "-q",
        "-f",
        "luks",
        line[0],
        line[1],
        "-o",
        "key-secret=s,iter-time=10",
        "x.luks",
        "1M",
    ];
    lab.zebu(&create).ok("create");
    let map = |secret: &str| {
        let args = [
            "map",
            "--output=json",
            "--object",
            secret,
            "--image-opts",
            DISK,
        ];
        let (ours, theirs) = (lab.zebu(&args), lab.qemu_img(&args));
        assert_eq!(ours.status, theirs.status, "{secret}: {ours:?} {theirs:?}");
        ours.status
    };
    assert_eq!(map("secret,id=s,file=line"), 0);
    assert_eq!(map("secret,id=s,file=pass"), 1);
    assert_eq!(map("secret,id=s,data=a passphrase"), 1);
    assert_eq!(
        map("secret,id=s,format=base64,data=YSBwYXNzcGhyYXNlCg=="),
        0
    );
    let seen = lab.shell(
        r#""$0" nbd -t -r -f raw -k "$PWD/socket" --object secret,id=s,data=hidden-text pass &
        for i in $(seq 300); do test -S socket && break; sleep 0.1; done
        tr '\0' ' ' < /proc/$!/cmdline; kill $!; wait; exit 0"#,
    );
    assert!(
        seen.out.contains("--object secret,id=s,data=xxx"),
        "{seen:?}"
    );
    assert!(!seen.out.contains("hidden"), "{seen:?}");
}

/// A container is backed up as it is, and never by accident as what it decrypts to.
#[test]
fn a_backup_has_no_plain_text() {
    let lab = Lab::with_secrets();
    let create = [
        "create",
        "-q",
        "-f",
        "luks",
        "-o",
        "key-secret=s,iter-time=10",
        "x.luks",
        "1M",
    ];
    lab.zebu(&with_secrets(&create)).ok("create");
    let backup = ["backup", "--name", "d", "--image-opts", DISK, "--to", "set"];
    lab.zebu(&with_secrets(&backup))
        .fails_with("the disk is encrypted, and its backup would not be");
    lab.zebu(&["backup", "-f", "raw", "x.luks", "--to", "set"])
        .ok("as it is");
}

/// No file has what is on an encrypted disk.
#[test]
fn no_plain_text_is_left() {
    let lab = Lab::with_secrets();
    let text = b"this text is on the disk and nowhere else. ";
    let plain: Vec<u8> = text.iter().copied().cycle().take(1 << 20).collect();
    fs::write(lab.path("plain"), &plain).unwrap();
    let options = "key-secret=s,iter-time=10";
    let convert = [
        "convert", "-f", "raw", "-O", "luks", "-o", options, "plain", "x.luks",
    ];
    lab.zebu(&with_secrets(&convert)).ok("convert");
    fs::remove_file(lab.path("plain")).unwrap();
    lab.zebu_io_script(
        &[&SECRETS[..], &["--image-opts", DISK]].concat(),
        "write -P 99 300 70000\nflush\n",
    )
    .ok("write");
    for entry in fs::read_dir(lab.path("")).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        let has = |needle: &[u8]| bytes.windows(needle.len()).any(|bytes| bytes == needle);
        assert!(!has(&text[..24]) && !has(&[99; 24]), "{}", path.display());
    }
}

/// The container is an image that is not finished until its conversion has ended.
#[test]
fn a_container_that_is_not_finished_opens_nowhere() {
    let lab = Lab::with_secrets();
    let mut bytes = vec![0; 4 << 20];
    bytes[..23].copy_from_slice(b"LUKS\xba\xbe\0\x01zebu-unfinished");
    fs::write(lab.path("x.luks"), bytes).unwrap();
    let info = ["info", "x.luks"];
    lab.zebu(&info)
        .fails_with("Image is incomplete: what makes it has not finished");
    assert_ne!(lab.qemu_img(&info).status, 0);
}

#[test]
fn cryptsetup_opens_what_was_made() {
    let lab = Lab::with_secrets();
    for kind in KINDS.iter().take(6) {
        let options = format!("key-secret=s,iter-time=10,{kind}");
        let create = ["create", "-q", "-f", "luks", "-o", &options, "x.luks", "1M"];
        lab.zebu(&with_secrets(&create)).ok(kind);
        let tested = lab.shell(
            "command -v cryptsetup > /dev/null || { echo cryptsetup is missing; exit 0; }
             cryptsetup open --test-passphrase --key-file pass x.luks || exit 1
             ! cryptsetup open --test-passphrase --key-file other x.luks",
        );
        tested.ok(kind);
    }
}

/// Hours of work for a passphrase are refused of an untrusted container.
#[test]
fn an_untrusted_container_may_not_ask_for_hours() {
    let lab = Lab::with_secrets();
    let create = [
        "create",
        "-q",
        "-f",
        "luks",
        "-o",
        "key-secret=s,iter-time=10",
        "x.luks",
        "1M",
    ];
    lab.zebu(&with_secrets(&create)).ok("create");
    let map = ["map", "--output=json", "--untrusted", "--image-opts", DISK];
    lab.zebu(&with_secrets(&map)).ok("map");
    // The iterations of the first slot.
    lab.patch("x.luks", 208 + 4, &u32::MAX.to_be_bytes());
    lab.zebu(&with_secrets(&map))
        .fails_with("more than the 20000000 that an untrusted container may ask for");
}
