//! `backup` that is killed at any call: all points stay, and the next one is right.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::backup::{backup, content, copy_state, points, restored, zebu_io};
use crate::common::{Lab, Limits};

/// A library that kills the program at the n-th call of the C library that changes files or enters
/// io_uring, and says at the end how many there were.
const KILLER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;
static void count(void) {
    const char *limit = getenv("KILL_AT");
    if (limit && atomic_fetch_add(&calls, 1) + 1 == atol(limit))
        kill(getpid(), SIGKILL);
}
__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("KILL_COUNT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "%ld", atomic_load(&calls));
        fclose(file);
    }
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
int rename(const char *a, const char *b) { count(); return REAL(rename)(a, b); }
int unlink(const char *a) { count(); return REAL(unlink)(a); }
int fsync(int fd) { count(); return REAL(fsync)(fd); }
int fdatasync(int fd) { count(); return REAL(fdatasync)(fd); }
ssize_t write(int fd, const void *b, size_t n) { count(); return REAL(write)(fd, b, n); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { count(); return REAL(pwrite64)(fd, b, n, o); }
int ftruncate64(int fd, off64_t n) { count(); return REAL(ftruncate64)(fd, n); }
long syscall(long n, ...) {
    long a[6];
    va_list list;
    va_start(list, n);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    count();
    return REAL(syscall)(n, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"#;

fn build_killer(lab: &Lab) -> PathBuf {
    let (source, library) = (lab.path("killer.c"), lab.path("killer.so"));
    fs::write(&source, KILLER).unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-w", "-o"])
        .args([&library, &source])
        .arg("-ldl")
        .status();
    assert!(status.expect("cc").success());
    library
}

/// A backup that is killed at any call leaves all points, and the next one is right.
#[test]
fn a_backup_may_be_killed_at_any_call() {
    let lab = Lab::new();
    let killer = build_killer(&lab);
    let mut saved = BTreeMap::new();
    lab.make("create disk.qcow2 8M");
    zebu_io(&lab, &["write -P 1 0 300k"]);
    backup(&lab, &[]);
    saved.insert(1, content(&lab, "disk.qcow2"));
    zebu_io(&lab, &["write -P 2 200k 300k"]);
    backup(&lab, &[]);
    saved.insert(2, content(&lab, "disk.qcow2"));
    zebu_io(&lab, &["write -P 3 400k 300k", "write -z 0 64k"]);
    saved.insert(3, content(&lab, "disk.qcow2"));
    let start = Lab::new();
    copy_state(&lab.path(""), &start.path(""));
    // With LD_PRELOAD only for zebu itself.
    let run = |at: u64| {
        let script = format!(
            "KILL_AT={at} KILL_COUNT={} LD_PRELOAD={} exec \"$0\" \"$@\"",
            lab.path("count").display(),
            killer.display()
        );
        let zebu = env!("CARGO_BIN_EXE_zebu");
        let mut args = vec!["-c", &*script, zebu];
        args.extend(["backup", "disk.qcow2", "--to", "set", "--keep", "2"]);
        lab.run(Path::new("/bin/sh"), &args, b"", &Limits::default())
    };
    assert_eq!(run(u64::MAX >> 1).status, 0);
    let count = fs::read_to_string(lab.path("count")).expect("a count");
    let calls: u64 = count.parse().expect("a number");
    assert!(calls > 50, "{calls}");
    for seed in zebu_testkit::cases(20, "kills") {
        let at = 1 + zebu_testkit::spread(seed, calls);
        copy_state(&start.path(""), &lab.path(""));
        run(at);
        for point in points(&lab) {
            assert!(
                restored(&lab, point) == saved[&point],
                "call {at}: point {point}"
            );
        }
        let verify = |what: &str| {
            let what = format!("call {at}: {what}");
            lab.zebu(&["backup", "verify", "set"]).ok(&what);
        };
        verify("killed");
        // The kill may be noticed by another change of the set before the next backup.
        if seed % 2 == 1 {
            let keep = ["backup", "keep", "set", "2"];
            lab.zebu(&keep).ok(&format!("call {at}: keep"));
            verify("keep");
        }
        // More is written, then the next backup is taken.
        zebu_io(&lab, &["write -P 4 3M 100k", "write -P 5 400k 4k"]);
        assert_clean_but_leaks(&lab, at);
        backup(&lab, &[]);
        let points = points(&lab);
        let last = *points.last().expect("a point");
        assert!(
            restored(&lab, last) == content(&lab, "disk.qcow2"),
            "call {at}"
        );
        for point in points
            .iter()
            .filter(|point| saved.contains_key(point) && **point != last)
        {
            assert!(
                restored(&lab, *point) == saved[point],
                "call {at}: point {point} later"
            );
        }
        // Nothing is left over.
        verify("the next backup");
        for entry in fs::read_dir(lab.path("set")).unwrap() {
            let name = entry.expect("an entry").file_name();
            assert!(!name.to_string_lossy().ends_with(".part"), "call {at}");
        }
    }
}

fn assert_clean_but_leaks(lab: &Lab, at: u64) {
    let check = lab.qemu_img(&["check", "-q", "disk.qcow2"]);
    assert!(matches!(check.status, 0 | 3), "call {at}: {check:?}");
}
