//! Lengths of compressed clusters in qcow2 images, which are bounds: the stream tells where it ends.

use std::fs;

use super::{content, for_each_spelling};
use crate::common::server::{Server, client};
use crate::common::{Lab, Rng};

const CLUSTER: u64 = 65536;
/// Where a descriptor of a cluster of this size has the number of further sectors.
const SECTORS: u32 = 62 - (16 - 8);

/// The entry of a cluster in the first L2 table: where it is, and its value.
fn entry(bytes: &[u8], cluster: u64) -> (usize, u64) {
    let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let table = number(number(40) as usize) & 0x00ff_ffff_ffff_fe00;
    let at = table as usize + 8 * cluster as usize;
    (at, number(at))
}

/// A compressed image of some clusters, and its disk, as `a.raw`. Its data end with the file.
fn compressed(lab: &Lab, random: &mut Rng) -> (Vec<u8>, u64) {
    let clusters = 1 + random.below(4);
    let mut disk = content(random, clusters * CLUSTER / 512);
    // Half of each cluster is compressible.
    for (nth, byte) in disk.iter_mut().enumerate() {
        if nth / 4096 % 2 == 0 {
            *byte = b'z';
        }
    }
    fs::write(lab.path("a.raw"), &disk).unwrap();
    let kind = ["zlib", "zstd"][random.below(2) as usize];
    let options = format!("compression_type={kind},cluster_size={CLUSTER}");
    let convert = [
        "convert", "-c", "-f", "raw", "-O", "qcow2", "-W", "-m", "1", "-o", &options,
    ];
    lab.zebu(&[&convert[..], &["a.raw", "x.qcow2"]].concat())
        .ok("an image");
    (fs::read(lab.path("x.qcow2")).unwrap(), clusters)
}

#[test]
fn lengths_reach_past_the_end_of_the_file() {
    for_each_spelling("compressed clusters", |lab, random| {
        let (mut bytes, clusters) = compressed(lab, random);
        let offset = |entry: u64| entry & ((1 << SECTORS) - 1);
        // The one whose data are the last ones.
        let entries = (0..clusters).map(|cluster| entry(&bytes, cluster));
        let (at, last) = entries.max_by_key(|(_, entry)| offset(*entry)).unwrap();
        let sectors = (last >> SECTORS) & 0xff;
        let more = random.below(0x100 - sectors);
        let new = last & !(0xff << SECTORS) | (sectors + more) << SECTORS;
        bytes[at..at + 8].copy_from_slice(&new.to_be_bytes());
        // As far as the length says without what was added, and what other programs fill up.
        let end = (offset(last) / 512 + sectors + 1) * 512;
        bytes.truncate((end as usize).min(bytes.len()));
        let is_cut = random.one_in(3);
        if is_cut {
            bytes.truncate(offset(last) as usize + 1000);
        }
        fs::write(lab.path("x.qcow2"), &bytes).unwrap();
        let spelt = format!("{more} more sectors, cut {is_cut}");
        let convert = ["convert", "-O", "raw", "x.qcow2", "out"];
        let status = i32::from(is_cut);
        for args in [
            &convert[..],
            &[&["--untrusted"], &convert[..]].concat(),
            &["import", "x.qcow2", "out"],
            &["compare", "-F", "raw", "x.qcow2", "a.raw"],
        ] {
            let answer = lab.zebu(args);
            answer.orderly(&spelt);
            assert_eq!(
                answer.status == 0,
                !is_cut,
                "{args:?}: {spelt}: {answer:#?}"
            );
            if args.last() == Some(&"out") && !is_cut {
                lab.assert_same_bytes("out", "a.raw", &spelt);
            }
        }
        let piped = lab.shell("cat x.qcow2 | $0 convert - out");
        assert_eq!(piped.status, status, "{spelt}: {piped:#?}");
        let check = lab.zebu(&["check", "x.qcow2"]);
        assert_eq!(check.status, 2 * status, "{spelt}: {check:#?}");
        if !is_cut {
            let mut server = Server::start(lab, &["-r", "-f", "qcow2", "x.qcow2"]);
            let uri = server.uri("");
            client(lab, "qemu-img", &["convert", "-O", "raw", &uri, "served"]).ok(&spelt);
            lab.assert_same_bytes("served", "a.raw", &spelt);
            server.stop();
            lab.qemu_img(&["compare", "-F", "raw", "x.qcow2", "a.raw"])
                .ok(&spelt);
        }
        spelt
    });
}
