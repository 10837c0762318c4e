//! Filters at any place of the chain that a session opens, spelt as options or as `json:`.

use crate::common::Rng;
use crate::world::{as_value, words};

/// The options of a node: dotted keys and values.
pub type Options = Vec<(String, String)>;

/// Filters over an image and over its file, the uppermost first.
#[derive(Default)]
struct Over {
    image: Vec<&'static str>,
    file: Vec<&'static str>,
}

/// Filters of an image.
pub struct Filters(Over);

/// An image and its format.
pub type Named<'a> = (&'a str, &'a str);

impl Over {
    fn random(rng: &mut Rng, kinds: &[&'static str]) -> Over {
        let mut image = Vec::new();
        while image.len() < 3 && rng.one_in(3) {
            let filter = rng.pick(kinds);
            // One of a kind is over another kind that compressed data pass through.
            if filter == "throttle" || !image.contains(&filter) {
                image.push(filter);
            }
        }
        let mut file = Vec::new();
        while file.len() < 3 && rng.one_in(4) {
            file.push(rng.pick(&["throttle", "preallocate", "blkdebug"]));
        }
        Over { image, file }
    }

    fn has_throttle(&self) -> bool {
        self.image.contains(&"throttle") || self.file.contains(&"throttle")
    }

    /// The node of an image, with more options of its own.
    fn node(&self, (name, format): Named, more: &Options) -> Options {
        let mut node = vec![
            ("driver".into(), "file".into()),
            ("filename".into(), name.into()),
        ];
        for filter in self.file.iter().rev() {
            node = over(filter, &node);
        }
        node = over(format, &node);
        node.extend(more.iter().cloned());
        for filter in self.image.iter().rev() {
            node = over(filter, &node);
        }
        node
    }
}

/// A node over another one.
fn over(driver: &str, below: &Options) -> Options {
    let mut node = vec![("driver".into(), driver.into())];
    match driver {
        "throttle" => node.push(("throttle-group".into(), "g".into())),
        "preallocate" => node.push(("prealloc-size".into(), "200000".into())),
        _ => {}
    }
    let child = if driver == "blkdebug" {
        "image"
    } else {
        "file"
    };
    let below = below.iter();
    node.extend(below.map(|(key, value)| (format!("{child}.{key}"), value.clone())));
    node
}

impl Filters {
    pub fn random(rng: &mut Rng) -> Filters {
        Filters(Over::random(rng, &["throttle", "copy-on-read"]))
    }

    /// With `compress` over the image. (Below it, `copy-on-read` stores what a write of a part of a cluster reads,
    /// and the cluster cannot be compressed any more: EIO, in QEMU too.)
    pub fn compressing(rng: &mut Rng) -> Filters {
        let mut filters = Filters(Over::random(rng, &["throttle"]));
        let at = rng.below(filters.0.image.len() as u64 + 1) as usize;
        filters.0.image.insert(at, "compress");
        filters
    }

    /// The option by which the group of `throttle` is defined.
    pub fn object(&self) -> Vec<String> {
        match self.0.has_throttle() {
            true => words(&["--object", "throttle-group,id=g,x-iops-total=5000"]),
            false => Vec::new(),
        }
    }

    /// The arguments that name an image with these filters, and options of its own.
    pub fn arguments(&self, rng: &mut Rng, image: &str, more: &Options) -> Vec<String> {
        let node = self.0.node((image, "qcow2"), more);
        if rng.one_in(2)
            && let Some(name) = as_json(&node)
        {
            return vec![name];
        }
        let options = node
            .iter()
            .map(|(key, value)| format!("{key}={}", as_value(value)));
        let options: Vec<_> = options.collect();
        vec!["--image-opts".into(), options.join(",")]
    }
}

/// The `json:` name of a node, if it has only text.
fn as_json(node: &Options) -> Option<String> {
    let is_text = |(_, value): &(String, String)| {
        let is_text = |c: char| (' '..='~').contains(&c) && c != '"' && c != '\\';
        value.chars().all(is_text)
    };
    let member = |(key, value): &(String, String)| format!(r#""{key}":"{value}""#);
    let members: Vec<_> = node.iter().map(member).collect();
    let name = format!("json:{{{}}}", members.join(","));
    node.iter().all(is_text).then_some(name)
}

/// The name of a backing file with filters over its file, as a header has it. Not `throttle`, whose group
/// each command would have to name.
pub fn named_with_filters(rng: &mut Rng, image: Named) -> Option<String> {
    let mut over = Over::default();
    while over.file.len() < 2 && !rng.one_in(3) {
        over.file.push(rng.pick(&["preallocate", "blkdebug"]));
    }
    as_json(&over.node(image, &Vec::new()))
}
