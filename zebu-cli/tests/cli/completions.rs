//! Completions: the words that the program knows, and that each shell shows them.

use std::fs;
use std::os::unix::fs::symlink;

use crate::common::server::have;
use crate::common::{Lab, Limits, beyond_qemu, program};

/// A folder with an image that has snapshots and a bitmap; `zebu` is in `.bin`.
fn lab() -> Lab {
    let lab = Lab::new();
    for line in [
        "create -q -f qcow2 base.qcow2 1M",
        "create -q -f qcow2 -b base.qcow2 -F qcow2 disk.qcow2",
        "snapshot -c before-upgrade disk.qcow2",
        "snapshot -c monday disk.qcow2",
        "bitmap --add disk.qcow2 since-monday",
    ] {
        let args: Vec<&str> = line.split(' ').collect();
        lab.zebu(&args).ok(line);
    }
    fs::create_dir(lab.path(".bin")).unwrap();
    symlink(program().canonicalize().unwrap(), lab.path(".bin/zebu")).unwrap();
    lab
}

/// What is typed, with | where the cursor is, and all that may be there.
const CASES: &[(&str, &[&str])] = &[
    ("zebu sn|", &["snapshot"]),
    ("zebu co|", &["commit", "compare", "completions", "convert"]),
    ("zebu ma|", &["manual", "map"]),
    ("zebu --un|", &["--untrusted"]),
    ("zebu help re|", &["rebase", "resize"]),
    (
        "zebu convert --target-f|",
        &["--target-format", "--target-format-options"],
    ),
    ("zebu convert -O v|", &["vdi", "vhdx", "vmdk", "vpc"]),
    ("zebu convert -Ovd|", &["-Ovdi"]),
    (
        "zebu convert --target-format=qc|",
        &["--target-format=qcow2"],
    ),
    ("zebu convert -f q|", &["qcow", "qcow2", "qed"]),
    (
        "zebu --untrusted create -f qcow2 -o comp|",
        &["compat=", "compression_type="],
    ),
    (
        "zebu convert -O qcow2 -o compression_type=z|",
        &["compression_type=zlib", "compression_type=zstd"],
    ),
    (
        "zebu convert -O qcow2 -o compat=1.1,lazy_refcounts=|",
        &[
            "compat=1.1,lazy_refcounts=off",
            "compat=1.1,lazy_refcounts=on",
        ],
    ),
    (
        "zebu create -f vmdk -o subformat=s|",
        &["subformat=streamOptimized"],
    ),
    (
        "zebu snapshot -a | disk.qcow2",
        &["before-upgrade", "monday"],
    ),
    ("zebu snapshot disk.qcow2 -d m|", &["monday"]),
    (
        "zebu convert -l before| disk.qcow2 x.raw",
        &["before-upgrade"],
    ),
    ("zebu bitmap --clear disk.qcow2 |", &["since-monday"]),
    (
        "zebu nbd -k x.sock --cache=w|",
        &["--cache=writeback", "--cache=writethrough"],
    ),
    ("zebu check -r |", &["all", "leaks"]),
    ("zebu info --output=j|", &["--output=json"]),
    ("zebu backup ver|", &["verify"]),
    ("zebu backup restore --po|", &["--point"]),
    ("zebu dd of=x bs|", &["bs="]),
    ("zebu io --cm|", &["--cmd"]),
    ("zebu info di|", &["disk.qcow2"]),
    ("zebu completions |", &["bash", "fish", "zsh"]),
    ("zebu nosuch |", &[]),
];

/// The words before the cursor, the one at it being the last, and those after it.
fn words(typed: &str) -> (Vec<String>, Vec<String>) {
    let (before, after) = typed.split_once('|').unwrap();
    let list = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
    (
        list(before),
        list(after)
            .into_iter()
            .filter(|word| !word.is_empty())
            .collect(),
    )
}

/// The lines of an answer, in order.
fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty())
        .collect();
    lines.sort_unstable();
    lines.dedup();
    lines
}

#[test]
fn the_program_knows_the_words() {
    if beyond_qemu("completions") {
        return;
    }
    let lab = lab();
    for (typed, expected) in CASES {
        let (before, after) = words(typed);
        let index = (before.len() - 1).to_string();
        let mut args = vec!["__complete", &index];
        args.extend(before.iter().chain(&after).map(String::as_str));
        let out = lab.zebu(&args).ok(typed).out;
        let (kind, list) = out.split_once('\n').unwrap();
        let files = ["zebu info di|", "zebu backup ver|"].contains(typed);
        assert_eq!(kind, if files { "files\t" } else { "words" }, "{typed}");
        let found: String = list
            .lines()
            .map(|line| format!("{}\n", line.split('\t').next().unwrap()))
            .collect();
        let words = expected
            .iter()
            .copied()
            .filter(|word| *word != "disk.qcow2");
        assert_eq!(sorted(&found), words.collect::<Vec<_>>(), "{typed}");
    }
    let files = |words: &[&str]| {
        let index = (words.len() - 1).to_string();
        lab.zebu(&[&["__complete", &index], words].concat())
            .ok("files")
            .out
    };
    assert_eq!(files(&["zebu", "dd", "if=di"]), "files\tif=\n");
    assert_eq!(files(&["zebu", "create", "-b", ""]), "files\t\n");
    assert_eq!(
        files(&["zebu", "create", "-f", "qcow2", "x", ""]),
        "words\n"
    );
    // What cannot be opened has no snapshots, and says nothing.
    let answer = lab
        .zebu(&["__complete", "3", "zebu", "snapshot", "-a", "", "nosuch"])
        .ok("no image");
    assert_eq!((answer.out.as_str(), answer.err.as_str()), ("words\n", ""));
}

/// Completes the cases in a shell. `script` is run for each by `shell` with what it says of the cursor.
fn in_shell(shell: &str, script: impl Fn(&str, &str) -> String) {
    if beyond_qemu("completions") || !have(shell) {
        return;
    }
    let lab = lab();
    let text = lab.zebu(&["completions", shell]).ok(shell).out;
    fs::write(lab.path("completions"), text).unwrap();
    for (typed, expected) in CASES {
        let (before, after) = typed.split_once('|').unwrap();
        if shell == "fish" && !after.is_empty() {
            // Outside of a terminal there is nothing after the cursor.
            continue;
        }
        let path = if shell == "fish" {
            ""
        } else {
            "PATH=$PWD/.bin:$PATH\n"
        };
        let script = format!("{path}{}", script(before, after));
        let args = match shell {
            "bash" => vec!["--norc", "-c", &script],
            "zsh" => vec!["-f", "-c", &script],
            _ => vec!["-N", "-c", &script],
        };
        let answer = lab.run(shell.as_ref(), &args, b"", &Limits::default());
        let expected: &[&str] = match *expected {
            // Bash looks for files itself.
            ["disk.qcow2"] if shell == "bash" => &[],
            expected => expected,
        };
        let last = before.rsplit(' ').next().unwrap();
        let shown: Vec<String> = match shell {
            // Bash replaces only what follows = and :.
            "bash" => {
                let kept = last.rfind('=').map_or("", |at| &last[..=at]);
                sorted(&answer.out)
                    .iter()
                    .map(|word| format!("{kept}{word}"))
                    .collect()
            }
            _ => sorted(&answer.out)
                .iter()
                .map(|word| word.to_string())
                .collect(),
        };
        assert_eq!(shown, expected, "{shell}: {typed}: {answer:#?}");
    }
}

#[test]
fn bash_shows_them() {
    in_shell("bash", |before, after| {
        format!(
            r#". ./completions
            line='{before}'; all='{before}{after}'
            COMP_LINE=$all COMP_POINT=${{#line}}
            _zebu zebu "${{line##*[ =:]}}" 2>/dev/null; printf '%s\n' "${{COMPREPLY[@]}}""#
        )
    });
}

#[test]
fn zsh_shows_them() {
    in_shell("zsh", |before, after| {
        let quoted = |text: &str| {
            text.split(' ')
                .map(|word| format!("'{word}' "))
                .collect::<String>()
        };
        let current = before.split(' ').count();
        let after = after.trim();
        let after = if after.is_empty() {
            String::new()
        } else {
            quoted(after)
        };
        // What the completion system has, printing what it gets.
        format!(
            r#"compdef() {{ : }}; compset() {{ : }}
            _files() {{ print -l -- ${{words[CURRENT]}}*(N) }}
            compadd() {{ local list=${{@[-1]}}; print -l -- "${{(@P)list}}" }}
            source ./completions
            words=({}{after}) CURRENT={current} PREFIX=$words[{current}]
            _zebu"#,
            quoted(before)
        )
    });
}

#[test]
fn fish_shows_them() {
    in_shell("fish", |before, _| {
        format!(
            "set -x PATH $PWD/.bin $PATH; source completions
             complete -C '{before}' | string replace -r '\\t.*' ''"
        )
    });
}
