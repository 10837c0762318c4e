//! New images on devices that hold something: each reads as zeroes, or as what was converted to it,
//! whatever the device held. The devices are exports, and loop devices where these can be made.
//!

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use crate::common::server::Server;
use crate::common::{Answer, Lab, Loop, Rng, beyond_qemu, cases};

/// Bytes of a disk, and of a device.
const DISK: usize = 1 << 20;
const DEVICE: usize = 16 << 20;
/// What a device holds.
const OLD: u8 = 0x53;

enum Device {
    Loop(Loop),
    Export(Server),
}

impl Device {
    fn name(&self) -> String {
        match self {
            Device::Loop(device) => device.0.clone(),
            Device::Export(server) => server.uri(""),
        }
    }

    fn read(&self, lab: &Lab) -> Vec<u8> {
        match self {
            Device::Loop(device) => fs::read(&device.0),
            Device::Export(_) => fs::read(lab.path("device")),
        }
        .unwrap()
    }
}

/// A disk with data in some places.
fn source(lab: &Lab, rng: &mut Rng) -> Vec<u8> {
    let mut disk = vec![0; DISK];
    for _ in 0..rng.below(5) {
        let at = rng.below(DISK as u64) as usize;
        let end = DISK.min(at + 1 + rng.below(100_000) as usize);
        disk[at..end].fill(rng.next() as u8);
    }
    let file = File::create(lab.path("src")).unwrap();
    for (nth, piece) in disk.chunks(4096).enumerate() {
        if piece.iter().any(|byte| *byte != 0) {
            file.write_all_at(piece, nth as u64 * 4096).unwrap();
        }
    }
    file.set_len(DISK as u64).unwrap();
    disk
}

/// The options of an image, and whether its disk is the device's content without any.
fn options(rng: &mut Rng, format: &str, data_file: Option<&str>) -> String {
    let mut options = Vec::new();
    let preallocation = match format {
        "qcow2" => rng.pick(&["off", "metadata", "falloc", "full"]),
        // Of a file, which devices ignore.
        _ => rng.pick(&["off", "falloc", "full"]),
    };
    options.push(format!("preallocation={preallocation}"));
    if format == "qcow2" {
        let is_old = data_file.is_none() && rng.one_in(4);
        options.extend(is_old.then(|| "compat=0.10".to_string()));
        let is_extended = !is_old && rng.one_in(3);
        options.extend(is_extended.then(|| "extended_l2=on".to_string()));
        let size = match is_extended {
            true => rng.pick(&["16k", "64k"]),
            false => rng.pick(&["512", "4k", "64k", "1M"]),
        };
        options.push(format!("cluster_size={size}"));
        if let Some(name) = data_file {
            options.push(format!("data_file={}", name.replace(',', ",,")));
            options.extend(rng.one_in(2).then(|| "data_file_raw=on".to_string()));
        }
    } else if format != "raw" {
        let forms: &[&str] = match format {
            "vdi" => &["static=on", "static=off"],
            "vpc" => &["subformat=dynamic"],
            "vhdx" => &["subformat=dynamic", "subformat=fixed"],
            _ => &["subformat=monolithicSparse", "subformat=streamOptimized"],
        };
        options.push(rng.pick(forms).into());
    }
    options.join(",")
}

fn step(lab: &Lab, rng: &mut Rng, on_loop: bool) {
    fs::write(lab.path("device"), vec![OLD; DEVICE]).unwrap();
    let device = match on_loop {
        true => match Loop::on(&lab.path("device")) {
            Some(device) => Device::Loop(device),
            None => return,
        },
        false => Device::Export(Server::start(
            lab,
            &["-t", "-e", "9", "-f", "raw", "device"],
        )),
    };
    let name = device.name();
    let mut disk = source(lab, rng);
    let format = rng.pick(&[
        "qcow2", "qcow2", "qcow2", "raw", "vdi", "vpc", "vhdx", "vmdk",
    ]);
    let is_data = format == "qcow2" && rng.one_in(2);
    let options = options(rng, format, is_data.then_some(&*name));
    let image = if is_data { "image" } else { &*name };
    let _ = fs::remove_file(lab.path("image"));
    let is_filled = rng.one_in(2);
    let args: Vec<&str> = match is_filled {
        true => vec![
            "convert", "-f", "raw", "-O", format, "-o", &options, "src", image,
        ],
        false => vec!["create", "-f", format, "-o", &options, image, "1M"],
    };
    let what = format!("{args:?} on {name}");
    let answer = lab.zebu(&args);
    // What cannot be is refused: a size, an option, a format of one file.
    if answer.status == 1 && !answer.err.is_empty() {
        return;
    }
    answer.ok(&what);
    let is_raw = format == "raw";
    if is_raw && options == "preallocation=off" && !is_filled {
        return;
    }
    if !is_filled {
        disk.fill(0);
    }
    let compare = |disk: &[u8], what: &str| {
        let args = ["convert", "-f", format, "-O", "raw", image, "out"];
        lab.zebu(&args).ok(what);
        let mut found = fs::read(lab.path("out")).unwrap();
        found.truncate(DISK);
        let first = found.iter().zip(disk).position(|(a, b)| a != b);
        assert!(first.is_none(), "{what}: wrong from byte {first:?} on");
    };
    compare(&disk, &what);
    if options.contains("data_file_raw=on") {
        assert!(
            device.read(lab)[..DISK] == disk,
            "{what}: the data file is another disk"
        );
    }
    if !["qcow2", "raw"].contains(&format) {
        return;
    }
    // The margins of what is written, and what more space adds.
    let (at, length) = (rng.below(DISK as u64 - 70_000), 1 + rng.below(70_000));
    let write = format!("write -P 7 {at} {length}");
    let written = lab
        .zebu(&["io", "-f", format, "-c", &write, image])
        .ok(&what);
    assert!(written.out.contains("wrote"), "{what}: {written:?}");
    disk[at as usize..(at + length) as usize].fill(7);
    compare(&disk, &format!("{what}, {write}"));
    if format == "qcow2" {
        let mode = format!(
            "--preallocation={}",
            rng.pick(&["off", "metadata", "falloc", "full"])
        );
        let resize = ["resize", "-q", "-f", "qcow2", &mode, image, "2M"];
        let grown: Answer = lab.zebu(&resize).ok(&format!("{what}, {mode}"));
        drop(grown);
        let size = ["convert", "-f", format, "-O", "raw", image, "out"];
        lab.zebu(&size).ok(&what);
        let found = fs::read(lab.path("out")).unwrap();
        assert!(
            found[DISK..].iter().all(|b| *b == 0),
            "{what}, {mode}: not zero"
        );
        lab.zebu(&["check", "-q", "-f", "qcow2", image]).ok(&what);
    }
}

#[test]
fn new_images_on_devices_read_as_zeroes() {
    if beyond_qemu("QEMU shows what a device held") {
        return;
    }
    let lab = Lab::new();
    for seed in cases(24, "images on devices") {
        step(&lab, &mut Rng::new(seed), seed % 2 == 0);
    }
}

/// A data file that is there is emptied, as that of a new image.
#[test]
fn an_old_data_file_is_emptied() {
    let lab = Lab::new();
    for options in [
        "",
        ",preallocation=metadata",
        ",preallocation=falloc",
        ",data_file_raw=on",
        ",extended_l2=on,preallocation=full",
    ] {
        fs::write(lab.path("data"), vec![OLD; 3 << 20]).unwrap();
        let options = format!("data_file=data{options}");
        let args = ["create", "-f", "qcow2", "-o", &options, "image", "1M"];
        lab.zebu(&args).ok(&options);
        lab.zebu(&["convert", "-f", "qcow2", "-O", "raw", "image", "out"])
            .ok(&options);
        let found = fs::read(lab.path("out")).unwrap();
        assert!(found.iter().all(|byte| *byte == 0), "{options}");
        let data = fs::read(lab.path("data")).unwrap();
        assert!(data.iter().all(|byte| *byte == 0), "{options}");
    }
}
