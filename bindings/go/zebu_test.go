package zebu_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	zebu "github.com/zebu-qcow2/zebu/bindings/go"
	"github.com/zebu-qcow2/zebu/bindings/go/imagereader"
)

const cluster = 65536

// newImage creates a qcow2 image of 32 clusters and opens it for writing.
func newImage(t *testing.T) (string, *zebu.Image) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "disk.qcow2")
	if err := zebu.Create(name, "qcow2", 32*cluster, "lazy_refcounts=off"); err != nil {
		t.Fatal(err)
	}
	disk, err := zebu.Open(name, &zebu.OpenOptions{Write: true, Discard: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { disk.Close() })
	return name, disk
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Guards against data that goroutines disturb, and against ends of the disk that io.ReaderAt does
// not allow.
func TestReadAndWrite(t *testing.T) {
	_, disk := newImage(t)
	var all sync.WaitGroup
	for n := range 16 {
		all.Add(1)
		go func() {
			defer all.Done()
			block := bytes.Repeat([]byte{byte(n + 1)}, 5000)
			for at := int64(n) * 5000; at < 20*cluster; at += 16 * 5000 {
				if _, err := disk.WriteAt(block, at); err != nil {
					t.Error(err)
				}
				read := make([]byte, len(block))
				if _, err := disk.ReadAt(read, at); err != nil || !bytes.Equal(read, block) {
					t.Error(at, err)
				}
			}
		}()
	}
	all.Wait()
	ok(t, disk.Flush())
	content, err := io.ReadAll(io.NewSectionReader(disk, 0, 32*cluster+7))
	if err != nil || len(content) != 32*cluster || content[4999] != 1 || content[5000] != 2 {
		t.Fatal(len(content), err)
	}
	if n, err := disk.ReadAt(make([]byte, 10), 32*cluster-4); n != 4 || err != io.EOF {
		t.Fatal(n, err)
	}
	if n, err := disk.ReadAt(make([]byte, 10), 99*cluster); n != 0 || err != io.EOF {
		t.Fatal(n, err)
	}
	if _, err := disk.WriteAt(make([]byte, 10), 32*cluster-4); !errors.Is(err, zebu.ErrOutOfRange) {
		t.Fatal(err)
	}
	ok(t, disk.Close())
	if _, err := disk.ReadAt(make([]byte, 1), 0); !errors.Is(err, os.ErrClosed) {
		t.Fatal(err)
	}
}

// Guards against states of the image that the methods do not show or do not change.
func TestWholeImage(t *testing.T) {
	_, disk := newImage(t)
	_, err := disk.WriteAt(bytes.Repeat([]byte{7}, 3*cluster), 2*cluster)
	ok(t, err)
	ok(t, disk.AddBitmap("daily", 4096, true))
	ok(t, disk.CreateSnapshot("before"))
	ok(t, disk.WriteZeroes(3*cluster, cluster, true))
	ok(t, disk.Discard(4*cluster, cluster))
	ok(t, disk.Resize(40*cluster, false))
	if err := disk.Resize(cluster, false); !errors.Is(err, zebu.ErrRefused) {
		t.Fatal(err)
	}
	var data, end uint64
	for extent, err := range disk.Extents(0, 40*cluster) {
		ok(t, err)
		if extent.Offset != end {
			t.Fatal(extent)
		}
		end += extent.Length
		if extent.Data && !extent.Zero {
			data += extent.Length
		}
	}
	if data != cluster || end != 40*cluster {
		t.Fatal(data, end)
	}
	snapshots, err := disk.Snapshots()
	ok(t, err)
	if len(snapshots) != 1 || snapshots[0].Name != "before" || snapshots[0].DiskSize != 32*cluster ||
		time.Since(snapshots[0].Time) > time.Hour {
		t.Fatal(snapshots)
	}
	ranges, err := disk.DirtyRanges("daily")
	ok(t, err)
	if want := (zebu.Range{Offset: 3 * cluster, Length: 2 * cluster}); len(ranges) == 0 || ranges[0] != want {
		t.Fatal(ranges)
	}
	ok(t, disk.ClearBitmap("daily"))
	ok(t, disk.EnableBitmap("daily", false))
	bitmaps, err := disk.Bitmaps()
	ok(t, err)
	if len(bitmaps) != 1 || bitmaps[0].Enabled || bitmaps[0].Granularity != 4096 {
		t.Fatal(bitmaps)
	}
	ok(t, disk.RemoveBitmap("daily"))
	ok(t, disk.ApplySnapshot("before"))
	ok(t, disk.DeleteSnapshot("before"))
	info, err := disk.Info()
	ok(t, err)
	if info.Size != 32*cluster || info.Format != "qcow2" || !info.Writable || info.Snapshots != 0 ||
		info.ClusterSize != cluster || info.AllocatedSize < 3*cluster {
		t.Fatalf("%+v", info)
	}
}

// Guards against errors that errors.Is does not find.
func TestErrors(t *testing.T) {
	_, err := zebu.Open(filepath.Join(t.TempDir(), "none"), nil)
	var failure *zebu.Error
	if !errors.Is(err, os.ErrNotExist) || !errors.As(err, &failure) || failure.Kind != zebu.ErrNotFound {
		t.Fatal(err)
	}
	name, disk := newImage(t)
	if _, err := zebu.Open(name, nil); !errors.Is(err, zebu.ErrLocked) {
		t.Fatal(err)
	}
	ok(t, disk.Close())
	reader, err := zebu.Open(name, nil)
	ok(t, err)
	defer reader.Close()
	if _, err := reader.WriteAt([]byte{1}, 0); !errors.Is(err, os.ErrPermission) {
		t.Fatal(err)
	}
	strict := &zebu.OpenOptions{Untrusted: true, Limits: "virtual-size=1M"}
	if _, err := zebu.Open(name, strict); !errors.Is(err, zebu.ErrLimit) {
		t.Fatal(err)
	}
	if _, err := zebu.Open(name, &zebu.OpenOptions{Cache: "fast"}); !errors.Is(err, zebu.ErrMisuse) {
		t.Fatal(err)
	}
}

// Guards against jobs that do not end with their context, or lose their result.
func TestJobs(t *testing.T) {
	name, disk := newImage(t)
	_, err := disk.WriteAt(bytes.Repeat([]byte{7, 8, 9, 1}, 6*cluster), 0)
	ok(t, err)
	ok(t, disk.Close())
	target := filepath.Join(t.TempDir(), "target.qcow2")
	ctx := context.Background()
	var done, total uint64
	ok(t, zebu.Convert(ctx, name, target, &zebu.ConvertOptions{
		Source:   &zebu.OpenOptions{Format: "qcow2"},
		Format:   "qcow2",
		Options:  "compression_type=zstd",
		Compress: true,
		Progress: func(d, t uint64) { done, total = d, t },
	}))
	if done != 32*cluster || total != done {
		t.Fatal(done, total)
	}
	if same, at, err := zebu.Compare(ctx, name, target, nil); !same || err != nil {
		t.Fatal(same, at, err)
	}
	result, err := zebu.Check(ctx, target, nil, "", nil)
	if err != nil || result.Corruptions != 0 || result.CompressedClusters != 24 {
		t.Fatalf("%+v, %v", result, err)
	}

	// Of more than can be in work at once, and slow.
	large := filepath.Join(t.TempDir(), "large")
	ok(t, os.WriteFile(large, bytes.Repeat([]byte{1, 2}, 16<<20), 0o600))
	slow := &zebu.ConvertOptions{Source: &zebu.OpenOptions{Format: "raw"}, Format: "qcow2", Rate: 16 << 20}
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if err := zebu.Convert(short, large, target, slow); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	if _, err := zebu.Open(target, nil); err == nil {
		t.Fatal("an incomplete image has opened")
	}
	defer func() {
		if why := recover(); why != "mine" {
			t.Fatal(why)
		}
	}()
	slow.Progress = func(done, total uint64) { panic("mine") }
	t.Fatal(zebu.Convert(ctx, large, target, slow))
}

// Guards against extents that go-qcow2reader's users do not expect.
func TestImageReader(t *testing.T) {
	name, disk := newImage(t)
	_, err := disk.WriteAt(make([]byte, cluster), 0)
	ok(t, err)
	_, err = disk.WriteAt([]byte{1}, 4*cluster)
	ok(t, err)
	ok(t, disk.Close())
	image, err := imagereader.Open(name, &zebu.OpenOptions{Untrusted: true})
	ok(t, err)
	defer image.Close()
	if image.Type() != "qcow2" || image.Size() != 32*cluster || image.Readable() != nil {
		t.Fatal(image.Type(), image.Size(), image.Readable())
	}
	for _, want := range []imagereader.Extent{
		{Start: cluster, Length: 3 * cluster, Zero: true},
		{Start: 4 * cluster, Length: cluster, Allocated: true},
		{Start: 5 * cluster, Length: 27 * cluster, Zero: true},
	} {
		extent, err := image.Extent(want.Start, 32*cluster-want.Start)
		if err != nil || extent != want {
			t.Fatal(extent, want, err)
		}
	}
	if _, err := image.Extent(0, 33*cluster); err == nil {
		t.Fatal("an extent outside of the disk")
	}
}

// Guards against texts that C cuts, numbers that C wraps, and contexts that are nil.
func TestArguments(t *testing.T) {
	name, disk := newImage(t)
	nul := "a\x00b"
	target := filepath.Join(t.TempDir(), "target")
	for _, err := range []error{
		disk.CreateSnapshot(nul),
		disk.AddBitmap(nul, 0, true),
		zebu.Create(name+"\x00", "qcow2", cluster, ""),
		zebu.Create(target, "raw\x00", cluster, ""),
		zebu.Create(target, "qcow2", cluster, "data_file="+nul),
		zebu.Convert(nil, name, target+"\x00", nil),
		zebu.Convert(nil, name, target, &zebu.ConvertOptions{Format: "qcow2", Compress: true, Level: 1<<32 + 3}),
	} {
		if !errors.Is(err, zebu.ErrRefused) {
			t.Error(err)
		}
	}
	if _, err := os.Stat(target); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if _, err := zebu.Open(name, &zebu.OpenOptions{Snapshot: nul}); !errors.Is(err, zebu.ErrRefused) {
		t.Error(err)
	}
	ok(t, disk.Close())
	if _, err := zebu.Check(nil, name, nil, "", nil); err != nil {
		t.Error(err)
	}
}

// Guards against a ring for each of many goroutines.
func TestThreads(t *testing.T) {
	_, disk := newImage(t)
	var all sync.WaitGroup
	for range 500 {
		all.Add(1)
		go func() {
			defer all.Done()
			for at := range int64(20) {
				if _, err := disk.WriteAt(make([]byte, 512), at*cluster); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	all.Wait()
	open, err := os.ReadDir("/proc/self/fd")
	ok(t, err)
	// Two for each call at once, and what others have.
	if most := 2*max(16, 4*runtime.GOMAXPROCS(0)) + 20; len(open) > most {
		t.Error(len(open), "descriptors of at most", most)
	}
}
