//! Names with line breaks and control characters in messages: of every option and operand of every command, of
//! what an image names, and of what clients ask a server for. Nothing on standard error has control characters
//! or lines that a name made, under QEMU's names either; there, standard output is QEMU's.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;

use super::hostile_names::{is_active, make, name};
use crate::common::server::Server;
use crate::common::{Lab, Limits, Rng, beyond_qemu, cases, part, program};

/// What lines begin with that names with a line break make.
const FORGED: [&str; 2] = ["    would open: nothing else", "image: other"];

/// A folder with the program under QEMU's names, and what was found in it.
struct Talk {
    lab: Lab,
    said: BTreeSet<String>,
    lines: usize,
}

impl Talk {
    fn new() -> Talk {
        let lab = Lab::new();
        let ours = program().canonicalize().expect("the program under test");
        for name in ["qemu-img", "qemu-nbd", "qemu-io"] {
            symlink(&ours, lab.path(name)).expect("symlink");
        }
        let (said, lines) = (BTreeSet::new(), 0);
        Talk { lab, said, lines }
    }

    /// Looks at what was said.
    fn hear(&mut self, text: &str, what: &str) {
        let is_bad = |line: &str| {
            let forged = FORGED.iter().any(|start| line.starts_with(start));
            forged || line.contains(is_active) || line.contains("panicked")
        };
        for line in text.split('\n').filter(|line| is_bad(line)) {
            self.said.insert(format!("{what}: {line:?}"));
        }
    }

    /// Runs a command by both names.
    fn run(&mut self, args: &[&str]) {
        let (role, of_role) = match args[0] {
            "nbd" => ("qemu-nbd", &args[1..]),
            "io" => ("qemu-io", &args[1..]),
            _ => ("qemu-img", args),
        };
        let path = self.lab.path(role);
        let answer = self.lab.run(&path, of_role, b"", &Limits::default());
        self.hear(&answer.err, &format!("{role} {args:?}"));
        let answer = self.lab.zebu(args);
        self.hear(&answer.err, &format!("zebu {args:?}"));
        self.hear(&answer.out, &format!("zebu {args:?} prints"));
        self.lines += 2;
    }

    /// Nothing was said that must not be.
    #[track_caller]
    fn end(self) {
        let all: Vec<_> = self.said.into_iter().collect();
        assert!(all.is_empty(), "{} lines:\n{}", all.len(), all.join("\n"));
        println!("\ncases: {} command lines", self.lines);
    }
}

/// The options of a command that take a value, in one spelling each.
fn with_values(command: &clap::Command) -> Vec<String> {
    let takes = |arg: &&clap::Arg| {
        let values = arg.get_num_args().expect("a built command");
        !arg.is_positional() && values.max_values() > 0
    };
    let options = command.get_arguments().filter(takes);
    let spelt = options.filter_map(|arg| {
        let long = arg.get_long().map(|name| format!("--{name}"));
        long.or_else(|| arg.get_short().map(|letter| format!("-{letter}")))
    });
    spelt.collect()
}

#[test]
fn of_every_option() {
    if beyond_qemu("all commands of zebu") {
        return;
    }
    let mut talk = Talk::new();
    talk.lab.make("create x.qcow2 1M");
    for seed in cases(1, "names in options") {
        let mut rng = Rng::new(seed);
        for command in zebu_cli::commands() {
            let subs = command
                .get_subcommands()
                .filter(|sub| sub.get_name() != "help");
            let subs = subs.map(|sub| (vec![command.get_name(), sub.get_name()], sub));
            for (words, command) in subs.chain([(vec![command.get_name()], &command)]) {
                // Operands: of one file, of two, behind the end of the options.
                for count in 1..=3 {
                    let names: Vec<_> = (0..count).map(|_| name(&mut rng)).collect();
                    let names: Vec<_> = names.iter().map(|name| &**name).collect();
                    talk.run(&[&words[..], &["--"], &names].concat());
                }
                for option in with_values(command) {
                    let value = name(&mut rng);
                    let missing = format!("missing/{}", name(&mut rng));
                    let joined = format!("{option}={value}");
                    for args in part(
                        3,
                        [
                            vec![&*option, &*value],
                            vec![&*option, &*value, &*missing],
                            vec![&*option, &*value, &*missing, &*value],
                            vec![&*joined, "x.qcow2", &*missing],
                        ],
                    ) {
                        talk.run(&[&words[..], &args].concat());
                    }
                }
            }
        }
    }
    assert!(talk.lines > 600, "{} command lines", talk.lines);
    talk.end();
}

/// What fails, or says something, for an image of [`make`]: `@` is its file, `%` another name, `~` that of its
/// parts.
const LINES: &[&str] = &[
    "amend -o %=1 @",
    "amend -o compat=% @",
    "bench -c 1 -f % @",
    "bench -c 1 -s 4k missing/%",
    "bitmap --add @ ~",
    "bitmap --add -g % @ b",
    "bitmap --remove @ %",
    "bitmap --merge % @ ~",
    "bitmap --merge ~ -b missing/% -F qcow2 @ ~",
    "check -r % @",
    "check missing/%",
    "commit -q -b % @",
    "commit @",
    "compare @ missing/%",
    "compare @ ~",
    "convert @ ~",
    "convert -O raw @ missing/%",
    "convert -O % @ out",
    "convert -l % -O raw @ out",
    "convert -l snapshot.name=% -O raw @ out",
    "convert -O qcow2 -B missing/% -F raw @ out",
    "convert -O qcow2 -o %=1 @ out",
    "convert -O qcow2 --bitmaps @ out/%",
    "convert -O raw @ @",
    "create -f qcow2 -b missing/% -F raw out 1M",
    "create -f qcow2 -b missing/% out",
    "create -f qcow2 -b ~ out",
    "create -f qcow2 -o data_file=% @",
    "create -f qcow2 @ %",
    "create -f qcow2 missing/% 1M",
    "create -f qcow2 ./% 1M",
    "create -f raw -o preallocation=% x 1M",
    "dd if=@ of=missing/%",
    "dd if=@ of=@",
    "dd if=@ of=o bs=%",
    "dd if=@ of=o %=1",
    "info --object % @",
    "info -f % @",
    "info --image-opts driver=qcow2,file.filename=missing/%",
    "info --image-opts %=1",
    "info missing/%",
    "info %:rest",
    "io -c info missing/%",
    "io -c % @",
    "map --picture % @",
    "measure -O % @",
    "measure -O qcow2 -o %=1 @",
    "measure -l % -O qcow2 @",
    "measure --size %",
    "nbd -k nbd.sock -f % @",
    "nbd -l % -k nbd.sock @",
    "nbd -B % -k nbd.sock @",
    "nbd -k missing/% @",
    "nbd -L -k missing/%",
    "nbd -L -b % -p 1",
    "rebase -b missing/% -F raw @",
    "rebase -u -b @ -F % @",
    "rebase -b ~ @",
    "rebase -b @ -F qcow2 @",
    "resize @ %",
    "resize --preallocation=% @ +1M",
    "resize @ -32k",
    "snapshot -a % @",
    "snapshot -c ~ @",
    "snapshot -d % @",
    "snapshot -a ~ missing/%",
    "top missing/%",
    "ova missing/%.ova @ missing/%",
    "ova % @",
    "import missing/% out",
    "import @ missing/%",
    "import @ out -O %",
    "import --sha256 % @ out",
    "backup create missing/% disk=@",
    "backup create set %=missing/%",
    "backup list missing/%",
    "backup verify missing/%",
    "backup restore missing/% out",
];

#[test]
fn of_images() {
    if beyond_qemu("names that are escaped") {
        return;
    }
    for seed in cases(1, "names in messages") {
        let mut talk = Talk::new();
        let mut rng = Rng::new(seed);
        let own = name(&mut rng);
        let file = make(&talk.lab, &own);
        let mut lines = |talk: &mut Talk| {
            for line in LINES {
                let other = name(&mut rng);
                let words: Vec<_> = line
                    .split(' ')
                    .map(|word| {
                        let word = word.replace('@', "\0").replace('~', "\x01");
                        let word = word.replace('%', &other);
                        word.replace('\0', &file).replace('\x01', &own)
                    })
                    .collect();
                let words: Vec<_> = words.iter().map(|word| &**word).collect();
                talk.run(&words);
            }
        };
        lines(&mut talk);
        // Another program has it.
        let held = talk.lab.held_by_zebu(&[&file]);
        lines(&mut talk);
        drop(held);
        // What it names is gone, or is itself.
        let backing = talk.lab.path(&own);
        fs::remove_file(&backing).unwrap();
        lines(&mut talk);
        symlink(format!("{own}.qcow2"), &backing).unwrap();
        lines(&mut talk);
        fs::remove_file(&backing).unwrap();
        fs::create_dir(&backing).unwrap();
        lines(&mut talk);
        // Parts that are damaged: names stand in what `check` says, too.
        let mut bytes = fs::read(talk.lab.path(&file)).unwrap();
        fs::remove_dir(&backing).unwrap();
        fs::write(&backing, vec![1; 65536]).unwrap();
        for at in (0..bytes.len()).step_by(65536) {
            if bytes[at..].starts_with(b"QFI") {
                continue;
            }
            bytes[at] ^= 0x40;
        }
        fs::write(talk.lab.path(&file), bytes).unwrap();
        lines(&mut talk);
        talk.end();
    }
}

/// A descriptor of VMDK or an appliance that names what is not there.
#[test]
fn of_descriptors() {
    if beyond_qemu("names that are escaped") {
        return;
    }
    let mut talk = Talk::new();
    for seed in cases(2, "names in descriptors") {
        let mut rng = Rng::new(seed);
        let (extent, kind, other) = (name(&mut rng), name(&mut rng), name(&mut rng));
        let vmdk = format!(
            "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
             createType=\"{kind}\"\nRW 2048 FLAT \"{extent}\" 0\n"
        );
        let good = vmdk.replace(&kind, "monolithicFlat");
        let bad_type = good.replace("FLAT", &other.replace(' ', "_"));
        let xml = |text: &str| {
            let escaped = text.chars().map(|c| match c {
                '\t' | '\n' | '\r' | '\'' | '&' | '<' | '\u{7f}'.. => format!("&#{};", c as u32),
                c if c.is_control() => String::new(),
                c => c.to_string(),
            });
            escaped.collect::<String>()
        };
        let ovf = format!(
            "<?xml version='1.0'?><Envelope xmlns='http://schemas.dmtf.org/ovf/envelope/1' \
             xmlns:ovf='http://schemas.dmtf.org/ovf/envelope/1'><References>\
             <File ovf:href='{0}' ovf:id='f'/></References><DiskSection><Info>x</Info>\
             <Disk ovf:capacity='1' ovf:diskId='d' ovf:fileRef='f' ovf:format='{1}'/>\
             <Disk ovf:capacity='1' ovf:diskId='{1}' ovf:fileRef='{1}' ovf:format='x'/>\
             </DiskSection><VirtualSystem ovf:id='vm'><Name>{0}</Name></VirtualSystem></Envelope>",
            xml(&extent),
            xml(&other)
        );
        for (file, text) in [
            ("a.vmdk", &vmdk),
            ("b.vmdk", &good),
            ("c.vmdk", &bad_type),
            ("a.ovf", &ovf),
            ("b.ovf", &ovf.replace("'f'", &format!("'{}'", xml(&kind)))),
            ("c.ovf", &ovf.replace("1.0", &other)),
        ] {
            let hostile = format!("{other} {file}");
            for name in [file, &hostile] {
                let path = format!("./{name}");
                fs::write(talk.lab.path(name), text).unwrap();
                for args in [
                    &["info", &path][..],
                    &["info", "--untrusted", &path],
                    &["convert", "-O", "raw", &path, "out"],
                    &["convert", "-O", "raw", "--disk", "1", &path, "out"],
                    &["convert", "-O", "raw", "--disk", "2", &path, "out"],
                    &["import", &path, "out"],
                ] {
                    talk.run(args);
                }
            }
        }
    }
    talk.end();
}

#[test]
fn of_servers() {
    if beyond_qemu("names that are escaped") {
        return;
    }
    let mut talk = Talk::new();
    for seed in cases(1, "names in logs") {
        let mut rng = Rng::new(seed);
        let (export, asked) = (name(&mut rng), name(&mut rng));
        let file = make(&talk.lab, &export);
        let args = ["-t", "-v", "--stats", "-x", &*export, "-D", &asked, &file];
        let mut server = Server::start(&talk.lab, &args);
        for export in [&export, &asked] {
            let escaped = |text: &str| {
                let bytes = text.bytes().map(|byte| format!("%{byte:02x}"));
                bytes.collect::<String>()
            };
            let uri = server.uri(&escaped(export));
            talk.run(&["info", &uri]);
            talk.run(&["info", &uri, "--object", &asked]);
            let options = format!(
                "driver=nbd,server.type=unix,server.path=nbd.sock,export={export},x-dirty-bitmap={asked}"
            );
            talk.run(&["map", "--image-opts", &options]);
        }
        server.stop();
        talk.hear(&server.log(), "the server's log");
        for path in [file, export] {
            fs::remove_file(talk.lab.path(&path)).unwrap();
        }
    }
    talk.end();
}
