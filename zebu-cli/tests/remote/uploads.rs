//! Images that are written to object stores. Guards against an object that is not whole, parts that
//! are left behind, an older object that is lost by a failure, and memory that grows with the image;
//! with a store of the test in each dialect, and with real servers (`make stores`).

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::stores::{DIALECTS, RealStore, run};
use crate::common::server::wait_until;
use crate::common::store::{Completion, Ending, Faults, Store};
use crate::common::web::images;
use crate::common::{Answer, Lab, Rng, beyond_qemu, cases, program};

/// The name of an object and how its store is reached, by dialect.
fn dialects(store: &Store) -> [(String, String); 3] {
    DIALECTS.map(|(name, variables, _)| {
        let (scheme, _) = name.split_once(':').unwrap();
        // Writes need credentials.
        let account = "GOOGLE_SERVICE_ACCOUNT_KEY='{\"gcs_base_url\":\"http://127.0.0.1:PORT\",\
                       \"disable_oauth\":true,\"client_email\":\"\",\"private_key\":\"\",\
                       \"private_key_id\":\"\"}'";
        let variables = variables.replace("GOOGLE_SKIP_SIGNATURE=true", account);
        let variables = variables.replace("PORT", &store.port().to_string());
        (format!("{scheme}://bucket/some dir/out"), variables)
    })
}

/// What [`dialects`] names, in the store.
const OBJECT: &str = "bucket/some dir/out";

/// Starts a conversion whose messages are kept.
pub fn start(lab: &Lab, variables: &str, args: &[&str]) -> Child {
    let mut command = Command::new(program());
    for variable in variables.split_whitespace() {
        let (name, value) = variable.split_once('=').unwrap();
        command.env(name, value.trim_matches('\''));
    }
    // SAFETY: signal(2) is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    command
        .args(args)
        .current_dir(lab.path(""))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Sends a signal and waits for the end.
pub fn stopped_by(child: Child, signal: i32) -> Answer {
    // SAFETY: the child was not waited for, so the id is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
    let output = child.wait_with_output().unwrap();
    Answer {
        status: output.status.code().unwrap_or(255),
        out: String::new(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// What can be written in order: the format, and the other options.
const OUTPUTS: [(&str, &[&str]); 5] = [
    ("raw", &["-O", "raw"]),
    ("qcow2", &["-O", "qcow2"]),
    ("qcow2", &["-O", "qcow2", "-c"]),
    ("qcow2", &["-O", "qcow2", "-S", "0"]),
    ("vmdk", &["-O", "vmdk", "-o", "subformat=streamOptimized"]),
];

#[test]
fn objects_are_written_in_each_dialect() {
    if beyond_qemu("object stores") {
        return;
    }
    let lab = images(48 << 20);
    let store = Store::new();
    for (nth, (name, variables)) in dialects(&store).iter().enumerate() {
        for (format, options) in OUTPUTS {
            store.set(Faults {
                delay: Duration::from_millis(5),
                busy: [0, 4, 0][nth],
                ..Faults::default()
            });
            store.put(OBJECT, b"before");
            let args = [&["convert", "-f", "raw"], options, &["x.raw", name]].concat();
            run(&lab, variables, &args).ok(name);
            fs::write(lab.path("out"), store.object(OBJECT).unwrap()).unwrap();
            let compare = ["compare", "-f", format, "-F", "raw", "out", "x.raw"];
            lab.qemu_img(&compare).ok(name);
            assert_eq!(store.uploads(), 0, "{name}");
            let mut lengths = store.part_lengths();
            lengths.retain(|length| *length != 8 << 20);
            assert!(lengths.len() <= 1, "{name}: {lengths:?}");
            // The same as to a pipe. (A VMDK has a random number.)
            if format != "vmdk" {
                let options = options.join(" ");
                let script = format!("\"$0\" convert -f raw {options} x.raw - > pipe");
                lab.shell(&script).ok("pipe");
                lab.assert_same_bytes("pipe", "out", name);
            }
        }
        // From a stream, whose length is not known before.
        let script = format!("cat x.raw | {variables} \"$0\" convert -f raw -O raw - '{name}'");
        lab.shell(&script).ok("from a stream");
        assert!(store.object(OBJECT).unwrap() == fs::read(lab.path("x.raw")).unwrap());
        // And back.
        run(
            &lab,
            variables,
            &["compare", "-f", "raw", "-F", "raw", name, "x.raw"],
        )
        .ok(name);
        fs::write(lab.path("empty"), "").unwrap();
        run(
            &lab,
            variables,
            &["convert", "-f", "raw", "-O", "raw", "empty", name],
        )
        .ok(name);
        assert_eq!(store.object(OBJECT), Some(Vec::new()), "{name}");
    }
    assert!((2..=4).contains(&store.most_at_once()));
    assert_eq!(store.uploads(), 0);
}

#[test]
fn nothing_is_left_of_what_fails() {
    if beyond_qemu("object stores") {
        return;
    }
    let lab = images(48 << 20);
    let store = Store::new();
    let whole = fs::read(lab.path("x.qcow2")).unwrap();
    let cut = &whole[..whole.len() / 2];
    fs::write(lab.path("cut.qcow2"), cut).unwrap();
    store.put(OBJECT, b"before");
    for (name, variables) in dialects(&store) {
        // Azure has no aborted uploads.
        let has_uploads = !name.starts_with("az");
        let convert = |source: &str, format: &str| {
            run(
                &lab,
                &variables,
                &["convert", "-f", format, "-O", "raw", source, &name],
            )
        };
        let assert_clean = || {
            assert_eq!(store.object(OBJECT).unwrap(), b"before", "{name}");
            assert!(store.uploads() == 0 || !has_uploads, "{name}");
        };
        // Of the source.
        let answer = convert("cut.qcow2", "qcow2");
        answer.fails_with(&format!("; the upload of '{name}' was aborted"));
        assert_clean();
        // Of a part.
        store.set(Faults {
            refused: Some(3),
            ..Faults::default()
        });
        convert("x.raw", "raw").fails_with("403");
        assert_clean();
        // Of the end.
        store.set(Faults {
            completions: [Completion {
                takes_effect: false,
                ending: Ending::Status(400),
            }]
            .into(),
            ..Faults::default()
        });
        convert("x.raw", "raw").fails_with("400");
        assert_clean();
        store.set(Faults::default());
        // Before anything is sent.
        let refused: [(&[&str], &str); 6] = [
            (&["-O", "vdi"], "cannot be written to an object in a store"),
            (&["-O", "vmdk"], "needs -o subformat=streamOptimized"),
            (&["-O", "raw", "-c"], "Compression not supported"),
            (&["-O", "raw", "-n"], "-n makes no sense"),
            (&["-O", "qcow2", "-B", "x.qcow2"], "-B makes no sense"),
            (
                &["-O", "qcow2", "-o", "preallocation=metadata"],
                "cannot have preallocation",
            ),
        ];
        for (options, why) in refused {
            let args = [&["convert", "-f", "raw"], options, &["x.raw", &name]].concat();
            run(&lab, &variables, &args).fails_with(why);
            assert_clean();
        }
        store.put(OBJECT, &whole);
        let args = ["convert", "-O", "qcow2", &name, &name];
        run(&lab, &variables, &args).fails_with("The input is read from this file");
        store.put(OBJECT, b"before");
    }
}

#[test]
fn a_signal_aborts_the_upload() {
    if beyond_qemu("object stores") {
        return;
    }
    let lab = images(96 << 20);
    let store = Store::new();
    store.put(OBJECT, b"before");
    let [(name, variables), ..] = dialects(&store);
    store.set(Faults {
        delay: Duration::from_millis(300),
        ..Faults::default()
    });
    for (signal, status, format) in [(libc::SIGINT, 130, "raw"), (libc::SIGTERM, 143, "qcow2")] {
        store.part_lengths();
        let args = ["convert", "-f", "raw", "-O", format, "x.raw", &name];
        let child = start(&lab, &variables, &args);
        let mut parts = 0;
        wait_until("a part", || {
            parts += store.part_lengths().len();
            parts >= 2
        });
        let answer = stopped_by(child, signal);
        assert_eq!(answer.status, status, "{answer:#?}");
        let why = format!("Interrupted; the upload of '{name}' was aborted");
        assert!(answer.err.contains(&why), "{answer:#?}");
        assert_eq!(store.uploads(), 0);
        assert_eq!(store.object(OBJECT).unwrap(), b"before");
    }
}

/// A completion that fails in one of the ways that stores have. What is refused has no effect.
fn bad_completion(rng: &mut Rng) -> Completion {
    let (may_have_effect, ending) = match rng.below(5) {
        0 => (true, Ending::Cut),
        1 => (true, Ending::Status(500)),
        2 => (true, Ending::Status(503)),
        3 => (true, Ending::Hang),
        _ => (false, Ending::Status(400)),
    };
    Completion {
        takes_effect: may_have_effect && rng.one_in(2),
        ending,
    }
}

/// Completions that fail, and signals. Whatever the message says of the object is so.
#[test]
fn messages_tell_what_became_of_the_object() {
    if beyond_qemu("object stores") {
        return;
    }
    let lab = images(1 << 20);
    let store = Store::new();
    for seed in cases(16, "uploads that fail or are stopped") {
        let mut rng = Rng::new(seed);
        let (name, variables) = &dialects(&store)[rng.below(3) as usize];
        let completions: Vec<_> = (0..rng.below(4))
            .map(|_| bad_completion(&mut rng))
            .collect();
        // The first one that is not tried again.
        let last = completions
            .iter()
            .position(|fault| matches!(fault.ending, Ending::Hang | Ending::Status(400)));
        let hangs = last.filter(|nth| matches!(completions[*nth].ending, Ending::Hang));
        let what = format!("seed {seed}: {name} {completions:?}");
        store.put(OBJECT, b"before");
        store.set(Faults {
            completions: completions.clone().into(),
            ..Faults::default()
        });
        let args = ["convert", "-f", "raw", "-O", "raw", "x.raw", name];
        // Of an earlier case, of which it is not known.
        let left = store.uploads();
        let before = store.completions();
        let begun = Instant::now();
        let child = start(&lab, variables, &args);
        let signal = match hangs.or(rng.one_in(4).then_some(0)) {
            Some(nth) => {
                wait_until("a completion", || store.completions() > before + nth);
                libc::SIGINT
            }
            None => 0,
        };
        let answer = stopped_by(child, signal);
        let what = format!("{what}: {answer:?}");
        assert!(begun.elapsed() < Duration::from_secs(15), "{what}");
        let is_new = store.object(OBJECT).unwrap() != b"before";
        if answer.status == 0 {
            assert!(is_new, "{what}");
        } else if answer.err.contains("was aborted") {
            assert!(!is_new, "{what}");
            assert!(store.uploads() <= left || name.starts_with("az"), "{what}");
        } else {
            assert!(answer.err.contains("it is not known whether"), "{what}");
        }
    }
}

#[test]
#[ignore = "waits for attempts that fail, most of a minute"]
fn a_store_that_is_gone_is_an_error() {
    let lab = images(96 << 20);
    let store = Store::new();
    let [(name, variables), ..] = dialects(&store);
    store.set(Faults {
        delay: Duration::from_millis(100),
        ..Faults::default()
    });
    let args = ["convert", "-f", "raw", "-O", "raw", "x.raw", &name];
    let child = start(&lab, &variables, &args);
    wait_until("a part", || !store.part_lengths().is_empty());
    store.set(Faults {
        dead: true,
        ..Faults::default()
    });
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("its parts are left"), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
    assert_eq!(store.object(OBJECT), None);
}

#[test]
fn memory_is_bounded() {
    if beyond_qemu("object stores") {
        return;
    }
    let lab = images(256 << 20);
    let store = Store::new();
    let [(name, variables), ..] = dialects(&store);
    store.set(Faults {
        delay: Duration::from_millis(50),
        ..Faults::default()
    });
    let variables: Vec<_> = variables.split_whitespace().collect();
    for (_, options) in OUTPUTS {
        let args = [&["convert", "-f", "raw"], options, &["x.raw", &name]].concat();
        let peak = lab.peak_of(&variables, &args);
        println!("{options:?}: {peak} KiB");
        assert!(peak < 128 << 10, "{options:?}: {peak} KiB");
    }
}

#[test]
fn versitygw_is_written() {
    let lab = images(96 << 20);
    let Some(server) = RealStore::versitygw(&lab) else {
        return;
    };
    let variables = &server.variables;
    for (format, options) in OUTPUTS {
        let name = format!("s3://bucket/some dir/{format}");
        let args = [&["convert", "-f", "raw"], options, &["x.raw", &name]].concat();
        run(&lab, variables, &args).ok(&name);
        let path = format!("root/bucket/some dir/{format}");
        let compare = ["compare", "-f", format, "-F", "raw", &path, "x.raw"];
        lab.qemu_img(&compare).ok(&name);
    }
    assert_eq!(server.uploads(), 0);
    fs::write(lab.path("root/bucket/old"), "before").unwrap();
    let half = fs::File::options()
        .write(true)
        .open(lab.path("x.qcow2"))
        .unwrap();
    half.set_len(half.metadata().unwrap().len() / 2).unwrap();
    let args = ["convert", "-O", "raw", "x.qcow2", "s3://bucket/old"];
    run(&lab, variables, &args).fails_with("was aborted");
    let args = [
        "convert",
        "-f",
        "raw",
        "-O",
        "raw",
        "-r",
        "40M",
        "x.raw",
        "s3://bucket/old",
    ];
    let child = start(&lab, variables, &args);
    wait_until("an upload", || server.uploads() == 1);
    std::thread::sleep(Duration::from_millis(500));
    let answer = stopped_by(child, libc::SIGTERM);
    assert_eq!(answer.status, 143, "{answer:#?}");
    assert!(answer.err.contains("was aborted"), "{answer:#?}");
    assert_eq!(server.uploads(), 0);
    assert_eq!(fs::read(lab.path("root/bucket/old")).unwrap(), b"before");
}

#[test]
fn azurite_is_written_and_read() {
    let lab = images(96 << 20);
    let Some(store) = RealStore::azurite(&lab) else {
        return;
    };
    let run = |args: &[&str]| run(&lab, &store.variables, args);
    for (format, options) in OUTPUTS {
        let name = format!("az://bucket/some dir/{format}");
        run(&[&["convert", "-f", "raw"], options, &["x.raw", &name]].concat()).ok(&name);
        run(&["info", "-f", format, &name]).ok(&name);
        let back = ["convert", "-f", format, "-O", "raw", &name, "out.raw"];
        run(&back).ok(&name);
        lab.assert_same_bytes("out.raw", "x.raw", &name);
        fs::remove_file(lab.path("out.raw")).unwrap();
    }
    let none = "az://bucket/none";
    run(&["info", none]).fails_with("not found");
    // What was there is there after an upload that was aborted.
    let half = fs::File::options().write(true).open(lab.path("x.qcow2"));
    let half = half.unwrap();
    half.set_len(half.metadata().unwrap().len() / 2).unwrap();
    let name = "az://bucket/some dir/raw";
    for name in [name, none] {
        let answer = run(&["convert", "-O", "raw", "x.qcow2", name]);
        assert_eq!(answer.status, 1, "{answer:#?}");
    }
    run(&["info", none]).fails_with("not found");
    run(&["convert", "-f", "raw", "-O", "raw", name, "out.raw"]).ok("as before");
    lab.assert_same_bytes("out.raw", "x.raw", "as before");
}
