/* Guards against requests of many threads that disturb each other. */
#include <pthread.h>

#include "test.h"

#define THREADS 8
#define BLOCK 4096
#define BLOCKS 32

static zebu_device *disk;

/* Each thread writes and reads every eighth block, in clusters that it shares with the others. */
static void *use(void *argument)
{
    zebu_error *error;
    size_t number = (size_t)argument;
    unsigned char block[BLOCK], read[BLOCK];
    for (size_t n = number; n < THREADS * BLOCKS; n += THREADS) {
        memset(block, (int)(n % 251 + 1), BLOCK);
        OK(zebu_write(disk, block, BLOCK, n * BLOCK, &error));
        OK(zebu_read(disk, read, BLOCK, n * BLOCK, &error));
        CHECK(!memcmp(block, read, BLOCK));
    }
    OK(zebu_flush(disk, &error));
    return NULL;
}

void test_threads(void)
{
    zebu_error *error;
    pthread_t threads[THREADS];
    disk = new_image("threads", THREADS * BLOCKS * BLOCK);
    for (size_t n = 0; n < THREADS; n++)
        CHECK(!pthread_create(&threads[n], NULL, use, (void *)n));
    /* A change of the whole device waits for the others' requests, and they for it. */
    OK(zebu_snapshot_create(disk, "meanwhile", &error));
    for (size_t n = 0; n < THREADS; n++)
        CHECK(!pthread_join(threads[n], NULL));
    unsigned char block[BLOCK];
    for (size_t n = 0; n < THREADS * BLOCKS; n++) {
        OK(zebu_read(disk, block, BLOCK, n * BLOCK, &error));
        CHECK(block[0] == n % 251 + 1 && block[BLOCK - 1] == block[0]);
    }
    OK(zebu_close(disk, &error));
}
