//! Chains of images with filters at random places, over images and over their files, named by headers or
//! by options. Every command must do in them what QEMU does.
//!
//! Guards against a filter that hides an image from `map`, `commit` or `info`, and one that makes a chain
//! what it is not.

use std::fs;

use crate::common::pair::Pair;
use crate::common::{Lab, Rng, cases, compare_answers, peer};

const OBJECT: [&str; 2] = ["--object", "throttle-group,id=g"];
const CLUSTER: u64 = 64 << 10;

/// An image of a chain.
#[derive(Debug)]
struct Image {
    file: String,
    format: &'static str,
    size: u64,
    /// Filters over it, the uppermost first.
    over: Vec<&'static str>,
    /// Filters over its file.
    over_file: Vec<&'static str>,
    /// The bottom is a filter over a plain file, named with the filter as the format.
    is_short: bool,
}

/// Images over each other, the top one first.
#[derive(Debug)]
struct Chain {
    images: Vec<Image>,
    /// The headers name no backing files: the options of the top image do.
    by_options: bool,
}

fn wrap(filter: &str, node: &str) -> String {
    let group = match filter {
        "throttle" => r#""throttle-group":"g","#,
        _ => "",
    };
    format!(r#"{{"driver":"{filter}",{group}"file":{node}}}"#)
}

impl Image {
    /// Its description, with that of what is behind it if options name that.
    fn node(&self, backing: Option<&str>) -> String {
        let mut file = format!(r#"{{"driver":"file","filename":"{}"}}"#, self.file);
        for filter in self.over_file.iter().rev() {
            file = wrap(filter, &file);
        }
        let backing = backing.map_or(String::new(), |node| format!(r#","backing":{node}"#));
        let mut node = match self.is_short {
            true => file,
            false => format!(r#"{{"driver":"{}","file":{file}{backing}}}"#, self.format),
        };
        for filter in self.over.iter().rev() {
            node = wrap(filter, &node);
        }
        node
    }

    /// Name and format by which the header of another image names it.
    fn named(&self) -> (String, &str) {
        let is_plain = self.over.is_empty() && self.over_file.is_empty();
        let format = self.over.first().copied().unwrap_or(self.format);
        match is_plain || self.is_short {
            true => (self.file.clone(), format),
            false => (format!("json:{}", self.node(None)), format),
        }
    }
}

impl Chain {
    fn random(rng: &mut Rng) -> Chain {
        let by_options = rng.one_in(3);
        let depth = 2 + rng.below(3) as usize;
        let images = (0..depth).map(|at| {
            let is_bottom = at + 1 == depth;
            let is_raw = is_bottom && rng.one_in(3);
            let is_short = is_raw && rng.one_in(2);
            let mut over = Vec::new();
            let kinds = ["throttle", "compress", "preallocate"];
            while !is_short && rng.one_in(2) && over.len() < 2 {
                let mut filter = rng.pick(&kinds);
                if is_raw || over.last() == Some(&"compress") {
                    filter = "throttle";
                }
                over.push(filter);
            }
            // Compressed data pass through throttle only.
            if over == ["compress", "preallocate"] {
                over.pop();
            }
            let over_file = match rng.below(8) {
                _ if is_short => vec![],
                0 => vec!["throttle"],
                1 => vec!["preallocate"],
                2 => vec!["throttle", "preallocate"],
                _ => vec![],
            };
            Image {
                file: format!("{at}"),
                format: if is_raw { "raw" } else { "qcow2" },
                size: CLUSTER * (8 + rng.below(8)),
                over: if is_short { vec!["preallocate"] } else { over },
                over_file,
                is_short,
            }
        });
        Chain {
            images: images.collect(),
            by_options,
        }
    }

    /// The name by which the images from this depth on are opened.
    fn name(&self, depth: usize) -> String {
        let images = &self.images[depth..];
        let (_, others) = images.split_first().expect("an image");
        if !self.by_options {
            let (name, _) = images[0].named();
            return match images[0].is_short {
                true => format!("json:{}", images[0].node(None)),
                false => name,
            };
        }
        let backing = others
            .iter()
            .rev()
            .fold(None, |below: Option<String>, image| {
                Some(image.node(below.as_deref()))
            });
        format!("json:{}", images[0].node(backing.as_deref()))
    }

    /// Makes the images, with some data in each.
    fn make(&self, rng: &mut Rng, lab: &Lab) {
        for (depth, image) in self.images.iter().enumerate().rev() {
            let size = image.size.to_string();
            let mut create = vec!["create", "-q", "-u", "-f", image.format];
            let below = self.images.get(depth + 1).map(Image::named);
            if let Some((name, format)) = below.as_ref().filter(|_| !self.by_options) {
                create.extend(["-b", name, "-F", format]);
            }
            create.extend([&*image.file, &size]);
            lab.qemu_img(&create).ok("create");
            let mut script = String::new();
            for _ in 0..1 + rng.below(3) {
                let at = 4096 * rng.below(image.size / 4096);
                let length = 4096 * (1 + rng.below(40));
                let length = length.min(image.size - at);
                script += &match rng.below(4) {
                    0 => format!("write -z {at} {length}\n"),
                    _ => format!("write -P {} {at} {length}\n", 1 + rng.below(255)),
                };
            }
            let whole = Chain::plain(self, depth);
            let written = lab.qemu_io_script(&[OBJECT[0], OBJECT[1], &whole], &script);
            written.ok("write");
        }
    }

    /// The name of images without the filters over the first one, which may not be written through them.
    fn plain(&self, depth: usize) -> String {
        let image = Image {
            file: self.images[depth].file.clone(),
            over: vec![],
            over_file: vec![],
            is_short: false,
            ..self.images[depth]
        };
        let below = (self.by_options && depth + 1 < self.images.len())
            .then(|| self.name(depth + 1)["json:".len()..].to_owned());
        format!("json:{}", image.node(below.as_deref()))
    }

    fn bottom(&self) -> &Image {
        self.images.last().expect("an image")
    }
}

/// What the images have as QEMU reads each of them.
fn contents(chain: &Chain, lab: &Lab) -> Vec<Vec<u8>> {
    let content = |depth: usize| {
        let name = chain.plain(depth);
        let args = [
            "convert", "-U", OBJECT[0], OBJECT[1], "-O", "raw", &name, "raw",
        ];
        lab.qemu_img(&args).ok("convert");
        fs::read(lab.path("raw")).unwrap()
    };
    (0..chain.images.len()).map(content).collect()
}

#[test]
fn chains_with_filters_are_what_they_are_in_qemu() {
    for seed in cases(8, "chains with filters") {
        let mut rng = Rng::new(seed);
        let chain = Chain::random(&mut rng);
        if zebu_testkit::trace() {
            println!("{seed}: {chain:#?}");
        }
        check(&chain, &mut rng);
    }
}

fn check(chain: &Chain, rng: &mut Rng) {
    let pair = Pair::new("");
    chain.make(rng, &pair.ours);
    pair.make("");
    let name = chain.name(0);
    let with = |command: &[&str], rest: &[&str]| -> Vec<String> {
        let all = [command, &OBJECT, &[&name], rest].concat();
        all.into_iter().map(str::to_owned).collect()
    };
    // Holes of copies may be others: both look at one folder.
    let same = |args: Vec<String>| {
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        pair.ours.sync_files();
        let (ours, theirs) = (pair.ours.zebu(&args), pair.ours.qemu_img(&args));
        match peer().is_current() {
            true => compare_answers(&ours, &theirs, &args, "one folder"),
            false => assert_eq!(ours.status, theirs.status, "{args:?}: {ours:?} {theirs:?}"),
        }
    };
    same(with(&["map"], &[]));
    same(with(&["map", "--output=json"], &[]));
    same(with(&["measure", "-O", "qcow2"], &[]));
    same(with(&["convert", "-O", "raw"], &["raw"]));
    if !chain.by_options {
        same(with(&["info", "--backing-chain"], &[]));
        same(with(&["info", "--backing-chain", "--output=json"], &[]));
        same(with(&["compare"], &[&chain.plain(0)]));
    }
    let mut script = String::new();
    for _ in 0..6 {
        let at = 512 * rng.below(chain.images[0].size / 512);
        let length = (512 * (1 + rng.below(200))).min(chain.images[0].size - at);
        script += &match rng.below(5) {
            0 => format!("write -z {at} {length}\n"),
            1 => format!("write -P 7 {at} {length}\n"),
            2 => format!("discard {at} {length}\n"),
            _ => format!("read -v {at} {length}\n"),
        };
    }
    script += "map\n";
    let same = pair.same_io(&[OBJECT[0], OBJECT[1], &name], &script);
    if same.is_none() || !change(chain, rng, &pair) {
        return;
    }
    let (ours, theirs) = (contents(chain, &pair.ours), contents(chain, &pair.theirs));
    for (depth, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        assert!(ours == theirs, "image {depth} after a change");
    }
    for image in chain.images.iter().filter(|i| i.format == "qcow2") {
        let checked = pair.ours.qemu_img(&[
            "check",
            "-U",
            OBJECT[0],
            OBJECT[1],
            "-f",
            "qcow2",
            &image.file,
        ]);
        let text = checked.ok("check").out;
        assert!(text.contains("No errors"), "{text}");
    }
}

/// A command that changes images of the chain. False: QEMU has crashed, as it does in commits over
/// `preallocate`.
fn change(chain: &Chain, rng: &mut Rng, pair: &Pair) -> bool {
    let name = chain.name(0);
    let last = chain.bottom();
    let depth = 1 + rng.below(chain.images.len() as u64 - 1) as usize;
    let (base, _) = chain.images[depth].named();
    // QEMU lacks a permission to commit in chains with `preallocate` over an image. It cannot reopen
    // `compress`, and does not end to commit what is below it.
    let mut over = chain.images.iter().flat_map(|image| &image.over);
    let can_commit = !over.any(|filter| ["preallocate", "compress"].contains(filter));
    let args: Vec<&str> = match rng.below(6) {
        0 if can_commit => vec!["commit", OBJECT[0], OBJECT[1], &name],
        1 if can_commit => vec!["commit", "-d", OBJECT[0], OBJECT[1], &name],
        0..3 if can_commit => {
            vec!["commit", "-b", &base, OBJECT[0], OBJECT[1], &name]
        }
        3 if !chain.by_options && chain.images[0].over.is_empty() => vec![
            "rebase",
            "-b",
            &last.file,
            "-F",
            last.format,
            OBJECT[0],
            OBJECT[1],
            &name,
        ],
        4 if !chain.by_options => vec!["rebase", "-b", "", OBJECT[0], OBJECT[1], &name],
        _ => vec!["snapshot", "-c", "one", OBJECT[0], OBJECT[1], &name],
    };
    let (ours, theirs) = (pair.ours.zebu(&args), pair.theirs.qemu_img(&args));
    if theirs.is_crash_of_qemu(&args.join(" ")) {
        return false;
    }
    assert_eq!(ours.status, theirs.status, "{args:?}: {ours:?} {theirs:?}");
    if peer().is_current() {
        compare_answers(&ours, &theirs, &args, "a change");
    }
    true
}
