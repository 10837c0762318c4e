//! Appliances: those that `ova` makes must be read by tar, QEMU and zebu; those of other programs by
//! zebu. Damaged and malicious ones must be refused.
//!

use std::fs;
use std::process::Command;

use crate::common::vmdk::content;
use crate::common::{Lab, Rng, beyond_qemu, cases, compare_answers};

/// Runs a program of the system in a folder of the lab and returns its output.
#[track_caller]
fn run(lab: &Lab, folder: &str, program: &str, args: &[&str]) -> String {
    let output = Command::new(program)
        .args(args)
        .current_dir(lab.path(folder))
        .output()
        .expect(program);
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A descriptor of disks with these files, each of which has a format's URI.
fn descriptor(disks: &[(&str, &str)]) -> String {
    let (mut files, mut entries) = (String::new(), String::new());
    for ((href, format), nth) in disks.iter().zip(1..) {
        files += &format!("<File ovf:href='{href}' ovf:id='f{nth}' ovf:size='0'/>\n");
        entries += &format!(
            "<Disk ovf:capacity='1' ovf:capacityAllocationUnits='byte * 2^20' ovf:diskId='d{nth}' \
             ovf:fileRef='f{nth}' ovf:format='{format}'/>\n"
        );
    }
    format!(
        "<?xml version='1.0' encoding='UTF-8'?>\n<!-- made by hand -->\n\
         <Envelope xmlns='http://schemas.dmtf.org/ovf/envelope/1' \
         xmlns:ovf='http://schemas.dmtf.org/ovf/envelope/1'>\n<References>\n{files}</References>\n\
         <DiskSection><Info>x</Info>\n{entries}</DiskSection>\n\
         <VirtualSystem ovf:id='vm'><Name>by hand</Name></VirtualSystem></Envelope>\n"
    )
}

const VMDK: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";

/// Makes `x.ova` by hand, of a disk of 1 MiB that is also `src.raw`.
fn by_hand(lab: &Lab, format: &str, disk: &str) {
    let mut random = Rng::new(7);
    let _ = fs::remove_dir_all(lab.path("in"));
    fs::create_dir(lab.path("in")).unwrap();
    fs::write(lab.path("src.raw"), content(&mut random, 1 << 20)).unwrap();
    let options = "subformat=streamOptimized";
    let target = format!("in/{disk}");
    if let Some((folder, _)) = target.rsplit_once('/') {
        fs::create_dir_all(lab.path(folder)).unwrap();
    }
    lab.qemu_img(&["convert", "-O", "vmdk", "-o", options, "src.raw", &target])
        .ok("a disk");
    fs::write(lab.path("in/a.ovf"), descriptor(&[(disk, VMDK)])).unwrap();
    let mut manifest = String::new();
    for name in ["a.ovf", disk] {
        let sum = run(lab, "in", "sha1sum", &[name]);
        let digits = sum.split(' ').next().unwrap();
        manifest += &format!("SHA1({name})= {digits}\r\n");
    }
    fs::write(lab.path("in/a.mf"), manifest).unwrap();
    let format = format!("--format={format}");
    run(
        lab,
        "in",
        "tar",
        &[&format, "-cf", "../x.ova", "a.ovf", disk, "a.mf"],
    );
}

#[test]
fn new_appliances_are_read_by_all() {
    if beyond_qemu("it has no appliances") {
        return;
    }
    let lab = Lab::new();
    let mut random = Rng::new(5);
    let sizes = [3_000_320, 1 << 20, 512];
    for (size, nth) in sizes.iter().zip(1..) {
        let name = format!("src{nth}.raw");
        fs::write(lab.path(&name), content(&mut random, *size)).unwrap();
    }
    lab.zebu(&["convert", "-O", "qcow2", "src2.raw", "two.qcow2"])
        .ok("a source");
    // What the file held before is gone.
    fs::write(lab.path("w&b.ova"), vec![b'x'; 9 << 20]).unwrap();
    let make = [
        "ova",
        "--output",
        "w&b.ova",
        "--cpus",
        "2",
        "src1.raw",
        "two.qcow2",
        "src3.raw",
    ];
    lab.zebu(&make).ok("an appliance");
    fs::create_dir(lab.path("out")).unwrap();
    let names = run(&lab, "out", "tar", &["-xvf", "../w&b.ova"]);
    let expected = [
        "w&b.ovf",
        "w&b.mf",
        "w&b-disk1.vmdk",
        "w&b-disk2.vmdk",
        "w&b-disk3.vmdk",
    ];
    assert_eq!(names.lines().collect::<Vec<_>>(), expected);
    let manifest = fs::read_to_string(lab.path("out/w&b.mf")).unwrap();
    for (line, name) in manifest
        .lines()
        .zip(["w&b.ovf"].iter().chain(&expected[2..]))
    {
        let sum = run(&lab, "out", "sha256sum", &[name]);
        let digits = sum.split(' ').next().unwrap();
        assert_eq!(line, format!("SHA256({name})= {digits}"));
    }
    let text = fs::read_to_string(lab.path("out/w&b.ovf")).unwrap();
    let info = lab.zebu(&["info", "--output=json", "w&b.ova"]).ok("info");
    for (size, nth) in sizes.iter().zip(1..) {
        let (source, file) = (format!("src{nth}.raw"), format!("out/w&b-disk{nth}.vmdk"));
        let length = fs::metadata(lab.path(&file)).unwrap().len();
        lab.qemu_img(&["compare", "-f", "vmdk", "-F", "raw", &file, &source])
            .ok(&file);
        let what = format!("ovf:href=\"w&amp;b-disk{nth}.vmdk\" ovf:size=\"{length}\"");
        assert!(text.contains(&what), "{text}");
        assert!(text.contains(&format!("ovf:capacity=\"{size}\"")), "{text}");
        for key in [
            format!("\"number\": {nth}"),
            format!("\"virtual-size\": {size}"),
            format!("\"file-length\": {length}"),
            format!("\"file\": \"w&b-disk{nth}.vmdk\""),
        ] {
            assert!(info.out.contains(&key), "{key}: {}", info.out);
        }
        for appliance in ["w&b.ova", "out/w&b.ovf"] {
            let number = nth.to_string();
            let convert = [
                "convert", appliance, "--disk", &number, "-O", "raw", "back.raw",
            ];
            lab.zebu(&convert).ok(appliance);
            lab.assert_same_bytes("back.raw", &source, appliance);
        }
        let strict = [
            "--untrusted",
            "convert",
            "w&b.ova",
            "--disk",
            &nth.to_string(),
        ];
        lab.zebu(&[&strict[..], &["-O", "qcow2", "back.qcow2"]].concat())
            .ok("strict mode");
        lab.qemu_img(&["compare", "back.qcow2", &source])
            .ok("strict mode");
    }
    let info = lab.zebu(&["info", "w&b.ova"]);
    let start = "appliance: w&b.ova\nname: w&b\ndisk 1: w&b-disk1.vmdk\n    virtual size: 2.86 MiB \
                 (3000320 bytes)\n    file format: vmdk\n    file length: ";
    assert!(info.out.starts_with(start), "{}", info.out);
    assert!(info.out.contains("    checksum: SHA256\n"), "{}", info.out);
    // As qemu-img it is a raw disk, with a warning.
    let args = ["info", "-U", "w&b.ova"];
    let mut ours = lab.zebu_called("qemu-img", &args);
    assert!(ours.err.starts_with("WARNING: 'w&b.ova' is a tar archive"));
    ours.err.clear();
    compare_answers(&ours, &lab.qemu_img(&args), &args, "by the name qemu-img");
}

#[test]
fn archives_of_other_programs_are_read() {
    if beyond_qemu("it has no appliances") {
        return;
    }
    let lab = Lab::new();
    let long = format!("{}/{}.vmdk", "folder".repeat(20), "disk".repeat(30));
    for (format, disk) in [
        ("ustar", "disk one.vmdk"),
        ("gnu", "disk.vmdk"),
        ("gnu", &long),
        ("pax", &long),
        ("v7", "disk.vmdk"),
    ] {
        by_hand(&lab, format, disk);
        lab.zebu(&["convert", "x.ova", "--disk", "1", "-O", "raw", "back.raw"])
            .ok(format);
        lab.assert_same_bytes("back.raw", "src.raw", format);
        let info = lab.zebu(&["info", "x.ova"]);
        assert!(info.out.contains("name: by hand\n"), "{info:?}");
        assert!(info.out.contains("checksum: SHA1\n"), "{info:?}");
    }
    // Names that begin with a dot and a slash.
    by_hand(&lab, "gnu", "disk.vmdk");
    run(
        &lab,
        "in",
        "tar",
        &["-cf", "../x.ova", "./a.ovf", "./disk.vmdk", "./a.mf"],
    );
    lab.zebu(&["convert", "x.ova", "--disk", "1", "-O", "raw", "back.raw"])
        .ok("./");
    lab.assert_same_bytes("back.raw", "src.raw", "./");
}

#[test]
fn damaged_appliances_are_refused() {
    if beyond_qemu("it has no appliances") {
        return;
    }
    let lab = Lab::new();
    by_hand(&lab, "ustar", "disk.vmdk");
    let sound = fs::read(lab.path("x.ova")).unwrap();
    let convert = ["convert", "x.ova", "--disk", "1", "-O", "raw", "new.raw"];
    let mut harmless = 0;
    let mut seeds = cases(300, "damaged appliances");
    for number in &mut seeds {
        let mut random = Rng::new(number);
        let mut bytes = sound.clone();
        // Half of the changes in headers and texts.
        let most = match random.below(2) {
            0 => 4096,
            _ => bytes.len() as u64,
        };
        let at = random.below(most) as usize;
        match random.below(4) {
            0 => bytes.truncate(at),
            1 => bytes[at] = b'0' + random.below(10) as u8,
            _ => bytes[at] ^= 1 << random.below(8),
        }
        fs::write(lab.path("x.ova"), &bytes).unwrap();
        let _ = fs::remove_file(lab.path("new.raw"));
        let answer = lab.zebu(&convert);
        let what = format!("damage {number} at {at}");
        answer.orderly(&what);
        match answer.status {
            0 => {
                // A field that does not matter, or padding.
                lab.assert_same_bytes("new.raw", "src.raw", &what);
                harmless += 1;
            }
            _ => {
                answer.failed_with_one_line(1, &what);
                assert!(!lab.path("new.raw").exists(), "{what}");
            }
        }
        lab.zebu(&["info", "x.ova"]).orderly(&what);
    }
    let count = seeds.done();
    assert!(
        harmless < count / 2 || !zebu_testkit::are_usual(),
        "{harmless} of {count}"
    );
    let mut bytes = sound.clone();
    let end = bytes.len() - 30_000;
    bytes[end] ^= 1;
    fs::write(lab.path("x.ova"), &bytes).unwrap();
    let answer = lab.zebu(&convert);
    answer.failed_with_one_line(1, "a changed disk");
    assert!(
        answer.err.contains("'disk.vmdk' is damaged: its SHA1 is "),
        "{answer:?}"
    );
}

/// Makes `x.ova` of files in `in`.
fn pack(lab: &Lab, files: &[(&str, &[u8])]) {
    let _ = fs::remove_dir_all(lab.path("in"));
    fs::create_dir(lab.path("in")).unwrap();
    let mut args = vec!["-cf", "../x.ova"];
    for (name, bytes) in files {
        fs::write(lab.path("in").join(name), bytes).unwrap();
        args.push(name);
    }
    run(lab, "in", "tar", &args);
}

#[test]
fn no_other_files_are_opened() {
    if beyond_qemu("it has no appliances") {
        return;
    }
    let lab = Lab::new();
    lab.make("raw secret.raw 1048576");
    lab.zebu(&["convert", "-O", "vmdk", "secret.raw", "secret.vmdk"])
        .ok("a disk");
    let absolute = lab.path("secret.vmdk");
    let convert = |name| ["convert", name, "--disk", "1", "-O", "raw", "new.raw"];
    let absolute_name = absolute.to_str().unwrap();
    for href in [
        absolute_name,
        "secret.vmdk",
        "../secret.vmdk",
        "..%2Fsecret.vmdk",
        "%2e%2e/secret.vmdk",
        "./%2e%2e%2fsecret.vmdk",
        &absolute_name.replace('/', "%2f"),
    ] {
        pack(&lab, &[("a.ovf", descriptor(&[(href, VMDK)]).as_bytes())]);
        let answer = lab.zebu(&convert("x.ova"));
        answer.failed_with_one_line(1, href);
        assert!(answer.err.contains("There is no '"), "{answer:?}");
        fs::create_dir_all(lab.path("below")).unwrap();
        fs::write(lab.path("below/a.ovf"), descriptor(&[(href, VMDK)])).unwrap();
        let answer = lab.zebu(&convert("below/a.ovf"));
        answer.failed_with_one_line(1, href);
        assert!(!lab.path("new.raw").exists());
    }
    // A disk that names another file.
    let extents = "createType=\"monolithicFlat\"\nCID=1\nparentCID=ffffffff\n";
    let flat = format!(
        "# Disk\nversion=1\n{extents}RW 2048 FLAT \"{}\" 0\n",
        absolute.display()
    );
    let ovf = descriptor(&[("d.vmdk", VMDK)]);
    pack(
        &lab,
        &[("a.ovf", ovf.as_bytes()), ("d.vmdk", flat.as_bytes())],
    );
    lab.zebu(&convert("x.ova"))
        .failed_with_one_line(1, "a flat disk");
    // A descriptor beside its disks opens them, but not in strict mode.
    fs::write(lab.path("a.ovf"), descriptor(&[("secret.vmdk", VMDK)])).unwrap();
    lab.zebu(&convert("a.ovf")).ok("beside");
    lab.assert_same_bytes("new.raw", "secret.raw", "beside");
    for command in [&["info", "a.ovf"][..], &convert("a.ovf")] {
        let answer = lab.zebu(&[&["--untrusted"], command].concat());
        answer.failed_with_one_line(1, "strict mode");
        assert!(answer.err.contains("which is not opened"), "{answer:?}");
    }
    // A link in an archive.
    fs::remove_file(lab.path("in/d.vmdk")).unwrap();
    std::os::unix::fs::symlink(&absolute, lab.path("in/d.vmdk")).unwrap();
    run(&lab, "in", "tar", &["-cf", "../x.ova", "a.ovf", "d.vmdk"]);
    let answer = lab.zebu(&convert("x.ova"));
    answer.failed_with_one_line(1, "a link");
    assert!(
        answer.err.contains("is a link in the archive"),
        "{answer:?}"
    );
}

#[test]
fn names_are_decoded() {
    if beyond_qemu("it has no appliances") {
        return;
    }
    let lab = Lab::new();
    let (disk, other) = ([1; 4096], [2; 4096]);
    for (href, files) in [
        ("d%20%C3%a4.img", &[("d ä.img", disk)][..]),
        ("./d%20e.img", &[("d e.img", disk), ("d%20e.img", other)]),
        // Of programs that do not encode.
        ("d%20e.img", &[("d%20e.img", disk), ("d%2520e.img", other)]),
        ("100%.img", &[("100%.img", disk)]),
        ("d%ff.img", &[("d%ff.img", disk)]),
    ] {
        let ovf = descriptor(&[(href, "raw")]);
        // The manifest has names as they are.
        let (name, sum) = (files[0].0, "0".repeat(40));
        let wrong = format!("SHA1({name})= {sum}\n");
        let mut all = vec![("a.ovf", ovf.as_bytes())];
        all.extend(files.iter().map(|(name, bytes)| (*name, &bytes[..])));
        pack(&lab, &all);
        for appliance in ["x.ova", "in/a.ovf"] {
            lab.zebu(&["convert", appliance, "--disk", "1", "new.raw"])
                .ok(href);
            assert!(fs::read(lab.path("new.raw")).unwrap() == disk, "{href}");
        }
        all.push(("a.mf", wrong.as_bytes()));
        pack(&lab, &all);
        for appliance in ["x.ova", "in/a.ovf"] {
            let answer = lab.zebu(&["convert", appliance, "--disk", "1", "new.raw"]);
            answer.fails_with(&format!("'{name}' is damaged"));
        }
    }
    // What zebu makes is encoded where it would have two meanings.
    fs::write(lab.path("src.raw"), disk).unwrap();
    lab.zebu(&["ova", "--output", "a%20b c.ova", "src.raw"])
        .ok("make");
    let ovf = run(&lab, ".", "tar", &["-xOf", "a%20b c.ova", "a%20b c.ovf"]);
    assert!(ovf.contains("href=\"a%2520b c-disk1.vmdk\""), "{ovf}");
    lab.zebu(&["convert", "a%20b c.ova", "--disk", "1", "new.raw"])
        .ok("back");
    assert!(fs::read(lab.path("new.raw")).unwrap() == disk);
}

#[test]
fn what_cannot_be_read_or_made_is_said() {
    if beyond_qemu("it has no appliances") {
        return;
    }
    let lab = Lab::new();
    lab.make("raw src.raw 1048576; create q.qcow2 1M");
    let disk = fs::read(lab.path("src.raw")).unwrap();
    let ovf = descriptor(&[("a.img", "x"), ("b.img", VMDK)]);
    let packed = ovf.replace("ovf:id='f2'", "ovf:id='f2' ovf:compression='gzip'");
    let files = [
        ("a.ovf", packed.as_bytes()),
        ("a.img", &disk),
        ("b.img", &disk),
    ];
    pack(&lab, &files);
    let raw = [
        "convert", "x.ova", "--disk", "1", "-f", "raw", "-O", "raw", "new.raw",
    ];
    lab.zebu(&raw).ok("a format that is given");
    lab.assert_same_bytes("new.raw", "src.raw", "a format that is given");
    fs::write(lab.path("text.ova"), "no appliance").unwrap();
    run(&lab, ".", "mkfifo", &["fifo.ova"]);
    fs::write(lab.path("long.ovf"), vec![b' '; (16 << 20) + 1]).unwrap();
    for (args, says) in [
        (
            "convert x.ova --disk 0 -O raw y",
            "There is no disk 0; the appliance has 2",
        ),
        (
            "convert x.ova --disk 3 -O raw y",
            "There is no disk 3; the appliance has 2",
        ),
        (
            "convert x.ova --disk 1 -O raw y",
            "The format of disk 1 is not known",
        ),
        (
            "convert x.ova --disk 2 -O raw y",
            "it is compressed as a whole",
        ),
        (
            "convert x.ova x.ova --disk 1 -O raw y",
            "--disk takes one appliance",
        ),
        (
            "convert --image-opts x.ova --disk 1 -O raw y",
            "--disk takes one appliance",
        ),
        (
            "convert src.raw --disk 1 -O raw y",
            "Could not open 'src.raw'",
        ),
        (
            "convert missing.ova --disk 1 -O raw y",
            "No such file or directory",
        ),
        (
            "convert -U x.ova --disk 1 -f raw -O raw x.ova",
            "read from this file",
        ),
        ("info text.ova", "The descriptor is"),
        ("info fifo.ova", "is no regular file"),
        ("info long.ovf", "longer than 16 MiB"),
        ("ova src.raw", "Expecting the new appliance"),
        ("ova --output y.ova", "Expecting at least one disk"),
        ("ova --output src.raw src.raw", "read from this file"),
        ("ova --output y.ova missing", "No such file or directory"),
        (
            "ova --output y.ova --name a/b src.raw",
            "The name of an appliance",
        ),
        (
            "ova --output y.ova --level 10 src.raw",
            "10 is not in 1..=9",
        ),
        (
            "ova --output missing/y.ova src.raw",
            "No such file or directory",
        ),
        ("ova --output /dev/null src.raw", "a regular file"),
    ] {
        let words: Vec<&str> = args.split(' ').collect();
        let answer = lab.zebu(&words);
        assert!(
            answer.status == 1 && answer.err.contains(says),
            "{args}: {answer:?}"
        );
        assert!(!lab.path("y").exists(), "{args}");
    }
    assert_eq!(fs::read(lab.path("src.raw")).unwrap(), disk);
    // What is refused before the appliance begins leaves the file as it was.
    fs::write(lab.path("old.ova"), "old").unwrap();
    let answer = lab.zebu(&["ova", "--output", "old.ova", "--name", "a/b", "src.raw"]);
    answer.failed_with_one_line(1, "a wrong name");
    assert!(!answer.err.contains("incomplete"), "{answer:?}");
    assert_eq!(fs::read(lab.path("old.ova")).unwrap(), b"old");
}

#[test]
fn an_appliance_that_is_not_finished_does_not_open() {
    if beyond_qemu("it has no appliances") {
        return;
    }
    let lab = Lab::new();
    lab.make("create src.qcow2 64M; io src.qcow2: write -s noise 0 64M");
    lab.zebu(&["ova", "--output", "x.ova", "src.qcow2"])
        .ok("before");
    let mut child = lab.start_zebu(&["ova", "--output", "x.ova", "--level", "9", "src.qcow2"]);
    let start = std::time::Instant::now();
    let length = || fs::metadata(lab.path("x.ova")).unwrap().len();
    while length() > 32 << 20 || length() < 2 << 20 {
        assert!(
            start.elapsed() < crate::common::TIME_LIMIT,
            "nothing is written"
        );
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap();
    let ended = child.wait().unwrap();
    if ended.success() {
        println!("skipped: it has ended before");
        return;
    }
    lab.zebu(&["info", "x.ova"])
        .failed_with_one_line(1, "it was killed");
}

#[test]
fn files_of_the_source_are_no_targets() {
    if beyond_qemu("it has no appliances") {
        return;
    }
    let lab = Lab::new();
    lab.make("create src.qcow2 1M; io src.qcow2: write -P 1 0 64k");
    lab.zebu(&["ova", "--output", "x.ova", "src.qcow2"])
        .ok("make");
    let mut tar = Command::new("tar");
    let unpacked = tar.args(["xf", "x.ova"]).current_dir(lab.path("")).status();
    assert!(unpacked.expect("tar").success());
    for (source, targets) in [
        ("x.ova", &["x.ova"][..]),
        ("x.ovf", &["x.ovf", "x.mf", "x-disk1.vmdk"]),
    ] {
        for target in targets {
            let before = fs::read(lab.path(target)).unwrap();
            let answer = lab.zebu(&["convert", "--disk", "1", source, target]);
            assert_eq!(answer.status, 1, "{target}: {answer:?}");
            assert!(
                fs::read(lab.path(target)).unwrap() == before,
                "{target} has changed"
            );
        }
    }
}

/// One that is elsewhere is not read over the network; the message says so before anything is asked for.
#[test]
fn appliances_are_read_from_files() {
    if beyond_qemu("appliances") {
        return;
    }
    let lab = Lab::new();
    for name in [
        "http://127.0.0.1:1/a.ova",
        "https://x/a.ova",
        "s3://b/a.ova",
    ] {
        let answer = lab.zebu(&["convert", "--disk", "1", "-O", "raw", name, "out"]);
        let expected = format!(
            "zebu: '{name}': an appliance is read from a file\nhint: download it, and name the file\n"
        );
        assert_eq!((answer.status, answer.err), (1, expected));
        assert!(!lab.path("out").exists());
    }
}
