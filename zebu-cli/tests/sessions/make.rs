//! Makes the images of a run: base images of all kinds, and an image over them.

use std::fs;

use crate::common::{Rng, bytes};
use crate::program::{By, Shell};
use crate::world::{Base, Disk, FOLDERS, Kind, SECTOR, World, as_value, done, odd_name, words};
use zebu_testkit::Written;

/// One of the two programs.
pub fn either(rng: &mut Rng) -> By {
    match rng.below(2) {
        0 => By::Zebu,
        _ => By::Qemu,
    }
}

/// Bytes in runs of one value, some of them zero.
fn random_bytes(rng: &mut Rng, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let mut at = 0;
    while at < length {
        let run = (SECTOR * (1 + rng.below(200) as usize)).min(length - at);
        if !rng.one_in(3) {
            bytes[at..at + run].fill(1 + rng.below(255) as u8);
        }
        at += run;
    }
    bytes
}

impl World {
    pub fn new(shell: &mut Shell, rng: &mut Rng) -> Result<World, String> {
        for folder in ["img", "other"] {
            fs::create_dir(shell.root.join(folder)).map_err(|e| e.to_string())?;
        }
        let mut world = World {
            name: odd_name(rng, "i", ".qcow2"),
            kind: Kind::default(),
            fixed_cwd: None,
            disk: Disk::default(),
            touched: Vec::new(),
            snaps: Vec::new(),
            bases: Vec::new(),
            base: None,
            clean_end: true,
            mapped_past_end: false,
            killed: false,
            vm_state: false,
            bitmaps: Vec::new(),
            count: 0,
        };
        let bits = [9, 12, 14, 16, 16, 21][rng.below(6) as usize];
        let cluster = 1usize << bits;
        let extended = bits >= 14 && rng.one_in(3);
        let version = if extended || !rng.one_in(4) { 3 } else { 2 };
        world.kind = Kind {
            cluster,
            version,
            extended,
            data_file: None,
        };
        let most = (150 << bits).min(3 << 20).max(3 << bits);
        let size = (1 + rng.below(most as u64 / 512) as usize) * 512;
        for _ in 0..rng.below(4) {
            world.new_base(shell, rng, size)?;
        }
        if !world.bases.is_empty() && !rng.one_in(4) {
            world.base = Some(rng.below(world.bases.len() as u64) as usize);
        }
        let bytes = world.below(world.base, size);
        world.disk = Disk::new(bytes);
        world.touched = vec![false; world.clusters()];
        let options = world.options(shell, rng, world.base);
        let (cwd, name) = world.place(shell, rng);
        let mut args = words(&["create", "-q", "-f", "qcow2", "-o", &options]);
        if let Some(base) = world.base {
            let base = &world.bases[base];
            let backing = match rng.one_in(4) {
                true => shell.absolute(&base.name),
                false => base.name.clone(),
            };
            args.extend(words(&["-b", &backing, "-F", base.format]));
        }
        args.extend([name, size.to_string()]);
        done(shell.img(either(rng), cwd, &args)?)?;
        if options.contains("preallocation") {
            world.touched.fill(true);
        }
        Ok(world)
    }

    /// Creation options of the image.
    fn options(&mut self, shell: &Shell, rng: &mut Rng, base: Option<usize>) -> String {
        let kind = &mut self.kind;
        let mut options = vec![format!("cluster_size={}", kind.cluster)];
        if kind.version == 2 {
            options.push("compat=0.10".into());
        } else {
            options.push("compat=1.1".into());
            if kind.extended {
                options.push("extended_l2=on".into());
            }
            if rng.one_in(3) {
                options.push("lazy_refcounts=on".into());
            }
            if rng.one_in(2) {
                let bits = 1 << rng.below(7);
                options.push(format!("refcount_bits={bits}"));
            }
            if rng.one_in(3) {
                options.push("compression_type=zstd".into());
            }
            if rng.one_in(4) {
                let raw = base.is_none() && rng.one_in(2);
                let data = odd_name(rng, "d", ".raw");
                let name = match rng.one_in(2) {
                    true => shell.absolute(&data),
                    false => {
                        self.fixed_cwd = Some(rng.pick(&FOLDERS));
                        // Files of this name in other folders must not be used.
                        for folder in FOLDERS {
                            let path = shell.root.join(folder).join(bytes::os(&data));
                            let _ = fs::write(path, [0xee; 70000]);
                        }
                        data
                    }
                };
                options.push(format!("data_file={}", as_value(&name)));
                if raw {
                    options.push("data_file_raw=on".into());
                }
                kind.data_file = Some((name, raw));
            }
        }
        if rng.one_in(3) && (base.is_none() || kind.extended) {
            let mode = rng.pick(&["metadata", "falloc", "full"]);
            options.push(format!("preallocation={mode}"));
        }
        options.join(",")
    }

    /// Makes a backing file of about `size` bytes: raw of any length, qcow2, perhaps with a backing
    /// file, or another format that is written in place.
    pub fn new_base(
        &mut self,
        shell: &mut Shell,
        rng: &mut Rng,
        size: usize,
    ) -> Result<(), String> {
        let nth = self.bases.len();
        let length = match rng.below(4) {
            0 => size,
            1 => size + SECTOR * (1 + rng.below(400) as usize),
            2 => (size / SECTOR).div_ceil(2) * SECTOR,
            _ => (1 + rng.below(2 * size as u64 / 512) as usize) * SECTOR,
        };
        if rng.one_in(5) {
            return self.new_other_base(shell, rng, length);
        }
        let format = rng.pick(&["raw", "qcow2"]);
        let name = odd_name(rng, &format!("b{nth}"), &format!(".{format}"));
        if format == "raw" {
            let length = match rng.one_in(2) {
                true => length,
                false => length - rng.below(SECTOR as u64) as usize,
            };
            let mut bytes = random_bytes(rng, length);
            fs::write(shell.root.join("img").join(bytes::os(&name)), &bytes)
                .map_err(|e| e.to_string())?;
            shell.note(format!(
                "# img/{}: raw, {length} bytes",
                name.escape_debug()
            ));
            // Both programs round the size up to sectors.
            bytes.resize(length.next_multiple_of(SECTOR), 0);
            self.bases.push(Base {
                name,
                format,
                bytes,
                backing: None,
            });
            return Ok(());
        }
        let backing = match nth {
            0 => None,
            _ => (!rng.one_in(3)).then(|| rng.below(nth as u64) as usize),
        };
        let mut disk = Disk::new(self.below(backing, length));
        let cluster = [512, 4096, 65536, 65536][rng.below(4) as usize];
        let mut options = format!("cluster_size={cluster}");
        if cluster == 65536 && rng.one_in(3) {
            options.push_str(",extended_l2=on");
        }
        let mut args = words(&["create", "-q", "-f", "qcow2", "-o", &options]);
        if let Some(backing) = backing {
            let base = &self.bases[backing];
            args.extend(words(&["-b", &base.name, "-F", base.format]));
        }
        args.extend([name.clone(), length.to_string()]);
        done(shell.img(either(rng), "img", &args)?)?;
        write_some(shell, rng, "qcow2", &name, &mut disk)?;
        self.bases.push(Base {
            name,
            format,
            bytes: disk.bytes,
            backing,
        });
        Ok(())
    }

    /// The same of a format that is neither raw nor qcow2, of `length` bytes.
    fn new_other_base(
        &mut self,
        shell: &mut Shell,
        rng: &mut Rng,
        length: usize,
    ) -> Result<(), String> {
        let others = Written::others();
        let written = others[rng.below(others.len() as u64) as usize];
        let name = odd_name(
            rng,
            &format!("b{}", self.bases.len()),
            &format!(".{}", written.name),
        );
        let mut args = words(&written.create());
        args.extend([name.clone(), length.to_string()]);
        done(shell.img(either(rng), "img", &args)?)?;
        let mut disk = Disk::new(vec![0; length]);
        write_some(shell, rng, written.name, &name, &mut disk)?;
        self.bases.push(Base {
            name,
            format: written.name,
            bytes: disk.bytes,
            backing: None,
        });
        Ok(())
    }
}

/// One of the programs writes to a backing file.
fn write_some(
    shell: &mut Shell,
    rng: &mut Rng,
    format: &str,
    name: &str,
    disk: &mut Disk,
) -> Result<(), String> {
    let length = disk.bytes.len();
    let mut commands = Vec::new();
    for _ in 0..1 + rng.below(6) {
        let at = rng.below((length / SECTOR) as u64) as usize * SECTOR;
        let count = (SECTOR * (1 + rng.below(200) as usize)).min(length - at);
        let byte = rng.below(256) as u8;
        commands.push(match byte {
            0 => format!("write -z {at} {count}"),
            _ => format!("write -P {byte} {at} {count}"),
        });
        disk.put(at, count, byte, true);
    }
    let args = words(&["-f", format, name]);
    done(shell.io(either(rng), "img", &args, &commands)?).map(drop)
}
