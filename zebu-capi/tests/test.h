/* What the tests share. */
#ifndef TEST_H
#define TEST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zebu.h"

/* Ends the program if the condition does not hold. */
#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);    \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

/* Ends the program with the error of a call that must not fail: OK(zebu_flush(disk, &error)). It
 * needs a variable `error`. */
#define OK(call)                                                                       \
    do {                                                                               \
        if ((call) < 0 || error) {                                                     \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,              \
                    zebu_error_get_message(error));                                    \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

/* Whether the error is of this kind, and the code that was returned fits. Frees the error. */
int is_error(zebu_error *error, zebu_error_kind kind, long code);

/* How the tests do I/O: NULL is the default. */
extern const char *engine;

/* The path of a file in the directory of the tests; valid until the fourth call from here. */
const char *path(const char *name);

/* A new qcow2 image that is open for writing. */
zebu_device *new_image(const char *name, uint64_t size);
zebu_device *open_image(const char *name, uint32_t flags);

void test_errors(void);
void test_whole(void);
void test_threads(void);
void test_queues(void);
void test_jobs(void);
void test_stress(void);

#endif
