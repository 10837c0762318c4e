//! Every option that the help of the newest QEMU lists is an option of ours, or stands in [`LACKING`] with
//! the reason, which docs/compatibility.md tells too.
//!
//! The help is that of the QEMU whose qemu-img `ZEBU_QEMU_NEWEST` names (`scripts/get-qemu-newest.sh` prints
//! one), else of the one that all tests compare with.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::common::{Lab, Limits, peer, program};

/// Options of QEMU that are refused, by the program or command, and a part of the message that tells why.
const LACKING: &[(&str, &str, &str)] = &[
    ("qemu-nbd", "--connect", "kernel's nbd driver"),
    ("qemu-nbd", "-c", "kernel's nbd driver"),
    ("qemu-nbd", "--disconnect", "kernel's nbd driver"),
    ("qemu-nbd", "-d", "kernel's nbd driver"),
    ("qemu-nbd", "--tls-authz", "who has a certificate"),
    ("qemu-nbd", "--tls-hostname", "lists over TLS"),
];

/// A slip of the pen in the help of QEMU: the option is another one, of which this is the beginning.
const MISSPELT: &[&str] = &["--progres"];

/// The qemu-img whose help is read.
fn newest() -> PathBuf {
    std::env::var_os("ZEBU_QEMU_NEWEST").map_or_else(|| peer().img().to_owned(), PathBuf::from)
}

/// A program's answer to arguments, on both outputs.
fn said(lab: &Lab, program: &Path, args: &[&str]) -> String {
    let answer = lab.run(program, args, b"", &Limits::default());
    answer.out + &answer.err
}

/// The options that a help lists at the start of its lines, each with whether it takes a value.
fn options(help: &str) -> BTreeSet<(String, bool)> {
    let mut all = BTreeSet::new();
    for line in help.lines() {
        let text = line.trim_start();
        if text == line || !text.starts_with('-') {
            continue;
        }
        // What explains the option is apart.
        let list = text.split("  ").next().unwrap_or(text);
        let words: Vec<&str> = list
            .split([' ', ','])
            .filter(|word| !word.is_empty())
            .collect();
        let has_value = words.iter().any(|word| !word.starts_with('-')) || list.contains('=');
        let names = words.iter().take_while(|word| word.starts_with('-'));
        for name in names {
            let name = name.split(['=', '[']).next().unwrap_or(name);
            if !name.trim_start_matches('-').is_empty() {
                all.insert((name.to_string(), has_value));
            }
        }
    }
    all
}

/// Whether the program does not know the option.
fn is_unknown(said: &str) -> bool {
    [
        "invalid option",
        "unrecognized option",
        "doesn't allow an argument",
        "is ambiguous",
    ]
    .iter()
    .any(|text| said.contains(text))
}

/// Asks for the help behind each of the options: it is printed if the options before it are known.
fn check(lab: &Lab, called: &str, before: &[&str], help: &str, missing: &mut Vec<String>) -> usize {
    let path = lab.path(called);
    let mut seen = 0;
    for (option, has_value) in options(help) {
        if MISSPELT.contains(&&*option) {
            continue;
        }
        seen += 1;
        let value = if has_value { &["1"][..] } else { &[] };
        let args = [before, &[&*option], value].concat();
        let answer = said(lab, &path, &args);
        let what = [&[called], before].concat().join(" ");
        let why = LACKING
            .iter()
            .find(|(of, name, _)| *of == what && *name == option);
        let is_told = why.is_none_or(|(.., why)| answer.contains(why));
        if is_unknown(&answer) || answer.contains("panicked") || !is_told {
            missing.push(format!("{what} {option}: {answer}"));
        }
    }
    seen
}

#[test]
fn every_option_of_qemu_is_known() {
    let lab = Lab::new();
    let ours = program().canonicalize().expect("the program under test");
    for name in ["qemu-img", "qemu-io", "qemu-nbd"] {
        std::os::unix::fs::symlink(&ours, lab.path(name)).expect("symlink");
    }
    let img = newest();
    let beside = |name: &str| img.with_file_name(name);
    let mut missing = Vec::new();
    let mut seen = 0;
    let help = said(&lab, &img, &["--help"]);
    seen += check(&lab, "qemu-img", &[], &help, &mut missing);
    for line in help.lines() {
        // A version without descriptions has lines of another form, and no help for a command.
        let Some((command, _)) = line.trim_start().split_once(" - ") else {
            continue;
        };
        let help = said(&lab, &img, &[command, "--help"]);
        seen += check(&lab, "qemu-img", &[command], &help, &mut missing);
    }
    for name in ["qemu-io", "qemu-nbd"] {
        let help = said(&lab, &beside(name), &["--help"]);
        seen += check(&lab, name, &[], &help, &mut missing);
    }
    // The commands of qemu-io's language, with the letters that their usage shows.
    let theirs = said(&lab, &beside("qemu-io"), &["-c", "help"]);
    let own = said(&lab, &lab.path("qemu-io"), &["-c", "help"]);
    let lines = |help: &str| -> BTreeSet<String> {
        let usages = help.lines().filter_map(|line| line.split_once(" -- "));
        usages.map(|(usage, _)| usage.trim().to_string()).collect()
    };
    for usage in lines(&theirs).difference(&lines(&own)) {
        missing.push(format!("qemu-io's command {usage}"));
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    println!("\ncases: {seen} options");
}

/// What is refused on purpose is told where the differences are.
#[test]
fn what_is_lacking_is_documented() {
    let text = include_str!("../../../docs/compatibility.md");
    for (_, option, _) in LACKING {
        assert!(text.contains(&format!("`{option}`")), "{option}");
    }
}
