//! Options and their values, by the definitions of the commands: what getopt takes as the value of an option
//! is taken, and nothing else is.

use crate::common::pair::Pair;
use crate::common::{Answer, Lab, beyond_qemu, part, rotated};

/// Options that no command has.
const NO_OPTIONS: [&str; 2] = ["-Y", "--no-such-option"];

/// Whether the value was taken for an option, or is missing.
fn is_refused(answer: &Answer) -> bool {
    let words = [
        "invalid option",
        "unrecognized option",
        "requires an argument",
    ];
    words.iter().any(|word| answer.err.contains(word))
}

/// The options of a command, each in all its spellings: whether it requires a value.
fn spellings(command: &clap::Command) -> Vec<(String, bool)> {
    let arguments = command.get_arguments();
    let options = arguments.filter(|arg| !arg.is_positional() && arg.get_id() != "help");
    options
        .flat_map(|arg| {
            let values = arg.get_num_args().expect("a built command");
            let requires_value = values.min_values() > 0 && !arg.is_require_equals_set();
            let long = arg.get_long().map(|name| format!("--{name}"));
            let short = arg.get_short().map(|letter| format!("-{letter}"));
            [long, short].map(|name| name.map(|name| (name, requires_value)))
        })
        .flatten()
        .collect()
}

#[test]
fn values_may_begin_with_a_dash() {
    if beyond_qemu("all commands of zebu") {
        return;
    }
    let lab = Lab::new();
    let mut seen = 0;
    for command in zebu_cli::commands() {
        let subs = command
            .get_subcommands()
            .filter(|sub| sub.get_name() != "help");
        let all = subs.map(|sub| (vec![command.get_name(), sub.get_name()], sub));
        for (name, command) in all.chain([(vec![command.get_name()], &command)]) {
            for (option, requires_value) in spellings(command) {
                seen += 1;
                let values = rotated([NO_OPTIONS[0], NO_OPTIONS[1], "-1", "-", "--"], seen);
                for value in part(5, values) {
                    if !requires_value && !NO_OPTIONS.contains(&value) {
                        // It is an operand, or ends the options.
                        continue;
                    }
                    let mut args = [&name[..], &[&*option, value]].concat();
                    if name == ["resize"] {
                        // Its last word is the size, also if that begins with a dash.
                        args.push("1M");
                    }
                    let answer = lab.zebu(&args);
                    assert_eq!(
                        is_refused(&answer),
                        !requires_value,
                        "{args:?}: {answer:#?}"
                    );
                    assert!(!answer.err.contains("panicked"), "{args:?}: {answer:#?}");
                }
            }
        }
    }
    assert!(seen > 300, "{seen} options");
}

/// With values that have a meaning, both programs do the same.
#[test]
fn such_values_mean_what_they_mean_in_qemu() {
    let pair = Pair::new("create x.qcow2 1M");
    pair.succeed(&["snapshot", "-c", "-name", "x.qcow2"]);
    pair.succeed(&["snapshot", "-a", "-name", "x.qcow2"]);
    pair.succeed(&["snapshot", "-d", "-name", "x.qcow2"]);
    for args in [
        &["create", "-f", "-raw", "y", "1M"][..],
        &["create", "-o", "-x", "y", "1M"],
        &["map", "-s", "-5", "x.qcow2"],
        &["convert", "-O", "--raw", "x.qcow2", "y"],
        &["snapshot", "-a", "--", "x.qcow2"],
    ] {
        pair.fail(args);
    }
    pair.succeed(&["bitmap", "--add", "x.qcow2", "--", "-bitmap"]);
}

#[test]
fn help_takes_the_name_of_a_command() {
    if beyond_qemu("help of a command") {
        return;
    }
    let lab = Lab::new();
    for words in [&["create"][..], &["backup"], &["backup", "list"]] {
        let help = lab.zebu(&[&["help"], words].concat()).ok("help");
        assert_eq!(help.out, lab.zebu(&[words, &["--help"]].concat()).out);
    }
    for words in [
        &["create", "extra"][..],
        &["create", "extra", "words"],
        &["create", "-f"],
        &["backup", "list", "x"],
        &["backup", "lost"],
        &["nothing"],
    ] {
        let answer = lab.zebu(&[&["help"], words].concat());
        assert_eq!(
            (answer.status, &*answer.out),
            (1, ""),
            "{words:?}: {answer:#?}"
        );
    }
}
