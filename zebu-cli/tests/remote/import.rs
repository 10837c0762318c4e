//! `import`. Guards against an image that is taken although its source has another checksum, names
//! other files or exceeds a limit; against a target that is left as an image by what fails; and
//! against an exit status or a verdict that says something else.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::server::wait_until;
use crate::common::stopping::{STOPS, start};
use crate::common::web::{Behaviour, Web, images, served};
use crate::common::{Answer, Lab, Limits, beyond_qemu, part, rotated};

/// Imports to `out`, which is removed before; of every second list of arguments it is a link to a
/// file that is not there. Returns the verdict.
#[track_caller]
fn import(lab: &Lab, args: &[&str], status: i32) -> Value {
    let (out, behind) = (lab.path("out"), lab.path("behind"));
    for path in [&out, &behind] {
        let _ = fs::remove_file(path);
    }
    let is_link = args.concat().len() % 2 == 1;
    if is_link {
        symlink("behind", &out).unwrap();
    }
    let verdict = verdict(&lab.zebu(&[&["import"], args, &["out"]].concat()), status);
    let made = [&out, &behind].map(|path| path.exists());
    assert_eq!(made, [status == 0, status == 0 && is_link], "{args:?}");
    verdict
}

/// The verdict of an answer, whose exit status fits it.
#[track_caller]
fn verdict(answer: &Answer, status: i32) -> Value {
    assert_eq!(answer.status, status, "{answer:#?}");
    let verdict: Value = serde_json::from_str(&answer.out).expect("a verdict");
    let result = match status {
        0 => "ok",
        1 => "failed",
        2 => "refused",
        3 => "checksum-mismatch",
        4 => "limit",
        5 => "source-failed",
        6 => "target-failed",
        7 => "needs-file",
        _ => "interrupted",
    };
    assert_eq!(verdict["result"], result, "{verdict:#}");
    match status {
        0 => assert!(answer.err.is_empty(), "{answer:#?}"),
        _ => {
            assert_eq!(answer.err.lines().count(), 1, "{answer:#?}");
            let reason = verdict["reason"].as_str().expect("a reason");
            assert!(answer.err.trim_end().ends_with(reason), "{answer:#?}");
        }
    }
    verdict
}

#[track_caller]
fn says(verdict: &Value, text: &str) {
    let reason = verdict["reason"].as_str().unwrap_or_default();
    assert!(reason.contains(text), "{text}: {verdict:#}");
}

/// The checksum of a file, by the tool that is told.
fn sum(lab: &Lab, tool: &str, file: &str) -> String {
    let answer = lab.run(Path::new(tool), &[file], b"", &Limits::default());
    answer.out.split_whitespace().next().expect(tool).into()
}

/// A server with this file.
fn web(lab: &Lab, file: &str) -> Web {
    served(lab, file, Behaviour::default())
}

#[test]
fn images_come_from_anywhere() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(5 << 20);
    for (nth, compressor) in ["cat", "gzip -c", "zstd -qc", "xz -c -1", "bzip2 -c"]
        .iter()
        .enumerate()
    {
        for file in ["x.raw", "x.qcow2"] {
            lab.shell(&format!("{compressor} {file} > packed"))
                .ok(compressor);
            let web = web(&lab, "packed");
            let url = web.url();
            let sha256 = sum(&lab, "sha256sum", "packed");
            let target = ["raw", "qcow2"][nth % 2];
            for source in part(2, rotated([&*url, "packed"], nth / 2)) {
                let args = ["--sha256", &sha256, "-O", target, source];
                let verdict = import(&lab, &args, 0);
                let compare = ["compare", "-f", target, "-F", "raw", "out", "x.raw"];
                lab.qemu_img(&compare).ok(compressor);
                let name = compressor.split(' ').next().unwrap();
                let compression = if name == "cat" { "none" } else { name };
                assert_eq!(verdict["compression"], compression);
                assert_eq!(verdict["format"], &file[2..]);
                assert_eq!(verdict["virtual-size"], 5 << 20);
                assert_eq!(verdict["checksums"]["sha256"], sha256);
                assert_eq!(verdict["verified"][0], "sha256");
                let length = |file| fs::metadata(lab.path(file)).unwrap().len();
                assert_eq!(verdict["bytes-read"], length("packed"));
                assert_eq!(verdict["image-bytes"], length(file));
            }
            let script = format!("cat packed | \"$0\" import -O {target} - piped");
            verdict(&lab.shell(&script), 0);
            lab.qemu_img(&["compare", "-f", target, "-F", "raw", "piped", "x.raw"])
                .ok("from a pipe");
            fs::remove_file(lab.path("piped")).unwrap();
        }
    }
    // Into what is there, which is longer and not zero.
    fs::write(lab.path("old"), vec![0xaa; 7 << 20]).unwrap();
    verdict(&lab.zebu(&["import", "x.qcow2", "old"]), 0);
    lab.assert_same_bytes("old", "x.raw", "into a file that was there");
}

#[test]
fn checksums_are_verified() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(12 << 20);
    for file in ["x.raw", "x.qcow2"] {
        let web = web(&lab, file);
        let url = web.url();
        let (sha256, sha512) = (sum(&lab, "sha256sum", file), sum(&lab, "sha512sum", file));
        let upper = sha512.to_uppercase();
        let verdict = import(&lab, &["--sha512", &upper, "--sha256", &sha256, &url], 0);
        assert_eq!(verdict["verified"].as_array().unwrap().len(), 2);
        assert_eq!(verdict["checksums"]["sha512"], sha512);
        // Lists, as the tools write them, here and on a server. The URL's name is `object`.
        fs::copy(lab.path(file), lab.path("object")).unwrap();
        for tool in ["sha256sum", "sha512sum", "sha256sum --tag", "sha256sum -b"] {
            let script = format!("({tool} x.raw x.qcow2; {tool} ./object) > sums");
            lab.shell(&script).ok(tool);
            let list = served(&lab, "sums", Behaviour::default());
            for sums in ["sums", &list.url()] {
                let verdict = import(&lab, &["--sums", sums, &url], 0);
                assert_eq!(verdict["verified"][0], tool[..9].trim_end_matches("sum"));
                import(&lab, &["--sums", sums, file], 0);
            }
        }
        // Another byte, also the last one, and one less.
        let wrong = sum(&lab, "sha256sum", "sums");
        let verdict = import(&lab, &["--sha256", &wrong, &url], 3);
        says(&verdict, &wrong);
        says(&verdict, &sha256);
        assert_eq!(verdict["verified"].as_array().unwrap().len(), 0);
        for other in ["x.raw", "x.qcow2"] {
            if other != file {
                let args = ["--sha512", &sum(&lab, "sha512sum", other), file];
                import(&lab, &args, 3);
            }
        }
        fs::write(lab.path("old"), vec![7; 1 << 20]).unwrap();
        let answer = lab.zebu(&["import", "-O", "qcow2", "--sha256", &wrong, file, "old"]);
        self::verdict(&answer, 3);
        // An image with tables is verified before the target is touched.
        let left = if file == "x.raw" { 0 } else { 1 << 20 };
        assert_eq!(fs::read(lab.path("old")).unwrap(), vec![7; left]);
        lab.shell("sha256sum x.raw x.qcow2 > sums").ok("sums");
        says(
            &import(&lab, &["--sums", "sums", &url], 3),
            "none for 'object'",
        );
        let gone = served(
            &lab,
            "sums",
            Behaviour {
                status: Some(404),
                ..Behaviour::default()
            },
        );
        import(&lab, &["--sums", &gone.url(), &url], 5);
        says(&import(&lab, &["--sums", "sums", "-"], 1), "has a name");
    }
}

#[test]
fn images_that_name_files_are_refused() {
    if beyond_qemu("import") {
        return;
    }
    let lab = Lab::new();
    fs::write(lab.path("secret"), vec![0x5a; 1 << 20]).unwrap();
    lab.qemu_img(&[
        "create", "-f", "qcow2", "-b", "secret", "-F", "raw", "backed",
    ])
    .ok("backed");
    lab.qemu_img(&[
        "create",
        "-f",
        "qcow2",
        "-o",
        "data_file=data",
        "with-data",
        "1M",
    ])
    .ok("with-data");
    let descriptor = "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\n\
                      createType=\"monolithicFlat\"\n\nRW 2048 FLAT \"secret\" 0\n";
    fs::write(lab.path("vmdk"), descriptor).unwrap();
    for (image, key, name) in [
        ("backed", "backing-file", "secret"),
        ("with-data", "data-file", "data"),
    ] {
        let verdict = import(&lab, &[image], 2);
        assert_eq!(verdict[key], name, "{verdict:#}");
        says(&verdict, "may not open");
        lab.shell(&format!("gzip -c {image} > packed")).ok("gzip");
        let web = web(&lab, "packed");
        let verdict = import(&lab, &["-O", "qcow2", "--spill", ".", &web.url()], 2);
        assert_eq!(verdict[key], name);
        assert_eq!(verdict["compression"], "gzip");
    }
    for options in [&[][..], &["--spill", "."]] {
        let verdict = import(&lab, &[options, &["vmdk"]].concat(), 2);
        assert_eq!(verdict["format"], "vmdk");
    }
    // The target that was there is as it was.
    fs::write(lab.path("old"), "before").unwrap();
    verdict_of_old(&lab, "backed");
    verdict_of_old(&lab, "with-data");
}

/// Imports what is refused into a file that is there.
#[track_caller]
fn verdict_of_old(lab: &Lab, image: &str) {
    verdict(&lab.zebu(&["import", image, "old"]), 2);
    assert_eq!(fs::read(lab.path("old")).unwrap(), b"before");
}

#[test]
fn archives_are_no_disks() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(1 << 20);
    lab.zebu(&["ova", "--output", "x.ova", "x.qcow2"]).ok("ova");
    fs::write(lab.path("old"), "before").unwrap();
    for format in ["ustar", "gnu", "pax", "v7"] {
        lab.shell(&format!("tar --format={format} -cf x.{format} x.raw"))
            .ok(format);
    }
    for archive in ["x.ova", "x.ustar", "x.gnu", "x.pax", "x.v7"] {
        for compressor in ["cat", "gzip -c", "zstd -qc", "xz -c", "bzip2 -c"] {
            lab.shell(&format!("{compressor} {archive} > packed"))
                .ok(compressor);
            let verdict = import(&lab, &["packed"], 2);
            says(&verdict, "'zebu convert FILE.ova --disk N'");
        }
        let web = web(&lab, archive);
        says(&import(&lab, &[&web.url()], 2), "is a tar archive");
        verdict_of_old(&lab, archive);
        // So it is whenever the format of an untrusted image is guessed, and only then.
        fs::copy(lab.path(archive), lab.path("x.img")).unwrap();
        for script in [
            "info x.img",
            "convert x.img new",
            "convert - new < x.img",
            "map x.img",
        ] {
            let (command, rest) = script.split_once(' ').unwrap();
            let strict = lab.shell(&format!("\"$0\" {command} --untrusted {rest}"));
            strict.fails_with("is a tar archive");
            assert!(!lab.path("new").exists(), "{script}");
        }
        lab.zebu(&["convert", "x.img", "new"])
            .fails_with("is a tar archive");
        lab.zebu(&["convert", "--untrusted", "-f", "raw", "x.img", "new"])
            .ok("the user's word");
        import(&lab, &["-f", "raw", archive], 0);
        lab.assert_same_bytes("out", archive, "the user's word");
        fs::remove_file(lab.path("new")).unwrap();
    }
}

#[test]
fn damaged_images_are_refused() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(4 << 20);
    let whole = fs::read(lab.path("x.qcow2")).unwrap();
    fs::write(lab.path("cut"), &whole[..whole.len() - 70_000]).unwrap();
    import(&lab, &["cut"], 2);
    lab.shell("gzip -c x.raw > gz; head -c 100000 gz > cut.gz; (cat gz; echo x) > more.gz")
        .ok("gzip");
    says(&import(&lab, &["cut.gz"], 2), "cut off");
    says(&import(&lab, &["more.gz"], 2), "followed by something else");
    fs::write(lab.path("empty"), "").unwrap();
    says(&import(&lab, &["empty"], 2), "empty");
    fs::write(
        lab.path("luks"),
        [b"LUKS\xba\xbe\0\x01".as_slice(), &[0; 4096]].concat(),
    )
    .unwrap();
    import(&lab, &["luks"], 2);
    // An image of another format is verified before the target is touched.
    lab.qemu_img(&["convert", "-f", "raw", "-O", "vdi", "x.raw", "x.vdi"])
        .ok("vdi");
    lab.shell("gzip -c x.vdi > vdi.gz").ok("gzip");
    says(&import(&lab, &["vdi.gz"], 7), "--spill");
    for args in [&["--spill", ".", "vdi.gz"][..], &["x.vdi"]] {
        let verdict = import(&lab, args, 0);
        assert_eq!(verdict["format"], "vdi");
        assert_eq!(verdict["virtual-size"], 4 << 20);
        lab.assert_same_bytes("out", "x.raw", "vdi");
    }
    fs::write(lab.path("old"), "before").unwrap();
    let wrong = sum(&lab, "sha256sum", "x.raw");
    let args = ["import", "--spill", ".", "--sha256", &wrong, "x.vdi", "old"];
    self::verdict(&lab.zebu(&args), 3);
    assert_eq!(fs::read(lab.path("old")).unwrap(), b"before");
    let args = ["--spill", ".", "--spill-size", "1M", "vdi.gz"];
    says(&import(&lab, &args, 4), "may be kept");
}

/// A file is read by its tables, wherever they are; a stream must be kept.
#[test]
fn files_need_no_spill() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(12 << 20);
    // The tables of the disk come after data of which a snapshot has others.
    lab.zebu(&["snapshot", "-c", "first", "x.qcow2"])
        .ok("snapshot");
    let write = "write -P 7 0 12M";
    lab.zebu_io(&["-c", write, "x.qcow2"]).ok("write");
    lab.zebu_io(&["-f", "raw", "-c", write, "x.raw"])
        .ok("write");
    for format in ["vdi", "vhdx", "vmdk"] {
        let name = format!("x.{format}");
        lab.qemu_img(&["convert", "-O", format, "x.qcow2", &name])
            .ok(format);
    }
    for file in ["x.qcow2", "x.vdi", "x.vhdx", "x.vmdk"] {
        let sha256 = sum(&lab, "sha256sum", file);
        for target in ["raw", "qcow2"] {
            let verdict = import(&lab, &["--sha256", &sha256, "-O", target, file], 0);
            lab.zebu(&["compare", "out", "x.raw"]).ok(file);
            let length = fs::metadata(lab.path(file)).unwrap().len();
            assert_eq!(verdict["bytes-read"], length);
            assert_eq!(verdict["image-bytes"], length);
            assert_eq!(verdict["checksums"]["sha256"], sha256);
            assert_eq!(verdict["verified"][0], "sha256");
        }
        let wrong = sha256.replace(|c: char| c.is_ascii_digit(), "0");
        import(&lab, &["--sha256", &wrong, file], 3);
    }
    let piped = lab.shell("cat x.vdi | \"$0\" import - out");
    says(&verdict(&piped, 7), "--spill");
}

/// What is converted is what was verified.
/// The L1 table behind all that it maps.
fn put_tables_last(lab: &Lab, image: &str) {
    let mut bytes = fs::read(lab.path(image)).unwrap();
    let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let (table, entries) = (number(40), number(32) & 0xffff_ffff);
    let table = bytes[table..table + entries * 8].to_vec();
    bytes.resize(bytes.len().next_multiple_of(65536), 0);
    let end = bytes.len() as u64;
    bytes[40..48].copy_from_slice(&end.to_be_bytes());
    bytes.extend(table);
    bytes.resize(bytes.len().next_multiple_of(65536), 0);
    fs::write(lab.path(image), bytes).unwrap();
}

/// An image whose tables come late is sound: it is read by ranges, or it has a status of its own.
#[test]
fn late_tables_are_no_damage() {
    if beyond_qemu("import") {
        return;
    }
    let lab = Lab::new();
    let disk: Vec<u8> = (0..36u64 << 20).map(|at| (at >> 9) as u8 | 1).collect();
    fs::write(lab.path("x.raw"), disk).unwrap();
    lab.zebu(&["convert", "-f", "raw", "-O", "qcow2", "x.raw", "x.qcow2"])
        .ok("an image");
    put_tables_last(&lab, "x.qcow2");
    let sha256 = sum(&lab, "sha256sum", "x.qcow2");
    let web = web(&lab, "x.qcow2");
    let url = web.url();
    let verdict = import(&lab, &[&url], 0);
    assert_eq!(verdict["format"], "qcow2");
    lab.assert_same_bytes("out", "x.raw", "by ranges");
    // What is verified is read once and in order.
    for args in [&["--sha256", &sha256, &url][..], &["-"]] {
        let pipe = if *args == ["-"] { "cat x.qcow2 |" } else { "" };
        let script = format!("{pipe} $0 import {} out", args.join(" "));
        let _ = fs::remove_file(lab.path("out"));
        says(&self::verdict(&lab.shell(&script), 7), "--spill");
        assert!(!lab.path("out").exists());
        let script = script.replace("import", "import --spill .");
        self::verdict(&lab.shell(&script), 0);
        lab.assert_same_bytes("out", "x.raw", "kept in a file");
    }
    // Other formats are read by ranges, too.
    lab.zebu(&["convert", "-f", "raw", "-O", "vdi", "x.raw", "x.vdi"])
        .ok("VDI");
    let web = self::web(&lab, "x.vdi");
    import(&lab, &[&web.url()], 0);
    lab.assert_same_bytes("out", "x.raw", "VDI");
    import(&lab, &["--max-download", "1M", &web.url()], 4);
}

#[test]
fn a_file_that_changes_is_refused() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(48 << 20);
    let (end, ended) = mpsc::channel::<()>();
    let verdict = std::thread::scope(|scope| {
        let lab = &lab;
        scope.spawn(move || {
            let file = fs::File::options().write(true).open(lab.path("x.qcow2"));
            let file = file.unwrap();
            // Until the other end is dropped, also by a panic.
            while ended.recv_timeout(Duration::from_millis(5)) == Err(RecvTimeoutError::Timeout) {
                file.set_modified(std::time::SystemTime::now()).unwrap();
            }
        });
        let verdict = import(lab, &["x.qcow2"], 5);
        drop(end);
        verdict
    });
    says(&verdict, "was changed while it was read");
}

#[test]
fn limits_hold() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(8 << 20);
    // A disk of zeroes is small when it is compressed.
    lab.shell(
        "truncate -s 2G zeroes; zstd -qc zeroes > bomb.zst; head -c 64M zeroes | gzip -c > bomb.gz",
    )
    .ok("bombs");
    lab.qemu_img(&["create", "-f", "qcow2", "big.qcow2", "1T"])
        .ok("big");
    let limits: [(&[&str], &str); 9] = [
        (
            &["--max-virtual-size", "1G", "bomb.zst"],
            "--max-virtual-size",
        ),
        (
            &["--max-virtual-size", "1G", "-O", "qcow2", "bomb.zst"],
            "--max-virtual-size",
        ),
        (&["--max-download", "1G", "bomb.zst"], "--max-download"),
        (
            &["--max-virtual-size", "67108863", "bomb.gz"],
            "--max-virtual-size",
        ),
        (&["--max-virtual-size", "1G", "big.qcow2"], "'virtual-size'"),
        (
            &["--untrusted=virtual-size=1G", "big.qcow2"],
            "'virtual-size'",
        ),
        (&["--max-download", "1M", "x.qcow2"], "--max-download"),
        (
            &["--max-download", "1M", "-O", "qcow2", "x.raw"],
            "--max-download",
        ),
        (&["--max-cpu", "1", "/dev/zero"], "--max-cpu"),
    ];
    for (args, text) in limits {
        says(&import(&lab, args, 4), text);
    }
    import(
        &lab,
        &[
            "--max-virtual-size",
            "64M",
            "--max-download",
            "64M",
            "bomb.gz",
        ],
        0,
    );
    let server = web(&lab, "x.raw");
    says(
        &import(&lab, &["--max-download", "1M", &server.url()], 4),
        "--max-download",
    );
    assert!(server.bytes() < 2 << 20);
    // Time, wherever it is spent.
    for stalls_after in [1, 100_000, 3 << 20] {
        let stalling = served(
            &lab,
            "x.raw",
            Behaviour {
                stalls_after,
                ranges: false,
                ..Behaviour::default()
            },
        );
        let begun = Instant::now();
        says(
            &import(&lab, &["--max-time", "1", &stalling.url()], 4),
            "--max-time",
        );
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{:?}",
            begun.elapsed()
        );
    }
}

#[test]
fn sources_that_cannot_be_read_are_errors() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(24 << 20);
    let with = |behaviour| served(&lab, "x.raw", behaviour);
    let plain = Behaviour::default;
    import(&lab, &["nothing"], 5);
    import(&lab, &["http://127.0.0.1:1/x"], 5);
    let missing = with(Behaviour {
        status: Some(404),
        ..plain()
    });
    says(&import(&lab, &[&missing.url()], 5), "404");
    let unknown = with(Behaviour {
        ranges: false,
        length: false,
        ..plain()
    });
    says(&import(&lab, &[&unknown.url()], 5), "length");
    let huge = with(Behaviour {
        header: Some(format!("X-Long: {}", "x".repeat(4 << 20))),
        ..plain()
    });
    import(&lab, &["--max-time", "60", &huge.url()], 5);
    // One that cuts is asked again, with ranges and without.
    for ranges in [true, false] {
        let cuts = with(Behaviour {
            cut: 3,
            ranges,
            ..plain()
        });
        import(&lab, &[&cuts.url()], 0);
        lab.assert_same_bytes("out", "x.raw", "cuts");
    }
    // One that ends in the middle, or has another image then.
    type Change = fn(&mut Behaviour);
    let changes: [(Change, &str); 2] = [
        (|behaviour| behaviour.status = Some(404), "404"),
        (
            |behaviour| behaviour.etag = Some("\"second\"".into()),
            "has changed",
        ),
    ];
    for (change, text) in changes {
        let web = with(Behaviour {
            delay: Duration::from_millis(20),
            ..plain()
        });
        let url = web.url();
        let options = format!("driver=http,url={url},connections=1,readahead=64k");
        let _ = fs::remove_file(lab.path("out"));
        let answer = std::thread::scope(|scope| {
            let lab = &lab;
            let importing =
                scope.spawn(move || lab.zebu(&["import", "--image-opts", &options, "out"]));
            wait_until("some bytes", || web.bytes() > 2 << 20);
            web.change(change);
            importing.join().unwrap()
        });
        says(&verdict(&answer, 5), text);
        assert!(!lab.path("out").exists());
    }
}

#[test]
fn targets_that_cannot_be_written_are_errors() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(8 << 20);
    let answer = lab.zebu(&["import", "x.raw", "nowhere/out"]);
    says(&verdict(&answer, 6), "No such file");
    // One that is in use is left alone.
    lab.make("create old 1M");
    let before = fs::read(lab.path("old")).unwrap();
    let held = lab.held_by_zebu(&["-f", "qcow2", "old"]);
    let answer = lab.zebu(&["import", "x.raw", "old"]);
    assert_eq!(answer.status, 6, "{answer:#?}");
    assert!(answer.out.contains("lock"), "{answer:#?}");
    drop(held);
    assert!(fs::read(lab.path("old")).unwrap() == before);
    for existed in [false, true] {
        for format in ["raw", "qcow2"] {
            for preallocation in ["off", "metadata", "falloc", "full"] {
                for blocks in [1, 200, 2000] {
                    does_not_fit(&lab, existed, format, preallocation, blocks);
                }
            }
        }
    }
    let refused: [(&[&str], &str); 8] = [
        (&["x.raw", "x.raw"], "same file"),
        (&["x.raw", "nbd://host/x"], "a file or a block device"),
        (&["x.raw", "-"], "a file or a block device"),
        (&["-O", "vdi", "x.raw", "out"], "raw or qcow2"),
        (&["--sha256", "12", "x.raw", "out"], "no sha256 checksum"),
        (&["--max-time", "0", "x.raw", "out"], "time limit"),
        (
            &["-o", "backing_file=x.raw", "-O", "qcow2", "x.raw", "out"],
            "'backing_file'",
        ),
        (&["x.raw"], "a source and a target"),
    ];
    for (args, text) in refused {
        let answer = lab.zebu(&[&["import"], args].concat());
        assert_eq!(answer.status, 1, "{answer:#?}");
        assert!(answer.err.contains(text), "{text}: {answer:#?}");
        assert!(!lab.path("out").exists());
    }
    assert_eq!(fs::metadata(lab.path("x.raw")).unwrap().len(), 8 << 20);
    let help = lab.zebu(&["import", "--help"]).ok("help");
    assert!(help.out.contains("Exit status:"), "{help:#?}");
}

/// No part of an image stays of one that is longer than files may be.
fn does_not_fit(lab: &Lab, existed: bool, format: &str, preallocation: &str, blocks: u32) {
    if (format, preallocation) == ("raw", "metadata") {
        return;
    }
    if existed {
        fs::write(lab.path("out"), [7; 3000]).unwrap();
    }
    let script = format!(
        "ulimit -f {blocks}; \"$0\" import -O {format} -o preallocation={preallocation} x.raw out"
    );
    verdict(&lab.shell(&script), 6);
    match fs::read(lab.path("out")) {
        Ok(left) => assert!(existed && left.is_empty(), "{script}: {} bytes", left.len()),
        Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::NotFound, "{script}"),
    }
    let _ = fs::remove_file(lab.path("out"));
}

#[test]
fn a_signal_leaves_no_image() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(16 << 20);
    let cases = [
        (100, "raw"),
        (5 << 20, "raw"),
        (5 << 20, "qcow2"),
        (100, "qcow2"),
    ];
    for (nth, (stalls_after, format)) in cases.into_iter().enumerate() {
        let web = served(
            &lab,
            "x.raw",
            Behaviour {
                stalls_after,
                ranges: false,
                ..Behaviour::default()
            },
        );
        let (number, status) = STOPS[nth];
        let url = web.url();
        let child = start(&lab, &["import", "-f", "raw", "-O", format, &url, "out"]);
        wait_until("bytes", || web.bytes() >= stalls_after);
        std::thread::sleep(Duration::from_millis(300));
        // SAFETY: the child was not waited for, so the id is its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, number) }, 0);
        let output = child.wait_with_output().unwrap();
        let answer = Answer {
            status: output.status.code().unwrap_or(255),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        };
        verdict(&answer, status);
        assert!(!lab.path("out").exists(), "{format}");
    }
}

#[test]
fn a_verdict_that_is_lost_is_an_error() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(1 << 20);
    // Noticed before anything is done.
    for (redirection, text) in [
        (">&-", "standard output: Bad file descriptor"),
        (">>out", "goes to this file"),
    ] {
        fs::write(lab.path("out"), "before").unwrap();
        let answer = lab.shell(&format!("\"$0\" import x.qcow2 out {redirection}"));
        answer.fails_with(text);
        assert_eq!(
            fs::read(lab.path("out")).unwrap(),
            b"before",
            "{redirection}"
        );
    }
    // The second one has no reader any more.
    for redirection in [">/dev/full", "> >(exit)"] {
        let script = format!("exec {redirection}; sleep 0.5; \"$0\" import x.qcow2 out");
        let answer = lab.shell(&script);
        assert_eq!(answer.status, 1, "{answer:#?}");
        let is_told = answer.err.ends_with("; the image is in 'out'\n");
        assert!(is_told && answer.err.contains("the verdict"), "{answer:#?}");
        lab.assert_same_bytes("out", "x.raw", redirection);
    }
    let script = "\"$0\" import --max-download 1k x.qcow2 out >/dev/full";
    let answer = lab.shell(script);
    assert_eq!(answer.status, 4, "{answer:#?}");
    assert!(answer.err.contains("the verdict"), "{answer:#?}");
}

#[test]
fn a_device_holds_a_disk_or_none() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(4 << 20);
    let device = lab.shell("truncate -s 8M device; losetup -f --show device");
    if device.status != 0 {
        println!("skipped: no loop devices");
        return;
    }
    let device = device.out.trim();
    let imports = [
        (&["x.qcow2", device][..], 0),
        (&["--sha256", &"0".repeat(64), "x.raw", device], 3),
        (&["--max-download", "1M", "x.raw", device], 4),
    ];
    let answers = imports.map(|(args, status)| {
        let answer = lab.zebu(&[&["import"], args].concat());
        (answer, status, fs::read(device).unwrap())
    });
    // Larger than the device, which is known before anything is written.
    lab.make("create large.qcow2 9M");
    fs::write(device, vec![9; 8 << 20]).unwrap();
    let untouched = lab.zebu(&["import", "-O", "raw", "large.qcow2", device]);
    let left = fs::read(device).unwrap();
    // Larger than the device, which is told at the end of a stream only.
    let large = lab.shell(&format!("cat x.raw x.raw x.raw | \"$0\" import - {device}"));
    lab.shell(&format!("losetup -d {device}")).ok("losetup");
    for (answer, status, bytes) in &answers {
        verdict(answer, *status);
        let disk = fs::read(lab.path("x.raw")).unwrap();
        let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        match status {
            0 => assert!(bytes.starts_with(&disk)),
            _ => assert!(is_zero(&bytes[..1 << 20]) && is_zero(&bytes[7 << 20..])),
        }
    }
    says(&verdict(&large, 6), "of the target");
    says(&verdict(&untouched, 6), "Cannot grow device files");
    assert!(left == vec![9; 8 << 20]);
}

#[test]
fn memory_is_bounded() {
    if beyond_qemu("import") {
        return;
    }
    let lab = images(128 << 20);
    let limits = [
        ("x.raw", "", 144),
        ("x.qcow2", "", 144),
        ("x.zst", "zstd -qc --long=27 x.raw > x.zst", 288),
        ("x.xz", "xz -c -0 x.raw > x.xz", 224),
    ];
    for (file, pack, most) in part(2, limits) {
        lab.shell(pack).ok("packed");
        let web = web(&lab, file);
        let peak = lab.peak_of(&[], &["import", &web.url(), "out"]);
        println!("{file}: {peak} KiB");
        assert!(peak < most << 10, "{file}: {peak} KiB");
    }
}
