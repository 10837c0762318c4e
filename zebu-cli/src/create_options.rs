//! The options of an image that is to be made (`-o`): `key=value,…`.

use zebu::block::Format;
use zebu::jobs::Qcow2Target;

use crate::failure::Failure;
use crate::known_options::known_options;
use crate::size;

/// Keys and values in the order given; a later one counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CreateOptions {
    list: Vec<(String, String)>,
}

impl CreateOptions {
    /// Reads the values of `-o`, of which there may be several. Commas in a
    /// value are doubled. An error is what is wrong with them.
    pub fn parse(format: Format, texts: &[String]) -> Result<Self, String> {
        let known: Vec<&str> = known_options(format).iter().map(|o| o.name).collect();
        Self::parse_known(&known, texts)
    }

    /// The same for options of these names.
    pub fn parse_known(known: &[&str], texts: &[String]) -> Result<Self, String> {
        let is_known = |key: &str| known.contains(&key);
        let mut options = CreateOptions::default();
        for item in texts.iter().flat_map(|text| split(text)) {
            let (key, value) = match item.split_once('=') {
                Some((key, value)) => (key.to_string(), value.to_string()),
                None => match item.strip_prefix("no") {
                    Some(key) if !is_known(&item) => (key.to_string(), "off".to_string()),
                    _ => (item, "on".to_string()),
                },
            };
            if !is_known(&key) {
                return Err(format!("Invalid parameter '{key}'"));
            }
            options.list.push((key, value));
        }
        Ok(options)
    }

    /// The names of the options that were given, in their order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.list.iter().map(|(name, _)| name.as_str())
    }

    /// Sets an option, as if it were given last.
    pub fn set(&mut self, key: &str, value: impl Into<String>) {
        self.list.push((key.to_string(), value.into()));
    }

    /// The value of an option.
    pub fn get(&self, key: &str) -> Option<&str> {
        let of_key = |pair: &&(String, String)| pair.0 == key;
        self.list.iter().rev().find(of_key).map(|(_, v)| v.as_str())
    }

    /// The value of a switch.
    pub fn switch(&self, key: &str) -> Result<bool, Failure> {
        match self.get(key) {
            None | Some("off" | "no" | "false" | "n") => Ok(false),
            Some("on" | "yes" | "true" | "y") => Ok(true),
            Some(_) => Err(Failure::new(format!(
                "Parameter '{key}' expects 'on' or 'off'"
            ))),
        }
    }

    /// The value of a size or number.
    pub fn number(&self, key: &str) -> Result<Option<u64>, Failure> {
        let Some(text) = self.get(key) else {
            return Ok(None);
        };
        let wrong = |_| Failure::new(format!("Parameter '{key}' expects a size"));
        size::parse(text).map(Some).map_err(wrong)
    }
}

/// Whether `-o` asks for the list of options.
pub fn asks_for_help(texts: &[String]) -> bool {
    let mut items = texts.iter().flat_map(|text| split(text));
    items.any(|item| item == "help" || item == "?")
}

/// Whether a value of `-o` is a list: not empty, and no empty item at an end.
pub fn is_list(text: &str) -> bool {
    let commas = text.len() - text.trim_end_matches(',').len();
    !text.is_empty() && !text.starts_with(',') && commas.is_multiple_of(2)
}

/// The items of a list with commas between them; two commas mean one.
fn split(text: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            items.push(String::new());
        } else if let Some(item) = items.last_mut() {
            item.push(c);
        }
    }
    items.retain(|item| !item.is_empty());
    items
}

/// The image that the options mean, in qemu-img's words if it cannot be.
pub fn qcow2_target(options: &CreateOptions) -> Result<Qcow2Target, Failure> {
    if options.get("encrypt.format").is_some() || options.switch("encryption")? {
        return Err(Failure::new("Encryption is not part of this version"));
    }
    let cluster_size = options.number("cluster_size")?.unwrap_or(65536);
    if !cluster_size.is_power_of_two() || !(512..=2 << 20).contains(&cluster_size) {
        return Err(Failure::new(
            "Cluster size must be a power of two between 512 and 2048k",
        ));
    }
    let preallocated = match options.get("preallocation") {
        None | Some("off" | "metadata") => false,
        Some("falloc" | "full") => true,
        Some(other) => return Err(Failure::new(format!("invalid parameter value: {other}"))),
    };
    let version = match options.get("compat") {
        None | Some("1.1" | "v3") => 3,
        Some("0.10" | "v2") => 2,
        Some(other) => {
            return Err(Failure::new(format!(
                "Invalid compatibility level: '{other}'"
            )));
        }
    };
    let extended_l2 = options.switch("extended_l2")?;
    if extended_l2 && version < 3 {
        return Err(Failure::new(
            "Extended L2 entries are only supported with compatibility level 1.1 and above (use \
             version=v3 or greater)",
        ));
    }
    if extended_l2 && cluster_size < 16384 {
        return Err(Failure::new(
            "Extended L2 entries are only supported with cluster sizes of at least 16384 bytes",
        ));
    }
    let refcount_bits = options.number("refcount_bits")?.unwrap_or(16);
    if !refcount_bits.is_power_of_two() || refcount_bits > 64 {
        return Err(Failure::new(
            "Refcount width must be a power of two and may not exceed 64 bits",
        ));
    }
    if version < 3 && refcount_bits != 16 {
        return Err(Failure::new(
            "Different refcount widths than 16 bits require compatibility level 1.1 or above \
             (use compat=1.1 or greater)",
        ));
    }
    Ok(Qcow2Target {
        version,
        cluster_bits: cluster_size.trailing_zeros(),
        refcount_order: refcount_bits.trailing_zeros(),
        extended_l2,
        preallocated,
        backing: options.get("backing_file").is_some(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_are_doubled() {
        assert_eq!(split("a=1,b=x,,y,c"), ["a=1", "b=x,y", "c"]);
        assert!(split("").is_empty());
    }

    #[test]
    fn the_last_value_counts() {
        let texts = ["cluster_size=4k".to_string(), "cluster_size=64k".into()];
        let options = CreateOptions::parse(Format::Qcow2, &texts).unwrap();
        assert_eq!(qcow2_target(&options).unwrap().cluster_bits, 16);
        assert!(CreateOptions::parse(Format::Raw, &texts).is_err());
    }
}
