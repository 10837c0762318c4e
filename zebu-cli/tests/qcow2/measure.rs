//! The length of streams, as `measure` says it before. Guards against a length that is not that of
//! the stream that `convert` writes.

use serde_json::Value;

use crate::common::{Lab, beyond_qemu};

/// Fails the test unless `measure` says the length of the stream that is written with the same
/// options.
fn assert_measured(lab: &Lab, options: &str, image: &str) {
    let what = format!("{options} {image}");
    let script = format!("\"$0\" convert {options} {image} - | wc -c");
    let written = lab.shell(&script).ok(&what).out.clone();
    let script = format!("\"$0\" measure --stream --output=json {options} {image}");
    let answer = lab.shell(&script);
    let said: Value = serde_json::from_str(&answer.ok(&what).out).expect("JSON");
    assert_eq!(said["stream"].to_string(), written.trim(), "{what}");
    let script = format!("\"$0\" measure --stream {options} {image}");
    let said = lab.shell(&script).ok(&what).out.clone();
    let line = format!("stream size: {}\n", written.trim());
    assert!(said.ends_with(&line), "{what}: {said}");
    if options.contains("-S") {
        return;
    }
    // The rest is what it is without the stream.
    let script = format!("\"$0\" measure {options} {image}");
    let rest = lab.shell(&script).ok(&what).out.clone();
    assert_eq!(said, rest + &line, "{what}");
}

#[test]
fn the_length_of_a_stream_is_known_before() {
    if beyond_qemu("QEMU writes no streams") {
        return;
    }
    let lab = Lab::new();
    lab.make(
        "create i 30000128; random i 21 150 wzc; raw r 5000001; create e 100M; create n 0; \
         create base 20M; random base 22 80 w; create -b base -F qcow2 over 24M; \
         random over 23 60 wz; create -o extended_l2=on s 9M; random s 24 100 wzud; \
         create z 40M; io z: write -z 0 10M; io z: write -P 0 10M 10M; io z: write -P 5 39M 5000",
    );
    let images = [
        "-f qcow2 i",
        "-f raw r",
        "-f qcow2 e",
        "-f qcow2 n",
        "over",
        "s",
        "z",
    ];
    for options in [
        "-O raw",
        "-O qcow2",
        "-O qcow2 -S 0",
        "-O qcow2 -S 4k",
        "-O qcow2 -S 1M",
        "-O qcow2 -o cluster_size=512",
        "-O qcow2 -o cluster_size=2M",
        "-O qcow2 -o compat=0.10",
        "-O qcow2 -o extended_l2=on",
        "-O qcow2 -o extended_l2=on,cluster_size=16k -S 4k",
        "-O qcow2 -o refcount_bits=64,cluster_size=512 -S 0",
        "-O qcow2 -o refcount_bits=1",
    ] {
        for image in images {
            assert_measured(&lab, options, image);
        }
    }
    lab.zebu(&["snapshot", "-c", "a", "i"]).ok("snapshot");
    lab.zebu(&["io", "-c", "write 5M 100k", "i"]).ok("write");
    assert_measured(&lab, "-O qcow2 -l a", "-f qcow2 i");
}

#[test]
fn streams_whose_length_is_not_known_are_refused() {
    if beyond_qemu("QEMU writes no streams") {
        return;
    }
    let lab = Lab::new();
    lab.make("create i 3M");
    for (options, why) in [
        ("--size 1M", "--stream requires a filename argument"),
        ("-O vmdk -o subformat=streamOptimized i", "does not support"),
        (
            "-O qcow2 -o preallocation=full i",
            "cannot have preallocation",
        ),
        (
            "-O qcow2 -o data_file=d i",
            "cannot have an external data file",
        ),
        (
            "-O qcow2 -S 1000 i",
            "Invalid buffer size for sparse output",
        ),
    ] {
        let args = ["measure", "--stream"]
            .into_iter()
            .chain(options.split(' '));
        let answer = lab.zebu(&args.collect::<Vec<_>>());
        assert!(answer.err.contains(why), "{options}: {answer:#?}");
        answer.failed_with_one_line(1, options);
    }
    let answer = lab.zebu(&["measure", "-S", "4k", "i"]);
    assert!(answer.err.contains("-S requires --stream"), "{answer:#?}");
    assert!(!lab.path("d").exists());
}
