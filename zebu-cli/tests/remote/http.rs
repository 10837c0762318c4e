//! Images on web servers: every command reads the same as from a file, with servers that are slow,
//! cut connections, are busy, have no ranges, or change the image; names and messages are QEMU's.

use std::fs;
use std::time::{Duration, Instant};

use super::cache_dir::{check_dump, date, state};
use super::uploads::{start, stopped_by};
use crate::common::nginx::Nginx;
use crate::common::server::{have, wait_until};
use crate::common::tls::certificates;
use crate::common::web::{Behaviour, Web, images, served};
use crate::common::{
    Answer, Lab, Limits, Rng, all_cases, beyond_qemu, cases, compare_answers, part, peer, program,
};

/// Converts `source` to raw and compares the result with `x.raw`.
#[track_caller]
fn reads_right(lab: &Lab, source: &str, format: &str, what: &str) {
    let args = ["convert", "-f", format, "-O", "raw", source, "out.raw"];
    lab.zebu(&args).ok(what);
    lab.assert_same_bytes("out.raw", "x.raw", what);
    fs::remove_file(lab.path("out.raw")).unwrap();
}

#[test]
fn all_commands_read_images() {
    if beyond_qemu("a server of the test") {
        return;
    }
    let lab = images(24 << 20);
    let web = served(&lab, "x.qcow2", Behaviour::default());
    let url = web.url();
    reads_right(&lab, &url, "qcow2", "qcow2");
    lab.zebu(&["compare", "-F", "raw", &url, "x.raw"])
        .ok("compare");
    lab.zebu(&["check", &url]).ok("check");
    for command in [&["map", "--output=json"][..], &["measure", "-O", "qcow2"]] {
        let ours = lab.zebu(&[command, &[&url]].concat()).ok("of the server");
        let file = lab
            .zebu(&[command, &["x.qcow2"]].concat())
            .ok("of the file");
        assert_eq!(ours.out, file.out, "{command:?}");
    }
    let script = "read 1M 64k\nread -v 5M 16\nmap\n";
    let ours = lab.zebu_io_script(&["-r", &url], script);
    let file = lab.zebu_io_script(&["-r", "x.qcow2"], script);
    assert_eq!(ours.status, 0, "{ours:#?}");
    let dump = |answer: &Answer| answer.out.lines().filter(|l| l.contains("  ")).count();
    assert_eq!(dump(&ours), dump(&file));

    // As a backing file, by an absolute name and by one that is relative to the server's.
    lab.zebu(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        &url,
        "-F",
        "qcow2",
        "top.qcow2",
    ])
    .ok("create");
    lab.zebu_io(&["-c", "write -P 9 0 64k", "top.qcow2"])
        .ok("write");
    lab.zebu_io_script(&["-f", "raw", "x.raw"], "write -P 9 0 64k")
        .ok("write");
    lab.zebu(&["compare", "-F", "raw", "top.qcow2", "x.raw"])
        .ok("above it");
    reads_right(&lab, "top.qcow2", "qcow2", "above it");
}

#[test]
fn opening_takes_few_requests() {
    if beyond_qemu("requests are counted") {
        return;
    }
    let lab = images(64 << 20);
    let web = served(&lab, "x.qcow2", Behaviour::default());
    lab.zebu(&["info", &web.url()]).ok("info");
    assert!(web.requests() <= 2, "{:#?}", web.heads());
    let before = web.requests();
    lab.zebu(&["map", &web.url()]).ok("map");
    assert!(web.requests() - before <= 4, "{}", web.requests() - before);
    // One request for at most a megabyte, and little that is not needed.
    let size = fs::metadata(lab.path("x.qcow2")).unwrap().len();
    let (requests, bytes) = (web.requests(), web.bytes());
    reads_right(&lab, &web.url(), "qcow2", "requests");
    let (requests, bytes) = (web.requests() - requests, web.bytes() - bytes);
    assert!(requests < size >> 20, "{requests} requests");
    assert!(bytes < size + (1 << 20), "{bytes} of {size} bytes");
    assert!(web.connections() < 60, "{} connections", web.connections());
    let head = web.heads().pop().unwrap();
    assert!(head.contains("if-range: \"first\"\r\n"), "{head}");
    assert!(!head.to_lowercase().contains("authorization"), "{head}");
}

#[test]
fn reads_run_side_by_side() {
    if beyond_qemu("time is measured") {
        return;
    }
    let lab = images(64 << 20);
    let delay = Duration::from_millis(200);
    let web = served(
        &lab,
        "x.qcow2",
        Behaviour {
            delay,
            ..Behaviour::default()
        },
    );
    let begun = Instant::now();
    reads_right(&lab, &web.url(), "qcow2", "late answers");
    // In a row, answers alone would take longer.
    let in_a_row = delay * web.requests() as u32;
    assert!(
        begun.elapsed() < in_a_row,
        "{:?} of {in_a_row:?}",
        begun.elapsed()
    );
}

/// Converts an image of `size` bytes while the server misbehaves at random.
fn with_faults(size: u64, format: &str, behaviour: Behaviour) {
    let lab = images(size);
    let file = format!("x.{format}");
    let length = fs::metadata(lab.path(&file)).unwrap().len();
    let web = served(&lab, &file, behaviour);
    reads_right(&lab, &web.url(), format, "faults");
    // Each fault costs one more request.
    let most = 2 * (length >> 20) + 64;
    assert!(web.requests() <= 2 * most, "{} requests", web.requests());
}

#[test]
fn faults_are_survived() {
    if beyond_qemu("a server of the test") {
        return;
    }
    let faults = Behaviour {
        cut: 5,
        busy: 7,
        ..Behaviour::default()
    };
    with_faults(48 << 20, "raw", faults.clone());
    with_faults(48 << 20, "qcow2", faults);
}

/// The same with much data, and the memory it takes.
#[test]
#[ignore = "a minute, and 3 GiB of disk"]
fn many_faults_are_survived() {
    let size = if all_cases() { 1 << 30 } else { 256 << 20 };
    for format in part(2, ["qcow2", "raw"]) {
        let faults = Behaviour {
            cut: 10,
            busy: 20,
            delay: Duration::from_millis(5),
            ..Behaviour::default()
        };
        with_faults(size, format, faults);
    }
}

#[test]
fn memory_is_bounded() {
    if beyond_qemu("a server of the test") {
        return;
    }
    let lab = images(256 << 20);
    for file in ["x.raw", "x.qcow2"] {
        let web = served(&lab, file, Behaviour::default());
        let format = &file[2..];
        let args = ["convert", "-f", format, "-O", "raw", &web.url(), "out.raw"];
        let peak = lab.peak_of(&[], &args);
        assert!(peak < 128 << 10, "{file}: {peak} KiB");
        lab.assert_same_bytes("out.raw", "x.raw", file);
    }
}

#[test]
fn another_image_is_never_mixed_in() {
    if beyond_qemu("a server of the test") {
        return;
    }
    let lab = images(32 << 20);
    let other = vec![7u8; 32 << 20];
    fs::write(lab.path("other.raw"), other).unwrap();
    // By the ETag, by the date, and by the length alone.
    let by = |etag: Option<&str>, modified: Option<&str>| Behaviour {
        etag: etag.map(Into::into),
        modified: modified.map(Into::into),
        delay: Duration::from_millis(10),
        ..Behaviour::default()
    };
    let date = Some("Mon, 02 Jan 2023 03:04:05 GMT");
    for (first, second) in [
        (by(Some("\"a\""), date), by(Some("\"b\""), date)),
        (
            by(None, date),
            by(None, Some("Tue, 03 Jan 2023 03:04:05 GMT")),
        ),
        (
            by(Some("W/\"a\""), date),
            by(Some("W/\"b\""), Some("Tue, 03 Jan 2023 03:04:05 GMT")),
        ),
    ] {
        let web = served(&lab, "x.raw", first);
        let url = web.url();
        let (lab, web) = (&lab, &web);
        let answer = std::thread::scope(|scope| {
            let convert = scope.spawn(|| {
                // Few at once, so that some come after the change.
                let options = format!(
                    "driver=raw,file.driver=http,file.connections=2,file.readahead=1M,file.url={url}"
                );
                let args = ["convert", "-O", "raw", "-r", "40M", "--image-opts", &options, "out.raw"];
                lab.zebu(&args)
            });
            while web.bytes() < 4 << 20 && !convert.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
            web.replace(&lab.path("other.raw"));
            web.change(|behaviour| *behaviour = second);
            convert.join().unwrap()
        });
        answer.fails_with("has changed since it was opened");
    }
    fs::write(lab.path("longer.raw"), vec![7u8; 33 << 20]).unwrap();
    let web = served(&lab, "x.raw", by(None, None));
    let mut held = lab.held_by_zebu(&["-r", "-f", "raw", &web.url()]);
    web.replace(&lab.path("longer.raw"));
    let answer = held.command("read 20M 64k");
    assert!(answer.contains("Stale file handle"), "{answer}");
    // Also if it is as before again.
    web.replace(&lab.path("x.raw"));
    let answer = held.command("read 20M 64k");
    assert!(answer.contains("Stale file handle"), "{answer}");
}

/// Servers that say more or less of an object, which changes while it is open. What tells its states
/// apart also tells when it is missing. It may come with later answers only: what was read before
/// counts then, too.
#[test]
fn no_read_has_bytes_of_another_state() {
    if beyond_qemu("a server of the test") {
        return;
    }
    const LENGTH: u64 = 2 << 20;
    let lab = Lab::new();
    let states = [0, 1].map(|number| state(&lab, number, LENGTH));
    for seed in cases(12, "objects that change on a server") {
        let mut rng = Rng::new(seed);
        // Of the first state; the second one has others, or none.
        let etag = ["\"a\"", "W/\"a\""][rng.below(2) as usize];
        let etag = (!rng.one_in(3)).then(|| etag.to_string());
        let modified = date(0);
        let first = Behaviour {
            ranges: !rng.one_in(3),
            bad_conditions: rng.one_in(2),
            modified: (etag.is_none() || rng.one_in(2)).then_some(modified),
            etag,
            silent: rng.below(4) * rng.below(2),
            ..Behaviour::default()
        };
        let second = Behaviour {
            silent: 0,
            etag: first
                .etag
                .as_ref()
                .filter(|_| rng.one_in(2))
                .map(|etag| etag.replace('a', "b")),
            modified: first
                .modified
                .as_ref()
                .filter(|_| rng.one_in(2))
                .map(|_| date(1)),
            ..first.clone()
        };
        let what = format!(
            "seed {seed}: ranges {}, conditions {}, {} silent, {:?} {:?}, then {:?} {:?}",
            first.ranges,
            !first.bad_conditions,
            first.silent,
            first.etag,
            first.modified,
            second.etag,
            second.modified
        );
        // With neither of them in the first two answers, nothing tells the states apart until one comes.
        let silent = first.silent;
        let tells = second.etag.is_some() || second.modified.is_some();
        let web = Web::new(&states[0], first);
        let url = web.url();
        let options = format!("driver=raw,file.driver=http,file.readahead=0,file.url={url}");
        let mut held = lab.held_by_zebu(&["-r", "--image-opts", &options]);
        for change in [false, true] {
            if change {
                if !tells && silent >= web.requests() {
                    break;
                }
                web.replace(&states[1]);
                web.change(|behaviour| *behaviour = second.clone());
            }
            for _ in 0..4 {
                let at = rng.below(LENGTH / 512) * 512;
                let answer = held.command(&format!("read -v {at} 512"));
                let seen = check_dump(&answer, 2);
                let may_fail = change || silent > 1;
                assert!(
                    seen == Some(0) || may_fail && seen.is_none(),
                    "{what}: {answer}"
                );
            }
        }
    }
}

#[test]
fn servers_without_ranges_are_read_in_order() {
    if beyond_qemu("QEMU refuses them") {
        return;
    }
    let lab = images(96 << 20);
    let behaviour = Behaviour {
        ranges: false,
        ..Behaviour::default()
    };
    for format in ["raw", "qcow2"] {
        let web = served(&lab, &format!("x.{format}"), behaviour.clone());
        reads_right(&lab, &web.url(), format, "without ranges");
        assert!(web.requests() <= 4, "{} requests", web.requests());
        // A body that is cut off is begun again.
        web.change(|behaviour| behaviour.cut = 2);
        reads_right(&lab, &web.url(), format, "cut off");
    }
    // Back and forth is refused after some time.
    let big = fs::File::create(lab.path("big.raw")).unwrap();
    big.set_len(200 << 20).unwrap();
    let web = served(&lab, "big.raw", behaviour.clone());
    let places = [190, 0, 100, 0, 190, 0, 100, 0, 190, 0];
    let script: String = places.map(|at| format!("read {at}M 4k\n")).concat();
    let answer = lab.zebu_io_script(&["-r", "-f", "raw", &web.url()], &script);
    assert!(answer.out.contains("read failed"), "{answer:#?}");
    assert!(web.requests() <= 4, "{} requests", web.requests());
    let unknown = Behaviour {
        length: false,
        ..behaviour
    };
    let web = served(&lab, "x.raw", unknown);
    lab.zebu(&["info", &web.url()]).fails_with("zebu convert -");
}

#[test]
fn what_servers_do_is_understood() {
    if beyond_qemu("a server of the test") {
        return;
    }
    let lab = images(4 << 20);
    let info = |web: &Web| lab.zebu(&["info", "-f", "raw", &web.url()]);
    let with = |behaviour| served(&lab, "x.raw", behaviour);
    let plain = Behaviour::default;
    // Conditions that a server does not understand.
    let web = with(Behaviour {
        bad_conditions: true,
        ..plain()
    });
    reads_right(&lab, &web.url(), "raw", "conditions");
    for status in [400, 403, 404, 410] {
        let web = with(Behaviour {
            status: Some(status),
            ..plain()
        });
        info(&web).fails_with(&status.to_string());
        assert_eq!(web.requests(), 1);
    }
    let web = with(Behaviour {
        header: Some("Content-Encoding: gzip".into()),
        ..plain()
    });
    info(&web).fails_with("encoded (gzip)");
    // It is busy for some time.
    let web = with(Behaviour {
        status: Some(503),
        ..plain()
    });
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| info(&web));
        wait_until("some attempts", || web.requests() >= 3);
        web.change(|behaviour| behaviour.status = None);
        waits.join().unwrap().ok("busy");
    });
    assert!(web.requests() < 8, "{} requests", web.requests());
    // It falls silent, and is asked again.
    let web = with(Behaviour {
        stalls_after: 1000,
        ..plain()
    });
    let options = format!(
        "driver=raw,file.driver=http,file.timeout=1,file.url={}",
        web.url()
    );
    std::thread::scope(|scope| {
        let args = ["convert", "--image-opts", "-O", "raw", &options, "out.raw"];
        let lab = &lab;
        let waits = scope.spawn(move || lab.zebu(&args));
        wait_until("a second attempt", || web.requests() >= 2);
        web.change(|behaviour| behaviour.stalls_after = 0);
        waits.join().unwrap().ok("silent");
    });
    // An empty object, and one of a byte.
    for size in [0, 1, 511, 65536, 65537] {
        fs::write(lab.path("small"), vec![1; size]).unwrap();
        let web = served(&lab, "small", plain());
        lab.zebu(&["convert", "-f", "raw", "-O", "raw", &web.url(), "out.raw"])
            .ok("small");
        let read = fs::read(lab.path("out.raw")).unwrap();
        assert_eq!(read.len(), size.next_multiple_of(512));
        assert!(read[..size].iter().all(|byte| *byte == 1));
    }
}

/// The first signal ends a conversion whose source does not answer, and says how it leaves the target.
#[test]
fn a_signal_ends_a_wait_for_a_server() {
    if beyond_qemu("a server of the test") {
        return;
    }
    let lab = images(8 << 20);
    let web = served(&lab, "x.raw", Behaviour::default());
    let stalls = || web.change(|behaviour| behaviour.stalls_after = 1);
    let url = web.url();
    let args = "convert -f raw -O raw -r 2M";
    let args: Vec<&str> = args.split(' ').chain([&*url, "out.raw"]).collect();
    let child = start(&lab, "", &args);
    wait_until("some bytes", || web.bytes() > 0);
    stalls();
    std::thread::sleep(Duration::from_millis(500));
    let begun = Instant::now();
    let answer = stopped_by(child, libc::SIGTERM);
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(15), "{took:?}");
    assert_eq!(answer.status, 143, "{answer:#?}");
    assert!(
        answer.err.contains("'out.raw' is incomplete"),
        "{answer:#?}"
    );
}

#[test]
fn redirects_are_followed_within_limits() {
    if beyond_qemu("a server of the test") {
        return;
    }
    let lab = images(4 << 20);
    let to = |place: &str| Behaviour {
        redirect: Some(place.into()),
        ..Behaviour::default()
    };
    let web = served(&lab, "x.raw", Behaviour::default());
    let mover = served(&lab, "x.raw", to(&web.url()));
    reads_right(&lab, &mover.url(), "raw", "redirect");
    // It is asked once.
    assert_eq!(mover.requests(), 1);
    // A place that holds for a time only is asked for again.
    let mut held = lab.held_by_zebu(&["-r", "-f", "raw", &mover.url()]);
    let next = served(&lab, "x.raw", Behaviour::default());
    web.change(|behaviour| behaviour.status = Some(403));
    mover.change(|behaviour| behaviour.redirect = Some(next.url()));
    let answer = held.command("read 3M 64k");
    assert!(answer.contains("read 65536/65536"), "{answer}");
    drop(held);
    // Credentials are sent only to the server that was named.
    fs::write(lab.path("secret"), "geheim").unwrap();
    let wanted = Some("Basic dTpnZWhlaW0=".to_string());
    mover.change(|behaviour| behaviour.authorization = wanted.clone());
    let options = format!(
        "driver=raw,file.driver=http,file.username=u,file.password-secret=s,file.cookie=c=1,file.url={}",
        mover.url()
    );
    let object = "secret,id=s,file=secret";
    let answer = lab.zebu(&["info", "--object", object, "--image-opts", &options]);
    answer.ok("redirect with a password");
    for (server, told) in [(&mover, true), (&next, false)] {
        let head = server.heads().pop().unwrap().to_lowercase();
        assert_eq!(head.contains("authorization:"), told, "{head}");
        assert_eq!(head.contains("cookie:"), told, "{head}");
    }
    mover.change(|behaviour| *behaviour = to(&mover.url()));
    let before = mover.requests();
    lab.zebu(&["info", &mover.url()])
        .fails_with("more than 10 redirects");
    assert_eq!(mover.requests() - before, 11);
    for (place, why) in [
        ("file:///etc/passwd", "to another protocol"),
        ("nbd://localhost/", "to another protocol"),
        ("http://", "to no URL"),
    ] {
        mover.change(|behaviour| *behaviour = to(place));
        lab.zebu(&["info", &mover.url()]).fails_with(why);
    }
}

#[test]
fn who_asks_is_told_from_files() {
    if beyond_qemu("tokens; secrets are in files") {
        return;
    }
    let lab = images(1 << 20);
    fs::write(lab.path("secret"), "geheim\n").unwrap();
    fs::write(lab.path("base64"), "Z2VoZWlt").unwrap();
    let web = served(&lab, "x.raw", Behaviour::default());
    let url = web.url();
    let info = |object: &str, options: &str| {
        let options = format!("driver=raw,file.driver=http,file.url={url}{options}");
        lab.zebu(&["info", "--object", object, "--image-opts", &options])
    };
    let (raw, base64) = (
        "secret,id=s,file=secret",
        "secret,id=s,file=base64,format=base64",
    );
    for (wanted, object, options) in [
        (
            "Basic dTpnZWhlaW0=",
            raw,
            ",file.username=u,file.password-secret=s",
        ),
        (
            "Basic dTpnZWhlaW0=",
            base64,
            ",file.username=u,file.password-secret=s",
        ),
        ("Basic dTo=", raw, ",file.username=u"),
        ("Bearer geheim", raw, ",file.token-secret=s"),
    ] {
        web.change(|behaviour| behaviour.authorization = Some(wanted.into()));
        let answer = info(object, options).ok(options);
        assert!(!answer.out.contains("geheim"), "{answer:#?}");
        info(object, ",file.username=other").fails_with("401");
    }
    web.change(|behaviour| {
        *behaviour = Behaviour {
            cookie: Some("geheim".into()),
            ..Behaviour::default()
        }
    });
    info(raw, ",file.cookie-secret=s").ok("cookie");
    info(raw, ",file.cookie=geheim").ok("cookie");
    info(raw, "").fails_with("401");
    info("secret,id=s,data=geheim", ",file.cookie-secret=s").ok("a text");
    info("secret,id=s,file=nowhere", "").fails_with("No such file");
    info(raw, ",file.password-secret=t,file.username=u").fails_with("No secret with id 't'");
    let port = web.port();
    let with_password = format!("http://u:geheim@127.0.0.1:{port}/object");
    let answer = lab.zebu(&["info", &with_password]);
    answer.fails_with("a URL has no password");
    web.change(|behaviour| {
        *behaviour = Behaviour {
            authorization: Some("Basic dTo=".into()),
            ..Behaviour::default()
        }
    });
    lab.zebu(&[
        "info",
        "-f",
        "raw",
        &format!("http://u@127.0.0.1:{port}/object"),
    ])
    .ok("a user in the URL");
}

#[test]
fn messages_show_no_signature() {
    if beyond_qemu("QEMU shows it") {
        return;
    }
    let lab = images(1 << 20);
    let web = served(
        &lab,
        "x.raw",
        Behaviour {
            etag: None,
            modified: None,
            ..Behaviour::default()
        },
    );
    let url = format!("{}?X-Amz-Signature=geheim%3D,x", web.url());
    let info = lab.zebu(&["info", "-f", "raw", &url]).ok("the name");
    assert!(info.out.contains(&url), "{info:#?}");
    let options = format!(
        "driver=raw,file.driver=http,file.url={}",
        url.replace(',', ",,")
    );
    let commands: [&[&str]; 5] = [
        // It says that the image is not cached.
        &[
            "convert",
            "--cache-dir",
            "cache",
            "-f",
            "raw",
            &url,
            "out.raw",
        ],
        &["convert", "-f", "qcow2", &url, "out.raw"],
        &["convert", "--image-opts", &options, "no/such/folder"],
        &["import", "--sha256", &"0".repeat(64), &url, "out.raw"],
        &["io", "-c", "write 0 512", "-f", "raw", &url],
    ];
    let answers = commands.map(|args| lab.zebu(args));
    web.change(|behaviour| behaviour.status = Some(403));
    let refused = commands.map(|args| lab.zebu(args));
    for answer in answers.iter().chain(&refused) {
        assert!(!answer.err.is_empty(), "{answer:#?}");
        let said = format!("{}{}", answer.out, answer.err);
        assert!(!said.contains("geheim"), "{answer:#?}");
    }
}

#[test]
fn proxies_come_from_the_environment() {
    if beyond_qemu("a server of the test") {
        return;
    }
    let lab = images(1 << 20);
    fs::write(lab.path("secret"), "geheim").unwrap();
    // A proxy is asked for whole URLs, and this one has the object itself.
    let proxy = served(&lab, "x.raw", Behaviour::default());
    let run = |variables: &str, rest: &[&str]| {
        let port = proxy.port();
        let script = format!("{variables} exec \"$0\" \"$@\"")
            .replace("PROXY", &format!("http://127.0.0.1:{port}"));
        let mut args = vec!["-c", &script, program().to_str().unwrap()];
        args.extend(rest);
        lab.run("sh".as_ref(), &args, b"", &Limits::default())
    };
    let far = ["info", "-f", "raw", "http://far.invalid/object"];
    run("http_proxy=PROXY", &far).ok("http_proxy");
    run("all_proxy=PROXY", &far).ok("all_proxy");
    assert!(
        proxy.heads()[0].starts_with("GET http://far.invalid/object"),
        "{:?}",
        proxy.heads()
    );
    let answer = run("http_proxy=PROXY no_proxy=far.invalid", &far);
    assert_eq!(answer.status, 1, "{answer:#?}");
    let options = "driver=raw,file.driver=http,file.url=http://far.invalid/object,\
                   file.proxy-username=u,file.proxy-password-secret=s";
    let args = [
        "info",
        "--object",
        "secret,id=s,file=secret",
        "--image-opts",
        options,
    ];
    run("http_proxy=PROXY", &args).ok("with a user");
    let head = proxy.heads().pop().unwrap().to_lowercase();
    assert!(
        head.contains("proxy-authorization: basic dtpnzwhlaw0="),
        "{head}"
    );
}

#[test]
fn untrusted_names_are_refused() {
    if beyond_qemu("--untrusted") {
        return;
    }
    let lab = images(1 << 20);
    let web = served(&lab, "x.qcow2", Behaviour::default());
    let url = web.url();
    lab.zebu(&["info", "--untrusted", &url])
        .fails_with("must be a path");
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        &url,
        "-F",
        "qcow2",
        "top.qcow2",
    ];
    lab.zebu(&create).ok("create");
    let requests = web.requests();
    let args = [
        "convert",
        "--untrusted",
        "-O",
        "raw",
        "top.qcow2",
        "out.raw",
    ];
    lab.zebu(&args).fails_with("may not open");
    assert_eq!(web.requests(), requests);
    // The user's own words.
    let options = format!("driver=qcow2,file.driver=http,file.url={url}");
    lab.zebu(&["info", "--untrusted", "--image-opts", &options])
        .ok("named");
}

/// The folder of QEMU's modules, if the one for HTTP is there.
pub fn qemu_modules() -> Option<String> {
    let root = peer().img().parent()?.parent()?;
    let found = ["lib/x86_64-linux-gnu/qemu", "lib/aarch64-linux-gnu/qemu"];
    let mut found = found.iter().map(|folder| root.join(folder));
    let folder = found.find(|folder| folder.join("block-curl.so").exists())?;
    Some(folder.to_str()?.into())
}

/// Runs qemu-img with its driver for HTTP.
fn qemu_img(lab: &Lab, modules: &str, args: &[&str]) -> Answer {
    qemu_img_with(lab, &format!("QEMU_MODULE_DIR='{modules}'"), args)
}

/// Runs qemu-img with these variables.
pub fn qemu_img_with(lab: &Lab, variables: &str, args: &[&str]) -> Answer {
    let script = format!("{variables} exec \"$0\" \"$@\"");
    let mut all = vec!["-c", &script, peer().img().to_str().unwrap()];
    all.extend(args);
    lab.run("sh".as_ref(), &all, b"", &Limits::default())
}

#[test]
fn nginx_serves_images() {
    if beyond_qemu("nginx with and without ranges") || !have("nginx") {
        return;
    }
    let lab = images(48 << 20);
    for lines in ["", "max_ranges 0;"] {
        let nginx = Nginx::new(&lab, lines);
        for format in ["raw", "qcow2"] {
            reads_right(
                &lab,
                &nginx.url("http", &format!("x.{format}")),
                format,
                lines,
            );
        }
    }
}

#[test]
fn certificates_are_verified() {
    if beyond_qemu("cacert") || !have("nginx") || !have("certtool") {
        return;
    }
    let lab = images(8 << 20);
    certificates(&lab);
    let folder = lab.path("good").display().to_string();
    let nginx = Nginx::new(
        &lab,
        &format!(
            "ssl_certificate {folder}/server-cert.pem; ssl_certificate_key {folder}/server-key.pem;"
        ),
    );
    let url = nginx.url("https", "x.qcow2");
    let options = |more: &str| format!("driver=qcow2,file.driver=https,file.url={url}{more}");
    let convert = |more: &str| {
        let options = options(more);
        lab.zebu(&["convert", "--image-opts", "-O", "raw", &options, "out.raw"])
    };
    for more in [",file.cacert=good/ca-cert.pem", ",file.sslverify=off"] {
        convert(more).ok(more);
        lab.assert_same_bytes("out.raw", "x.raw", more);
    }
    convert("").fails_with("certificate");
    convert(",file.cacert=other/ca-cert.pem").fails_with("certificate");
    convert(",file.cacert=nowhere").fails_with("No such file");
    convert(",file.cacert=x.raw").fails_with("x.raw");
    // Another name than that of the certificate.
    let by_address = options(",file.cacert=good/ca-cert.pem").replace("localhost", "127.0.0.2");
    let answer = lab.zebu(&["info", "--image-opts", &by_address]);
    assert_eq!(answer.status, 1, "{answer:#?}");
    // From https to http.
    let plain = served(&lab, "x.qcow2", Behaviour::default());
    let moving = Nginx::new(
        &lab,
        &format!(
            "ssl_certificate {folder}/server-cert.pem; ssl_certificate_key {folder}/server-key.pem; \
             return 302 {};",
            plain.url()
        ),
    );
    let away = options(",file.cacert=good/ca-cert.pem").replace(&url, &moving.url("https", "x"));
    lab.zebu(&["info", "--image-opts", &away])
        .fails_with("from https to http");
    assert_eq!(plain.requests(), 0);
}

#[test]
fn names_and_messages_are_those_of_qemu() {
    let Some(modules) = qemu_modules().filter(|_| have("nginx") && !beyond_qemu("its modules"))
    else {
        println!("skipped: QEMU's driver for HTTP is not installed");
        return;
    };
    let lab = images(1 << 20);
    fs::write(lab.path("secret"), "geheim").unwrap();
    fs::write(lab.path("odd.raw"), [1; 1000]).unwrap();
    lab.make("img create -q -f qcow2 -b x.qcow2 -F qcow2 top.qcow2");
    let nginx = Nginx::new(&lab, "");
    let url = nginx.url("http", "x.qcow2");
    lab.zebu(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        &url,
        "-F",
        "qcow2",
        "far.qcow2",
    ])
    .ok("create");
    let same = |args: &[&str]| {
        let ours = lab.zebu(args);
        let theirs = qemu_img(&lab, &modules, args);
        compare_answers(&ours, &theirs, args, "HTTP");
    };
    for name in ["x.qcow2", "top.qcow2", "odd.raw"] {
        let url = nginx.url("http", name);
        same(&["info", &url]);
        same(&["info", "--output=json", &url]);
        same(&["info", "--backing-chain", &url]);
        if name != "odd.raw" {
            // QEMU takes the rest of the last sector for data.
            same(&["map", "--output=json", &url]);
        }
    }
    same(&["info", "--backing-chain", "far.qcow2"]);
    same(&["check", &url]);
    let object = "secret,id=s,file=secret";
    for more in [
        "",
        ",file.username=u",
        ",file.username=u,file.password-secret=s",
        ",file.sslverify=off",
        ",file.sslverify=on",
        ",file.cookie=abc",
        ",file.cookie-secret=s",
        ",file.cookie=abc,file.cookie-secret=s",
        ",file.proxy-username=u",
        ",file.proxy-username=u,file.proxy-password-secret=s",
        ",file.readahead=64k,file.timeout=7",
        ",file.readahead=100",
        ",file.timeout=10001",
        ",file.password-secret=t",
        ",file.unknown=1",
    ] {
        for driver in ["http", "https"] {
            let options = format!("driver=qcow2,file.driver={driver},file.url={url}{more}");
            same(&["info", "--object", object, "--image-opts", &options]);
        }
        let options = format!("driver=http,url={url}{}", more.replace("file.", ""));
        same(&["info", "--object", object, "--image-opts", &options]);
    }
    for options in [
        "driver=http".to_string(),
        format!("driver=qcow2,file.filename={url}"),
        format!("driver=qcow2,file.driver=http,file.filename={url}"),
    ] {
        same(&["info", "--image-opts", &options]);
    }
    let json = format!(
        r#"json:{{"driver":"qcow2","file":{{"driver":"http","url":"{url}","sslverify":false,"cookie":"a=1"}}}}"#
    );
    same(&["info", &json]);
    same(&["info", "--output=json", &json]);
    same(&["info", "http:foo"]);
    let new = nginx.url("http", "new");
    same(&["resize", &url, "20M"]);
    same(&["snapshot", "-c", "a", &url]);
    same(&["convert", "-O", "qcow2", "odd.raw", &new]);
    same(&["create", "-f", "qcow2", &new, "1M"]);
    same(&["convert", "-n", "-O", "qcow2", "odd.raw", &url]);
    same(&["convert", "-n", "-O", "raw", "odd.raw", &url]);
}

/// Converts compressed images, as they are published, when each request takes 20 ms. Prints how long
/// both programs take.
#[test]
fn late_answers_take_fewer_requests_than_with_qemu() {
    let Some(modules) = qemu_modules().filter(|_| !beyond_qemu("a comparison")) else {
        println!("skipped: QEMU's driver for HTTP is not installed");
        return;
    };
    let lab = Lab::new();
    let mut rng = Rng::new(1);
    // Half of it is said twice.
    let words = (0..24 << 16).map(|_| rng.next().to_le_bytes().repeat(2));
    fs::write(lab.path("x.raw"), words.flatten().collect::<Vec<u8>>()).unwrap();
    lab.make("img convert -c -f raw -O qcow2 x.raw x.qcow2");
    let behaviour = Behaviour {
        delay: Duration::from_millis(20),
        ..Behaviour::default()
    };
    let web = served(&lab, "x.qcow2", behaviour);
    let url = web.url();
    let args = [
        "convert", "-t", "unsafe", "-f", "qcow2", "-O", "raw", &url, "out.raw",
    ];
    let median = |run: &dyn Fn()| {
        let mut times: Vec<_> = (0..3)
            .map(|_| {
                let begun = Instant::now();
                run();
                begun.elapsed()
            })
            .collect();
        times.sort();
        times[1].as_secs_f64()
    };
    let ours = median(&|| drop(lab.zebu(&args).ok("late answers")));
    let requests = web.requests() / 3;
    lab.assert_same_bytes("out.raw", "x.raw", "late answers");
    // Its driver may hang: then it is ended by the time limit.
    let theirs = median(&|| drop(qemu_img(&lab, &modules, &args)));
    let more = web.requests() / 3 - requests;
    let ratio = theirs / ours;
    println!(
        "{ours:.3} s with {requests} requests, QEMU {theirs:.3} s with {more}: {ratio:.1} times"
    );
    assert!(requests < more, "{requests} requests, QEMU {more}");
}

/// A proxy may leave ETags and dates out of some answers; an object may be replaced meanwhile.
#[test]
fn a_version_that_is_told_later_counts() {
    if beyond_qemu("a server of the test") {
        return;
    }
    let lab = images(4 << 20);
    fs::write(lab.path("other.raw"), vec![7u8; 4 << 20]).unwrap();
    let opened = |silent| {
        let behaviour = Behaviour {
            silent,
            ..Behaviour::default()
        };
        let web = served(&lab, "x.raw", behaviour);
        let options = format!(
            "driver=raw,file.driver=http,file.readahead=0,file.url={}",
            web.url()
        );
        let held = lab.held_by_zebu(&["-r", "--image-opts", &options]);
        (web, held)
    };
    let stale = "Stale file handle";
    // The second answer tells it: nothing was read before.
    let (web, mut held) = opened(1);
    let answer = held.command("read 1M 512");
    assert!(!answer.contains(stale), "{answer}");
    assert!(web.heads()[2].contains("if-range"), "{:#?}", web.heads());
    web.publish(&lab.path("other.raw"), "\"second\"");
    let answer = held.command("read 2M 512");
    assert!(answer.contains(stale), "{answer}");
    // A later one tells it: what was read before may be of another version.
    let (_web, mut held) = opened(3);
    let answer = held.command("read 1M 512");
    assert!(!answer.contains(stale), "{answer}");
    let answer = held.command("read 2M 512");
    assert!(answer.contains(stale), "{answer}");
    // Redirects lead to another place, and nothing tells a version.
    let nothing = Behaviour {
        etag: None,
        modified: None,
        ..Behaviour::default()
    };
    let (one, other) = (
        served(&lab, "x.raw", nothing.clone()),
        served(&lab, "other.raw", nothing.clone()),
    );
    let moving = served(&lab, "x.raw", nothing);
    moving.change(|behaviour| behaviour.redirect = Some(one.url()));
    let options = format!(
        "driver=raw,file.driver=http,file.readahead=0,file.url={}",
        moving.url()
    );
    let mut held = lab.held_by_zebu(&["-r", "--image-opts", &options]);
    let answer = held.command("read 1M 512");
    assert!(!answer.contains(stale), "{answer}");
    one.change(|behaviour| behaviour.status = Some(410));
    moving.change(|behaviour| behaviour.redirect = Some(other.url()));
    let answer = held.command("read 2M 512");
    assert!(answer.contains(stale), "{answer}");
}

/// A web server of this machine may serve the very file that is to be written.
#[test]
fn a_target_that_is_served_as_the_source_is_kept() {
    if beyond_qemu("QEMU writes to no file that a server serves") {
        return;
    }
    let lab = images(1 << 20);
    let nginx = Nginx::new(&lab, "");
    let [raw, qcow2] = ["x.raw", "x.qcow2"].map(|name| nginx.url("http", name));
    let before = ["x.raw", "x.qcow2"].map(|name| fs::read(lab.path(name)).unwrap());
    lab.zebu(&[
        "create", "-q", "-f", "qcow2", "-b", &qcow2, "-F", "qcow2", "far.q",
    ])
    .ok("create");
    let of = format!("if={raw}");
    for args in [
        &["convert", "-f", "raw", &raw, "x.raw"][..],
        &["convert", "-f", "raw", "-O", "qcow2", &raw, "x.raw"],
        &["convert", "-O", "qcow2", "far.q", "x.qcow2"],
        &["import", "-f", "raw", &raw, "x.raw"],
        &["dd", "-f", "raw", &of, "of=x.raw"],
        &["ova", "--output", "x.raw", "-f", "raw", &raw],
    ] {
        let answer = lab.zebu(args);
        assert_eq!(answer.status, 1, "{args:?}: {answer:?}");
        let now = ["x.raw", "x.qcow2"].map(|name| fs::read(lab.path(name)).unwrap());
        assert!(now == before, "{args:?}");
    }
    // A copy is another file.
    lab.zebu(&["convert", "-f", "raw", &raw, "copy.raw"])
        .ok("copy");
    lab.zebu(&["convert", "-f", "raw", &raw, "copy.raw"])
        .ok("again");
    assert!(fs::read(lab.path("copy.raw")).unwrap() == before[0]);
}
