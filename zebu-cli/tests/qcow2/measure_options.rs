//! `measure -o`: each option that `create` has is taken, ignored or refused as the newest QEMU does, with
//! values of all kinds, alone and with another one.

use std::path::PathBuf;

use crate::common::{Lab, Limits, Rng, cases, peer, program};

const FORMATS: [&str; 6] = ["raw", "qcow2", "vmdk", "vdi", "vhdx", "vpc"];

const VALUES: [&str; 22] = [
    "on", "off", "", "1", "0", "8", "16", "512", "65536", "64k", "2M", "-1", "x", "metadata",
    "falloc", "full", "raw", "zstd", "0.10", "1.1", "v3", "aes",
];

/// The qemu-img that is compared with.
fn newest() -> PathBuf {
    std::env::var_os("ZEBU_QEMU_NEWEST").map_or_else(|| peer().img().to_owned(), PathBuf::from)
}

#[test]
fn options_are_taken_as_in_qemu() {
    let lab = Lab::new();
    let theirs = newest();
    let run = |program: &PathBuf, args: &[&str]| lab.run(program, args, b"", &Limits::default());
    let version = run(&theirs, &["--version"]).out;
    if !version.starts_with("qemu-img version 1") {
        println!("skipped: an older QEMU takes other options");
        return;
    }
    let ours = lab.path("qemu-img");
    std::os::unix::fs::symlink(program().canonicalize().expect("program"), &ours).expect("symlink");
    lab.make("raw x 1048576");
    let known = FORMATS.map(|format| {
        let help = run(&theirs, &["create", "-f", format, "-o", "help"]).out;
        let names = help.lines().filter_map(|line| line.split_once("=<"));
        let names = names.map(|(name, _)| name.trim().to_string());
        names.chain(["nonsense".into()]).collect::<Vec<_>>()
    });
    let mut differing = Vec::new();
    for seed in cases(150, "options of measure") {
        let mut rng = Rng::new(seed);
        // Most of them of qcow2, which has the most to say.
        let nth = if rng.one_in(2) {
            1
        } else {
            rng.below(6) as usize
        };
        let options = &known[nth];
        let mut list: Vec<_> = (0..1 + rng.below(2))
            .map(|_| {
                let name = &options[rng.below(options.len() as u64) as usize];
                format!("{name}={}", rng.pick(&VALUES))
            })
            .collect();
        // Encryption is refused, as without a secret there.
        list.retain(|item| item != "encrypt.format=luks");
        let list = list.join(",");
        let source = if rng.one_in(2) {
            &["--size", "1G"][..]
        } else {
            &["x"]
        };
        let output = rng.pick(&["human", "json"]);
        let args = [
            "measure",
            "--output",
            output,
            "-O",
            FORMATS[nth],
            "-o",
            &list,
        ];
        let args = [&args[..], source].concat();
        let [own, other] = [&ours, &theirs].map(|program| run(program, &args));
        if (own.status, &own.out) != (other.status, &other.out) {
            differing.push(format!("seed {seed}: {args:?}\n{own:#?}\n{other:#?}"));
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}
