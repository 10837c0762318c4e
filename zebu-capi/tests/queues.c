/* Guards against completions that are lost, and event loops that sleep for ever. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "test.h"

#define BLOCK 8192
#define CLUSTER 65536
#define REQUESTS 200

static unsigned char memory[REQUESTS][BLOCK];

static zebu_queue *new_queue(void)
{
    zebu_error *error;
    zebu_queue_options options = ZEBU_QUEUE_OPTIONS_INIT;
    options.engine = engine;
    zebu_queue *queue = zebu_queue_new(&options, &error);
    OK(0);
    return queue;
}

/* Waits for `count` completions in an event loop, a few at a time. */
static void collect(zebu_queue *queue, int events, int count)
{
    zebu_error *error;
    zebu_completion completions[7];
    while (count > 0) {
        struct epoll_event event;
        int ready = epoll_wait(events, &event, 1, 60000);
        CHECK(ready == 1 || (ready < 0 && errno == EINTR));
        ssize_t found = zebu_queue_complete(queue, completions, 7, &error);
        OK(found);
        for (ssize_t n = 0; n < found; n++) {
            CHECK(completions[n].result == 0 && !completions[n].error);
            CHECK(!*(unsigned char *)completions[n].cookie);
            *(unsigned char *)completions[n].cookie = 1;
        }
        count -= (int)found;
    }
    CHECK(count == 0);
}

/* Writes all blocks, makes them durable, and reads them back. */
static void event_loop(zebu_queue *queue, zebu_device *disk)
{
    zebu_error *error;
    static unsigned char done[REQUESTS + 1];
    int events = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { .events = EPOLLIN };
    CHECK(!epoll_ctl(events, EPOLL_CTL_ADD, zebu_queue_fd(queue, &error), &event));
    for (int step = 0; step < 3; step++) {
        int count = step == 1 ? 1 : REQUESTS;
        memset(done, 0, sizeof done);
        for (int n = 0; n < count; n++) {
            struct iovec iov[2] = { { memory[n], 512 }, { memory[n] + 512, BLOCK - 512 } };
            if (step == 0)
                memset(memory[n], n % 250 + 1, BLOCK);
            if (step == 0)
                OK(zebu_queue_write(queue, disk, iov, 2, n * BLOCK, &done[n], &error));
            else if (step == 1)
                OK(zebu_queue_flush(queue, disk, &done[n], &error));
            else
                OK(zebu_queue_read(queue, disk, iov, 2, n * BLOCK, &done[n], &error));
        }
        if (step == 1)
            memset(memory, 0, sizeof memory);
        CHECK(zebu_queue_in_flight(queue, &error) == count);
        collect(queue, events, count);
        CHECK(zebu_queue_in_flight(queue, &error) == 0);
    }
    for (int n = 0; n < REQUESTS; n++)
        CHECK(memory[n][0] == n % 250 + 1 && memory[n][BLOCK - 1] == memory[n][0]);
    close(events);
}

/* Blocking calls of a thread whose own queues have requests in flight. */
static void blocking_beside(zebu_device *disk)
{
    zebu_error *error;
    zebu_queue *queues[2] = { new_queue(), new_queue() };
    zebu_completion completions[4];
    struct iovec iov = { memory[0], BLOCK };
    for (int n = 0; n < 8; n++)
        OK(zebu_queue_write(queues[n % 2], disk, &iov, 1, 4096, NULL, &error));
    /* It waits for the writes. */
    OK(zebu_snapshot_create(disk, "beside", &error));
    OK(zebu_read(disk, memory[1], BLOCK, 4096, &error));
    CHECK(!memcmp(memory[0], memory[1], BLOCK));
    for (int n = 0; n < 2; n++) {
        struct pollfd fd = { zebu_queue_fd(queues[n], &error), POLLIN, 0 };
        while (poll(&fd, 1, 60000) < 0)
            CHECK(errno == EINTR);
        CHECK(fd.revents == POLLIN);
        CHECK(zebu_queue_complete(queues[n], completions, 4, &error) == 4);
        OK(zebu_queue_free(queues[n], &error));
    }
}

/* Requests of a queue that wait for those of another one of the thread. */
static void waiting_beside(zebu_device *disk)
{
    zebu_error *error;
    zebu_queue *queues[2] = { new_queue(), new_queue() };
    zebu_completion completions[8];
    struct iovec iov = { memory[0], BLOCK };
    OK(zebu_discard(disk, 0, 4 * CLUSTER, &error));
    for (int q = 0; q < 2; q++) {
        for (int n = 0; n < 8; n++)
            OK(zebu_queue_write(queues[q], disk, &iov, 1, n * CLUSTER / 2, NULL, &error));
        CHECK(zebu_queue_complete(queues[q], NULL, 0, &error) == 0);
    }
    for (int q = 1; q >= 0; q--) {
        CHECK(zebu_queue_wait(queues[q], completions, 8, 8, 60000, &error) == 8);
        OK(zebu_queue_free(queues[q], &error));
    }
}

static void other_kinds(zebu_queue *queue, zebu_device *disk)
{
    zebu_error *error;
    zebu_completion completions[4];
    int cookies[3];
    OK(zebu_queue_discard(queue, disk, 0, BLOCK, &cookies[0], &error));
    OK(zebu_queue_write_zeroes(queue, disk, 0, BLOCK, 0, &cookies[1], &error));
    struct iovec iov = { memory[0], BLOCK };
    OK(zebu_queue_read(queue, disk, &iov, 1, (uint64_t)1 << 40, &cookies[2], &error));
    CHECK(zebu_queue_wait(queue, completions, 3, 4, -1, &error) == 3);
    int failed = 0;
    for (int n = 0; n < 3; n++) {
        if (completions[n].cookie == &cookies[2]) {
            CHECK(completions[n].result == -EINVAL);
            CHECK(zebu_error_get_kind(completions[n].error) == ZEBU_ERROR_OUT_OF_RANGE);
            failed++;
        }
    }
    CHECK(failed == 1);
    /* Nothing is in flight: it does not wait. */
    CHECK(zebu_queue_wait(queue, completions, 1, 4, -1, &error) == 0);
    OK(zebu_read(disk, memory[0], BLOCK, 0, &error));
    CHECK(memory[0][0] == 0);
}

static void *of_another_thread(void *queue)
{
    zebu_error *error;
    int code = zebu_queue_flush(queue, NULL, NULL, &error);
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
    code = zebu_queue_free(queue, &error);
    CHECK(is_error(error, ZEBU_ERROR_MISUSE, code));
    return NULL;
}

void test_queues(void)
{
    zebu_error *error;
    zebu_device *disk = new_image("queues", REQUESTS * BLOCK);
    zebu_queue *queue = new_queue();
    event_loop(queue, disk);
    other_kinds(queue, disk);
    blocking_beside(disk);
    waiting_beside(disk);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, of_another_thread, queue));
    CHECK(!pthread_join(thread, NULL));
    /* A queue that is freed with requests in flight. */
    struct iovec iov = { memory[0], BLOCK };
    for (int n = 0; n < 20; n++)
        OK(zebu_queue_write(queue, disk, &iov, 1, n * BLOCK, NULL, &error));
    CHECK(zebu_queue_complete(queue, NULL, 0, &error) == 0);
    OK(zebu_queue_free(queue, &error));
    memset(memory, 0, sizeof memory);
    OK(zebu_close(disk, &error));
}
