//! Guards against two programs that write to one image, which destroys it:
//! QEMU and zebu must exclude each other, in both directions, and must not
//! exclude readers from each other.

mod common;

use common::{Answer, Lab, assert_same_answer};

const IN_USE: &str = "Failed to get shared \"write\" lock";

fn image() -> Lab {
    let lab = Lab::new();
    lab.make(
        "create x.qcow2 4M; io x.qcow2: write -P 7 0 200k; \
         create -b x.qcow2 -F qcow2 overlay.qcow2; raw r.raw 1000000",
    );
    lab.settle();
    lab
}

#[track_caller]
fn in_use(answer: &Answer, status: i32, message: &str, file: &str) {
    let lines: Vec<&str> = answer.err.lines().collect();
    assert!(
        answer.status == status
            && lines.len() == 2
            && lines[0].ends_with(message)
            && lines[1] == format!("Is another process using the image [{file}]?"),
        "{message:?} about {file} and status {status} expected: {answer:#?}"
    );
}

#[test]
fn an_image_that_qemu_writes_is_refused_unless_shared() {
    let lab = image();
    let held = lab.held_by_qemu(&["x.qcow2"]);
    let message = format!("Could not open 'x.qcow2': {IN_USE}");
    for (status, args) in [
        (1, &["info", "x.qcow2"][..]),
        (1, &["map", "x.qcow2"]),
        (1, &["check", "x.qcow2"]),
        (1, &["measure", "-O", "raw", "x.qcow2"]),
        (1, &["bench", "-c", "1", "x.qcow2"]),
        (1, &["convert", "-O", "raw", "x.qcow2", "out.raw"]),
        (2, &["compare", "x.qcow2", "r.raw"]),
        (2, &["compare", "r.raw", "x.qcow2"]),
    ] {
        in_use(&lab.zebu(args), status, &message, "x.qcow2");
    }
    assert!(!lab.path("out.raw").exists());

    for args in [
        &["info", "-U", "x.qcow2"][..],
        &["info", "--force-share", "x.qcow2"],
        &["map", "-U", "--output=json", "x.qcow2"],
        &["check", "-U", "x.qcow2"],
        &["measure", "-U", "-O", "raw", "x.qcow2"],
        &["compare", "-U", "x.qcow2", "r.raw"],
    ] {
        assert_same_answer(&lab, args, "-U");
    }
    lab.zebu(&["convert", "-U", "-O", "raw", "x.qcow2", "out.raw"])
        .ok("-U");
    lab.zebu(&["bench", "-U", "-c", "1", "x.qcow2"]).ok("-U");
    drop(held);
    lab.zebu(&["convert", "-O", "raw", "x.qcow2", "later.raw"])
        .ok("afterwards");
    lab.assert_same_bytes("out.raw", "later.raw", "-U");
}

#[test]
fn a_backing_file_that_qemu_writes_is_refused_unless_shared() {
    let lab = image();
    let _held = lab.held_by_qemu(&["x.qcow2"]);
    let backing = format!("Could not open 'overlay.qcow2': Could not open backing file: {IN_USE}");
    in_use(&lab.zebu(&["map", "overlay.qcow2"]), 1, &backing, "x.qcow2");
    in_use(
        &lab.zebu(&["convert", "-O", "raw", "overlay.qcow2", "out.raw"]),
        1,
        &backing,
        "x.qcow2",
    );
    // info does not open backing files, until it is asked to.
    assert_same_answer(&lab, &["info", "overlay.qcow2"], "backing file in use");
    in_use(
        &lab.zebu(&["info", "--backing-chain", "overlay.qcow2"]),
        1,
        &format!("Could not open 'x.qcow2': {IN_USE}"),
        "x.qcow2",
    );
    assert_same_answer(&lab, &["map", "-U", "overlay.qcow2"], "-U");
    assert_same_answer(
        &lab,
        &["info", "-U", "--backing-chain", "overlay.qcow2"],
        "-U",
    );
}

#[test]
fn a_raw_image_that_qemu_writes_is_no_source_of_convert() {
    let lab = image();
    let _held = lab.held_by_qemu(&["-f", "raw", "r.raw"]);
    // Whoever opens a raw image shares everything, except convert, whose
    // source must not change.
    for args in [
        &["info", "-f", "raw", "r.raw"][..],
        &["map", "-f", "raw", "r.raw"],
        &["compare", "-F", "raw", "x.qcow2", "r.raw"],
    ] {
        assert_same_answer(&lab, args, "a raw image that is written");
    }
    let convert = ["convert", "-f", "raw", "-O", "raw", "r.raw", "out.raw"];
    in_use(
        &lab.zebu(&convert),
        1,
        &format!("Could not open 'r.raw': {IN_USE}"),
        "r.raw",
    );
}

#[test]
fn readers_share() {
    let lab = image();
    let _qemu = lab.held_by_qemu(&["-r", "x.qcow2"]);
    let mut zebu = lab.held_by_zebu(&["-r", "x.qcow2"]);
    assert_same_answer(&lab, &["info", "x.qcow2"], "two readers");
    assert!(zebu.command("read -P 7 0 4k").contains("read 4096/4096"));
    lab.qemu_img(&["check", "x.qcow2"]).ok("readers share");
    lab.qemu_io(&["-r", "-c", "read 0 4k", "x.qcow2"])
        .ok("readers share");
}

#[test]
fn an_image_that_zebu_reads_refuses_a_writer() {
    let lab = image();
    for args in [&["-r", "x.qcow2"][..], &["-r", "overlay.qcow2"]] {
        let held = lab.held_by_zebu(args);
        let refused = lab.qemu_io(&["-c", "write 0 4k", "x.qcow2"]);
        assert!(
            refused.status == 1 && refused.err.contains("Failed to get \"write\" lock"),
            "{refused:#?}"
        );
        drop(held);
        lab.qemu_io(&["-c", "write -P 7 0 4k", "x.qcow2"])
            .ok("the lock is gone");
    }
}

#[test]
fn an_image_that_zebu_may_write_refuses_readers() {
    let lab = image();
    // Without -r qemu-io opens for writing, whatever the commands are.
    let _held = lab.held_by_zebu(&["x.qcow2"]);
    in_use(
        &lab.qemu_img(&["info", "x.qcow2"]),
        1,
        &format!("Could not open 'x.qcow2': {IN_USE}"),
        "x.qcow2",
    );
    lab.qemu_img(&["info", "-U", "x.qcow2"]).ok("-U");
    in_use(
        &lab.zebu(&["info", "x.qcow2"]),
        1,
        &format!("Could not open 'x.qcow2': {IN_USE}"),
        "x.qcow2",
    );
    let refused = lab.zebu_io(&["-c", "read 0 4k", "x.qcow2"]);
    in_use(
        &refused,
        1,
        "can't open device x.qcow2: Failed to get \"write\" lock",
        "x.qcow2",
    );
}

#[test]
fn sharing_needs_a_reader() {
    let lab = image();
    let answer = lab.zebu_io(&["-U", "-c", "length", "x.qcow2"]);
    answer.failed_with_one_line(1, "-U for writing");
    assert!(
        answer
            .err
            .contains("force-share=on can only be used with read-only images"),
        "{answer:#?}"
    );
    let _held = lab.held_by_qemu(&["x.qcow2"]);
    lab.zebu_io(&["-r", "-U", "-c", "read -P 7 0 4k", "x.qcow2"])
        .ok("-r -U");
}

#[test]
fn no_output_over_the_input() {
    let lab = image();
    in_use(
        &lab.zebu(&["convert", "-O", "raw", "x.qcow2", "x.qcow2"]),
        1,
        "x.qcow2: error while converting raw: Failed to get \"write\" lock",
        "x.qcow2",
    );
    lab.qemu_img(&["check", "x.qcow2"]).ok("untouched");
}
