//! `--metrics` of the servers and `zebu top`: what is counted, clients and servers that are slow or
//! hostile, and the terminal, which must be as it was afterwards.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command as Program, Stdio};
use std::time::{Duration, Instant};

use zebu::internal::nbd::{Command, Headers, Request};
use zebu_vhost::front_end::Setup;

use crate::common::server::{Raw, Server, wait_until};
use crate::common::terminal::terminal;
use crate::common::vhost::{self, Disk};
use crate::common::{Lab, TIME_LIMIT, beyond_qemu, program};

/// What a server answers to these bytes, until it closes the connection.
fn answer(path: &Path, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
    // The server may have answered already.
    let _ = stream.write_all(request);
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    text
}

fn metrics(lab: &Lab) -> String {
    answer(
        &lab.path("m.sock"),
        b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
    )
}

fn value(metrics: &str, series: &str) -> f64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(series));
    let value = line.and_then(|rest| rest.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {series}: {metrics}"))
}

fn request(command: Command, offset: u64, length: u64) -> Request {
    Request {
        command,
        flags: 0,
        cookie: 1,
        offset,
        length,
    }
}

#[test]
fn an_nbd_server_counts() {
    if beyond_qemu("metrics") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 1M");
    let name = "a\"\\\nb";
    let args = [
        "-t",
        "-e2",
        "-x",
        name,
        "--metrics",
        "unix:m.sock",
        "x.qcow2",
    ];
    let mut server = Server::start(&lab, &args);
    let mut client = Raw::with_export(&server, name, Headers::Simple);
    for n in 0..3 {
        let write = request(Command::Write, n * 4096, 4096);
        assert_eq!(client.ask(&write, &[1; 4096]).error, 0);
    }
    let read = request(Command::Read, 0, 8192);
    assert_eq!(client.ask(&read, &[]).error, 0);
    // Past the end.
    assert_ne!(
        client.ask(&request(Command::Read, 1 << 20, 512), &[]).error,
        0
    );
    let text = metrics(&lab);
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert!(text.contains("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
    let export = "export=\"a\\\"\\\\\\nb\"";
    let of = |metric: &str, operation: &str| {
        let labels = format!("{{{export},operation=\"{operation}\"}}");
        value(&text, &format!("zebu_{metric}{labels}"))
    };
    assert_eq!(of("requests_total", "write"), 3.0);
    assert_eq!(of("request_bytes_total", "write"), 12288.0);
    assert_eq!(of("requests_total", "read"), 2.0);
    assert_eq!(of("request_errors_total", "read"), 1.0);
    assert_eq!(of("requests_in_flight", "read"), 0.0);
    assert_eq!(of("request_duration_seconds_count", "write"), 3.0);
    assert!(of("request_duration_seconds_sum", "write") > 0.0);
    let all = format!("bucket{{{export},operation=\"write\",le=\"+Inf\"}}");
    assert_eq!(
        value(&text, &format!("zebu_request_duration_seconds_{all}")),
        3.0
    );
    assert_eq!(value(&text, &format!("zebu_clients{{{export}}}")), 1.0);
    assert_eq!(
        value(&text, &format!("zebu_image_size_bytes{{{export}}}")),
        1048576.0
    );
    assert!(value(&text, &format!("zebu_image_allocated_bytes{{{export}}}")) > 0.0);
    assert!(value(&text, &format!("zebu_l2_cache_hits_total{{{export}}}")) >= 0.0);
    // Each metric is described once, before its values.
    for line in text.lines().filter(|line| line.starts_with("zebu_")) {
        let name = line.split(['{', ' ']).next().unwrap();
        let name = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| name.strip_suffix(end))
            .unwrap_or(name);
        assert_eq!(
            text.matches(&format!("# TYPE {name} ")).count(),
            1,
            "{line}"
        );
    }
    drop(client);
    wait_until("the client is gone", || {
        value(&metrics(&lab), &format!("zebu_clients{{{export}}}")) == 0.0
    });
    server.stop();
    assert!(!lab.path("m.sock").exists());
}

#[test]
fn a_vhost_server_counts() {
    if beyond_qemu("metrics") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 1M");
    let mut server = vhost::serve(&lab, &["--metrics", "unix:m.sock", "x.qcow2"]);
    let mut disk = Disk::new(&lab, Setup::default());
    assert_eq!(disk.give(vhost::WRITE, 0, &[1; 4096]), vhost::OK);
    let series = "zebu_request_bytes_total{export=\"zebu\",operation=\"write\"}";
    wait_until("the request is counted", || {
        value(&metrics(&lab), series) == 4096.0
    });
    drop(disk);
    server.stop();
}

#[test]
fn hostile_clients_of_metrics() {
    if beyond_qemu("metrics") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 1M");
    let socket = lab.path("m.sock");
    let mut server = Server::start(&lab, &["-t", "--metrics", "unix:m.sock", "x.qcow2"]);
    // They say nothing, or only a part; more than the server keeps.
    let silent: Vec<UnixStream> = (0..100)
        .map(|n| {
            let mut stream = UnixStream::connect(&socket).unwrap();
            // Those that the server has given up.
            let _ = stream.write_all(&b"GET /metrics HTTP/1.1\r\nHost: "[..n % 20]);
            stream
        })
        .collect();
    // One that reads nothing.
    let mut deaf = UnixStream::connect(&socket).unwrap();
    deaf.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    for (request, status) in [
        (&b"GET /metrics HTTP/1.0\n\n"[..], "200"),
        (b"GET /metrics?a=b HTTP/1.1\r\n\r\n", "200"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", "200"),
        (b"GET / HTTP/1.1\r\n\r\n", "200"),
        (b"GET http://host/metrics HTTP/1.1\r\n\r\n", "200"),
        (b"GET HTTP://[::1]:9/metrics?a=b HTTP/1.1\r\n\r\n", "200"),
        (b"GET http://host HTTP/1.1\r\n\r\n", "200"),
        (b"GET http://host?a=/metrics HTTP/1.1\r\n\r\n", "200"),
        (b"GET http://host/x HTTP/1.1\r\n\r\n", "404"),
        (b"GET http:///metrics HTTP/1.1\r\n\r\n", "400"),
        (b"GET /x HTTP/1.1\r\n\r\n", "404"),
        (
            b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n123456789",
            "405",
        ),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "505"),
        (b"\r\n\r\n", "400"),
        (b"\x16\x03\x01\x02\n\n", "400"),
        (&[b'a'; 100_000], "431"),
    ] {
        let text = answer(&socket, request);
        assert!(
            text.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request:?}: {text}"
        );
        let body = text.split_once("\r\n\r\n").unwrap().1;
        assert_eq!(body.is_empty(), request.starts_with(b"HEAD"), "{text}");
    }
    // The disk is served all the time, and the end waits for none of them.
    let mut client = Raw::with_export(&server, "", Headers::Simple);
    assert_eq!(client.ask(&request(Command::Read, 0, 512), &[]).error, 0);
    drop(client);
    let start = Instant::now();
    server.stop();
    assert!(start.elapsed() < Duration::from_secs(9));
    drop((silent, deaf));
}

#[test]
fn bad_addresses_of_metrics() {
    if beyond_qemu("metrics") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 1M");
    let socket = lab.path("n.sock");
    let socket = socket.to_str().unwrap();
    for address in ["", "9100", "unix:", "203.0.113.1:1", "unix:/no/such/dir/m"] {
        let args = ["nbd", "-k", socket, "--metrics", address, "x.qcow2"];
        lab.zebu(&args).failed_with_one_line(1, address);
    }
    lab.zebu(&["top", "no.sock"]).failed_with_one_line(1, "top");
    for args in [
        &["top"][..],
        &["top", "-n0", "a"],
        &["top", "-i0", "a"],
        &["top", "a", "b"],
    ] {
        let answer = lab.zebu(args);
        assert_eq!(answer.status, 1, "{answer:?}");
    }
}

#[test]
fn top_prints_rates() {
    if beyond_qemu("top") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 1M");
    let args = ["-t", "-x", "disk", "--metrics", "unix:m.sock", "x.qcow2"];
    let mut server = Server::start(&lab, &args);
    let mut client = Raw::with_export(&server, "disk", Headers::Simple);
    client.ask(&request(Command::Read, 0, 512), &[]);
    let top = lab.zebu(&["top", "-n2", "-i0.1", "m.sock"]).ok("top");
    assert_eq!(top.out.matches("EXPORT").count(), 2, "{}", top.out);
    let row = top.out.lines().find(|line| line.starts_with("disk "));
    let words: Vec<&str> = row.unwrap().split_whitespace().collect();
    assert_eq!(words[..4], ["disk", "read", "0", "0"], "{}", top.out);
    assert!(top.out.contains("clients: 1") && top.out.contains("disk 1 MiB"));
    assert!(!top.out.contains('\x1b'));
    server.stop();
}

/// A server that answers every request with these bytes.
fn fake(path: &Path, bytes: Vec<u8>) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(&bytes);
        }
    });
}

#[test]
fn top_of_a_hostile_server() {
    if beyond_qemu("top") {
        return;
    }
    let lab = Lab::new();
    let top = |name: &str, bytes: Vec<u8>| {
        fake(&lab.path(name), bytes);
        lab.zebu(&["top", "-n1", "-i0.1", name])
    };
    let http = |body: &str| format!("HTTP/1.1 200 OK\r\n\r\n{body}").into_bytes();
    // Escape sequences, other scripts, values that are none.
    let evil = "zebu_clients{export=\"\x1b[2J\u{202e}evil\u{7}\"} 1e308\n\
                zebu_image_size_bytes{export=\"n\"} NaN\n\
                zebu_image_size_bytes{export=\"m\"} 1e300\n\
                zebu_requests_total{export=\"n\",operation=\"\x1b]0;x\x07\"} 9e99\n\
                zebu_request_duration_seconds_bucket{export=\"n\",operation=\"a\",le=\"x\"} 1\n";
    let answer = top("evil", http(evil)).ok("evil");
    assert!(answer.out.contains("\\u{1b}[2J"), "{}", answer.out);
    assert!(
        !answer.out.contains(['\x1b', '\x07', '\u{202e}']),
        "{}",
        answer.out
    );
    // Many exports.
    let many: String = (0..100_000)
        .map(|n| format!("zebu_clients{{export=\"{n}\"}} 1\n"))
        .collect();
    top("many", http(&many)).ok("many");
    for (name, bytes) in [
        ("empty", Vec::new()),
        ("nothing", http("")),
        ("other", http("go_threads 7\n")),
        ("endless", http(&"a 1\n".repeat(5 << 20))),
        ("head", vec![b'a'; 1 << 20]),
        ("status", b"HTTP/1.1 500 \x1b[2J\r\n\r\n".to_vec()),
        (
            "cut",
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na".to_vec(),
        ),
    ] {
        let answer = top(name, bytes);
        answer.failed_with_one_line(1, name);
        assert!(!answer.err.contains('\x1b'), "{}", answer.err);
    }
    // One that never answers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let start = Instant::now();
    lab.zebu(&["top", "-n1", &address])
        .failed_with_one_line(1, "silent");
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn top_leaves_the_terminal_as_it_was() {
    if beyond_qemu("top") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 1M");
    let mut server = Server::start(&lab, &["-t", "--metrics", "unix:m.sock", "x.qcow2"]);
    for (end, status) in [
        ("q", 0),
        ("INT", 0),
        ("HUP", 128 + 1),
        ("QUIT", 128 + 3),
        ("TERM", 128 + 15),
    ] {
        let (mut ours, theirs) = terminal();
        let modes = || rustix::termios::tcgetattr(&theirs).unwrap();
        let before = format!("{:?}", modes().local_modes);
        let handle = || Stdio::from(theirs.try_clone().unwrap());
        let mut top = Program::new(program())
            .args(["top", "-i0.1", "m.sock"])
            .current_dir(lab.path(""))
            .env("TERM", "xterm")
            .stdin(handle())
            .stdout(handle())
            .stderr(handle())
            .spawn()
            .unwrap();
        let mut shown = String::new();
        while !shown.contains("clients: 0") {
            let mut bytes = [0; 4096];
            let n = ours.read(&mut bytes).unwrap();
            shown += &String::from_utf8_lossy(&bytes[..n]);
        }
        assert!(shown.starts_with("\x1b[?1049h"), "{shown:?}");
        assert_ne!(format!("{:?}", modes().local_modes), before);
        match end {
            "q" => ours.write_all(b"q").unwrap(),
            signal => {
                let signal = format!("-{signal}");
                let killed = Program::new("kill")
                    .args([&signal, &top.id().to_string()])
                    .status();
                assert!(killed.unwrap().success());
            }
        }
        assert_eq!(top.wait().unwrap().code(), Some(status), "{end}");
        assert_eq!(format!("{:?}", modes().local_modes), before, "{end}");
        drop(theirs);
        let mut rest = Vec::new();
        // The end of a pseudoterminal is an error.
        let _ = ours.read_to_end(&mut rest);
        assert!(
            rest.ends_with(b"\x1b[?25h\x1b[?1049l"),
            "{:?}",
            String::from_utf8_lossy(&rest)
        );
    }
    server.stop();
}
