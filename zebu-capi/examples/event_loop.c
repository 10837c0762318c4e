/* Copies the data of a disk into a raw file, in an event loop: event_loop IMAGE TARGET.
 *
 * One thread, one epoll, several reads in flight. The image may be of untrusted origin. */
#include <err.h>
#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <zebu.h>

#define PART (256 * 1024)
#define DEPTH 8

/* A part of the disk that is read, then written. */
struct part {
    uint64_t offset;
    struct iovec iov;
    int is_write;
    char memory[PART];
};

static zebu_device *source, *target;
static zebu_queue *queue;
/* The extent that is being copied. */
static zebu_extent extent;
static uint64_t size, copied;

static void fail(zebu_error *error)
{
    errx(1, "%s", zebu_error_get_message(error));
}

/* Reads the next part. Returns 0 at the end of the disk. */
static int next(struct part *part)
{
    zebu_error *error;
    while (extent.length == 0 || extent.flags & ZEBU_EXTENT_ZERO) {
        uint64_t end = extent.offset + extent.length;
        if (end == size)
            return 0;
        if (zebu_extents(source, end, size - end, &extent, 1, &error) < 0)
            fail(error);
    }
    part->offset = extent.offset;
    part->is_write = 0;
    part->iov.iov_base = part->memory;
    part->iov.iov_len = extent.length < PART ? extent.length : PART;
    extent.offset += part->iov.iov_len;
    extent.length -= part->iov.iov_len;
    if (zebu_queue_read(queue, source, &part->iov, 1, part->offset, part, &error) < 0)
        fail(error);
    return 1;
}

/* What follows the completion of a request. */
static void completed(const zebu_completion *completion)
{
    zebu_error *error;
    struct part *part = completion->cookie;
    if (completion->error)
        errx(1, "%s", zebu_error_get_message(completion->error));
    if (part->is_write) {
        copied += part->iov.iov_len;
        next(part);
        return;
    }
    part->is_write = 1;
    if (zebu_queue_write(queue, target, &part->iov, 1, part->offset, part, &error) < 0)
        fail(error);
}

int main(int argc, char **argv)
{
    static struct part parts[DEPTH];
    zebu_error *error;
    zebu_open_options untrusted = ZEBU_OPEN_OPTIONS_INIT, raw = ZEBU_OPEN_OPTIONS_INIT;
    untrusted.flags = ZEBU_OPEN_UNTRUSTED;
    raw.flags = ZEBU_OPEN_WRITE;
    raw.format = "raw";
    if (argc != 3)
        errx(2, "usage: event_loop IMAGE TARGET");
    if (!(source = zebu_open(argv[1], &untrusted, &error)))
        fail(error);
    size = (uint64_t)zebu_size(source, NULL);
    if (zebu_create(argv[2], "raw", size, NULL, &error) < 0 ||
        !(target = zebu_open(argv[2], &raw, &error)) ||
        !(queue = zebu_queue_new(NULL, &error)))
        fail(error);

    int events = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { .events = EPOLLIN };
    if (events < 0 || epoll_ctl(events, EPOLL_CTL_ADD, zebu_queue_fd(queue, NULL), &event) < 0)
        err(1, "epoll");
    for (int n = 0; n < DEPTH && next(&parts[n]); n++)
        ;
    while (zebu_queue_in_flight(queue, NULL) > 0) {
        zebu_completion completions[DEPTH];
        /* io_uring may interrupt it. */
        if (epoll_wait(events, &event, 1, -1) < 0 && errno != EINTR)
            err(1, "epoll_wait");
        ssize_t count = zebu_queue_complete(queue, completions, DEPTH, &error);
        if (count < 0)
            fail(error);
        for (ssize_t n = 0; n < count; n++)
            completed(&completions[n]);
    }
    if (zebu_queue_free(queue, &error) < 0 || zebu_close(target, &error) < 0 ||
        zebu_close(source, &error) < 0)
        fail(error);
    printf("%" PRIu64 " bytes of data copied\n", copied);
    return 0;
}
