package zebu

/*
#include <stdlib.h>
#include <zebu.h>
*/
import "C"

import (
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// OpenOptions say how an image is opened. The zero value is the default.
type OpenOptions struct {
	// Open for writing too.
	Write bool
	// The name is a list of QEMU's image options: driver=qcow2,file.filename=PATH.
	ImageOptions bool
	// The image is of untrusted origin: it opens no other file, and memory and work are limited.
	Untrusted bool
	// Limits of an untrusted image: virtual-size=1T,work=64G.
	Limits string
	// Leave the backing file closed: its data read as zeroes.
	NoBacking bool
	// Open although another program may write to the image.
	ForceShare bool
	// Carry out discards.
	Discard bool
	// qcow2, raw, ...; empty: by the content, which a guest that writes to a raw image could abuse.
	Format string
	// QEMU's cache modes: writeback (the default), none, writethrough, directsync, unsafe.
	Cache string
	// io_uring, native or threads; empty: what the system has.
	Engine string
	// Open this internal snapshot (id or name), read-only.
	Snapshot string
	// Bytes of cached L2 tables of a qcow2 image; 0: enough for the disk, up to 32 MiB.
	L2CacheSize uint64
}

// texts are C strings that live during a call.
type texts struct {
	c []*C.char
	// Of a text that C would cut.
	err error
}

// add returns a C string, or NULL for an empty one.
func (s *texts) add(text string) *C.char {
	if text == "" {
		return nil
	}
	return s.name(text)
}

// name returns a C string that may be empty.
func (s *texts) name(text string) *C.char {
	if strings.IndexByte(text, 0) >= 0 {
		s.err = &Error{ErrRefused, syscall.EINVAL, fmt.Sprintf("%q has a NUL byte", text)}
	}
	c := C.CString(text)
	s.c = append(s.c, c)
	return c
}

func (s *texts) free() {
	for _, c := range s.c {
		C.free(unsafe.Pointer(c))
	}
}

// The calls of the library that are made at once. Each OS thread that makes one keeps a ring, and Go
// keeps a thread for each call that has waited at the same time.
var calls = make(chan struct{}, max(16, 4*runtime.GOMAXPROCS(0)))

// enter waits until a call may be made; leave ends it.
func enter() { calls <- struct{}{} }
func leave() { <-calls }

func (o *OpenOptions) c(s *texts) C.zebu_open_options {
	var c C.zebu_open_options
	c.struct_size = C.sizeof_zebu_open_options
	if o == nil {
		return c
	}
	for _, flag := range []struct {
		is  bool
		bit C.uint32_t
	}{
		{o.Write, C.ZEBU_OPEN_WRITE},
		{o.ImageOptions, C.ZEBU_OPEN_IMAGE_OPTIONS},
		{o.Untrusted, C.ZEBU_OPEN_UNTRUSTED},
		{o.NoBacking, C.ZEBU_OPEN_NO_BACKING},
		{o.ForceShare, C.ZEBU_OPEN_FORCE_SHARE},
		{o.Discard, C.ZEBU_OPEN_DISCARD},
	} {
		if flag.is {
			c.flags |= flag.bit
		}
	}
	c.format = s.add(o.Format)
	c.cache = s.add(o.Cache)
	c.engine = s.add(o.Engine)
	c.snapshot = s.add(o.Snapshot)
	c.limits = s.add(o.Limits)
	c.l2_cache_size = C.uint64_t(o.L2CacheSize)
	return c
}

// Image is an open image. Any number of goroutines may use it at once.
type Image struct {
	// Held for reading during calls: Close waits for them.
	mutex  sync.RWMutex
	device *C.zebu_device
}

var (
	_ io.ReaderAt = (*Image)(nil)
	_ io.WriterAt = (*Image)(nil)
	_ io.Closer   = (*Image)(nil)
)

// Open opens an image: name is a path, or a name in QEMU's spelling (nbd://..., json:{...}). A qcow2
// image that its last writer left dirty is repaired before it is opened for writing. options may be
// nil.
func Open(name string, options *OpenOptions) (*Image, error) {
	var s texts
	defer s.free()
	c := options.c(&s)
	file := s.name(name)
	if s.err != nil {
		return nil, s.err
	}
	enter()
	defer leave()
	var failure *C.zebu_error
	device := C.zebu_open(file, &c, &failure)
	if device == nil {
		return nil, take(failure)
	}
	return &Image{device: device}, nil
}

// Create creates an image file of size bytes. What the file held is lost. options are those of
// zebu create -o: cluster_size=2M,extended_l2=on. With backing_file and backing_fmt, size may be 0:
// that of the backing file. Commas in a value are doubled.
func Create(name, format string, size uint64, options string) error {
	var s texts
	defer s.free()
	file, kind, list := s.name(name), s.name(format), s.add(options)
	if s.err != nil {
		return s.err
	}
	enter()
	defer leave()
	var failure *C.zebu_error
	C.zebu_create(file, kind, C.uint64_t(size), list, &failure)
	return take(failure)
}

// Close makes everything durable and closes the image, also after an error. It waits for calls that
// are being made.
func (i *Image) Close() error {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if i.device == nil {
		return os.ErrClosed
	}
	enter()
	defer leave()
	var failure *C.zebu_error
	C.zebu_close(i.device, &failure)
	i.device = nil
	return take(failure)
}

// use makes a call of the library.
func (i *Image) use(call func(device *C.zebu_device, failure **C.zebu_error)) error {
	i.mutex.RLock()
	defer i.mutex.RUnlock()
	if i.device == nil {
		return os.ErrClosed
	}
	enter()
	defer leave()
	var failure *C.zebu_error
	call(i.device, &failure)
	return take(failure)
}

// named makes a call of the library with a name.
func (i *Image) named(name string, call func(*C.zebu_device, *C.char, **C.zebu_error)) error {
	var s texts
	defer s.free()
	c := s.name(name)
	if s.err != nil {
		return s.err
	}
	return i.use(func(device *C.zebu_device, failure **C.zebu_error) { call(device, c, failure) })
}

// Size returns the size of the disk in bytes.
func (i *Image) Size() (int64, error) {
	var size C.int64_t
	err := i.use(func(device *C.zebu_device, failure **C.zebu_error) {
		size = C.zebu_size(device, failure)
	})
	return int64(size), err
}

// inside returns how many of length bytes at offset are inside the disk.
func (i *Image) inside(length int, offset int64) (int, error) {
	if offset < 0 {
		return 0, fmt.Errorf("zebu: offset %d: %w", offset, ErrOutOfRange)
	}
	size, err := i.Size()
	if err != nil {
		return 0, err
	}
	return int(max(min(int64(length), size-offset), 0)), nil
}

// ReadAt reads from the disk. At its end it returns io.EOF, as io.ReaderAt describes it.
func (i *Image) ReadAt(p []byte, offset int64) (int, error) {
	n, err := i.inside(len(p), offset)
	if err != nil {
		return 0, err
	}
	if n > 0 {
		err = i.use(func(device *C.zebu_device, failure **C.zebu_error) {
			C.zebu_read(device, unsafe.Pointer(&p[0]), C.size_t(n), C.uint64_t(offset), failure)
		})
	}
	switch {
	case err != nil:
		return 0, err
	case n < len(p):
		return n, io.EOF
	}
	return n, nil
}

// WriteAt writes to the disk. A write that is not inside the disk writes nothing.
func (i *Image) WriteAt(p []byte, offset int64) (int, error) {
	if offset < 0 {
		return 0, fmt.Errorf("zebu: offset %d: %w", offset, ErrOutOfRange)
	}
	if len(p) == 0 {
		return 0, nil
	}
	err := i.use(func(device *C.zebu_device, failure **C.zebu_error) {
		C.zebu_write(device, unsafe.Pointer(&p[0]), C.size_t(len(p)), C.uint64_t(offset), failure)
	})
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// Flush makes what was written before durable.
func (i *Image) Flush() error {
	return i.use(func(device *C.zebu_device, failure **C.zebu_error) {
		C.zebu_flush(device, failure)
	})
}

// Discard says that a range is no longer needed: it reads as zeroes or as before.
func (i *Image) Discard(offset, length uint64) error {
	return i.use(func(device *C.zebu_device, failure **C.zebu_error) {
		C.zebu_discard(device, C.uint64_t(offset), C.uint64_t(length), failure)
	})
}

// WriteZeroes makes a range zero. With unmap it gives up its space.
func (i *Image) WriteZeroes(offset, length uint64, unmap bool) error {
	var flags C.uint32_t
	if unmap {
		flags = C.ZEBU_ZEROES_UNMAP
	}
	return i.use(func(device *C.zebu_device, failure **C.zebu_error) {
		C.zebu_write_zeroes(device, C.uint64_t(offset), C.uint64_t(length), flags, failure)
	})
}

// Resize gives the disk another size, a multiple of 512. A smaller one needs shrink: what is behind
// it is lost.
func (i *Image) Resize(size uint64, shrink bool) error {
	var flags C.uint32_t
	if shrink {
		flags = C.ZEBU_RESIZE_SHRINK
	}
	return i.use(func(device *C.zebu_device, failure **C.zebu_error) {
		C.zebu_resize(device, C.uint64_t(size), nil, flags, failure)
	})
}

// Extent is a range of the disk that is stored alike.
type Extent struct {
	Offset, Length uint64
	// Its bytes are stored somewhere.
	Data bool
	// It reads as zeroes.
	Zero bool
	// A layer of the chain maps it.
	Allocated  bool
	Compressed bool
	// The layer that maps it: 0 is the image, 1 its backing file.
	Depth int
	// Where it begins in the file of its layer; -1: nowhere as it is.
	HostOffset int64
}

// Extents iterates over what a range of the disk is made of, in order and without gaps. An error
// ends it.
func (i *Image) Extents(offset, length uint64) iter.Seq2[Extent, error] {
	return func(yield func(Extent, error) bool) {
		var found [64]C.zebu_extent
		for length > 0 {
			var count C.ssize_t
			err := i.use(func(device *C.zebu_device, failure **C.zebu_error) {
				count = C.zebu_extents(device, C.uint64_t(offset), C.uint64_t(length),
					&found[0], C.size_t(len(found)), failure)
			})
			if err != nil {
				yield(Extent{}, err)
				return
			}
			// The image ends before the range.
			if count == 0 {
				return
			}
			for _, c := range found[:count] {
				extent := newExtent(&c)
				offset += extent.Length
				length -= extent.Length
				if !yield(extent, nil) {
					return
				}
			}
		}
	}
}

func newExtent(c *C.zebu_extent) Extent {
	return Extent{
		Offset:     uint64(c.offset),
		Length:     uint64(c.length),
		Data:       c.flags&C.ZEBU_EXTENT_DATA != 0,
		Zero:       c.flags&C.ZEBU_EXTENT_ZERO != 0,
		Allocated:  c.flags&C.ZEBU_EXTENT_ALLOCATED != 0,
		Compressed: c.flags&C.ZEBU_EXTENT_COMPRESSED != 0,
		Depth:      int(c.depth),
		HostOffset: int64(c.host_offset),
	}
}

// Info describes an image.
type Info struct {
	// Size of the disk in bytes.
	Size uint64
	// Bytes that the image's files take on the host; -1 if that is not known.
	AllocatedSize int64
	// The unit of allocation in bytes; 0: the format has none.
	ClusterSize uint64
	Format      string
	Filename    string
	// As the image names it; empty: there is none.
	BackingFilename, BackingFormat string
	Writable, Encrypted            bool
	// Its last writer did not close it.
	Dirty bool
	// Number of internal snapshots.
	Snapshots int
}

// Info returns what the image is.
func (i *Image) Info() (Info, error) {
	var info Info
	err := i.use(func(device *C.zebu_device, failure **C.zebu_error) {
		c := C.zebu_get_info(device, failure)
		if c == nil {
			return
		}
		defer C.zebu_info_free(c)
		info = Info{
			Size:            uint64(c.size),
			AllocatedSize:   int64(c.allocated_size),
			ClusterSize:     uint64(c.cluster_size),
			Format:          C.GoString(c.format),
			Filename:        C.GoString(c.filename),
			BackingFilename: C.GoString(c.backing_filename),
			BackingFormat:   C.GoString(c.backing_format),
			Writable:        c.flags&C.ZEBU_INFO_WRITABLE != 0,
			Encrypted:       c.flags&C.ZEBU_INFO_ENCRYPTED != 0,
			Dirty:           c.flags&C.ZEBU_INFO_DIRTY != 0,
			Snapshots:       int(c.snapshots),
		}
	})
	return info, err
}

// Snapshot is an internal snapshot.
type Snapshot struct {
	ID, Name string
	Time     time.Time
	// Size of the disk in bytes; -1: the snapshot does not say.
	DiskSize int64
	// Bytes of the state of the virtual machine.
	VMStateSize uint64
	// How long the guest had run.
	VMClock time.Duration
}

// Snapshots returns the internal snapshots.
func (i *Image) Snapshots() ([]Snapshot, error) {
	var snapshots []Snapshot
	err := i.use(func(device *C.zebu_device, failure **C.zebu_error) {
		list := C.zebu_snapshots(device, failure)
		if list == nil {
			return
		}
		defer C.zebu_snapshot_list_free(list)
		for _, c := range unsafe.Slice(list.items, list.count) {
			snapshots = append(snapshots, Snapshot{
				ID:          C.GoString(c.id),
				Name:        C.GoString(c.name),
				Time:        time.Unix(int64(c.date_sec), int64(c.date_nsec)),
				DiskSize:    int64(c.disk_size),
				VMStateSize: uint64(c.vm_state_size),
				VMClock:     time.Duration(c.vm_clock_nsec),
			})
		}
	})
	return snapshots, err
}

// CreateSnapshot creates an internal snapshot.
func (i *Image) CreateSnapshot(name string) error {
	return i.named(name, func(device *C.zebu_device, name *C.char, failure **C.zebu_error) {
		C.zebu_snapshot_create(device, name, failure)
	})
}

// ApplySnapshot gives the disk the content, and the size, of a snapshot (id or name).
func (i *Image) ApplySnapshot(name string) error {
	return i.named(name, func(device *C.zebu_device, name *C.char, failure **C.zebu_error) {
		C.zebu_snapshot_apply(device, name, failure)
	})
}

// DeleteSnapshot deletes a snapshot (id or name).
func (i *Image) DeleteSnapshot(name string) error {
	return i.named(name, func(device *C.zebu_device, name *C.char, failure **C.zebu_error) {
		C.zebu_snapshot_delete(device, name, failure)
	})
}

// Bitmap is a dirty bitmap that an image keeps.
type Bitmap struct {
	Name string
	// Bytes of the disk for a bit.
	Granularity uint64
	// Writes are recorded.
	Enabled bool
	// It was not stored by its last writer, and cannot be used.
	Inconsistent bool
}

// Range is a range of the disk.
type Range struct {
	Offset, Length uint64
}

// Bitmaps returns the dirty bitmaps.
func (i *Image) Bitmaps() ([]Bitmap, error) {
	var bitmaps []Bitmap
	err := i.use(func(device *C.zebu_device, failure **C.zebu_error) {
		list := C.zebu_bitmaps(device, failure)
		if list == nil {
			return
		}
		defer C.zebu_bitmap_list_free(list)
		for _, c := range unsafe.Slice(list.items, list.count) {
			bitmaps = append(bitmaps, Bitmap{
				Name:         C.GoString(c.name),
				Granularity:  uint64(c.granularity),
				Enabled:      c.flags&C.ZEBU_BITMAP_ENABLED != 0,
				Inconsistent: c.flags&C.ZEBU_BITMAP_INCONSISTENT != 0,
			})
		}
	})
	return bitmaps, err
}

// AddBitmap adds a dirty bitmap. granularity is a power of two from 512 on, or 0 for the default.
func (i *Image) AddBitmap(name string, granularity uint64, enabled bool) error {
	var flags C.uint32_t
	if enabled {
		flags = C.ZEBU_BITMAP_ENABLED
	}
	return i.named(name, func(device *C.zebu_device, name *C.char, failure **C.zebu_error) {
		C.zebu_bitmap_add(device, name, C.uint64_t(granularity), flags, failure)
	})
}

// RemoveBitmap removes a dirty bitmap.
func (i *Image) RemoveBitmap(name string) error {
	return i.named(name, func(device *C.zebu_device, name *C.char, failure **C.zebu_error) {
		C.zebu_bitmap_remove(device, name, failure)
	})
}

// EnableBitmap begins, or stops, to record writes.
func (i *Image) EnableBitmap(name string, enabled bool) error {
	return i.named(name, func(device *C.zebu_device, name *C.char, failure **C.zebu_error) {
		if enabled {
			C.zebu_bitmap_enable(device, name, failure)
		} else {
			C.zebu_bitmap_disable(device, name, failure)
		}
	})
}

// ClearBitmap makes everything clean.
func (i *Image) ClearBitmap(name string) error {
	return i.named(name, func(device *C.zebu_device, name *C.char, failure **C.zebu_error) {
		C.zebu_bitmap_clear(device, name, failure)
	})
}

// DirtyRanges returns the dirty ranges of a bitmap, in ascending order.
func (i *Image) DirtyRanges(name string) ([]Range, error) {
	var ranges []Range
	err := i.named(name, func(device *C.zebu_device, name *C.char, failure **C.zebu_error) {
		list := C.zebu_bitmap_dirty(device, name, failure)
		if list == nil {
			return
		}
		defer C.zebu_range_list_free(list)
		for _, c := range unsafe.Slice(list.items, list.count) {
			ranges = append(ranges, Range{uint64(c.offset), uint64(c.length)})
		}
	})
	return ranges, err
}

// isCanceled reports whether an error is that of a job that was cancelled.
func isCanceled(err error) bool {
	return errors.Is(err, errCanceled)
}
