//! Guards against an incremental backup that misses changes: both programs must keep the same
//! bitmaps, in whatever order they add, change and read them.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::Command;

use crate::common::part;
use crate::common::rng::Rng;
use crate::common::server::{have, wait_until};
use crate::common::{Answer, Lab, Limits, comparable, peer};
use serde_json::{Value, json};

/// The dirty ranges of a bitmap, in bytes, as QEMU reads them.
#[track_caller]
pub fn dirty(lab: &Lab, file: &str, name: &str) -> Vec<Range<u64>> {
    let socket = lab.path("bitmap.sock");
    let _ = fs::remove_file(&socket);
    let mut server = Command::new(peer().nbd())
        .args(["-r", "-t", "-f", "qcow2", "-B", name, "-k"])
        .arg(&socket)
        .arg(file)
        .current_dir(lab.path(""))
        .spawn()
        .expect("qemu-nbd");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let args = ["--json", &map, &uri];
    let mut answer = None;
    wait_until("a map", || {
        let asked = lab.run(Path::new("nbdinfo"), &args, b"", &Limits::default());
        let ended = server.try_wait().expect("wait").is_some();
        let done = asked.status == 0 || ended;
        answer = Some(asked);
        done
    });
    let _ = server.kill();
    let _ = server.wait();
    let answer = answer.expect("asked").ok("nbdinfo");
    let map: Value = serde_json::from_str(&answer.out).expect("JSON");
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for extent in map.as_array().expect("extents") {
        let number = |key: &str| extent[key].as_u64().expect("a number");
        if number("type") & 1 == 0 {
            continue;
        }
        let (start, end) = (number("offset"), number("offset") + number("length"));
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    ranges
}

/// What `info` says of the bitmaps.
pub fn listed(answer: Answer) -> Value {
    let info: Value = serde_json::from_str(&answer.ok("info").out).expect("JSON");
    info["format-specific"]["data"]["bitmaps"].clone()
}

/// The bitmaps, of which both programs must say the same.
#[track_caller]
pub fn bitmaps(lab: &Lab, file: &str) -> Value {
    let args = ["info", "-U", "--output=json", file];
    let (ours, theirs) = (listed(lab.zebu(&args)), listed(lab.qemu_img(&args)));
    assert_eq!(ours, theirs, "bitmaps of {file}");
    ours
}

fn bitmap(name: &str, granularity: u64, flags: &[&str]) -> Value {
    json!({ "name": name, "granularity": granularity, "flags": flags })
}

/// A message without QEMU's name of a node, which is another one each time.
fn without_node(text: &str) -> String {
    let mut kept = text.to_string();
    for before in [" in '#block", " to #block"] {
        if let Some(at) = kept.find(before) {
            let rest = kept[at + before.len()..].trim_start_matches(|c: char| c.is_ascii_digit());
            kept = format!("{}{}", &kept[..at], rest.trim_start_matches('\''));
        }
    }
    kept
}

/// Runs a command in both folders; fails the test unless both programs say the same. Returns the
/// status.
#[track_caller]
fn same(ours: &Lab, theirs: &Lab, args: &[&str]) -> i32 {
    let (a, b) = (ours.zebu(args), theirs.qemu_img(args));
    a.orderly("zebu");
    for (ours, theirs) in [(&a.err, &b.err), (&a.out, &b.out)] {
        // Before QEMU 11 there is none.
        let ours = comparable(ours).replace(" --remove-all,", "");
        let theirs = without_node(&comparable(theirs)).replace(" --remove-all,", "");
        assert_eq!(ours, theirs, "{args:?}");
    }
    assert_eq!(a.status, b.status, "{args:?}");
    a.status
}

fn copy(from: &Lab, to: &Lab) {
    for entry in fs::read_dir(from.path("")).expect("list") {
        let entry = entry.expect("an entry");
        let name = entry.file_name();
        fs::copy(entry.path(), to.path(name.to_str().expect("UTF-8"))).expect("copy");
    }
}

/// Whether the tests of this file can run.
pub fn ready() -> bool {
    if !peer().is_current() {
        println!("skipped: an older QEMU has other words and rules");
    }
    peer().is_current() && have("nbdinfo")
}

const FILES: &str = "create a.q 10M; img bitmap --add a.q b0; img bitmap --add -g 4k a.q b1; \
    io a.q: write 0 4k | write 1M 1M; img bitmap --disable a.q b1; io a.q: write 9M 64k; \
    create other.q 10M; img bitmap --add -g 8k other.q b0; io other.q: write 4M 12k; \
    img bitmap --add other.q x; create small.q 5M; img bitmap --add small.q b0; \
    create large.q 20M; img bitmap --add large.q b0; create -o compat=0.10 old.q 10M; \
    raw disk.raw 1048576; create big.q 8T; create broken.q 10M; img bitmap --add broken.q b0; \
    img bitmap --add --disable broken.q b1; crash broken.q: write 0 4k; \
    img bitmap --add broken.q b2";

#[test]
fn every_action_is_as_in_qemu() {
    if !ready() {
        return;
    }
    let template = Lab::new();
    template.make(FILES);
    let (longest, too_long) = ("n".repeat(1023), "n".repeat(1024));
    let lists = [
        "bitmap",
        "bitmap a.q",
        "bitmap a.q b0",
        "bitmap --add",
        "bitmap --add a.q",
        "bitmap --add a.q b x",
        "bitmap --clear -g 4k a.q b0",
        "bitmap --add -F qcow2 a.q b0",
        "bitmap --add -b other.q a.q b2",
        "bitmap -g 1k -b other.q --clear a.q",
        "bitmap -F raw -b other.q --clear a.q",
        "bitmap -f qcow2 --image-opts --add a.q b2",
        "bitmap --add a.q b0",
        "bitmap --add a.q b2",
        "bitmap --add -f qcow2 a.q b2",
        "bitmap --add -f nonsense a.q b2",
        "bitmap --add -g 512 a.q b2",
        "bitmap --add -g 0 a.q b2",
        "bitmap --add -g 0x1000 a.q b2",
        "bitmap --add --granularity=2G a.q b2",
        "bitmap --add -g 4G a.q b2",
        "bitmap --add -g 256 a.q b2",
        "bitmap --add -g 1000 a.q b0",
        "bitmap --add -g -1 a.q b2",
        "bitmap --add -g 8E a.q b2",
        "bitmap --add -g x a.q b2",
        "bitmap --add -g 1k -g 8k a.q b2",
        "bitmap --add a.q LONGEST",
        "bitmap --add a.q TOO-LONG",
        "bitmap --add a.q EMPTY",
        "bitmap --remove a.q EMPTY",
        "bitmap --add -g 512 big.q b",
        "bitmap --add -g 2k big.q b",
        "bitmap --add old.q b",
        "bitmap --add -g 3 old.q b",
        "bitmap --remove old.q b",
        "bitmap --add disk.raw b",
        "bitmap --add -f raw disk.raw b",
        "bitmap --add -f raw -g 3 disk.raw b",
        "bitmap --clear -f raw disk.raw b",
        "bitmap --add missing.q b",
        "bitmap --add --image-opts driver=qcow2,file.filename=a.q b2",
        "bitmap --remove a.q b0",
        "bitmap --remove a.q b1",
        "bitmap --remove a.q nope",
        "bitmap --clear a.q b0",
        "bitmap --clear a.q b1",
        "bitmap --clear a.q nope",
        "bitmap --disable a.q b0",
        "bitmap --disable a.q b1",
        "bitmap --enable a.q b0",
        "bitmap --enable a.q b1",
        "bitmap --enable a.q nope",
        "bitmap --add --disable a.q b2",
        "bitmap --disable --add a.q b2",
        "bitmap --add --add a.q b2",
        "bitmap --add --disable --enable --clear --remove a.q b2",
        "bitmap --remove --add -g 32k a.q b0",
        "bitmap --remove --add --merge b1 --disable a.q b0",
        "bitmap --merge b1 a.q b0",
        "bitmap --merge b0 a.q b1",
        "bitmap --merge b0 a.q b0",
        "bitmap --merge b0 --clear --merge b1 a.q b1",
        "bitmap --add --merge b0 --merge b1 a.q b2",
        "bitmap --merge nope a.q b0",
        "bitmap --merge b0 a.q nope",
        "bitmap --merge b0 -b other.q a.q b1",
        "bitmap --merge b0 -b other.q -F qcow2 a.q b1",
        "bitmap --add --merge x --merge b0 -b other.q a.q b2",
        "bitmap --merge b0 -b other.q -F nonsense a.q b1",
        "bitmap --merge b0 -b other.q -F raw a.q b1",
        "bitmap --merge b0 -b missing.q a.q b1",
        "bitmap --clear --merge nope -b other.q a.q b1",
        "bitmap --merge b0 -b small.q a.q b1",
        "bitmap --merge b0 -b large.q a.q b1",
        "bitmap --add broken.q b0",
        "bitmap --add broken.q b3",
        "bitmap --remove broken.q b0",
        "bitmap --remove --add broken.q b0",
        "bitmap --clear broken.q b0",
        "bitmap --enable broken.q b0",
        "bitmap --disable broken.q b0",
        "bitmap --merge b2 broken.q b0",
        "bitmap --merge b0 broken.q b2",
        "bitmap --merge b0 -b broken.q a.q b0",
    ];
    for list in part(3, lists) {
        let args: Vec<&str> = list
            .split(' ')
            .map(|word| match word {
                "LONGEST" => &longest,
                "TOO-LONG" => &too_long,
                "EMPTY" => "",
                word => word,
            })
            .collect();
        let (ours, theirs) = (Lab::new(), Lab::new());
        copy(&template, &ours);
        copy(&template, &theirs);
        let status = same(&ours, &theirs, &args);
        for file in ["a.q", "broken.q", "big.q"] {
            let ours_have = bitmaps(&ours, file);
            let theirs_have = listed(theirs.qemu_img(&["info", "--output=json", file]));
            // QEMU marks bitmaps that it only had open as in use after a crash.
            assert_eq!(ours_have, theirs_have, "{list}: {file}");
        }
        for bitmap in bitmaps(&ours, "a.q").as_array().expect("a list") {
            let name = bitmap["name"].as_str().expect("a name");
            if status == 0 && name.len() < 100 {
                let [a, b] = [&ours, &theirs].map(|lab| dirty(lab, "a.q", name));
                assert_eq!(a, b, "{list}: {name}");
            }
        }
        ours.qemu_img(&["check", "a.q"]).ok(list);
        ours.zebu(&["check", "a.q"]).ok(list);
    }
}

#[test]
fn the_name_qemu_img_changes_nothing() {
    if !ready() {
        return;
    }
    let lab = Lab::new();
    lab.make("create a.q 1M");
    let answer = lab.zebu_called("qemu-img", &["bitmap", "--remove", "a.q", "b"]);
    assert_eq!(answer.status, 1);
    let text = "qemu-img: Operation remove on bitmap b failed: Dirty bitmap 'b' not found\n";
    assert_eq!(answer.err, text);
}

/// Kinds of images that may have bitmaps.
const KINDS: [&str; 7] = [
    "create a.q 8M",
    "create -o cluster_size=512 a.q 3M",
    "create -o cluster_size=2M a.q 8M",
    "create -o extended_l2=on,cluster_size=16k a.q 8M",
    "create -o data_file=data.raw a.q 8M",
    "create -o data_file=data.raw,data_file_raw=on a.q 8M",
    "raw base.raw 4194304; create -b base.raw -F raw -o cluster_size=4k,refcount_bits=1 a.q 8M",
];

/// One step of a session: arguments, and whether they are of qemu-io. `compressed`: bytes of a compressed
/// write, if there are some. Only whole clusters are, since QEMU marks what it could not write as dirty.
fn step(random: &mut Rng, size: u64, compressed: Option<u64>) -> (bool, Vec<String>) {
    let name = format!("b{}", random.below(4));
    let other = format!("b{}", random.below(4));
    let granularity = 512 << random.below(12);
    let at = random.below(size / 512) * 512;
    let length =
        (512 + random.below(256) * random.below(512) * 512 / 64 / 512 * 512).min(size - at);
    let packed = compressed.unwrap_or(size);
    let text = match random.below(20) {
        0..4 => format!("bitmap --add -g {granularity} a.q {name}"),
        4 => format!("bitmap --add --disable a.q {name}"),
        5 => format!("bitmap --remove a.q {name}"),
        6 => format!("bitmap --clear a.q {name}"),
        7 => format!("bitmap --disable a.q {name}"),
        8 => format!("bitmap --enable a.q {name}"),
        9 => format!("bitmap --merge {other} a.q {name}"),
        10 => format!("io write -q -z {at} {length}"),
        11 => format!("io discard -q {at} {length}"),
        12 if compressed.is_some() => format!(
            "io write -q -c {} {packed}",
            random.below(size / packed) * packed
        ),
        13 => format!("bitmap --remove --add --merge {other} a.q {name}"),
        14 => format!("io write -q -z -u {at} {length}"),
        _ => format!("io write -q -P {} {at} {length}", random.below(256)),
    };
    match text.strip_prefix("io ") {
        Some(command) => {
            let args = ["-d", "unmap", "-c", command, "a.q"];
            (true, args.map(String::from).to_vec())
        }
        None => (false, text.split(' ').map(String::from).collect()),
    }
}

#[test]
fn sessions_in_turn_with_qemu() {
    if !ready() {
        return;
    }
    for seed in zebu_testkit::cases(5, "images whose bitmaps change") {
        let mut random = Rng::new(seed);
        let kind = KINDS[random.below(KINDS.len() as u64) as usize];
        let (ours, theirs) = (Lab::new(), Lab::new());
        for lab in [&ours, &theirs] {
            lab.make(kind);
        }
        let info = ours.qemu_img(&["info", "--output=json", "a.q"]).ok("info");
        let info: Value = serde_json::from_str(&info.out).expect("JSON");
        let size = info["virtual-size"].as_u64().expect("a size");
        let cluster = info["cluster-size"].as_u64().expect("a size").max(65536);
        let compressed = (!kind.contains("data_file")).then_some(cluster);
        for nth in 0..12 {
            let (is_io, args) = step(&mut random, size, compressed);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let expected = match is_io {
                true => theirs.qemu_io(&args),
                false => theirs.qemu_img(&args),
            };
            // Two of three steps are of the program under test.
            let answer = match (random.below(3) == 0, is_io) {
                (true, true) => ours.qemu_io(&args),
                (true, false) => ours.qemu_img(&args),
                (false, true) => ours.zebu_io(&args),
                (false, false) => ours.zebu(&args),
            };
            let what = format!("seed {seed}, step {nth}, {kind}: {args:?}");
            answer.orderly(&what);
            assert_eq!(answer.status, expected.status, "{what}\n{answer:?}");
        }
        let what = format!("seed {seed}: {kind}");
        let list = bitmaps(&ours, "a.q");
        assert_eq!(
            list,
            listed(theirs.qemu_img(&["info", "--output=json", "a.q"])),
            "{what}"
        );
        for bitmap in list.as_array().into_iter().flatten() {
            let name = bitmap["name"].as_str().expect("a name");
            let [a, b] = [&ours, &theirs].map(|lab| dirty(lab, "a.q", name));
            assert_eq!(a, b, "{what}: {name}");
        }
        ours.qemu_img(&["check", "a.q"]).ok(&what);
        let them = theirs.path("a.q");
        ours.qemu_img(&["compare", "a.q", them.to_str().expect("UTF-8")])
            .ok(&what);
    }
}

#[test]
fn a_killed_writer_leaves_bitmaps_inconsistent() {
    if !ready() {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "create a.q 4M; img bitmap --add a.q b0; img bitmap --add --disable a.q b1; \
         io a.q: write 0 64k",
    );
    let mut child = lab.start_zebu(&["io", "a.q"]);
    {
        use std::io::{Read, Write};
        let stdin = child.stdin.as_mut().expect("piped");
        stdin.write_all(b"write 1M 64k\n").expect("write");
        let stdout = child.stdout.as_mut().expect("piped");
        let mut seen = Vec::new();
        while !seen.windows(5).any(|window| window == b"wrote") {
            let mut byte = [0];
            stdout.read_exact(&mut byte).expect("read");
            seen.push(byte[0]);
        }
    }
    child.kill().expect("kill");
    child.wait().expect("wait");
    // A bitmap that is not enabled did not change.
    let expected = json!([
        bitmap("b0", 65536, &["in-use", "auto"]),
        bitmap("b1", 65536, &[]),
    ]);
    assert_eq!(bitmaps(&lab, "a.q"), expected);
    assert_eq!(dirty(&lab, "a.q", "b1"), []);
    // Also after another writer.
    lab.zebu_io(&["-c", "write 2M 64k", "a.q"]).ok("write");
    assert_eq!(bitmaps(&lab, "a.q"), expected);
    lab.qemu_img(&["bitmap", "--remove", "a.q", "b0"])
        .ok("remove");
    lab.qemu_img(&["check", "-r", "leaks", "a.q"]).ok("check");
}

#[test]
fn reading_changes_nothing_and_read_only_images_are_refused() {
    if !ready() {
        return;
    }
    let lab = Lab::new();
    lab.make("create a.q 4M; img bitmap --add a.q b0; io a.q: write 0 64k");
    let before = fs::read(lab.path("a.q")).expect("read");
    lab.zebu(&["info", "a.q"]).ok("info");
    lab.zebu(&["check", "a.q"]).ok("check");
    lab.zebu(&["convert", "-O", "raw", "a.q", "a.raw"])
        .ok("convert");
    lab.zebu_io(&["-r", "-c", "read 0 64k", "a.q"]).ok("read");
    lab.zebu_io(&["-c", "read 0 64k", "a.q"]).ok("read");
    let read_only = "driver=qcow2,read-only=on,file.filename=a.q";
    let answer = lab.zebu(&["bitmap", "--add", "--image-opts", read_only, "b1"]);
    assert_eq!(answer.status, 1, "{answer:?}");
    assert!(before == fs::read(lab.path("a.q")).expect("read"));
}

#[test]
fn convert_copies_bitmaps_as_qemu() {
    if !ready() {
        return;
    }
    let template = Lab::new();
    template.make(FILES);
    template.make(
        "img snapshot -c s a.q; create there.q 10M; create has.q 10M; img bitmap --add has.q b1",
    );
    let lists = [
        "--bitmaps -O qcow2 a.q new",
        "--bitmaps -O qcow2 -o cluster_size=512 a.q new",
        "--bitmaps -O qcow2 -o cluster_size=2M,extended_l2=on a.q new",
        "--bitmaps -O qcow2 -c a.q new",
        "--bitmaps -O qcow2 -n a.q there.q",
        "--bitmaps -O qcow2 -n a.q has.q",
        "--bitmaps -O qcow2 -n a.q large.q",
        "--bitmaps -O qcow2 -n a.q old.q",
        "--bitmaps -n --target-image-opts a.q driver=qcow2,file.filename=there.q",
        "--bitmaps -n -O raw small.q disk.raw",
        "--bitmaps -O raw a.q new",
        "--bitmaps -O qcow2 -o compat=0.10 a.q new",
        "--bitmaps -O qcow2 -f raw disk.raw new",
        "--bitmaps -O qcow2 old.q new",
        "--bitmaps -O qcow2 a.q other.q new",
        "--bitmaps -O qcow2 broken.q new",
        "--bitmaps --skip-broken-bitmaps -O qcow2 broken.q new",
        "--skip-broken-bitmaps -O qcow2 a.q new",
        "--bitmaps -O qcow2 -o data_file=data a.q new",
    ];
    for list in lists {
        let args: Vec<&str> = std::iter::once("convert").chain(list.split(' ')).collect();
        let (ours, theirs) = (Lab::new(), Lab::new());
        copy(&template, &ours);
        copy(&template, &theirs);
        if same(&ours, &theirs, &args) != 0 {
            continue;
        }
        let target = match list.contains("there.q") {
            true => "there.q",
            false => "new",
        };
        let list_ours = bitmaps(&ours, target);
        let theirs_have = listed(theirs.qemu_img(&["info", "--output=json", target]));
        assert_eq!(list_ours, theirs_have, "{list}");
        for bitmap in list_ours.as_array().into_iter().flatten() {
            let name = bitmap["name"].as_str().expect("a name");
            let [a, b] = [&ours, &theirs].map(|lab| dirty(lab, target, name));
            assert_eq!(a, b, "{list}: {name}");
        }
        ours.qemu_img(&["compare", "a.q", target]);
        ours.qemu_img(&["check", target]).ok(list);
    }
}

#[test]
fn measure_counts_bitmaps_as_qemu() {
    if !ready() {
        return;
    }
    let lab = Lab::new();
    lab.make(FILES);
    for file in ["a.q", "broken.q", "large.q", "old.q"] {
        for options in [
            "-O qcow2",
            "-O raw",
            "-O qcow2 -o cluster_size=512",
            "-O qcow2 -o compat=0.10",
        ] {
            let mut args = vec!["measure"];
            args.extend(options.split(' '));
            args.push(file);
            same(&lab, &lab, &args);
        }
    }
}

#[test]
fn another_size_keeps_bitmaps() {
    if !ready() {
        return;
    }
    let lab = Lab::new();
    lab.make(FILES);
    lab.zebu(&["resize", "a.q", "12M"]).ok("grow");
    // What was added counts as written where changes are recorded.
    let expected = [
        0..65536,
        1 << 20..2 << 20,
        9 << 20..(9 << 20) + 65536,
        10 << 20..12 << 20,
    ];
    assert_eq!(dirty(&lab, "a.q", "b0"), expected);
    assert_eq!(dirty(&lab, "a.q", "b1"), [0..4096, 1 << 20..2 << 20]);
    lab.zebu(&["resize", "--shrink", "a.q", "1536k"])
        .ok("shrink");
    assert_eq!(dirty(&lab, "a.q", "b0"), [0..65536, 1 << 20..3 << 19]);
    assert_eq!(dirty(&lab, "a.q", "b1"), [0..4096, 1 << 20..3 << 19]);
    lab.qemu_img(&["resize", "a.q", "3M"]).ok("grow");
    lab.qemu_img(&["check", "a.q"]).ok("check");
    // An inconsistent bitmap stays so, and prevents nothing.
    lab.zebu(&["resize", "broken.q", "12M"]).ok("grow");
    let expected = json!([
        bitmap("b0", 65536, &["in-use", "auto"]),
        bitmap("b1", 65536, &["in-use"]),
        bitmap("b2", 65536, &["auto"]),
    ]);
    assert_eq!(bitmaps(&lab, "broken.q"), expected);
    assert_eq!(dirty(&lab, "broken.q", "b2"), [10 << 20..12 << 20]);
    // One that would be too large for QEMU becomes inconsistent.
    lab.make("create wide.q 1T; img bitmap --add -g 512 wide.q b0; img bitmap --add wide.q b1");
    lab.zebu(&["resize", "wide.q", "4T"]).ok("grow");
    let expected = json!([
        bitmap("b0", 512, &["in-use", "auto"]),
        bitmap("b1", 65536, &["auto"]),
    ]);
    assert_eq!(bitmaps(&lab, "wide.q"), expected);
    assert_eq!(dirty(&lab, "wide.q", "b1"), [1 << 40..4 << 40]);
    lab.qemu_img(&["check", "wide.q"]).ok("check");
}

#[test]
fn a_commit_is_recorded_in_the_base() {
    if !ready() {
        return;
    }
    let recipe = "create base.q 4M; img bitmap --add base.q b0; create -b base.q -F qcow2 a.q 4M; \
        img bitmap --add a.q t0; io a.q: write 1M 64k | write -z 2M 64k";
    let (ours, theirs) = (Lab::new(), Lab::new());
    for lab in [&ours, &theirs] {
        lab.make(recipe);
    }
    same(&ours, &theirs, &["commit", "a.q"]);
    let [a, b] = [&ours, &theirs].map(|lab| dirty(lab, "base.q", "b0"));
    assert_eq!(a, b);
    assert_eq!(a, [1 << 20..(1 << 20) + 65536, 2 << 20..(2 << 20) + 65536]);
    assert_eq!(
        bitmaps(&ours, "a.q"),
        json!([bitmap("t0", 65536, &["auto"])])
    );
    ours.qemu_img(&["check", "base.q"]).ok("check");
    ours.qemu_img(&["check", "a.q"]).ok("check");
}

#[test]
fn rebase_and_external_snapshots_keep_bitmaps() {
    if !ready() {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "create base.q 4M; io base.q: write -P 1 0 1M; img bitmap --add base.q b0; \
         io base.q: write -P 2 2M 64k; create other.q 4M; io other.q: write -P 1 0 1M",
    );
    let before = fs::read(lab.path("base.q")).expect("read");
    lab.zebu(&[
        "create", "-q", "-f", "qcow2", "-b", "base.q", "-F", "qcow2", "a.q",
    ])
    .ok("create");
    lab.zebu(&["bitmap", "--add", "a.q", "t0"]).ok("add");
    lab.zebu_io(&["-c", "write -P 3 3M 64k", "a.q"]).ok("write");
    assert!(before == fs::read(lab.path("base.q")).expect("read"));
    lab.zebu(&["rebase", "-b", "other.q", "-F", "qcow2", "a.q"])
        .ok("rebase");
    let range = |at: u64| at << 20..(at << 20) + 65536;
    // The data that the image got from its old backing file were written to it.
    assert_eq!(dirty(&lab, "a.q", "t0"), [range(2), range(3)]);
    lab.zebu(&["rebase", "-u", "-b", "", "a.q"]).ok("rebase");
    assert_eq!(dirty(&lab, "a.q", "t0"), [range(2), range(3)]);
    assert_eq!(dirty(&lab, "base.q", "b0"), [range(2)]);
}

#[test]
fn bitmaps_need_no_backing_file() {
    if !ready() {
        return;
    }
    let lab = Lab::new();
    lab.make("create -u -b nowhere -F qcow2 a.q 1M; create -u -b nowhere -F qcow2 b.q 1M");
    for file in ["a.q", "b.q"] {
        lab.zebu(&["bitmap", "--add", file, "b0"]).ok("add");
    }
    let merge = [
        "bitmap", "--merge", "b0", "-b", "b.q", "-F", "qcow2", "a.q", "b0",
    ];
    lab.zebu(&merge).ok("merge");
    lab.zebu(&["bitmap", "--clear", "a.q", "b0"]).ok("clear");
    lab.zebu(&["bitmap", "--remove", "a.q", "b0"]).ok("remove");
}

#[test]
fn going_back_to_a_snapshot_makes_everything_dirty() {
    if !ready() {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "create a.q 4M; io a.q: write -P 1 0 64k; img snapshot -c s a.q; img bitmap --add a.q b0; \
         img bitmap --add -g 4k a.q b1; img bitmap --disable a.q b1",
    );
    lab.zebu(&["snapshot", "-a", "s", "a.q"]).ok("apply");
    assert_eq!(dirty(&lab, "a.q", "b0"), [0..4 << 20]);
    assert_eq!(dirty(&lab, "a.q", "b1"), []);
    lab.zebu(&["snapshot", "-d", "s", "a.q"]).ok("delete");
    lab.zebu(&["snapshot", "-c", "t", "a.q"]).ok("create");
    lab.zebu(&["resize", "a.q", "5M"]).ok("grow");
    lab.zebu(&["bitmap", "--clear", "a.q", "b0"]).ok("clear");
    lab.zebu(&["snapshot", "-a", "t", "a.q"]).ok("apply");
    assert_eq!(dirty(&lab, "a.q", "b0"), [0..4 << 20]);
    lab.qemu_img(&["check", "a.q"]).ok("check");
}

#[test]
fn amend_keeps_bitmaps_or_refuses() {
    if !ready() {
        return;
    }
    let lab = Lab::new();
    lab.make(FILES);
    let (b0, b1) = (dirty(&lab, "a.q", "b0"), dirty(&lab, "a.q", "b1"));
    let before = fs::read(lab.path("a.q")).expect("read");
    let answer = lab.zebu(&["amend", "-o", "compat=0.10", "a.q"]);
    answer.failed_with_one_line(1, "a downgrade");
    assert!(
        answer.err.contains("Bitmaps prevent downgrade"),
        "{answer:?}"
    );
    assert!(before == fs::read(lab.path("a.q")).expect("read"));
    lab.zebu(&["amend", "-o", "refcount_bits=64,lazy_refcounts=on", "a.q"])
        .ok("amend");
    assert_eq!(
        (dirty(&lab, "a.q", "b0"), dirty(&lab, "a.q", "b1")),
        (b0, b1)
    );
    lab.qemu_img(&["check", "a.q"]).ok("check");
    for name in ["b0", "b1"] {
        lab.zebu(&["bitmap", "--remove", "a.q", name]).ok("remove");
    }
    lab.zebu(&["amend", "-o", "refcount_bits=16,compat=0.10", "a.q"])
        .ok("without bitmaps");
    lab.qemu_img(&["check", "a.q"]).ok("check");
}
