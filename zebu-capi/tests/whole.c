/* Guards against blocking functions that do not do what they say: data, status, information,
 * backing files, snapshots, bitmaps, sizes. */
#include "test.h"

#define CLUSTER 65536

static void data(zebu_device *disk)
{
    zebu_error *error;
    static unsigned char bytes[3 * CLUSTER], read[3 * CLUSTER];
    memset(bytes, 7, sizeof bytes);
    OK(zebu_write(disk, bytes, sizeof bytes, CLUSTER, &error));
    struct iovec iov[2] = { { read, 100 }, { read + 100, sizeof read - 100 } };
    OK(zebu_readv(disk, iov, 2, CLUSTER, &error));
    CHECK(!memcmp(bytes, read, sizeof bytes));
    iov[0].iov_len = 1;
    OK(zebu_writev(disk, iov, 1, 0, &error));
    OK(zebu_read(disk, read, 2, 0, &error));
    CHECK(read[0] == 7 && read[1] == 0);
    OK(zebu_write_zeroes(disk, 2 * CLUSTER, CLUSTER, ZEBU_ZEROES_UNMAP, &error));
    OK(zebu_write_zeroes(disk, 0, CLUSTER, 0, &error));
    OK(zebu_discard(disk, 3 * CLUSTER, CLUSTER, &error));
    OK(zebu_flush(disk, &error));
    /* Data in cluster 1 alone. */
    zebu_extent extents[8];
    uint64_t at = 0, size = (uint64_t)zebu_size(disk, &error);
    while (at < size) {
        ssize_t count = zebu_extents(disk, at, size - at, extents, 2, &error);
        OK(count);
        CHECK(count > 0);
        for (ssize_t n = 0; n < count; n++) {
            CHECK(extents[n].offset == at && extents[n].length > 0);
            int is_data = at <= CLUSTER && at + extents[n].length > CLUSTER &&
                          !(extents[n].flags & ZEBU_EXTENT_ZERO);
            CHECK(is_data == (at == CLUSTER));
            if (is_data) {
                CHECK(extents[n].length == CLUSTER && extents[n].flags & ZEBU_EXTENT_DATA);
                CHECK(extents[n].depth == 0 && extents[n].host_offset % CLUSTER == 0);
            }
            at += extents[n].length;
        }
    }
}

static void info(zebu_device *disk)
{
    zebu_error *error;
    zebu_info *info = zebu_get_info(disk, &error);
    OK(0);
    CHECK(info->size == 16 * CLUSTER && info->cluster_size == CLUSTER);
    CHECK(!strcmp(info->format, "qcow2") && !strcmp(info->filename, path("whole")));
    CHECK(info->flags == ZEBU_INFO_WRITABLE && info->snapshots == 0);
    CHECK(info->allocated_size > CLUSTER && !info->backing_filename && !info->backing_format);
    zebu_info_free(info);
}

static void snapshots(zebu_device *disk)
{
    zebu_error *error;
    unsigned char byte = 9;
    OK(zebu_snapshot_create(disk, "before", &error));
    OK(zebu_write(disk, &byte, 1, CLUSTER, &error));
    OK(zebu_resize(disk, 20 * CLUSTER, "metadata", 0, &error));
    zebu_snapshot_list *list = zebu_snapshots(disk, &error);
    OK(0);
    CHECK(list->count == 1 && list->items[0].disk_size == 16 * CLUSTER);
    CHECK(!strcmp(list->items[0].name, "before") && !strcmp(list->items[0].id, "1"));
    CHECK(list->items[0].date_sec > 1000000000 && list->items[0].vm_state_size == 0);
    zebu_snapshot_list_free(list);
    OK(zebu_snapshot_apply(disk, "before", &error));
    CHECK(zebu_size(disk, &error) == 16 * CLUSTER);
    OK(zebu_read(disk, &byte, 1, CLUSTER, &error));
    CHECK(byte == 7);
    OK(zebu_snapshot_delete(disk, "1", &error));
    list = zebu_snapshots(disk, &error);
    OK(0);
    CHECK(list->count == 0 && !list->items);
    zebu_snapshot_list_free(list);
}

static size_t dirty(zebu_device *disk, const char *name, uint64_t offset)
{
    zebu_error *error;
    zebu_range_list *list = zebu_bitmap_dirty(disk, name, &error);
    OK(0);
    size_t count = list->count;
    CHECK(count == 0 || (list->items[0].offset == offset && list->items[0].length == 4096));
    zebu_range_list_free(list);
    return count;
}

static void bitmaps(zebu_device *disk)
{
    zebu_error *error;
    unsigned char byte = 3;
    OK(zebu_bitmap_add(disk, "daily", 4096, ZEBU_BITMAP_ENABLED, &error));
    OK(zebu_bitmap_add(disk, "off", 0, 0, &error));
    OK(zebu_write(disk, &byte, 1, 8192 + 5, &error));
    OK(zebu_bitmap_disable(disk, "daily", &error));
    OK(zebu_write(disk, &byte, 1, 5 * CLUSTER, &error));
    CHECK(dirty(disk, "daily", 8192) == 1);
    CHECK(dirty(disk, "off", 0) == 0);
    zebu_bitmap_list *list = zebu_bitmaps(disk, &error);
    OK(0);
    CHECK(list->count == 2 && !strcmp(list->items[0].name, "daily"));
    CHECK(list->items[0].granularity == 4096 && list->items[0].flags == 0);
    CHECK(list->items[1].granularity == CLUSTER);
    zebu_bitmap_list_free(list);
    OK(zebu_bitmap_clear(disk, "daily", &error));
    CHECK(dirty(disk, "daily", 0) == 0);
    OK(zebu_bitmap_enable(disk, "daily", &error));
    OK(zebu_bitmap_remove(disk, "off", &error));
    list = zebu_bitmaps(disk, &error);
    OK(0);
    CHECK(list->count == 1 && list->items[0].flags == ZEBU_BITMAP_ENABLED);
    zebu_bitmap_list_free(list);
}

static void backing(void)
{
    zebu_error *error;
    OK(zebu_create(path("overlay"), "qcow2", 0, "backing_file=whole,backing_fmt=qcow2", &error));
    zebu_device *overlay = open_image("overlay", 0);
    zebu_info *info = zebu_get_info(overlay, &error);
    OK(0);
    CHECK(info->size == 16 * CLUSTER && !(info->flags & ZEBU_INFO_WRITABLE));
    CHECK(!strcmp(info->backing_filename, "whole") && !strcmp(info->backing_format, "qcow2"));
    zebu_info_free(info);
    char *json = zebu_get_info_json(overlay, &error);
    OK(0);
    CHECK(json[0] == '{' && strstr(json, "\"virtual-size\": 1048576") &&
          strstr(json, "\"backing-filename\": \"whole\""));
    zebu_string_free(json);
    zebu_extent extent;
    CHECK(zebu_extents(overlay, CLUSTER, CLUSTER, &extent, 1, &error) == 1);
    CHECK(extent.depth == 1);
    OK(zebu_close(overlay, &error));
}

void test_whole(void)
{
    zebu_error *error;
    zebu_device *disk = new_image("whole", 16 * CLUSTER);
    data(disk);
    info(disk);
    snapshots(disk);
    bitmaps(disk);
    OK(zebu_close(disk, &error));
    backing();
}
