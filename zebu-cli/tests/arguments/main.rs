//! Generated argument lists of qemu-img's commands, most of them with a mistake (`grammar.rs`). Both
//! programs run with each list on the same files. Status, first line of standard error, standard
//! output and all files must be the same, except for the differences that `intended.rs` lists.
//!
//! With `ZEBU_ALL` a test continues after a difference, and counts them.

mod accepted;
mod errors;
mod grammar;
mod intended;

use zebu_testkit::program::{self as common};

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use common::{Answer, Lab, Limits, Rng, bytes, comparable, peer};

/// The files that every list finds in its folder.
const FILES: &str = "create base.q 4M; io base.q: write -P 1 0 1M | write -P 2 2M 300k; \
    create -b base.q -F qcow2 over.q 5M; io over.q: write -P 3 64k 64k | write -z 2M 64k; \
    create snap.q 2M; io snap.q: write -P 4 0 128k; img snapshot -c one snap.q; \
    io snap.q: write -P 5 64k 64k; create -o compat=0.10 old.q 1M; io old.q: write -P 6 0 4k; \
    create other.q 4M; io other.q: write -P 1 0 1M | write -P 2 2M 300k | write -P 9 3M 512; \
    create bits.q 4M; img bitmap --add bits.q b0; img bitmap --add -g 4k bits.q b1; \
    io bits.q: write -P 8 1M 70000; img bitmap --disable bits.q b1; \
    create broken-bits.q 4M; img bitmap --add broken-bits.q b0; \
    crash broken-bits.q: write 0 4k; img bitmap --add broken-bits.q b2; raw disk.raw 1049088; raw small.raw 4096; \
    create -o cluster_size=4k broken.q 1M; io broken.q: write -P 7 0 64k";

fn template() -> Lab {
    let lab = Lab::new();
    lab.make(FILES);
    fs::create_dir(lab.path("folder")).expect("mkdir");
    fs::write(lab.path("empty"), b"").expect("write");
    // An unaligned L2 entry.
    let l2 = lab.u64_at("broken.q", lab.u64_at("broken.q", 40)) & 0x00ff_ffff_ffff_fe00;
    lab.patch("broken.q", l2 + 8, &(1u64 << 63 | 0x5200).to_be_bytes());
    for (name, copied) in grammar::ODD_NAMES {
        fs::copy(lab.path(copied), lab.path(name)).expect("copy");
    }
    let over = ["create", "-q", "-f", "qcow2", "-F", "qcow2"];
    for (backing, options, name) in grammar::ODD_CHAINS {
        let args = [&over[..], &["-b", backing, "-o", options, name]].concat();
        lab.qemu_img(&args).ok(name);
    }
    for name in ["noise", "text"] {
        fs::remove_file(lab.path(name)).expect("remove");
    }
    lab.sync_files();
    lab
}

/// The name and content of every file.
type Files = BTreeMap<String, Vec<u8>>;

fn files(lab: &Lab) -> Files {
    let entries = fs::read_dir(lab.path("")).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let named = paths.filter(|path| path.is_file()).map(|path| {
        let name = path.file_name().expect("a name").as_bytes();
        (bytes::text(name), content(&path))
    });
    named.collect()
}

/// The content of a file; of a large one its length.
fn content(path: &Path) -> Vec<u8> {
    let length = path.metadata().expect("metadata").len();
    match length > 64 << 20 {
        true => format!("{length} bytes").into_bytes(),
        false => fs::read(path).expect("read"),
    }
}

fn lay_out(template: &Files) -> Lab {
    let lab = Lab::new();
    for (name, content) in template {
        fs::write(lab.path(name), content).expect("write");
    }
    fs::create_dir(lab.path("folder")).expect("mkdir");
    lab
}

fn limits() -> Limits {
    Limits {
        time: Duration::from_secs(30),
        ..Limits::default()
    }
}

/// A message without QEMU's name of a node.
fn without_node(text: &str) -> String {
    for before in [" in '#block", " to #block"] {
        if let Some(at) = text.find(before) {
            let rest = text[at + before.len()..].trim_start_matches(|c: char| c.is_ascii_digit());
            return format!("{}{}", &text[..at], rest.trim_start_matches('\''));
        }
    }
    text.to_string()
}

/// The first line of a message, without the name of the program.
fn first_line(answer: &Answer) -> String {
    // An action that QEMU has since 11.1.
    let text = without_node(&comparable(&answer.err)).replace("--remove-all, ", "");
    let line = text.lines().next().unwrap_or_default();
    let words = line.split(' ').map(|word| {
        let name = word.trim_start_matches('\'');
        match name.starts_with('/') && (name.ends_with("/zebu") || name.ends_with("/qemu-img")) {
            true => "PROGRAM",
            false => word,
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The output; of a progress only the last step.
fn output(answer: &Answer) -> String {
    let text = comparable(&answer.out);
    let lines = text.lines();
    lines
        .map(|line| {
            line.rsplit('\r')
                .find(|part| !part.is_empty())
                .unwrap_or("")
        })
        .collect::<Vec<_>>()
        .join("\n")
}

/// Differences between the two programs.
pub struct Found {
    /// The exit status: zebu's, QEMU's.
    status: [i32; 2],
    /// Whether zebu left every file as it was.
    lost_nothing: bool,
    /// The first line of standard error of both.
    messages: [String; 2],
    /// All differences as text.
    all: Vec<String>,
}

fn differences(ours: &Lab, theirs: &Lab, args: &[&str], template: &Files) -> Found {
    let answers = [
        ours.zebu_limited(args, &limits()),
        theirs.run(peer().img(), args, b"", &limits()),
    ];
    let mut found = Vec::new();
    let mut compare = |what: &str, [ours, theirs]: [String; 2]| {
        if ours != theirs {
            found.push(format!("{what}\n  ours   {ours}\n  QEMU's {theirs}"));
        }
    };
    answers[0].orderly(&format!("{args:?}"));
    compare("status", [0, 1].map(|i| answers[i].status.to_string()));
    compare("message", [0, 1].map(|i| first_line(&answers[i])));
    compare("output", [0, 1].map(|i| output(&answers[i])));
    let [a, b] = [ours, theirs].map(files);
    let changed = |files: &Files| {
        let changed = files.iter().filter(|(n, c)| template.get(*n) != Some(*c));
        let names = changed.map(|(name, _)| name.clone());
        let gone = template.keys().filter(|n| !files.contains_key(*n));
        (names.collect::<Vec<_>>(), gone.cloned().collect::<Vec<_>>())
    };
    compare(
        "changed and lost files",
        [&a, &b].map(|f| format!("{:?}", changed(f))),
    );
    if answers.iter().all(|answer| answer.status == 0) {
        for name in changed(&a)
            .0
            .iter()
            // Too large to be read.
            .filter(|name| *name != "broken.q" && a.get(*name) != b.get(*name))
        {
            let other = bytes::text(theirs.path(name).as_os_str().as_bytes());
            // The name must not begin with a protocol.
            let name = &*format!("./{name}");
            let answer = ours.qemu_img(&["compare", name, &other]);
            // What QEMU leaves cannot be opened either.
            let opens_not = || theirs.qemu_img(&["compare", name, name]).status > 1;
            if answer.status == 1 || answer.status > 1 && !opens_not() {
                found.push(format!(
                    "content of {name}\n  {} {}",
                    answer.out, answer.err
                ));
            }
            let info = |lab: &Lab| {
                let text = lab.qemu_img(&["info", name]).out;
                let lines = text.lines().filter(|line| !line.contains("disk size"));
                let lines = lines.take_while(|line| !line.starts_with("Child node"));
                lines.map(without_date).collect::<Vec<_>>().join("\n")
            };
            let (x, y) = (info(ours), info(theirs));
            if x != y {
                found.push(format!("info of {name}\n--- ours\n{x}\n--- QEMU's\n{y}"));
            }
        }
    }
    Found {
        status: [0, 1].map(|i| answers[i].status),
        lost_nothing: changed(&a) == (Vec::new(), Vec::new()),
        messages: [0, 1].map(|i| first_line(&answers[i])),
        all: found,
    }
}

/// A line of the snapshot list without date and time.
fn without_date(line: &str) -> String {
    let is_date = |word: &&str| word.starts_with("20") && word.contains('-');
    let is_time = |word: &&str| word.len() == 8 && word.matches(':').count() == 2;
    let words = line.split_whitespace();
    let kept = words.filter(|word| !is_date(word) && !is_time(word));
    kept.collect::<Vec<_>>().join(" ")
}

#[test]
fn generated_argument_lists() {
    if !peer().is_current() {
        println!("skipped: an older QEMU has other messages");
        return;
    }
    let template = files(&template());
    let (mut intended, mut differing) = (0, 0);
    for seed in zebu_testkit::cases(40, "argument lists") {
        let args = grammar::arguments(&mut Rng::new(seed));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let (ours, theirs) = (lay_out(&template), lay_out(&template));
        let found = differences(&ours, &theirs, &args, &template);
        if found.all.is_empty() {
            continue;
        }
        if let Some(why) = intended::why(&args, &found) {
            println!("seed {seed}: {args:?}: intended: {why}");
            intended += 1;
            continue;
        }
        let text = format!("seed {seed}: {args:?}\n {}", found.all.join("\n "));
        assert!(zebu_testkit::all(), "{text}");
        println!("DIFFERS {text}");
        differing += 1;
    }
    println!("{intended} differ as intended, {differing} otherwise");
    assert_eq!(differing, 0);
}
