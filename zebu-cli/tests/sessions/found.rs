//! Regression tests of errors that sessions have found.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::program::{Answer, By, Shell};
use crate::snapshots::make_snapshots_old;

/// A folder with the two programs.
struct Place {
    _folder: tempfile::TempDir,
    shell: Shell,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir_in(Path::new(env!("CARGO_TARGET_TMPDIR"))).expect("folder");
        fs::create_dir(folder.path().join("img")).expect("folder");
        Place {
            shell: Shell::new(folder.path()),
            _folder: folder,
        }
    }

    /// Runs a program with the words of a line.
    fn run(&mut self, by: By, cwd: &str, line: &str) -> Answer {
        let args: Vec<String> = line.split(' ').map(String::from).collect();
        self.shell.img(by, cwd, &args).expect("an answer")
    }

    #[track_caller]
    fn done(&mut self, by: By, line: &str) {
        let answer = self.run(by, ".", line);
        assert_eq!(answer.status, 0, "{line}: {}", answer.text());
    }

    /// Runs a session of commands; `args` are options and name.
    #[track_caller]
    fn io(&mut self, by: By, args: &str, commands: &[&str]) {
        let args: Vec<String> = args.split(' ').map(String::from).collect();
        let commands = commands.iter().map(|c| c.to_string()).collect::<Vec<_>>();
        let answer = self.shell.io(by, ".", &args, &commands).expect("an answer");
        assert_eq!(answer.status, 0, "{commands:?}: {}", answer.text());
    }

    /// Fails the test unless both programs read these patterns and find no errors.
    #[track_caller]
    fn reads(&mut self, name: &str, commands: &[&str]) {
        for by in [By::Zebu, By::Qemu] {
            self.io(by, &format!("-f qcow2 -r {name}"), commands);
            self.done(by, &format!("check -q -f qcow2 {name}"));
        }
    }

    /// Opens a file for writing.
    fn file(&self, name: &str) -> fs::File {
        let mut options = fs::OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .open(self.shell.root.join(name));
        file.expect("a file")
    }

    /// A raw file full of 0xff.
    fn full(&self, name: &str, length: usize) {
        fs::write(self.shell.root.join(name), vec![0xff; length]).expect("a file");
    }
}

#[test]
fn close_keeps_data_written_past_the_end_of_the_file() {
    let mut place = Place::new();
    place.done(By::Qemu, "create -q -f qcow2 -o extended_l2=on a 1G");
    place.io(By::Qemu, "-f qcow2 a", &["write -P 1 0 2k"]);
    // The file ends within the cluster and within a page.
    let file = place.file("a");
    let length = file.metadata().expect("length").len();
    file.set_len((length - 1) / 65536 * 65536 + 2048)
        .expect("cut");
    place.io(
        By::Zebu,
        "-f qcow2 -t none a",
        &["write -P 2 32k 2k", "flush"],
    );
    place.reads("a", &["read -P 1 0 2k", "read -P 2 32k 2k"]);
}

#[test]
fn copy_on_write_ends_at_the_end_of_the_disk() {
    for options in ["compat=1.1", "compat=0.10", "extended_l2=on"] {
        let mut place = Place::new();
        place.full("b", 1 << 20);
        let create = format!("create -q -f qcow2 -o {options} -b b -F raw a 96k");
        place.done(By::Zebu, &create);
        place.io(By::Zebu, "-f qcow2 a", &["write -P 1 64k 4k"]);
        let answer = place
            .shell
            .img(By::Zebu, ".", &["rebase", "-b", "", "a"].map(String::from));
        assert_eq!(answer.expect("an answer").status, 0);
        place.done(By::Qemu, "resize -q a 1M");
        let commands = [
            "read -P 1 64k 4k",
            "read -P 255 68k 28k",
            "read -P 0 96k 928k",
        ];
        place.reads("a", &commands);
    }
}

#[test]
fn zeroes_written_over_zeroes_hide_a_new_backing_file() {
    for (options, range) in [
        ("compat=1.1", "4k 8k"),
        ("compat=1.1", "60k 70k"),
        ("compat=0.10", "4k 8k"),
        ("compat=0.10", "64k 64k"),
        ("extended_l2=on", "1k 512"),
        ("extended_l2=on", "3k 90k"),
    ] {
        let mut place = Place::new();
        fs::write(place.shell.root.join("zero"), vec![0; 1 << 20]).expect("a file");
        place.full("full", 1 << 20);
        for below in ["", "-b zero -F raw "] {
            if below.is_empty() && options == "compat=0.10" {
                // Version 2 has no zero clusters without a backing file.
                continue;
            }
            let create = format!("create -q -f qcow2 -o {options} {below}a 1M");
            place.done(By::Zebu, &create);
            place.io(By::Zebu, "-f qcow2 a", &[&format!("write -z {range}")]);
            place.done(By::Zebu, "rebase -u -b full -F raw a");
            place.reads(
                "a",
                &[&format!("read -P 0 {range}"), "read -P 255 512k 64k"],
            );
        }
    }
}

#[test]
fn relative_data_file_names_as_in_qemu() {
    let mut place = Place::new();
    let create = "create -q -f qcow2 -o data_file=d img/a 1M";
    place.done(By::Zebu, create);
    place.full("img/d", 1 << 20);
    place.io(By::Zebu, "-f qcow2 img/a", &["write -P 3 0 64k"]);
    place.reads("img/a", &["read -P 3 0 64k", "read -P 0 64k 64k"]);
    for command in [
        "convert -O raw img/a out",
        "measure -O raw img/a",
        "amend -o lazy_refcounts=on img/a",
        "map img/a",
        "check img/a",
        "resize img/a 2M",
    ] {
        place.done(By::Zebu, command);
    }
    assert_eq!(
        fs::read(place.shell.root.join("out")).expect("out")[..65536],
        [3; 65536]
    );
    assert!(fs::read(place.shell.root.join("img/d")).expect("d") == vec![0xff; 1 << 20]);
    // From another folder the name is another file, or none.
    fs::remove_file(place.shell.root.join("img/d")).expect("d");
    for by in [By::Zebu, By::Qemu] {
        let answer = place.run(by, "img", "convert -O raw a out");
        assert_eq!(answer.status, 1, "{}", answer.text());
        assert_eq!(place.run(by, "img", "info a").status, 0);
    }
}

#[test]
fn a_discard_that_keeps_clusters_leaves_snapshots_alone() {
    let mut place = Place::new();
    place.done(By::Qemu, "create -q -f qcow2 a 2M");
    place.io(By::Qemu, "-f qcow2 a", &["write -P 1 0 1M"]);
    place.done(By::Qemu, "snapshot -c one a");
    let options = "driver=qcow2,file.driver=file,file.filename=a,discard=unmap,discard-no-unref=on";
    let commands = ["discard 0 512k", "write -z -u 512k 512k"];
    place.io(By::Zebu, &format!("--image-opts {options}"), &commands);
    place.reads("a", &["read -P 0 0 1M"]);
    place.done(By::Zebu, "snapshot -a one a");
    place.reads("a", &["read -P 1 0 1M"]);
}

#[test]
fn amend_to_version_3_extends_snapshot_entries() {
    let mut place = Place::new();
    for options in [
        "compat=1.1",
        "compat=1.1,size=3M",
        "compat=1.1,lazy_refcounts=on",
    ] {
        place.done(By::Qemu, "create -q -f qcow2 -o compat=0.10 a 2M");
        place.io(By::Qemu, "-f qcow2 a", &["write -P 1 0 64k"]);
        place.done(By::Qemu, "snapshot -c one a");
        place.done(By::Qemu, "snapshot -c two a");
        make_snapshots_old(&place.shell.root.join("a")).expect("old");
        place.io(By::Qemu, "-f qcow2 a", &["write -P 2 0 64k"]);
        place.done(By::Zebu, &format!("amend -o {options} a"));
        place.reads("a", &["read -P 2 0 64k"]);
        for by in [By::Zebu, By::Qemu] {
            place.done(by, "snapshot -a two a");
            place.reads("a", &["read -P 1 0 64k", "read -P 0 64k 1M"]);
        }
    }
}

#[test]
fn a_refused_amend_changes_nothing() {
    let mut place = Place::new();
    for (create, options) in [
        ("compat=0.10", "size=3M"),
        ("compat=0.10", "compat=1.1,size=8E"),
        ("compat=0.10", "compat=1.1,size=1025"),
        ("compat=1.1", "lazy_refcounts=on,size=7E"),
        ("compat=1.1", "lazy_refcounts=on,refcount_bits=1"),
        ("compat=1.1", "compat=0.10,size=3M"),
    ] {
        place.done(By::Qemu, &format!("create -q -f qcow2 -o {create} a 2M"));
        place.io(By::Qemu, "-f qcow2 a", &["write -P 1 0 64k"]);
        place.done(By::Qemu, "snapshot -c one a");
        let before = fs::read(place.shell.root.join("a")).expect("a");
        let answer = place.run(By::Zebu, ".", &format!("amend -o {options} a"));
        assert_eq!(answer.status, 1, "{options}: {}", answer.text());
        let after = fs::read(place.shell.root.join("a")).expect("a");
        assert!(before == after, "{options}: {}", answer.text());
    }
}

/// Makes an image that maps guest offset 1M to one of its own tables. Returns the host offset.
fn image_that_maps_itself(place: &mut Place, structure: &str) -> u64 {
    place.done(By::Qemu, "create -q -f qcow2 a 4M");
    place.io(By::Qemu, "-f qcow2 a", &["write -P 1 0 64k"]);
    place.done(By::Qemu, "snapshot -c one a");
    place.io(By::Qemu, "-f qcow2 a", &["write -P 2 0 64k"]);
    let file = place.file("a");
    let number = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).expect("read");
        u64::from_be_bytes(bytes)
    };
    let offset = |at: u64| number(at) & 0x00ff_ffff_ffff_fe00;
    let (l1, snapshots) = (offset(40), offset(64));
    let l2 = offset(l1);
    let host = match structure {
        "active-l1" => l1,
        "active-l2" => l2,
        "refcount-table" => offset(48),
        "refcount-block" => offset(offset(48)),
        "snapshot-table" => snapshots,
        "inactive-l1" => offset(snapshots),
        "inactive-l2" => offset(offset(snapshots)),
        other => panic!("{other}"),
    };
    let entry = (host | 1 << 63).to_be_bytes();
    file.write_all_at(&entry, l2 + 16 * 8).expect("write");
    host
}

#[test]
fn overlap_check_option() {
    let mut place = Place::new();
    for structure in [
        "active-l1",
        "active-l2",
        "refcount-table",
        "refcount-block",
        "snapshot-table",
        "inactive-l1",
        "inactive-l2",
    ] {
        let host = image_that_maps_itself(&mut place, structure);
        let image = fs::read(place.shell.root.join("a")).expect("a");
        for option in [
            "".to_string(),
            ",overlap-check=none".into(),
            ",overlap-check=constant".into(),
            ",overlap-check=all".into(),
            format!(",overlap-check.template=none,overlap-check.{structure}=on"),
            format!(",overlap-check.template=all,overlap-check.{structure}=off"),
        ] {
            let status = [By::Zebu, By::Qemu].map(|by| {
                fs::write(place.shell.root.join("a"), &image).expect("a");
                let file = "driver=qcow2,file.driver=file,file.filename=a";
                let args = ["--image-opts".to_string(), format!("{file}{option}")];
                let commands = ["write -P 9 1M 512".to_string(), "abort".to_string()];
                place
                    .shell
                    .io(by, ".", &args, &commands)
                    .expect("an answer");
                let after = fs::read(place.shell.root.join("a")).expect("a");
                let written = after[host as usize..][..512] == [9; 512];
                (written, after[79] & 2 != 0)
            });
            assert_eq!(
                status[0], status[1],
                "{structure}{option}: written, marked corrupt"
            );
        }
    }
}
