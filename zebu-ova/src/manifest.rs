//! Manifests: a line `SHA256(name)= digits` for each file.

use crate::checksum::{Algorithm, Checksum};
use crate::{Result, refused};

/// The checksums of files by name.
#[derive(Debug, Default)]
pub(crate) struct Manifest(Vec<(String, Checksum)>);

impl Manifest {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut list = Vec::new();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            match entry(line) {
                Some(entry) => list.push(entry),
                None => {
                    let shown: String = line.chars().take(80).collect();
                    return refused(format!("The manifest has an invalid line: {shown:?}"));
                }
            }
        }
        Ok(Manifest(list))
    }

    /// The checksum of a file. Of several the last.
    pub(crate) fn of(&self, name: &str) -> Option<&Checksum> {
        let found = self.0.iter().rev().find(|(other, _)| other == name);
        found.map(|(_, checksum)| checksum)
    }

    /// With one more file.
    pub(crate) fn add(&mut self, name: &str, checksum: Checksum) {
        self.0.push((name.to_owned(), checksum));
    }

    pub(crate) fn text(&self) -> String {
        let lines = self.0.iter().map(|(name, checksum)| {
            let algorithm = checksum.algorithm.name();
            format!("{algorithm}({name})= {checksum}\n")
        });
        lines.collect()
    }
}

fn entry(line: &str) -> Option<(String, Checksum)> {
    let (algorithm, rest) = line.split_once('(')?;
    let (name, digits) = rest.rsplit_once(')')?;
    let algorithm = Algorithm::by_name(&algorithm.trim().to_ascii_uppercase())?;
    let digits = digits.trim_start().strip_prefix('=')?.trim();
    Some((name.to_owned(), Checksum::parse(algorithm, digits)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let sha1 = "da39a3ee5e6b4b0d3255bfef95601890afd80709";
        let text = format!(
            "SHA1(a (1).vmdk)= {sha1}\r\n\nSHA1 (b) = {}\n",
            sha1.to_uppercase()
        );
        let manifest = Manifest::parse(&text).unwrap();
        let empty = Checksum::of_bytes(Algorithm::Sha1, b"");
        assert_eq!(manifest.of("a (1).vmdk"), Some(&empty));
        assert_eq!(manifest.of("b"), Some(&empty));
        assert_eq!(manifest.of("c"), None);
        assert_eq!(empty.to_string(), sha1);
        let mut again = Manifest::default();
        again.add("x", Checksum::of_bytes(Algorithm::Sha256, b"abc"));
        let digits = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(again.text(), format!("SHA256(x)= {digits}\n"));
        Manifest::parse(&again.text()).unwrap();
    }

    #[test]
    fn invalid_lines() {
        for bad in [
            "SHA1(a)= 00",
            "SHA1(a) da39a3ee5e6b4b0d3255bfef95601890afd80709",
            "MD5(a)= d41d8cd98f00b204e9800998ecf8427e",
            "SHA1(a)= +a39a3ee5e6b4b0d3255bfef95601890afd80709",
            "SHA1 a",
            "x",
        ] {
            Manifest::parse(bad).unwrap_err();
        }
    }
}
