/* Requests of a guest with many in flight: 16 threads write a file at random, each its own blocks,
 * or read it and compare.
 *
 * usage: storm write|verify FILE MIB [direct]
 *
 * A block of 4 KiB has its number and the round that wrote it in each word, so that it tells when it
 * stands in another place, is torn or is old: the last round wrote all. Ends with status 1 if a
 * request fails or a block differs.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 16, BLOCK = 4096, MOST = 16, ROUNDS = 2 };

static int file, verify;
static uint64_t blocks;
static const char *name;

static void fail(const char *what, uint64_t block)
{
    fprintf(stderr, "storm: %s at block %llu of %s\n", what, (unsigned long long)block, name);
    exit(1);
}

static void fill(uint64_t *memory, uint64_t block, uint64_t round)
{
    for (int i = 0; i < BLOCK / 8; i++)
        memory[i] = block << 8 | round;
}

/* Writes or verifies `count` blocks in one request. */
static void request(char *memory, uint64_t block, uint64_t count, uint64_t round)
{
    static _Thread_local uint64_t expected[BLOCK / 8];
    size_t length = count * BLOCK;
    off_t place = block * BLOCK;
    if (!verify) {
        for (uint64_t i = 0; i < count; i++)
            fill((uint64_t *)(memory + i * BLOCK), block + i, round);
        if (pwrite(file, memory, length, place) != (ssize_t)length)
            fail("a write failed", block);
        return;
    }
    if (pread(file, memory, length, place) != (ssize_t)length)
        fail("a read failed", block);
    for (uint64_t i = 0; i < count; i++) {
        fill(expected, block + i, round);
        if (memcmp(memory + i * BLOCK, expected, BLOCK) != 0)
            fail("other data", block + i);
    }
}

/* The parts of MOST blocks whose number is `thread` modulo THREADS, from a random one on in each
 * round, each in requests of random lengths. */
static void *work(void *argument)
{
    uint64_t thread = (uintptr_t)argument, parts = blocks / MOST / THREADS;
    unsigned random = thread + 1;
    char *memory;
    if (posix_memalign((void **)&memory, BLOCK, MOST * BLOCK) != 0)
        fail("no memory", 0);
    for (uint64_t round = verify ? ROUNDS - 1 : 0; round < ROUNDS; round++) {
        uint64_t first = rand_r(&random) % parts;
        for (uint64_t n = 0; n < parts; n++) {
            uint64_t part = (first + n * 7) % parts * THREADS + thread;
            for (uint64_t at = 0, count; at < MOST; at += count) {
                count = rand_r(&random) % MOST + 1;
                if (count > MOST - at)
                    count = MOST - at;
                request(memory, part * MOST + at, count, round);
            }
        }
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: storm write|verify FILE MIB [direct]\n");
        return 2;
    }
    verify = strcmp(argv[1], "verify") == 0;
    name = argv[2];
    /* No multiple of 7 in each thread, so that steps of 7 reach every part. */
    uint64_t parts = strtoull(argv[3], NULL, 0) * 1048576 / (THREADS * MOST * BLOCK);
    while (parts % 7 == 0)
        parts++;
    blocks = parts * THREADS * MOST;
    file = open(name, (verify ? O_RDONLY : O_RDWR | O_CREAT) | (argc > 4 ? O_DIRECT : 0), 0600);
    if (file < 0)
        fail("it cannot be opened", 0);
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, work, (void *)i) != 0)
            fail("no thread", 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    if (!verify && fsync(file) != 0)
        fail("fsync failed", 0);
    return 0;
}
