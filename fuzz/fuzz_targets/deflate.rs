//! Compresses bytes at each level. Two inflaters must give them back, one of which has no more than
//! a window of 4 KiB; an encoder that was used before must write the same stream as a new one.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use zebu_deflate::{Encoder, Level};
use zlib_rs::{Inflate, InflateFlush, Status};

thread_local! {
    static USED: RefCell<Encoder> = RefCell::new(Encoder::new());
}

fuzz_target!(|data: &[u8]| {
    let [first, repeat, data @ ..] = data else {
        return;
    };
    let level = Level::new(i32::from(first % 9) + 1).expect("a level from 1 to 9");
    // Repeats reach past the window and past a segment, which short inputs do not.
    let data = data.repeat(1 + usize::from(*repeat));
    let data = &data[..data.len().min(200_000)];
    let mut stream = vec![0; data.len() + data.len() / 1000 + 100];
    let length = USED.with_borrow_mut(|used| used.compress_zlib(level, data, &mut stream));
    let length = length.expect("room for stored blocks");
    let stream = &stream[..length];

    let mut again = vec![0; length];
    let same = Encoder::new().compress_zlib(level, data, &mut again);
    assert!(same == Some(length) && again == stream);
    assert_eq!(Encoder::new().compress_zlib(level, data, &mut again[1..]), None);

    let mut back = vec![0; data.len()];
    let got = libdeflater::Decompressor::new().zlib_decompress(stream, &mut back);
    assert!(got == Ok(data.len()) && back == data);
    narrow(stream, data);
});

/// Inflates a few bytes at a time, so that the inflater has only its window to copy from.
fn narrow(stream: &[u8], data: &[u8]) {
    let mut inflate = Inflate::new(true, 12);
    let mut piece = [0; 61];
    let mut done = 0;
    loop {
        let rest = &stream[inflate.total_in() as usize..];
        let status = inflate.decompress(rest, &mut piece, InflateFlush::NoFlush);
        let count = inflate.total_out() as usize - done;
        assert_eq!(piece[..count], data[done..done + count]);
        done += count;
        match status {
            Ok(Status::StreamEnd) => break,
            Ok(_) => assert!(count > 0, "the stream has no end"),
            Err(e) => panic!("{e:?}"),
        }
    }
    assert_eq!((done, inflate.total_in() as usize), (data.len(), stream.len()));
}
