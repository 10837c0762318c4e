/* Guards against misuse that crashes, and against errors of the wrong kind. */
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

static void arguments(zebu_device *disk)
{
    zebu_error *error;
    char byte;
    int code;

    CHECK(!zebu_open(NULL, NULL, &error));
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, -EINVAL));
    code = zebu_read(NULL, &byte, 1, 0, &error);
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
    code = zebu_read(disk, NULL, 1, 0, &error);
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
    code = zebu_readv(disk, NULL, -1, 0, &error);
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
    struct iovec iov[2] = { { &byte, SIZE_MAX }, { &byte, 1 } };
    code = zebu_readv(disk, iov, 2, 0, &error);
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
    code = zebu_readv(disk, iov, 1, 0, &error);
    CHECK(is_error(error, ZEBU_ERROR_OUT_OF_RANGE, code));
    CHECK(zebu_readv(disk, NULL, 0, 0, &error) == 0);
    code = (int)zebu_extents(disk, 0, 1, NULL, 0, &error);
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
    code = zebu_close(NULL, &error);
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
    code = zebu_queue_free(NULL, &error);
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
    code = zebu_snapshot_create(disk, NULL, &error);
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
    CHECK(!zebu_convert(NULL, NULL, NULL, &error));
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, -EINVAL));
    /* Without a place for the error. */
    CHECK(zebu_flush(NULL, NULL) == -EINVAL);
    CHECK(zebu_error_get_kind(NULL) == ZEBU_ERROR_NONE);
    CHECK(!*zebu_error_get_message(NULL));
    zebu_error_free(NULL);
    zebu_info_free(NULL);
    zebu_string_free(NULL);
    zebu_job_free(NULL);
}

static void options(void)
{
    zebu_error *error;
    /* Programs that were compiled with another header. */
    struct {
        zebu_open_options known;
        uint64_t unknown;
    } newer = { ZEBU_OPEN_OPTIONS_INIT, 0 };
    newer.known.struct_size = sizeof newer;
    zebu_device *disk = zebu_open(path("errors"), &newer.known, &error);
    OK(0);
    OK(zebu_close(disk, &error));
    newer.unknown = 1;
    CHECK(!zebu_open(path("errors"), &newer.known, &error));
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, -EINVAL));
    size_t older = sizeof older;
    disk = zebu_open(path("errors"), (void *)&older, &error);
    OK(0);
    OK(zebu_close(disk, &error));

    const zebu_open_options init = ZEBU_OPEN_OPTIONS_INIT;
    zebu_open_options bad[7] = { init, init, init, init, init, init, init };
    bad[0].struct_size = 0;
    bad[1].flags = 1u << 31;
    bad[2].cache = "fast";
    bad[3].engine = "steam";
    bad[4].limits = "work=1";
    bad[5].flags = ZEBU_OPEN_UNTRUSTED;
    bad[5].limits = "girth=1";
    bad[6].reserved = 1;
    for (int n = 0; n < 7; n++) {
        CHECK(!zebu_open(path("errors"), &bad[n], &error));
        CHECK(is_error(error, ZEBU_ERROR_MISUSE, -EINVAL));
    }
}

/* A child has what its parent has opened, without the threads and with the parent's locks. */
static void forks(void)
{
    zebu_error *error;
    zebu_device *disk = new_image("forks", 1 << 20);
    zebu_queue *queue = zebu_queue_new(NULL, &error);
    OK(0);
    char byte = 7;
    OK(zebu_write(disk, &byte, 1, 0, &error));
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        int code = zebu_write(disk, &byte, 1, 0, &error);
        CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
        struct iovec one = { &byte, 1 };
        code = zebu_queue_read(queue, disk, &one, 1, 0, NULL, &error);
        CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
        OK(zebu_queue_free(queue, &error));
        OK(zebu_close(disk, &error));
        /* Its own are as ever. */
        CHECK(!zebu_open(path("forks"), NULL, &error));
        CHECK(is_error(error, ZEBU_ERROR_LOCKED, -EAGAIN));
        disk = new_image("child", 1 << 20);
        OK(zebu_write(disk, &byte, 1, 0, &error));
        OK(zebu_close(disk, &error));
        /* What the parent's threads own cannot be freed here, which valgrind would report at an exit. */
        raise(SIGKILL);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    /* Nothing of the parent's was given up. */
    CHECK(!zebu_open(path("forks"), NULL, &error));
    CHECK(is_error(error, ZEBU_ERROR_LOCKED, -EAGAIN));
    OK(zebu_read(disk, &byte, 1, 0, &error));
    CHECK(byte == 7);
    OK(zebu_queue_free(queue, &error));
    OK(zebu_close(disk, &error));
}

void test_errors(void)
{
    zebu_error *error;
    char byte = 1;
    zebu_device *disk = new_image("errors", 1 << 20);
    arguments(disk);

    int code = zebu_read(disk, &byte, 1, 1 << 20, &error);
    CHECK(is_error(error, ZEBU_ERROR_OUT_OF_RANGE, code));
    zebu_extent extent;
    code = (int)zebu_extents(disk, UINT64_MAX, 1, &extent, 1, &error);
    CHECK(is_error(error, ZEBU_ERROR_OUT_OF_RANGE, code));
    code = zebu_resize(disk, 512, NULL, 0, &error);
    CHECK(is_error(error, ZEBU_ERROR_REFUSED, code));
    code = zebu_snapshot_apply(disk, "none", &error);
    CHECK(code < 0 && error);
    zebu_error_free(error);
    CHECK(!zebu_open(path("errors"), NULL, &error));
    CHECK(is_error(error, ZEBU_ERROR_LOCKED, -EAGAIN));
    code = zebu_create(path("errors"), "qcow2", 512, NULL, &error);
    CHECK(is_error(error, ZEBU_ERROR_LOCKED, code));
    code = zebu_create(path("x"), "raw", UINT64_MAX, NULL, &error);
    CHECK(is_error(error, ZEBU_ERROR_REFUSED, code));
    code = zebu_create(path("no such directory/x"), "raw", 512, NULL, &error);
    CHECK(is_error(error, ZEBU_ERROR_NOT_FOUND, code));
    OK(zebu_close(disk, &error));

    CHECK(!zebu_open(path("no such file"), NULL, &error));
    CHECK(strstr(zebu_error_get_message(error), "no such file"));
    CHECK(is_error(error, ZEBU_ERROR_NOT_FOUND, -ENOENT));
    zebu_open_options limited = ZEBU_OPEN_OPTIONS_INIT;
    limited.flags = ZEBU_OPEN_UNTRUSTED;
    limited.limits = "virtual-size=64K,snapshots=1";
    CHECK(!zebu_open(path("errors"), &limited, &error));
    CHECK(is_error(error, ZEBU_ERROR_LIMIT, -EFBIG));
    disk = open_image("errors", 0);
    code = zebu_write(disk, &byte, 1, 0, &error);
    CHECK(code < 0 && zebu_error_get_kind(error) == ZEBU_ERROR_NOT_PERMITTED);
    zebu_error_free(error);
    OK(zebu_close(disk, &error));
    options();
    forks();

    code = zebu_create(path("x"), "qcow3", 1 << 20, NULL, &error);
    CHECK(is_error(error, ZEBU_ERROR_REFUSED, code));
    code = zebu_create(path("x"), "qcow2", 1 << 20, "cluster_size=3", &error);
    CHECK(is_error(error, ZEBU_ERROR_REFUSED, code));
}
