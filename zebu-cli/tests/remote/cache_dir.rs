//! The cache of blocks of images on other machines (`--cache-dir`). Guards against bytes of another
//! state of an object, of damaged files, and against a folder that grows.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::stores::{DIALECTS, run};
use crate::common::server::{Server, wait_until};
use crate::common::sshd::{self, Sshd};
use crate::common::web::{Behaviour, Web, images, served};
use crate::common::{Answer, Lab, Limits, Rng, beyond_qemu, cases, program};

/// Bytes of a block.
const BLOCK: u64 = 256 << 10;

/// `args` with the cache `cache`.
fn cached<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&args[..1], &["--cache-dir", "cache"], &args[1..]].concat()
}

/// The folder of the cache's own files.
const OWN: &str = "cache/zebu-cache";

/// The files of blocks in a cache, and what is being written.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .flat_map(|entry| match entry.path() {
            path if path.is_dir() => files(&path),
            path if path.ends_with("usage") => Vec::new(),
            path => vec![path],
        })
        .collect()
}

fn size(folder: &Path) -> u64 {
    let sizes = files(folder).into_iter().flat_map(fs::metadata);
    sizes.map(|is| is.len()).sum()
}

/// Converts `source` to raw with the cache and compares the result with `x.raw`.
#[track_caller]
fn reads_right(lab: &Lab, source: &str, format: &str) -> Answer {
    let args = ["convert", "-f", format, "-O", "raw", source, "out.raw"];
    let answer = lab.zebu(&cached(&args)).ok(source);
    lab.assert_same_bytes("out.raw", "x.raw", source);
    fs::remove_file(lab.path("out.raw")).unwrap();
    answer
}

#[test]
fn a_second_command_asks_once() {
    if beyond_qemu("a cache") {
        return;
    }
    let lab = images(64 << 20);
    let delay = Duration::from_millis(20);
    for format in ["raw", "qcow2"] {
        let behaviour = Behaviour {
            delay,
            ..Behaviour::default()
        };
        let web = served(&lab, &format!("x.{format}"), behaviour);
        let mut before = (0, 0);
        for round in ["cold", "warm"] {
            let begun = Instant::now();
            reads_right(&lab, &web.url(), format);
            let (requests, bytes) = (web.requests() - before.0, web.bytes() - before.1);
            let time = begun.elapsed();
            println!("{format}, {round}: {requests} requests, {bytes} bytes, {time:?}");
            if round == "warm" {
                // The one that opens it.
                assert_eq!(requests, 1, "{:#?}", web.heads());
                assert!(bytes <= 64 << 10, "{bytes}");
            }
            before = (web.requests(), web.bytes());
        }
    }
}

#[test]
fn all_commands_use_it() {
    if beyond_qemu("a cache") {
        return;
    }
    let lab = images(16 << 20);
    let web = served(&lab, "x.qcow2", Behaviour::default());
    let url = &*web.url();
    reads_right(&lab, url, "qcow2");
    let options = format!("driver=qcow2,file.driver=http,file.url={url}");
    lab.zebu(&[
        "create",
        "-f",
        "qcow2",
        "-b",
        url,
        "-F",
        "qcow2",
        "top.qcow2",
    ])
    .ok("create");
    let asks_once = |args: &[&str]| {
        let before = web.requests();
        let answer = lab.zebu(&cached(args)).ok(args[0]);
        // One for each time that it is opened.
        let asked = web.requests() - before;
        assert!((1..=2).contains(&asked), "{args:?}: {asked} requests");
        answer
    };
    for args in [
        &["info", url][..],
        &["map", url],
        &["check", url],
        &["compare", "-F", "raw", url, "x.raw"],
        &["measure", "-O", "qcow2", url],
        &[
            "convert",
            "--untrusted",
            "--image-opts",
            "-O",
            "raw",
            &options,
            "out.raw",
        ],
        &[
            "dd",
            "-f",
            "qcow2",
            "-O",
            "raw",
            "bs=1M",
            &format!("if={url}"),
            "of=out.raw",
        ],
        &["io", "-r", "-c", "read 1M 3M", url],
        // As a backing file, below an image that is written.
        &["io", "-c", "write 0 64k", "-c", "read 0 4M", "top.qcow2"],
        &["convert", "-O", "raw", "top.qcow2", "out.raw"],
        &["import", url, "imported.raw"],
    ] {
        asks_once(args);
    }
    lab.assert_same_bytes("imported.raw", "x.raw", "import");
    let before = web.requests();
    let server = Server::start(
        &lab,
        &["--cache-dir", "cache", "-r", "-f", "qcow2", "-t", url],
    );
    lab.zebu(&[
        "compare",
        "-f",
        "raw",
        "-F",
        "raw",
        &server.uri(""),
        "x.raw",
    ])
    .ok("nbd");
    drop(server);
    assert_eq!(web.requests() - before, 1);
    // An image that is written is not cached, and says nothing of it.
    let answer = asks_once(&["io", "-c", "read 0 4M", "top.qcow2"]);
    assert_eq!(answer.err, "");
}

#[test]
fn object_stores_are_cached() {
    if beyond_qemu("a cache") {
        return;
    }
    let lab = images(8 << 20);
    for (name, variables, _) in DIALECTS {
        let web = served(&lab, "x.qcow2", Behaviour::default());
        let variables = variables.replace("PORT", &web.port().to_string());
        let convert = || {
            let args = ["convert", "-f", "qcow2", "-O", "raw", name, "out.raw"];
            run(&lab, &variables, &cached(&args)).ok(name);
            lab.assert_same_bytes("out.raw", "x.raw", name);
            web.requests()
        };
        let before = convert();
        assert_eq!(convert(), before + 1, "{name}");
        // Another store with the same names.
        let other = served(&lab, "x.qcow2", Behaviour::default());
        let args = cached(&["convert", name, "out.raw"]);
        let there = variables.replace(&web.port().to_string(), &other.port().to_string());
        run(&lab, &there, &args).ok(name);
        assert!(other.requests() > 1, "{name}");
    }
}

#[test]
fn ssh_is_cached_while_the_file_stays() {
    if beyond_qemu("a cache") {
        return;
    }
    let lab = images(8 << 20);
    let server = Sshd::start(&lab, "internal-sftp");
    let name = server.name(&lab, "x.qcow2");
    let convert = || {
        let args = ["convert", "-f", "qcow2", "-O", "raw", &name, "out.raw"];
        let answer = sshd::run(&lab, &cached(&args));
        answer.status == 0 && {
            lab.assert_same_bytes("out.raw", "x.raw", "ssh");
            answer.err.is_empty() || {
                assert!(
                    answer.err.contains("within the last ten minutes"),
                    "{answer:#?}"
                );
                true
            }
        }
    };
    let cache = lab.path("cache");
    // It is new.
    assert!(convert() && files(&cache).is_empty());
    let time = |seconds| SystemTime::now() - Duration::from_secs(seconds);
    let file = fs::File::options()
        .write(true)
        .open(lab.path("x.qcow2"))
        .unwrap();
    file.set_modified(time(3600)).unwrap();
    assert!(convert());
    let kept = files(&cache);
    assert!(kept.len() as u64 >= file.metadata().unwrap().len() / BLOCK);
    // They are read: with other bytes in them, the image is damaged.
    assert!(convert());
    assert_eq!(files(&cache), kept);
    // It changes while it is open: what is not here fails.
    fs::remove_dir_all(&cache).unwrap();
    let raw = server.name(&lab, "x.raw");
    let raw_file = fs::File::options()
        .write(true)
        .open(lab.path("x.raw"))
        .unwrap();
    raw_file.set_modified(time(3600)).unwrap();
    let io = format!(
        "(echo read 0 64k; sleep 1; touch changed; echo read 0 64k; echo read 4M 64k) | \
         ZEBU_SSH='{}' \"$0\" io -r -f raw --cache-dir cache '{raw}'",
        lab.path("ssh/ssh").display()
    );
    let answer = thread::scope(|scope| {
        let io = scope.spawn(|| lab.shell(&io));
        wait_until("the first read", || files(&cache).len() == 1);
        raw_file.write_all_at(b"other", 5 << 20).unwrap();
        io.join().unwrap()
    });
    assert_eq!(
        answer.out.matches("read 65536/65536").count(),
        2,
        "{answer:#?}"
    );
    assert!(answer.out.contains("Stale file handle"), "{answer:#?}");
    assert_eq!(files(&cache).len(), 1);
}

#[test]
fn only_what_cannot_be_another_is_cached() {
    if beyond_qemu("a cache") {
        return;
    }
    let lab = images(4 << 20);
    let old = Some("Mon, 02 Jan 2023 03:04:05 GMT");
    let date = |date: &str| Some(format!("Date: {date}"));
    let cache = lab.path("cache");
    for (etag, modified, header, expected) in [
        (Some("\"a\""), None, None, true),
        (None, old, date("Mon, 02 Jan 2023 03:05:05 GMT"), true),
        (
            Some("W/\"a\""),
            old,
            date("Mon, 02 Jan 2023 03:05:05 GMT"),
            true,
        ),
        (None, old, date("Mon, 02 Jan 2023 03:05:04 GMT"), false),
        (None, old, None, false),
        (
            Some("W/\"a\""),
            None,
            date("Mon, 02 Jan 2023 03:05:05 GMT"),
            false,
        ),
        (None, None, None, false),
    ] {
        let web = served(
            &lab,
            "x.raw",
            Behaviour {
                etag: etag.map(Into::into),
                modified: modified.map(Into::into),
                header,
                ..Behaviour::default()
            },
        );
        let answer = reads_right(&lab, &web.url(), "raw");
        assert_eq!(!files(&cache).is_empty(), expected, "{etag:?} {modified:?}");
        assert_eq!(answer.err.is_empty(), expected, "{answer:#?}");
        if !expected {
            assert!(
                answer.err.contains("is not cached: the server tells"),
                "{answer:#?}"
            );
        }
        fs::remove_dir_all(&cache).unwrap();
    }
    // Another state of the object, and the first one again.
    let web = served(&lab, "x.raw", Behaviour::default());
    fs::write(lab.path("other.raw"), vec![7; 4 << 20]).unwrap();
    reads_right(&lab, &web.url(), "raw");
    web.publish(&lab.path("other.raw"), "\"second\"");
    let url = web.url();
    let compare = ["compare", "-f", "raw", "-F", "raw", &url, "other.raw"];
    lab.zebu(&cached(&compare)).ok("changed");
    web.publish(&lab.path("x.raw"), "\"first\"");
    let before = web.requests();
    reads_right(&lab, &url, "raw");
    assert_eq!(web.requests() - before, 1);
    // Whoever is not let in gets nothing of what is here.
    web.change(|behaviour| behaviour.status = Some(403));
    lab.zebu(&cached(&["convert", &url, "out.raw"]))
        .fails_with("403");
}

#[test]
fn folders_and_sizes_are_checked() {
    if beyond_qemu("a cache") {
        return;
    }
    let lab = images(4 << 20);
    let web = served(&lab, "x.raw", Behaviour::default());
    let url = web.url();
    let info = |args: &[&str]| lab.zebu(&[&["info", "-f", "raw", &url], args].concat());
    info(&["--cache-size", "1G"]).fails_with("--cache-size needs --cache-dir");
    for size in ["x", "-1", "1023k"] {
        let answer = info(&["--cache-dir", "c", "--cache-size", size]);
        assert_eq!(answer.status, 1, "{size}: {answer:#?}");
    }
    assert!(info(&["--cache-dir", "x.raw"]).status == 1);
    fs::create_dir(lab.path("open")).unwrap();
    fs::set_permissions(lab.path("open"), fs::Permissions::from_mode(0o770)).unwrap();
    info(&["--cache-dir", "open"]).fails_with("others may write to it");
    if lab.can_run_as(65_534) {
        // Root itself trusts only its own folder.
        std::os::unix::fs::chown(lab.path("open"), Some(65_534), None).unwrap();
        info(&["--cache-dir", "open"]).fails_with("must belong to the user");
    }
    // What is written says one line and goes on. (No file may have so many bytes.)
    let script = format!("ulimit -f 100; \"$0\" compare --cache-dir c -f raw -F raw {url} x.raw");
    let answer = lab.shell(&script);
    answer.clone().ok("no space");
    assert_eq!(answer.err.lines().count(), 1, "{answer:#?}");
    assert!(
        answer.err.contains("blocks are not cached for now"),
        "{answer:#?}"
    );
    assert_eq!(files(&lab.path("c")), [] as [PathBuf; 0]);
    // Abbreviations are QEMU's.
    let args = [
        "compare", "--cach", "none", "-f", "raw", "-F", "raw", "x.raw", "x.raw",
    ];
    lab.zebu(&args).ok("abbreviated");
    lab.zebu(&[
        "io",
        "--cach",
        "none",
        "-r",
        "-f",
        "raw",
        "-c",
        "read 0 512",
        "x.raw",
    ])
    .ok("abbreviated");
    lab.zebu(&["info", "--cache-d", "c", &url])
        .ok("abbreviated");
}

#[test]
fn the_size_is_a_bound() {
    if beyond_qemu("a cache") {
        return;
    }
    let lab = images(24 << 20);
    let web = served(&lab, "x.raw", Behaviour::default());
    let url = web.url();
    let cache = lab.path("cache");
    for _ in 0..2 {
        let convert = ["convert", "-f", "raw", "-O", "raw", &url, "out.raw"];
        let args = [&cached(&convert)[..], &["--cache-size", "6M"]].concat();
        lab.zebu(&args).ok("bounded");
        lab.assert_same_bytes("out.raw", "x.raw", "bounded");
        let size = size(&cache);
        assert!((3 << 20..=6 << 20).contains(&size), "{size}");
    }
}

/// What servers tell of an object's state.
#[derive(Clone, Copy, Debug)]
enum Tag {
    /// An ETag that no other state has.
    Exact,
    /// One of the second of the change and the length, as nginx has it.
    Second,
    None,
}

/// The time of day of a server of the test.
pub fn date(second: u64) -> String {
    let (minute, second) = (second / 60, second % 60);
    let (hour, minute) = (minute / 60, minute % 60);
    format!("Mon, 02 Jan 2023 {hour:02}:{minute:02}:{second:02} GMT")
}

/// One process after the other reads objects that a server chooses by token or cookie, while they
/// change and its clock goes on. Each sees what is there now.
#[test]
fn each_process_sees_what_is_there_now() {
    if beyond_qemu("a cache") {
        return;
    }
    let mut seeds = cases(3, "processes with one cache");
    let mut warm = 0;
    while let Some(seed) = seeds.next() {
        warm += one_after_the_other(seed);
        seeds.add(PROCESSES);
    }
    println!("{warm} processes have read the cache");
    assert!(warm > 0 || !zebu_testkit::are_usual());
}

const PROCESSES: u64 = 8;

/// Returns how many have read the cache.
fn one_after_the_other(seed: u64) -> u64 {
    const LENGTH: u64 = BLOCK;
    let mut rng = Rng::new(seed);
    let lab = Lab::new();
    let first = state(&lab, 0, LENGTH);
    let web = Web::new(&first, Behaviour::default());
    let url = web.url();
    for user in ["a", "b"] {
        fs::write(lab.path(user), user).unwrap();
    }
    let (mut now, mut warm) = (0, 0);
    // The state of each user, and when it changed.
    let mut objects = [(1, 0), (2, 0)];
    let mut states = 3;
    let tag = [Tag::Exact, Tag::Second, Tag::None][(seed % 3) as usize];
    for _ in 0..PROCESSES {
        now += [0, 0, 1, 30, 61][rng.below(5) as usize];
        if rng.one_in(3) {
            objects[rng.below(2) as usize] = (states, now);
            states += 1;
        }
        let user = rng.below(2) as usize;
        let (number, changed) = objects[user];
        web.replace(&state(&lab, number, LENGTH));
        let has_cookie = rng.one_in(2);
        web.change(|behaviour| {
            let name = ["a", "b"][user];
            *behaviour = Behaviour {
                etag: match tag {
                    Tag::Exact => Some(format!("\"{number}\"")),
                    Tag::Second => Some(format!("\"{changed:x}-{LENGTH:x}\"")),
                    Tag::None => None,
                },
                modified: Some(date(changed)),
                header: Some(format!("Date: {}", date(now))),
                authorization: (!has_cookie).then(|| format!("Bearer {name}")),
                cookie: has_cookie.then(|| name.to_string()),
                ..Behaviour::default()
            };
        });
        let name = ["a", "b"][user];
        let option = ["token-secret", "cookie-secret"][usize::from(has_cookie)];
        let options = format!("driver=raw,file.driver=http,file.url={url},file.{option}=s");
        let secret = format!("secret,id=s,file={name}");
        let at = rng.below(LENGTH / 512) * 512;
        let read = format!("read -v {at} 512");
        let args = ["io", "--object", &secret, "-r", "-c", &read];
        let args = [&cached(&args)[..], &["--image-opts", &options]].concat();
        let bytes = web.bytes();
        let answer = lab.zebu(&args).ok("read");
        let seen = check_dump(&answer.out, states);
        warm += u64::from(web.bytes() - bytes <= 64 << 10);
        assert_eq!(seen, Some(number), "{tag:?}, at {now}: {objects:?}");
    }
    warm
}

/// Bytes of the object in the next test, and of its cache.
const OBJECT: u64 = 8 << 20;
const BOUND: u64 = 3 << 20;
/// Processes at once.
const READERS: u64 = 3;

/// A state of an object of this length: each word has the state's number and its own place.
pub fn state(lab: &Lab, number: u64, length: u64) -> PathBuf {
    let path = lab.path(&format!("state-{number}"));
    let words = (0..length / 8).map(|place| word(number, place));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    fs::write(&path, bytes).unwrap();
    path
}

fn word(number: u64, place: u64) -> u64 {
    number << 48 | place
}

/// What the dump of `read -v` shows: places and bytes.
fn dumped(out: &str) -> Vec<(u64, Vec<u8>)> {
    let lines = out.lines().filter_map(|line| {
        let (place, rest) = line.split_once(":  ")?;
        let place = u64::from_str_radix(place, 16).ok()?;
        let bytes = rest.get(..47)?.split(' ');
        let bytes: Result<_, _> = bytes.map(|b| u8::from_str_radix(b, 16)).collect();
        Some((place, bytes.ok()?))
    });
    lines.collect()
}

/// The states that a process has seen: one, or none.
pub fn check_dump(answer: &str, states: u64) -> Option<u64> {
    let mut seen = None;
    for (place, bytes) in dumped(answer) {
        assert_eq!((place % 16, bytes.len()), (0, 16), "{answer}");
        for (nth, bytes) in bytes.chunks(8).enumerate() {
            let found = u64::from_le_bytes(bytes.try_into().unwrap());
            let number = found >> 48;
            assert!(number < states, "{place:#x}: {found:#x}\n{answer}");
            assert_eq!(found, word(number, place / 8 + nth as u64), "{answer}");
            assert_eq!(*seen.get_or_insert(number), number, "two states\n{answer}");
        }
    }
    for line in answer.lines().filter(|line| line.contains("failed")) {
        assert!(line.contains("Stale file handle"), "{answer}");
    }
    seen
}

/// A process that reads at random.
fn reader(lab: &Lab, web: &Web, rng: &mut Rng, states: u64, kill: bool) -> Option<u64> {
    let mut script = String::new();
    for _ in 0..1 + rng.below(12) {
        // Many requests at once, and some bytes of which each is looked at.
        let at = rng.below(OBJECT / 512) * 512;
        let length = (1 + rng.below(2 << 11)) * 512;
        script += &format!("aio_read -q {at} {}\n", length.min(OBJECT - at));
        let at = rng.below(OBJECT / 512 - 8) * 512;
        script += &format!("read -v {at} {}\n", 512 * (1 + rng.below(8)));
    }
    let bound = BOUND.to_string();
    let url = web.url();
    let mut args = vec!["io", "-r", "-f", "raw", "--cache-dir", "cache"];
    args.extend(["--cache-size", &bound, &url]);
    if kill {
        let mut child = Command::new(program())
            .args(&args)
            .current_dir(lab.path(""))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        // It may have ended already.
        let _ = std::io::Write::write_all(&mut input.as_ref().unwrap(), script.as_bytes());
        thread::sleep(Duration::from_micros(rng.below(60_000)));
        let _ = child.kill();
        child.wait().unwrap();
        return None;
    }
    let answer = lab.run(program(), &args, script.as_bytes(), &Limits::default());
    let said: Vec<&str> = answer.err.lines().collect();
    assert!(
        said.iter().all(|line| line.contains("Stale file handle")),
        "{answer:#?}"
    );
    check_dump(&format!("{}\n{}", answer.out, answer.err), states)
}

/// Files of the user in the folder of the cache, with names like those of the cache's own.
fn users_files(lab: &Lab, rng: &mut Rng) -> Vec<(PathBuf, Vec<u8>)> {
    let key = "0123456789abcdef".repeat(4);
    let names = [
        "usage".to_string(),
        "new-disk.qcow2".into(),
        format!("new-{}-{}", rng.below(1 << 16), rng.below(9)),
        format!("{key}/notes"),
        format!("{key}/{:016x}", rng.below(100)),
        "notes".into(),
    ];
    let files = names.into_iter().map(|name| {
        let path = lab.path("cache").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let bytes = (0..1 + rng.below(100)).map(|_| rng.next() as u8).collect();
        fs::write(&path, &bytes).unwrap();
        // The oldest ones go first.
        let old = SystemTime::now() - Duration::from_secs(1 << 20);
        fs::File::open(&path).unwrap().set_modified(old).unwrap();
        (path, bytes)
    });
    files.collect()
}

/// Damages a file of the cache.
fn damage(cache: &Path, rng: &mut Rng) {
    let mut all = files(cache);
    if rng.one_in(4) {
        all = vec![cache.join("usage")];
    }
    if all.is_empty() {
        return;
    }
    let path = &all[rng.below(all.len() as u64) as usize];
    // An error: it is gone.
    let Ok(file) = fs::File::options().write(true).open(path) else {
        return;
    };
    let length = file.metadata().map_or(0, |is| is.len()).max(1);
    let at = rng.below(length);
    let _ = match rng.below(5) {
        0 => fs::remove_file(path),
        1 => file.set_len(at),
        2 => file.set_len(at).and_then(|()| file.set_len(length)),
        3 => file.write_all_at(&[rng.next() as u8; 100], at),
        _ => file.write_all_at(&[0; 4096], at & !4095),
    };
}

/// Processes that read at random through one cache that is too small, while the server changes the
/// object, files are damaged, and some of the processes are killed. Each read has the bytes of the
/// state that its process has opened, or is an error that says so.
#[test]
fn processes_share_a_folder_that_is_damaged() {
    if beyond_qemu("a cache") {
        return;
    }
    let mut seeds = cases(1, "processes that share a folder");
    while let Some(seed) = seeds.next() {
        seeds.add(READERS * ROUNDS);
        share_a_folder(seed);
    }
}

/// How often each reader is started.
const ROUNDS: u64 = 15;

fn share_a_folder(seed: u64) {
    const STATES: u64 = 4;
    let lab = Lab::new();
    let states = (0..STATES).map(|number| state(&lab, number, OBJECT));
    let paths: Vec<PathBuf> = states.collect();
    let behaviour = Behaviour {
        etag: Some("\"0\"".into()),
        cut: 30,
        ..Behaviour::default()
    };
    let web = Web::new(&paths[0], behaviour);
    let cache = lab.path(OWN);
    let users_files = users_files(&lab, &mut Rng::new(seed));
    let done = AtomicBool::new(false);
    let (most, ended, seen) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|nth| {
                let (lab, web, ended, seen) = (&lab, &web, &ended, &seen);
                let mut rng = Rng::new(seed * 1000 + nth);
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        let kill = rng.one_in(4);
                        let state = reader(lab, web, &mut rng, STATES, kill);
                        ended.fetch_add(u64::from(!kill), Ordering::SeqCst);
                        seen.fetch_or(state.map_or(0, |state| 1 << state), Ordering::SeqCst);
                    }
                })
            })
            .collect();
        let chaos = scope.spawn(|| {
            let mut rng = Rng::new(seed);
            while !done.load(Ordering::SeqCst) {
                if rng.one_in(40) {
                    let number = rng.below(STATES);
                    web.publish(&paths[number as usize], &format!("\"{number}\""));
                }
                damage(&cache, &mut rng);
                most.fetch_max(size(&cache), Ordering::SeqCst);
                thread::sleep(Duration::from_millis(rng.below(10)));
            }
        });
        let results: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        done.store(true, Ordering::SeqCst);
        chaos.join().unwrap();
        results.into_iter().for_each(|result| result.unwrap());
    });
    for (path, bytes) in users_files {
        let found = fs::read(&path).unwrap_or_default();
        assert!(found == bytes, "{} has changed", path.display());
    }
    let (most, ended, seen) = (most.into_inner(), ended.into_inner(), seen.into_inner());
    println!("{ended} processes, states {seen:#b}, {most} bytes at most");
    assert!(ended > 0 && seen.count_ones() > 1, "{ended} {seen:#b}");
    // Each process may be writing blocks, and a file that gets its name may be seen twice. A file
    // may be larger than it was, by the test.
    assert!(most <= BOUND + 2 * READERS * (1 << 20), "{most}");
}
