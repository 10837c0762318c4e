//! The packets of the SSH File Transfer Protocol, version 3 (draft-ietf-secsh-filexfer-02), and of
//! OpenSSH's extensions (its file PROTOCOL, section 4): plain values.

use std::io::{self, Read};

/// The version that is spoken.
pub(super) const VERSION: u32 = 3;
/// The longest packet that is received: OpenSSH sends 256 KiB at most.
const LONGEST: usize = (256 << 10) + 1024;
/// The bytes before the data of a write, besides the file's handle.
const WRITE_HEADER: usize = 4 + 1 + 4 + 4 + 8 + 4;

/// `pflags` of an open.
pub(super) mod open {
    pub const READ: u32 = 1;
    pub const WRITE: u32 = 2;
    pub const CREATE: u32 = 8;
    pub const EXCLUSIVE: u32 = 0x20;
}

mod kind {
    pub const INIT: u8 = 1;
    pub const VERSION: u8 = 2;
    pub const OPEN: u8 = 3;
    pub const READ: u8 = 5;
    pub const WRITE: u8 = 6;
    pub const FSTAT: u8 = 8;
    pub const FSETSTAT: u8 = 10;
    pub const REMOVE: u8 = 13;
    pub const STATUS: u8 = 101;
    pub const HANDLE: u8 = 102;
    pub const DATA: u8 = 103;
    pub const ATTRS: u8 = 105;
    pub const EXTENDED: u8 = 200;
    pub const EXTENDED_REPLY: u8 = 201;
}

mod attribute {
    pub const SIZE: u32 = 1;
    pub const IDS: u32 = 2;
    pub const PERMISSIONS: u32 = 4;
    pub const TIMES: u32 = 8;
}

/// A packet that is being made: its length and its number are set at the end.
#[derive(Debug)]
pub(super) struct Packet(Vec<u8>);

impl Packet {
    fn new(kind: u8, room: usize) -> Packet {
        let mut bytes = Vec::with_capacity(room);
        bytes.extend([0; 4]);
        bytes.push(kind);
        bytes.extend([0; 4]);
        Packet(bytes)
    }

    fn number(mut self, number: u32) -> Packet {
        self.0.extend(number.to_be_bytes());
        self
    }

    fn long(mut self, number: u64) -> Packet {
        self.0.extend(number.to_be_bytes());
        self
    }

    fn string(self, text: &[u8]) -> Packet {
        let mut packet = self.number(text.len() as u32);
        packet.0.extend(text);
        packet
    }

    /// The bytes, as request `id`.
    pub fn finish(mut self, id: u32) -> Vec<u8> {
        let length = (self.0.len() - 4) as u32;
        self.0[..4].copy_from_slice(&length.to_be_bytes());
        self.0[5..9].copy_from_slice(&id.to_be_bytes());
        self.0
    }

    /// The first one: the version has the place of the number.
    pub fn init() -> Vec<u8> {
        Packet::new(kind::INIT, 9).finish(VERSION)
    }

    /// Opens a file. `mode` is for one that is created.
    pub fn open(path: &str, flags: u32, mode: u32) -> Packet {
        Packet::new(kind::OPEN, 64)
            .string(path.as_bytes())
            .number(flags)
            .number(attribute::PERMISSIONS)
            .number(mode)
    }

    pub fn stat(handle: &[u8]) -> Packet {
        Packet::new(kind::FSTAT, 64).string(handle)
    }

    pub fn set_length(handle: &[u8], length: u64) -> Packet {
        Packet::new(kind::FSETSTAT, 64)
            .string(handle)
            .number(attribute::SIZE)
            .long(length)
    }

    /// Sets the times of access and of change.
    pub fn set_times(handle: &[u8], seconds: u32) -> Packet {
        Packet::new(kind::FSETSTAT, 64)
            .string(handle)
            .number(attribute::TIMES)
            .number(seconds)
            .number(seconds)
    }

    pub fn read(handle: &[u8], offset: u64, length: u32) -> Packet {
        Packet::new(kind::READ, 64)
            .string(handle)
            .long(offset)
            .number(length)
    }

    /// A write of `length` bytes, which `fill` copies.
    pub fn write(
        handle: &[u8],
        offset: u64,
        length: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Packet {
        let mut packet = Packet::new(kind::WRITE, WRITE_HEADER + handle.len() + length)
            .string(handle)
            .long(offset)
            .number(length as u32);
        let start = packet.0.len();
        packet.0.resize(start + length, 0);
        fill(&mut packet.0[start..]);
        packet
    }

    pub fn remove(path: &str) -> Packet {
        Packet::new(kind::REMOVE, 64).string(path.as_bytes())
    }

    pub fn flush(handle: &[u8]) -> Packet {
        Packet::new(kind::EXTENDED, 64)
            .string(Extensions::FSYNC.as_bytes())
            .string(handle)
    }

    pub fn limits() -> Packet {
        Packet::new(kind::EXTENDED, 64).string(Extensions::LIMITS.as_bytes())
    }
}

/// What a server can do besides version 3.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Extensions {
    pub fsync: bool,
    pub limits: bool,
}

impl Extensions {
    const FSYNC: &str = "fsync@openssh.com";
    const LIMITS: &str = "limits@openssh.com";
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Status {
    pub code: u32,
    pub message: String,
}

impl Status {
    pub const OK: u32 = 0;
    pub const EOF: u32 = 1;
    pub const NO_SUCH_FILE: u32 = 2;
    pub const PERMISSION_DENIED: u32 = 3;
    pub const UNSUPPORTED: u32 = 8;
}

/// What a server says of a file. None: it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Attributes {
    pub size: Option<u64>,
    pub mode: Option<u32>,
    /// When it was changed, in seconds.
    pub modified: Option<u32>,
}

/// A reply.
#[derive(Debug)]
pub(super) enum Reply {
    Status(Status),
    Handle(Vec<u8>),
    Data(Data),
    Attributes(Attributes),
    Extended(Vec<u8>),
}

/// The data of a read.
#[derive(Debug)]
pub(super) struct Data {
    packet: Vec<u8>,
    start: usize,
}

impl Data {
    pub fn bytes(&self) -> &[u8] {
        &self.packet[self.start..]
    }
}

/// The error of a packet that no server sends.
fn violation(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Receives a packet, without its length.
fn receive(input: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    input.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if !(5..=LONGEST).contains(&length) {
        return Err(violation(
            "it does not speak SFTP (a packet's length is wrong)",
        ));
    }
    let mut packet = vec![0; length];
    input.read_exact(&mut packet)?;
    Ok(packet)
}

/// Receives the first packet of a server: the version and the extensions.
pub(super) fn receive_version(input: &mut impl Read) -> io::Result<(u32, Extensions)> {
    let packet = receive(input)?;
    let mut rest = Fields(&packet);
    if rest.byte()? != kind::VERSION {
        return Err(violation(
            "it does not speak SFTP (its first packet is another one)",
        ));
    }
    let version = rest.number()?;
    let mut extensions = Extensions::default();
    while !rest.0.is_empty() {
        let (name, _value) = (rest.string()?, rest.string()?);
        extensions.fsync |= name == Extensions::FSYNC.as_bytes();
        extensions.limits |= name == Extensions::LIMITS.as_bytes();
    }
    Ok((version, extensions))
}

/// Receives a reply, and the number of its request.
pub(super) fn receive_reply(input: &mut impl Read) -> io::Result<(u32, Reply)> {
    let packet = receive(input)?;
    let mut rest = Fields(&packet);
    let (kind, id) = (rest.byte()?, rest.number()?);
    let reply = match kind {
        kind::STATUS => Reply::Status(Status {
            code: rest.number()?,
            // Servers of older versions have no text.
            message: String::from_utf8_lossy(rest.string().unwrap_or_default()).into_owned(),
        }),
        kind::HANDLE => Reply::Handle(rest.string()?.to_vec()),
        kind::DATA => {
            let length = rest.string()?.len();
            let start = packet.len() - rest.0.len() - length;
            let mut packet = packet;
            packet.truncate(start + length);
            return Ok((id, Reply::Data(Data { packet, start })));
        }
        kind::ATTRS => Reply::Attributes(rest.attributes()?),
        kind::EXTENDED_REPLY => Reply::Extended(rest.0.to_vec()),
        _ => return Err(violation("it sends a packet of an unknown type")),
    };
    Ok((id, reply))
}

/// The most bytes of a read and of a write, out of the reply to `limits@openssh.com`; 0: unlimited.
pub(super) fn parse_limits(reply: &[u8]) -> io::Result<(u64, u64)> {
    let mut rest = Fields(reply);
    let _packet = rest.long()?;
    Ok((rest.long()?, rest.long()?))
}

/// The fields of a packet that are still to be read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> io::Result<&'a [u8]> {
        let parts = self.0.split_at_checked(count);
        let (field, rest) = parts.ok_or_else(|| violation("a packet ends within a field"))?;
        self.0 = rest;
        Ok(field)
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn byte(&mut self) -> io::Result<u8> {
        self.array().map(|[byte]| byte)
    }

    fn number(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn long(&mut self) -> io::Result<u64> {
        self.array().map(u64::from_be_bytes)
    }

    fn string(&mut self) -> io::Result<&'a [u8]> {
        let length = self.number()?;
        self.take(length as usize)
    }

    fn attributes(&mut self) -> io::Result<Attributes> {
        let flags = self.number()?;
        let has = |flag| flags & flag != 0;
        let mut attributes = Attributes::default();
        if has(attribute::SIZE) {
            attributes.size = Some(self.long()?);
        }
        if has(attribute::IDS) {
            self.take(8)?;
        }
        if has(attribute::PERMISSIONS) {
            attributes.mode = Some(self.number()?);
        }
        if has(attribute::TIMES) {
            self.take(4)?;
            attributes.modified = Some(self.number()?);
        }
        Ok(attributes)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against packets of a server that are taken for others, or read past their end.
    use super::*;

    fn framed(packet: &[u8]) -> Vec<u8> {
        [&(packet.len() as u32).to_be_bytes(), packet].concat()
    }

    #[test]
    fn requests_have_their_lengths_and_numbers() {
        let read = Packet::read(b"h", 0x1_0000_0002, 7).finish(9);
        assert_eq!(
            read,
            framed(b"\x05\0\0\0\x09\0\0\0\x01h\0\0\0\x01\0\0\0\x02\0\0\0\x07")
        );
        let write = Packet::write(b"h", 1, 3, |to| to.copy_from_slice(b"abc")).finish(2);
        assert_eq!(
            write,
            framed(b"\x06\0\0\0\x02\0\0\0\x01h\0\0\0\0\0\0\0\x01\0\0\0\x03abc")
        );
        assert_eq!(Packet::init(), framed(b"\x01\0\0\0\x03"));
    }

    #[test]
    fn replies_are_read() {
        let data = framed(b"\x67\0\0\0\x05\0\0\0\x03abc");
        match receive_reply(&mut &data[..]).unwrap() {
            (5, Reply::Data(data)) => assert_eq!(data.bytes(), b"abc"),
            other => panic!("{other:?}"),
        }
        let version = framed(b"\x02\0\0\0\x03\0\0\0\x11fsync@openssh.com\0\0\0\x011");
        let (version, extensions) = receive_version(&mut &version[..]).unwrap();
        assert_eq!(
            (version, extensions.fsync, extensions.limits),
            (3, true, false)
        );
        let attributes = b"\x69\0\0\0\x01\0\0\0\x0f\0\0\0\0\0\0\0\x09\0\0\0\0\0\0\0\0\0\0\x81\xa4\
            \0\0\0\x01\0\0\0\x02";
        match receive_reply(&mut &framed(attributes)[..]).unwrap() {
            (1, Reply::Attributes(found)) => assert_eq!(
                (found.size, found.mode, found.modified),
                (Some(9), Some(0o100644), Some(2))
            ),
            other => panic!("{other:?}"),
        }
        // Without a text.
        let status = framed(b"\x65\0\0\0\x01\0\0\0\x04");
        assert!(matches!(
            receive_reply(&mut &status[..]),
            Ok((1, Reply::Status(Status { code: 4, .. })))
        ));
    }

    #[test]
    fn nonsense_is_refused() {
        for packet in [
            &b"\x67\0\0\0\x05\0\0\0\x04abc"[..],
            b"\x67\0\0\0\x05\xff\xff\xff\xffabc",
            b"\x69\0\0\0\x01\0\0\0\x01\0\0",
            b"\x66\0\0\0\x01",
            b"\x07\0\0\0\x01",
        ] {
            assert!(
                receive_reply(&mut &framed(packet)[..]).is_err(),
                "{packet:?}"
            );
        }
        for bytes in [&b"Welcome!\n"[..], b"\0\0\0\0", b"\0\0\0\x09\x02", b""] {
            assert!(receive_version(&mut &bytes[..]).is_err(), "{bytes:?}");
        }
    }
}
