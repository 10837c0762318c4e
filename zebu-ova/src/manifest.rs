//! Manifests: a line `SHA256(name)= digits` for each file.

use std::collections::HashMap;

use crate::checksum::{Algorithm, Checksum};
use crate::href::in_folder;
use crate::printable;

/// The checksums of files by name. Of several of one file the last counts.
#[derive(Debug, Default)]
pub(crate) struct Manifest {
    checksums: HashMap<String, Checksum>,
    /// The first line that is none of a known checksum, and how many there are.
    odd: Option<(String, usize)>,
}

impl Manifest {
    pub(crate) fn parse(text: &str) -> Self {
        let text = text.trim_start_matches('\u{feff}');
        let mut manifest = Manifest::default();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            if let Some((name, checksum)) = entry(line) {
                manifest.checksums.insert(name, checksum);
                continue;
            }
            match &mut manifest.odd {
                Some((_, count)) => *count += 1,
                None => manifest.odd = Some((line.chars().take(80).collect(), 1)),
            }
        }
        manifest
    }

    /// What is said of lines that verify nothing, if there are such.
    pub(crate) fn warning(&self) -> Option<String> {
        let (line, count) = self.odd.as_ref()?;
        let lines = match count {
            1 => "a line that verifies nothing".to_owned(),
            count => format!("{count} lines that verify nothing, the first one"),
        };
        Some(printable(&format!("The manifest has {lines}: {line}")))
    }

    /// Whether there are no checksums.
    pub(crate) fn is_empty(&self) -> bool {
        self.checksums.is_empty()
    }

    /// The checksum of a file by its name in the archive: the manifest is in `folder`, and has names that
    /// are relative to that, or those of the archive.
    pub(crate) fn of_file(&self, folder: &str, name: &str) -> Option<&Checksum> {
        let relative = name.strip_prefix(folder);
        relative
            .and_then(|name| self.of(name))
            .or_else(|| self.of(name))
    }

    /// The checksum of a file.
    pub(crate) fn of(&self, name: &str) -> Option<&Checksum> {
        self.checksums.get(name)
    }
}

/// The line of a file.
pub(crate) fn line(name: &str, checksum: &Checksum) -> String {
    let algorithm = checksum.algorithm.name();
    format!("{algorithm}({name})= {checksum}\n")
}

fn entry(line: &str) -> Option<(String, Checksum)> {
    let (algorithm, rest) = line.split_once('(')?;
    let (name, digits) = rest.rsplit_once(')')?;
    let algorithm = Algorithm::by_name(&algorithm.trim().to_ascii_uppercase().replace('-', ""))?;
    let digits = digits.trim_start().strip_prefix('=')?.trim();
    Some((
        in_folder(name).to_owned(),
        Checksum::parse(algorithm, digits)?,
    ))
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
        let manifest = Manifest::parse(&text);
        let empty = Checksum::of_bytes(Algorithm::Sha1, b"");
        assert_eq!(manifest.of("a (1).vmdk"), Some(&empty));
        assert_eq!(manifest.of("b"), Some(&empty));
        assert_eq!(manifest.of("c"), None);
        let here = Manifest::parse(&format!("SHA1(./d)= {sha1}"));
        assert_eq!(here.of("d"), Some(&empty));
        assert_eq!(empty.to_string(), sha1);
        let checksum = Checksum::of_bytes(Algorithm::Sha256, b"abc");
        let digits = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let written = line("x", &checksum);
        assert_eq!(written, format!("SHA256(x)= {digits}\n"));
        let twice = line("x", &empty) + &written;
        assert_eq!(Manifest::parse(&twice).of("x"), Some(&checksum));
    }

    #[test]
    fn lines_that_verify_nothing_are_told() {
        for bad in [
            "SHA1(a)= 00",
            "SHA1(a) da39a3ee5e6b4b0d3255bfef95601890afd80709",
            "MD5(a)= d41d8cd98f00b204e9800998ecf8427e",
            "SHA1(a)= +a39a3ee5e6b4b0d3255bfef95601890afd80709",
            "SHA1 a",
            "x",
        ] {
            let good = "SHA1(a)= da39a3ee5e6b4b0d3255bfef95601890afd80709";
            let manifest = Manifest::parse(&format!("{bad}\n{good}\n"));
            assert!(manifest.of("a").is_some());
            let said = manifest.warning().unwrap();
            assert!(said.ends_with(bad) && !said.contains("lines"), "{said}");
            assert_eq!(Manifest::parse(good).warning(), None);
        }
    }
}
