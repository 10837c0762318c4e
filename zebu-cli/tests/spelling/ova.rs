//! Appliances: the archive, the names in it, the descriptor's encoding, the manifest.

use std::fs;
use std::path::Path;

use super::{Container, content, for_each_spelling};
use crate::common::{Lab, Limits, Rng};

const VMDK: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";

/// The header of a member.
fn header(name: &[u8], length: usize, kind: u8, format: &str) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name);
    header[100..108].copy_from_slice(b"0000644\0");
    header[108..116].copy_from_slice(b"0000000\0");
    header[116..124].copy_from_slice(b"0000000\0");
    header[124..136].copy_from_slice(format!("{length:011o}\0").as_bytes());
    header[136..148].copy_from_slice(b"00000000000\0");
    header[156] = kind;
    match format {
        "v7" => {}
        "gnu" => header[257..265].copy_from_slice(b"ustar  \0"),
        _ => header[257..265].copy_from_slice(b"ustar\x0000"),
    }
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

fn add(archive: &mut Vec<u8>, name: &str, bytes: &[u8], format: &str) {
    if format == "pax" {
        let record = format!(" path={name}\n");
        let mut length = record.len() + 2;
        if format!("{length}{record}").len() != length {
            length += 1;
        }
        let record = format!("{length}{record}");
        archive.extend(header(b"PaxHeader", record.len(), b'x', format));
        archive.extend(record.as_bytes());
        archive.resize(archive.len().next_multiple_of(512), 0);
        archive.extend(header(b"short", bytes.len(), b'0', format));
    } else {
        let kind = if format == "v7" { 0 } else { b'0' };
        archive.extend(header(name.as_bytes(), bytes.len(), kind, format));
    }
    archive.extend(bytes);
    archive.resize(archive.len().next_multiple_of(512), 0);
}

/// The text in one of the encodings of descriptors.
fn encoded(random: &mut Rng, name: &str) -> (Vec<u8>, &'static str) {
    let encodings = [
        "UTF-8",
        "UTF-8 with a mark",
        "UTF-16LE",
        "UTF-16BE",
        "ISO-8859-1",
        "windows-1252",
    ];
    let encoding = encodings[random.below(encodings.len() as u64) as usize];
    let declared = encoding.split(' ').next().unwrap();
    let declared = declared.trim_end_matches("LE").trim_end_matches("BE");
    let text = format!(
        "<?xml version='1.0' encoding='{declared}'?>\n<Envelope \
         xmlns='http://schemas.dmtf.org/ovf/envelope/1' \
         xmlns:ovf='http://schemas.dmtf.org/ovf/envelope/1'><References><File ovf:href='{name}' \
         ovf:id='f1'/><File ovf:href='gone.vmdk' ovf:id='f2'/></References><DiskSection>\
         <Disk ovf:capacity='65536' ovf:diskId='d1' ovf:fileRef='f1' ovf:format='{VMDK}'/>\
         <Disk ovf:capacity='1' ovf:diskId='d2' ovf:fileRef='f2' ovf:format='{VMDK}'/>\
         </DiskSection><VirtualSystem ovf:id='v'><Name>Gr\u{f6}\u{df}e</Name></VirtualSystem></Envelope>"
    );
    let units = || text.encode_utf16();
    let bytes = match encoding {
        "UTF-8" => text.into_bytes(),
        "UTF-8 with a mark" => format!("\u{feff}{text}").into_bytes(),
        "UTF-16LE" => [0xfeff]
            .into_iter()
            .chain(units())
            .flat_map(u16::to_le_bytes)
            .collect(),
        "UTF-16BE" => [0xfeff]
            .into_iter()
            .chain(units())
            .flat_map(u16::to_be_bytes)
            .collect(),
        _ => text.chars().map(|c| c as u8).collect(),
    };
    (bytes, encoding)
}

fn digest(lab: &Lab, kind: &str, bytes: &[u8]) -> String {
    fs::write(lab.path("digested"), bytes).unwrap();
    let tool = format!("{}sum", kind.to_ascii_lowercase());
    let answer = lab.run(Path::new(&tool), &["digested"], b"", &Limits::default());
    answer.out.split(' ').next().unwrap().to_owned()
}

#[test]
fn archives() {
    for_each_spelling("appliances", |lab, random| {
        let disk = content(random, 128);
        fs::write(lab.path("a.raw"), &disk).unwrap();
        let convert = [
            "convert",
            "-f",
            "raw",
            "-O",
            "vmdk",
            "-o",
            "subformat=streamOptimized",
        ];
        lab.zebu(&[&convert[..], &["a.raw", "d.vmdk"]].concat())
            .ok("a disk");
        let stored = fs::read(lab.path("d.vmdk")).unwrap();
        let format = ["ustar", "gnu", "pax", "v7"][random.below(4) as usize];
        let folder = ["", "./", "vm/", "./a/b/"][random.below(4) as usize];
        let (text, encoding) = encoded(random, "d.vmdk");
        let (kind, manifest_name) = (
            ["SHA1", "SHA256", "SHA384", "SHA512"][random.below(4) as usize],
            ["a.mf", "a.MF", "disk1.mf", ""][random.below(4) as usize],
        );
        let is_damaged = random.one_in(3);
        let mut manifest = String::new();
        for (name, bytes) in [("a.ovf", &text), ("d.vmdk", &stored)] {
            let mut digits = digest(lab, kind, bytes);
            if is_damaged && name == "d.vmdk" {
                digits = "0".repeat(digits.len());
            }
            let folder = if random.one_in(4) { folder } else { "" };
            let blank = if random.one_in(2) { " " } else { "" };
            manifest += &format!("{kind}{blank}({folder}{name})= {digits}\r\n");
        }
        // A line that nothing is known of is told, and the others count.
        let is_odd = random.one_in(3);
        if is_odd {
            manifest.insert_str(0, &format!("SHA3-256(d.vmdk)= {}\n", "0".repeat(64)));
        }
        let mut members = vec![
            (format!("{folder}a.ovf"), text),
            (format!("{folder}d.vmdk"), stored),
        ];
        if !manifest_name.is_empty() {
            members.push((format!("{folder}{manifest_name}"), manifest.into_bytes()));
        }
        if random.one_in(2) {
            // Any order.
            let at = 1 + random.below(members.len() as u64 - 1) as usize;
            members.rotate_left(at);
        }
        let has_apple = random.one_in(2);
        // What nothing names may be anything.
        let mut archive = others(random);
        for (name, bytes) in &members {
            if has_apple {
                let (folder, base) = name.rsplit_once('/').unwrap_or(("", name));
                let slash = if folder.is_empty() { "" } else { "/" };
                let name = format!("{folder}{slash}._{base}");
                add(&mut archive, &name, b"\0\x05\x16\x07 attributes", format);
            }
            add(&mut archive, name, bytes, format);
        }
        archive.resize(archive.len() + 1024, 0);
        let file = ["x.ova", "X.OVA", "x.tar"][random.below(3) as usize];
        fs::write(lab.path(file), archive).unwrap();
        let spelt = format!(
            "{format} {folder:?} {encoding} {kind} {manifest_name:?} damaged {is_damaged} apple {has_apple}"
        );
        // Without the number of a disk it is an archive.
        Container {
            lab,
            name: file,
            disk: b"",
            refused_as: &["tar archive"],
            has_files: false,
            spelt: &spelt,
        }
        .judge();
        for strict in [&[][..], &["--untrusted"]] {
            let take = ["convert", "--disk", "1", "-O", "raw", file, "taken"];
            let answer = lab.zebu(&[strict, &take].concat());
            if is_damaged && !manifest_name.is_empty() {
                answer.orderly(&spelt);
                assert!(
                    answer.status == 1 && answer.err.contains("is damaged"),
                    "{spelt}: {answer:?}"
                );
                continue;
            }
            let answer = answer.ok(&spelt);
            let is_told = answer.err.contains("verifies nothing: SHA3-256(d.vmdk)");
            assert!(
                is_told == (is_odd && !manifest_name.is_empty()),
                "{spelt}: {answer:?}"
            );
            assert!(fs::read(lab.path("taken")).unwrap() == disk, "{spelt}");
            // One disk that is missing leaves the others.
            let take = ["convert", "--disk", "2", "-O", "raw", file, "gone"];
            let answer = lab.zebu(&[strict, &take].concat());
            answer.orderly(&spelt);
            assert!(
                answer.status == 1 && answer.err.contains("gone.vmdk"),
                "{spelt}: {answer:?}"
            );
        }
        spelt
    });
}

/// Members that are no regular files, or that have unusual headers.
fn others(random: &mut Rng) -> Vec<u8> {
    let mut archive = Vec::new();
    for nth in 0..random.below(4) {
        let name = format!("other{nth}");
        // A link, as hard links sometimes are with a length, a FIFO, a device.
        let kind = [b'1', b'2', b'6', b'3'][random.below(4) as usize];
        match random.below(3) {
            0 => archive.extend(header(name.as_bytes(), 0, kind, "ustar")),
            1 => archive.extend(header(name.as_bytes(), 700, b'1', "gnu")),
            _ => {
                let record = b"28 comment=of two\nlines x=y\n";
                archive.extend(header(b"PaxHeader", record.len(), b'x', "ustar"));
                archive.extend(record);
                archive.resize(archive.len().next_multiple_of(512), 0);
                add(&mut archive, &name, b"text", "ustar");
            }
        }
    }
    archive
}

/// What an appliance has more than once, or that is no file, is not taken at random.
#[test]
fn several_descriptors_and_links() {
    let lab = Lab::new();
    let disk = content(&mut Rng::new(1), 8);
    let text = "<Envelope><File id='f' href='d.raw'/><Disk diskId='d' fileRef='f' format='raw'/></Envelope>";
    let make = |members: &[(&str, &[u8])], more: &[Vec<u8>]| {
        let mut archive = Vec::new();
        for (name, bytes) in members {
            add(&mut archive, name, bytes, "ustar");
        }
        archive.extend(more.concat());
        archive.resize(archive.len() + 1024, 0);
        fs::write(lab.path("x.ova"), archive).unwrap();
        lab.zebu(&["convert", "--disk", "1", "-O", "raw", "x.ova", "out"])
    };
    let (text, raw) = (text.as_bytes(), &*disk);
    make(&[("a.ovf", text), ("vm/b.ovf", text), ("d.raw", raw)], &[])
        .fails_with("2 OVF descriptors, such as 'a.ovf' and 'vm/b.ovf'");
    let link = header(b"d.raw", 0, b'2', "ustar");
    make(&[("a.ovf", text)], std::slice::from_ref(&link)).fails_with("'d.raw' is a link");
    make(&[("a.ovf", text), ("d.raw", raw), ("./d.raw", raw)], &[]).fails_with("twice");
    let link = header(b"latest.raw", 0, b'2', "ustar");
    make(&[("a.ovf", text), ("d.raw", raw)], &[link]).ok("a link that nothing names");
    assert!(fs::read(lab.path("out")).unwrap() == disk);
    let sum = digest(&lab, "SHA1", raw);
    let (own, other) = (format!("SHA1(d.raw)= {sum}\n"), "SHA1(x)= 0\n");
    let answer = make(
        &[
            ("a.ovf", text),
            ("d.raw", raw),
            ("a.mf", own.as_bytes()),
            ("b.mf", other.as_bytes()),
        ],
        &[],
    );
    let said = answer.ok("a manifest that is not used").err;
    assert_eq!(said, "WARNING: 'x.ova': The manifest 'b.mf' is not used\n");
}

/// A file in chunks says so, not that it is not there.
#[test]
fn chunks_have_their_own_message() {
    let lab = Lab::new();
    let text = format!(
        "<Envelope><File id='f' href='d.vmdk' chunkSize='1024'/>\
         <Disk diskId='d' fileRef='f' format='{VMDK}'/></Envelope>"
    );
    let mut archive = Vec::new();
    add(&mut archive, "a.ovf", text.as_bytes(), "ustar");
    add(&mut archive, "d.vmdk.000000000", &[1; 1024], "ustar");
    archive.resize(archive.len() + 1024, 0);
    fs::write(lab.path("x.ova"), archive).unwrap();
    lab.zebu(&["convert", "--disk", "1", "-O", "raw", "x.ova", "out"])
        .fails_with("chunkSize");
    lab.zebu(&["info", "x.ova"]).ok("info");
}

/// A manifest that is about other files is not passed over.
#[test]
fn a_manifest_is_used_or_refused() {
    let lab = Lab::new();
    let disk = content(&mut Rng::new(1), 8);
    let text = "<Envelope><File id='f' href='d.raw'/><Disk diskId='d' fileRef='f' format='raw'/></Envelope>";
    let make = |manifests: &[(&str, &str)]| {
        let mut archive = Vec::new();
        add(&mut archive, "a.ovf", text.as_bytes(), "ustar");
        add(&mut archive, "d.raw", &disk, "ustar");
        for (name, text) in manifests {
            add(&mut archive, name, text.as_bytes(), "ustar");
        }
        archive.resize(archive.len() + 1024, 0);
        fs::write(lab.path("x.ova"), archive).unwrap();
        lab.zebu(&["convert", "--disk", "1", "-O", "raw", "x.ova", "out"])
    };
    make(&[]).ok("without a manifest");
    let zeroes = "0".repeat(40);
    let of = |name: &str| format!("SHA1({name})= {zeroes}\n");
    make(&[("b.mf", &of("d.raw"))]).fails_with("is damaged");
    make(&[("b.mf", &of("other.raw"))]).fails_with("no checksum of a file");
    make(&[("b.mf", &of("d.raw")), ("c.mf", &of("d.raw"))]).fails_with("2 manifests");
}
