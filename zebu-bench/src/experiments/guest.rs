//! Seed 003's own load: bonnie++ in a guest, on an image whose L2 tables are more than the cache
//! or all in it. The guest's processor is emulated, so most of the time is the guest's own.

use super::Experiment;
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::measure::child::{self, command};
use crate::measure::served::served;
use crate::measure::stats::median;
use crate::peers::on_path;
use crate::peers::qemu::done;
use crate::report::Section;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::units::{self, GIB, KIB};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Small clusters make many tables: one of 4 KiB maps 2 MiB of the disk.
const CLUSTER: u64 = 4 * KIB;
const DISK: u64 = GIB;
const TABLES: u64 = DISK / (CLUSTER / 8 * CLUSTER);
/// The columns of bonnie++ that are shown: name, unit, and the place in its line of results.
const FIGURES: [(&str, &str, usize); 4] = [
    ("block writes", "KiB/s", 11),
    ("rewriting", "KiB/s", 13),
    ("block reads", "KiB/s", 17),
    ("seeks", "1/s", 19),
];
/// What the guest does; its disk is `/dev/vda`.
const JOB: &str = "\
mkdir -p /etc /mnt
echo 'root:x:0:0:root:/:/bin/sh' >/etc/passwd
echo 'root:x:0:' >/etc/group
mkfs.ext4 -q -F /dev/vda
mount -t ext4 /dev/vda /mnt
bonnie++ -d /mnt -u root -s SIZE -r 64 -n 0 -f -q -m guest 2>/dev/null
umount /mnt
";

/// The experiment `guest`.
pub struct Guest;

/// What bonnie++ writes, more than the guest has memory.
fn mebibytes(bench: &Bench) -> u64 {
    match bench.options.quick {
        true => 160,
        false => 512,
    }
}

/// One row: a server with a size of the cache.
struct Row {
    server: &'static str,
    tables: u64,
    /// Of each run, the figures in their order.
    runs: Vec<[f64; 4]>,
}

impl Experiment for Guest {
    fn name(&self) -> &'static str {
        "guest"
    }

    fn about(&self) -> &'static str {
        "bonnie++ in a guest, with an L2 cache of one table and of all (seed 003, P4)"
    }

    /// Each machine takes a quarter of a minute.
    fn is_quick(&self) -> bool {
        false
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let machine = machine(bench)?;
        // A minute for each round.
        let runs = match bench.options.quick {
            true => 1,
            false => bench.rules().runs,
        };
        section.method(format!(
            "Debian's cloud kernel in QEMU's emulated machine (TCG, two processors, 160 MiB) makes an \
             ext4 file system on its disk and runs `bonnie++ -s {} -r 64 -n 0 -f` there. The disk is a \
             qcow2 image of {} with clusters of {} and all its tables ({TABLES}), served over NBD by \
             zebu or by qemu-nbd with `l2-cache-size` for one table (QEMU's least is two) or for all; \
             `--cache=none`. With `--quick` only all. Medians of {runs} run{} in turn. The guest's processor is the bound: what \
             differs between the rows is what the server adds to it.",
            mebibytes(bench),
            units::size(DISK),
            units::size(CLUSTER),
            if runs == 1 { "" } else { "s" },
        ));
        let sizes: &[u64] = if bench.options.quick {
            &[TABLES]
        } else {
            &[1, TABLES]
        };
        let mut rows: Vec<Row> = (sizes.iter().copied())
            .flat_map(|tables| {
                ["QEMU", "zebu"].map(|server| Row {
                    server,
                    tables,
                    runs: Vec::new(),
                })
            })
            .collect();
        for _ in 0..runs {
            for row in &mut rows {
                match machine.once(bench, row.server, row.tables) {
                    Ok(figures) => row.runs.push(figures),
                    Err(e) => section.note(format!("{}: {e}", row.label())),
                }
            }
        }
        show(section, &rows);
        Ok(())
    }
}

impl Row {
    fn label(&self) -> String {
        match self.tables {
            1 => format!("{}, 1 table", self.server),
            tables => format!("{}, all {tables} tables", self.server),
        }
    }

    fn figure(&self, nth: usize) -> f64 {
        median(&self.runs.iter().map(|run| run[nth]).collect::<Vec<_>>())
    }
}

fn show(section: &mut Section, rows: &[Row]) {
    let title = "bonnie++ in a guest";
    let mut heads = vec!["served by".to_string()];
    heads.extend(FIGURES.map(|(name, unit, _)| format!("{name}, {unit}")));
    let mut table = Table {
        title: title.into(),
        heads,
        rows: Vec::new(),
    };
    let mut chart = Chart::new(title, "KiB/s (seeks: 1/s), more is better");
    for row in rows {
        let mut line = vec![row.label()];
        line.extend((0..FIGURES.len()).map(|nth| match row.figure(nth) {
            n if n.is_finite() => format!("{n:.0}"),
            _ => "—".into(),
        }));
        table.rows.push(line);
    }
    for (nth, (name, ..)) in FIGURES.iter().enumerate() {
        chart.group(name, rows.iter().map(|row| (row.label(), row.figure(nth))));
    }
    section.table(table, Some(chart));
}

/// What a run needs.
struct Machine {
    kernel: PathBuf,
    initramfs: PathBuf,
    qemu: PathBuf,
    qemu_nbd: PathBuf,
    socket: PathBuf,
    image: PathBuf,
}

fn machine(bench: &Bench) -> Result<Machine> {
    let missing = |what: &str| Error::new(format!("there is no {what}"));
    let qemu = on_path("qemu-system-x86_64").ok_or_else(|| missing("qemu-system-x86_64"))?;
    on_path("bonnie++").ok_or_else(|| missing("bonnie++"))?;
    let qemu_nbd = bench.peers.qemu.img.with_file_name("qemu-nbd");
    if !qemu_nbd.is_file() {
        return Err(missing("qemu-nbd beside qemu-img"));
    }
    let dir = bench.dir.join("guest");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/get-guest.sh");
    let mut make = Command::new("sh");
    make.arg(script).arg(&dir).args(["mkfs.ext4", "bonnie++"]);
    done(make)?;
    // An archive with the job, behind that of the programs.
    let job = dir.join("job");
    let text = JOB.replace("SIZE", &mebibytes(bench).to_string());
    std::fs::write(&job, text).context(|| job.display().to_string())?;
    let mut append = Command::new("sh");
    append.current_dir(&dir).args([
        "-c",
        "echo job | cpio --quiet -o -H newc >job.cpio && cat initramfs job.cpio >with-job",
    ]);
    done(append)?;
    Ok(Machine {
        kernel: dir.join("vmlinuz"),
        initramfs: dir.join("with-job"),
        qemu,
        qemu_nbd,
        // Paths of sockets are short.
        socket: std::env::temp_dir().join(format!("zebu-guest-{}.sock", std::process::id())),
        image: dir.join("disk.qcow2"),
    })
}

impl Machine {
    /// Boots it once on a new image.
    fn once(&self, bench: &Bench, server: &str, tables: u64) -> Result<[f64; 4]> {
        let _ = std::fs::remove_file(&self.image);
        let mut create = Command::new(&bench.peers.qemu.img);
        create
            .args(["create", "-q", "-f", "qcow2", "-o"])
            .arg(format!("cluster_size={CLUSTER},preallocation=metadata"))
            .arg(&self.image)
            .arg(DISK.to_string());
        done(create)?;
        let mut line = match server {
            "zebu" => command([bench.zebu.as_os_str(), "nbd".as_ref()]),
            _ => command([self.qemu_nbd.as_os_str()]),
        };
        line.extend(["-t", "-e", "2", "--cache=none", "-k"].map(OsString::from));
        line.push(self.socket.clone().into());
        line.push("--image-opts".into());
        line.push(
            format!(
                "driver=qcow2,file.filename={},l2-cache-size={},l2-cache-entry-size={CLUSTER}",
                self.image.display().to_string().replace(',', ",,"),
                tables * CLUSTER
            )
            .into(),
        );
        let line = served(&line, &self.socket, &self.guest());
        let outcome = child::run(&line, &bench.scratch());
        let _ = std::fs::remove_file(&self.image);
        let _ = std::fs::remove_file(&self.socket);
        let said = outcome?.stdout;
        figures(&said).ok_or_else(|| Error::new("bonnie++ has said nothing in the guest"))
    }

    fn guest(&self) -> Vec<OsString> {
        let mut line = command([self.qemu.as_os_str()]);
        let fixed = "-machine q35 -cpu max -smp 2 -m 160 -nodefaults -display none -no-reboot \
                     -accel tcg,thread=multi -serial stdio -append";
        line.extend(fixed.split_whitespace().map(OsString::from));
        line.push("no_timer_check console=ttyS0 quiet panic=-1".into());
        line.push("-kernel".into());
        line.push(self.kernel.clone().into());
        line.push("-initrd".into());
        line.push(self.initramfs.clone().into());
        line.push("-drive".into());
        let drive = format!(
            "file=nbd+unix:///?socket={},format=raw,if=virtio,cache=none",
            self.socket.display()
        );
        line.push(drive.into());
        line
    }
}

/// The figures in what the guest has said; NaN where bonnie++ found a test too short.
fn figures(said: &str) -> Option<[f64; 4]> {
    let line = said.lines().find(|line| line.contains(",guest,"))?;
    let fields: Vec<&str> = line.trim().split(',').collect();
    let field = |nth: usize| fields.get(nth).and_then(|f| f.parse().ok());
    Some(FIGURES.map(|(_, _, nth)| field(nth).unwrap_or(f64::NAN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_bonnie_is_read() {
        let said = "boot\r\n1.98,2.00a,guest,1,1795306683,256M,,8192,5,,,101,9,202,8,,,303,7,404.5,6,,\r\n";
        assert_eq!(figures(said), Some([101.0, 202.0, 303.0, 404.5]));
        let short = said.replace("303", "+++++");
        assert!(figures(&short).is_some_and(|f| f[2].is_nan()));
        assert_eq!(figures("guest: ended 1"), None);
    }
}
