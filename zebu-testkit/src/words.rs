//! The words of QEMU's messages, which versions change.

/// Messages about JSON before version 11, which adds line and column, and since then.
const JSON: [(&str, &str); 6] = [
    ("premature EOI", "premature end of input"),
    ("missing : in object pair", "expecting ':'"),
    ("expected separator in list", "expected ',' or ']'"),
    ("expected separator in dict", "expected ',' or '}'"),
    ("key is not a string in object", "expecting key"),
    // Of a key.
    ("invalid keyword 'a'", "expecting key"),
];

/// A line of a version before 11 in the words of that, and a line of that without what older ones lack.
pub fn newest_words(line: &str) -> String {
    if let Some((before, what)) = line.split_once("JSON parse error, ") {
        let place = before
            .rfind("options: ")
            .map_or(0, |at| at + "options: ".len());
        let mut what = what.to_owned();
        for (old, new) in JSON {
            what = what.replace(old, new);
        }
        return format!("{}JSON parse error, {what}", &before[..place]);
    }
    match line.strip_suffix("'.\n") {
        Some(rest) if line.contains(" specified: '") => format!("{rest}'\n"),
        _ if line.contains(" expects '") => line.replace("' not '", "', not '"),
        _ => line.replace("--help' for more info\n", "--help' for more information\n"),
    }
}
