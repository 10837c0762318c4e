//! Names of files that are not UTF-8 or have characters with a meaning elsewhere: each command must
//! open or make exactly the named file. Names in images (snapshots, features) must be read as by
//! QEMU.
//!
//! U+E080 to U+E0FF in names stand for single bytes (`common/bytes.rs`).

use zebu::internal::printable;

use crate::common::{Answer, Lab, bytes, peer, testing_qemu};
use crate::common::{assert_same_answer, compare_answers};

/// An invalid byte, a truncated character, and separators of options and protocols.
const ODD: &str = "\u{e0ff}\u{e0e2}\u{e082}, x\n:é";

/// A file name with these characters; after `./` the colon ends no protocol.
fn odd(name: &str) -> String {
    format!("./{name}{ODD}")
}

/// The name as a value of an option.
fn value(name: &str) -> String {
    name.replace(',', ",,")
}

/// The output of a command that must succeed.
#[track_caller]
fn done(answer: Answer) -> String {
    assert_eq!(answer.status, 0, "{answer:#?}");
    answer.out
}

/// Fails the test unless both programs answer the same, but for escapes in `name` and what they
/// leave of the blanks between columns.
#[track_caller]
fn same_but_escaped(lab: &Lab, args: &[&str], name: &str, what: &str) {
    let [mut ours, mut theirs] = [lab.zebu(args), lab.qemu_img(args)];
    if !testing_qemu() {
        theirs.out = theirs.out.replace(name, &printable(name.as_bytes()));
    }
    for answer in [&mut ours, &mut theirs] {
        let words: Vec<_> = answer.out.split(' ').filter(|w| !w.is_empty()).collect();
        answer.out = words.join(" ");
    }
    compare_answers(&ours, &theirs, args, what);
}

/// Fails the test unless both programs read these patterns.
#[track_caller]
fn reads(lab: &Lab, name: &str, commands: &[&str]) {
    let mut args = vec!["-r", "-f", "qcow2"];
    args.extend(commands.iter().flat_map(|c| ["-c", c]));
    args.push(name);
    for answer in [lab.zebu_io(&args), lab.qemu_io(&args)] {
        assert!(!done(answer).contains("failed"), "{name}: {commands:?}");
    }
}

#[test]
fn every_command_accepts_any_file_name() {
    let lab = Lab::new();
    std::fs::create_dir(lab.path(&odd("folder"))).expect("mkdir");
    let inside = |name: &str| format!("{}/{name}{ODD}", odd("folder"));
    let (base, top, copy) = (inside("base"), inside("top"), inside("copy"));
    let zebu = |args: &[&str]| done(lab.zebu(args));
    zebu(&["create", "-q", "-f", "qcow2", &base, "1M"]);
    done(lab.zebu_io(&["-c", "write -P 1 0 64k", &base]));
    // The name in the image, relative to its folder.
    let stored = format!("./base{ODD}");
    zebu(&[
        "create", "-q", "-f", "qcow2", "-b", &stored, "-F", "qcow2", &top,
    ]);
    reads(&lab, &top, &["read -P 1 0 64k"]);
    let raw = inside("raw");
    zebu(&["convert", "-O", "raw", &top, &raw]);
    zebu(&["compare", &top, &raw]);
    zebu(&[
        "convert", "-O", "qcow2", "-B", &stored, "-F", "qcow2", &top, &copy,
    ]);
    reads(&lab, &copy, &["read -P 1 0 64k", "read -P 0 64k 64k"]);
    done(lab.zebu_io(&["-c", "write -P 2 64k 64k", &top]));
    zebu(&["commit", "-q", &top]);
    reads(&lab, &base, &["read -P 1 0 64k", "read -P 2 64k 64k"]);
    let other = inside("other");
    zebu(&[
        "dd",
        "-O",
        "qcow2",
        &format!("if={base}"),
        &format!("of={other}"),
    ]);
    zebu(&[
        "rebase",
        "-b",
        &format!("./other{ODD}"),
        "-F",
        "qcow2",
        &top,
    ]);
    zebu(&["snapshot", "-c", ODD, &top]);
    zebu(&["amend", "-o", "lazy_refcounts=on", &top]);
    zebu(&["check", "-q", &top]);
    zebu(&["resize", "-q", &top, "2M"]);
    reads(&lab, &top, &["read -P 1 0 64k", "read -P 2 64k 64k"]);
    zebu(&["convert", "-l", ODD, "-O", "raw", &top, &raw]);
    let info = zebu(&["info", &top]);
    let folder = odd("folder");
    let line = format!("backing file: ./other{ODD} (actual path: {folder}/./other{ODD})\n");
    // QEMU prints the line feed.
    let line = match testing_qemu() {
        true => line,
        false => line.trim_end().replace('\n', "\\n"),
    };
    assert!(info.contains(&line), "{info}");
    for args in [
        &["info", "--backing-chain", &top][..],
        &["info", "--output=json", "--backing-chain", &top],
        &["snapshot", "-l", &top],
        &["map", &top],
        &["map", "--output=json", &top],
        &["check", "--output=json", &top],
        &["measure", "-O", "qcow2", &top],
        &[
            "info",
            "--image-opts",
            &format!("driver=raw,offset=512,file.filename={}", value(&top)),
        ],
    ] {
        same_but_escaped(&lab, args, ODD, "a name of any bytes");
    }
}

#[test]
fn names_are_stored_unchanged() {
    for by_qemu in [false, true] {
        let lab = Lab::new();
        let run = |args: &[&str]| {
            done(match by_qemu {
                false => lab.zebu(args),
                true => lab.qemu_img(args),
            })
        };
        run(&["create", "-q", "-f", "raw", &odd("base"), "1M"]);
        let data = format!("data_file={},backing_fmt=raw", value(&odd("data")));
        let backing = format!("backing_file={},{data}", value(&odd("base")));
        let line = run(&["create", "-f", "qcow2", "-o", &backing, "top"]);
        let shown = match by_qemu || testing_qemu() {
            true => value(&odd("base")),
            false => value(&odd("base")).replace('\n', "\\n"),
        };
        assert!(line.contains(&format!("backing_file={shown}")), "{line}");
        assert!(lab.path(&odd("data")).exists());
        let header = std::fs::read(lab.path("top")).expect("read");
        for name in [odd("base"), odd("data")] {
            let name = bytes::os(&name).into_encoded_bytes();
            assert!(header.windows(name.len()).any(|part| part == name));
        }
        for args in [&["info", "top"][..], &["info", "--output=json", "top"]] {
            same_but_escaped(&lab, args, ODD, "names in the header");
        }
        done(lab.zebu_io(&["-c", "write -P 3 0 64k", "top"]));
        reads(&lab, "top", &["read -P 3 0 64k", "read -P 0 64k 64k"]);
    }
}

/// Each invalid sequence becomes one U+FFFD, divided as by QEMU.
#[test]
fn json_replaces_invalid_utf8_as_qemu() {
    let lab = Lab::new();
    for name in [
        "\u{e0ff}",
        "\u{e080}\u{e080}",
        "\u{e0e2}\u{e082}x",
        "\u{e0f0}\u{e09f}\u{e098}",
        "\u{1f600}é",
        "\u{e0c0}\u{e080}",
        "\u{e0ed}\u{e0a0}\u{e080}",
        "\u{e0f8}\u{e088}\u{e080}\u{e080}\u{e080}",
        "\u{e0f8}\u{e088}\u{e080}x",
        "\u{e0fc}\u{e084}\u{e080}\u{e080}\u{e080}\u{e080}",
        "\u{e0fe}\u{e080}",
        "\u{e0c1}\u{e0bf}",
        "\u{e0e0}\u{e080}\u{e080}",
        "\u{e0f4}\u{e090}\u{e080}\u{e080}",
        "\u{ffff}\u{fdd0}\u{fffd}",
        "\u{7f}\u{1}\t\"\\",
    ] {
        std::fs::write(lab.path(name), [0; 512]).expect("write");
        lab.sync_files();
        assert_same_answer(&lab, &["info", "-f", "raw", "--output=json", name], name);
        let options = format!("driver=raw,size=512,file.filename={name}");
        same_but_escaped(&lab, &["info", "--image-opts", &options], name, name);
    }
}

/// A zero byte ends the name in an entry of the snapshot table.
#[test]
fn zero_bytes_end_names_of_snapshots() {
    let lab = Lab::new();
    lab.make("create a.q 1M; io a.q: write -P 1 0 64k; img snapshot -c abcdef a.q; io a.q: write -P 2 0 64k");
    let table = lab.u64_at("a.q", 64);
    let extra = u64::from(lab.u32_at("a.q", table + 36));
    // The id is one byte; the name follows it.
    let name = table + 40 + extra + 1;
    for (kept, at) in [("abc", 3), ("a", 1), ("", 0)] {
        lab.patch("a.q", name + at, &[0]);
        for args in [
            &["snapshot", "-l", "a.q"][..],
            &["info", "--output=json", "a.q"],
            &["convert", "-l", "abcdef", "-O", "raw", "a.q", "out"],
            &["snapshot", "-a", "abcdef", "a.q"],
        ] {
            assert_same_answer(&lab, args, kept);
        }
        if !kept.is_empty() {
            let copy = lab.path("b.q");
            std::fs::copy(lab.path("a.q"), &copy).expect("copy");
            for answer in [
                lab.zebu(&["snapshot", "-a", kept, "a.q"]),
                lab.qemu_img(&["snapshot", "-a", kept, "b.q"]),
            ] {
                done(answer);
            }
            reads(&lab, "a.q", &["read -P 1 0 64k"]);
        }
    }
    // The snapshot can be deleted by its id.
    assert_same_answer(&lab, &["snapshot", "-d", "1", "a.q"], "by its id");
    done(lab.zebu(&["check", "-q", "a.q"]));
}

/// A table of feature names need not end with a whole entry.
#[test]
fn short_tables_of_feature_names() {
    const TYPE: u32 = 0x6803_f857;
    if !peer().is_current() {
        return;
    }
    let lab = Lab::new();
    lab.make("create a.q 1M");
    let mut at = u64::from(lab.u32_at("a.q", 100));
    while lab.u32_at("a.q", at) != TYPE {
        at += 8 + u64::from(lab.u32_at("a.q", at + 4)).next_multiple_of(8);
    }
    let whole = lab.u32_at("a.q", at + 4);
    // Bits with and without a name.
    for bits in [1u64 << 0, 1 << 4, 1 << 5, 1 << 4 | 1 << 40, 1 << 63] {
        lab.patch("a.q", 72, &bits.to_be_bytes());
        for length in [whole, 0, 1, 2, 3, 8, 47, 48, 49, 95, 96, 97, 200, whole - 1] {
            lab.patch("a.q", at + 4, &length.to_be_bytes());
            // Ends the extensions after the shortened table.
            let end = at + 8 + u64::from(length).next_multiple_of(8);
            let kept: Vec<u8> = std::fs::read(lab.path("a.q")).expect("read");
            if length != whole {
                lab.patch("a.q", end, &[0; 8]);
            }
            assert_same_answer(
                &lab,
                &["info", "a.q"],
                &format!("{bits:#x}, {length} bytes"),
            );
            lab.patch("a.q", 0, &kept[..4096]);
        }
    }
}
