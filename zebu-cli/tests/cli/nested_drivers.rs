//! Random descriptions of images for `--image-opts` and `json:`: nested drivers, offsets and sizes,
//! options of the backing file. zebu must open what qemu-img opens, with the same content, and refuse
//! what it refuses.

use std::fs;

use crate::common::{Lab, Rng, beyond_qemu, cases};

/// Options, in their order.
#[derive(Default)]
struct Options(Vec<(String, String)>);

impl Options {
    fn set(&mut self, key: String, value: impl ToString) {
        self.0.push((key, value.to_string()));
    }

    fn as_text(&self) -> String {
        let words: Vec<_> = self.0.iter().map(|(k, v)| format!("{k}={v}")).collect();
        words.join(",")
    }

    fn as_json(&self) -> String {
        let mut object = serde_json::Map::new();
        for (key, value) in &self.0 {
            object.insert(key.clone(), value.clone().into());
        }
        format!("json:{}", serde_json::Value::Object(object))
    }
}

const FILES: &[&str] = &[
    "a.q",
    "o.q",
    "x.raw",
    "window.raw",
    "in.q",
    "gone",
    "a.q",
    "o.q",
];

/// The offset of the qcow2 image in `window.raw`.
const WINDOW: u64 = 192 << 10;

/// Adds a random driver and its children with the prefix `at`, which is empty or ends with a dot.
fn node(rng: &mut Rng, options: &mut Options, at: &str, depth: u64) {
    let leaf = depth == 0;
    match rng.below(if leaf { 3 } else { 10 }) {
        0 | 1 => {
            if rng.one_in(2) {
                options.set(
                    format!("{at}driver"),
                    rng.pick(&["file", "file", "host_device"]),
                );
            } else if at.is_empty() {
                options.set("driver".into(), "file");
            }
            options.set(format!("{at}filename"), rng.pick(FILES));
            if rng.one_in(4) {
                options.set(format!("{at}locking"), rng.pick(&["off", "auto", "on"]));
            }
        }
        2 => {
            options.set(format!("{at}driver"), rng.pick(&["null-co", "null-aio"]));
            if rng.one_in(2) {
                options.set(format!("{at}size"), rng.pick(&["0", "512", "1M", "70000"]));
            } else {
                options.set(format!("{at}size"), 2 << 20);
            }
            options.set(format!("{at}read-zeroes"), "on");
        }
        3 | 4 => {
            options.set(format!("{at}driver"), "raw");
            if rng.one_in(2) {
                // Whole sectors: with others qemu-img convert loses data.
                options.set(
                    format!("{at}offset"),
                    rng.pick(&["0", "512", "64k", "192k", "1536", "1G", "196608"]),
                );
            }
            if rng.one_in(3) {
                options.set(
                    format!("{at}size"),
                    rng.pick(&["512", "64k", "1M", "1000", "1G"]),
                );
            }
            node(rng, options, &format!("{at}file."), depth - 1);
        }
        5..=7 => {
            options.set(format!("{at}driver"), "qcow2");
            match rng.below(6) {
                0 => options.set(format!("{at}backing"), ""),
                1 => node(rng, options, &format!("{at}backing."), depth - 1),
                2 => options.set(
                    format!("{at}backing.driver"),
                    rng.pick(&["raw", "qcow2", "zz"]),
                ),
                3 => options.set(
                    format!("{at}backing.file.driver"),
                    rng.pick(&["blkdebug", "file"]),
                ),
                _ => {}
            }
            node(rng, options, &format!("{at}file."), depth - 1);
        }
        8 if rng.one_in(2) => filter(rng, options, at, depth - 1),
        8 => {
            options.set(format!("{at}driver"), "blkdebug");
            if rng.one_in(3) {
                options.set(format!("{at}align"), rng.pick(&["512", "4096", "100"]));
            }
            node(rng, options, &format!("{at}image."), depth - 1);
        }
        _ => {
            // An image at an offset of a file, and one inside of a qcow2 disk.
            options.set(format!("{at}driver"), "qcow2");
            options.set(format!("{at}file.driver"), rng.pick(&["raw", "qcow2"]));
            match options.0.last().is_some_and(|(_, driver)| driver == "raw") {
                true => {
                    options.set(format!("{at}file.offset"), WINDOW);
                    options.set(format!("{at}file.file.filename"), "window.raw");
                }
                false => options.set(format!("{at}file.file.filename"), "in.q"),
            }
        }
    }
}

/// Adds a filter, and what is below it.
fn filter(rng: &mut Rng, options: &mut Options, at: &str, depth: u64) {
    let name = rng.pick(&[
        "throttle",
        "throttle",
        "preallocate",
        "compress",
        "copy-on-read",
    ]);
    options.set(format!("{at}driver"), name);
    match name {
        "throttle" if !rng.one_in(5) => {
            options.set(
                format!("{at}throttle-group"),
                rng.pick(&["g", "g", "g", "h"]),
            );
        }
        "preallocate" if rng.one_in(2) => {
            let align = rng.pick(&["512", "1M", "100"]);
            options.set(format!("{at}prealloc-align"), align);
        }
        _ => {}
    }
    node(rng, options, &format!("{at}file."), depth);
}

/// Images: plain, an overlay, at an offset of a file, inside of a qcow2 disk.
fn images() -> Lab {
    let lab = Lab::new();
    lab.make(
        "img create -q -f qcow2 a.q 2M; random a.q 5 20 w; \
         img create -q -f qcow2 -b a.q -F qcow2 o.q 2M; img create -q -f raw x.raw 2M",
    );
    lab.qemu_io(&["-c", "write -P 7 100k 300k", "o.q"])
        .ok("o.q");
    lab.qemu_io(&["-f", "raw", "-c", "write -P 8 0 1M", "x.raw"])
        .ok("x.raw");
    let image = fs::read(lab.path("a.q")).unwrap();
    let mut window = vec![0x55; WINDOW as usize];
    window.extend(&image);
    window.resize(window.len().next_multiple_of(64 << 10), 0);
    fs::write(lab.path("window.raw"), window).unwrap();
    lab.qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "a.q", "in.q"])
        .ok("in.q");
    lab
}

#[test]
fn random_descriptions() {
    if beyond_qemu("it compares zebu with QEMU") {
        return;
    }
    let lab = images();
    let (mut opened, mut refused) = (0, 0);
    for seed in cases(60, "nested drivers") {
        let mut rng = Rng::new(seed);
        let mut options = Options::default();
        let depth = rng.below(5);
        node(&mut rng, &mut options, "", depth);
        let (text, json) = (options.as_text(), options.as_json());
        let what = format!("seed {seed}: {text}");
        let source: &[&str] = match rng.one_in(2) {
            true => &["--image-opts", &text],
            false => &[&json],
        };
        let group = ["--object", "throttle-group,id=g,x-iops-total=100000"];
        let convert = |out| [&["convert"], &group[..], &["-O", "raw"], source, &[out]].concat();
        let theirs = lab.qemu_img(&convert("theirs.raw"));
        let ours = lab.zebu(&convert("ours.raw"));
        if theirs.status != 0 {
            assert_eq!(
                ours.status, 1,
                "{what}\nours: {ours:#?}\ntheirs: {theirs:#?}"
            );
            refused += 1;
            continue;
        }
        // QEMU reads truncated tables, header extensions and data as zeroes, and allows a file
        // twice in a chain.
        let own_rules = [
            "past the end of the file",
            "after the end of the file",
            "is cut off",
            "infinite loop",
        ];
        if ours.status == 1 && own_rules.iter().any(|words| ours.err.contains(words)) {
            refused += 1;
            continue;
        }
        assert_eq!(ours.status, 0, "{what}\nours: {ours:#?}");
        let read = |name: &str| fs::read(lab.path(name)).unwrap();
        assert!(
            read("ours.raw") == read("theirs.raw"),
            "{what}: other content"
        );
        for command in ["info", "map"] {
            let args = [&[command, "--output=json"], &group[..], source].concat();
            let (ours, theirs) = (lab.zebu(&args), lab.qemu_img(&args));
            if theirs.status == 0 {
                assert_eq!(ours.status, 0, "{what}: {command}: {ours:#?}");
            }
        }
        opened += 1;
    }
    println!("{opened} opened, {refused} refused");
}

/// A resize of a part of a file must not change the rest of the file.
#[test]
fn raw_disks_with_offset_and_size_are_not_resized() {
    let lab = Lab::new();
    let content = vec![7; 8 << 20];
    fs::write(lab.path("o.raw"), &content).unwrap();
    let part = "driver=raw,offset=1M,size=2M,file.driver=file,file.filename=o.raw";
    for args in [
        &["resize", "--shrink", "--image-opts", part, "1M"][..],
        &["resize", "--image-opts", part, "3M"],
        &["io", "--image-opts", "-c", "truncate 1M", part],
    ] {
        let answer = lab.zebu(args);
        assert_eq!(answer.status, 1, "{args:?}: {answer:#?}");
        let said = format!("{}{}", answer.out, answer.err);
        let words = "Cannot resize fixed-size raw disks";
        assert!(said.contains(words), "{args:?}: {answer:#?}");
        let now = fs::read(lab.path("o.raw")).unwrap();
        assert!(now == content, "{args:?} changed the file");
    }
}
