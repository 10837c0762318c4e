//! Disks of 0 bytes, which some formats cannot hold. Guards against a success whose image nobody
//! opens, and against a refusal that has touched the target.

use std::fs;

use crate::common::{Answer, Lab, beyond_qemu, part};

/// A form of a target, and whether a disk of 0 bytes can be opened in it.
type Form = (&'static str, &'static str, bool);

const FORMS: [Form; 20] = [
    ("raw", "", true),
    ("qcow2", "", true),
    ("qcow2", "compat=0.10", true),
    ("qcow2", "extended_l2=on", true),
    ("qcow2", "preallocation=full", true),
    ("qcow2", "data_file=data", true),
    ("vhdx", "", true),
    ("vhdx", "subformat=fixed", true),
    ("vdi", "", true),
    ("vdi", "static=on", true),
    ("vpc", "", true),
    ("vpc", "force_size=on", true),
    ("vpc", "subformat=fixed", false),
    ("vpc", "subformat=fixed,force_size=on", false),
    ("vmdk", "", false),
    ("vmdk", "subformat=monolithicFlat", false),
    ("vmdk", "subformat=twoGbMaxExtentSparse", false),
    ("vmdk", "subformat=twoGbMaxExtentFlat", false),
    ("vmdk", "subformat=streamOptimized", false),
    ("vmdk", "adapter_type=lsilogic", false),
];

/// `empty.raw` and `empty.qcow2`, and `source`, which is not empty.
fn sources() -> Lab {
    let lab = Lab::new();
    fs::write(lab.path("empty.raw"), b"").unwrap();
    fs::write(lab.path("source"), vec![7; 3 << 20]).unwrap();
    lab.make("img create -q -f qcow2 empty.qcow2 0");
    lab
}

/// The names of all files, sorted.
fn names(lab: &Lab) -> Vec<String> {
    let entries = fs::read_dir(lab.path("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// Runs `make`, which writes `out` in the format, without and with a file of this name before. Fails
/// the test unless both programs open the result or, if that cannot be opened, nothing was written.
#[track_caller]
fn judge(lab: &Lab, format: &str, opens: bool, what: &str, make: &dyn Fn() -> Answer) {
    const OLD: &[u8] = b"kept";
    for old in [None, Some(OLD)] {
        if let Some(old) = old {
            fs::write(lab.path("out"), old).unwrap();
        }
        let before = names(lab);
        let answer = make();
        if opens {
            answer.ok(what);
            let info = ["info", "-f", format, "out"];
            lab.qemu_img(&info).ok(what);
            lab.zebu(&info).ok(what);
            let compare = ["compare", "-f", format, "-F", "raw", "out", "empty.raw"];
            lab.qemu_img(&compare).ok(what);
            lab.zebu(&compare).ok(what);
        } else {
            answer.failed_with_one_line(1, what);
            let says = answer.err.contains(" of 0 bytes could not be opened");
            assert!(says, "{what}: {answer:#?}");
            assert_eq!(names(lab), before, "{what}");
            let kept = old.is_none_or(|old| fs::read(lab.path("out")).unwrap() == old);
            assert!(kept, "{what}: the target has changed");
        }
        for name in ["out", "data"] {
            let _ = fs::remove_file(lab.path(name));
        }
    }
}

#[test]
fn conversions() {
    if beyond_qemu("QEMU writes what it cannot open") {
        return;
    }
    let lab = sources();
    for (format, options, opens) in part(2, FORMS) {
        let options = match options {
            "" => vec![],
            options => vec!["-o", options],
        };
        for (from, source) in [("raw", "empty.raw"), ("qcow2", "empty.qcow2")] {
            let start = ["convert", "-f", from, "-O", format];
            let all = [&start[..], &options, &[source, "out"]].concat();
            let what = all.join(" ");
            judge(&lab, format, opens, &what, &|| lab.zebu(&all));
            // QEMU ends with an error, too, or aborts, and leaves files behind.
            let before = names(&lab);
            let theirs = lab.qemu_img(&all).status;
            assert_eq!(theirs == 0, opens, "{what}: QEMU");
            for name in names(&lab).iter().filter(|name| !before.contains(name)) {
                fs::remove_file(lab.path(name)).unwrap();
            }
        }
        let options = options.join(" ");
        let script =
            format!("\"$0\" convert -f raw -O {format} {options} --spill . - out < empty.raw");
        judge(&lab, format, opens, &script, &|| lab.shell(&script));
    }
}

#[test]
fn streams() {
    if beyond_qemu("QEMU writes no streams") {
        return;
    }
    let lab = sources();
    let stream = "subformat=streamOptimized";
    for (format, options, opens) in part(2, FORMS) {
        let is_stream = ["raw", "qcow2"].contains(&format) || options == stream;
        if !is_stream || options.contains("data_file") || options.contains("preallocation") {
            continue;
        }
        let options = match options {
            "" => String::new(),
            options => format!("-o {options}"),
        };
        let convert = format!("\"$0\" convert -f qcow2 -O {format} {options} empty.qcow2 -");
        match opens {
            true => {
                let script = format!("{convert} > out");
                judge(&lab, format, opens, &script, &|| lab.shell(&script));
            }
            false => {
                let answer = lab.shell(&convert);
                answer.fails_with(" of 0 bytes could not be opened");
                assert_eq!(answer.out, "", "{convert}");
            }
        }
    }
}

#[test]
fn parts_and_appliances() {
    if beyond_qemu("QEMU writes what it cannot open") {
        return;
    }
    let lab = sources();
    for (format, options, opens) in part(2, FORMS) {
        if !options.is_empty() {
            continue;
        }
        for operands in [
            &["if=source", "skip=3", "bs=1M"][..],
            &["if=source", "skip=9", "bs=1M"],
            &["if=source", "count=0"],
            &["if=empty.raw"],
        ] {
            let all = [&["dd", "-f", "raw", "-O", format, "of=out"], operands].concat();
            judge(&lab, format, opens, &all.join(" "), &|| lab.zebu(&all));
        }
    }
    for disks in [&["empty.raw"][..], &["source", "empty.raw"]] {
        let all = [&["ova", "-f", "raw", "--output", "out"], disks].concat();
        judge(&lab, "ova", false, &all.join(" "), &|| lab.zebu(&all));
    }
}
