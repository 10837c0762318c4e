//! What the documentation shows works: each example of the help, each line of the guide, man pages.

use std::fs;

use crate::common::documented::Documented;
use crate::common::server::have;
use crate::common::{Lab, Limits, beyond_qemu};

/// The commands that the help lists.
fn commands(lab: &Lab) -> Vec<String> {
    let help = lab.zebu(&["help"]).ok("help").out;
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = list.map_while(|line| line.strip_prefix("  ")?.split(' ').next().map(String::from));
    names.collect()
}

#[test]
fn examples_of_the_help_work() {
    if beyond_qemu("the documentation") {
        return;
    }
    let names = commands(&Lab::new());
    assert!(names.len() > 20, "{names:?}");
    for name in &names {
        let examples = zebu_cli::examples_of(name);
        assert!(!examples.is_empty(), "{name} has no examples");
        let at = Documented::new();
        at.run("sha256sum disk.qcow2 > SHA256SUMS").ok("sums");
        if name == "convert" {
            at.run("zebu snapshot -c before-upgrade disk.qcow2")
                .ok("snapshot");
        }
        let help = at.lab.zebu(&["help", name]).ok(name).out;
        for (what, line) in examples {
            assert!(
                help.contains(&format!("  # {what}\n  {line}\n")),
                "{name}: {line}\n{help}"
            );
            at.run(line).ok(line);
        }
    }
}

#[test]
fn the_guide_works() {
    if beyond_qemu("the documentation") {
        return;
    }
    let text = include_str!("../../../docs/guide.md");
    for section in text.split("\n## ").skip(1) {
        let at = Documented::new();
        let title = section.lines().next().unwrap();
        for block in section.split("```sh\n").skip(1) {
            let (lines, _) = block.split_once("```").unwrap();
            at.run(lines).ok(&format!("{title}: {lines}"));
        }
    }
}

#[test]
fn man_pages_are_rendered_without_warnings() {
    if beyond_qemu("man pages") {
        return;
    }
    let lab = Lab::new();
    lab.zebu(&["manual", "man", "2026-01-02"]).ok("manual");
    let names = commands(&lab);
    for name in &names {
        let page = fs::read_to_string(lab.path(&format!("man/zebu-{name}.1"))).expect(name);
        for section in [
            "NAME",
            "SYNOPSIS",
            "OPTIONS",
            "EXAMPLES",
            "EXIT STATUS",
            "SEE ALSO",
        ] {
            assert!(page.contains(section), "{name} has no {section}:\n{page}");
        }
    }
    let convert = fs::read_to_string(lab.path("man/zebu-convert.1")).unwrap();
    assert!(
        convert.starts_with(".TH ZEBU-CONVERT 1 \"2026-01-02\" \"zebu "),
        "{convert}"
    );
    assert!(
        convert.contains(r"\fB\-\-target\-format\fR \fI<FMT>\fR"),
        "{convert}"
    );
    let pages: Vec<_> = fs::read_dir(lab.path("man"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    let pages: Vec<_> = pages
        .iter()
        .map(|name| format!("man/{}", name.to_str().unwrap()))
        .collect();
    for (program, options) in [
        ("groff", &["-man", "-Tutf8", "-ww", "-z"][..]),
        ("mandoc", &["-Tlint", "-Wwarning"]),
    ] {
        if !have(program) {
            continue;
        }
        for page in &pages {
            let args = [options, &[page.as_str()]].concat();
            let answer = lab.run(program.as_ref(), &args, b"", &Limits::default());
            let said = (answer.err.as_str(), answer.out.as_str());
            assert_eq!((answer.status, said), (0, ("", "")), "{program} {page}");
        }
    }
}

#[test]
fn man_pages_have_a_date_or_none() {
    if beyond_qemu("man pages") {
        return;
    }
    let lab = Lab::new();
    lab.zebu(&["manual", "none"]).ok("manual");
    let page = fs::read_to_string(lab.path("none/zebu.1")).unwrap();
    assert!(page.starts_with(".TH ZEBU 1 \"\" \"zebu "), "{page}");
    lab.zebu(&["manual", "leap", "2028-02-29"]).ok("a date");
    for date in [
        "2026-1-2",
        "26-01-02",
        "2026-13-02",
        "2026-00-02",
        "2026-01-32",
        "2026-01-00",
        "+026-01-02",
        "2026/01/02",
        "2026-01-02 ",
        "2026-01-0\u{e9}",
        "x\" y\n.sy id",
        "today",
    ] {
        lab.zebu(&["manual", "bad", date])
            .failed_with_one_line(1, date);
    }
    for args in [&["manual", ""][..], &["manual", "", "2026-01-02"]] {
        lab.zebu(args).failed_with_one_line(1, "no folder");
    }
    let entries = fs::read_dir(lab.path("")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["leap", "none"]);
}
