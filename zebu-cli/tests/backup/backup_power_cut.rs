//! `backup`: a power cut at any call leaves points that are right, and the next backup is right.
//!
//! A library in the program notes what is durable: the content of each file when it was last synced,
//! and the names of the directory when that was last synced. At a call it kills the program. What a
//! power cut may leave then is made of names and contents, each as they were synced or as they are
//! without a cut.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::backup::{backup, content, copy_state, points, restored, zebu_io};
use crate::common::{Lab, Limits, spread};

/// The library. It refuses io_uring, whose syncs it could not see.
///
/// `durable/INODE` has the content of a file, `durable/list` a line `INODE NAME` for each file of the
/// set. Files are linked in `pins`, so that no inode is used again.
const NOTER: &str = r#"
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
static atomic_long calls;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static void count(void) {
    const char *limit = getenv("KILL_AT");
    if (limit && atomic_fetch_add(&calls, 1) + 1 == atol(limit))
        kill(getpid(), SIGKILL);
}
static void give_up(const char *what) {
    perror(what);
    _exit(99);
}
static void note_file(const char *path, unsigned long inode) {
    static char buffer[1 << 16];
    char name[64];
    snprintf(name, sizeof name, "durable/%lu", inode);
    int from = open(path, O_RDONLY | O_CLOEXEC);
    int to = open("durable/new", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (from < 0 || to < 0) give_up(path);
    ssize_t got;
    while ((got = read(from, buffer, sizeof buffer)) > 0)
        if (REAL(write)(to, buffer, got) != got) give_up("write");
    if (got < 0) give_up("read");
    close(from);
    close(to);
    if (REAL(rename)("durable/new", name)) give_up(name);
}
static void note_names(int with_content) {
    DIR *set = opendir("set");
    FILE *list = fopen("durable/new", "w");
    if (!set || !list) give_up("set");
    struct dirent *entry;
    while ((entry = readdir(set))) {
        char path[1024], pin[64];
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "set/%s", entry->d_name);
        snprintf(pin, sizeof pin, "pins/%lu", (unsigned long)entry->d_ino);
        if (link(path, pin) && errno != EEXIST) give_up(path);
        fprintf(list, "%lu %s\n", (unsigned long)entry->d_ino, entry->d_name);
    }
    closedir(set);
    fclose(list);
    if (REAL(rename)("durable/new", "durable/list")) give_up("list");
    if (!with_content) return;
    set = opendir("set");
    while ((entry = readdir(set))) {
        char path[1024];
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "set/%s", entry->d_name);
        note_file(path, entry->d_ino);
    }
    closedir(set);
}
__attribute__((constructor)) static void begin(void) {
    struct stat disk;
    if (stat("disk.qcow2", &disk)) give_up("disk.qcow2");
    note_file("disk.qcow2", disk.st_ino);
    note_names(1);
}
__attribute__((destructor)) static void tell(void) {
    FILE *file = fopen("count", "w");
    if (!file) give_up("count");
    fprintf(file, "%ld", atomic_load(&calls));
    fclose(file);
}
/* What was there before the call is durable after it. */
static int synced(int fd, int (*call)(int)) {
    struct stat set, this;
    count();
    pthread_mutex_lock(&one_at_a_time);
    int is_dir = !fstat(fd, &this) && S_ISDIR(this.st_mode);
    if (S_ISREG(this.st_mode)) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        note_file(path, this.st_ino);
    } else if (is_dir && !stat("set", &set) && set.st_ino == this.st_ino) {
        note_names(0);
    }
    int result = call(fd);
    pthread_mutex_unlock(&one_at_a_time);
    return result;
}
int fsync(int fd) { return synced(fd, REAL(fsync)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)); }
int rename(const char *a, const char *b) { count(); return REAL(rename)(a, b); }
int unlink(const char *a) { count(); return REAL(unlink)(a); }
ssize_t write(int fd, const void *b, size_t n) { count(); return REAL(write)(fd, b, n); }
ssize_t pwrite64(int fd, const void *b, size_t n, off_t o) { count(); return REAL(pwrite64)(fd, b, n, o); }
int ftruncate64(int fd, off_t n) { count(); return REAL(ftruncate64)(fd, n); }
long syscall(long n, ...) {
    long a[6];
    va_list list;
    va_start(list, n);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (n == SYS_io_uring_setup) {
        errno = ENOSYS;
        return -1;
    }
    return REAL(syscall)(n, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"#;

fn build_noter(lab: &Lab) -> PathBuf {
    let (source, library) = (lab.path("noter.c"), lab.path("noter.so"));
    fs::write(&source, NOTER).unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-w", "-o"])
        .args([&library, &source])
        .args(["-ldl", "-lpthread"])
        .status();
    assert!(status.expect("cc").success());
    library
}

/// Runs `backup --keep 2` until the call with this number.
fn run_until(lab: &Lab, library: &Path, at: u64) -> i32 {
    for folder in ["durable", "pins"] {
        let _ = fs::remove_dir_all(lab.path(folder));
        fs::create_dir(lab.path(folder)).unwrap();
    }
    let script = format!(
        "KILL_AT={at} LD_PRELOAD={} exec \"$0\" \"$@\"",
        library.display()
    );
    let zebu = env!("CARGO_BIN_EXE_zebu");
    let mut args = vec!["-c", &*script, zebu];
    args.extend(["backup", "disk.qcow2", "--to", "set", "--keep", "2"]);
    let answer = lab.run(Path::new("/bin/sh"), &args, b"", &Limits::default());
    assert!([0, 128 + 9].contains(&answer.status), "{answer:?}");
    answer.status
}

/// Inode and name of each file of the set, as synced or as it is.
fn names(lab: &Lab, synced: bool) -> Vec<(u64, String)> {
    if synced {
        let list = fs::read_to_string(lab.path("durable/list")).unwrap();
        let pair = |line: &str| {
            let (inode, name) = line.split_once(' ').expect("INODE NAME");
            (inode.parse().expect("an inode"), name.to_owned())
        };
        return list.lines().map(pair).collect();
    }
    let entries = fs::read_dir(lab.path("set")).unwrap();
    entries
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().expect("UTF-8");
            (entry.metadata().unwrap().ino(), name)
        })
        .collect()
}

/// Makes in `after` what a power cut leaves of the disk and the set in `lab`.
fn cut(lab: &Lab, after: &Lab, synced_names: bool, synced_contents: bool) {
    let content = |inode: u64, path: PathBuf| match synced_contents {
        // Of a file that was never synced nothing is left.
        true => fs::read(lab.path(&format!("durable/{inode}"))).unwrap_or_default(),
        false => fs::read(path).unwrap(),
    };
    let _ = fs::remove_dir_all(after.path("set"));
    fs::create_dir(after.path("set")).unwrap();
    for (inode, name) in names(lab, synced_names) {
        let path = match synced_names {
            true => lab.path(&format!("pins/{inode}")),
            false => lab.path("set").join(&name),
        };
        fs::write(after.path("set").join(name), content(inode, path)).unwrap();
    }
    let disk = lab.path("disk.qcow2");
    let inode = fs::metadata(&disk).unwrap().ino();
    fs::write(after.path("disk.qcow2"), content(inode, disk)).unwrap();
}

/// Fails unless the points are right, and the next backup is.
fn judge(lab: &Lab, saved: &BTreeMap<u64, Vec<u8>>, what: &str) {
    for point in points(lab) {
        assert!(restored(lab, point) == saved[&point], "{what}: {point}");
    }
    assert!(content(lab, "disk.qcow2") == saved[&3], "{what}");
    zebu_io(lab, &["write -P 4 3M 100k", "write -P 5 400k 4k"]);
    backup(lab, &["--keep", "2"]);
    let points = points(lab);
    let last = *points.last().expect("a point");
    assert!(
        restored(lab, last) == content(lab, "disk.qcow2"),
        "{what}: the next backup"
    );
    for point in points.iter().filter(|point| **point < 3) {
        assert!(
            restored(lab, *point) == saved[point],
            "{what}: {point} later"
        );
    }
    lab.zebu(&["backup", "verify", "set"]).ok(what);
}

#[test]
fn the_power_may_be_cut_at_any_call() {
    let lab = Lab::new();
    let library = build_noter(&lab);
    let mut saved = BTreeMap::new();
    lab.make("create disk.qcow2 8M");
    let writes: [&[&str]; 3] = [
        &["write -P 1 0 300k"],
        &["write -P 2 200k 300k"],
        &["write -P 3 400k 300k", "write -z 0 64k"],
    ];
    for (point, commands) in (1..).zip(writes) {
        zebu_io(&lab, commands);
        saved.insert(point, content(&lab, "disk.qcow2"));
        if point < 3 {
            backup(&lab, &[]);
        }
    }
    let (start, after) = (Lab::new(), Lab::new());
    copy_state(&lab.path(""), &start.path(""));
    assert_eq!(run_until(&lab, &library, u64::MAX >> 1), 0);
    let calls = fs::read_to_string(lab.path("count")).expect("a count");
    let calls: u64 = calls.parse().expect("a number");
    assert!(calls > 30, "{calls}");
    let mut seeds = zebu_testkit::cases(9, "power cuts");
    while let Some(seed) = seeds.next() {
        // The last one is after the end.
        let at = 1 + spread(seed, calls + 1);
        copy_state(&start.path(""), &lab.path(""));
        run_until(&lab, &library, at);
        for (names, contents) in [(true, true), (true, false), (false, true)] {
            cut(&lab, &after, names, contents);
            let what = format!("call {at}, names {names}, contents {contents}");
            judge(&after, &saved, &what);
            seeds.add(1);
        }
    }
}
