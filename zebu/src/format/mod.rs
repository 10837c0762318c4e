//! What is on the disk, as pure values: bytes in, values out, no I/O.
