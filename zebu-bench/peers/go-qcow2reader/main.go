// A driver for the go-qcow2reader library, so that its convert can be measured: it turns one
// image into a sparse raw file with the library's own defaults, and, as qemu-img convert by
// default, leaves writeback to the kernel.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/klauspost/compress/zstd"
	"github.com/lima-vm/go-qcow2reader"
	"github.com/lima-vm/go-qcow2reader/convert"
	"github.com/lima-vm/go-qcow2reader/image/qcow2"
)

func main() {
	workers := flag.Int("m", 0, "workers; 0: as many as the library wants")
	flag.Parse()
	if flag.NArg() != 2 {
		fmt.Fprintln(os.Stderr, "usage: convert [-m WORKERS] IMAGE RAW")
		os.Exit(2)
	}
	if err := toRaw(flag.Arg(0), flag.Arg(1), *workers); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func toRaw(from, to string, workers int) error {
	// The library inflates zlib by itself; zstd is for its user to provide.
	qcow2.SetDecompressor(qcow2.CompressionTypeZstd, func(r io.Reader) (io.ReadCloser, error) {
		d, err := zstd.NewReader(r)
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	})
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	image, err := qcow2reader.Open(in)
	if err != nil {
		return err
	}
	defer image.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	if err := out.Truncate(image.Size()); err != nil {
		return err
	}
	if err := convert.Convert(out, image, convert.Options{Workers: workers}); err != nil {
		return err
	}
	return out.Close()
}
