package zebu

/*
#include <zebu.h>
*/
import "C"

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// Progress is called during a job, on the goroutine that called it, with how much is done. total
// is 0 at the beginning.
type Progress func(done, total uint64)

// How often progress is reported.
const interval = 50 * time.Millisecond

// begin returns the context, which may be nil, or its cause if it has ended.
func begin(ctx context.Context) (context.Context, error) {
	if ctx == nil {
		ctx = context.Background()
	}
	return ctx, context.Cause(ctx)
}

// start starts a job with these texts.
func start(s *texts, call func(failure **C.zebu_error) *C.zebu_job) (*C.zebu_job, error) {
	if s.err != nil {
		return nil, s.err
	}
	enter()
	defer leave()
	var failure *C.zebu_error
	job := call(&failure)
	return job, take(failure)
}

// run waits for the end of a job, and takes its result. It cancels the job at the end of the
// context.
func run(ctx context.Context, job *C.zebu_job, progress Progress, result func()) error {
	var waiter sync.WaitGroup
	// Also if progress panics.
	defer func() {
		C.zebu_job_cancel(job, nil)
		waiter.Wait()
		C.zebu_job_free(job)
	}()
	report := func() {
		var now C.zebu_progress
		if progress != nil && C.zebu_job_get_progress(job, &now, nil) == 0 {
			progress(uint64(now.done), uint64(now.total))
		}
	}
	ended := make(chan error, 1)
	waiter.Add(1)
	go func() {
		defer waiter.Done()
		var failure *C.zebu_error
		C.zebu_job_wait(job, &failure)
		ended <- take(failure)
	}()
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	canceled := ctx.Done()
	for {
		select {
		case err := <-ended:
			if isCanceled(err) && ctx.Err() != nil {
				return fmt.Errorf("%s: %w", err, context.Cause(ctx))
			}
			if err == nil {
				report()
				if result != nil {
					result()
				}
			}
			return err
		case <-canceled:
			C.zebu_job_cancel(job, nil)
			canceled = nil
		case <-ticker.C:
			report()
		}
	}
}

// ConvertOptions say how an image is converted. The zero value is the default.
type ConvertOptions struct {
	// How the source is opened; may be nil.
	Source *OpenOptions
	// Empty: raw.
	Format string
	// As those of [Create], without a backing file.
	Options string
	// Compress the target.
	Compress bool
	// Of compression: 1 to 9 for zlib, 1 to 22 for zstd; 0: the default.
	Level int
	// Bytes a second at most; 0: no limit.
	Rate     uint64
	Progress Progress
}

// Convert copies the content of an image into a new image file. What the file held is lost. At the
// end of the context, which may be nil, it stops, and returns an error that wraps the context's cause
// (context.Canceled, context.DeadlineExceeded, or what was given to its CancelCauseFunc). After an error a qcow2 target
// is marked as incomplete, so that it does not open; the content of others is undefined.
func Convert(ctx context.Context, source, target string, options *ConvertOptions) error {
	ctx, err := begin(ctx)
	if err != nil {
		return err
	}
	if options == nil {
		options = &ConvertOptions{}
	}
	if options.Level != int(int32(options.Level)) {
		return &Error{ErrRefused, syscall.EINVAL, fmt.Sprintf("There is no level %d", options.Level)}
	}
	var s texts
	defer s.free()
	open := options.Source.c(&s)
	// The options for C point to it.
	var pinner runtime.Pinner
	defer pinner.Unpin()
	pinner.Pin(&open)
	c := C.zebu_convert_options{
		struct_size:    C.sizeof_zebu_convert_options,
		level:          C.int32_t(options.Level),
		source:         &open,
		target_format:  s.add(options.Format),
		target_options: s.add(options.Options),
		rate:           C.uint64_t(options.Rate),
	}
	if options.Compress {
		c.flags = C.ZEBU_CONVERT_COMPRESS
	}
	from, to := s.name(source), s.name(target)
	job, err := start(&s, func(failure **C.zebu_error) *C.zebu_job {
		return C.zebu_convert(from, to, &c, failure)
	})
	if err != nil {
		return err
	}
	return run(ctx, job, options.Progress, nil)
}

// CheckResult is what a check has found.
type CheckResult struct {
	Corruptions, Leaks uint64
	// Errors that kept the check from looking at everything.
	CheckErrors                                            uint64
	CorruptionsFixed, LeaksFixed                           uint64
	TotalClusters, AllocatedClusters                       uint64
	FragmentedClusters, CompressedClusters, ImageEndOffset uint64
}

// Check looks for errors and leaks in an image. repair is empty, "leaks" or "all". ctx, options and
// progress may be nil. At the end of the context it stops, as [Convert] does.
func Check(ctx context.Context, name string, options *OpenOptions, repair string, progress Progress) (CheckResult, error) {
	ctx, err := begin(ctx)
	if err != nil {
		return CheckResult{}, err
	}
	var s texts
	defer s.free()
	open := options.c(&s)
	file, mode := s.name(name), s.add(repair)
	job, err := start(&s, func(failure **C.zebu_error) *C.zebu_job {
		return C.zebu_check(file, &open, mode, failure)
	})
	if err != nil {
		return CheckResult{}, err
	}
	var result CheckResult
	err = run(ctx, job, progress, func() {
		c := C.zebu_job_get_check_result(job, nil)
		result = CheckResult{
			Corruptions:        uint64(c.corruptions),
			Leaks:              uint64(c.leaks),
			CheckErrors:        uint64(c.check_errors),
			CorruptionsFixed:   uint64(c.corruptions_fixed),
			LeaksFixed:         uint64(c.leaks_fixed),
			TotalClusters:      uint64(c.total_clusters),
			AllocatedClusters:  uint64(c.allocated_clusters),
			FragmentedClusters: uint64(c.fragmented_clusters),
			CompressedClusters: uint64(c.compressed_clusters),
			ImageEndOffset:     uint64(c.image_end_offset),
		}
	})
	return result, err
}

// CompareOptions say how images are compared. The zero value is the default.
type CompareOptions struct {
	// How the images are opened; may be nil.
	First, Second *OpenOptions
	// Compare also sizes and what is allocated.
	Strict   bool
	Progress Progress
}

// Compare compares the content of two images. It returns whether they are the same, and where they
// differ if not. A disk that is shorter is as if it ended with zeroes. ctx and options may be nil. At
// the end of the context it stops, as [Convert] does.
func Compare(ctx context.Context, first, second string, options *CompareOptions) (identical bool, offset uint64, err error) {
	ctx, err = begin(ctx)
	if err != nil {
		return false, 0, err
	}
	if options == nil {
		options = &CompareOptions{}
	}
	var s texts
	defer s.free()
	opens := [2]C.zebu_open_options{options.First.c(&s), options.Second.c(&s)}
	var flags C.uint32_t
	if options.Strict {
		flags = C.ZEBU_COMPARE_STRICT
	}
	a, b := s.name(first), s.name(second)
	job, err := start(&s, func(failure **C.zebu_error) *C.zebu_job {
		return C.zebu_compare(a, &opens[0], b, &opens[1], flags, failure)
	})
	if err != nil {
		return false, 0, err
	}
	err = run(ctx, job, options.Progress, func() {
		c := C.zebu_job_get_compare_result(job, nil)
		identical, offset = c.identical != 0, uint64(c.offset)
	})
	return identical, offset, err
}
