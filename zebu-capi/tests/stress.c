/* Guards against threads and queues that wait for each other for ever: random requests of several
 * queues of several threads, between blocking calls, and queues that are freed with requests in
 * flight. ZEBU_STRESS: rounds of each thread. */
#include <pthread.h>

#include "test.h"

#define SIZE (2 << 20)
#define LONGEST 70000
#define THREADS 4
#define QUEUES 3
#define DEPTH 8

static zebu_device *disk;

typedef struct {
    zebu_queue *queue;
    int in_flight;
    unsigned char memory[DEPTH][LONGEST];
} user;

static void submit(user *user, unsigned *seed)
{
    zebu_error *error;
    size_t length = 1 + rand_r(seed) % LONGEST;
    uint64_t offset = rand_r(seed) % (SIZE - length);
    unsigned char *memory = user->memory[user->in_flight];
    struct iovec iov[2] = { { memory, length / 2 }, { memory + length / 2, length - length / 2 } };
    switch (rand_r(seed) % 6) {
    case 0: OK(zebu_queue_flush(user->queue, disk, NULL, &error)); break;
    case 1: OK(zebu_queue_discard(user->queue, disk, offset, length, NULL, &error)); break;
    case 2: OK(zebu_queue_read(user->queue, disk, iov, 2, offset, NULL, &error)); break;
    default: OK(zebu_queue_write(user->queue, disk, iov, 2, offset, NULL, &error)); break;
    }
    user->in_flight++;
}

static void wait_for_all(user *user)
{
    zebu_error *error;
    zebu_completion done[DEPTH];
    CHECK(zebu_queue_wait(user->queue, done, DEPTH, DEPTH, -1, &error) == user->in_flight);
    for (; user->in_flight > 0; user->in_flight--)
        CHECK(done[user->in_flight - 1].result == 0);
}

static void step(user *users, unsigned *seed)
{
    zebu_error *error;
    user *user = &users[rand_r(seed) % QUEUES];
    char name[20], bytes[5000] = { 1 };
    switch (rand_r(seed) % 16) {
    case 0:
    case 1: wait_for_all(user); break;
    case 2: OK(zebu_write(disk, bytes, sizeof bytes, rand_r(seed) % (SIZE / 2), &error)); break;
    case 3: OK(zebu_flush(disk, &error)); break;
    case 4:
        snprintf(name, sizeof name, "%u", rand_r(seed));
        OK(zebu_snapshot_create(disk, name, &error));
        OK(zebu_snapshot_delete(disk, name, &error));
        break;
    case 5: CHECK(zebu_queue_complete(user->queue, NULL, 0, &error) == 0); break;
    default:
        if (user->in_flight < DEPTH)
            submit(user, seed);
    }
}

static void *work(void *argument)
{
    zebu_error *error;
    unsigned seed = (unsigned)(size_t)argument;
    const char *rounds = getenv("ZEBU_STRESS");
    zebu_queue_options options = ZEBU_QUEUE_OPTIONS_INIT;
    options.engine = engine;
    user *users = calloc(QUEUES, sizeof *users);
    CHECK(users);
    for (int round = rounds ? atoi(rounds) : 2; round > 0; round--) {
        for (int n = 0; n < QUEUES; n++) {
            users[n].in_flight = 0;
            users[n].queue = zebu_queue_new(&options, &error);
            OK(0);
        }
        for (int n = 0; n < 50; n++)
            step(users, &seed);
        for (int n = 0; n < QUEUES; n++)
            OK(zebu_queue_free(users[n].queue, &error));
    }
    free(users);
    return NULL;
}

void test_stress(void)
{
    zebu_error *error;
    pthread_t threads[THREADS];
    disk = new_image("stress", SIZE);
    for (size_t n = 0; n < THREADS; n++)
        CHECK(!pthread_create(&threads[n], NULL, work, (void *)(n + 1)));
    for (size_t n = 0; n < THREADS; n++)
        CHECK(!pthread_join(threads[n], NULL));
    OK(zebu_close(disk, &error));
    zebu_open_options options = ZEBU_OPEN_OPTIONS_INIT;
    options.engine = engine;
    zebu_job *job = zebu_check(path("stress"), &options, NULL, &error);
    OK(zebu_job_wait(job, &error));
    CHECK(zebu_job_get_check_result(job, &error)->corruptions == 0);
    zebu_job_free(job);
}
