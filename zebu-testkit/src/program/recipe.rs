//! Recipes: short texts that make images. Steps are separated by `;`, and each is one of
//!
//! - `create …`: `qemu-img create -q -f qcow2 …`
//! - `img …`: qemu-img with these arguments
//! - `io FILE: cmd | cmd …`: qemu-io commands, which must succeed
//! - `crash FILE: cmd | cmd …`: the same, then qemu-io aborts
//! - `random FILE SEED COUNT KINDS`: COUNT writes at random offsets; KINDS are their kinds: `w`
//!   plain, `z` zeroes, `u` zeroes that may unmap, `c` one compressed cluster, `d` discard
//! - `raw FILE BYTES`: a raw file with some data
//! - `cut FILE BYTES`: sets the length of a file
//!
//! Any step may use two files: `noise` (incompressible) and `text` (compressible).

use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use super::{Lab, Rng};

/// Options of qcow2 images that `create` and `convert` are tested with. A data file is `d`.
pub const QCOW2_OPTIONS: [&str; 18] = [
    "cluster_size=64k",
    "cluster_size=512",
    "cluster_size=4k",
    "cluster_size=256k",
    "cluster_size=2M",
    "compat=0.10",
    "compat=v2,cluster_size=1k",
    "compat=v3",
    "refcount_bits=1",
    "refcount_bits=2,cluster_size=512",
    "refcount_bits=64,cluster_size=512",
    "lazy_refcounts=on",
    "extended_l2=on",
    "extended_l2=on,cluster_size=16k",
    "compression_type=zstd",
    "compression_type=zstd,cluster_size=4k",
    "data_file=d",
    "data_file=d,data_file_raw=on",
];

/// Runs recipes in a folder.
pub struct Recipe<'a> {
    pub lab: &'a Lab,
}

impl Recipe<'_> {
    #[track_caller]
    pub fn run(&self, recipe: &str) {
        for step in recipe.split(';').map(str::trim).filter(|s| !s.is_empty()) {
            let (verb, rest) = step.split_once(' ').unwrap_or((step, ""));
            let words: Vec<&str> = rest.split_whitespace().collect();
            self.seed_files();
            match verb {
                "create" => {
                    let mut args = vec!["create", "-q", "-f", "qcow2"];
                    args.extend(words);
                    self.lab.qemu_img(&args).ok(step);
                }
                "img" => {
                    self.lab.qemu_img(&words).ok(step);
                }
                "io" | "crash" => {
                    let (file, commands) = rest.split_once(':').expect("FILE: commands");
                    let mut args = vec!["-d", "unmap"];
                    for command in commands.split('|') {
                        args.extend(["-c", command.trim()]);
                    }
                    if verb == "crash" {
                        args.extend(["-c", "abort", file]);
                        let answer = self.lab.qemu_io(&args);
                        assert!(answer.status > 128, "{step}: {answer:#?}");
                    } else {
                        args.push(file);
                        self.lab.qemu_io(&args).ok(step);
                    }
                }
                "random" => self.random(&words),
                "raw" => self.raw(words[0], words[1].parse().expect("BYTES")),
                "cut" => File::options()
                    .write(true)
                    .open(self.lab.path(words[0]))
                    .and_then(|file| file.set_len(words[1].parse().expect("BYTES")))
                    .expect(step),
                other => panic!("no such step: {other}"),
            }
        }
    }

    /// Makes `noise` and `text`.
    fn seed_files(&self) {
        if self.lab.path("noise").exists() {
            return;
        }
        let mut random = Rng::new(7);
        let noise: Vec<u8> = (0..150_001).map(|_| random.below(256) as u8).collect();
        let mut text = String::new();
        for line in 0..4000 {
            let word = random.below(9000);
            let _ = writeln!(text, "{line} the quick brown fox {word}");
        }
        fs::write(self.lab.path("noise"), noise).expect("write");
        fs::write(self.lab.path("text"), text).expect("write");
    }

    /// See `random` above.
    fn random(&self, words: &[&str]) {
        let [file, seed, count, kinds] = words else {
            panic!("random FILE SEED COUNT KINDS, not {words:?}")
        };
        let info = self
            .lab
            .qemu_img(&["info", "--output=json", file])
            .ok("info");
        let info: serde_json::Value = serde_json::from_str(&info.out).expect("JSON");
        let size = info["virtual-size"].as_u64().expect("size");
        let cluster = info["cluster-size"].as_u64().unwrap_or(65536);
        let mut random = Rng::new(seed.parse().expect("SEED"));
        let kinds: Vec<char> = kinds.chars().collect();
        let mut script = String::new();
        for _ in 0..count.parse::<u32>().expect("COUNT") {
            let kind = kinds[random.below(kinds.len() as u64) as usize];
            // Half of the offsets are in a small area, so that writes overlap.
            let area = if random.below(2) == 0 {
                size
            } else {
                size.min(20 * cluster)
            };
            let mut at = random.below(area);
            let mut len = match random.below(4) {
                0 => 1 + random.below(4096),
                1 => 512 * (1 + random.below(32)),
                2 => cluster,
                _ => cluster + random.below(2 * cluster),
            };
            if kind == 'c' || random.below(3) == 0 {
                at -= at % cluster;
            }
            if kind == 'c' {
                len = cluster;
            }
            len = len.min(size - at);
            let pattern = 1 + random.below(255);
            let source = match random.below(3) {
                0 => "-s noise".to_string(),
                1 => "-s text".to_string(),
                _ => format!("-P {pattern}"),
            };
            let _ = match kind {
                'w' => writeln!(script, "write -q {source} {at} {len}"),
                'z' => writeln!(script, "write -q -z {at} {len}"),
                'u' => writeln!(script, "write -q -z -u {at} {len}"),
                'c' => writeln!(script, "write -q -c {source} {at} {len}"),
                'd' => writeln!(script, "discard -q {at} {len}"),
                other => panic!("no such kind of write: {other}"),
            };
        }
        // A compressed write over an allocated cluster fails, so the status is not checked.
        let answer = self.lab.qemu_io_script(&["-d", "unmap", file], &script);
        answer.orderly("qemu-io");
        assert!(!answer.err.contains("can't open"), "{answer:#?}");
    }

    /// A raw file with data at random offsets.
    fn raw(&self, name: &str, len: u64) {
        let file = File::create(self.lab.path(name)).expect("create");
        file.set_len(len).expect("length");
        let mut random = Rng::new(len);
        let noise = fs::read(self.lab.path("noise")).expect("read");
        for _ in 0..12 {
            let at = random.below(len.max(1));
            let n = (1 + random.below(60_000)).min(len - at) as usize;
            file.write_all_at(&noise[..n], at).expect("write");
        }
    }
}
