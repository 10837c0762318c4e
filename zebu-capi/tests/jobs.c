/* Guards against jobs that do not end, do not stop, or report the wrong result. */
#include <errno.h>
#include <poll.h>
#include <time.h>

#include "test.h"

#define SIZE (8 << 20)
#define LARGE (5 * SIZE)

static void convert_and_compare(void)
{
    zebu_error *error;
    zebu_open_options source = ZEBU_OPEN_OPTIONS_INIT;
    source.engine = engine;
    zebu_convert_options options = ZEBU_CONVERT_OPTIONS_INIT;
    options.source = &source;
    options.flags = ZEBU_CONVERT_COMPRESS;
    options.target_format = "qcow2";
    options.target_options = "compression_type=zstd,cluster_size=128k";
    zebu_job *job = zebu_convert(path("source"), path("target"), &options, &error);
    OK(0);
    struct pollfd fd = { zebu_job_fd(job, &error), POLLIN, 0 };
    while (poll(&fd, 1, 60000) < 0)
        CHECK(errno == EINTR);
    CHECK(fd.revents == POLLIN);
    OK(zebu_job_wait(job, &error));
    zebu_progress progress;
    OK(zebu_job_get_progress(job, &progress, &error));
    CHECK(progress.ended && progress.done == SIZE && progress.total == SIZE);
    CHECK(!zebu_job_get_check_result(job, &error));
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, -EINVAL));
    zebu_job_free(job);

    job = zebu_compare(path("source"), &source, path("target"), NULL, 0, &error);
    OK(zebu_job_wait(job, &error));
    CHECK(zebu_job_get_compare_result(job, &error)->identical);
    zebu_job_free(job);

    zebu_device *target = open_image("target", ZEBU_OPEN_WRITE);
    char byte = 0;
    OK(zebu_write(target, &byte, 1, 70000, &error));
    OK(zebu_close(target, &error));
    job = zebu_compare(path("source"), &source, path("target"), NULL, 0, &error);
    OK(zebu_job_wait(job, &error));
    const zebu_compare_result *result = zebu_job_get_compare_result(job, &error);
    CHECK(!result->identical && result->offset <= 70000 && result->offset >= 70000 / 512 * 512);
    zebu_job_free(job);
}

static void check(void)
{
    zebu_error *error;
    zebu_open_options how = ZEBU_OPEN_OPTIONS_INIT;
    how.engine = engine;
    zebu_job *job = zebu_check(path("target"), &how, NULL, &error);
    OK(zebu_job_wait(job, &error));
    const zebu_check_result *result = zebu_job_get_check_result(job, &error);
    OK(0);
    CHECK(result->corruptions == 0 && result->leaks == 0 && result->check_errors == 0);
    CHECK(result->allocated_clusters == 64 && result->compressed_clusters >= 60);
    zebu_job_free(job);
    job = zebu_check(path("target"), &how, "all", &error);
    OK(zebu_job_wait(job, &error));
    zebu_job_free(job);
}

/* Of more than can be in work at once, and so slow that a job that is not stopped takes most of a
 * minute. */
static void cancel(void)
{
    zebu_error *error;
    time_t start = time(NULL);
    zebu_convert_options options = ZEBU_CONVERT_OPTIONS_INIT;
    zebu_open_options source = ZEBU_OPEN_OPTIONS_INIT;
    source.engine = engine;
    options.source = &source;
    options.target_format = "qcow2";
    options.rate = 1 << 20;
    zebu_job *job = zebu_convert(path("large"), path("stopped"), &options, &error);
    OK(0);
    CHECK(!zebu_job_get_compare_result(job, &error));
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, -EINVAL));
    OK(zebu_job_cancel(job, &error));
    int code = zebu_job_wait(job, &error);
    CHECK(is_error(error, ZEBU_ERROR_CANCELED, code));
    CHECK(code == -ECANCELED);
    zebu_progress progress;
    OK(zebu_job_get_progress(job, &progress, &error));
    CHECK(progress.ended && progress.done < LARGE);
    zebu_job_free(job);
    /* Its target is incomplete, and cannot be taken for an image. */
    CHECK(!zebu_open(path("stopped"), NULL, &error));
    zebu_error_free(error);
    /* Freeing a job that runs cancels it. */
    job = zebu_convert(path("large"), path("stopped"), &options, &error);
    OK(0);
    zebu_job_free(job);
    CHECK(time(NULL) - start < 30);
}

/* A raw image of `size` bytes of data. */
static void new_raw(const char *name, const unsigned char *bytes, uint64_t size)
{
    zebu_error *error;
    zebu_open_options raw = ZEBU_OPEN_OPTIONS_INIT;
    raw.flags = ZEBU_OPEN_WRITE;
    raw.format = "raw";
    OK(zebu_create(path(name), "raw", size, NULL, &error));
    zebu_device *disk = zebu_open(path(name), &raw, &error);
    OK(0);
    for (uint64_t at = 0; at < size; at += SIZE)
        OK(zebu_write(disk, bytes, SIZE, at, &error));
    OK(zebu_close(disk, &error));
}

void test_jobs(void)
{
    zebu_error *error;
    static unsigned char bytes[SIZE];
    for (size_t n = 0; n < SIZE; n++)
        bytes[n] = (unsigned char)(n % 241 + 1);
    new_raw("source", bytes, SIZE);
    new_raw("large", bytes, LARGE);
    convert_and_compare();
    check();
    cancel();
    /* What does not open fails at the start. */
    CHECK(!zebu_convert(path("no such file"), path("y"), NULL, &error));
    CHECK(is_error(error, ZEBU_ERROR_NOT_FOUND, -ENOENT));
    CHECK(!zebu_convert(path("source"), path("source"), NULL, &error));
    CHECK(is_error(error, ZEBU_ERROR_LOCKED, -EAGAIN));
    zebu_convert_options options = ZEBU_CONVERT_OPTIONS_INIT;
    options.target_format = "qcow2";
    options.flags = ZEBU_CONVERT_COMPRESS;
    options.level = 99;
    CHECK(!zebu_convert(path("source"), path("y"), &options, &error));
    CHECK(is_error(error, ZEBU_ERROR_REFUSED, -ENOTSUP));
    CHECK(!zebu_check(path("source"), NULL, "some", &error));
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, -EINVAL));
}
