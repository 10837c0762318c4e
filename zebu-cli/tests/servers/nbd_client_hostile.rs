//! Malicious NBD servers: the client must not panic, hang or use unbounded memory, and must not
//! accept data that it did not request.

use std::io::Write;
use std::sync::atomic::Ordering;

use crate::common::other_server::{self as other, Hostile, chunk, handshake, request, take};
use crate::common::{Lab, Limits, beyond_qemu};

const MIB: u64 = 1 << 20;

/// Serves one connection.
type Serve = fn(std::os::unix::net::UnixStream) -> std::io::Result<()>;

/// Replies to every request with the bytes that `answer` returns for its command, cookie, offset and
/// length.
fn with_answers(
    mut stream: std::os::unix::net::UnixStream,
    answer: impl Fn(u16, [u8; 8], u64, u32) -> Vec<u8>,
) -> std::io::Result<()> {
    handshake(&mut stream, MIB, 1)?;
    loop {
        let (command, cookie, offset, length) = request(&mut stream)?;
        stream.write_all(&answer(command, cookie, offset, length))?;
    }
}

/// A chunk with data.
fn data(done: bool, cookie: [u8; 8], offset: u64, bytes: &[u8]) -> Vec<u8> {
    let mut all = chunk(done, 1, cookie, bytes.len() as u32 + 8);
    all.extend(offset.to_be_bytes());
    all.extend(bytes);
    all
}

/// Block status: all is allocated.
fn all_data(cookie: [u8; 8]) -> Vec<u8> {
    let mut all = chunk(true, 5, cookie, 12);
    all.extend(7u32.to_be_bytes());
    all.extend((MIB as u32).to_be_bytes());
    all.extend(0u32.to_be_bytes());
    all
}

#[test]
fn hostile_servers_are_refused() {
    if beyond_qemu("it has other messages") {
        return;
    }
    let handshakes: &[(&str, Serve)] = &[
        ("begins with", |mut s| s.write_all(&[7; 4096])),
        ("goes on with", |mut s| s.write_all(b"NBDMAGIC12345678")),
        ("closed the connection", |mut s| {
            s.write_all(b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53")
        }),
        ("too large", |mut s| {
            // The protocol before 2011.
            let mut all = b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53".to_vec();
            all.extend([0xff; 8]);
            all.extend([0, 0, 0, 1]);
            all.extend([0; 124]);
            s.write_all(&all)
        }),
        ("export flags", |mut s| {
            let mut all = b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53".to_vec();
            all.extend(MIB.to_be_bytes());
            all.extend([1, 0, 0, 1]);
            all.extend([0; 124]);
            s.write_all(&all)
        }),
        ("closed the connection", |mut s| s.write_all(b"NBDMAG")),
        ("not speak NBD", |mut s| {
            other::greet(&mut s)?;
            other::option(&mut s)?;
            s.write_all(&[9; 64])
        }),
        ("bytes", |mut s| {
            other::greet(&mut s)?;
            let mut header = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
            header.extend([0, 0, 0, 11, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]);
            s.write_all(&header)?;
            take::<1000>(&mut s).map(drop)
        }),
        ("without end", |mut s| {
            other::greet(&mut s)?;
            loop {
                other::answer(&mut s, 11, 3, &[0, 0])?;
            }
        }),
        ("no multiple", |mut s| {
            handshake_with_block(&mut s, MIB + 1, [512, 512, 4096])
        }),
        ("block sizes", |mut s| {
            handshake_with_block(&mut s, MIB, [0, 0, 0])
        }),
        ("block sizes", |mut s| {
            handshake_with_block(&mut s, MIB, [3, 5, 7])
        }),
        ("too large", |mut s| handshake(&mut s, u64::MAX, 1)),
        ("size", |mut s| {
            other::greet(&mut s)?;
            loop {
                let (number, _) = other::option(&mut s)?;
                other::answer(&mut s, number, 1, &[])?;
            }
        }),
    ];
    let answers: &[(&str, Serve)] = &[
        ("begins with", |s| {
            with_answers(s, |_, _, _, _| vec![1; 100])
        }),
        ("nobody made", |s| {
            with_answers(s, |_, _, _, _| chunk(true, 0, [0xee; 8], 0))
        }),
        ("without structure", |s| {
            with_answers(s, |_, cookie, _, _| {
                let mut all = 0x6744_6698u32.to_be_bytes().to_vec();
                all.extend([0; 4]);
                all.extend(cookie);
                all
            })
        }),
        ("without any", |s| {
            with_answers(s, |_, cookie, _, _| chunk(true, 0, cookie, 0))
        }),
        ("other form", |s| {
            with_answers(s, |_, cookie, _, _| {
                [chunk(true, 6, cookie, 12), vec![0; 12]].concat()
            })
        }),
        ("not asked for", |s| {
            with_answers(s, |_, cookie, _, _| {
                let mut all = all_data(cookie);
                all[23] = 8;
                all
            })
        }),
        ("a chunk", |s| {
            with_answers(s, |_, cookie, _, _| chunk(true, 5, cookie, u32::MAX))
        }),
        ("a chunk", |s| {
            with_answers(s, |_, cookie, _, _| chunk(true, 77, cookie, 0))
        }),
        ("without end", |s| {
            with_answers(s, |_, cookie, _, _| {
                let one = [chunk(false, 0x8001, cookie, 6), vec![0, 0, 0, 5, 0, 0]].concat();
                one.repeat(1000)
            })
        }),
        ("closed the connection", |mut s| {
            handshake(&mut s, MIB, 1)?;
            request(&mut s).map(drop)
        }),
        // From here on block status is valid, and replies to reads are not.
        ("all of its data", |s| {
            with_reads(s, |cookie, _, _| chunk(true, 0, cookie, 0))
        }),
        ("not asked for", |s| {
            with_reads(s, |cookie, o, l| {
                data(true, cookie, o + u64::from(l), &[1; 512])
            })
        }),
        ("not asked for", |s| {
            with_reads(s, |cookie, o, _| {
                data(true, cookie, o.wrapping_sub(512), &[1; 512])
            })
        }),
        ("not asked for", |s| {
            with_reads(s, |cookie, o, l| {
                data(true, cookie, o, &vec![1; l as usize + 512])
            })
        }),
        ("or twice", |s| {
            with_reads(s, |cookie, o, l| {
                let half = vec![1; l as usize / 2];
                [data(false, cookie, o, &half), data(true, cookie, o, &half)].concat()
            })
        }),
        ("no length", |s| {
            with_reads(s, |cookie, o, _| data(true, cookie, o, &[]))
        }),
        ("hole", |s| {
            with_reads(s, |cookie, o, _| {
                let mut all = chunk(true, 2, cookie, 12);
                all.extend(o.to_be_bytes());
                all.extend(u32::MAX.to_be_bytes());
                all
            })
        }),
        ("closed the connection", |mut s| {
            handshake(&mut s, MIB, 1)?;
            loop {
                let (command, cookie, offset, _) = request(&mut s)?;
                if command == 7 {
                    s.write_all(&all_data(cookie))?;
                    continue;
                }
                let half = data(true, cookie, offset, &[1; 4096]);
                return s.write_all(&half[..1000]);
            }
        }),
    ];
    for (place, (words, serve)) in handshakes.iter().chain(answers).copied().enumerate() {
        let lab = Lab::new();
        let hostile = Hostile::new(&lab, "h", move |stream, _| serve(stream));
        // Memory must not depend on lengths that the server sends.
        let limits = Limits {
            memory: Some(2 << 20),
            ..Limits::default()
        };
        // A reconnect must not be tried after a violation of the protocol.
        let options = format!(
            "driver=nbd,path={},reconnect-delay=1",
            hostile.socket.display()
        );
        let answer = lab.zebu_limited(
            &["convert", "--image-opts", "-O", "raw", &options, "out.raw"],
            &limits,
        );
        let what = format!("case {place}, {words}");
        answer.failed_with_one_line(1, &what);
        assert!(answer.err.contains(words), "{what}: {answer:?}");
        assert!(hostile.connections.load(Ordering::SeqCst) < 100, "{what}");
    }
}

/// The same with valid block status.
fn with_reads(
    stream: std::os::unix::net::UnixStream,
    answer: impl Fn([u8; 8], u64, u32) -> Vec<u8>,
) -> std::io::Result<()> {
    with_answers(stream, |command, cookie, offset, length| match command {
        7 => all_data(cookie),
        _ => answer(cookie, offset, length),
    })
}

/// A handshake with these block sizes.
fn handshake_with_block(
    stream: &mut std::os::unix::net::UnixStream,
    size: u64,
    block: [u32; 3],
) -> std::io::Result<()> {
    other::greet(stream)?;
    loop {
        let (number, _) = other::option(stream)?;
        if number != 7 {
            other::answer(stream, number, (1 << 31) + 1, &[])?;
            continue;
        }
        let mut info = vec![0, 3];
        info.extend(block.iter().flat_map(|n| n.to_be_bytes()));
        other::answer(stream, 7, 3, &info)?;
        let mut info = vec![0, 0];
        info.extend(size.to_be_bytes());
        info.extend([0, 1]);
        other::answer(stream, 7, 3, &info)?;
        other::answer(stream, 7, 1, &[])?;
    }
}
