//! Decodes bytes as all messages of an NBD connection, handshake and transmission. A decoded value
//! must encode, and decode again to the same value.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zebu::internal::nbd::{
    ChunkHeader, ContextQuery, Go, Headers, Info, OptionHeader, OptionReply, OptionReplyHeader,
    Request, SimpleReply, StatusFilter, decode_error_payload, decode_extents, decode_list_item,
    encode_error_payload, encode_extents,
};

fuzz_target!(|data: &[u8]| {
    handshake(data);
    for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
        transmission(headers, data);
    }
    if let Ok(filter) = StatusFilter::decode(data) {
        assert_eq!(filter.encode(), data);
    }
    if let Ok((error, text, offset)) = decode_error_payload(data) {
        assert_eq!(encode_error_payload(error, &text, offset), data);
    }
});

fn handshake(data: &[u8]) {
    if let Some(bytes) = data.first_chunk() {
        let _ = OptionHeader::decode(bytes);
    }
    if let Some(bytes) = data.first_chunk() {
        let _ = OptionReplyHeader::decode(bytes);
    }
    if let Ok(go) = Go::decode(data) {
        assert_eq!(go.encode(), data);
    }
    if let Ok(query) = ContextQuery::decode(data) {
        assert_eq!(query.encode(), data);
    }
    if let Ok(info) = Info::decode(data)
        && !matches!(info, Info::Other(_))
    {
        assert_eq!(OptionReply::info(&info).payload, data);
    }
    let _ = ContextQuery::decode_context(data);
    let _ = decode_list_item(data);
}

fn transmission(headers: Headers, data: &[u8]) {
    if let Ok(request) = Request::decode(headers, data) {
        let mut out = Vec::new();
        request.encode(headers, &mut out);
        assert_eq!(out, data[..Request::size(headers)]);
        let _ = request.payload(headers);
    }
    if let Some(bytes) = data.first_chunk()
        && let Ok(reply) = SimpleReply::decode(bytes)
    {
        assert_eq!(&reply.encode(), bytes);
    }
    let _ = ChunkHeader::decode(headers, data);
    if let Ok((context, extents)) = decode_extents(headers, data) {
        assert_eq!(encode_extents(headers, context, &extents), data);
    }
}
