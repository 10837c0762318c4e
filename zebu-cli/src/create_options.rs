//! The options of an image that is to be made (`-o`): `key=value,…`.

use zebu::block::Format;

use crate::known_options::known_options;

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
        assert_eq!(options.get("cluster_size"), Some("64k"));
        assert!(CreateOptions::parse(Format::Raw, &texts).is_err());
    }
}
