//! Parts of URIs.
#![cfg(any(feature = "nbd", feature = "ssh"))]

/// What is said of a URI that is none.
pub(crate) const INVALID: &str = "No valid URL specified";

/// An address without the brackets of IPv6.
pub(crate) fn without_brackets(host: &str) -> &str {
    let inside = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    inside.unwrap_or(host)
}

/// `HOST[:PORT]`, decoded; the port is empty or a number.
pub(crate) fn host_and_port(address: &str) -> Result<(String, &str), String> {
    let (host, port) = match address.rsplit_once(':') {
        // Not a colon inside an address in brackets.
        Some((host, port)) if !port.contains(']') => (host, port),
        _ => (address, ""),
    };
    if !port.is_empty() && port.parse::<u16>().is_err() {
        return Err(INVALID.into());
    }
    Ok((decoded(without_brackets(host))?, port))
}

/// What follows the question mark.
pub(crate) struct Query(pub Vec<(String, String)>);

impl Query {
    pub fn parse(text: &str) -> Result<Query, String> {
        let parts = text.split(['&', ';']).filter(|part| !part.is_empty());
        let pair = |part: &str| {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            Ok((decoded(key)?, decoded(value)?))
        };
        parts.map(pair).collect::<Result<_, String>>().map(Query)
    }

    pub fn take(&mut self, key: &str) -> Option<String> {
        let place = self.0.iter().position(|(k, _)| k == key)?;
        Some(self.0.remove(place).1)
    }
}

/// With `%XX` as what it means.
pub(crate) fn decoded(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = rest.get(..2).and_then(|d| std::str::from_utf8(d).ok());
        let byte = digits
            .filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))
            .and_then(|digits| u8::from_str_radix(digits, 16).ok())
            .filter(|byte| *byte != 0);
        bytes.push(byte.ok_or(INVALID)?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| INVALID.into())
}
