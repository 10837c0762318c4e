//! Injected errors (blkdebug). With the same rules, the same commands must fail in zebu and qemu-io
//! and leave the same data. A command of the program whose request fails must leave a consistent
//! image.

use std::fs;

use crate::common::pair::Pair;
use crate::common::{Answer, Lab, Rng, beyond_qemu, cases};

/// A rule: its section, and keys with values.
struct Rule(&'static str, Vec<(&'static str, String)>);

/// Rules as options under `prefix`.
fn as_options(rules: &[Rule], prefix: &str) -> String {
    let mut text = String::new();
    for section in ["inject-error", "set-state"] {
        let of_section = rules.iter().filter(|rule| rule.0 == section);
        for (nth, Rule(_, says)) in of_section.enumerate() {
            for (key, value) in says {
                text += &format!(",{prefix}{section}.{nth}.{key}={value}");
            }
        }
    }
    text
}

/// Rules as the text of a configuration file.
fn as_config(rules: &[Rule]) -> String {
    let mut text = String::from("# rules of a test\n");
    for Rule(section, says) in rules {
        text += &format!("[{section}]\n");
        for (key, value) in says {
            text += &format!("{key} = \"{value}\"\n");
        }
    }
    text
}

/// Random rules for these events.
fn rules(rng: &mut Rng, events: &[&str], sectors: u64) -> Vec<Rule> {
    let count = 1 + rng.below(4);
    let mut all = Vec::new();
    for _ in 0..count {
        let mut says = vec![("event", rng.pick(events).to_string())];
        if rng.one_in(3) {
            says.push(("state", rng.below(4).to_string()));
        }
        if rng.one_in(4) {
            says.push(("new_state", (1 + rng.below(3)).to_string()));
            all.push(Rule("set-state", says));
            continue;
        }
        if rng.one_in(2) {
            let kinds = ["read", "write", "write-zeroes", "discard", "flush"];
            says.push(("iotype", rng.pick(&kinds).into()));
        }
        if rng.one_in(2) {
            says.push(("errno", rng.pick(&["5", "28", "0", "12", "0x5"]).into()));
        }
        if rng.one_in(3) {
            says.push(("sector", rng.below(sectors).to_string()));
        }
        if rng.one_in(2) {
            says.push(("once", rng.pick(&["on", "off"]).into()));
        }
        if rng.one_in(4) {
            says.push(("immediately", rng.pick(&["on", "off"]).into()));
        }
        all.push(Rule("inject-error", says));
    }
    all
}

/// Random qemu-io commands on the first `sectors`, aligned to `unit` sectors.
fn commands(rng: &mut Rng, sectors: u64, unit: u64, kinds: &[&str]) -> Vec<String> {
    (0..4 + rng.below(12))
        .map(|_| {
            let start = rng.below(sectors / unit) * unit;
            let length = (1 + rng.below(40)).min((sectors - start) / unit) * unit;
            let (at, length) = (start * 512, length * 512);
            match rng.pick(kinds) {
                "read" => format!("read {at} {length}"),
                "write" => format!("write -P {} {at} {length}", 1 + rng.below(200)),
                "zero" => format!("write -z {at} {length}"),
                "unmap" => format!("write -z -u {at} {length}"),
                other if other.contains("flush") => "flush".into(),
                other => format!("{other} {at} {length}"),
            }
        })
        .collect()
}

/// The output of the commands without times.
fn untimed(answer: &Answer) -> Vec<String> {
    let lines = answer.out.lines().filter(|line| !line.contains(" ops; "));
    lines.map(str::to_owned).collect()
}

/// Runs the commands with both programs and compares their output.
#[track_caller]
fn both(pair: &Pair, options: &str, commands: &[String], what: &str) {
    let mut args = Vec::new();
    for command in commands {
        args.extend(["-c", command]);
    }
    // The default of qemu-io, writethrough, would flush after each write.
    args.extend(["-t", "writeback", "--image-opts", options]);
    let mut ours = pair.ours.zebu_io(&args);
    let theirs = pair.theirs.qemu_io(&args);
    // qemu-io ignores a failed flush at the end.
    if ours.err.contains("close failed") {
        ours.status = theirs.status;
    }
    assert_eq!(
        (untimed(&ours), ours.status),
        (untimed(&theirs), theirs.status),
        "{what}: {options}\n{commands:#?}\nours: {ours:#?}\ntheirs: {theirs:#?}"
    );
}

const SECTORS: u64 = 2048;

/// Random limits of requests, with the prefix `at`, and the alignment in sectors.
fn limits(rng: &mut Rng, at: &str) -> (String, u64) {
    let unit = match rng.below(4) {
        0 => 4096,
        1 => 512,
        _ => 0,
    };
    let mut text = String::new();
    if unit > 0 {
        text += &format!(",{at}align={unit}");
    }
    let any = 512u64.max(unit);
    if rng.one_in(3) {
        text += &format!(",{at}max-transfer={}", any << rng.below(5));
    }
    if rng.one_in(3) {
        let optimal = any << rng.below(4);
        text += &format!(",{at}opt-write-zero={optimal}");
        if rng.one_in(2) {
            text += &format!(",{at}max-write-zero={}", optimal << rng.below(3));
        }
    }
    if rng.one_in(3) {
        let optimal = any << rng.below(4);
        text += &format!(",{at}opt-discard={optimal}");
        if rng.one_in(2) {
            text += &format!(",{at}max-discard={}", optimal << rng.below(3));
        }
    }
    (text, any / 512)
}

#[test]
fn raw_requests_fail_as_with_qemu() {
    if beyond_qemu("it compares zebu with QEMU") {
        return;
    }
    const EVENTS: &[&str] = &[
        "none",
        "read_aio",
        "write_aio",
        "flush_to_os",
        "flush_to_disk",
        "pwritev",
        "pwritev_zero",
        "pwritev_done",
        "l2_load",
    ];
    const KINDS: &[&str] = &["read", "write", "zero", "unmap", "discard", "flush"];
    let content: Vec<u8> = (0..SECTORS * 512).map(|i| (i / 512 + i) as u8).collect();
    let pair = Pair::new("");
    let mut failed = 0;
    for seed in cases(30, "scripts with injected errors") {
        let mut rng = Rng::new(seed);
        for lab in [&pair.ours, &pair.theirs] {
            fs::write(lab.path("r.raw"), &content).unwrap();
        }
        let mut rules = rules(&mut rng, EVENTS, SECTORS);
        let (top, at) = match rng.below(3) {
            // Without a format there are no other events.
            0 => ("driver=blkdebug", ""),
            _ => ("driver=raw,file.driver=blkdebug", "file."),
        };
        let (limits, unit) = limits(&mut rng, at);
        if limits.contains("max-transfer") {
            // QEMU splits requests before the events, and has an event for each piece.
            for Rule(_, says) in &mut rules {
                says[0].1 = rng.pick(&["none", "flush_to_os", "flush_to_disk"]).into();
            }
        }
        let mut options = format!("{top},{at}image.filename=r.raw{limits}");
        if rng.one_in(3) {
            for lab in [&pair.ours, &pair.theirs] {
                fs::write(lab.path("rules"), as_config(&rules)).unwrap();
            }
            options += &format!(",{at}config=rules");
        } else {
            options += &as_options(&rules, at);
        }
        let commands = commands(&mut rng, SECTORS, unit, KINDS);
        let what = format!("seed {seed}:\n{}", as_config(&rules));
        both(&pair, &options, &commands, &what);
        let [ours, theirs] =
            [&pair.ours, &pair.theirs].map(|lab| fs::read(lab.path("r.raw")).unwrap());
        let differs = ours.iter().zip(&theirs).position(|(a, b)| a != b);
        assert_eq!(differs, None, "seed {seed}: {options}\n{commands:#?}");
        failed += usize::from(ours != content);
    }
    println!("cases: {failed} scripts on raw images that fail on purpose");
}

/// All clusters are allocated in order, and rules are for sectors of guest data: the programs need
/// not access metadata at the same time.
#[test]
fn qcow2_requests_fail_as_with_qemu() {
    if beyond_qemu("it compares zebu with QEMU") {
        return;
    }
    const EVENTS: &[&str] = &["none", "read_aio", "write_aio", "pwritev_rmw_head"];
    /// The first sector of guest data in the file, after five clusters.
    const FIRST: u64 = 5 * 128;
    let pair = Pair::new("img create -q -f qcow2 base.q 1M");
    for lab in [&pair.ours, &pair.theirs] {
        lab.qemu_io(&["-c", "write -P 9 0 1M", "base.q"])
            .ok("base.q");
    }
    let mut scripts = 0;
    for seed in cases(20, "scripts with injected errors") {
        let mut rng = Rng::new(seed);
        for lab in [&pair.ours, &pair.theirs] {
            fs::copy(lab.path("base.q"), lab.path("a.q")).unwrap();
        }
        // Few, so that rules and requests have the same sectors.
        let sectors: Vec<u64> = (0..3).map(|_| rng.below(SECTORS)).collect();
        let mut rules = rules(&mut rng, EVENTS, 1);
        for Rule(section, says) in &mut rules {
            says.retain(|(key, _)| *key != "sector");
            if *section == "inject-error" {
                let sector = FIRST + sectors[rng.below(3) as usize];
                says.push(("sector", sector.to_string()));
            }
        }
        let options = format!(
            "driver=qcow2,file.driver=blkdebug,file.image.filename=a.q{}",
            as_options(&rules, "file.")
        );
        let commands: Vec<String> = (0..4 + rng.below(12))
            .map(|_| {
                let at = sectors[rng.below(3) as usize] * 512;
                match rng.one_in(2) {
                    true => format!("read {at} 512"),
                    false => format!("write -P {} {at} 512", 1 + rng.below(200)),
                }
            })
            .collect();
        both(&pair, &options, &commands, &format!("seed {seed}"));
        pair.assert_alike(&["a.q"], &format!("seed {seed}: {options}\n{commands:#?}"));
        scripts += 1;
    }
    println!("cases: {scripts} scripts on qcow2 images that fail on purpose");
}

/// Events that occur in commands.
const WORK: &[&str] = &[
    "none",
    "read_aio",
    "write_aio",
    "l1_update",
    "l2_load",
    "l2_update",
    "l2_alloc_write",
    "refblock_load",
    "refblock_update_part",
    "refblock_alloc_hookup",
    "cluster_alloc",
    "cluster_free",
    "cow_read",
    "flush_to_os",
    "flush_to_disk",
    "pwritev",
    "pwritev_done",
    "empty_image_prepare",
    "l1_grow_write_table",
    "l1_grow_activate_table",
    "reftable_load",
];

/// Rules that make one request fail, the first after an event has occurred a number of times.
fn one_failure(rng: &mut Rng) -> String {
    let event = rng.pick(WORK);
    let times = match event {
        "none" | "reftable_load" => 1,
        _ => 1 + rng.below(8),
    };
    let mut rules: Vec<Rule> = (1..times)
        .map(|nth| {
            let says = vec![
                ("event", event.to_string()),
                ("state", nth.to_string()),
                ("new_state", (nth + 1).to_string()),
            ];
            Rule("set-state", says)
        })
        .collect();
    let mut says = vec![
        ("event", event.to_string()),
        ("state", times.to_string()),
        ("errno", rng.pick(&["5", "28"]).into()),
        (
            "iotype",
            rng.pick(&["write", "read", "flush", "write-zeroes", "discard"])
                .into(),
        ),
    ];
    if rng.one_in(2) {
        says.push(("once", "on".into()));
    }
    rules.push(Rule("inject-error", says));
    as_options(&rules, "file.")
}

/// The content of an image.
fn content(lab: &Lab, name: &str, what: &str) -> Vec<u8> {
    lab.qemu_img(&["convert", "-O", "raw", name, "content.raw"])
        .ok(what);
    fs::read(lab.path("content.raw")).unwrap()
}

/// Fails the test unless `check` finds no errors.
#[track_caller]
fn assert_consistent(lab: &Lab, name: &str, what: &str) {
    let check = lab.qemu_img(&["check", name]);
    // Leaks are allowed.
    assert!([0, 3].contains(&check.status), "{what}: {name}: {check:#?}");
}

#[test]
fn failed_commands_leave_consistent_images() {
    if beyond_qemu("its images may be inconsistent") {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "img create -q -f qcow2 -o cluster_size=1k base0.q 2M; random base0.q 1 60 w; \
         img create -q -f qcow2 -o cluster_size=1k other0.q 2M; random other0.q 2 60 w; \
         img create -q -f qcow2 -o cluster_size=1k -b base.q -F qcow2 -u top0.q 2M",
    );
    let restore = || {
        for name in ["base", "other", "top"] {
            fs::copy(
                lab.path(&format!("{name}0.q")),
                lab.path(&format!("{name}.q")),
            )
            .unwrap();
        }
    };
    restore();
    lab.qemu_io_script(
        &["top.q"],
        "write -P 3 0 100k\nwrite -P 4 900k 300k\nwrite -z 40k 4k\n",
    )
    .ok("top");
    fs::copy(lab.path("top.q"), lab.path("top0.q")).unwrap();
    let [base, top] = ["base.q", "top.q"].map(|name| content(&lab, name, "before"));
    let (mut failed, mut done) = (0, 0);
    for seed in cases(30, "scripts with injected errors") {
        restore();
        let mut rng = Rng::new(seed);
        let rules = one_failure(&mut rng);
        let over = |name: &str| {
            format!("driver=qcow2,file.driver=blkdebug,file.image.filename={name}{rules}")
        };
        let command = rng.below(5);
        let (top_rules, base_rules) = (over("top.q"), over("base.q"));
        let backing = rules.replace("file.", "backing.file.");
        let commit =
            format!("driver=qcow2,file.filename=top.q,backing.file.driver=blkdebug{backing}");
        let resized = rng.pick(&["+1M", "-1M", "+20M"]);
        let args: Vec<&str> = match command {
            0 => vec!["commit", "--image-opts", &top_rules],
            1 => vec!["commit", "--image-opts", &commit],
            2 => vec![
                "rebase",
                "-b",
                "other.q",
                "-F",
                "qcow2",
                "--image-opts",
                &top_rules,
            ],
            3 => vec!["resize", "--shrink", "--image-opts", &top_rules, resized],
            _ => {
                let args = [
                    "convert",
                    "-n",
                    "--target-image-opts",
                    "-f",
                    "qcow2",
                    "top.q",
                ];
                let mut args = args.to_vec();
                args.push(&base_rules);
                args
            }
        };
        let what = format!("seed {seed}: {args:?}");
        let answer = lab.zebu(&args);
        let ok = answer.status == 0;
        assert!(ok || answer.status == 1, "{what}: {answer:#?}");
        assert_eq!(ok, answer.err.is_empty(), "{what}: {answer:#?}");
        done += u64::from(ok);
        failed += u64::from(!ok);
        for name in ["top.q", "base.q"] {
            assert_consistent(&lab, name, &what);
        }
        let now = content(&lab, "top.q", &what);
        match command {
            3 => {
                let sizes = [2 << 20, 3 << 20, 1 << 20, 22 << 20];
                assert!(sizes.contains(&now.len()), "{what}: {}", now.len());
                let kept = now.len().min(top.len());
                assert!(now[..kept] == top[..kept], "{what}: other content");
                assert!(now[kept..].iter().all(|b| *b == 0), "{what}: not zero");
            }
            4 if ok => assert!(
                content(&lab, "base.q", &what) == top,
                "{what}: other content"
            ),
            // The base is the target.
            4 => {}
            _ => {
                assert!(now == top, "{what}: other content: {answer:#?}");
                if command < 2 && ok {
                    assert!(content(&lab, "base.q", &what) == top, "{what}");
                }
                if command == 2 {
                    assert!(content(&lab, "base.q", &what) == base, "{what}");
                }
            }
        }
    }
    println!("cases: {} commands of which {failed} failed", failed + done);
}
