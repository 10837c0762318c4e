//! Images made by QEMU: `convert`, `map`, `info`, `check`, `measure` and `compare` must give the same
//! result with both programs.
//!
//! Each line of the tables below is a recipe (`common/recipe.rs`) that makes the image `x.qcow2`.

use crate::common::{Lab, assert_same_answer, compare_answers, part, rotated};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// Makes each image and compares all reports and the content.
#[track_caller]
fn images(recipes: &[&str]) {
    for (i, recipe) in recipes.iter().enumerate() {
        let lab = Lab::new();
        let what = format!("image: {recipe}");
        println!("{what}");
        lab.make(recipe);
        examine(&lab, i, &what);
    }
}

/// Compares each second report of the image of this index.
fn examine(lab: &Lab, i: usize, what: &str) {
    lab.sync_files();
    let before = fs::metadata(lab.path("x.qcow2")).expect("x.qcow2");

    let reports = [
        &["info", "x.qcow2"][..],
        &["info", "--output=json", "x.qcow2"],
        &["info", "--backing-chain", "x.qcow2"],
        &["info", "--backing-chain", "--output=json", "x.qcow2"],
        &["info", "-f", "qcow2", "x.qcow2"],
        &["map", "x.qcow2"],
        &["map", "--output=json", "x.qcow2"],
        &[
            "map",
            "--output=json",
            "--start-offset=70000",
            "--max-length=300000",
            "x.qcow2",
        ],
        &["check", "x.qcow2"],
        &["check", "--output=json", "x.qcow2"],
        &["measure", "--output=json", "-O", "qcow2", "x.qcow2"],
        &["measure", "--output=json", "-O", "raw", "x.qcow2"],
        &["measure", "x.qcow2"],
    ];
    for args in part(2, rotated(reports, i)) {
        assert_same_answer(lab, args, what);
    }

    let info = lab.qemu_img(&["info", "-U", "--output=json", "x.qcow2"]);
    let info: serde_json::Value = serde_json::from_str(&info.out).expect("JSON");
    for snapshot in info["snapshots"].as_array().into_iter().flatten() {
        let name = snapshot["name"].as_str().expect("name");
        let id = format!("snapshot.id={}", snapshot["id"].as_str().expect("id"));
        same_raw(lab, &["-l", name], what);
        same_raw(lab, &["-l", &id], what);
        let size = fs::metadata(lab.path("ours.raw")).unwrap().len();
        if info["virtual-size"].as_u64() != Some(size.next_multiple_of(512)) {
            // QEMU measures it with the size of the disk.
            continue;
        }
        assert_same_answer(
            lab,
            &[
                "measure",
                "--output=json",
                "-O",
                "qcow2",
                "-l",
                name,
                "x.qcow2",
            ],
            what,
        );
    }
    same_raw(lab, &[], what);

    // theirs.raw has the content of the image.
    let args = ["compare", "x.qcow2", "theirs.raw"];
    let same = assert_same_answer(lab, &args, what);
    assert_eq!(same.out, "Images are identical.\n", "{what}");
    let size = info["virtual-size"].as_u64().expect("size");
    if size > 0 {
        let at = size / 3 * 2;
        let file = File::options()
            .read(true)
            .write(true)
            .open(lab.path("theirs.raw"))
            .expect("open");
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("read");
        file.write_all_at(&[byte[0] ^ 0x10], at).expect("write");
        let changed = assert_same_answer(lab, &args, what);
        assert_eq!(changed.status, 1, "{what}");
        assert!(
            changed.out.starts_with("Content mismatch at offset "),
            "{what}: {changed:?}"
        );
    }

    let after = fs::metadata(lab.path("x.qcow2")).expect("x.qcow2");
    assert_eq!(
        before.modified().expect("time"),
        after.modified().expect("time"),
        "{what}: reading commands must not write to the image"
    );
}

/// Converts with both programs and compares the files. Leaves QEMU's as `theirs.raw`.
fn same_raw(lab: &Lab, options: &[&str], what: &str) {
    for name in ["ours.raw", "theirs.raw"] {
        let _ = fs::remove_file(lab.path(name));
    }
    let args = |output| {
        let mut args = vec!["convert", "-O", "raw"];
        args.extend(options);
        args.extend(["x.qcow2", output]);
        args
    };
    let ours = lab.zebu(&args("ours.raw"));
    let theirs = lab.qemu_img(&args("theirs.raw"));
    compare_answers(&ours, &theirs, &args("ours.raw"), what);
    assert_eq!(ours.status, 0, "{what}: {ours:#?}");
    if options.contains(&"-l") {
        // QEMU's has the size of the disk.
        let length = fs::metadata(lab.path("ours.raw")).unwrap().len();
        let theirs = fs::OpenOptions::new()
            .write(true)
            .open(lab.path("theirs.raw"));
        theirs.unwrap().set_len(length).unwrap();
    }
    lab.assert_same_bytes("ours.raw", "theirs.raw", what);
}

#[test]
fn versions_and_cluster_sizes() {
    images(&[
        "create -o compat=0.10 x.qcow2 8M; random x.qcow2 1 60 wwzcd",
        "create -o compat=1.1 x.qcow2 8M; random x.qcow2 2 60 wwzucd",
        "create -o cluster_size=512 x.qcow2 2M; random x.qcow2 3 100 wwzucd",
        "create -o compat=0.10,cluster_size=512 x.qcow2 1M; random x.qcow2 4 80 wwcd",
        "create -o cluster_size=4k x.qcow2 4M; random x.qcow2 5 100 wwzucd",
        "create -o compat=0.10,cluster_size=4k x.qcow2 4M; random x.qcow2 6 80 wwcd",
        "create -o cluster_size=2M x.qcow2 64M; random x.qcow2 7 25 wwzucd",
    ]);
}

#[test]
fn refcount_widths() {
    images(&[
        "create -o refcount_bits=1 x.qcow2 4M; random x.qcow2 11 40 wwzud",
        "create -o refcount_bits=2 x.qcow2 4M; random x.qcow2 12 40 wwzud; img snapshot -c s x.qcow2; random x.qcow2 13 20 wzud",
        "create -o refcount_bits=4 x.qcow2 4M; random x.qcow2 14 40 wwzucd",
        "create -o refcount_bits=8 x.qcow2 4M; random x.qcow2 15 40 wwzucd",
        "create -o refcount_bits=32 x.qcow2 4M; random x.qcow2 16 40 wwzucd",
        "create -o refcount_bits=64 x.qcow2 4M; random x.qcow2 17 40 wwzucd",
        "create -o refcount_bits=64,cluster_size=512 x.qcow2 1M; random x.qcow2 18 40 wwzucd",
    ]);
}

#[test]
fn subclusters() {
    images(&[
        "create -o extended_l2=on x.qcow2 4M; random x.qcow2 21 60 wwzud",
        "create -o extended_l2=on,cluster_size=16k x.qcow2 4M; random x.qcow2 22 80 wwzucd",
        "create -o extended_l2=on,cluster_size=128k x.qcow2 16M; random x.qcow2 23 80 wwzucd",
        "create -o extended_l2=on,cluster_size=2M x.qcow2 64M; random x.qcow2 24 25 wwzucd",
        "create -o extended_l2=on,compression_type=zstd x.qcow2 8M; random x.qcow2 25 60 wwzucd; img snapshot -c s x.qcow2; random x.qcow2 26 30 wzucd",
        "create -o extended_l2=on,preallocation=metadata x.qcow2 4M; random x.qcow2 27 30 wwzud",
        "create base.qcow2 3M; random base.qcow2 28 30 w; create -o extended_l2=on -b base.qcow2 -F qcow2 x.qcow2 4M; random x.qcow2 29 50 wwzud",
    ]);
}

#[test]
fn compressed() {
    images(&[
        "raw r.raw 5000000; img convert -c -O qcow2 r.raw x.qcow2",
        "raw r.raw 5000000; img convert -c -O qcow2 -o compression_type=zstd r.raw x.qcow2",
        "raw r.raw 3000000; img convert -c -O qcow2 -o cluster_size=4k r.raw x.qcow2",
        "raw r.raw 1000000; img convert -c -O qcow2 -o cluster_size=512 r.raw x.qcow2",
        "raw r.raw 9000000; img convert -c -O qcow2 -o cluster_size=2M,compression_type=zstd r.raw x.qcow2",
        "img convert -c -O qcow2 text x.qcow2; random x.qcow2 31 6 w",
        "raw r.raw 5000000; img convert -c -O qcow2 -o extended_l2=on,compression_type=zstd r.raw x.qcow2; random x.qcow2 32 20 wz",
        "create -o compression_type=zstd x.qcow2 8M; random x.qcow2 33 60 wcccd",
    ]);
}

#[test]
fn chains() {
    images(&[
        "raw base.raw 3000000; create -b base.raw -F raw x.qcow2 4M; random x.qcow2 41 30 wzud",
        "raw base.raw 6000000; create -b base.raw -F raw x.qcow2 4M; random x.qcow2 42 20 wzud",
        "create base.qcow2 2M; random base.qcow2 43 20 wzc; create -b base.qcow2 -F qcow2 x.qcow2 4M; random x.qcow2 44 20 wzud",
        "create base.qcow2 8M; random base.qcow2 45 30 wzc; create -b base.qcow2 -F qcow2 x.qcow2 4M",
        "raw base.raw 3000000; create -b base.raw -F raw mid.qcow2 2M; random mid.qcow2 46 20 wzud; create -o cluster_size=4k -b mid.qcow2 -F qcow2 x.qcow2 5M; random x.qcow2 47 30 wzucd",
        "create -o cluster_size=2M base.qcow2 6M; random base.qcow2 48 4 w; create -o compat=0.10,cluster_size=512 -b base.qcow2 -F qcow2 mid.qcow2 3M; random mid.qcow2 49 20 w; create -b mid.qcow2 -F qcow2 x.qcow2 6M; random x.qcow2 50 12 wzuc",
        "create base.qcow2 1000448; random base.qcow2 51 20 w; create -b base.qcow2 -F qcow2 x.qcow2 2000384; random x.qcow2 52 10 wz",
        "raw base.raw 1000001; create -b base.raw -F raw x.qcow2 2000384; random x.qcow2 53 10 wz",
        "create base.qcow2 2M; random base.qcow2 54 20 w; create -b json:{\"driver\":\"qcow2\",\"file.filename\":\"base.qcow2\"} -F qcow2 x.qcow2 2M; random x.qcow2 55 5 w",
        "create base.qcow2 2M; random base.qcow2 56 20 w; create -b file:base.qcow2 -F qcow2 x.qcow2 2M; random x.qcow2 57 5 w",
        "raw base.raw 0; create -b base.raw -F raw x.qcow2 1M; random x.qcow2 58 5 w",
    ]);
}

#[test]
fn data_files() {
    images(&[
        "create -o data_file=d.raw x.qcow2 4M; random x.qcow2 61 40 wwzud",
        "create -o data_file=d.raw,data_file_raw=on x.qcow2 4M; random x.qcow2 62 40 wwzd",
        "create -o data_file=d.raw,extended_l2=on x.qcow2 4M; random x.qcow2 63 40 wwzud",
        "create -o data_file=d.raw,preallocation=metadata x.qcow2 4M; random x.qcow2 64 10 wwzd",
        "raw base.raw 2000000; create -o data_file=d.raw -b base.raw -F raw x.qcow2 3M; random x.qcow2 65 20 wz",
    ]);
}

#[test]
fn snapshots() {
    images(&[
        "create x.qcow2 8M; random x.qcow2 71 30 wzuc; img snapshot -c first x.qcow2; random x.qcow2 72 30 wzucd; img snapshot -c second x.qcow2; random x.qcow2 73 10 wd",
        "create -o compat=0.10,cluster_size=4k x.qcow2 2M; random x.qcow2 74 30 w; img snapshot -c a x.qcow2; img snapshot -c b x.qcow2; random x.qcow2 75 30 w; img snapshot -d a x.qcow2",
        "create x.qcow2 4M; random x.qcow2 76 20 w; img snapshot -c s x.qcow2; random x.qcow2 77 20 w; img snapshot -a s x.qcow2",
        "create x.qcow2 4M; img snapshot -c empty x.qcow2; random x.qcow2 78 20 w; img resize -q x.qcow2 6M; random x.qcow2 79 10 w",
        "raw base.raw 3000000; create -b base.raw -F raw x.qcow2 4M; img snapshot -c s x.qcow2; random x.qcow2 80 20 wz; img snapshot -c t x.qcow2",
    ]);
}

#[test]
fn preallocation() {
    images(&[
        "create -o preallocation=off x.qcow2 4M",
        "create -o preallocation=metadata x.qcow2 4M; random x.qcow2 81 10 wzud",
        "create -o preallocation=falloc x.qcow2 4M; random x.qcow2 82 10 wzud",
        "create -o preallocation=full x.qcow2 4M; random x.qcow2 83 10 wzud",
        "create -o preallocation=metadata,cluster_size=4k x.qcow2 4M",
        "create -o preallocation=metadata,lazy_refcounts=on x.qcow2 3000320",
    ]);
}

#[test]
fn zeroes_and_discards() {
    images(&[
        "create x.qcow2 4M; io x.qcow2: write -P 1 0 1M | write -z 64k 128k | write -z -u 512k 128k | write -z 2M 64k | write -z -u 3M 64k",
        "create x.qcow2 4M; io x.qcow2: write -P 1 0 1M | discard 64k 128k | discard 512k 1000 | discard 700000 64k",
        "raw base.raw 3000000; create -b base.raw -F raw x.qcow2 4M; io x.qcow2: write -P 1 0 1M | discard 64k 128k | write -z -u 512k 128k | write -z 2M 512k | discard 0 64k",
        "create -o compat=0.10 x.qcow2 4M; io x.qcow2: write -P 1 0 1M | discard 64k 128k | write -z 512k 128k",
        "create x.qcow2 4M; io x.qcow2: write -P 0 0 1M | write -P 1 100 1 | write -P 0 2M 3",
        "create x.qcow2 4M; io x.qcow2: write -z 0 4M",
    ]);
}

#[test]
fn sizes() {
    images(&[
        "create x.qcow2 0",
        "create x.qcow2 512; io x.qcow2: write -P 1 0 512",
        "create x.qcow2 1000448; random x.qcow2 91 20 wz",
        "create -o cluster_size=4k x.qcow2 1000448; random x.qcow2 92 20 wzuc",
        "create -o cluster_size=2M x.qcow2 3000320; random x.qcow2 93 10 wz",
        "create x.qcow2 65536; io x.qcow2: write -P 1 0 64k",
        "create x.qcow2 66048; io x.qcow2: write -P 1 65536 512",
        "create x.qcow2 1T; io x.qcow2: write -P 1 0 1k | write -P 2 500G 70000 | write -z 700G 64k | write -P 3 1099511626752 1k",
        "create -o cluster_size=2M,extended_l2=on x.qcow2 1T; io x.qcow2: write -P 1 5k 1k | write -P 2 500G 70000",
        "create x.qcow2 4M; random x.qcow2 94 20 w; img resize -q --shrink x.qcow2 1000448",
        "create x.qcow2 1000448; random x.qcow2 95 20 w; img resize -q x.qcow2 4M",
    ]);
}

#[test]
fn bitmaps_and_other_metadata() {
    images(&[
        "create x.qcow2 4M; img bitmap --add x.qcow2 one; img bitmap --add -g 4k x.qcow2 two; random x.qcow2 101 20 w; img bitmap --disable x.qcow2 two",
        "create -o lazy_refcounts=on x.qcow2 4M; random x.qcow2 102 20 wz",
        "create -o lazy_refcounts=on x.qcow2 4M; img bitmap --add x.qcow2 b; crash x.qcow2: write -P 1 1M 64k",
        "create base.qcow2 1M; create -o backing_file=base.qcow2,backing_fmt=qcow2 x.qcow2; img rebase -u -b base.qcow2 -F qcow2 x.qcow2",
    ]);
}

#[test]
fn crashed_writers() {
    images(&[
        "create -o lazy_refcounts=on x.qcow2 4M; crash x.qcow2: write -P 1 0 64k | write -P 2 1M 200k",
        "create -o lazy_refcounts=on x.qcow2 4M; crash x.qcow2: write -P 1 0 64k | flush | write -P 2 1M 200k",
        "create x.qcow2 4M; crash x.qcow2: write -P 1 0 64k | write -P 2 1M 200k | flush | write -P 3 2M 64k",
    ]);
}
