//! The options and operands of the commands, and values that they may be given.

use super::common::Rng;

/// The kind of a value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// No value.
    None,
    Format,
    TargetFormat,
    Cache,
    Output,
    Size,
    Workers,
    Sparse,
    Snapshot,
    Image,
    Writable,
    New,
    Backing,
    NewOptions,
    AmendOptions,
    Preallocation,
    Repair,
    Rate,
    Change,
    Operand,
    Bitmap,
    Granularity,
}
use Kind::*;

/// Short name, long name and value of an option.
type Opt = (&'static str, &'static str, Kind);
/// A command, its options, its operands.
type Command = (&'static str, &'static [Opt], &'static [Kind]);

const COMMANDS: &[Command] = &[
    (
        "amend",
        &[
            ("-f", "--format", Format),
            ("-t", "--cache", Cache),
            ("-o", "--options", AmendOptions),
            ("-o", "--options", AmendOptions),
            ("-o", "--options", AmendOptions),
            ("-p", "--progress", None),
            ("-q", "--quiet", None),
            ("", "--force", None),
            ("", "--image-opts", None),
        ],
        &[Writable],
    ),
    (
        "bitmap",
        &[
            ("", "--add", None),
            ("", "--add", None),
            ("", "--remove", None),
            ("", "--clear", None),
            ("", "--enable", None),
            ("", "--disable", None),
            ("", "--merge", Bitmap),
            ("", "--merge", Bitmap),
            ("-g", "--granularity", Granularity),
            ("-b", "--source-file", Image),
            ("-F", "--source-format", Format),
            ("-f", "--format", Format),
            ("", "--image-opts", None),
        ],
        &[Writable, Bitmap],
    ),
    (
        "check",
        &[
            ("-f", "--format", Format),
            ("-T", "--cache", Cache),
            ("-q", "--quiet", None),
            ("-U", "--force-share", None),
            ("-r", "--repair", Repair),
            ("", "--output", Output),
            ("", "--image-opts", None),
        ],
        &[Image],
    ),
    (
        "commit",
        &[
            ("-f", "--format", Format),
            ("-t", "--cache", Cache),
            ("-b", "--base", Image),
            ("-d", "--drop", None),
            ("-r", "--rate", Rate),
            ("-p", "--progress", None),
            ("-q", "--quiet", None),
            ("", "--image-opts", None),
        ],
        &[Writable],
    ),
    (
        "compare",
        &[
            ("-f", "--a-format", Format),
            ("-F", "--b-format", Format),
            ("-T", "--cache", Cache),
            ("-s", "--strict", None),
            ("-p", "--progress", None),
            ("-q", "--quiet", None),
            ("-U", "--force-share", None),
            ("", "--image-opts", None),
        ],
        &[Image, Image],
    ),
    (
        "convert",
        &[
            ("-f", "--source-format", Format),
            ("-O", "--target-format", TargetFormat),
            ("-O", "--target-format", TargetFormat),
            ("-T", "--source-cache", Cache),
            ("-t", "--target-cache", Cache),
            ("-o", "", NewOptions),
            ("-o", "", NewOptions),
            ("-B", "--backing", Backing),
            ("-F", "--backing-format", Format),
            ("-c", "", None),
            ("-C", "--copy-range-offloading", None),
            ("-n", "--no-create", None),
            ("-l", "", Snapshot),
            ("-S", "--sparse-size", Sparse),
            ("-m", "--parallel", Workers),
            ("-W", "--oob-writes", None),
            ("-r", "--rate", Rate),
            ("-U", "--force-share", None),
            ("-p", "--progress", None),
            ("-q", "--quiet", None),
            ("", "--target-is-zero", None),
            ("", "--salvage", None),
            ("", "--bitmaps", None),
            ("", "--skip-broken-bitmaps", None),
            ("", "--target-image-opts", None),
            ("", "--source-image-opts", None),
        ],
        &[Image, New],
    ),
    (
        "create",
        &[
            ("-f", "--format", TargetFormat),
            ("-f", "--format", TargetFormat),
            ("-o", "--options", NewOptions),
            ("-o", "--options", NewOptions),
            ("-b", "--backing", Backing),
            ("-F", "--backing-format", Format),
            ("-u", "--backing-unsafe", None),
            ("-q", "--quiet", None),
        ],
        &[New, Size],
    ),
    (
        "dd",
        &[
            ("-f", "--format", Format),
            ("-O", "--output-format", TargetFormat),
            ("-U", "--force-share", None),
            ("", "--image-opts", None),
        ],
        &[Operand, Operand, Operand],
    ),
    (
        "info",
        &[
            ("-f", "--format", Format),
            ("-b", "--backing-chain", None),
            ("-U", "--force-share", None),
            ("", "--output", Output),
            ("", "--image-opts", None),
        ],
        &[Image],
    ),
    (
        "map",
        &[
            ("-f", "--format", Format),
            ("-s", "--start-offset", Size),
            ("-l", "--max-length", Size),
            ("-U", "--force-share", None),
            ("", "--output", Output),
            ("", "--image-opts", None),
        ],
        &[Image],
    ),
    (
        "measure",
        &[
            ("-f", "--format", Format),
            ("-O", "--target-format", TargetFormat),
            ("-o", "--options", NewOptions),
            ("-o", "--options", NewOptions),
            ("", "--size", Size),
            ("-l", "--snapshot", Snapshot),
            ("-U", "--force-share", None),
            ("", "--output", Output),
            ("", "--image-opts", None),
        ],
        &[Image],
    ),
    (
        "rebase",
        &[
            ("-f", "--format", Format),
            ("-t", "--cache", Cache),
            ("-T", "--backing-cache", Cache),
            ("-b", "--backing", Backing),
            ("-b", "--backing", Backing),
            ("-F", "--backing-format", Format),
            ("-u", "--backing-unsafe", None),
            ("-c", "--compress", None),
            ("-U", "--force-share", None),
            ("-p", "--progress", None),
            ("-q", "--quiet", None),
            ("", "--image-opts", None),
        ],
        &[Writable],
    ),
    (
        "resize",
        &[
            ("-f", "--format", Format),
            ("", "--shrink", None),
            ("", "--preallocation", Preallocation),
            ("-q", "--quiet", None),
            ("", "--image-opts", None),
        ],
        &[Writable, Change],
    ),
    (
        "snapshot",
        &[
            ("-f", "--format", Format),
            ("-l", "--list", None),
            ("-c", "", Snapshot),
            ("-a", "", Snapshot),
            ("-d", "", Snapshot),
            ("-q", "--quiet", None),
            ("-U", "--force-share", None),
            ("", "--image-opts", None),
        ],
        &[Writable],
    ),
];

/// Copies of files, with names that are not UTF-8 or have characters with a meaning in options.
pub const ODD_NAMES: [(&str, &str); 5] = [
    ("half\u{e0e2}\u{e082}.q", "base.q"),
    ("com,ma sp.q", "over.q"),
    ("co:lon\u{e0ff}.q", "snap.q"),
    ("-\u{e9}\u{e0ed}\u{e0a0}\u{e080}.raw", "disk.raw"),
    ("\u{e0c0}\u{e080}=\u{e0f8}\".q", "old.q"),
];

/// Overlays of such files: backing file, options, name.
pub const ODD_CHAINS: [(&str, &str, &str); 3] = [
    ("half\u{e0e2}\u{e082}.q", "cluster_size=4k", "\u{e0ff}.q"),
    (
        "./co:lon\u{e0ff}.q",
        "data_file=d,,\u{e0fe}\u{e9}.raw",
        "data\u{e0ff}.q",
    ),
    ("\u{e0ff}.q", "extended_l2=on", "%41\u{e080}.q"),
];

/// Options of images: name, valid values, invalid values.
type Table = &'static [(
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
)];

const NEW_OPTIONS: Table = &[
    (
        "cluster_size",
        &["512", "4k", "64k", "2M", "0x10000", "64K", "+4096", "2048k"],
        &[
            "4M", "0", "1000", "256", "-1", "1.5k", "", "k", "1e3", "4kk", "64KiB",
        ],
    ),
    (
        "extended_l2",
        &["on", "off", "yes", "true", "n", "no"],
        &["1", "", "ON"],
    ),
    (
        "preallocation",
        &["off", "metadata", "falloc"],
        &["none", ""],
    ),
    ("compression_type", &["zlib", "zstd"], &["lzo", ""]),
    (
        "size",
        &["1M", "1.5M", "1023", "0x100000"],
        &["0", "-1", "10G", "8E", "", "foo"],
    ),
    ("compat", &["0.10", "1.1", "v2", "v3"], &["2", "", "1.2"]),
    (
        "backing_file",
        &[
            "base.q",
            "disk.raw",
            "com,,ma sp.q",
            "half\u{e0e2}\u{e082}.q",
        ],
        &["missing.q", "", "miss\u{e0ff}.q"],
    ),
    (
        "backing_fmt",
        &["qcow2", "raw"],
        &["foo", "", "vmdk", "\u{e0ff}"],
    ),
    (
        "data_file",
        &["data.raw", "d,,\u{e0ff}.raw"],
        &["", "folder"],
    ),
    ("data_file_raw", &["on", "off"], &["x"]),
    ("lazy_refcounts", &["on", "off"], &["maybe"]),
    (
        "refcount_bits",
        &["1", "16", "64", "+16", "0x10", " 16"],
        &[
            "128",
            "3",
            "0",
            "-1",
            "++16",
            "010",
            "16k",
            "",
            "x",
            "16 ",
            "18446744073709551616",
        ],
    ),
    ("nocow", &["on", "off"], &["x"]),
    ("extent_size_hint", &["0", "1M"], &["x"]),
    ("encryption", &["off"], &["x"]),
    ("foo", &[], &["1"]),
];

const AMEND_OPTIONS: Table = &[
    ("compat", &["0.10", "1.1", "v2", "v3"], &["2", ""]),
    ("lazy_refcounts", &["on", "off", "true"], &["maybe"]),
    (
        "refcount_bits",
        &["1", "16", "64", "0x10"],
        &["128", "3", "0", "-1", "++16", "16k", ""],
    ),
    (
        "size",
        &["1M", "6M", "8M", "0"],
        &["-1", "1000", "8E", "", "foo"],
    ),
    ("data_file", &[], &["data.raw", ""]),
    ("data_file_raw", &["off"], &["on"]),
    ("backing_file", &[], &["base.q"]),
    ("backing_fmt", &[], &["raw"]),
    ("cluster_size", &[], &["64k", "x"]),
    ("preallocation", &[], &["full"]),
    ("encrypt.iter-time", &[], &["5", "x"]),
    ("foo", &[], &["1"]),
];

const GOOD_SIZES: &[&str] = &[
    "1", "511", "512", "513", "64k", "1M", "1m", "1.5M", "5242880", "0x100000", "+1M", "1K", " 1M",
    "1b", ".5k", "1.", "0.5G", "010",
];
const BAD_SIZES: &[&str] = &[
    "0",
    "0x",
    "-1",
    "-1M",
    "++1M",
    "1E",
    "7E",
    "8E",
    "9223372036854775296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "",
    "1x",
    "k",
    "1M ",
    "1e3",
    "0x10k",
    "1.5",
    "inf",
    "nan",
    "1.1.1k",
    "1Mb",
    "0.1",
    "1k1",
    "0x1.8",
    "1.5b",
    "-0",
    "- 1",
];

/// Chooses the parts of a list with at most one mistake: which of two mistakes is reported does not
/// matter.
struct Choice<'a> {
    random: &'a mut Rng,
    may_be_wrong: bool,
}

/// A list of arguments: the command, then the rest.
pub fn arguments(random: &mut Rng) -> Vec<String> {
    let may_be_wrong = random.below(4) != 0;
    let mut choice = Choice {
        random,
        may_be_wrong,
    };
    let (command, options, operands) = choice.one_of(COMMANDS);
    let mut positional: Vec<String> = operands.iter().map(|kind| choice.value(*kind)).collect();
    if choice.errs(20) {
        match choice.below(3) {
            0 => drop(positional.pop()),
            1 => positional.push(choice.value(Image)),
            _ => positional.clear(),
        }
    }
    let count = choice.below(5).min(choice.below(5));
    let mut given: Vec<Vec<String>> = Vec::new();
    let mut chosen: Vec<Opt> = Vec::new();
    for _ in 0..count {
        let option = choice.one_of(options);
        // All of several -o are used, of other options the last.
        if option.0 == "-o" || !chosen.contains(&option) {
            given.push(choice.option(&option));
            chosen.push(option);
        }
    }
    if choice.errs(30) {
        let wrong = choice.one_of(&["-Z", "--foo", "--fo=x", "-", "--outpu"]);
        given.push(vec![wrong.to_string()]);
    }
    // Options are mostly first.
    let mut all: Vec<Vec<String>> = Vec::new();
    let before = choice.below(4) != 0;
    let mut rest = positional.into_iter().map(|name| vec![name]).peekable();
    if before {
        all.extend(given);
        if choice.below(30) == 0 {
            all.push(vec!["--".into()]);
        }
    } else {
        for group in given {
            while rest.peek().is_some() && choice.below(2) == 0 {
                all.extend(rest.next());
            }
            all.push(group);
        }
    }
    all.extend(rest);
    std::iter::once(command.to_string())
        .chain(all.into_iter().flatten())
        .collect()
}

impl Choice<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    fn one_of<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Whether to make the mistake here: once in `once_in` times.
    fn errs(&mut self, once_in: u64) -> bool {
        let errs = self.may_be_wrong && self.below(once_in) == 0;
        self.may_be_wrong &= !errs;
        errs
    }

    fn of<'t>(&mut self, good: &[&'t str], bad: &[&'t str]) -> &'t str {
        match good.is_empty() || (!bad.is_empty() && self.errs(4)) {
            true => self.one_of(bad),
            false => self.one_of(good),
        }
    }

    /// An option in one of its forms.
    fn option(&mut self, (short, long, kind): &Opt) -> Vec<String> {
        if *kind == None {
            let name = match short.is_empty() || (!long.is_empty() && self.below(3) == 0) {
                true => long,
                false => short,
            };
            return vec![name.to_string()];
        }
        let text = self.value(*kind);
        let form = match (short.is_empty(), long.is_empty()) {
            (true, _) => 6 + self.below(3),
            (_, true) => self.below(6),
            _ => self.below(9),
        };
        match form {
            0 if !text.is_empty() => vec![format!("{short}{text}")],
            0..6 => vec![short.to_string(), text],
            6 => vec![format!("{long}={text}")],
            // An abbreviation, which getopt accepts if it is unique.
            7 => vec![long[..long.len() - 1].to_string(), text],
            _ => vec![long.to_string(), text],
        }
    }

    fn value(&mut self, kind: Kind) -> String {
        let text = match kind {
            None => "",
            Format => self.of(&["qcow2", "qcow2", "raw", "file"], &["foo", "", "host_device"]),
            TargetFormat => self.of(&["qcow2", "qcow2", "raw", "file"], &["foo", "", "bochs", "host_device"]),
            Cache => self.of(
                &["none", "writeback", "writethrough", "directsync", "unsafe"],
                &["", "foo", "NONE"],
            ),
            Output => self.of(&["human", "json"], &["xml", ""]),
            Size => self.of(GOOD_SIZES, BAD_SIZES),
            Workers => self.of(
                &["1", "4", "16", "0x4", "+4", " 4"],
                &["17", "0", "010", "-1", "++4", "1k", "", "x", "4 "],
            ),
            Sparse => self.of(&["0", "4k", "512", "16M", "0x1000", "64K"], &["1", "17M", "-1", "", "x", "1.5k"]),
            Snapshot => self.of(
                &["one", "1", "snapshot.id=1", "snapshot.name=one"],
                &["two", "", "snapshot.id=1,snapshot.name=two", "t\u{e0ff}o", "snapshot.name=\u{e9}\u{e080}"],
            ),
            Image => self.of(
                &[
                    "base.q", "base.q", "over.q", "over.q", "bits.q", "bits.q", "snap.q", "old.q", "other.q", "disk.raw", "disk.raw",
                    "small.raw", "empty", "file:base.q", "half\u{e0e2}\u{e082}.q", "com,ma sp.q", "./co:lon\u{e0ff}.q",
                    "./-\u{e9}\u{e0ed}\u{e0a0}\u{e080}.raw", "\u{e0c0}\u{e080}=\u{e0f8}\".q", "\u{e0ff}.q",
                    "data\u{e0ff}.q", "file:co:lon\u{e0ff}.q", "%41\u{e080}.q", "%41\u{e080}.q",
                    "json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"base.q\"}}",
                ],
                &[
                    "missing.q", "folder", "", "foo:base.q", "broken.q", "broken-bits.q", "driver=qcow2,file.filename=base.q",
                    "file.filename=disk.raw", "json:{", "base.q/x", "co:lon\u{e0ff}.q", "miss\u{e0ff}.q",
                    "driver=qcow2,file.filename=com,,ma sp.q", "file.filename=co:lon\u{e0ff}.q",
                    "driver=raw,offset=512,file.filename=half\u{e0e2}\u{e082}.q,file.driver=file",
                    "driver=raw,size=1M,file.filename=\u{e0c0}\u{e080}=\u{e0f8}\".q",
                ],
            ),
            Writable => self.of(
                &["base.q", "bits.q", "bits.q", "bits.q", "over.q", "over.q", "over.q", "snap.q", "snap.q", "old.q", "disk.raw", "file:snap.q",
                    "com,ma sp.q", "./co:lon\u{e0ff}.q", "\u{e0ff}.q", "data\u{e0ff}.q"],
                &["missing.q", "folder", "", "broken.q", "broken-bits.q", "driver=qcow2,file.filename=over.q", "empty",
                    "miss\u{e0ff}.q", "driver=qcow2,file.filename=com,,ma sp.q"],
            ),
            New => self.of(
                &["new", "new", "new", "disk.raw", "other.q", "file:new", "n,\u{e0ff}", "com,ma sp.q", "./n:\u{e9} w"],
                &["folder", "folder/new", "missing/new", "", "foo:new", "driver=qcow2,file.filename=other.q"],
            ),
            Backing => self.of(
                &["base.q", "base.q", "disk.raw", "other.q", "file:base.q", "half\u{e0e2}\u{e082}.q", "./co:lon\u{e0ff}.q",
                    "com,ma sp.q", "\u{e0ff}.q"],
                &["missing.q", "", "folder", "m\u{e0ff}.q", "json:{\u{e0ff}"],
            ),
            Preallocation => self.of(&["off", "metadata", "falloc", "full"], &["none", ""]),
            Bitmap => self.of(
                &["b0", "b0", "b1", "b1", "b2", "new", "n,\u{e9}"],
                &["", "missing", "\u{e9}", "--"],
            ),
            Granularity => self.of(
                &["512", "4k", "64K", "0x1000", "0", "2G", "1M"],
                &["256", "1000", "4G", "-1", "x", "", "1.5k", "8E", "18446744073709551616"],
            ),
            Repair => self.of(&["leaks", "all"], &["none", ""]),
            Rate => self.of(&["0", "100M", "1G", "0x10000000", "1.5G"], &["-1", "x", "", "8E"]),
            Change => self.of(
                &["+1M", "6M", "8M", "+512", "4M", "3M", "1.5M", "0x600000"],
                &["+1", "0", "", "x", "+x", "+", "-", "++1M", "+-1M", "8E", "+8E", "-1M", "-100M"],
            ),
            NewOptions => return self.key_values(NEW_OPTIONS),
            AmendOptions => return self.key_values(AMEND_OPTIONS),
            Operand => return self.operand(),
        };
        text.to_string()
    }

    fn operand(&mut self) -> String {
        let (name, value) = match self.below(8) {
            0..3 => ("if", self.value(Image)),
            3..6 => ("of", self.value(New)),
            _ => (
                self.of(&["bs", "count", "skip"], &["foo", ""]),
                self.of(
                    &["512", "0x200", "4096"],
                    &["0", "-1", "x", "", "2147483648"],
                )
                .into(),
            ),
        };
        format!("{name}={value}")
    }

    /// A list of image options.
    fn key_values(&mut self, from: Table) -> String {
        if self.errs(30) {
            let wrong = [
                "",
                ",",
                "help",
                "?",
                "size",
                "nosize",
                "=",
                "a,,b",
                "nolazy_refcounts",
            ];
            return self.one_of(&wrong).into();
        }
        let count = 1 + self.below(3).min(self.below(3));
        let items = (0..count).map(|_| {
            let (name, good, bad) = self.one_of(from);
            format!("{name}={}", self.of(good, bad))
        });
        items.collect::<Vec<_>>().join(",")
    }
}
