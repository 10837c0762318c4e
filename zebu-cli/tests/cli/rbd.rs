//! Images in Ceph, with a cluster that `ZEBU_CEPH_CONF` names the configuration of (`make stores`).
//! Guards against images that differ from those of local files, and from what QEMU sees of them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::http::{qemu_img_with, qemu_modules};
use super::stores::run;
use crate::common::web::images;
use crate::common::{Answer, Lab, Limits, beyond_qemu, compare_answers};

/// The cluster.
struct Ceph {
    conf: PathBuf,
    /// For the environment of the programs.
    variables: String,
    /// What the images of the test are called by.
    prefix: String,
}

impl Ceph {
    /// None: there is none.
    fn find() -> Option<Ceph> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let Some(conf) = std::env::var_os("ZEBU_CEPH_CONF").map(std::path::absolute) else {
            println!("skipped: ZEBU_CEPH_CONF names no cluster");
            return None;
        };
        let conf = conf.unwrap();
        let nth = NEXT.fetch_add(1, Ordering::SeqCst);
        Some(Ceph {
            variables: format!("CEPH_CONF='{}'", conf.display()),
            conf,
            prefix: format!("zebu-{}-{nth}", std::process::id()),
        })
    }

    fn name(&self, image: &str) -> String {
        format!("rbd:rbd/{}-{image}", self.prefix)
    }

    fn zebu(&self, lab: &Lab, args: &[&str]) -> Answer {
        run(lab, &self.variables, args)
    }

    /// Runs Ceph's program `rbd`, with `@` for the test's prefix.
    fn rbd(&self, lab: &Lab, args: &str) {
        let args = args.replace('@', &self.prefix).replace('#', "@");
        let args: Vec<&str> = args.split(' ').collect();
        let program = self.conf.with_file_name("rbd");
        lab.run(&program, &args, b"", &Limits::default()).ok("rbd");
    }
}

impl Drop for Ceph {
    fn drop(&mut self) {
        let lab = Lab::new();
        let program = self.conf.with_file_name("rbd");
        let run = |args: &[&str]| lab.run(&program, args, b"", &Limits::default());
        for image in run(&["ls"])
            .out
            .lines()
            .filter(|i| i.starts_with(&self.prefix))
        {
            run(&["snap", "purge", image]);
            run(&["rm", image]);
        }
    }
}

#[test]
fn ceph_is_written_and_read() {
    let Some(ceph) = Ceph::find() else { return };
    if beyond_qemu("librbd") {
        return;
    }
    let lab = images(48 << 20);
    std::fs::create_dir(lab.path("here")).unwrap();
    let steps = [
        "convert -f raw -O raw x.raw @a.raw",
        "convert -O qcow2 x.qcow2 @c.qcow2",
        "convert -O qcow2 -c x.qcow2 @d.qcow2",
        "convert -n -O qcow2 x.qcow2 @d.qcow2",
        "convert -n -f qcow2 -O raw x.qcow2 @a.raw",
        "create -f raw @b.raw 64M",
        "create -f qcow2 -o preallocation=metadata @h.qcow2 3M",
        "create -f qcow2 -b @c.qcow2 -F qcow2 @i.qcow2",
        "resize @c.qcow2 +8M",
        "resize -f raw @b.raw 20M --shrink",
        "resize -f raw @b.raw 70M",
        "snapshot -c one @c.qcow2",
        "amend -o refcount_bits=32 @d.qcow2",
        "check -r all @d.qcow2",
    ];
    for step in steps {
        let there = step.replace('@', &ceph.name(""));
        ceph.zebu(&lab, &there.split(' ').collect::<Vec<_>>())
            .ok(&there);
        let here = step.replace('@', &lab.path("here/").display().to_string());
        lab.zebu(&here.split(' ').collect::<Vec<_>>()).ok(&here);
    }
    let script = "write -P 7 1M 3M\nwrite -z 2M 64k\ndiscard 5M 1M\nflush\nwrite -P 1 100 300\n\
                  write -z -u 8M 8M\naio_write -P 5 17M 1M\naio_write -P 6 18M 1M\naio_flush\n";
    for (image, format) in [("i.qcow2", "qcow2"), ("b.raw", "raw")] {
        let variables = &ceph.variables;
        let io = format!(
            "printf '{}' | {variables} \"$0\" io -f {format} {}",
            script.replace('\n', "\\n"),
            ceph.name(image)
        );
        let args = ["-c", &io, crate::common::program().to_str().unwrap()];
        lab.run("sh".as_ref(), &args, b"", &Limits::default())
            .ok(image);
        let here = format!("here/{image}");
        assert_eq!(lab.zebu_io_script(&["-f", format, &here], script).status, 0);
    }
    for name in ["a.raw", "b.raw", "c.qcow2", "d.qcow2", "h.qcow2", "i.qcow2"] {
        let (_, format) = name.split_once('.').unwrap();
        let (there, here) = (ceph.name(name), format!("here/{name}"));
        let args = ["compare", "-f", format, "-F", format, &there, &here];
        ceph.zebu(&lab, &args).ok(name);
        if format == "qcow2" {
            ceph.zebu(&lab, &["check", &there]).ok(name);
        }
        let back = ["convert", "-f", format, "-O", "raw", &there, "out.raw"];
        ceph.zebu(&lab, &back).ok(name);
        lab.qemu_img(&["compare", "-f", "raw", "-F", format, "out.raw", &here])
            .ok(name);
    }
}

#[test]
fn ceph_is_seen_as_by_qemu() {
    let Some(ceph) = Ceph::find() else { return };
    let Some(modules) = qemu_modules() else {
        println!("skipped: no QEMU with modules");
        return;
    };
    if beyond_qemu("librbd") {
        return;
    }
    let lab = images(48 << 20);
    ceph.zebu(&lab, &["convert", "-O", "raw", "x.qcow2", &ceph.name("a")])
        .ok("convert");
    ceph.rbd(&lab, "snap create @-a#s");
    ceph.rbd(
        &lab,
        "create --size 40M --object-size 1M --image-feature layering @-plain",
    );
    ceph.rbd(&lab, "snap protect @-a#s");
    ceph.rbd(&lab, "clone @-a#s @-clone");
    let (name, conf) = (ceph.name("a"), ceph.conf.display());
    let (snapshot, clone) = (format!("{name}@s"), ceph.name("clone"));
    let with_conf = format!("{snapshot}:id=admin:conf={conf}");
    let image = format!("{}-a", ceph.prefix);
    let options = format!("driver=rbd,pool=rbd,image={image},snapshot=s,user=admin,conf={conf}");
    let plain = ceph.name("plain");
    let variables = format!("QEMU_MODULE_DIR='{modules}' {}", ceph.variables);
    // Data in the clone, and a hole.
    let (far, hole) = ("3M", "9M");
    for image in [&clone, &plain] {
        let script = format!(
            "{} \"$0\" io -f raw -c 'write -P 3 {far} 5M' -c 'discard {hole} 4M' {image}",
            ceph.variables
        );
        let args = ["-c", &script, crate::common::program().to_str().unwrap()];
        lab.run("sh".as_ref(), &args, b"", &Limits::default())
            .ok("write");
    }
    for args in [
        &["map", "--output=json", "-f", "raw", &name][..],
        &["map", "--output=json", "-f", "raw", &snapshot],
        &["map", "--output=json", "-f", "raw", &clone],
        &["map", "--output=json", "-f", "raw", &plain],
        &["measure", "-f", "raw", "-O", "qcow2", &clone],
        &["info", "rbd:"],
        &["info", "rbd:rbd/none"],
        &["info", "rbd:none/none"],
        &["info", "rbd:rbd/x:x"],
        &["info", "rbd:rbd/x:x=y"],
        &["info", "--image-opts", "driver=rbd,pool=rbd"],
        &["info", "--image-opts", "driver=rbd,image=x"],
    ] {
        let ours = ceph.zebu(&lab, args);
        let theirs = qemu_img_with(&lab, &variables, args);
        compare_answers(&ours, &theirs, args, &format!("{args:?}"));
    }
    // The names that are shown.
    for args in [
        &["info", "-f", "raw", &name][..],
        &["info", "-f", "raw", &with_conf],
        &["info", "--image-opts", &options],
    ] {
        // The order of the fields is that of QEMU's hash table.
        let first = |answer: Answer| -> serde_json::Value {
            let name = answer.out.lines().next().unwrap_or_default();
            let name = name.strip_prefix("image: ").expect("a name");
            match name.strip_prefix("json:") {
                Some(text) => serde_json::from_str(text).expect("JSON"),
                None => name.into(),
            }
        };
        let ours = first(ceph.zebu(&lab, args).ok("ours"));
        assert_eq!(
            ours,
            first(qemu_img_with(&lab, &variables, args)),
            "{args:?}"
        );
    }
    for image in [&name, &clone, &plain] {
        let args = ["convert", "-f", "raw", "-O", "raw", image];
        ceph.zebu(&lab, &[&args[..], &["out.raw"]].concat())
            .ok(image);
        qemu_img_with(&lab, &variables, &[&args[..], &["theirs.raw"]].concat()).ok(image);
        lab.assert_same_bytes("out.raw", "theirs.raw", image);
    }
    let answer = ceph.zebu(&lab, &["resize", "-f", "raw", &snapshot, "1M"]);
    answer.fails_with("a snapshot is only read");
    let answer = ceph.zebu(&lab, &["create", "-f", "raw", &name, "1M"]);
    answer.fails_with("error rbd create: File exists");
    let answer = ceph.zebu(
        &lab,
        &["convert", "-f", "raw", "-O", "raw", "-n", &name, &name],
    );
    answer.fails_with("The input is read from this file");
    let answer = ceph.zebu(&lab, &["info", "--untrusted", &name]);
    answer.fails_with("must be a path");
}
