//! `amend`: the content must stay, also that of snapshots, and the image must be consistent, with
//! another version (version 2 has no zero clusters) and another refcount width. An option that is
//! accepted must be applied, and one that cannot be applied must be refused before any change.

use crate::common::Lab;
use crate::common::beyond_qemu;
use crate::common::pair::{Pair, assert_content};
use crate::common::part;

#[track_caller]
fn amend(pair: &Pair, options: &str) {
    pair.succeed(&["amend", "-o", options, "a.qcow2"]);
    pair.assert_alike(&["a.qcow2"], options);
}

#[test]
fn versions_and_refcounts() {
    let images = [
        "lazy_refcounts=on,cluster_size=4k",
        "cluster_size=64k",
        "cluster_size=512",
    ];
    for create in part(3, images) {
        let pair = Pair::new(&format!(
            "create -o {create} a.qcow2 5M; random a.qcow2 4 30 wzud"
        ));
        let before = ["convert", "-O", "raw", "a.qcow2", "before.raw"];
        pair.ours.qemu_img(&before).ok("convert");
        for options in [
            "compat=0.10",
            "compat=0.10",
            "compat=1.1",
            "lazy_refcounts=on",
            "refcount_bits=64",
            "refcount_bits=1",
            "refcount_bits=2,lazy_refcounts=off",
            "compat=v2,refcount_bits=16",
            "compat=v3,refcount_bits=32,lazy_refcounts=on",
            "refcount_bits=8",
            "compat=0.10,refcount_bits=16",
            "compat=1.1",
            "compat=0.10",
        ] {
            amend(&pair, options);
            assert_content(&pair.ours, "a.qcow2", "before.raw", options);
        }
        // It can still be written to.
        pair.ours.make("random a.qcow2 5 30 wzc");
        pair.ours.qemu_img(&["check", "a.qcow2"]).ok("check");
    }
}

/// QEMU takes a minute to change the refcount width here.
#[test]
fn large_clusters() {
    let lab = Lab::new();
    lab.make("create -o cluster_size=2M a.qcow2 5M; random a.qcow2 4 30 wzud");
    lab.make("img convert -O raw a.qcow2 before.raw");
    for options in [
        "refcount_bits=64",
        "refcount_bits=1",
        "compat=0.10,refcount_bits=16",
    ] {
        if beyond_qemu("it takes very long") {
            break;
        }
        lab.zebu(&["amend", "-o", options, "a.qcow2"]).ok(options);
        lab.qemu_img(&["check", "a.qcow2"]).ok(options);
        assert_content(&lab, "a.qcow2", "before.raw", options);
    }
}

/// Refcount tables larger than a cluster.
#[test]
fn many_refcounts() {
    let pair = Pair::new(
        "create -o cluster_size=512 a.qcow2 64M; \
         io a.qcow2: write -P 1 0 3M | write -P 2 20M 1M | write -P 3 60M 2M",
    );
    for options in [
        "refcount_bits=64",
        "refcount_bits=1",
        "refcount_bits=16",
        "compat=0.10",
    ] {
        amend(&pair, options);
    }
}

#[test]
fn zero_clusters_and_a_backing_file() {
    for size in ["3M", "2000384"] {
        let pair = Pair::new(&format!(
            "create base.qcow2 2M; io base.qcow2: write -P 9 0 2M; \
             create -b base.qcow2 -F qcow2 a.qcow2 {size}; random a.qcow2 7 40 wzuzud"
        ));
        for options in ["compat=0.10", "compat=1.1"] {
            amend(&pair, options);
        }
    }
}

/// QEMU leaves images here that fail its own check.
#[test]
fn zero_clusters_of_snapshots() {
    if beyond_qemu("it breaks the refcount flags") {
        return;
    }
    for backing in ["", "-b base.qcow2 -F qcow2"] {
        let lab = Lab::new();
        lab.make(&format!(
            "create base.qcow2 2M; io base.qcow2: write -P 9 0 2M; \
             create {backing} a.qcow2 2M; random a.qcow2 7 30 wz; \
             img snapshot -c one a.qcow2; random a.qcow2 8 20 zw; \
             img snapshot -c two a.qcow2; img snapshot -c three a.qcow2; \
             random a.qcow2 9 10 wzu; img convert -O raw a.qcow2 now.raw"
        ));
        for name in ["one", "two", "three"] {
            let raw = format!("{name}.raw");
            lab.make(&format!("img convert -l {name} -O raw a.qcow2 {raw}"));
        }
        lab.zebu(&["amend", "-o", "compat=0.10", "a.qcow2"])
            .ok("amend");
        lab.qemu_img(&["check", "a.qcow2"]).ok("check");
        lab.zebu(&["check", "a.qcow2"]).ok("check");
        assert_content(&lab, "a.qcow2", "now.raw", "active");
        for name in ["one", "two", "three"] {
            let args = ["convert", "-l", name, "-O", "raw", "a.qcow2", "x.raw"];
            lab.qemu_img(&args).ok("convert");
            assert_content(&lab, "x.raw", &format!("{name}.raw"), "a snapshot");
        }
        let info = lab.qemu_img(&["info", "a.qcow2"]).ok("info").out;
        assert!(info.contains("compat: 0.10"), "{info}");
        // Version 2 has no zero clusters.
        for name in ["one", "two", "three"] {
            lab.qemu_img(&["snapshot", "-a", name, "a.qcow2"])
                .ok("apply");
            lab.qemu_img(&["check", "a.qcow2"]).ok("check");
        }
    }
}

#[test]
fn sizes() {
    let pair = Pair::new("create a.qcow2 5M; random a.qcow2 4 30 wzc");
    for options in [
        "size=8M",
        "size=8M",
        // A multiple of the cluster size: otherwise QEMU shows the data that was cut off when it
        // grows the disk.
        "size=983040",
        "size=4M,compat=0.10",
        "size=1000448",
        // Has no effect.
        "size=0",
    ] {
        amend(&pair, options);
    }
    pair.fail(&["amend", "-o", "size=1000", "a.qcow2"]);
    let pair = Pair::new("create a.qcow2 5M; random a.qcow2 4 30 w; img snapshot -c s a.qcow2");
    for options in ["size=8M", "size=1M", "refcount_bits=64", "refcount_bits=2"] {
        amend(&pair, options);
    }
    pair.fail(&["amend", "-o", "compat=0.10", "a.qcow2"]);
    pair.fail(&["amend", "-o", "refcount_bits=1", "a.qcow2"]);
    pair.assert_alike(&["a.qcow2"], "after refusals");
}

#[test]
fn data_files() {
    let pair = Pair::new("create -o data_file=d,data_file_raw=on a.qcow2 1M; random a.qcow2 4 9 w");
    for options in ["data_file_raw=on", "data_file=./d", "data_file_raw=off"] {
        amend(&pair, options);
    }
    pair.fail(&["amend", "-o", "data_file_raw=on", "a.qcow2"]);
    pair.fail(&["amend", "-o", "compat=0.10", "a.qcow2"]);
    for name in ["e", ""] {
        let option = format!("data_file={name}");
        pair.succeed(&["amend", "-o", &option, "a.qcow2"]);
        let info = [&pair.ours, &pair.theirs].map(|lab| {
            lab.qemu_img(&["info", "a.qcow2"])
                .out
                .contains("data file: e")
        });
        assert_eq!(info[0], info[1], "{option}");
        if name == "e" {
            pair.fail(&["amend", "-o", "data_file_raw=off", "a.qcow2"]);
            pair.ours.make("raw e 1048576");
            pair.theirs.make("raw e 1048576");
        }
    }
}

#[test]
fn refusals() {
    let pair = Pair::new(
        "create a.qcow2 1M; raw a.raw 1024; create base.qcow2 1M; \
         create -b base.qcow2 -F qcow2 o.qcow2; create -o extended_l2=on ext.qcow2 1M; \
         create -o compat=0.10 old.qcow2 1M; create -o refcount_bits=8 narrow.qcow2 1M",
    );
    for args in [
        &["amend"][..],
        &["amend", "a.qcow2"],
        &["amend", "-o", "help"],
        &["amend", "-f", "raw", "-o", "help"],
        &["amend", "-f", "nofmt", "-o", "help"],
        &["amend", "-o", "compat=1.1"],
        &["amend", "-o", "compat=1.1", "a.qcow2", "b"],
        &["amend", "-o", "compat=1.1", "none"],
        &["amend", "-o", "foo=1", "a.qcow2"],
        &["amend", "-o", "nocow=on", "a.qcow2"],
        &["amend", "-o", "", "a.qcow2"],
        &["amend", "-o", ",size=1", "a.qcow2"],
        &["amend", "-o", "cluster_size=64k", "a.qcow2"],
        &["amend", "-o", "preallocation=off", "a.qcow2"],
        &["amend", "-o", "encryption=off", "a.qcow2"],
        &["amend", "-o", "encrypt.format=luks", "a.qcow2"],
        &["amend", "-o", "compression_type=zlib", "a.qcow2"],
        &["amend", "-o", "extended_l2=off", "a.qcow2"],
        &["amend", "-o", "encrypt.new-secret=x", "a.qcow2"],
        &["amend", "-o", "encrypt.iter-time=9", "a.qcow2"],
        &["amend", "-o", "compat=foo", "a.qcow2"],
        &["amend", "-o", "lazy_refcounts=foo", "a.qcow2"],
        &["amend", "-o", "refcount_bits=x", "a.qcow2"],
        &["amend", "-o", "refcount_bits=3", "a.qcow2"],
        &["amend", "-o", "refcount_bits=128", "a.qcow2"],
        &["amend", "-o", "size=x", "a.qcow2"],
        &["amend", "-o", "size=-1", "a.qcow2"],
        &["amend", "-o", "backing_file=base.qcow2", "a.qcow2"],
        &["amend", "-o", "backing_file=base.qcow2", "o.qcow2"],
        &["amend", "-o", "backing_fmt=raw", "o.qcow2"],
        &["amend", "-o", "data_file=d", "a.qcow2"],
        &["amend", "-o", "data_file_raw=on", "a.qcow2"],
        &["amend", "-o", "compat=0.10", "ext.qcow2"],
        &["amend", "-o", "compat=0.10", "narrow.qcow2"],
        &["amend", "-o", "lazy_refcounts=on", "old.qcow2"],
        &["amend", "-o", "refcount_bits=8", "old.qcow2"],
        &["amend", "-o", "compat=0.10,lazy_refcounts=on", "a.qcow2"],
        &["amend", "-t", "foo", "-o", "compat=1.1", "a.qcow2"],
        &["amend", "-f", "raw", "-o", "size=1", "a.raw"],
    ] {
        pair.fail(args);
    }
    pair.assert_alike(
        &[
            "a.qcow2",
            "o.qcow2",
            "ext.qcow2",
            "old.qcow2",
            "narrow.qcow2",
        ],
        "after refusals",
    );
    let held = [&pair.ours, &pair.theirs].map(|lab| lab.held_by_qemu(&["a.qcow2"]));
    pair.fail(&["amend", "-o", "compat=1.1", "a.qcow2"]);
    drop(held);
}

#[test]
fn accepted_options() {
    let pair = Pair::new("create a.qcow2 1M");
    for args in [
        &["amend", "-f", "qcow2", "-o", "help"][..],
        &["amend", "-o", "help", "a.qcow2"],
        &["amend", "-o", "size=1,help", "a.qcow2"],
        &["amend", "-q", "-p", "-o", "compat=1.1", "a.qcow2"],
        &[
            "amend",
            "--force",
            "-t",
            "none",
            "-o",
            "nolazy_refcounts",
            "a.qcow2",
        ],
        &["amend", "-o", "data_file_raw=off", "a.qcow2"],
        &[
            "amend",
            "--image-opts",
            "-o",
            "compat=v3",
            "driver=qcow2,file.filename=a.qcow2",
        ],
    ] {
        pair.succeed(args);
    }
    pair.assert_alike(&["a.qcow2"], "amended");
    let args = ["amend", "-p", "-o", "compat=0.10", "a.qcow2"];
    let answer = pair.ours.zebu(&args).ok("progress");
    assert!(answer.out.starts_with("    (0.00/100%)\r"), "{answer:#?}");
    assert!(answer.out.ends_with("    (100.00/100%)\r\n"), "{answer:#?}");
}

/// QEMU only clears the feature bit, after which the compressed data cannot be read.
#[test]
fn zstd_is_not_downgraded() {
    if beyond_qemu("it makes the image unreadable") {
        return;
    }
    let lab = Lab::new();
    lab.make("create -o compression_type=zstd a.qcow2 1M; io a.qcow2: write -c -s text 0 64k");
    lab.zebu(&["amend", "-o", "compat=0.10", "a.qcow2"])
        .failed_with_one_line(1, "zstd");
    lab.qemu_io(&["-c", "read 0 64k", "a.qcow2"]).ok("read");
}
