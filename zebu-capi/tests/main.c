/* The tests of libzebu: DIRECTORY [ENGINE]. */
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

int main(int argc, char **argv)
{
    CHECK(argc >= 2);
    directory = argv[1];
    engine = argc > 2 ? argv[2] : NULL;
    test_errors();
    test_whole();
    test_threads();
    test_queues();
    test_jobs();
    return 0;
}
