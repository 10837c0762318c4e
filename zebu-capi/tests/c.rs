//! The tests in C, built with the header against the shared library, and the header itself.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use zebu_capi::{HEADER, layout};

const PACKAGE: &str = env!("CARGO_MANIFEST_DIR");
const STRICT: [&str; 5] = ["-std=gnu99", "-Wall", "-Wextra", "-Wpedantic", "-Werror"];

/// The directory of the shared library: that of this test, where cargo has built it.
fn libraries() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().to_path_buf()
}

fn run(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{text}{errors}",
        output.status
    );
    text
}

fn cc(sources: &[PathBuf], program: &Path) {
    run(Command::new("cc")
        .args(STRICT)
        .arg("-g")
        .arg(format!("-I{PACKAGE}/include"))
        .args(sources)
        .arg("-o")
        .arg(program)
        .arg(format!("-L{}", libraries().display()))
        .args(["-lzebu_capi", "-lpthread"]));
}

fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    command.env("LD_LIBRARY_PATH", libraries());
    command
}

fn sources(directory: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(Path::new(PACKAGE).join(directory)).unwrap();
    let files = files.map(|file| file.unwrap().path());
    files
        .filter(|path| path.extension().is_some_and(|e| e == "c"))
        .collect()
}

/// With each engine, and with `ZEBU_VALGRIND` once under valgrind, without io_uring (`main.c`).
#[test]
fn the_library_does_what_the_header_says() {
    let directory = tempfile::tempdir().unwrap();
    let tests = directory.path().join("tests");
    cc(&sources("tests"), &tests);
    for engine in zebu::EngineKind::ALL {
        let images = directory.path().join(engine.name());
        fs::create_dir(&images).unwrap();
        run(program(&tests).arg(&images).arg(engine.name()));
    }
    if std::env::var_os("ZEBU_VALGRIND").is_none() {
        return;
    }
    let images = directory.path().join("valgrind");
    fs::create_dir(&images).unwrap();
    run(program(Path::new("valgrind"))
        .args(["--quiet", "--error-exitcode=9", "--leak-check=full"])
        .args(["--errors-for-leak-kinds=definite", "--fair-sched=yes"])
        .args([&tests, &images])
        .arg("threads"));
}

/// Each compiles without a warning. One is run.
#[test]
fn the_examples_work() {
    let directory = tempfile::tempdir().unwrap();
    for source in sources("examples") {
        let name = source.file_stem().unwrap().to_owned();
        cc(&[source], &directory.path().join(name));
    }
    let [image, copy] = ["image", "copy"].map(|name| directory.path().join(name));
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n / 1000) as u8).collect();
    fs::write(&image, &content[..2_999_808]).unwrap();
    let said = run(program(&directory.path().join("event_loop")).args([&image, &copy]));
    assert!(said.ends_with("2999808 bytes of data copied\n"), "{said}");
    assert!(fs::read(&copy).unwrap() == content[..2_999_808]);
}

/// The names in the header and in the library are the same, and C and Rust have the same
/// structures.
#[test]
fn the_header_fits_the_library() {
    let library = libraries().join("libzebu_capi.so");
    let symbols = run(Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library));
    let exported = symbols.lines().filter_map(|line| line.split(' ').nth(2));
    let exported: BTreeSet<&str> = exported.filter(|name| name.starts_with("zebu_")).collect();
    let code = without_comments(HEADER);
    let words = code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '(');
    let declared = words
        .filter_map(|word| word.split_once('('))
        .map(|(name, _)| name);
    let declared: BTreeSet<&str> = declared.filter(|name| name.starts_with("zebu_")).collect();
    assert_eq!(declared, exported);

    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("layout.c");
    let mut text = String::from("#include <zebu.h>\n");
    for (member, offset) in layout::offsets() {
        let (structure, member) = member.split_once('.').unwrap();
        text += &format!(
            "_Static_assert(offsetof({structure}, {member}) == {offset}, \"{structure}.{member}\");\n"
        );
    }
    fs::write(&source, text).unwrap();
    run(Command::new("cc")
        .args(["-fsyntax-only", "-std=c11", &format!("-I{PACKAGE}/include")])
        .arg(&source));
}

fn without_comments(code: &str) -> String {
    let mut rest = code;
    let mut text = String::new();
    while let Some((before, after)) = rest.split_once("/*") {
        text += before;
        rest = after.split_once("*/").expect("the end of a comment").1;
    }
    text + rest
}
