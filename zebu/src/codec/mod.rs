//! Compressed clusters: zlib and zstd, one cluster at a time.
