//! Guards against values that the peer would decode differently, and against hostile bytes that make
//! a decoder panic or allocate.

use proptest::prelude::*;

use super::*;

const HEADERS: [Headers; 3] = [Headers::Simple, Headers::Structured, Headers::Extended];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn bytes_on_the_wire() {
    let mut out = Vec::new();
    let mut request = Request {
        command: Command::WriteZeroes,
        flags: command::FUA | command::NO_HOLE,
        cookie: 0x0102_0304_0506_0708,
        offset: 0x10_0000,
        length: 0x200,
    };
    request.encode(Headers::Structured, &mut out);
    let rest = "00030006010203040506070800000000001000000000";
    assert_eq!(hex(&out), format!("25609513{rest}0200"));
    out.clear();
    request.length = 1 << 40;
    request.encode(Headers::Extended, &mut out);
    let rest = "000300060102030405060708000000000010000000000100";
    assert_eq!(hex(&out), format!("21e41c71{rest}00000000"));
    let header = ChunkHeader {
        done: true,
        kind: ChunkKind::None,
        cookie: 9,
        offset: 0x5000,
        length: 0,
    };
    let structured = "668e33ef00010001000000000000000900001008";
    assert_eq!(
        hex(header.data(Headers::Structured, 0x6000, 0x1000).bytes()),
        format!("{structured}0000000000006000")
    );
    let extended = "6e8a278c0001000200000000000000090000000000005000000000000000000c";
    assert_eq!(
        hex(header.hole(Headers::Extended, 0x6000, 0x1000).bytes()),
        format!("{extended}000000000000600000001000")
    );
    let simple = SimpleReply {
        error: 22,
        cookie: 7,
    };
    assert_eq!(hex(&simple.encode()), "67446698000000160000000000000007");
    out.clear();
    OptionReply::error(OptionReplyKind::ErrUnknown, "no").encode(OptionKind::Go, &mut out);
    assert_eq!(hex(&out), "0003e889045565a90000000780000006000000026e6f");
    assert_eq!(
        hex(&encode_option(OptionKind::Abort, &[])),
        "49484156454f50540000000200000000"
    );
}

#[test]
fn handshake_messages_round_trip() {
    let go = Go {
        name: "disk".into(),
        wanted: vec![3, 1, 77],
    };
    assert_eq!(Go::decode(&go.encode()), Ok(go));
    let query = ContextQuery {
        name: String::new(),
        queries: vec!["base:allocation".into(), String::new()],
    };
    assert_eq!(ContextQuery::decode(&query.encode()), Ok(query));
    for info in [
        Info::Export(ExportInfo {
            size: 1 << 50,
            flags: 0x123,
        }),
        Info::Name("a".into()),
        Info::Description("é".into()),
        Info::BlockSize {
            minimum: 1,
            preferred: 4096,
            maximum: MAX_PAYLOAD,
        },
    ] {
        assert_eq!(Info::decode(&OptionReply::info(&info).payload), Ok(info));
    }
    let extents = [
        Extent {
            length: 5,
            flags: 0,
        },
        Extent {
            length: u64::from(u32::MAX),
            flags: 3,
        },
    ];
    for headers in HEADERS {
        let payload = encode_extents(headers, 4, &extents);
        let decoded = decode_extents(headers, &payload).unwrap();
        assert_eq!(decoded, (4, extents.to_vec()));
        assert!(decode_extents(headers, &payload[..payload.len() - 1]).is_err());
    }
    let long = "é".repeat(3000);
    let (code, message, offset) =
        decode_error_payload(&encode_error_payload(5, &long, Some(9))).unwrap();
    assert!((code, offset) == (5, Some(9)) && long.starts_with(&message) && message.len() == 4096);
}

proptest! {
    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Go::decode(&bytes);
        let _ = ContextQuery::decode(&bytes);
        let _ = ContextQuery::decode_context(&bytes);
        let _ = Info::decode(&bytes);
        let _ = decode_list_item(&bytes);
        let _ = decode_error_payload(&bytes);
        let _ = StatusFilter::decode(&bytes);
        for headers in HEADERS {
            let _ = decode_extents(headers, &bytes);
            let _ = Request::decode(headers, &bytes);
            let _ = ChunkHeader::decode(headers, &bytes);
        }
    }

    #[test]
    fn requests_round_trip(
        number in 0u16..20, flags: u16, cookie: u64, offset: u64, length: u32,
    ) {
        for headers in HEADERS {
            let request = Request {
                command: Command::from_wire(number), flags, cookie, offset, length: length.into(),
            };
            let mut out = Vec::new();
            request.encode(headers, &mut out);
            prop_assert_eq!(out.len(), Request::size(headers));
            prop_assert_eq!(Request::decode(headers, &out), Ok(request));
        }
    }
}
