//! References to files, which are URIs (RFC 3986) relative to the descriptor.

/// The names that a file may have which a descriptor refers to: with percent encoding undone, as
/// the specification has it, then as it is written, which is the name that some programs mean.
pub(crate) fn names(href: &str) -> Vec<String> {
    let mut names: Vec<_> = decoded(href).into_iter().collect();
    names.push(href.to_owned());
    let mut names: Vec<_> = names
        .iter()
        .map(|name| in_folder(name).to_owned())
        .collect();
    names.dedup();
    names
}

/// The text with percent encoding undone; None: it is not encoded, or the result is no name: not
/// UTF-8, or with a NUL.
fn decoded(href: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(href.len());
    let mut rest = href.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        let digit = |at: usize| char::from(digits[at]).to_digit(16);
        bytes.push((digit(0)? * 16 + digit(1)?) as u8);
        rest = after;
    }
    String::from_utf8(bytes).ok().filter(|n| !n.contains('\0'))
}

/// The reference to a file of this name. Only the percent sign has two meanings: readers that do
/// not decode find all other names.
pub(crate) fn of_name(name: &str) -> String {
    name.replace('%', "%25")
}

/// The folder of a name, with its last slash, and what follows.
pub(crate) fn split(name: &str) -> (&str, &str) {
    name.split_at(name.rfind('/').map_or(0, |slash| slash + 1))
}

/// The name in the archive of what a descriptor in `folder` calls `name`; None: it is outside.
pub(crate) fn beside(folder: &str, name: &str) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(name.split('/')) {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// A name without what says that it is in the directory of the descriptor.
pub(crate) fn in_folder(name: &str) -> &str {
    name.strip_prefix("./").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn encoded_names() {
        for (href, expected) in [
            ("a.vmdk", &["a.vmdk"][..]),
            ("./a.vmdk", &["a.vmdk"]),
            ("a%20b%2Evmdk", &["a b.vmdk", "a%20b%2Evmdk"]),
            ("%2e%2Fa", &["a", "%2e%2Fa"]),
            ("./%C3%a4", &["ä", "%C3%a4"]),
            ("..%2fa", &["../a", "..%2fa"]),
            ("%2fetc%2fshadow", &["/etc/shadow", "%2fetc%2fshadow"]),
            // Once only.
            ("a%2520b", &["a%20b", "a%2520b"]),
            // No encoding, and no names.
            ("100%", &["100%"]),
            ("a%2", &["a%2"]),
            ("a%+1", &["a%+1"]),
            ("a%ff", &["a%ff"]),
            ("a%00b", &["a%00b"]),
        ] {
            assert_eq!(names(href), expected, "{href}");
        }
    }

    #[test]
    fn names_beside_a_descriptor() {
        assert_eq!(split("a/b/c.ovf"), ("a/b/", "c.ovf"));
        assert_eq!(split("c.ovf"), ("", "c.ovf"));
        for (folder, name, expected) in [
            ("vm/", "d.vmdk", Some("vm/d.vmdk")),
            ("vm/", "./x/../d.vmdk", Some("vm/d.vmdk")),
            ("a/b/", "../d", Some("a/d")),
            ("a/", "../../d", None),
            ("", "d", Some("d")),
        ] {
            assert_eq!(beside(folder, name).as_deref(), expected, "{folder} {name}");
        }
    }

    proptest! {
        #[test]
        fn references_lead_back(name in "[a-z0-9% /é\u{1f600}]{0,20}") {
            prop_assert_eq!(&names(&of_name(&name))[0], in_folder(&name));
        }

        #[test]
        fn nothing_panics(href in "[%0-9a-f\u{e9}]{0,12}") {
            prop_assert!(names(&href).iter().all(|name| name.len() <= href.len()));
        }
    }
}
