//! `dd` must copy the same range as qemu-img to an output of the same size, and must refuse its
//! input as output.

use crate::common::pair::Pair;
use crate::common::{Lab, beyond_qemu, part};

fn inputs() -> Pair {
    Pair::new(
        "raw odd.raw 3000001; create in.qcow2 5M; random in.qcow2 1 30 wzc; \
         create -o cluster_size=512 small.qcow2 100000; random small.qcow2 2 20 w; \
         create -b in.qcow2 -F qcow2 over.qcow2 6M; random over.qcow2 3 10 wz",
    )
}

#[test]
fn bs_count_and_skip() {
    let pair = inputs();
    for input in ["odd.raw", "small.qcow2"] {
        for block in ["", "bs=1", "bs=511", "bs=1000", "bs=4097", "bs=1M"] {
            // qemu-img is slow with blocks of one byte.
            if block == "bs=1" && input == "odd.raw" {
                continue;
            }
            let parts = [
                &[][..],
                &["count=3"],
                &["count=3", "skip=2"],
                &["skip=2"],
                &["count=1", "skip=2"],
                &["count=100000000"],
                &["skip=100000000"],
                &["count=0"],
            ];
            for chosen in part(2, parts) {
                let of = format!("if={input}");
                let mut args = vec!["dd", &of, "of=out.raw"];
                args.extend(chosen);
                args.extend(Some(block).filter(|b| !b.is_empty()));
                pair.both(&args);
                let theirs = pair.theirs.path("out.raw");
                let theirs = theirs.to_str().expect("UTF-8");
                pair.ours
                    .assert_same_bytes("out.raw", theirs, &format!("{args:?}"));
            }
        }
    }
}

#[test]
fn formats() {
    let pair = inputs();
    for args in [
        &["dd", "-O", "qcow2", "bs=1M", "if=in.qcow2", "of=out"][..],
        &[
            "dd",
            "-O",
            "qcow2",
            "bs=1M",
            "skip=2",
            "if=over.qcow2",
            "of=out",
        ],
        &["dd", "-O", "raw", "bs=64k", "if=over.qcow2", "of=out"],
        &[
            "dd",
            "-f",
            "raw",
            "-O",
            "qcow2",
            "bs=64k",
            "if=small.qcow2",
            "of=out",
        ],
        &[
            "dd",
            "-f",
            "raw",
            "-O",
            "qcow2",
            "bs=64k",
            "count=0",
            "if=odd.raw",
            "of=out",
        ],
        &[
            "dd",
            "--image-opts",
            "bs=1M",
            "if=driver=qcow2,file.filename=in.qcow2",
            "of=out",
        ],
        &["dd", "-U", "bs=1M", "if=in.qcow2", "of=file:out"],
        // The last of equal operands is used.
        &["dd", "bs=7", "bs=1M", "if=none", "if=in.qcow2", "of=out"],
    ] {
        pair.succeed(args);
        pair.assert_alike(&["out"], &format!("{args:?}"));
    }
}

#[test]
fn outputs_in_use_are_refused() {
    let pair = inputs();
    let mut held = [&pair.ours, &pair.theirs].map(|lab| lab.held_by_qemu(&["in.qcow2"]));
    pair.fail(&["dd", "-O", "qcow2", "if=odd.raw", "of=in.qcow2"]);
    pair.fail(&["dd", "-f", "raw", "if=odd.raw", "of=in.qcow2"]);
    pair.fail(&["dd", "if=in.qcow2", "of=out.raw"]);
    for held in &mut held {
        held.command("flush");
    }
    drop(held);
    pair.assert_alike(&["in.qcow2"], "in use");
}

#[test]
fn refusals() {
    let pair = inputs();
    for args in [
        &["dd"][..],
        &["dd", "if=odd.raw"],
        &["dd", "of=out"],
        &["dd", "foo", "if=odd.raw", "of=out"],
        &["dd", "foo=1", "if=odd.raw", "of=out"],
        &["dd", "obs=1", "if=odd.raw", "of=out"],
        &["dd", "if=odd.raw", "of=out", "bs=0"],
        &["dd", "if=odd.raw", "of=out", "bs=-1"],
        &["dd", "if=odd.raw", "of=out", "bs=x"],
        &["dd", "if=odd.raw", "of=out", "bs=3G"],
        &["dd", "if=odd.raw", "of=out", "count=x"],
        &["dd", "if=odd.raw", "of=out", "count=-1"],
        &["dd", "if=odd.raw", "of=out", "skip=x"],
        &["dd", "if=none", "of=out"],
        &["dd", "-f", "nofmt", "if=odd.raw", "of=out"],
        &["dd", "-O", "nofmt", "if=odd.raw", "of=out"],
        &["dd", "if=", "of=out"],
        &["dd", "if=odd.raw", "of="],
        &["dd", "if=odd.raw", "of=/no/where"],
        &["dd", "-f", "raw", "--image-opts", "if=odd.raw", "of=out"],
    ] {
        pair.fail(args);
        assert!(!pair.ours.path("out").exists(), "{args:?}");
    }
}

#[test]
fn the_input_is_refused_as_output() {
    if beyond_qemu("it empties the file before it reads it") {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "raw a.raw 100000; raw same.raw 100000; img create -q -f qcow2 -F raw -b a.raw x.qcow2",
    );
    for args in [
        &["dd", "-f", "raw", "if=a.raw", "of=a.raw"][..],
        &["dd", "-f", "raw", "if=a.raw", "of=./a.raw"],
        &["dd", "if=x.qcow2", "of=a.raw"],
        &["dd", "if=x.qcow2", "of=x.qcow2"],
    ] {
        lab.zebu(args).failed_with_one_line(1, "onto itself");
        lab.assert_same_bytes("a.raw", "same.raw", "the input");
    }
}
