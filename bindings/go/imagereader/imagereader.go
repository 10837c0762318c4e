// Package imagereader opens images in the shape of github.com/lima-vm/go-qcow2reader: [Image] has
// the methods of its interface image.Image, so that a program can use either.
//
// A program that already uses go-qcow2reader replaces the types [Type] and [Extent] by those of its
// package image; they have the same fields.
package imagereader

import (
	"fmt"
	"io"

	zebu "github.com/zebu-qcow2/zebu/bindings/go"
)

// Type is the name of a format, as qcow2 images store it for their backing file.
type Type string

// Extent is a range of the disk that is stored alike.
type Extent struct {
	Start      int64 `json:"start"`
	Length     int64 `json:"length"`
	Allocated  bool  `json:"allocated"`
	Zero       bool  `json:"zero"`
	Compressed bool  `json:"compressed"`
}

// Image is the interface.
type Image interface {
	io.ReaderAt
	io.Closer
	Extent(start, length int64) (Extent, error)
	Type() Type
	Size() int64 // -1 if unknown
	Readable() error
}

type reader struct {
	*zebu.Image
	info zebu.Info
}

// Open opens an image for reading. One of untrusted origin should be opened with
// zebu.OpenOptions{Untrusted: true}.
func Open(name string, options *zebu.OpenOptions) (Image, error) {
	image, err := zebu.Open(name, options)
	if err != nil {
		return nil, err
	}
	info, err := image.Info()
	if err != nil {
		image.Close()
		return nil, err
	}
	return &reader{image, info}, nil
}

// Extent returns the extent at start, up to length bytes of it.
func (r *reader) Extent(start, length int64) (Extent, error) {
	if start < 0 || length <= 0 {
		return Extent{}, fmt.Errorf("extent of %d bytes at %d: %w", length, start, zebu.ErrOutOfRange)
	}
	for e, err := range r.Extents(uint64(start), uint64(length)) {
		return Extent{
			Start:      start,
			Length:     int64(e.Length),
			Allocated:  e.Allocated,
			Zero:       e.Zero,
			Compressed: e.Compressed,
		}, err
	}
	return Extent{}, io.EOF
}

// Type returns the format.
func (r *reader) Type() Type {
	return Type(r.info.Format)
}

// Size returns the size of the disk in bytes.
func (r *reader) Size() int64 {
	return int64(r.info.Size)
}

// Readable returns why the content cannot be read.
func (r *reader) Readable() error {
	if r.info.Encrypted {
		return fmt.Errorf("the image is encrypted: %w", zebu.ErrUnsupported)
	}
	return nil
}
