// Package zebu opens disk images (qcow2, raw, VMDK, VHD, VHDX, VDI and others) as block devices.
//
//	disk, err := zebu.Open("disk.qcow2", nil)
//	if err != nil {
//		log.Fatal(err)
//	}
//	defer disk.Close()
//	n, err := disk.ReadAt(buffer, 0)
//
// An [Image] is an io.ReaderAt, an io.WriterAt and an io.Closer that any number of goroutines may
// use at once. [Convert], [Check] and [Compare] work on whole images.
//
// The package needs the C library libzebu, which pkg-config finds (scripts/build-c.sh of zebu's
// repository installs it): only its static archive, or also the shared library.
package zebu

/*
#cgo pkg-config: --static zebu
#include <stdlib.h>
#include <zebu.h>
*/
import "C"

// Version returns the version of the library.
func Version() string {
	return C.GoString(C.zebu_version())
}
