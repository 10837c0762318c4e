/* The tests of libzebu: DIRECTORY [ENGINE]. With the engine "threads" io_uring is not used at all. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "test.h"

const char *engine;
static const char *directory;

const char *path(const char *name)
{
    static char paths[4][4096];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", directory, name);
    return path;
}

int is_error(zebu_error *error, zebu_error_kind kind, long code)
{
    int is = error && zebu_error_get_kind(error) == kind && *zebu_error_get_message(error) &&
             code == -zebu_error_get_errno(error);
    if (!is)
        fprintf(stderr, "kind %d, code %ld: %s\n", (int)zebu_error_get_kind(error), code,
                zebu_error_get_message(error));
    zebu_error_free(error);
    return is;
}

zebu_device *open_image(const char *name, uint32_t flags)
{
    zebu_error *error;
    zebu_open_options options = ZEBU_OPEN_OPTIONS_INIT;
    options.flags = flags;
    options.engine = engine;
    zebu_device *disk = zebu_open(path(name), &options, &error);
    OK(0);
    return disk;
}

zebu_device *new_image(const char *name, uint64_t size)
{
    zebu_error *error;
    OK(zebu_create(path(name), "qcow2", size, NULL, &error));
    return open_image(name, ZEBU_OPEN_WRITE | ZEBU_OPEN_DISCARD);
}

/* As on a system without io_uring. valgrind 3.19 takes io_uring_enter for a call that does not wait,
 * and runs no other thread meanwhile: what waits for one in it waits for ever. */
static void forbid_io_uring(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { sizeof code / sizeof *code, code };
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0));
}

int main(int argc, char **argv)
{
    CHECK(argc >= 2);
    directory = argv[1];
    engine = argc > 2 ? argv[2] : NULL;
    if (engine && !strcmp(engine, "threads"))
        forbid_io_uring();
    test_errors();
    test_whole();
    test_threads();
    test_queues();
    test_jobs();
    test_stress();
    return 0;
}
