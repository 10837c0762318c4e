//! Guards against a header that QEMU accepts and zebu refuses, or the opposite, and against a header
//! that loses something when it is rewritten: an unknown extension, a field of a later version, the
//! backing file.

use std::path::Path;
use std::process::Command;

use proptest::prelude::*;
use zebu::internal::structures::{
    AUTOCLEAR_BITMAPS, AUTOCLEAR_DATA_FILE_RAW, BitmapsExtension, CryptMethod, CryptoExtension,
    EXTENSION_BITMAPS, EXTENSION_FEATURE_NAMES, Extension, FeatureKind, FeatureNames, Geometry,
    Header, INCOMPATIBLE_DATA_FILE, L1Entry, check_table,
};
use zebu::qcow2::{BitmapEntry, Compression, FormatError, Snapshot};

/// A valid header: a disk of 1 GiB, as qemu-img lays it out.
fn plain() -> Header {
    let mut header = Header::new(16, 1 << 30);
    header.refcount_table_offset = 0x1_0000;
    header.refcount_table_clusters = 1;
    header.l1_offset = 0x3_0000;
    header.l1_size = 2;
    header
}

fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

/// The message of decoding a changed header.
fn message(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut bytes = plain().encode().unwrap();
    change(&mut bytes);
    Header::decode(&bytes).unwrap_err().to_string()
}

/// The same for one number of four bytes.
fn with32(at: usize, value: u32) -> String {
    message(|b| put32(b, at, value))
}

/// The same for one number of eight bytes.
fn with64(at: usize, value: u64) -> String {
    message(|b| put64(b, at, value))
}

#[test]
fn messages_are_those_of_qemu() {
    assert_eq!(with32(0, 1), "Image is not in qcow2 format");
    assert_eq!(message(|b| b.truncate(3)), "Image is not in qcow2 format");
    assert_eq!(with32(4, 4), "Unsupported qcow2 version 4");
    assert_eq!(with32(4, 1), "Unsupported qcow2 version 1");
    assert_eq!(with32(20, 8), "Unsupported cluster size: 2^8");
    assert_eq!(with32(20, 22), "Unsupported cluster size: 2^22");
    assert_eq!(with32(100, 96), "qcow2 header too short");
    assert_eq!(with32(100, 65544), "qcow2 header exceeds cluster size");
    assert_eq!(with64(8, 65537), "Invalid backing file offset");
    assert_eq!(
        message(|b| b[104] = 2),
        "qcow2: unknown compression type: 2"
    );
    assert_eq!(
        message(|b| b[104] = 1),
        "qcow2: Compression type incompatible feature bit must be set"
    );
    assert_eq!(
        with64(72, 8),
        "qcow2: Compression type incompatible feature bit must not be set"
    );
    assert_eq!(
        with32(96, 7),
        "Reference count entry width too large; may not exceed 64 bits"
    );
    assert_eq!(
        with32(56, 0),
        "Image does not contain a reference count table"
    );
    assert_eq!(with32(56, 129), "Reference count table too large");
    assert_eq!(with64(48, 0x1_0001), "Reference count table offset invalid");
    assert_eq!(with32(60, 65537), "Snapshot table too large");
    assert_eq!(with64(64, 1), "Snapshot table offset invalid");
    assert_eq!(with32(36, (4 << 20) + 1), "Active L1 table too large");
    assert_eq!(
        message(|b| {
            put32(b, 36, 4 << 20);
            put64(b, 40, i64::MAX as u64 & !0xffff);
        }),
        "Active L1 table offset invalid"
    );
    assert_eq!(with32(36, 1), "L1 table is too small");
    assert_eq!(with64(24, u64::MAX), "Image is too big");
    assert_eq!(
        with64(88, AUTOCLEAR_DATA_FILE_RAW),
        "data-file-raw requires a data file"
    );
    assert_eq!(with32(116, 0xffff), "Header extension too large");
    let backing = |offset, length| {
        message(|b| {
            put64(b, 8, offset);
            put32(b, 16, length);
        })
    };
    assert_eq!(backing(60000, 1024), "Backing file name too long");
    assert_eq!(backing(65530, 7), "Backing file name too long");
    let mut small = plain();
    small.cluster_bits = 13;
    small.set_extended_l2(true);
    assert_eq!(
        small.encode().unwrap_err().to_string(),
        "Unsupported subcluster size: 256"
    );
}

#[test]
fn unknown_features_have_names() {
    assert_eq!(
        with64(72, 0x8000_0000_0000_0020),
        "Unsupported qcow2 feature(s): Unknown incompatible feature: 8000000000000020"
    );
    // The names of bits 1 and 2 are given to bits 5 and 63.
    let named = message(|b| {
        b[120 + 48 + 1] = 5;
        b[120 + 96 + 1] = 63;
        b[120 + 96 + 3] = 7;
        put64(b, 72, 0x8000_0000_0000_0060);
    });
    assert_eq!(
        named,
        "Unsupported qcow2 feature(s): corrupt bit, e\\u{7}ternal data file, \
         Unknown incompatible feature: 40"
    );
    // A bit number above 63 must not overflow a shift.
    message(|b| {
        b[121] = 200;
        put64(b, 72, 0x20);
    });
}

#[test]
fn extension_messages() {
    let with = |extension: Extension, crypt: u32| {
        let mut header = plain();
        header.extensions.push(extension);
        header.crypt_method = crypt;
        header.encode().unwrap_err().to_string()
    };
    let crypto = |offset| Extension::Crypto(CryptoExtension { offset, length: 1 });
    assert_eq!(
        with(crypto(0), 0),
        "CRYPTO header extension only expected with LUKS encryption method"
    );
    assert_eq!(
        with(crypto(5), 2),
        "Encryption header offset '5' is not a multiple of cluster size '65536'"
    );
    assert_eq!(
        with(Extension::BackingFormat(vec![b'x'; 16]), 0),
        "ERROR: ext_backing_format: len=16 too large (>=16)"
    );
    let good = BitmapsExtension {
        count: 1,
        reserved: 0,
        directory_size: 32,
        directory_offset: 0x9_0000,
    };
    let bitmaps = |change: fn(&mut BitmapsExtension)| {
        let mut extension = good;
        change(&mut extension);
        let mut header = plain();
        header.autoclear = AUTOCLEAR_BITMAPS;
        header.extensions.set(Extension::Bitmaps(extension));
        // The image can be used all the same.
        let again = Header::decode(&header.encode().unwrap()).unwrap();
        assert!(again.has_bitmaps());
        again.bitmaps().unwrap_err().to_string()
    };
    assert_eq!(
        bitmaps(|b| b.count = 0),
        "found bitmaps extension with zero bitmaps"
    );
    assert_eq!(
        bitmaps(|b| b.count = 65536),
        "bitmaps_ext: Image has 65536 bitmaps, exceeding the QEMU supported maximum of 65535"
    );
    assert_eq!(
        bitmaps(|b| b.reserved = 1),
        "bitmaps_ext: Reserved field is not zero"
    );
    assert_eq!(
        bitmaps(|b| b.directory_offset += 8),
        "bitmaps_ext: invalid bitmap directory offset"
    );
    assert_eq!(
        bitmaps(|b| b.directory_size = 67_107_841),
        "bitmaps_ext: bitmap directory size (67107841) exceeds \
         the maximum supported size (67107840)"
    );
    // Without the autoclear bit the same extension is kept and not checked.
    let mut header = plain();
    header.extensions.set(Extension::Bitmaps(BitmapsExtension {
        reserved: 7,
        ..good
    }));
    let again = Header::decode(&header.encode().unwrap()).unwrap();
    assert_eq!(again.extensions.bitmaps().unwrap().unwrap().reserved, 7);
    assert!(!again.has_bitmaps());
    assert_eq!(again.bitmaps(), Ok(None));
    // One of another length is kept, too.
    let kind = EXTENSION_BITMAPS;
    let data = vec![7; 16];
    header.extensions.set(Extension::Unknown { kind, data });
    let again = Header::decode(&header.encode().unwrap()).unwrap();
    assert_eq!(again.extensions, header.extensions);
    assert_eq!(
        again.bitmaps().unwrap_err().to_string(),
        "bitmaps_ext: Invalid extension length"
    );
}

#[test]
fn a_check_decodes_headers_that_do_not_open() {
    let mut header = plain();
    header.refcount_table_clusters = 0;
    header.snapshots_offset = 7;
    let bytes = header.encode().unwrap();
    assert_eq!(Header::decode(&bytes), Err(FormatError::NoRefcountTable));
    assert_eq!(Header::decode_for_check(&bytes), Ok(header));
}

#[test]
fn short_files_read_as_zeros() {
    // QEMU reads zeroes after the end of the file, so there are no extensions.
    let whole = plain().encode().unwrap();
    let header = Header::decode(&whole[..112]).unwrap();
    assert!(header.extensions.is_empty());
    // A truncated extension is an error.
    assert!(matches!(
        Header::decode(&whole[..200]),
        Err(FormatError::Truncated { .. })
    ));
}

#[test]
fn old_version_3_headers_stay_short() {
    // Before the compression type the header had 104 bytes.
    let mut header = plain();
    header.header_length = 104;
    header.unknown_fields.clear();
    let bytes = header.encode().unwrap();
    assert_eq!(bytes[104..108], EXTENSION_FEATURE_NAMES.to_be_bytes());
    assert_eq!(Header::decode(&bytes).as_ref(), Ok(&header));
    header.set_compression(Compression::Zstd);
    let again = Header::decode(&header.encode().unwrap()).unwrap();
    assert_eq!(again.compression, Compression::Zstd);
    assert_eq!(again.header_length, 112);
}

#[test]
fn the_backing_name_moves_only_if_needed() {
    let mut header = plain();
    header.set_backing(Some(b"base.qcow2"), Some(b"qcow2"));
    assert_eq!(header.backing_offset, 112 + 16 + 392 + 8);
    header.backing_offset = 4096;
    let mut again = Header::decode(&header.encode().unwrap()).unwrap();
    assert_eq!(again, header);
    // An extension that needs its place moves it.
    again.extensions.push(Extension::Unknown {
        kind: 0x1234_5678,
        data: vec![1; 5000],
    });
    let moved = Header::decode(&again.encode().unwrap()).unwrap();
    assert_eq!(moved.backing_offset, 112 + 16 + 392 + 5008 + 8);
    assert_eq!(moved.backing_file(), Some(&b"base.qcow2"[..]));
    assert_eq!(moved.extensions, again.extensions);
    again.set_backing(None, None);
    assert_eq!((again.backing_offset, again.backing_file()), (0, None));
    assert_eq!(again.extensions.backing_format(), None);
}

#[test]
fn small_clusters_have_no_feature_names() {
    let mut header = Header::new(9, 0);
    assert!(header.extensions.feature_names().is_none());
    // An existing table stays while it fits.
    header
        .extensions
        .set(Extension::FeatureNames(FeatureNames::standard()));
    header.fit().unwrap();
    assert!(header.extensions.feature_names().is_some());
    assert_eq!(header.encode().unwrap().len(), 512);
    header.set_backing(Some(b"a.qcow2"), Some(b"qcow2"));
    assert!(matches!(
        header.encode(),
        Err(FormatError::HeaderDoesNotFit { .. })
    ));
    header.fit().unwrap();
    assert!(header.extensions.feature_names().is_none());
    assert_eq!(header.backing_offset, 0x88);
    header.set_backing(Some(&[b'x'; 400]), None);
    assert!(header.fit().is_err());
}

#[test]
fn extensions_keep_their_places() {
    let mut header = plain();
    let unknown = |kind| Extension::Unknown {
        kind,
        data: vec![1, 2, 3],
    };
    header.extensions.push(unknown(9));
    header.extensions.push(unknown(7));
    header.set_data_file_name(Some(b"data.raw"));
    header
        .extensions
        .set(Extension::BackingFormat(b"raw".to_vec()));
    let kinds: Vec<u32> = header.extensions.iter().map(Extension::kind).collect();
    assert_eq!(kinds, [0xe279_2aca, 0x4441_5441, 0x6803_f857, 9, 7]);
    header.extensions.set(unknown(9));
    header.extensions.set(unknown(5));
    assert_eq!(header.extensions.iter().nth(3), Some(&unknown(9)));
    assert_eq!(header.extensions.len(), 6);
    let again = Header::decode(&header.encode().unwrap()).unwrap();
    assert_eq!(again.extensions, header.extensions);
    // An unknown extension with a known type would not decode to the same value.
    header.extensions.push(unknown(0));
    assert!(matches!(header.encode(), Err(FormatError::Inconsistent(_))));
}

#[test]
fn tables_against_the_file() {
    let check = |offset, entries, len| check_table("Active L1 table", offset, entries, 8, 512, len);
    assert_eq!(check(512, 64, 1024), Ok(()));
    assert!(matches!(
        check(512, 65, 1024),
        Err(FormatError::TableBeyondFile { bytes: 520, .. })
    ));
    assert_eq!(check(1024, 0, 0), Ok(()));
    assert!(check(1, 0, 10).is_err());
    assert!(check(512, u64::MAX, u64::MAX).is_err());
    assert!(check(!511, 100, u64::MAX).is_err());
    assert!(check_table("x", 5, 1, 1, 0, 9).is_err());
}

fn extensions() -> impl Strategy<Value = Extension> {
    let text = |n| prop::collection::vec(any::<u8>(), 0..n);
    prop_oneof![
        text(16).prop_map(Extension::BackingFormat),
        text(99).prop_map(Extension::DataFile),
        text(200).prop_map(|bytes| Extension::FeatureNames(FeatureNames(bytes))),
        (1u32..65536, 0u64..9999, 0u64..99).prop_map(|(count, directory_size, at)| {
            Extension::Bitmaps(BitmapsExtension {
                count,
                reserved: 0,
                directory_size,
                directory_offset: at << 21,
            })
        }),
        (0u64..99, any::<u64>()).prop_map(|(at, length)| {
            Extension::Crypto(CryptoExtension {
                offset: at << 21,
                length,
            })
        }),
        (1u32..99, text(40)).prop_map(|(kind, data)| Extension::Unknown { kind, data }),
    ]
}

/// Any headers that can be decoded.
fn headers() -> impl Strategy<Value = Header> {
    (
        (any::<bool>(), 14u32..=21, 0u64..1 << 40, any::<bool>()),
        any::<[u16; 4]>(),
        (0u64..32, any::<u64>(), 0u64..4, 0u32..=6),
        prop::option::of(prop::collection::vec(any::<u8>(), 1..60)),
        prop::collection::vec(extensions(), 0..6),
        prop::option::of(prop::collection::vec(any::<u8>(), 0..30)),
    )
        .prop_map(|(basic, places, features, backing, extensions, unknown)| {
            let (v2, cluster_bits, size, zstd) = basic;
            let mut header = if v2 {
                Header::new_v2(cluster_bits, size)
            } else {
                Header::new(cluster_bits, size)
            };
            let place = |n: usize| u64::from(places[n]) << cluster_bits;
            header.l1_offset = place(0);
            header.l1_size = 1 << 20;
            header.refcount_table_offset = place(1);
            header.refcount_table_clusters = 1 + u32::from(places[3] % 4);
            header.snapshots_offset = place(2);
            header.nb_snapshots = u32::from(places[3]);
            header.crypt_method = 2;
            if !v2 {
                header.incompatible = features.0 & !8 | INCOMPATIBLE_DATA_FILE;
                header.compatible = features.1;
                header.autoclear = features.2 | 1 << 40;
                header.refcount_order = features.3;
                if let Some(fields) = unknown {
                    header.header_length = 105 + fields.len() as u32;
                    header.unknown_fields = fields;
                } else {
                    header.header_length = 104;
                    header.unknown_fields.clear();
                }
                if zstd {
                    header.set_compression(Compression::Zstd);
                }
            }
            for extension in extensions {
                header.extensions.push(extension);
            }
            header.backing_name = backing;
            header.place_backing_name().unwrap();
            header
        })
}

proptest! {
    #[test]
    fn round_trip(header in headers()) {
        let bytes = header.encode().unwrap();
        prop_assert_eq!(bytes.len() as u64, header.cluster_size());
        let again = Header::decode(&bytes);
        prop_assert_eq!(again.as_ref(), Ok(&header));
        prop_assert_eq!(again.unwrap().encode().unwrap(), bytes);
        Geometry::new(&header).unwrap();
    }

    #[test]
    fn damaged_headers(
        header in headers(),
        changes in prop::collection::vec((0usize..600, any::<u8>()), 1..6),
        cut: usize,
    ) {
        let mut bytes = header.encode().unwrap();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        if cut.is_multiple_of(4) {
            let len = bytes.len();
            bytes.truncate(cut / 4 % len);
        }
        for decode in [Header::decode, Header::decode_for_check] {
            let Ok(decoded) = decode(&bytes) else { continue };
            let geometry = Geometry::new(&decoded).unwrap();
            let _ = (geometry.l1_entries(), geometry.guest_clusters());
            // A decoded header can be encoded, and decodes to the same value.
            match decoded.encode() {
                Ok(again) => {
                    let again = Header::decode_for_check(&again).unwrap();
                    prop_assert_eq!(again.extensions, decoded.extensions);
                    prop_assert_eq!(again.backing_name, decoded.backing_name);
                }
                Err(e) => prop_assert!(matches!(e, FormatError::HeaderDoesNotFit { .. }), "{}", e),
            }
        }
    }

    #[test]
    fn any_bytes(
        mut bytes in prop::collection::vec(any::<u8>(), 0..800), magic: bool, bits in 0u32..24,
    ) {
        if magic && bytes.len() >= 32 {
            put32(&mut bytes, 0, 0x5146_49fb);
            put32(&mut bytes, 4, 2 + bits % 2);
            put32(&mut bytes, 20, bits);
        }
        let _ = Header::decode_fixed(&bytes);
        let _ = Header::decode(&bytes);
        let _ = Header::decode_for_check(&bytes);
    }
}

/// Runs qemu-img in `dir`. Returns `false` if it is missing or refuses the options (old versions
/// lack some).
fn qemu_img(dir: &Path, args: &[&str]) -> bool {
    Command::new("qemu-img")
        .args(args)
        .current_dir(dir)
        .output()
        .is_ok_and(|output| output.status.success())
}

#[test]
fn images_of_qemu_img_survive_a_rewrite() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    if !qemu_img(dir, &["create", "-f", "qcow2", "base.qcow2", "10M"]) {
        eprintln!("no qemu-img: nothing to compare with");
        return;
    }
    let options = [
        "compat=0.10",
        "compat=0.10,backing_file=base.qcow2,backing_fmt=qcow2",
        "compat=1.1",
        "compat=1.1,lazy_refcounts=on",
        "cluster_size=512",
        "cluster_size=512,backing_file=base.qcow2,backing_fmt=qcow2",
        "cluster_size=2M",
        "refcount_bits=1",
        "refcount_bits=64,cluster_size=4k",
        "compression_type=zstd",
        "extended_l2=on,cluster_size=16k",
        "extended_l2=on,backing_file=base.qcow2,backing_fmt=qcow2",
        "data_file=data.raw",
        "data_file=data2.raw,data_file_raw=on",
        "preallocation=metadata",
        "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10",
    ];
    let mut compared = 0;
    for (n, option) in options.iter().enumerate() {
        let name = format!("{n}.qcow2");
        let secret = "secret,id=s,data=abc";
        let mut create = vec!["create", "-f", "qcow2", "--object", secret];
        create.extend(["-o", option, &name, "20M"]);
        if !qemu_img(dir, &create) {
            eprintln!("this qemu-img does not support {option}");
            continue;
        }
        compare(&dir.join(&name), option);
        compared += 1;
        // The same with a bitmap and a snapshot.
        if qemu_img(dir, &["bitmap", "--add", &name, "b0"]) {
            compare(&dir.join(&name), &format!("{option} with a bitmap"));
        }
        if qemu_img(dir, &["snapshot", "-c", "one", &name]) {
            compare(&dir.join(&name), &format!("{option} with a snapshot"));
        }
    }
    assert!(compared >= 8, "only {compared} images could be made");
}

/// Decodes the metadata of an image, encodes them again, and compares the bytes.
fn compare(path: &Path, what: &str) {
    let file = std::fs::read(path).unwrap();
    let fixed = Header::decode_fixed(&file[..112]).unwrap();
    let first = &file[..file.len().min(fixed.cluster_size() as usize)];
    let header = Header::decode(first).unwrap_or_else(|e| panic!("{what}: {e}"));
    let mut again = header.encode().unwrap();
    assert!(again[first.len()..].iter().all(|b| *b == 0), "{what}");
    again.truncate(first.len());
    assert!(again == first, "{what}: the first cluster differs");

    assert_eq!(header.size, 20 << 20, "{what}");
    if header.version == 3 {
        let names = header.extensions.feature_names();
        let new = Header::new(fixed.cluster_bits, 0);
        assert_eq!(names, new.extensions.feature_names(), "{what}");
    }
    assert_eq!(header.crypt() == CryptMethod::Luks, what.contains("luks"));
    assert_eq!(header.has_extended_l2(), what.contains("extended_l2"));
    assert_eq!(header.lazy_refcounts(), what.contains("lazy"));
    assert_eq!(header.has_data_file(), what.contains("data_file"));
    assert_eq!(header.is_data_file_raw(), what.contains("data_file_raw"));
    assert_eq!(header.backing_file().is_some(), what.contains("backing"));
    assert!(!header.is_dirty() && !header.is_corrupt(), "{what}");

    // The tables are at the offsets in the header and have valid entries.
    let geometry = Geometry::new(&header).unwrap();
    let len = file.len() as u64;
    let l1_size = u64::from(header.l1_size);
    let cluster_size = geometry.cluster_size();
    let file_end = len.next_multiple_of(cluster_size);
    let name = "Active L1 table";
    check_table(name, header.l1_offset, l1_size, 8, cluster_size, file_end).unwrap();
    assert!(l1_size >= geometry.l1_entries());
    let l1 = &file[file.len().min(header.l1_offset as usize)..];
    for entry in l1.chunks_exact(8).take(header.l1_size as usize) {
        let entry = L1Entry::from_be_bytes(entry.try_into().unwrap());
        entry.l2_table(&geometry).unwrap();
    }
    if header.nb_snapshots > 0 {
        let bytes = &file[header.snapshots_offset as usize..];
        let table = Snapshot::decode_table(bytes, header.nb_snapshots).unwrap();
        assert_eq!(table[0].name, b"one");
        assert_eq!(table[0].disk_size(), Some(20 << 20));
        table[0].check_l1(cluster_size).unwrap();
        // The padding of the last entry may lie after the end of the file.
        let again = Snapshot::encode_table(&table).unwrap();
        let there = again.len().min(bytes.len());
        assert_eq!(again[..there], bytes[..there], "{what}");
    }
    if let Some(place) = header.bitmaps().unwrap() {
        let at = place.directory_offset as usize;
        let bytes = &file[at..at + place.directory_size as usize];
        let list = BitmapEntry::decode_directory(bytes, place.count).unwrap();
        assert_eq!(list[0].name, b"b0");
        list[0].check(&geometry).unwrap();
        assert_eq!(BitmapEntry::encode_directory(&list).unwrap(), bytes);
    }
}

#[test]
fn feature_names_can_be_looked_up() {
    let names = FeatureNames::standard();
    assert_eq!(
        names.name(FeatureKind::Autoclear, 1),
        Some(&b"raw external data"[..])
    );
    assert_eq!(names.name(FeatureKind::Compatible, 5), None);
    assert_eq!(names.iter().count(), 8);
}
