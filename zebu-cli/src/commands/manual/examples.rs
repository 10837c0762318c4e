//! Examples of the commands, in the help and in the man pages. Those of a command can be run one after
//! the other where its files are.

use std::fmt::Write;

use clap::Command;

/// What is done, and the line of a shell that does it.
pub type Example = (&'static str, &'static str);

/// The examples of a command; none if it has none.
pub fn examples_of(command: &str) -> &'static [Example] {
    let found = EXAMPLES.iter().find(|entry| entry.0 == command);
    found.map_or(&[], |entry| entry.1)
}

/// The command with its examples at the end of the help.
pub fn with_examples(command: Command, name: &str) -> Command {
    let list = examples_of(name);
    if list.is_empty() {
        return command;
    }
    let mut text = String::new();
    if let Some(before) = command.get_after_help() {
        let _ = writeln!(text, "{before}\n");
    }
    text.push_str("Examples:");
    for (what, line) in list {
        let _ = write!(text, "\n  # {what}\n  {line}");
    }
    command.after_help(text)
}

const EXAMPLES: &[(&str, &[Example])] = &[
    (
        "amend",
        &[
            (
                "For programs that only know old images",
                "zebu amend -o compat=0.10 disk.qcow2",
            ),
            ("What can be changed", "zebu amend -f qcow2 -o help"),
        ],
    ),
    (
        "backup",
        &[
            ("A full backup", "zebu backup disk.qcow2 --to backups"),
            (
                "Later, what has changed; older points than 30 are merged",
                "zebu backup disk.qcow2 --to backups --keep 30",
            ),
            ("The points in time", "zebu backup list backups"),
            (
                "Back to the first one",
                "zebu backup restore backups --point 1 restored.raw",
            ),
            (
                "Whether all files are as they were written",
                "zebu backup verify backups",
            ),
        ],
    ),
    (
        "bench",
        &[
            (
                "Reads of 4 KiB, 32 in flight",
                "zebu bench -c 10000 -d 32 disk.qcow2",
            ),
            (
                "The same for writes, which change the image",
                "zebu bench -w -c 10000 -d 32 disk.qcow2",
            ),
        ],
    ),
    (
        "bitmap",
        &[
            (
                "Record what changes from now on",
                "zebu bitmap --add disk.qcow2 since-monday",
            ),
            ("Clear it", "zebu bitmap --clear disk.qcow2 since-monday"),
            ("Remove it", "zebu bitmap --remove disk.qcow2 since-monday"),
        ],
    ),
    (
        "check",
        &[
            ("Look, and change nothing", "zebu check disk.qcow2"),
            (
                "Free clusters that nothing uses",
                "zebu check -r leaks disk.qcow2",
            ),
            (
                "Repair everything that can be",
                "zebu check -r all disk.qcow2",
            ),
        ],
    ),
    (
        "commit",
        &[(
            "Move the changes to the backing file",
            "zebu commit overlay.qcow2",
        )],
    ),
    (
        "compare",
        &[
            (
                "Content of two images of any formats",
                "zebu compare disk.qcow2 disk.raw",
            ),
            (
                "Where the formats are known",
                "zebu compare -p -f qcow2 -F raw disk.qcow2 disk.raw",
            ),
        ],
    ),
    (
        "completions",
        &[
            ("For bash", "zebu completions bash > zebu.bash"),
            ("For fish", "zebu completions fish > zebu.fish"),
        ],
    ),
    (
        "convert",
        &[
            ("To raw, sparse", "zebu convert -p disk.qcow2 copy.raw"),
            (
                "To a compressed qcow2 image",
                "zebu convert -c -O qcow2 -o compression_type=zstd disk.raw small.qcow2",
            ),
            (
                "A snapshot",
                "zebu convert -l before-upgrade disk.qcow2 old.raw",
            ),
            (
                "Only what differs from the backing file",
                "zebu convert -O qcow2 -B base.qcow2 -F qcow2 overlay.qcow2 copy.qcow2",
            ),
            (
                "For other hypervisors",
                "zebu convert -O vmdk -o subformat=streamOptimized disk.qcow2 disk.vmdk",
            ),
            (
                "From a web server",
                "zebu convert https://example.org/disk.qcow2 fetched.raw",
            ),
            (
                "The same, with a cache for the next time",
                "zebu convert --cache-dir cache https://example.org/disk.qcow2 fetched.raw",
            ),
            (
                "From a stream",
                "gzip -c disk.qcow2 | zebu convert - piped.raw",
            ),
            (
                "To a stream",
                "zebu convert -O qcow2 disk.qcow2 - | gzip -c > disk.qcow2.gz",
            ),
        ],
    ),
    (
        "create",
        &[
            ("An empty disk", "zebu create -f qcow2 new.qcow2 20G"),
            (
                "The changes of another image",
                "zebu create -f qcow2 -b base.qcow2 -F qcow2 changes.qcow2",
            ),
            (
                "With options of the format",
                "zebu create -f qcow2 -o cluster_size=128k,extended_l2=on fine.qcow2 20G",
            ),
            ("Which options there are", "zebu create -f qcow2 -o help"),
        ],
    ),
    (
        "dd",
        &[(
            "From the fifth to the eighth MiB of a disk",
            "zebu dd -O qcow2 bs=1M skip=4 count=8 if=disk.raw of=part.qcow2",
        )],
    ),
    (
        "import",
        &[
            (
                "Verified by a list of checksums",
                "zebu import --sums SHA256SUMS disk.qcow2 imported.raw",
            ),
            (
                "From a web server, within limits",
                "zebu import --max-virtual-size 100G --max-download 10G --max-time 600 \
                 https://example.org/disk.qcow2 fetched.raw",
            ),
            (
                "From a stream",
                "gzip -c disk.qcow2 | zebu import -O qcow2 - piped.qcow2",
            ),
        ],
    ),
    (
        "info",
        &[
            ("Of one image", "zebu info disk.qcow2"),
            (
                "With its backing files",
                "zebu info --backing-chain overlay.qcow2",
            ),
            (
                "What an untrusted image would open",
                "zebu info --untrusted --output=json overlay.qcow2",
            ),
        ],
    ),
    (
        "io",
        &[
            (
                "Write, and see where it is",
                "zebu io -c 'write -P 0xff 1M 64k' -c map disk.qcow2",
            ),
            (
                "The first sector",
                "zebu io -r -c 'read -v 0 512' disk.qcow2",
            ),
        ],
    ),
    (
        "manual",
        &[
            ("All pages, into a new folder", "zebu manual man1"),
            ("With a date", "zebu manual man1 \"$(date +%F)\""),
        ],
    ),
    (
        "map",
        &[
            ("Where data are stored", "zebu map disk.qcow2"),
            (
                "Everything, for programs",
                "zebu map --output=json disk.qcow2",
            ),
            (
                "A picture of the disk and of its file",
                "zebu map --picture disk.svg disk.qcow2",
            ),
        ],
    ),
    (
        "measure",
        &[
            ("A copy of a disk", "zebu measure -O qcow2 disk.raw"),
            ("A new image", "zebu measure -O qcow2 --size 20G"),
        ],
    ),
    (
        "nbd",
        &[
            (
                "In the background, until it is killed",
                "zebu nbd --fork --pid-file disk.pid -t -e 8 -k $PWD/disk.sock disk.qcow2",
            ),
            ("What a server has", "zebu nbd -L -k $PWD/disk.sock"),
            (
                "Copy from the server",
                "zebu convert \"nbd+unix:///?socket=$PWD/disk.sock\" copy.raw",
            ),
            ("Stop the server", "kill $(cat disk.pid)"),
        ],
    ),
    (
        "ova",
        &[
            (
                "For a hypervisor that imports appliances",
                "zebu ova --output machine.ova disk.qcow2",
            ),
            (
                "Convert it back",
                "zebu convert machine.ova --disk 1 -O qcow2 again.qcow2",
            ),
        ],
    ),
    (
        "rebase",
        &[
            (
                "Another backing file, and the same content",
                "zebu rebase -b other.qcow2 -F qcow2 overlay.qcow2",
            ),
            ("No backing file", "zebu rebase -b '' overlay.qcow2"),
        ],
    ),
    (
        "resize",
        &[
            ("Larger", "zebu resize disk.qcow2 +10G"),
            (
                "Smaller: what is behind the new end is lost",
                "zebu resize --shrink disk.qcow2 8M",
            ),
        ],
    ),
    (
        "snapshot",
        &[
            ("Take one", "zebu snapshot -c today disk.qcow2"),
            ("List them", "zebu snapshot -l disk.qcow2"),
            ("Go back", "zebu snapshot -a today disk.qcow2"),
            ("Delete it", "zebu snapshot -d today disk.qcow2"),
        ],
    ),
    (
        "top",
        &[
            (
                "A server with metrics, until it is killed",
                "zebu nbd --fork --pid-file disk.pid --metrics unix:$PWD/metrics.sock -t -k $PWD/disk.sock \
                 disk.qcow2",
            ),
            (
                "Its rates in the last tenth of a second",
                "zebu top -n 1 -i 0.1 metrics.sock",
            ),
            ("Stop the server", "kill $(cat disk.pid)"),
        ],
    ),
    (
        "vhost-user-blk",
        &[
            (
                "A disk of four virtqueues, in the background",
                "zebu vhost-user-blk --fork --pid-file disk.pid --socket-path $PWD/disk.sock --num-queues 4 \
                 disk.qcow2",
            ),
            ("Stop the server", "kill $(cat disk.pid)"),
        ],
    ),
];
