//! Memory that is short. The tables of an image are as long as it says, so what cannot be had for them is
//! an error with a message, where an abort would say nothing of the image.
//!

use crate::common::{Answer, Lab, Limits, Rng, beyond_qemu, cases};

/// Runs the program with so many KiB of address space.
fn limited(lab: &Lab, kib: u64, args: &[&str]) -> Answer {
    let limits = Limits {
        memory: Some(kib),
        ..Limits::default()
    };
    lab.zebu_limited(args, &limits)
}

#[test]
fn tables_that_do_not_fit_are_an_error() {
    const TABLE: u64 = 30 << 10;
    if beyond_qemu("other programs need more memory") {
        return;
    }
    let lab = Lab::new();
    // An L1 table of 30 MiB.
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=512",
        "big.q",
        "120G",
    ];
    lab.zebu(&create).ok("an image");
    // What the program needs for an image with small tables, within a step.
    lab.make("create small.q 1M");
    let starts = |kib: &u64| limited(&lab, *kib, &["info", "small.q"]).status == 0;
    let least = (1..200).map(|nth| nth * 4096).find(starts);
    let least = least.expect("a limit that is enough");
    let mut refused = 0;
    let mut seeds = cases(30, "limits of memory");
    const COMMANDS: [&str; 10] = [
        "info big.q",
        "check big.q",
        "check -r all big.q",
        "map big.q",
        "measure -O qcow2 big.q",
        "snapshot -l big.q",
        "bitmap --add big.q b",
        "io -c quit big.q",
        "resize big.q 121G",
        "compare big.q big.q",
    ];
    for seed in &mut seeds {
        let line = COMMANDS[seed as usize % COMMANDS.len()];
        let args: Vec<&str> = line.split(' ').collect();
        let mut rng = Rng::new(seed);
        let kib = least + 4096 + rng.below(TABLE - 8192);
        let answer = limited(&lab, kib, &args);
        let what = format!("{line} with {kib} KiB");
        answer.orderly(&what);
        if answer.status != 0 {
            assert!(
                answer.err.contains("Cannot allocate memory"),
                "{what}: {answer:#?}"
            );
            refused += 1;
        }
        // Whatever failed has left the image as it was.
        lab.zebu(&["check", "-q", "big.q"]).ok(line);
    }
    assert!(
        refused > 0 || !zebu_testkit::are_usual(),
        "memory was never short"
    );
}
