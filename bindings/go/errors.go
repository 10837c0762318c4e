package zebu

/*
#include <zebu.h>
*/
import "C"

import (
	"os"
	"syscall"
)

// Kind is the kind of an [Error]. It is an error itself, for errors.Is.
type Kind int

// The kinds of errors.
const (
	ErrNotFound     Kind = C.ZEBU_ERROR_NOT_FOUND     // A file does not exist; also os.ErrNotExist.
	ErrNotPermitted Kind = C.ZEBU_ERROR_NOT_PERMITTED // A write to an image that was opened for reading, or what permissions forbid; also os.ErrPermission.
	ErrLocked       Kind = C.ZEBU_ERROR_LOCKED        // Another program, or another Image of this one, uses the image.
	ErrCorrupt      Kind = C.ZEBU_ERROR_CORRUPT       // The image is damaged.
	ErrDirty        Kind = C.ZEBU_ERROR_DIRTY         // The image was not closed by its last writer.
	ErrOutOfRange   Kind = C.ZEBU_ERROR_OUT_OF_RANGE  // The request is not inside the disk.
	ErrNoSpace      Kind = C.ZEBU_ERROR_NO_SPACE      // No space is left, or the file may not become that long.
	ErrUnsupported  Kind = C.ZEBU_ERROR_UNSUPPORTED   // The image needs, or the request is, something that is not supported.
	ErrRefused      Kind = C.ZEBU_ERROR_REFUSED       // The request makes no sense for this image, or the policy of opening forbids it.
	ErrLimit        Kind = C.ZEBU_ERROR_LIMIT         // An untrusted image goes beyond a limit.
	ErrIO           Kind = C.ZEBU_ERROR_IO            // The storage failed in another way.
	ErrMisuse       Kind = C.ZEBU_ERROR_MISUSE        // An option that does not exist, or a defect of this package.
	ErrPanic        Kind = C.ZEBU_ERROR_PANIC         // A defect of the library.

	errCanceled Kind = C.ZEBU_ERROR_CANCELED
)

var kinds = map[Kind]string{
	ErrNotFound:     "not found",
	ErrNotPermitted: "not permitted",
	ErrLocked:       "in use",
	ErrCorrupt:      "damaged",
	ErrDirty:        "not closed by its last writer",
	ErrOutOfRange:   "out of range",
	ErrNoSpace:      "no space left",
	ErrUnsupported:  "not supported",
	ErrRefused:      "refused",
	ErrLimit:        "beyond a limit",
	ErrIO:           "I/O error",
	ErrMisuse:       "misuse",
	ErrPanic:        "a defect of the library",
	errCanceled:     "canceled",
}

func (k Kind) Error() string {
	return "zebu: " + kinds[k]
}

// Error is an error of the library.
type Error struct {
	Kind Kind
	// The nearest errno.
	Errno syscall.Errno
	// One line or more.
	Message string
}

func (e *Error) Error() string {
	return e.Message
}

// Is reports whether target is the error's kind, or what Go's standard library calls it.
func (e *Error) Is(target error) bool {
	switch target {
	case os.ErrNotExist:
		return e.Kind == ErrNotFound
	case os.ErrPermission:
		return e.Kind == ErrNotPermitted
	}
	return target == e.Kind
}

// Unwrap returns the errno.
func (e *Error) Unwrap() error {
	return e.Errno
}

// take converts the error of a call, and frees it. It returns nil for NULL.
func take(failure *C.zebu_error) error {
	if failure == nil {
		return nil
	}
	defer C.zebu_error_free(failure)
	return &Error{
		Kind:    Kind(C.zebu_error_get_kind(failure)),
		Errno:   syscall.Errno(C.zebu_error_get_errno(failure)),
		Message: C.GoString(C.zebu_error_get_message(failure)),
	}
}
