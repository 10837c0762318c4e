//! Guards against opening another file than the one that is named, or with other options: a comma, a
//! colon or a directory that is parsed wrong, an option that is ignored. And against a name from an
//! untrusted image that causes a panic.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use proptest::prelude::*;
use zebu_testkit::newest_words;

use super::*;
use crate::block::*;
use crate::protocols::parse::MAX_DEPTH;
use crate::storage::EngineKind;
use crate::{Error, Result};

fn name(text: &str) -> Result<ImageSpec> {
    Source::Name(text.into()).resolve(None, None)
}

fn opts(text: &str) -> Result<ImageSpec> {
    Source::Options(text.into()).resolve(None, None)
}

fn message(result: Result<ImageSpec>) -> String {
    result.expect_err("should be refused").to_string()
}

#[test]
fn three_notations_give_the_same_spec() {
    for spec in [
        name(r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"d/x"}}"#),
        name(r#"json:{"driver":"qcow2","file.driver":"file","file.filename":"d/x"}"#),
        name("json: {'driver': 'qcow2', 'file': {'driver': 'file', 'filename': 'd/x'}}"),
        opts("driver=qcow2,file.driver=file,file.filename=d/x"),
        Source::Name("file:d/x".into()).resolve(None, Some(Format::QCOW2)),
    ] {
        let spec = spec.unwrap();
        assert_eq!(spec.format, Some(Format::QCOW2));
        assert_eq!(spec.file.path, Path::new("d/x"));
        assert_eq!(spec.file.driver, FileDriver::File);
        assert_eq!(spec.display_name(), "d/x");
    }
}

#[test]
fn names_are_relative_to_the_image_that_has_them() {
    for (of, name, path) in [
        ("d/o", "b", "d/b"),
        ("d/o", "../b", "d/../b"),
        ("o", "b", "b"),
        ("/a/o", "b", "/a/b"),
        ("d/o", "/b", "/b"),
        ("d/o", "file:b", "b"),
        ("d/o", r#"json:{"file.filename":"b"}"#, "b"),
        ("o", "./nbd:x", "./nbd:x"),
        ("d/o", "file:nbd:x", "./nbd:x"),
    ] {
        let spec = Source::Name(name.into())
            .resolve(Some(OsStr::new(of)), None)
            .unwrap();
        assert_eq!(spec.file.path, Path::new(path), "{name} of {of}");
    }
    let of = Some(OsStr::new(r#"json:{"driver":"raw"}"#));
    let relative = Source::Name("b".into()).resolve(of, None);
    assert!(message(relative).contains("relative"), "no directory");
    assert!(Source::Name("/b".into()).resolve(of, None).is_ok());
    let data = FileSpec::resolve(OsStr::new("x.raw"), Some(OsStr::new("d/o"))).unwrap();
    assert_eq!(data.path, Path::new("d/x.raw"));
}

#[test]
fn options_are_parsed() {
    let spec = opts(
        "driver=qcow2,l2-cache-size=1M,lazy-refcounts=on,overlap-check=constant,\
         overlap-check.active-l2=on,discard=unmap,detect-zeroes=unmap,read-only=on,\
         file.filename=a,,b,file.aio=native,file.cache.direct=on,file.locking=off,\
         backing.driver=raw,backing.offset=512,backing.file.filename=b,\
         data-file.driver=raw,data-file.file.filename=d",
    )
    .unwrap();
    assert_eq!(spec.file.path, Path::new("a,b"));
    assert_eq!(spec.file.options.aio, Some(EngineKind::Native));
    assert_eq!(spec.file.options.common.direct, Some(true));
    assert_eq!(spec.file.options.locking, Locking::Off);
    assert_eq!(spec.options.common.read_only, Some(true));
    assert_eq!(spec.options.common.detect_zeroes, Some(DetectZeroes::Unmap));
    assert_eq!(spec.options.qcow2.l2_cache_size, Some(1 << 20));
    let checks = spec.options.qcow2.overlap_check.unwrap();
    assert!(checks.has("main-header") && checks.has("active-l2"));
    assert!(!checks.has("inactive-l2") && !checks.has("refcount-block"));
    assert_eq!(spec.data_file.unwrap().path, Path::new("d"));
    let BackingSpec::Image(backing) = spec.backing else {
        panic!("a backing image");
    };
    assert_eq!(backing.options.raw.offset, Some(512));
    let none = name(r#"json:{"driver":"qcow2","backing":null,"file.filename":"x"}"#).unwrap();
    assert_eq!(none.backing, BackingSpec::None);
}

#[test]
fn options_are_parsed_when_the_format_is_known() {
    let spec = opts("offset=512,file.filename=x").unwrap();
    let mut raw = spec.clone();
    raw.set_format(Format::RAW).unwrap();
    assert_eq!(raw.options.raw.offset, Some(512));
    assert_eq!(
        spec.clone()
            .set_format(Format::QCOW2)
            .unwrap_err()
            .to_string(),
        "Block format 'qcow2' does not support the option 'offset'"
    );
}

#[test]
fn display_names_include_options() {
    for (text, header, shown) in [
        (r#""backing":null,"#, None, "x"),
        (
            r#""backing":null,"#,
            Some("b"),
            r#"json:{"backing": null, "driver": "qcow2", "file": {"driver": "file", "filename": "x"}}"#,
        ),
        (
            r#""backing":{"driver":"raw","file.filename":"b"},"#,
            Some("b"),
            "x",
        ),
        (
            r#""backing":{"driver":"raw","offset":512,"file.filename":"b"},"#,
            Some("b"),
            r#"json:{"backing": {"offset": 512, "driver": "raw", "file": {"driver": "file", "filename": "b"}}, "driver": "qcow2", "file": {"driver": "file", "filename": "x"}}"#,
        ),
        (r#""l2-cache-size":65536,"#, Some("b"), "x"),
    ] {
        let text = format!(r#"json:{{{text}"driver":"qcow2","file.filename":"x"}}"#);
        let spec = name(&text).unwrap();
        assert_eq!(
            spec.display_name_with_backing(header.map(OsStr::new)),
            shown
        );
        assert_eq!(spec.display_name(), "x");
    }
}

#[test]
fn nesting_is_bounded() {
    let deep = format!("json:{}1{}", "{\"a\":".repeat(5000), "}".repeat(5000));
    assert!(message(name(&deep)).ends_with("JSON nesting depth limit exceeded"));
    assert!(name(&format!("json:{}", "[".repeat(100_000))).is_err());
    let mut text = String::from("driver=qcow2,file.filename=x");
    let mut prefix = String::new();
    for _ in 0..200 {
        prefix.push_str("backing.");
        text.push_str(&format!(",{prefix}driver=qcow2,{prefix}file.filename=x"));
    }
    assert!(message(opts(&text)).contains("More than 64 images"));
    // Options that are not parsed until the format is known count, too.
    let text = text.replace("driver=qcow2", "read-only=on");
    let mut spec = opts(&text).unwrap();
    let mut depth = 0;
    while spec.set_format(Format::QCOW2).is_ok() {
        let BackingSpec::Image(backing) = spec.backing else {
            panic!("images up to the bound");
        };
        spec = *backing;
        depth += 1;
    }
    assert!(depth <= MAX_DEPTH);
}

/// The messages are those of QEMU. If qemu-img is installed, each is compared.
#[test]
fn refusals_have_the_messages_of_qemu() {
    let cases: &[(bool, &str, &str)] = &[
        (false, "", "The 'file' block driver requires a file name"),
        (false, "foo:bar", "Unknown protocol 'foo'"),
        (false, ":x", "Unknown protocol ''"),
        (
            false,
            "json:",
            "Could not parse the JSON options: Expecting a JSON value",
        ),
        (false, "json:[]", "Invalid JSON object given"),
        (false, "json:5", "Invalid JSON object given"),
        (false, "json:{}", "Must specify either driver or file"),
        (
            false,
            r#"json:{"a":}"#,
            "Could not parse the JSON options: 1:6: JSON parse error, expecting value",
        ),
        (
            false,
            r#"json:{"a":1"#,
            "Could not parse the JSON options: 1:8: JSON parse error, premature end of input",
        ),
        (
            false,
            r#"json:{"a":01}"#,
            "Could not parse the JSON options: 1:6: JSON parse error, stray '01'",
        ),
        (
            false,
            r#"json:{a:1}"#,
            "Could not parse the JSON options: 1:2: JSON parse error, expecting key",
        ),
        (
            false,
            r#"json:{"a" 1}"#,
            "Could not parse the JSON options: 1:6: JSON parse error, expecting ':'",
        ),
        (
            false,
            r#"json:{"a":[1,2}"#,
            "Could not parse the JSON options: 1:11: JSON parse error, expected ',' or ']'",
        ),
        (
            false,
            r#"json:{1:2}"#,
            "Could not parse the JSON options: 1:2: JSON parse error, expecting key",
        ),
        (
            false,
            r#"json:{"a":"\q"}"#,
            "Could not parse the JSON options: 1:6: JSON parse error, invalid escape sequence in string",
        ),
        (
            false,
            r#"json:{"a":"\ud800"}"#,
            "Could not parse the JSON options: 1:6: JSON parse error, \\ud800 is not a valid Unicode character",
        ),
        (
            false,
            r#"json:{"a":1,"a":2}"#,
            "Could not parse the JSON options: 1:12: JSON parse error, duplicate key",
        ),
        (
            false,
            r#"json:{"a":1,"a":[1]}"#,
            "Could not parse the JSON options: 1:15: JSON parse error, duplicate key",
        ),
        (
            false,
            "json:{\"a\":\n  1,\n \"b\" 2}",
            "Could not parse the JSON options: 3:6: JSON parse error, expecting ':'",
        ),
        (
            false,
            r#"json:{"a":1.}"#,
            "Could not parse the JSON options: 1:6: JSON parse error, stray '1.}'",
        ),
        (
            false,
            r#"json:{"a":"\u12"}"#,
            "Could not parse the JSON options: 1:6: JSON parse error, \\u12\" is not a valid Unicode character",
        ),
        (
            false,
            r#"json:{"a":1 "b":2}"#,
            "Could not parse the JSON options: 1:8: JSON parse error, expected ',' or '}'",
        ),
        (
            false,
            r#"json:{"a":1}{}"#,
            "Could not parse the JSON options: Expecting at most one JSON value",
        ),
        (
            false,
            r#"json:{"filename":"x"}"#,
            "Must specify either driver or file",
        ),
        (
            false,
            r#"json:{"driver":"qcow2"}"#,
            "A block device must be specified for \"file\"",
        ),
        (
            false,
            r#"json:{"driver":"qcow2","filename":"x"}"#,
            "A block device must be specified for \"file\"",
        ),
        (
            false,
            r#"json:{"driver":"qcow2","file":1}"#,
            "A block device must be specified for \"file\"",
        ),
        (
            false,
            r#"json:{"driver":"qcow2","file":{}}"#,
            "A block device must be specified for \"file\"",
        ),
        (
            false,
            r#"json:{"driver":"qcow2","file":{"filename":5}}"#,
            "Must specify either driver or file",
        ),
        (
            false,
            r#"json:{"driver":"qcow2","file":{"driver":"file"}}"#,
            "The 'file' block driver requires a file name",
        ),
        (
            false,
            r#"json:{"driver":"qcow2","file":"node"}"#,
            "Cannot find device='node' nor node-name='node'",
        ),
        (
            true,
            "x.qcow2",
            "Cannot find device='x.qcow2' nor node-name='x.qcow2'",
        ),
        (true, "", "Must specify either driver or file"),
        (true, "driver=zz,file.filename=x", "Unknown driver 'zz'"),
        (
            true,
            "driver=qcow2,file.driver=zz,file.filename=x",
            "Unknown driver 'zz'",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,file=1",
            "Cannot reference an existing block device with additional options or a new filename",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,x=1",
            "Block format 'qcow2' does not support the option 'x'",
        ),
        (
            true,
            "driver=raw,file.filename=x,lazy-refcounts=on",
            "Block format 'raw' does not support the option 'lazy-refcounts'",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,filename=x",
            "Block format 'qcow2' does not support the option 'filename'",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,=1",
            "Block format 'qcow2' does not support the option ''",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,file.x=1",
            "Block protocol 'file' doesn't support the option 'x'",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,file.cache.dirct=on",
            "Block protocol 'file' doesn't support the option 'cache.dirct'",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,read-only=ON",
            "Parameter 'read-only' expects 'on' or 'off'",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,lazy-refcounts=maybe",
            "Parameter 'lazy-refcounts' expects 'on' or 'off'",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,l2-cache-size=1x",
            "Parameter 'l2-cache-size' expects a non-negative number below 2^64",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,l2-cache-size=-1",
            "Value '-1' is out of range for parameter 'l2-cache-size'",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,cache-size=1M,l2-cache-size=2M",
            "l2-cache-size may not exceed cache-size",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,cache-clean-interval=1k",
            "Parameter 'cache-clean-interval' expects a number",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,overlap-check=y",
            "Unsupported value 'y' for qcow2 option 'overlap-check'. Allowed are any of the following: none, constant, cached, all",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,discard=what",
            "Invalid discard option",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,detect-zeroes=what",
            "invalid parameter value: what",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,force-share=on,read-only=off",
            "force-share=on can only be used with read-only images",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,node-name=a#",
            "Invalid node-name: 'a#'",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,file.aio=y",
            "invalid parameter value: y",
        ),
        (
            true,
            "driver=qcow2,file.filename=x,file.locking=y",
            "invalid parameter value: y",
        ),
        (
            true,
            "driver=raw,file.filename=x,size=513",
            "Specified size is not multiple of 512",
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    let qemu = qemu_img();
    if let Some(qemu) = &qemu {
        let made = Command::new(qemu)
            .args(["create", "-q", "-f", "qcow2", "x", "1M"])
            .current_dir(&dir)
            .status();
        assert!(made.unwrap().success());
    }
    for (options, text, said) in cases {
        let spec = match options {
            true => opts(text),
            false => name(text),
        };
        assert_eq!(message(spec), *said, "{text}");
        let Some(qemu) = &qemu else { continue };
        let mut command = Command::new(qemu);
        command.arg("info").current_dir(&dir);
        if *options {
            command.arg("--image-opts");
        }
        let output = command.arg(text).output().unwrap();
        let output = String::from_utf8_lossy(&output.stderr);
        let output: String = output.split_inclusive('\n').map(newest_words).collect();
        let theirs = format!("Could not open '{text}': {said}");
        let theirs: String = theirs.split_inclusive('\n').map(newest_words).collect();
        assert!(output.contains(&theirs), "{output} for {theirs}");
    }
}

#[test]
fn display_names_match_qemu() {
    let Some(qemu) = qemu_img() else { return };
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let output = Command::new(&qemu).args(args).current_dir(&dir).output();
        let output = output.unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    };
    std::fs::create_dir(dir.path().join("d")).unwrap();
    for path in ["x", "a,b", "d/x", "./nbd:x", "\u{e9}\"\\"] {
        run(&["create", "-q", "-f", "raw", path, "1M"]);
    }
    for text in [
        "driver=raw,file.filename=a,,b",
        "driver=raw,file.filename=x,file.locking=off,file.aio=threads,discard=on",
        "driver=raw,file.filename=x,offset=512",
        "driver=raw,file.filename=x,offset=512,size=1k",
        "driver=raw,file.driver=file,file.filename=d/x,size=512",
        "driver=raw,file.filename=nbd:x",
        "file.filename=x,size=512",
        "driver=file,filename=x",
        "x",
        "d/x",
        "file:x",
        "file:nbd:x",
        "./nbd:x",
        r#"json:{"driver":"raw","offset":512e0,"file":{"driver":"file","filename":"x"}}"#,
        r#"json:{"driver":"raw","size":null,"file":{"driver":"file","filename":"x"}}"#,
        r#"json:{"driver":"raw","size":"512","file.filename":"\u00e9\"\\"}"#,
        r#"json:{"driver":"file","filename":"x"}"#,
    ] {
        let options = text.contains('=');
        let (mut spec, shown) = match options {
            true => (opts(text).unwrap(), run(&["info", "--image-opts", text])),
            false => (name(text).unwrap(), run(&["info", text])),
        };
        if spec.format.is_none() {
            spec.set_format(Format::RAW).unwrap();
        }
        let mut lines = shown.lines();
        let image = format!("image: {}", spec.display_name().display());
        assert_eq!(lines.next(), Some(image.as_str()), "{text}");
        let format = format!("file format: {}", spec.format_name());
        assert_eq!(lines.next(), Some(format.as_str()), "{text}");
    }
}

/// qemu-img, if it is installed and has the messages of QEMU 10.
fn qemu_img() -> Option<String> {
    let name = std::env::var("ZEBU_QEMU_IMG").unwrap_or_else(|_| "qemu-img".into());
    let version = match Command::new(&name).arg("--version").output() {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(_) => String::new(),
    };
    let major = version
        .strip_prefix("qemu-img version ")
        .and_then(|v| v.split('.').next()?.parse::<u32>().ok());
    if major.is_none_or(|major| major < 10) {
        eprintln!("skipped: no qemu-img 10 or later on PATH (or in ZEBU_QEMU_IMG)");
        return None;
    }
    Some(name)
}

/// Pieces of names and options, in any order.
fn pieces() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "json:",
        "file:",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "'",
        ":",
        ",",
        ",,",
        "=",
        ".",
        "\\",
        "\\u",
        "d800",
        "null",
        "true",
        "1",
        "-1",
        "512",
        "driver",
        "qcow2",
        "raw",
        "file",
        "filename",
        "backing",
        "data-file",
        "offset",
        "size",
        "overlap-check",
        "l2-cache-size",
        "\n",
        "\0",
        "é",
        " ",
        "/",
        "x",
    ]);
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

/// A valid name with random changes.
fn damaged() -> impl Strategy<Value = String> {
    let whole = r#"json:{"driver":"qcow2","backing":{"driver":"raw","size":512,"file":{"driver":"file","filename":"\u00e9\ud83d\ude00x"}},"file.filename":"y","l2-cache-size":"1.5M","data-file":null}"#;
    (0..whole.len(), any::<char>(), any::<bool>()).prop_map(move |(at, c, keep)| {
        let mut text = whole[..at].to_string();
        text.push(c);
        text.push_str(&whole[at + usize::from(!keep)..]);
        text
    })
}

fn parses_or_fails_in_one_line(text: &str) {
    bytes_parse_or_fail_in_one_line(text.into());
}

fn bytes_parse_or_fail_in_one_line(text: OsString) {
    for source in [Source::Name(text.clone()), Source::Options(text.clone())] {
        for (of, format) in [
            (None, None),
            (Some("d/o"), Some(Format::RAW)),
            (Some("json:{}"), Some(Format::QCOW2)),
        ] {
            let check = |error: Error| {
                let line = error.to_string();
                assert!(
                    !line.is_empty() && !line.contains(char::is_control),
                    "{line:?}"
                );
            };
            match source.resolve(of.map(OsStr::new), format) {
                Ok(mut spec) => {
                    assert!(!spec.file.path.as_os_str().is_empty());
                    if spec.format.is_none() {
                        spec.set_format(Format::QCOW2).err().map(check);
                    }
                    spec.display_name_with_backing(Some(OsStr::new("b")));
                }
                Err(error) => check(error),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_string_parses_or_fails_in_one_line(text in any::<String>(), made in pieces(), bad in damaged(),
        bytes in any::<Vec<u8>>(), cut in any::<prop::sample::Index>(), byte in 0x80u8..) {
        parses_or_fails_in_one_line(&text);
        parses_or_fails_in_one_line(&format!("json:{text}"));
        parses_or_fails_in_one_line(&made);
        parses_or_fails_in_one_line(&format!("json:{{\"driver\":\"raw\",{made}"));
        parses_or_fails_in_one_line(&bad);
        bytes_parse_or_fail_in_one_line(OsString::from_vec(bytes));
        let mut spoiled = made.into_bytes();
        spoiled.insert(cut.index(spoiled.len() + 1), byte);
        bytes_parse_or_fail_in_one_line(OsString::from_vec(spoiled));
    }

    #[test]
    fn a_display_name_resolves_to_the_same_image(path in "[a-z\"\\\\é,:{}\u{1f600} ]{1,12}", offset in 0u64..1 << 40) {
        let escaped = path.replace(',', ",,");
        let spec = opts(&format!("driver=raw,offset={offset},file.driver=file,file.filename={escaped}")).unwrap();
        let again = Source::Name(spec.display_name()).resolve(None, None).unwrap();
        prop_assert_eq!(&spec, &again);
        prop_assert_eq!(again.file.path, PathBuf::from(path));
    }
}
