//! Decodes bytes as each structure of the format. A decoded value must encode, and decode again to
//! the same value. (A header may be refused by the encoder, which is stricter.)
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use zebu::internal::structures::{BitmapTableEntry, Geometry, Header, HostOffset, L1Entry, L2Entry, LuksHeader, RefcountBlock, RefcountTableEntry, SubclusterKind};
use zebu::qcow2::{BitmapEntry, Snapshot};
use zebu_fuzz::hostile_images::{Rng, build, mutate_once};

fuzz_target!(|data: &[u8]| {
    if data.len() < 4 {
        return;
    }
    let (count, rest) = (u32::from(data[0]), &data[1..]);
    header(data);
    let _ = LuksHeader::decode(data);
    snapshots(data, 1);
    snapshots(rest, count);
    bitmaps(data, 1);
    bitmaps(rest, count);
    for order in 0..=6 {
        for (bits, extended) in [(9, false), (16, true), (21, true)] {
            let mut header = Header::new(bits, 1 << 40);
            header.refcount_order = order;
            header.set_extended_l2(extended);
            let geometry = Geometry::new(&header).expect("a sound header");
            entries(rest, &geometry);
        }
    }
});

fn header(data: &[u8]) {
    let _ = Header::decode_for_check(data);
    let Ok(header) = Header::decode(data) else {
        return;
    };
    let geometry = Geometry::new(&header).expect("the geometry of a header that decodes");
    entries(data, &geometry);
    for entry in header.extensions.iter() {
        assert!(entry.data_len() <= data.len());
    }
    if let Ok(bytes) = header.encode() {
        let mut again = Header::decode(&bytes).expect("what was encoded");
        // The name moves if the extensions need its place.
        again.backing_offset = header.backing_offset;
        assert_eq!(again, header);
    }
    let mut fitted = header.clone();
    if fitted.fit().is_ok() {
        let _ = fitted.encode();
    }
}

fn snapshots(data: &[u8], count: u32) {
    let Ok(table) = Snapshot::decode_table(data, count) else {
        return;
    };
    let bytes = Snapshot::encode_table(&table).expect("what was decoded");
    assert_eq!(Snapshot::decode_table(&bytes, count), Ok(table));
}

fn bitmaps(data: &[u8], count: u32) {
    let _ = BitmapEntry::decode(data);
    let Ok(list) = BitmapEntry::decode_directory(data, count) else {
        return;
    };
    let bytes = BitmapEntry::encode_directory(&list).expect("what was decoded");
    assert_eq!(BitmapEntry::decode_directory(&bytes, count), Ok(list));
}

fn entries(data: &[u8], geometry: &Geometry) {
    for word in data.chunks_exact(8).take(8) {
        let word: [u8; 8] = word.try_into().expect("8 bytes");
        if let Ok(Some(at)) = L1Entry::from_be_bytes(word).l2_table(geometry) {
            assert!(at.is_aligned(geometry.cluster_bits()));
        }
        if let Ok(Some(at)) = RefcountTableEntry::from_be_bytes(word).block(geometry) {
            assert!(at.is_aligned(geometry.cluster_bits()));
        }
        let _ = BitmapTableEntry::from_be_bytes(word).kind(geometry);
    }
    for index in 0..8 {
        let Some(entry) = L2Entry::read(data, index, geometry) else {
            break;
        };
        let mut at = 0;
        while at < geometry.subclusters_per_cluster() {
            let Ok((kind, count)) = entry.subcluster_run(at, geometry) else {
                break;
            };
            assert!(count >= 1 && at + count <= geometry.subclusters_per_cluster());
            if let SubclusterKind::Compressed(cluster) = kind {
                assert!(cluster.length >= 1 && cluster.end() > HostOffset(0));
            }
            at += count;
        }
    }
    let mut bytes = data[..data.len().min(64)].to_vec();
    let mut block = RefcountBlock::new(&mut bytes[..], geometry);
    for index in 0..block.entries() {
        let count = block.get(index).expect("an entry");
        block.set(index, count).expect("what it was");
        assert_eq!(block.get(index), Some(count));
    }
}

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let mut rng = Rng::new(u64::from(seed));
    if rng.one_in(2) {
        return fuzzer_mutate(data, size, max_size);
    }
    let mut image = if rng.one_in(20) {
        // The bytes may begin with any table of an image.
        let mut image = build(&mut rng, 64 << 10);
        let skip = rng.below(image.len() as u64) & !511;
        image.drain(..skip as usize);
        image
    } else {
        data[..size].to_vec()
    };
    mutate_once(&mut rng, &mut image);
    let length = image.len().min(max_size);
    data[..length].copy_from_slice(&image[..length]);
    length
});
