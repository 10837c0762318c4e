/*
 * zebu: disk images as block devices (qcow2, raw, VMDK, VHD, VHDX, VDI, DMG and others).
 *
 *     zebu_error *error;
 *     zebu_device *disk = zebu_open("disk.qcow2", NULL, &error);
 *     if (!disk)
 *         errx(1, "%s", zebu_error_get_message(error));
 *     zebu_read(disk, buffer, sizeof buffer, 0, NULL);
 *     zebu_close(disk, NULL);
 *
 * ERRORS. A function that can fail takes `zebu_error **error` last. It may be NULL. Otherwise the
 * call sets it: to NULL after success, or to an error that the caller frees (zebu_error_free). What
 * it held before is not looked at. Functions that return int, int64_t or ssize_t return a negative
 * errno after a failure; those that return a pointer return NULL. A NULL argument where NULL is not
 * allowed, a structure of an unknown size and a call of the wrong thread are ZEBU_ERROR_MISUSE. A
 * defect of the library that panics is ZEBU_ERROR_PANIC, never an unwinding through the caller.
 *
 * THREADS. A zebu_device may be used by any number of threads at once, except for zebu_close, which
 * is the last call. A zebu_queue belongs to the thread that made it: calls of others are
 * ZEBU_ERROR_MISUSE. A zebu_job may be used by any number of threads at once, except for
 * zebu_job_free. Errors, lists and infos may be read by several threads and are freed once.
 * After fork(2) the child opens images again: what the parent has opened is ZEBU_ERROR_MISUSE there,
 * and zebu_close, zebu_queue_free and zebu_job_free of it do nothing. (A child of vfork or clone
 * only executes another program.)
 *
 * BLOCKING. Functions of a device return when the operation has ended. Operations that change the
 * whole device (zebu_resize, snapshots, bitmaps, zebu_close) wait until the requests that were
 * started before, in any queue, have ended, and requests that are started later wait for them.
 * A queue with requests in flight must go on being driven (zebu_queue_complete, zebu_queue_wait) or
 * be freed: others may wait for it. While a thread waits in a blocking function or in
 * zebu_queue_wait, all of its queues are driven.
 *
 * POINTERS. Texts that are given to the library are used only during the call. Structures that the
 * library returns, and the texts in them, are valid until they are freed by the function named with
 * them. Functions that free take NULL, and do nothing then. The items of an empty list are NULL.
 *
 * TEXTS. File names are bytes. Messages and texts of images are UTF-8, what is not is replaced;
 * names of snapshots, bitmaps and files are as stored, up to a NUL byte.
 *
 * SIZES. Offsets, lengths and sizes are bytes. Any alignment works.
 *
 * STRUCTURES that the caller fills begin with `struct_size` and are initialised by their macro
 * (zebu_open_options o = ZEBU_OPEN_OPTIONS_INIT): what is 0 or NULL is the default, and `reserved`
 * must be 0. Later versions add members at the end of these and of structures that the library
 * returns.
 *
 * SIGNALS. A process with a limit on file sizes (RLIMIT_FSIZE) should ignore SIGXFSZ.
 */
#ifndef ZEBU_H
#define ZEBU_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library, "0.1.0". Never freed. */
const char *zebu_version(void);

/* ---- Errors ---- */

typedef struct zebu_error zebu_error;

typedef enum zebu_error_kind {
    /* No error: what zebu_error_get_kind(NULL) returns. */
    ZEBU_ERROR_NONE = 0,
    /* A file does not exist. */
    ZEBU_ERROR_NOT_FOUND = 1,
    /* A write to a device that was opened for reading, or what permissions forbid. */
    ZEBU_ERROR_NOT_PERMITTED = 2,
    /* Another program, or another device of this one, uses the image. */
    ZEBU_ERROR_LOCKED = 3,
    /* The image is damaged. */
    ZEBU_ERROR_CORRUPT = 4,
    /* The image was not closed by its last writer, and must be repaired. */
    ZEBU_ERROR_DIRTY = 5,
    /* The request is not inside the device. */
    ZEBU_ERROR_OUT_OF_RANGE = 6,
    /* No space is left, or the file may not become that long. */
    ZEBU_ERROR_NO_SPACE = 7,
    /* The image needs, or the request is, something that is not supported. */
    ZEBU_ERROR_UNSUPPORTED = 8,
    /* The request makes no sense for this image, or the policy of opening forbids it. */
    ZEBU_ERROR_REFUSED = 9,
    /* An untrusted image goes beyond a limit. */
    ZEBU_ERROR_LIMIT = 10,
    /* The storage failed in another way. */
    ZEBU_ERROR_IO = 11,
    /* A job was cancelled. */
    ZEBU_ERROR_CANCELED = 12,
    /* A call that this header forbids: a NULL argument, the wrong thread. */
    ZEBU_ERROR_MISUSE = 13,
    /* A defect of the library. */
    ZEBU_ERROR_PANIC = 14
} zebu_error_kind;

zebu_error_kind zebu_error_get_kind(const zebu_error *error);
/* The nearest errno, positive; 0 for NULL. */
int zebu_error_get_errno(const zebu_error *error);
/* One line or more, without a newline at the end. Valid as long as the error. "" for NULL. */
const char *zebu_error_get_message(const zebu_error *error);
void zebu_error_free(zebu_error *error);

/* ---- Opening, creating ---- */

typedef struct zebu_device zebu_device;

/* Open for writing too. */
#define ZEBU_OPEN_WRITE (1u << 0)
/* The name is a list of QEMU's image options: "driver=qcow2,file.filename=PATH". */
#define ZEBU_OPEN_IMAGE_OPTIONS (1u << 1)
/* The image is of untrusted origin: it opens no other file, and memory and work are limited. */
#define ZEBU_OPEN_UNTRUSTED (1u << 2)
/* Leave the backing file closed: its data read as zeroes. */
#define ZEBU_OPEN_NO_BACKING (1u << 3)
/* Open although another program may write to the image. */
#define ZEBU_OPEN_FORCE_SHARE (1u << 4)
/* Carry out discards, which are otherwise ignored as the image may always do. */
#define ZEBU_OPEN_DISCARD (1u << 5)

typedef struct zebu_open_options {
    size_t struct_size;
    /* ZEBU_OPEN_... */
    uint32_t flags;
    uint32_t reserved;
    /* "qcow2", "raw", ...; NULL: by the content, which a guest that writes to a raw image could
     * abuse. Writes to the first block of an image that is guessed to be raw are restricted. */
    const char *format;
    /* QEMU's cache modes: "writeback" (NULL), "none", "writethrough", "directsync", "unsafe". */
    const char *cache;
    /* How blocking functions do I/O: "io_uring", "native", "threads"; NULL: what the system has. */
    const char *engine;
    /* Opens this internal snapshot (id or name), read-only. */
    const char *snapshot;
    /* Limits of an untrusted image: "virtual-size=1T,work=64G"; docs/SECURITY.md lists them. */
    const char *limits;
    /* Bytes of cached L2 tables of a qcow2 image; 0: enough for the disk, up to 32 MiB. */
    uint64_t l2_cache_size;
} zebu_open_options;

#define ZEBU_OPEN_OPTIONS_INIT { sizeof(zebu_open_options), 0, 0, 0, 0, 0, 0, 0, 0 }

/* Opens an image: `name` is a path, or a name in QEMU's spelling ("nbd://...", "json:{...}").
 * `options` may be NULL. A qcow2 image that its last writer left dirty is repaired before it is
 * opened for writing. */
zebu_device *zebu_open(const char *name, const zebu_open_options *options, zebu_error **error);

/* Makes everything durable and frees the device, also after an error. A device that is never closed
 * keeps its locks. Waits for requests in flight. NULL is ZEBU_ERROR_MISUSE. */
int zebu_close(zebu_device *device, zebu_error **error);

/* Creates an image file of `size` bytes. What the file held is lost. `options` are those of
 * `zebu create -o`, or NULL: "cluster_size=2M,extended_l2=on". With "backing_file" and
 * "backing_fmt", size may be 0: that of the backing file. Commas in a value are doubled. */
int zebu_create(const char *name, const char *format, uint64_t size, const char *options,
                zebu_error **error);

/* ---- Information ---- */

#define ZEBU_INFO_WRITABLE (1u << 0)
#define ZEBU_INFO_ENCRYPTED (1u << 1)
/* Its last writer did not close it. */
#define ZEBU_INFO_DIRTY (1u << 2)

typedef struct zebu_info {
    /* Of the disk. */
    uint64_t size;
    /* That the image's files take on the host; UINT64_MAX if that is not known. */
    uint64_t allocated_size;
    /* The unit of allocation; 0: the format has none. */
    uint64_t cluster_size;
    /* ZEBU_INFO_... */
    uint32_t flags;
    /* Number of internal snapshots. */
    uint32_t snapshots;
    const char *format;
    const char *filename;
    /* As the image names it; NULL: there is none. */
    const char *backing_filename;
    /* NULL: the image does not say. */
    const char *backing_format;
} zebu_info;

/* The size of the disk. */
int64_t zebu_size(const zebu_device *device, zebu_error **error);
zebu_info *zebu_get_info(const zebu_device *device, zebu_error **error);
void zebu_info_free(zebu_info *info);
/* The same as JSON in one line, with the keys of `zebu info --output=json`; zebu_string_free. */
char *zebu_get_info_json(const zebu_device *device, zebu_error **error);
void zebu_string_free(char *string);

/* Its bytes are stored somewhere. */
#define ZEBU_EXTENT_DATA (1u << 0)
/* It reads as zeroes. */
#define ZEBU_EXTENT_ZERO (1u << 1)
/* A layer of the chain maps it. */
#define ZEBU_EXTENT_ALLOCATED (1u << 2)
#define ZEBU_EXTENT_COMPRESSED (1u << 3)

typedef struct zebu_extent {
    uint64_t offset;
    uint64_t length;
    /* Where it begins in the file of its layer; UINT64_MAX: nowhere as it is. */
    uint64_t host_offset;
    /* ZEBU_EXTENT_... */
    uint32_t flags;
    /* The layer that maps it: 0 is the image, 1 its backing file. */
    uint32_t depth;
} zebu_extent;

/* What a range of the disk is made of: fills up to `max` extents, in order and without gaps, and
 * returns their number. If they end before the range does, the next call begins there. */
ssize_t zebu_extents(const zebu_device *device, uint64_t offset, uint64_t length,
                     zebu_extent *extents, size_t max, zebu_error **error);

/* ---- Blocking I/O, from any thread ---- */

/* The whole range is read or written; 0 after success. */
int zebu_read(const zebu_device *device, void *buffer, size_t length, uint64_t offset,
              zebu_error **error);
int zebu_write(const zebu_device *device, const void *buffer, size_t length, uint64_t offset,
               zebu_error **error);
int zebu_readv(const zebu_device *device, const struct iovec *iov, int count, uint64_t offset,
               zebu_error **error);
int zebu_writev(const zebu_device *device, const struct iovec *iov, int count, uint64_t offset,
                zebu_error **error);
/* Makes what was written before durable. If it fails, earlier writes may be lost. */
int zebu_flush(const zebu_device *device, zebu_error **error);
/* The range is no longer needed: it reads as zeroes or as before. */
int zebu_discard(const zebu_device *device, uint64_t offset, uint64_t length, zebu_error **error);
/* Without ZEBU_ZEROES_UNMAP the range keeps its space. */
#define ZEBU_ZEROES_UNMAP (1u << 0)
int zebu_write_zeroes(const zebu_device *device, uint64_t offset, uint64_t length, uint32_t flags,
                      zebu_error **error);

/* ---- Changes of the whole device ---- */

/* Allows a smaller size: what is behind it is lost. */
#define ZEBU_RESIZE_SHRINK (1u << 0)
/* `size` is a multiple of 512. `preallocation`: "off" (NULL), "metadata", "falloc", "full". */
int zebu_resize(const zebu_device *device, uint64_t size, const char *preallocation,
                uint32_t flags, zebu_error **error);

typedef struct zebu_snapshot {
    const char *id;
    const char *name;
    /* Of the disk; UINT64_MAX: the snapshot does not say. */
    uint64_t disk_size;
    uint64_t vm_state_size;
    uint64_t vm_clock_nsec;
    /* When it was taken, since the epoch. */
    uint32_t date_sec;
    uint32_t date_nsec;
} zebu_snapshot;

typedef struct zebu_snapshot_list {
    size_t count;
    const zebu_snapshot *items;
} zebu_snapshot_list;

zebu_snapshot_list *zebu_snapshots(const zebu_device *device, zebu_error **error);
void zebu_snapshot_list_free(zebu_snapshot_list *list);
int zebu_snapshot_create(const zebu_device *device, const char *name, zebu_error **error);
/* `name`: id or name. The disk gets the content, and the size, of the snapshot. */
int zebu_snapshot_apply(const zebu_device *device, const char *name, zebu_error **error);
int zebu_snapshot_delete(const zebu_device *device, const char *name, zebu_error **error);

/* Writes are recorded. */
#define ZEBU_BITMAP_ENABLED (1u << 0)
/* It was not stored by its last writer, and cannot be used. */
#define ZEBU_BITMAP_INCONSISTENT (1u << 1)

typedef struct zebu_bitmap {
    const char *name;
    /* Bytes of the disk for a bit. */
    uint64_t granularity;
    /* ZEBU_BITMAP_... */
    uint32_t flags;
    uint32_t reserved;
} zebu_bitmap;

typedef struct zebu_bitmap_list {
    size_t count;
    const zebu_bitmap *items;
} zebu_bitmap_list;

typedef struct zebu_range {
    uint64_t offset;
    uint64_t length;
} zebu_range;

typedef struct zebu_range_list {
    size_t count;
    const zebu_range *items;
} zebu_range_list;

/* The dirty bitmaps that the image keeps. */
zebu_bitmap_list *zebu_bitmaps(const zebu_device *device, zebu_error **error);
void zebu_bitmap_list_free(zebu_bitmap_list *list);
/* `granularity`: a power of two from 512 on, or 0 for the default. `flags`: ZEBU_BITMAP_ENABLED or
 * 0. */
int zebu_bitmap_add(const zebu_device *device, const char *name, uint64_t granularity,
                    uint32_t flags, zebu_error **error);
int zebu_bitmap_remove(const zebu_device *device, const char *name, zebu_error **error);
int zebu_bitmap_enable(const zebu_device *device, const char *name, zebu_error **error);
int zebu_bitmap_disable(const zebu_device *device, const char *name, zebu_error **error);
int zebu_bitmap_clear(const zebu_device *device, const char *name, zebu_error **error);
/* The dirty ranges of the disk, in ascending order. */
zebu_range_list *zebu_bitmap_dirty(const zebu_device *device, const char *name, zebu_error **error);
void zebu_range_list_free(zebu_range_list *list);

/* ---- Asynchronous I/O ----
 *
 * A queue belongs to one thread. Submitted requests are started, and completions are found, by
 * zebu_queue_complete and zebu_queue_wait. In an event loop: wait until the descriptor is readable
 * (level-triggered), and call zebu_queue_complete. The descriptor is readable when something was
 * submitted, when something has ended, and when completions are left. With io_uring, a wait for it
 * may end with EINTR. A queue may serve requests of several devices, and a device may be used by
 * several queues.
 */

typedef struct zebu_queue zebu_queue;

/* This thread inflates compressed clusters, instead of threads of the library. */
#define ZEBU_QUEUE_INFLATE_INLINE (1u << 0)

typedef struct zebu_queue_options {
    size_t struct_size;
    /* ZEBU_QUEUE_... */
    uint32_t flags;
    uint32_t reserved;
    /* As in zebu_open_options. */
    const char *engine;
} zebu_queue_options;

#define ZEBU_QUEUE_OPTIONS_INIT { sizeof(zebu_queue_options), 0, 0, 0 }

typedef struct zebu_completion {
    /* That of the request. */
    void *cookie;
    /* NULL after success. Belongs to the queue: valid until the next zebu_queue_complete,
     * zebu_queue_wait or zebu_queue_free of it. */
    const zebu_error *error;
    /* 0, or a negative errno. */
    int result;
} zebu_completion;

/* `options` may be NULL. */
zebu_queue *zebu_queue_new(const zebu_queue_options *options, zebu_error **error);
/* Ends the requests in flight, whose completions are lost, and waits for what the kernel has of
 * them: their memory is not used afterwards. A write that was ended has happened or not, or for a
 * part. An error (the wrong thread, or NULL) frees nothing. */
int zebu_queue_free(zebu_queue *queue, zebu_error **error);
/* The descriptor for epoll. It belongs to the queue. */
int zebu_queue_fd(zebu_queue *queue, zebu_error **error);
/* Number of requests whose completion was not returned yet; negative after misuse. */
ssize_t zebu_queue_in_flight(zebu_queue *queue, zebu_error **error);

/* Submit a request. An error here means that there will be no completion. `iov` is used during the
 * call only, the memory it names until the completion was returned. The order of requests in flight
 * is not defined: a flush holds for what was completed before it was submitted. */
int zebu_queue_read(zebu_queue *queue, const zebu_device *device, const struct iovec *iov,
                    int count, uint64_t offset, void *cookie, zebu_error **error);
int zebu_queue_write(zebu_queue *queue, const zebu_device *device, const struct iovec *iov,
                     int count, uint64_t offset, void *cookie, zebu_error **error);
int zebu_queue_flush(zebu_queue *queue, const zebu_device *device, void *cookie,
                     zebu_error **error);
int zebu_queue_discard(zebu_queue *queue, const zebu_device *device, uint64_t offset,
                       uint64_t length, void *cookie, zebu_error **error);
int zebu_queue_write_zeroes(zebu_queue *queue, const zebu_device *device, uint64_t offset,
                            uint64_t length, uint32_t flags, void *cookie, zebu_error **error);

/* Starts what was submitted, and fills up to `max` completions. Returns their number. Never waits.
 * With max = 0, completions may be NULL. */
ssize_t zebu_queue_complete(zebu_queue *queue, zebu_completion *completions, size_t max,
                            zebu_error **error);
/* The same, but waits until there are `min` completions (at most `max`), all requests have ended,
 * or so many milliseconds have passed; -1: no limit. */
ssize_t zebu_queue_wait(zebu_queue *queue, zebu_completion *completions, size_t min, size_t max,
                        int timeout_ms, zebu_error **error);

/* ---- Jobs ----
 *
 * A job runs on threads of the library. Images that do not open fail the call that starts it.
 */

typedef struct zebu_job zebu_job;

/* Compress the target. */
#define ZEBU_CONVERT_COMPRESS (1u << 0)

typedef struct zebu_convert_options {
    size_t struct_size;
    /* ZEBU_CONVERT_... */
    uint32_t flags;
    /* Of compression: 1 to 9 for zlib, 1 to 22 for zstd; 0: the default. */
    int32_t level;
    /* How the source is opened; may be NULL. */
    const zebu_open_options *source;
    /* NULL: "raw". */
    const char *target_format;
    /* As in zebu_create, without a backing file. */
    const char *target_options;
    /* Bytes a second at most; 0: no limit. */
    uint64_t rate;
} zebu_convert_options;

#define ZEBU_CONVERT_OPTIONS_INIT { sizeof(zebu_convert_options), 0, 0, 0, 0, 0, 0 }

/* Copies the content of an image into a new image file. What the file held is lost. After an error
 * or a cancellation, a qcow2 target is marked as incomplete, so that it does not open; the content
 * of others is undefined. `options` may be NULL. */
zebu_job *zebu_convert(const char *source, const char *target, const zebu_convert_options *options,
                       zebu_error **error);

/* Looks for errors and leaks. `repair`: NULL, "leaks" or "all". `options` may be NULL. */
zebu_job *zebu_check(const char *name, const zebu_open_options *options, const char *repair,
                     zebu_error **error);

/* Compare also sizes and what is allocated. */
#define ZEBU_COMPARE_STRICT (1u << 0)
/* Compares the content of two images. A disk that is shorter is as if it ended with zeroes. Options
 * may be NULL. */
zebu_job *zebu_compare(const char *first, const zebu_open_options *first_options,
                       const char *second, const zebu_open_options *second_options,
                       uint32_t flags, zebu_error **error);

typedef struct zebu_progress {
    uint64_t done;
    /* 0 at the beginning. */
    uint64_t total;
    /* Not 0: the job has ended. */
    int ended;
} zebu_progress;

typedef struct zebu_check_result {
    uint64_t corruptions;
    uint64_t leaks;
    /* Errors that kept the check from looking at everything. */
    uint64_t check_errors;
    uint64_t corruptions_fixed;
    uint64_t leaks_fixed;
    uint64_t total_clusters;
    uint64_t allocated_clusters;
    uint64_t fragmented_clusters;
    uint64_t compressed_clusters;
    uint64_t image_end_offset;
} zebu_check_result;

typedef struct zebu_compare_result {
    /* Not 0: the images are the same. */
    int identical;
    int reserved;
    /* Where they differ. */
    uint64_t offset;
} zebu_compare_result;

int zebu_job_get_progress(const zebu_job *job, zebu_progress *progress, zebu_error **error);
/* A descriptor that is readable once the job has ended. It belongs to the job. */
int zebu_job_fd(const zebu_job *job, zebu_error **error);
/* Requests the end of the job. It goes on for a moment: see zebu_job_wait. */
int zebu_job_cancel(const zebu_job *job, zebu_error **error);
/* Waits for the end. The result is that of the job, each time: 0, or its error;
 * ZEBU_ERROR_CANCELED (-ECANCELED) after a cancellation. */
int zebu_job_wait(const zebu_job *job, zebu_error **error);
/* The result of a check or a comparison that has succeeded. Valid as long as the job. */
const zebu_check_result *zebu_job_get_check_result(const zebu_job *job, zebu_error **error);
const zebu_compare_result *zebu_job_get_compare_result(const zebu_job *job, zebu_error **error);
/* Cancels the job if it runs, waits for its end, and frees it. */
void zebu_job_free(zebu_job *job);

#ifdef __cplusplus
}
#endif

#endif
