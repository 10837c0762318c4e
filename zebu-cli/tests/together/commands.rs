//! What two programs do at once: commands on the name `t`, and what is there before.

/// A command. `N` in its words is 0 or 1, the number of its program.
pub struct Command {
    pub words: &'static str,
    /// Bytes of a file at most: what is larger fails.
    pub most: Option<u64>,
}

const fn command(words: &'static str) -> Command {
    Command { words, most: None }
}

/// A command that fails in the middle.
const fn limited(words: &'static str) -> Command {
    Command {
        words,
        most: Some(1 << 20),
    }
}

/// All of them.
pub const COMMANDS: &[Command] = &[
    command("convert -f raw -O raw sN t"),
    command("convert -f raw -O qcow2 sN t"),
    command("convert -f raw -c -O qcow2 sN t"),
    command("convert -f raw -O vmdk sN t"),
    command("convert -f raw -n -O raw sN t"),
    command("convert -n -O qcow2 sN t"),
    command("convert -O raw t uN"),
    command("convert -O qcow2 t u"),
    limited("convert -f raw -O raw big t"),
    limited("convert -f raw -S 0 -O qcow2 big t"),
    command("create -f raw t 192K"),
    command("create -f qcow2 t 3M"),
    command("create -f qcow2 -b base -F qcow2 t"),
    limited("create -f raw t 8M"),
    limited("create -f qcow2 -o preallocation=full t 4M"),
    command("dd -f raw -O raw if=sN of=t"),
    command("dd -f raw -O qcow2 if=sN of=t"),
    command("dd -O raw if=t of=u"),
    command("import -f raw sN t"),
    command("import -f raw -O qcow2 sN t"),
    command("import -f raw --sha256 BAD sN t"),
    command("import -f raw -O qcow2 --sha256 BAD sN t"),
    command("ova -f raw --name vm --output t sN"),
    command("backup -q --name disk --to set t"),
    command("backup -q --full --name disk --to set t"),
    // It fails.
    command("backup -q --name disk --to set nothing"),
    command("snapshot -c newN t"),
    command("snapshot -d old t"),
    command("snapshot -a old t"),
    command("resize t +64K"),
    command("resize -f raw t +64K"),
    command("resize --shrink t 64K"),
    command("rebase -b other -F qcow2 t"),
    command("rebase -u -b other -F qcow2 t"),
    command("commit t"),
    command("commit -d t"),
    command("amend -o lazy_refcounts=on t"),
    command("check -r all t"),
    command("check t"),
    command("bitmap --add t bitN"),
    command("bitmap --remove t bit"),
    command("io -f raw -c write_-P_N1_0_64k t"),
    command("io -c write_-P_N1_0_64k t"),
    command("io -c write_-P_N1_0_64k base"),
    command("compare t base"),
    command("info t"),
];

impl Command {
    /// The words for the program of this number.
    pub fn of(&self, number: usize) -> Vec<String> {
        let bad = "0".repeat(64);
        let word = |word: &str| match word {
            "BAD" => bad.clone(),
            // Blanks within a word.
            word if word.contains('_') => word.replace('_', " ").replace('N', &number.to_string()),
            word => word.replace('N', &number.to_string()),
        };
        self.words.split(' ').map(word).collect()
    }
}

/// Something that is there before.
pub struct State {
    pub name: &'static str,
    /// Commands that make it, in a folder that has [`FILES`].
    pub make: &'static [&'static str],
    /// `t` is a symbolic link to `behind`, which is not there.
    pub is_link: bool,
}

/// Files that are there before, with their lengths in bytes: what the commands read.
pub const FILES: &[(&str, usize)] = &[("s0", 256 << 10), ("s1", 192 << 10), ("big", 3 << 20)];

/// Commands that make the other images.
pub const BASES: &[&str] = &[
    "convert -f raw -O qcow2 s0 base",
    "convert -f raw -O qcow2 s1 other",
];

pub const STATES: &[State] = &[
    State {
        name: "nothing",
        make: &[],
        is_link: false,
    },
    State {
        name: "a dangling link",
        make: &[],
        is_link: true,
    },
    State {
        name: "a raw image",
        make: &["convert -f raw -O raw s1 t"],
        is_link: false,
    },
    State {
        name: "an overlay",
        make: &[
            "create -q -f qcow2 -b base -F qcow2 t",
            "io -c write_-P_7_64k_64k t",
            "snapshot -c old t",
            "bitmap --add t bit",
            "io -c write_-P_8_96k_64k t",
        ],
        is_link: false,
    },
];
