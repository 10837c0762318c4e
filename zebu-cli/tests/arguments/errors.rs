//! Frequent errors: images that are damaged, in use, missing or of another format, and invalid
//! requests.

use std::fs;

use super::common::{Lab, peer};
use super::{differences, files, intended, lay_out, template};

/// Commands on the files of the template and of `add_states`.
const REQUESTS: &[&str] = &[
    "info missing.q",
    "info folder",
    "info -f qcow2 disk.raw",
    "info -f nonsense base.q",
    "info nobacking.q",
    "map nobacking.q",
    "check nobacking.q",
    "convert nobacking.q new",
    "info version9.q",
    "check version9.q",
    "info feature.q",
    "convert feature.q new",
    "info cluster.q",
    "map l1.q",
    "info l1.q",
    "check l1.q",
    "info table.q",
    "resize table.q 8M",
    "info snapshots.q",
    "snapshot -l snapshots.q",
    "snapshot -c x snapshots.q",
    "check snapshots.q",
    "resize corrupt.q 8M",
    "snapshot -c x corrupt.q",
    "commit corrupt.q",
    "amend -o lazy_refcounts=on corrupt.q",
    "convert -O raw corrupt.q new",
    "info short.q",
    "check short.q",
    "check disk.raw",
    "snapshot -f raw -c x disk.raw",
    "snapshot -f raw -a x disk.raw",
    "snapshot -f raw -d x disk.raw",
    "amend -f raw -o size=1M disk.raw",
    "commit -f raw disk.raw",
    "rebase -f raw -b base.q -F qcow2 disk.raw",
    "rebase -f raw -u -b base.q -F qcow2 disk.raw",
    "rebase -f raw -c -b base.q -F qcow2 disk.raw",
    "resize -f raw disk.raw 4k",
    "resize -f raw disk.raw 0",
    "resize -f raw --preallocation=metadata disk.raw 8M",
    "resize -f raw --preallocation=falloc disk.raw 512k",
    "snapshot -a missing snap.q",
    "snapshot -d missing snap.q",
    "snapshot -c one snap.q",
    "convert -l missing -O raw snap.q new",
    "convert -l one -f raw -O raw disk.raw new",
    "measure -l missing -O qcow2 snap.q",
    "resize snap.q 1M --shrink",
    "resize base.q 1M",
    "resize base.q -100M --shrink",
    "resize base.q 9E",
    "resize old.q 100P",
    "create -f qcow2 folder 1M",
    "create -f qcow2 missing/x 1M",
    "create -f qcow2 new 100P",
    "create -f raw new 9E",
    "create -f qcow2 new",
    "create -f qcow2 new 1M 2M",
    "create -f qcow2 -b missing.q -F qcow2 new",
    "create -f qcow2 -b base.q new",
    "create -f qcow2 -b new -F qcow2 new 1M",
    "create -f raw -b base.q -F qcow2 new 1M",
    "create -f vmdx new 1M",
    "convert -O vmdx base.q new",
    "convert -c -O raw base.q new",
    "convert -c -O qcow2 -o preallocation=full base.q new",
    "convert -n -O qcow2 base.q missing.q",
    "convert -n -f raw -O raw disk.raw small.raw",
    "convert -n -O qcow2 base.q old.q",
    "convert -B missing.q -F qcow2 -O qcow2 base.q new",
    "convert -O qcow2 -B base.q over.q new",
    "convert base.q other.q folder",
    "convert -O qcow2 base.q missing/x",
    "convert -l one base.q snap.q new",
    "compare base.q other.q",
    "compare -s base.q snap.q",
    "compare base.q missing.q",
    "compare base.q version9.q",
    "rebase -b missing.q -F qcow2 over.q",
    "rebase -b base.q -F nonsense over.q",
    "rebase -b over.q -F qcow2 -u over.q",
    "rebase over.q",
    "commit base.q",
    "commit -b other.q over.q",
    "commit nobacking.q",
    "amend -o compat=0.10,lazy_refcounts=on base.q",
    "amend -o refcount_bits=1 snap.q",
    "amend -o cluster_size=4k base.q",
    "amend -o backing_file=other.q over.q",
    "dd if=base.q",
    "dd if=missing.q of=new",
    "dd if=base.q of=new bs=0",
    "dd if=base.q of=new skip=99999999",
    "dd if=base.q of=folder skip=99999999",
    "dd -O qcow2 if=base.q of=missing/x skip=99999999",
    "create -f raw -o preallocation=falloc,nocow=on new 1M",
    "create -f vdi -o preallocation=off,nocow=on new 1M",
    "convert -O raw -o nocow=x,refcount_bits=16 base.q new",
    "create -f qcow2 -o nocow=x,refcount_bits=x new 1M",
    "create -f qcow2 -o refcount_bits=0x10 new 1M",
    "create -f qcow2 -o refcount_bits=-1 new 1M",
    "measure -O bochs base.q",
    "measure -O vpc base.q",
    "measure -o , base.q",
    "measure -O vmdx base.q",
    "amend -o size=x,cluster_size=4k base.q",
    "amend -o cluster_size=4k,size=x base.q",
    "convert -T none -O raw folder new",
    "bench -t none -f raw folder",
    "bench missing.q",
    "bench -c 0 base.q",
    "bench -t nonsense base.q",
    "info --image-opts driver=nonsense,file.filename=base.q",
    "info --image-opts driver=qcow2,nonsense=on,file.filename=base.q",
    "info --image-opts driver=qcow2",
    "info json:{}",
    "info json:{\"driver\":\"qcow2\"}",
    "info nbd:unix:missing.sock",
    // No file is made there, not by root either.
    "create -f qcow2 /sys/new 1M",
    "create -f raw /sys/new 1M",
    "convert -O raw base.q /sys/new",
    "create -f qcow2 -o nonsense=on new 1M",
    "create -f qcow2 -o cluster_size=5 new 1M",
    "create -f qcow2 -o compat=2.0 new 1M",
    "create -f qcow2 new 1X",
    "create -f qcow2 new -1M",
    "convert -O qcow2 -o nonsense=on base.q new",
    "convert -O qcow2 -o size=1M base.q new",
    "resize base.q 1X",
    "resize base.q",
    "resize base.q +0",
    "resize missing.q 1M",
    "snapshot -c x missing.q",
    "rebase -b base.q -F qcow2 missing.q",
    "commit missing.q",
    "amend -o size=1M missing.q",
    "check missing.q",
    "map missing.q",
    "measure -O qcow2 missing.q",
    "convert missing.q new",
    "nonsense base.q",
];

/// Commands on an image that another program has open for writing.
const OF_HELD: &[&str] = &[
    "info base.q",
    "check base.q",
    "check -r all base.q",
    "map base.q",
    "convert -O raw base.q new",
    "convert -n -O qcow2 other.q base.q",
    "create -f qcow2 base.q 1M",
    "resize base.q 8M",
    "snapshot -c x base.q",
    "snapshot -l base.q",
    "commit over.q",
    "rebase -b \"\" over.q",
    "amend -o lazy_refcounts=on base.q",
    "compare base.q other.q",
    "measure -O qcow2 base.q",
    "dd if=base.q of=new",
    "bench -c 1 base.q",
];

/// Adds copies of `base.q` and `snap.q` with one error each.
fn add_states(lab: &Lab) {
    let copy = |from: &str, name: &str, at: u64, bytes: &[u8]| {
        fs::copy(lab.path(from), lab.path(name)).expect("copy");
        lab.patch(name, at, bytes);
    };
    copy("base.q", "version9.q", 4, &9u32.to_be_bytes());
    copy("base.q", "feature.q", 72, &(1u64 << 40).to_be_bytes());
    copy("base.q", "corrupt.q", 79, &[2]);
    copy("base.q", "cluster.q", 20, &30u32.to_be_bytes());
    copy("base.q", "l1.q", 40, &0x30001u64.to_be_bytes());
    copy("base.q", "table.q", 48, &0x10001u64.to_be_bytes());
    copy("snap.q", "snapshots.q", 64, &0x12345u64.to_be_bytes());
    let whole = fs::read(lab.path("base.q")).expect("read");
    fs::write(lab.path("short.q"), &whole[..60]).expect("write");
    lab.make("create -u -b missing.q -F qcow2 nobacking.q 1M");
    for name in ["noise", "text"] {
        fs::remove_file(lab.path(name)).expect("remove");
    }
}

#[test]
fn frequent_errors() {
    if !peer().is_current() {
        println!("skipped: an older QEMU has other messages");
        return;
    }
    let lab = template();
    add_states(&lab);
    let template = files(&lab);
    let mut differing = Vec::new();
    for request in REQUESTS {
        let args: Vec<&str> = request.split(' ').collect();
        let (ours, theirs) = (lay_out(&template), lay_out(&template));
        let found = differences(&ours, &theirs, &args, &template);
        if !found.all.is_empty() && intended::why(&args, &found).is_none() {
            differing.push(format!("{request}\n {}", found.all.join("\n ")));
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
    println!("\ncases: {} requests", REQUESTS.len());
}

#[test]
fn errors_of_images_in_use() {
    if !peer().is_current() {
        println!("skipped: an older QEMU has other messages");
        return;
    }
    let template = files(&template());
    let mut differing = Vec::new();
    for request in OF_HELD {
        let args: Vec<&str> = request.split(' ').map(|a| a.trim_matches('"')).collect();
        let labs = [lay_out(&template), lay_out(&template)];
        let held = labs.each_ref().map(|lab| lab.held_by_qemu(&["base.q"]));
        let found = differences(&labs[0], &labs[1], &args, &template);
        drop(held);
        if !found.all.is_empty() && intended::why(&args, &found).is_none() {
            differing.push(format!("{request}\n {}", found.all.join("\n ")));
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
    println!("\ncases: {} requests", OF_HELD.len());
}
