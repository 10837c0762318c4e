//! Guards against a backup that lacks what was written: bitmaps of a server that tell of less than
//! is dirty, to any client, and bitmaps that a client understands differently from QEMU.

use crate::common::other_server::Other;
use crate::common::server::{Raw, Server, client, have, libnbd};
use crate::common::{Lab, beyond_qemu, comparable, peer};
use zebu::block::DirtyBits;
use zebu::internal::nbd::{
    Command, ContextQuery, Extent, Headers, OptionKind, OptionReplyKind, Request, StatusFilter,
    command, decode_extents,
};

/// Bitmaps of `x.qcow2`: two that are not enabled, with different granularities and names; `on`,
/// which is; and `below` of its backing file, which is smaller.
const COLONS: &str = "a:b: é☃";

fn images() -> Lab {
    let lab = Lab::new();
    lab.make(
        "create base.qcow2 16M; img bitmap --add base.qcow2 below; \
         io base.qcow2: write 3M 64k | write 16320k 64k; \
         create -b base.qcow2 -F qcow2 x.qcow2 64M; \
         img bitmap --add -g 512 x.qcow2 fine; img bitmap --add x.qcow2 on; \
         io x.qcow2: write -P 1 1M 200k | write -z 5M 1k | write 10000000 1 | write 67108352 512; \
         img bitmap --disable x.qcow2 fine",
    );
    lab.qemu_img(&[
        "bitmap",
        "--add",
        "--disable",
        "-g",
        "128k",
        "x.qcow2",
        COLONS,
    ])
    .ok("bitmap");
    lab.qemu_img(&["bitmap", "--merge", "on", "x.qcow2", COLONS])
        .ok("bitmap");
    lab
}

const BITMAPS: [&str; 4] = ["fine", "on", COLONS, "below"];

fn options() -> Vec<&'static str> {
    let mut all = vec!["-t", "-e", "0", "-f", "qcow2"];
    for name in BITMAPS {
        all.extend(["-B", name]);
    }
    all
}

fn context(name: &str) -> String {
    format!("qemu:dirty-bitmap:{name}")
}

/// The options of an export at a socket.
fn image_opts(socket: &std::path::Path, context: &str) -> String {
    format!(
        "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap={context}",
        socket.display()
    )
}

#[test]
fn both_programs_see_the_same_of_both_servers() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    let mut options = options();
    options.extend(["-A", "-r", "x.qcow2"]);
    let ours = Server::start(&lab, &options);
    let theirs = Other::qemu_nbd(&lab, "q", &options);
    for name in BITMAPS {
        let mut seen = Vec::new();
        for socket in [&ours.socket, &theirs.socket] {
            for form in ["json", "human"] {
                let options = image_opts(socket, &context(name));
                let args = ["map", &format!("--output={form}"), "--image-opts", &options];
                let zebu = comparable(&lab.zebu(&args).ok("map").out);
                let qemu = comparable(&lab.qemu_img(&args).ok("map").out);
                assert_eq!(zebu, qemu, "{name}");
                if form == "json" {
                    seen.push(qemu);
                }
            }
        }
        assert_eq!(seen[0], seen[1], "{name}");
        if name == "on" {
            assert!(seen[0].contains(
                "{ \"start\": 1048576, \"length\": 262144, \"depth\": 0, \"present\": false, \
                 \"zero\": false, \"data\": false"
            ));
        }
    }
    for socket in [&ours.socket, &theirs.socket] {
        // What is dirty is read as everything else.
        let args = ["convert", "-O", "raw", "--image-opts"];
        let options = image_opts(socket, &context("on"));
        let all: Vec<&str> = args.into_iter().chain([&*options, "out.raw"]).collect();
        lab.zebu(&all).ok("convert");
        lab.qemu_img(&["compare", "-U", "x.qcow2", "out.raw"])
            .ok("compare");
        for name in [&context("none"), "qemu:", "base:other", ""] {
            let options = image_opts(socket, name);
            let refused = lab.zebu(&["map", "--image-opts", &options]);
            refused.failed_with_one_line(1, "a context that is not there");
            let text = format!("x-dirty-bitmap '{name}' not found");
            assert!(refused.err.contains(&text), "{refused:?}");
            assert_eq!(lab.qemu_img(&["map", "--image-opts", &options]).status, 1);
        }
        let long = "a".repeat(5000);
        let refused = lab.zebu(&["map", "--image-opts", &image_opts(socket, &long)]);
        assert!(refused.err.contains("too long"), "{refused:?}");
        // It tells the layer, and "zero" only of the context that knows.
        let options = image_opts(socket, "qemu:allocation-depth");
        let map = lab.zebu(&["map", "--output=json", "--image-opts", &options]);
        let map = map.ok("map").out;
        assert!(!map.contains("\"zero\": true"), "{map}");
        let options = image_opts(socket, "base:allocation");
        let args = ["map", "--output=json", "--image-opts", &options];
        let all = [lab.zebu(&args), lab.qemu_img(&args)].map(|answer| comparable(&answer.out));
        assert_eq!(all[0], all[1]);
    }
}

#[test]
fn clients_list_and_read_bitmaps() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    let mut options = options();
    options.extend(["-B", "on", "x.qcow2"]);
    let mut server = Server::start(&lab, &options);
    let listed = lab.zebu(&["nbd", "-L", "-k", server.socket.to_str().unwrap()]);
    let listed = listed.ok("-L").out;
    let text = format!(
        "contexts: 5\n   base:allocation\n   qemu:dirty-bitmap:fine\n   qemu:dirty-bitmap:on\n   \
         qemu:dirty-bitmap:{COLONS}\n   qemu:dirty-bitmap:below\n"
    );
    assert!(listed.ends_with(&text), "{listed}");
    let theirs = client(
        &lab,
        peer().nbd().to_str().unwrap(),
        &["-L", "-k", server.socket.to_str().unwrap()],
    );
    assert!(theirs.ok("-L").out.ends_with(&text));
    if have("nbdinfo") {
        let uri = server.uri("");
        let info = client(&lab, "nbdinfo", &[&uri]).ok("nbdinfo").out;
        for name in BITMAPS {
            assert!(info.contains(&context(name)), "{info}");
        }
        let map = |name: &str| {
            let map = format!("--map={}", context(name));
            client(&lab, "nbdinfo", &[&map, &uri]).ok("nbdinfo").out
        };
        let words = |text: &str| -> Vec<String> {
            let lines = text.lines();
            lines
                .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect()
        };
        assert_eq!(
            words(&map("fine")),
            [
                "0 1048576 0 clean",
                "1048576 204800 1 dirty",
                "1253376 3989504 0 clean",
                "5242880 1024 1 dirty",
                "5243904 4755968 0 clean",
                "9999872 512 1 dirty",
                "10000384 57107968 0 clean",
                "67108352 512 1 dirty",
            ]
        );
        assert_eq!(
            words(&map(COLONS)),
            [
                "0 1048576 0 clean",
                "1048576 262144 1 dirty",
                "1310720 3932160 0 clean",
                "5242880 131072 1 dirty",
                "5373952 4587520 0 clean",
                "9961472 131072 1 dirty",
                "10092544 56885248 0 clean",
                "66977792 131072 1 dirty",
            ]
        );
        assert_eq!(
            words(&map("below")),
            [
                "0 3145728 0 clean",
                "3145728 65536 1 dirty",
                "3211264 13500416 0 clean",
                "16711680 65536 1 dirty",
                "16777216 50331648 0 clean",
            ]
        );
    }
    server.stop();
}

/// The names of the contexts in the replies to a query.
fn query(raw: &mut Raw, kind: OptionKind, queries: &[&str]) -> Vec<(u32, String)> {
    let query = ContextQuery {
        name: String::new(),
        queries: queries.iter().map(|query| query.to_string()).collect(),
    };
    let (last, all) = raw.option(kind, &query.encode());
    assert_eq!(last, OptionReplyKind::Ack);
    all.iter()
        .map(|payload| ContextQuery::decode_context(payload).unwrap())
        .collect()
}

#[test]
fn queries_mean_what_they_mean_to_qemu() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    lab.make("img bitmap --add x.qcow2 a:");
    let mut options = options();
    options.extend(["-B", "a:", "-A", "-r", "x.qcow2"]);
    let ours = Server::start(&lab, &options);
    let theirs = Other::qemu_nbd(&lab, "q", &options);
    let two = [&ours.socket, &theirs.socket].map(|socket| {
        let mut raw = Raw::at(socket);
        assert_eq!(
            raw.option(OptionKind::StructuredReply, &[]).0,
            OptionReplyKind::Ack
        );
        raw
    });
    let [mut ours, mut theirs] = two;
    let colons = context(COLONS);
    for queries in [
        &[][..],
        &["qemu:"],
        &["base:"],
        &["qemu:dirty-bitmap:"],
        &["qemu:dirty-bitmap"],
        &["qemu:dirty-bitmap:on"],
        &["qemu:dirty-bitmap:a:"],
        &["qemu:dirty-bitmap:a:b:"],
        &[&colons],
        &["qemu:dirty-bitmap:o"],
        &["qemu:allocation-depth"],
        &["base:allocation", "qemu:dirty-bitmap:fine", "other:", ""],
        &["qemu:dirty-bitmap:on", "qemu:dirty-bitmap:on", "qemu:"],
    ] {
        for kind in [OptionKind::ListMetaContext, OptionKind::SetMetaContext] {
            // Their order and ids are the server's.
            let mut all = [&mut ours, &mut theirs].map(|raw| {
                let found = query(raw, kind, queries);
                let names = found.into_iter().map(|(_, name)| name);
                names.collect::<Vec<_>>()
            });
            all.iter_mut().for_each(|names| names.sort());
            assert_eq!(all[0], all[1], "{kind:?} {queries:?}");
        }
    }
}

#[test]
fn servers_refuse_the_same_bitmaps() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    lab.make(
        "create torn.qcow2 16M; img bitmap --add torn.qcow2 b; \
         img bitmap --add --disable torn.qcow2 off; crash torn.qcow2: write 0 64k; \
         raw data.raw 1048576; create -o compat=0.10 old.qcow2 1M",
    );
    let nbd = peer().nbd();
    for args in [
        &["-B", "none", "x.qcow2"][..],
        &["-B", "", "x.qcow2"],
        &["-r", "-B", "on", "-B", "none", "x.qcow2"],
        &["-B", "b", "torn.qcow2"],
        &["-B", "off", "torn.qcow2"],
        &["-r", "-B", "b", "torn.qcow2"],
        &["-B", "b", "-f", "raw", "data.raw"],
        &["--bitmap=b", "old.qcow2"],
    ] {
        let socket = lab.path("s.sock");
        let mut all = vec!["-k", socket.to_str().unwrap()];
        all.extend(args);
        let theirs = client(&lab, nbd.to_str().unwrap(), &all);
        let mut called = vec!["nbd"];
        called.extend(&all);
        let ours = lab.zebu(&called);
        assert_eq!(ours.status, theirs.status, "{args:?}");
        let text = |err: &str| err.split_once(": ").unwrap().1.to_owned();
        assert_eq!(text(&ours.err), text(&theirs.err), "{args:?}");
    }
}

/// The extents of an answer with one context.
fn extents(raw: &Raw, payload: &[u8]) -> (u32, Vec<Extent>) {
    decode_extents(raw.headers, payload).unwrap()
}

fn status(offset: u64, length: u64, flags: u16) -> Request {
    Request {
        command: Command::BlockStatus,
        flags,
        cookie: 7,
        offset,
        length,
    }
}

/// A client that has chosen these contexts; their ids.
fn chosen(server: &Server, headers: Headers, contexts: &[&str]) -> (Raw, Vec<u32>) {
    let mut raw = Raw::new(server);
    let option = match headers {
        Headers::Extended => OptionKind::ExtendedHeaders,
        _ => OptionKind::StructuredReply,
    };
    assert_eq!(raw.option(option, &[]).0, OptionReplyKind::Ack);
    let found = query(&mut raw, OptionKind::SetMetaContext, contexts);
    assert_eq!(found.len(), contexts.len());
    let go = [0; 6];
    assert_eq!(raw.option(OptionKind::Go, &go).0, OptionReplyKind::Ack);
    raw.headers = headers;
    let id = |name: &&str| found.iter().find(|found| found.1 == *name).unwrap().0;
    let ids = contexts.iter().map(id).collect();
    (raw, ids)
}

#[test]
fn ranges_flags_and_contexts_that_were_not_chosen() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    let mut options = options();
    options.push("x.qcow2");
    let mut server = Server::start(&lab, &options);
    let (on, fine) = (context("on"), context("fine"));
    let all = |extents: &[Extent]| -> Vec<(u64, u64)> {
        extents.iter().map(|e| (e.length, e.flags)).collect()
    };
    for headers in [Headers::Structured, Headers::Extended] {
        let (mut raw, ids) = chosen(&server, headers, &[&on]);
        // A range begins and ends anywhere.
        let got = raw.ask(&status((1 << 20) + 1, 262_144, 0), &[]);
        let (id, found) = extents(&raw, &got.others[0]);
        assert_eq!(id, ids[0]);
        assert_eq!(all(&found), [(262_143, 1), (1, 0)]);
        let got = raw.ask(&status((1 << 20) - 1, 1 << 20, command::REQ_ONE), &[]);
        assert_eq!(all(&extents(&raw, &got.others[0]).1), [(1, 0)]);
        let got = raw.ask(&status(1 << 20, 63 << 20, command::REQ_ONE), &[]);
        assert_eq!(all(&extents(&raw, &got.others[0]).1), [(262_144, 1)]);
        for bad in [status(0, 0, 0), status(64 << 20, 1, 0)] {
            assert_eq!(raw.ask(&bad, &[]).error, 22);
        }
        // Another context together with this.
        let (mut raw, _) = chosen(&server, headers, &[&fine, "base:allocation", &on]);
        let got = raw.ask(&status(0, 64 << 20, 0), &[]);
        assert_eq!(got.others.len(), 3);
        let (mut raw, _) = chosen(&server, headers, &[]);
        assert_eq!(raw.ask(&status(0, 512, 0), &[]).error, 22);
    }
    // Filters of contexts that were not chosen, or that nobody has.
    let (mut raw, ids) = chosen(&server, Headers::Extended, &[&on, &fine]);
    let other = (0..10).find(|id| !ids.contains(id)).unwrap();
    for (contexts, error) in [
        (vec![ids[0]], 0),
        (vec![ids[1]], 0),
        (ids.clone(), 0),
        (vec![ids[0], ids[0]], 22),
        (vec![other], 22),
        (vec![ids[0], u32::MAX], 22),
    ] {
        let count = contexts.len();
        let filter = StatusFilter {
            length: 64 << 20,
            contexts,
        };
        let payload = filter.encode();
        let request = status(0, payload.len() as u64, command::PAYLOAD_LEN);
        let got = raw.ask(&request, &payload);
        assert_eq!(got.error, error, "{filter:?}");
        assert_eq!(got.others.len(), if error == 0 { count } else { 0 });
    }
    server.stop();
}

#[test]
fn an_enabled_bitmap_grows_while_it_is_read() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    lab.make("create w.qcow2 256M; img bitmap --add -g 64k w.qcow2 b");
    let server = &mut Server::start(&lab, &["-t", "-e", "0", "-B", "b", "w.qcow2"]);
    let name = context("b");
    std::thread::scope(|scope| {
        let server = &*server;
        for first in 0..4u64 {
            let name = &name;
            scope.spawn(move || {
                // What a client wrote is dirty when its reply has come, to another client as well.
                let (mut writer, _) = chosen(server, Headers::Extended, &[]);
                let (mut reader, _) = chosen(server, Headers::Extended, &[name]);
                for nth in 0..200 {
                    let at = ((nth * 4 + first) * 7919 % 4096) << 16;
                    // Zeroes over data, and over nothing.
                    let (command, data) = match nth % 2 {
                        0 => (Command::Write, vec![1; 512]),
                        _ => (Command::WriteZeroes, Vec::new()),
                    };
                    let request = Request {
                        command,
                        ..status(at + 100, 512, 0)
                    };
                    assert_eq!(writer.ask(&request, &data).error, 0);
                    let one = status(at, 1 << 16, command::REQ_ONE);
                    let got = reader.ask(&one, &[]);
                    let found = extents(&reader, &got.others[0]).1;
                    assert_eq!(found[0].flags, 1, "{at}");
                    let got = reader.ask(&status(0, 256 << 20, 0), &[]);
                    let found = extents(&reader, &got.others[0]).1;
                    assert_eq!(found.iter().map(|e| e.length).sum::<u64>(), 256 << 20);
                }
            });
        }
    });
    let before = dirty(&server.uri(""), "b");
    let bytes: u64 = before.iter().map(|range| range.end - range.start).sum();
    assert_eq!(bytes, 800 << 16);
    server.stop();
    // And it is stored.
    let other = Other::qemu_nbd(&lab, "q", &["-r", "-B", "b", "w.qcow2"]);
    // It admits one client.
    let name = format!("json:{}", json(&other.socket, &context("b")));
    assert_eq!(dirty(&name, "b"), before);
    lab.qemu_img(&["check", "-U", "w.qcow2"]).ok("check");
}

/// The members of an export at a socket.
fn json(socket: &std::path::Path, context: &str) -> serde_json::Value {
    serde_json::json!({
        "driver": "nbd",
        "server": { "type": "unix", "path": socket.to_str() },
        "x-dirty-bitmap": context,
    })
}

/// The dirty ranges that the library reads from a server.
fn dirty(uri: &str, name: &str) -> Vec<std::ops::Range<u64>> {
    let queue = zebu::Queue::new(Default::default()).unwrap();
    let source = zebu::names::Source::Name(uri.into());
    let device = zebu::Device::open(&queue, &source, &zebu::OpenOptions::default()).unwrap();
    let bits = queue.block_on(device.remote_bitmap(&queue, &context(name)));
    bits.unwrap().ranges().collect()
}

#[test]
fn the_library_reads_bitmaps_of_servers() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    let mut options = options();
    options.extend(["-r", "x.qcow2"]);
    let ours = Server::start(&lab, &options);
    let theirs = Other::qemu_nbd(&lab, "q", &options);
    for uri in [ours.uri(""), theirs.uri("")] {
        assert_eq!(
            dirty(&uri, "fine"),
            [
                1_048_576..1_253_376,
                5_242_880..5_243_904,
                9_999_872..10_000_384,
                67_108_352..67_108_864
            ]
        );
        assert_eq!(
            dirty(&uri, "below"),
            [3_145_728..3_211_264, 16_711_680..16_777_216]
        );
        let queue = zebu::Queue::new(Default::default()).unwrap();
        let source = zebu::names::Source::Name(uri.into());
        let device = zebu::Device::open(&queue, &source, &zebu::OpenOptions::default()).unwrap();
        let missing = queue.block_on(device.remote_bitmap(&queue, &context("none")));
        let text = missing.unwrap_err().to_string();
        assert!(text.contains("not found"), "{text}");
    }
    let queue = zebu::Queue::new(Default::default()).unwrap();
    let source = zebu::names::Source::Name(lab.path("base.qcow2").into());
    let device = zebu::Device::open(&queue, &source, &zebu::OpenOptions::default()).unwrap();
    let local = queue.block_on(device.remote_bitmap(&queue, &context("below")));
    let text = local.unwrap_err().to_string();
    assert!(text.contains("is not an export"), "{text}");
}

#[test]
fn many_bitmaps_with_many_ranges() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = images();
    lab.make("create m.qcow2 2G");
    let names: Vec<String> = (0..20).map(|n| format!("bitmap {n}")).collect();
    let start = |n: u64| n * 131_072;
    let every = (0..12_000).map(|n| start(n)..start(n) + 65_536);
    let every: Vec<std::ops::Range<u64>> = every.collect();
    let mut bits = DirtyBits::new(2 << 30, 512);
    every.iter().for_each(|range| bits.set(range.clone()));
    let queue = zebu::Queue::new(Default::default()).unwrap();
    let source = zebu::names::Source::Name(lab.path("m.qcow2").into());
    let options = zebu::OpenOptions::default().write(true);
    let mut device = zebu::Device::open(&queue, &source, &options).unwrap();
    queue.block_on(async {
        for (nth, name) in names.iter().enumerate() {
            let granularity = if nth == 0 { 512 } else { 65_536 };
            let added = device.bitmap_add(&queue, name, Some(granularity), false);
            added.await.unwrap();
            device.bitmap_merge(&queue, name, &bits).await.unwrap();
        }
        device.close(&queue).await.unwrap();
    });
    let mut args = vec!["-t", "-e", "0", "m.qcow2"];
    names.iter().for_each(|name| args.extend(["-B", name]));
    let mut server = Server::start(&lab, &args);
    let uri = server.uri("");
    assert_eq!(dirty(&uri, "bitmap 0"), every);
    assert_eq!(dirty(&uri, "bitmap 19"), every);
    // One reply has extents of all contexts, a part of the range each.
    let contexts: Vec<String> = names.iter().map(|name| context(name)).collect();
    let contexts: Vec<&str> = contexts.iter().map(String::as_str).collect();
    for headers in [Headers::Structured, Headers::Extended] {
        let (mut raw, _) = chosen(&server, headers, &contexts);
        let got = raw.ask(&status(0, (2 << 30) - 512, 0), &[]);
        assert_eq!(got.others.len(), contexts.len());
        assert!(got.others.iter().all(|payload| payload.len() > 1000));
    }
    if let Some(python) = libnbd(&lab) {
        let script = format!(
            "import nbd\nh = nbd.NBD()\nnames = ['qemu:dirty-bitmap:bitmap %d' % n for n in (0, 19)]\n\
             [h.add_meta_context(n) for n in names]\nh.connect_uri('{uri}')\n\
             for name in names:\n  \
               at, all = 0, []\n  \
               while at < h.get_size():\n    \
                 mine = []\n    \
                 def f(context, offset, entries, error):\n      \
                   if context == name: mine.extend(entries)\n    \
                 h.block_status(min(2**31, h.get_size() - at), at, f)\n    \
                 assert mine\n    \
                 for length, flags in zip(mine[::2], mine[1::2]):\n      \
                   if flags: all.append((at, length))\n      \
                   at += length\n  \
               assert all == [(n * 131072, 65536) for n in range(12000)], all[:9]\n"
        );
        client(&lab, python, &["-c", &script]).ok("libnbd");
    }
    // Memory for replies is bounded: a client asks and does not receive.
    let (mut raw, _) = chosen(&server, Headers::Extended, &contexts);
    let mut bytes = Vec::new();
    for _ in 0..3000 {
        status(0, 2 << 30, 0).encode(raw.headers, &mut bytes);
    }
    raw.put(&bytes);
    std::thread::sleep(std::time::Duration::from_secs(1));
    let peak = server.peak_memory();
    assert!(peak < 256 << 20, "{peak}");
    drop(raw);
    server.stop();
}

/// With `--store-bitmaps` a bitmap is consistent after a kill that follows a flush.
#[test]
fn bitmaps_are_stored_with_each_flush() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 64M; img bitmap --add x.qcow2 b");
    for (nth, stores) in [true, true, false].into_iter().enumerate() {
        let mut options = vec!["-t", "-f", "qcow2", "x.qcow2"];
        if stores {
            options.push("--store-bitmaps");
        }
        let mut server = Server::start(&lab, &options);
        let uri = server.uri("");
        for part in 0..3 {
            let write = format!("write {}M 64k", 10 * nth + part);
            lab.qemu_io(&["-f", "raw", "-c", &write, "-c", "flush", &uri])
                .ok("qemu-io");
        }
        server.kill(&lab, "x.qcow2");
        std::fs::remove_file(&server.socket).unwrap();
        lab.qemu_img(&["check", "x.qcow2"]).ok("check");
        if !stores {
            let socket = lab.path("n.sock");
            let socket = socket.to_str().unwrap();
            let refused = lab.zebu(&["nbd", "-r", "-k", socket, "-B", "b", "x.qcow2"]);
            assert_eq!(refused.status, 1, "{refused:?}");
            assert!(refused.err.contains("inconsistent"), "{refused:?}");
            continue;
        }
        let mut server = Server::start(&lab, &["-t", "-e", "0", "-r", "-B", "b", "x.qcow2"]);
        let written = (0..=nth as u64).flat_map(|nth| (0..3).map(move |part| 10 * nth + part));
        let written: Vec<_> = written
            .map(|mib| mib << 20..(mib << 20) + (64 << 10))
            .collect();
        assert_eq!(dirty(&server.uri(""), "b"), written);
        server.stop();
    }
}
