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

    /// Runs commands of `io` on a raw image.
    fn io(&self, lab: &Lab, image: &str, commands: &[&str]) {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let name = self.name(image);
        let args = ["io", "-f", "raw"].into_iter().chain(commands);
        let args: Vec<&str> = args.chain([&*name]).collect();
        self.zebu(lab, &args).ok(image);
    }

    /// Whether zebu reads what Ceph's program `rbd` exports.
    fn is_as_exported(&self, lab: &Lab, image: &str) {
        self.rbd(lab, &format!("export --no-progress @-{image} theirs.raw"));
        let name = self.name(image);
        self.zebu(
            lab,
            &["convert", "-f", "raw", "-O", "raw", &name, "out.raw"],
        )
        .ok(image);
        lab.assert_same_bytes("out.raw", "theirs.raw", image);
        std::fs::remove_file(lab.path("theirs.raw")).unwrap();
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

/// Objects that do not follow each other, and those of an image that was cloned from.
#[test]
fn ceph_has_clones_and_stripes() {
    let Some(ceph) = Ceph::find() else { return };
    if beyond_qemu("librbd") {
        return;
    }
    let lab = Lab::new();
    ceph.rbd(&lab, "create --size 13M --object-size 1M @-parent");
    let script = [
        "write -P 1 1M 1M",
        "write -P 2 6M 512k",
        "write -P 3 12M 1M",
    ];
    ceph.io(&lab, "parent", &script);
    ceph.rbd(&lab, "snap create @-parent#s");
    ceph.rbd(&lab, "snap protect @-parent#s");
    for size in ["512K", "1M", "4M"] {
        let layout = format!("--object-size {size} --stripe-unit {size} --stripe-count 1");
        ceph.rbd(&lab, &format!("clone {layout} @-parent#s @-clone-{size}"));
        ceph.rbd(
            &lab,
            &format!("resize --no-progress --size 30M @-clone-{size}"),
        );
        let image = format!("clone-{size}");
        ceph.is_as_exported(&lab, &image);
        ceph.io(
            &lab,
            &image,
            &[
                "write -P 4 9M 300k",
                "write -z -u 1M 256k",
                "write -P 5 25M 1",
            ],
        );
        ceph.is_as_exported(&lab, &image);
    }
    let striped = "create --size 40M --object-size 1M --stripe-unit 64K --stripe-count 4 @-striped";
    ceph.rbd(&lab, striped);
    ceph.io(
        &lab,
        "striped",
        &[
            "write -P 1 192k 64k",
            "write -P 2 9000k 1M",
            "write -P 3 20M 1",
        ],
    );
    ceph.is_as_exported(&lab, "striped");
}

/// Zeroes of any range, and an option of the configuration in a name.
#[test]
fn ceph_zeroes_any_range() {
    let Some(ceph) = Ceph::find() else { return };
    if beyond_qemu("librbd") {
        return;
    }
    let lab = Lab::new();
    lab.make("img create -f raw here.raw 24M");
    let name = format!("{}:rbd_default_order=20", ceph.name("zeroes"));
    ceph.zebu(&lab, &["create", "-f", "raw", &name, "24M"])
        .ok("create");
    let script = [
        "write -P 7 0 24M",
        "write -z 100 300",
        "write -z -u 5000 10000",
        "write -z 1000000 3000001",
        "write -z -u 5000001 3000000",
        "discard 9M 3M",
        "write -z 9M 3M",
        "write -z -u 25165823 1",
        "flush",
    ];
    ceph.io(&lab, "zeroes", &script);
    let args = script.iter().flat_map(|command| ["-c", command]);
    let args: Vec<&str> = ["io", "-f", "raw"]
        .into_iter()
        .chain(args)
        .chain(["here.raw"])
        .collect();
    lab.zebu(&args).ok("here");
    ceph.is_as_exported(&lab, "zeroes");
    lab.assert_same_bytes("out.raw", "here.raw", "zeroes");
    let program = ceph.conf.with_file_name("rbd");
    let image = format!("{}-zeroes", ceph.prefix);
    let info = lab.run(&program, &["info", &image], b"", &Limits::default());
    assert!(info.out.contains("order 20 (1 MiB objects)"), "{info:#?}");
}

/// A file of the current directory could be anyone's.
#[test]
fn ceph_is_not_configured_by_the_current_directory() {
    let Some(ceph) = Ceph::find() else { return };
    if beyond_qemu("librbd") {
        return;
    }
    let lab = Lab::new();
    let log = lab.path("log");
    let conf = std::fs::read_to_string(&ceph.conf).unwrap();
    let conf = conf.replace("\nlog file =", &format!("\nlog file = {}", log.display()));
    std::fs::write(lab.path("ceph.conf"), conf).unwrap();
    let answer = run(&lab, "HOME='/nonexistent'", &["info", "rbd:rbd/none"]);
    // The library says something, too.
    assert!(answer.err.contains("error connecting"), "{answer:#?}");
    assert!(!log.exists());
    let name = format!("rbd:rbd/none:conf={}", lab.path("ceph.conf").display());
    let args = [
        "create",
        "-u",
        "-f",
        "qcow2",
        "-b",
        &name,
        "-F",
        "raw",
        "top.qcow2",
        "1M",
    ];
    lab.zebu(&args).ok("create");
    let answer = lab.zebu(&["convert", "-O", "raw", "top.qcow2", "out.raw"]);
    answer.fails_with("no configuration of a cluster");
}

/// The OSD stops for some seconds while writes are in flight.
#[test]
fn ceph_that_does_not_answer_is_waited_for() {
    let Some(ceph) = Ceph::find() else { return };
    if beyond_qemu("librbd") {
        return;
    }
    let pid = std::fs::read_to_string(ceph.conf.with_file_name("osd.0.pid")).unwrap();
    let signal = |signal: &str| {
        let args = [signal, pid.trim()];
        assert!(
            std::process::Command::new("kill")
                .args(args)
                .status()
                .unwrap()
                .success()
        );
    };
    let lab = images(64 << 20);
    for format in ["raw", "qcow2"] {
        let name = ceph.name(&format!("stopped-{format}"));
        std::thread::scope(|scope| {
            let args = ["convert", "-O", format, "-r", "24M", "x.qcow2", &name];
            let (ceph, lab) = (&ceph, &lab);
            let convert = scope.spawn(move || ceph.zebu(lab, &args));
            for _ in 0..2 {
                std::thread::sleep(std::time::Duration::from_millis(700));
                signal("-STOP");
                std::thread::sleep(std::time::Duration::from_secs(3));
                signal("-CONT");
            }
            convert.join().unwrap().ok(format);
        });
        let args = ["compare", "-f", "qcow2", "-F", format, "x.qcow2", &name];
        ceph.zebu(&lab, &args).ok(format);
    }
}
