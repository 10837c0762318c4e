//! Addresses of the metrics of servers: `HOST:PORT` or `unix:PATH`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// Where a server answers requests for its metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A host, without the brackets of an IPv6 address, and a port.
    Tcp(String, u16),
    /// The path of a unix socket.
    Unix(OsString),
}

impl MetricsAddress {
    /// Reads an address; `None` if it is not one.
    pub fn parse(text: &[u8]) -> Option<Self> {
        if let Some(path) = text.strip_prefix(b"unix:") {
            let path = OsStr::from_bytes(path);
            return (!path.is_empty()).then(|| MetricsAddress::Unix(path.into()));
        }
        let (host, port) = std::str::from_utf8(text).ok()?.rsplit_once(':')?;
        let in_brackets = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let is_plain = !host.is_empty() && !host.contains([':', '[', ']', '/']);
        let host = in_brackets.or_else(|| is_plain.then_some(host))?;
        Some(MetricsAddress::Tcp(host.into(), port.parse().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let tcp = |host: &str, port| Some(MetricsAddress::Tcp(host.into(), port));
        assert_eq!(
            MetricsAddress::parse(b"localhost:9100"),
            tcp("localhost", 9100)
        );
        assert_eq!(MetricsAddress::parse(b"[::1]:0"), tcp("::1", 0));
        assert_eq!(
            MetricsAddress::parse(b"unix:/run/m:1"),
            Some(MetricsAddress::Unix("/run/m:1".into()))
        );
        let bad: [&[u8]; 8] = [
            b"",
            b"9100",
            b":9100",
            b"::1:9100",
            b"host:",
            b"host:65536",
            b"unix:",
            b"/run/a:1",
        ];
        for text in bad {
            assert_eq!(MetricsAddress::parse(text), None, "{text:?}");
        }
    }
}
